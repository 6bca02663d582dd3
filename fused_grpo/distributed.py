"""The loss under data parallelism: whole weights from sharded ones, and weights of tokens that make
averaged gradients those of one process.

What ranks share inside a call of the loss (`process_group`, `sequence_group`) is in `groups`.
docs/integrations.md has the table: what is sharded, and what to call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fused_grpo.aggregation import PER, Divisors, Scheme, check_divisors, scheme_named
from fused_grpo.batch import TokenBatch, mask_batch
from fused_grpo.groups import check_member


def full_weight(weight: Tensor, *, average: bool = True) -> Tensor:
    """The whole of a sharded parameter, to be given to `grpo_loss` or `linear_logprobs`.

    * A DTensor (FSDP2, `fully_shard`): gathered now; its gradient is summed over the ranks and
      scattered, so that the parameter gets a DTensor laid out as itself.
    * A parameter that DeepSpeed's ZeRO-3 has partitioned: gathered now and partitioned again, the
      result keeping the gathered copy for as long as it lives; gathered once more in the backward,
      for autograd adds a gradient only to a parameter of its shape, and partitioned at its end.
      DeepSpeed's own hooks reduce the gradient.
    * Any other tensor: itself. Inside the forward of a module that FSDP wraps, its parameters are
      whole already.

    One collective here and one in the backward, whatever tokens a rank has: every rank must come
    to both.

    Args:
        weight: the parameter, or a bias.
        average: divide a DTensor's gradient by the number of ranks, as FSDP does with those of the
            other parameters. False: the sum.

    Raises:
        TypeError: not a tensor.
        ValueError: a ZeRO-3 parameter that is in flight (being prefetched).
    """
    if not isinstance(weight, Tensor):
        raise TypeError(f"weight must be a torch.Tensor, not {type(weight).__name__}")
    if hasattr(weight, "ds_id"):
        release = _gather_zero(weight)
        whole = _WholeOfZero.apply(weight)
        release()
        return whole
    if not hasattr(weight, "full_tensor"):
        return weight
    from torch.distributed.tensor import Partial

    mesh: Any = weight.device_mesh  # type: ignore[attr-defined]
    whole = weight.full_tensor(grad_placements=[Partial()] * mesh.ndim)
    return _ScaledGradient.apply(whole, 1 / mesh.size()) if average else whole


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class _WholeOfZero(torch.autograd.Function):
    """A gathered ZeRO-3 parameter as a tensor that outlives the partitioning of the parameter."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        ctx.parameter = parameter
        return parameter.data

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        release = _gather_zero(ctx.parameter)
        # after the gradient has been added, and DeepSpeed's hook on that has reduced it
        engine: Any = torch.autograd.Variable
        engine._execution_engine.queue_callback(release)
        return gradient


def _gather_zero(parameter: Any) -> Callable[[], None]:
    """Makes a ZeRO-3 parameter whole; what undoes it, where it was not whole before."""
    status = parameter.ds_status.name
    if status == "AVAILABLE":
        return lambda: None
    if status != "NOT_AVAILABLE":
        raise ValueError(
            f"weight is a ZeRO-3 parameter that is {status}: let the prefetch end, or gather it "
            "with deepspeed.zero.GatheredParameters"
        )
    parameter.all_gather(param_list=[parameter])

    def release() -> None:
        if parameter.ds_status.name == "AVAILABLE":
            parameter.partition(param_list=[parameter], has_been_updated=False)

    return release


def union_token_weights(
    mask: Tensor,
    scheme: str = "token_mean",
    *,
    group: dist.ProcessGroup | None = None,
    sequence_group: dist.ProcessGroup | None = None,
    averaged: bool = True,
    max_completion_length: int | None = None,
    group_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """`token_weights` over the batches of all ranks, for `grpo_loss(token_weights=)`.

    The ranks' losses are then W times their shares, and gradients averaged over the W ranks are
    those of one process that has all the data, for every scheme: with uneven token counts, ranks
    without a token, and prompts whose samples lie on several ranks. For accumulated calls give the
    mask of all of them and cut the result: their losses add up, with no factor.

    Args:
        mask: [B, T], or [N] or [1, N] with `cu_seqlens`: this rank's, boolean or 0/1. B may differ
            between ranks.
        scheme: a name in `aggregation.SCHEMES` or `aggregation.PRESETS`. "local_token_mean" is
            "token_mean" here: one process would make one call.
        group: the ranks whose gradients are averaged, those that share sequences among them. None:
            all.
        sequence_group: as in `grpo_loss`; its sequences are counted once.
        averaged: False for gradients that are summed: without the factor W.
        max_completion_length, group_ids, cu_seqlens: as in `token_weights`; group ids are global.

    Returns:
        fp32 weights in the shape of `mask`.

    Raises:
        TypeError, ValueError: as `token_weights`.
    """
    chosen = scheme_named(scheme)
    given: dict[str, object] = {"max_completion_length": max_completion_length}
    given["group_ids"] = group_ids
    check_divisors(chosen, f"scheme={scheme!r}", given)
    group = dist.group.WORLD if group is None else group
    for name, value in (("group", group), ("sequence_group", sequence_group)):
        if value is not None or name == "group":
            check_member(name, value)
    batch = mask_batch(mask, group_ids, cu_seqlens, sequence_group)
    assert group is not None
    divisor = _union_divisor(chosen, batch, group, Divisors(None, None, max_completion_length))
    factor = dist.get_world_size(group) if averaged else 1
    weights = (factor / divisor.clamp_min(1)).to(torch.float32)
    return batch.to_layout(weights.expand(batch.index.shape))


def _union_divisor(
    scheme: Scheme, batch: TokenBatch, group: dist.ProcessGroup, given: Divisors
) -> Tensor:
    """[n] or 0-d, fp64 but for devices without."""
    sharers = 1 if batch.group is None else dist.get_world_size(batch.group)
    lengths = batch.whole_lengths
    if scheme.per == "group":
        tokens, groups = _group_tokens(batch, group)
        return tokens[batch.sequence] * groups / sharers
    wide = torch.float32 if lengths.device.type == "mps" else torch.float64
    local = [lengths.sum() / sharers, lengths.new_tensor(lengths.numel()) / sharers]
    counts = torch.stack([*local, (lengths > 0).sum() / sharers]).to(wide)
    dist.all_reduce(counts, group=group)
    tokens, sequences, nonempty = counts.unbind()
    over = {"tokens": tokens, "local_tokens": tokens, "sequences": sequences, "nonempty": nonempty}
    per = torch.as_tensor(PER[scheme.per](batch, given), dtype=wide, device=lengths.device)
    return per * over.get(scheme.over, torch.ones_like(tokens))


def _group_tokens(batch: TokenBatch, group: dist.ProcessGroup) -> tuple[Tensor, int]:
    """([S] counted tokens of each sequence's group, once for every sharer; how many groups)."""
    assert batch.group_ids is not None
    own = list(zip(batch.group_ids.tolist(), batch.whole_lengths.tolist(), strict=True))
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, own, group=group)
    totals: dict[int, int] = {}
    for name, length in (pair for part in parts for pair in part):
        totals[name] = totals.get(name, 0) + length
    tokens = [totals[name] for name, _ in own]
    return batch.whole_lengths.new_tensor(tokens, dtype=torch.float32), len(totals)
