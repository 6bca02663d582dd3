"""Sums over micro-batches, row order, padding: what must not change the loss."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from cases import LOSS_TYPES, Case, exact_logps, make_case
from oracle import close, ours
from torch import Tensor

from fused_grpo.reference import reference_loss


def rows_of(case: Case, rows: list[int]) -> Case:
    return replace(
        case,
        hidden=case.hidden[rows],
        ids=case.ids[rows],
        advantages=case.advantages[rows],
        tensors={k: v[rows] for k, v in case.tensors.items()},
    )


@pytest.mark.parametrize(
    "parts",
    [[[0], [1], [2], [3], [4], [5]], [[0, 1, 2], [3, 4, 5]], [[5, 0], [1, 4, 2], [3]]],
    ids=["1x6", "3x2", "uneven"],
)
@pytest.mark.parametrize("name", ["dapo", "dr_grpo", "grpo"])
def test_micro_batches_add_up(name: str, parts: list[list[int]]) -> None:
    """R3: the gradient does not depend on the split into micro-batches.

    dapo: the token count of the whole batch is passed in; the means over rows of the other two are
    weighted by the caller with each part's share of the rows.
    """
    case = make_case(vocab=61, beta=0.1, entropy_coef=0.1, **LOSS_TYPES[name])
    if name == "dapo":
        case.options["num_items_in_batch"] = int(case.mask.sum())
    whole = ours(case)
    loss, weight_grad = torch.tensor(0.0).double(), torch.zeros_like(case.weight)
    for rows in parts:
        share = 1.0 if name == "dapo" else len(rows) / 6
        part = ours(rows_of(case, rows))
        loss = loss + share * part.output.loss.detach()
        weight_grad = weight_grad + share * part.grads["weight"]
        close(share * part.grads["hidden"], whole.grads["hidden"][rows], 1e-12, "hidden")
    close(loss, whole.output.loss, 1e-12, "loss")
    close(weight_grad, whole.grads["weight"], 1e-12, "weight")


@pytest.mark.parametrize("name", LOSS_TYPES)
def test_row_order_does_not_matter(name: str) -> None:
    case = make_case(vocab=61, beta=0.1, **LOSS_TYPES[name])
    order = [3, 0, 5, 1, 4, 2]
    want, got = ours(case), ours(rows_of(case, order))
    close(got.output.loss, want.output.loss, 1e-12, "loss")
    close(got.grads["hidden"], want.grads["hidden"][order], 1e-12, "hidden")
    close(got.grads["weight"], want.grads["weight"], 1e-12, "weight")


@pytest.mark.parametrize("name", ["grpo", "bnpo", "dapo", "dr_grpo"])
def test_padding_does_not_matter(name: str) -> None:
    case = make_case(vocab=61, beta=0.1, **LOSS_TYPES[name])

    def wider(x: Tensor) -> Tensor:
        return torch.cat([x, torch.zeros_like(x[:, :4])], dim=1)

    padded = replace(
        case,
        hidden=wider(case.hidden),
        ids=wider(case.ids),
        tensors={k: wider(v) for k, v in case.tensors.items()},
    )
    want, got = ours(case), ours(padded)
    close(got.output.loss, want.output.loss, 1e-12, "loss")
    close(got.grads["weight"], want.grads["weight"], 1e-12, "weight")
    close(got.grads["hidden"], wider(want.grads["hidden"]), 1e-12, "hidden")


def test_reference_takes_rows_apart_too() -> None:
    """The oracle itself: a loop over sequences with numbers in hand gives the same loss."""
    case = make_case(vocab=61, beta=0.1, loss_type="grpo")
    logps = exact_logps(case)
    total = 0.0
    for row, advantage in enumerate(case.advantages.tolist()):
        losses = []
        for t in case.mask[row].nonzero().flatten().tolist():
            r = math.exp(float(logps[row, t] - case.tensors["old_per_token_logps"][row, t]))
            d = float(case.tensors["ref_per_token_logps"][row, t] - logps[row, t])
            clipped = min(max(r, 0.8), 1.2)
            losses.append(-min(r * advantage, clipped * advantage) + 0.1 * (math.exp(d) - d - 1))
        total += sum(losses) / max(len(losses), 1) / len(case.advantages)
    got = reference_loss(
        case.hidden, case.weight, case.ids, case.advantages, **case.tensors, **case.options
    )
    assert float(got.loss) == pytest.approx(total, rel=1e-12)
