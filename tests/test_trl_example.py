"""The example of TRL: three changed lines at most, and it runs."""

from __future__ import annotations

import difflib
import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl", exc_type=ImportError)

import trl_runs

ROOT = Path(__file__).parent.parent
BEFORE, AFTER = (ROOT / "examples" / name for name in ("trl_grpo_before.py", "trl_grpo.py"))


def changed() -> tuple[list[str], list[str]]:
    """(lines that go, lines that come), the docstring and empty lines aside."""
    texts = [path.read_text().split('"""', 2)[2].splitlines() for path in (BEFORE, AFTER)]
    diff = [line for line in difflib.ndiff(*texts) if line[2:].strip()]
    return [x[2:] for x in diff if x[0] == "-"], [x[2:] for x in diff if x[0] == "+"]


def test_at_most_three_lines_change() -> None:
    gone, come = changed()
    assert 1 <= len(come) <= 3
    assert len(gone) <= len(come)


def test_the_readme_shows_these_lines() -> None:
    readme = (ROOT / "README.md").read_text()
    for line in changed()[1]:
        assert line in readme.splitlines()


def test_it_runs_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trl_runs.save_with_bytes(tmp_path / "model")
    runs = []
    for script in (BEFORE, AFTER):
        arguments = [str(tmp_path / "model"), "2", str(tmp_path / script.stem)]
        monkeypatch.setattr(sys, "argv", [str(script), *arguments])
        trainer = runpy.run_path(str(script), run_name="__main__")["trainer"]
        runs.append([entry for entry in trainer.state.log_history if "grad_norm" in entry])
    before, after = runs
    assert len(before) == len(after) == 2
    for name in ("loss", "grad_norm", "entropy", "rewards/short/mean"):
        for theirs, ours in zip(before, after, strict=True):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name
    assert float(before[0]["grad_norm"]) > 0
    assert "Fused" in type(trainer).__name__
