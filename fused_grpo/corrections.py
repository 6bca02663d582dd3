"""Corrections for a sampler whose log-probabilities differ from those of the trained policy.

With d = old - sampler per token (0 where the sampler's is NaN), w = e^d corrects the policy term as
an importance weight, or says which tokens to leave out. Everything here is detached.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fused_grpo.batch import TokenBatch, make_batch
from fused_grpo.checks import check_choice, check_number
from fused_grpo.kl import k1, k2, k3
from fused_grpo.ratios import LEVELS, clamp_log_ratio

if TYPE_CHECKING:
    from fused_grpo.objectives.spec import LossSpec

DEFAULT_RATIO_MAX = 3.0  # as in TRL; verl and SkyRL start from 2


@dataclass(frozen=True)
class Correction:
    """The level of the ratio (`objectives.view.LEVELS`), and what happens outside its bounds."""

    level: str
    masks: bool  # 0 outside the bounds, rather than the nearest bound


# "monitor" only logs; "bypass" puts the sampler's log-probs in the place of the old ones
CORRECTIONS: dict[str, Correction | None] = {
    "token_truncate": Correction("token", masks=False),
    "token_mask": Correction("token", masks=True),
    "sequence_truncate": Correction("sequence_sum", masks=False),
    "sequence_mask": Correction("sequence_sum", masks=True),
    "geometric_truncate": Correction("sequence", masks=False),
    "geometric_mask": Correction("sequence", masks=True),
    "monitor": None,
    "bypass": None,
}

DIVERGENCES: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
REJECTIONS = tuple(
    f"{level}_{k}"
    for level in ("token", "seq_sum", "seq_mean", "seq_max")
    for k in DIVERGENCES
    if (level, k) != ("seq_max", "k1")  # of a signed divergence
)


@dataclass(frozen=True)
class Corrected:
    """[n] weights of the policy term and [n] which tokens stay, or None."""

    weight: Tensor | None
    keep: Tensor | None


def check_rejection(rejection: Mapping[str, object] | None) -> None:
    """ValueError unless it maps names in REJECTIONS to a bound, or for k1 to a pair of ratios."""
    if rejection is None:
        return
    if not isinstance(rejection, Mapping) or not rejection:
        raise ValueError(
            f"rejection={rejection!r} must map criteria to bounds, as in {{'seq_mean_k3': 0.01}}"
        )
    for name, bound in rejection.items():
        check_choice("rejection", name, REJECTIONS)
        if name.endswith("k1"):
            low, high = _ratio_bounds(name, bound)
            if not 0 < low < high:
                raise ValueError(f"rejection[{name!r}]={bound}: 0 < low < high must hold")
        else:
            check_number(f"rejection[{name!r}]", bound, lambda x: 0 < x < math.inf, "> 0")


def _ratio_bounds(name: str, bound: object) -> tuple[float, float]:
    """(low, high) of a pair; of a single bound > 1, its inverse and itself."""
    if isinstance(bound, (tuple, list)) and len(bound) == 2:
        for value in bound:
            check_number(f"rejection[{name!r}]", value, lambda x: 0 < x < math.inf, "> 0")
        return float(bound[0]), float(bound[1])
    must = "> 1, or a pair of ratios (low, high)"
    check_number(f"rejection[{name!r}]", bound, lambda x: 1 < x < math.inf, must)
    return 1 / float(bound), float(bound)  # type: ignore[arg-type]


def prepare(batch: TokenBatch, spec: LossSpec) -> TokenBatch:
    """The batch with its corrections, as far as they do not depend on the policy's log-probs."""
    if spec.bypass:
        return replace(batch, old=batch.sampler)
    if not spec.corrects or batch.old is None:
        return batch
    done = correct(batch, batch.old, spec)
    weight = batch.weight_is if done.weight is None else done.weight
    return replace(batch, weight_is=weight, keep=done.keep)


def waits_for_logps(batch: TokenBatch, spec: LossSpec) -> bool:
    """Whether the corrections compare the sampler with this policy, for lack of an old one."""
    return spec.corrects and (spec.bypass or batch.old is None)


def spans_sequences(spec: LossSpec) -> bool:
    """Whether the corrections of a token depend on others of its sequence."""
    chosen = CORRECTIONS.get(spec.sampling_correction or "")
    by_weight = chosen is not None and chosen.level != "token"
    vetoes = spec.veto_ratio_min is not None or spec.veto_ratio_max is not None
    return by_weight or vetoes or any(not n.startswith("token") for n in spec.rejection or ())


def correct(batch: TokenBatch, policy: Tensor, spec: LossSpec) -> Corrected:
    """Weights and rejections of the tokens, for log-probs [n] of the policy that is trained."""
    d = log_ratio(policy, batch)
    return Corrected(_weights(d, batch, spec), _keep(d, batch, spec))


def log_ratio(policy: Tensor, batch: TokenBatch) -> Tensor:
    """[n] policy - sampler, 0 where the sampler's log-prob is unknown."""
    assert batch.sampler is not None
    d = policy.detach() - batch.sampler
    return torch.where(batch.sampler.isnan(), 0.0, d)


