"""Running reward functions: coroutines at the same time, and none longer than it may."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

GRACE = 1.0  # seconds beyond its timeout that a coroutine has to notice that it is over


class RewardTimeoutError(TimeoutError):
    """A reward function took longer than it may."""


_loop: asyncio.AbstractEventLoop | None = None


def is_async(func: Callable[..., Any]) -> bool:
    """Whether calling `func` gives a coroutine."""
    inner = func.func if isinstance(func, functools.partial) else func
    call = getattr(type(inner), "__call__", None)  # noqa: B004 (the method, not whether)
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(call)


def call_all(
    funcs: Sequence[Callable[..., Any]], batch: dict[str, list[Any]], timeout: float | None
) -> list[Any]:
    """What each function returns of `batch`, or the exception that it ended with.

    Coroutines run together, on an event loop in a thread that lives as long as the program, so that
    clients they keep stay connected; meanwhile the other functions run one after the other. A
    function that takes longer than `timeout` seconds gives a RewardTimeoutError; a coroutine is
    cancelled, a plain function runs on in a thread, as nothing can stop it.
    """
    start = time.monotonic()
    running = {i: _submit(f, batch, timeout) for i, f in enumerate(funcs) if is_async(f)}
    results: list[Any] = [None] * len(funcs)
    try:
        for i, func in enumerate(funcs):
            if i not in running:
                results[i] = _outcome(_call, func, batch, timeout)
        for i, future in running.items():
            results[i] = _outcome(_wait, future, start, timeout)
    finally:
        for future in running.values():
            future.cancel()
    return [_named_timeout(result, timeout) for result in results]


def call_once(func: Callable[..., Any], batch: dict[str, list[Any]], timeout: float | None) -> Any:
    """What a function, or coroutine, returns of `batch`."""
    if is_async(func):
        return _wait(_submit(func, batch, timeout), time.monotonic(), timeout)
    return _call(func, batch, timeout)


def _outcome(call: Callable[..., Any], *args: Any) -> Any:
    """What a call returns or raises; `exit()` in a verifier is its failure, not the run's end."""
    try:
        return call(*args)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return error


def _fresh(value: Any) -> Any:
    """Lists and dicts anew, all else as it is: a function may change what it is given."""
    if type(value) is list:
        return [_fresh(item) for item in value]
    if type(value) is dict:
        return {key: _fresh(item) for key, item in value.items()}
    return value


def _call(func: Callable[..., Any], batch: dict[str, list[Any]], timeout: float | None) -> Any:
    # in a thread only where it must be: signals, which some verifiers use, work in the main one
    batch = _fresh(batch)
    if timeout is None or hasattr(func, "failures"):  # an isolated verifier has its own timeout
        return func(**batch)
    future: Future[Any] = Future()

    def work() -> None:
        try:
            future.set_result(func(**batch))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="reward", daemon=True).start()
    return future.result(timeout)


def _submit(
    func: Callable[..., Any], batch: dict[str, list[Any]], timeout: float | None
) -> Future[Any]:
    global _loop
    if _loop is None:
        _loop = asyncio.new_event_loop()
        threading.Thread(target=_loop.run_forever, name="rewards", daemon=True).start()

    async def told() -> tuple[Any, BaseException | None]:
        # one of these that left a task would end the loop, and all that wait for it would hang
        try:
            call: Coroutine[Any, Any, Any] = func(**_fresh(batch))
            return await call, None
        except (SystemExit, KeyboardInterrupt) as error:
            return None, error

    async def bounded() -> tuple[Any, BaseException | None]:
        return await asyncio.wait_for(told(), timeout)

    return asyncio.run_coroutine_threadsafe(bounded(), _loop)


def _wait(future: Future[Any], start: float, timeout: float | None) -> Any:
    global _loop
    left = None if timeout is None else max(start + timeout + GRACE - time.monotonic(), 0.0)
    try:
        result, error = future.result(left)
    except FutureTimeout:
        if not future.done():  # it holds the loop, which is lost for the others as well
            _loop = None
        raise
    if error is not None:
        raise error
    return result


def _named_timeout(result: Any, timeout: float | None) -> Any:
    """A function's own TimeoutError says what it waited for; that of the limit says nothing."""
    kinds = (TimeoutError, FutureTimeout, asyncio.TimeoutError)  # one class from Python 3.11 on
    if timeout is not None and isinstance(result, kinds) and not str(result):
        return RewardTimeoutError(f"no answer within reward_timeout={timeout:g} s")
    return result
