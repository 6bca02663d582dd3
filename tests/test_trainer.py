"""`GRPOTrainer` on a random model over characters: what reaches the loss, and what comes out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from fused_grpo.integrations.models import add_head_forward, causal_lm
from fused_grpo.trainer import GRPOConfig, GRPOTrainer, RewardError
from fused_grpo.trainer.batches import grouped, logps_of, split
from fused_grpo.trainer.models import tiny
from fused_grpo.trainer.rollout import Sampler, completion_mask
from fused_grpo.trainer.sampler import GroupSampler

PROMPTS = [{"prompt": text, "length": len(text)} for text in ("ab", "hello", "x=1+2", "no", "q: a")]
LORA = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", lora_dropout=0.5)


def letters(completions: list[str], **_: Any) -> list[float]:
    """Differs between completions, so that groups teach something."""
    return [sum(c in "abcdefghijklm" for c in text) / 5 for text in completions]


def config(path: Path, **options: Any) -> GRPOConfig:
    defaults = {
        "output_dir": str(path),
        "max_steps": 2,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "max_grad_norm": 1e9,
    }
    return GRPOConfig(**{**defaults, **options})


def trainer(path: Path, reward: Any = letters, peft: Any = None, **options: Any) -> GRPOTrainer:
    torch.manual_seed(0)
    model, tokenizer = tiny(torch.float32)
    args = config(path, **options)
    return GRPOTrainer(model, reward, args, PROMPTS, PROMPTS, tokenizer, peft_config=peft)


def logs(run: GRPOTrainer, name: str) -> list[float]:
    return [entry[name] for entry in run.state.log_history if name in entry]


def first_step(run: GRPOTrainer) -> tuple[dict[str, torch.Tensor], float]:
    """The gradients of the first optimizer step, before anything is updated."""
    grads: dict[str, torch.Tensor] = {}
    original = run.create_optimizer

    def create(*args: Any, **kwargs: Any) -> Any:
        optimizer = original(*args, **kwargs)

        def keep(*_: Any) -> None:
            for name, parameter in run.model.named_parameters():
                if parameter.grad is not None:
                    grads.setdefault(name, parameter.grad.clone())

        optimizer.register_step_pre_hook(keep)
        return optimizer

    run.create_optimizer = create  # type: ignore[method-assign]
    run.args.max_steps = 1
    run.train()
    return grads, logs(run, "loss")[0]


# ---- the loss -----------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_loss_does_not_depend_on_the_accumulation(tmp_path: Path, loss_type: str) -> None:
    """R2, R3, R12, T3, T8: groups of 4 are cut by micro-batches of 2; lengths are ragged; beta
    gives the loss a value."""

    def make(size: int, steps: int) -> GRPOTrainer:
        run = trainer(
            tmp_path / f"{size}",
            loss_type=loss_type,
            beta=0.5,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=steps,
            num_generations=4,
        )
        with torch.no_grad():
            for parameter in run.policy.reference.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=GENERATOR()))
            run.model.lm_head.weight[0] *= 4  # ends come early: ragged lengths
        return run

    whole, loss = first_step(make(8, 1))
    parts, accumulated = first_step(make(2, 4))
    assert loss > 1e-3
    assert accumulated == pytest.approx(loss, rel=1e-5)
    for name, grad in whole.items():
        torch.testing.assert_close(parts[name], grad, atol=1e-6, rtol=1e-4, msg=name)


def GENERATOR() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def test_gradient_is_that_of_the_formula_written_out(tmp_path: Path) -> None:
    """One step against plain autograd on the full logits of the completions that were sampled."""
    run = trainer(tmp_path, epsilon=0.1, scale_rewards="group")
    seen: dict[str, Any] = {}
    original = run.collector

    def generate(rows: Any) -> Any:
        seen["generation"] = original(rows)
        seen["model"] = LlamaForCausalLM(run.model.config)
        seen["model"].load_state_dict(run.model.state_dict())
        return seen["generation"]

    run.collector = generate  # type: ignore[method-assign]
    grads, loss = first_step(run)
    (batch,), model = seen["generation"].batches, seen["model"]
    ids, length = batch.input_ids, batch.completion_ids.shape[1]
    ids = torch.cat([ids[:, : ids.shape[1] - length + 1], batch.completion_ids], 1)
    mask = torch.cat([batch.attention_mask, torch.ones(len(ids), 1, dtype=torch.bool)], 1)
    places = (mask.long().cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask.long(), position_ids=places).logits
    logps = logits[:, -length - 1 : -1].log_softmax(-1)
    logps = logps.gather(-1, batch.completion_ids[..., None])[..., 0][batch.completion_mask]
    advantages = batch.advantages[:, None].expand_as(batch.completion_mask)[batch.completion_mask]
    expected = -((logps - logps.detach()).exp() * advantages).sum() / batch.completion_mask.sum()
    expected.backward()
    assert loss == pytest.approx(expected.item(), abs=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("peft", [None, LORA], ids=["full", "lora"])
def test_activation_checkpointing_and_autocast(tmp_path: Path, peft: Any) -> None:
    plain, _ = first_step(trainer(tmp_path / "a", peft=peft))
    again, _ = first_step(trainer(tmp_path / "b", peft=peft, gradient_checkpointing=True))
    mixed, _ = first_step(trainer(tmp_path / "c", peft=peft, bf16=True, max_completion_length=1))
    short, _ = first_step(trainer(tmp_path / "d", peft=peft, max_completion_length=1))
    assert plain.keys() == again.keys() == mixed.keys()
    for name, grad in plain.items():
        torch.testing.assert_close(again[name], grad, atol=1e-6, rtol=1e-4, msg=name)
    flat = [torch.cat([g.flatten() for g in grads.values()]) for grads in (mixed, short)]
    assert torch.cosine_similarity(*flat, dim=0) > 0.98


@pytest.mark.parametrize("peft", [None, LORA], ids=["full", "lora"])
def test_ratio_is_one_on_fresh_samples_and_moves_afterwards(tmp_path: Path, peft: Any) -> None:
    """S20, T7: Old log-probabilities of an unmoved policy are the new ones, exactly."""
    run = trainer(tmp_path, peft=peft, num_iterations=3, max_steps=3, learning_rate=5e-2)
    run.train()
    low, high = logs(run, "ratio/min"), logs(run, "ratio/max")
    assert low[0] == high[0] == 1
    assert high[1] > 1.001
    assert high[2] > 1.001


def test_old_log_probabilities_of_later_windows_are_those_that_sampled(tmp_path: Path) -> None:
    """Two optimizer steps per generation: the second is off policy, and its ratio says so."""
    run = trainer(tmp_path, steps_per_generation=2, max_steps=4, learning_rate=3e-2)
    run.train()
    low, high = logs(run, "ratio/min"), logs(run, "ratio/max")
    for fresh, stale in ((0, 1), (2, 3)):
        assert low[fresh] == pytest.approx(1, abs=1e-5)
        assert high[fresh] == pytest.approx(1, abs=1e-5)
        assert high[stale] - low[stale] > 1e-3


def test_temperature_reaches_the_log_probabilities(tmp_path: Path) -> None:
    """N9: Samples and log-probabilities at the same temperature: the ratio is 1."""
    run = trainer(tmp_path, temperature=0.5)
    sample = run.sampler(run.model, ["ab", "hello"])
    (batch,) = split(sample, sample.completion_mask, torch.zeros(2), 2)
    got = run.policy.at_head(batch, logps_of(batch, run.args))
    logits = run.model(**batch.model_inputs(run.model)).logits / 0.5
    logps = logits[:, -batch.completion_ids.shape[1] :].log_softmax(-1)
    expected = logps.gather(-1, batch.completion_ids[..., None])[..., 0] * batch.completion_mask
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_reference_of_an_adapter_is_the_model_without_it(tmp_path: Path) -> None:
    run = trainer(tmp_path, peft=LORA, beta=0.1, max_steps=3, learning_rate=5e-2)
    assert run.policy.reference is None
    before = causal_lm(run.model).lm_head.weight.clone()
    run.train()
    kl = logs(run, "kl")
    assert kl[0] == pytest.approx(0, abs=1e-6)
    assert kl[-1] > 1e-5
    assert torch.equal(causal_lm(run.model).lm_head.weight, before)
    trained = {n for n, p in run.model.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)


def test_reference_of_a_full_model_stays_where_it_was(tmp_path: Path) -> None:
    run = trainer(tmp_path, beta=0.1, max_steps=3)
    start = {name: p.clone() for name, p in run.model.named_parameters()}
    run.train()
    assert run.policy.reference is not None
    for name, parameter in run.policy.reference.named_parameters():
        assert torch.equal(parameter, start[name])
        assert parameter.grad is None
    assert logs(run, "kl")[-1] > 0


def test_a_frozen_base_gets_no_gradients(tmp_path: Path) -> None:
    grads, _ = first_step(trainer(tmp_path, peft=LORA))
    assert grads
    assert all("lora_" in name for name in grads)


# ---- masks and padding --------------------------------------------------------------------------


def test_first_end_of_sequence_counts_and_nothing_after_it() -> None:
    ids = torch.tensor([[5, 9, 0, 0], [0, 0, 0, 0], [5, 6, 7, 8], [5, 6, 7, 0], [5, 1, 0, 3]])
    mask, ended = completion_mask(ids, [0, 9])
    assert mask.long().tolist() == [
        [1, 1, 0, 0],
        [1, 0, 0, 0],
        [1, 1, 1, 1],
        [1, 1, 1, 1],
        [1, 1, 1, 0],
    ]
    assert ended.tolist() == [True, True, False, True, True]


def test_end_of_sequence_is_kept_where_it_is_the_padding_too(tmp_path: Path) -> None:
    """S11: Masks are never read off the ids."""
    run = trainer(tmp_path)
    assert run.processing_class.pad_token_id == run.processing_class.eos_token_id
    with torch.no_grad():
        run.model.lm_head.weight[0] *= 8
    sample = run.sampler(run.model, ["ab", "hello"], copies=32)
    rows = sample.completions()
    eos = run.processing_class.eos_token_id
    ended = [row for row in rows if eos in row]
    assert ended, "no completion ended"
    assert all(row.index(eos) == len(row) - 1 for row in ended)
    assert any(len(row) == 1 for row in ended), "a prompt's first token can be the end"


def test_padding_on_the_left_changes_nothing(tmp_path: Path) -> None:
    """S19: Positions count from the first token of a prompt, not from its padding."""
    run = trainer(tmp_path)
    alone = run.sampler(run.model, ["ab"], greedy=True)
    beside = run.sampler(run.model, ["ab", "a much longer prompt than that"], greedy=True)
    assert beside.prompt_mask[0].sum() == 2
    assert alone.completions()[0] == beside.completions()[0]
    logps = []
    for sample in (alone, beside):
        rows = len(sample.prompt_ids)
        (batch,) = split(sample, sample.completion_mask, torch.zeros(rows), rows)
        logps.append(
            run.policy.at_head(batch, logps_of(batch, run.args))[0, : len(alone.completions()[0])]
        )
    torch.testing.assert_close(logps[0], logps[1], atol=1e-5, rtol=1e-5)


def test_reading_each_prompt_once_changes_nothing(tmp_path: Path) -> None:
    """Copies share the prompt's keys and values: greedy completions are those of single rows."""
    run = trainer(tmp_path)
    prompts = ["ab", "a longer prompt", "xyz"]
    shared = run.sampler(run.model, prompts, copies=3, greedy=True).completions()
    single = run.sampler(run.model, prompts, greedy=True).completions()
    assert shared == [row for row in single for _ in range(3)]


