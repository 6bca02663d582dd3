"""The list of faults is complete, and its document is that of the tests."""

from __future__ import annotations

import bug_list


def test_every_entry_has_a_test_or_a_reason() -> None:
    tests = {name for name, where in bug_list.found().items() if where}
    assert tests <= set(bug_list.ENTRIES), "ids that are no entries"
    assert set(bug_list.ELSEWHERE) <= set(bug_list.ENTRIES)
    assert not tests & set(bug_list.ELSEWHERE), "entries with a test and a reason against one"
    missing = set(bug_list.ENTRIES) - tests - set(bug_list.ELSEWHERE)
    assert not missing, sorted(missing)


def test_the_document_is_that_of_the_tests() -> None:
    assert bug_list.DOCUMENT.read_text() == bug_list.document(), "run python tests/bug_list.py"
