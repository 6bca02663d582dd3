"""Numbers worked out by hand: small enough to check on paper."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_grpo import (
    group_relative_advantages,
    grpo_loss,
    linear_logprobs,
    policy_loss,
    zero_variance_fraction,
)

REWARDS = torch.tensor([[0.9, 0.4, 0.9, 0.2]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("ddof", "expected"),
    [(0, [0.973, -0.649, 0.973, -1.298]), (1, [0.843, -0.562, 0.843, -1.124])],
)
def test_advantages_of_four_rewards(ddof: int, expected: list[float]) -> None:
    got = group_relative_advantages(REWARDS, ddof=ddof, eps=0.0)
    torch.testing.assert_close(got, torch.tensor([expected]).double(), rtol=0, atol=5e-4)
    # The default eps of 1e-4 divides by 0.3559 + 0.0001.
    if ddof == 1:
        default = group_relative_advantages(REWARDS)
        ratio = (default / got).flatten()
        expected_ratio = torch.full((4,), 0.35590 / 0.35600, dtype=torch.float64)
        torch.testing.assert_close(ratio, expected_ratio, atol=1e-6, rtol=0)


def ratio_loss(
    ratio: float, advantage: float, **options: Any
) -> tuple[float, float, dict[str, Tensor]]:
    """Loss and d(loss)/d(logp) of a single token with the given ratio."""
    logp = torch.tensor([[math.log(ratio) - 1.0]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-1.0]], dtype=torch.float64)
    out = policy_loss(
        logp, torch.tensor([advantage], dtype=torch.float64), old_per_token_logps=old, **options
    )
    out.loss.backward()
    return float(out.loss.detach()), float(logp.grad), out.metrics


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.31, 0.97, -1.164, 0.0),  # unclipped 1.271, clipped 1.164: the minimum is 1.164
        (1.31, -0.97, 1.2707, 1.2707),  # a negative advantage is not clipped from above
        (1.1, 0.97, -1.067, -1.067),  # inside the range: g = -A ratio
        (0.7, 0.97, -0.679, -0.679),  # a positive advantage is not clipped from below
        (0.7, -0.97, 0.776, 0.0),  # clipped at 0.8
        (0.9, -0.97, 0.873, 0.873),
    ],
)
def test_clipped_surrogate(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    got_loss, got_gradient, metrics = ratio_loss(ratio, advantage)
    assert got_loss == pytest.approx(loss, abs=1e-9)
    assert got_gradient == pytest.approx(gradient, abs=1e-9)
    assert float(metrics["ratio/mean"]) == pytest.approx(ratio)
    clipped_high, clipped_low = ratio > 1.2 and advantage > 0, ratio < 0.8 and advantage < 0
    assert float(metrics["clip_ratio/high_mean"]) == clipped_high
    assert float(metrics["clip_ratio/low_mean"]) == clipped_low
    assert float(metrics["clip_ratio/region_mean"]) == (clipped_high or clipped_low)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (6.0, -1.0, 4.0, 0.0),  # the second bound: min(ratio, 4) A
        (3.0, -1.0, 3.0, 3.0),
        (6.0, 1.0, -1.2, 0.0),  # a positive advantage is clipped before
    ],
)
def test_two_sided_clip(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    got_loss, got_gradient, _ = ratio_loss(ratio, advantage, delta=4.0)
    assert got_loss == pytest.approx(loss)
    assert got_gradient == pytest.approx(gradient)


def test_delta_below_the_clip_keeps_the_gradient() -> None:
    """A < 0 and delta < ratio < 1 + epsilon_high: the clipped term is the minimum and is live."""
    loss, gradient, _ = ratio_loss(1.15, -1.0, delta=1.1, epsilon_high=0.4)
    assert loss == pytest.approx(1.15)
    assert gradient == pytest.approx(1.15)


@pytest.mark.parametrize("side", [-1.0, 1.0])
def test_gradient_passes_at_the_bound(side: float) -> None:
    """Clipping is inclusive: at ratio == 1 +- epsilon the gradient is that of the ratio."""
    epsilon = 0.25
    bound = 1 + side * epsilon
    logp = torch.tensor([[math.log(bound)]], dtype=torch.float64)
    candidates = [logp]
    for direction in (-1e9, 1e9):
        candidates.append(torch.nextafter(logp, torch.tensor(direction).double()))
    exact = next(x for x in candidates if float(x.exp()) == bound)
    x = exact.clone().requires_grad_()
    out = policy_loss(
        x,
        torch.tensor([side]).double(),
        old_per_token_logps=torch.zeros(1, 1).double(),
        epsilon_low=epsilon,
        epsilon_high=epsilon,
    )
    out.loss.backward()
    assert float(x.grad) == pytest.approx(-side * bound)
    assert float(out.metrics["clip_ratio/region_mean"]) == 0.0


def test_epsilons_are_distances_from_one() -> None:
    """R14: epsilon_low and epsilon_high are no ratios; each acts on its own side."""
    assert ratio_loss(1.27, 1.0, epsilon_high=0.28)[0] == pytest.approx(-1.27)
    assert ratio_loss(1.29, 1.0, epsilon_high=0.28)[0] == pytest.approx(-1.28)
    assert ratio_loss(0.75, -1.0, epsilon_low=0.3, epsilon_high=0.1)[0] == pytest.approx(0.75)
    assert ratio_loss(0.65, -1.0, epsilon_low=0.3, epsilon_high=0.1)[0] == pytest.approx(0.7)


def test_equal_rewards_teach_nothing() -> None:
    """Advantages and gradients are exactly 0, and the fraction of such groups is reported."""
    rewards = torch.tensor([[1.0, 1.0, 1.0], [0.1, 0.1, 0.1], [0.0, 1.0, 0.0]])
    advantages = group_relative_advantages(rewards)
    assert not advantages[:2].any()
    assert float(zero_variance_fraction(rewards)) == pytest.approx(2 / 3)
    hidden = torch.randn(3, 4, 8, requires_grad=True)
    weight = torch.randn(20, 8, requires_grad=True)
    out = grpo_loss(hidden, weight, torch.randint(20, (3, 4)), advantages[:2].flatten()[:3])
    out.loss.backward()
    assert float(out.loss.detach()) == 0.0
    assert not hidden.grad.any()
    assert not weight.grad.any()
    assert float(out.metrics["zero_coefficient_fraction"]) == 1.0


@pytest.mark.parametrize("corrected", [False, True])
def test_k3(corrected: bool) -> None:
    """k3 = e^d - d - 1 with d = ref - logp: 0 where the policies agree, e - 2 at d = 1."""
    logp = torch.tensor([[-1.0, -2.0, -3.0]], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([[-1.0, -1.0, -4.0]], dtype=torch.float64)
    old = torch.tensor([[-1.5, -2.0, -2.0]], dtype=torch.float64)
    out = policy_loss(
        logp,
        torch.zeros(1).double(),
        old_per_token_logps=old,
        ref_per_token_logps=ref,
        beta=0.5,
        use_bias_correction_kl=corrected,
    )
    out.loss.backward()
    k3 = torch.tensor([0.0, math.e - 2, math.exp(-1)]).double()
    ratio = torch.tensor([math.exp(0.5), 1.0, math.exp(-1)]).double()
    kl = k3 * ratio if corrected else k3
    torch.testing.assert_close(out.per_token_loss[0], 0.5 * kl)
    assert float(out.metrics["kl"]) == pytest.approx(float(kl.mean()))
    # d(k3) = 1 - e^d; with the live ratio, d(ratio k3) = ratio (logp - ref)
    gradient = ratio * (logp - ref)[0].detach() if corrected else 1 - (ref - logp)[0].detach().exp()
    torch.testing.assert_close(logp.grad[0], 0.5 * gradient / 3)


def test_sequence_ratio() -> None:
    """exp of the mean log-ratio of the counted tokens, with the gradient through the mean."""
    ratios = torch.tensor([[0.1, 0.3, 9.0], [-0.2, 0.0, 0.05]]).double()
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    logp = (ratios - 1.0).requires_grad_()
    out = policy_loss(
        logp,
        torch.tensor([2.0, -1.0]).double(),
        completion_mask=mask,
        old_per_token_logps=torch.full((2, 3), -1.0).double(),
        importance_sampling_level="sequence",
        loss_type="grpo",
        epsilon_high=0.3,
    )
    out.loss.backward()
    first, second = math.exp(0.2), math.exp(-0.05)
    expected = [[-2 * first, -2 * first, 0.0], [second] * 3]
    torch.testing.assert_close(out.per_token_loss, torch.tensor(expected).double())
    assert float(out.loss.detach()) == pytest.approx((-2 * first + second) / 2)
    gradient = [[-2 * first / 4, -2 * first / 4, 0.0], [second / 6] * 3]
    torch.testing.assert_close(logp.grad, torch.tensor(gradient).double())
    assert float(out.metrics["ratio/max"]) == pytest.approx(first)
    assert float(out.metrics["ratio/min"]) == pytest.approx(second)


# Reductions: token losses 1, 2 | 3, 4, 5 with a mask that cuts the first row short.
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])
LOSSES = torch.tensor([[1.0, 2.0, 77.0], [3.0, 4.0, 5.0]]).double()
ENTROPIES = torch.tensor([[1.0, 3.0, 55.0], [2.0, 4.0, 9.0]]).double()
GOLDEN = [
    ({"loss_type": "grpo"}, (1.5 + 4.0) / 2, (2.0 + 5.0) / 2),
    ({"loss_type": "bnpo"}, 15 / 5, 19 / 5),
    ({"loss_type": "dapo"}, 15 / 5, 19 / 5),
    ({"loss_type": "dapo", "num_items_in_batch": 10}, 15 / 10, 19 / 10),
    ({"loss_type": "dapo", "num_items_in_batch": torch.tensor(8)}, 15 / 8, 19 / 8),
    ({"loss_type": "dr_grpo", "max_completion_length": 4}, 15 / 8, 19 / 8),
    ({"loss_type": "dr_grpo", "max_completion_length": 3}, 15 / 6, 19 / 6),
]
GOLDEN_IDS = ["grpo", "bnpo", "dapo", "dapo_10", "dapo_tensor_8", "dr_grpo_4", "dr_grpo_3"]


@pytest.mark.parametrize(("options", "policy", "entropy"), GOLDEN, ids=GOLDEN_IDS)
def test_reductions_of_two_by_three(options: dict[str, Any], policy: float, entropy: float) -> None:
    """R13: each reduction has its own number, and the entropy bonus the same reduction."""
    logps = torch.full((2, 3), -1.0).double()
    rest = {"completion_mask": MASK, **options}
    plain = policy_loss(logps, -LOSSES, **rest)
    assert float(plain.loss) == pytest.approx(policy)
    torch.testing.assert_close(plain.per_token_loss, LOSSES * MASK)
    bonus = policy_loss(logps, -LOSSES, entropies=ENTROPIES, entropy_coef=0.1, **rest)
    assert float(bonus.loss) == pytest.approx(policy - 0.1 * entropy)
    kl = policy_loss(
        logps, -LOSSES, ref_per_token_logps=logps + 1.0, beta=0.3, completion_mask=MASK, **options
    )
    count = float(plain.loss) / float(policy_loss(logps, -torch.ones(2, 3).double(), **rest).loss)
    assert float(kl.loss) == pytest.approx(policy + 0.3 * (math.e - 2) * policy / count)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"loss_type": "grpo"}, 0.5),
        ({"loss_type": "bnpo"}, 10 / 110),
        ({"loss_type": "dapo"}, 10 / 110),
        ({"loss_type": "dr_grpo", "max_completion_length": 128}, 10 / 256),
    ],
    ids=["grpo", "bnpo", "dapo", "dr_grpo"],
)
def test_short_and_long_sequence(options: dict[str, Any], expected: float) -> None:
    """R9: lengths 10 and 100 with losses 1 and 0: a mean per sequence is no mean over the batch."""
    mask = (torch.arange(100) < torch.tensor([[10], [100]])).long()
    logps = torch.full((2, 100), -1.0).double()
    out = policy_loss(logps, torch.tensor([-1.0, 0.0]).double(), completion_mask=mask, **options)
    assert float(out.loss) == pytest.approx(expected)


def test_lengths_one_and_three_in_two_micro_batches() -> None:
    """R3: lengths 1 and 3, advantages +1 and -1: (-1 + 3) / 4, whatever the micro-batches."""
    logps = torch.full((2, 3), -1.0).double()
    mask, advantages = torch.tensor([[1, 0, 0], [1, 1, 1]]), torch.tensor([1.0, -1.0]).double()
    together = policy_loss(logps, advantages, completion_mask=mask, num_items_in_batch=4).loss
    apart = [
        policy_loss(
            logps[i : i + 1],
            advantages[i : i + 1],
            completion_mask=mask[i : i + 1],
            num_items_in_batch=4,
        ).loss
        for i in range(2)
    ]
    assert float(together) == pytest.approx(0.5)
    assert float(sum(apart)) == pytest.approx(0.5)


def test_two_class_head() -> None:
    """Logits (log 3, 0): p = 3/4; d(logp)/dz = 1 - p; dH/dz = -p (log p + H)."""
    hidden = torch.tensor([[math.log(3.0)]], dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    out = linear_logprobs(hidden, weight, torch.tensor([0]), entropy=True)
    entropy = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    assert float(out.logps.detach()) == pytest.approx(math.log(0.75))
    assert float(out.entropy.detach()) == pytest.approx(entropy)
    (slope,) = torch.autograd.grad(out.logps.sum(), hidden, retain_graph=True)
    assert float(slope) == pytest.approx(0.25)
    (slope,) = torch.autograd.grad(out.entropy.sum(), hidden)
    assert float(slope) == pytest.approx(-0.75 * (math.log(0.75) + entropy))


def test_metrics_of_four_tokens() -> None:
    """Ratios 1/2, 1, 3/2, 2 with advantages -1, +1, +1, -1."""
    ratios = torch.tensor([[0.5, 1.0, 1.5, 2.0]]).double()
    out = policy_loss(
        ratios.log(),
        torch.tensor([[-1.0, 1.0, 1.0, -1.0]]).double(),
        old_per_token_logps=torch.zeros(1, 4).double(),
        entropies=torch.tensor([[1.0, 2.0, 3.0, 4.0]]).double(),
        log_ratio_clamp=0.6,
    )
    expected = {
        "clip_ratio/low_mean": 1 / 4,
        "clip_ratio/high_mean": 1 / 4,
        "clip_ratio/region_mean": 2 / 4,
        "ratio/mean": (math.exp(-0.6) + 1.0 + 1.5 + math.exp(0.6)) / 4,
        "ratio/min": math.exp(-0.6),
        "ratio/max": math.exp(0.6),
        "log_ratio/min": math.log(0.5),
        "log_ratio/max": math.log(2.0),
        "log_ratio/clamped": 2 / 4,
        "entropy": 2.5,
        "num_tokens": 4,
    }
    for name, value in expected.items():
        assert float(out.metrics[name]) == pytest.approx(value), name
    weights = [math.exp(-0.6), 1.0, 1.5, math.exp(0.6)]
    ess = sum(weights) ** 2 / (4 * sum(w * w for w in weights))
    assert float(out.metrics["effective_sample_size"]) == pytest.approx(ess)
