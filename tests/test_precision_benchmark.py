"""The benchmark of precision, and that its document shows what it measured."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # benchmarks/ is run from the root, and not installed

from benchmarks import precision  # noqa: E402
from benchmarks.data import Spec  # noqa: E402

TINY = Spec(tokens=48, vocab=257, width=32, padding=0.27)


@pytest.mark.parametrize("dtype", precision.DTYPES)
def test_rows_of_a_small_case(dtype: str) -> None:
    rows = {row["name"]: row["errors"] for row in precision.run(replace(TINY, dtype=dtype))}
    ours = rows["fused-grpo"]
    assert ours["max"] < 1e-4
    assert ours["flips"] == 0
    assert ours["sequences"] == 0
    assert ours["dhidden"] < (1e-5 if dtype == "fp32" else 2.0**-8)
    assert rows["eager"]["mean"] < 1e-5 if dtype == "fp32" else rows["eager"]["mean"] > 1e-3
    assert ("eager, fp32 head" in rows) == (dtype == "bf16")


def test_what_an_error_is() -> None:
    """Known shifts of the log-probabilities, far from and across the bounds of the clip."""
    case = TINY.build()
    truth = case.old[case.mask].double()  # every ratio is 1
    same = precision.errors(case, truth, truth)
    assert set(same.values()) == {0.0}
    small = precision.errors(case, truth + 1e-3, truth)
    assert small["mean"] == pytest.approx(1e-3)
    assert small["flips"] == 0
    assert small["sequences"] == 1, "each is off by 1e-3, beyond 4e-4"
    up = precision.errors(case, truth + 0.3, truth)
    positive = (case.advantages > 0)[:, None].expand(case.mask.shape)[case.mask]
    assert up["flips"] == pytest.approx(float(positive.double().mean()))
    first = torch.zeros_like(truth)
    first[0] = 0.5
    one = precision.errors(case, truth + first, truth)
    assert one["max"] == pytest.approx(0.5)
    assert one["sequences"] == 1 / len(case.mask)


def test_the_document_shows_what_was_measured() -> None:
    text = precision.PAGE.read_text()
    results = json.loads(precision.COMMITTED.read_text())
    assert precision.filled(text, results) == text, "run python -m benchmarks.precision --table"
    assert {row["name"] for row in results["rows"]} == {shown for *_, shown in precision.SHOWN}
    ours = [row["errors"] for row in results["rows"] if row["name"] == "fused-grpo"]
    assert all(e["flips"] == e["sequences"] == 0 for e in ours)
