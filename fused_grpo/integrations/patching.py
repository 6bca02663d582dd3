"""Putting our functions in the place of another library's, and back: explicit, once, checked."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

Replacement = tuple[Any, str, Any]  # (object, attribute, new value)


def check_version(distribution: str, supported: tuple[str, ...]) -> str:
    """The installed version of a distribution.

    Raises:
        RuntimeError: it is not installed, or in a version whose internals nobody has compared.
    """
    versions = " or ".join(supported)
    try:
        found = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError as error:
        raise RuntimeError(f"{distribution} is not installed; install {versions}") from error
    if found not in supported:
        raise RuntimeError(
            f"{distribution} {found} is not supported: what is replaced was compared with "
            f"{versions} only"
        )
    return found


def holders(packages: tuple[str, ...], value: object) -> Iterator[tuple[Any, str]]:
    """(module, attribute) of every loaded module of the packages that holds `value` itself."""
    for name, module in sorted(sys.modules.items()):
        if module is not None and name.partition(".")[0] in packages:
            for attribute, held in list(vars(module).items()):
                if held is value:
                    yield module, attribute


def _held(owner: Any, attribute: str) -> Any:
    """What stands there; of a class the entry itself, static and class methods included."""
    return vars(owner)[attribute] if isinstance(owner, type) else getattr(owner, attribute)


class Patch:
    """Attributes to replace; applied at most once at a time, and undone to what was there.

    Also a context manager: `with patch(): ...` undoes on the way out.
    """

    def __init__(self, name: str, find: Callable[[], list[Replacement]]) -> None:
        """`find` says what to replace when the patch is applied, or raises."""
        self.name, self._find = name, find
        self._done: list[tuple[Any, str, Any, Any]] = []

    @property
    def applied(self) -> bool:
        return bool(self._done)

    def apply(self) -> Patch:
        """Replaces everything.

        Raises:
            RuntimeError: it is applied already, or there is nothing to replace.
        """
        if self._done:
            raise RuntimeError(f"{self.name} is patched already; call unpatch() first")
        found = self._find()
        if not found:
            raise RuntimeError(f"{self.name}: found nothing to replace")
        try:
            for owner, attribute, new in found:
                old = _held(owner, attribute)
                setattr(owner, attribute, new)
                self._done.append((owner, attribute, old, new))
        except BaseException:
            self._restore()
            raise
        return self

    def undo(self) -> None:
        """Puts back what was there.

        Raises:
            RuntimeError: it is not applied, or somebody else has replaced the same since.
        """
        if not self._done:
            raise RuntimeError(f"{self.name} is not patched")
        for owner, attribute, _, new in self._done:
            if _held(owner, attribute) is not new:
                where = getattr(owner, "__name__", owner)
                raise RuntimeError(
                    f"{where}.{attribute} was replaced again after {self.name} was patched; undo "
                    "that first"
                )
        self._restore()

    def _restore(self) -> None:
        for owner, attribute, old, _ in reversed(self._done):
            setattr(owner, attribute, old)
        self._done.clear()

    def __enter__(self) -> Patch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.undo()
