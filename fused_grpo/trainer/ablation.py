"""What `fused-grpo ablate` does: the same training in variants, each with several seeds."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from fused_grpo.trainer.metrics import METRICS_FILE, read_metrics
from fused_grpo.trainer.passk import length_at_reward, smooth, table
from fused_grpo.trainer.prompts import text_of
from fused_grpo.trainer.rewards import RewardFunc, reward_name
from fused_grpo.trainer.tasks import Task

SUMMARY_FILE = "ablation_run.json"
SMOOTHED = 3  # steps over which reward and length are averaged before they are compared


def random_reward(task: Task) -> RewardFunc:
    """0 or 1 by lot, whatever was written: what rises under it was not taught by the reward."""

    def lot(completions: list[Any], **_: Any) -> list[float]:
        return (torch.rand(len(completions)) < 0.5).float().tolist()  # its state is in checkpoints

    return lot


def format_reward(task: Task) -> RewardFunc:
    """1 for what looks like an answer, right or not: what rises under it is the format alone.

    There is an answer, and it is a number exactly where the right one is.
    """

    def looks_right(completions: list[Any], **columns: Any) -> list[float]:
        answers = [task.answer_of(text_of(completion)) for completion in completions]
        wanted = columns.get("answer", [None] * len(answers))
        return [
            float(given is not None and (right is None or is_number(given) == is_number(right)))
            for given, right in zip(answers, wanted, strict=True)
        ]

    return looks_right


def is_number(value: Any) -> bool:
    try:
        return math.isfinite(float(str(value).replace(",", "")))
    except ValueError:
        return False


@dataclass(frozen=True)
class Variant:
    """Words for `fused-grpo train`, and a reward in the place of the task's."""

    words: tuple[str, ...]
    control: Callable[[Task], RewardFunc] | None = None


def _variant(
    loss: str = "grpo", scale: str = "group", control: Callable[[Task], RewardFunc] | None = None
) -> Variant:
    return Variant(("--loss-type", loss, "--scale_rewards", scale), control)


# each differs from the first in one thing: how lengths are normalised, the std, or the reward
VARIANTS: dict[str, Variant] = {
    "grpo": _variant(),
    "no_std": _variant(scale="none"),
    "dr_grpo": _variant("dr_grpo"),
    "dapo": _variant("dapo"),
    "bnpo": _variant("bnpo"),
    "random_reward": _variant(control=random_reward),
    "format_only": _variant(control=format_reward),
}


def main(words: list[str], seeds: Sequence[int], names: list[str] | None, folder: Path) -> int:
    """Trains what is not finished yet, prints the tables, and writes ablation.json and .png.

    Args:
        words: of `fused-grpo train`, for all runs.
        seeds, names: what to run; every variant by default.
        folder: of all runs, FOLDER/VARIANT/seed-N.

    Raises:
        ValueError: an unknown variant, an option that a variant sets, or a folder with runs of
            other options.
    """
    chosen = list(VARIANTS) if names is None else names
    unknown = [name for name in chosen if name not in VARIANTS]
    if unknown:
        raise ValueError(f"--variants {unknown[0]!r} is unknown; choose of {', '.join(VARIANTS)}")
    for word in words:
        if word.split("=")[0].replace("-", "_") in ("__loss_type", "__scale_rewards", "__seed"):
            raise ValueError(f"{word} is set by the variants and --seeds")
    runs: dict[str, list[dict[str, Any]]] = {}
    for seed in seeds:  # all variants of a seed before the next: an interrupted one compares
        for name in chosen:
            path = folder / name / f"seed-{seed}"
            runs.setdefault(name, []).append(_run(name, seed, words, path))
    report = {"options": words, "seeds": list(seeds), **summarise(runs)}
    _write(folder / "ablation.json", report)
    print(render(report))
    if importlib.util.find_spec("matplotlib") is not None:
        plot(report, folder / "ablation.png")
    print(f"written: {folder / 'ablation.json'}")
    return 0


