"""bf16 on a CPU: exponentials straight out of the matrix product.

oneDNN's bf16 product is twice as fast as its fp32 one, but rounds what it returns to bf16. Logits
must not be rounded: that is an error of 2^-9 |z|, some 0.03 nat. Exponentials may: that is 2^-9 of
each, as in any operand of a product. So the product is asked for sigmoid(z - k), taken of its fp32
accumulators before they are rounded. With k near z_target + 48 its argument is far below 0, where
sigmoid is exp; k is a bf16 number, and one more term of each dot product.

Sums of rounded exponentials would be off by 1e-3 where a few entries hold all the mass, so those
above 2^-9 of the sum are computed once more in fp32, which leaves logp within 1e-4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fused_grpo.tiles import Head, TileSums, row_blocks, slices

_SHIFT = (
    48.0  # entries up to e^39 times as likely as the target, and down to e^-39, are represented
)
_LARGEST = 2.0**-12  # sigmoid(x) is e^x to this relative error
_EXACT_SHARE = 2.0**-9
_GROUP = 64


def applies(hidden: Tensor, head: Head, temperature: Tensor | float, entropy: bool) -> bool:
    """Whether logits are plain bf16 products, and nothing but their exponentials is asked for."""
    return (
        hidden.device.type == "cpu"
        and hidden.dtype == head.weight.dtype == torch.bfloat16
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        and head.bias is None
        and head.softcap is None
        and not entropy
        and not isinstance(temperature, Tensor)
        and head.logit_scale == temperature
    )


def exponentials(
    rows: Tensor, target: Tensor, weight: Tensor, tile: int, exps: Tensor
) -> TileSums | None:
    """The forward of a chunk like `tiles.tile_softmax`, with one softmax for the whole row.

    Fills `exps` [c, V] bf16 with exp(z - k), 0 at the target. None where a row is out of range (its
    target e^39 times less likely than another entry, or NaN): then `exps` is of no use.
    """
    width = rows.shape[1]
    x = rows.float()
    z_target = (x * weight[target].float()).sum(1)
    offset = (z_target + _SHIFT).bfloat16()
    k = offset.float()
    extended = torch.cat([rows, offset[:, None]], 1)
    staged = weight.new_full((min(tile, weight.shape[0]), width + 1), -1.0)
    for v in slices(weight.shape[0], tile):
        w = staged[: v.stop - v.start]
        w[:, :width] = weight[v]
        exps[:, v] = torch.ops.mkldnn._linear_pointwise(extended, w, None, "sigmoid", [], "")
    exps[torch.arange(rows.shape[0], device=exps.device), target] = 0.0
    mass, row, column = _sums_and_largest(exps)
    if mass is None:
        return None
    for p in slices(row.numel(), tile):
        r, c = row[p], column[p]
        exact = ((x[r] * weight[c].float()).sum(1) - k[r]).exp()
        mass.index_add_(0, r, exact - exps[r, c].float())
    some = mass > 0
    return TileSums(
        top=torch.where(some, k + mass.log(), 0.0)[:, None],
        mass=some.float()[:, None],
        q_top=torch.where(some, mass, 1.0)[:, None],
        spread=None,
        z_target=z_target,
    )


def _sums_and_largest(exps: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
    """[c] sums of the rows of `exps` [c, V], and where their largest entries are: rows and columns.

    The sums are None where an entry is too large for sigmoid to be exp, or NaN.
    """
    mass = torch.empty(exps.shape[0], device=exps.device)
    grouped = exps.shape[1] - exps.shape[1] % _GROUP
    rows, columns = [], []
    in_range = True
    for b in row_blocks(exps):
        mass[b] = exps[b].float().sum(1)
        above = (mass[b] * _EXACT_SHARE)[:, None]
        groups, rest = exps[b, :grouped].unflatten(1, (-1, _GROUP)), exps[b, grouped:]
        largest = groups.amax(-1)
        for part in (largest, rest):
            in_range = in_range and bool((part <= _LARGEST).all())
        row, group = (largest > above).nonzero(as_tuple=True)
        hit, offset = (groups[row, group] > above[row]).nonzero(as_tuple=True)
        last_row, last = (rest > above).nonzero(as_tuple=True)
        rows += [row[hit] + b.start, last_row + b.start]
        columns += [group[hit] * _GROUP + offset, last + grouped]
    return mass if in_range else None, torch.cat(rows), torch.cat(columns)
