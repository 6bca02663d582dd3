"""What the trainer makes of advantages, divergences to the reference and the sampler's support."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from test_trainer import LORA, PROMPTS, config, first_step, letters, logs, trainer
from tiny_models import tiny as tiny_model
from torch import Tensor

from fused_grpo import compute_advantages, multi_reward_advantages
from fused_grpo.integrations.models import causal_lm
from fused_grpo.trainer import GRPOTrainer
from fused_grpo.trainer.batches import MicroBatch, loss_of
from fused_grpo.trainer.models import character_tokenizer


def move_reference(run: GRPOTrainer) -> None:
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in run.policy.reference.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=g))


def generation(run: GRPOTrainer) -> list[MicroBatch]:
    rows = [row for row in PROMPTS[:2] for _ in range(4)]
    return run.collector(rows).batches


def log_p(model: Any, batch: MicroBatch, temperature: float = 1.0) -> Tensor:
    """[B, T, V] of the completion's positions, from the model's own logits."""
    logits = model(**batch.model_inputs(model)).logits.float() / temperature
    return logits[:, -batch.completion_ids.shape[1] :].log_softmax(-1)


def loss_output(run: GRPOTrainer, batch: MicroBatch) -> Any:
    return run.model(**batch.model_inputs(run.model), head_fn=loss_of(batch, run.args))


# ---- divergence ---------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["full", "top_k"])
def test_divergence_over_the_vocabulary(tmp_path: Path, estimator: str) -> None:
    """The KL in the loss is that of the two models' own logits, at the sampling temperature."""
    top_k = {"kl_top_k": 4} if estimator == "top_k" else {}
    run = trainer(tmp_path, beta=0.5, temperature=0.7, kl_estimator=estimator, **top_k)
    move_reference(run)
    (batch,) = generation(run)
    assert batch.ref_logps is None
    p, r = log_p(run.model, batch, 0.7), log_p(run.policy.reference, batch, 0.7)
    if estimator == "top_k":
        top = p.topk(4).indices
        p, r = (
            torch.cat([x.gather(2, top), x.scatter(2, top, -math.inf).logsumexp(2, True)], 2)
            for x in (p, r)
        )
    kl = (p.exp() * (p - r)).sum(-1)[batch.completion_mask].mean()
    got = loss_output(run, batch).metrics["kl"]
    torch.testing.assert_close(got, kl.detach(), rtol=1e-4, atol=1e-6)


def test_divergence_of_an_adapter(tmp_path: Path) -> None:
    """The reference is the model without its adapter; its states are kept, its head is shared."""
    run = trainer(
        tmp_path, peft=LORA, beta=0.1, kl_estimator="full", max_steps=3, learning_rate=5e-2
    )
    run.train()
    kl = logs(run, "kl")
    assert kl[0] == pytest.approx(0, abs=1e-6)
    assert kl[-1] > 1e-5
    (batch,) = run._generation.batches
    assert batch.reference is not None
    assert batch.reference[1].weight is causal_lm(run.model).lm_head.weight


def test_divergence_pulls_to_the_reference(tmp_path: Path) -> None:
    """Equal rewards: nothing but the divergence moves the policy, and it falls."""
    run = trainer(
        tmp_path,
        lambda prompts, **_: [1.0] * len(prompts),
        beta=1.0,
        kl_estimator="full",
        max_steps=40,
        learning_rate=4e-3,
        lr_scheduler_type="constant",
    )
    move_reference(run)
    run.train()
    kl = logs(run, "kl")
    assert kl[-1] < 0.7 * kl[0]


# ---- the sampler's support ----------------------------------------------------------------------

SAMPLERS: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.6},
    "all": {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "temperature": 0.8},
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_sampled_tokens_are_inside_their_support(tmp_path: Path, name: str) -> None:
    """What `generate` draws from is what the loss normalises over: no token outside, ratio 1."""
    run = trainer(tmp_path, keep_sampling_mask=True, max_steps=2, **SAMPLERS[name])
    run.train()
    assert logs(run, "support/target_outside") == [0.0, 0.0]
    size = logs(run, "support/size")[0]
    assert size == 5 if name == "top_k" else 1 < size < 60
    assert logs(run, "ratio/max")[0] == pytest.approx(1, abs=1e-5)


