"""JSON over HTTP with a server that may be slow, busy, restarting or gone."""

from __future__ import annotations

import functools
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from fused_grpo.trainer.sample import RolloutError
from fused_grpo.trainer.secrecy import check_url, printable

T = TypeVar("T")
R = TypeVar("R")

# what may be different the next time: no connection, one that breaks, half an answer
LOST = (urllib.error.URLError, http.client.HTTPException, OSError, ValueError)
BUSY = (408, 425, 429)
EXCERPT = 500  # characters of an answer in an error
PART = 1 << 20  # bytes that are read at a time


class RefusedError(RolloutError):
    """The server answered that it will not do it.

    Attributes:
        status: of HTTP.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Http:
    """Requests to one server, sent again where that may help.

    Attributes:
        base_url: of http or https, without a slash at the end. Servers that send elsewhere are not
            followed.
        timeout: seconds that the server may stay silent in one request.
        retries: how often a request is sent again after the first time.
        concurrency: requests at the same time.
        max_bytes: of one answer; experts of every token make the longest ones.
        wait: seconds before the second time, doubled each time up to `longest_wait`.
    """

    base_url: str
    timeout: float = 600.0
    retries: int = 4
    concurrency: int = 64
    max_bytes: int = 1 << 30
    wait: float = 0.5
    longest_wait: float = 30.0

    def __post_init__(self) -> None:
        check_url("base_url", self.base_url)

    def post(self, path: str, body: Any = None) -> Any:
        """What a POST is answered with: JSON, text where it is not, None where it is empty.

        Raises:
            RefusedError: a status of 4xx that is not about load: the request itself is wrong.
            RolloutError: no usable answer, naming what was tried and for how long.
        """
        return self._ask("POST", path, {} if body is None else body)

    def get(self, path: str) -> Any:
        """The same for a GET."""
        return self._ask("GET", path, None)

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """`function` of each item, several at a time; the first error stops what has not begun."""
        work = list(items)
        pool = ThreadPoolExecutor(min(self.concurrency, len(work)) or 1)
        try:
            return [future.result() for future in [pool.submit(function, item) for item in work]]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def wait_until_up(self, path: str, seconds: float) -> None:
        """Return once `path` answers.

        Raises:
            RolloutError: it has not within that many seconds.
        """
        start = time.monotonic()
        while True:
            try:
                self._once("GET", path, None)
                return
            except LOST as error:
                if time.monotonic() - start >= seconds:
                    raise RolloutError(
                        f"no server at {self.base_url}: GET {path} was tried for "
                        f"{time.monotonic() - start:.1f} s, at last {_reason(error)}"
                    ) from error
            time.sleep(min(self.wait, seconds / 10))

    def _ask(self, method: str, path: str, body: Any) -> Any:
        start, wait = time.monotonic(), self.wait
        for attempt in range(self.retries + 1):
            try:
                return self._once(method, path, body)
            except LOST as error:
                asked = _retry_after(error)
                if isinstance(error, urllib.error.HTTPError) and not _passes(error.code):
                    raise RefusedError(
                        f"{self.base_url}{path} refused: {_reason(error)}", error.code
                    ) from error
                if attempt == self.retries:
                    raise RolloutError(
                        f"{method} {self.base_url}{path} was tried {attempt + 1} times in "
                        f"{time.monotonic() - start:.1f} s, at last {_reason(error)}. Is the "
                        "server running? Its own log says more"
                    ) from error
            time.sleep(min(max(wait, asked), self.longest_wait))
            wait *= 2
        raise AssertionError("unreachable")

    def _once(self, method: str, path: str, body: Any) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.base_url + path,
            data=data,
            method=method,
            headers={"Content-Type": "application/json"},
        )
        with _opener().open(request, timeout=self.timeout) as answer:
            text = self._read(answer).decode()
            if "json" not in answer.headers.get("Content-Type", ""):
                return text or None
        try:
            return json.loads(text)
        except RecursionError as error:
            raise ValueError("JSON of absurd depth") from error

    def _read(self, answer: Any) -> bytes:
        data = bytearray()
        while part := answer.read(PART):
            data += part
            if len(data) > self.max_bytes:
                raise RolloutError(
                    f"{self.base_url} answered with more than {self.max_bytes:,} bytes"
                )
        if answer.length:  # what is missing of the announced length: in parts, nobody complains
            raise http.client.IncompleteRead(bytes(data), answer.length)
        return bytes(data)


@functools.cache
def _opener() -> urllib.request.OpenerDirector:
    """HTTP, through proxies of the environment: no files, no FTP, and no way to another server."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        *(urllib.request.ProxyHandler, urllib.request.UnknownHandler),
        *(urllib.request.HTTPHandler, urllib.request.HTTPSHandler),
        *(urllib.request.HTTPDefaultErrorHandler, urllib.request.HTTPErrorProcessor),
    ):
        opener.add_handler(handler())
    return opener


def _passes(status: int) -> bool:
    return status >= 500 or status in BUSY


def _retry_after(error: Exception) -> float:
    """Seconds that the server asks to wait, 0 if it does not say."""
    headers = getattr(error, "headers", None)
    value = headers.get("Retry-After", "") if headers else ""
    return float(value) if value.strip().isdigit() else 0.0


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        text = error.read(EXCERPT).decode(errors="replace")
        return printable(f"status {error.code} {error.reason}: {text}")
    inner = error.reason if isinstance(error, urllib.error.URLError) else error
    name = type(inner).__name__ if isinstance(inner, Exception) else "URLError"
    return f"{name}: {inner}"
