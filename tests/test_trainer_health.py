"""Warnings: each rule on synthetic logs, what is said again and when, and three real runs."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import watched_runs

from fused_grpo.trainer import GRPOConfig
from fused_grpo.trainer.health import HealthWarnings
from fused_grpo.trainer.health_rules import CALM, FIRST, RULES, USUAL, Rule

BY_NAME = {rule.name: rule for rule in RULES}
NAMES = list(BY_NAME)


def metric_of(rule: Rule) -> str:
    return rule.metric.replace("*", "exact")


def beginning(rule: Rule) -> list[float]:
    """Logs before the trouble: those that the reading compares with, or none."""
    count = {"mean": 0, "mean / median before": USUAL // 2}.get(rule.reading, FIRST)
    return [1.0 if "/" in rule.reading else 0.1] * count


def at(rule: Rule, reading: float) -> float:
    """The value of the metric that, seen `over` times after `beginning`, gives a reading."""
    return reading + 0.1 if rule.reading == "mean - first" else reading


def healthy(rule: Rule) -> float:
    """A value far on the right side of the threshold."""
    return at(rule, rule.threshold / 4 if rule.sign > 0 else rule.threshold * 4 + 1)


class Watch:
    """Feeds logs to the callback, and remembers the step of each warning."""

    def __init__(self, tmp_path: Path, history: Any = (), **options: Any) -> None:
        self.texts: list[str] = []
        self.callback = HealthWarnings(tmp_path, say=self.texts.append, **options)
        self.state = SimpleNamespace(
            global_step=len(history), is_world_process_zero=True, log_history=list(history)
        )
        self.callback.on_train_begin(None, self.state, None)

    def __call__(self, metric: str, values: list[float], **others: float) -> list[int]:
        """The steps at which something was said."""
        steps = []
        for value in values:
            self.state.global_step += 1
            before = len(self.texts)
            logs = {metric: value, **others}
            self.callback.on_log(None, self.state, None, logs)
            self.state.log_history.append({**logs, "step": self.state.global_step})
            steps += [self.state.global_step] * (len(self.texts) - before)
        return steps

    @property
    def rules(self) -> list[str]:
        return [warning["rule"] for warning in self.callback.given]


def only(rule: Rule) -> dict[str, Any]:
    return {"thresholds": {name: None for name in NAMES if name != rule.name}}


@pytest.mark.parametrize("name", NAMES)
def test_a_rule_speaks_at_its_threshold_and_once(tmp_path: Path, name: str) -> None:
    rule = BY_NAME[name]
    start = beginning(rule)
    watch = Watch(tmp_path, **only(rule))
    bad = at(rule, rule.threshold) * (1 + rule.sign * 1e-9)  # as close as sums of floats allow
    steps = watch(metric_of(rule), [*start, *[bad] * (rule.over + 30)])
    assert steps == [len(start) + rule.over]
    (text,) = watch.texts
    assert text.startswith(f"{name}, step")
    assert f"(threshold {rule.threshold:g}). Try: {rule.advice}." in text
    assert "{" not in text
    if "*" in rule.metric:
        assert "exact" in text
    (entry,) = watched_runs.lines(tmp_path / "warnings.jsonl")
    assert entry == watch.callback.given[0]
    assert (entry["rule"], entry["step"], entry["text"]) == (name, steps[0], text)


@pytest.mark.parametrize("name", NAMES)
def test_a_rule_is_silent_just_before_its_threshold(tmp_path: Path, name: str) -> None:
    rule = BY_NAME[name]
    watch = Watch(tmp_path, **only(rule))
    near = rule.threshold * (1 - rule.sign * 0.01) if rule.threshold else 1e-3
    assert watch(metric_of(rule), [*beginning(rule), *[at(rule, near)] * 60]) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_rule_waits_for_as_many_logs_as_it_says(tmp_path: Path, name: str) -> None:
    rule = BY_NAME[name]
    watch = Watch(tmp_path, **only(rule))
    bad = at(rule, rule.threshold + rule.sign * abs(rule.threshold) * 0.2)
    assert watch(metric_of(rule), [*beginning(rule), *[bad] * (rule.over - 1)]) == []
    assert len(watch(metric_of(rule), [bad])) == 1


@pytest.mark.parametrize("name", [n for n in NAMES if BY_NAME[n].threshold])
def test_a_threshold_of_ones_own(tmp_path: Path, name: str) -> None:
    rule = BY_NAME[name]
    other = rule.threshold * (1.5 if rule.sign > 0 else 0.7)
    watch = Watch(tmp_path, thresholds={**only(rule)["thresholds"], name: other})
    between = at(rule, rule.threshold * (1.2 if rule.sign > 0 else 0.85))
    assert watch(metric_of(rule), [*beginning(rule), *[between] * 30]) == []
    beyond = at(rule, other * (1.01 if rule.sign > 0 else 0.99))
    watch = Watch(tmp_path, thresholds={**only(rule)["thresholds"], name: other})
    assert len(watch(metric_of(rule), [*beginning(rule), *[beyond] * rule.over])) == 1


def test_it_is_said_again_when_twice_as_bad(tmp_path: Path) -> None:
    watch = Watch(tmp_path, **only(BY_NAME["kl_explosion"]))
    assert watch("kl", [1.0] * 3) == [3]
    assert watch("kl", [1.9] * 10) == []
    assert watch("kl", [2.01] * 10) == [16]  # the mean of three is then at least 2
    assert watch("kl", [3.9] * 10) == []
    assert watch("kl", [40.0]) == [34]
    falling = Watch(tmp_path, **only(BY_NAME["few_effective_tokens"]))
    assert falling("effective_sample_size", [0.4] * 3) == [3]
    assert falling("effective_sample_size", [0.21] * 9) == []
    assert falling("effective_sample_size", [0.19] * 9) == [14]


def test_it_is_said_anew_only_after_a_long_calm(tmp_path: Path) -> None:
    watch = Watch(tmp_path, **only(BY_NAME["kl_explosion"]))
    assert watch("kl", [1.2] * 5) == [3]
    # around the threshold, and short of the margin below it, nothing is over
    assert watch("kl", [0.95, 1.05] * 100) == []
    assert watch("kl", [0.5] * (CALM - 2)) == []  # the mean of three stays calm for one more
    assert watch("kl", [1.2] * 5) == []
    assert watch("kl", [0.5] * (CALM + 2)) == []  # two of them stand with a value of before
    assert len(watch("kl", [1.2] * 5)) == 1


def test_causes_are_told_apart(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    steps = watch("rewards/a/missing", [1.0] * 9, **{"rewards/b/missing": 0.9, "kl": 5.0})
    assert steps == [3, 3, 3]
    assert sorted(watch.rules) == ["kl_explosion", "reward_missing", "reward_missing"]
    assert {w["name"] for w in watch.callback.given} == {"", "a", "b"}


def test_spikes_are_compared_with_the_median_before(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    usual = [0.9, 1.0, 1.1] * 7
    assert watch("grad_norm", [50.0, *usual]) == [], "at the start nothing is usual"
    assert watch("grad_norm", [9.0]) == []
    assert watch("grad_norm", [11.0]) == [24]
    assert "norm is 11, 11 times the usual" in watch.texts[-1]
    watch = Watch(tmp_path)
    assert watch("grad_norm", [0.0] * 15 + [5.0]) == [], "nothing is a multiple of zero"


def test_texts_name_what_was_seen(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    logs = {"completions/clipped_ratio": 0.31}
    watch("completions/mean_length", [100.0] * 10 + [250.0] * 10, **logs)
    assert watch.texts[0].startswith(
        "length_grows, steps 11 to 20: completions grew from 100 to 250 tokens (2.5 times); 31% "
        "are cut off (threshold 2). Try: loss_type dapo"
    )


def test_missing_values_are_no_news(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    assert watch("kl", [5.0, math.nan, None, 5.0]) == []  # type: ignore[list-item]
    assert watch("kl", [5.0]) == [5]
    assert watch("entropy", [math.nan] * 50) == []


def test_a_resumed_run_remembers_and_does_not_repeat(tmp_path: Path) -> None:
    first = Watch(tmp_path)
    first("entropy", [2.0] * 12, kl=3.0)
    assert first.rules == ["kl_explosion"]
    second = Watch(tmp_path, first.state.log_history)
    assert second("entropy", [2.0] * 5, kl=3.0) == []
    assert second("entropy", [0.01] * 10) == [27]  # against the first logs of all
    entries = watched_runs.lines(tmp_path / "warnings.jsonl")
    assert [(e["rule"], e["step"]) for e in entries] == [
        ("kl_explosion", 3),
        ("entropy_collapse", 27),
    ]


def test_other_processes_are_silent(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    watch.state.is_world_process_zero = False
    assert watch("kl", [5.0] * 9) == []
    assert not (tmp_path / "warnings.jsonl").exists()


# ---- real runs ----------------------------------------------------------------------------------


def warned(path: Path) -> set[str]:
    file = path / "warnings.jsonl"
    return {entry["rule"] for entry in watched_runs.lines(file)} if file.exists() else set()


def same(prompts: list[str], **_: Any) -> list[float]:
    return [0.5] * len(prompts)


def rarely(completions: list[str], **_: Any) -> list[float | None]:
    return [0.5 * i if i < 2 else None for i in range(len(completions))]


@pytest.mark.parametrize(
    ("reward", "options", "expected"),
    [
        (same, {"max_steps": 10}, {"zero_variance", "reward_constant"}),
        (rarely, {"max_steps": 4}, {"reward_missing"}),
        (watched_runs.letters, {"max_steps": 6, "max_completion_length": 2}, {"truncation"}),
        (watched_runs.letters, {"max_steps": 6, "learning_rate": 1e-4}, set()),
        (
            watched_runs.letters,
            {"max_steps": 8, "learning_rate": 0.3, "num_iterations": 4, "beta": 1e-3},
            {"clipping", "kl_explosion"},
        ),
    ],
    ids=["equal rewards", "missing rewards", "short", "healthy", "learning rate"],
)
def test_real_runs(
    tmp_path: Path,
    reward: Any,
    options: dict[str, Any],
    expected: set[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    eos = {"generation_kwargs": {"eos_token_id": list(range(40))}}  # ends by itself, soon
    run = watched_runs.make(
        tmp_path, reward, **({} if "truncation" in expected else eos), **options
    )
    with caplog.at_level(logging.WARNING, logger="fused_grpo"):
        run.train()
    assert warned(tmp_path) >= expected
    if not expected:
        assert warned(tmp_path) == set()
    for rule in expected:
        assert any(text.startswith(f"{rule}, ") for text in caplog.messages)


def test_warnings_can_be_switched_off(tmp_path: Path) -> None:
    watched_runs.make(tmp_path / "a", same, max_steps=6, run_warnings=False).train()
    thresholds = '{"zero_variance": null}'
    run = watched_runs.make(tmp_path / "b", same, max_steps=6, run_warning_thresholds=thresholds)
    run.train()
    assert warned(tmp_path / "a") == set()
    assert "zero_variance" not in warned(tmp_path / "b")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"run_warning_thresholds": {"kl": 1.0}}, ValueError, "has no rule 'kl'; they are length"),
        ({"run_warning_thresholds": "{kl"}, ValueError, "is not JSON"),
        ({"run_warning_thresholds": [1]}, TypeError, "must be a dict by rule, not list"),
        ({"run_warning_thresholds": {"truncation": "1"}}, TypeError, r"\['truncation'\] must be a"),
        ({"run_warning_thresholds": {"truncation": True}}, TypeError, "must be a number, not bool"),
        ({"run_warning_thresholds": {}, "run_warnings": False}, ValueError, "needs run_warnings"),
    ],
)
def test_options_that_do_not_fit(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        GRPOConfig(str(tmp_path), per_device_train_batch_size=8, use_cpu=True, **options)
