"""bf16 on a CPU: exponentials straight out of the matrix product.

oneDNN's bf16 product is twice as fast as its fp32 one, but rounds what it returns to bf16. Logits
must not be rounded: that is an error of 2^-9 |z|, some 0.03 nat. Exponentials may: that is 2^-9 of
each, as in any operand of a product. So the product is asked for sigmoid(z - k), taken of its fp32
accumulators before they are rounded. With k near z_target + 48 its argument is far below 0, where
sigmoid is exp.

Two things keep the sum of rounded exponentials exact, and logp within 1e-4:

* Entries above 2^-9 of the sum are computed once more in fp32: few entries do not average.
* Equal logits would round alike, and their errors add up instead of averaging (an untrained head,
  a padded vocabulary). So column v's logit is shifted by a known d_v, spread over several bf16
  spacings, and the shift is taken out again in fp32: subtractive dither, whose error has mean 0
  whatever the logits are (Schuchman 1964). 512 equal neighbours that hold all the mass, the worst
  case, are off by 8e-5.

Both k and d_v are one more term of each dot product, exact in bf16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from fused_grpo.memory import slices
from fused_grpo.tiles import GROUP, Head, TileSums, rows_in_tile

# Entries up to e^39 times as likely as the target, and down to e^-39, are represented.
_SHIFT = 48.0
_LARGEST = 2.0**-12  # sigmoid(x) is e^x to this relative error
_EXACT_SHARE = 2.0**-9
_DITHER = 2.0**-5  # 4 to 8 spacings of bf16
_GATHERED = 512  # rows of the weight at a time: they stay in cache


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
    rows: Tensor,
    target: Tensor,
    weight: Tensor,
    tile: int,
    exps: list[Tensor] | None,
    groups: Tensor | None = None,
) -> TileSums | None:
    """The forward of a chunk like `tiles.tile_softmax`, with one softmax for the whole row.

    Fills `exps`, bf16 tiles, with exp(z - k), 0 at the target, where they are given, and `groups`
    with the sums of its groups before they were rounded. None where a row is out of range (its
    target e^39 times less likely than the others, or NaN): then both are of no use.
    """
    vocab = weight.shape[0]
    x = rows.float()
    z_target = (x * weight.index_select(0, target).float()).sum(1)
    k = (z_target + _SHIFT).bfloat16()
    shift = dither(vocab)
    undither = shift.float().neg_().exp_()
    product = _sigmoids(rows, k, weight, shift, min(tile, vocab))
    block = x.new_zeros(rows.shape[0], min(tile, vocab) + -min(tile, vocab) % GROUP)
    sums = _Sums(torch.zeros_like(z_target))
    for j, v in enumerate(slices(vocab, tile)):
        e = product(v)
        column = target - v.start
        hit = rows_in_tile(column, e.shape[1])
        e[hit, column[hit]] = 0.0
        block[:, : e.shape[1]].copy_(e).mul_(undither[v])
        block[:, e.shape[1] :] = 0.0
        of_groups = sums.add(block, v.start)
        if groups is not None:
            first, last = v.start // GROUP, -(-v.stop // GROUP)
            groups[:, first:last] = of_groups[:, : last - first]
        if exps is not None:
            exps[j][:, : e.shape[1]] = block[:, : e.shape[1]]
    if not bool((sums.mass <= _LARGEST).all()):  # or NaN
        return None
    mass = sums.exact(x, weight, k.float())
    others = mass > 0
    return TileSums(
        top=torch.where(others, k.float() + mass.log(), 0.0)[:, None],
        mass=others.float()[:, None],
        q_top=torch.where(others, mass, 1.0)[:, None],
        spread=None,
        z_target=z_target,
    )


def _sigmoids(
    rows: Tensor, k: Tensor, weight: Tensor, shift: Tensor, tile: int
) -> Callable[[slice], Tensor]:
    """v -> [c, v] sigmoid(z - k + shift): k and the shift are two more columns of the operands."""
    width = weight.shape[1]
    extended = torch.cat([rows, torch.stack([-k, torch.ones_like(k)], 1)], 1)
    staged = weight.new_ones(tile, width + 2)

    def product(v: slice) -> Tensor:
        w = staged[: v.stop - v.start]
        w[:, :width], w[:, -1] = weight[v], shift[v]
        return torch.ops.mkldnn._linear_pointwise(extended, w, None, "sigmoid", [], "")

    return product


@functools.lru_cache(maxsize=4)
def dither(vocab: int) -> Tensor:
    """[vocab] bf16 shifts with a triangular density on +-_DITHER, evenly spread over neighbours.

    Multiples of the golden ratio, modulo 1, through the inverse of the distribution.
    """
    u = torch.arange(vocab, dtype=torch.float64).mul_((5**0.5 - 1) / 2).frac_()
    rising = (2 * u).sqrt() - 1
    falling = 1 - (2 - 2 * u).sqrt()
    return torch.where(u < 0.5, rising, falling).mul_(_DITHER).bfloat16()


class _Sums:
    """Sums of a chunk's rows, and the entries that must not enter them rounded."""

    def __init__(self, mass: Tensor) -> None:
        self.mass = mass  # [c]
        nowhere = mass.new_empty(0, dtype=torch.int64)
        self.large = nowhere, nowhere, mass.new_empty(0)  # rows, columns and rounded values

    def add(self, e: Tensor, start: int) -> Tensor:
        """Adds a tile e [c, v], whose first column is `start`; v is a multiple of GROUP.

        Returns the sums of its groups.
        """
        groups = e.unflatten(1, (-1, GROUP))
        sums = groups.sum(-1)
        self.mass += sums.sum(1)
        # the whole sum is at least what is known so far; only a group above it can hold an entry
        above = self.mass * _EXACT_SHARE
        row, group = (sums > above[:, None]).nonzero(as_tuple=True)
        values = groups.flatten(0, 1).index_select(0, row * groups.shape[1] + group)
        hit, offset = (values > above[row, None]).nonzero(as_tuple=True)
        new = row[hit], group[hit] * GROUP + (offset + start), values[hit, offset]
        both = [torch.cat(pair) for pair in zip(self.large, new, strict=True)]
        still = both[2] > above[both[0]]
        self.large = both[0][still], both[1][still], both[2][still]
        return sums

    def exact(self, x: Tensor, weight: Tensor, k: Tensor) -> Tensor:
        """[c] the sums with their largest entries computed in fp32."""
        row, column, value = self.large
        z = torch.empty_like(value)
        for some in slices(row.numel(), _GATHERED):
            w = weight.index_select(0, column[some])
            z[some] = (x.index_select(0, row[some]) * w).sum(1)
        return self.mass.index_add(0, row, z.sub_(k[row]).exp_().sub_(value))
