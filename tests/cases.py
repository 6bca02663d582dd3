"""Ragged batches of everything a loss call takes, padded and packed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fused_grpo.reference import reference_logprobs

HEAD_OPTIONS = ("temperature", "logit_scale", "softcap")
# tensors of a second head, which the oracle sees in float64
REFERENCE_HEAD = ("ref_hidden", "ref_weight", "ref_bias")

# Log-ratios are drawn near these values. They stay away from every bound that the tests use
# (log 0.8, log 0.9, log 1.2, log 1.28, log 1.7, +-0.5): rounding must not decide who is clipped.
OLD_GRID = (-0.6, -0.35, -0.15, -0.02, 0.02, 0.1, 0.4, 0.8, 1.8)
REF_GRID = (-1.2, -0.3, -0.05, 0.02, 0.2, 0.8)


LOSS_TYPES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo", "max_completion_length": 11},
    "dapo": {"loss_type": "dapo"},
    "dapo_items": {"loss_type": "dapo", "num_items_in_batch": 50},
}
LEVELS = ("token", "sequence")
DEFAULT_DTYPE = torch.float64


@dataclass
class Case:
    """Arguments of ``grpo_loss``: the head's leaves, the batch's tensors, and the options."""

    hidden: Tensor
    weight: Tensor
    ids: Tensor
    advantages: Tensor
    bias: Tensor | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def mask(self) -> Tensor:
        return self.tensors.get("completion_mask", torch.ones_like(self.ids)).bool()

    def with_options(self, **options: Any) -> Case:
        return replace(self, options=self.options | options)

    def leaves(self, convert: Callable[[Tensor], Tensor] = torch.clone) -> dict[str, Tensor]:
        named = {"hidden": self.hidden, "weight": self.weight, "bias": self.bias}
        return {k: convert(x.detach()) for k, x in named.items() if x is not None}


def ragged_mask(rows: int, width: int, kind: str = "ragged") -> Tensor:
    """[rows, width]: 'ones'; 'ragged' right padding; 'holes': zeros inside and the last row empty;
    'tail': only the last two tokens of each row count."""
    mask = torch.ones(rows, width, dtype=torch.long)
    if kind == "tail":
        mask[:, :-2] = 0
    if kind in ("ragged", "holes"):
        for row in range(rows):
            mask[row, max(1, width - 3 * row) :] = 0
    if kind == "holes":
        mask[0, 1:4] = 0
        mask[1, 0] = 0
        mask[-1] = 0
    return mask


def make_case(
    *,
    seed: int = 0,
    rows: int = 6,
    width: int = 11,
    dim: int = 24,
    vocab: int = 129,
    dtype: torch.dtype | None = None,
    mask: str = "holes",
    bias: bool = False,
    old: bool = True,
    ref: bool = True,
    logit_std: float = 2.0,
    **options: Any,
) -> Case:
    """A padded batch with everything a loss call may need, inputs rounded to ``dtype``."""
    dtype = DEFAULT_DTYPE if dtype is None else dtype
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    # Both signs, so that each side of the clip is met.
    sign = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(rows)[:rows]
    case = Case(
        hidden=normal(rows, width, dim).to(dtype),
        weight=(normal(vocab, dim) * logit_std / math.sqrt(dim)).to(dtype),
        ids=torch.randint(vocab, (rows, width), generator=g),
        advantages=(sign * (0.3 + normal(rows).abs())).to(vector_dtype(dtype)),
        bias=normal(vocab).to(dtype) if bias else None,
        options=options,
    )
    counted = ragged_mask(rows, width, mask).bool()
    if mask != "ones":
        case.tensors["completion_mask"] = counted.long()
        case.ids[~counted] = -100
    logps = exact_logps(case)
    if old:
        case.tensors["old_per_token_logps"] = logps - log_ratios(counted, options, g)
    if ref:
        case.tensors["ref_per_token_logps"] = logps + from_grid(REF_GRID, counted.shape, g)
    for name in ("old_per_token_logps", "ref_per_token_logps"):
        if name in case.tensors:
            case.tensors[name] = case.tensors[name].to(vector_dtype(dtype))
    return case


def with_reference(case: Case, *, distance: float = 0.3, dim: int | None = None) -> Case:
    """A reference head instead of its log-probabilities: that of the case, moved by `distance`, or
    one of another width `dim`."""
    g = torch.Generator().manual_seed(99)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    hidden, weight = case.hidden.double(), case.weight.double()
    if dim is None:
        hidden = hidden + distance * normal(*hidden.shape)
        size = weight.std() if weight.numel() > 1 else weight.abs().squeeze()
        weight = weight + distance * size * normal(*weight.shape)
    else:
        hidden = normal(*hidden.shape[:-1], dim)
        weight = 2 * normal(weight.shape[0], dim) / math.sqrt(dim)
    tensors = {k: v for k, v in case.tensors.items() if k != "ref_per_token_logps"}
    tensors |= {
        "ref_hidden": hidden.to(case.hidden.dtype),
        "ref_weight": weight.to(case.weight.dtype),
    }
    if case.bias is not None:
        moved = case.bias.double() + distance * normal(*case.bias.shape)
        tensors["ref_bias"] = moved.to(case.bias.dtype)
    return replace(case, tensors=tensors)


def vector_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the per-token vectors that go with a head of ``dtype``."""
    return torch.promote_types(dtype, torch.float32)


