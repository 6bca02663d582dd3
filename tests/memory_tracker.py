"""Which tensors an operation makes, and how many bytes of them live at once."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MemoryTracker(TorchDispatchMode):
    """Follows the storages that operations return while it is active.

    ``peak`` is the largest number of bytes alive at once among storages made inside, ``largest``
    the size in bytes of the biggest one, ``sizes`` of all. Scratch space that an operation frees
    before it returns is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.sizes: list[int] = []
        self._known: dict[int, weakref.ref[Any]] = {}
        self._allocates: dict[Any, bool] = {}

    @property
    def largest(self) -> int:
        return max(self.sizes, default=0)

    def _follow(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def gone(_: Any) -> None:
            del self._known[key]
            self.live -= size

        self._known[key] = weakref.ref(storage, gone)
        self.sizes.append(size)
        self.live += size
        self.peak = max(self.peak, self.live)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in self._allocates:
            # Views and in-place operations say in their schema that the result aliases an argument.
            self._allocates[func] = all(r.alias_info is None for r in func._schema.returns)
        if self._allocates[func]:
            for x in tree_leaves(result):
                if isinstance(x, Tensor):
                    self._follow(x)
        return result


class MatmulCounter(TorchDispatchMode):
    """Counts multiplications in matrix products, as ``count``, and keeps the ``shapes`` of both
    operands."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_", "bmm", "_linear_pointwise", "linear"):
            a, b = args[1:3] if name.startswith("addmm") else args[:2]
            columns = b.shape[0] if "linear" in name else b.shape[-1]
            self.count += a.numel() * columns
            self.shapes.add((*a.shape, *b.shape))
        return result


@contextmanager
def saved_bytes() -> Iterator[dict[str, int]]:
    """Bytes of distinct storages saved for backward inside the block, as ``result['bytes']``."""
    result, seen = {"bytes": 0}, {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in seen:
            seen[storage._cdata] = storage  # kept, so that no address is used twice
            result["bytes"] += storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield result
