"""A run stays below its output directory, whatever links and names somebody put there."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from trainer_runs import crash, trainer

from fused_grpo.trainer import checkpoints
from fused_grpo.trainer.checkpoints import BrokenCheckpointError
from fused_grpo.trainer.confined import OutsideError, is_inside
from fused_grpo.trainer.guards import RunLock
from fused_grpo.trainer.records import JsonLines

KEPT = "not a word of this may be lost\n"


def write(run_dir: Path, step: int) -> Path:
    draft = checkpoints.draft_root(run_dir) / f"checkpoint-{step}"
    draft.mkdir(parents=True)
    (draft / "weights").write_bytes(b"weights" * step)
    return checkpoints.publish(draft, run_dir, {"step": step, "resumable": True, "run": {}})


def rewrite(folder: Path, **changes: Any) -> None:
    """A manifest that says something else and has the right checksum: whoever writes it can."""
    body = json.loads((folder / "manifest.json").read_text())
    del body["sha256"]
    body |= changes
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps({**body, "sha256": digest}))


@pytest.fixture
def outside(tmp_path):
    """A folder that is none of the run's business, and must be left as it is."""
    folder = tmp_path / "outside"
    (folder / "deep").mkdir(parents=True)
    for name in ("file", "deep/file"):
        (folder / name).write_text(KEPT)
    os.rename(write(tmp_path / "made", 7), folder / "checkpoint-7")  # what `recover` looks for
    before = snapshot(folder)
    yield folder
    assert snapshot(folder) == before


def snapshot(folder: Path) -> dict[str, str]:
    return {
        p.relative_to(folder).as_posix(): p.read_text() if p.is_file() else "folder"
        for p in folder.rglob("*")
    }


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "run"


# ---- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "../file",
        "a/../../file",
        "/etc/passwd",
        "",
        "..",
        "C:\\file",
        "C:file",
        "\\\\host\\x",
        "..\\x",
    ],
)
def test_a_manifest_names_files_of_its_folder_only(run_dir, name):
    folder = write(run_dir, 1)
    entry = {"bytes": 4, "sha256": "0" * 64}
    rewrite(folder, files={name: entry})
    assert not is_inside(name)
    with pytest.raises(BrokenCheckpointError, match="outside of its folder"):
        checkpoints.read_manifest(folder)
    assert "outside of its folder" in checkpoints.problems_of(folder)[0]
    assert checkpoints.last_good(run_dir)[0] is None


@pytest.mark.parametrize("name", ["weights", "shards/part", "..hidden", "a..b/c", "..."])
def test_names_below_a_folder_are_fine(name):
    assert is_inside(name)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sequence", "9"),
        ("sequence", None),
        ("step", "../../x"),
        ("resumable", "yes"),
        ("files", ["weights"]),
        ("files", {"weights": None}),
        ("files", {"weights": {"bytes": 7}}),
        ("format", "../1"),
    ],
)
def test_a_manifest_of_other_kinds_of_values_is_damaged(run_dir, key, value):
    first, second = write(run_dir, 1), write(run_dir, 2)
    rewrite(second, **{key: value})
    found, problems = checkpoints.last_good(run_dir)
    assert found == first
    assert len(problems) == 1
    assert "manifest.json" in problems[0]


@pytest.mark.parametrize("name", ["checkpoint-1x", "checkpoint-", "checkpoint-٣", "checkpoint-1 "])
def test_other_names_are_no_checkpoints(run_dir, name):
    folder = write(run_dir, 1)
    os.rename(folder, run_dir / name)
    assert checkpoints.last_good(run_dir) == (None, [])


# ---- links ---------------------------------------------------------------------------------------


def test_a_link_in_the_place_of_a_checkpoint_is_passed_over(run_dir, outside):
    elsewhere = write(outside.parent / "other", 9)
    good = write(run_dir, 1)
    (run_dir / "checkpoint-9").symlink_to(elsewhere)
    found, problems = checkpoints.last_good(run_dir)
    assert found == good
    assert "is a link to" in problems[0]
    assert [c.folder for c in checkpoints.complete(run_dir)] == [good]


