"""Caller's tensors -> flat tokens: the ones that count, one layout for padded and packed input."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fused_grpo.checks import check_tensor
from fused_grpo.groups import sum_over_ranks
from fused_grpo.ratios import Sequences

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class TokenBatch:
    """The n counted tokens, flat, sequence after sequence."""

    index: Tensor  # [n] int64, positions in the flattened ids
    target: Tensor  # [n] int64
    sequence: Tensor  # [n] int64, which of the S sequences
    advantages: Tensor  # [n]
    old: Tensor | None  # [n] log-probs of the sampling policy; None: this policy, detached
    ref: Tensor | None  # [n] log-probs of the reference policy
    weight_is: Tensor | None  # [n] importance weights on the policy term
    lengths: Tensor  # [S] int64, counted tokens of each sequence
    shape: torch.Size  # of the caller's ids
    sampler: Tensor | None = None  # [n] log-probs as the sampler reported them, NaN where unknown
    token_weights: Tensor | None = None  # [n] the caller's w_t, in the place of a scheme's
    entropy_scale: Tensor | None = None  # [n] factors on the tokens' entropy bonus
    group_ids: Tensor | None = None  # [S] int64, which prompt or rollout a sequence belongs to
    keep: Tensor | None = None  # [n] bool, false where a correction rejects a token
    # With a fixed capacity every position is a token, and zeros stand where it does not count.
    counted: Tensor | None = None  # [n] bool; None: all
    spans: Tensor | None = None  # [S] int64, tokens of each sequence, counted or not
    # Where ranks hold parts of the same sequences:
    group: ProcessGroup | None = None
    totals: Tensor | None = None  # [S] int64, counted tokens of each sequence on all ranks

    @property
    def sequences(self) -> Sequences:
        """Where the sequences stand in vectors [n]."""
        here = self.lengths if self.spans is None else self.spans
        return Sequences(self.sequence, here, self.whole_lengths, self.group)

    @property
    def whole_lengths(self) -> Tensor:
        """[S] int64, counted tokens of each sequence, wherever they are."""
        return self.lengths if self.totals is None else self.totals

    @property
    def whole_count(self) -> int | Tensor:
        """How many tokens of these sequences count, wherever they are."""
        return self.count if self.totals is None else self.totals.sum()

    @property
    def count(self) -> int | Tensor:
        """How many tokens count; 0-d int64 with a fixed capacity."""
        return self.index.numel() if self.counted is None else self.lengths.sum()

    def select(self, values: Tensor) -> Tensor:
        """[n] values, 0 where a token does not count."""
        return values if self.counted is None else torch.where(self.counted, values, 0)

    def __getitem__(self, span: slice) -> TokenBatch:
        """The tokens of a span; what belongs to sequences stays that of all of them."""
        per_token = {
            f.name: value[span]
            for f in fields(self)
            if f.name not in _NOT_PER_TOKEN and (value := getattr(self, f.name)) is not None
        }
        return replace(self, **per_token)

    def to_layout(self, values: Tensor) -> Tensor:
        """[n] -> the shape of the caller's ids, 0 where a token does not count; differentiable."""
        flat = values.new_zeros(self.shape.numel())
        return flat.index_copy(0, self.index, self.select(values)).view(self.shape)


_NOT_PER_TOKEN = ("lengths", "shape", "group_ids", "spans", "group", "totals")


