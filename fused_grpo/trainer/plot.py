"""Pictures of runs from their metrics.jsonl."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fused_grpo.trainer.metrics import METRICS_FILE, read_metrics
from fused_grpo.trainer.models import MissingExtraError

# metric, its evaluated twin in the same panel, and the panel's title
PANELS: tuple[tuple[str, str | None, str], ...] = (
    ("reward", "eval_reward", "reward"),
    ("completions/mean_length", None, "completion length (tokens)"),
    ("entropy", None, "entropy (nats)"),
    ("kl", None, "KL to the reference (nats)"),
)


@dataclass(frozen=True)
class Run:
    """The logs of one run, under the name that the legend shows."""

    name: str
    entries: list[dict[str, Any]]

    def points(self, metric: str, smooth: int = 1) -> tuple[list[int], list[float]]:
        """Steps and values, each value the mean of the last `smooth`."""
        found = [(e["step"], e[metric]) for e in self.entries if _is_number(e.get(metric))]
        found.sort(key=lambda point: point[0])
        steps, values = [step for step, _ in found], [value for _, value in found]
        windows = [values[max(0, i + 1 - smooth) : i + 1] for i in range(len(values))]
        return steps, [sum(window) / len(window) for window in windows]

    @property
    def metrics(self) -> set[str]:
        """The names of what it measured."""
        return {n for e in self.entries for n, v in e.items() if n != "step" and _is_number(v)}


def load(paths: Sequence[str | Path]) -> list[Run]:
    """The runs in folders or metrics.jsonl files, named by folder, or by path if names are equal.

    Raises:
        FileNotFoundError, ValueError: a file is missing, or holds no logs.
    """
    files = [Path(p) / METRICS_FILE if Path(p).is_dir() else Path(p) for p in paths]
    names = [_name(file) for file in files]
    runs = []
    for file, name in zip(files, names, strict=True):
        if not file.exists():
            raise FileNotFoundError(
                f"there is no {file}: give folders of runs, or metrics.jsonl files"
            )
        entries = [e for e in read_metrics(file) if isinstance(e.get("step"), int)]
        if not entries:
            raise ValueError(f"{file} holds no logs")
        runs.append(Run(name if names.count(name) == 1 else str(file), entries))
    return runs


def draw(
    runs: Sequence[Run],
    out: str | Path,
    metrics: Sequence[str] | None = None,
    smooth: int = 1,
    title: str = "",
) -> Path:
    """Draw metrics of runs over optimizer steps, one line and one entry of the legend per run.

    Args:
        out: the picture; its ending says the format.
        metrics: one panel each; default: reward, length, entropy and KL.
        smooth: lines are means of the last so many logs; what they are means of stays behind them.

    Raises:
        ValueError: no run has one of the metrics, or smooth is below 1, or out has a wrong ending.
        MissingExtraError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError("plots need matplotlib: pip install 'fused-grpo[demo]'")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if smooth < 1:
        raise ValueError(f"smooth={smooth} must be at least 1")
    panels = PANELS if metrics is None else tuple((name, None, name) for name in metrics)
    _check(runs, metrics or ())
    rows, columns = (len(panels) + 1) // 2, min(len(panels), 2)
    figure = Figure(figsize=(4.5 * columns, 3 * rows), layout="constrained")
    canvas = FigureCanvasAgg(figure)  # draws to a file, whatever display there is
    kinds = canvas.get_supported_filetypes()
    if Path(out).suffix.lstrip(".") not in kinds:
        raise ValueError(f"out={str(out)!r} must end in one of .{', .'.join(sorted(kinds))}")
    figure.suptitle(title)
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, panel in zip(grid, panels, strict=False):
        _draw(axes, runs, *panel, smooth)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    return Path(out)


def main(paths: Sequence[str], metrics: Sequence[str] | None, out: str | None, smooth: int) -> Path:
    """`fused-grpo plot`: where the picture is. Raises what `load` and `draw` raise."""
    runs = load(paths)
    first = Path(paths[0])
    alone = (first if first.is_dir() else first.parent) / "metrics.png"
    return draw(runs, out or (alone if len(runs) == 1 else "comparison.png"), metrics, smooth)


def _draw(
    axes: Any, runs: Sequence[Run], metric: str, evaluated: str | None, title: str, smooth: int
) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("optimizer step", fontsize=9)
    axes.grid(alpha=0.3)
    for i, run in enumerate(runs):
        color = f"C{i % 10}"
        label = run.name
        for name, style in ((metric, ".-"), (evaluated, "o--")):
            steps, values = (
                run.points(name, 1 if name == evaluated else smooth) if name else ([], [])
            )
            if not steps:
                continue
            if smooth > 1 and name == metric:
                axes.plot(*run.points(metric), color=color, alpha=0.25)
            axes.plot(steps, values, style, color=color, label=label, markersize=4)
            label = "_"  # one entry per run
    if not axes.lines:
        axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes)
    elif evaluated is not None:
        axes.set_xlabel("optimizer step (circles: held-out, greedy)", fontsize=9)
    if axes.lines and (len(runs) > 1 or evaluated is not None):
        axes.legend(fontsize=8)


def _check(runs: Sequence[Run], metrics: Sequence[str]) -> None:
    known = set().union(*(run.metrics for run in runs))
    for name in metrics:
        if name not in known:
            raise ValueError(f"no run has a metric {name!r}; there are {', '.join(sorted(known))}")


def _name(file: Path) -> str:
    inside = file.name == METRICS_FILE
    return Path(os.path.abspath(file)).parent.name if inside else file.stem


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
