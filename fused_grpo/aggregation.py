"""Every reduction is a weight per token: loss = sum_t w_t loss_t.

A scheme is a pair of divisors, w_t = 1 / (per_t * over): what a token's sequence is divided by,
and what the batch is. Both stand in a table, and the names that other libraries use are a second
one. `token_weights` is the function for callers; a loss_type names its scheme in
`objectives.LOSS_TYPES`, and `aggregation` changes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fused_grpo.batch import TokenBatch, mask_batch
from fused_grpo.checks import check_choice, check_number, check_tensor


@dataclass(frozen=True)
class Divisors:
    """What the caller knows beyond the mask; None: as this call's tokens say.

    Attributes:
        num_items_in_batch: counted tokens of all accumulated calls and ranks.
        num_sequences: their sequences.
        max_completion_length: the constant of the "fixed_length" schemes.
    """

    num_items_in_batch: float | Tensor | None = None
    num_sequences: float | Tensor | None = None
    max_completion_length: float | None = None


Divisor = Callable[[TokenBatch, Divisors], "float | Tensor"]


def _group_tokens(batch: TokenBatch, _: Divisors) -> Tensor:
    """[n] counted tokens of the token's group."""
    groups, _count = _groups(batch)
    totals = torch.zeros_like(batch.lengths).index_add(0, groups, batch.whole_lengths)
    return totals[groups][batch.sequence]


def _groups(batch: TokenBatch) -> tuple[Tensor, int]:
    """([S] group of each sequence as 0..P-1, P)."""
    assert batch.group_ids is not None
    names, groups = batch.group_ids.unique(return_inverse=True)
    return groups, names.numel()


# divisor of a token, [n] or a number
PER: dict[str, Divisor] = {
    "token": lambda batch, given: 1.0,
    "sequence": lambda batch, given: batch.whole_lengths[batch.sequence].clamp_min(1),
    "group": _group_tokens,
    "fixed": lambda batch, given: _known(given.max_completion_length, 1),
}
# divisor of the batch, a number
OVER: dict[str, Divisor] = {
    "nothing": lambda batch, given: 1.0,
    "local_tokens": lambda batch, given: batch.whole_count,
    "tokens": lambda batch, given: _known(given.num_items_in_batch, batch.whole_count),
    "sequences": lambda batch, given: _known(given.num_sequences, batch.lengths.numel()),
    "nonempty": lambda batch, given: _known(given.num_sequences, (batch.whole_lengths > 0).sum()),
    "groups": lambda batch, given: _groups(batch)[1],
}


def _known(value: float | Tensor | None, otherwise: float | Tensor) -> float | Tensor:
    return otherwise if value is None else value


@dataclass(frozen=True)
class Scheme:
    """w_t = 1 / (PER[per] * OVER[over]); the options that it takes, and those it needs."""

    per: str
    over: str
    takes: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    def weights(self, batch: TokenBatch, given: Divisors) -> Tensor:
        """[n], in the dtype of the batch; the divisor is at least 1."""
        like = batch.advantages
        per, over = PER[self.per](batch, given), OVER[self.over](batch, given)
        divisor = as_scalar(per, like) * as_scalar(over, like)
        return (1 / divisor.clamp_min(1)).expand(like.shape)


def as_scalar(value: float | Tensor, like: Tensor) -> Tensor:
    """0-d (a vector stays one), in the dtype and on the device of `like`. A number is filled in: a
    copy would end a graph capture."""
    if isinstance(value, Tensor):
        value = value.detach().to(like)
        return value.reshape(()) if value.numel() == 1 else value
    return like.new_full((), value)


_ITEMS, _SEQUENCES = ("num_items_in_batch",), ("num_sequences",)
_LENGTH, _GROUPS = ("max_completion_length",), ("group_ids",)

SCHEMES: dict[str, Scheme] = {
    # GRPO, arXiv 2402.03300: the mean over sequences, masked ones included, of their token means
    "sequence_mean": Scheme("sequence", "sequences", takes=_SEQUENCES),
    "nonempty_sequence_mean": Scheme("sequence", "nonempty", takes=_SEQUENCES),
    # LUSPO, arXiv 2602.05261: the mean over sequences of their token sums
    "sequence_sum": Scheme("token", "sequences", takes=_SEQUENCES),
    "nonempty_sequence_sum": Scheme("token", "nonempty", takes=_SEQUENCES),
    # DAPO, arXiv 2503.14476: the mean over tokens
    "token_mean": Scheme("token", "tokens", takes=_ITEMS),
    "local_token_mean": Scheme("token", "local_tokens"),
    "token_sum": Scheme("token", "nothing"),
    # Dr. GRPO, arXiv 2503.20783: a constant, no length bias
    "fixed_length": Scheme("fixed", "sequences", takes=_LENGTH + _SEQUENCES, needs=_LENGTH),
    "nonempty_fixed_length": Scheme("fixed", "nonempty", takes=_LENGTH + _SEQUENCES, needs=_LENGTH),
    # the mean over groups (prompts, or rollouts of several samples) of their token means
    "group_mean": Scheme("group", "groups", takes=_GROUPS, needs=_GROUPS),
}

