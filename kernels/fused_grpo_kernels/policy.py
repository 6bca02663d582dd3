"""The policy part of a loss in one launch: log-probabilities in, losses, dL/dlogp and metrics out.

With d_t = logp_t - old_t (its mean or sum over the sequence at those levels), r = exp(clamp(d)):

    loss_t = surrogate(l_t, r_t, A_t) * importance_t + beta k3_t (r_t, if corrected) - coef H_t
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
    "idle",  # nothing goes back to the head
    "kl_clamped",
    "ratio_min",
    "log_ratio_min",
    "ratio_max",
    "log_ratio_max",
)
WIDTH: tl.constexpr = tl.constexpr(16)  # of a row of partial sums, padded to a power of two
_SUMS: tl.constexpr = tl.constexpr(11)  # columns below are sums
_LARGEST: tl.constexpr = tl.constexpr(3.4028234663852886e38)  # of fp32
_MINIMA: tl.constexpr = tl.constexpr(13)  # columns from _SUMS to here are minima, then maxima


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


# The surrogates that are local to a token, by the names of `fused_grpo.objectives.surrogates`. Each
# takes the numbers of a token and up to four options, and returns its value, the derivatives by the
# ratio and by the log-probability itself, and what its bounds leave out with A < 0 and with A > 0.


@triton.jit
def _outside(ratio, a, low, high):
    return (ratio < low) & (a < 0), (ratio > high) & (a > 0)


@triton.jit
def _left_out(keep, a):
    return (keep == 0) & (a < 0), (keep == 0) & (a > 0)


@triton.jit
def _where(keep, value, slope):
    """As torch.where(keep, value, 0): its gradient is 0 times the slope elsewhere, NaN stays."""
    return tl.where(keep, value, 0.0), tl.where(keep, 1.0, 0.0) * slope


@triton.jit
def clip(logp, old, ratio, d, a, low, high, delta, dual):
    free = ratio
    if delta is not None:
        free = tl.where(ratio > delta, delta, ratio)
    x = free * a
    y = _clamp(ratio, low, high) * a
    value = -tl.where((x < y) | (x != x), x, y)
    # the derivative of torch.minimum: half to each at a tie, all to both where one is NaN
    to_x = tl.where(x == y, 0.5, tl.where(x > y, 0.0, 1.0)) * a
    to_y = tl.where(x == y, 0.5, tl.where(x < y, 0.0, 1.0)) * a
    if delta is not None:
        to_x = tl.where(ratio <= delta, to_x, 0.0)
    to_y = tl.where((ratio >= low) & (ratio <= high), to_y, 0.0)
    slope = -(to_x + to_y)
    if dual is not None:
        bound = -dual * a
        kept = tl.where(value == bound, 0.5, tl.where(value > bound, 0.0, 1.0)) * slope
        least = tl.where((value < bound) | (value != value), value, bound)
        slope = tl.where(a < 0, kept, slope)
        value = tl.where(a < 0, least, value)
    below, above = _outside(ratio, a, low, high)
    return value, slope, tl.zeros_like(a), below, above


@triton.jit
def cispo(logp, old, ratio, d, a, low, high, _2, _3):
    weight = -_clamp(ratio, low, high) * a
    below, above = _outside(ratio, a, low, high)
    return weight * logp, tl.zeros_like(a), weight, below, above


@triton.jit
def sapo(logp, old, ratio, d, a, positive, negative, _2, _3):
    tau = tl.where(a > 0, positive, negative)
    x = tau * (ratio - 1.0)
    gate, rest = 1.0 / (1.0 + tl.exp(-x)), 1.0 / (1.0 + tl.exp(x))  # 1 - gate keeps its digits
    none = a != a
    return -a * (4.0 / tau) * gate, -a * 4.0 * gate * rest, tl.zeros_like(a), none, none


@triton.jit
def reinforce(logp, old, ratio, d, a, _0, _1, _2, _3):
    none = a != a
    return -a * logp, tl.zeros_like(a), -a, none, none


@triton.jit
def importance_sampling(logp, old, ratio, d, a, _0, _1, _2, _3):
    none = a != a
    return -ratio * a, -a, tl.zeros_like(a), none, none


@triton.jit
def masked_importance_sampling(logp, old, ratio, d, a, low, high, _2, _3):
    keep = ((ratio <= low) | (ratio >= high)) == 0
    weight = -tl.where(keep, ratio, 0.0) * a
    value, weight = _where(keep, weight * logp, weight)
    below, above = _outside(ratio, a, low, high)
    return value, tl.zeros_like(a), weight, below, above


@triton.jit
def _within_tv(logp, old, a, low, high):
    moved = tl.exp(logp) - tl.exp(old)
    return tl.where(a > 0, moved > high, moved < -low) == 0


@triton.jit
def dppo_tv(logp, old, ratio, d, a, low, high, ratio_max, _3):
    keep = _within_tv(logp, old, a, low, high)
    weight = -tl.where(ratio > ratio_max, ratio_max, ratio) * a
    below, above = _left_out(keep, a)
    value, by_logp = _where(keep, weight * logp, weight)
    return value, tl.zeros_like(a), by_logp, below, above


@triton.jit
def prime(logp, old, ratio, d, a, low, high, penalty, _3):
    keep = _within_tv(logp, old, a, low, high)
    below, above = _left_out(keep, a)
    value, slope = _where(keep, -ratio * a, -a)
    return value + penalty * d * d, slope, 2.0 * penalty * d, below, above


@triton.jit
def prime_ipo(logp, old, ratio, d, a, high, penalty, _2, _3):
    keep = (tl.abs(tl.exp(logp) - tl.exp(old)) > high) == 0
    below, above = _left_out(keep, a)
    value, slope = _where(keep, -ratio * a, -a)
    return value + penalty * d * d, slope, 2.0 * penalty * d, below, above


@triton.jit
def dro(logp, old, ratio, d, a, penalty, _1, _2, _3):
    none = a != a
    return -a * logp + penalty * d * d, tl.zeros_like(a), -a + 2.0 * penalty * d, none, none


SURROGATES: dict[str, Any] = {
    f.__name__: f
    for f in (
        *(clip, cispo, sapo, reinforce, importance_sampling, masked_importance_sampling),
        *(dppo_tv, prime, prime_ipo, dro),
    )
}


@triton.jit(do_not_specialize=["n"])
def policy_kernel(
    logps,  # [n] fp32
    old,  # [n] | None: this policy, detached
    log_ratio,  # [n] | None: given at sequence level, in place of logps - old
    ref,  # [n] | None
    advantages,  # [n]
    importance,  # [n] | None
    entropy,  # [n] | None
    counted,  # [n] bool | None: all
    weights,  # [n] | None; w_t, or 1 / max(divisor * length of the token's sequence, 1) with
    sequence,  # [n] int64 | None: no length
    lengths,  # [S] int64 | None
    divisor,  # [] fp32 | None
    loss,  # [n] out
    g,  # [n] out; with g_ratio without the part that passes through the ratio
    g_ratio,  # [n] out | None; that part, by the log-ratio
    g_entropy,  # [n] out | None
    partials,  # [blocks, WIDTH] out
    n,
    p0,  # options of the surrogate, float | None
    p1,
    p2,
    p3,
    beta,  # float | None
    coef,  # float | None
    limit,  # float | None
    SURROGATE: tl.constexpr,
    CORRECTED: tl.constexpr,
    APART: tl.constexpr,  # g without the policy term's share, for callers who know it
    BLOCK: tl.constexpr,
):
    """One block of tokens. Everything that is None costs nothing."""
    block = tl.program_id(0)
    t = block * BLOCK + tl.arange(0, BLOCK)
    live = t < n
    if counted is not None:
        live = live & (tl.load(counted + t, mask=live, other=0) != 0)

    logp = tl.load(logps + t, mask=live, other=0.0)
    before = logp
    if old is not None:
        before = tl.load(old + t, mask=live, other=0.0)
    d = logp - before  # not 0 without old: NaN and infinities stay visible
    if log_ratio is not None:
        d = tl.load(log_ratio + t, mask=live, other=0.0)
    if weights is not None:
        w = tl.load(weights + t, mask=live, other=0.0)
    else:
        w = tl.zeros([BLOCK], tl.float32) + tl.load(divisor)
        if sequence is not None:
            at = lengths + tl.load(sequence + t, mask=live, other=0)
            w *= tl.load(at, mask=live, other=1).to(tl.float32)
        w = 1.0 / tl.maximum(w, 1.0)

    r = d
    inside = d == d
    if limit is not None:
        inside = (d >= -limit) & (d <= limit)
        r = _clamp(d, -limit, limit)
    ratio = tl.exp(r)
    a = tl.load(advantages + t, mask=live, other=0.0)
    ratio = tl.where((a == 0) & (ratio > _LARGEST), _LARGEST, ratio)  # times 0 it would be NaN
    value, slope, by_logp, below, above = SURROGATE(logp, before, ratio, d, a, p0, p1, p2, p3)
    if importance is not None:
        share = tl.load(importance + t, mask=live, other=0.0)
        value *= share
        slope *= share
        by_logp *= share

    # dloss_t / dlog-ratio, and dloss_t / dlogp_t past the ratio
    through = tl.where((slope == 0) & (ratio > _LARGEST), 0.0, slope * ratio)
    direct = tl.zeros([BLOCK], tl.float32)
    kl = tl.zeros([BLOCK], tl.float32)
    clamped = live & (live == 0)
    if beta is not None:
        x = tl.load(ref + t, mask=live, other=0.0) - logp
        within = x == x
        c = x
        if limit is not None:
            within = (x >= -limit) & (x <= limit)
            c = _clamp(x, -limit, limit)
        clamped = c != x
        minus, kl = _expm1_and_k3(c)
        direct = -beta * minus
        if CORRECTED:
            direct *= ratio
            if g_ratio is None and not APART:
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
    if not APART:
        gradient += w * by_logp
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
    _sum_to(row + 2, below.to(tl.float32), live)
    _sum_to(row + 3, above.to(tl.float32), live)
    _sum_to(row + 4, ratio, live)
    _sum_to(row + 5, ratio * ratio, live)
    _sum_to(row + 6, beyond.to(tl.float32), live)
    _sum_to(row + 7, kl, live)
    _sum_to(row + 8, h, live)
    idle = gradient == 0
    if coef is not None:
        idle = idle & (coef * w == 0)
    _sum_to(row + 9, idle.to(tl.float32), live)
    _sum_to(row + 10, clamped.to(tl.float32), live)
    tl.store(row + 11, _minimum_of(tl.where(live, ratio, float("inf"))))
    tl.store(row + 12, _minimum_of(tl.where(live, d, float("inf"))))
    tl.store(row + 13, -_minimum_of(tl.where(live, -ratio, float("inf"))))
    tl.store(row + 14, -_minimum_of(tl.where(live, -d, float("inf"))))


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
        used = (row < blocks)[:, None] & (column < 15)[None, :]
        x = tl.load(partials + row[:, None] * WIDTH + column[None, :], mask=used, other=0.0)
        total += tl.sum(x, 0)
        y = tl.where(used, x * sign[None, :], float("inf"))
        unknown += tl.sum((y != y).to(tl.int32), 0)
        lowest = tl.minimum(lowest, tl.min(tl.where(y == y, y, float("inf")), 0))
    extreme = tl.where(unknown > 0, float("nan"), lowest * sign)
    tl.store(out + column, tl.where(is_sum, total, extreme))


@triton.jit
def segment_kernel(
    values,  # [n] fp32
    base,  # [n] | None: subtracted
    addend,  # [n] | None: added to the mean
    counted,  # [n] bool | None: all
    offsets,  # [S + 1] int64
    out,  # [n]
    MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[t] = mean or sum over t's segment's counted tokens of (values - base), + addend[t]."""
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
    result = tl.sum(total, 0)
    if MEAN:
        result /= tl.maximum(tl.sum(count, 0), 1).to(tl.float32)
    for start in range(first, end, BLOCK):
        t = start + tl.arange(0, BLOCK)
        live = t < end
        if counted is not None:
            live = live & (tl.load(counted + t, mask=live, other=0) != 0)
        y = tl.zeros([BLOCK], tl.float32) + result
        if addend is not None:
            y += tl.load(addend + t, mask=live, other=0.0)
        tl.store(out + t, tl.where(live, y, 0.0), mask=t < end)


