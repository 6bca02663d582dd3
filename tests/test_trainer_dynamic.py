"""Dynamic sampling: which prompts are trained on, and that only they count."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import Script, letters, scripted

from fused_grpo.advantages import zero_variance_fraction
from fused_grpo.aggregation import SCHEMES
from fused_grpo.trainer.batches import MicroBatch
from fused_grpo.trainer.dynamic import Choice, joined, select, varying
from fused_grpo.trainer.rollout import Sample
from fused_grpo.trainer.trainer import GRPOTrainer

# four prompts are one generation; "e..." have equal rewards
PROMPTS = ["e1", "v1", "e2", "v2", "e3", "v3x", "e4", "v4", "v5xy", "e5", "v6", "v7"]
START = PROMPTS[:4]


def rows(prompts: list[str], group: int = 4) -> list[dict[str, Any]]:
    return [{"prompt": prompt} for prompt in prompts for _ in range(group)]


def collect(run: GRPOTrainer, prompts: list[str], number: int = 0) -> list[MicroBatch]:
    run.collector.number = number
    return run.collector(rows(prompts)).batches


def asked(run: GRPOTrainer) -> list[list[str]]:
    script: Any = run.collector.sampler
    assert isinstance(script, Script)
    return script.asked


def prompts_of(run: GRPOTrainer, batches: list[MicroBatch]) -> list[str]:
    """Of the groups that are trained on."""
    out = []
    for batch in batches:
        for ids, mask, counted in zip(
            batch.input_ids, batch.attention_mask, batch.completion_mask, strict=True
        ):
            length = batch.input_ids.shape[1] - batch.completion_ids.shape[1] + 1
            text = run.processing_class.decode(ids[:length][mask[:length]])
            if counted.any():
                out.append(text)
    assert all(out.count(text) in (0, 4) for text in out)
    return list(dict.fromkeys(out))


def same(ours: list[MicroBatch], theirs: list[MicroBatch]) -> None:
    for one, two in zip(ours, theirs, strict=True):
        for name in ("completion_ids", "completion_mask", "advantages", "num_items", "num_rows"):
            torch.testing.assert_close(getattr(one, name), getattr(two, name), msg=name)
        for name in ("input_ids", "attention_mask"):
            assert torch.equal(getattr(one, name), getattr(two, name)), name


def test_a_refilled_generation_is_that_of_the_prompts_that_vary(tmp_path: Path) -> None:
    run = scripted(tmp_path, PROMPTS, dynamic_sample=True, per_device_train_batch_size=8,
                   gradient_accumulation_steps=2)  # fmt: skip
    batches = collect(run, START)
    kept = prompts_of(run, batches)
    assert kept[:2] == ["v1", "v2"]
    assert len(kept) == 4
    assert all(prompt[0] == "v" for prompt in kept)
    plain = scripted(
        tmp_path, PROMPTS, per_device_train_batch_size=8, gradient_accumulation_steps=2
    )
    same(batches, collect(plain, kept))
    rounds = asked(run)
    drawn = [prompt for one in rounds for prompt in one]
    assert len(set(drawn)) == len(drawn), "a prompt was sampled twice"
    assert kept == [prompt for prompt in drawn if prompt[0] == "v"]
    metrics = run._metrics.drain()
    assert metrics["dynamic_sample/rounds"] == len(rounds) - 1 > 0
    assert metrics["dynamic_sample/sampled"] == len(drawn)
    assert metrics["dynamic_sample/dropped"] == sum(prompt[0] == "e" for prompt in drawn)
    assert metrics["dynamic_sample/trained"] == 4


def test_whoever_listens_gets_what_is_trained_on(tmp_path: Path) -> None:
    run = scripted(tmp_path, PROMPTS, dynamic_sample=True)
    heard: list[Any] = []
    run.collector.on_generation = lambda *given: heard.extend(given)
    (batch,) = collect(run, START)
    names, sample, rewards, advantages = heard
    kept = prompts_of(run, [batch])
    assert [row["prompt"] for row in names] == [prompt for prompt in kept for _ in range(4)]
    texts = run.processing_class.batch_decode(sample.completion_ids, skip_special_tokens=True)
    expected = letters([row["prompt"] for row in names], texts)
    assert rewards[:, 0].tolist() == pytest.approx(expected)
    assert torch.equal(advantages, batch.advantages)


def test_metrics_are_of_everything_that_was_sampled(tmp_path: Path) -> None:
    run = scripted(tmp_path, PROMPTS, dynamic_sample=True)
    collect(run, START)
    drawn = [prompt for one in asked(run) for prompt in one]
    metrics = run._metrics.drain()
    plain = scripted(tmp_path, PROMPTS, per_device_train_batch_size=4 * len(drawn))
    tokens = plain.collector(rows(drawn)).tokens
    expected = plain._metrics.drain()
    for name in ("reward", "reward_std", "frac_reward_zero_std", "completions/mean_length"):
        assert metrics[name] == pytest.approx(expected[name]), name
    assert metrics["frac_reward_zero_std"] == pytest.approx(
        metrics["dynamic_sample/dropped"] / metrics["dynamic_sample/sampled"]
    )
    again = scripted(tmp_path, PROMPTS, dynamic_sample=True)
    assert again.collector(rows(START)).tokens == tokens


def step(run: GRPOTrainer, prompts: list[str]) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of a generation that is one optimizer step, and its gradients."""
    run.model.zero_grad()
    batches = collect(run, prompts)
    loss = sum(float(run.training_loss(batch)) for batch in batches)  # type: ignore[attr-defined]
    return loss, {n: p.grad.clone() for n, p in run.model.named_parameters() if p.grad is not None}