def from_grid(grid: Sequence[float], shape: Sequence[int], g: torch.Generator) -> Tensor:
    values = torch.tensor(grid, dtype=torch.float64)
    jitter = 0.01 * (torch.rand(shape, generator=g, dtype=torch.float64) - 0.5)
    return values[torch.randint(len(grid), shape, generator=g)] + jitter


def log_ratios(counted: Tensor, options: dict[str, Any], g: torch.Generator) -> Tensor:
    """Per-token log-ratios; at the sequence level their mean over a row is one of the grid."""
    if options.get("importance_sampling_level", "token") == "token":
        return from_grid(OLD_GRID, counted.shape, g)
    noise = torch.randn(counted.shape, generator=g, dtype=torch.float64) * 0.3 * counted
    noise = noise - noise.sum(1, keepdim=True) / counted.sum(1, keepdim=True).clamp(min=1)
    return noise + from_grid(OLD_GRID, (counted.shape[0], 1), g)


def exact_logps(case: Case) -> Tensor:
    """Log-probabilities of the counted tokens in float64, zeros elsewhere."""
    head = {k: v for k, v in case.options.items() if k in HEAD_OPTIONS}
    leaves = case.leaves(Tensor.double)
    targets = case.ids.masked_fill(~case.mask, -100)
    return reference_logprobs(
        leaves.pop("hidden"), leaves.pop("weight"), targets, **leaves, **head
    )[0]


def pack(case: Case) -> Case:
    """The same sequences back to back, without the padding on their right (holes stay)."""
    rows, width = case.ids.shape
    position = torch.arange(1, width + 1).expand(rows, width)
    lengths = (position * case.mask).amax(dim=1)
    keep = position <= lengths[:, None]
    tensors = {k: v[keep] if v.shape[:2] == keep.shape else v for k, v in case.tensors.items()}
    tensors["cu_seqlens"] = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)
    options = {
        k: (v[keep] if isinstance(v, Tensor) and v.shape[:2] == keep.shape else v)
        for k, v in case.options.items()
    }
    per_token = case.advantages.shape == keep.shape
    advantages = case.advantages[keep] if per_token else case.advantages
    if advantages.shape == (rows,) and keep.sum() == rows:  # of sequences, or of tokens?
        advantages = advantages[None] if per_token else advantages[:, None]
    return replace(
        case,
        hidden=case.hidden[keep],
        ids=case.ids[keep],
        advantages=advantages,
        tensors=tensors,
        options=options,
    )