def test_the_checkpoints_own_sampling_options_are_not_used(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.model.generation_config.top_k = 1
    run.model.generation_config.repetition_penalty = 5.0
    rows = run.sampler(run.model, ["ab"], copies=16).completions()
    assert len({tuple(row) for row in rows}) > 1, "top_k=1 of the checkpoint made them all equal"
    assert run.model.generation_config.top_k == 1


def test_truncated_completions_leave_numerator_and_denominator(tmp_path: Path) -> None:
    """R4: One mask decides what is summed and what it is divided by."""
    run = trainer(tmp_path, mask_truncated_completions=True)
    with torch.no_grad():
        run.model.lm_head.weight[0] *= 4
    (batch,) = run.collector([row for row in PROMPTS[:2] for _ in range(4)]).batches
    ends = (batch.completion_ids == 0) & batch.completion_mask
    counted = batch.completion_mask.any(1)
    assert counted.any()
    assert not counted.all()
    assert torch.equal(ends.any(1), counted)
    assert batch.num_items == batch.completion_mask.sum()


def test_all_completions_truncated_gives_loss_zero(tmp_path: Path) -> None:
    """R5: 0 / 0 is 0 here, with a graph and finite metrics."""
    run = trainer(tmp_path, mask_truncated_completions=True, generation_kwargs={"eos_token_id": 96})
    grads, loss = first_step(run)
    assert loss == 0
    assert all(grad.abs().max() == 0 for grad in grads.values())


# ---- rewards ------------------------------------------------------------------------------------


def test_reward_functions_get_rows_columns_and_ids(tmp_path: Path) -> None:
    calls: list[dict[str, Any]] = []

    def reward(prompts: Any, completions: Any, completion_ids: Any, length: Any, **_: Any) -> Any:
        calls.append({"prompts": prompts, "completions": completions, "length": length})
        assert [len(prompt) for prompt in prompts] == length
        assert len(prompts) == len(completions) == len(completion_ids) == 8
        return [float(len(ids)) for ids in completion_ids]

    trainer(tmp_path, reward, max_steps=1).train()
    (call,) = calls
    assert [call["prompts"][i] == call["prompts"][i + 1] for i in range(3)] == [True] * 3
    assert len(set(call["prompts"])) == 2


def test_conversations_go_through_the_chat_template(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.processing_class.chat_template = (
        "{% for m in messages %}{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}A:{% endif %}"
    )
    seen: list[Any] = []

    def reward(prompts: Any, completions: Any, **_: Any) -> list[float]:
        seen.extend(completions)
        return [0.0] * len(prompts)

    run.reward_funcs = [reward]
    run.evaluate([{"prompt": [{"role": "user", "content": "hi"}]}])
    assert seen[0][0]["role"] == "assistant"
    sample = run.sampler(run.model, [[{"role": "user", "content": "hi"}]])
    assert run.processing_class.decode(sample.prompt_ids[0]) == "hi\nA:"


def test_none_is_left_out_of_its_group(tmp_path: Path) -> None:
    """T1: A reward of None is no 0: the others are compared, and the loss stays finite."""
    values = [1.0, None, 0.0, 1.0, None, None, None, None]
    run = trainer(tmp_path, lambda prompts, **_: values)
    (batch,) = run.collector([row for row in PROMPTS[:2] for _ in range(4)]).batches
    advantages = batch.advantages
    assert advantages[1] == 0
    assert (advantages[4:] == 0).all()
    std = torch.tensor([1.0, 0.0, 1.0]).std()
    expected = (torch.tensor([1.0, 0.0, 1.0]) - 2 / 3) / (std + 1e-4)
    torch.testing.assert_close(advantages[[0, 2, 3]], expected)
    metrics = run._metrics.drain()
    assert metrics["reward"] == pytest.approx(2 / 3)
    assert metrics["frac_reward_zero_std"] == 0.5


def test_equal_rewards_teach_nothing(tmp_path: Path) -> None:
    run = trainer(tmp_path, lambda prompts, **_: [0.1] * len(prompts))
    grads, loss = first_step(run)
    assert loss == 0
    assert all(grad.abs().max() == 0 for grad in grads.values())
    assert logs(run, "frac_reward_zero_std") == [1.0]
    assert logs(run, "reward_std") == [0.0]


def test_weights_of_several_reward_functions(tmp_path: Path) -> None:
    def ones(prompts: Any, **_: Any) -> list[float]:
        return [1.0] * len(prompts)

    def nothing(prompts: Any, **_: Any) -> list[None]:
        return [None] * len(prompts)

    run = trainer(tmp_path, [ones, nothing, ones], reward_weights=[2.0, 9.0, 0.5], max_steps=1)
    run.train()
    assert logs(run, "reward") == [2.5]
    assert logs(run, "rewards/ones/mean") == [1.0]
    assert math.isnan(logs(run, "rewards/nothing/mean")[0])
    first = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert first["rewards/nothing/mean"] is None


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda n: [0.0] * (n - 1), r"'broken' returned 7 rewards for 8 completions"),
        (lambda n: 1.0, r"'broken' returned float, not a list of 8"),
        (lambda n: ["good"] * n, r"'broken' returned 'good', not a number"),
        (lambda n: [math.inf] * n, r"'broken' returned inf"),
    ],
)
def test_wrong_rewards_stop_the_run(tmp_path: Path, result: Any, message: str) -> None:
    def broken(prompts: list[str], **_: Any) -> Any:
        return result(len(prompts))

    with pytest.raises(RewardError, match=message) as error:
        trainer(tmp_path, broken).train()
    assert "prompt: '" in str(error.value)


