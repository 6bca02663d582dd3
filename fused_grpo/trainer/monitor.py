"""What watches a run, put together: files, progress, warnings, trackers."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, ProgressCallback

from fused_grpo.trainer.completions import CompletionsLog
from fused_grpo.trainer.health import HealthWarnings
from fused_grpo.trainer.metrics import MetricsFile, Throughput
from fused_grpo.trainer.progress import LastLine, Lines, RichBar, TqdmBar, choose

BARS: dict[str, Any] = {"rich": RichBar, "tqdm": TqdmBar, "lines": Lines}


class Monitor:
    """The callbacks of a `GRPOTrainer`, added to it.

    Attributes:
        throughput: tokens per second between logs.
        completions: takes the generations of the collector, or None.
    """

    def __init__(self, trainer: Any) -> None:
        args = trainer.args
        folder = Path(args.output_dir or ".")
        self.throughput = Throughput()
        self.completions: CompletionsLog | None = None
        self._bar: Any = None
        warnings = HealthWarnings(folder, args.run_warning_thresholds)
        callbacks: list[Any] = [MetricsFile(folder), self.throughput]
        if args.run_warnings:
            callbacks.append(warnings)
        if args.log_completions:
            self.completions = CompletionsLog(
                folder,
                trainer.processing_class,
                trainer.collector.reward_names,
                args.num_completions_to_print,
            )
            callbacks.append(self.completions)
            trainer.collector.on_generation = self.completions
        kind = self._replace_progress(trainer)
        if kind != "none":
            callbacks.append(LastLine(lambda: len(warnings.given)))
        for callback in callbacks:
            trainer.add_callback(callback)
        _log_below(folder, trainer)

    def _replace_progress(self, trainer: Any) -> str:
        """The kind of progress shown: ours in the place of the Trainer's, but in notebooks."""
        args = trainer.args
        kind = choose(args.progress, args.disable_tqdm, sys.stderr.isatty())
        theirs = [trainer.pop_callback(c) for c in (ProgressCallback, PrinterCallback)]
        if args.progress == "auto" and not any(theirs):
            return "none"  # a notebook, which has its own
        if kind in BARS:
            self._bar = BARS[kind]()
            trainer.add_callback(self._bar)
        return kind

    def close(self) -> None:
        """Leave the terminal as it was, however the run ended."""
        if self._bar is not None:
            self._bar.close()


def _log_below(folder: Path, trainer: Any) -> None:
    """TensorBoard's files of an evaluation before training go where those of training go."""
    from transformers.integrations import TensorBoardCallback
    from transformers.integrations.integration_utils import default_logdir

    for callback in trainer.callback_handler.callbacks:
        ours = isinstance(callback, TensorBoardCallback)
        if ours and getattr(callback, "logging_dir", "") is None:
            callback.logging_dir = os.path.join(folder, default_logdir())
