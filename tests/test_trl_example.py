"""The example of TRL: three changed lines at most, and it runs."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
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


def test_it_runs_as_before(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    trl_runs.model().save_pretrained(folder)
    trl_runs.tokenizer().save_pretrained(folder)
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    losses = []
    for script in (BEFORE, AFTER):
        done = subprocess.run(
            [sys.executable, str(script), str(folder), "2", str(tmp_path / script.stem)],
            env=os.environ
            | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found = re.findall(r"'grad_norm': '?([0-9.e-]+)", done.stdout)
        assert len(found) == 2
        assert float(found[0]) > 0
        losses.append(found)
    assert losses[0] == losses[1]
