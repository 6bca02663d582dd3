"""compute_advantages and multi_reward_advantages against formulas in Python floats."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_grpo import compute_advantages, group_relative_advantages, multi_reward_advantages
from fused_grpo.advantages import weighted_sum
from fused_grpo.estimators import ESTIMATORS

NAN = float("nan")
Rows = list[list[float]]

GROUPS: Rows = [
    [0.0, 1.0, 0.5, 0.25],
    [1.0, 1.0, 1.0, 1.0],
    [3.0, 100.0, 7.0, NAN],
    [NAN, NAN, NAN, NAN],
    [2.0, NAN, NAN, NAN],
    [0.0, 0.0, 1.0, 1.0],
    [0.1, NAN, 0.1, 0.1],
]
LENGTHS: Rows = [
    [5, 1, 9, 30],
    [1, 2, 3, 4],
    [7, 7, 2, 11],
    [1, 1, 1, 1],
    [4, 5, 6, 7],
    [3, 1, 12, 2],
    [2, 2, 5, 1],
]
GREEDY = [0.5, 1.0, 4.0, 2.0, NAN, 0.0, 0.3]


def valid(row: list[float]) -> list[float]:
    return [r for r in row if not math.isnan(r)]


def by_group(formula: Callable[[list[float], int, list[float]], float]) -> Callable[..., Rows]:
    """formula(valid rewards of the group, index among them, their lengths), 0 where nothing can be
    learnt."""

    def estimate(groups: Rows, lengths: Rows) -> Rows:
        out = []
        for row, sizes in zip(groups, lengths, strict=True):
            rewards = valid(row)
            of = [n for n, r in zip(sizes, row, strict=True) if not math.isnan(r)]
            teaches = len(rewards) > 1 and max(rewards) > min(rewards)
            where, line = 0, []
            for r in row:
                if math.isnan(r):
                    line.append(0.0)
                    continue
                line.append(formula(rewards, where, of) if teaches else 0.0)
                where += 1
            out.append(line)
        return out

    return estimate


def others(r: list[float], i: int) -> list[float]:
    return r[:i] + r[i + 1 :]


def loo_std(r: list[float], i: int, _: list[float]) -> float:
    rest = others(r, i)
    spread = statistics.stdev(rest) if len(rest) > 1 and max(rest) > min(rest) else 0.0
    return (r[i] - statistics.fmean(rest)) / (spread + 1e-6 if spread else 1.0)


def best_of(r: list[float], i: int, _: list[float]) -> float:
    second, best = sorted(r)[-2:]
    return (best - second) / (statistics.stdev(r) + 1e-4) if r[i] == best > second else 0.0


def whitened(groups: Rows, weights: Rows, eps: float = 1e-4) -> Rows:
    """Each value as often as its weight says, written out."""
    flat = [
        x
        for row, counts in zip(groups, weights, strict=True)
        for r, n in zip(row, counts, strict=True)
        if not math.isnan(r)
        for x in [r] * int(n)
    ]
    mean, std = statistics.fmean(flat), statistics.stdev(flat)
    return [[0.0 if math.isnan(r) else (r - mean) / (std + eps) for r in row] for row in groups]


def with_baseline(groups: Rows, lengths: Rows) -> Rows:
    centred = by_group(lambda r, i, _: r[i] - statistics.fmean(r))(groups, lengths)
    holes = [
        [NAN if math.isnan(r) else c for r, c in zip(row, line, strict=True)]
        for row, line in zip(groups, centred, strict=True)
    ]
    white = whitened(holes, [[1] * len(row) for row in groups])
    return [
        [w if len(set(valid(row))) > 1 else 0.0 for w in line]
        for row, line in zip(groups, white, strict=True)
    ]


SCORED = sum(len(valid(row)) for row in GROUPS) / sum(r != 0 for row in GROUPS for r in valid(row))

FORMULAS: dict[str, Callable[[Rows, Rows], Rows]] = {
    "grpo": by_group(lambda r, i, _: (r[i] - statistics.fmean(r)) / (statistics.stdev(r) + 1e-4)),
    "dr_grpo": by_group(lambda r, i, _: r[i] - statistics.fmean(r)),
    "rloo": by_group(lambda r, i, _: r[i] - statistics.fmean(others(r, i))),
    "rloo_std": by_group(loo_std),
    "reinforce_plus_plus": lambda groups, _: whitened(groups, [[1] * 4] * len(groups)),
    "reinforce_plus_plus_baseline": with_baseline,
    "opo": by_group(lambda r, i, n: r[i] - sum(a * b for a, b in zip(n, r, strict=True)) / sum(n)),
    "remax": lambda groups, _: [
        [0.0 if math.isnan(r) or math.isnan(g) else r - g for r in row]
        for row, g in zip(groups, GREEDY, strict=True)
    ],
    "pass_at_k": by_group(best_of),
    "maxrl": by_group(lambda r, i, _: (r[i] - statistics.fmean(r)) / (statistics.fmean(r) + 1e-6)),
    "gpg": by_group(lambda r, i, _: (r[i] - statistics.fmean(r)) * SCORED),
}
EXTRA: dict[str, dict[str, Tensor]] = {
    "opo": {"lengths": torch.tensor(LENGTHS)},
    "remax": {"greedy_rewards": torch.tensor(GREEDY, dtype=torch.float64)},
}
# whose baseline is the group's
OF_GROUPS = sorted(set(FORMULAS) - {"reinforce_plus_plus", "remax"})


def doubles(rows: Any) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def test_every_estimator_has_a_formula_here() -> None:
    assert FORMULAS.keys() == ESTIMATORS.keys()


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("name", FORMULAS)
def test_against_the_definition(name: str, flat: bool) -> None:
    """T1: NaN, equal and single rewards among ordinary ones."""
    rewards, extra = doubles(GROUPS), EXTRA.get(name, {})
    if flat:
        extra = {k: v.flatten() for k, v in extra.items()}
        got = compute_advantages(rewards.flatten(), 4, estimator=name, **extra).view(-1, 4)
    else:
        got = compute_advantages(rewards, estimator=name, **extra)
    want = doubles(FORMULAS[name](GROUPS, LENGTHS))
    assert want.count_nonzero() >= (2 if name == "pass_at_k" else 5)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-13)
    single = compute_advantages(rewards.float(), estimator=name, **extra)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single, want.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OF_GROUPS)
@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.0, 1e8, 1e30])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 16])
def test_equal_and_single_rewards_are_exactly_zero(size: int, value: float, name: str) -> None:
    """Seven times 0.1 has a rounding std; another group teaches something."""
    rewards = torch.full((3, size), value)
    rewards[2] = torch.arange(size)
    rewards[1, 1:] = NAN
    extra = {"lengths": torch.arange(1, 3 * size + 1).view(3, size)} if name == "opo" else {}
    got = compute_advantages(rewards, estimator=name, **extra)
    assert not got[:2].any()
    assert got.isfinite().all()
    assert bool(got[2].any()) == (size > 1)


@pytest.mark.parametrize("value", [0.1, -1e30])
def test_equal_batches_are_exactly_zero(value: float) -> None:
    rewards = torch.full((3, 7), value)
    rewards[1, 2] = NAN
    assert not compute_advantages(rewards, estimator="reinforce_plus_plus").any()
    lengths = torch.arange(1, 22).view(3, 7)
    assert not compute_advantages(rewards, estimator="reinforce_plus_plus", lengths=lengths).any()
    greedy = torch.full((3,), value)
    assert not compute_advantages(rewards, estimator="remax", greedy_rewards=greedy).any()


@pytest.mark.parametrize("name", FORMULAS)
def test_nothing_valid(name: str) -> None:
    extra = {
        "opo": {"lengths": torch.ones(2, 3)},
        "remax": {"greedy_rewards": torch.ones(2)},
    }.get(name, {})
    got = compute_advantages(torch.full((2, 3), NAN), estimator=name, **extra)
    assert not got.any()


@pytest.mark.parametrize("name", sorted(set(FORMULAS) - {"maxrl"}))
def test_huge_rewards(name: str) -> None:
    """+-1e30, whose squares are no fp32 numbers: what does not depend on the unit stays finite."""
    rewards = torch.tensor([[1e30, -1e30, 3e29, 0.0], [1.0, 0.0, 0.0, 2.0]])
    extra = {
        "opo": {"lengths": torch.ones(2, 4)},
        "remax": {"greedy_rewards": torch.zeros(2)},
    }.get(name, {})
    got = compute_advantages(rewards, estimator=name, **extra)
    assert got.isfinite().all()
    assert got[0].abs().max() > 0.1
    if name in ("grpo", "pass_at_k", "rloo_std"):
        small = compute_advantages(rewards.double() / 1e30, estimator=name, eps=0.0)
        torch.testing.assert_close(got[0].double(), small[0], rtol=1e-5, atol=1e-5)


def test_numbers_worked_out() -> None:
    """(0.9, 0.4, 0.9, 0.2): mean 0.6, sample std 0.3559; the means of the others 1/2, 2/3, ..."""
    rewards = doubles([[0.9, 0.4, 0.9, 0.2]])

    def of(name: str, **options: Any) -> list[float]:
        return [
            round(x, 4) for x in compute_advantages(rewards, estimator=name, **options)[0].tolist()
        ]

    assert of("grpo", eps=0.0) == [0.8429, -0.562, 0.8429, -1.1239]
    assert of("grpo", eps=0.0, ddof=0) == [0.9733, -0.6489, 0.9733, -1.2978]
    assert of("rloo") == [0.4, -0.2667, 0.4, -0.5333]
    assert of("dr_grpo") == [0.3, -0.2, 0.3, -0.4]
    assert of("maxrl", eps=0.0) == [0.5, -0.3333, 0.5, -0.6667]
    assert of("gpg") == [0.3, -0.2, 0.3, -0.4]
    # (0.9 + 3 * 0.4 + 0.9 + 5 * 0.2) / 10 = 0.4
    assert of("opo", lengths=torch.tensor([[1, 3, 1, 5]])) == [0.5, 0.0, 0.5, -0.2]
    assert of("remax", greedy_rewards=torch.tensor([0.5])) == [0.4, -0.1, 0.4, -0.3]
    assert of("pass_at_k") == [0.0] * 4  # the best is not better than the second
    one = doubles([[0.9, 0.4, 0.7, 0.2]])
    got = compute_advantages(one, estimator="pass_at_k", scale="none")
    torch.testing.assert_close(got, doubles([[0.2, 0.0, 0.0, 0.0]]))


def test_whitening_over_tokens() -> None:
    """With lengths, statistics count every token: those of a batch of tokens, one reward each."""
    rewards, lengths = doubles(GROUPS), torch.tensor(LENGTHS)
    got = compute_advantages(rewards, estimator="reinforce_plus_plus", lengths=lengths)
    want = doubles(whitened(GROUPS, LENGTHS))
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-13)
    tokens = got[~rewards.isnan()].repeat_interleave(lengths[~rewards.isnan()])
    assert abs(float(tokens.mean())) < 1e-12
    assert float(tokens.std()) == pytest.approx(1.0, rel=1e-4)


def test_scale_of_rloo_and_pass_at_k() -> None:
    rewards = doubles(GROUPS)
    for scale in ("none", "group", "batch"):
        torch.testing.assert_close(
            compute_advantages(rewards, estimator="rloo", scale=scale),
            group_relative_advantages(rewards, scale=scale, baseline="leave_one_out"),
        )
    plain = compute_advantages(rewards, estimator="pass_at_k", scale="none")
    std = statistics.stdev([r for row in GROUPS for r in valid(row)])
    batch = compute_advantages(rewards, estimator="pass_at_k", scale="batch", eps=0.0)
    torch.testing.assert_close(batch, plain / std)


@pytest.mark.parametrize("name", FORMULAS)
def test_inputs_are_untouched_and_gradient_free(name: str) -> None:
    rewards = doubles(GROUPS).requires_grad_()
    extra = {k: v.clone() for k, v in EXTRA.get(name, {}).items()}
    got = compute_advantages(rewards, estimator=name, **extra)
    assert not got.requires_grad
    assert torch.equal(rewards.detach().nan_to_num(9.0), doubles(GROUPS).nan_to_num(9.0))
    assert all(torch.equal(v, EXTRA[name][k]) or v.isnan().any() for k, v in extra.items())


# ---- several rewards ----------------------------------------------------------------------------

REWARDS = doubles(
    [
        [1.0, 10.0],
        [0.0, 30.0],
        [1.0, NAN],
        [0.0, 20.0],
        [0.5, 1.0],
        [0.5, 1.0],
        [0.5, 1.0],
        [0.5, 1.0],
        [NAN, NAN],
        [1.0, 5.0],
        [0.0, 5.0],
        [0.0, 5.0],
    ]
)
WEIGHTS = [2.0, 0.5]


def test_sum_then_normalize() -> None:
    total = [
        sum(w * r for w, r in zip(WEIGHTS, row, strict=True) if r == r) for row in REWARDS.tolist()
    ]
    total[8] = NAN
    got = multi_reward_advantages(REWARDS, 4, weights=WEIGHTS)
    want = doubles(FORMULAS["grpo"]([total[i : i + 4] for i in (0, 4, 8)], [[1] * 4] * 3)).flatten()
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-13)
    assert not got[4:9].any()
    summed = weighted_sum(REWARDS, WEIGHTS)
    torch.testing.assert_close(summed, doubles(total), equal_nan=True)


def test_normalize_then_sum() -> None:
    """GDPO: each reward by its own group, the weighted sum, then the batch."""
    columns = [[REWARDS[i : i + 4, k].tolist() for i in (0, 4, 8)] for k in (0, 1)]
    parts = [doubles(FORMULAS["grpo"](c, [[1] * 4] * 3)).flatten() for c in columns]
    total = WEIGHTS[0] * parts[0] + WEIGHTS[1] * parts[1]
    scored = [float(x) for i, x in enumerate(total) if i != 8]
    mean, std = statistics.fmean(scored), statistics.stdev(scored)
    want = (total - mean) / (std + 1e-4)
    want[4:9] = 0  # the second group teaches nothing, and nobody scored row 8
    for how in (
        {"aggregation": "normalize_then_sum"},
        {"estimator": "gdpo"},
        {"estimator": "gdpo", "aggregation": "normalize_then_sum"},
    ):
        got = multi_reward_advantages(REWARDS, 4, weights=WEIGHTS, **how)
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-13)


def test_a_reward_of_another_unit_does_not_drown_the_others() -> None:
    """T9: the unit of one reward matters in a sum, and not once it is normalised."""
    scaled = REWARDS * torch.tensor([1.0, 0.001])
    before, after = (
        multi_reward_advantages(r, 4, estimator="gdpo", eps=0.0) for r in (REWARDS, scaled)
    )
    torch.testing.assert_close(before, after)
    before, after = (multi_reward_advantages(r, 4) for r in (REWARDS, scaled))
    assert (before - after).abs().max() > 0.1


def test_one_reward_is_no_special_case() -> None:
    rewards = doubles(GROUPS).flatten()
    for name in ("grpo", "rloo", "maxrl"):
        got = multi_reward_advantages(rewards[:, None], 4, estimator=name)
        assert torch.equal(got, compute_advantages(rewards, 4, estimator=name))
    assert not multi_reward_advantages(torch.zeros(8, 3), 4, estimator="gdpo").any()


def test_options_pass_through() -> None:
    got = multi_reward_advantages(REWARDS, 4, estimator="grpo", scale="none", weights=WEIGHTS)
    total = weighted_sum(REWARDS, WEIGHTS)
    assert torch.equal(got, group_relative_advantages(total, 4, scale="none"))


# ---- other libraries ----------------------------------------------------------------------------


def test_against_trl() -> None:
    """The statistics that TRL 1.16's trainer makes its advantages of, NaN left out of them."""
    utils = pytest.importorskip("trl.trainer.utils")
    rewards = doubles([row for row in GROUPS if len(set(valid(row))) > 1]).float()
    mean = torch.nanmean(rewards, dim=1, keepdim=True)
    for scale, std in (
        ("group", utils.nanstd(rewards, dim=1)[:, None]),
        ("batch", utils.nanstd(rewards.flatten())),
    ):
        want = ((rewards - mean) / (std + 1e-4)).nan_to_num(0.0)
        torch.testing.assert_close(group_relative_advantages(rewards, scale=scale), want)


