"""The policy part of a loss in one launch: log-probabilities in, losses, dL/dlogp and metrics out.

With d_t = logp_t - old_t (its mean over the sequence at sequence level), r = exp(clamp(d)):

    loss_t = surrogate(r_t, A_t) * importance_t + beta * kl_t * (r_t, if corrected) - coef * H_t
    loss   = sum_t w_t loss_t                              g_t = dloss / dlogp_t

The formulas are those of `fused_grpo.objectives`, whose autograd the tests hold these closed forms
to: at a bound of a clamp the gradient passes, beyond it is 0, a tie of the minimum gives each side
half, and NaN goes where it goes in torch.

Sums over tokens leave as one row of partial sums per block, added up in a fixed order by a second
launch: no atomics, the same bits every time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_grpo_kernels.common import on_device_of
from fused_grpo_kernels.registry import Config, KernelCase, Target

BLOCK = 256  # tokens per program
SEGMENT_BLOCK = 1024  # tokens a program of the segment mean reads at a time
ROWS = 64  # rows of partial sums read at a time

# Columns of the partial sums: sums first, then minima, then maxima.
COLUMNS = (
    "loss",  # sum w_t loss_t
    "count",
    "clip_low",
    "clip_high",
    "ratio",
    "ratio_squared",
    "clamped",
    "kl",
    "entropy",
    "idle",  # g_t = 0
    "ratio_min",
    "log_ratio_min",
    "ratio_max",
    "log_ratio_max",
)
WIDTH: tl.constexpr = tl.constexpr(16)  # of a row of partial sums, padded to a power of two
_SUMS: tl.constexpr = tl.constexpr(10)  # columns below are sums
_MINIMA: tl.constexpr = tl.constexpr(12)  # columns from _SUMS to here are minima, then maxima


@triton.jit
def _clamp(x, low, high):
    """As torch.clamp: NaN stays."""
    return tl.where(x < low, low, tl.where(x > high, high, x))


@triton.jit
def _expm1_and_k3(d):
    """(e^d - 1, e^d - 1 - d), without cancellation near 0: a series in |d| < 1, 2^-24 relative."""
    series = 1.0 / 479001600.0
    series = series * d + 1.0 / 39916800.0
    series = series * d + 1.0 / 3628800.0
    series = series * d + 1.0 / 362880.0
    series = series * d + 1.0 / 40320.0
    series = series * d + 1.0 / 5040.0
    series = series * d + 1.0 / 720.0
    series = series * d + 1.0 / 120.0
    series = series * d + 1.0 / 24.0
    series = series * d + 1.0 / 6.0
    series = series * d + 0.5
    near = tl.abs(d) < 1.0
    small = d * d * series
    large = tl.exp(d) - 1.0
    return tl.where(near, d + small, large), tl.where(near, small, large - d)


@triton.jit
def clip_surrogate(ratio, advantage, low, high, delta):
    """(value, its derivative by the ratio): -min(min(r, delta) A, clamp(r, low, high) A)."""
    free = ratio
    if delta is not None:
        free = tl.where(ratio > delta, delta, ratio)
    a = free * advantage
    b = _clamp(ratio, low, high) * advantage
    value = -tl.where((a < b) | (a != a), a, b)
    # the derivative of torch.minimum: half to each at a tie, all to both where one is NaN
    to_a = tl.where(a == b, 0.5, tl.where(a > b, 0.0, 1.0)) * advantage
    to_b = tl.where(a == b, 0.5, tl.where(a < b, 0.0, 1.0)) * advantage
    if delta is not None:
        to_a = tl.where(ratio <= delta, to_a, 0.0)
    to_b = tl.where((ratio >= low) & (ratio <= high), to_b, 0.0)
    return value, -(to_a + to_b)


# The surrogates there are: name of the torch function -> device function (ratio, advantage, low,
# high, delta) -> (value, derivative). One more objective that is local to a token is one more row.
SURROGATES: dict[str, Any] = {"clip": clip_surrogate}


@triton.jit(do_not_specialize=["n", "num_sequences"])
def policy_kernel(
    logps,  # [n] fp32
    old,  # [n] | None: this policy, detached
    log_ratio,  # [n] | None: given at sequence level, in place of logps - old
    ref,  # [n] | None
    advantages,  # [n]
    importance,  # [n] | None
    entropy,  # [n] | None
    counted,  # [n] bool | None: all
    weights,  # [n] | None; w_t, or
    sequence,  # [n] int64 | None, with `lengths` [S] int64: 1 / (n_b S)
    lengths,
    divisor,  # [] fp32 | None: 1 / max(divisor, 1)
    loss,  # [n] out
    g,  # [n] out; at sequence level without the part that passes through the ratio
    g_ratio,  # [n] out | None; that part, by the log-ratio
    g_entropy,  # [n] out | None
    partials,  # [blocks, WIDTH] out
    n,
    num_sequences,
    low,
    high,
    delta,  # float | None
    beta,  # float | None
    coef,  # float | None
    limit,  # float | None
    SURROGATE: tl.constexpr,
    CORRECTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of tokens. Everything that is None costs nothing."""
    block = tl.program_id(0)
    t = block * BLOCK + tl.arange(0, BLOCK)
    live = t < n
    if counted is not None:
        live = live & (tl.load(counted + t, mask=live, other=0) != 0)

    logp = tl.load(logps + t, mask=live, other=0.0)
    if log_ratio is not None:
        d = tl.load(log_ratio + t, mask=live, other=0.0)
    elif old is not None:
        d = logp - tl.load(old + t, mask=live, other=0.0)
    else:
        d = logp - logp  # not 0: NaN and infinities stay visible
    if weights is not None:
        w = tl.load(weights + t, mask=live, other=0.0)
    elif divisor is not None:
        w = tl.zeros([BLOCK], tl.float32) + 1.0 / tl.maximum(tl.load(divisor), 1.0)
    else:
        length = tl.load(lengths + tl.load(sequence + t, mask=live, other=0), mask=live, other=1)
        w = 1.0 / (length * num_sequences).to(tl.float32)

    r = d
    inside = d == d
    if limit is not None:
        inside = (d >= -limit) & (d <= limit)
        r = _clamp(d, -limit, limit)
    ratio = tl.exp(r)
    a = tl.load(advantages + t, mask=live, other=0.0)
    value, slope = SURROGATE(ratio, a, low, high, delta)
    if importance is not None:
        share = tl.load(importance + t, mask=live, other=0.0)
        value *= share
        slope *= share

    through = slope * ratio  # dloss_t / dlog-ratio, and dloss_t / dlogp_t past the ratio
    direct = tl.zeros([BLOCK], tl.float32)
    kl = tl.zeros([BLOCK], tl.float32)
    if beta is not None:
        x = tl.load(ref + t, mask=live, other=0.0) - logp
        within = x == x
        c = x
        if limit is not None:
            within = (x >= -limit) & (x <= limit)
            c = _clamp(x, -limit, limit)
        minus, kl = _expm1_and_k3(c)
        direct = -beta * minus
        if CORRECTED:
            direct *= ratio
            if g_ratio is None:
                # the two parts, ratio * k3 and -ratio * expm1, share an e^c that is best left out
                both = inside & within
                through += tl.where(both, 0.0, beta * kl * ratio)
                direct = tl.where(both, -beta * c * ratio, direct)
            else:
                through += beta * kl * ratio
            kl *= ratio
        if limit is not None:
            direct = tl.where(within, direct, 0.0)
        value += beta * kl
    if limit is not None:
        through = tl.where(inside, through, 0.0)

    h = tl.zeros([BLOCK], tl.float32)
    if entropy is not None:
        h = tl.load(entropy + t, mask=live, other=0.0)
        if coef is not None:
            value -= coef * h
    if g_entropy is not None:
        tl.store(g_entropy + t, tl.where(live, -coef * w, 0.0), mask=t < n)

    gradient = w * direct
    if g_ratio is not None:
        tl.store(g_ratio + t, tl.where(live, w * through, 0.0), mask=t < n)
    else:
        gradient += w * through
    tl.store(g + t, tl.where(live, gradient, 0.0), mask=t < n)
    tl.store(loss + t, tl.where(live, value, 0.0), mask=t < n)

    beyond = d != d
    beyond = beyond & (d == d)
    if limit is not None:
        beyond = tl.abs(d) > limit
    row = partials + block * WIDTH
    _sum_to(row + 0, w * value, live)
    _sum_to(row + 1, live.to(tl.float32), live)
    _sum_to(row + 2, ((ratio < low) & (a < 0)).to(tl.float32), live)
    _sum_to(row + 3, ((ratio > high) & (a > 0)).to(tl.float32), live)
    _sum_to(row + 4, ratio, live)
    _sum_to(row + 5, ratio * ratio, live)
    _sum_to(row + 6, beyond.to(tl.float32), live)
    _sum_to(row + 7, kl, live)
    _sum_to(row + 8, h, live)
    _sum_to(row + 9, (gradient == 0).to(tl.float32), live)
    tl.store(row + 10, _minimum_of(tl.where(live, ratio, float("inf"))))
    tl.store(row + 11, _minimum_of(tl.where(live, d, float("inf"))))
    tl.store(row + 12, -_minimum_of(tl.where(live, -ratio, float("inf"))))
    tl.store(row + 13, -_minimum_of(tl.where(live, -d, float("inf"))))


