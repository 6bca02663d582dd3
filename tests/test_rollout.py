"""The protocol, what comes of lists of tokens, and what `generate` says of itself."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_routing import mixture
from test_trainer import PROMPTS, config, letters, logs, trainer

from fused_grpo.trainer import GRPOTrainer
from fused_grpo.trainer.models import tiny
from fused_grpo.trainer.sample import Completion, Sample, sample_of


def test_rows_of_tokens_become_a_sample() -> None:
    """The padding's id is that of a token, which counts where it was sampled."""
    experts = [np.full((n, 2, 1), n) for n in (3, 5)]
    rows = [
        Completion([5, 4], [-1.0, math.nan], experts[0]),
        Completion([4, 9, 4], [-2.0, -3.0, -4.0], experts[1]),
    ]
    sample = sample_of([[1, 2], [1, 2, 3]], rows, [9], 4, torch.device("cpu"))
    assert sample.prompt_ids.tolist() == [[4, 1, 2], [1, 2, 3]]
    assert sample.prompt_mask.long().tolist() == [[0, 1, 1], [1, 1, 1]]
    assert sample.completions() == [[5, 4], [4, 9]]
    assert sample.ended.tolist() == [False, True]
    assert sample.sampling_logps[0, 0] == -1
    assert sample.sampling_logps[0, 1:].isnan().all()
    assert sample.sampling_logps[1].tolist() == [-2, -3, -4]
    assert sample.routed_experts[:, :, 0, 0].tolist() == [[0, 3, 3, 3, 0], [5, 5, 5, 5, 5]]
    none = sample_of([[1]], [Completion([5])], [9], 4, torch.device("cpu"))
    assert none.sampling_logps is None
    assert none.routed_experts is None


@pytest.mark.parametrize(
    "rules",
    [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 20, "top_p": 0.9, "min_p": 0.2}],
)
def test_log_probabilities_over_the_kept_support(tmp_path: Path, rules: dict[str, Any]) -> None:
    """With keep_sampling_mask the sampler's are over what it kept, as those of the loss are."""
    run = trainer(
        tmp_path,
        sampling_correction="monitor",
        keep_sampling_mask=True,
        temperature=0.7,
        max_steps=1,
        **rules,
    )
    run.train()
    assert logs(run, "sampling/logp_difference/max")[0] < 2e-5
    assert 1.5 < logs(run, "support/size")[0] <= 0.9 * run.model.config.vocab_size


class Own:
    """Someone's own way of making completions."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(
        self, model: Any, prompts: list[str], copies: int = 1, greedy: bool = False
    ) -> Sample:
        self.calls.append("greedy" if greedy else "sample")
        rows = [[5, 6 + i % 20, 0] for i in range(len(prompts) * copies)]
        ids = [[2, 3] for _ in rows]
        return sample_of(ids, [Completion(row) for row in rows], [0], 0, torch.device("cpu"))

    def sync(self, model: Any) -> None:
        self.calls.append("sync")

    def close(self) -> None:
        self.calls.append("close")


def test_a_rollout_of_ones_own(tmp_path: Path) -> None:
    """It is told of the weights before each generation, and before an evaluation."""
    own = Own()
    model, tokenizer = tiny(torch.float32)
    args = config(tmp_path, num_iterations=2, max_steps=4)
    run = GRPOTrainer(model, letters, args, PROMPTS, PROMPTS, tokenizer, rollout=own)
    run.train()
    assert own.calls == ["sync", "sample"] * 2
    run.evaluate()
    assert own.calls[4:] == ["sync", "greedy"]
    assert logs(run, "completions/mean_length") == [3.0] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling_correction": "monitor"}, "no log-probabilities, which a correction reads"),
        ({"router_replay": "R3"}, "no experts, which router_replay reads"),
    ],
)
def test_a_rollout_that_leaves_out_what_is_wanted(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    model, tokenizer = mixture()
    args = config(tmp_path, **options)
    run = GRPOTrainer(model, letters, args, PROMPTS, None, tokenizer, rollout=Own())
    with pytest.raises(ValueError, match=f"the rollout reports {message}"):
        run.train()
