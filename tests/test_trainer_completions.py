"""The file of completions: what is in it, after a resume too, and how it is shown."""

from __future__ import annotations

import builtins
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import watched_runs

from fused_grpo import cli
from fused_grpo.trainer.completions import find, table


def half(completions: list[str], **_: Any) -> list[float | None]:
    return [None if i % 2 else 1.0 for i in range(len(completions))]


def logged(path: Path) -> list[dict[str, Any]]:
    return watched_runs.lines(path / "completions.jsonl")


def test_completions_are_those_that_train_the_model(tmp_path: Path) -> None:
    """Against the batches that reach the loss, and the rewards of the texts."""
    run = watched_runs.make(tmp_path, [watched_runs.letters, half], log_completions=True)
    with torch.no_grad():
        run.model.lm_head.weight[0] *= 4  # some end
    seen: list[Any] = []
    original = run.collector.__call__

    def keep(rows: Any) -> Any:
        seen.append((rows, original(rows)))
        return seen[-1][1]

    run.collector = keep  # type: ignore[assignment]
    run.train()
    entries = logged(tmp_path)
    assert [entry["step"] for entry in entries] == [1] * 8 + [2] * 8
    expected = []
    for rows, generation in seen:
        (batch,) = generation.batches
        for i, row in enumerate(rows):
            ids = batch.completion_ids[i][batch.completion_mask[i]].tolist()
            expected.append((row["prompt"], ids, batch.advantages[i].item()))
    for entry, (prompt, ids, advantage) in zip(entries, expected, strict=True):
        ended = ids[-1] == run.processing_class.eos_token_id
        text = run.processing_class.decode(ids, skip_special_tokens=True)  # as rewards see it
        assert (entry["prompt"], entry["completion"]) == (prompt, text)
        assert (entry["length"], entry["ended"]) == (len(ids), ended)
        assert entry["advantage"] == advantage
        assert entry["rewards"]["letters"] == pytest.approx(watched_runs.letters([text])[0])
    assert {entry["ended"] for entry in entries} == {True, False}
    assert [entry["rewards"]["half"] for entry in entries] == [1.0, None] * 8


def test_without_the_option_there_is_no_file(tmp_path: Path) -> None:
    watched_runs.make(tmp_path).train()
    assert not (tmp_path / "completions.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"logging_steps": 2, "max_steps": 5}, [1, 3, 5]),
        ({"steps_per_generation": 2, "max_steps": 4}, [1, 3]),
        ({"num_iterations": 3, "max_steps": 6, "logging_steps": 4}, [1]),
        ({"num_iterations": 3, "max_steps": 6, "logging_steps": 2}, [1, 4]),
    ],
)
def test_generations_are_thinned_by_logging_steps(
    tmp_path: Path, options: dict[str, Any], steps: list[int]
) -> None:
    watched_runs.make(tmp_path, log_completions=True, **options).train()
    assert list(dict.fromkeys(entry["step"] for entry in logged(tmp_path))) == steps


def test_logging_changes_nothing_else(tmp_path: Path) -> None:
    runs = []
    for name, options in (("a", {}), ("b", {"log_completions": True})):
        run = watched_runs.make(tmp_path / name, **options)
        run.train()
        runs.append(run)
    for a, b in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    watched_runs.make(
        tmp_path, log_completions=True, max_steps=3, save_strategy="steps", save_steps=1
    ).train()
    whole = logged(tmp_path)
    run = watched_runs.make(tmp_path, log_completions=True, max_steps=3)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert logged(tmp_path) == whole
    assert len(whole) == 24


def test_evaluation_is_not_in_it(tmp_path: Path) -> None:
    run = watched_runs.make(tmp_path, log_completions=True, eval_strategy="steps", eval_steps=1)
    run.evaluate()
    run.train()
    assert len(logged(tmp_path)) == 16


