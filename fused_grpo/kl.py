"""Estimators of the KL to the reference from one log-probability per token, d = ref - logp."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from fused_grpo.ratios import clamp_log_ratio, expm1


def k1(d: Tensor) -> Tensor:
    """-d: unbiased, of either sign; its gradient is 1 whatever the policies."""
    return -d


def k2(d: Tensor) -> Tensor:
    """d^2 / 2: its gradient, logp - ref, is that of the KL on policy."""
    return d.square() / 2


def k3(d: Tensor) -> Tensor:
    """e^d - d - 1 >= 0, and 0 only at d = 0 (Schulman 2020)."""
    return expm1(d) - d


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
    beyond = raw.abs() > (torch.inf if clamp is None else clamp)
    if how.score:
        since = d.detach() - d  # logp - sg logp
        if how.exponential:
            inside = (bounded == d) & ~beyond
            outside = value.masked_fill(inside, 0.0) * since.exp()
            value = torch.where(inside, scored_k3(value, d), outside)
        else:
            value = value * since.exp()
    return Penalty(value, bounded != d, beyond)


def scored_k3(value: Tensor, d: Tensor) -> Tensor:
    """k3(d) e^(logp - sg logp), given its value, as a function of logp.

    (e^d - 1 - d) e^(sg d - d) = e^(sg d) - (1 + d) e^(sg d - d): without the first term, which is
    constant, all derivatives stay, the first being -d, and nothing of the size of e^d cancels.
    """
    now = d.detach()
    return value.detach() + (1 + now) - (1 + d) * (now - d).exp()


@dataclass
class AdaptiveKL:
    """Raises beta while the KL is above the target, and lowers it while it is below.

    Ziegler et al. (arXiv 1909.08593, section 2.2): with e = clip(KL / target - 1, -0.2, 0.2),

        beta <- beta * (1 + e * batch_size / horizon)

        control = AdaptiveKL(target=0.1, horizon=10000, batch_size=64, coef=0.05)
        loss = grpo_loss(..., beta=control.current)
        control.update(mean_kl)            # of the whole optimizer step

    Attributes:
        target: in the unit of what `update` is given: nats per token in the trainer.
        horizon: completions over which beta changes by a fifth at most.
        batch_size: completions of a step.
        coef: beta, at first that of the first step.

    Raises:
        ValueError: a number that is not > 0, a horizon below the batch.
    """

    target: float = 0.1
    horizon: float = 10000
    batch_size: float = 1
    coef: float = 0.05

    def __post_init__(self) -> None:
        for name in ("target", "batch_size", "coef"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be > 0")
        if not self.horizon >= self.batch_size:
            raise ValueError(
                f"horizon={self.horizon} must be at least the batch of {self.batch_size} "
                "completions that a step takes"
            )

    @property
    def current(self) -> float:
        """The coefficient of the next step."""
        return self.coef

    def update(self, kl: float) -> None:
        """Takes the mean KL of a step."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * self.batch_size / self.horizon

    def state(self) -> dict[str, float]:
        """Its fields, to be given to the constructor again."""
        return asdict(self)
