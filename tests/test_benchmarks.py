"""The benchmark compares like with like, and writes what it promises."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # benchmarks/ is run from the root, and not installed

from benchmarks import loss, measure, report  # noqa: E402
from benchmarks.data import PADDING, _length_for_padding, synthetic_case  # noqa: E402
from benchmarks.implementations import IMPLEMENTATIONS, Implementation, exact, make_feed  # noqa: E402


@pytest.mark.parametrize("item", IMPLEMENTATIONS, ids=lambda i: i.key)
def test_every_implementation_computes_the_same_loss(item):
    if reason := item.reason_to_skip(torch.bfloat16, quick=True):
        pytest.skip(reason)
    tiny = partial(synthetic_case, vocab=257, hidden=32, batch=4, length=12)
    for case in (tiny(), replace(tiny(temperature=0.6), loss_type="grpo", beta=0.1)):
        error = measure.errors(item, make_feed(case, item.layout), exact(case))
        assert error["loss"] < 1e-5, error
        assert error["logps_max"] < 1e-4, error
        assert error["dhidden"] < 1e-5, error
        assert error["dweight"] < 1e-5, error


def test_inputs_are_ragged_off_policy_and_padded_as_promised():
    case = synthetic_case(vocab=257, hidden=32, batch=16, length=100)
    assert case.padding == pytest.approx(PADDING, abs=0.02)
    ratio = torch.exp(exact(case)[1] - case.old[case.mask])
    assert 0.01 < float(((ratio < 0.8) | (ratio > 1.2)).double().mean()) < 0.2
    lengths = torch.tensor([3, 10, 40, 100])
    limit = _length_for_padding(lengths, 0.27)
    empty = 1 - lengths.clamp(max=limit).double().mean() / limit
    assert float(empty) == pytest.approx(0.27, abs=0.05)


def test_a_quick_run_writes_json_table_and_plot(tmp_path, capsys):
    only = ["--only", "eager", "--dtype", "fp32", "bf16"]
    loss.main(["--quick", *only, "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "| fused-grpo | padded |" in printed
    (path,) = tmp_path.glob("*-quick-loss.json")
    assert path.with_suffix(".png").stat().st_size > 1000
    table = path.with_suffix(".md").read_text()
    assert "% padding" in table
    results = json.loads(path.read_text())
    assert [c["dtype"] for c in results["cases"]] == ["fp32", "bf16"]
    for case in results["cases"]:
        ours = case["implementations"][0]
        assert ours["ours"]
        assert ours["peak_bytes"] > 0  # taken in a fresh process
        assert all(len(i["seconds"]) >= 2 for i in case["implementations"])


def test_a_failure_of_another_library_is_reported_and_the_run_goes_on(
    tmp_path, monkeypatch, capsys
):
    def broken(feed):
        raise RuntimeError("no such kernel")

    ours = next(i for i in IMPLEMENTATIONS if i.ours)
    items = (ours, Implementation("broken", "padded", broken))
    monkeypatch.setattr(loss, "IMPLEMENTATIONS", items)
    monkeypatch.setattr(measure, "peak_memory", lambda item, case: 1.0)
    loss.main(["--quick", "--dtype", "fp32", "--out", str(tmp_path)])
    assert "Skipped: broken (RuntimeError: no such kernel)" in capsys.readouterr().out
    monkeypatch.setattr(loss, "IMPLEMENTATIONS", (replace(ours, run=broken),))
    with pytest.raises(RuntimeError, match="no such kernel"):
        loss.main(["--quick", "--dtype", "fp32", "--out", str(tmp_path)])


def test_verdict_compares_with_the_fastest_of_the_layout():
    def row(name: str, layout: str, seconds: float, ours: bool = False, extra: bool = False):
        ratio = {"median": 1.0 / seconds}
        return {
            "name": name,
            "layout": layout,
            "median_s": seconds,
            "ours": ours,
            "extra": extra,
            "ours_over_it": ratio,
        }

    rows = [
        row("ours", "padded", 1.0, ours=True),
        row("a", "padded", 4.0),
        row("b", "padded", 2.0),
        row("c", "padded", 1.6, extra=True),
        row("d", "counted", 1.1),
    ]
    case = {"dtype": "fp32", "implementations": rows}

    def outcome(layout: str, extras: bool) -> tuple:
        found = report.verdict(case, layout, extras)
        return found["fastest"], found["ratio"], found["holds"]

    assert outcome("padded", False) == ("b", 1 / 2, True)
    assert outcome("padded", True) == ("c", 1 / 1.6, True)
    assert outcome("counted", True) == ("d", 1 / 1.1, False)
