"""What the kernels share: the logits' epilogue, and arithmetic that needs no device library.

A tile is a block of tokens by `tile` vocabulary entries. Of each (token, tile), the target left
out, kernels keep

    top      the largest logit z; 0 where the tile holds no other entry, or only -inf
    mass     sum of e_v = exp(z_v - top); 0 where the tile is empty, else at least 1
    spread   sum of e_v (z_v - top), for entropies

in fp32, laid out [tiles, tokens] so that a tile's column of numbers is written and read in one run.
Each tile is scaled by its own largest logit, so that any range of logits is exact and none has to
be done over, and the exponentials of a tile, in [0, 1], lose nothing as bf16 that they need.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def log1p(x):
    """log(1 + x) for x in [0, 1], to rounding, also where 1 + x loses x."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def softplus(x):
    """log(1 + exp(x)); 0 at -inf, inf at inf."""
    return tl.maximum(x, 0.0) + log1p(tl.exp(-tl.abs(x)))


@triton.jit
def tanh(x):
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def round_to(x, dtype: tl.constexpr, INTERP: tl.constexpr):
    """fp32 x in `dtype`, to nearest even: as hardware does, where the interpreter cuts off."""
    if INTERP and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + (0x7FFF + ((bits >> 16) & 1))) & -65536
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def finish_logits(x, bias, first, vocab, factor, inner, TILE: tl.constexpr, CAP: tl.constexpr):
    """Products [m, TILE] from entry `first` on -> logits: factor_t (x + b), or with a softcap
    factor_t tanh(inner (x + b)).

    `factor` [m] and `inner` hold the scale, the cap and the temperatures, see `types.Epilogue`.
    """
    if bias is not None:
        cols = first + tl.arange(0, TILE)
        x += tl.load(bias + cols, mask=cols < vocab, other=0.0).to(tl.float32)[None, :]
    if CAP:
        x = tanh(x * inner)
    return x * factor[:, None]


@triton.jit
def exponentials(
    z,
    top_out,
    mass_out,
    spread_out,
    rows,
    first,
    target,
    n,
    vocab,
    TILE: tl.constexpr,
):
    """Logits [m, TILE] from entry `first` on -> exponentials, 0 at the target; writes the tile's
    statistics.

    Columns are compared as offsets within the tile: a constant against a number per row, which
    keeps the tile in registers.
    """
    offset = tl.arange(0, TILE)[None, :]
    hit = offset == (target - first)[:, None]
    z = tl.where(hit | (offset >= vocab - first), -float("inf"), z)
    top = tl.max(z, 1)
    top = tl.where(top == -float("inf"), 0.0, top)
    # subtract first: the common size of the logits then costs no accuracy
    d = z - top[:, None]
    e = tl.exp2(d * LOG2E)
    at = (first // TILE).to(tl.int64) * n + rows
    inside = (rows < n) & (tl.zeros_like(rows) + first < vocab)
    tl.store(top_out + at, top, mask=inside)
    tl.store(mass_out + at, tl.sum(e, 1), mask=inside)
    if spread_out is not None:  # 0 * -inf is 0 here
        tl.store(spread_out + at, tl.sum(e * tl.maximum(d, -1e4), 1), mask=inside)
    return e


@contextlib.contextmanager
def on_device_of(x: torch.Tensor) -> Iterator[None]:
    """Launches go to the current device, which need not be that of the tensors."""
    if x.device.type != "cuda":
        yield
        return
    with torch.cuda.device(x.device):
        yield
