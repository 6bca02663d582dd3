"""Verifiers in processes of their own: one that hangs or crashes costs a sample, not the run."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from multiprocessing import spawn
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from fused_grpo.trainer.isolation_server import COMMAND, READY, START

logger = logging.getLogger(__name__)

SERVER = Path(__file__).with_name("isolation_server.py")
IMPORT_TIMEOUT = 300.0  # seconds for the verifier's module, which may import torch
SHOWN = 1000  # characters of a sample in a warning
GONE = (EOFError, OSError)  # what a connection raises once the other side is dead


def isolated(
    func: Callable[..., float | None],
    timeout: float = 10.0,
    workers: int = 2,
    memory_mb: int | None = None,
) -> Isolated:
    """A reward function that runs `func` on each sample in a worker process.

        reward_funcs=isolated(verify, timeout=5.0)      # verify(completion, answer) -> float

    `func` is given what it asks for by name: `prompt`, `completion`, `completion_ids` and the
    columns of the dataset, of one sample. A sample's reward is None, which leaves it out of its
    group, when `func` raises, takes longer than `timeout`, or takes its process down (a segfault,
    `os._exit`, the memory limit); the worker is killed, with all it has started, and replaced.
    Workers start with the first call and end with the object or the program, even one that is
    killed.

    Args:
        func: can be pickled: a function of a module, or a `functools.partial` of one. Where it is
            defined in the script that runs, the script is imported again by the worker, and needs
            `if __name__ == "__main__":` around its training.
        timeout: seconds for one sample.
        workers: samples that are verified at once.
        memory_mb: what a worker may allocate beyond what it starts with, in MiB; None: no limit.

    Raises:
        TypeError, ValueError: naming the argument, what was given and what fits.
        RuntimeError: from the first call, when a worker cannot import `func`.
    """
    return Isolated(func, timeout, workers, memory_mb)


class Isolated:
    """See `isolated`.

    Attributes:
        failures: of the last call: why samples have no reward, and how many ("timeout", "crash",
            "error").
    """

    def __init__(
        self,
        func: Callable[..., float | None],
        timeout: float,
        workers: int,
        memory_mb: int | None,
    ) -> None:
        if not callable(func):
            raise TypeError(f"func must be a function, not {type(func).__name__}")
        for name, value in (("timeout", timeout), ("workers", workers), ("memory_mb", memory_mb)):
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value} must be > 0")
        try:
            self._pickled = pickle.dumps(func)
        except Exception as error:
            raise TypeError(
                f"func must be a function of a module, which a worker can import, not {func!r}: "
                f"{error}"
            ) from error
        self.func, self.timeout, self.workers, self.memory_mb = func, timeout, workers, memory_mb
        inner = func.func if isinstance(func, functools.partial) else func
        self.__name__: str = getattr(inner, "__name__", type(inner).__name__)
        self._names = _argument_names(func)
        self.failures: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._server: _Server | None = None

    def __call__(self, **batch: Sequence[Any]) -> list[float | None]:
        """As a reward function: lists of prompts, completions, ids and columns of equal length."""
        singular = {"prompts": "prompt", "completions": "completion"}
        columns = dict(batch)
        # last: a column of the data set may be called "completion", and is not what was sampled
        columns |= {one: columns.pop(many) for many, one in singular.items() if many in batch}
        wanted = columns.keys() if self._names is None else self._names & columns.keys()
        size = len(batch["completions"])
        return self.run([{name: columns[name][row] for name in wanted} for row in range(size)])

    def run(self, samples: Sequence[dict[str, Any]]) -> list[float | None]:
        """`func(**sample)` of each, in order; None where it gave None or failed."""
        with self._lock:
            try:
                results, failed = self._round(samples)
            except GONE:  # somebody killed the server, perhaps for its memory
                self._server = None
                results, failed = self._round(samples)
        self.failures = Counter(kind for kind, _ in failed.values())
        if failed:
            row, (kind, text) = min(failed.items())
            logger.warning(
                "verifier %r gave no reward for %d of %d samples (%s). The first, a %s: %s\n%s",
                self.__name__,
                len(failed),
                len(samples),
                ", ".join(f"{n} {kind}" for kind, n in sorted(self.failures.items())),
                kind,
                str(samples[row])[:SHOWN],
                text,
            )
        return results

    def _round(self, samples: Sequence[dict[str, Any]]) -> Any:
        if self._server is None:
            self._server = _Server(self._pickled, self.memory_mb)
        return _Round(self._server, samples, self.workers, self.timeout).finish()

    def close(self) -> None:
        """End the workers; a later call starts new ones."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def __reduce__(self) -> Any:
        return isolated, (self.func, self.timeout, self.workers, self.memory_mb)