def test_a_failing_reward_function_is_named_with_its_prompt_and_leaves_the_checkpoint(
    tmp_path: Path,
) -> None:
    calls = []

    def fragile(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        calls.append(1)
        if len(calls) > 2 and "no" in prompts:
            raise KeyError("answer")
        return letters(completions)

    run = trainer(tmp_path, fragile, max_steps=40, save_strategy="steps", save_steps=2)
    with pytest.raises(
        RewardError, match=r"'fragile' raised KeyError: 'answer'.*prompt: 'no'"
    ) as e:
        run.train()
    assert isinstance(e.value.__cause__, KeyError)
    last = sorted(tmp_path.glob("checkpoint-*"))[-1]
    model = AutoModelForCausalLM.from_pretrained(last)
    assert torch.isfinite(model.lm_head.weight).all()
    assert AutoTokenizer.from_pretrained(last)("ab")["input_ids"] == [2, 3]


# ---- runs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"num_iterations": 2, "gradient_accumulation_steps": 2}, {"peft": LORA, "beta": 0.1}],
    ids=["plain", "iterations", "lora"],
)
def test_a_resumed_run_equals_one_that_never_stopped(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """Across an epoch's end: 5 prompts make 2 generations, the 4th step is in the second epoch."""
    options["lr_scheduler_type"] = "constant"  # whatever number of steps is planned
    whole = trainer(tmp_path / "whole", max_steps=6, **options)
    whole.train()
    first = trainer(tmp_path / "b", max_steps=6, save_strategy="steps", save_steps=2, **options)
    first.args.max_steps = 4
    first.train()
    second = trainer(tmp_path / "b", max_steps=6, **options)
    second.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-4"))
    for (name, a), b in zip(whole.model.named_parameters(), second.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=0, rtol=0, msg=name)
    steps = [
        json.loads(line)["step"]
        for line in (tmp_path / "b" / "metrics.jsonl").read_text().splitlines()
        if "grad_norm" in line
    ]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert logs(second, "num_tokens")[-1] == logs(whole, "num_tokens")[-1]


def test_the_same_seed_gives_the_same_run_and_another_does_not(tmp_path: Path) -> None:
    rewards = []
    for i, seed in enumerate((7, 7, 8)):
        run = trainer(tmp_path / str(i), seed=seed, max_steps=3)
        run.train()
        rewards.append((logs(run, "reward"), logs(run, "grad_norm")))
    assert rewards[0] == rewards[1]
    assert rewards[0] != rewards[2]


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo"])
def test_training_raises_the_reward(tmp_path: Path, loss_type: str) -> None:
    run = trainer(
        tmp_path,
        loss_type=loss_type,
        per_device_train_batch_size=16,
        num_generations=8,
        max_steps=25,
        learning_rate=2e-2,
        scale_rewards="none" if loss_type == "dr_grpo" else "group",
    )
    before = run.evaluate()["eval_reward"]
    run.train()
    assert run.evaluate()["eval_reward"] > before + 0.3


def test_logs_and_metrics_file(tmp_path: Path) -> None:
    run = trainer(tmp_path, beta=0.1, eval_strategy="steps", eval_steps=1)
    run.train()
    entries = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    training = [entry for entry in entries if "loss" in entry]
    assert [entry["step"] for entry in training] == [1, 2]
    names = {
        *("loss", "grad_norm", "learning_rate", "reward", "reward_std", "frac_reward_zero_std"),
        *("rewards/letters/mean", "rewards/letters/std", "kl", "entropy", "num_tokens"),
        *("completions/mean_length", "completions/min_length", "completions/max_length"),
        *("completions/clipped_ratio", "clip_ratio/low_mean", "clip_ratio/high_mean"),
        *("clip_ratio/region_mean", "step_time"),
    }
    assert names <= set(training[0])
    assert names <= set(run.state.log_history[0]) | {"rewards/letters/std"}
    assert all(math.isfinite(training[0][name]) for name in names)
    assert 0 < training[0]["entropy"] <= math.log(100)
    assert training[1]["num_tokens"] > training[0]["num_tokens"]
    assert [entry["step"] for entry in entries if "eval_reward" in entry] == [1, 2]


def test_entropy_and_dropout_are_those_of_the_policy_that_samples(tmp_path: Path) -> None:
    """T10: Sampling, old log-probabilities and the loss see one policy: without dropout."""
    run = trainer(tmp_path, peft=LORA)
    rates = [m.p for m in run.model.modules() if isinstance(m, torch.nn.Dropout)]
    assert rates
    assert set(rates) == {0.0}
    torch.manual_seed(0)
    model, tokenizer = tiny(torch.float32)
    args = config(tmp_path, disable_dropout=False)
    kept = GRPOTrainer(model, letters, args, PROMPTS, None, tokenizer, peft_config=LORA)
    assert 0.5 in [m.p for m in kept.model.modules() if isinstance(m, torch.nn.Dropout)]


def test_evaluation_is_greedy_and_independent_of_batch_and_accumulation(tmp_path: Path) -> None:
    """R8: It is no loss divided by an option of training, and needs no training before it."""
    results = []
    for size, steps in ((1, 1), (4, 2)):
        run = trainer(
            tmp_path / str(size),
            per_device_eval_batch_size=size,
            gradient_accumulation_steps=steps,
        )
        out = run.evaluate()
        results.append({k: v for k, v in out.items() if "runtime" not in k})
    assert results[0] == results[1]
    named = run.evaluate({"a": PROMPTS[:2], "b": PROMPTS[2:]})
    assert {"eval_a_reward", "eval_b_reward"} <= set(named)


# ---- what cannot work ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_generations": 3}, r"num_generations that fit: 2, 4, 8; .* that fit: 3, 6, 9"),
        ({"num_generations": 16, "gradient_accumulation_steps": 3}, r"that fit: 16, 32, 48"),
        ({"num_generations": 1}, r"num_generations=1 must be at least 2"),
        ({"temperature": 0.0}, r"temperature=0.0 must be > 0"),
        ({"epsilon": 1.2}, r"epsilon=1.2 must be in \[0, 1\)"),
        ({"loss_type": "ppo"}, r"loss_type='ppo' is unknown"),
        ({"beta": -1.0}, r"beta=-1.0"),
        ({"delta": 0.9}, r"delta=0.9"),
        ({"scale_rewards": "std"}, r"scale_rewards='std' is unknown"),
        ({"top_p": 0.0}, r"top_p=0.0"),
        ({"use_bias_correction_kl": True}, r"needs beta > 0"),
        ({"steps_per_generation": 3, "gradient_accumulation_steps": 2}, r"must be a multiple"),
        ({"generation_kwargs": {"num_beams": 4}}, r"must not hold num_beams"),
        ({"remove_unused_columns": True}, r"remove_unused_columns"),
    ],
)
def test_options_that_do_not_fit(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    """T3: The message names what does fit."""
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **options)


