"""Completions as they were sampled, with rewards and advantages: a file of them, and a table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainerCallback

from fused_grpo.trainer.records import Entry, RunLines, read_lines
from fused_grpo.trainer.rollout import Sample
from fused_grpo.trainer.secrecy import printable

COMPLETIONS_FILE = "completions.jsonl"
LONGEST = 400  # characters of a text in a table


def records(
    step: int,
    rows: list[dict[str, Any]],
    texts: list[str],
    rewards: Tensor,
    names: list[str],
    advantages: Tensor,
    sample: Sample,
) -> list[Entry]:
    """One entry per completion, [B] rows: see docs/trainer-monitoring.md for the keys."""
    columns = {
        "prompt": [row["prompt"] for row in rows],
        "completion": texts,
        "advantage": advantages.tolist(),
        "length": sample.completion_mask.sum(1).tolist(),
        "ended": sample.ended.tolist(),
    }
    entries = []
    for i, scores in enumerate(rewards.tolist()):
        entry = {"step": step, **{name: column[i] for name, column in columns.items()}}
        entries.append(entry | {"rewards": dict(zip(names, scores, strict=True))})
    return entries


class CompletionsLog(TrainerCallback):
    """Appends the completions of all processes to completions.jsonl, and prints some of them.

    The collector of the trainer calls it with each generation; one is taken when logging_steps
    optimizer steps have passed since the last that was.

    Args:
        output_dir: the folder of the run.
        tokenizer: turns ids into texts.
        names: of the reward functions.
        show: how many completions of a generation to print; None: all.
    """

    def __init__(
        self, output_dir: str | Path, tokenizer: Any, names: list[str], show: int | None
    ) -> None:
        self._lines = RunLines(Path(output_dir) / COMPLETIONS_FILE)
        self._tokenizer, self._names, self._show = tokenizer, names, show
        self._state: Any = None
        self._last = -sys.maxsize

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._state, self._last = state, -sys.maxsize
        if state.is_world_process_zero:
            self._lines.start(state.global_step)

    def __call__(
        self, rows: list[dict[str, Any]], sample: Sample, rewards: Tensor, advantages: Tensor
    ) -> None:
        """Of this process's [B] rows; all processes call it together."""
        state = self._state
        if state is None or state.global_step - self._last < max(state.logging_steps, 1):
            return
        self._last = state.global_step
        texts = self._tokenizer.batch_decode(sample.completions(), skip_special_tokens=True)
        step = state.global_step + 1  # the first that learns from them
        own = records(step, rows, texts, rewards, self._names, advantages, sample)
        every = gather_object(own)
        if state.is_world_process_zero:
            self._lines.append(every)
            if self._show != 0:
                print(table(every[: self._show]), file=sys.stderr, flush=True)


def find(
    path: Path, step: int | None = None, best: int | None = None, worst: int | None = None
) -> list[Entry]:
    """Completions of a step (default: the last), all or those of the highest or lowest rewards.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it has no completions of that step, or best or worst is below 1.
    """
    for name, value in (("best", best), ("worst", worst)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if not path.exists():
        raise FileNotFoundError(f"no {path}: train with --log_completions True to get it")
    steps: dict[int, None] = {}
    found: list[Entry] = []
    for entry in read_lines(path):
        if step is None and entry["step"] not in steps:
            found = []
        steps[entry["step"]] = None
        if step in (None, entry["step"]):
            found.append(entry)
    if not found:
        known = ", ".join(map(str, steps)) or "none"
        raise ValueError(f"{path} has no completions of step {step}; it has those of {known}")
    order = sorted(found, key=_total, reverse=best is not None)
    limit = best if best is not None else worst
    return found if limit is None else order[:limit]


def _total(entry: Entry) -> float:
    return sum(value for value in entry["rewards"].values() if value is not None)


def table(entries: list[Entry]) -> str:
    """The entries as text: with rich a table, without it a paragraph each."""
    names = list(entries[0]["rewards"]) if entries else []
    head = ["prompt", "completion", *names, "advantage", "length", "ended"]
    rows = [_cells(entry, names) for entry in entries]
    title = f"step {entries[0]['step']}" if entries else "no completions"
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return "\n".join([title] + [_paragraph(head, row) for row in rows])
    drawn = Table(title=title, show_lines=True)
    for name in head:
        drawn.add_column(name, overflow="fold")
    for row in rows:
        drawn.add_row(*map(Text, row))  # not markup: a completion may hold brackets
    console = Console(force_terminal=False, highlight=False)
    with console.capture() as captured:
        console.print(drawn)
    return captured.get().rstrip("\n")


def _cells(entry: Entry, names: list[str]) -> list[str]:
    prompt = entry["prompt"]
    if not isinstance(prompt, str):
        prompt = "\n".join(f"{m.get('role')}: {m.get('content')}" for m in prompt)
    scores = [entry["rewards"][name] for name in names]
    numbers = ["none" if x is None or x != x else f"{x:.3g}" for x in [*scores, entry["advantage"]]]
    length, ended = str(entry["length"]), "yes" if entry["ended"] else "no"
    return [_short(prompt), _short(entry["completion"]), *numbers, length, ended]


def _short(text: str) -> str:
    text = printable(text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"


def _paragraph(head: list[str], row: list[str]) -> str:
    return "\n  ".join(f"{name}: {cell}" for name, cell in zip(head, row, strict=True))
