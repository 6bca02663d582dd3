"""Batches and option sets for the tests of objectives, and both ways to evaluate them."""

from __future__ import annotations

import math
from typing import Any

import formulas
import torch
from cases import Case, exact_logps, make_case, pack
from torch import Tensor

from fused_grpo import grpo_loss, policy_loss
from fused_grpo.objectives import LOSS_TYPES

# every objective with its options at other than the default values
OBJECTIVES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "grpo_sequence": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "bnpo": {"loss_type": "bnpo", "delta": 1.7},
    "dr_grpo": {"loss_type": "dr_grpo", "max_completion_length": 13},
    "dapo": {"loss_type": "dapo", "epsilon_low": 0.1, "epsilon_high": 0.28},
    "dapo_dual": {"dual_clip": 1.7},
    "dapo_dual_below_clip": {"dual_clip": 1.05, "epsilon_high": 0.28},
    "dapo_sum": {"importance_sampling_level": "sequence_sum", "delta": 4.0},
    "gspo": {"loss_type": "gspo", "epsilon_low": 0.05, "epsilon_high": 0.07},
    "gspo_token": {"loss_type": "gspo_token", "dual_clip": 3.0},
    "luspo": {"loss_type": "luspo"},
    "rloo": {"loss_type": "rloo"},
    "cispo": {"loss_type": "cispo"},
    "cispo_bounds": {"loss_type": "cispo", "ratio_min": 0.8, "ratio_max": 1.2},
    "cispo_sequence": {"loss_type": "cispo", "importance_sampling_level": "sequence"},
    "sapo": {"loss_type": "sapo"},
    "sapo_sequence": {
        "loss_type": "sapo",
        "importance_sampling_level": "sequence",
        "sapo_temperature_pos": 0.8,
        "sapo_temperature_neg": 1.4,
    },
    "vespo": {"loss_type": "vespo"},
    "vespo_shapes": {
        "loss_type": "vespo",
        "vespo_k_pos": 1.1,
        "vespo_lambda_pos": 1.3,
        "vespo_k_neg": 0.7,
        "vespo_lambda_neg": 0.4,
    },
    "gmpo": {"loss_type": "gmpo", "epsilon_low": 0.3, "epsilon_high": 0.5},
    "reinforce": {"loss_type": "reinforce"},
    "importance_sampling": {"loss_type": "importance_sampling"},
    "masked_importance_sampling": {"loss_type": "masked_importance_sampling"},
    "dppo_tv": {"loss_type": "dppo_tv", "divergence_low": 0.02, "divergence_high": 0.03},
    "dppo_kl": {"loss_type": "dppo_kl", "divergence_low": 1e-3, "ratio_max": 1.4},
    "prime": {"loss_type": "prime", "divergence_low": 0.02, "log_ratio_penalty": 0.1},
    "prime_ipo": {"loss_type": "prime_ipo", "divergence_high": 0.02},
    "dro": {"loss_type": "dro", "log_ratio_penalty": 0.15},
    "clip_cov": {"loss_type": "clip_cov", "cov_ratio": 1.0, "cov_low": 0.5, "cov_high": 3.0},
    "kl_cov": {"loss_type": "kl_cov", "cov_ratio": 0.2, "cov_coef": 0.3},
}
REDUCTIONS: dict[str, dict[str, Any]] = {
    "own": {},
    "sequence_mean": {"aggregation": "sequence_mean"},
    "global_sequence_mean": {"aggregation": "sequence_mean", "num_sequences": 17},
    "nonempty_sequence_mean": {"aggregation": "nonempty_sequence_mean"},
    "sequence_sum": {"aggregation": "sequence_sum"},
    "nonempty_sequence_sum": {"aggregation": "nonempty_sequence_sum"},
    "global_token_mean": {"aggregation": "token_mean", "num_items_in_batch": 77},
    "token_sum": {"aggregation": "token_sum"},
    "fixed_length": {"aggregation": "fixed_length", "max_completion_length": 9},
    "nonempty_fixed_length": {"aggregation": "nonempty_fixed_length", "max_completion_length": 9},
    "group_mean": {"aggregation": "group_mean"},
}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "given": {"given": True},
    "token_truncate": {"sampling_correction": "token_truncate", "sampling_ratio_max": 1.3},
    "token_mask": {
        "sampling_correction": "token_mask",
        "sampling_ratio_min": 0.8,
        "sampling_ratio_max": 1.3,
    },
    "sequence_truncate": {"sampling_correction": "sequence_truncate"},
    "sequence_mask": {"sampling_correction": "sequence_mask", "sampling_ratio_max": 2.0},
    "geometric_truncate": {"sampling_correction": "geometric_truncate", "sampling_ratio_max": 1.1},
    "geometric_mask": {"sampling_correction": "geometric_mask", "sampling_ratio_min": 0.97},
    "monitor": {"sampling_correction": "monitor"},
    "bypass": {"sampling_correction": "bypass"},
    "token_rejection": {"rejection": {"token_k1": 1.3, "token_k3": 0.02}},
    "sequence_rejection": {"rejection": {"seq_mean_k2": 0.03, "seq_sum_k1": (0.2, 4.0)}},
    "max_rejection": {"rejection": {"seq_max_k3": 0.1}, "sampling_correction": "token_truncate"},
    "veto": {"veto_ratio_min": 0.65, "veto_ratio_max": 1.6},
}