@pytest.fixture(autouse=True)
def _training_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    def training_loss(self: GRPOTrainer, batch: MicroBatch) -> torch.Tensor:
        self.model.train()
        loss = self.compute_loss(self.model, batch)
        loss.backward()
        return loss.detach()

    monkeypatch.setattr(GRPOTrainer, "training_loss", training_loss, raising=False)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("truncated", [False, True], ids=["all", "ended"])
def test_dropped_groups_count_in_no_normaliser(
    tmp_path: Path, scheme: str, truncated: bool
) -> None:
    """T6: Two of four prompts are dropped and none sampled: a batch of the other two alone."""
    options: dict[str, Any] = {"aggregation": scheme, "mask_truncated_completions": truncated}
    options |= {"beta": 0.3, "entropy_coef": 0.01}

    def moved(run: GRPOTrainer) -> GRPOTrainer:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in run.policy.reference.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        return run

    dropping = moved(
        scripted(tmp_path, PROMPTS, dynamic_sample=True, max_resample_times=0, **options)
    )
    loss, grads = step(dropping, START)
    assert asked(dropping) == [START]
    alone = moved(scripted(tmp_path, PROMPTS, per_device_train_batch_size=8, **options))
    expected, expected_grads = step(alone, ["v1", "v2"])
    assert abs(expected) > 1e-3
    assert loss == pytest.approx(expected, rel=1e-5)
    for name, grad in expected_grads.items():
        torch.testing.assert_close(grads[name], grad, atol=1e-6, rtol=1e-4, msg=name)


def test_what_is_left_is_spread_over_the_optimizer_steps(tmp_path: Path) -> None:
    run = scripted(
        tmp_path,
        PROMPTS,
        dynamic_sample=True,
        max_resample_times=0,
        per_device_train_batch_size=8,
        steps_per_generation=2,
    )
    first, second = collect(run, ["v1", "v2", "e1", "e2"])
    assert [prompts_of(run, [batch]) for batch in (first, second)] == [["v1"], ["v2"]]
    assert first.num_rows == second.num_rows == 4
    assert first.num_items == first.completion_mask.sum()


