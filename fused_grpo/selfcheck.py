"""A small loss against fp64: whether a backend computes right on this machine."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Largest accepted errors: log-probabilities and loss absolute, gradients relative to their norm.
# 16-bit inputs: logits come from fp32 accumulators, gradients are rounded to the inputs' dtype.
TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (1e-4, 5e-3)}


@dataclass
class Numbers:
    """The errors of one backend, on one device, in one dtype, against fp64."""

    backend: str
    device: str
    dtype: str
    errors: dict[str, float]
    ok: bool


def check_numbers(backend: str, device: str, dtype: torch.dtype) -> Numbers:
    """The loss of a small ragged batch and its gradients against the reference in fp64."""
    from fused_grpo.loss import grpo_loss
    from fused_grpo.reference import reference_loss

    leaves, tensors, options = _small_case(device, dtype)
    for x in leaves:
        x.requires_grad_()
    wide = [x.detach().double().requires_grad_() for x in leaves]
    want = reference_loss(wide[0], wide[1], **_doubled(tensors), **options)
    want.loss.backward()
    name = str(dtype).removeprefix("torch.")
    # interpreted kernels meet log(0) on their way to a selection
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")
    try:
        got = grpo_loss(leaves[0], leaves[1], **tensors, **options, backend=backend)
        got.loss.backward()
    except Exception as error:  # whatever goes wrong is what this command is there to tell
        message = f"{type(error).__name__}: {error}".splitlines()[0]
        return Numbers(backend, device, name, {f"failed, {message}": float("nan")}, False)
    values, gradients = TOLERANCE[dtype]
    errors = {
        "loss": _largest(got.loss, want.loss),
        "logps": _largest(got.per_token_logps, want.per_token_logps),
        "dhidden": _relative(leaves[0].grad, wide[0].grad),
        "dweight": _relative(leaves[1].grad, wide[1].grad),
    }
    limits = dict(zip(errors, (values, values, gradients, gradients), strict=True))
    ok = all(errors[key] <= limits[key] for key in errors)
    return Numbers(backend, device, name, errors, ok)


def _small_case(
    device: str, dtype: torch.dtype
) -> tuple[list[Tensor], dict[str, Any], dict[str, Any]]:
    """(hidden and weight, the other tensors, options): ragged, clipped on both sides, with KL."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(3, 9, 48, generator=g), torch.randn(257, 48, generator=g) / 48**0.5
    ids = torch.randint(257, (3, 9), generator=g)
    logps = -5.5 + 0.4 * torch.randn(3, 9, generator=g)
    tensors = {
        "completion_ids": ids,
        "advantages": torch.tensor([1.0, -0.7, 0.3]),
        "completion_mask": torch.arange(9) < torch.tensor([9, 4, 7])[:, None],
        "old_per_token_logps": logps,
        "ref_per_token_logps": logps + 0.1 * torch.randn(3, 9, generator=g),
    }
    options: dict[str, Any] = {"loss_type": "grpo", "beta": 0.1, "temperature": 0.9}
    leaves = [x.to(device, dtype) for x in (hidden, weight)]
    return leaves, {name: x.to(device) for name, x in tensors.items()}, options


def _doubled(tensors: dict[str, Any]) -> dict[str, Any]:
    return {k: x.double() if x.is_floating_point() else x for k, x in tensors.items()}


def _largest(got: Tensor, want: Tensor) -> float:
    return float((got.detach().double() - want.detach()).abs().max())


def _relative(got: Tensor | None, want: Tensor | None) -> float:
    assert got is not None and want is not None  # noqa: PT018
    return float((got.double() - want).norm() / want.norm())
