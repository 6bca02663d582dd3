"""From log-probabilities to per-token losses: every term of a loss, differentiable."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fused_grpo import corrections
from fused_grpo.batch import TokenBatch
from fused_grpo.kl import Penalty, kl_penalty, scored_k3
from fused_grpo.objectives.spec import LossSpec
from fused_grpo.objectives.view import TokenView
from fused_grpo.ratios import LEVELS, clamp_log_ratio, exp


@dataclass(frozen=True)
class Terms:
    """Per-token values [n]; the ratio is at its level, `view.log_ratio` before its clamp.

    `active` says which tokens the policy term acts on, `keep` which tokens count at all; None: all.
    """

    loss: Tensor
    view: TokenView
    kl: Penalty | None
    active: Tensor | None
    keep: Tensor | None


def token_terms(
    logps: Tensor,
    batch: TokenBatch,
    spec: LossSpec,
    entropy: Tensor | None = None,
    kl: Tensor | None = None,
) -> Terms:
    """The loss of every token, differentiable in `logps` [n], `entropy` [n] and `kl` [n], which is
    one that the head summed over the vocabulary.

    `batch` comes from `corrections.prepare`. The entropy bonus is part of the loss where
    entropies are given.
    """
    weight, keep = batch.weight_is, batch.keep
    if corrections.waits_for_logps(batch, spec):
        done = corrections.correct(batch, logps, spec)
        weight, keep = weight if done.weight is None else done.weight, done.keep
    view = make_view(logps, batch, spec, entropy, weight)
    learns = _chosen_by_entropy(view, spec)
    active = _both(_on_policy(view, batch, spec), learns)
    loss, penalty = other_terms(view, batch, spec, kl)
    loss = _select(active, policy_term(view, spec)) + loss
    if spec.entropy_coef != 0 and entropy is not None:
        loss = loss - _select(learns, entropy_bonus(entropy, batch, spec))
    return Terms(_select(keep, loss), view, penalty, active, keep)


def other_terms(
    view: TokenView, batch: TokenBatch, spec: LossSpec, kl: Tensor | None = None
) -> tuple[Tensor | float, Penalty | None]:
    """The KL and the likelihood of positives: local to a token, but for the ratio of the KL."""
    loss: Tensor | float = 0.0
    penalty = None
    if spec.head_kl:
        assert kl is not None
        penalty = Penalty(kl)
        loss = spec.beta * kl
    elif spec.beta != 0:
        assert batch.ref is not None
        d = batch.ref - view.logps
        penalty = kl_penalty(d, spec.kl_estimator, spec.log_ratio_clamp, spec.kl_clamp)
        if spec.use_bias_correction_kl:  # DeepSeek-V3.2 (arXiv 2512.02556): unbiased off policy
            penalty = replace(penalty, value=_corrected(view, penalty, d, spec))
        loss = spec.beta * penalty.value
    if spec.positive_nll_coef != 0:  # VAPO, arXiv 2504.05118
        positive = torch.where(view.advantages > 0, view.logps, 0.0)
        loss = loss - spec.positive_nll_coef * positive
    return loss, penalty


def _corrected(view: TokenView, penalty: Penalty, d: Tensor, spec: LossSpec) -> Tensor:
    """[n] the KL times the live ratio.

    A ratio r of tokens is sg(r) e^(l - sg l), so that r k3 is a case of `scored_k3`: its gradient
    -r d would otherwise be the difference of two numbers of the size of r e^d.
    """
    ratio, value = view.ratio, penalty.value
    if spec.kl_estimator != "k3" or spec.level not in ("token", "sequence_token"):
        return ratio * value
    moves = clamp_log_ratio(view.log_ratio, spec.log_ratio_clamp) == view.log_ratio
    assert penalty.input_clamped is not None
    assert penalty.value_clamped is not None
    inside = moves & ~penalty.input_clamped & ~penalty.value_clamped
    together = ratio.detach() * scored_k3(value, d)
    apart = ratio.masked_fill(inside, 0.0) * value.masked_fill(inside, 0.0)
    return torch.where(inside, together, apart)


def entropy_bonus(entropy: Tensor, batch: TokenBatch, spec: LossSpec) -> Tensor:
    """[n] what the loss is lowered by."""
    bonus = spec.entropy_coef * entropy
    return bonus if batch.entropy_scale is None else bonus * batch.entropy_scale


def policy_term(view: TokenView, spec: LossSpec) -> Tensor:
    """[n] the surrogate's loss times the importance weights."""
    loss = spec.row.surrogate(view, spec)
    if not isinstance(loss, Tensor) or loss.shape != view.logps.shape:
        shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"loss_type={spec.loss_type!r} must return one loss per token, "
            f"{list(view.logps.shape)}, not {shape}"
        )
    if view.weight is not None and not spec.row.folds_weight:
        loss = loss * view.weight
    return loss


