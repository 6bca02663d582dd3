"""What a run holds while it trains: its output directory, and the signals that end it."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from fused_grpo.trainer.confined import check_inside

try:
    import fcntl
except ImportError:  # not on Windows, where directories are not locked
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

LOCK_FILE = "run.lock"
SIGNALS = (signal.SIGTERM, signal.SIGINT)
ECHO_S = 1.0  # torchrun and a terminal may both deliver the same signal


class RunLockedError(OSError):
    """Another run writes into the same output directory."""


class Interrupted(SystemExit):
    """A signal has ended the run after a checkpoint was saved; exit status 128 + its number."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(128 + signum)
        self.status, self.message = 128 + signum, message

    def __str__(self) -> str:
        return self.message


class RunLock:
    """One process alone writes into a folder. May be taken several times by it.

    A lock of the operating system on `run.lock`: it ends with its process, however that ends, and
    is not inherited by children. The file says who holds it.

    Raises:
        RunLockedError: another process holds it.
        OutsideError: `run.lock` is a link out of the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK_FILE
        self._depth = 0
        self._file: Any = None

    @property
    def held(self) -> bool:
        return self._depth > 0

    def acquire(self) -> None:
        """Take it, once more if it is held."""
        if not self._depth:
            self._acquire()
        self._depth += 1

    def release(self) -> None:
        """Give back what one `acquire` took."""
        self._depth -= 1
        if not self._depth and self._file is not None:
            self._file.close()
            self._file = None

    def _acquire(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        check_inside(self.path)
        file = self.path.open("a+")
        try:
            if fcntl is not None:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            file.seek(0)
            holder = _holder(file.read())
            file.close()
            raise RunLockedError(
                f"{self.path.parent} belongs to a run that is still going, {holder}: wait for it, "
                "stop it, or choose another output_dir"
            ) from error
        except OSError as error:
            logger.warning("%s cannot be locked (%s): start no second run there", self.path, error)
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}) + "\n")
        file.flush()
        self._file = file


def _holder(text: str) -> str:
    try:
        who = json.loads(text)
        return f"process {who['pid']} on {who['host']}"
    except (ValueError, KeyError, TypeError):
        return "of an unknown process"


class StopSignals:
    """`with signals:` the first SIGTERM or SIGINT is remembered, the second one ends the process.

    Attributes:
        received: the number of the first signal, 0 if there was none.
    """

    def __init__(self) -> None:
        self.received = 0
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        self.received = 0
        if threading.current_thread() is threading.main_thread():  # handlers need it
            self._before = {number: signal.signal(number, self._take) for number in SIGNALS}
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _take(self, number: int, frame: FrameType | None) -> None:
        if not self.received:
            self.received, self._since = number, time.monotonic()
            name = signal.Signals(number).name
            os.write(2, f"\n{name}: saving after this step; once more exits at once\n".encode())
            return
        if time.monotonic() - self._since > ECHO_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
