"""The forward on a CPU: exponentials straight out of the matrix product.

oneDNN's product can take a sigmoid of its fp32 accumulators on their way to memory, and
sigmoid(z - k) is exp(z - k) far below 0. With one k for all logits, the columns' bias, a softmax is
a product and a sum: no maximum, no pass of exponentials. Rows whose logits do not fit that k are
computed the other way (`tiles.tile_softmax`), each on its own account.

In bf16 the product is twice as fast as in fp32, but rounds what it returns. Logits must not be
rounded: that is an error of 2^-9 |z|, some 0.03 nat. Exponentials may: that is 2^-9 of each, as in
any operand of a product. Two things keep their sum exact, and logp within 1e-4:

* Entries above 2^-9 of the sum are computed once more in fp32: few entries do not average.
* Equal logits would round alike, and their errors add up instead of averaging (an untrained head,
  a padded vocabulary). So column v's logit is shifted by a known d_v, spread over several bf16
  spacings, and the shift is taken out again in fp32: subtractive dither, whose error has mean 0
  whatever the logits are (Schuchman 1964). 512 equal neighbours that hold all the mass, the worst
  case, are off by 8e-5.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from fused_grpo.memory import slices
from fused_grpo.tiles import (
    GROUP,
    Head,
    LogitTiles,
    TileSums,
    add_up_groups,
    linear_cpu,
    rows_in_tile,
)

_SHIFT = 60.0
# Kept exponentials are raised by as much as the largest allow: their products with small weights
# would be denormal, which bf16 products of the hardware take for 0.
_RAISED = 2.0**80
_RAISED_SHIFT = _SHIFT - math.log(_RAISED)
# sigmoid(x) is e^x to this relative error: logits up to 51, or 44
_LARGEST = {torch.bfloat16: 2.0**-12, torch.float32: 2.0**-22}
# Entries below 2^-126 are lost; this much per vocabulary entry makes them 1e-7 of the sum.
_SMALLEST_MEAN = 2.0**-126 * 1e7
_LEAST_TARGET = -20.0  # below it not even the attempt pays: the other logits are mostly as low
_MIN_VOCAB = 4096  # in fp32
_EXACT_SHARE = 2.0**-9
_DITHER = 2.0**-5  # 4 to 8 spacings of bf16
_GATHERED = 512  # rows of the weight at a time: they stay in cache


def applies(hidden: Tensor, head: Head, temperature: Tensor | float, entropy: bool) -> bool:
    """Whether logits are plain products, and nothing but their exponentials is asked for."""
    if (
        hidden.device.type != "cpu"
        or not torch.backends.mkldnn.is_available()
        or head.softcap is not None
        or head.lora_weight is not None
        or entropy
        or isinstance(temperature, Tensor)
    ):
        return False
    if torch.float64 in (hidden.dtype, head.weight.dtype):
        return False
    return _in_bf16(hidden, head, temperature) or head.weight.shape[0] >= _MIN_VOCAB


def _in_bf16(hidden: Tensor, head: Head, temperature: Tensor | float) -> bool:
    return (
        hidden.dtype == head.weight.dtype == torch.bfloat16
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        and head.bias is None
        and head.logit_scale == temperature
    )


def exponentials(
    logits: LogitTiles, rows: Tensor, target: Tensor, tile: int, exps: list[Tensor] | None
) -> tuple[TileSums, Tensor, Tensor]:
    """The forward of a chunk [c, H] like `tiles.tile_softmax`, with one softmax for the whole row.

    Fills `exps`, tile by tile, with _RAISED exp(z - k), 0 at the target, where they are given. Also
    returns the sums of their groups [c, V / GROUP], before they were rounded, and [c] which rows
    are out of range, NaN among them: theirs are of no use.
    """
    head, x = logits.head, logits.x
    vocab, in_bf16 = head.weight.shape[0], _in_bf16(rows, head, logits.temperature)
    z_target = (x * head.weight.index_select(0, target).to(x.dtype)).sum(1)
    offset = x.new_full((vocab,), -_SHIFT)
    if head.bias is not None:
        bias = head.bias.to(x.dtype) * (head.logit_scale / logits.temperature)
        z_target += bias.index_select(0, target)
        offset += bias
    groups = x.new_zeros(len(x), -(-vocab // GROUP))
    bad = ~(z_target >= _LEAST_TARGET)  # or NaN
    tiles = slices(0 if bool(bad.all()) else vocab, tile)
    product = _Rounded(logits, rows, offset, tile) if in_bf16 else _Plain(logits, offset)
    for j, v in enumerate(tiles):
        product(v, target, groups, None if exps is None else exps[j])
    mass = product.exact(groups.sum(1))
    largest = _LARGEST[torch.bfloat16 if in_bf16 else torch.float32]
    bad |= ~((mass >= vocab * _SMALLEST_MEAN * _RAISED) & (mass <= largest * _RAISED))
    top, ones = _RAISED_SHIFT + mass.log()[:, None], torch.ones_like(mass)[:, None]
    return TileSums(top, ones, mass[:, None], None, z_target), groups, bad


def _without_target(e: Tensor, column: Tensor) -> Tensor:
    """e [c, v] with 0 at the targets, whose columns are counted from its first."""
    hit = rows_in_tile(column, e.shape[1])
    e[hit, column[hit]] = 0.0
    return e


class _Plain:
    """_RAISED exp(z - k) of a tile, in fp32."""

    def __init__(self, logits: LogitTiles, offset: Tensor) -> None:
        self.logits, self.offset = logits, offset

    def __call__(self, v: slice, target: Tensor, groups: Tensor, out: Tensor | None) -> None:
        weight = self.logits.weight_tile(v)
        e = linear_cpu(self.logits.x, weight, self.offset[v], "sigmoid")
        e = _without_target(e, target - v.start)
        whole = e if e.shape[1] % GROUP == 0 else F.pad(e, (0, -e.shape[1] % GROUP))
        add_up_groups(whole, v.start, groups).mul_(_RAISED)
        if out is not None:
            torch.mul(e, _RAISED, out=out[:, : e.shape[1]])

    def exact(self, mass: Tensor) -> Tensor:
        return mass


class _Rounded:
    """_RAISED exp(z - k) of a tile, from a product in bf16 with dither, and the entries that must
    not enter a sum rounded."""

    def __init__(self, logits: LogitTiles, rows: Tensor, offset: Tensor, tile: int) -> None:
        self.x, self.weight, self.rows = logits.x, logits.head.weight, rows
        vocab = len(offset)
        shift = dither(vocab)
        self.offset, self.undither = offset + shift, shift.neg().exp_().mul_(_RAISED)
        width = min(tile, vocab)
        self.block = offset.new_empty(len(rows), width + -width % GROUP)
        self.mass = offset.new_zeros(len(rows))  # so far
        nowhere = offset.new_empty(0, dtype=torch.int64)
        self.large = nowhere, nowhere, self.mass[:0]  # rows, columns and rounded values

    def __call__(self, v: slice, target: Tensor, groups: Tensor, out: Tensor | None) -> None:
        e = linear_cpu(self.rows, self.weight[v], self.offset[v], "sigmoid")
        e = _without_target(e, target - v.start)
        width = e.shape[1]
        self.block[:, :width].copy_(e).mul_(self.undither[v])
        self.block[:, width:] = 0.0
        whole = self.block[:, : width + -width % GROUP]
        self.set_aside(whole, v.start, add_up_groups(whole, v.start, groups))
        if out is not None:
            out[:, :width] = self.block[:, :width]

    def set_aside(self, e: Tensor, start: int, groups: Tensor) -> None:
        """Notes the largest entries of a tile e [c, v], whose first column is `start`."""
        self.mass += groups.sum(1)
        # the whole sum is at least what is known so far; only a group above it can hold an entry
        above = self.mass * _EXACT_SHARE
        row, group = (groups > above[:, None]).nonzero(as_tuple=True)
        values = e.unflatten(1, (-1, GROUP))[row, group]
        hit, offset = (values > above[row, None]).nonzero(as_tuple=True)
        new = row[hit], group[hit] * GROUP + (offset + start), values[hit, offset]
        both = [torch.cat(pair) for pair in zip(self.large, new, strict=True)]
        still = both[2] > above[both[0]]
        self.large = both[0][still], both[1][still], both[2][still]

    def exact(self, mass: Tensor) -> Tensor:
        """[c] the sums with their largest entries computed in fp32."""
        row, column, value = self.large
        z = torch.empty_like(value)
        for some in slices(row.numel(), _GATHERED):
            w = self.weight.index_select(0, column[some])
            z[some] = (self.x.index_select(0, row[some]) * w).sum(1)
        return mass.index_add(0, row, z.sub_(_RAISED_SHIFT).exp_().sub_(value))


@functools.lru_cache(maxsize=4)
def dither(vocab: int) -> Tensor:
    """[vocab] shifts (fp32, exact in bf16) with a triangular density on +-_DITHER, evenly spread
    over neighbours.

    Multiples of the golden ratio, modulo 1, through the inverse of the distribution.
    """
    u = torch.arange(vocab, dtype=torch.float64, device="cpu").mul_((5**0.5 - 1) / 2).frac_()
    rising = (2 * u).sqrt() - 1
    falling = 1 - (2 - 2 * u).sqrt()
    return torch.where(u < 0.5, rising, falling).mul_(_DITHER).bfloat16().float()