@triton.jit
def _sum_to(pointer, x, live):
    tl.store(pointer, tl.sum(tl.where(live, x, 0.0), 0))


@triton.jit
def _minimum_of(x):
    """The minimum, NaN where there is one, as torch.amin."""
    return tl.where(tl.sum((x != x).to(tl.int32), 0) > 0, float("nan"), tl.min(x, 0))


@triton.jit(do_not_specialize=["blocks"])
def totals_kernel(partials, out, blocks, ROWS: tl.constexpr):
    """[blocks, WIDTH] partial sums, minima and maxima -> [WIDTH], always in the same order."""
    column = tl.arange(0, WIDTH)
    is_sum = column < _SUMS
    sign = tl.where(column < _MINIMA, 1.0, -1.0)  # a maximum is a minimum of the negatives
    total = tl.zeros([WIDTH], tl.float32)
    lowest = tl.zeros([WIDTH], tl.float32) + float("inf")
    unknown = tl.zeros([WIDTH], tl.int32)
    for start in range(0, blocks, ROWS):
        row = start + tl.arange(0, ROWS)
        used = (row < blocks)[:, None] & (column < 14)[None, :]
        x = tl.load(partials + row[:, None] * WIDTH + column[None, :], mask=used, other=0.0)
        total += tl.sum(x, 0)
        y = tl.where(used, x * sign[None, :], float("inf"))
        unknown += tl.sum((y != y).to(tl.int32), 0)
        lowest = tl.minimum(lowest, tl.min(tl.where(y == y, y, float("inf")), 0))
    extreme = tl.where(unknown > 0, float("nan"), lowest * sign)
    tl.store(out + column, tl.where(is_sum, total, extreme))


