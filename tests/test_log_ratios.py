"""Stale and extreme log-probabilities: exp of a log-ratio is bounded, in value and in gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import LEVELS, exact_logps, make_case
from oracle import check, ours

from fused_grpo import policy_loss

DIFFERENCES = [-200.0, -90.0, -20.5, -19.5, -1.0, 0.0, 1.0, 19.5, 20.5, 88.0, 90.0, 200.0]


def one_token(difference: float, advantage: float, dtype: torch.dtype, **options: Any) -> Any:
    """Loss, gradient and metrics of a token whose log-ratio is ``difference``."""
    logp = torch.tensor([[-1.0]], dtype=dtype, requires_grad=True)
    old = logp.detach() - difference
    out = policy_loss(
        logp, torch.tensor([advantage], dtype=dtype), old_per_token_logps=old, **options
    )
    out.loss.backward()
    return float(out.loss.detach()), float(logp.grad), out.metrics


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_policy_ratio_is_clamped(difference: float, dtype: torch.dtype) -> None:
    """N4, N5: one stale token has a finite loss and, beyond the clamp, gradient 0."""
    loss, gradient, metrics = one_token(difference, -1.0, dtype)
    ratio = math.exp(min(max(difference, -20.0), 20.0))
    assert loss == pytest.approx(max(ratio, 0.8), rel=1e-5)
    live = ratio > 0.8 and abs(difference) <= 20
    assert gradient == pytest.approx(ratio if live else 0.0, rel=1e-5)
    assert float(metrics["log_ratio/clamped"]) == (abs(difference) > 20)
    assert float(metrics["log_ratio/max"]) == pytest.approx(difference, rel=1e-6)
    assert all(torch.isfinite(v) for v in metrics.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_kl_is_clamped(difference: float, dtype: torch.dtype) -> None:
    """N4: k3 at any distance is finite, with gradient 1 - e^d inside the clamp and 0 beyond."""
    logp = torch.tensor([[-1.0]], dtype=dtype, requires_grad=True)
    out = policy_loss(
        logp,
        torch.zeros(1, dtype=dtype),
        ref_per_token_logps=logp.detach() + difference,
        beta=1.0,
    )
    out.loss.backward()
    d = min(max(difference, -20.0), 20.0)
    assert float(out.loss.detach()) == pytest.approx(math.exp(d) - d - 1, rel=1e-5)
    gradient = 1 - math.exp(d) if abs(difference) <= 20 else 0.0
    assert float(logp.grad) == pytest.approx(gradient, rel=1e-5)


@pytest.mark.parametrize("difference", [-30.0, 30.0])
def test_clamp_can_be_moved_or_switched_off(difference: float) -> None:
    """None: log-ratios enter exp as they are."""
    for clamp in (None, 40.0):
        loss, gradient, metrics = one_token(difference, -1.0, torch.float64, log_ratio_clamp=clamp)
        assert loss == pytest.approx(max(math.exp(difference), 0.8))
        assert gradient == pytest.approx(math.exp(difference) if difference > 0 else 0.0)
        assert float(metrics["log_ratio/clamped"]) == 0.0
    loss, gradient, _ = one_token(difference, -1.0, torch.float64, log_ratio_clamp=1.0)
    assert loss == pytest.approx(max(math.exp(math.copysign(1.0, difference)), 0.8))
    assert gradient == 0.0


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stale_tokens_in_the_fused_loss(dtype: torch.dtype, level: str) -> None:
    """N5: log-ratios of +-200 among ordinary ones; equal to float64, gradients finite."""
    case = make_case(
        vocab=61, dtype=dtype, beta=0.1, importance_sampling_level=level, loss_type="grpo"
    )
    logps = exact_logps(case).float()
    for name, sign in (("old_per_token_logps", -1), ("ref_per_token_logps", 1)):
        case.tensors[name][0, 5] = logps[0, 5] + sign * 200
        case.tensors[name][1, 2] = logps[1, 2] - sign * 200
    # With e^20 in the sums the relative error of each row is what counts; 1e-4 nats of error in a
    # 16-bit head's log-prob are 1e-4 of such a token's k3.
    result = check(case)
    if level == "token":
        assert float(result.output.metrics["log_ratio/clamped"]) > 0


def test_clamped_tokens_send_no_gradient() -> None:
    """Beyond the clamp the token is constant: exactly 0, and counted as without coefficient."""
    case = make_case(vocab=61, ref=False)
    case.advantages = -torch.ones_like(case.advantages)
    case.tensors["old_per_token_logps"] = exact_logps(case) - 50.0
    result = ours(case)
    assert not result.grads["hidden"].any()
    assert not result.grads["weight"].any()
    assert float(result.output.metrics["zero_coefficient_fraction"]) == 1.0
    assert float(result.output.metrics["log_ratio/clamped"]) == 1.0
