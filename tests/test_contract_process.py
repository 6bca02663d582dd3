"""What a process may do with the public calls: threads, forks, copies, a thousand calls.

test_autograd_contract has the cycles of `grpo_loss`, and copies and pickles of `GRPOLoss`;
test_routed that of a module with a seed; test_isolation processes of verifiers.
"""

from __future__ import annotations

import copy
import gc
import io
import itertools
import multiprocessing
import pickle
import resource
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from entry_points import (
    DIFFERENTIABLE,
    ENTRIES,
    HEAD,
    SEEDED,
    assert_same_bits,
    logprobs,
    loss,
    results,
    tensors,
    upstream,
    with_leaves,
)
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fused_grpo import GRPOLoss, LossSpec, TokenView, grpo_loss, linear_logprobs, policy_loss
from fused_grpo.exponentials import dither
from fused_grpo.routed import _uniform

# ---- threads


def larger(dtype: torch.dtype, seed: int, rows: int) -> dict[str, Tensor]:
    """Another shape: the batch some times over."""
    t = tensors(dtype, seed)
    apart = ("weight", "bias", "lora_weight", "ref_weight", "rewards")
    return {k: x if k in apart else torch.cat([x] * rows) for k, x in t.items()}


def test_threads_do_not_see_each_other() -> None:
    """All calls at once on four threads, shapes and dtypes mixed: the bits of one after another."""
    dtypes = (torch.float64, torch.float32, torch.bfloat16)
    jobs = [
        (entry, larger(dtype, seed, 1 + seed % 3))
        for seed, (entry, dtype) in enumerate(itertools.product(ENTRIES.values(), dtypes))
    ]
    want = [results(*job) for job in jobs]
    for cached in (dither, _uniform):
        cached.cache_clear()
    ready = threading.Barrier(4)

    def work(first: int) -> list[tuple[int, list[Tensor]]]:
        torch.set_num_threads(1)
        ready.wait(timeout=30)
        order = range(first, len(jobs), 4)
        return [(i, results(*jobs[i])) for _ in range(2) for i in order]

    with ThreadPoolExecutor(4) as pool:
        found = [pair for part in pool.map(work, range(4)) for pair in part]
    assert len(found) == 2 * len(jobs)
    for i, got in found:
        assert_same_bits(got, want[i])


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_backward_in_another_thread(name: str) -> None:
    entry = DIFFERENTIABLE[name]
    want = results(entry, tensors())
    t = with_leaves(tensors(), entry.leaves)
    out = entry.call(t)
    heads = out[: entry.outputs]
    with ThreadPoolExecutor(1) as pool:
        pool.submit(torch.autograd.backward, heads, [upstream(x) for x in heads]).result()
    assert_same_bits([x.detach() for x in out] + [t[k].grad for k in entry.leaves], want)


def test_modes_of_one_thread_are_not_those_of_another() -> None:
    """no_grad here leaves the calls of other threads their graphs."""
    with torch.no_grad(), ThreadPoolExecutor(1) as pool:
        got = pool.submit(results, HEAD["grpo_loss"], tensors()).result()
    assert_same_bits(got, results(HEAD["grpo_loss"], tensors()))


# ---- processes


def in_child(name: str, queue: Any) -> None:
    torch.set_num_threads(1)
    queue.put([x.float().numpy() for x in results(ENTRIES[name], tensors())])


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("name", ["grpo_loss", "grpo_loss routed", "linear_support", "policy_loss"])
def test_a_fork_after_use(name: str) -> None:
    """A child made by fork, after forward and backward here, gives the same bits."""
    want = [x.float() for x in results(ENTRIES[name], tensors())]
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=in_child, args=(name, queue))
    child.start()
    try:
        got = [torch.from_numpy(x) for x in queue.get(timeout=60)]
        child.join(timeout=60)
        assert child.exitcode == 0
    finally:
        child.kill()
    assert_same_bits(got, want)


