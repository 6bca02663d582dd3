"""The comparison of the package with ``fused_grpo.reference`` in float64.

The oracle sees exactly the numbers that the code under test sees: inputs are rounded to the dtype
under test first and only then widened to float64.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from cases import REFERENCE_HEAD, Case
from torch import Tensor

import fused_grpo
from fused_grpo.reference import reference_loss


@dataclass(frozen=True)
class Tolerance:
    """Largest accepted errors: log-probabilities in nats, gradients relative to their norm."""

    logps: float
    grads: float
    loss: float
    floor: float = 0.0  # what a gradient of denormal numbers may be off by


# float32: rounding of sums of a few hundred terms. 16-bit inputs: logits come from float32
# accumulators, so that log-probabilities keep float32 accuracy; gradients are rounded to the leaf's
# dtype (2^-9 relative for bfloat16), and once before that where a 16-bit matmul is used.
TOLERANCE = {
    torch.float64: Tolerance(1e-11, 1e-9, 1e-11),
    torch.float32: Tolerance(1e-5, 1e-5, 1e-5),
    torch.bfloat16: Tolerance(1e-4, 5e-3, 1e-4),
    torch.float16: Tolerance(1e-4, 5e-3, 1e-4),
}
DTYPES = tuple(TOLERANCE)


def dtype_id(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass
class Result:
    """Everything a call returns, and the gradients of its leaves."""

    output: Any
    grads: dict[str, Tensor | None]


def upstream(case: Case) -> Tensor:
    """Fixed per-token weights for reduction='none'; the first counted token gets 0 (R6)."""
    weights = torch.linspace(-1.0, 1.5, case.ids.numel(), dtype=torch.float64).view(case.ids.shape)
    weights.view(-1)[int(case.mask.reshape(-1).long().argmax())] = 0.0
    return weights


def run(
    function: Callable[..., Any],
    case: Case,
    *,
    convert: Callable[[Tensor], Tensor] = torch.clone,
    trainable: Sequence[str] = ("hidden", "weight", "bias"),
    reduction: str = "sum",
    **extra: Any,
) -> Result:
    """Call the loss on fresh leaves and go backward, through ``per_token_loss`` for 'none'."""
    leaves = case.leaves(convert)
    for name, x in leaves.items():
        x.requires_grad_(name in trainable)
    output = function(
        leaves["hidden"],
        leaves["weight"],
        case.ids,
        case.advantages,
        bias=leaves.get("bias"),
        **{k: convert(v) if k in REFERENCE_HEAD else v for k, v in case.tensors.items()},
        **case.options,
        **extra,
    )
    if reduction == "none":
        (output.per_token_loss * upstream(case).to(output.per_token_loss)).sum().backward()
    else:
        output.loss.backward()
    return Result(output, {name: x.grad for name, x in leaves.items()})


def oracle(case: Case, **how: Any) -> Result:
    """The reference in float64 on the values of ``case``."""
    return run(reference_loss, case, convert=Tensor.double, **how)


def ours(case: Case, *, reduction: str = "sum", **how: Any) -> Result:
    return run(
        lambda *a, **k: fused_grpo.grpo_loss(*a, reduction=reduction, **k),
        case,
        reduction=reduction,
        **how,
    )


def check(case: Case, *, tolerance: Tolerance | None = None, **how: Any) -> Result:
    """Run ours and the oracle; compare loss, log-probabilities, entropy, metrics, all gradients."""
    tol = tolerance or TOLERANCE[case.hidden.dtype]
    extra = {k: how.pop(k) for k in ("chunk_bytes", "backend") if k in how}
    want, got = oracle(case, **how), ours(case, **how, **extra)
    assert_outputs_agree(got.output, want.output, tol)
    for name, expected in want.grads.items():
        dtype = case.leaves()[name].dtype
        assert_gradient(name, got.grads[name], expected, dtype, tol.grads, tol.floor)
    if got.grads["hidden"] is not None:
        assert not got.grads["hidden"][~case.mask.view(got.grads["hidden"].shape[:-1])].any()
    return got


def assert_outputs_agree(
    got: Any, want: Any, tol: Tolerance, optional: Collection[str] = ()
) -> None:
    """Values, shapes and metric names of a GRPOLossOutput; it may lack the ``optional`` metrics."""
    # With reduction="none" the loss is the unweighted loss of each token.
    per_token = got.loss.dim() > 0
    close(got.loss, want.per_token_loss if per_token else want.loss, tol.loss, "loss")
    close(got.per_token_logps, want.per_token_logps, tol.logps, "per_token_logps")
    close(got.per_token_loss, want.per_token_loss, tol.loss, "per_token_loss")
    if want.entropy is not None and got.entropy is not None:
        close(got.entropy, want.entropy, tol.logps, "entropy")
    for name, value in got.metrics.items():
        assert value.dim() == 0, name
        assert not value.requires_grad, name
        if name in want.metrics:
            # Shares are float32 whatever the inputs.
            close(value, want.metrics[name], max(1e-6, 10 * tol.loss), f"metrics[{name!r}]")
    # The reference reports entropies wherever it computed them. Which tokens teach nothing is not
    # known before the upstream gradient of reduction="none" is.
    absent = {"entropy", *optional} | ({"zero_coefficient_fraction"} if per_token else set())
    missing = want.metrics.keys() - got.metrics.keys() - absent
    assert not missing, f"metrics without {missing}"


def close(got: Tensor, want: Tensor, tol: float, name: str) -> None:
    """|got - want| <= tol * max(1, |want|), elementwise; shapes must agree."""
    assert got.shape == want.shape, f"{name}: {tuple(got.shape)} != {tuple(want.shape)}"
    torch.testing.assert_close(
        got.detach().double(),
        want.detach().double(),
        atol=tol,
        rtol=tol,
        msg=lambda m: f"{name}: {m}",
    )


def assert_gradient(
    name: str,
    got: Tensor | None,
    want: Tensor | None,
    dtype: torch.dtype,
    tol: float,
    floor: float = 0.0,
) -> None:
    """Relative error of the whole gradient and of each of its rows, in the dtype of the leaf."""
    assert (got is None) == (want is None), f"{name}.grad: only one of the two is None"
    if got is None or want is None:
        return
    assert got.dtype == dtype, f"{name}.grad is {got.dtype}, the leaf {dtype}"
    assert torch.isfinite(got).all(), f"{name}.grad is not finite"
    assert got.shape == want.shape
    if want.numel() == 0:
        return
    width = want.shape[-1] if want.dim() > 1 else 1
    error = (got.double() - want).reshape(-1, width).norm(dim=-1)
    norms = want.reshape(-1, width).norm(dim=-1)
    assert error.norm() <= tol * norms.norm() + floor, (
        f"{name}.grad: {error.norm() / norms.norm():.2e}"
    )
    # A row that is wrong must not hide behind larger ones; the floor is what cancellation leaves.
    worst = ((error - floor) / (norms + 0.02 * norms.amax()).clamp(min=1e-300)).amax()
    assert worst <= 4 * tol, f"a row of {name}.grad: {worst:.2e}"
