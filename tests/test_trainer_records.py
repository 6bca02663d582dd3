"""Files that a run appends to: what a kill, a full disk and a resume leave of them."""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path
from typing import Any

import pytest
import watched_runs

from fused_grpo.trainer.records import JsonLines, RunLines, read_lines


def test_what_json_does_not_have_becomes_null_and_texts_come_back(tmp_path: Path) -> None:
    entry = {"a": math.nan, "b": [1.5, -math.inf], "c": {"d": math.inf}, "e": 'ü\n"\u2028', "f": 1}
    file = JsonLines(tmp_path / "new" / "file")
    file.append([entry, {"half": "\udc80"}])
    (read, half) = read_lines(file.path)
    assert read == {"a": None, "b": [1.5, None], "c": {"d": None}, "e": 'ü\n"\u2028', "f": 1}
    assert half == {"half": "\udc80"}
    assert "ü" in file.path.read_text(encoding="utf-8"), "texts can be read in the file"


@pytest.mark.parametrize("cut", range(1, 14))
def test_a_line_cut_short_costs_itself_alone(tmp_path: Path, cut: int) -> None:
    file = JsonLines(tmp_path / "file")
    file.append([{"step": 1}, {"step": 2}])
    size = os.path.getsize(file.path)
    os.truncate(file.path, size - cut)
    before = [entry["step"] for entry in read_lines(file.path)]
    # without its line break alone an entry is whole
    assert before == ([1, 2] if cut == 1 else [1])
    JsonLines(file.path).append([{"step": 3}])
    assert [entry["step"] for entry in read_lines(file.path)] == [*before, 3]


def test_no_file_has_no_entries(tmp_path: Path) -> None:
    assert list(read_lines(tmp_path / "none")) == []


class FullDisk:
    """Writes half of a text, then fails."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> FullDisk:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def write(self, text: str) -> None:
        with self.path.open("a") as file:
            file.write(text[: len(text) // 2])
        raise OSError(28, "No space left on device")

    def writelines(self, texts: Any) -> None:
        for text in texts:
            self.write(text)


def test_a_full_disk_costs_entries_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = JsonLines(tmp_path / "file")
    file.append([{"step": 1}])
    original = Path.open
    full = True

    def opened(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if full and mode != "r" and mode != "rb" and kwargs:
            return FullDisk(path)
        return original(path, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", opened)
    with caplog.at_level(logging.WARNING):
        file.append([{"step": 2}])
        file.append([{"step": 3}])
        file.keep(lambda entry: False)
        full = False
        file.append([{"step": 4}])
    assert [entry["step"] for entry in read_lines(file.path)] == [1, 4]
    assert sum("is not written for now" in text for text in caplog.messages) == 1
    assert sum("keeps entries of before" in text for text in caplog.messages) == 1
    assert "No space left" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_new_run_starts_anew_with_what_it_wrote_before_training(tmp_path: Path) -> None:
    path = tmp_path / "file"
    JsonLines(path).append([{"step": 0, "run": "old"}, {"step": 9, "run": "old"}])
    run = RunLines(path)
    run.append([{"step": 0, "run": "new"}])
    assert len(list(read_lines(path))) == 3, "an evaluation alone takes nothing away"
    run.start(0)
    run.append([{"step": 1, "run": "new"}])
    assert [(e["step"], e["run"]) for e in read_lines(path)] == [(0, "new"), (1, "new")]


def test_a_resumed_run_keeps_what_came_before(tmp_path: Path) -> None:
    path = tmp_path / "file"
    JsonLines(path).append([{"step": step, "run": "old"} for step in range(5)])
    run = RunLines(path)
    run.start(3)
    run.append([{"step": 4, "run": "new"}])
    assert [e["step"] for e in read_lines(path)] == [0, 1, 2, 3, 4]
    assert [e["run"] for e in read_lines(path)] == ["old"] * 4 + ["new"]


def test_an_evaluation_before_a_resumed_training_takes_nothing_away(tmp_path: Path) -> None:
    first = watched_runs.make(tmp_path, save_strategy="steps", save_steps=1)
    first.train()
    again = watched_runs.make(tmp_path, max_steps=3)
    again.evaluate()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    entries = watched_runs.lines(tmp_path / "metrics.jsonl")
    assert [entry["step"] for entry in entries if "loss" in entry] == [1, 2, 3]
    assert sum("eval_reward" in entry for entry in entries) == 1
