"""Files of JSON lines that a run appends to, and that outlive a kill, a full disk and a resume."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fused_grpo.trainer.confined import check_inside

logger = logging.getLogger(__name__)
Entry = dict[str, Any]
# half of a surrogate pair becomes its JSON escape
TEXT: Any = {"encoding": "utf-8", "errors": "backslashreplace"}


def read_lines(path: Path) -> Iterator[Entry]:
    """The entries of a file of JSON lines; none if there is no such file.

    A line that a killed process or a full disk cut short is left out.
    """
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(entry, dict):
                yield entry


class JsonLines:
    """Appends entries to a file. A disk that is full costs entries, not the run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._failed = False

    def append(self, entries: list[Entry]) -> None:
        """Write the entries at once; numbers that JSON does not have become null."""
        text = "".join(_encoded(entry) for entry in entries)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            check_inside(self.path)
            if self._failed or _cut_short(self.path):
                text = "\n" + text
            with self.path.open("a", **TEXT) as file:
                file.write(text)
            self._failed = False
        except OSError as error:
            if not self._failed:
                logger.warning("%s is not written for now: %s", self.path, error)
            self._failed = True

    def keep(self, wanted: Callable[[Entry], bool]) -> None:
        """Drop the entries that are not wanted, entry by entry: the file may be large."""
        if not self.path.exists():
            return
        temporary = self.path.with_name(self.path.name + ".part")
        try:
            check_inside(temporary)
            with temporary.open("w", **TEXT) as file:
                file.writelines(_encoded(e) for e in read_lines(self.path) if wanted(e))
            os.replace(temporary, self.path)
        except OSError as error:
            logger.warning("%s keeps entries of before: %s", self.path, error)
            temporary.unlink(missing_ok=True)


class RunLines(JsonLines):
    """Entries with a "step", in the order of a run.

    A new run starts the file anew. A resumed one keeps the entries up to the step it resumes from.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._started = False
        self._before: list[Entry] = []

    def append(self, entries: list[Entry]) -> None:
        """Before training starts, they are kept as well, to go into the file of a new run."""
        if not self._started:
            self._before += entries
        super().append(entries)

    def start(self, step: int) -> None:
        """Training starts, or goes on from a step above 0."""
        if step > 0:
            self.keep(lambda entry: entry.get("step", 0) <= step)
        elif not self._started:
            self.keep(lambda entry: False)
            if self._before:
                super().append(self._before)
        self._started, self._before = True, []


def _cut_short(path: Path) -> bool:
    """Whether the last line has no end."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def _encoded(entry: Entry) -> str:
    return json.dumps(_finite(entry), ensure_ascii=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value
