"""Sampling with transformers' continuous batching, on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_trainer import LORA, first_step, logs, trainer

from fused_grpo.trainer import RolloutError

CONTINUOUS = {"use_transformers_continuous_batching": True}


def test_greedy_completions_are_those_of_generate(tmp_path: Path) -> None:
    prompts = ["ab", "a longer prompt of more than one page of the cache", "xyz"]
    want = trainer(tmp_path / "a")
    got = trainer(tmp_path / "b", **CONTINUOUS)
    expected = want.sampler(want.model, prompts, copies=2, greedy=True)
    sample = got.sampler(got.model, prompts, copies=2, greedy=True)
    assert sample.completions() == expected.completions()
    assert torch.equal(sample.ended, expected.ended)
    assert torch.equal(sample.prompt_ids, expected.prompt_ids)
    assert sample.sampling_logps is None


@pytest.mark.parametrize(
    ("peft", "more"),
    [
        (None, {}),
        (LORA, {"temperature": 0.7}),
        (None, {"top_k": 5, "temperature": 0.8, "keep_sampling_mask": True}),
    ],
    ids=["plain", "lora", "kept support"],
)
def test_its_log_probabilities_are_those_of_the_policy(
    tmp_path: Path, peft: Any, more: dict[str, Any]
) -> None:
    run = trainer(
        tmp_path, peft=peft, sampling_correction="monitor", learning_rate=5e-2, **CONTINUOUS, **more
    )
    run.train()
    assert len(logs(run, "sampling/logp_difference/max")) == 2
    assert max(logs(run, "sampling/logp_difference/max")) < 5e-5


def test_the_same_seed_gives_the_same_gradients(tmp_path: Path) -> None:
    first, _ = first_step(trainer(tmp_path / "a", **CONTINUOUS))
    again, _ = first_step(trainer(tmp_path / "b", **CONTINUOUS))
    other, _ = first_step(trainer(tmp_path / "c", seed=5, **CONTINUOUS))
    assert all(torch.equal(grad, again[name]) for name, grad in first.items())
    assert not all(torch.equal(grad, other[name]) for name, grad in first.items())


def test_completions_of_a_group_differ(tmp_path: Path) -> None:
    run = trainer(tmp_path, **CONTINUOUS)
    rows = run.sampler(run.model, ["ab"], copies=16).completions()
    assert len({tuple(row) for row in rows}) > 10


def test_options_of_transformers_reach_it(tmp_path: Path) -> None:
    """A cache that cannot hold one completion is too small: an error, and no endless wait."""
    run = trainer(
        tmp_path,
        transformers_continuous_batching_config={"num_blocks": 1, "page_size": 4},
        **CONTINUOUS,
    )
    with pytest.raises((RolloutError, RuntimeError, ValueError)):
        run.sampler(run.model, ["a longer prompt"], copies=4)


def test_truncated_log_probabilities_need_the_kept_support(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ContinuousBatching reports log-prob.*top_k=5"):
        trainer(tmp_path, sampling_correction="monitor", top_k=5, **CONTINUOUS)