def make_batch(
    tokens: Tensor,
    advantages: Tensor,
    *,
    completion_mask: Tensor | None = None,
    old_per_token_logps: Tensor | None = None,
    ref_per_token_logps: Tensor | None = None,
    sampling_per_token_logps: Tensor | None = None,
    importance_sampling_ratio: Tensor | None = None,
    token_weights: Tensor | None = None,
    entropy_scale: Tensor | None = None,
    group_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dtype: torch.dtype,
    compact: bool = True,
    group: ProcessGroup | None = None,
) -> TokenBatch:
    """Checks shapes, dtypes and devices, then selects the counted tokens.

    `tokens` are the completion's ids, or anything else in their layout: [B, T], or [N] or [1, N]
    with `cu_seqlens` [S + 1]. `dtype` is that of all per-token floats (fp32, or fp64 for fp64
    hidden states). The ranks of `group` hold parts of the same sequences. Without `compact` every
    position becomes a token, so that shapes do not depend on the mask and the host never waits.
    """
    ids_shape, device = tokens.shape, tokens.device
    num_sequences, sequence = _sequences(ids_shape, cu_seqlens, device, check=compact)
    # who shares sequences takes part in collectives, which an error on one rank would leave waiting
    check = compact and group is None
    layout = _Layout(ids_shape, num_sequences, sequence, cu_seqlens is not None, device, check)
    counted = _mask(completion_mask, ids_shape, device)
    index = positions(counted, compact)

    def pick(values: Tensor) -> Tensor:
        return values[index] if compact else torch.where(counted, values, 0)

    def floats(name: str, value: Tensor | None, per_sequence: bool = False) -> Tensor | None:
        if value is None:
            return None
        return pick(layout.per_token(name, value, per_sequence).to(dtype))

    flat_advantages = floats("advantages", advantages, per_sequence=True)
    assert flat_advantages is not None
    lengths = _lengths(sequence, counted, num_sequences)
    batch = TokenBatch(
        index=index,
        target=pick(tokens.detach().reshape(-1)).long(),
        sequence=sequence[index],
        advantages=flat_advantages,
        old=floats("old_per_token_logps", old_per_token_logps),
        ref=floats("ref_per_token_logps", ref_per_token_logps),
        weight_is=floats("importance_sampling_ratio", importance_sampling_ratio, per_sequence=True),
        lengths=lengths,
        shape=ids_shape,
        sampler=floats("sampling_per_token_logps", sampling_per_token_logps),
        token_weights=floats("token_weights", token_weights),
        entropy_scale=floats("entropy_scale", entropy_scale, per_sequence=True),
        group_ids=_group_ids(group_ids, num_sequences, device),
        group=group,
        totals=None if group is None else sum_over_ranks(lengths, group),
    )
    if compact:
        return batch
    everything = torch.ones_like(counted)
    return replace(batch, counted=counted, spans=_lengths(sequence, everything, num_sequences))


def mask_batch(
    mask: Tensor,
    group_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    group: ProcessGroup | None = None,
) -> TokenBatch:
    """`make_batch` of a mask alone, for what weighs tokens."""
    return make_batch(
        torch.zeros_like(mask, dtype=torch.long),
        torch.zeros(mask.shape, dtype=torch.float32, device=mask.device),
        completion_mask=mask,
        group_ids=group_ids,
        cu_seqlens=cu_seqlens,
        dtype=torch.float32,
        group=group,
    )


def positions(counted: Tensor, compact: bool) -> Tensor:
    """[n] the tokens' positions: of those that count, or all."""
    if compact:
        return counted.nonzero().squeeze(1)
    return torch.arange(counted.numel(), device=counted.device)


def _lengths(sequence: Tensor, counted: Tensor, num_sequences: int) -> Tensor:
    """[S] counted positions of each sequence; `sequence` ascends."""
    bounds = torch.searchsorted(sequence, torch.arange(num_sequences + 1, device=sequence.device))
    total = torch.cat([counted.new_zeros(1, dtype=torch.int64), counted.cumsum(0)])
    return total[bounds].diff()


def _group_ids(group_ids: Tensor | None, num_sequences: int, device: torch.device) -> Tensor | None:
    if group_ids is None:
        return None
    check_tensor("group_ids", group_ids, device, floating=False)
    if group_ids.shape != (num_sequences,):
        raise ValueError(
            f"group_ids has shape {list(group_ids.shape)}; it must be [{num_sequences}], one per "
            "sequence"
        )
    return group_ids.detach().long()