@pytest.mark.parametrize("name", ["extra", "weights"])
def test_a_link_out_of_a_checkpoint_is_a_fault_of_it(run_dir, outside, name):
    first, second = write(run_dir, 1), write(run_dir, 2)
    (second / name).unlink(missing_ok=True)
    (second / name).symlink_to(outside / "file")
    found, problems = checkpoints.last_good(run_dir)
    assert found == first
    assert "out of the checkpoint" in problems[0]


def test_a_folder_below_a_checkpoint_may_be_no_link_out_either(run_dir, outside):
    folder = write(run_dir, 1)
    (folder / "shards").mkdir()
    (folder / "shards" / "more").symlink_to(outside / "deep")
    assert "out of the checkpoint" in checkpoints.problems_of(folder)[0]


def test_a_link_inside_of_a_checkpoint_is_its_own_business(run_dir):
    folder = write(run_dir, 1)
    (folder / "same").symlink_to("weights")
    assert checkpoints.problems_of(folder) == []


def test_an_output_directory_that_is_a_link_is_what_was_asked_for(run_dir, tmp_path):
    folder = write(tmp_path / "disk", 1)
    run_dir.symlink_to(tmp_path / "disk")
    assert checkpoints.last_good(run_dir) == (run_dir / folder.name, [])
    assert write(run_dir, 2).is_dir()


def test_removing_old_checkpoints_follows_no_link(run_dir, outside):
    for step in (1, 2, 3):
        write(run_dir, step)
    (run_dir / "checkpoint-0").symlink_to(outside)
    (run_dir / "checkpoint-1" / "link").symlink_to(outside)  # damaged thereby: not counted
    os.symlink(outside, run_dir / "checkpoint-2" / "deep")
    checkpoints.rotate(run_dir, 1, [])
    assert (run_dir / "checkpoint-3").is_dir()
    assert (run_dir / "checkpoint-0").is_symlink()


def test_a_link_among_what_is_removed_is_removed_itself(run_dir, outside):
    """One that stays inside for the check, and leads out from where it is removed."""
    for step in (1, 2):
        write(run_dir, step)
    inside = run_dir / "checkpoint-1" / "link"
    inside.symlink_to("weights")
    checkpoints.rotate(run_dir, 1, [])
    assert not (run_dir / "checkpoint-1").exists()
    assert not (run_dir / checkpoints.SAVING).exists()


def saving(run_dir: Path) -> None:
    write(run_dir, 3)


def clearing(run_dir: Path) -> None:
    checkpoints.recover(run_dir)


def rotating(run_dir: Path) -> None:
    checkpoints.rotate(run_dir, 1, [])


@pytest.mark.parametrize("act", [saving, clearing, rotating])
def test_drafts_are_not_kept_behind_a_link(run_dir, outside, act):
    for step in (1, 2):
        write(run_dir, step)
    (run_dir / checkpoints.SAVING).symlink_to(outside)
    act(run_dir)
    assert not (run_dir / checkpoints.SAVING).is_symlink()
    assert checkpoints.latest(run_dir) in (run_dir / "checkpoint-2", run_dir / "checkpoint-3")


def test_a_draft_that_is_a_link_is_not_published(run_dir, outside):
    elsewhere = write(outside.parent / "other", 9)
    write(run_dir, 1)
    (run_dir / checkpoints.SAVING).mkdir()
    (run_dir / checkpoints.SAVING / "checkpoint-9").symlink_to(elsewhere)
    checkpoints.recover(run_dir)
    assert not os.path.lexists(run_dir / "checkpoint-9")
    assert checkpoints.problems_of(elsewhere) == []


@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_of_the_same_name_is_replaced_and_not_followed(run_dir, outside, dangling):
    run_dir.mkdir()
    (run_dir / "checkpoint-4").symlink_to(outside / ("nothing" if dangling else "deep"))
    folder = write(run_dir, 4)
    assert not folder.is_symlink()
    assert checkpoints.problems_of(folder) == []


# ---- files of a run ------------------------------------------------------------------------------