@triton.jit
def segment_mean_kernel(
    values,  # [n] fp32
    base,  # [n] | None: subtracted
    addend,  # [n] | None: added to the mean
    counted,  # [n] bool | None: all
    offsets,  # [S + 1] int64
    out,  # [n]
    BLOCK: tl.constexpr,
):
    """out[t] = mean over the counted tokens of t's segment of (values - base), + addend[t]."""
    segment = tl.program_id(0)
    first, end = tl.load(offsets + segment), tl.load(offsets + segment + 1)
    total = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(first, end, BLOCK):
        t = start + tl.arange(0, BLOCK)
        live = t < end
        if counted is not None:
            live = live & (tl.load(counted + t, mask=live, other=0) != 0)
        x = tl.load(values + t, mask=live, other=0.0)
        if base is not None:
            x -= tl.load(base + t, mask=live, other=0.0)
        total += x
        count += live.to(tl.int32)
    mean = tl.sum(total, 0) / tl.maximum(tl.sum(count, 0), 1).to(tl.float32)
    for start in range(first, end, BLOCK):
        t = start + tl.arange(0, BLOCK)
        live = t < end
        if counted is not None:
            live = live & (tl.load(counted + t, mask=live, other=0) != 0)
        y = tl.zeros([BLOCK], tl.float32) + mean
        if addend is not None:
            y += tl.load(addend + t, mask=live, other=0.0)
        tl.store(out + t, tl.where(live, y, 0.0), mask=t < end)


