"""What a loss logs: detached 0-d tensors over the counted tokens, no host synchronisation."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fused_grpo import corrections
from fused_grpo.batch import TokenBatch
from fused_grpo.objectives.spec import LossSpec
from fused_grpo.objectives.terms import Terms, token_terms
from fused_grpo.passes import TokenValues, Upstream


@torch.no_grad()
def metrics(
    values: TokenValues, upstream: Upstream | None, batch: TokenBatch, spec: LossSpec
) -> dict[str, Tensor]:
    """Of a loss at `values` [n], with its gradients where they were formed. See `grpo_loss` for the
    names."""
    logps, entropy = values.logps.detach(), values.entropy
    wanted = entropy.detach() if entropy is not None and spec.needs_entropy else None
    kl = None if values.kl is None else values.kl.detach()
    terms = token_terms(logps, batch, spec, wanted, kl)
    out = _ratio_metrics(terms, spec)
    out["num_tokens"] = torch.tensor(float(logps.numel()), device=logps.device)
    if terms.kl is not None:
        out["kl"] = mean(terms.kl.value)
        if terms.kl.input_clamped is not None and terms.kl.value_clamped is not None:
            out["kl/log_ratio_clamped"] = mean(terms.kl.input_clamped)
            out["kl/clamped"] = mean(terms.kl.value_clamped)
    if entropy is not None:
        out["entropy"] = mean(entropy.detach())
    if terms.active is not None:
        out["policy_mask/dropped"] = mean(~terms.active)
    if values.outside is not None and values.support_size is not None:
        out["support/size"] = mean(values.support_size)
        out["support/target_outside"] = mean(values.outside)
    if upstream is not None:
        idle = upstream.logps == 0
        for part in (upstream.entropy, upstream.kl):
            idle = idle if part is None else idle & (part == 0)
        out["zero_coefficient_fraction"] = mean(idle)
    if batch.sampler is not None:
        out |= _sampling_metrics(terms, batch)
    return out


def _ratio_metrics(terms: Terms, spec: LossSpec) -> dict[str, Tensor]:
    view = terms.view
    ratio, log_ratio = view.ratio, view.log_ratio
    out = {}
    if spec.row.clipped is not None:
        low, high = spec.row.clipped(view, spec)
        out["clip_ratio/low_mean"] = mean(low)
        out["clip_ratio/high_mean"] = mean(high)
        out["clip_ratio/region_mean"] = mean(low | high)
    tiny = torch.finfo(ratio.dtype).tiny
    return out | {
        "ratio/mean": mean(ratio),
        "ratio/min": extreme(ratio, torch.amin),
        "ratio/max": extreme(ratio, torch.amax),
        "log_ratio/min": extreme(log_ratio, torch.amin),
        "log_ratio/max": extreme(log_ratio, torch.amax),
        "log_ratio/clamped": mean(log_ratio.abs() > (spec.log_ratio_clamp or math.inf)),
        "effective_sample_size": ratio.sum().square()
        / (ratio.numel() * ratio.square().sum()).clamp_min(tiny),
    }


def _sampling_metrics(terms: Terms, batch: TokenBatch) -> dict[str, Tensor]:
    """The gap to the sampler, and what the corrections made of it."""
    # the policy that the sampler is compared with: the old one, where it is not the sampler itself
    view = terms.view
    compared = view.logps if batch.old is None or batch.old is batch.sampler else batch.old
    out = {f"sampling/{k}": v for k, v in corrections.statistics(compared, batch).items()}
    if terms.keep is not None:
        out["sampling/rejected"] = mean(~terms.keep)
    if view.weight is not None:
        w, tiny = view.weight, torch.finfo(view.weight.dtype).tiny
        out |= {
            "sampling/importance_ratio/mean": mean(w),
            "sampling/importance_ratio/min": extreme(w, torch.amin),
            "sampling/importance_ratio/max": extreme(w, torch.amax),
            "sampling/effective_sample_size": w.sum().square()
            / (w.numel() * w.square().sum()).clamp_min(tiny),
        }
    return out


def mean(x: Tensor) -> Tensor:
    return x.float().sum() / max(x.numel(), 1)


def extreme(x: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    return reduce(x) if x.numel() else x.new_zeros(())
