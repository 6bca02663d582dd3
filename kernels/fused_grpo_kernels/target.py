"""The logit of each token's target, by an fp32 dot of its two rows.

A matrix product's epilogue could pick it out of its tile, at the price of registers that it does
not have; apart, it costs NH multiplications. Sums leave the target out, so that logp <= 0 whatever
the rounding of the two.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_grpo_kernels.common import on_device_of, tanh
from fused_grpo_kernels.registry import Config, KernelCase, Target, target_of
from fused_grpo_kernels.types import Epilogue


@triton.jit(do_not_specialize=["n", "width"])
def target_kernel(
    hidden,
    weight,
    bias,
    target,
    factor,
    z_out,
    n,
    width,
    stride_h,
    stride_w,
    stride_k,
    inner,
    BM: tl.constexpr,
    BK: tl.constexpr,
    CAP: tl.constexpr,
):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    live = rows < n
    y = tl.load(target + rows, mask=live, other=0)
    k = tl.arange(0, BK)
    a_at = hidden + rows.to(tl.int64)[:, None] * stride_h + k[None, :]
    b_at = weight + y.to(tl.int64)[:, None] * stride_w + k.to(tl.int64)[None, :] * stride_k
    x = tl.zeros((BM, BK), dtype=tl.float32)
    for start in range(0, width, BK):
        inside = live[:, None] & (start + k < width)[None, :]
        a = tl.load(a_at + start, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(b_at, mask=inside, other=0.0).to(tl.float32)
        x += a * b
        b_at += BK * stride_k
    z = tl.sum(x, 1)
    if bias is not None:
        z += tl.load(bias + y, mask=live, other=0.0)
    if CAP:
        z = tanh(z * inner)
    tl.store(z_out + rows, z * tl.load(factor + rows, mask=live, other=0.0), mask=live)


def config_of(target: Target) -> Config:
    if target.backend == "interpreter":
        return Config({"BM": 64, "BK": 64}, 1, 1)
    return Config({"BM": 4, "BK": 512}, 4, 1)


def target_logits(hidden: Tensor, weight: Tensor, targets: Tensor, epilogue: Epilogue) -> Tensor:
    """[c] fp32 logits of `targets` [c]; hidden [c, H] with unit stride in H, weight [V, H]."""
    config = config_of(target_of(hidden.device))
    n, width = hidden.shape
    out = torch.empty(n, dtype=torch.float32, device=hidden.device)
    with on_device_of(hidden):
        target_kernel[(triton.cdiv(n, config.constexprs["BM"]),)](
            hidden,
            weight,
            epilogue.bias,
            targets,
            epilogue.factor,
            out,
            n,
            width,
            hidden.stride(0),
            *weight.stride(),
            epilogue.inner,
            **config.constexprs,
            CAP=epilogue.capped,
            **config.options,
        )
    return out


def cases(target: Target) -> Iterator[KernelCase]:
    config = config_of(target)
    for dtype, everything in (("bf16", False), ("fp16", False), ("fp32", True)):
        signature = {
            "hidden": f"*{dtype}",
            "weight": f"*{dtype}",
            "bias": "*fp32" if everything else "constexpr",
            "target": "*i64",
            "factor": "*fp32",
            "z_out": "*fp32",
            **dict.fromkeys(("n", "width", "stride_h", "stride_w"), "i32"),
            # a launch turns the 1 into a constant
            "stride_k": "i32" if everything else "constexpr",
            "inner": "fp32",
        }
        absent: dict[str, int | None] = {
            name: None for name, kind in signature.items() if kind == "constexpr"
        }
        if not everything:
            absent["stride_k"] = 1
        yield KernelCase(
            name="target(bias+cap)" if everything else "target()",
            fn=target_kernel,
            signature=signature,
            constexprs={**absent, **config.constexprs, "CAP": everything},
            config=config,
            dtype=dtype,
            divisible=("hidden", "weight", "stride_h", "stride_w"),
        )
