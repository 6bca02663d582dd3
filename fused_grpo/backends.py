"""The one choice of backend: what passes over the head."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fused_grpo import chunked, routed, workspace
from fused_grpo.memory import ChunkPlan
from fused_grpo.passes import HeadResult, Waiting

BACKENDS = ("auto", "triton", "chunked", "reference")


@dataclass(frozen=True)
class Backend:
    """`chunked.head_pass`, `workspace.plan_pass` and `routed.routed_pass`, or others with their
    arguments."""

    name: str
    head_pass: Callable[..., HeadResult]
    plan_pass: Callable[..., ChunkPlan]
    routed_pass: Callable[..., tuple[HeadResult, Waiting]]


CHUNKED = Backend("chunked", chunked.head_pass, workspace.plan_pass, routed.routed_pass)
REFERENCE = replace(CHUNKED, name="reference")  # never makes a pass of its own


def choose(name: str, hidden: Tensor, weight: Tensor, wants: str | None = None) -> Backend:
    """The backend of a call; "auto" is Triton on CUDA and ROCm, chunked torch elsewhere.

    `wants`: what of the call only chunked torch can do.

    Raises:
        ValueError: "triton" cannot be had with these tensors.
    """
    if name in ("chunked", "reference"):
        return CHUNKED if name == "chunked" else REFERENCE
    reason = why_not_triton(hidden, weight, explicit=name == "triton")
    reason = reason or (wants and f"it has no {wants}")
    if reason is None:
        from fused_grpo import triton_backend, triton_routed

        routed_pass = triton_routed.routed_pass
        return Backend("triton", triton_backend.head_pass, triton_backend.plan_pass, routed_pass)
    if name == "triton":
        raise ValueError(f'backend="triton": {reason}; use "chunked", or "auto"')
    return CHUNKED


def why_not_triton(hidden: Tensor, weight: Tensor, explicit: bool) -> str | None:
    """The reason against Triton; None: none. Interpreted kernels are for those who ask by name."""
    if not explicit and hidden.device.type != "cuda":
        return f"the tensors are on {hidden.device}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if hidden.device.type == "cuda" and torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(hidden.device)
        if major < 8:
            return f"compute capability {major}.{minor} is below 8.0"
    from fused_grpo import triton_backend

    return triton_backend.unsupported(hidden, weight)


def compaction(
    compact: bool | None, backend: str, device: torch.device, is_routed: bool = False
) -> bool:
    """Whether tokens that do not count are left out, which makes the host wait for their number.

    Raises:
        ValueError: `compact=False` with a backend that always leaves them out; a wait that routed
            gradients need where there must be none.
    """
    if compact is None:
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        compact = not (capturing and backend == "triton")
    if not compact and backend != "triton":
        raise ValueError(
            f'compact=False needs backend="triton"; here it is {backend!r} on {device}'
        )
    if not compact and is_routed:
        raise ValueError(
            "compact=False, or the capture of a CUDA graph, with backward='routed': the host waits "
            "for the number of tiles that are kept; use 'exact'"
        )
    return compact
