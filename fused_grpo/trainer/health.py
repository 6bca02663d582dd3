"""Warnings in words, by the rules of `health_rules`.

A cause is said once, again when it has become twice as bad, and anew after a long time without it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from fused_grpo.trainer.health_rules import CALM, READINGS, RULES, THRESHOLDS, WORSE, Rule, Series
from fused_grpo.trainer.records import RunLines

logger = logging.getLogger(__name__)

WARNINGS_FILE = "warnings.jsonl"


@dataclass
class _Said:
    """What is known of a cause: the reading when it was said last, and calm logs since."""

    reading: float
    calm: int = 0


class HealthWarnings(TrainerCallback):
    """Applies `RULES` to every log; says what they find and appends it to warnings.jsonl.

    Args:
        output_dir: the folder of the run.
        thresholds: others than those of `RULES`, by name; None switches a rule off.
        say: takes the text; default: the logger of this module, as a warning.
    """

    def __init__(
        self,
        output_dir: str | Path,
        thresholds: dict[str, float | None] | None = None,
        say: Callable[[str], None] = logger.warning,
    ) -> None:
        self.thresholds: dict[str, float | None] = {**THRESHOLDS, **(thresholds or {})}
        self._lines = RunLines(Path(output_dir) / WARNINGS_FILE)
        self._say = say
        self._forget()

    def _forget(self) -> None:
        self.given: list[dict[str, Any]] = []
        self._series: dict[str, Series] = {}
        self._said: dict[tuple[str, str], _Said] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A resumed run remembers its logs; what they gave rise to was said at the time."""
        self._forget()
        for logs in state.log_history:
            for _warning in self.check(logs["step"], logs):
                pass
        if state.is_world_process_zero:
            self._lines.start(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        for warning in self.check(state.global_step, logs or {}):
            if state.is_world_process_zero:
                self.given.append(warning)
                self._lines.append([warning])
                self._say(warning["text"])

    def check(self, step: int, logs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Takes the metrics of a log and yields what they warn of.

        Each is a dict of "step", "rule", "name", "reading", "threshold" and "text".
        """
        fresh = [n for n, v in logs.items() if isinstance(v, (int, float)) and not math.isnan(v)]
        for metric in fresh:
            self._series.setdefault(metric, Series()).add(step, logs[metric])
        for rule in RULES:
            threshold = self.thresholds[rule.name]
            if threshold is None:
                continue
            for metric, name in _matches(rule.metric, fresh):
                series = self._series[metric]
                reading = READINGS[rule.reading](series, rule.over)
                if reading is None or not self._due(rule, name, reading, threshold):
                    continue
                yield {
                    "step": step,
                    "rule": rule.name,
                    "name": name,
                    "reading": reading,
                    "threshold": threshold,
                    "text": self._text(rule, name, reading, threshold, series),
                }

    def _due(self, rule: Rule, name: str, reading: float, threshold: float) -> bool:
        """Whether to say it now."""
        known = self._said.get((rule.name, name))
        if known is None:
            if rule.worse(reading, threshold):
                self._said[rule.name, name] = _Said(reading)
                return True
            return False
        known.calm = known.calm + 1 if rule.calm(reading, threshold) else 0
        if known.calm >= CALM:
            del self._said[rule.name, name]
        further = known.reading * (WORSE if rule.sign > 0 else 1 / WORSE)
        if known.reading != 0 and rule.worse(reading, further):
            known.reading = reading
            return True
        return False

    def _text(self, rule: Rule, name: str, reading: float, threshold: float, series: Series) -> str:
        steps = [step for step, _ in series.latest][-rule.over :]
        cut = self._series.get("completions/clipped_ratio")
        seen = rule.seen.format(
            value=f"{reading:.3g}",
            share=f"{reading:.0%}",
            now=f"{series.mean(rule.over):.3g}",
            start=f"{series.start:.3g}",
            name=name,
            cut=f"{cut.mean(1):.0%}" if cut else "an unknown share",
        )
        span = f"step {steps[-1]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
        return f"{rule.name}, {span}: {seen} (threshold {threshold:g}). Try: {rule.advice}."


def _matches(pattern: str, metrics: list[str]) -> Iterator[tuple[str, str]]:
    """(metric, what the "*" of the pattern stands for) for each that fits."""
    head, star, tail = pattern.partition("*")
    for metric in metrics:
        if not star and metric == pattern:
            yield metric, ""
        elif star and metric.startswith(head) and metric.endswith(tail):
            yield metric, metric[len(head) : len(metric) - len(tail)]