def test_choice_of_places() -> None:
    def chosen(text: str, places: int) -> tuple[list[int], str]:
        choice = Choice.of(torch.tensor([c == "v" for c in text]), places)
        return choice.groups, "".join("v" if t else "." for t in choice.trained)

    assert chosen("vvv", 3) == ([0, 1, 2], "vvv")
    assert chosen("eveevvv", 3) == ([1, 4, 5], "vvv")
    assert chosen("evee", 4) == ([1, 0, 2, 3], "v...")
    assert chosen("eveeve", 6) == ([1, 0, 2, 4, 3, 5], "v..v..")
    assert chosen("vveve", 4) == ([0, 1, 3, 2], "vvv.")
    assert chosen("eee", 2) == ([0, 1], "..")


def test_nothing_varies(tmp_path: Path) -> None:
    """Every prompt of the dataset is tried once, then the run goes on with a loss of 0."""
    run = scripted(tmp_path, [f"e{i}" for i in range(9)], dynamic_sample=True, max_steps=1)
    run.train()
    drawn = [prompt for one in asked(run) for prompt in one]
    assert sorted(drawn) == [f"e{i}" for i in range(9)]
    (entry,) = [entry for entry in run.state.log_history if "grad_norm" in entry]
    assert entry["loss"] == entry["grad_norm"] == entry["dynamic_sample/trained"] == 0
    assert entry["dynamic_sample/rounds"] == 2  # of 4 and of the last one
    assert entry["frac_reward_zero_std"] == 1


def test_rounds_are_bounded(tmp_path: Path) -> None:
    run = scripted(
        tmp_path, [f"e{i}" for i in range(40)], dynamic_sample=True, max_resample_times=3
    )
    collect(run, [f"e{i}" for i in range(4)])
    assert [len(one) for one in asked(run)] == [4, 4, 4, 4]


def test_a_prompt_that_stands_twice_in_the_dataset_is_drawn_once(tmp_path: Path) -> None:
    run = scripted(tmp_path, ["e1", "e1", "v1", "v1", "v2", "v2"] * 2, dynamic_sample=True)
    batches = collect(run, ["e1", "e2", "v1", "e3"])
    assert prompts_of(run, batches) == ["v1", "v2"]
    assert [prompt for one in asked(run)[1:] for prompt in one] == ["v2"]


def test_other_prompts_depend_on_the_seed_and_the_generation_alone(tmp_path: Path) -> None:
    def others(number: int, seed: int, **options: Any) -> list[list[str]]:
        prompts = [f"{'ev'[i % 2]}{i}" for i in range(60)]
        run = scripted(tmp_path, prompts, dynamic_sample=True, seed=seed, **options)
        torch.rand(number + 1)
        collect(run, ["e0", "e2", "e4", "e6"], number)
        return asked(run)[1:]

    assert others(3, 1) == others(3, 1)
    assert others(3, 1) != others(4, 1)
    assert others(3, 1) != others(3, 2)
    assert others(3, 2, data_seed=1) == others(3, 1)
    following = others(1, 1, shuffle_dataset=False)
    assert following[0] == ["e8", "v9", "e10", "v11"]


def test_a_resumed_run_draws_the_same_prompts(tmp_path: Path) -> None:
    options: dict[str, Any] = {"dynamic_sample": True, "lr_scheduler_type": "constant"}
    options |= {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 9}
    whole = scripted(tmp_path / "a", PROMPTS, max_steps=6, **options)
    whole.train()
    second = scripted(tmp_path / "b", PROMPTS, max_steps=6, **options)
    second.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-4"))
    assert asked(second) == asked(whole)[-len(asked(second)) :]
    assert len(asked(second)) > 2
    for one, two in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [True, True, False, False, True]),
        ({"dynamic_sample_range": 0.2}, [True, False, False, False, True]),
        ({"reward_weights": [1.0, -1.0]}, [True, True, False, False, False]),
        ({"advantage_estimator": "gdpo"}, [True, True, False, False, True]),
        (
            {"advantage_estimator": "gdpo", "reward_weights": [1.0, -1.0]},
            [True, True, False, False, True],
        ),
    ],
)
def test_what_varies(tmp_path: Path, options: dict[str, Any], expected: list[bool]) -> None:
    nan = torch.nan
    first = [[0, 1, 0, 1], [0.5, 0.6, 0.5, 0.5], [0.1] * 4, [nan, nan, 0.3, nan], [0, 1, 0, 1]]
    second = [[0.0] * 4] * 4 + [[0, 1, 0, 1]]
    rewards = torch.tensor([first, second]).flatten(1).T
    rewards[12:16, 1] = nan  # nothing where the first has nothing
    run = scripted(tmp_path, PROMPTS, [letters, letters], dynamic_sample=True, **options)
    got = varying(rewards, run.args)
    assert got.tolist() == expected
    if not options:
        share = zero_variance_fraction(rewards.nansum(1).masked_fill(rewards[:, 0].isnan(), nan), 4)
        assert share == pytest.approx(1 - sum(expected) / 5)


