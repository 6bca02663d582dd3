"""pass@k, majorities, bootstrap intervals and lengths at a reward, against counting it all out."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_grpo.trainer import passk


def enumerated(n: int, c: int, k: int) -> Fraction:
    """The share of the k-subsets of n samples, the first c of them right, that hold a right one."""
    subsets = list(itertools.combinations(range(n), k))
    return Fraction(sum(min(subset) < c for subset in subsets), len(subsets))


@pytest.mark.parametrize("n", range(1, 9))
def test_pass_at_k_counts_the_subsets(n: int) -> None:
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        assert passk.pass_at_k(n, c, k) == float(enumerated(n, c, k))


@given(st.integers(1, 400), st.data())
def test_pass_at_k_keeps_its_digits_and_order(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    missed = math.prod(Fraction(n - c - i, n - i) for i in range(k)) if n - c >= k else Fraction(0)
    assert passk.pass_at_k(n, c, k) == float(1 - missed)
    if k > 1:
        assert passk.pass_at_k(n, c, k) >= passk.pass_at_k(n, c, k - 1)
    assert passk.pass_at_k(n, c, 1) == c / n


def test_pass_at_k_is_unbiased() -> None:
    """The mean over all outcomes of n samples, each right with chance p, is 1 - (1 - p)^k."""
    n, p = 6, Fraction(2, 7)
    for k in range(1, n + 1):
        mean = sum(
            math.comb(n, c) * p**c * (1 - p) ** (n - c) * enumerated(n, c, k) for c in range(n + 1)
        )
        assert mean == 1 - (1 - p) ** k
        estimate = sum(
            float(math.comb(n, c) * p**c * (1 - p) ** (n - c)) * passk.pass_at_k(n, c, k)
            for c in range(n + 1)
        )
        assert estimate == pytest.approx(float(mean), abs=1e-14)


@pytest.mark.parametrize(
    ("n", "c", "k", "message"),
    [(4, 1, 5, "k=5"), (4, 1, 0, "k=0"), (4, 5, 1, "c=5"), (4, -1, 1, "c=-1")],
)
def test_pass_at_k_refuses(n: int, c: int, k: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        passk.pass_at_k(n, c, k)


answers = st.lists(st.sampled_from(["7", "8", "9", None]), min_size=1, max_size=7)


@given(answers)
def test_majority_is_the_mean_over_ties(given_answers: list[str | None]) -> None:
    correct = [float(answer == "7") for answer in given_answers]
    votes = Counter(answer for answer in given_answers if answer is not None)
    winners = [a for a, n in votes.items() if n == max(votes.values())]
    expected = winners.count("7") / len(winners) if winners else 0.0
    assert passk.majority_vote(given_answers, correct) == expected


def test_majority_of_an_answer_that_is_judged_both_ways() -> None:
    assert passk.majority_vote(["a", "a", "b"], [1.0, 0.0, 1.0]) == 0.5


def test_majority_of_subsets_approaches_all_of_them() -> None:
    given_answers = ["7", "7", "8", "8", "9", None, "7"]
    correct = [float(answer == "7") for answer in given_answers]
    subsets = list(itertools.combinations(range(7), 3))
    exact = [
        passk.majority_vote([given_answers[i] for i in s], [correct[i] for i in s]) for s in subsets
    ]
    draws = 4000
    found = passk.majority_at_k(given_answers, correct, 3, seed=1, draws=draws)
    assert abs(found - np.mean(exact)) < 4 * np.std(exact) / math.sqrt(draws)
    assert found == passk.majority_at_k(given_answers, correct, 3, seed=1, draws=draws)
    whole = passk.majority_vote(given_answers, correct)
    assert passk.majority_at_k(given_answers, correct, 7) == whole == 1.0
    with pytest.raises(ValueError, match="k=8"):
        passk.majority_at_k(given_answers, correct, 8)


def test_bootstrap_is_that_of_all_resamples() -> None:
    """Of four values there are 4^4 resamples: their quantiles are what many draws come to."""
    values = [0.0, 0.25, 0.5, 3.0]
    means = [sum(draw) / 4 for draw in itertools.product(values, repeat=4)]
    low, high = np.quantile(means, [0.1, 0.9])
    found = passk.bootstrap(values, level=0.8, resamples=40_000)
    assert found.mean == np.mean(values)
    # the distribution has steps of 1/16 near the quantiles
    assert found.low == pytest.approx(low, abs=1 / 16)
    assert found.high == pytest.approx(high, abs=1 / 16)


def test_bootstrap_covers() -> None:
    """Of 95 % intervals of a mean of 500 Bernoulli draws about 95 % hold the truth."""
    rng = np.random.default_rng(0)
    runs, inside = 300, 0
    for run in range(runs):
        found = passk.bootstrap((rng.random(500) < 0.3).astype(float), seed=run, resamples=1000)
        inside += found.low <= 0.3 <= found.high
    # 4 standard deviations of a share of 300
    assert abs(inside / runs - 0.95) < 4 * math.sqrt(0.95 * 0.05 / runs)


@settings(max_examples=30)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=30), st.integers(0, 2**31))
def test_bootstrap_repeats_and_brackets(values: list[float], seed: int) -> None:
    found = passk.bootstrap(values, seed=seed, resamples=600)
    assert found == passk.bootstrap(values, seed=seed, resamples=600)
    assert min(values) - 1e-12 <= found.low <= found.high <= max(values) + 1e-12


def test_pairs_use_what_the_prompts_share() -> None:
    """Prompts differ a lot, the two models little: only the paired interval sees it."""
    rng = np.random.default_rng(0)
    before = rng.random(200) * 10
    after = before + 0.1 + 0.05 * rng.standard_normal(200)
    change = passk.paired_difference(before, after)
    assert change.mean == pytest.approx(float(np.mean(after - before)))
    assert change.excludes_zero()
    assert not passk.paired_difference(before, before[::-1]).excludes_zero()
    assert passk.paired_difference(after, before).high < 0
    with pytest.raises(ValueError, match="no pairs"):
        passk.paired_difference(before, after[1:])


@pytest.mark.parametrize(
    ("values", "level", "message"),
    [([], 0.95, "one number per prompt"), ([1.0], 1.0, "level=1"), ([math.nan], 0.9, "finite")],
)
def test_bootstrap_refuses(values: list[float], level: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        passk.bootstrap(values, level)


def test_matched_samples_spend_what_training_spent() -> None:
    # 100 prompts of 20 tokens: 2,000 a round; 9,999 more buy 4 whole rounds
    assert passk.matched_samples(9_999, 100, 20.0) == 1 + 4
    assert passk.matched_samples(0, 100, 20.0) == 1
    with pytest.raises(ValueError, match="tokens_per_sample=0"):
        passk.matched_samples(1, 1, 0)


def test_length_at_reward_interpolates() -> None:
    rewards, lengths = [0.1, 0.3, 0.2, 0.7], [10.0, 20.0, 15.0, 40.0]
    assert passk.length_at_reward(rewards, lengths, 0.1) == 10
    assert passk.length_at_reward(rewards, lengths, 0.25) == pytest.approx(17.5)
    assert passk.length_at_reward(rewards, lengths, 0.3) == 20
    assert passk.length_at_reward(rewards, lengths, 0.45) == pytest.approx(27.5)
    assert passk.length_at_reward(rewards, lengths, 0.71) is None


def test_smooth_is_a_trailing_mean() -> None:
    assert passk.smooth([3, 5, 7, 0], 3) == [3, 4, 5, 4]
    assert passk.smooth([1.5, 2.5], 1) == [1.5, 2.5]