def _weights(d: Tensor, batch: TokenBatch, spec: LossSpec) -> Tensor | None:
    chosen = CORRECTIONS.get(spec.sampling_correction or "")
    if chosen is None:
        return None
    at_level = LEVELS[chosen.level](d, batch.sequences)
    ratio = clamp_log_ratio(at_level, spec.log_ratio_clamp).exp()
    low = spec.sampling_ratio_min or 0.0
    high = DEFAULT_RATIO_MAX if spec.sampling_ratio_max is None else spec.sampling_ratio_max
    if chosen.masks:
        return torch.where((ratio < low) | (ratio > high), 0.0, ratio)
    return ratio.clamp(low, high)


def _keep(d: Tensor, batch: TokenBatch, spec: LossSpec) -> Tensor | None:
    if not spec.rejects:
        return None
    d = clamp_log_ratio(d, spec.log_ratio_clamp)
    keep = torch.ones_like(d, dtype=torch.bool)
    for name, bound in (spec.rejection or {}).items():
        keep &= ~_beyond(name, bound, d, batch)
    low = math.log(spec.veto_ratio_min) if spec.veto_ratio_min else -math.inf
    high = math.log(spec.veto_ratio_max) if spec.veto_ratio_max else math.inf
    if math.isfinite(low) or math.isfinite(high):
        outliers = ((d < low) | (d > high)).to(d.dtype)
        keep &= (batch.sequences.total(outliers) == 0)[batch.sequence]
    return keep


def _beyond(name: str, bound: object, d: Tensor, batch: TokenBatch) -> Tensor:
    """[n] whether a token fails one criterion; a NaN, which must be seen, does not."""
    level, _, divergence = name.rpartition("_")
    values = DIVERGENCES[divergence](d)
    if level == "seq_max":
        values = batch.sequences.total(values, "max")[batch.sequence]
    else:
        at_level = {"token": "token", "seq_sum": "sequence_sum", "seq_mean": "sequence"}[level]
        values = LEVELS[at_level](values, batch.sequences)
    if divergence == "k1":  # bounds of the ratio sampler / policy: k1 is its logarithm
        low, high = _ratio_bounds(name, bound)
        return (values < math.log(low)) | (values > math.log(high))
    return values > bound  # type: ignore[operator]


def statistics(policy: Tensor, batch: TokenBatch) -> dict[str, Tensor]:
    """How far sampler and policy are apart, detached 0-d tensors.

    Over tokens: "kl" (mean of sampler - policy), "k3", "chi2_token" (mean w^2 - 1) and
    "logp_difference/mean|max" of |sampler - policy|. Over sequences with tokens, whose perplexity
    is exp(-mean log-prob): "chi2_seq", "policy_ppl", "sampler_ppl", "ppl_ratio" (mean policy /
    sampler) and "log_ppl_diff|_abs|_max|_min". Exponents are kept within +-20.
    """
    d = log_ratio(policy, batch)
    bounded, over = d.clamp(-20, 20), batch.sequences
    present = over.lengths > 0
    tokens, sequences = max(d.numel(), 1), present.sum().clamp_min(1)

    def token_mean(x: Tensor) -> Tensor:
        return x.sum() / tokens

    def sequence_mean(x: Tensor) -> Tensor:
        return torch.where(present, x, 0.0).sum() / sequences

    def extreme(x: Tensor) -> Tensor:
        return x.new_zeros(()) if empty else torch.where(present, x, torch.inf).amin()

    empty = d.numel() == 0
    gap, log_ppl = over.mean(-d), over.mean(-policy.detach())
    return {
        "kl": token_mean(-d),
        "k3": token_mean(k3(bounded)),
        "chi2_token": token_mean((2 * bounded).exp()) - (0 if empty else 1),
        "chi2_seq": sequence_mean((2 * over.total(d).clamp(-20, 20)).exp()) - (0 if empty else 1),
        "logp_difference/mean": token_mean(d.abs()),
        "logp_difference/max": d.new_zeros(()) if empty else d.abs().amax(),
        "policy_ppl": sequence_mean(log_ppl.exp()),
        "sampler_ppl": sequence_mean((log_ppl - gap).exp()),
        "ppl_ratio": sequence_mean(gap.exp()),
        "log_ppl_diff": sequence_mean(gap),
        "log_ppl_diff_abs": sequence_mean(gap.abs()),
        "log_ppl_diff_max": -extreme(-gap),
        "log_ppl_diff_min": extreme(gap),
    }


def sampling_statistics(
    policy_per_token_logps: Tensor,
    sampling_per_token_logps: Tensor,
    *,
    completion_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> dict[str, Tensor]:
    """`statistics` of two tensors of log-probs [B, T] (packed: [N] or [1, N]).

    Args:
        policy_per_token_logps: of the policy that is trained.
        sampling_per_token_logps: as the sampler reported them; NaN where unknown.
        completion_mask, cu_seqlens: as in `policy_loss`.

    Raises:
        TypeError, ValueError: as `policy_loss`.
    """
    batch = make_batch(
        policy_per_token_logps,
        torch.zeros_like(policy_per_token_logps),
        completion_mask=completion_mask,
        old_per_token_logps=policy_per_token_logps,
        sampling_per_token_logps=sampling_per_token_logps,
        cu_seqlens=cu_seqlens,
        dtype=torch.promote_types(policy_per_token_logps.dtype, torch.float32),
    )
    assert batch.old is not None
    return statistics(batch.old, batch)
