"""Token weights: golden numbers, other libraries' names, accumulation, and passing them through."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import Case, make_case, pack
from oracle import close, ours
from torch import Tensor

from fused_grpo import token_weights
from fused_grpo.aggregation import PRESETS, SCHEMES

MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]])
GOLDEN: dict[str, tuple[dict[str, Any], list[float]]] = {
    # scheme: options, the weight of a token in rows 0, 1 and 3 (row 2 is empty)
    "sequence_mean": ({}, [1 / 8, 1 / 4, 1 / 12]),
    "nonempty_sequence_mean": ({}, [1 / 6, 1 / 3, 1 / 9]),
    "sequence_sum": ({}, [1 / 4] * 3),
    "nonempty_sequence_sum": ({}, [1 / 3] * 3),
    "token_mean": ({}, [1 / 6] * 3),
    "local_token_mean": ({}, [1 / 6] * 3),
    "token_sum": ({}, [1.0] * 3),
    "fixed_length": ({"max_completion_length": 5}, [1 / 20] * 3),
    "nonempty_fixed_length": ({"max_completion_length": 5}, [1 / 15] * 3),
    "group_mean": ({"group_ids": torch.tensor([9, 9, 4, 4])}, [1 / 6, 1 / 6, 1 / 6]),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_numbers(name: str) -> None:
    """R9: each scheme on a batch small enough to count."""
    options, per_row = GOLDEN[name]
    got = token_weights(MASK, name, **options)
    want = MASK * torch.tensor([per_row[0], per_row[1], 0.0, per_row[2]])[:, None]
    close(got, want, 1e-7, name)
    assert got.dtype == torch.float32
    close(token_weights(MASK.bool(), name, **options), want, 1e-7, "boolean mask")


def test_every_scheme_has_a_golden_number() -> None:
    assert set(GOLDEN) == set(SCHEMES)
    assert set(PRESETS.values()) <= set(SCHEMES)


def means(n: Tensor) -> Tensor:
    """The mean over sequences of their means over tokens."""
    return 1 / (n * len(n))


def means_of_nonempty(n: Tensor) -> Tensor:
    return 1 / (n * (n > 0).sum())


def sums(n: Tensor) -> Tensor:
    """The mean over sequences of their sums over tokens."""
    return torch.full_like(n, 1 / len(n))


def sums_of_nonempty(n: Tensor) -> Tensor:
    return torch.full_like(n, 1 / int((n > 0).sum()))


def tokens(n: Tensor) -> Tensor:
    """The mean over tokens."""
    return torch.full_like(n, 1 / float(n.sum()))


def total(n: Tensor) -> Tensor:
    return torch.ones_like(n)


def by_length(n: Tensor) -> Tensor:
    """Sums divided by the longest length that there may be, 5, and the mean over sequences."""
    return sums(n) / 5


def by_length_of_nonempty(n: Tensor) -> Tensor:
    return sums_of_nonempty(n) / 5


def prompts(n: Tensor) -> Tensor:
    """The mean over prompts, of two sequences each, of their means over tokens."""
    return (1 / (2 * n.view(2, 2).sum(1))).repeat_interleave(2)


# as their sources have it, for losses [B, T] in one call
LIBRARIES = {
    **dict.fromkeys(("trl:grpo", "trl:sapo", "liger:grpo", "liger:sapo"), means),
    **dict.fromkeys(("trl:bnpo", "trl:dapo", "trl:cispo", "trl:vespo"), tokens),
    **dict.fromkeys(("liger:bnpo", "liger:dapo", "liger:cispo", "liger:vespo"), tokens),
    **dict.fromkeys(("trl:dr_grpo", "liger:dr_grpo", "skyrl:seq_mean_token_sum_norm"), by_length),
    **dict.fromkeys(("trl:luspo", "liger:luspo"), sums),
    "verl:token-mean": tokens,
    "verl:token-sum": total,
    "verl:seq-mean-token-sum": sums_of_nonempty,
    "verl:seq-mean-token-sum-norm": by_length_of_nonempty,
    "verl:seq-mean-token-mean": means_of_nonempty,
    "openrlhf:token": tokens,
    "openrlhf:sample": means_of_nonempty,
    "skyrl:token_mean": tokens,
    "skyrl:token_mean_legacy": tokens,
    "skyrl:sequence_mean": means,
    "skyrl:prompt_mean": prompts,
    "nemo:token_level": tokens,
    "nemo:sequence_level": means_of_nonempty,
    "slime:rollout": prompts,
    "slime:per_token": tokens,
    "areal:token_mean": tokens,
    "prime:tokens": tokens,
}


@pytest.mark.parametrize("name", PRESETS)
def test_names_of_other_libraries(name: str) -> None:
    options, _ = GOLDEN[PRESETS[name]]
    want = LIBRARIES[name](MASK.sum(1).float())[:, None].expand_as(MASK)
    close(token_weights(MASK, name, **options), torch.where(MASK > 0, want, 0.0), 1e-7, name)


@pytest.mark.parametrize("name", ["token_mean", "sequence_mean", "nonempty_sequence_sum"])
def test_accumulated_calls_add_up(name: str) -> None:
    """R3: with the sums over all calls the split does not matter, whatever the lengths."""
    totals: dict[str, Any] = {"num_items_in_batch": 6} if name == "token_mean" else {}
    if not totals:
        totals["num_sequences"] = 3 if name.startswith("nonempty") else 4
    whole = token_weights(MASK, name)
    for rows in ([0], [1, 2], [3]), ([0, 3], [2, 1]):
        for part in rows:
            close(token_weights(MASK[part], name, **totals), whole[part], 1e-7, str(part))
            as_tensor = {k: torch.tensor(v) for k, v in totals.items()}
            close(token_weights(MASK[part], name, **as_tensor), whole[part], 1e-7, str(part))


def test_packed_weights_are_those_of_the_rows() -> None:
    bounds = torch.tensor([0, 2, 3, 3, 6])
    options, _ = GOLDEN["group_mean"]
    for name in ("sequence_mean", "group_mean"):
        extra = options if name == "group_mean" else {}
        got = token_weights(torch.ones(6), name, cu_seqlens=bounds, **extra)
        close(got, token_weights(MASK, name, **extra)[MASK.bool()], 1e-7, name)


def test_nothing_counts() -> None:
    for name, (options, _) in GOLDEN.items():
        got = token_weights(torch.zeros(4, 3), name, **options)
        assert torch.equal(got, torch.zeros(4, 3)), name


def case_with(weights: torch.Tensor | None, **options: Any) -> Case:
    case = make_case(vocab=61, beta=0.1, entropy_coef=0.1, **options)
    if weights is not None:
        case.tensors["token_weights"] = weights
    return case


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("name", ["sequence_mean", "token_sum"])
def test_given_weights_are_those_of_the_scheme(name: str, layout: str) -> None:
    want = case_with(None, aggregation=name)
    weights = token_weights(want.mask, name).double()
    # whatever stands at masked positions has no effect
    got = case_with(torch.where(want.mask, weights, torch.nan))
    if layout == "packed":
        want, got = pack(want), pack(got)
    a, b = ours(got, chunk_bytes=1 << 13), ours(want)
    close(a.output.loss, b.output.loss, 1e-7, "loss")
    for key, grad in b.grads.items():
        if grad is not None:
            close(a.grads[key], grad, 1e-7, key)


def test_given_weights_scale_the_loss_of_each_token() -> None:
    """Negative ones and zeros included; a token of weight 0 sends nothing to the head."""
    weights = torch.linspace(-1.0, 1.0, 66, dtype=torch.float64).view(6, 11)
    weights[0] = 0.0
    case = case_with(weights)
    out = ours(case)
    close(out.output.loss, (weights * out.output.per_token_loss).sum(), 1e-12, "loss")
    assert not out.grads["hidden"][0].any()
    assert out.grads["hidden"][1].any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheme": "mean"}, "aggregation='mean' is unknown"),
        ({"scheme": "group_mean"}, "scheme='group_mean' needs group_ids"),
        ({"scheme": "token_sum", "num_sequences": 3}, "num_sequences=3 is not used by"),
        ({"num_items_in_batch": -1}, "num_items_in_batch=-1 must be >= 0"),
        ({"scheme": "grpo"}, "choose one of sequence_mean"),
        ({"group_ids": torch.arange(4)}, "is not used by scheme='token_mean'"),
        ({"scheme": "fixed_length", "max_completion_length": 0}, "must be >= 1"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        token_weights(MASK, **options)
    with pytest.raises(TypeError, match=r"mask must be a torch\.Tensor"):
        token_weights([[1, 1]])  # type: ignore[arg-type]
