"""What a run shows while it goes: a bar, or a line per log, and a line at its end."""

from __future__ import annotations

import importlib.util
import math
import sys
import time
from collections.abc import Callable
from statistics import fmean
from typing import Any

from transformers import ProgressCallback, TrainerCallback

# label and metric, in the order shown
SHOWN: tuple[tuple[str, str], ...] = (
    ("reward", "reward"),
    ("length", "completions/mean_length"),
    ("entropy", "entropy"),
    ("kl", "kl"),
    ("zero-var", "frac_reward_zero_std"),
    ("loss", "loss"),
    ("tok/s", "tokens_per_second"),
)
ENDS = 5  # logs at each end of a run that its last line takes means of


def shown(logs: dict[str, Any]) -> dict[str, str]:
    """Label -> text of the metrics that are there and are numbers."""
    known = {label: logs.get(metric) for label, metric in SHOWN}
    return {label: _number(v) for label, v in known.items() if v is not None and v == v}


def choose(progress: str, disabled: bool, terminal: bool) -> str:
    """One of "rich", "tqdm", "lines" and "none" for the option of that name."""
    if progress != "auto":
        return progress
    if disabled:
        return "none"
    if not terminal:
        return "lines"
    return "rich" if importlib.util.find_spec("rich") is not None else "tqdm"


class TqdmBar(ProgressCallback):
    """The Trainer's progress bar with the metrics that matter on it, instead of a dump of all."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if state.is_world_process_zero and self.training_bar is not None and logs:
            self.training_bar.set_postfix(shown(logs))

    def close(self) -> None:
        """Leave the terminal as it was, however the run ended."""
        for bar in (self.training_bar, self.prediction_bar):
            if bar is not None:
                bar.close()


class RichBar(TrainerCallback):
    """A bar of steps with the metrics under it; another one while an evaluation runs.

    What is printed meanwhile, warnings too, goes above the bars.
    """

    def __init__(self, console: Any = None) -> None:
        from rich.console import Console

        self._console = Console(stderr=True) if console is None else console
        self._bars: Any = None
        self._steps: Any = None
        self._evaluation: Any = None

    def _start(self) -> Any:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        if self._bars is None:
            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[metrics]}"),
                console=self._console,
            )
            self._bars.start()
        return self._bars

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            self._steps = self._start().add_task(
                "train", total=state.max_steps, completed=state.global_step, metrics=""
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._steps is not None:
            self._bars.update(self._steps, completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        texts = shown(logs or {})
        if self._steps is not None and texts:
            text = "  ".join(f"{label} {value}" for label, value in texts.items())
            self._bars.update(self._steps, metrics=text)

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **_: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        if self._evaluation is None:
            self._evaluation = self._start().add_task(
                "evaluate", total=len(eval_dataloader), metrics=""
            )
        self._bars.advance(self._evaluation)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._evaluation is not None:
            self._bars.remove_task(self._evaluation)
            self._evaluation = None
        if self._steps is None:
            self.close()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Leave the terminal as it was, however the run ended."""
        if self._bars is not None:
            self._bars.stop()
        self._bars = self._steps = self._evaluation = None


class Lines(TrainerCallback):
    """A line per log, for log files."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        texts = [f"{label} {value}" for label, value in shown(logs).items()]
        evaluated = [n for n in logs if n.startswith("eval_") and n.endswith("reward")]
        texts += [f"{name} {_number(logs[name])}" for name in evaluated]
        if texts:
            _tell(f"{state.global_step}/{state.max_steps}  " + "  ".join(texts))

    def close(self) -> None:
        """Nothing to do."""


class LastLine(TrainerCallback):
    """Says at the end how long a run took, what moved, and whether there were warnings.

    Args:
        warnings: gives how many there were.
    """

    def __init__(self, warnings: Callable[[], int]) -> None:
        self._warnings = warnings
        self._began = (0.0, 0, 0)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._began = time.perf_counter(), state.global_step, state.num_input_tokens_seen

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            start, step, tokens = self._began
            seconds = time.perf_counter() - start
            steps, tokens = state.global_step - step, state.num_input_tokens_seen - tokens
            _tell(last_line(steps, tokens, seconds, state.log_history, self._warnings()))


def last_line(
    steps: int, tokens: int, seconds: float, history: list[dict[str, Any]], warnings: int
) -> str:
    """`steps` and `tokens` in `seconds`; means of metrics at both ends of the run's logs."""
    parts = [f"{steps:,} steps in {_duration(seconds)}, {tokens:,} tokens"]
    for label, metric in SHOWN:
        values = [e[metric] for e in history if isinstance(e.get(metric), float)]
        values = [value for value in values if math.isfinite(value)]
        if metric in ("loss", "tokens_per_second") or not values:
            continue
        first, last = values[:ENDS], values[-ENDS:]
        parts.append(f"{label} {_number(fmean(first))} -> {_number(fmean(last))}")
    if warnings:
        parts.append(f"{warnings} warning{'s' * (warnings > 1)} in warnings.jsonl")
    return "; ".join(parts)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
