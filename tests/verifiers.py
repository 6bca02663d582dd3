"""Verifiers for `test_isolation`, in a module that imports nothing heavy: workers import it."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any


def length(completion: str) -> float:
    return float(len(completion))


def misbehave(completion: str, scale: float = 1.0, **columns: Any) -> float | None:
    """Does what the completion says; else its length times `scale`."""
    word, _, rest = completion.partition(" ")
    if word in ACTIONS:
        ACTIONS[word](rest)
    return None if word == "none" else len(completion) * scale


def process_id(completion: str) -> float:
    return float(os.getpid())


def named(prompt: str, completion_ids: list[int], answer: str, bonus: float) -> float:
    return len(prompt) + 10 * len(completion_ids) + 100 * len(answer) + bonus


def text(completion: str) -> Any:
    return "yes"


def _hog(_: str) -> None:
    bytearray(2**30)


def _spawn(path: str) -> None:
    """Starts a program that outlives its parent, writes its number, and hangs."""
    child = subprocess.Popen(["sleep", "600"])
    Path(path).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)


ACTIONS = {
    "sleep": lambda _: time.sleep(600),
    "regex": lambda _: re.match(r"(a+)+b", "a" * 60),  # never lets go of the interpreter's lock
    "exit": lambda _: os._exit(0),
    "segfault": lambda _: ctypes.string_at(0),
    "raise": lambda rest: int(rest),
    "quit": lambda _: (_ for _ in ()).throw(SystemExit(3)),
    "hog": _hog,
    "spawn": _spawn,
}
