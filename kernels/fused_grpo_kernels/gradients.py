"""Exponentials -> gradients of the raw logits, in place: what the two plain products then take.

    dL/dx_v = jac ( g (1[v = y] - p_v) - e p_v (log p_v + H) )        jac = d logit / d x

with the target's own entry formed from 1 - p, in fp32 before it is rounded. Programs own columns
and walk the tokens in order, so that leaving out tokens moves rows up inside the same memory: a row
is read by the time it is written, and every column sum (the bias) has a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_grpo_kernels.common import on_device_of, round_to
from fused_grpo_kernels.registry import Config, KernelCase, Target, target_of
from fused_grpo_kernels.types import Epilogue, RowStats, TileStats

_ROWS = 128  # per program, where none are left out


@triton.jit(do_not_specialize=["n", "count", "rows_each", "vocab", "tiles"])
def gradients_kernel(
    exps,
    out,  # may be the memory of exps
    kept,  # rows of exps that become rows 0, 1, ... of out; None: all
    target,
    g,
    e,
    logps,
    one_minus_p,
    largest,
    shift,
    entropy,
    top,
    z_target,
    factor,
    bias_out,  # [splits, vocab]
    n,
    count,
    rows_each,
    vocab,
    tiles,
    stride_e,
    stride_o,
    inner,
    BM: tl.constexpr,
    TILE: tl.constexpr,
    COMPACT: tl.constexpr,
    ENTROPY: tl.constexpr,
    CAP: tl.constexpr,
    BIAS: tl.constexpr,
    INTERP: tl.constexpr,
):
    j, split = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    cols = j * TILE + tl.arange(0, TILE)
    column_sum = tl.zeros((TILE,), dtype=tl.float32)
    last = tl.minimum((split + 1) * rows_each, count)
    for start in range(split * rows_each, last, BM):
        i = start + tl.arange(0, BM)
        live = i < last
        row = i
        if COMPACT:
            row = tl.load(kept + i, mask=live, other=0)
        inside = live[:, None] & (cols < vocab)[None, :]
        y = tl.load(target + row, mask=live, other=-1).to(tl.int32)
        gt = tl.load(g + row, mask=live, other=0.0)
        omp = tl.load(one_minus_p + row, mask=live, other=0.0)
        f = tl.load(factor + row, mask=live, other=1.0)
        m = tl.load(top + j.to(tl.int64) * n + row, mask=live, other=0.0)
        gap = tl.load(largest + row, mask=live, other=0.0)
        log_scale = (m - gap) - tl.load(shift + row, mask=live, other=0.0)
        at = exps + row.to(tl.int64)[:, None] * stride_e + cols[None, :]
        q = tl.load(at, mask=inside, other=0.0).to(tl.float32)

        hit = tl.arange(0, TILE)[None, :] == (y - j * TILE)[:, None]
        p = q * tl.exp(log_scale)[:, None]
        dz = -gt[:, None] * p
        own = gt * omp
        idle = (gt == 0.0) & (omp == omp)
        if ENTROPY or CAP:
            log_q = tl.log(tl.maximum(q, 1.1754944e-38))
        if ENTROPY:
            et = tl.load(e + row, mask=live, other=0.0)
            h = tl.load(entropy + row, mask=live, other=0.0)
            logp = tl.load(logps + row, mask=live, other=0.0)
            p_own = tl.exp(logp)
            dz -= et[:, None] * p * (log_q + (log_scale + h)[:, None])
            own -= tl.where(p_own == 0.0, 0.0, et * p_own * (logp + h))
            idle = idle & (et == 0.0)
        dz = tl.where(hit, own[:, None], dz)
        if CAP:
            zy = tl.load(z_target + row, mask=live, other=0.0)
            tanh = tl.where(hit, zy[:, None], m[:, None] + log_q) / f[:, None]
            dz *= 1.0 - tanh * tanh
        # a token without a coefficient gives 0 by selection, whatever its logits are
        dz = tl.where(idle[:, None], 0.0, dz * (f * inner)[:, None])
        if BIAS:
            column_sum += tl.sum(tl.where(inside, dz, 0.0), 0)
        if COMPACT:  # all threads have read their rows before any of these is written
            tl.debug_barrier()
        to = out + i.to(tl.int64)[:, None] * stride_o + cols[None, :]
        tl.store(to, round_to(dz, out.dtype.element_ty, INTERP), mask=inside)
        if COMPACT:
            tl.debug_barrier()
    if BIAS:
        tl.store(bias_out + split.to(tl.int64) * vocab + cols, column_sum, mask=cols < vocab)


def config_of(target: Target) -> Config:
    if target.backend == "interpreter":
        return Config({"BM": 64, "TILE": 64}, 1, 1)
    return Config({"BM": 16, "TILE": 128}, 4, 1)


def logit_gradients(
    exps: Tensor,
    targets: Tensor,
    stats: TileStats,
    rows: RowStats,
    epilogue: Epilogue,
    g: Tensor,
    e: Tensor | None,
    kept: Tensor | None,
    out: Tensor,
    bias: bool,
) -> Tensor | None:
    """dL/dx of the `kept` tokens (ascending; None: all) into out [kept, V], which may be `exps`.

    Args:
        exps: [c, V] what `forward` or `fold` stored.
        g, e: [c] fp32, dL/dlogp and dL/dentropy (None: 0) of each token.
        bias: also return the column sums [V], fp32.
    """
    target = target_of(exps.device)
    config = config_of(target)
    g = g.contiguous()
    e, kept = (None if x is None else x.contiguous() for x in (e, kept))
    n, vocab = exps.shape
    count = n if kept is None else kept.numel()
    tiles = stats.top.shape[0]
    # rows can only move up in place if one program moves them all
    rows_each = max(count, 1) if kept is not None else _ROWS
    splits = triton.cdiv(count, rows_each)
    sums = exps.new_zeros((splits, vocab), dtype=torch.float32) if bias else None
    with on_device_of(exps):
        gradients_kernel[(tiles * splits,)](
            exps,
            out,
            kept,
            targets,
            g,
            e,
            rows.logps,
            rows.one_minus_p,
            rows.largest,
            rows.shift,
            rows.entropy if e is not None else None,
            stats.top,
            rows.z_target,
            epilogue.factor,
            sums,
            n,
            count,
            rows_each,
            vocab,
            tiles,
            exps.stride(0),
            out.stride(0),
            epilogue.inner,
            **{**config.constexprs, "TILE": stats.tile},
            COMPACT=kept is not None,
            ENTROPY=e is not None,
            CAP=epilogue.capped,
            BIAS=bias,
            INTERP=target.backend == "interpreter",
            **config.options,
        )
    return None if sums is None else sums.sum(0)


def cases(target: Target) -> Iterator[KernelCase]:
    config = config_of(target)
    everything = ("COMPACT", "ENTROPY", "CAP", "BIAS")
    for stored, written, flags in (
        ("bf16", "bf16", ()),
        ("bf16", "bf16", ("COMPACT",)),
        ("bf16", "bf16", everything),
        ("fp32", "bf16", everything),
        ("fp32", "fp32", everything),
    ):
        yield _case(
            config, stored, written, dict.fromkeys(everything, False) | dict.fromkeys(flags, True)
        )


def _case(config: Config, stored: str, written: str, flags: dict[str, bool]) -> KernelCase:
    pointers = ("g", "logps", "one_minus_p", "largest", "shift", "top", "z_target", "factor")
    optional = {"kept": ("COMPACT", "*i64"), "bias_out": ("BIAS", "*fp32")}
    optional |= dict.fromkeys(("e", "entropy"), ("ENTROPY", "*fp32"))
    signature = {"exps": f"*{stored}", "out": f"*{written}", "target": "*i64", "inner": "fp32"}
    signature |= dict.fromkeys(pointers, "*fp32")
    signature |= {
        name: kind if flags[flag] else "constexpr" for name, (flag, kind) in optional.items()
    }
    integers = ("n", "count", "rows_each", "vocab", "tiles", "stride_e", "stride_o")
    signature |= dict.fromkeys(integers, "i32")
    absent = {name: None for name, kind in signature.items() if kind == "constexpr"}
    names = "+".join(name.lower() for name, on in flags.items() if on)
    return KernelCase(
        name=f"gradients[{stored}->{written}]({names})",
        fn=gradients_kernel,
        signature={
            name: signature[name] for name in gradients_kernel.arg_names if name in signature
        },
        constexprs={**absent, **config.constexprs, **flags, "INTERP": False},
        config=config,
        dtype=stored,
        divisible=("exps", "out", "stride_e", "stride_o"),
    )
