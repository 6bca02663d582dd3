"""The documents' tables from the committed results: `python -m benchmarks.readme`.

A table stands between `<!-- results: NAME -->` and `<!-- end -->`, in the README and in docs/.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import planner, precision, routing, tables, verdicts
from benchmarks.parts import AXES

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MACHINE = "amd-epyc-2cpu"  # whose results the documents show

Results = dict[str, Any]
# name of a table -> the part whose results it shows, and how
TABLES: dict[str, tuple[str, Callable[[Results], str]]] = {
    "loss-fp32": ("loss", lambda found: tables.short(case_of(found, "fp32"))),
    "loss-bf16": ("loss", lambda found: tables.short(case_of(found, "bf16"))),
    "products": ("loss", lambda found: products(found)),
    "tasks": ("tasks", lambda found: tables.tasks(found["cases"])),
    "scaling": (
        "scaling",
        lambda found: tables.scaled(
            found["cases"], kinds=("exact", "routed", "log-probabilities", "eager")
        ),
    ),
    "scaling-all": ("scaling", lambda found: tables.scaled(found["cases"])),
    "verdicts": ("loss", lambda found: verdicts.table(found["cases"])),
    "summary": ("loss", lambda found: verdicts.summary(found["cases"])),
    "skipped": ("loss", lambda found: tables.skipped(found["cases"])),
    "machine": ("loss", tables.about),
    "routing": ("routing", lambda found: routing.page(found["cases"])[0]),
    "precision": ("precision", precision.table),
    "planner": ("planner", lambda found: planner.table(found["rows"])),
}
TABLES |= {
    f"sweep-{axis}": ("sweeps", lambda found, axis=axis: tables.sweep(found["cases"], axis))  # type: ignore[misc]
    for axis in AXES
}


def case_of(results: Results, dtype: str) -> dict[str, Any]:
    """The real tokens at temperature 1."""
    wanted = {"source": "real", "temperature": 1.0, "dtype": dtype}
    found = [c for c in results["cases"] if wanted.items() <= c["spec"].items()]
    return found[0]


def products(results: Results) -> str:
    """What an exact loss with both gradients needs at least."""
    bf16, fp32 = (3 * case_of(results, dtype)["gemm_s"] for dtype in ("bf16", "fp32"))
    return (
        f"Three bare products of the logits' size took {bf16:.2f} s (bf16, rounded results) and "
        f"{fp32:.2f} s (fp32, `torch.mm`) in the same rounds."
    )


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def filled(text: str, render: Callable[[str], str | None]) -> str:
    """A document with its tables replaced; those that `render` has nothing for stay."""

    def replace(match: re.Match[str]) -> str:
        found = render(match[2])
        return match[0] if found is None else f"{match[1]}\n{found}\n{match[3]}"

    pattern = r"(<!-- results: ([\w-]+) -->)\n.*?\n?(<!-- end -->)"
    return re.sub(pattern, replace, text, flags=re.S)


def render(name: str) -> str | None:
    """A table, or None where its part has not been measured."""
    if name not in TABLES:
        raise ValueError(f"there is no table {name!r}; the tables are {', '.join(TABLES)}")
    part, make = TABLES[name]
    path = RESULTS / f"{MACHINE}-{part}.json"
    return make(json.loads(path.read_text())) if path.exists() else None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 where they differ")
    args = parser.parse_args(argv)
    stale = []
    for path in documents():
        before = path.read_text()
        after = filled(before, render)
        if after != before:
            stale.append(path)
            if not args.check:
                path.write_text(after)
    for path in stale:
        print(f"{'differs' if args.check else 'wrote'}: {path.relative_to(ROOT)}")
    return int(args.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
