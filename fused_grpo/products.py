"""Matrix products with fp32 results from fp32 accumulators, whatever the operands."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a @ b in fp32; 16-bit operands are multiplied as they are where the library can."""
    if a.dtype != torch.float32 and wide_results(a.device, a.dtype):
        if out is None:
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    return torch.mm(a.float(), b.float(), out=out)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b in fp32, without rounding the product first."""
    if a.dtype != torch.float32 and wide_results(a.device, a.dtype):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float())


@functools.cache
def wide_results(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether 16-bit operands can give fp32 results; ROCm and older releases may lack it."""
    if device.type != "cuda":
        return False
    try:
        probe = torch.zeros(16, 16, device=device, dtype=dtype)
        torch.mm(probe, probe, out_dtype=torch.float32)
        torch.addmm(probe.float(), probe, probe, out_dtype=torch.float32)
    except (NotImplementedError, RuntimeError, TypeError):
        return False
    return True


@contextlib.contextmanager
def tensor_cores_for(dtype: torch.dtype) -> Iterator[None]:
    """fp32 products of what came as fp16 run on tensor cores: TF32 holds every fp16 value."""
    if dtype != torch.float16 or not torch.cuda.is_available():
        yield
        return
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
