"""Extreme inputs: each gives the fp64 answer of the same formula, rounded, or a clear error."""

from __future__ import annotations

import math
from typing import Any

import formulas
import pytest
import torch
from cases import Case
from objective_cases import OBJECTIVES, drop_unused, formula_batch
from torch import Tensor

from fused_grpo import grpo_loss, policy_loss
from fused_grpo.kl import ESTIMATORS
from fused_grpo.objectives import LossSpec

# ---- log-ratios

# what fp32 has no exponential of, and what it has
GAPS = (200.0, -200.0, 88.0, -104.0, 15.0, -15.0)
CLAMPS = (20.0, None, 100.0)


def stale(gap: float, options: dict[str, Any], dtype: torch.dtype) -> Case | None:
    """Two sequences with tokens of that log-ratio and others; None where the options do not fit."""
    logps = torch.tensor([[-1.0, -0.5, -1.0], [-1.0, -1.0, -2.0]], dtype=dtype)
    away = torch.tensor([[gap, 0.05, gap], [-0.03, gap, 0.1]], dtype=dtype)
    tensors = {"old_per_token_logps": logps - away}
    tensors["completion_mask"] = torch.ones(2, 3, dtype=torch.bool)
    if options.get("beta"):
        tensors["ref_per_token_logps"] = logps + away.flip(1)
    try:
        LossSpec(**options)
    except ValueError as error:
        assert "log_ratio_clamp" in str(error)  # noqa: PT017 - an objective that takes no exp
        return None
    advantages = torch.tensor([[1.3, 1.3, 0.0], [-0.7, -0.7, -0.7]], dtype=dtype)
    none = torch.zeros(2, 3, dtype=torch.long)
    case = Case(torch.zeros(2, 3, 1), logps, none, advantages, None, tensors, options)
    drop_unused(case)
    return case


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """To the dtype and back, with infinity where it has no such number."""
    return x.to(dtype).double()


def assert_rounded(got: Tensor, want: Tensor, name: str, rtol: float = 2e-5) -> None:
    """Where the answer has a number of the dtype, that number; elsewhere nothing finite."""
    want = rounded(want, got.dtype)
    finite = want.isfinite() & (want.abs() < 1e37)
    assert (~got[~finite].isfinite() | (got[~finite].abs() > 1e36)).all(), name
    message = lambda m: f"{name}: {m}"  # noqa: E731
    torch.testing.assert_close(
        got.double()[finite], want[finite], rtol=rtol, atol=1e-6, msg=message
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("clamp", CLAMPS, ids=str)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_log_ratios_out_of_range(objective: str, clamp: float | None, dtype: torch.dtype) -> None:
    """+-200 and others, with every estimate of the KL: values and gradients of `policy_loss`.

    Without a clamp e^200 is no number of fp32: the gradient of a token that the clip has switched
    off was 0 times infinity, NaN, and made that of the whole batch NaN.
    """
    tried = 0
    kinds = tuple(ESTIMATORS) if dtype == torch.float32 else ("k3", "k3_score")
    for gap in GAPS:
        for estimator in (None, *kinds):
            options = {**OBJECTIVES[objective], "log_ratio_clamp": clamp}
            if estimator is not None:
                options |= {"beta": 0.1, "kl_estimator": estimator}
                options["kl_clamp"] = 30.0 if clamp is None else None
            case = stale(gap, options, dtype)
            if case is None or (estimator == "k3_score" and gap > 20.0 and clamp == 100.0):
                continue  # the formula's own e^88 - e^88: see the test of its gradient below
            tried += 1
            x = case.weight.clone().requires_grad_()
            out = policy_loss(x, case.advantages, **case.tensors, **case.options)
            out.loss.backward()
            exact = case.weight.double().requires_grad_()
            want = formulas.loss(formula_batch(case, exact, None))
            want.backward()
            label = f"gap {gap}, {estimator}"
            assert_rounded(out.loss.detach(), want.detach(), f"loss, {label}")
            assert_rounded(x.grad, exact.grad, f"gradient, {label}")
    assert tried >= 2 * len(GAPS) - 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("how", ["k3_score", "corrected", "corrected_sequence_token"])
def test_gradients_of_the_size_of_their_parts(how: str, dtype: torch.dtype) -> None:
    """r k3(d) with r = sg(r) e^(l - sg l) has the gradient -r d and the curvature r (1 - d); their
    parts are of the size of e^d, in fp32 off by all of it at d = 18, inside the clamp of 20."""
    d = torch.tensor([[-80.0, -18.0, -1.0, -1e-6, 0.0, 1e-6, 1.0, 10.0, 18.0, 80.0]], dtype=dtype)
    logps = torch.full_like(d, -1.5).requires_grad_()
    options: dict[str, Any] = {"kl_estimator": "k3_score"}
    if how.startswith("corrected"):
        options = {"use_bias_correction_kl": True, "old_per_token_logps": logps.detach() - 0.25}
    if how.endswith("sequence_token"):
        options["importance_sampling_level"] = "sequence_token"
    ratio = math.exp(0.25) if how.startswith("corrected") else 1.0
    shared = {"beta": 1.0, "aggregation": "token_sum", "log_ratio_clamp": None}
    ref = (logps.detach() + d).requires_grad_(False)
    d = ref - logps.detach()  # as it is after rounding
    out = policy_loss(logps, d.new_zeros(1), ref_per_token_logps=ref, **shared, **options)
    (grad,) = torch.autograd.grad(out.loss, logps, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), logps)
    tol = 1e-12 if dtype == torch.float64 else 1e-6
    value = ratio * (torch.expm1(d.double()) - d.double())
    torch.testing.assert_close(out.per_token_loss.double(), value, rtol=3e-5, atol=1e-12)
    torch.testing.assert_close(grad, -ratio * d, rtol=tol, atol=tol)
    torch.testing.assert_close(second, ratio * (1 - d), rtol=tol, atol=tol)