VERL = {
    "grpo": ("compute_grpo_outcome_advantage", {"eps": 1e-6}),
    "dr_grpo": ("compute_grpo_outcome_advantage", {}),
    "rloo": ("compute_rloo_outcome_advantage", {}),
    "opo": ("compute_opo_outcome_advantage", {}),
    "pass_at_k": ("compute_grpo_passk_outcome_advantage", {"eps": 1e-6}),
    "reinforce_plus_plus": ("compute_reinforce_plus_plus_outcome_advantage", {"eps": 0.0}),
    "reinforce_plus_plus_baseline": (
        "compute_reinforce_plus_plus_baseline_outcome_advantage",
        {"eps": 0.0},
    ),
    "gpg": ("compute_gpg_outcome_advantage", {}),
}


@pytest.mark.parametrize("name", VERL)
def test_against_verl(name: str) -> None:
    """verl's own functions, where they can be imported; it has no NaN, and whitens over tokens."""
    algos = pytest.importorskip("verl.trainer.ppo.core_algos", exc_type=ImportError)
    function, options = VERL[name]
    rewards = torch.tensor([[0.0, 1.0, 0.5, 0.25], [3.0, 100.0, 7.0, 8.0], [0.0, 0.0, 1.0, 1.0]])
    lengths = torch.tensor(LENGTHS[:3])
    mask = (torch.arange(30) < lengths.view(-1, 1)).float()
    at_end = torch.zeros_like(mask)
    at_end[torch.arange(12), lengths.flatten() - 1] = rewards.flatten()
    more: dict[str, Any] = {"norm_adv_by_std_in_grpo": False} if name == "dr_grpo" else {}
    if name == "reinforce_plus_plus":
        more["config"] = type("Config", (), {"gamma": 1.0})()
    else:
        import numpy as np

        more["index"] = np.arange(12) // 4
    if name == "pass_at_k":
        more["config"] = {}
    want = getattr(algos, function)(at_end, mask, **more)[0][:, 0].view(3, 4)
    takes_lengths = name == "opo" or "plus" in name
    extra = {"lengths": lengths} if takes_lengths else {}
    got = compute_advantages(rewards, estimator=name, **options, **extra)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