def test_the_lock_does_not_empty_another_file(run_dir, outside):
    run_dir.mkdir()
    (run_dir / "run.lock").symlink_to(outside / "file")
    with pytest.raises(OutsideError, match=r"run\.lock is a link to .*remove the link"):
        RunLock(run_dir).acquire()


def test_metrics_are_not_appended_to_another_file(run_dir, outside, caplog):
    run_dir.mkdir()
    for name in ("metrics.jsonl", "warnings.jsonl.part"):
        (run_dir / name).symlink_to(outside / "file")
    JsonLines(run_dir / "metrics.jsonl").append([{"step": 1}])
    assert "is a link to" in caplog.text
    lines = JsonLines(run_dir / "warnings.jsonl")
    lines.append([{"step": 1}])
    lines.keep(lambda entry: False)
    assert (run_dir / "warnings.jsonl").read_text() == '{"step": 1}\n'


def test_run_json_is_not_written_through_a_link(run_dir, outside):
    run_dir.mkdir()
    (run_dir / "run.json").symlink_to(outside / "file")  # replaced
    checkpoints.write_json(run_dir / "run.json", {})
    assert not (run_dir / "run.json").is_symlink()
    (run_dir / "run.json.tmp").symlink_to(outside / "file")
    with pytest.raises(OutsideError, match=r"run\.json\.tmp is a link"):
        checkpoints.write_json(run_dir / "run.json", {})


# ---- a whole run ---------------------------------------------------------------------------------


def test_a_resumed_run_reads_no_checkpoint_behind_a_link(run_dir, outside, caplog):
    crash(run_dir, 2)
    os.rename(run_dir / "checkpoint-2", run_dir.parent / "moved")
    (run_dir / "checkpoint-2").symlink_to(run_dir.parent / "moved")
    run = trainer(run_dir, max_steps=2)
    with caplog.at_level(logging.WARNING):
        run.train(resume_from_checkpoint=True)
    assert "checkpoint-2 is a link to" in caplog.text
    assert f"resuming from {run_dir / 'checkpoint-1'}" in caplog.text
    assert not (run_dir / "checkpoint-2").is_symlink()


def test_a_link_that_was_named_is_followed(run_dir, tmp_path):
    crash(run_dir, 2)
    (tmp_path / "mine").symlink_to(run_dir / "checkpoint-2")
    run = trainer(run_dir, max_steps=2)
    run.train(resume_from_checkpoint=str(tmp_path / "mine"))
    assert run.state.global_step == 2


def said(folder: Path, **changes: Any) -> None:
    """A trainer_state.json that says something else, and a manifest that vouches for it."""
    path = folder / "trainer_state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    data, files = path.read_bytes(), json.loads((folder / "manifest.json").read_text())["files"]
    files[path.name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    rewrite(folder, files=files)


@pytest.mark.parametrize("step", ["../../x", "1", None, -1, 1.0, True, [1]])
def test_the_step_of_a_state_is_a_number(run_dir, step):
    """The next checkpoint is called after it."""
    crash(run_dir, 1)
    said(run_dir / "checkpoint-1", global_step=step)
    with pytest.raises(BrokenCheckpointError, match=r"trainer_state\.json is damaged: its step is"):
        trainer(run_dir, max_steps=2).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("where", ["absolute", "relative", "a link"])
def test_the_best_checkpoint_is_one_of_the_run(run_dir, outside, caplog, where):
    """Its weights are loaded at the end, and a checkpoint's JSON may say any path."""
    crash(run_dir, 2)
    folder = run_dir / "checkpoint-2"
    path = {
        "absolute": outside,
        "relative": run_dir / "checkpoint-1" / ".." / ".." / "outside",
        "a link": run_dir / "checkpoint-9",
    }[where]
    if where == "a link":
        path.symlink_to(outside)
    said(folder, best_model_checkpoint=str(path))
    run = trainer(run_dir, max_steps=3)
    run.train(resume_from_checkpoint=str(folder))
    assert run.state.best_model_checkpoint is None
    assert "it is left out of account" in caplog.text
