"""The benchmark compares like with like, and writes what it promises."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # benchmarks/ is run from the root, and not installed

from benchmarks import head_data, heads, loss, measure, readme, report  # noqa: E402
from benchmarks.data import PADDING, _length_for_padding, synthetic_case  # noqa: E402
from benchmarks.implementations import IMPLEMENTATIONS, Implementation, exact, make_feed  # noqa: E402


@pytest.mark.parametrize("item", IMPLEMENTATIONS, ids=lambda i: i.key)
def test_every_implementation_computes_the_same_loss(item):
    """M8: Log-probabilities with a plain loss on top are among what is compared."""
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


# --- the heads of models -------------------------------------------------------------------------


def test_every_head_that_is_installed_computes_the_same():
    case = head_data.head_case("tiny-head", 64, "cpu", torch.float32)
    exact_answer = head_data.truth(case)
    for head in heads.HEADS:
        if find_spec(head.package) is None:
            continue
        error = heads.errors(case, head, exact_answer)
        assert error["logps_max"] < 1e-5, head.name
        assert error["dhidden"] < 1e-5, head.name
        assert error["dweight"] < 1e-5, head.name


def test_the_exact_rows_are_rows_of_the_exact_gradients():
    case = head_data.head_case("tiny-head", 2048, "cpu", torch.float32)
    assert case.hidden.shape == (2, 1024, 32)
    _, logps, dh, dw = exact(case)
    got = head_data.truth(case)
    for a, b in zip(got, (logps, dh[: len(got[1])], dw[head_data.weight_rows(case)]), strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-9, atol=1e-12)


def test_a_quick_run_of_heads_writes_json_and_table(tmp_path, capsys):
    args = ["--quick", "--shape", "tiny-head", "--dtype", "bf16", "--only", "eager"]
    loss.main([*args, "--out", str(tmp_path)])
    (path,) = tmp_path.glob("*-quick-heads.json")
    (case,) = json.loads(path.read_text())["heads"]
    assert {(r["task"], r["name"]) for r in case["rows"]} == {
        (task, name) for task in heads.PRODUCTS for name in ("fused-grpo", "eager")
    }
    for row in case["rows"]:
        floor = heads.PRODUCTS[row["task"]] * row["product_s"]
        assert row["over_floor"] == pytest.approx(row["median_s"] / floor, rel=0.9)
        assert row["over_floor_range"][0] <= row["over_floor"] <= row["over_floor_range"][1]
    assert not case["targets_apply"]  # neither the machine nor the shape
    assert "set for an H200" in path.with_suffix(".md").read_text()
    assert "TRL chunked: not measured" in capsys.readouterr().out


def test_a_peer_that_fails_is_named_and_ours_is_not_excused(tmp_path, monkeypatch):
    def broken(feed):
        raise RuntimeError("out of memory")

    ours = heads.HEADS[0]
    monkeypatch.setattr(heads, "HEADS", (ours, heads.Head("broken", broken, broken)))
    args = ["--quick", "--shape", "tiny-head", "--dtype", "fp32", "--out", str(tmp_path)]
    loss.main(args)
    (path,) = tmp_path.glob("*-quick-heads.md")
    assert "Skipped: broken (RuntimeError: out of memory)" in path.read_text()
    monkeypatch.setattr(heads, "HEADS", (replace(ours, loss=broken),))
    with pytest.raises(RuntimeError, match="out of memory"):
        loss.main(args)


def test_targets_are_judged_by_ratio():
    def row(task: str, name: str, seconds: float, over_floor: float) -> dict:
        return {"task": task, "name": name, "median_s": seconds, "over_floor": over_floor}

    rows = [row("loss", "fused-grpo", 0.7, 1.2), row("loss", "TRL chunked", 1.0, 1.7)]
    assert heads.judge(rows, "loss", "floor", 1.25)["ratio"] == 1.2
    assert heads.judge(rows, "loss", "TRL chunked", 0.75)["ratio"] == pytest.approx(0.7)
    assert heads.judge(rows[:1], "loss", "TRL chunked", 0.75)["ratio"] is None
    for ratio, applies, said in ((0.7, True, "holds"), (0.8, True, "MISSED"), (0.8, False, "H200")):
        verdict = {"task": "loss", "over": "TRL chunked", "limit": 0.75, "ratio": ratio}
        assert said in heads._verdict(verdict, applies)


def test_the_defaults_on_a_gpu_are_the_heads_in_bf16():
    args = loss.parse(["--device", "cuda"])
    assert args.heads
    assert (args.shape, args.dtype) == (list(head_data.DEFAULT_MODELS), ["bf16"])
    args = loss.parse([])
    assert (args.heads, args.shape, args.dtype) == (False, ["real", "qwen"], ["fp32", "bf16"])
    with pytest.raises(SystemExit):
        loss.parse(["--shape", "real", "qwen3-8b"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    with pytest.raises(SystemExit, match="sees no GPU"):
        loss.main(["--device", "cuda"])


def test_the_readme_shows_the_committed_results() -> None:
    assert readme.main(["--check"]) == 0
    text = readme.README.read_text()
    assert text.count("<!-- results:") == text.count("<!-- end -->") == 2
    found = {"fp32": "| fp32 |", "bf16": "| another |"}
    assert "| another |" in readme.filled(text, found)
