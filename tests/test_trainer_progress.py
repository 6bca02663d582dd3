"""Bars and lines: what they show, where they are quiet, and how they leave the terminal."""

from __future__ import annotations

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import watched_runs
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from fused_grpo.trainer import monitor, progress
from fused_grpo.trainer.progress import Lines, RichBar, TqdmBar, choose, last_line, shown

LABELS = ("reward", "length", "entropy", "kl", "zero-var", "tok/s")
LOGS = {
    "loss": 0.5,
    "reward": 0.25,
    "completions/mean_length": 1234.5,
    "entropy": 1.5,
    "kl": 0.0123456,
    "frac_reward_zero_std": 0.125,
    "tokens_per_second": 4321.0,
    "other": 9.0,
}


def kinds(run: Any) -> list[type]:
    known = (RichBar, Lines, ProgressCallback, PrinterCallback)
    return [type(c) for c in run.callback_handler.callbacks if isinstance(c, known)]


@pytest.mark.parametrize(
    ("option", "disabled", "terminal", "expected"),
    [
        ("auto", False, True, "rich"),
        ("auto", False, False, "lines"),
        ("auto", True, True, "none"),
        ("auto", True, False, "none"),
        ("lines", True, True, "lines"),
        ("tqdm", False, False, "tqdm"),
        ("none", False, True, "none"),
    ],
)
def test_choice(option: str, disabled: bool, terminal: bool, expected: str) -> None:
    if expected == "rich":
        pytest.importorskip("rich")
    assert choose(option, disabled, terminal) == expected


def test_without_rich_there_is_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name: None)
    assert choose("auto", False, True) == "tqdm"


def test_numbers_shown() -> None:
    texts = shown(LOGS | {"kl": float("nan"), "entropy": None})
    assert list(texts) == ["reward", "length", "zero-var", "loss", "tok/s"]
    assert texts["length"] == "1,234"
    assert texts["tok/s"] == "4,321"
    assert texts["reward"] == "0.25"


def test_one_bar_takes_the_place_of_the_trainers(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    for option, kind in (("rich", RichBar), ("tqdm", TqdmBar), ("lines", Lines)):
        assert kinds(watched_runs.make(tmp_path, progress=option)) == [kind]
    assert kinds(watched_runs.make(tmp_path, progress="none")) == []
    assert kinds(watched_runs.make(tmp_path, progress="auto", disable_tqdm=True)) == []


def test_a_notebook_keeps_its_own_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.trainer

    class Notebook(TrainerCallback):
        """As transformers' own, which needs IPython."""

    monkeypatch.setattr(transformers.trainer, "DEFAULT_PROGRESS_CALLBACK", Notebook)
    run = watched_runs.make(tmp_path, progress="auto")
    assert kinds(run) == []
    callbacks = [type(c) for c in run.callback_handler.callbacks]
    assert Notebook in callbacks
    assert progress.LastLine not in callbacks


@pytest.mark.parametrize("kind", ["rich", "tqdm", "lines"])
def test_a_run_shows_its_metrics_and_a_last_line(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    if kind == "rich":
        console = pytest.importorskip("rich.console")
        terminal = console.Console(file=stream, force_terminal=True, width=250)
        monkeypatch.setitem(monitor.BARS, "rich", lambda: RichBar(terminal))
    run = watched_runs.make(tmp_path, progress=kind, beta=0.1, max_steps=3)
    run.evaluate()
    run.train()
    printed = capsys.readouterr()
    assert printed.out == ""
    text = stream.getvalue() + printed.err
    for label in LABELS:
        assert re.search(rf"\b{label}[ =][\d.]+", text), label
    assert "3/3" in text
    assert re.search(
        r"3 steps in [\d.]+ s, \d+ tokens; reward [\d.]+ -> [\d.]+; length .* zero-var", text
    )
    if kind == "rich":
        assert "evaluate" in text
        assert text.count("\x1b[?25l") == text.count("\x1b[?25h"), "the cursor is back"


def test_nothing_is_printed_with_disable_tqdm(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = watched_runs.make(tmp_path, progress="auto", disable_tqdm=True)
    run.evaluate()
    run.train()
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "")


@pytest.mark.parametrize("kind", ["rich", "tqdm"])
def test_a_failing_run_closes_its_bars(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    if kind == "rich":
        console = pytest.importorskip("rich.console")
        terminal = console.Console(file=stream, force_terminal=True)
        monkeypatch.setitem(monitor.BARS, "rich", lambda: RichBar(terminal))

    def broken(**_: Any) -> list[float]:
        raise KeyError("answer")

    run = watched_runs.make(tmp_path, broken, progress=kind)
    with pytest.raises(RuntimeError, match="KeyError"):
        run.train()
    if kind == "rich":
        text = stream.getvalue()
        assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1
    else:
        (bar,) = [c for c in run.callback_handler.callbacks if isinstance(c, TqdmBar)]
        assert bar.training_bar.disable, "tqdm closes by disabling itself"


def test_other_processes_are_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    console = pytest.importorskip("rich.console")
    stream = io.StringIO()
    other = SimpleNamespace(
        is_world_process_zero=False, global_step=1, max_steps=3, num_input_tokens_seen=1
    )
    other.log_history = [LOGS]
    bars = [RichBar(console.Console(file=stream, force_terminal=True)), TqdmBar(), Lines()]
    for bar in [*bars, progress.LastLine(lambda: 1)]:
        bar.on_train_begin(None, other, None)
        bar.on_log(None, other, None, logs=LOGS)
        bar.on_prediction_step(None, other, None, eval_dataloader=[1])
        bar.on_step_end(None, other, None)
        bar.on_evaluate(None, other, None)
        bar.on_train_end(None, other, None)
    assert stream.getvalue() == ""
    assert capfd.readouterr() == ("", "")


def test_the_last_line_compares_both_ends_of_a_run() -> None:
    history: list[dict[str, Any]] = [{"reward": i / 10, "step": i} for i in range(11)]
    history.insert(3, {"eval_reward": 9.0, "reward": float("nan")})
    assert last_line(11, 12345, 3725.0, history, 0) == (
        "11 steps in 1 h 2 min, 12,345 tokens; reward 0.2 -> 0.8"
    )
    assert last_line(1, 5, 65.2, [], 1).endswith(
        "1 steps in 1 min 5 s, 5 tokens; 1 warning in warnings.jsonl"
    )
    assert last_line(1, 5, 0.25, [], 2).endswith("in 0.2 s, 5 tokens; 2 warnings in warnings.jsonl")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"progress": "bar"}, "progress='bar' is unknown; choose one of auto, rich"),
        ({"progress": "rich", "disable_tqdm": True}, "contradict"),
        ({"report_to": "wandb"}, "report_to='wandb' needs wandb: pip install wandb"),
    ],
)
def test_options_that_do_not_fit(
    tmp_path: Path, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = progress.importlib.util.find_spec
    monkeypatch.setattr(
        progress.importlib.util, "find_spec", lambda n, *a: None if n == "wandb" else find(n, *a)
    )
    with pytest.raises(ValueError, match=message):
        watched_runs.make(tmp_path, **options)
