"""Estimators of the KL to the reference from one log-probability per token, d = ref - logp."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_grpo.ratios import clamp_log_ratio


def k1(d: Tensor) -> Tensor:
    """-d: unbiased, of either sign; its gradient is 1 whatever the policies."""
    return -d


def k2(d: Tensor) -> Tensor:
    """d^2 / 2: its gradient, logp - ref, is that of the KL on policy."""
    return d.square() / 2


def k3(d: Tensor) -> Tensor:
    """e^d - d - 1 >= 0, and 0 only at d = 0 (Schulman 2020)."""
    return torch.expm1(d) - d


@dataclass(frozen=True)
class Estimator:
    """A value, whether it takes exp of d, and what stands for its gradient."""

    value: Callable[[Tensor], Tensor]
    exponential: bool = False
    straight_through: bool = False  # the value as it is, the gradient of k2
    score: bool = False  # times e^(logp - sg logp): adds the gradient of the sampling distribution


ESTIMATORS: dict[str, Estimator] = {
    "k1": Estimator(k1),
    "k2": Estimator(k2),
    "k3": Estimator(k3, exponential=True),
    "abs": Estimator(torch.abs),
    "k1+": Estimator(k1, straight_through=True),
    "k3+": Estimator(k3, exponential=True, straight_through=True),
    "abs+": Estimator(torch.abs, straight_through=True),
    "k1_score": Estimator(k1, score=True),
    "k2_score": Estimator(k2, score=True),
    "k3_score": Estimator(k3, exponential=True, score=True),
}


# divergences that the head sums over the vocabulary, given the reference's hidden states and weight
HEAD_KL = ("full", "top_k")


@dataclass(frozen=True)
class Penalty:
    """[n] the KL as it enters the loss, and which clamps of an estimate were met."""

    value: Tensor
    input_clamped: Tensor | None = None
    value_clamped: Tensor | None = None


def kl_penalty(d: Tensor, estimator: str, limit: float | None, clamp: float | None) -> Penalty:
    """The estimate of KL(policy || reference) at d = ref - logp [n].

    Args:
        limit: d enters exp clamped to +- this (k3 only: the others take no exp); None: as it is.
        clamp: the value is clamped to +- this. Beyond a clamp the gradient is 0, except that
            straight-through estimators keep that of k2.
    """
    how = ESTIMATORS[estimator]
    bounded = clamp_log_ratio(d, limit) if how.exponential else d
    raw = how.value(bounded)
    value = raw if clamp is None else raw.clamp(-clamp, clamp)
    if how.straight_through:
        gradient = k2(d)
        value = value.detach() + (gradient - gradient.detach())
    if how.score:
        value = value * (d.detach() - d).exp()
    return Penalty(value, bounded != d, raw.abs() > (torch.inf if clamp is None else clamp))
