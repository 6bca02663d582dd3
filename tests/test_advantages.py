"""group_relative_advantages and zero_variance_fraction against loops over groups."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_grpo import group_relative_advantages, zero_variance_fraction

NAN = float("nan")


def by_hand(
    groups: list[list[float]], scale: str, baseline: str, eps: float, ddof: int
) -> list[list[float]]:
    """The definition, one reward at a time, in Python floats."""
    std = statistics.stdev if ddof == 1 else statistics.pstdev
    everything = [r for group in groups for r in group if not math.isnan(r)]
    result = []
    for group in groups:
        valid = [r for r in group if not math.isnan(r)]
        row = []
        for i, r in enumerate(group):
            if math.isnan(r) or len(valid) < 2 or max(valid) == min(valid):
                row.append(0.0)
                continue
            others = [x for j, x in enumerate(group) if j != i and not math.isnan(x)]
            center = statistics.fmean(valid if baseline == "mean" else others)
            divisor = {"none": 1.0, "group": std(valid) + eps}.get(scale)
            row.append((r - center) / (std(everything) + eps if divisor is None else divisor))
        result.append(row)
    return result


GROUPS = [
    [0.0, 1.0, 0.5, 0.25],
    [1.0, 1.0, 1.0, 1.0],
    [-3.0, 100.0, 7.0, NAN],
    [NAN, NAN, NAN, NAN],
    [2.0, NAN, NAN, NAN],
    [1e-3, 2e-3, 1e-3, 1e-3],
]


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("eps", [1e-4, 0.0])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_against_the_definition(
    scale: str, baseline: str, eps: float, ddof: int, flat: bool
) -> None:
    """T1: a NaN reward is left out of the statistics of its group and gets 0."""
    rewards = torch.tensor(GROUPS, dtype=torch.float64)
    options: dict[str, Any] = {"scale": scale, "baseline": baseline, "eps": eps, "ddof": ddof}
    if flat:
        got = group_relative_advantages(rewards.flatten(), 4, **options).view(6, 4)
    else:
        got = group_relative_advantages(rewards, **options)
    want = torch.tensor(by_hand(GROUPS, scale, baseline, eps, ddof), dtype=torch.float64)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("value", [0.1, 1 / 3, -7.7, 1e8])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 16])
def test_equal_rewards_are_exactly_zero(size: int, value: float, baseline: str, scale: str) -> None:
    """Seven times 0.1 has a rounding standard deviation: equality decides, not std == 0."""
    rewards = torch.full((3, size), value)
    rewards[2] = torch.arange(size)
    got = group_relative_advantages(rewards, scale=scale, baseline=baseline, eps=0.0)
    assert not got[:2].any()
    assert torch.isfinite(got).all()
    assert bool(got[2].any()) == (size > 1)


def test_equal_valid_rewards_with_nan_are_zero() -> None:
    rewards = torch.tensor([[0.1, NAN, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1], [0.0, 1.0, NAN, NAN] * 2])
    got = group_relative_advantages(rewards)
    assert not got[0].any()
    assert torch.equal(got[1] == 0, rewards[1].isnan())


def test_groups_are_normalised_on_their_own() -> None:
    """T9: reward scales of 1 and 100 give the same advantages."""
    base = torch.tensor([0.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    got = group_relative_advantages(torch.stack([base, 100 * base + 5]), eps=0.0)
    torch.testing.assert_close(got[0], got[1])


def test_flat_rewards_are_grouped_by_neighbours() -> None:
    rewards = torch.tensor([0.0, 1.0, 10.0, 30.0])
    got = group_relative_advantages(rewards, num_generations=2, scale="none")
    assert got.tolist() == [-0.5, 0.5, -10.0, 10.0]
    assert got.shape == rewards.shape


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.int64, torch.float32),
        (torch.bool, torch.float32),
    ],
)
def test_dtypes(dtype: torch.dtype, expected: torch.dtype) -> None:
    got = group_relative_advantages(torch.tensor([[0, 1, 1, 0]]).to(dtype), scale="none")
    assert got.dtype == expected
    assert got.tolist() == [[-0.5, 0.5, 0.5, -0.5]]


def test_input_is_untouched_and_gradient_free() -> None:
    rewards = torch.tensor([[0.0, NAN, 1.0]], requires_grad=True)
    before = rewards.detach().clone()
    got = group_relative_advantages(rewards)
    assert not got.requires_grad
    assert torch.equal(rewards.detach().nan_to_num(9.0), before.nan_to_num(9.0))


def test_large_offsets_keep_their_digits() -> None:
    """Rewards of 1e4 + small: the mean is subtracted before anything is squared."""
    rewards = torch.tensor([[10000.0, 10000.5, 10001.0, 10000.25]])
    want = group_relative_advantages(rewards.double() - 10000.0).float()
    torch.testing.assert_close(group_relative_advantages(rewards), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([[1.0, 1.0], [0.0, 1.0]], 0.5),
        ([[1.0, 1.0], [0.1, 0.1]], 1.0),
        ([[0.0, 1.0], [1.0, 0.0]], 0.0),
        ([[NAN, 1.0], [0.0, 1.0]], 0.5),
        ([[NAN, NAN], [0.0, 1.0], [0.0, 1.0], [0.0, 2.0]], 0.25),
    ],
)
def test_zero_variance_fraction(groups: list[list[float]], expected: float) -> None:
    rewards = torch.tensor(groups)
    got = zero_variance_fraction(rewards)
    assert isinstance(got, Tensor)
    assert got.dim() == 0
    assert float(got) == expected
    assert float(zero_variance_fraction(rewards.flatten(), 2)) == expected


@pytest.mark.parametrize(
    ("rewards", "arguments", "match"),
    [
        (torch.zeros(7), {"num_generations": 4}, "num_generations"),
        (torch.zeros(8), {}, "num_generations"),
        (torch.zeros(8), {"num_generations": 0}, "num_generations"),
        (torch.zeros(8), {"num_generations": -2}, "num_generations"),
        (torch.zeros(2, 4), {"num_generations": 3}, "num_generations"),
        (torch.zeros(2, 2, 2), {}, "rewards"),
        (torch.zeros(2, 4), {"scale": "std"}, "scale"),
        (torch.zeros(2, 4), {"baseline": "median"}, "baseline"),
        (torch.zeros(2, 4), {"eps": -1e-3}, "eps"),
        (torch.zeros(2, 4), {"ddof": 2}, "ddof"),
        (torch.tensor([[1.0, float("inf")]]), {}, "rewards"),
    ],
)
def test_bad_input(rewards: Tensor, arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        group_relative_advantages(rewards, **arguments)


def test_rewards_must_be_a_tensor() -> None:
    with pytest.raises(TypeError, match="rewards"):
        group_relative_advantages([0.0, 1.0])  # type: ignore[arg-type]
