"""The faults of scripts/mutants.py still fit the sources that they are put into."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
spec = importlib.util.spec_from_file_location("mutants", ROOT / "scripts" / "mutants.py")
assert spec is not None
assert spec.loader is not None
mutants = importlib.util.module_from_spec(spec)
sys.modules["mutants"] = mutants  # dataclasses look it up
spec.loader.exec_module(mutants)


def test_every_fault_stands_once_in_its_file() -> None:
    for mutant in mutants.MUTANTS:
        text = (ROOT / mutant.file).read_text()
        assert text.count(mutant.old) == 1, mutant
        assert mutant.old != mutant.new


def test_every_file_has_tests_that_exist() -> None:
    assert {mutant.file for mutant in mutants.MUTANTS} <= set(mutants.TESTS)
    for tests in mutants.TESTS.values():
        for test in tests.split():
            assert (ROOT / "tests" / f"test_{test}.py").exists(), test


def test_the_document_is_of_these_faults() -> None:
    """docs/mutants.md is written by a whole run: the same faults, and enough of them found."""
    rows = [line for line in mutants.DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    listed = [tuple(cell.strip() for cell in row.strip("|").split("|")) for row in rows]
    wanted = [(f"`{mutant.file}`", mutant.what) for mutant in mutants.MUTANTS]
    assert [row[:2] for row in listed] == wanted
    found = sum(row[2] == "found" for row in listed)
    assert found >= mutants.FLOOR * len(listed)