def test_options_of_another_type(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="num_generations must be an integer, not float"):
        config(tmp_path, num_generations=4.0)
    with pytest.raises(TypeError, match="temperature must be a number, not str"):
        config(tmp_path, temperature="hot")


@pytest.mark.parametrize(
    ("dataset", "error", "message"),
    [
        ([], ValueError, "is empty"),
        ([{"text": "a"}], ValueError, '"prompt"'),
        ([{"prompt": "a", "completions": "b"}], ValueError, "completions"),
        (iter([{"prompt": "a"}]), TypeError, "streams"),
        ([{"prompt": "a"}], ValueError, "has 1 prompts, but a generation takes 2"),
    ],
)
def test_datasets_that_do_not_fit(
    tmp_path: Path, dataset: Any, error: type[Exception], message: str
) -> None:
    model, tokenizer = tiny(torch.float32)
    with pytest.raises(error, match=message):
        GRPOTrainer(model, letters, config(tmp_path), dataset, None, tokenizer).train()


def test_other_arguments_that_do_not_fit(tmp_path: Path) -> None:
    model, tokenizer = tiny(torch.float32)
    for funcs, message in ((model, "functions, not Llama"), ("name", "functions, not str")):
        with pytest.raises(TypeError, match=message):
            GRPOTrainer(model, funcs, config(tmp_path), PROMPTS, None, tokenizer)
    with pytest.raises(ValueError, match="reward_weights has 2 entries for 1"):
        GRPOTrainer(
            model, letters, config(tmp_path, reward_weights=[1.0, 2.0]), PROMPTS, None, tokenizer
        )
    with pytest.raises(ValueError, match="reward_funcs is empty"):
        GRPOTrainer(model, [], config(tmp_path), PROMPTS, None, tokenizer)


