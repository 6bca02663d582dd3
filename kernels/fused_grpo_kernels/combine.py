"""Tile statistics -> log-probabilities, entropies and what the gradients need of each token.

With d = logsumexp(others) - z_target nothing is a difference of nearly equal numbers:

    logp = -log(1 + e^d) <= 0        1 - p = 1 / (1 + e^-d)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_grpo_kernels.common import on_device_of, softplus
from fused_grpo_kernels.registry import Config, KernelCase, Target, target_of
from fused_grpo_kernels.types import RowStats, TileStats


@triton.jit(do_not_specialize=["n", "tiles"])
def combine_kernel(
    top,
    mass,
    spread,
    z_target,
    logps,
    one_minus_p,
    largest,
    shift,
    entropy,
    n,
    tiles,
    BM: tl.constexpr,
    BJ: tl.constexpr,
    SPREAD: tl.constexpr,
):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    peak = tl.full((BM,), -float("inf"), dtype=tl.float32)
    for start in range(0, tiles, BJ):
        j = start + tl.arange(0, BJ)
        at = j.to(tl.int64)[:, None] * n + rows[None, :]
        inside = (j < tiles)[:, None] & (rows < n)[None, :]
        s = tl.load(mass + at, mask=inside, other=0.0)
        m = tl.load(top + at, mask=inside, other=0.0)
        peak = tl.maximum(peak, tl.max(tl.where(s == 0.0, -float("inf"), m), 0))
    peak = tl.where(peak == -float("inf"), 0.0, peak)

    total = tl.zeros((BM,), dtype=tl.float32)
    moment = tl.zeros((BM,), dtype=tl.float32)
    for start in range(0, tiles, BJ):
        j = start + tl.arange(0, BJ)
        at = j.to(tl.int64)[:, None] * n + rows[None, :]
        inside = (j < tiles)[:, None] & (rows < n)[None, :]
        s = tl.load(mass + at, mask=inside, other=0.0)
        d = tl.where(s == 0.0, 0.0, tl.load(top + at, mask=inside, other=0.0) - peak[None, :])
        w = tl.exp(d)
        total += tl.sum(w * s, 0)
        if SPREAD:
            a = tl.load(spread + at, mask=inside, other=0.0)
            moment += tl.sum(w * (a + s * tl.maximum(d, -1e4)), 0)

    log_total = tl.log(total)
    z = tl.load(z_target + rows, mask=rows < n, other=0.0)
    d = tl.where(z == float("inf"), float("nan"), log_total + (peak - z))
    # the others' share of the whole is exp(-gap)
    gap = tl.where(total == 0.0, 0.0, log_total + softplus(-d))
    logp = -softplus(d)
    tl.store(logps + rows, logp, mask=rows < n)
    tl.store(one_minus_p + rows, 1.0 / (1.0 + tl.exp(-d)), mask=rows < n)
    tl.store(largest + rows, peak, mask=rows < n)
    tl.store(shift + rows, gap, mask=rows < n)
    if SPREAD:
        p = tl.exp(logp)
        own = tl.where(p == 0.0, 0.0, -p * logp)
        h = own - tl.exp(-gap) * (moment - total * gap)
        tl.store(entropy + rows, tl.where(h < 0.0, 0.0, h), mask=rows < n)


def config_of(target: Target) -> Config:
    if target.backend == "interpreter":
        return Config({"BM": 64, "BJ": 64}, 1, 1)
    return Config({"BM": 32, "BJ": 64}, 4, 1)


def combine(stats: TileStats, z_target: Tensor) -> RowStats:
    """Statistics of each token [c], entropies where `stats` has their sums."""
    tiles, n = stats.top.shape
    device = stats.top.device
    config = config_of(target_of(device))
    out = torch.empty((5, n), dtype=torch.float32, device=device)
    logps, one_minus_p, largest, shift, entropies = out
    entropy = None if stats.spread is None else entropies
    with on_device_of(stats.top):
        combine_kernel[(triton.cdiv(n, config.constexprs["BM"]),)](
            stats.top,
            stats.mass,
            stats.spread,
            z_target,
            logps,
            one_minus_p,
            largest,
            shift,
            entropy,
            n,
            tiles,
            **config.constexprs,
            SPREAD=entropy is not None,
            **config.options,
        )
    return RowStats(logps, one_minus_p, largest, shift, z_target, entropy)


def cases(target: Target) -> Iterator[KernelCase]:
    config = config_of(target)
    for spread in (False, True):
        signature = {
            "top": "*fp32",
            "mass": "*fp32",
            "spread": "*fp32" if spread else "constexpr",
            **dict.fromkeys(("z_target", "logps", "one_minus_p", "largest", "shift"), "*fp32"),
            "entropy": "*fp32" if spread else "constexpr",
            "n": "i32",
            "tiles": "i32",
        }
        absent = {name: None for name, kind in signature.items() if kind == "constexpr"}
        yield KernelCase(
            name="combine(spread)" if spread else "combine()",
            fn=combine_kernel,
            signature=signature,
            constexprs={**absent, **config.constexprs, "SPREAD": spread},
            config=config,
            dtype="fp32",
        )