def test_the_corrected_kl_beyond_the_clamp_of_its_ratio() -> None:
    """There the ratio is a constant, e^20, and k3 alone moves: e^20 (1 - e^d)."""
    logps = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    old, d = logps.detach() - 25.0, 0.5
    options: dict[str, Any] = {"beta": 1.0, "use_bias_correction_kl": True}
    options |= {"log_ratio_clamp": 20.0, "aggregation": "token_sum"}
    tensors = {"old_per_token_logps": old, "ref_per_token_logps": logps.detach() + d}
    policy_loss(logps, logps.new_zeros(1).detach(), **tensors, **options).loss.backward()
    assert logps.grad.item() == pytest.approx(math.exp(20.0) * (1 - math.exp(d)), rel=1e-12)


@pytest.mark.both_backends
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_clipped_ratio_of_any_size_sends_nothing(reduction: str, level: str) -> None:
    """In the fused loss, without a clamp: the stale row is clipped, the other trains as alone."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 3, 4), torch.randn(9, 4)
    ids, a = torch.randint(9, (2, 3)), torch.tensor([1.0, 0.5])
    old = -torch.full((2, 3), 2.0)
    old[0] = -200.0
    options: dict[str, Any] = {"log_ratio_clamp": None, "importance_sampling_level": level}

    def grads(mask: Tensor) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        out = grpo_loss(
            *leaves,
            ids,
            a,
            completion_mask=mask,
            old_per_token_logps=old,
            reduction=reduction,
            **({} if reduction == "none" else {"aggregation": "token_sum"}),
            **options,
        )
        out.loss.sum().backward()
        return [x.grad for x in leaves]

    both = grads(torch.ones(2, 3, dtype=torch.bool))
    alone = grads(torch.tensor([[False] * 3, [True] * 3]))
    for got, want in zip(both, alone, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)
    a[0] = 0.0  # and with an advantage of 0
    for got, want in zip(grads(torch.ones(2, 3, dtype=torch.bool)), alone, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


def test_what_overflows_and_counts_is_seen() -> None:
    """An unclipped ratio beyond fp32: loss and gradient are infinite, as in fp64 rounded."""
    logps = torch.tensor([[-1.0]], requires_grad=True)
    old = torch.tensor([[-201.0]])
    out = policy_loss(logps, -torch.ones(1), old_per_token_logps=old, log_ratio_clamp=None)
    out.loss.backward()
    assert out.loss == math.inf
    assert logps.grad.item() == math.inf


@pytest.mark.parametrize("above", [0.0, 1e-7, 1e-3])
def test_an_old_log_probability_above_0_is_that_of_certainty(above: float) -> None:
    """By rounding it may come out so: the divergence of dppo_kl was NaN, which is no bound."""
    logps = torch.tensor([[-3.0]], dtype=torch.float64, requires_grad=True)
    old = torch.full((1, 1), above, dtype=torch.float64)
    out = policy_loss(
        logps, torch.tensor([-1.0]).double(), old_per_token_logps=old, loss_type="dppo_kl"
    )
    out.loss.backward()
    assert logps.grad.item() == 0.0
