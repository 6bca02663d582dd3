"""Faults of others in memory and work (docs/bug-list.md): bytes and products, counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from memory_tracker import MatmulCounter, MemoryTracker, saved_bytes
from torch import Tensor

from fused_grpo import grpo_loss, linear_logprobs, policy_loss

H, V, ROWS, WIDTH = 16, 1500, 4, 96
CHUNK = 1 << 19


def tensors() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden = torch.randn(ROWS, WIDTH, H, requires_grad=True)
    weight = torch.randn(V, H, requires_grad=True)
    return hidden, weight, torch.randint(V, (ROWS, WIDTH)), torch.randn(ROWS)


def fused(hidden: Tensor, weight: Tensor, ids: Tensor, a: Tensor, **options: Any) -> Tensor:
    return grpo_loss(hidden, weight, ids, a, chunk_bytes=CHUNK, **options).loss


def in_two_steps(hidden: Tensor, weight: Tensor, ids: Tensor, a: Tensor) -> Tensor:
    logps = linear_logprobs(hidden, weight, ids, chunk_bytes=CHUNK).logps
    return policy_loss(logps, a).loss


def test_no_more_work_or_memory_than_log_probabilities_and_a_plain_loss() -> None:
    """M8: a fused loss was slower, and larger, than chunked log-probabilities with a plain loss on
    top. Both have the same gradients here; the fused one takes three products of the logits' size
    where the other takes four, and no more memory at its peak but for some vectors."""
    found = {}
    args = tensors()
    for function in (fused, in_two_steps):
        leaves = [x.detach().clone().requires_grad_() for x in args[:2]]
        with MatmulCounter() as counter, MemoryTracker() as tracker:
            function(*leaves, *args[2:]).backward()
        found[function] = counter.count / (ROWS * WIDTH * H * V), tracker.peak, leaves
    work, peak, leaves = found[fused]
    other_work, other_peak, others = found[in_two_steps]
    assert work == 3.0
    assert other_work == 4.0
    assert peak <= other_peak + 16 * ROWS * WIDTH  # vectors of the tokens
    for ours, theirs in zip(leaves, others, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("width", [96, 768])
def test_peak_does_not_grow_with_the_tokens(width: int) -> None:
    """M1: [B, T, V] logits: out of memory with a model of 0.6B. Beyond both gradients, the peak is
    the chunk and vectors of the tokens, eight times as many of them or not."""
    hidden = torch.randn(ROWS, width, H, requires_grad=True)
    _, weight, _, a = tensors()
    with MemoryTracker() as tracker:
        fused(hidden, weight, torch.randint(V, (ROWS, width)), a).backward()
    gradients = 4 * (hidden.numel() + weight.numel())
    vectors = 160 * ROWS * width
    assert tracker.peak <= gradients + CHUNK + vectors
    assert width == 96 or 4 * ROWS * width * V > 8 * (gradients + CHUNK + vectors)


@pytest.mark.parametrize("name", ["unused", "zero", "reported"])
def test_an_entropy_without_coefficient_costs_nothing(name: str) -> None:
    """M2, M10: with entropy_coef=0 the entropy's backward tensors were kept all the same. Neither
    that coefficient nor an entropy that is only reported saves a byte or takes a product more, and
    the reported one is a constant: its value by hand, without a gradient."""
    args = tensors()
    options = {"unused": {}, "zero": {"entropy_coef": 0.0}, "reported": {"entropy": True}}[name]
    with saved_bytes() as plain:
        fused(*args)
    with saved_bytes() as saved, MatmulCounter() as counter:
        out = grpo_loss(*args, chunk_bytes=CHUNK, **options)
        out.loss.backward()
    assert saved["bytes"] <= plain["bytes"] + 4 * ROWS * WIDTH
    assert counter.count == 3 * ROWS * WIDTH * H * V
    if name == "reported":
        logp = (args[0].detach().double() @ args[1].detach().double().T).log_softmax(-1)
        want = -(logp.exp() * logp).sum(-1)
        assert not out.entropy.requires_grad
        torch.testing.assert_close(out.entropy.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("counted", [0, 1, 50, ROWS * WIDTH])
def test_rows_that_are_projected_are_those_that_count(counted: int) -> None:
    """M2: logits of prompts and tool output were computed in fp32 and thrown away. The products
    take exactly the tokens with mask 1."""
    args = tensors()
    mask = torch.zeros(ROWS * WIDTH)
    mask[torch.randperm(ROWS * WIDTH)[:counted]] = 1
    with MatmulCounter() as counter:
        fused(*args, completion_mask=mask.view(ROWS, WIDTH)).backward()
    assert counter.count == 3 * counted * H * V


@pytest.mark.parametrize("frozen", ["weight", "hidden"])
def test_what_is_frozen_costs_neither_buffer_nor_product(frozen: str) -> None:
    """M4: a frozen head's [V, H] gradient was allocated, computed and thrown away. One product
    less, no buffer of that size, no gradient, and the other's gradient as before."""
    args = tensors()
    fused(*args).backward()
    want = {"hidden": args[0].grad.clone(), "weight": args[1].grad.clone()}
    leaves = {"hidden": args[0].detach().clone(), "weight": args[1].detach().clone()}
    for name, x in leaves.items():
        x.requires_grad_(name != frozen)
    with MatmulCounter() as counter, MemoryTracker() as tracker:
        fused(leaves["hidden"], leaves["weight"], *args[2:]).backward()
    assert counter.count == 2 * ROWS * WIDTH * H * V
    for name, x in leaves.items():
        if name == frozen:
            assert x.grad is None
        else:
            torch.testing.assert_close(x.grad, want[name], rtol=1e-5, atol=1e-7)
    other = 4 * leaves["weight" if frozen == "hidden" else "hidden"].numel()
    assert tracker.peak <= other + CHUNK + 160 * ROWS * WIDTH
    assert 4 * leaves[frozen].numel() not in tracker.sizes