def test_log_probabilities_are_over_the_support(tmp_path: Path) -> None:
    run = trainer(tmp_path, keep_sampling_mask=True, top_k=5, temperature=0.8)
    (batch,) = generation(run)
    p = log_p(run.model, batch, 0.8)
    p = p.masked_fill(p < p.topk(5).values[..., -1:], -math.inf).log_softmax(-1)
    want = p.gather(-1, batch.completion_ids[..., None])[..., 0]
    got = loss_output(run, batch).per_token_logps
    counted = batch.completion_mask
    torch.testing.assert_close(got[counted], want[counted].detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("how", [{"num_iterations": 2}, {"steps_per_generation": 2}], ids=str)
def test_the_sampler_s_support_is_kept_when_the_policy_moves(
    tmp_path: Path, how: dict[str, Any]
) -> None:
    """Later passes take the ids of the policy that sampled: still no token outside."""
    run = trainer(
        tmp_path, keep_sampling_mask=True, top_k=5, max_steps=4, learning_rate=5e-2, **how
    )
    run.train()
    assert logs(run, "support/target_outside") == [0.0] * 4
    assert logs(run, "support/size") == [5.0] * 4
    ratios = logs(run, "ratio/max")
    assert ratios[0] == pytest.approx(1, abs=1e-5)
    assert ratios[1] > 1 + 1e-3
    batch = run._generation.batches[0]
    assert batch.support_ids.shape[-1] == 5
    # the moved policy would choose other entries by itself
    moved = log_p(run.model, batch).topk(5).indices.sort(-1).values
    assert not torch.equal(moved, batch.support_ids)


def test_the_reference_is_over_the_same_support(tmp_path: Path) -> None:
    run = trainer(tmp_path, keep_sampling_mask=True, top_k=5, beta=0.5)
    move_reference(run)
    (batch,) = generation(run)
    p, r = log_p(run.model, batch), log_p(run.policy.reference, batch)
    outside = p < p.topk(5).values[..., -1:]
    p, r = (x.masked_fill(outside, -math.inf).log_softmax(-1) for x in (p, r))
    d = (r - p).gather(-1, batch.completion_ids[..., None])[..., 0][batch.completion_mask]
    got = loss_output(run, batch).metrics["kl"]
    torch.testing.assert_close(got, (d.exp() - d - 1).mean().detach(), rtol=1e-4, atol=1e-6)


# ---- advantages ---------------------------------------------------------------------------------


def test_estimators_reach_the_loss(tmp_path: Path) -> None:
    """What the micro-batch holds is the estimator's value for the rewards of its completions."""
    for name in ("grpo", "dr_grpo", "rloo", "rloo_std", "pass_at_k", "maxrl", "gpg", "opo"):
        run = trainer(tmp_path, advantage_estimator=name)
        (batch,) = generation(run)
        texts = run.processing_class.batch_decode(
            [
                ids[mask]
                for ids, mask in zip(batch.completion_ids, batch.completion_mask, strict=True)
            ],
            skip_special_tokens=True,
        )
        rewards = torch.tensor(letters(texts))
        extra = {"lengths": batch.completion_mask.sum(1)} if name == "opo" else {}
        want = compute_advantages(rewards, 4, estimator=name, **extra)
        assert want.any()
        torch.testing.assert_close(batch.advantages, want)


def test_statistics_over_tokens(tmp_path: Path) -> None:
    run = trainer(tmp_path, advantage_estimator="reinforce_plus_plus")
    with torch.no_grad():
        run.model.lm_head.weight[0] *= 4  # ends come early: ragged lengths
    (batch,) = generation(run)
    tokens = batch.advantages.repeat_interleave(batch.completion_mask.sum(1))
    assert len(tokens) < batch.completion_mask.numel()
    assert float(tokens.mean()) == pytest.approx(0, abs=1e-5)
    assert float(tokens.std()) == pytest.approx(1, abs=1e-3)


def test_remax_subtracts_the_greedy_reward(tmp_path: Path) -> None:
    """One more completion per prompt, scored with that prompt's columns."""
    calls: list[dict[str, Any]] = []

    def reward(prompts: list[str], completions: list[str], length: list[int], **_: Any) -> Any:
        calls.append({"prompts": prompts, "completions": completions, "length": length})
        return letters(completions)

    run = trainer(tmp_path, reward, advantage_estimator="remax")
    (batch,) = generation(run)
    sampled, greedy = calls
    assert greedy["prompts"] == ["ab", "hello"]
    assert greedy["length"] == [2, 5]
    baseline = torch.tensor(letters(greedy["completions"])).repeat_interleave(4)
    want = torch.tensor(letters(sampled["completions"])) - baseline
    torch.testing.assert_close(batch.advantages, want)
    again = run.sampler(run.model, ["ab", "hello"], greedy=True)
    assert (
        run.processing_class.batch_decode(again.completions(), skip_special_tokens=True)
        == (greedy["completions"])
    )


@pytest.mark.parametrize(
    "options",
    [{"advantage_estimator": "gdpo"}, {"multi_objective_aggregation": "normalize_then_sum"}],
    ids=str,
)
def test_several_rewards(tmp_path: Path, options: dict[str, Any]) -> None:
    seen: list[list[float]] = []

    def first(completions: list[str], **_: Any) -> list[float]:
        seen.append(letters(completions))
        return seen[-1]

    def second(completions: list[str], **_: Any) -> list[float]:
        seen.append([100.0 * len(set(text)) for text in completions])
        return seen[-1]

    run = trainer(tmp_path, [first, second], reward_weights=[1.0, 0.5], **options)
    (batch,) = generation(run)
    rewards = torch.tensor(seen).T
    want = multi_reward_advantages(rewards, 4, weights=[1.0, 0.5], aggregation="normalize_then_sum")
    torch.testing.assert_close(batch.advantages, want)
    assert not torch.allclose(want, multi_reward_advantages(rewards, 4, weights=[1.0, 0.5]))


def test_every_estimator_trains(tmp_path: Path) -> None:
    for name in ("reinforce_plus_plus_baseline", "remax", "opo", "gdpo"):
        grads, _ = first_step(trainer(tmp_path, advantage_estimator=name))
        assert all(grad.isfinite().all() for grad in grads.values())
        assert any(grad.any() for grad in grads.values())


# ---- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"advantage_estimator": "ppo"}, r"advantage_estimator='ppo' is unknown.*rloo.*gdpo"),
        ({"multi_objective_aggregation": "mean"}, r"multi_objective_aggregation='mean'"),
        ({"advantage_estimator": "rloo", "scale_rewards": "none"}, r"scale_rewards.*rloo"),
        (
            {"advantage_estimator": "remax", "multi_objective_aggregation": "normalize_then_sum"},
            r"multi_objective_aggregation.*remax",
        ),
        ({"kl_estimator": "full"}, r"needs beta > 0"),
        ({"kl_estimator": "exact", "beta": 0.1}, r"kl_estimator='exact' is unknown"),
        ({"kl_estimator": "top_k", "beta": 0.1}, r"kl_top_k"),
        ({"kl_top_k": 4, "beta": 0.1}, r"kl_top_k"),
        ({"keep_sampling_mask": True}, r"keep_sampling_mask.*top_k=0"),
        ({"keep_sampling_mask": True, "top_k": 5, "repetition_penalty": 1.1}, r"penalty"),
    ],
)
def test_options_that_do_not_fit(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **options)


