"""Routed gradients on the extreme heads and batches of test_extremes_head: values as exact calls
have them, gradients finite, repeatable, and right on average.

test_routed and test_properties_objectives hold the estimator itself to the exact gradient.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from cases import Case
from drawn_cases import evaluate
from oracle import dtype_id
from test_extremes_head import CASES, DENORMAL, LARGEST, rounded
from torch import Tensor

from fused_grpo import linear_logprobs

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
TAU = 0.25  # of vocabularies of 37 entries: a smaller one keeps them all
SMALLEST = 1e-12  # keeps whatever has a probability of that size
SEEDS = 150


def with_old(name: str, dtype: torch.dtype) -> Case:
    case = rounded(name, dtype)
    targets = case.ids.masked_fill(~case.mask, -100)
    logps = linear_logprobs(case.hidden, case.weight, targets, bias=case.bias).logps
    off = torch.where(torch.rand(logps.shape) < 0.5, 0.05, -0.4)
    case.tensors["old_per_token_logps"] = (logps - off).to(case.advantages.dtype)
    return case


def loss_of(case: Case, **options: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    """(loss and log-probabilities, gradients)."""
    found = evaluate(case, **options)
    return [found.loss, found.output.per_token_loss, found.output.per_token_logps], found.grads


def logprobs_of(case: Case, **options: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    leaves = {k: v.requires_grad_() for k, v in case.leaves().items()}
    targets = case.ids.masked_fill(~case.mask, -100)
    out = linear_logprobs(
        leaves["hidden"],
        leaves["weight"],
        targets,
        bias=leaves.get("bias"),
        entropy=True,
        **options,
    )
    g = torch.Generator().manual_seed(3)
    by = [torch.randn(targets.shape, generator=g, dtype=torch.float64) for _ in range(2)]
    (out.logps * by[0].to(out.logps) + out.entropy * by[1].to(out.entropy)).sum().backward()
    return [out.logps.detach(), out.entropy.detach()], {k: v.grad for k, v in leaves.items()}


CALLS = {"grpo_loss": (loss_of, with_old), "linear_logprobs": (logprobs_of, rounded)}
WEIGHT_GRADS = ("routed", "exact")


def routed(tau: float = TAU, seed: int = 1, weight_grad: str = "routed") -> dict[str, Any]:
    return {
        "backward": "routed",
        "route_tau": tau,
        "route_seed": seed,
        "route_weight_grad": weight_grad,
    }


def kernels_too(p: dict[str, Any]) -> bool:
    """Interpreted, they take their time."""
    return p["dtype"] == torch.float32 and p["name"] != LARGEST and p["weight_grad"] == "routed"


@pytest.mark.both_backends(triton_if=kernels_too)
@pytest.mark.parametrize("weight_grad", WEIGHT_GRADS)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("name", CASES)
def test_values_are_exact_and_gradients_repeat(
    name: str, dtype: torch.dtype, call: str, weight_grad: str
) -> None:
    function, make = CALLS[call]
    case = make(name, dtype)
    want, exact = function(case)
    got, grads = function(case, **routed(weight_grad=weight_grad))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    again = function(case, **routed(weight_grad=weight_grad))
    assert all(torch.equal(a, b) for a, b in zip(again[0], got, strict=True))
    for leaf, grad in grads.items():
        assert grad.isfinite().all(), leaf
        assert torch.equal(again[1][leaf], grad), leaf
        assert grad.dtype == exact[leaf].dtype
        assert grad.shape == exact[leaf].shape
    assert not grads["hidden"][~case.mask].any()
    if weight_grad == "exact":
        near(grads["weight"], exact["weight"], name, dtype)


FLOOR = {"denormal states": DENORMAL, "denormal weight": DENORMAL}


def near(got: Tensor, want: Tensor, name: str, dtype: torch.dtype) -> None:
    tol = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 8e-3}[dtype]
    error = (got.double() - want.double()).norm()
    assert error <= tol * want.double().norm() + FLOOR.get(name, tol * 1e-3), float(error)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("name", [name for name in CASES if name != LARGEST])
def test_a_threshold_that_keeps_everything_is_exact(
    name: str, dtype: torch.dtype, call: str
) -> None:
    function, make = CALLS[call]
    case = make(name, dtype)
    _, exact = function(case)
    for tau in (0.0, SMALLEST):
        _, grads = function(case, **routed(tau))
        for leaf, grad in grads.items():
            near(grad, exact[leaf], name, dtype)


# ---- on average


@functools.cache
def measured(name: str, call: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(exact gradients, those of SEEDS seeds), fp64."""
    function, make = CALLS[call]
    case = make(name, torch.float64)
    _, exact = function(case)
    found: dict[str, list[Tensor]] = {leaf: [] for leaf in exact}
    for seed in range(SEEDS):
        for leaf, grad in function(case, **routed(seed=seed))[1].items():
            found[leaf].append(grad)
    return exact, {leaf: torch.stack(grads) for leaf, grads in found.items()}


def off_by(exact: Tensor, draws: Tensor) -> float:
    """How far the mean of random projections is from the exact one, in standard errors.

    A projection adds up many entries, so that its mean over the seeds is close to normal, as that
    of an entry that is kept once in a hundred seeds is not.
    """
    g = torch.Generator().manual_seed(0)
    by = torch.randn(8, exact.numel(), generator=g, dtype=torch.float64)
    seen = draws.reshape(SEEDS, -1) @ by.T
    want = by @ exact.reshape(-1)
    error = (seen.mean(0) - want).abs()
    standard = seen.std(0) / SEEDS**0.5
    rounding = 1e-9 * (1 + want.abs())
    return float((error / (standard + rounding)).amax())


TRIED = [n for n in CASES if n not in (LARGEST, "N = 0, no rows", "N = 0, no columns")]


@pytest.mark.parametrize(
    ("name", "call"),
    [(name, tuple(CALLS)[i % 2]) for i, name in enumerate(TRIED)]  # in turn: they take a second
    + [("one row masked", "grpo_loss"), ("half at -inf", "linear_logprobs")],
)
def test_the_mean_is_the_exact_gradient(name: str, call: str) -> None:
    """Within 5 standard errors, over 150 seeds."""
    exact, draws = measured(name, call)
    for leaf, want in exact.items():
        assert off_by(want, draws[leaf]) <= 5, leaf


def test_a_bias_would_be_seen() -> None:
    """What is kept by chance, 20 % too heavy; and one that forgets what it left out."""
    exact, draws = measured("one row masked", "grpo_loss")
    kept = draws["weight"]
    assert kept.std(0).amax() > 0
    assert off_by(exact["weight"], kept) <= 5
    assert off_by(exact["weight"], exact["weight"] + 1.2 * (kept - exact["weight"])) <= 5
    assert off_by(exact["weight"], 1.2 * kept) > 5
    missing = torch.where(kept == 0, 0.0, exact["weight"])
    assert off_by(exact["weight"], missing) > 5
