"""Faults of reward functions."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import torch
from fault_arena import GOES_ON, LEFT_OUT, STOPS, Arena, Fault
from trainer_runs import PROMPTS, letters


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


REWARD_FAULTS = [Fault("Reward functions", *row) for row in REWARDS] + [
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
