"""The tables of docs/api/arguments.md: `python scripts/docs_tables.py` (--check: compare).

They stand between `<!-- arguments -->` and `<!-- end -->`, and say what the fields say.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from fused_grpo.trainer.config import GRPOConfig
from fused_grpo.trainer.loop_args import LoopArguments
from fused_grpo.trainer.loss_args import LossArguments
from fused_grpo.trainer.monitor_args import MonitorArguments
from fused_grpo.trainer.rollout_args import RolloutArguments

PAGE = Path(__file__).parents[1] / "docs" / "api" / "arguments.md"
SECTIONS: dict[str, type] = {
    "Prompts, completions, rewards": GRPOConfig,
    "The loss": LossArguments,
    "Where completions come from": RolloutArguments,
    "The loop": LoopArguments,
    "Watching": MonitorArguments,
}


def arguments() -> dict[str, list[Field[Any]]]:
    """Fields by section: all that transformers has not, and what it has with another default."""
    theirs = {f.name: f for f in fields(TrainingArguments)}
    left = {f.name: f for f in fields(GRPOConfig)}
    found: dict[str, list[Field[Any]]] = {}
    for title, kind in [*list(SECTIONS.items())[1:], *list(SECTIONS.items())[:1]]:
        names = [f.name for f in fields(kind) if f.name in left]
        found[title] = [left.pop(name) for name in names]
        if kind is GRPOConfig:
            found[title] = [f for f in found[title] if _differs(f, theirs.get(f.name))]
    return {title: found[title] for title in SECTIONS}


def _differs(ours: Field[Any], theirs: Field[Any] | None) -> bool:
    return theirs is None or _default(ours) != _default(theirs)


def _default(field: Field[Any]) -> str:
    if field.default_factory is not MISSING:
        return repr(field.default_factory())
    return "required" if field.default is MISSING else repr(field.default)


def tables() -> str:
    lines = []
    for title, rows in arguments().items():
        lines += [f"## {title}", "", "| argument | default | what |", "|---|---|---|"]
        for field in rows:
            text = " ".join(str(field.metadata.get("help", "")).split()).replace("|", "\\|")
            lines.append(f"| `{field.name}` | `{_default(field)}` | {text} |")
        lines.append("")
    return "\n".join(lines)


def filled(text: str) -> str:
    """The page with its tables replaced."""
    parts = re.match(r"(.*<!-- arguments -->\n).*(<!-- end -->.*)", text, re.S)
    assert parts is not None
    return f"{parts[1]}\n{tables()}\n{parts[2]}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 where they differ")
    args = parser.parse_args(argv)
    before = PAGE.read_text()
    after = filled(before)
    if args.check:
        return int(after != before)
    PAGE.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