# ---- parts --------------------------------------------------------------------------------------


def test_sampler_splits_groups_over_processes_and_repeats_batches() -> None:
    def shares(rank: int, epoch: int) -> list[list[int]]:
        return list(
            GroupSampler(
                5,
                num_generations=4,
                batch_size=8,
                repeats=3,
                seed=1,
                epoch=lambda: epoch,
                rank=rank,
                world_size=2,
            )
        )

    first, second = shares(0, 0), shares(1, 0)
    assert len(first) == len(second) == 6
    assert first[0] == first[1] == first[2] != first[3]
    for a, b in zip(first, second, strict=True):
        rows = a + b
        assert len(set(rows)) == 2
        assert all(rows.count(row) == 4 for row in rows)
    assert shares(0, 0) == first
    assert shares(0, 1) != first


def test_grouped_prompts() -> None:
    assert grouped(["a", "a", "b", "b"]) == (["a", "b"], 2)
    assert grouped(["a", "b", "b"]) == (["a", "b", "b"], 1)
    assert grouped(["a", "a"]) == (["a"], 2)


def test_sampler_needs_an_end_of_sequence(tmp_path: Path) -> None:
    model, tokenizer = tiny(torch.float32)
    model.generation_config.eos_token_id = None
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="end-of-sequence"):
        Sampler(model, tokenizer, config(tmp_path))