# ---- LoRA on the head, mixtures of experts ------------------------------------------------------

HEAD_LORA = LoraConfig(
    r=4, lora_alpha=8, target_modules=["q_proj", "lm_head"], init_lora_weights=False
)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"beta": 0.1, "temperature": 0.8},
        {"beta": 0.1, "kl_estimator": "full"},
        {"keep_sampling_mask": True, "top_k": 5, "num_iterations": 2},
    ],
    ids=str,
)
def test_lora_on_the_head_trains(tmp_path: Path, options: dict[str, Any]) -> None:
    """The ratios of fresh samples are 1, the reference is the bare model, both factors move."""
    run = trainer(tmp_path, peft=HEAD_LORA, max_steps=2, learning_rate=1e-2, **options)
    layer = causal_lm(run.model).lm_head
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    run.train()
    assert logs(run, "ratio/max")[0] == pytest.approx(1, abs=1e-5)
    if "beta" in options:
        assert logs(run, "kl")[0] > 1e-4  # the adapter starts at random, away from the reference
    if "keep_sampling_mask" in options:
        assert logs(run, "support/target_outside") == [0.0, 0.0]
    moved = {name for name, p in layer.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"lora_A.default.weight", "lora_B.default.weight"}


def test_the_loss_of_a_head_with_lora_is_that_of_its_logits(tmp_path: Path) -> None:
    run = trainer(tmp_path, peft=HEAD_LORA, temperature=0.7)
    (batch,) = generation(run)
    expected = log_p(run.model, batch, 0.7).gather(-1, batch.completion_ids[..., None])[..., 0]
    out = loss_output(run, batch)
    torch.testing.assert_close(
        out.per_token_logps, expected * batch.completion_mask, atol=1e-5, rtol=1e-5
    )


def test_the_load_balance_of_experts_is_in_the_loss(tmp_path: Path) -> None:
    """Accumulated over micro-batches as the model's own, one share of each."""
    model = tiny_model("MixtralForCausalLM", output_router_logits=True, router_aux_loss_coef=0.5)
    args = config(tmp_path, gradient_accumulation_steps=2, per_device_train_batch_size=4)
    run = GRPOTrainer(
        model, lambda prompts, **_: [1.0] * len(prompts), args, PROMPTS, None, character_tokenizer()
    )
    batches = generation(run)
    assert len(batches) == 2
    losses = [loss_output(run, batch).loss for batch in batches]
    own = [
        run.model(**batch.model_inputs(run.model), output_router_logits=True).aux_loss
        for batch in batches
    ]
    torch.testing.assert_close(sum(losses), 0.5 * sum(own) / 2, atol=1e-6, rtol=1e-5)
    run.train()
    assert logs(run, "aux_loss")[0] > 0
