"""The states that torch may be in when a public call is made: they change no bit of it.

Autocast, inference mode and mixed dtypes of `grpo_loss` are in test_autograd_contract; GPUs in
test_gpu.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from entry_points import (
    CONSTANT,
    DIFFERENTIABLE,
    ENTRIES,
    HEAD,
    assert_same_bits,
    results,
    tensors,
    upstream,
    with_leaves,
)

from fused_grpo.exponentials import dither
from fused_grpo.routed import _uniform

DTYPES = (torch.float32, torch.bfloat16)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic(warn_only: bool) -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES: dict[str, Callable[[], Any]] = {
    "deterministic": lambda: deterministic(False),
    "deterministic, warnings only": lambda: deterministic(True),
    "float64 by default": lambda: default_dtype(torch.float64),
    "bfloat16 by default": lambda: default_dtype(torch.bfloat16),
    "float16 by default": lambda: default_dtype(torch.float16),
    "meta by default": lambda: torch.device("meta"),
    "cpu by default": lambda: torch.device("cpu"),
    "autocast to bfloat16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True, check_nan=True),
    "saved on the CPU": torch.autograd.graph.save_on_cpu,
    "saved as copies": lambda: torch.autograd.graph.saved_tensors_hooks(
        lambda x: x.detach().clone(), lambda x: x.clone()
    ),
    "no multithreading": lambda: torch.autograd.set_multithreading_enabled(False),
}


@pytest.fixture(autouse=True)
def _nothing_cached() -> Iterator[None]:
    """What is computed once and kept must not be of the mode that it was first asked for in."""
    for cached in (dither, _uniform):
        cached.cache_clear()
    yield
    for cached in (dither, _uniform):
        cached.cache_clear()


# torch's own product, whose backward autocast reaches; torch says to leave autocast before
REACHED = "grpo_loss reference"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ENTRIES)
def test_a_mode_changes_no_bit(name: str, mode: str, dtype: torch.dtype) -> None:
    """Around forward and backward; and the call after it is as the one before."""
    entry, t = ENTRIES[name], tensors(dtype)
    for cached in (dither, _uniform):
        cached.cache_clear()
    with MODES[mode]():
        got = results(entry, t)
    if name == REACHED and mode.startswith("autocast"):
        values = len(entry.call(t))
        assert_same_bits(got[:values], results(entry, t)[:values])
        return
    after = results(entry, t)
    for cached in (dither, _uniform):
        cached.cache_clear()
    want = results(entry, t)
    assert_same_bits(after, want)
    assert_same_bits(got, want)


@pytest.mark.parametrize("mode", ["autocast to bfloat16", "float64 by default", "meta by default"])
@pytest.mark.parametrize("around", ["forward", "backward"])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_a_mode_around_one_half(name: str, around: str, mode: str) -> None:
    if name == REACHED and mode.startswith("autocast") and around == "backward":
        pytest.skip("torch's own product, see above")
    entry = DIFFERENTIABLE[name]
    want = results(entry, tensors())
    t = with_leaves(tensors(), entry.leaves)
    off = contextlib.nullcontext

    with MODES[mode]() if around == "forward" else off():
        out = entry.call(t)
    heads = out[: entry.outputs]
    by = [upstream(x) for x in heads]
    with MODES[mode]() if around == "backward" else off():
        torch.autograd.backward(heads, by)
    got = [x.detach() for x in out] + [t[n].grad for n in entry.leaves]
    assert_same_bits(got, want)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ENTRIES)
def test_without_gradients(name: str, mode: Callable[[], Any]) -> None:
    """The values' bits are those with gradients, and nothing hangs on the graph."""
    entry = ENTRIES[name]
    t = with_leaves(tensors(), entry.leaves)
    with mode():
        out = entry.call(t)
    assert not any(x.requires_grad for x in out)
    want = [x.detach() for x in entry.call(tensors())]
    again = [x.detach() for x in entry.call(t)]  # what inference mode left behind still trains
    for got, x, y in zip(out, want, again, strict=False):
        if "zero_coefficient" in name:
            continue
        torch.testing.assert_close(got.clone(), x, rtol=1e-6, atol=1e-6, equal_nan=True)
        torch.testing.assert_close(y, x, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", HEAD)
def test_anomaly_detection_names_the_call(name: str) -> None:
    """NaN in the states: the error's traceback of the forward is this one."""
    entry = HEAD[name]
    t = tensors()
    t["hidden"][2, 0, 0] = float("nan")
    with warnings.catch_warnings(record=True) as told, torch.autograd.set_detect_anomaly(True):
        warnings.simplefilter("always")
        with pytest.raises(RuntimeError, match="returned nan values"):
            results(entry, t)
    assert any("test_contract_modes" in str(w.message) for w in told)


def test_the_tables_are_complete() -> None:
    """Every public function is among the entries."""
    import fused_grpo

    apart = {"LossSpec", "TokenView", "register_objective", "plan_memory"}  # take no tensors
    outputs = {"GRPOLossOutput", "LinearLogprobs"}
    tried = {name.split(" ")[0] for name in ENTRIES}
    assert tried == set(fused_grpo.__all__) - apart - outputs
    assert set(CONSTANT) <= tried
