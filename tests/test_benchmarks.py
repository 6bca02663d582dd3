"""The benchmark compares like with like, and writes and shows what it measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # benchmarks/ is run from the root, and not installed

from benchmarks import (  # noqa: E402
    compare,
    implementations,
    measure,
    parts,
    peers,
    plots,
    readme,
    report,
    scaling,
    tables,
    verdicts,
)
from benchmarks.compare import Settings  # noqa: E402
from benchmarks.data import PADDING, Spec, _length_for_padding  # noqa: E402
from benchmarks.implementations import OURS, ROUTED, Implementation, make_feed  # noqa: E402
from benchmarks.truth import exact, some_rows  # noqa: E402
from fused_grpo.memory import VECTOR_BYTES  # noqa: E402
from fused_grpo.reference import reference_logprobs  # noqa: E402

ITEMS = implementations.implementations()
TINY = Spec(tokens=48, vocab=257, width=32, padding=0.27, dtype="fp32")


# --- inputs and the exact answer -----------------------------------------------------------------


@pytest.mark.parametrize("padding", [0.0, 0.27, 0.7])
def test_inputs_are_as_large_ragged_and_padded_as_asked(padding: float) -> None:
    case = replace(TINY, tokens=4096, padding=padding).build()
    assert case.tokens == pytest.approx(4096, rel=0.03)
    assert case.padding == pytest.approx(padding, abs=0.02)
    assert len(case.mask.sum(1).unique()) == (1 if padding == 0 else len(case.mask))


@pytest.mark.parametrize("entropy", [0.3, 2.4, 4.5])
def test_inputs_are_as_uncertain_as_asked_and_slightly_off_policy(entropy: float) -> None:
    case = replace(TINY, tokens=2048, vocab=1031, entropy=entropy).build()
    assert compare.mean_entropy(case) == pytest.approx(entropy, rel=0.25)
    ratio = torch.exp(exact(case, gradients=False).logps - case.old[case.mask])
    assert 0.005 < float(((ratio < 0.8) | (ratio > 1.2)).double().mean()) < 0.2


@pytest.mark.parametrize("zero", [0.0, 0.5, 0.75])
def test_as_many_tokens_as_asked_have_no_coefficient(zero: float) -> None:
    spec = replace(TINY, tokens=512, padding=0.0, zero=zero)
    case = spec.build()
    found = compare.describe(spec, case, exact(case))
    assert found["without_advantage"] == zero
    assert zero <= found["zero"] < zero + 0.2  # clipped ones join them


def test_the_same_spec_builds_the_same_and_travels_as_json() -> None:
    spec = replace(TINY, dtype="bf16")
    first, second = spec.build(), Spec(**json.loads(json.dumps(spec.to_json()))).build()
    assert torch.equal(first.hidden, second.hidden)
    assert torch.equal(first.old, second.old)
    assert spec.key != replace(spec, padding=0.3).key
    assert Spec().key == "default"


def test_real_completions_are_cut_to_the_padding_asked_for() -> None:
    lengths = torch.tensor([3, 10, 40, 100])
    limit = _length_for_padding(lengths, PADDING)
    empty = 1 - lengths.clamp(max=limit).double().mean() / limit
    assert float(empty) == pytest.approx(PADDING, abs=0.05)


@pytest.mark.parametrize("whole", [True, False])
def test_the_exact_answer_is_that_of_autograd_in_fp64(
    whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.truth.CHUNK", 17)
    if not whole:
        monkeypatch.setattr("benchmarks.truth.WHOLE", 0)
    case = replace(TINY, temperature=0.6, loss_type="grpo", beta=0.1).build()
    feed = make_feed(case.to(torch.float64), "counted")
    logps, _ = reference_logprobs(feed.hidden, feed.weight, feed.ids, temperature=0.6)
    loss = implementations.clipped_loss(logps, feed)
    loss.backward()
    found = exact(case)
    dw = feed.weight.grad
    assert dw is not None
    if not whole:
        assert found.rows is not None
        assert torch.equal(found.rows, some_rows(feed.ids))
        dw = dw[found.rows]
    expected = (loss.detach(), logps.detach(), feed.hidden.grad, dw)
    got = (found.loss, found.logps, found.dhidden, found.dweight)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)


# --- adapters ------------------------------------------------------------------------------------


def gradient_tolerance(item: Implementation) -> float:
    """Routed gradients are one random draw; other tests hold them to their mean and variance."""
    return 0.02 if item.name == ROUTED else 1e-5


@pytest.mark.parametrize("item", ITEMS, ids=lambda i: i.key)
def test_every_implementation_computes_the_same_loss(item: Implementation) -> None:
    """M8: Log-probabilities with a plain loss on top are among what is compared."""
    if reason := item.reason_to_skip(replace(TINY, dtype="bf16"), quick=True):
        pytest.skip(reason)
    for spec in (TINY, replace(TINY, temperature=0.6, loss_type="grpo", beta=0.1)):
        case = spec.build()
        error = measure.errors(item, make_feed(case, item.layout), exact(case), "loss")
        assert error["loss"] < 1e-5, error
        assert error["logps_max"] < 1e-4, error
        assert error["dhidden"] < gradient_tolerance(item), error
        assert error["dweight"] < gradient_tolerance(item), error


@pytest.mark.parametrize("task", ["logprobs", "frozen"])
def test_the_other_tasks_have_what_they_should_and_no_more(task: str) -> None:
    spec = replace(TINY, task=task)
    case = spec.build()
    chosen, _ = compare.choose(spec, Settings(quick=True))
    assert {OURS, "eager"} < {item.name for item in chosen}
    assert (ROUTED in {item.name for item in chosen}) == (task == "frozen")
    for item in chosen:
        feed = measure.task_feed(case, item.layout, task)
        error = measure.errors(item, feed, exact(case), task)
        assert error["logps_max"] < 1e-4, item.key
        assert ("dhidden" in error) == (task == "frozen")
        assert error.get("dhidden", 0) < gradient_tolerance(item), item.key
        assert feed.weight.grad is None


def test_errors_notice_a_wrong_implementation() -> None:
    def wrong(feed: Any) -> Any:
        loss, logps = implementations.fused_grpo(feed)
        feed.weight.grad *= 1.01
        return loss, logps

    case = TINY.build()
    item = Implementation("wrong", "padded", run=wrong)
    error = measure.errors(item, make_feed(case, "padded"), exact(case), "loss")
    assert error["dweight"] == pytest.approx(0.01, rel=1e-3)
    assert error["dhidden"] < 1e-5


def test_reasons_to_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    by_key = {item.key: item for item in ITEMS}
    assert "GPU" in str(by_key["quack/counted"].reason_to_skip(TINY))
    assert "GPU" in str(by_key["Liger Triton/padded"].reason_to_skip(TINY))
    assert "fp32" in str(by_key["eager, low precision/counted"].reason_to_skip(TINY))
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    monkeypatch.setenv("VERL_PATH", "/nonexistent")
    assert by_key["TRL chunked/counted"].reason_to_skip(TINY) == "trl is not installed"
    assert "VERL_PATH" in str(by_key["verl torch/counted"].reason_to_skip(TINY))
    monkeypatch.setattr(implementations, "free_memory", lambda device: 1e9)
    large = replace(TINY, tokens=131_072, vocab=32_768)
    assert "need 52 GB, 1 GB are free" in str(by_key["eager/counted"].reason_to_skip(large))
    assert by_key[f"{OURS}/padded"].reason_to_skip(large) is None
    on_gpu = replace(TINY, device="cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    assert "Hopper" in str(peers.needs("quack", gpu=True, hopper=True)(on_gpu))
    assert "16-bit" in str(peers.needs("quack", half=True)(on_gpu))


# --- measuring -----------------------------------------------------------------------------------


def test_runs_take_turns_and_slow_ones_stop_after_two_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    clock: Iterator[float] = iter([1.0, 9.0, 2.0, 1.0, 9.0, 2.0] + [1.0, 2.0] * 3)

    def seconds(call: Any, device: str) -> float:
        call()
        return next(clock)

    monkeypatch.setattr(measure, "_seconds", seconds)
    monkeypatch.setattr(measure, "_waited_for_a_core", lambda: 0.0)
    runs = {name: (lambda name=name: order.append(name)) for name in "abc"}  # type: ignore[misc]
    found = measure.time_in_turns(runs, "cpu", 5, 3.0, lambda: None)
    assert "".join(order) == "abcabcacacac"
    assert found["b"].seconds == [9.0, 9.0]
    assert found["c"].ratios(found["a"]) == [2.0] * 5


def test_a_failure_of_another_library_is_reported_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(feed: Any) -> Any:
        raise RuntimeError("no such kernel")

    ours = ITEMS[0]
    items = (ours, Implementation("broken", "padded", run=broken))
    monkeypatch.setattr(compare, "implementations", lambda: items)
    found = compare.run(TINY, Settings(rounds=2))
    assert [row["name"] for row in found["implementations"]] == [OURS]
    assert found["skipped"][0]["reason"] == "RuntimeError: no such kernel"
    assert "Skipped: broken, padded (RuntimeError: no such kernel)" in tables.full(found)
    monkeypatch.setattr(compare, "implementations", lambda: (replace(ours, run=broken),))
    with pytest.raises(RuntimeError, match="no such kernel"):
        compare.run(TINY, Settings(rounds=2))


def test_peak_memory_is_that_of_a_fresh_process() -> None:
    """Beyond the inputs: both gradients at least, and not the libraries."""
    spec = replace(TINY, tokens=64, vocab=40_000, width=256, dtype="bf16")
    gradients = 2 * (40_000 + 64) * 256
    found = measure.peak_memory(spec, ITEMS[0])
    assert gradients < found < 10 * gradients


def test_machine_versions_and_commit_are_recorded() -> None:
    found = measure.machine("cpu")
    assert found["packages"]["torch"] == torch.__version__
    assert found["packages"]["quack-kernels"] is None
    assert found["commit"] is None or len(found["commit"].rstrip("+")) == 12


# --- the command ---------------------------------------------------------------------------------


def quick(tmp_path: Path, *words: str) -> None:
    few = ["--implementations", "eager,", "eager"]
    report.main(["--quick", "--out", str(tmp_path), *few, *words])


def test_a_quick_run_writes_json_table_and_plot_and_can_be_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(tmp_path, "--only", "loss", "--memory", "none")
    assert "| fused-grpo | padded |" in capsys.readouterr().out
    (path,) = tmp_path.glob("*-loss.json")
    assert path.with_suffix(".png").stat().st_size > 1000
    results = json.loads(path.read_text())
    assert [case["dtype"] for case in results["cases"]] == ["bf16", "fp32"]
    for case in results["cases"]:
        ours, *others = case["implementations"]
        assert others
        assert all(len(row["seconds"]) == 2 for row in case["implementations"])
        assert ours["over_floor"]["median"] > 0
    assert results["machine"]["packages"]["torch"] == torch.__version__

    def again(*_: Any, **__: Any) -> Any:
        raise AssertionError("measured again")

    before = path.with_suffix(".md").read_text()
    path.with_suffix(".md").unlink()
    monkeypatch.setattr(compare, "run", again)
    quick(tmp_path, "--only", "loss", "--memory", "none", "--resume")
    assert path.with_suffix(".md").read_text().splitlines()[4:] == before.splitlines()[4:]
    path.with_suffix(".md").unlink()
    quick(tmp_path, "--only", "loss", "--render")
    assert path.with_suffix(".md").exists()
    with pytest.raises(AssertionError, match="measured again"):
        quick(tmp_path, "--only", "loss")


def test_what_was_measured_is_kept_when_a_later_case_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def jobs(choice: Any) -> Iterator[parts.Job]:
        def fails() -> Any:
            raise KeyboardInterrupt

        yield parts.Job("first", lambda: {"key": "first"})
        yield parts.Job("second", fails)

    monkeypatch.setitem(parts.PARTS, "loss", jobs)
    base, about = tmp_path / "x", {"machine": {"commit": "c"}, "command": ""}
    with pytest.raises(KeyboardInterrupt):
        report.run_part("loss", None, about, base, resume=False)
    (case,) = json.loads(base.with_suffix(".json").read_text())["cases"]
    assert case["key"] == "first"
    assert case["measured"]["commit"] == "c"


@pytest.mark.parametrize("part", ["tasks", "sweeps", "scaling", "routing"])
def test_quick_runs_of_the_other_parts(part: str, tmp_path: Path) -> None:
    quick(tmp_path, "--only", part, "--memory", "none")
    (path,) = tmp_path.glob(f"*-{part}.json")
    assert path.with_suffix(".png").stat().st_size > 1000
    assert path.with_suffix(".md").read_text().count("|---|") > 0


def test_scaling_says_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = {"peak_bytes": 130e6, "gradient_bytes": 20e6, "sum_bytes": 10e6, "seconds": 0.001}
    monkeypatch.setattr(scaling, "run_fresh", lambda command: dict(measured))
    monkeypatch.setattr(scaling, "free_memory", lambda device: 1e5)
    case = scaling.run(64, "bf16", "cpu", full=False, quick=True)
    assert [row["kind"] for row in case["rows"]] == ["exact"]
    assert case["skipped"][0]["kind"] == "eager"
    assert tables.scaled([case]).splitlines()[2] == "| 64 | 16 µs, 100 MB |"
    case["rows"].append({"kind": "eager", **measured})
    case |= {"rows": case["rows"], "skipped": [{"kind": "routed", "needed": 5e10}]}
    other = {**case, "tokens": 128, "rows": [{"kind": "routed", **measured}], "skipped": []}
    assert "does not fit: 50 GB" in tables.scaled([case, other])


def test_parts_by_device() -> None:
    on_cpu = parts.Choice(Settings())
    assert parts.default_parts(on_cpu) == ["loss", "tasks", "scaling", "sweeps"]
    assert "routing" in parts.default_parts(parts.Choice(Settings(full=True)))
    on_gpu = parts.Choice(Settings(), device="cuda")
    assert "heads" in parts.default_parts(on_gpu)
    assert {"device=cuda" in job.key for job in parts.heads(on_gpu)} == {True}


def test_axes_reach_as_far_as_promised() -> None:
    keys = [job.key for job in parts.sweeps(parts.Choice(Settings(full=True)))]
    assert len(keys) == len(set(keys))
    assert {"tokens=131072", "vocab=262144", "width=8192", "padding=0.7"} < set(keys)
    usual = [job.key for job in parts.sweeps(parts.Choice(Settings()))]
    assert set(usual) < set(keys)


def test_quick_numbers_never_reach_the_results() -> None:
    with pytest.raises(SystemExit):
        report.parse(["--quick"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(SystemExit, match="sees no GPU"):
        report.main(["--device", "cuda"])


# --- verdicts ------------------------------------------------------------------------------------


def row(name: str, layout: str, seconds: float, **more: Any) -> dict[str, Any]:
    base = {"name": name, "layout": layout, "median_s": seconds, "ours": False, "extra": False}
    base |= {"ours_over_it": {"median": 1 / seconds}, "over_floor": {"median": seconds / 0.9}}
    errors = {"logps_max": 5e-5, "dhidden": 4e-3, "dweight": 6e-3}
    return base | {"errors": errors} | more


def case_of(dtype: str, *rows: dict[str, Any]) -> dict[str, Any]:
    spec = {"source": "real", "device": "cpu", "temperature": 1.0}
    return {
        "spec": spec,
        "task": "loss",
        "dtype": dtype,
        "gemm_s": 0.3,
        "implementations": list(rows),
    }


def test_verdicts_compare_with_the_fastest_of_the_layout_and_say_why() -> None:
    case = case_of(
        "fp32",
        row(OURS, "padded", 1.0, ours=True),
        row(ROUTED, "padded", 0.4, ours=True),
        row("a", "padded", 4.0),
        row("b", "padded", 2.0),
        row("c", "padded", 1.25, extra=True),
        row("d", "counted", 1.05),
    )
    found = {(v.what, v.over): v for v in verdicts.judge(case)}
    exact_padded = found["exact", "b, padded"]
    assert (exact_padded.value, exact_padded.holds) == (0.5, True)
    assert exact_padded.with_extras == "0.80 (c)"
    missed = found["exact", "d, counted"]
    assert missed.value == pytest.approx(1 / 1.05)
    assert "missed" in missed.outcome
    assert "0.10 s beside the three bare products" in missed.reason
    assert found["routed", "b, padded"].value == pytest.approx(0.2)
    assert found["routed", "exact"].value == pytest.approx(0.4)
    assert found["routed", "the bare product"].value == pytest.approx(0.4 / 0.3)
    assert not found["routed", "relative error of dh and dW"].holds
    case["gemm_s"] = 0.32
    assert "would be 0.91" in verdicts.judge(case)[1].reason
    case["gemm_s"] = 0.4
    assert "below the three bare products" in verdicts.judge(case)[1].reason
    assert "**missed**" in verdicts.table([case])
    said = verdicts.summary([case])
    assert said.startswith("Of 7 ratios and errors that were aimed at, 3 are met")
    assert "fp32 exact over d, counted (0.95 for 0.90)" in said


def test_gpu_verdicts_are_for_one_shape() -> None:
    case = case_of("bf16", row(OURS, "counted", 1.0, ours=True), row("TRL chunked", "counted", 2.0))
    case |= verdicts.GPU_SHAPE
    case["spec"] = {"source": "synthetic", "device": "cuda"}
    assert [(v.over, v.value) for v in verdicts.judge(case)] == [
        ("its floor of bare products", pytest.approx(1 / 0.9)),
        ("TRL chunked", 0.5),
    ]
    case["implementations"].pop()
    assert verdicts.judge(case)[1].outcome == "not measured"
    assert verdicts.judge(case | {"tokens": 4096}) == []


# --- the documents -------------------------------------------------------------------------------


def test_the_documents_show_the_committed_results() -> None:
    assert readme.main(["--check"]) == 0


def test_every_table_is_shown_and_every_mark_is_a_table() -> None:
    text = "\n".join(path.read_text() for path in readme.documents())
    for name in readme.TABLES:
        assert text.count(f"<!-- results: {name} -->") == 1, name
    assert text.count("<!-- results:") == len(readme.TABLES)
    with pytest.raises(ValueError, match="no table 'lost'"):
        readme.filled("<!-- results: lost -->\n<!-- end -->", readme.render)


def test_a_changed_number_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    monkeypatch.setattr(readme, "documents", lambda: [page])
    page.write_text("a\n\n<!-- results: loss-fp32 -->\n\n<!-- end -->\nb\n")
    assert readme.main(["--check"]) == 1
    assert readme.main([]) == 0
    written = page.read_text()
    assert "| fused-grpo | padded |" in written
    assert written.startswith("a\n\n<!--")
    assert written.endswith("<!-- end -->\nb\n")
    assert readme.main(["--check"]) == 0
    page.write_text(written.replace("| fused-grpo | padded | ", "| fused-grpo | padded | 1"))
    assert readme.main(["--check"]) == 1


@pytest.mark.parametrize("part", ["loss", "tasks", "scaling", "sweeps", "routing"])
def test_committed_results_say_where_they_are_from(part: str) -> None:
    path = readme.RESULTS / f"{readme.MACHINE}-{part}.json"
    results = json.loads(path.read_text())
    assert results["machine"]["packages"]["torch"]
    for case in results["cases"]:
        assert case["measured"]["commit"]
        for item in case.get("implementations", []):
            assert item["errors"]["logps_max"] > 0
            assert len(item["seconds"]) >= 2
    assert path.with_suffix(".png").exists()
    assert path.with_suffix(".md").read_text() == tables.page(part, results)


def test_extra_memory_does_not_grow_with_the_tokens() -> None:
    path = readme.RESULTS / f"{readme.MACHINE}-scaling.json"
    cases = json.loads(path.read_text())["cases"]
    assert {case["tokens"] for case in cases} == {4096, 32_768, 131_072}
    first, *_, last = ({row["kind"]: row for row in case["rows"]} for case in cases)
    vectors = VECTOR_BYTES * (cases[-1]["tokens"] - cases[0]["tokens"])
    for kind in ("exact", "routed", "log-probabilities"):
        # the margin is that of the planner's predictions: what libraries load on first use
        assert scaling.extra(last[kind]) < scaling.extra(first[kind]) + vectors + 16e6
        assert last[kind]["logps_max"] < 1e-4
    for kind in ("exact", "exact, old=None", "exact, sequence-level ratios"):
        rows = [row for case in cases for row in case["rows"] if row["kind"] == kind]
        assert max(map(scaling.extra, rows)) < scaling.BUDGET + 16e6
    eager = first["eager"]["peak_bytes"]
    assert eager > 8 * scaling.extra(last["exact"])


def test_plots_are_the_same_for_the_same_results(tmp_path: Path) -> None:
    results = json.loads((readme.RESULTS / f"{readme.MACHINE}-scaling.json").read_text())
    files = [tmp_path / "a.png", tmp_path / "b.png"]
    for path in files:
        plots.draw("scaling", results, path)
    assert files[0].read_bytes() == files[1].read_bytes()
