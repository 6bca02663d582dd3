"""Rows without their padding: all tokens in one row for the model, the counted ones for the loss.

Sequences stand one after another, positions count from 0 in each, and attention stays inside of
them: by `cu_seq_lens_q` and its like in flash attention, by a mask that transformers makes of the
positions in the other implementations. `check_packing` finds out whether a model does so.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fused_grpo.integrations.models import causal_lm
from fused_grpo.trainer.rollout import positions

# transformers makes a mask of position_ids for these; flash attention is told the bounds
MASKED = ("sdpa", "eager", "flex_attention")
LAYERS = ("full_attention", "sliding_attention", "chunked_attention")


def uses_flash(model: nn.Module) -> bool:
    """Whether attention is told where sequences begin, rather than given a mask."""
    return "flash" in str(_text_config(model)._attn_implementation)


def packed_inputs(input_ids: Tensor, attention_mask: Tensor, model: nn.Module) -> dict[str, Any]:
    """Keywords of the model's forward for the tokens [1, N] of rows [B, L] that the mask keeps."""
    lengths = attention_mask.sum(1)
    inputs: dict[str, Any] = {
        "input_ids": input_ids[attention_mask][None],
        "position_ids": positions(attention_mask)[attention_mask][None],
    }
    if uses_flash(model):
        bounds, longest = cumulative(lengths).int(), int(lengths.max())
        inputs |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
        inputs |= {"max_length_q": longest, "max_length_k": longest}
    return inputs


def cumulative(lengths: Tensor) -> Tensor:
    """[S + 1] the bounds of S sequences one after another."""
    return pad(lengths.cumsum(0), (1, 0))


@dataclass(frozen=True)
class Packing:
    """Where the counted tokens of completions [B, T] stand among the tokens of a packed row.

    Attributes:
        counted: [B, T] what the loss sees, n tokens.
        source: [n] places of the states that predict them in the model's row [1, N, H].
    """

    counted: Tensor
    source: Tensor

    @classmethod
    def of(cls, attention_mask: Tensor, counted: Tensor) -> Packing:
        """`attention_mask` [B, L]: its last T columns are those that predict completions."""
        place = attention_mask.flatten().cumsum(0).sub(1).view_as(attention_mask)
        return cls(counted, place[:, -counted.shape[1] :][counted])

    @property
    def cu_seqlens(self) -> Tensor:
        """[B + 1] the bounds of the completions; one without a counted token is empty."""
        return cumulative(self.counted.sum(1))

    def states(self, hidden: Tensor) -> Tensor:
        """[1, n, H] of [1, N, H]."""
        return hidden.index_select(1, self.source)

    def flat(self, values: Tensor) -> Tensor:
        """[1, n, ...] of [B, T, ...]."""
        return values[self.counted][None]

    def rows(self, values: Tensor, fill: float = 0) -> Tensor:
        """[B, T, ...] of [1, n, ...], `fill` where a token does not count."""
        out = values.new_full((*self.counted.shape, *values.shape[2:]), fill)
        out[self.counted] = values[0]
        return out


@torch.no_grad()
def check_packing(model: nn.Module) -> None:
    """Compare the hidden states of two packed sequences with those of each alone.

    Raises:
        ValueError: a model that carries state from one token to the next, without `position_ids`,
            or with an attention that is not known to keep packed sequences apart; or the states
            differ.
    """
    inner: Any = causal_lm(model)
    name, backbone, config = type(inner).__name__, inner.base_model, _text_config(model)
    remedy = "; set padding_free=False"
    if "position_ids" not in inspect.signature(backbone.forward).parameters:
        raise ValueError(
            f"padding_free=True needs position_ids, which {name} does not take{remedy}"
        )
    others = sorted(set(getattr(config, "layer_types", None) or ()) - set(LAYERS))
    if others or getattr(inner, "_is_stateful", False):
        kind = ", ".join(others) or "a state between tokens"
        raise ValueError(
            f"padding_free=True does not know {kind} of {name}, which packed sequences would "
            f"share{remedy}"
        )
    attention = config._attn_implementation
    if attention not in MASKED and not uses_flash(model):
        raise ValueError(
            f"padding_free=True does not know attn_implementation={attention!r}: choose one of "
            f"{', '.join(MASKED)}, flash_attention_2{remedy}"
        )
    _compare(inner, name, remedy)


def _compare(inner: Any, name: str, remedy: str) -> None:
    weight = inner.get_input_embeddings().weight
    ids = torch.arange(1, 9, device=weight.device).view(2, 4) % len(weight)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[0, -1] = False
    training = inner.training
    inner.eval()
    try:
        packed = _states(inner, ids, mask)
        alone = torch.cat([_states(inner, ids[i : i + 1], mask[i : i + 1]) for i in (0, 1)], 1)
    finally:
        inner.train(training)
    bound = 1e-4 if packed.dtype in (torch.float32, torch.float64) else 5e-2
    error = ((packed - alone).norm() / alone.norm()).item()
    if not error <= bound:
        raise ValueError(
            f"padding_free=True: {name} does not keep packed sequences apart, its hidden states "
            f"are off by {error:.1e} of their norm{remedy}"
        )


def _states(inner: Any, ids: Tensor, mask: Tensor) -> Tensor:
    return inner.base_model(**packed_inputs(ids, mask, inner), use_cache=False)[0].double()


def _text_config(model: nn.Module) -> Any:
    return causal_lm(model).config.get_text_config(decoder=True)
