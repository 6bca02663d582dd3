"""The list of faults is complete, and its document is that of the tests."""

from __future__ import annotations

import ast

import bug_list
import pytest
import ranks


def test_every_entry_has_a_test_or_a_reason() -> None:
    tests = set(bug_list.found())
    assert tests <= set(bug_list.ENTRIES), "ids that are no entries"
    assert set(bug_list.ELSEWHERE) <= set(bug_list.ENTRIES) == set(bug_list.REPORTED)
    assert not tests & set(bug_list.ELSEWHERE), "entries with a test and a reason against one"
    missing = set(bug_list.ENTRIES) - tests - set(bug_list.ELSEWHERE)
    assert not missing, sorted(missing)


def test_every_entry_has_a_test_that_runs_without_a_gpu() -> None:
    missing = set(bug_list.ENTRIES) - set(bug_list.found(ci=True)) - set(bug_list.ELSEWHERE)
    assert not missing, sorted(missing)


def test_what_is_named_on_ranks_runs_there() -> None:
    """A function of `ranks_*.py` is a test where it is a case, under its name and arguments."""
    cases = {name.partition("-")[0] for world in (2, 4) for name in ranks.names(world)}
    named = [t for tests in bug_list.found().values() for t in tests if t.startswith("ranks_")]
    assert named
    assert {name.partition("::")[2] for name in named} <= cases


@pytest.mark.parametrize(
    ("docstring", "ids"),
    [
        ("N1: x", ["N1"]),
        ("N1, S20: x, T4", ["N1", "S20"]),
        ("N1,\n    N2: x", ["N1", "N2"]),
        ("N2.", ["N2"]),
        ("Replay of R2 and R3: both", []),
        ("H1: no letter of a section", []),
        ("T1 and T2: x", []),
    ],
)
def test_ids_are_what_a_docstring_begins_with(docstring: str, ids: list[str]) -> None:
    (function,) = ast.parse(f'def f():\n    """{docstring}"""').body
    assert isinstance(function, ast.FunctionDef)
    assert bug_list.ids_of(function) == ids


def test_the_document_is_that_of_the_tests() -> None:
    assert bug_list.DOCUMENT.read_text() == bug_list.document(), "run python tests/bug_list.py"
