"""Optimizer steps whose loss or gradient is not finite: which ones, and why, in words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fused_grpo.trainer.batches import MicroBatch
from fused_grpo.trainer.policy import Policy

ADVICE = """\
Going on from here unchanged would meet the same numbers again. What helps, by what was seen above:
- weights that are not finite: resume from an earlier checkpoint;
- hidden states that are not finite, finite weights: train in bf16 or fp32 instead of fp16;
- large log-ratios: a smaller learning_rate, fewer num_iterations or steps_per_generation;
- finite log-probabilities, a gradient that is not: a smaller learning_rate or max_grad_norm;
- otherwise: an objective of your own, or rewards as large as the dtype's range.
A changed learning_rate is used after a resume."""


class NonFiniteError(RuntimeError):
    """Too many steps in a row had a loss or a gradient that is not finite."""


@dataclass
class _Seen:
    batch: MicroBatch
    logps: Tensor | None
    loss: Tensor | None = None


class StepWatch:
    """Remembers the micro-batches of an optimizer step; looks at them only if asked.

    Attributes:
        skipped, in_a_row: steps that were left out, in all and since the last good one.
    """

    def __init__(self) -> None:
        self.skipped = self.in_a_row = 0
        self._seen: list[_Seen] = []

    def add(self, batch: MicroBatch, logps: Tensor | None) -> None:
        """The micro-batch that is computed now, and its log-probabilities [B, T]."""
        self._seen.append(_Seen(batch, None if logps is None else logps.detach()))

    def add_loss(self, loss: Tensor) -> None:
        """Of the micro-batch added last."""
        if self._seen:
            self._seen[-1].loss = loss

    def is_finite(self, grad_norm: float, ignore_gradient: bool) -> bool:
        """Whether the losses of the step so far and the norm of its gradient are."""
        losses = [float(seen.loss) for seen in self._seen if seen.loss is not None]
        return all(map(math.isfinite, losses)) and (ignore_gradient or math.isfinite(grad_norm))

    def count(self, good: bool) -> None:
        """Ends the step."""
        self.in_a_row = 0 if good else self.in_a_row + 1
        self.skipped += not good
        self._seen.clear()

    def explain(self, tokenizer: Any, policy: Policy | None) -> list[str]:
        """One line for each micro-batch; with `policy`, its hidden states are computed again."""
        total = len(self._seen)
        return [
            f"micro-batch {i + 1} of {total}: " + "; ".join(_facts(seen, tokenizer, policy))
            for i, seen in enumerate(self._seen)
        ]


def _facts(seen: _Seen, tokenizer: Any, policy: Policy | None) -> list[str]:
    facts = [] if seen.loss is None else [f"loss {float(seen.loss):.4g}"]
    if seen.logps is not None:
        facts += _of_logps(seen.logps, seen.batch, tokenizer)
    if policy is not None:
        finite = policy.at_head(seen.batch, lambda hidden, head: torch.isfinite(hidden).all(-1))
        bad = int((~finite).sum())
        facts.append(f"hidden states not finite at {bad} of {finite.numel()} positions")
    return facts


def _of_logps(logps: Tensor, batch: MicroBatch, tokenizer: Any) -> list[str]:
    mask = batch.completion_mask
    if not mask.any():
        return ["no token counts"]
    bad = ~logps.isfinite() & mask
    facts = [f"{int(bad.sum())} of {int(mask.sum())} log-probabilities not finite"]
    if bad.any():
        facts[0] += ", the first " + _where(bad.nonzero()[0], batch, tokenizer)
    good = mask & ~bad
    if good.any():
        low = logps.masked_fill(~good, math.inf)
        facts.append(f"smallest log-probability {_extreme(low, -1, batch, tokenizer)}")
        if batch.old_logps is not None:
            moved = (logps - batch.old_logps).abs().masked_fill(~good, -1.0)
            facts.append(f"largest |log-ratio| {_extreme(moved, 1, batch, tokenizer)}")
    return facts


def _extreme(values: Tensor, sign: int, batch: MicroBatch, tokenizer: Any) -> str:
    place = int((values * sign).argmax())
    spot = torch.tensor(divmod(place, values.shape[1]))
    return f"{float(values.flatten()[place]):.4g} {_where(spot, batch, tokenizer)}"


def _where(spot: Tensor, batch: MicroBatch, tokenizer: Any) -> str:
    row, place = spot.tolist()
    token = int(batch.completion_ids[row, place])
    return f"(row {row}, token {place}: {tokenizer.decode([token])!r}, id {token})"


def weights_in_words(model: nn.Module) -> str:
    """Whether the weights themselves are finite."""
    bad = [name for name, p in model.named_parameters() if not bool(torch.isfinite(p).all())]
    if not bad:
        return "All weights are finite."
    return f"{len(bad)} weight tensors are not finite, among them {bad[0]}."
