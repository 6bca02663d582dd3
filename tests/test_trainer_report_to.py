"""Trackers get the metrics under their names: TensorBoard, trackio, and a stand-in for W&B."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import watched_runs

from fused_grpo import cli

NAMES = {
    *("reward", "kl", "entropy", "loss", "completions/mean_length", "frac_reward_zero_std"),
    *("tokens_per_second", "rewards/letters/mean", "grad_norm", "memory/peak_gb"),
}


def trained(path: Path, **options: Any) -> list[dict[str, Any]]:
    """The logs of a run that evaluates before and after it trains."""
    run = watched_runs.make(path, beta=0.1, **options)
    run.evaluate()
    run.train()
    run.evaluate()
    return [e for e in watched_runs.lines(path / "metrics.jsonl") if "loss" in e]


def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    training = trained(tmp_path / "run", report_to="tensorboard")
    assert not list(Path().iterdir()), "everything is below output_dir, the first evaluation too"
    scalars: dict[str, list[tuple[int, float]]] = {}
    for file in sorted((tmp_path / "run" / "runs").glob("*/events*")):
        events = EventAccumulator(str(file)).Reload()
        for tag in events.Tags()["scalars"]:
            scalars.setdefault(tag, []).extend((e.step, e.value) for e in events.Scalars(tag))
    for name in NAMES:
        expected = [(entry["step"], entry[name]) for entry in training]
        read = scalars[f"train/{name}"]
        assert [step for step, _ in read] == [step for step, _ in expected] == [1, 2]
        values = [value for _, value in expected]
        assert [value for _, value in read] == pytest.approx(values, rel=1e-6)  # kept in fp32
    assert [step for step, _ in scalars["eval/reward"]] == [0, 2]


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its local database; nothing leaves the machine."""
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    import trackio
    from trackio import sqlite_storage

    for module in [m for n, m in sys.modules.items() if n.startswith("trackio")]:
        if hasattr(module, "TRACKIO_DIR"):
            monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    training = trained(tmp_path / "run", report_to="trackio", project="letters", run_name="one")
    trackio.finish()  # of the evaluation after training; a process does it when it ends
    rows = sqlite_storage.SQLiteStorage.get_logs("letters", "one")
    for name in NAMES:
        values = [row[f"train/{name}"] for row in rows if f"train/{name}" in row]
        assert values == pytest.approx([entry[name] for entry in training])
    assert sum("eval/reward" in row for row in rows) == 2


class Wandb(types.ModuleType):
    """As much of W&B's interface as transformers' callback uses."""

    __version__ = "0.99"

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
        self.run: Any = None
        self.logged: list[dict[str, Any]] = []
        self.config: dict[str, Any] = {}
        self.defined: list[str] = []
        self.finished = 0

    def init(self, **options: Any) -> Any:
        self.options = options
        self.run = types.SimpleNamespace(
            _label=lambda **_: None, config=self.config, name="one", get_url=lambda: "", summary={}
        )
        return self.run

    def define_metric(self, name: str, **_: Any) -> None:
        self.defined.append(name)

    def log(self, values: dict[str, Any], **_: Any) -> None:
        assert self.run is not None
        self.logged.append(dict(values))

    def watch(self, *_: Any, **__: Any) -> None:
        pass

    def finish(self) -> None:
        self.finished += 1


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = Wandb()
    errors = types.ModuleType("wandb.sdk.lib.config_util")
    errors.ConfigError = type("ConfigError", (Exception,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "wandb.sdk", types.ModuleType("wandb.sdk"))
    monkeypatch.setitem(sys.modules, "wandb.sdk.lib", types.ModuleType("wandb.sdk.lib"))
    monkeypatch.setitem(sys.modules, "wandb.sdk.lib.config_util", errors)
    monkeypatch.setenv("WANDB_WATCH", "false")
    training = trained(tmp_path, report_to="wandb", run_name="one")
    assert wandb.options["name"] == "one"
    assert wandb.config["num_generations"] == 4
    steps = [entry for entry in wandb.logged if "train/loss" in entry]
    assert [entry["train/global_step"] for entry in steps] == [1, 2]
    for name in NAMES:
        assert [entry[f"train/{name}"] for entry in steps] == [entry[name] for entry in training]
    assert sum("eval/reward" in entry for entry in wandb.logged) == 2


def test_nothing_is_reported_unless_asked_for(tmp_path: Path) -> None:
    run = watched_runs.make(tmp_path)
    assert run.args.report_to == []
    names = [type(callback).__module__ for callback in run.callback_handler.callbacks]
    assert not [name for name in names if "integrations" in name]


def test_the_command_takes_it(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    arguments = f"train --model tiny --steps 1 --output-dir {tmp_path} --report_to tensorboard"
    assert cli.main(arguments.split()) == 0
    assert list((tmp_path / "runs").glob("*/events*"))
