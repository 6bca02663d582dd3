"""Metrics of a run: collected between two logs, averaged, and written as JSON lines."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from fused_grpo.advantages import zero_variance_fraction
from fused_grpo.trainer.records import RunLines, read_lines

METRICS_FILE = "metrics.jsonl"
# what is made of the observations of a metric, by the last part of its name; else their mean
EXTREMES: dict[str, Callable[..., float]] = {
    "min": min,
    "min_length": min,
    "max": max,
    "max_length": max,
    "peak_gb": max,
}


class MetricLog:
    """Weighted means of metrics by name; tensors are read only when the log is drained."""

    def __init__(self) -> None:
        self._values: dict[str, list[tuple[Tensor | float, Tensor | float]]] = {}

    def add(self, metrics: dict[str, Any], weight: Tensor | float = 1.0) -> None:
        """Take one observation of each metric; with NaN it is left out."""
        for name, value in metrics.items():
            self._values.setdefault(name, []).append((value, weight))

    def pending(self) -> dict[str, list[tuple[float, float]]]:
        """What a log would take now, as numbers; it stays."""
        return {n: [(float(v), float(w)) for v, w in e] for n, e in self._values.items()}

    def restore(self, pending: dict[str, list[tuple[float, float]]]) -> None:
        """Go on from what `pending` gave."""
        self._values = {name: list(entries) for name, entries in pending.items()}

    def drain(self, gather: Callable[[list[Any]], list[Any]] | None = None) -> dict[str, float]:
        """The means since the last call (extremes for names that end in min or max).

        `gather` makes of a list that of all processes; their observations then count alike.
        """
        own = self.pending()
        self._values.clear()
        seen: dict[str, list[tuple[float, float]]] = {}
        for part in [own] if gather is None else gather([own]):
            for name, pairs in part.items():
                seen.setdefault(name, []).extend(pairs)
        return {name: _reduced(name, pairs) for name, pairs in seen.items()}


def _reduced(name: str, pairs: list[tuple[float, float]]) -> float:
    """The extreme of (value, weight) pairs if the name says so, else their weighted mean."""
    pairs = [(value, weight) for value, weight in pairs if not math.isnan(value)]
    extreme = EXTREMES.get(name.split("/")[-1])
    if extreme is not None:
        return extreme((value for value, _ in pairs), default=math.nan)
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
        out[f"rewards/{name}/missing"] = rewards[:, i].isnan().float().mean()
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
        else lengths.new_zeros(()),
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

    def __init__(self, output_dir: str | Path) -> None:
        self._lines = RunLines(Path(output_dir) / METRICS_FILE)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            self._lines.start(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if state.is_world_process_zero and logs:
            self._lines.append([{"step": state.global_step, **logs}])


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The entries of a metrics.jsonl; none if there is no such file."""
    return list(read_lines(path))


class Throughput(TrainerCallback):
    """Tokens per second since the last call."""

    def __init__(self) -> None:
        self._tokens, self._step = 0, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._tokens, self._step = state.num_input_tokens_seen, state.global_step

    def __call__(self, state: Any, step_time: float) -> dict[str, float]:
        """Of the steps since the last call, which took `step_time` seconds each on average.

        Tokens are those read and sampled over all processes.
        """
        tokens, steps = state.num_input_tokens_seen - self._tokens, state.global_step - self._step
        self._tokens, self._step = state.num_input_tokens_seen, state.global_step
        seconds = step_time * steps
        return {"tokens_per_second": tokens / seconds if seconds > 0 else math.nan}


def peak_memory() -> dict[str, float]:
    """The most memory of this process so far, in 10^9 bytes: torch's on a GPU, else resident."""
    if torch.cuda.is_available():
        return {"memory/peak_gb": torch.cuda.max_memory_allocated() / 1e9}
    try:
        import resource
    except ImportError:  # Windows
        return {}
    unit = 1 if sys.platform == "darwin" else 1024
    return {"memory/peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9}
