"""Which (token, tile) pairs the routed backward keeps, from the forward's sums of each tile.

A pair stays with probability q = min(1, S / tau), S being the tile's probability mass without the
target, and then counts 1 / q; the target's own tile always stays and counts 1. The noise is a hash
of the token's key and the tile, so that nothing depends on where a token stands. A token that can
be expected to keep more than a bound keeps nothing here and is marked; what was drawn decides
nothing.

Two launches with a prefix sum between them: the first counts the pairs of each (tile, block of
tokens), the second, which draws the same again, writes them to the places that the counts give.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_grpo_kernels.common import on_device_of
from fused_grpo_kernels.registry import Config, KernelCase, Target, target_of
from fused_grpo_kernels.types import RowStats, TileStats


@triton.jit
def mix(x):
    """`fused_grpo.routed._mix`: a bijection of 32-bit words."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def tile_masses(top, mass, largest, shift, j, rows, n, tiles):
    """Probability masses [BJ, BM] of tiles j, targets left out; 0 beyond the ends."""
    at = j.to(tl.int64)[:, None] * n + rows[None, :]
    inside = (j < tiles)[:, None] & (rows < n)[None, :]
    m = tl.load(mass + at, mask=inside, other=0.0)
    d = (tl.load(top + at, mask=inside, other=0.0) - largest[None, :]) - shift[None, :]
    return tl.where(m == 0.0, 0.0, m * tl.exp(tl.where(m == 0.0, 0.0, d)))


@triton.jit
def chances(s, j, own, tau):
    """The probabilities q of tiles j with masses s [BJ, BM]: NaN for NaN, 1 for a token's own."""
    return tl.where((s >= tau) | (j[:, None] == own[None, :]), 1.0, s / tau)


@triton.jit
def drawn(q, keys, j):
    """Whether pairs stay: hash / 2^32 < q."""
    word = mix(keys[None, :] ^ mix((j + 1).to(tl.uint32))[:, None])
    u = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32
    return (q >= 1.0) | (u < q)


@triton.jit(do_not_specialize=["n", "tiles", "blocks"])
def count_kernel(
    top,
    mass,
    largest,
    shift,
    target,
    keys,  # [n] int64 below 2^32
    live,  # [n] int8
    dense_out,  # [n] int8
    routing_out,  # [n, 3] fp32
    counts,  # [tiles, blocks] int32
    n,
    tiles,
    blocks,
    tau,
    bound,
    BM: tl.constexpr,
    BJ: tl.constexpr,
    TILE: tl.constexpr,
):
    block = tl.program_id(0)
    rows = block * BM + tl.arange(0, BM)
    inside = rows < n
    big = tl.load(largest + rows, mask=inside, other=0.0)
    gap = tl.load(shift + rows, mask=inside, other=0.0)
    own = tl.load(target + rows, mask=inside, other=0).to(tl.int32) // TILE
    key = tl.load(keys + rows, mask=inside, other=0).to(tl.uint32)

    expected = tl.zeros((BM,), dtype=tl.float32)
    variance = tl.zeros((BM,), dtype=tl.float32)
    squares = tl.zeros((BM,), dtype=tl.float32)
    for start in range(0, tiles, BJ):
        j = start + tl.arange(0, BJ)
        s = tile_masses(top, mass, big, gap, j, rows, n, tiles)
        q = chances(s, j, own, tau)
        expected += tl.sum(tl.where((j < tiles)[:, None], q, 0.0), 0)
        variance += tl.sum(tl.where(q < 1.0, s * (tau - s), 0.0), 0)
        squares += tl.sum(s * s, 0)
    dense = (expected > bound) | (expected != expected)
    draws = inside & (dense == 0) & (tl.load(live + rows, mask=inside, other=0) != 0)

    kept = tl.zeros((BM,), dtype=tl.int32)
    for start in range(0, tiles, BJ):
        j = start + tl.arange(0, BJ)
        s = tile_masses(top, mass, big, gap, j, rows, n, tiles)
        stays = drawn(chances(s, j, own, tau), key, j) & (j < tiles)[:, None]
        kept += tl.sum(stays.to(tl.int32), 0)
        number = tl.sum((stays & draws[None, :]).to(tl.int32), 1)
        tl.store(counts + j.to(tl.int64) * blocks + block, number, mask=j < tiles)
    tl.store(dense_out + rows, dense.to(tl.int8), mask=inside)
    to = routing_out + rows.to(tl.int64) * 3
    tl.store(to, kept.to(tl.float32), mask=inside)
    tl.store(to + 1, variance, mask=inside)
    tl.store(to + 2, squares, mask=inside)


@triton.jit(do_not_specialize=["n", "tiles", "blocks", "first_token"])
def fill_kernel(
    top,
    mass,
    largest,
    shift,
    target,
    keys,
    live,
    dense,
    places,  # [tiles, blocks] int64: where the pairs of a tile and block begin
    token_out,  # [pairs] int32
    tile_out,  # [pairs] int32
    value_out,  # [pairs] fp32, 1 / q
    n,
    tiles,
    blocks,
    first_token,
    tau,
    BM: tl.constexpr,
    BJ: tl.constexpr,
    TILE: tl.constexpr,
):
    block = tl.program_id(0)
    rows = block * BM + tl.arange(0, BM)
    inside = rows < n
    big = tl.load(largest + rows, mask=inside, other=0.0)
    gap = tl.load(shift + rows, mask=inside, other=0.0)
    own = tl.load(target + rows, mask=inside, other=0).to(tl.int32) // TILE
    key = tl.load(keys + rows, mask=inside, other=0).to(tl.uint32)
    draws = inside & (tl.load(dense + rows, mask=inside, other=1) == 0)
    draws = draws & (tl.load(live + rows, mask=inside, other=0) != 0)
    for start in range(0, tiles, BJ):
        j = start + tl.arange(0, BJ)
        s = tile_masses(top, mass, big, gap, j, rows, n, tiles)
        q = chances(s, j, own, tau)
        stays = drawn(q, key, j) & (j < tiles)[:, None] & draws[None, :]
        one = stays.to(tl.int32)
        first = tl.load(places + j.to(tl.int64) * blocks + block, mask=j < tiles, other=0)
        at = first[:, None] + (tl.cumsum(one, 1) - one)
        number = tl.zeros((BJ, BM), dtype=tl.int32)
        tl.store(token_out + at, number + (first_token + rows)[None, :], mask=stays)
        tl.store(tile_out + at, number + j[:, None], mask=stays)
        tl.store(value_out + at, 1.0 / tl.where(stays, q, 1.0), mask=stays)