def _run(name: str, seed: int, words: list[str], path: Path) -> dict[str, Any]:
    """The outcome of a run, trained now unless it is finished."""
    from fused_grpo import cli, cli_tasks

    variant, summary = VARIANTS[name], path / SUMMARY_FILE
    own = [*words, *variant.words, "--seed", str(seed)]
    if summary.exists():
        known: dict[str, Any] = json.loads(summary.read_text())
        if known["options"] != own:
            raise ValueError(
                f"{path} holds a run of other options, {' '.join(known['options'])}: choose "
                "another --output-dir"
            )
        print(f"{name}, seed {seed}: finished before", flush=True)
        return known
    print(f"{name}, seed {seed}", flush=True)
    options, rest = cli.build_parser().parse_known_args(
        ["train", *own, "--resume", "--output-dir", str(path)]
    )
    task = cli_tasks.task_of(options)
    control = None if variant.control is None else variant.control(task)
    done = cli.train_run(options, rest, control)
    steps = [e for e in read_metrics(path / METRICS_FILE) if "completions/mean_length" in e]
    outcome = {
        "options": own,
        "before": done.before,
        "after": done.after,
        "pass": [interval.json() for interval in done.passed],
        # of the task's own reward, whatever was trained on
        "rewards": [e[f"rewards/{reward_name(task.reward)}/mean"] for e in steps],
        "lengths": [e["completions/mean_length"] for e in steps],
        "seconds": done.seconds,
    }
    _write(summary, outcome)
    return outcome


def summarise(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Outcomes by variant, and lengths at the reward that every variant but the controls reaches.

    Rewards and lengths of the training samples are averaged over seeds and `SMOOTHED` steps.
    """
    curves = {}
    for name, outcomes in runs.items():
        rewards = [fmean(step) for step in zip(*(o["rewards"] for o in outcomes), strict=True)]
        lengths = [fmean(step) for step in zip(*(o["lengths"] for o in outcomes), strict=True)]
        curves[name] = (smooth(rewards, SMOOTHED), smooth(lengths, SMOOTHED))
    taught = [name for name in runs if VARIANTS[name].control is None] or list(runs)
    level = min(max(curves[name][0]) for name in taught)
    return {
        "matched_reward": level,
        "variants": {
            name: {
                "before": fmean(o["before"] for o in outcomes),
                "after": [o["after"] for o in outcomes],
                "pass_difference": [o["pass"][2] for o in outcomes],
                "rewards": curves[name][0],
                "lengths": curves[name][1],
                "length_at_matched_reward": length_at_reward(*curves[name], level),
            }
            for name, outcomes in runs.items()
        },
    }


def render(report: dict[str, Any]) -> str:
    """The summary as a Markdown table."""
    rows = []
    for name, v in report["variants"].items():
        change = fmean(d["mean"] for d in v["pass_difference"])
        sure = sum(d["low"] > 0 for d in v["pass_difference"])
        length = v["length_at_matched_reward"]
        rows.append(
            [
                name,
                f"{v['before']:.3f}",
                " ".join(f"{after:.3f}" for after in v["after"]),
                f"{change:+.3f} ({sure} of {len(v['after'])})",
                f"{v['lengths'][-1]:.1f}",
                "not reached" if length is None else f"{length:.1f}",
            ]
        )
    header = [
        "variant",
        "reward before",
        "after, by seed",
        "pass@1 gained (surely, 95%)",
        "last length",
        f"length at reward {report['matched_reward']:.3f}",
    ]
    return f"\nheld-out, greedy; seeds {report['seeds']}\n\n{table(rows, header)}\n"


def plot(report: dict[str, Any], png: Path) -> None:
    """Reward and length of the training samples by step, one line a variant. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, key in zip(figure.subplots(1, 2), ("rewards", "lengths"), strict=True):
        for name, variant in report["variants"].items():
            values = variant[key]
            control = VARIANTS[name].control is not None
            axes.plot(range(1, len(values) + 1), values, ":" if control else "-", label=name)
        axes.set_title(f"the task's {key}" if key == "rewards" else "lengths (tokens)", fontsize=10)
        axes.set_xlabel(f"optimizer step (mean of seeds and {SMOOTHED} steps)", fontsize=9)
        axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(png, dpi=120)


def _write(path: Path, content: dict[str, Any]) -> None:
    """All of it or nothing, so that what exists is finished."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(part, path)
