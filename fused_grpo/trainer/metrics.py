"""Metrics of a run: collected between two logs, averaged, written as JSON lines and on the bar."""

from __future__ import annotations

import json
import logging
import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import ProgressCallback, TrainerCallback

from fused_grpo.advantages import zero_variance_fraction

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
BAR_METRICS = ("reward", "completions/mean_length", "entropy", "kl", "loss")


class MetricLog:
    """Weighted means of metrics by name; tensors are read only when the log is drained."""

    def __init__(self) -> None:
        self._values: dict[str, list[tuple[Tensor | float, Tensor | float]]] = {}

    def add(self, metrics: dict[str, Any], weight: Tensor | float = 1.0) -> None:
        """Take one observation of each metric; with NaN it is left out."""
        for name, value in metrics.items():
            self._values.setdefault(name, []).append((value, weight))

    def drain(self) -> dict[str, float]:
        """The means since the last call (extremes for names that end in min or max)."""
        out = {}
        for name, entries in self._values.items():
            pairs = [(float(v), float(w)) for v, w in entries]
            pairs = [(v, w) for v, w in pairs if not math.isnan(v)]
            out[name] = _reduced(name, pairs)
        self._values.clear()
        return out

    def pending(self) -> dict[str, list[tuple[float, float]]]:
        """What a log would take now, as numbers; it stays."""
        return {n: [(float(v), float(w)) for v, w in e] for n, e in self._values.items()}

    def restore(self, pending: dict[str, list[tuple[float, float]]]) -> None:
        """Go on from what `pending` gave."""
        self._values = {name: list(entries) for name, entries in pending.items()}

    @staticmethod
    def merge(parts: list[dict[str, float]]) -> dict[str, float]:
        """What `drain` gave on several processes, as one."""
        return {
            name: _reduced(name, [(part[name], 1.0) for part in parts if part[name] == part[name]])
            for name in parts[0]
        }


def _reduced(name: str, pairs: list[tuple[float, float]]) -> float:
    """The extreme of (value, weight) pairs if the name says so, else their weighted mean."""
    if name.split("/")[-1] in ("min", "min_length"):
        return min((value for value, _ in pairs), default=math.nan)
    if name.split("/")[-1] in ("max", "max_length"):
        return max((value for value, _ in pairs), default=math.nan)
    total = sum(weight for _, weight in pairs)
    return sum(v * w for v, w in pairs) / total if total else math.nan


def reward_metrics(
    rewards: Tensor, total: Tensor, names: list[str], num_generations: int | None
) -> dict[str, Tensor]:
    """Of [B, F] rewards and their [B] weighted sums, NaN where missing.

    `num_generations` None: the rows are not groups, and what is said of groups is left out.
    """
    out = {"reward": total.nanmean()}
    if num_generations is not None:
        out["reward_std"] = _nanstd(total.view(-1, num_generations), 1).nanmean()
        out["frac_reward_zero_std"] = zero_variance_fraction(total, num_generations)
    for i, name in enumerate(names):
        out[f"rewards/{name}/mean"] = rewards[:, i].nanmean()
        out[f"rewards/{name}/std"] = _nanstd(rewards[:, i], 0)
    return out


def completion_metrics(lengths: Tensor, ended: Tensor) -> dict[str, Tensor]:
    """Of [B] completion lengths in tokens and [B] whether each came to its end."""
    lengths = lengths.float()
    terminated = lengths[ended]
    return {
        "completions/mean_length": lengths.mean(),
        "completions/min_length": lengths.min(),
        "completions/max_length": lengths.max(),
        "completions/clipped_ratio": 1 - ended.float().mean(),
        "completions/mean_terminated_length": terminated.mean()
        if len(terminated)
        else torch.zeros(()),
    }


def _nanstd(values: Tensor, dim: int) -> Tensor:
    """Sample standard deviation of the values that are not NaN; 0 for a single one."""
    valid = ~values.isnan()
    centred = torch.where(valid, values - values.nanmean(dim, keepdim=True), 0.0)
    count = valid.sum(dim)
    std = (centred.square().sum(dim) / (count - 1).clamp_min(1)).sqrt()
    return torch.where(count > 0, std, math.nan)


class MetricsFile(TrainerCallback):
    """Appends every log to metrics.jsonl in the output directory, one JSON object a line.

    A new run starts the file anew. A resumed one keeps the lines up to the step it resumes from.
    """

    def __init__(self) -> None:
        self._opened = False

    def resumed(self) -> None:
        """The file is that of the checkpoint a run continues from: keep all of it."""
        self._opened = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        path = Path(args.output_dir) / METRICS_FILE
        if not self._opened:
            path.parent.mkdir(parents=True, exist_ok=True)
            kept = [e for e in read_metrics(path) if e["step"] < state.global_step]
            path.write_text("".join(json.dumps(entry) + "\n" for entry in kept))
            self._opened = True
        entry = {"step": state.global_step}
        # NaN is not JSON
        entry.update({k: None if isinstance(v, float) and v != v else v for k, v in logs.items()})
        try:
            _append(path, json.dumps(entry) + "\n")
        except OSError as error:  # a full disk
            logger.warning("step %d is missing in %s: %s", state.global_step, path, error)


def _append(path: Path, line: str) -> None:
    """All of the line or nothing."""
    with path.open("ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        data = line.encode()
        try:
            if file.write(data) != len(data):
                raise OSError("the disk is full")
        except OSError:
            file.truncate(size)
            raise


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The entries of a metrics.jsonl; none if there is no such file.

    A line without its end is what a crash has left of it, and left out.
    """
    if not path.exists():
        return []
    whole, _, _ = path.read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines() if line.strip()]


class RewardBar(ProgressCallback):
    """The Trainer's progress bar with the metrics that matter on it, instead of a dump of all."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if state.is_world_process_zero and self.training_bar is not None and logs:
            shown = {n.split("/")[-1]: logs[n] for n in BAR_METRICS if logs.get(n) is not None}
            self.training_bar.set_postfix({n: f"{v:.3g}" for n, v in shown.items()})
