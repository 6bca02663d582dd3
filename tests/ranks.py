"""Cases that run on several processes at once: starting these takes seconds, so one start serves
all cases of a world size, and each is reported as a test of its own (`test_distributed`)."""

from __future__ import annotations

import importlib
import json
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import Case
from torch import Tensor

CASES: dict[str, tuple[tuple[int, ...], Callable[[], None]]] = {}
MODULES = (
    "ranks_vocab",
    "ranks_routed",
    "ranks_sequences",
    "ranks_data",
    "ranks_errors",
    "ranks_contract",
)
PASSED = "passed"
PATIENCE = timedelta(seconds=60)


def case(function: Callable[..., None], worlds: Sequence[int] = (2, 4), **arguments: Any) -> None:
    """A case, named by its function and arguments; `of` in the arguments is its name there."""
    of = arguments.pop("of", None)
    name = function.__name__ + ("" if of is None else f"-{of}")
    assert name not in CASES, name
    CASES[name] = tuple(worlds), lambda: function(**arguments)


def names(world: int) -> list[str]:
    for module in MODULES:
        importlib.import_module(module)
    return [name for name, (worlds, _) in CASES.items() if world in worlds]


def work(rank: int, world: int, folder: str) -> None:
    """What each process does: all cases, and a file with what became of them."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world,
        timeout=PATIENCE,
    )
    results = {}
    for name in names(world):
        torch.manual_seed(0)
        try:
            CASES[name][1]()
            results[name] = PASSED
        except Exception:  # the ranks may be out of step now: this is the last case
            results[name] = traceback.format_exc()
            raise
        finally:
            Path(folder, f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank()


def world() -> int:
    return dist.get_world_size()


def everyone() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def summed(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    x = x.detach().clone()
    dist.all_reduce(x, group=group)
    return x


def of_all(value: Any) -> list[Any]:
    parts: list[Any] = [None] * world()
    dist.all_gather_object(parts, value)
    return parts


def same_bits(x: Tensor) -> bool:
    parts = of_all(x.detach().reshape(-1).contiguous().view(torch.uint8))
    return all(torch.equal(parts[0], part) for part in parts)


@contextmanager
def counted_collectives() -> Iterator[list[str]]:
    """The collectives that this rank calls meanwhile."""
    called: list[str] = []
    originals = {n: getattr(dist, n) for n in ("all_reduce", "all_gather", "all_gather_object")}

    def count(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return originals[name](*args, **kwargs)

        return call

    try:
        for name in originals:
            setattr(dist, name, count(name))
        yield called
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def bounds(cuts: Sequence[int], index: int | None = None) -> slice:
    index = rank() if index is None else index
    return slice(cuts[index], cuts[index + 1])


def vocab_part(full: Case, part: slice) -> Case:
    """The case with some rows of its head."""
    bias = None if full.bias is None else full.bias[part]
    return replace(full, weight=full.weight[part], bias=bias)


def time_part(full: Case, part: slice) -> Case:
    """The case with some positions of all its sequences."""
    shape = full.ids.shape

    def cut(x: Any) -> Any:
        return x[:, part] if isinstance(x, Tensor) and x.shape[:2] == shape else x

    return replace(
        full,
        hidden=cut(full.hidden),
        ids=cut(full.ids),
        advantages=cut(full.advantages),
        tensors={k: cut(v) for k, v in full.tensors.items()},
        options={k: cut(v) for k, v in full.options.items()},
    )
