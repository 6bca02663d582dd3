"""What callers may expect of the public calls beyond the right numbers: see the tests' names."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fused_grpo import grpo_loss, policy_loss

# ---- shapes


@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize("name", ["advantages", "importance_sampling_ratio", "entropy_scale"])
def test_a_vector_of_sequences_or_tokens_is_not_guessed(name: str, backend: str) -> None:
    """Three packed tokens in three sequences, one of them empty: [3] was read per sequence."""
    torch.manual_seed(0)
    hidden, weight, ids = torch.randn(3, 4), torch.randn(7, 4), torch.tensor([1, 2, 3])
    bounds = torch.tensor([0, 2, 2, 3])
    values = torch.tensor([1.0, -2.0, 3.0])
    options: dict[str, Any] = {"cu_seqlens": bounds, "backend": backend}
    if name == "entropy_scale":
        options["entropy_coef"] = 0.5
    given = {"advantages": torch.full((3, 1), 0.7), name: values}
    with pytest.raises(ValueError, match=rf"{name} has shape \[3\].*\[3, 1\].*\[1, 3\]"):
        grpo_loss(hidden, weight, ids, given.pop("advantages"), **given, **options)

    def losses(spelled: torch.Tensor, ids: torch.Tensor = ids, **bounds: Any) -> torch.Tensor:
        given = {"advantages": torch.full((len(ids) if ids.dim() > 1 else 3, 1), 0.7)}
        given |= {name: spelled}
        a, more = given.pop("advantages"), {**options, "cu_seqlens": None, **bounds}
        return grpo_loss(
            hidden.view(*ids.shape, 4), weight, ids, a, reduction="none", **given, **more
        ).per_token_loss

    per_token, per_sequence = values[None], values[:, None]
    of_tokens = losses(values[:, None], ids[:, None])  # as three sequences of one token
    torch.testing.assert_close(losses(per_token, cu_seqlens=bounds), of_tokens[:, 0])
    of_sequences = losses(values[[0, 0, 2], None], ids[:, None])
    torch.testing.assert_close(losses(per_sequence, cu_seqlens=bounds), of_sequences[:, 0])


def test_one_token_in_each_sequence_is_no_question() -> None:
    logps, a = -torch.ones(3), torch.tensor([1.0, -2.0, 3.0])
    got = policy_loss(logps, a, cu_seqlens=torch.arange(4)).per_token_loss
    torch.testing.assert_close(got, -a)