def test_log_probabilities_of_a_model_without_position_ids(tmp_path: Path) -> None:
    """BLOOM takes its positions from the mask; padding must not matter there either."""
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    _, tokenizer = tiny(torch.float32)
    model = BloomForCausalLM(
        BloomConfig(vocab_size=len(tokenizer), hidden_size=32, n_layer=2, n_head=4)
    ).eval()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    add_head_forward(model)
    args = config(tmp_path)
    sampler = Sampler(model, tokenizer, args)
    outputs = []
    for prompts in (["ab"], ["ab", "a longer one"]):
        sample = sampler(model, prompts, greedy=True)
        (batch,) = split(sample, sample.completion_mask, torch.zeros(len(prompts)), len(prompts))
        out = model(**batch.model_inputs(model), head_fn=logps_of(batch, args))
        outputs.append(out[0, : len(sample.completions()[0])].detach())
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-5, rtol=1e-5)


def test_adapter_checkpoint_loads_again(tmp_path: Path) -> None:
    run = trainer(tmp_path, peft=LORA, save_strategy="steps", save_steps=2)
    run.train()
    torch.manual_seed(0)
    base, _ = tiny(torch.float32)
    loaded = PeftModel.from_pretrained(base, tmp_path / "checkpoint-2").eval()
    ids = torch.tensor([[3, 4, 5]])
    run.model.eval()
    torch.testing.assert_close(loaded(input_ids=ids).logits, run.model(input_ids=ids).logits)
