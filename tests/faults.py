"""Faults put into a small run: how each is done, what the user must read, what stands afterwards.

`TABLE` is the table; test_trainer_faults.py runs every row, and `python tests/faults.py` writes
docs/faults.md from it.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from trainer_runs import PROMPTS, letters, trainer

from fused_grpo.trainer import GRPOTrainer

DOCUMENT = Path(__file__).parents[1] / "docs" / "faults.md"
STEPS, SAVED = 3, 2  # of the run, and the last step that is saved before the fault
OPTIONS: dict[str, Any] = {"max_steps": STEPS}

# what a row ends in
STOPS = "The run stops with this line; resumed, it ends with the bits of an undisturbed run."
GOES_ON = "The run goes on, and ends with the bits of an undisturbed run."
LEFT_OUT = "The run goes on without what is missing."
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

    def __str__(self) -> str:
        return f"{self.group}: {self.what}"


# ---- reward functions ---------------------------------------------------------------------------


def _returns(make: Callable[[list[float]], Any]) -> Callable[[Arena], None]:
    """The reward function returns what `make` makes of the right rewards."""

    def inject(arena: Arena) -> None:
        def faulty(completions: list[str], **_: Any) -> Any:
            return make(letters(completions))

        faulty.__name__ = "letters"
        arena.reward = faulty

    return inject


def _raises(error: BaseException, how: str = "plain", **options: Any) -> Callable[[Arena], None]:
    def inject(arena: Arena) -> None:
        def plain(**_: Any) -> Any:
            raise error

        async def coroutine(**_: Any) -> Any:
            await asyncio.sleep(0)
            raise error

        def second(completions: list[str], **_: Any) -> Any:
            raise error

        func = coroutine if how == "coroutine" else plain
        arena.reward = [letters, second] if how == "second" else func
        arena.options |= options

    return inject


def _hangs(how: str, **options: Any) -> Callable[[Arena], None]:
    def inject(arena: Arena) -> None:
        over = threading.Event()

        def hangs(completions: list[str], **_: Any) -> Any:
            over.wait(30)

        async def hangs_too(completions: list[str], **_: Any) -> Any:
            await asyncio.sleep(30)

        async def blocks(completions: list[str], **_: Any) -> Any:
            over.wait(30)

        arena.reward = {"plain": hangs, "coroutine": hangs_too, "blocks": blocks}[how]
        arena.options |= {"reward_timeout": 0.2, **options}
        arena.cleanup.append(over.set)

    return inject


def _mutates(kind: str) -> Callable[[Arena], None]:
    """Changes what it is given, before and after another function reads the same."""

    def spoil(batch: dict[str, list[Any]]) -> None:
        for column in batch.values():
            for item in column:
                if isinstance(item, (list, dict)):
                    item.clear()
            column.clear()

    def inject(arena: Arena) -> None:
        rows = [{**row, "answer": ["a", {"b": 1}]} for row in PROMPTS]

        def judge(**batch: Any) -> list[float]:
            assert all(answer == ["a", {"b": 1}] for answer in batch["answer"])
            assert all(batch["completion_ids"])
            rewards = letters(**batch)
            spoil(batch)
            return rewards

        async def judge_too(**batch: Any) -> list[float]:
            return judge(**batch)

        func = judge if kind == "plain" else judge_too
        arena.reward = [func, func]
        arena.options |= {"prompts": rows, "reward_weights": [0.5, 0.5]}

    return inject


class Odd:
    def __float__(self) -> float:
        raise RuntimeError("no number")


def _first(value: Any) -> Callable[[Arena], None]:
    return _returns(lambda rewards: [value, *rewards[1:]])


NOT_A_NUMBER = "reward function 'letters' returned {}, not a number or None; prompt: "
NOT_A_LIST = "reward function 'letters' returned {}, not a list of 8 numbers; prompt: "
WRONG_COUNT = "reward function 'letters' returned {} rewards for 8 completions; prompt: "
LATE = "reward function '{}' raised RewardTimeoutError: no answer within reward_timeout=0.2 s"
BROKEN = ValueError("no such verifier")
RAISED = "reward function '{}' raised ValueError: no such verifier; prompt: "
EXITED = "reward function '{}' raised SystemExit: 0; prompt: "

REWARDS = [
    ("raises", _raises(BROKEN), RAISED.format("plain"), STOPS),
    ("raises, the second of two", _raises(BROKEN, "second"), RAISED.format("second"), STOPS),
    ("raises in a coroutine", _raises(BROKEN, "coroutine"), RAISED.format("coroutine"), STOPS),
    (
        "raises in a coroutine with a time limit",
        _raises(BROKEN, "coroutine", reward_timeout=5.0),
        RAISED.format("coroutine"),
        STOPS,
    ),
    (
        'raises, with `reward_errors="none"`',
        _raises(BROKEN, reward_errors="none"),
        "reward function 'plain': ValueError: no such verifier",
        LEFT_OUT,
    ),
    ("calls `exit()`", _raises(SystemExit(0)), EXITED.format("plain"), STOPS),
    (
        "calls `exit()`, with a time limit",
        _raises(SystemExit(0), reward_timeout=5.0),
        EXITED.format("plain"),
        STOPS,
    ),
    (
        "calls `exit()`, the second of two",
        _raises(SystemExit(0), "second"),
        EXITED.format("second"),
        STOPS,
    ),
    (
        "calls `exit()` in a coroutine",
        _raises(SystemExit(0), "coroutine"),
        EXITED.format("coroutine"),
        STOPS,
    ),
    (
        "calls `exit()` in a coroutine with a time limit",
        _raises(SystemExit(0), "coroutine", reward_timeout=5.0),
        EXITED.format("coroutine"),
        STOPS,
    ),
    (
        "cancels itself",
        _raises(asyncio.CancelledError("gone"), "coroutine"),
        "reward function 'coroutine' raised CancelledError",
        STOPS,
    ),
    ("is out of memory", _raises(MemoryError()), "'plain' raised MemoryError: ; prompt: ", STOPS),
    ("hangs, with `reward_timeout`", _hangs("plain"), LATE.format("hangs"), STOPS),
    ("hangs in a coroutine", _hangs("coroutine"), LATE.format("hangs_too"), STOPS),
    ("hangs and blocks its event loop", _hangs("blocks"), LATE.format("blocks"), STOPS),
    (
        'hangs, with `reward_errors="none"`',
        _hangs("plain", reward_errors="none"),
        "no answer within reward_timeout=0.2 s",
        LEFT_OUT,
    ),
    ("returns NaN for all", _returns(lambda r: [float("nan")] * len(r)), "teach nothing", LEFT_OUT),
    ("returns None for all", _returns(lambda r: [None] * len(r)), "teach nothing", LEFT_OUT),
    ("returns NaN for one", _first(float("nan")), "for 1 of 8 completions", LEFT_OUT),
    ("returns None for one", _first(None), "for 1 of 8 completions", LEFT_OUT),
    ("returns infinity", _first(float("inf")), "returned inf: rewards must be finite", STOPS),
    ("returns minus infinity", _first(-float("inf")), "returned -inf: rewards must be", STOPS),
    ("returns what fp32 does not hold", _first(1e300), "1e+300: rewards must be finite", STOPS),
    ("returns an integer of 400 digits", _first(10**400), "not a number or None; prompt: ", STOPS),
    ("returns a complex number", _first(1j), NOT_A_NUMBER.format("1j"), STOPS),
    ("returns a text for one", _first("0.5"), NOT_A_NUMBER.format("'0.5'"), STOPS),
    ("returns bytes for one", _first(b"1"), NOT_A_NUMBER.format("b'1'"), STOPS),
    ("returns a list for one", _first([0.5]), NOT_A_NUMBER.format("[0.5]"), STOPS),
    ("returns a dict for one", _first({"r": 1}), NOT_A_NUMBER.format("{'r': 1}"), STOPS),
    ("returns an object that is no number", _first(Odd()), "not a number or None; prompt", STOPS),
    ("returns None", _returns(lambda r: None), NOT_A_LIST.format("NoneType"), STOPS),
    ("returns one number", _returns(lambda r: 1.0), NOT_A_LIST.format("float"), STOPS),
    ("returns a text", _returns(lambda r: "12345678"), NOT_A_LIST.format("str"), STOPS),
    ("returns bytes", _returns(lambda r: b"12345678"), NOT_A_LIST.format("bytes"), STOPS),
    ("returns a generator", _returns(iter), NOT_A_LIST.format("list_iterator"), STOPS),
    ("returns a dict", _returns(lambda r: dict.fromkeys("12345678")), "returned dict, not", STOPS),
    ("returns a set", _returns(set), NOT_A_LIST.format("set"), STOPS),
    ("returns too few", _returns(lambda r: r[1:]), WRONG_COUNT.format(7), STOPS),
    ("returns too many", _returns(lambda r: [*r, 0.0]), WRONG_COUNT.format(9), STOPS),
    ("returns none at all", _returns(lambda r: []), WRONG_COUNT.format(0), STOPS),
    ("returns a tensor [8, 1]", _returns(lambda r: torch.tensor(r)[:, None]), "not a num", STOPS),
    ("returns a tensor [2, 4]", _returns(lambda r: torch.tensor(r).view(2, 4)), "2 rew", STOPS),
    ("returns a tensor []", _returns(lambda r: torch.tensor(1.0)), "returned float, not", STOPS),
    ("returns a complex tensor", _returns(lambda r: torch.tensor(r) * 1j), "not a number", STOPS),
    ("returns a tensor [8]", _returns(torch.tensor), "", GOES_ON),
    ("returns an array", _returns(lambda r: torch.tensor(r).numpy()), "", GOES_ON),
    ("changes what it is given", _mutates("plain"), "", LEFT_OUT),
    ("changes what it is given, in a coroutine", _mutates("coroutine"), "", LEFT_OUT),
]


def _interrupt(how: str) -> Callable[[Arena], None]:
    return _raises(KeyboardInterrupt(), how)


TABLE = [Fault("Reward functions", *row) for row in REWARDS] + [
    Fault(
        "Reward functions",
        f"raises KeyboardInterrupt{words}",
        _interrupt(how),
        "interrupted. Checkpoints are whole; --resume goes on from the last",
        status=130,
    )
    for how, words in (
        ("plain", ""),
        ("second", ", the second of two"),
        ("coroutine", " in a coroutine"),
    )
]


def document() -> str:
    """docs/faults.md."""
    lines = [HEAD.format(count=len(TABLE))]
    for group in dict.fromkeys(fault.group for fault in TABLE):
        lines += [f"## {group}", "", "| what happens | what you read | and then |", "|---|---|---|"]
        for fault in (fault for fault in TABLE if fault.group == group):
            cells = (fault.what, f"`{fault.message}`" if fault.message else "", fault.ends)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


HEAD = """\
# Faults in a run, and what becomes of it

{count} faults that tests put into a run of the trainer, one at a time, each after two steps that were
saved. Whatever happens, the checkpoints that were there are whole and load. `python tests/faults.py`
writes this page from the table of the tests.
"""


if __name__ == "__main__":
    DOCUMENT.write_text(document())
    print(f"wrote {DOCUMENT}", file=sys.stderr)
