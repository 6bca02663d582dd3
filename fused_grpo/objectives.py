"""Objectives as functions of per-token log-probabilities. Each formula stands here once.

A surrogate maps (ratio, advantages, spec) to a per-token loss; g_t = dL/dlogp_t is autograd of the
whole on vectors of length N, so nothing here knows about vocabularies, hidden states or gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fused_grpo.aggregation import SCHEMES, as_scalar
from fused_grpo.batch import TokenBatch
from fused_grpo.checks import check_choice, check_number


@dataclass(frozen=True)
class LossSpec:
    """The options of a loss, checked. See `grpo_loss` for their meaning."""

    loss_type: str = "dapo"
    importance_sampling_level: str = "token"
    epsilon_low: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = False
    entropy_coef: float = 0.0
    log_ratio_clamp: float | None = 20.0
    num_items_in_batch: float | Tensor | None = None
    max_completion_length: int | None = None

    def __post_init__(self) -> None:
        check_choice("loss_type", self.loss_type, LOSS_TYPES)
        check_choice(
            "importance_sampling_level", self.importance_sampling_level, ("token", "sequence")
        )
        finite = math.isfinite
        check_number("epsilon_low", self.epsilon_low, lambda x: 0 <= x < 1, "in [0, 1)")
        if self.epsilon_high is not None:
            must = ">= 0: the bound is 1 + epsilon_high"
            check_number("epsilon_high", self.epsilon_high, lambda x: x >= 0, must)
        if self.delta is not None:
            check_number("delta", self.delta, lambda x: x > 1, "> 1: it bounds the ratio itself")
        check_number("beta", self.beta, lambda x: x >= 0 and finite(x), ">= 0")
        check_number("entropy_coef", self.entropy_coef, finite, "finite")
        if self.log_ratio_clamp is not None:
            check_number("log_ratio_clamp", self.log_ratio_clamp, lambda x: x > 0, "> 0, or None")
        if self.use_bias_correction_kl and self.beta == 0:
            raise ValueError(
                "use_bias_correction_kl=True needs beta > 0: there is no KL to correct"
            )
        self._check_divisor()

    def _check_divisor(self) -> None:
        _, option, required = SCHEMES[LOSS_TYPES[self.loss_type].scheme]
        for name in ("num_items_in_batch", "max_completion_length"):
            value = getattr(self, name)
            if value is not None and name != option:
                raise ValueError(f"{name}={value} is not used by loss_type={self.loss_type!r}")
            if value is None and name == option and required:
                raise ValueError(f"loss_type={self.loss_type!r} needs {name}")
        items, length = self.num_items_in_batch, self.max_completion_length
        if isinstance(items, Tensor):
            if items.numel() != 1:
                raise ValueError(
                    f"num_items_in_batch must hold one number, not shape {list(items.shape)}"
                )
        elif items is not None:
            check_number("num_items_in_batch", items, lambda x: x >= 0, ">= 0")
        if length is not None:
            check_number("max_completion_length", length, lambda x: x >= 1, ">= 1")

    @property
    def upper(self) -> float:
        """epsilon_high, or epsilon_low where it is None."""
        return self.epsilon_low if self.epsilon_high is None else self.epsilon_high

    def token_weights(self, batch: TokenBatch) -> Tensor:
        """[n] w_t of loss = sum_t w_t loss_t."""
        weights, option, _ = SCHEMES[LOSS_TYPES[self.loss_type].scheme]
        return batch.select(weights(batch, getattr(self, option) if option else None))


def clip_surrogate(ratio: Tensor, advantages: Tensor, spec: LossSpec) -> Tensor:
    """-min(min(r, delta) A, clip(r, 1 - eps_low, 1 + eps_high) A).

    PPO (arXiv 1707.06347) with separate bounds (DAPO, arXiv 2503.14476) and the two-sided clip of
    INTELLECT-2 (arXiv 2505.07291); at a bound the gradient passes.
    """
    clipped = ratio.clamp(1 - spec.epsilon_low, 1 + spec.upper)
    free = ratio if spec.delta is None else ratio.clamp(max=spec.delta)
    return -torch.minimum(free * advantages, clipped * advantages)


@dataclass(frozen=True)
class LossType:
    """A name: its surrogate and its scheme of token weights (`aggregation.SCHEMES`)."""

    surrogate: Callable[[Tensor, Tensor, LossSpec], Tensor]
    scheme: str


LOSS_TYPES = {
    "grpo": LossType(clip_surrogate, "sequence_mean"),
    "bnpo": LossType(clip_surrogate, "local_token_mean"),
    "dr_grpo": LossType(clip_surrogate, "fixed_length"),
    "dapo": LossType(clip_surrogate, "token_mean"),
}


@dataclass(frozen=True)
class Terms:
    """Per-token values [n]; `log_ratio` before its clamp, both at the level of the ratio."""

    loss: Tensor  # policy + beta kl, without the entropy term
    kl: Tensor | None
    log_ratio: Tensor
    ratio: Tensor


def token_terms(logps: Tensor, batch: TokenBatch, spec: LossSpec) -> Terms:
    """The loss of every token, differentiable in `logps` [n]."""
    log_ratio = logps - (logps.detach() if batch.old is None else batch.old)
    if spec.importance_sampling_level == "sequence":
        log_ratio = batch.select(sequence_mean_of(log_ratio, batch))
    ratio = _clamp(log_ratio, spec).exp()
    loss = LOSS_TYPES[spec.loss_type].surrogate(ratio, batch.advantages, spec)
    if batch.weight_is is not None:
        loss = loss * batch.weight_is
    if spec.beta == 0:
        return Terms(loss, None, log_ratio, ratio)
    assert batch.ref is not None
    kl = k3(_clamp(batch.ref - logps, spec))
    if spec.use_bias_correction_kl:  # DeepSeek-V3.2 (arXiv 2512.02556): unbiased off policy
        kl = ratio * kl
    return Terms(loss + spec.beta * kl, kl, log_ratio, ratio)


def k3(log_ratio: Tensor) -> Tensor:
    """e^d - d - 1 >= 0 with d = ref - logp, 0 only at d = 0 (Schulman 2020)."""
    return torch.expm1(log_ratio) - log_ratio


def sequence_mean_of(values: Tensor, batch: TokenBatch) -> Tensor:
    """[n] -> [n]: the mean over the counted tokens of each token's sequence."""
    if values.numel() == 0:
        return values
    # a sum per segment rather than scattered adds, which are not deterministic on a GPU
    spans = batch.lengths if batch.spans is None else batch.spans
    total = torch.segment_reduce(batch.select(values), "sum", lengths=spans, initial=0, unsafe=True)
    return (total / batch.lengths.clamp_min(1))[batch.sequence]