class Scored(Dataset[list[Tensor]]):
    """A data set that scores its samples in the worker."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> list[Tensor]:
        t = tensors(seed=index)
        with torch.no_grad():
            return [*logprobs(t, entropy=True), *ENTRIES["linear_support"].call(t)]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_in_a_worker_of_a_data_loader() -> None:
    want = [Scored()[i] for i in range(4)]
    loader = DataLoader(
        Scored(), batch_size=None, num_workers=1, multiprocessing_context="fork", timeout=60
    )
    for got, expected in zip(loader, want, strict=True):
        assert_same_bits(got, expected)


# ---- copies


def outputs() -> dict[str, Any]:
    t = tensors()
    return {
        "GRPOLossOutput": grpo_loss(t["hidden"], t["weight"], t["ids"], t["advantages"]),
        "routed": grpo_loss(
            t["hidden"], t["weight"], t["ids"], t["advantages"], entropy=True, **SEEDED
        ),
        "policy_loss": policy_loss(t["logps"], t["advantages"], reduction="none"),
        "LinearLogprobs": linear_logprobs(t["hidden"], t["weight"], t["ids"], entropy=True),
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    if is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    return bool(a == b)


def saved(x: Any, weights_only: bool) -> Any:
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=weights_only)


@pytest.mark.parametrize("name", ["GRPOLossOutput", "routed", "policy_loss", "LinearLogprobs"])
def test_outputs_are_copied_and_saved(name: str) -> None:
    """By copy, pickle, torch.save; as a dict of tensors also with weights_only."""
    out = outputs()[name]
    for other in (copy.copy(out), copy.deepcopy(out), pickle.loads(pickle.dumps(out))):
        assert type(other) is type(out)
        assert same(other, out)
    assert same(saved(out, False), out)
    plain = {f.name: getattr(out, f.name) for f in fields(out)}
    assert same(saved(plain, True), plain)
    moved = copy.deepcopy(out)
    next(getattr(moved, f.name) for f in fields(moved)).add_(1)
    assert not same(moved, out)


def test_an_output_with_a_graph_is_pickled_as_values_or_not_at_all() -> None:
    t = with_leaves(tensors(), ("hidden",))
    out = grpo_loss(t["hidden"], t["weight"], t["ids"], t["advantages"])
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(out)
    detached = replace(out, loss=out.loss.detach())
    assert same(pickle.loads(pickle.dumps(detached)), detached)


def test_specs_are_copied_and_compare() -> None:
    spec = LossSpec(loss_type="cispo", beta=0.1, ratio_max=4.0)
    for other in (copy.copy(spec), copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):
        assert other == spec
    assert LossSpec(loss_type="cispo") != spec
    assert is_dataclass(TokenView)


@pytest.mark.parametrize("options", [{}, {"beta": 0.1, "temperature": 0.7}, SEEDED], ids=str)
def test_modules_are_copied_and_saved(options: dict[str, Any]) -> None:
    """The same bits; a module has no state of its own, so that weights_only loads it all."""
    module = GRPOLoss(loss_type="grpo", **options)
    t = tensors()
    call = {"completion_mask": t["mask"], "old_per_token_logps": t["old"]}
    call |= {"ref_per_token_logps": t["ref"]} if "beta" in options else {}
    positional = (t["hidden"], t["weight"], t["ids"], t["advantages"])
    want = module(*positional, **call)
    copies = [copy.copy(module), copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    again = GRPOLoss(loss_type="grpo", **options)
    again.load_state_dict(saved(module.state_dict(), True))
    for other in (*copies, again, saved(module, False), module.to(torch.bfloat16).train().eval()):
        assert same(other(*positional, **call), want)
        assert repr(other) == repr(module)
    copies[1].options["epsilon_low"] = 0.0
    assert "epsilon_low" not in module.options


# ---- nothing is left


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("backward", [True, False], ids=["backward", "forward alone"])
@pytest.mark.parametrize("name", ENTRIES)
def test_arguments_die_with_their_last_name(name: str, backward: bool) -> None:
    """Without the garbage collector: no cycle, no cache and no global holds what was given."""
    entry = ENTRIES[name]
    t = with_leaves(tensors(), entry.leaves)
    alive = {k: weakref.ref(x) for k, x in t.items()}
    out = entry.call(t)
    heads = out[: entry.outputs]
    if backward and heads:
        torch.autograd.backward(heads, [upstream(x) for x in heads])
    alive |= {f"output {i}": weakref.ref(x) for i, x in enumerate(out)}
    del t, out, heads
    assert [k for k, ref in alive.items() if ref() is not None] == []


class Broken(Exception):
    pass


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("name", HEAD)
def test_arguments_die_after_an_error(name: str) -> None:
    """Raised by the checks."""
    entry = HEAD[name]

    def run() -> list[weakref.ref[Tensor]]:
        t = with_leaves(tensors(), entry.leaves)
        alive = [weakref.ref(x) for x in t.values()]
        t["weight"] = torch.cat([t["weight"], t["weight"]])  # the bias fits no more
        with pytest.raises((ValueError, RuntimeError)):
            entry.call(t)
        return alive

    alive = run()
    assert [i for i, ref in enumerate(alive) if ref() is not None] == []


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("name", [name for name in HEAD if name != "grpo_loss reference"])
def test_arguments_die_after_an_error_inside_a_pass(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fused_grpo import workspace

    entry = HEAD[name]
    original = workspace.Workspace.allocate

    def allocate(*args: Any, **more: Any) -> Any:
        original(*args, **more)
        raise Broken

    def run() -> list[weakref.ref[Tensor]]:
        t = with_leaves(tensors(), entry.leaves)
        alive = [weakref.ref(x) for x in t.values()]
        with pytest.raises(Broken):
            entry.call(t)
        return alive

    with monkeypatch.context() as patch:
        patch.setattr(workspace.Workspace, "allocate", allocate)
        alive = run()
    assert [i for i, ref in enumerate(alive) if ref() is not None] == []
    assert_same_bits(results(entry, tensors()), results(entry, tensors()))


WRONG: dict[str, Any] = {
    "shape": lambda t: loss(t | {"ids": t["ids"][:, 1:]}),
    "range": lambda t: loss(t | {"ids": t["ids"] + 10**6}),
    "option": lambda t: loss(t, epsilon=0.2),
    "support": lambda t: logprobs(t, support_top_p=7.0),
}


def everything(seed: int) -> None:
    for entry in ENTRIES.values():
        t = tensors(seed=seed % 7)
        results(entry, t)
    for call in WRONG.values():
        with pytest.raises((ValueError, TypeError)):
            call(tensors())
    for _ in range(2):
        loss(tensors(), backward="routed", route_seed=1000 + seed, route_tau=0.5)


def held() -> tuple[int, int, int]:
    """(tensors, blocks of memory that Python has, the process's peak in kB)."""
    gc.collect()
    alive = sum(issubclass(type(x), Tensor) for x in gc.get_objects())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return alive, sys.getallocatedblocks(), peak


def test_a_thousand_calls_do_not_grow() -> None:
    """All calls, errors too: what Python holds and what the process has stay where they were."""
    for seed in range(8):  # until what Python keeps for reuse has its size
        everything(seed)
    before = held()
    rounds = -(-1000 // (len(ENTRIES) + len(WRONG) + 2))
    for seed in range(rounds):
        everything(seed)
    tensors_more, blocks_more, peak_more = (b - a for a, b in zip(before, held(), strict=True))
    assert tensors_more <= 0
    assert blocks_more < 1000, blocks_more  # less than one a call
    assert peak_more < 16 << 10, peak_more
    for cached in (dither, _uniform):
        info = cached.cache_info()
        assert info.maxsize is not None
        assert info.currsize <= info.maxsize <= 8