def applies(objective: dict[str, Any], correction: dict[str, Any]) -> bool:
    """Whether the package takes the pair; that it refuses the others is tested apart."""
    mode = correction.get("sampling_correction", "")
    loss_type = objective.get("loss_type", "dapo")
    if mode == "bypass":
        return loss_type != "reinforce"
    return loss_type != "vespo" or mode in ("", "monitor", "token_truncate", "token_mask")


GROUPS = torch.tensor([4, 4, 7, 7, 7, 2])


def reduced(options: dict[str, Any], reduction: dict[str, Any]) -> dict[str, Any]:
    """The options with another reduction; the length of dr_grpo belongs to its own."""
    if "aggregation" in reduction:
        options = {k: v for k, v in options.items() if k != "max_completion_length"}
    return options | reduction


def make(
    objective: dict[str, Any],
    reduction: dict[str, Any],
    correction: dict[str, Any],
    *,
    old: bool = True,
    dtype: torch.dtype = torch.float64,
    **more: Any,
) -> Case:
    """A padded case with holes, an empty row, and the tensors that the options ask for."""
    options = {k: v for k, v in (objective | correction | more).items() if k != "given"}
    options = reduced(options, reduction)
    case = make_case(
        vocab=61, old=old, ref=bool(options.get("beta")), bias=True, dtype=dtype, **options
    )
    if reduction.get("aggregation") == "group_mean":
        case.tensors["group_ids"] = GROUPS
    sampled = {"sampling_correction", "rejection", "veto_ratio_min", "veto_ratio_max"}
    if sampled & set(options):
        case.tensors["sampling_per_token_logps"] = sampler_logps(case)
    if correction.get("given"):
        ratios = torch.linspace(0.0, 1.9, case.ids.numel(), dtype=case.advantages.dtype)
        case.tensors["importance_sampling_ratio"] = ratios.view(case.ids.shape)
    drop_unused(case)
    return case


def sampler_logps(case: Case) -> Tensor:
    """Near the old log-probs, two rows and a token far off, two unknown."""
    g = torch.Generator().manual_seed(5)
    base = case.tensors.get("old_per_token_logps", exact_logps(case))
    noise = 0.25 * torch.randn(case.ids.shape, generator=g, dtype=torch.float64)
    noise[0] -= 0.3
    noise[2] += 0.2
    noise[1, 3] = 0.6
    noise[0, 6] = noise[3, 0] = math.nan
    return (base + noise).to(base.dtype)