class _Worker:
    """One process: its number, its socket, and the sample it is at."""

    def __init__(self, pid: int, tasks: Connection) -> None:
        self.pid, self.tasks = pid, tasks
        self.row, self.deadline = -1, 0.0


class _Server:
    """The process that workers are forked from, and those that wait for work."""

    def __init__(self, pickled: bytes, memory_mb: int | None) -> None:
        main = spawn.get_preparation_data("isolated")
        del main["authkey"]  # a secret, of connections that are not made here
        if b"__main__" not in pickled:  # then the trainer's script need not run again
            main = {k: v for k, v in main.items() if not k.startswith("init_main")}
        memory = None if memory_mb is None else memory_mb * 2**20
        setup = pickle.dumps((main, pickled, memory))
        self.control, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            # -I: with this folder on its path, a module here could take the name of another
            [sys.executable, "-I", str(SERVER), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the trainer, which then ends this one
            # one thread each, as there is a process for every core already
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        theirs.close()
        self.close = weakref.finalize(self, _end, self.control, self.process)
        self.idle: list[_Worker] = []
        self.control.settimeout(IMPORT_TIMEOUT)
        try:
            self.control.sendall(COMMAND.pack(len(setup)) + setup)
            answer = self.control.recv(1 << 16)
        except OSError as error:
            answer = str(error).encode()
        if answer != READY:
            self.close()
            raise RuntimeError(
                "a worker could not import the verifier; where it is defined in the script that "
                "runs, the script needs `if __name__ == '__main__':` around its training\n"
                + answer.decode(errors="replace")
            )
        self.control.settimeout(None)

    def worker(self) -> _Worker:
        """An idle one, or a new one."""
        while self.idle:
            worker = self.idle.pop()
            if not worker.tasks.poll():  # it has nothing to say: this would be its end
                return worker
            self.kill(worker)
        self.control.sendall(COMMAND.pack(START))
        data, fds, _, _ = socket.recv_fds(self.control, COMMAND.size, 1)
        if not fds:
            raise EOFError("the process that forks workers is gone")
        return _Worker(COMMAND.unpack(data)[0], Connection(fds[0]))

    def kill(self, worker: _Worker) -> None:
        worker.tasks.close()
        self.control.sendall(COMMAND.pack(worker.pid))


def _end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """The end of the socket makes the server kill its workers and exit."""
    control.close()
    try:
        process.wait(5.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class _Round:
    """One pass over some samples."""

    def __init__(
        self,
        server: _Server,
        samples: Sequence[dict[str, Any]],
        workers: int,
        timeout: float,
    ) -> None:
        self.server, self.samples, self.timeout = server, samples, timeout
        self.waiting = deque(range(len(samples)))
        self.busy: dict[Connection, _Worker] = {}
        self.size = min(workers, len(samples))
        self.results: list[float | None] = [None] * len(samples)
        self.failed: dict[int, tuple[str, str]] = {}

    def finish(self) -> tuple[list[float | None], dict[int, tuple[str, str]]]:
        """The results, and for rows that failed the kind of failure and a text."""
        try:
            while self.waiting or self.busy:
                while self.waiting and len(self.busy) < self.size:
                    self._give(self.server.worker(), self.waiting.popleft())
                first = min((w.deadline for w in self.busy.values()), default=0.0)
                for tasks in wait(list(self.busy), max(0.0, first - time.monotonic())):
                    self._take(self.busy.pop(tasks))  # type: ignore[call-overload]
                now = time.monotonic()
                for worker in [w for w in self.busy.values() if w.deadline <= now]:
                    self._drop(worker, "timeout", f"no answer in {self.timeout:g} s")
        except BaseException:  # interrupted: nobody may answer in the next round
            self.server.close()
            raise
        return self.results, self.failed

    def _give(self, worker: _Worker, row: int) -> None:
        worker.row, worker.deadline = row, time.monotonic() + self.timeout
        self.busy[worker.tasks] = worker
        try:
            worker.tasks.send_bytes(pickle.dumps(self.samples[row]))
        except GONE as error:
            self._drop(worker, "crash", f"its process ended ({type(error).__name__})")

    def _take(self, worker: _Worker) -> None:
        try:
            fine, value = pickle.loads(worker.tasks.recv_bytes())
        except GONE:
            self._drop(worker, "crash", "its process ended")
            return
        self.server.idle.append(worker)
        if fine:
            self.results[worker.row] = value
        else:
            self.failed[worker.row] = ("error", value)

    def _drop(self, worker: _Worker, kind: str, text: str) -> None:
        self.busy.pop(worker.tasks, None)
        self.failed[worker.row] = (kind, text)
        self.server.kill(worker)


def _argument_names(func: Callable[..., Any]) -> set[str] | None:
    """The keywords that `func` takes; None if it takes any."""
    try:
        parameters = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):  # some builtins have none
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return {p.name for p in parameters if p.kind is not p.VAR_POSITIONAL}