def _clamp(log_ratio: Tensor, spec: LossSpec) -> Tensor:
    # exp stays finite, and the gradient is 0 beyond the clamp
    if spec.log_ratio_clamp is None:
        return log_ratio
    return log_ratio.clamp(-spec.log_ratio_clamp, spec.log_ratio_clamp)


class Objective:
    """A loss bound to a batch: log-probabilities in, per-token losses and g_t = dL/dlogp_t out.

    `local` says whether a span of tokens can be evaluated without the others, so that gradients
    leave in one pass over the head. Ratios over sequences are local too when there are no old
    log-probs: every ratio is then 1 whatever the log-probabilities, and the policy's share of g_t
    is known before the head runs.
    """

    def __init__(self, spec: LossSpec, batch: TokenBatch) -> None:
        self.spec, self.batch = spec, batch
        self.weights = spec.token_weights(batch)
        self._fresh: tuple[Tensor, Tensor] | None = None
        by_token = spec.importance_sampling_level == "token"
        self.local = by_token or (batch.old is None and not spec.use_bias_correction_kl)
        if self.local and not by_token:
            policy = replace(spec, beta=0.0)
            zeros = torch.zeros_like(batch.advantages)
            self._fresh = values_and_gradient(zeros, self.weights, batch, policy)

    def __call__(self, span: slice, logps: Tensor) -> tuple[Tensor, Tensor]:
        """([c] per-token losses without the entropy term, [c] g_t) of a span of tokens."""
        batch, weights, spec = self.batch[span], self.weights[span], self.spec
        if self._fresh is None:
            return values_and_gradient(logps, weights, batch, spec)
        loss, g = (t[span] for t in self._fresh)
        if spec.beta == 0:
            return loss, g
        by_token = replace(spec, importance_sampling_level="token")
        silent = replace(batch, advantages=torch.zeros_like(batch.advantages))
        kl, g_kl = values_and_gradient(logps, weights, silent, by_token)
        return loss + kl, g + g_kl

    def entropy_gradient(self, span: slice) -> Tensor | None:
        """[c] dL/dentropy_t."""
        if self.spec.entropy_coef == 0:
            return None
        return -self.spec.entropy_coef * self.weights[span]

    def evaluate(
        self, span: slice, logps: Tensor, entropy: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """([c] per-token losses, [c] g_t, [c] dL/dentropy_t | None) of a span of tokens."""
        loss, g = self(span, logps)
        if self.spec.entropy_coef != 0 and entropy is not None:
            loss = loss - self.spec.entropy_coef * entropy
        return loss, g, self.entropy_gradient(span)

    def total(self, per_token: Tensor) -> Tensor:
        """The loss [], of the per-token losses [n] of all tokens."""
        return (per_token * self.weights).sum()

    def metrics(self, logps: Tensor, entropy: Tensor | None, g: Tensor | None) -> dict[str, Tensor]:
        """`metrics` of all tokens, once they have been evaluated."""
        return metrics(logps, entropy, g, self.batch, self.spec)


def values_and_gradient(
    logps: Tensor, weights: Tensor, batch: TokenBatch, spec: LossSpec
) -> tuple[Tensor, Tensor]:
    """([n] per-token losses without the entropy term, [n] the gradient of their weighted sum)."""
    with torch.enable_grad():
        leaf = logps.detach().requires_grad_()
        values = token_terms(leaf, batch, spec).loss
        (g,) = torch.autograd.grad((values * weights).sum(), leaf)
    return values.detach(), g


def metrics(
    logps: Tensor, entropy: Tensor | None, g: Tensor | None, batch: TokenBatch, spec: LossSpec
) -> dict[str, Tensor]:
    """Detached 0-d tensors over the counted tokens, no host synchronisation; see `grpo_loss`."""
    with torch.no_grad():
        terms = token_terms(logps.detach(), batch, spec)
        ratio, log_ratio, a = batch.select(terms.ratio), terms.log_ratio, batch.advantages
        low = (ratio < 1 - spec.epsilon_low) & (a < 0)
        high = (ratio > 1 + spec.upper) & (a > 0)
        means = {
            "clip_ratio/low_mean": low,
            "clip_ratio/high_mean": high,
            "clip_ratio/region_mean": low | high,
            "ratio/mean": ratio,
            "log_ratio/clamped": log_ratio.abs() > (spec.log_ratio_clamp or math.inf),
        }
        if terms.kl is not None:
            means["kl"] = terms.kl
        if entropy is not None:
            means["entropy"] = entropy.detach()
        if g is not None:
            means["zero_coefficient_fraction"] = (g == 0) & (spec.entropy_coef == 0)
        out = {name: _mean(x, batch) for name, x in means.items()}
        for name, x in {"ratio": terms.ratio, "log_ratio": log_ratio}.items():
            out[f"{name}/min"] = _extreme(x, torch.amin, batch)
            out[f"{name}/max"] = _extreme(x, torch.amax, batch)
        squares = (batch.count * ratio.square().sum()).clamp_min(torch.finfo(ratio.dtype).tiny)
        out["effective_sample_size"] = ratio.sum().square() / squares
        out["num_tokens"] = as_scalar(batch.count, out["ratio/mean"])
    return out


def _mean(x: Tensor, batch: TokenBatch) -> Tensor:
    total = batch.select(x.float()).sum()
    return total / as_scalar(batch.count, total).clamp_min(1)


def _extreme(x: Tensor, reduce: Callable[[Tensor], Tensor], batch: TokenBatch) -> Tensor:
    if not x.numel():
        return x.new_zeros(())
    if batch.counted is None:
        return reduce(x)
    ends = math.inf if reduce is torch.amin else -math.inf
    return torch.where(batch.counted.any(), reduce(torch.where(batch.counted, x, ends)), 0)
