"""Ragged batches, and the comparison of the package with ``fused_grpo.reference`` in float64.

The oracle sees exactly the numbers that the code under test sees: inputs are rounded to the dtype
under test first and only then widened to float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import fused_grpo
from fused_grpo.reference import reference_logprobs, reference_loss

HEAD_OPTIONS = ("temperature", "logit_scale", "softcap")

# Log-ratios are drawn near these values. They stay away from every bound that the tests use
# (log 0.8, log 0.9, log 1.2, log 1.28, log 1.7, +-0.5): rounding must not decide who is clipped.
OLD_GRID = (-0.6, -0.35, -0.15, -0.02, 0.02, 0.1, 0.4, 0.8, 1.8)
REF_GRID = (-1.2, -0.3, -0.05, 0.02, 0.2, 0.8)


@dataclass(frozen=True)
class Tolerance:
    """Largest accepted errors: log-probabilities in nats, gradients relative to their norm."""

    logps: float
    grads: float
    loss: float


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
class Case:
    """Arguments of ``grpo_loss``: the head's leaves, the batch's tensors, and the options."""

    hidden: Tensor
    weight: Tensor
    ids: Tensor
    advantages: Tensor
    bias: Tensor | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def mask(self) -> Tensor:
        return self.tensors.get("completion_mask", torch.ones_like(self.ids)).bool()

    def with_options(self, **options: Any) -> Case:
        return replace(self, options=self.options | options)

    def leaves(self, convert: Callable[[Tensor], Tensor] = torch.clone) -> dict[str, Tensor]:
        named = {"hidden": self.hidden, "weight": self.weight, "bias": self.bias}
        return {k: convert(x.detach()) for k, x in named.items() if x is not None}


@dataclass
class Result:
    """Everything a call returns, and the gradients of its leaves."""

    output: Any
    grads: dict[str, Tensor | None]


def ragged_mask(rows: int, width: int, kind: str = "ragged") -> Tensor:
    """[rows, width]: 'ones'; 'ragged' right padding; 'holes': zeros inside and the last row empty;
    'tail': only the last two tokens of each row count."""
    mask = torch.ones(rows, width, dtype=torch.long)
    if kind == "tail":
        mask[:, :-2] = 0
    if kind in ("ragged", "holes"):
        for row in range(rows):
            mask[row, max(1, width - 3 * row) :] = 0
    if kind == "holes":
        mask[0, 1:4] = 0
        mask[1, 0] = 0
        mask[-1] = 0
    return mask


def make_case(
    *,
    seed: int = 0,
    rows: int = 6,
    width: int = 11,
    dim: int = 24,
    vocab: int = 129,
    dtype: torch.dtype = torch.float64,
    mask: str = "holes",
    bias: bool = False,
    old: bool = True,
    ref: bool = True,
    logit_std: float = 2.0,
    **options: Any,
) -> Case:
    """A padded batch with everything a loss call may need, inputs rounded to ``dtype``."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    # Both signs, so that each side of the clip is met.
    sign = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(rows)[:rows]
    case = Case(
        hidden=normal(rows, width, dim).to(dtype),
        weight=(normal(vocab, dim) * logit_std / math.sqrt(dim)).to(dtype),
        ids=torch.randint(vocab, (rows, width), generator=g),
        advantages=(sign * (0.3 + normal(rows).abs())).to(vector_dtype(dtype)),
        bias=normal(vocab).to(dtype) if bias else None,
        options=options,
    )
    counted = ragged_mask(rows, width, mask).bool()
    if mask != "ones":
        case.tensors["completion_mask"] = counted.long()
        case.ids[~counted] = -100
    logps = exact_logps(case)
    if old:
        case.tensors["old_per_token_logps"] = logps - log_ratios(counted, options, g)
    if ref:
        case.tensors["ref_per_token_logps"] = logps + from_grid(REF_GRID, counted.shape, g)
    for name in ("old_per_token_logps", "ref_per_token_logps"):
        if name in case.tensors:
            case.tensors[name] = case.tensors[name].to(vector_dtype(dtype))
    return case