@pytest.mark.parametrize("count", [3, None])
def test_some_are_printed(
    tmp_path: Path,
    count: int | None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "200")
    watched_runs.make(
        tmp_path, log_completions=True, num_completions_to_print=count, max_steps=1
    ).train()
    printed = capsys.readouterr().err
    shown = [line.split("│") for line in printed.splitlines() if re.search(r"│ (yes|no) +│", line)]
    entries = logged(tmp_path)[:count]
    assert len(shown) == len(entries) == (count or 8)
    for cells, entry in zip(shown, entries, strict=True):
        assert float(cells[4]) == pytest.approx(entry["advantage"], rel=1e-2)
        assert cells[5].strip() == str(entry["length"])


ENTRIES = [
    {
        "step": step,
        "prompt": prompt,
        "completion": f"[bold]answer {i}[/bold]",
        "advantage": 0.5,
        "length": 3,
        "ended": i > 0,
        "rewards": {"exact": value, "other": None if i else -2.0},
    }
    for step, prompt in ((1, "one"), (4, [{"role": "user", "content": "four"}]))
    for i, value in enumerate((0.0, 2.0, 1.0))
]


@pytest.mark.parametrize("rich", [True, False])
def test_a_table_shows_texts_as_they_are(monkeypatch: pytest.MonkeyPatch, rich: bool) -> None:
    if rich:
        pytest.importorskip("rich")
        monkeypatch.setenv("COLUMNS", "200")
    else:
        original = builtins.__import__

        def without(name: str, *args: Any, **kwargs: Any) -> Any:
            if name.startswith("rich"):
                raise ImportError(name)
            return original(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", without)
    long = ENTRIES[3] | {"completion": "a" * 150 + "b" * 300 + "c" * 150}
    text = table([ENTRIES[4], long])
    assert "[bold]answer 1[/bold]" in text, "brackets are text, not markup"
    assert "user: four" in text
    assert "none" in text
    assert ("┃ exact" in text) == rich
    assert text.count("a") >= 150
    assert text.count("b") < 150, "long texts lose their middle"
    assert "step 4" in text
    assert table([]).strip().startswith("no completions")


def test_the_command_finds_the_best_and_the_worst(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["completions", str(tmp_path)]) == 2
    assert "train with --log_completions True" in capsys.readouterr().err
    from fused_grpo.trainer.records import JsonLines

    file = JsonLines(tmp_path / "completions.jsonl")
    file.append(ENTRIES)
    assert [e["completion"][13:14] for e in find(file.path)] == ["0", "1", "2"]
    assert {e["step"] for e in find(file.path)} == {4}
    assert [e["rewards"]["exact"] for e in find(file.path, 1, best=2)] == [2.0, 1.0]
    assert [e["rewards"]["exact"] for e in find(file.path, 1, worst=1)] == [0.0]
    assert cli.main(["completions", str(tmp_path), "--step", "1", "--worst", "1"]) == 0
    printed = capsys.readouterr().out
    assert "answer 0" in printed
    assert "answer 1" not in printed
    assert cli.main(["completions", str(tmp_path), "--step", "3"]) == 2
    assert "no completions of step 3; it has those of 1, 4" in capsys.readouterr().err
    assert cli.main(["completions", str(tmp_path), "--best", "0"]) == 2
    assert "at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_completions_to_print": 3}, ValueError, "needs log_completions"),
        ({"num_completions_to_print": None}, ValueError, "needs log_completions"),
        ({"log_completions": True, "num_completions_to_print": -1}, ValueError, "at least 0"),
        ({"log_completions": True, "num_completions_to_print": 1.5}, TypeError, "not float"),
    ],
)
def test_options_that_do_not_fit(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        watched_runs.make(tmp_path, **options)


def test_all_processes_share_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process writes what all have gathered; the others write nothing."""
    from fused_grpo.trainer import completions

    run = watched_runs.make(tmp_path, log_completions=True)
    log = run.monitor.completions
    assert log is not None
    monkeypatch.setattr(completions, "gather_object", lambda own: own + own)
    sample = run.sampler(run.model, ["ab"], copies=2)
    rows = [{"prompt": "ab"}] * 2
    for first in (False, True):
        state = SimpleNamespace(is_world_process_zero=first, global_step=0, logging_steps=1)
        log.on_train_begin(None, state, None)
        log(rows, sample, torch.zeros(2, 1), torch.zeros(2))
        assert (tmp_path / "completions.jsonl").exists() == first
    assert len(logged(tmp_path)) == 4
