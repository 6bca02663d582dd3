"""The head's matrix product with the softmax statistics of its tiles as epilogue: 2NHV.

Persistent programs walk the output tiles in groups of row blocks, so that a wave of programs shares
few rows and few weight tiles in cache; accumulators are fp32, and no logit is ever written. With
gradients to come, the exponentials of each tile are, in the dtype of `exps`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_grpo_kernels.common import (
    exponentials,
    finish_logits,
    on_device_of,
    round_to,
)
from fused_grpo_kernels.registry import Config, KernelCase, Target, target_of
from fused_grpo_kernels.types import Epilogue, TileStats, empty_statistics


@triton.jit(do_not_specialize=["n", "vocab"])
def head_kernel(
    hidden,  # [n, width]: a pointer, or a descriptor of [BM, BK] blocks
    weight,  # [vocab, width]: a pointer, or a descriptor of [BN, BK] blocks
    exps,  # [n, vocab]: None, a pointer, or (COPY_OUT) a descriptor of [BM, BN // 2] blocks
    bias,
    target,
    factor,
    top_out,
    mass_out,
    spread_out,
    n,
    vocab,
    width,
    stride_h,
    stride_w,
    stride_e,
    inner,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    COPY_OUT: tl.constexpr,
    CAP: tl.constexpr,
    INTERP: tl.constexpr,
):
    blocks_m, blocks_n = tl.cdiv(n, BM), tl.cdiv(vocab, BN)
    for block in tl.range(tl.program_id(0), blocks_m * blocks_n, tl.num_programs(0)):
        first = block // (GROUP * blocks_n) * GROUP
        size = tl.minimum(blocks_m - first, GROUP)
        within = block % (GROUP * blocks_n)
        m, j = first + within % size, within // size
        rows, cols = m * BM + tl.arange(0, BM), j * BN + tl.arange(0, BN)

        acc = tl.zeros((BM, BN), dtype=tl.float32)
        if not DESCRIPTORS:  # rows beyond the end read the last one and are not written
            k = tl.arange(0, BK)
            row_at = hidden + tl.minimum(rows, n - 1).to(tl.int64)[:, None] * stride_h + k[None, :]
            col_at = (
                weight + tl.minimum(cols, vocab - 1).to(tl.int64)[:, None] * stride_w + k[None, :]
            )
        for start in range(0, width, BK):
            if DESCRIPTORS:
                a = hidden.load([m * BM, start])
                b = weight.load([j * BN, start])
            else:
                inside = (start + k < width)[None, :]
                a = tl.load(row_at + start, mask=inside, other=0.0)
                b = tl.load(col_at + start, mask=inside, other=0.0)
            if INTERP:  # the interpreter multiplies the bit patterns of bf16
                a, b = a.to(tl.float32), b.to(tl.float32)
            acc = tl.dot(a, b.T, acc, input_precision="ieee")

        f = tl.load(factor + rows, mask=rows < n, other=0.0)
        y = tl.load(target + rows, mask=rows < n, other=-1).to(tl.int32)
        # two tiles, one after the other: half the registers
        halves = acc.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()
        for half in tl.static_range(2):
            first = j * BN + half * (BN // 2)
            z = finish_logits(halves[half], bias, first, vocab, f, inner, BN // 2, CAP)
            e = exponentials(z, top_out, mass_out, spread_out, rows, first, y, n, vocab, BN // 2)
            if exps is not None:
                if COPY_OUT:
                    exps.store([m * BM, first], round_to(e, exps.dtype, INTERP))
                else:
                    cols = first + tl.arange(0, BN // 2)
                    at = exps + rows.to(tl.int64)[:, None] * stride_e + cols[None, :]
                    inside = (rows < n)[:, None] & (cols < vocab)[None, :]
                    tl.store(at, round_to(e, exps.dtype.element_ty, INTERP), mask=inside)


def _config(
    bm: int, bn: int, bk: int, group: int, warps: int, stages: int, **switches: Any
) -> Config:
    return Config({"BM": bm, "BN": bn, "BK": bk, "GROUP": group, **switches}, warps, stages)


def configs(target: Target, store: bool) -> tuple[Config, ...]:
    """The choices on a target, the default first; the width of a tile, BN, is the same in all.

    `store`: exponentials are written; their way out takes the shared memory of a stage.
    """
    if target.backend == "interpreter":
        return (_config(64, 128, 64, 2, 1, 1, DESCRIPTORS=False),)
    if target.has_descriptors:
        choices = ((8, 3), (16, 3)) if store else ((8, 3), (16, 3), (8, 4))
        return tuple(
            _config(128, 256, 64, group, 8, stages, DESCRIPTORS=True) for group, stages in choices
        )
    if target.backend == "hip":
        return (_config(128, 256, 32, 8, 8, 2, DESCRIPTORS=False),)
    return (_config(64, 256, 32, 16, 8, 4, DESCRIPTORS=False),)


def _copies_out(target: Target, config: Config, capped: bool) -> bool:
    """Whether exponentials leave through a descriptor; Triton 3.9 fails on that behind a tanh on
    sm_100."""
    return config.constexprs["DESCRIPTORS"] and not (capped and int(target.arch) >= 100)


def refusal(dtype: torch.dtype, weight: Tensor, target: Target) -> str | None:
    """Why this kernel does not take operands of `dtype` with this weight (see `fold`), or None."""
    if weight.dtype != dtype or dtype not in (torch.bfloat16, torch.float16):
        return f"operands are {dtype} and {weight.dtype}, not both bf16 or fp16"
    aligned = weight.stride(0) % 16 == 0 and weight.data_ptr() % 16 == 0
    if weight.stride(1) != 1 or not aligned or weight.shape[1] % 16:
        return "the weight's rows are not contiguous and a multiple of 16 entries long and apart"
    if target.backend == "cuda" and int(target.arch) < 80:
        return f"sm_{target.arch} has no bf16 tensor cores"
    return None


def project(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    epilogue: Epilogue,
    *,
    spread: bool,
    exps: Tensor | None,
    config: Config | None = None,
) -> TileStats:
    """Tile statistics of tokens [c, H], contiguous, under a weight [V, H] of the same dtype.

    Args:
        targets: [c] int64 in [0, V).
        spread: also form what entropies need.
        exps: [c, V] bf16, for bf16 operands, unit stride in V, rows a multiple of 16 apart:
            receives the exponentials of each tile, 0 at the target.
        config: one of `configs`; None: the default, or on a GPU the fastest, timed at first use.
    """
    target = target_of(hidden.device)

    def run(with_config: Config) -> TileStats:
        return _launch(hidden, weight, targets, epilogue, spread, exps, with_config, target)

    with on_device_of(hidden):
        return run(config or choose(run, configs(target, exps is not None), hidden, weight))


def _launch(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    epilogue: Epilogue,
    spread: bool,
    exps: Tensor | None,
    config: Config,
    target: Target,
) -> TileStats:
    (n, width), vocab = hidden.shape, weight.shape[0]
    c = config.constexprs
    stats = empty_statistics(n, vocab, c["BN"] // 2, spread, hidden.device)
    copy_out = _copies_out(target, config, epilogue.capped)
    operands = [
        _operand(hidden, [c["BM"], c["BK"]] if c["DESCRIPTORS"] else None),
        _operand(weight, [c["BN"], c["BK"]] if c["DESCRIPTORS"] else None),
        _operand(exps, [c["BM"], c["BN"] // 2] if copy_out else None),
    ]
    programs = min(
        num_programs(target, hidden.device), triton.cdiv(n, c["BM"]) * stats.top.shape[0]
    )
    head_kernel[(programs,)](
        *operands,
        epilogue.bias,
        targets,
        epilogue.factor,
        stats.top,
        stats.mass,
        stats.spread,
        n,
        vocab,
        width,
        hidden.stride(0),
        weight.stride(0),
        0 if exps is None else exps.stride(0),
        epilogue.inner,
        **c,
        COPY_OUT=copy_out,
        CAP=epilogue.capped,
        INTERP=target.backend == "interpreter",
        **config.options,
    )
    return stats


def _operand(x: Tensor | None, block: list[int] | None) -> Any:
    if x is None or block is None:
        return x
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(x, block)


def num_programs(target: Target, device: torch.device) -> int:
    """One per multiprocessor; a few when interpreted, so that each meets several blocks."""
    if target.backend == "interpreter":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


_CHOSEN: dict[tuple[object, ...], Config] = {}


def choose(
    run: Callable[[Config], object],
    among: Sequence[Config],
    hidden: Tensor,
    weight: Tensor,
) -> Config:
    """The fastest configuration for this device, dtype, H and V, timed on the first call.

    A launch only overwrites its results, so it can be repeated. Nothing is timed where the host
    must not wait, under graph capture: the default is taken, and the question stays open.
    """
    if len(among) == 1:
        return among[0]
    key = (hidden.device, hidden.dtype, tuple(weight.shape), weight.stride(0), len(among))
    if key in _CHOSEN:
        return _CHOSEN[key]
    if torch.cuda.is_current_stream_capturing() or hidden.shape[0] < 512:
        return among[0]
    _CHOSEN[key] = min(among, key=lambda config: _milliseconds(lambda: run(config)))
    return _CHOSEN[key]


def _milliseconds(run: Callable[[], object], repeat: int = 3) -> float:
    run()  # compiles
    times = []
    for _ in range(repeat):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times)


# (bias, softcap, entropy sums, exponentials) that the gate compiles: the plain cases, and the one
# with everything
VARIANTS = (
    (False, False, False, False),
    (False, False, True, False),
    (False, False, False, True),
    (True, True, True, True),
)


def cases(target: Target) -> Iterator[KernelCase]:
    for bias, cap, spread, store in VARIANTS:
        for dtype in ("bf16",) if store else ("bf16", "fp16"):
            for config in configs(target, store):
                yield _case(target, config, dtype, bias, cap, spread, store)


def _case(
    target: Target, config: Config, dtype: str, bias: bool, cap: bool, spread: bool, store: bool
) -> KernelCase:
    c = config.constexprs
    copy_out = _copies_out(target, config, cap)

    def operand(rows: int, cols: int, descriptor: bool) -> str:
        return f"tensordesc<{dtype}[{rows},{cols}]>" if descriptor else f"*{dtype}"

    signature = {
        "hidden": operand(c["BM"], c["BK"], c["DESCRIPTORS"]),
        "weight": operand(c["BN"], c["BK"], c["DESCRIPTORS"]),
        "exps": operand(c["BM"], c["BN"] // 2, copy_out) if store else "constexpr",
        "bias": "*fp32" if bias else "constexpr",
        "target": "*i64",
        "factor": "*fp32",
        "top_out": "*fp32",
        "mass_out": "*fp32",
        "spread_out": "*fp32" if spread else "constexpr",
        **dict.fromkeys(("n", "vocab", "width", "stride_h", "stride_w", "stride_e"), "i32"),
        "inner": "fp32",
    }
    absent = {name: None for name, kind in signature.items() if kind == "constexpr"}
    flags = {"bias": bias, "cap": cap, "spread": spread, "store": store}
    names = "+".join(name for name, on in flags.items() if on)
    shape = "x".join(str(c[k]) for k in ("BM", "BN", "BK"))
    return KernelCase(
        name=f"head[{shape},group={c['GROUP']},stages={config.num_stages}]({names})",
        fn=head_kernel,
        signature=signature,
        constexprs={**absent, **c, "COPY_OUT": copy_out, "CAP": cap, "INTERP": False},
        config=config,
        dtype=dtype,
        needs_mma=True,
        divisible=(
            "hidden",
            "weight",
            "exps",
            "target",
            "factor",
            "top_out",
            "mass_out",
            "spread_out",
            "width",
            "stride_h",
            "stride_w",
            "stride_e",
        ),
    )