@dataclass(frozen=True)
class Weights:
    """w_t: given [n] fp32; or 1 / max(divisor, 1), divisor [] fp32; or 1 / max(divisor n_b, 1),
    from the sequence [n] int64 of each token and the lengths [S] int64."""

    given: Tensor | None = None
    divisor: Tensor | None = None
    sequence: Tensor | None = None
    lengths: Tensor | None = None


@dataclass(frozen=True)
class Options:
    """The numbers of a loss; None leaves a term out."""

    surrogate: str  # of SURROGATES
    numbers: tuple[float | None, ...] = ()  # its options, four at most
    beta: float | None = None
    corrected: bool = False
    coef: float | None = None
    limit: float | None = None


@dataclass(frozen=True)
class Inputs:
    """Flat vectors [n], fp32 and contiguous; `offsets` [S + 1] int64 for levels above "token"."""

    logps: Tensor
    advantages: Tensor
    old: Tensor | None = None
    ref: Tensor | None = None
    importance: Tensor | None = None
    entropy: Tensor | None = None
    counted: Tensor | None = None  # bool
    offsets: Tensor | None = None
    level: str = "token"  # of LEVELS


# level -> whether a sequence's log-ratio is a mean, and whether its gradient goes back as one
LEVELS = {
    "token": (False, False),
    "sequence": (True, True),
    "sequence_token": (True, False),
    "sequence_sum": (False, True),
}


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

    `apart` leaves the policy term out of g: for callers who know its share already.
    """
    x = inputs
    n, like = x.logps.numel(), x.logps
    blocks = triton.cdiv(n, BLOCK)
    loss, g = torch.empty_like(like), torch.empty_like(like)
    g_entropy = None if options.coef is None else torch.empty_like(like)
    partials = like.new_empty(blocks, WIDTH.value)
    log_ratio = g_ratio = None
    mean, shared = LEVELS[x.level]
    if x.offsets is not None:
        base = x.logps if x.old is None else x.old
        log_ratio = per_segment(x.logps, x.offsets, base, mean=mean, counted=x.counted)
        g_ratio = torch.empty_like(like) if shared else None
    given = (*options.numbers, None, None, None, None)[:4]
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
            *given,
            options.beta,
            options.coef,
            options.limit,
            SURROGATE=SURROGATES[options.surrogate],
            CORRECTED=options.corrected,
            APART=apart,
            **config.constexprs,
            **config.options,
        )
    if x.offsets is not None and g_ratio is not None:
        g = per_segment(g_ratio, x.offsets, mean=mean, addend=g, counted=x.counted)
    return Outputs(loss, g, g_entropy, partials)


def per_segment(
    values: Tensor,
    offsets: Tensor,
    base: Tensor | None = None,
    *,
    mean: bool = True,
    addend: Tensor | None = None,
    counted: Tensor | None = None,
) -> Tensor:
    """[n] -> [n]: the mean or sum over each token's segment of values - base, plus addend."""
    out = torch.empty_like(values)
    config = _segment_config()
    with on_device_of(values):
        segment_kernel[(offsets.numel() - 1,)](
            values,
            base,
            addend,
            counted,
            offsets,
            out,
            MEAN=mean,
            **config.constexprs,
            **config.options,
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
_NUMBERS = {"n": "i32", "blocks": "i32"}
_FLOATS = ("p0", "p1", "p2", "p3", "beta", "coef", "limit")
# What a launch is given, of what it may leave out, by kind of call.
_OPTIONAL = (
    *("old", "log_ratio", "ref", "importance", "entropy", "counted", "weights", "sequence"),
    *("lengths", "divisor", "g_ratio", "g_entropy", "p0", "p1", "p2", "p3"),
    *("beta", "coef", "limit"),
)
_CLIP = ("p0", "p1", "old", "divisor", "limit")
_MOST = (
    *("p0", "p1", "p2", "ref", "importance", "entropy", "counted", "divisor", "sequence"),
    *("lengths", "g_entropy", "beta", "coef", "limit"),
)
_GIVEN = {
    "least": ("p0", "p1", "divisor"),
    "clip": _CLIP,
    "clip and kl": (*_CLIP, "ref", "sequence", "lengths", "beta"),
    "token": (*_MOST, "old"),
    "sequence": (*_MOST, "log_ratio", "g_ratio"),
}
# how many options a surrogate takes by default
_OPTIONS_OF = {"clip": 2, "cispo": 2, "sapo": 2, "reinforce": 0, "importance_sampling": 0}
_OPTIONS_OF |= {"masked_importance_sampling": 2, "dppo_tv": 3, "prime": 3, "prime_ipo": 2, "dro": 1}


def cases(target: Target) -> Iterator[KernelCase]:
    """The same on every target: the kernels are elementwise, and need little of it."""
    for kind, given in _GIVEN.items():
        absent = tuple(x for x in _OPTIONAL if x not in given)
        flags = {"CORRECTED": kind in ("token", "sequence"), "APART": False}
        constants = {"SURROGATE": clip, **flags}
        yield _case(f"policy/{kind}", policy_kernel, _config(), absent, constants)
    for name, count in _OPTIONS_OF.items():
        given = ("old", "divisor", "limit", "p0", "p1", "p2", "p3")[: 3 + count]
        absent = tuple(x for x in _OPTIONAL if x not in given)
        constants = {"SURROGATE": SURROGATES[name], "CORRECTED": False, "APART": False}
        yield _case(f"surrogate/{name}", policy_kernel, _config(), absent, constants)
    yield _case("policy_totals", totals_kernel, _totals_config(), (), {})
    for kind, absent in (("in", ("addend",)), ("out", ("base",))):
        constants = {"MEAN": kind == "in"}
        yield _case(f"segment/{kind}", segment_kernel, _segment_config(), absent, constants)


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