def make_view(
    logps: Tensor,
    batch: TokenBatch,
    spec: LossSpec,
    entropy: Tensor | None,
    weight: Tensor | None,
) -> TokenView:
    old = logps.detach() if batch.old is None else batch.old
    if spec.bypass:  # an unknown log-prob of the sampler is a ratio of 1
        old = torch.where(old.isnan(), logps.detach(), old)
    log_ratio = level_of(logps - old, batch, spec)
    ratio = exp(clamp_log_ratio(log_ratio, spec.log_ratio_clamp))
    # infinity times an advantage of 0 would be NaN, and any finite ratio times it is 0
    nothing = (ratio == torch.inf) & (batch.advantages == 0)
    ratio = ratio.masked_fill(nothing, torch.finfo(ratio.dtype).max)
    return TokenView(
        logps=logps,
        advantages=batch.advantages,
        old=old,
        log_ratio=log_ratio,
        ratio=ratio,
        weight=weight,
        entropy=entropy,
        sequences=batch.sequences,
    )


def level_of(log_ratio: Tensor, batch: TokenBatch, spec: LossSpec) -> Tensor:
    """[n] the log-ratio at the level of the ratio, from those of tokens."""
    if batch.counted is None or batch.spans is None:
        return LEVELS[spec.level](log_ratio, batch.sequences)
    if spec.level == "token":
        return log_ratio
    # with a fixed capacity the mean over the counted tokens, which is the only other level there
    return batch.select(batch.sequences.mean(batch.select(log_ratio))[batch.sequence])


def _chosen_by_entropy(view: TokenView, spec: LossSpec) -> Tensor | None:
    """[n] the tokens that the entropy quantile leaves; None: all."""
    if spec.top_entropy_quantile >= 1:
        return None
    assert view.entropy is not None
    entropy = view.entropy.detach()
    return ~(entropy < _quantile(entropy, 1 - spec.top_entropy_quantile))


def _on_policy(view: TokenView, batch: TokenBatch, spec: LossSpec) -> Tensor | None:
    """[n] A >= 0, or mean over the sequence of (sampler or old - logp) <= threshold; None: all.

    Off-policy sequence masking of DeepSeek-V3.2, arXiv 2512.02556.
    """
    if spec.off_policy_mask_threshold is None:
        return None
    if batch.sampler is None:
        gap = view.old - view.logps.detach()
    else:
        gap = -corrections.log_ratio(view.logps, batch)
    moved = view.sequence_mean(gap) > spec.off_policy_mask_threshold
    return ~((view.advantages < 0) & moved)


def _both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a & b


def _quantile(values: Tensor, q: float) -> Tensor:
    """Linear interpolation between order statistics; torch.quantile stops at 2^24 values."""
    if values.numel() == 0:
        return values.new_zeros(())
    ordered = values.sort().values
    position = q * (values.numel() - 1)
    below = min(int(position), values.numel() - 1)
    above = min(below + 1, values.numel() - 1)
    return torch.lerp(ordered[below], ordered[above], position - below)


def _select(mask: Tensor | None, values: Tensor) -> Tensor:
    return values if mask is None else torch.where(mask, values, 0.0)
