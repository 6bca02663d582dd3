"""Every kernel, configuration and dtype that a launcher may choose, by target.

A launcher picks its configurations from the functions that `kernel_cases` lists, so what has not
been compiled and checked ahead of time cannot be launched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

# Given to every launch and every ahead-of-time compilation: releases differ in the default, and
# unfused multiply-adds cost registers.
FP_FUSION = True


@dataclass(frozen=True)
class Target:
    """What to compile for; the fields of `triton.backends.compiler.GPUTarget`."""

    backend: str  # "cuda", "hip", or "interpreter" (TRITON_INTERPRET=1: no compilation)
    arch: int | str  # compute capability (90), or gfx name
    warp_size: int

    @property
    def has_descriptors(self) -> bool:
        """Whether tensor descriptors are hardware copies (TMA) there."""
        return self.backend == "cuda" and 90 <= int(self.arch) < 120

    @property
    def fp_fusion(self) -> bool:
        return FP_FUSION


TARGETS = {
    "sm_80": Target("cuda", 80, 32),
    "sm_90": Target("cuda", 90, 32),
    "sm_100": Target("cuda", 100, 32),
    "gfx942": Target("hip", "gfx942", 64),
}
INTERPRETER = Target("interpreter", 0, 1)


@dataclass(frozen=True)
class Config:
    """One way to launch a kernel: tile sizes and switches, warps, pipeline stages."""

    constexprs: Mapping[str, Any]
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of a launch beside the kernel's own."""
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": FP_FUSION,
        }


@dataclass(frozen=True)
class KernelCase:
    """One compilation: a kernel with the types of its arguments and all its constants."""

    name: str
    fn: Any  # the @triton.jit function
    signature: Mapping[str, str]  # argument -> Triton type, e.g. "*bf16", "i32", "fp32"
    constexprs: Mapping[str, Any]  # every constexpr argument, those of `config` included
    config: Config
    dtype: str  # "bf16", "fp16" or "fp32": that of the head's operands
    needs_mma: bool = False  # whether tensor-core instructions must appear
    divisible: tuple[str, ...] = ()  # arguments that launches give as multiples of 16


# Modules with a function cases(target) -> Iterator[KernelCase] each.
MODULES: tuple[str, ...] = (
    *("forward", "target", "fold", "combine", "gradients", "policy"),
    *("routed", "pairs"),
)


def kernel_cases(target: Target) -> Iterator[KernelCase]:
    """All compilations that a launch on `target` may need."""
    for name in MODULES:
        yield from import_module(f"{__package__}.{name}").cases(target)


def target_of(device: torch.device) -> Target:
    """What launches on `device` compile for.

    Raises:
        ValueError: on a CPU, unless Triton interprets its kernels.
    """
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        if torch.version.hip:
            return Target("hip", properties.gcnArchName.partition(":")[0], properties.warp_size)
        return Target("cuda", 10 * properties.major + properties.minor, 32)
    from triton import knobs

    if device.type == "cpu" and knobs.runtime.interpret:
        return INTERPRETER
    raise ValueError(
        f"Triton kernels run on CUDA and ROCm devices, or on a CPU where TRITON_INTERPRET=1 is set "
        f"before triton is imported; the tensors are on {device}"
    )
