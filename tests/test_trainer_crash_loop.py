"""`kill -9` at random moments never leaves a run that cannot be read or that ends differently."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("crash_loop.py")


@pytest.mark.parametrize(
    "kills", [5, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(1500)])]
)
def test_killed_runs_end_with_the_same_bits(tmp_path: Path, kills: int) -> None:
    if sys.platform != "linux":
        pytest.skip("forks a process that has loaded torch")
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path), str(kills)],
        capture_output=True,
        text=True,
        timeout=1400,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    print(figures)
    assert figures["kills"] == kills
    assert figures["while_saving"] >= (kills // 10 or 1), "too few kills hit the saving"
