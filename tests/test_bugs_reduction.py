"""Faults of others in reductions and divisors (docs/bug-list.md).

`plain` is the loss on full logits in thirty lines, apart from `fused_grpo.reference`.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_grpo import grpo_loss

B, T, H, V = 4, 5, 6, 17
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")
MASK = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 1, 1, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 0]])


def plain(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    advantages: Tensor,
    mask: Tensor,
    old: Tensor | None,
    ref: Tensor,
    correction: Tensor | None,
    *,
    loss_type: str,
    level: str,
    beta: float,
    delta: float | None,
    items: int | None,
) -> Tensor:
    logp = (hidden @ weight.T).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    old = logp.detach() if old is None else old
    log_ratio, lengths = logp - old, mask.sum(1).clamp(min=1)
    if level == "sequence":
        log_ratio = ((log_ratio * mask).sum(1) / lengths)[:, None].expand_as(logp)
    ratio, a = log_ratio.exp(), advantages[:, None]
    free = ratio if delta is None else ratio.clamp(max=delta)
    policy = -torch.minimum(free * a, ratio.clamp(0.8, 1.2) * a)
    if correction is not None:
        policy = policy * correction
    gap = ref - logp
    token = (policy + beta * (gap.exp() - gap - 1)) * mask
    if loss_type == "grpo":
        return (token.sum(1) / lengths).mean()
    if loss_type == "dr_grpo":
        return token.sum() / (len(token) * 8)
    return token.sum() / (mask.sum() if items is None else items)


OLD = ("none", "given")
CORRECTIONS = ("none", "token", "column", "sequence")
PRODUCT = list(
    itertools.product(
        LOSS_TYPES, ("token", "sequence"), (0.0, 0.1), (None, 1.4), OLD, CORRECTIONS, (None, 7)
    )
)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_full_product_of_options(loss_type: str) -> None:
    """R1, R4, R9, R13: a fused path dropped the sampler's weights, delta, tool masks and the number
    of items, each in some combination, and gradients were 100 times too large. All combinations of
    them against thirty lines on full logits, in fp64: the loss and both gradients."""
    g = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).double()

    hidden, weight, ids = normal(B, T, H), normal(V, H), torch.randint(V, (B, T), generator=g)
    logp = (hidden @ weight.T).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    before, ref, a = logp + 0.4 * normal(B, T), logp + 0.5 * normal(B, T), normal(B)
    weights = torch.rand(B, T, generator=g).double()
    shapes = {"none": None, "token": weights, "column": weights[:, :1], "sequence": weights[:, 0]}
    count = 0
    for _, level, beta, delta, old, correction, items in (p for p in PRODUCT if p[0] == loss_type):
        if items is not None and loss_type != "dapo":
            continue  # refused elsewhere
        given = before if old == "given" else None
        options: dict[str, Any] = {"max_completion_length": 8} if loss_type == "dr_grpo" else {}
        options |= {} if items is None else {"num_items_in_batch": items}
        options |= {"ref_per_token_logps": ref, "beta": beta} if beta else {}
        results = []
        for ours in (False, True):
            leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
            if ours:
                loss = grpo_loss(
                    *leaves,
                    ids,
                    a,
                    completion_mask=MASK,
                    old_per_token_logps=given,
                    importance_sampling_ratio=shapes[correction],
                    loss_type=loss_type,
                    importance_sampling_level=level,
                    delta=delta,
                    **options,
                ).loss
            else:
                wide = shapes["column"] if correction == "sequence" else shapes[correction]
                loss = plain(
                    *leaves,
                    *(ids, a, MASK, given, ref, wide),
                    loss_type=loss_type,
                    level=level,
                    beta=beta,
                    delta=delta,
                    items=items,
                )
            loss.backward()
            results.append((loss.detach(), *(x.grad for x in leaves)))
        for want, got in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
        count += 1
    assert count == (128 if loss_type == "dapo" else 64)


@pytest.mark.parametrize("scale", [0.01, 0.5])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_sampler_weight_scales_the_gradient_by_itself(loss_type: str, scale: float) -> None:
    """R1: a weight of 0.01 that never reached the fused loss left gradients 100 times too large. It
    scales loss and gradients by exactly that."""
    hidden, weight = torch.randn(B, T, H).double(), torch.randn(V, H).double()
    ids, a = torch.randint(V, (B, T)), torch.randn(B).double()
    options: dict[str, Any] = {"max_completion_length": 8} if loss_type == "dr_grpo" else {}
    grads = []
    for correction in (None, torch.full((B, T), scale, dtype=torch.float64)):
        leaf = hidden.clone().requires_grad_()
        out = grpo_loss(
            leaf,
            weight,
            ids,
            a,
            completion_mask=MASK,
            importance_sampling_ratio=correction,
            loss_type=loss_type,
            **options,
        )
        out.loss.backward()
        grads.append(leaf.grad)
    assert grads[0].norm() > 1e-3
    torch.testing.assert_close(grads[1], scale * grads[0], rtol=1e-12, atol=0)


def partitions(rows: tuple[int, ...]) -> list[list[tuple[int, ...]]]:
    """All ways to cut rows into non-empty sets."""
    if not rows:
        return [[]]
    first, rest = rows[0], rows[1:]
    found = []
    for p in partitions(rest):
        found.append([(first,), *p])
        found += [[*p[:i], (first, *p[i]), *p[i + 1 :]] for i in range(len(p))]
    return found


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
def test_every_partition_of_a_batch_has_the_gradient_of_the_whole(loss_type: str) -> None:
    """R3, R12, T8: token means became means of means: gradients depended on the cut into
    micro-batches and on the ranks that got short answers. Lengths 3, 4, 0 and 4, all 15 partitions
    of the rows, and the mean over two ranks with the divisor of both: the gradient of one batch."""
    hidden, weight = torch.randn(B, T, H).double(), torch.randn(V, H).double()
    ids, a = torch.randint(V, (B, T)), torch.tensor([1.0, -1.0, 0.5, -2.0]).double()
    total: dict[str, Any] = {
        "grpo": {"num_sequences": B},
        "dr_grpo": {"max_completion_length": 8, "num_sequences": B},
        "dapo": {"num_items_in_batch": int(MASK.sum())},
    }[loss_type]

    def gradient(rows: tuple[int, ...], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        leaf, index = weight.clone().requires_grad_(), torch.tensor(rows)
        out = grpo_loss(
            hidden[index],
            leaf,
            ids[index],
            a[index],
            completion_mask=MASK[index],
            loss_type=loss_type,
            **options,
        )
        out.loss.backward()
        return out.loss.detach(), leaf.grad

    alone = {} if loss_type != "dr_grpo" else {"max_completion_length": 8}
    want = gradient(tuple(range(B)), alone)
    every = partitions(tuple(range(B)))
    assert len(every) == 15
    for parts in every:
        found = [gradient(rows, total) for rows in parts]
        for i in range(2):
            torch.testing.assert_close(sum(f[i] for f in found), want[i], rtol=1e-12, atol=1e-13)
        if len(parts) == 2:  # as ranks, whose gradients are averaged: divisors per rank
            halved = {k: v / 2 if k != "max_completion_length" else v for k, v in total.items()}
            found = [gradient(rows, halved) for rows in parts]
            mean = sum(f[1] for f in found) / 2
            torch.testing.assert_close(mean, want[1], rtol=1e-12, atol=1e-13)
