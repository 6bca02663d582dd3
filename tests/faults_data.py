"""Faults of data sets, optimizers, and signals that come at a bad time."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import torch
from fault_arena import SAVED, SAVES, SET_ASIDE, STEPS, STOPS, Arena, Fault
from trainer_runs import PROMPTS, letters
from transformers import TrainerCallback

from fused_grpo.trainer import GRPOTrainer

Inject = Callable[[Arena], None]


def _rows(rows: Any, resume: Any = True) -> Inject:
    def inject(arena: Arena) -> None:
        arena.resume = resume
        arena.options["prompts"] = rows

    return inject


class Spoilt(list[Any]):
    """Rows that are right until they have been read a number of times, then not."""

    def __init__(self, reads: int, then: Callable[[], Any]) -> None:
        super().__init__(PROMPTS)
        self.reads, self.then = reads, then

    def __getitem__(self, number: Any) -> Any:
        self.reads -= 1
        return super().__getitem__(number) if self.reads >= 0 else self.then()


def _raise(error: Exception) -> Callable[[], Any]:
    def then() -> Any:
        raise error

    return then


def _later(then: Callable[[], Any]) -> Inject:
    # once by the check of the first row, and once each for the digest of the prompts
    return lambda arena: _rows(Spoilt(1 + len(PROMPTS), then))(arena)


DATA = [
    ("is empty", _rows([]), "train_dataset is empty"),
    (
        "has one row",
        _rows(PROMPTS[:1], None),
        "has 1 prompts, but a generation takes 2",
    ),
    ("is a stream", _rows(iter(PROMPTS)), "train_dataset must have a length and rows by number"),
    ("has rows that are texts", _rows(["a", "b"]), "train_dataset must hold dicts with a"),
    ("has no prompts", _rows([{"text": "a"}] * 5), "train_dataset must hold dicts with a"),
    ("has a column of the trainer's", _rows([{**r, "prompts": 1} for r in PROMPTS]), "['prompts']"),
    ("lacks a prompt", _rows([*PROMPTS[:4], {"text": "a"}]), 'train_dataset[4] has no "prompt"'),
    ("has null for a prompt", _rows([*PROMPTS[:4], {"prompt": None}]), "[4] has no"),
    ("has a row that is null", _rows([*PROMPTS[:4], None]), 'train_dataset[4] has no "prompt"'),
    (
        "lacks a column in a row",
        _rows([*({**row, "answer": 1} for row in PROMPTS[:4]), PROMPTS[4]]),
        "train_dataset[4] does not have the columns of other rows, differing in 'answer'",
    ),
    ("has a file that ends", _later(_raise(EOFError("cut"))), "cannot be read, EOFError: cut"),
    ("is on a disk that fails", _later(_raise(OSError(5, "EIO"))), "cannot be read, OSError: "),
    ("gets shorter", _later(_raise(IndexError("gone"))), "cannot be read, IndexError: gone"),
    ("ends like an iterator", _later(_raise(StopIteration())), "cannot be read, StopIteration"),
    ("loses a prompt later", _later(lambda: {}), 'has no "prompt" (text or messages): {}'),
]


def _in_training(change: Callable[[GRPOTrainer], None]) -> Inject:
    """Changes something just before the optimizer's step."""

    def inject(arena: Arena) -> None:
        class Change(TrainerCallback):
            def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
                assert arena.run is not None
                change(arena.run)

        arena.options["callbacks"] = [Change()]

    return inject


def _moment(name: str, value: float) -> Inject:
    def change(run: GRPOTrainer) -> None:
        optimizer: Any = run.optimizer
        inner = getattr(optimizer, "optimizer", optimizer)
        next(iter(inner.state.values()))[name].flatten()[0] = value

    return _in_training(change)


@torch.no_grad()
def _spoil_weight(run: GRPOTrainer) -> None:
    next(run.model.parameters()).flatten()[0] = float("inf")


NOT_FINITE = "weights or the optimizer's moments are not finite"
OPTIMIZER = [
    ("its first moment becomes NaN", _moment("exp_avg", float("nan")), NOT_FINITE),
    ("its first moment becomes infinite", _moment("exp_avg", float("inf")), NOT_FINITE),
    ("its second moment becomes NaN", _moment("exp_avg_sq", float("nan")), NOT_FINITE),
    ("its second moment becomes infinite", _moment("exp_avg_sq", float("inf")), NOT_FINITE),
    ("a weight becomes infinite", _in_training(_spoil_weight), NOT_FINITE),
]


def _signal(number: int, place: str) -> Inject:
    def send(*_: Any) -> None:
        os.kill(os.getpid(), number)

    def inject(arena: Arena) -> None:
        def reward(completions: list[str], **_: Any) -> list[float]:
            send()
            return letters(completions)

        def prepare(run: GRPOTrainer) -> None:
            if place == "generation":
                inner = run.model.generate
                arena.patch.setattr(
                    run.model, "generate", lambda *a, **k: (send(), inner(*a, **k))[1]
                )
            elif place == "the backward pass":
                parameter = next(p for p in run.model.parameters() if p.requires_grad)
                parameter.register_hook(send)

        reward.__name__ = "letters"
        if place == "a reward function":
            arena.reward = reward
        elif place == "the optimizer's step":
            _in_training(send)(arena)
        arena.prepare.append(prepare)

    return inject


def _signal_while_saving(number: int) -> Inject:
    """In a run of its own: after its last step there would be nothing left to stop."""

    def inject(arena: Arena) -> None:
        def prepare(run: GRPOTrainer) -> None:
            write = run._write

            def sending(*args: Any) -> None:
                if run.state.global_step == 1:
                    os.kill(os.getpid(), number)
                write(*args)

            run._write = sending  # type: ignore[method-assign]

        arena.folder = arena.folder.with_name("new")
        arena.prepare.append(prepare)

    return inject


PLACES = ("generation", "a reward function", "the backward pass", "the optimizer's step")
DATA_FAULTS = [Fault("Data sets", *row, STOPS) for row in DATA]
DATA_FAULTS += [Fault("The optimizer", *row, SET_ASIDE) for row in OPTIMIZER]
for signum in (signal.SIGTERM, signal.SIGINT):
    DATA_FAULTS += [
        Fault(
            "Signals",
            f"{signum.name} during {place}",
            _signal(signum, place),
            "stopped by a signal after step 3. The state is in ",
            SAVES,
            128 + signum,
            STEPS,
        )
        for place in PLACES
    ]
    DATA_FAULTS.append(
        Fault(
            "Signals",
            f"{signum.name} while a checkpoint is saved",
            _signal_while_saving(signum),
            "stopped by a signal after step 2. The state is in ",
            SAVES,
            128 + signum,
            SAVED,
        )
    )