@dataclass(frozen=True)
class Pairs:
    """Kept (token, tile) pairs, a run of tokens after the other, in it by tile, then by token."""

    token: Tensor  # [m] int32
    tile: Tensor  # [m] int32
    value: Tensor  # [m] fp32, 1 / q
    runs: list[tuple[int, int, int]]  # (pairs, first token, tokens) of each run


def config_of(target: Target) -> Config:
    if target.backend == "interpreter":
        return Config({"BM": 32, "BJ": 16}, 1, 1)
    return Config({"BM": 32, "BJ": 64}, 4, 1)


def select(
    stats: TileStats,
    rows: RowStats,
    targets: Tensor,
    keys: Tensor,
    live: Tensor,
    tau: float,
    bound: float,
    first_token: int,
    run_pairs: int,
) -> tuple[Pairs, Tensor, Tensor]:
    """(pairs, dense [c] bool, routing [c, 3]) of tokens [c]; waits for the number of pairs, once.

    Args:
        targets: [c] int64. keys: [c] int64 in [0, 2^32). live: [c] bool, the others keep nothing.
        bound: tokens that can be expected to keep more than this many tiles, and those with NaN,
            are dense: they keep nothing here.
        first_token: what the numbers of tokens in `Pairs.token` begin with.
        run_pairs: runs of tokens are as long as they have at most so many pairs, but at least a
            block of tokens.

    routing: tiles that the token keeps (whether live or not); the variance of the masses of its
    tiles, each taken as one entry; the sum of their squares.
    """
    tiles, n = stats.top.shape
    device = stats.top.device
    config = config_of(target_of(device))
    block = config.constexprs["BM"]
    blocks = triton.cdiv(n, block)
    counts = torch.empty((tiles, blocks), dtype=torch.int32, device=device)
    dense = torch.empty(n, dtype=torch.int8, device=device)
    routing = torch.empty((n, 3), dtype=torch.float32, device=device)
    common = (stats.top, stats.mass, rows.largest, rows.shift, targets, keys, live.to(torch.int8))
    constants = {**config.constexprs, "TILE": stats.tile, **config.options}
    with on_device_of(stats.top):
        count_kernel[(blocks,)](
            *common, dense, routing, counts, n, tiles, blocks, tau, bound, **constants
        )
        ends = counts.sum(0).cumsum(0).tolist()  # the wait
        runs, places, start = [], torch.empty_like(counts, dtype=torch.int64), 0
        for first, last in _runs(ends, run_pairs):
            part = counts[:, first:last]
            end = part.reshape(-1).cumsum(0).view(part.shape)
            places[:, first:last] = end - part + start
            tokens = min(n, last * block) - first * block
            runs.append((ends[last - 1] - start, first_token + first * block, tokens))
            start = ends[last - 1]
        token, tile = (torch.empty(start, dtype=torch.int32, device=device) for _ in range(2))
        value = torch.empty(start, dtype=torch.float32, device=device)
        if start:
            out = (token, tile, value)
            fill_kernel[(blocks,)](
                *common, dense, places, *out, n, tiles, blocks, first_token, tau, **constants
            )
    return Pairs(token, tile, value, runs), dense.bool(), routing


def _runs(ends: list[int], most: int) -> Iterator[tuple[int, int]]:
    """Blocks [first, last) that hold at most `most` pairs together, where more than one."""
    first, start = 0, 0
    for last in range(1, len(ends) + 1):
        if last == len(ends) or ends[last] - start > most:
            yield first, last
            first, start = last, ends[last - 1]


def cases(target: Target) -> Iterator[KernelCase]:
    config = config_of(target)
    sums = dict.fromkeys(("top", "mass", "largest", "shift"), "*fp32")
    tokens = {"target": "*i64", "keys": "*i64", "live": "*i8"}
    sizes = dict.fromkeys(("n", "tiles", "blocks"), "i32")
    count = {"dense_out": "*i8", "routing_out": "*fp32", "counts": "*i32", **sizes}
    count |= {"tau": "fp32", "bound": "fp32"}
    fill = {"dense": "*i8", "places": "*i64", "token_out": "*i32", "tile_out": "*i32"}
    fill |= {"value_out": "*fp32", **sizes, "first_token": "i32", "tau": "fp32"}
    for name, fn, own in (("count", count_kernel, count), ("fill", fill_kernel, fill)):
        yield KernelCase(
            name=f"routed_{name}()",
            fn=fn,
            signature={**sums, **tokens, **own},
            constexprs={**config.constexprs, "TILE": 128},
            config=config,
            dtype="fp32",
            divisible=("top", "mass", "target", "keys"),
        )
