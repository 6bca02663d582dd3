"""What does not count has no effect: masks, empty batches, garbage at masked positions."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import LEVELS, LOSS_TYPES, Case, make_case, pack
from oracle import check, close, dtype_id, ours
from torch import Tensor

from fused_grpo import grpo_loss
from fused_grpo.batch import make_batch


def same(a: Any, b: Any, tol: float = 1e-12) -> None:
    """Two results of `ours` agree in loss and gradients."""
    close(a.output.loss, b.output.loss, tol, "loss")
    for name, grad in a.grads.items():
        close(grad, b.grads[name], tol, name)


@pytest.mark.both_backends
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "options",
    [
        *LOSS_TYPES.values(),
        {"num_items_in_batch": 0},
        {"num_items_in_batch": torch.tensor(0)},
        {"num_items_in_batch": torch.tensor(0.0)},
    ],
    ids=[*LOSS_TYPES, "items_0", "items_tensor_0", "items_tensor_0.0"],
)
def test_everything_masked(options: dict[str, Any], level: str, layout: str) -> None:
    """R5, S10: loss 0, zero gradients attached to the graph, finite metrics."""
    case = make_case(
        vocab=61,
        bias=True,
        beta=0.1,
        entropy_coef=0.1,
        importance_sampling_level=level,
        **options,
    )
    case = pack(case) if layout == "packed" else case
    case.tensors["completion_mask"] = torch.zeros_like(case.ids)
    result = check(case)
    assert float(result.output.loss.detach()) == 0.0
    for name, grad in result.grads.items():
        assert grad is not None, name
        assert not grad.any(), name
    assert all(torch.isfinite(v) for v in result.output.metrics.values())
    assert int(result.output.metrics["num_tokens"]) == 0


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_empty_batches(shape: tuple[int, int]) -> None:
    """No rows, or rows without tokens: as if everything were masked."""
    hidden = torch.randn(*shape, 8, requires_grad=True)
    weight = torch.randn(20, 8, requires_grad=True)
    ids = torch.zeros(shape, dtype=torch.long)
    out = grpo_loss(hidden, weight, ids, torch.randn(shape[0]))
    out.loss.backward()
    assert float(out.loss.detach()) == 0.0
    assert hidden.grad.shape == hidden.shape
    assert not weight.grad.any()


@pytest.mark.parametrize("num_items", [0, 0.5, torch.tensor(0)])
def test_divisors_are_at_least_one(num_items: Any) -> None:
    """R5: no 0/0, and no loss that explodes because a count was 0."""
    case = make_case(vocab=61, ref=False)
    want = ours(case.with_options(num_items_in_batch=1))
    same(ours(case.with_options(num_items_in_batch=num_items)), want)


@pytest.mark.both_backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize("level", LEVELS)
def test_garbage_at_masked_positions_is_inert(level: str, dtype: torch.dtype) -> None:
    """N5, R11, S8: NaN and inf there change no bit of the loss, the metrics or a gradient."""
    case = make_case(
        vocab=61,
        dtype=dtype,
        bias=True,
        beta=0.1,
        entropy_coef=0.1,
        importance_sampling_level=level,
    )
    shape = case.ids.shape
    case.advantages = case.advantages[:, None].repeat(1, shape[1])
    case.tensors["importance_sampling_ratio"] = torch.rand(shape)
    off = ~case.mask
    want = ours(case)
    garbage = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e30, -200.0, 100.0])
    filler = garbage.repeat(math.ceil(case.ids.numel() / 6))[: case.ids.numel()].view(shape)

    def spoil(x: Tensor) -> Tensor:
        return torch.where(off, filler.to(x.dtype), x)

    spoiled = replace(
        case,
        hidden=torch.where(off[..., None], filler[..., None].to(dtype), case.hidden),
        ids=case.ids.masked_fill(off, 10**12),
        advantages=spoil(case.advantages),
        tensors={k: (v if k == "completion_mask" else spoil(v)) for k, v in case.tensors.items()},
    )
    for variant in (spoiled, pack(spoiled)):
        got = ours(variant)
        if variant is spoiled:
            assert torch.equal(got.output.loss, want.output.loss)
            for name, grad in want.grads.items():
                assert torch.equal(got.grads[name], grad), name
            for name, value in want.output.metrics.items():
                assert torch.equal(got.output.metrics[name], value), name
        assert torch.isfinite(got.output.loss)
        assert all(torch.isfinite(g).all() for g in got.grads.values())


@pytest.mark.parametrize("name", ["bnpo", "dapo"])
def test_masking_a_sequence_is_removing_it(name: str) -> None:
    """R4: one mask defines the numerator and the denominator."""
    case = make_case(vocab=61, beta=0.1, mask="ragged", loss_type=name)
    keep = torch.tensor([0, 2, 3, 5])
    fewer = Case(
        case.hidden[keep],
        case.weight,
        case.ids[keep],
        case.advantages[keep],
        tensors={k: v[keep] for k, v in case.tensors.items()},
        options=case.options,
    )
    case.tensors["completion_mask"][[1, 4]] = 0
    masked, removed = ours(case), ours(fewer)
    close(masked.output.loss, removed.output.loss, 1e-12, "loss")
    close(masked.grads["weight"], removed.grads["weight"], 1e-12, "weight")


@pytest.mark.both_backends
def test_end_of_sequence_token_is_kept() -> None:
    """S11: masks are never guessed from ids; a sampled pad == eos token counts where it counts."""
    case = make_case(vocab=61, ref=False, mask="ones")
    case.ids[:, -1] = 0
    result = check(case)
    assert int(result.output.metrics["num_tokens"]) == case.ids.numel()
    assert (result.grads["hidden"][:, -1] != 0).any()


def test_packed_bounds_without_waiting_for_the_device() -> None:
    """A fixed capacity reads the bounds where they are: the same sequences, empty ones too."""
    bounds = torch.tensor([0, 2, 2, 5, 6])
    tokens, advantages = torch.zeros(6, dtype=torch.long), torch.zeros(4, 1)
    batches = [
        make_batch(tokens, advantages, cu_seqlens=bounds, dtype=torch.float32, compact=compact)
        for compact in (True, False)
    ]
    for batch in batches:
        assert batch.sequence.tolist() == [0, 0, 2, 2, 2, 3]
