"""A run that a fault finds, and the row of a table that says what the fault is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer_runs import letters, trainer

from fused_grpo.trainer import GRPOTrainer

STEPS, SAVED = 3, 2  # of the run, and the last step that is saved before the fault
OPTIONS: dict[str, Any] = {"max_steps": STEPS}

# what a row ends in
STOPS = "The run stops with this line; resumed, it ends with the bits of an undisturbed run."
GOES_ON = "The run goes on, and ends with the bits of an undisturbed run."
LEFT_OUT = "The run goes on without what is missing."
SET_ASIDE = (
    "The run goes on, and a resume passes over what it has saved since: it ends with the bits of "
    "an undisturbed run."
)
SAVES = "The run saves, stops with this line, and resumed ends with the bits of an undisturbed run."


@dataclass
class Arena:
    """A run that goes on from the checkpoint of step `SAVED`, as a fault finds it."""

    folder: Path
    patch: Any
    reward: Any = letters
    options: dict[str, Any] = field(default_factory=dict)
    prepare: list[Callable[[GRPOTrainer], None]] = field(default_factory=list)
    cleanup: list[Callable[[], None]] = field(default_factory=list)
    resume: Any = True
    run: GRPOTrainer | None = None

    def train(self) -> None:
        self.run = trainer(self.folder, self.reward, **{**OPTIONS, **self.options})
        for change in self.prepare:
            change(self.run)
        self.run.train(resume_from_checkpoint=self.resume)

    @property
    def saved(self) -> Path:
        return self.folder / f"checkpoint-{SAVED}"


@dataclass(frozen=True)
class Fault:
    """A row: what happens, how it is done, a part of what the user reads, and what stands."""

    group: str
    what: str
    inject: Callable[[Arena], None]
    message: str
    ends: str = STOPS
    status: int = 2
    left: int = SAVED  # the step of the last good checkpoint afterwards

    def __str__(self) -> str:
        return f"{self.group}: {self.what}"
