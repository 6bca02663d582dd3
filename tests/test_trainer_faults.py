"""Faults put into a run, a row of `faults.TABLE` each: a clear message, and nothing is lost.

Each finds a run that goes on from the checkpoint of its second step of three. Kills at random
moments are in crash_loop.py, more about single parts in test_trainer_rewards.py (what each option
of rewards does), test_rollout_servers.py (requests that are sent again), test_trainer_guards.py
(locks and signals, also of two processes), test_trainer_checkpoints.py (damage, full disks,
rotation) and test_trainer_nonfinite.py.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faults
import faults_disk
import pytest
import torch
from fault_arena import (
    GOES_ON,
    LEFT_OUT,
    OPTIONS,
    SAVED,
    SAVES,
    SET_ASIDE,
    STEPS,
    STOPS,
    Arena,
    Fault,
)
from faults import TABLE
from safetensors.torch import load_file
from trainer_runs import assert_same, crash, trainer

from fused_grpo import cli
from fused_grpo.trainer import GRPOTrainer, checkpoints


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> GRPOTrainer:
    """The run that nothing disturbs."""
    run = trainer(tmp_path_factory.mktemp("whole"), **OPTIONS)
    run.train()
    return run


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run leaves that died after two steps."""
    folder = tmp_path_factory.mktemp("begun")
    crash(folder, SAVED, **OPTIONS)
    return folder


@pytest.fixture
def arena(begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    folder = tmp_path / "run"
    shutil.copytree(begun, folder)
    made = Arena(folder, monkeypatch)
    yield made
    for clean in made.cleanup:
        clean()


def command(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit status of `fused-grpo train` on the run."""

    def train(options: Any, rest: list[str]) -> int:
        arena.train()
        return 0

    with monkeypatch.context() as patch:
        patch.setitem(cli.COMMANDS, "train", train)
        return cli.main(["train"])


def assert_loads(folder: Path, step: int) -> None:
    """The last good checkpoint is that of a step, and it loads."""
    good, _ = checkpoints.last_good(folder)
    assert good == folder / f"checkpoint-{step}"
    weights = load_file(good / "model.safetensors")
    assert weights
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights.values())


def state(folder: Path) -> str:
    """A digest of the checkpoints of a run, and of whatever else a resume reads."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in ("run.lock", "run.json"):  # which nothing reads
            digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


RESUMED: set[str] = set()  # states from which a run has ended with the right bits


def go_on(folder: Path, whole: GRPOTrainer) -> None:
    """The run, resumed without the fault, is the one that was never disturbed."""
    before = state(folder)
    if before in RESUMED:  # byte for byte: most faults leave everything as they found it
        return
    run = trainer(folder, **OPTIONS)
    run.train(resume_from_checkpoint=True)
    assert_same(whole, run)
    assert_loads(folder, STEPS)
    RESUMED.add(before)


@pytest.mark.parametrize("fault", TABLE, ids=str)
def test_fault(
    fault: Fault,
    arena: Arena,
    whole: GRPOTrainer,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    fault.inject(arena)
    with caplog.at_level(logging.WARNING):
        status = command(arena, monkeypatch)
    monkeypatch.undo()
    for clean in arena.cleanup:
        clean()
    printed = capfd.readouterr().err
    told = [line for line in printed.splitlines() if line.startswith("fused-grpo: ")]
    assert "Traceback" not in printed
    if fault.ends in (STOPS, SAVES):
        assert status == fault.status
        assert len(told) == 1, printed
        assert fault.message in told[0]
        assert_loads(arena.folder, fault.left)
        go_on(arena.folder, whole)
        return
    assert status == 0, printed
    assert fault.message in caplog.text
    assert arena.run is not None
    assert arena.run.state.global_step == STEPS
    if fault.ends == SET_ASIDE:
        assert_loads(arena.folder, fault.left)
        go_on(arena.folder, whole)
    elif fault.ends == GOES_ON:
        assert_same(whole, arena.run)
    else:
        assert fault.ends == LEFT_OUT
        assert_loads(arena.folder, STEPS)


def test_a_kill_before_any_operation_on_a_file(
    arena: Arena, whole: GRPOTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory as it is before each of them is what a kill there would leave."""
    operations: list[str] = []
    different: dict[str, Path] = {}

    def look(what: str) -> None:
        operations.append(what)
        found = state(arena.folder)
        if found not in different:
            different[found] = tmp_path / str(len(operations))
            shutil.copytree(arena.folder, different[found])

    with faults_disk.listening(arena.folder, monkeypatch, look):
        arena.train()
    saving = list(faults_disk.SAVING)
    begin = operations.index(saving[0])
    assert begin > 0
    assert operations[begin : begin + len(saving)] == saving
    assert len(different) > 10
    steps = []
    for folder in different.values():
        checkpoints.recover(folder)
        good, problems = checkpoints.last_good(folder)
        assert good is not None
        assert problems == []
        steps.append(int(good.name.removeprefix("checkpoint-")))
        go_on(folder, whole)
    assert set(steps) == {SAVED, STEPS}
    assert steps == sorted(steps)


@pytest.mark.parametrize("name", faults_disk.FILES)
@pytest.mark.parametrize("kind", faults_disk.DAMAGE)
def test_damage_of_any_kind_to_any_file(arena: Arena, name: str, kind: str) -> None:
    """Noticed, named and passed over; that the run then ends rightly is in the table."""
    files = [path.name for path in arena.saved.iterdir()]
    assert sorted(files) == sorted(faults_disk.FILES)
    faults_disk.DAMAGE[kind](arena.saved / name)
    good, problems = checkpoints.last_good(arena.folder)
    assert good == arena.folder / f"checkpoint-{SAVED - 1}"
    assert len(problems) == 1
    assert name in problems[0]


def test_rows_differ() -> None:
    assert len({str(fault) for fault in TABLE}) == len(TABLE)


def test_the_document_is_that_of_the_table() -> None:
    assert faults.DOCUMENT.read_text() == faults.document(), "run python tests/faults.py"
