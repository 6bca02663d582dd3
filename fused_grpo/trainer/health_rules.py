"""What metrics look like when a run goes wrong, with thresholds, and what to try: one table."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

FIRST = 10  # logs at the start of a run that later ones are compared with
USUAL = 20  # logs that tell what is usual, half of them at least
WORSE = 2.0  # said again when the reading has moved this factor further
CALM = 20  # said anew after so many logs without trouble
MARGIN = 0.1  # a trouble is over when the reading is back by this share of the threshold


@dataclass
class Series:
    """One metric of a run: its first values and its latest ones, with their steps."""

    first: list[float] = field(default_factory=list)
    latest: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=USUAL + 1))
    count: int = 0

    def add(self, step: int, value: float) -> None:
        """Take the value of a log."""
        self.count += 1
        self.latest.append((step, value))
        if len(self.first) < FIRST:
            self.first.append(value)

    def mean(self, over: int) -> float:
        """Of the last `over` values."""
        return statistics.fmean([value for _, value in self.latest][-over:])

    @property
    def start(self) -> float:
        """The mean of the first values."""
        return statistics.fmean(self.first)


def _value(series: Series, over: int) -> float | None:
    return series.mean(over) if series.count >= over else None


def _times_first(series: Series, over: int) -> float | None:
    if series.count < FIRST + over or series.start == 0:
        return None
    return series.mean(over) / series.start


def _above_first(series: Series, over: int) -> float | None:
    return series.mean(over) - series.start if series.count >= FIRST + over else None


def _times_usual(series: Series, over: int) -> float | None:
    before = [value for _, value in series.latest][:-over]
    usual = statistics.median(before) if len(before) >= USUAL // 2 else 0.0
    return series.mean(over) / usual if usual > 0 else None


# how a metric is read over the last logs; None: too early to say
READINGS: dict[str, Callable[[Series, int], float | None]] = {
    "mean": _value,
    "mean / first": _times_first,
    "mean - first": _above_first,
    "mean / median before": _times_usual,
}


@dataclass(frozen=True)
class Rule:
    """When to say what.

    Attributes:
        metric: its name in the logs; a "*" stands for a reward function.
        reading: a key of `READINGS`.
        sign: +1 warns at the threshold and above it, -1 at it and below.
        over: the number of last logs that are read.
        seen: what was seen, with {value} or {share} (the reading, as it is or in percent), {now}
            and {start} (means of the last and of the first logs), {name} (what "*" stood for) and
            {cut} (the share of truncated completions now).
        advice: what to try.
    """

    name: str
    metric: str
    reading: str
    sign: int
    threshold: float
    over: int
    seen: str
    advice: str

    def worse(self, reading: float, than: float) -> bool:
        """Whether a reading is at or beyond a bound."""
        return self.sign * reading >= self.sign * than

    def calm(self, reading: float, threshold: float) -> bool:
        """Whether a reading is back from the threshold, by a margin."""
        back = threshold - self.sign * MARGIN * abs(threshold)
        return self.sign * reading < self.sign * back


RULES: tuple[Rule, ...] = (
    Rule(
        *("length_grows", "completions/mean_length", "mean / first", +1, 2.0, 10),
        "completions grew from {start} to {now} tokens ({value} times); {cut} are cut off",
        "loss_type dapo or dr_grpo, whose token weights do not spare long wrong answers; a penalty "
        "of overlong completions; see whether the reward rises with length alone",
    ),
    Rule(
        *("length_collapses", "completions/mean_length", "mean / first", -1, 0.5, 10),
        "completions shrank from {start} to {now} tokens ({value} times)",
        "see in completions.jsonl whether the reward can be had without an answer; a higher beta; "
        "a lower learning_rate",
    ),
    Rule(
        *("truncation", "completions/clipped_ratio", "mean", +1, 0.5, 5),
        "{share} of the completions end at max_completion_length, not by themselves",
        "a larger max_completion_length; mask_truncated_completions=True; an eos_token_id in "
        "generation_kwargs that the model does write",
    ),
    Rule(
        *("truncation_rises", "completions/clipped_ratio", "mean - first", +1, 0.2, 10),
        "completions that are cut off rose from {start} to {now}",
        "a larger max_completion_length; mask_truncated_completions=True; a penalty of overlong "
        "completions",
    ),
    Rule(
        *("entropy_collapse", "entropy", "mean / first", -1, 0.1, 10),
        "entropy fell from {start} to {now} nats ({value} times): samples are nearly all the same",
        "epsilon_high=0.28; entropy_coef or use_adaptive_entropy; a lower learning_rate; a higher "
        "beta; harder prompts, if the reward is near its best",
    ),
    Rule(
        *("entropy_explodes", "entropy", "mean / first", +1, 3.0, 10),
        "entropy rose from {start} to {now} nats ({value} times): samples become noise",
        "a lower learning_rate or entropy_coef; a higher beta; top_p or min_p with "
        "keep_sampling_mask=True",
    ),
    Rule(
        *("zero_variance", "frac_reward_zero_std", "mean", +1, 0.8, 5),
        "{share} of the groups have equal rewards, and teach nothing",
        "prompts neither too easy nor too hard for this model; a larger num_generations; a higher "
        "temperature; a reward with more than two values",
    ),
    Rule(
        *("ratio_tail", "ratio/max", "mean", +1, 10.0, 3),
        "the largest importance ratio is {value} on average",
        "fewer num_iterations or steps_per_generation; a lower learning_rate; loss_type gspo or "
        "cispo; a sampling_correction, if another program samples",
    ),
    Rule(
        *("clipping", "clip_ratio/region_mean", "mean", +1, 0.3, 3),
        "the clip holds back {share} of the tokens",
        "a lower learning_rate; fewer num_iterations or steps_per_generation; a wider epsilon",
    ),
    Rule(
        *("few_effective_tokens", "effective_sample_size", "mean", -1, 0.5, 3),
        "importance ratios leave {share} of the tokens effective",
        "fewer num_iterations or steps_per_generation; a lower learning_rate",
    ),
    Rule(
        *("kl_explosion", "kl", "mean", +1, 1.0, 3),
        "the KL to the reference is {value} nats a token",
        "a lower learning_rate; a higher beta; a lower max_grad_norm; kl_estimator k2 or full, "
        "whose gradients have lighter tails than k3's",
    ),
    Rule(
        *("reward_constant", "rewards/*/std", "mean", -1, 0.0, 10),
        "reward function {name} gives every completion of a step the same",
        "see in completions.jsonl what it is given; if all are right, harder prompts",
    ),
    Rule(
        *("reward_missing", "rewards/*/missing", "mean", +1, 0.5, 3),
        "reward function {name} returns None for {share} of the completions",
        "see whether it fails or times out; leave out prompts that it does not apply to",
    ),
    Rule(
        *("reward_fails", "rewards/*/failed", "mean", +1, 1.0, 3),
        "reward function {name} fails on {value} completions a call",
        "see the log for why; fix it, or give it more time",
    ),
    Rule(
        *("steps_skipped", "skipped_steps", "mean", +1, 1.0, 1),
        "{now} optimizer steps so far were left out: loss or gradient were not finite",
        "a lower learning_rate; fp32 weights, or bf16 for fp16; see the completions of this step",
    ),
    Rule(
        *("gradient_spike", "grad_norm", "mean / median before", +1, 10.0, 1),
        "the gradient's norm is {now}, {value} times the usual",
        "max_grad_norm near the usual norm; a larger batch; see the completions of this step",
    ),
    Rule(
        *("sampler_gap", "sampling/logp_difference/mean", "mean", +1, 0.1, 5),
        "the sampler's log-probabilities are off by {value} nats a token",
        "the same weights, dtype and temperature for both; a sampling_correction such as "
        "token_truncate; MoE models: replay of the routing",
    ),
)
THRESHOLDS = {rule.name: rule.threshold for rule in RULES}
