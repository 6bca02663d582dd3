"""A picture of a run from its metrics.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fused_grpo.trainer.metrics import read_metrics

# title and the metrics drawn in it, the first one found first
PANELS: list[tuple[str, list[str]]] = [
    ("reward", ["reward", "eval_reward"]),
    ("completion length (tokens)", ["completions/mean_length"]),
    ("entropy (nats)", ["entropy"]),
    ("KL to the reference (nats)", ["kl"]),
]


def plot_metrics(metrics_file: Path, png: Path, title: str = "") -> None:
    """Reward, length, entropy and KL over optimizer steps. Needs matplotlib (the demo extra)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    entries = read_metrics(metrics_file)
    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)  # draws to a file, whatever display there is
    figure.suptitle(title)
    for axes, (name, keys) in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("optimizer step", fontsize=9)
        axes.grid(alpha=0.3)
        drawn = [_draw(axes, entries, key) for key in keys]
        if not any(drawn):
            axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes)
    figure.savefig(png, dpi=120)


def _draw(axes: Any, entries: list[dict[str, Any]], key: str) -> bool:
    points = [(entry["step"], entry[key]) for entry in entries if entry.get(key) is not None]
    if not points:
        return False
    held_out = key.startswith("eval_")
    label = "held-out, greedy" if held_out else "training, sampled"
    axes.plot(*zip(*points, strict=True), marker="o" if held_out else ".", label=label)
    if "reward" in key:
        axes.set_ylim(-0.02, max(1.02, *(value for _, value in points)))
        axes.legend(fontsize=8)
    return True