@dataclass(frozen=True)
class _Layout:
    shape: torch.Size
    num_sequences: int
    sequence: Tensor  # [N] sequence of every position, counted or not
    packed: bool
    device: torch.device
    check: bool  # whether a vector of either kind is an error

    @property
    def _ambiguous(self) -> bool:
        """Whether a vector could be one per sequence or one per token, and it matters which."""
        n, s = self.sequence.numel(), self.num_sequences
        if not self.packed or n != s:
            return False
        return not torch.equal(self.sequence, torch.arange(s, device=self.device))

    def per_token(self, name: str, value: Tensor, per_sequence: bool) -> Tensor:
        """Flattens a per-token value, or spreads a per-sequence one, to [N]; detached."""
        check_tensor(name, value, self.device, floating=True)
        value = value.detach()
        s = self.num_sequences
        if per_sequence and value.shape in ((s,), (s, 1)):
            if value.dim() == 1 and self.check and self._ambiguous:
                raise ValueError(
                    f"{name} has shape [{s}], and there are {s} tokens in {s} sequences, not one "
                    f"in each: give [{s}, 1], one per sequence, or [1, {s}], one per token"
                )
            return value.reshape(-1)[self.sequence]
        if value.shape == self.shape or (
            self.packed and value.squeeze(0).shape == self.sequence.shape
        ):
            return value.reshape(-1)
        fits = f"{list(self.shape)}" + (f", [{s}] or [{s}, 1]" if per_sequence else "")
        raise ValueError(
            f"{name} has shape {list(value.shape)}; with completion_ids {list(self.shape)} and "
            f"{s} sequences it must be {fits}"
        )


def _sequences(
    shape: torch.Size, cu_seqlens: Tensor | None, device: torch.device, check: bool
) -> tuple[int, Tensor]:
    if cu_seqlens is None:
        if len(shape) != 2:
            raise ValueError(
                f"completion_ids has shape {list(shape)}: give [B, T], or [N] with cu_seqlens"
            )
        return shape[0], torch.arange(shape[0], device=device).repeat_interleave(shape[1])
    if len(shape) == 2 and shape[0] != 1:
        raise ValueError(
            f"with cu_seqlens, completion_ids must be [N] or [1, N], not {list(shape)}"
        )
    check_tensor("cu_seqlens", cu_seqlens, None, floating=False)
    n = shape.numel()
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise ValueError(f"cu_seqlens must be [S + 1] with S >= 1, not {list(cu_seqlens.shape)}")
    if not check:
        ends = cu_seqlens[1:].to(device=device, dtype=torch.int64)
        sequence = torch.searchsorted(ends, torch.arange(n, device=device), right=True)
        return ends.numel(), sequence.clamp(max=ends.numel() - 1)
    bounds = cu_seqlens.to(device="cpu", dtype=torch.int64)
    lengths = bounds.diff()
    if bounds[0] != 0 or bounds[-1] != n or (lengths < 0).any():
        raise ValueError(
            f"cu_seqlens must rise from 0 to the {n} positions of completion_ids, not go from "
            f"{int(bounds[0])} to {int(bounds[-1])} in steps of {int(lengths.min())} and more"
        )
    return lengths.numel(), torch.repeat_interleave(lengths).to(device)


def _mask(mask: Tensor | None, shape: torch.Size, device: torch.device) -> Tensor:
    """[N] bool. A mask says what counts; it is never guessed from token ids."""
    if mask is None:
        return torch.ones(shape.numel(), dtype=torch.bool, device=device)
    check_tensor("completion_mask", mask, device, floating=None)
    if mask.shape != shape and not (mask.numel() == shape.numel() and mask.squeeze(0).dim() == 1):
        raise ValueError(
            f"completion_mask has shape {list(mask.shape)}, completion_ids has {list(shape)}; "
            "they must be the same"
        )
    flat = mask.reshape(-1)
    if flat.dtype != torch.bool and device.type == "cpu" and not ((flat == 0) | (flat == 1)).all():
        raise ValueError(
            "completion_mask must be boolean or hold only 0 and 1; weigh tokens elsewhere"
        )
    return flat != 0