def test_remax_and_truncation_come_along(tmp_path: Path) -> None:
    """The baseline of each prompt is that of its own greedy completion, also after a refill."""
    options: dict[str, Any] = {
        "advantage_estimator": "remax",
        "mask_truncated_completions": True,
        "overlong_buffer_len": 3,
    }
    run = scripted(tmp_path, PROMPTS, dynamic_sample=True, **options)
    batches = collect(run, START)
    drawn = [prompt for one in asked(run) for prompt in one if prompt[0] == "v"]
    plain = scripted(tmp_path, PROMPTS, **options)
    theirs = collect(plain, drawn[:4])
    same(batches, theirs)
    assert not batches[0].completion_mask.any(1).all(), "no completion was truncated"


def test_samples_of_several_rounds_are_padded_to_one_width() -> None:
    def sample(rows: int, prompt: int, length: int, start: int) -> Sample:
        count = torch.arange(start, start + rows * (prompt + length)).view(rows, -1)
        ones = torch.ones(rows, prompt, dtype=torch.bool)
        return Sample(
            count[:, :prompt],
            ones,
            count[:, prompt:],
            torch.ones(rows, length, dtype=torch.bool),
            torch.ones(rows, dtype=torch.bool),
            -count[:, prompt:].float(),
        )

    one, two = sample(2, 3, 1, 0), sample(1, 1, 2, 100)
    whole = joined([one, two])
    assert whole.prompt_ids.tolist() == [[0, 1, 2], [4, 5, 6], [0, 0, 100]]
    assert whole.prompt_mask.tolist() == [[True] * 3, [True] * 3, [False, False, True]]
    assert whole.completion_ids.tolist() == [[3, 0], [7, 0], [101, 102]]
    assert whole.completion_mask.tolist() == [[True, False], [True, False], [True, True]]
    assert whole.sampling_logps is not None
    assert whole.sampling_logps.tolist() == [[-3, 0], [-7, 0], [-101, -102]]
    assert whole.ended.tolist() == [True] * 3
    assert joined([one, replace(two, sampling_logps=None)]).sampling_logps is None
    assert select(whole, [2, 0]).prompt_ids.tolist() == [[0, 0, 100], [0, 1, 2]]


@pytest.mark.parametrize(
    "options",
    [
        {"scale_rewards": "batch"},
        {"advantage_estimator": "reinforce_plus_plus"},
        {"advantage_estimator": "reinforce_plus_plus_baseline"},
        {"advantage_estimator": "gdpo"},
        {"advantage_estimator": "opo"},
    ],
    ids=lambda options: next(iter(options.values())),
)
def test_dropped_groups_count_in_no_statistic(tmp_path: Path, options: dict[str, Any]) -> None:
    run = scripted(tmp_path, PROMPTS, dynamic_sample=True, max_resample_times=0, **options)
    (batch,) = collect(run, START)
    alone = scripted(tmp_path, PROMPTS, per_device_train_batch_size=8, **options)
    (expected,) = collect(alone, ["v1", "v2"])
    trained = batch.completion_mask.any(1)
    assert (batch.advantages[~trained] == 0).all()
    torch.testing.assert_close(batch.advantages[trained], expected.advantages)
