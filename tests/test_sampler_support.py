"""linear_support against the processors of transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fused_grpo import linear_logprobs, linear_support

RULES: list[dict[str, Any]] = [
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"top_k": 30, "top_p": 0.9, "min_p": 0.05},
]


def head(lead: tuple[int, ...] = (4, 6), vocab: int = 129) -> dict[str, Tensor]:
    return {
        "hidden": torch.randn(*lead, 24).double(),
        "weight": torch.randn(vocab, 24).double() * 2 / math.sqrt(24),
        "bias": torch.randn(vocab).double(),
    }


def by_transformers(leaves: dict[str, Tensor], temperature: Any, rules: dict[str, Any]) -> Tensor:
    """[n, V] what is kept."""
    scores = (leaves["hidden"] @ leaves["weight"].T + leaves["bias"]) / temperature
    scores = scores.reshape(-1, scores.shape[-1])
    for name, warper in (
        ("top_k", TopKLogitsWarper),
        ("top_p", TopPLogitsWarper),
        ("min_p", MinPLogitsWarper),
    ):
        if name in rules:
            scores = warper(rules[name])(None, scores)
    return scores > -math.inf


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 14, 100 << 20])
@pytest.mark.parametrize("rules", RULES, ids=str)
def test_ids(rules: dict[str, Any], chunk_bytes: int) -> None:
    leaves, temperature = head(), torch.linspace(0.5, 1.5, 24).view(4, 6).double()
    ids = linear_support(**leaves, temperature=temperature, chunk_bytes=chunk_bytes, **rules)
    kept = by_transformers(leaves, temperature[..., None], rules)
    assert ids.shape == (4, 6, int(kept.sum(1).max()))
    for row, expected in zip(ids.view(24, -1).tolist(), kept, strict=True):
        count = int(expected.sum())
        assert row == expected.nonzero()[:, 0].tolist() + [-1] * (len(row) - count)


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_is_what_linear_logprobs_finds_by_itself(rules: dict[str, Any]) -> None:
    leaves, targets = head(), torch.randint(129, (4, 6))
    ids = linear_support(**leaves, **rules)
    given = linear_logprobs(**leaves, targets=targets, support_ids=ids)
    found = linear_logprobs(
        **leaves, targets=targets, **{f"support_{k}": v for k, v in rules.items()}
    )
    assert torch.equal(given.logps, found.logps)
    assert torch.equal(given.support_size, found.support_size)
    assert torch.equal(given.target_outside, found.target_outside)


def test_masked_positions() -> None:
    leaves = head()
    mask = torch.ones(4, 6)
    mask[1] = mask[0, 2] = 0
    leaves["hidden"][1] = math.nan
    ids = linear_support(**leaves, top_k=3, mask=mask)
    assert (ids[mask == 0] == -1).all()
    assert (ids[mask == 1] >= 0).all()
    assert linear_support(**leaves, top_k=3, mask=0 * mask).shape == (4, 6, 0)


def test_head_options() -> None:
    leaves = head()
    options = {"softcap": 2.0, "logit_scale": 0.5, "temperature": 0.7}
    z = 2 * torch.tanh((leaves["hidden"] @ leaves["weight"].T + leaves["bias"]) * 0.25) / 0.7
    want = z.softmax(-1) >= 0.3 * z.softmax(-1).amax(-1, keepdim=True)
    ids = linear_support(**leaves, min_p=0.3, **options)
    assert torch.equal((ids >= 0).sum(-1), want.sum(-1))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, "top_k, top_p and min_p"),
        ({"top_k": 0}, "support_top_k"),
        ({"top_p": 1.5}, "support_top_p"),
        ({"top_k": 3, "mask": torch.ones(4, 5)}, "mask"),
        ({"top_k": 3, "temperature": 0.0}, "temperature"),
    ],
)
def test_bad_input(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        linear_support(**head(), **options)
