"""The benchmark of the planner, and that its document shows what it measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # benchmarks/ is run from the root, and not installed
from benchmarks import planner  # noqa: E402

RESULTS = Path(planner.__file__).parent / "results"


def test_quick_run(capsys) -> None:  # type: ignore[no-untyped-def]
    assert planner.main(["--quick"]) == 0
    assert capsys.readouterr().out.count("\n") == len(planner.DTYPES) * len(planner.KINDS)


def test_the_document_shows_what_was_measured() -> None:
    (path,) = RESULTS.glob("*-planner.json")
    rows = json.loads(path.read_text())["rows"]
    text = planner.DOCUMENT.read_text()
    assert planner.with_table(text, rows) == text
    assert all(planner.off(row) <= 1 for row in rows)