@dataclass(frozen=True)
class Weights:
    """w_t: given [n] fp32; or 1 / max(divisor, 1), divisor [] fp32; or 1 / (n_b S), from the
    sequence [n] int64 of each token and the lengths [S] int64."""

    given: Tensor | None = None
    divisor: Tensor | None = None
    sequence: Tensor | None = None
    lengths: Tensor | None = None


@dataclass(frozen=True)
class Options:
    """The numbers of a loss; None leaves a term out."""

    surrogate: str  # of SURROGATES
    low: float  # the clip's bounds, as ratios
    high: float
    delta: float | None = None
    beta: float | None = None
    corrected: bool = False
    coef: float | None = None
    limit: float | None = None


@dataclass(frozen=True)
class Inputs:
    """Flat vectors [n], fp32 and contiguous; `offsets` [S + 1] int64 asks for sequence level."""

    logps: Tensor
    advantages: Tensor
    old: Tensor | None = None
    ref: Tensor | None = None
    importance: Tensor | None = None
    entropy: Tensor | None = None
    counted: Tensor | None = None  # bool
    offsets: Tensor | None = None


@dataclass(frozen=True)
class Outputs:
    """Per-token losses (with the entropy term), dL/dlogp, dL/dentropy | None, partial sums."""

    loss: Tensor
    g: Tensor
    g_entropy: Tensor | None
    partials: Tensor


def policy_terms(
    inputs: Inputs, weights: Weights, options: Options, apart: bool = False
) -> Outputs:
    """One launch over n >= 1 tokens; with `offsets`, a mean per sequence before and after it.

    `apart` leaves what passes through the ratio out of g: for callers who know it already.
    """
    x = inputs
    n, like = x.logps.numel(), x.logps
    blocks = triton.cdiv(n, BLOCK)
    loss, g = torch.empty_like(like), torch.empty_like(like)
    g_entropy = None if options.coef is None else torch.empty_like(like)
    partials = like.new_empty(blocks, WIDTH.value)
    log_ratio = g_ratio = None
    if x.offsets is not None:
        base = x.logps if x.old is None else x.old
        log_ratio = segment_mean(x.logps, x.offsets, base, counted=x.counted)
    if x.offsets is not None or apart:
        g_ratio = torch.empty_like(like)
    config = _config()
    with on_device_of(like):
        policy_kernel[(blocks,)](
            x.logps,
            x.old,
            log_ratio,
            x.ref,
            x.advantages,
            x.importance,
            x.entropy,
            x.counted,
            weights.given,
            weights.sequence,
            weights.lengths,
            weights.divisor,
            loss,
            g,
            g_ratio,
            g_entropy,
            partials,
            n,
            1 if weights.lengths is None else weights.lengths.numel(),
            options.low,
            options.high,
            options.delta,
            options.beta,
            options.coef,
            options.limit,
            SURROGATE=SURROGATES[options.surrogate],
            CORRECTED=options.corrected,
            **config.constexprs,
            **config.options,
        )
    if x.offsets is not None and not apart:
        assert g_ratio is not None
        g = segment_mean(g_ratio, x.offsets, addend=g, counted=x.counted)
    return Outputs(loss, g, g_entropy, partials)


