"""The program that `isolation` starts: it imports a verifier once and forks workers from there.

It runs by its path and imports nothing but the standard library and the verifier, so that no
thread exists when it forks and a worker is replaced in milliseconds. It holds one end of a Unix
socket: that the other is closed, as it is by the death of the trainer in whatever way, kills every
worker.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from multiprocessing import process, spawn
from multiprocessing.connection import Connection
from typing import Any

COMMAND = struct.Struct("!q")  # a process to kill; START: fork a worker and send its socket
START = 0
READY = b"ready"
ERROR_LENGTH = 4000  # characters of a traceback, its end


def receive(control: socket.socket, size: int) -> bytes:
    """`size` bytes, or fewer where the other side is gone."""
    data = b""
    while len(data) < size:
        part = control.recv(size - len(data))
        if not part:
            break
        data += part
    return data


def serve(control: socket.socket) -> None:
    """Do what the trainer asks for until its end of the socket is closed."""
    # a scheduler that ends a job signals all its processes, and the trainer may still need this
    # one; a handler, not SIG_IGN, which programs started by a verifier would inherit
    signal.signal(signal.SIGTERM, lambda *_: None)
    (size,) = COMMAND.unpack(receive(control, COMMAND.size))
    try:
        main, pickled, memory = pickle.loads(receive(control, size))
        process.current_process()._inheriting = True  # type: ignore[attr-defined]
        spawn.prepare(main)  # sys.path, and the trainer's script where the verifier lives in it
        del process.current_process()._inheriting  # type: ignore[attr-defined]
        func = pickle.loads(pickled)
    except BaseException:
        control.sendall(traceback.format_exc()[-ERROR_LENGTH:].encode())
        raise SystemExit(1) from None
    control.sendall(READY)
    workers: set[int] = set()
    while len(command := receive(control, COMMAND.size)) == COMMAND.size:
        (pid,) = COMMAND.unpack(command)
        if pid == START:
            workers.add(_start(control, func, memory))
        elif pid in workers:  # not reaped yet, so that the number is still its own
            _kill(pid)
            workers.remove(pid)
    for pid in workers:
        _kill(pid)


def _start(control: socket.socket, func: Callable[..., Any], memory: int | None) -> int:
    """Forks a worker, sends its number and socket, and gives the number."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        control.close()
        ours.close()
        _work(Connection(theirs.detach()), func, memory)
    theirs.close()
    socket.send_fds(control, [COMMAND.pack(pid)], [ours.fileno()])
    ours.close()
    return pid


def _kill(pid: int) -> None:
    """A worker and what it has started, whether it still runs or not; leaves no zombie."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # so young that it has no group of its own yet
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _work(tasks: Connection, func: Callable[..., Any], memory: int | None) -> None:
    """Answers (ok, reward or traceback) to each task; never returns."""
    import resource  # not on Windows, where the trainer must be able to import this file

    os.setsid()  # a group, so that its children go with it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory is not None:
        limit = _address_space(resource.getpagesize()) + memory
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    while True:
        try:
            task = tasks.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)
        try:
            value = func(**pickle.loads(task))
            answer: tuple[bool, Any] = (True, None if value is None else float(value))
        except BaseException:
            answer = (False, traceback.format_exc()[-ERROR_LENGTH:])
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            tasks.send_bytes(pickle.dumps(answer))
        except OSError:
            os._exit(0)


def _address_space(page: int) -> int:
    """Bytes that this process has mapped; 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * page
    except OSError:
        return 0


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
