"""The demonstration of `benchmarks.long_context`, small enough to run here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # benchmarks/ is run from the root, and not installed

from benchmarks.long_context import main, table  # noqa: E402

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="limits the address space"
)
SMALL = ["--vocab", "151936", "--width", "64", "--layers", "1", "--steps", "1", "--threads", "1"]
SMALL_LIMIT = 3 * 10**9


def test_eager_exceeds_the_limit_that_ours_trains_under(tmp_path: Path) -> None:
    """2,048 tokens: full logits are 1.2 GB, and a softmax of them with its gradient several."""
    limits = ["--limit", str(SMALL_LIMIT), "--length", "2048"]
    eager, fused = main([*SMALL, *limits, "--out", str(tmp_path), "--name", "test"])
    assert "allocate memory" in eager["failed"]
    assert "failed" not in fused
    assert fused["peak_rss"] < SMALL_LIMIT
    assert fused["grad_norm"][0] > 0
    written = json.loads((tmp_path / "test-long-context.json").read_text())
    assert written["runs"] == [eager, fused]
    lines = table([eager, fused]).splitlines()
    assert "out of memory" in lines[2]
    assert "out of memory" not in lines[3]


def test_both_compute_the_same(tmp_path: Path) -> None:
    """Without a limit that matters: the eager loss fails for its memory, not for its numbers."""
    short: Any = ["--length", "96", "--limit", str(40 * 10**9), "--steps", "2"]
    eager, fused = main([*SMALL, *short])
    assert eager["loss"] == pytest.approx(fused["loss"], rel=1e-5)
    assert eager["grad_norm"] == pytest.approx(fused["grad_norm"], rel=1e-4)