def segment_mean(
    values: Tensor,
    offsets: Tensor,
    base: Tensor | None = None,
    *,
    addend: Tensor | None = None,
    counted: Tensor | None = None,
) -> Tensor:
    """[n] -> [n]: the mean over each token's segment of values - base, plus addend."""
    out = torch.empty_like(values)
    config = _segment_config()
    with on_device_of(values):
        segment_mean_kernel[(offsets.numel() - 1,)](
            values, base, addend, counted, offsets, out, **config.constexprs, **config.options
        )
    return out


def totals(partials: Tensor) -> Tensor:
    """[blocks, WIDTH] of `policy_terms` -> [WIDTH], in the order of `COLUMNS`."""
    out = partials.new_empty(WIDTH.value)
    config = _totals_config()
    with on_device_of(partials):
        totals_kernel[(1,)](partials, out, partials.shape[0], **config.constexprs, **config.options)
    return out


def _config() -> Config:
    return Config({"BLOCK": BLOCK}, num_warps=8, num_stages=1)


def _segment_config() -> Config:
    return Config({"BLOCK": SEGMENT_BLOCK}, num_warps=4, num_stages=1)


def _totals_config() -> Config:
    return Config({"ROWS": ROWS}, num_warps=4, num_stages=1)


_POINTERS = {"sequence": "*i64", "lengths": "*i64", "offsets": "*i64", "counted": "*i1"}
_NUMBERS = {"n": "i32", "num_sequences": "i32", "blocks": "i32"}
_FLOATS = ("low", "high", "delta", "beta", "coef", "limit")
# What a launch is given, of what it may leave out, by kind of call.
_OPTIONAL = (
    *("old", "log_ratio", "ref", "importance", "entropy", "counted", "weights", "sequence"),
    *("lengths", "divisor", "g_ratio", "g_entropy", "delta", "beta", "coef", "limit"),
)
_GIVEN = {
    "least": ("divisor",),
    "clip": ("old", "divisor", "limit"),
    "clip and kl": ("old", "ref", "sequence", "lengths", "beta", "limit"),
    "token": tuple(x for x in _OPTIONAL if x not in ("log_ratio", "g_ratio", "weights", "divisor")),
    "sequence": tuple(x for x in _OPTIONAL if x not in ("old", "weights", "sequence", "lengths")),
}


def cases(target: Target) -> Iterator[KernelCase]:
    """The same on every target: the kernels are elementwise, and need little of it."""
    for kind, given in _GIVEN.items():
        absent = tuple(x for x in _OPTIONAL if x not in given)
        constants = {"SURROGATE": clip_surrogate, "CORRECTED": kind in ("token", "sequence")}
        yield _case(f"policy/{kind}", policy_kernel, _config(), absent, constants)
    yield _case("policy_totals", totals_kernel, _totals_config(), (), {})
    for kind, absent in (("in", ("addend",)), ("out", ("base",))):
        yield _case(f"segment_mean/{kind}", segment_mean_kernel, _segment_config(), absent, {})


def _case(
    name: str, fn: Any, config: Config, absent: tuple[str, ...], constants: dict[str, Any]
) -> KernelCase:
    constants = {**constants, **dict.fromkeys(absent), **config.constexprs}
    types = {**_POINTERS, **_NUMBERS, **dict.fromkeys(_FLOATS, "fp32")}
    signature = {
        argument: types.get(argument, "*fp32")
        for argument in fn.arg_names
        if argument not in constants
    }
    return KernelCase(name, fn, signature, constants, config, "fp32")