def vector_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the per-token vectors that go with a head of ``dtype``."""
    return torch.promote_types(dtype, torch.float32)


def from_grid(grid: Sequence[float], shape: Sequence[int], g: torch.Generator) -> Tensor:
    values = torch.tensor(grid, dtype=torch.float64)
    jitter = 0.01 * (torch.rand(shape, generator=g, dtype=torch.float64) - 0.5)
    return values[torch.randint(len(grid), shape, generator=g)] + jitter


def log_ratios(counted: Tensor, options: dict[str, Any], g: torch.Generator) -> Tensor:
    """Per-token log-ratios; at the sequence level their mean over a row is one of the grid."""
    if options.get("importance_sampling_level", "token") == "token":
        return from_grid(OLD_GRID, counted.shape, g)
    noise = torch.randn(counted.shape, generator=g, dtype=torch.float64) * 0.3 * counted
    noise = noise - noise.sum(1, keepdim=True) / counted.sum(1, keepdim=True).clamp(min=1)
    return noise + from_grid(OLD_GRID, (counted.shape[0], 1), g)


def exact_logps(case: Case) -> Tensor:
    """Log-probabilities of the counted tokens in float64, zeros elsewhere."""
    head = {k: v for k, v in case.options.items() if k in HEAD_OPTIONS}
    leaves = case.leaves(Tensor.double)
    targets = case.ids.masked_fill(~case.mask, -100)
    return reference_logprobs(
        leaves.pop("hidden"), leaves.pop("weight"), targets, **leaves, **head
    )[0]


def pack(case: Case) -> Case:
    """The same sequences back to back, without the padding on their right (holes stay)."""
    rows, width = case.ids.shape
    position = torch.arange(1, width + 1).expand(rows, width)
    lengths = (position * case.mask).amax(dim=1)
    keep = position <= lengths[:, None]
    tensors = {
        k: (v[keep] if v.shape == keep.shape else v.reshape(-1)) for k, v in case.tensors.items()
    }
    tensors["cu_seqlens"] = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)
    options = {
        k: (v[keep] if isinstance(v, Tensor) and v.dim() == 2 else v)
        for k, v in case.options.items()
    }
    per_token = case.advantages.shape == keep.shape
    return replace(
        case,
        hidden=case.hidden[keep],
        ids=case.ids[keep],
        advantages=case.advantages[keep] if per_token else case.advantages,
        tensors=tensors,
        options=options,
    )


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
        **case.tensors,
        **case.options,
        **extra,
    )
    if reduction == "none":
        (output.per_token_loss * upstream(case).to(output.per_token_loss.dtype)).sum().backward()
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
        assert_gradient(name, got.grads[name], expected, case.leaves()[name].dtype, tol.grads)
    if got.grads["hidden"] is not None:
        assert not got.grads["hidden"][~case.mask.view(got.grads["hidden"].shape[:-1])].any()
    return got


def assert_outputs_agree(got: Any, want: Any, tol: Tolerance) -> None:
    """Values, shapes and metric names of a GRPOLossOutput against a ReferenceOutput."""
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
    optional = {"entropy"} | ({"zero_coefficient_fraction"} if per_token else set())
    missing = want.metrics.keys() - got.metrics.keys() - optional
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
    name: str, got: Tensor | None, want: Tensor | None, dtype: torch.dtype, tol: float
) -> None:
    """Relative error of the whole gradient and of each of its rows, in the dtype of the leaf."""
    assert (got is None) == (want is None), f"{name}.grad is {got}, expected {want}"
    if got is None or want is None:
        return
    assert got.dtype == dtype, f"{name}.grad is {got.dtype}, the leaf {dtype}"
    assert torch.isfinite(got).all(), f"{name}.grad is not finite"
    error = (got.double() - want).reshape(-1, want.shape[-1] if want.dim() > 1 else 1).norm(dim=-1)
    norms = want.reshape(len(error), -1).norm(dim=-1)
    assert error.norm() <= tol * norms.norm(), f"{name}.grad: {error.norm() / norms.norm():.2e}"
    # A row that is wrong must not hide behind larger ones; the floor is what cancellation leaves.
    floor = 0.02 * norms.amax() if len(norms) else 0.0
    worst = (error / (norms + floor).clamp(min=1e-300)).amax() if len(norms) else torch.tensor(0.0)
    assert worst <= 4 * tol, f"a row of {name}.grad: {worst:.2e}"