PRESETS: dict[str, str] = {
    "trl:grpo": "sequence_mean",
    "trl:sapo": "sequence_mean",
    "trl:bnpo": "local_token_mean",
    "trl:dr_grpo": "fixed_length",
    "trl:dapo": "token_mean",
    "trl:cispo": "token_mean",
    "trl:vespo": "token_mean",
    "trl:luspo": "sequence_sum",
    "liger:grpo": "sequence_mean",
    "liger:sapo": "sequence_mean",
    "liger:bnpo": "local_token_mean",
    "liger:dr_grpo": "fixed_length",
    "liger:dapo": "token_mean",
    "liger:cispo": "token_mean",
    "liger:vespo": "token_mean",
    "liger:luspo": "sequence_sum",
    "verl:token-mean": "token_mean",
    "verl:token-sum": "token_sum",
    "verl:seq-mean-token-sum": "nonempty_sequence_sum",
    "verl:seq-mean-token-sum-norm": "nonempty_fixed_length",
    "verl:seq-mean-token-mean": "nonempty_sequence_mean",
    "openrlhf:token": "token_mean",
    "openrlhf:sample": "nonempty_sequence_mean",
    "skyrl:token_mean": "token_mean",
    "skyrl:token_mean_legacy": "local_token_mean",
    "skyrl:sequence_mean": "sequence_mean",
    "skyrl:seq_mean_token_sum_norm": "fixed_length",
    "skyrl:prompt_mean": "group_mean",
    "nemo:token_level": "token_mean",
    "nemo:sequence_level": "nonempty_sequence_mean",
    "slime:rollout": "group_mean",
    "slime:per_token": "token_mean",
    "areal:token_mean": "token_mean",
    "prime:tokens": "token_mean",
}


def scheme_named(name: str) -> Scheme:
    """The scheme of a name in SCHEMES or PRESETS; ValueError for any other."""
    check_choice("aggregation", name, (*SCHEMES, *PRESETS))
    return SCHEMES[PRESETS.get(name, name)]


def check_divisors(scheme: Scheme, what: str, given: dict[str, object]) -> None:
    """ValueError for a divisor that `what` would ignore, or that it lacks."""
    for name, value in given.items():
        if value is not None and name not in scheme.takes:
            raise ValueError(f"{name}={value} is not used by {what}")
        if value is None and name in scheme.needs:
            raise ValueError(f"{what} needs {name}")
    for name in ("num_items_in_batch", "num_sequences"):
        count = given.get(name)
        if isinstance(count, Tensor):
            if count.numel() != 1:
                raise ValueError(f"{name} must hold one number, not shape {list(count.shape)}")
        elif count is not None:
            check_number(name, count, lambda x: x >= 0, ">= 0")
    length = given.get("max_completion_length")
    if length is not None:
        check_number("max_completion_length", length, lambda x: x >= 1, ">= 1")


def token_weights(
    mask: Tensor,
    scheme: str = "token_mean",
    *,
    num_items_in_batch: float | Tensor | None = None,
    num_sequences: float | Tensor | None = None,
    max_completion_length: int | None = None,
    group_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The weights w_t of a reduction: loss = sum_t w_t loss_t.

    With n_b counted tokens in sequence b, B sequences, N tokens and P groups in this call:

        sequence_mean  1 / (n_b B)             token_mean        1 / N
        sequence_sum   1 / B                   local_token_mean  1 / N, whatever the accumulation
        fixed_length   1 / (L B)               token_sum         1
        group_mean     1 / (tokens of the group * P)

    B counts fully masked sequences, except in the schemes called nonempty_*. Divisors are at least
    1. The names in `aggregation.PRESETS` ("verl:seq-mean-token-sum", "skyrl:prompt_mean", ...) are
    those of other libraries for the same schemes.

    Accumulation and data parallelism. N becomes `num_items_in_batch` and B `num_sequences` where
    they are given: the sums over all accumulated calls and all ranks. The losses of the calls then
    add up to that of one big batch, with no factor for accumulation; where gradients are averaged
    over W ranks (DDP, FSDP), divide the given number by W (or multiply the loss by W, which verl
    calls dp_size). Where nothing is given, or the scheme has no such number, the loss is this
    call's mean: multiply it by this call's share (its rows over all rows, 1 / (accumulation steps)
    for equal ones), and nothing more for averaged gradients. `token_sum` needs the factor W.

    Args:
        mask: [B, T], or [N] or [1, N] with `cu_seqlens`: boolean or 0/1, what counts.
        scheme: a name in `aggregation.SCHEMES` or `aggregation.PRESETS`.
        num_items_in_batch, num_sequences: numbers or one-element tensors, see above.
        max_completion_length: L, needed by the fixed_length schemes.
        group_ids: [B] integers, the prompt or rollout that each sequence belongs to; needed by
            "group_mean".
        cu_seqlens: [S + 1] bounds of packed sequences.

    Returns:
        fp32 weights in the shape of `mask`, 0 where it is 0; to be given to a loss as they are
        (`token_weights=`), or changed first.

    Raises:
        TypeError, ValueError: unknown scheme, a divisor that it would ignore or lacks, a shape that
            does not fit.
    """
    chosen = scheme_named(scheme)
    check_tensor("mask", mask, None, floating=None)
    counts: dict[str, Any] = {
        "num_items_in_batch": num_items_in_batch,
        "num_sequences": num_sequences,
        "max_completion_length": max_completion_length,
    }
    check_divisors(chosen, f"scheme={scheme!r}", {**counts, "group_ids": group_ids})
    batch = mask_batch(mask, group_ids, cu_seqlens)
    return batch.to_layout(chosen.weights(batch, Divisors(**counts)))