def drop_unused(case: Case) -> None:
    """Old log-probabilities where nothing reads them: they would be refused."""
    o = case.options
    row = LOSS_TYPES[o.get("loss_type", "dapo")]
    reads = row.uses_old or o.get("use_bias_correction_kl")
    reads = reads or "sampling_per_token_logps" in case.tensors
    reads = reads or o.get("off_policy_mask_threshold") is not None
    if not reads or o.get("sampling_correction") == "bypass":
        case.tensors.pop("old_per_token_logps", None)


HEAD = ("temperature", "logit_scale", "softcap")


def formula_batch(case: Case, logps: Tensor, entropy: Tensor | None) -> formulas.Batch:
    """The case for `formulas`, in float64, with masked positions of NaN."""
    mask, t = case.mask, case.tensors

    def wide(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        x = x.double()
        return (x if x.shape == mask.shape else x.view(-1, 1)).expand(mask.shape)

    a = wide(case.advantages)
    assert a is not None
    groups = t.get("group_ids")
    return formulas.Batch(
        logps=logps,
        mask=mask,
        advantages=a,
        old=wide(t.get("old_per_token_logps")),
        ref=wide(t.get("ref_per_token_logps")),
        sampler=wide(t.get("sampling_per_token_logps")),
        given_ratio=wide(t.get("importance_sampling_ratio")),
        entropy=entropy,
        groups=None if groups is None else groups.tolist(),
        options={k: v for k, v in case.options.items() if k not in (*HEAD, "entropy")},
    )


def leaves_of(case: Case) -> tuple[Tensor, Tensor]:
    """[B, T] differentiable log-probabilities and entropies of the case, 0 where masked."""
    g = torch.Generator().manual_seed(9)
    logps = exact_logps(case).detach()
    entropy = torch.rand(logps.shape, generator=g, dtype=torch.float64) * 3
    return logps.requires_grad_(), entropy.requires_grad_()


def by_formula(case: Case) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(loss, dL/dlogps, dL/dentropy) of the independent formulas."""
    logps, entropy = leaves_of(case)
    weights = case.tensors.get("token_weights")
    value = formulas.loss(formula_batch(case, logps, entropy), weights)
    value.backward()
    return value.detach(), logps.grad, entropy.grad


def by_policy_loss(case: Case) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The same three of `policy_loss`."""
    logps, entropy = leaves_of(case)
    options = {k: v for k, v in case.options.items() if k not in (*HEAD, "entropy")}
    out = policy_loss(logps, case.advantages, entropies=entropy, **case.tensors, **options)
    out.loss.backward()
    return out.loss.detach(), logps.grad, entropy.grad


def from_head(case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, gradients) of the formulas on full logits."""
    leaves = {k: v.requires_grad_() for k, v in case.leaves(Tensor.double).items()}
    logits = leaves["hidden"] @ leaves["weight"].T + leaves["bias"]
    log_p = torch.log_softmax(logits, -1)
    ids = case.ids.masked_fill(~case.mask, 0)
    logps = log_p.gather(-1, ids[..., None])[..., 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    value = formulas.loss(formula_batch(case, logps, entropy), case.tensors.get("token_weights"))
    value.backward()
    return value.detach(), {k: v.grad for k, v in leaves.items()}


def fused(
    case: Case, layout: str = "padded", chunk_bytes: int = 1 << 13
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """(loss, gradients, metrics) of `grpo_loss`; the gradient of hidden states comes padded."""
    call = pack(case) if layout == "packed" else case
    leaves = {k: v.requires_grad_() for k, v in call.leaves().items()}
    out = grpo_loss(
        leaves["hidden"],
        leaves["weight"],
        call.ids,
        call.advantages,
        bias=leaves["bias"],
        chunk_bytes=chunk_bytes,
        **call.tensors,
        **call.options,
    )
    out.loss.backward()
    grads = {k: v.grad for k, v in leaves.items()}
    if layout == "packed":
        rows, width = case.ids.shape
        position = torch.arange(1, width + 1).expand(rows, width)
        keep = position <= (position * case.mask).amax(1, keepdim=True)
        padded = torch.zeros_like(case.hidden)
        padded[keep] = grads["hidden"]
        grads["hidden"] = padded
    return out.loss.detach(), grads, out.metrics