# ---- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"estimator": "ppo"}, "estimator ppo grpo rloo opo"),
        ({"estimator": "rloo", "baseline": "mean"}, "baseline rloo scale eps ddof"),
        ({"estimator": "dr_grpo", "eps": 0.1}, "eps dr_grpo"),
        ({"estimator": "grpo", "lengths": torch.ones(2, 4)}, "lengths grpo"),
        ({"estimator": "opo"}, "opo lengths"),
        ({"estimator": "opo", "lengths": None}, "opo lengths"),
        ({"estimator": "opo", "lengths": torch.ones(2, 3)}, "lengths 3 4"),
        ({"estimator": "opo", "lengths": -torch.ones(2, 4)}, "lengths"),
        ({"estimator": "remax"}, "remax greedy_rewards"),
        ({"estimator": "remax", "greedy_rewards": torch.ones(8)}, "greedy_rewards 8 2"),
        ({"estimator": "pass_at_k", "scale": "std"}, "scale std group"),
        ({"estimator": "rloo_std", "eps": -1.0}, "eps -1.0"),
        ({"estimator": "reinforce_plus_plus", "ddof": 3}, "ddof 3"),
        ({"estimator": "maxrl"}, "maxrl rewards"),
    ],
)
def test_bad_options(options: dict[str, Any], names: str) -> None:
    rewards = torch.tensor([[1.0, -2.0, 0.0, 3.0], [0.0, 1.0, 1.0, 0.0]])
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the words are checked below)
        compute_advantages(rewards, **options)
    assert all(name in str(caught.value) for name in names.split()), caught.value


@pytest.mark.parametrize(
    ("rewards", "options", "match"),
    [
        (torch.zeros(8), {}, "rewards"),
        (torch.zeros(8, 2), {"weights": [1.0]}, "weights"),
        (torch.zeros(8, 2), {"weights": [1.0, NAN]}, "weights"),
        (torch.zeros(8, 2), {"aggregation": "mean"}, "aggregation"),
        (torch.zeros(7, 2), {}, "num_generations"),
        (torch.full((8, 2), math.inf), {}, "rewards"),
    ],
)
def test_bad_multi_rewards(rewards: Tensor, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        multi_reward_advantages(rewards, 4, **options)


def test_lengths_must_be_a_tensor() -> None:
    with pytest.raises(TypeError, match="lengths"):
        compute_advantages(torch.zeros(1, 2), estimator="opo", lengths=[[1, 2]])
