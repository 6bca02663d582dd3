"""`full_weight` with DeepSpeed's own ZeRO-3, where it is installed (`pip install deepspeed`); the
stand-in of `test_distributed.py` is for everywhere else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_two_ranks_of_zero_3_train_like_one_process(tmp_path: Path) -> None:
    script = Path(__file__).parent / "ranks_deepspeed.py"
    done = subprocess.run(
        [sys.executable, script, tmp_path],
        env=os.environ | {"DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = re.search(r"error (\S+) moved (\S+)", done.stdout)
    assert found is not None, done.stdout[-2000:]
    assert float(found[1]) < 1e-6
    assert float(found[2]) > 1e-3
