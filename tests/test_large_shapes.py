"""Vocabularies at and around the sizes that break kernels, and offsets that 32 bits do not hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import make_case
from oracle import check, dtype_id
from torch import Tensor

from fused_grpo import grpo_loss, linear_logprobs
from fused_grpo.reference import reference_logprobs

BLOCK = 2**31  # elements: one more is out of reach of an int32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize("vocab", [32_000, 65_536, 65_537, 131_073, 248_320, 262_144])
def test_vocabularies_of_any_size(vocab: int, dtype: torch.dtype) -> None:
    """N19, S6: values and gradients as near to fp64 at V = 262,144 as at 32,000."""
    case = make_case(rows=2, width=4, dim=24, vocab=vocab, dtype=dtype, beta=0.1)
    check(case)


@pytest.mark.parametrize("part", ["hidden", "weight"])
def test_rows_further_apart_than_32_bits_count(part: str, tmp_path: Path) -> None:
    """S4: rows 2^31 elements apart, in a file of holes that takes no memory; the last row too."""
    size, width = 2 * BLOCK + 16, 16
    path = tmp_path / "holes"
    with path.open("wb") as file:
        file.truncate(2 * size)
    flat = torch.from_file(str(path), shared=True, size=size, dtype=torch.bfloat16)
    far = flat.as_strided((3, width), (BLOCK, 1))
    near = torch.randn(3, width).bfloat16()
    far.copy_(near)
    other, ids = torch.randn(3, width).bfloat16(), torch.tensor([2, 0, 1])

    def call(x: Tensor) -> list[Tensor]:
        pair = (x, other) if part == "hidden" else (other, x)
        hidden, weight = (y.detach().requires_grad_() for y in pair)
        # detach() of the view keeps its strides: nothing is copied before the call
        out = linear_logprobs(hidden, weight, ids)
        out.logps.sum().backward()
        assert hidden.grad is not None
        assert weight.grad is not None
        return [out.logps.detach(), hidden.grad, weight.grad]

    assert far.stride(0) == BLOCK
    for got, want in zip(call(far), call(near), strict=True):
        assert torch.equal(got, want)
    pair = (near, other) if part == "hidden" else (other, near)
    exact, _ = reference_logprobs(*(x.double() for x in pair), ids)
    torch.testing.assert_close(call(far)[0].double(), exact, rtol=1e-5, atol=1e-5)


class Counted(torch.utils._python_dispatch.TorchDispatchMode):
    """How many operators torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_work_is_by_the_chunk_and_not_by_the_row() -> None:
    """M9: as many operators for 256 tokens as for 64 that share a chunk."""
    counts = []
    for tokens in (64, 256):
        hidden = torch.randn(1, tokens, 8, requires_grad=True)
        weight = torch.randn(300, 8, requires_grad=True)
        ids = torch.randint(300, (1, tokens))
        with Counted() as counted:
            grpo_loss(hidden, weight, ids, torch.ones(1)).loss.backward()
        counts.append(counted.count)
    assert counts[0] == counts[1]
