"""The share of `GRPOConfig` in what a run shows and keeps: docs/trainer-monitoring.md."""

# ruff: noqa: RUF009 (arg is dataclasses.field, one call per field)

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from typing import Any

from fused_grpo.trainer.health_rules import THRESHOLDS
from fused_grpo.trainer.loss_args import arg

PROGRESS = ("auto", "rich", "tqdm", "lines", "none")

# names of report_to, and the packages of which each needs one
TRACKERS = {
    "tensorboard": ("tensorboard", "tensorboardX"),
    "trackio": ("trackio",),
    "wandb": ("wandb",),
}


@dataclass
class MonitorArguments:
    """Options of the progress bar, the file of completions and the warnings."""

    progress: str = arg(
        "auto",
        "'rich' or 'tqdm' for a bar, 'lines' for a line per log, 'none'; 'auto': a bar where there "
        "is a terminal, lines where there is none, nothing with disable_tqdm.",
    )
    log_completions: bool = arg(
        False, "Append completions with rewards and advantages to completions.jsonl."
    )
    num_completions_to_print: int | None = arg(
        0, "With log_completions: print so many of each generation; None: all."
    )
    run_warnings: bool = arg(True, "Say in words what looks wrong with a run, and what to try.")
    run_warning_thresholds: dict[str, Any] | str | None = arg(
        None, 'Other thresholds by rule, as in {"truncation": 0.9}; null switches a rule off.'
    )

    def check_monitor(self) -> None:
        """TypeError or ValueError for options that do not fit; JSON texts become dicts."""
        if self.progress not in PROGRESS:
            raise ValueError(
                f"progress={self.progress!r} is unknown; choose one of {', '.join(PROGRESS)}"
            )
        if self.disable_tqdm and self.progress in ("rich", "tqdm"):  # type: ignore[attr-defined]
            raise ValueError(f"disable_tqdm=True and progress={self.progress!r} contradict")
        for package in ("rich", "tqdm"):
            if self.progress == package and importlib.util.find_spec(package) is None:
                raise ValueError(f"progress={package!r} needs {package}, which is not installed")
        for tracker, packages in TRACKERS.items():
            wanted = tracker in self.report_to  # type: ignore[attr-defined]
            if wanted and not any(map(importlib.util.find_spec, packages)):
                raise ValueError(
                    f"report_to={tracker!r} needs {packages[0]}: pip install {packages[0]}"
                )
        self._check_completions()
        self._check_thresholds()

    def _check_completions(self) -> None:
        show = self.num_completions_to_print
        if show is not None and (isinstance(show, bool) or not isinstance(show, int)):
            kind = type(show).__name__
            raise TypeError(f"num_completions_to_print must be an integer or None, not {kind}")
        if show is not None and show < 0:
            raise ValueError(f"num_completions_to_print={show} must be at least 0, or None")
        if show != 0 and not self.log_completions:
            raise ValueError(f"num_completions_to_print={show} needs log_completions=True")

    def _check_thresholds(self) -> None:
        given = self.run_warning_thresholds
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"run_warning_thresholds={given!r} is not JSON: {error}"
                ) from error
        if given is None:
            return
        if not self.run_warnings:
            raise ValueError("run_warning_thresholds needs run_warnings=True")
        if not isinstance(given, dict):
            kind = type(given).__name__
            raise TypeError(f"run_warning_thresholds must be a dict by rule, not {kind}")
        for name, value in given.items():
            if name not in THRESHOLDS:
                raise ValueError(
                    f"run_warning_thresholds has no rule {name!r}; they are {', '.join(THRESHOLDS)}"
                )
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, (int, float))
            ):
                kind = type(value).__name__
                raise TypeError(f"run_warning_thresholds[{name!r}] must be a number, not {kind}")
        self.run_warning_thresholds = given
