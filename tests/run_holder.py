"""Another process that has a run's directory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import fused_grpo.trainer.guards

# the module alone, which needs the standard library only: without the seconds that torch takes
GUARDS = f"""
import os, runpy, signal, sys, time
from pathlib import Path
guards = runpy.run_path({fused_grpo.trainer.guards.__file__!r})
"""
HOLD = (
    GUARDS
    + """
lock = guards["RunLock"](Path(sys.argv[1]))
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""
)


def holder(folder: Path) -> subprocess.Popen[str]:
    """Another process that holds the lock of a folder."""
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    return other
