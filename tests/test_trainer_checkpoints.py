"""Checkpoint folders: whole or not there, damage noticed, the last good one never lost."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from trainer_runs import STEPS, Crash, assert_same, crash, trainer
from transformers import TrainerCallback

from fused_grpo.trainer import GRPOTrainer, checkpoints
from fused_grpo.trainer.batches import MicroBatch
from fused_grpo.trainer.checkpoints import BrokenCheckpointError
from fused_grpo.trainer.saving import SaveError
from fused_grpo.trainer.state import load_state, save_state

ABOUT = {"step": 1, "resumable": True, "run": {}}


def write(run_dir: Path, step: int, **about: Any) -> Path:
    """A checkpoint of a few files."""
    draft = checkpoints.draft_root(run_dir) / f"checkpoint-{step}"
    (draft / "shards").mkdir(parents=True)
    (draft / "weights").write_bytes(os.urandom(100))
    (draft / "shards" / "part").write_bytes(b"x" * 10)
    return checkpoints.publish(draft, run_dir, {**ABOUT, "step": step, **about})


def flip(path: Path, place: int = 50) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, tuple[Any, str]] = {
    "truncated": (lambda f: os.truncate(f / "weights", 99), "has 99 bytes instead of 100"),
    "a bit": (lambda f: flip(f / "weights"), "weights is damaged"),
    "missing": (lambda f: (f / "shards" / "part").unlink(), "part is missing"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "has no manifest.json"),
    "half a manifest": (lambda f: os.truncate(f / "manifest.json", 60), "manifest.json is damaged"),
    "a bit of the manifest": (
        lambda f: (f / "manifest.json").write_text(
            (f / "manifest.json").read_text().replace("true", "false")
        ),
        "manifest.json is damaged: it is not what was written",
    ),
    "an empty manifest": (lambda f: (f / "manifest.json").write_text("[]"), "is damaged"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_noticed_and_the_one_before_is_used(tmp_path: Path, kind: str) -> None:
    harm, message = DAMAGE[kind]
    first, second = write(tmp_path, 1), write(tmp_path, 2)
    assert checkpoints.last_good(tmp_path) == (second, [])
    harm(second)
    good, problems = checkpoints.last_good(tmp_path)
    assert good == first
    assert len(problems) == 1
    assert message in problems[0]
    harm(first)
    assert checkpoints.last_good(tmp_path)[0] is None


def test_the_last_one_is_the_one_written_last_whatever_its_step(tmp_path: Path) -> None:
    """A run that began anew in the folder of a longer one."""
    write(tmp_path, 40)
    again = write(tmp_path, 2)
    assert checkpoints.last_good(tmp_path)[0] == again
    checkpoints.rotate(tmp_path, 1, [again])
    assert [c.folder for c in checkpoints.complete(tmp_path)] == [again]


def test_rotation_keeps_the_newest_the_best_and_what_it_does_not_know(tmp_path: Path) -> None:
    folders = [write(tmp_path, step) for step in range(1, 6)]
    (tmp_path / "checkpoint-9").mkdir()  # of something else
    os.truncate(folders[3] / "weights", 1)  # not good, so it does not count
    checkpoints.rotate(tmp_path, 2, [folders[0], folders[4]])
    left = sorted(p.name for p in tmp_path.iterdir())
    assert left == ["checkpoint-1", "checkpoint-4", "checkpoint-5", "checkpoint-9"]
    checkpoints.rotate(tmp_path, None, [])
    checkpoints.rotate(tmp_path, 1, [folders[4]])
    assert not folders[0].exists()
    assert checkpoints.last_good(tmp_path)[0] == folders[4]


def test_what_is_not_finite_neither_counts_as_good_nor_pushes_out_what_is(tmp_path: Path) -> None:
    write(tmp_path, 1)
    good = write(tmp_path, 2, finite=True)
    for step in (3, 4, 5):
        last = write(tmp_path, step, finite=False)
        checkpoints.rotate(tmp_path, 2, [last])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-5"]
    found, problems = checkpoints.last_good(tmp_path)
    assert found == good
    assert problems == [f"{last} holds weights or moments that are not finite"]


@pytest.mark.parametrize("calls", range(1, 16))
def test_a_crash_at_any_call_while_publishing_leaves_a_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """Dies at the n-th system call of saving a step that was saved already, and of rotating."""
    write(tmp_path, 1)
    old = (tmp_path / "checkpoint-1" / "weights").read_bytes()
    count = 0

    def dying(name: str) -> Any:
        original = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == calls:
                raise Crash(name)
            return original(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in ("rename", "replace", "fsync", "rmdir", "unlink"):
            patch.setattr(os, name, dying(name))
        try:
            checkpoints.rotate(tmp_path, 1, [write(tmp_path, 1)])
        except Crash:
            pass
        else:
            assert calls > 10, "every call of this test should crash something"
    checkpoints.recover(tmp_path)
    good, problems = checkpoints.last_good(tmp_path)
    assert good == tmp_path / "checkpoint-1"
    assert not problems
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-1"]
    assert (good / "weights").read_bytes() != old or calls < 12


# ---- state --------------------------------------------------------------------------------------


def test_state_goes_through_a_file_unchanged(tmp_path: Path) -> None:
    rows = torch.arange(12).view(4, 3)
    batch = MicroBatch(rows, rows[1:] > 3, rows[:, 1:], rows.T, torch.rand(4), rows[:, 0])
    state = {
        "batch": batch,
        "numbers": [1, 0.1, True, None, float("inf"), "text"],
        "pair": (torch.zeros(()), torch.rand(2, dtype=torch.bfloat16)),
        "nothing": {},
    }
    save_state(tmp_path / "s", state)
    got = load_state(tmp_path / "s")
    assert got["numbers"] == state["numbers"]
    assert [type(x) for x in got["numbers"]] == [type(x) for x in state["numbers"]]
    assert isinstance(got["pair"], tuple)
    assert got["pair"][1].dtype == torch.bfloat16
    assert torch.equal(got["pair"][1], state["pair"][1])
    assert got["nothing"] == {}
    assert isinstance(got["batch"], MicroBatch)
    for name, value in vars(batch).items():
        loaded = getattr(got["batch"], name)
        same = torch.equal(loaded, value) if isinstance(value, torch.Tensor) else loaded == value
        assert same, name


@dataclass
class Foreign:
    x: int = 0


@pytest.mark.parametrize("value", [{1: 2}, {"a": [object()]}, Foreign(), {"f": print}])
def test_what_cannot_be_saved_raises(tmp_path: Path, value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be saved"):
        save_state(tmp_path / "s", value)


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "fused_grpo.cli:main",
        "fused_grpo.cli:argparse",
        "fused_grpo.trainer.config:GRPOConfig",
        "fused_grpo.trainer.collect:Collector",
    ],
)
def test_a_file_names_nothing_but_what_is_saved(tmp_path: Path, name: str) -> None:
    tree = {"dataclass": name, "fields": {"dict": {}}}
    save_file({}, tmp_path / "s", metadata={"tree": json.dumps(tree)})
    with pytest.raises(TypeError, match="a checkpoint names"):
        load_state(tmp_path / "s")


# ---- the trainer --------------------------------------------------------------------------------


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = trainer(tmp_path / "whole", num_iterations=2, save_strategy="no")
    whole.train()
    run = tmp_path / "run"
    crash(run, 3, num_iterations=2)
    flip(run / "checkpoint-3" / "optimizer.pt", 5000)
    resumed = trainer(run, num_iterations=2)
    resumed.train(resume_from_checkpoint=True)
    assert "passed over: " in caplog.text
    assert "optimizer.pt is damaged" in caplog.text
    assert f"resuming from {run / 'checkpoint-2'}" in caplog.text
    assert_same(whole, resumed)


def test_a_damaged_checkpoint_that_was_asked_for_is_refused(tmp_path: Path) -> None:
    crash(tmp_path, 2)
    os.truncate(tmp_path / "checkpoint-2" / "model.safetensors", 1000)
    with pytest.raises(BrokenCheckpointError, match=r"1000 bytes.*last good.*checkpoint-1"):
        trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    shutil.rmtree(tmp_path / "checkpoint-1")
    with pytest.raises(BrokenCheckpointError, match=r"no checkpoint to resume from.*1000 bytes"):
        trainer(tmp_path).train(resume_from_checkpoint=True)


def test_without_a_checkpoint_a_run_begins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = trainer(tmp_path / "new", max_steps=1)
    run.train(resume_from_checkpoint=True)
    assert "no checkpoint in" in caplog.text
    assert run.state.global_step == 1
    again = trainer(tmp_path / "new", max_steps=1)
    again.train()
    assert "has checkpoints of an earlier run, which this one does not continue" in caplog.text
    assert again.state.log_history[0]["step"] == 1


def test_metrics_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    """A torn line, lines of steps that come again, and an evaluation before the resume."""
    whole = trainer(tmp_path / "whole", save_strategy="no", eval_strategy="steps", eval_steps=2)
    whole.train()
    run = tmp_path / "run"
    crash(run, 4, eval_strategy="steps", eval_steps=2, save_steps=2)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "eval_reward": 9}\n{"step": 5, "lo')
    resumed = trainer(run, eval_strategy="steps", eval_steps=2)
    resumed.evaluate()
    resumed.train(resume_from_checkpoint=True)
    assert_same(whole, resumed)


def test_run_json_and_manifest_say_what_the_run_is(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=1, beta=0.1, seed=3).train()
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["identity"]["seed"] == 3
    assert record["identity"]["model"].startswith("LlamaForCausalLM with ")
    assert record["identity"]["dataset"].startswith("5 prompts, ")
    assert record["config"]["beta"] == 0.1
    assert record["config"]["reward_funcs"] == ["letters"]
    assert record["versions"]["torch"] == str(torch.__version__)
    manifest = checkpoints.read_manifest(tmp_path / "checkpoint-1")
    assert manifest["run"]["identity"] == record["identity"]
    assert {"model.safetensors", "optimizer.pt", "metrics.jsonl"} <= manifest["files"].keys()
    assert not list(tmp_path.glob("checkpoint-1/*.pkl"))


def test_only_the_model_is_no_place_to_resume_from(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=2, save_only_model=True, save_total_limit=1).train()
    assert [p.name for p in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    with pytest.raises(BrokenCheckpointError, match="holds the model only"):
        trainer(tmp_path).train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="holds the model only"):
        trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_the_best_checkpoint_is_kept_found_and_loaded(tmp_path: Path) -> None:
    """Evaluated rewards 1, 3, 2, ...: the second is the best, and the limit is 2."""
    scores = iter([1.0, 3.0, 2.0, 0.0, 0.0, 0.0])
    options = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_reward",
        "greater_is_better": True,
        "save_total_limit": 2,
    }
    run = trainer(tmp_path, **options)

    def evaluate(**_: Any) -> dict[str, float]:
        found = {"eval_reward": next(scores)}
        run.control = run.callback_handler.on_evaluate(run.args, run.state, run.control, found)
        return found

    run.evaluate = evaluate  # type: ignore[method-assign]
    weights: list[torch.Tensor] = []

    class Keep(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            weights.append(run.model.lm_head.weight.clone())

    run.add_callback(Keep())
    run.train()
    best = str(tmp_path / "checkpoint-2")
    assert run.state.best_model_checkpoint == best
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-6"]
    assert torch.equal(run.model.lm_head.weight, weights[1])
    saved = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())
    assert (saved["best_model_checkpoint"], saved["best_global_step"]) == (best, 2)
    first = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert first["best_model_checkpoint"] == best


def test_what_is_pushed_is_the_finished_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Trainer

    pushed: list[tuple[str, bool]] = []
    monkeypatch.setattr(
        Trainer,
        "_push_from_checkpoint",
        lambda self, folder: pushed.append((folder, not checkpoints.problems_of(Path(folder)))),
    )
    run = trainer(tmp_path, max_steps=2)
    run.args.push_to_hub = True
    run.train()
    assert pushed == [(str(tmp_path / f"checkpoint-{step}"), True) for step in (1, 2)]


# ---- the disk -----------------------------------------------------------------------------------


def fill_disk(run: GRPOTrainer, steps: range, size: int) -> None:
    """Files cannot grow beyond a size while these steps are saved."""
    write, limits = run._write, resource.getrlimit(resource.RLIMIT_FSIZE)

    def full(*args: Any) -> None:
        allowed = size if run.state.global_step in steps else limits[0]
        resource.setrlimit(resource.RLIMIT_FSIZE, (allowed, limits[1]))
        try:
            write(*args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    run._write = full  # type: ignore[method-assign]


# a size that is too small for: the model; the optimizer; the tokenizer
@pytest.mark.parametrize("size", [100_000, 500_000, 8_000])
def test_a_full_disk_costs_a_checkpoint_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, size: int
) -> None:
    whole = trainer(tmp_path / "whole", save_strategy="no")
    whole.train()
    run = trainer(tmp_path / "run", save_total_limit=1)
    fill_disk(run, range(3, 5), size)
    seen: list[list[str]] = []

    class Look(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seen.append(sorted(p.name for p in (tmp_path / "run").glob("*checkpoint-*")))
            assert not (tmp_path / "run" / ".saving").exists()

    run.add_callback(Look())
    run.train()
    assert seen == [[f"checkpoint-{step}"] for step in (1, 2, 2, 2, 5, 6)]
    told = [r.message for r in caplog.records if "could not be saved" in r.message]
    assert [m[:12] for m in told] == ["checkpoint-3", "checkpoint-4"]
    assert all("The last good checkpoint is checkpoint-2; the run goes on" in m for m in told)
    assert_same(whole, run)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_run_stops_when_it_cannot_be_saved_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    original, count = os.fsync, 0

    def fsync(handle: int) -> None:
        nonlocal count
        count += 1
        if count > 30:
            raise OSError(code, os.strerror(code))
        original(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    run = trainer(tmp_path, max_failed_saves=2)
    with pytest.raises(SaveError, match=rf"{os.strerror(code)}.*2 failed in a row"):
        run.train()
    monkeypatch.undo()
    good, problems = checkpoints.last_good(tmp_path)
    assert good is not None
    assert not problems
    resumed = trainer(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == STEPS


def test_a_mistake_in_saving_is_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.process_state = lambda: {"x": object()}  # type: ignore[method-assign]
    with pytest.raises(TypeError, match="cannot be saved"):
        run.train()


def test_the_example_of_the_document_runs_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = Path(__file__).parents[1] / "docs" / "trainer-checkpoints.md"
    (block,) = re.findall(r"```python\n(.*?)```", document.read_text(), re.S)
    monkeypatch.chdir(tmp_path)
    for steps in (4, 6):
        exec(block.replace("max_steps=4", f"max_steps={steps}"), {})
        names = sorted(p.name for p in Path("runs/kept-in-python").glob("checkpoint-*"))
        assert names == [f"checkpoint-{steps - 2}", f"checkpoint-{steps}"]
