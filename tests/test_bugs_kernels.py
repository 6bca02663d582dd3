"""Faults of others in kernels and their tools (docs/bug-list.md), for every launch of a loss."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import make_case
from oracle import ours
from torch import Tensor

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
forward = pytest.importorskip("fused_grpo_kernels.forward")
registry = pytest.importorskip("fused_grpo_kernels.registry")
InterpretedFunction = pytest.importorskip("triton.runtime.interpreter").InterpretedFunction

if torch.cuda.is_available():
    pytest.skip("launches are watched in the interpreter", allow_module_level=True)

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"ref": False},
    "everything": {
        "bias": True,
        "beta": 0.1,
        "entropy_coef": 0.05,
        "softcap": 4.0,
        "temperature": 0.7,
        "importance_sampling_level": "sequence",
    },
    "routed": {"ref": False, "backward": "routed", "route_seed": 3},
}


# what a kernel rewrites in place, by design: (input, output)
IN_PLACE = {("gradients_kernel", "exps", "out")}


@contextmanager
def launches(twice: str = "") -> Iterator[list[tuple[str, dict[str, Tensor]]]]:
    """(kernel, its tensors by name) of every launch meanwhile; those of `twice` are repeated."""
    seen: list[tuple[str, dict[str, Tensor]]] = []
    original = InterpretedFunction.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        seen.append((self.fn.__name__, {k: x for k, x in given.items() if isinstance(x, Tensor)}))
        if self.fn.__name__ == twice:
            original(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    InterpretedFunction.run = run
    try:
        yield seen
    finally:
        InterpretedFunction.run = original


def loss_of(name: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    case = make_case(rows=3, width=7, vocab=300, dim=32, dtype=dtype, **OPTIONS[name])
    result = ours(case, backend="triton")
    out = result.output
    grads = [g for g in result.grads.values() if g is not None]
    return (out.loss, out.per_token_logps, out.per_token_loss, *grads, *out.metrics.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIONS)
def test_no_two_arguments_of_a_launch_share_memory(name: str, dtype: torch.dtype) -> None:
    """K2: the loss was always 0, as an output that was not asked for was given the pointer of the
    one that was. Of no launch do two tensors overlap but where a kernel works in place, and what is
    not wanted is None."""
    with launches() as seen:
        loss_of(name, dtype)
    assert len(seen) >= 3
    for kernel, tensors in seen:
        for (a, x), (b, y) in itertools.combinations(tensors.items(), 2):
            if (kernel, a, b) not in IN_PLACE:
                assert not overlap(x, y), (kernel, a, b)


def overlap(x: Tensor, y: Tensor) -> bool:
    ends = [(t.data_ptr(), t.data_ptr() + t.element_size() * (1 + sum(reach(t)))) for t in (x, y)]
    (start, end), (other_start, other_end) = ends
    return bool(x.numel() and y.numel()) and start < other_end and other_start < end


def reach(x: Tensor) -> list[int]:
    return [(n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)]


@pytest.mark.parametrize("name", OPTIONS)
def test_a_launch_that_may_be_timed_changes_no_bit_by_being_repeated(name: str) -> None:
    """K3: tuning runs every candidate on the same buffers: atomics added up, and kernels in place
    spoiled their inputs. One kernel is timed here, in `forward.choose`, and Triton's own tuner is
    not used; run twice in a row it gives the bits of one run."""
    sources = {p: p.read_text() for p in Path(forward.__file__).parent.glob("*.py")}
    assert not any("autotune" in text for text in sources.values())
    callers = [p.stem for p, text in sources.items() if re.search(r"(?<!def )\bchoose\(", text)]
    assert callers == ["forward"]
    once = loss_of(name, torch.bfloat16)
    with launches(twice="head_kernel") as seen:
        again = loss_of(name, torch.bfloat16)
    assert "head_kernel" in {kernel for kernel, _ in seen}
    for a, b in zip(once, again, strict=True):
        assert torch.equal(a, b)


@triton.jit
def _product(a, b, out, precision: tl.constexpr, wide: tl.constexpr):
    i, k = tl.arange(0, 16), tl.arange(0, 32)
    x = tl.load(a + i[:, None] * 32 + k[None, :])
    y = tl.load(b + i[:, None] * 32 + k[None, :])
    if wide:
        x, y = x.to(tl.float32), y.to(tl.float32)
    z = tl.dot(x, y.T, input_precision=precision)
    tl.store(out + i[:, None] * 16 + i[None, :], z)


def test_canary_for_bf16_in_the_interpreter() -> None:
    """K1: the interpreter multiplied the bit patterns of bf16, with errors of 1e10. Widened first,
    as every kernel here does it, products are right; should they be right without, say so."""
    a, b = torch.randn(16, 32).bfloat16(), torch.randn(16, 32).bfloat16()
    want = a.double() @ b.double().T
    out = torch.empty(16, 16)
    _product[(1,)](a, b, out, "ieee", True)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    _product[(1,)](a, b, out, "ieee", False)
    wrong = (out.double() - want).abs().max() > 1
    assert wrong, "this Triton multiplies bf16 when interpreted: INTERP can go from the kernels"


def test_a_whole_loss_in_bf16_is_that_of_its_numbers_in_fp32() -> None:
    """K1: and no kernel forgets to: bf16 inputs, against the same numbers as fp32 tensors."""
    results = []
    for wide in (False, True):
        case = make_case(
            rows=3, width=7, vocab=300, dim=32, dtype=torch.bfloat16, **OPTIONS["everything"]
        )
        if wide:
            case.hidden, case.weight = case.hidden.float(), case.weight.float()
            case.bias = case.bias.float()
        results.append(ours(case, backend="triton").output)
    narrow, wide_ = results
    torch.testing.assert_close(narrow.per_token_logps, wide_.per_token_logps, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(narrow.loss, wide_.loss, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("target", registry.TARGETS)
def test_blocks_do_not_grow_with_the_vocabulary(target: str) -> None:
    """S6, K5: a block as wide as the vocabulary is refused above 65,536 or 131,072 entries, and
    spills below. No constant of any kernel on any chip is a size of the model's: tiles of at most
    2^15 elements a stage, whatever V and H are."""
    for case in registry.kernel_cases(registry.TARGETS[target]):
        sizes = {k: v for k, v in case.config.constexprs.items() if not isinstance(v, bool)}
        assert all(v <= 1024 for v in sizes.values()), (case.name, sizes)
        assert "vocab" not in case.constexprs
        assert "width" not in case.constexprs
        for m, n in (("BM", "BN"), ("BM", "BK"), ("BN", "BK")):
            if m in sizes and n in sizes:
                assert sizes[m] * sizes[n] <= 1 << 15, (case.name, sizes)
