"""Statistics of verified samples: pass@k, majority votes, bootstrap intervals."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

RESAMPLES = 10_000
CHUNK = 500  # resamples at once: 500 x 2,000 prompts are 8 MB


@dataclass(frozen=True)
class Interval:
    """A mean over prompts and the bounds of its confidence interval."""

    mean: float
    low: float
    high: float
    level: float

    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0

    def json(self) -> dict[str, float]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that one of k samples is right, estimated without bias from c right ones of n.

    1 - C(n - c, k) / C(n, k): the share of the k-subsets of the n samples with a right one in it
    (Chen et al. 2021, equation 1).

    Raises:
        ValueError: unless 1 <= k <= n and 0 <= c <= n.
    """
    if not 1 <= k <= n:
        raise ValueError(f"k={k} must lie between 1 and the number of samples, n={n}")
    if not 0 <= c <= n:
        raise ValueError(f"c={c} must lie between 0 and n={n}")
    subsets = math.comb(n, k)
    return (subsets - math.comb(n - c, k)) / subsets  # whole numbers: rounded once


def majority_vote(answers: Sequence[Hashable], correct: Sequence[float]) -> float:
    """The expected correctness of the commonest answer, ties drawn by lot.

    Answers that are None, such as of a completion without one, have no vote; 0 if there is none.
    An answer that was judged both right and wrong counts with its mean.
    """
    votes: dict[Hashable, list[float]] = defaultdict(list)
    for answer, right in zip(answers, correct, strict=True):
        if answer is not None:
            votes[answer].append(right)
    most = max(map(len, votes.values()), default=0)
    winners = [sum(v) / len(v) for v in votes.values() if len(v) == most]
    return sum(winners) / len(winners) if winners else 0.0


def majority_at_k(
    answers: Sequence[Hashable], correct: Sequence[float], k: int, seed: int = 0, draws: int = 200
) -> float:
    """`majority_vote` of k of the samples: of all where k is their number, else of `draws` subsets.

    Raises:
        ValueError: unless 1 <= k <= n.
    """
    n = len(answers)
    if not 1 <= k <= n:
        raise ValueError(f"k={k} must lie between 1 and the number of samples, n={n}")
    if k == n:
        return majority_vote(answers, correct)
    rng = np.random.default_rng(seed)
    votes = []
    for _ in range(draws):
        chosen = rng.choice(n, k, replace=False)
        votes.append(majority_vote([answers[i] for i in chosen], [correct[i] for i in chosen]))
    return sum(votes) / draws


def bootstrap(
    values: Sequence[float], level: float = 0.95, seed: int = 0, resamples: int = RESAMPLES
) -> Interval:
    """The mean of one value per prompt, with a percentile bootstrap interval over the prompts.

    Prompts are what is resampled: several samples of one prompt are no extra evidence. Where
    all values are equal the interval is a point, which says nothing about other prompts.

    Raises:
        ValueError: without values, with one that is not finite, or a level outside (0, 1).
    """
    data = np.asarray(values, dtype=np.float64)
    if data.ndim != 1 or not len(data):
        raise ValueError(f"values must be one number per prompt, not an array {list(data.shape)}")
    if not np.isfinite(data).all():
        raise ValueError("values must be finite")
    if not 0 < level < 1:
        raise ValueError(f"level={level} must lie between 0 and 1")
    if resamples < 1:
        raise ValueError(f"resamples={resamples} must be at least 1")
    rng = np.random.default_rng(seed)
    means = [
        data[rng.integers(0, len(data), (min(CHUNK, resamples - start), len(data)))].mean(1)
        for start in range(0, resamples, CHUNK)
    ]
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(data.mean()), float(low), float(high), level)


def paired_difference(
    before: Sequence[float], after: Sequence[float], level: float = 0.95, seed: int = 0
) -> Interval:
    """`bootstrap` of after - before, two values for each prompt in the same order.

    Raises:
        ValueError: when the numbers of values differ, and as `bootstrap` does.
    """
    if len(before) != len(after):
        raise ValueError(f"before has {len(before)} prompts, after {len(after)}: they are no pairs")
    return bootstrap([b - a for a, b in zip(before, after, strict=True)], level, seed)


def matched_samples(train_tokens: float, prompts: int, tokens_per_sample: float) -> int:
    """How many samples of each prompt an untrained model gets for what training has cost.

    The trained model answers `prompts` once each, after training has read and sampled
    `train_tokens` tokens. For the same tokens the untrained one answers each
    1 + train_tokens / (prompts * tokens_per_sample) times, rounded down. Counted are tokens, not
    operations: one that is trained on costs some four times as many as one that is only sampled,
    and this favours the trained model by that much.
    """
    if min(prompts, tokens_per_sample) <= 0 or train_tokens < 0:
        raise ValueError(
            f"prompts={prompts} and tokens_per_sample={tokens_per_sample} must be positive, "
            f"train_tokens={train_tokens} not negative"
        )
    return 1 + int(train_tokens / (prompts * tokens_per_sample))


def length_at_reward(
    rewards: Sequence[float], lengths: Sequence[float], level: float
) -> float | None:
    """The length where the reward first reaches `level`, interpolated between two steps.

    `rewards` and `lengths` have one number per step. None: the reward never gets there.
    """
    previous: tuple[float, float] | None = None
    for reward, length in zip(rewards, lengths, strict=True):
        if reward >= level:
            if previous is None or reward == previous[0]:
                return length
            share = (level - previous[0]) / (reward - previous[0])
            return previous[1] + share * (length - previous[1])
        previous = (reward, length)
    return None


def smooth(values: Sequence[float], window: int) -> list[float]:
    """The mean of up to `window` values at each place, those before it and itself."""
    return [
        sum(part) / len(part)
        for part in (values[max(i + 1 - window, 0) : i + 1] for i in range(len(values)))
    ]


def table(rows: Sequence[Sequence[Any]], header: Sequence[str]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
