"""Process groups of the path: what the ranks must agree on before they wait for each other, the
shard of a vocabulary, and sums over the ranks.

A rank that raises alone leaves the others waiting. So a call with a group starts with one exchange
of a few integers, in which bad arguments are told to all; after it every rank has the same tokens
and options, and whatever raises, raises everywhere.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class VocabShard:
    """The rows [start, start + V_r) of a head of `vocab` rows that this rank of `group` holds."""

    group: dist.ProcessGroup
    rank: int
    start: int
    vocab: int
    largest: int  # rows of the largest shard: the chunks of all ranks are planned for it

    def sum(self, x: Tensor) -> Tensor:
        """x summed over the ranks, in place; the same bits on each."""
        dist.all_reduce(x, group=self.group)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """[W, ...] of every rank's x, in the order of the ranks."""
        return _gather(x, self.group)


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x, group=group)
    return torch.stack(parts)


class _SumOverRanks(torch.autograd.Function):
    """y = sum_r x_r on every rank. A loss that is the sum of the ranks' losses depends on x_r
    through every rank's y: the gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        y = x.clone()
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x summed over the ranks; differentiable, for a loss that is the sum of the ranks' losses."""
    return _SumOverRanks.apply(x, group)


def max_over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    y = x.detach().clone()
    dist.all_reduce(y, dist.ReduceOp.MAX, group=group)
    return y


def join_vocab(
    group: dist.ProcessGroup | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    counts: Tensor | int | None,
    arguments: Mapping[str, Any],
) -> VocabShard | None:
    """This rank's part of a vocabulary whose rows `group` shares in the order of its ranks.

    `arguments` are what else the call was given, by name: options, and tensors over the tokens, of
    which `counts` says which count: a mask, or the target of those that do not. Hidden states must
    be the same on all ranks, too, but that is not checked: they are large.

    Raises, on every rank of the group:
        ValueError: a rank that has no [V_r, H] weight of the others' width and dtype, or other
            tokens or options than they.
    """
    if group is None:
        return None
    check_member("process_group", group)
    matrices = all(isinstance(x, Tensor) and x.dim() >= 1 for x in (hidden, weight))
    rows = weight.shape[0] if matrices and weight.dim() == 2 and weight.shape[1] else 0
    same = {
        "the width of weight [V_r, H]": weight.shape[-1] if matrices else -1,
        "the dtype of weight": _fingerprint(getattr(weight, "dtype", None), None),
        "the shape and dtype of hidden": _shape(hidden),
        "whether there is a bias": int(bias is not None),
        "whether hidden, weight or bias need gradients": _needs_gradients(hidden, weight, bias),
    }
    targets = arguments.get("targets")
    mask = targets != counts if isinstance(counts, int) and isinstance(targets, Tensor) else counts
    same |= {name: _fingerprint(value, mask) for name, value in arguments.items()}
    rows_of = _exchange("process_group", group, same, rows, hidden)
    if not all(rows_of):
        raise ValueError(
            f"weight has {rows_of} rows on the ranks of process_group: each needs a shard "
            "[V_r, H] of at least one row"
        )
    rank = dist.get_rank(group)
    return VocabShard(group, rank, sum(rows_of[:rank]), sum(rows_of), max(rows_of))


def join_sequences(
    group: dist.ProcessGroup | None,
    tokens: Tensor,
    cu_seqlens: Tensor | None,
    arguments: Mapping[str, Any],
) -> dist.ProcessGroup | None:
    """`group`, once its ranks have agreed that they hold parts of the same sequences.

    `arguments`: options, which must be the same, and tensors, of which each rank has its own part.

    Raises, on every rank of the group:
        ValueError: the ranks have other numbers of sequences, options or kinds of tensors.
    """
    if group is None:
        return None
    check_member("sequence_group", group)
    count = -1
    if isinstance(tokens, Tensor) and tokens.dim() > 0:
        count = tokens.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    same = {"the number of sequences": count, "autograd": int(torch.is_grad_enabled())}
    for name, value in arguments.items():
        by_token = name in _PER_TOKEN or getattr(value, "shape", ()) not in ((), (count,))
        part = isinstance(value, Tensor) and by_token
        same[name] = _fingerprint(str(value.dtype) if part else value, None)
    _exchange("sequence_group", group, same, 0, tokens)
    return group


def rank_in(group: dist.ProcessGroup | None) -> int:
    """0 where there is no group."""
    return 0 if group is None else dist.get_rank(group)


def check_member(name: str, group: object) -> None:
    """TypeError or ValueError unless it is a group that this rank is in."""
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"{name} must be a torch.distributed.ProcessGroup that this rank is in, not "
            f"{type(group).__name__}"
        )
    if dist.get_rank(group) < 0:
        raise ValueError(f"{name}: rank {dist.get_rank()} is not in this group")


def _exchange(
    what: str, group: dist.ProcessGroup, same: Mapping[str, int], own: int, like: Tensor
) -> list[int]:
    """Every rank's `own` number, once `same` is the same on all of them."""
    names = list(same)
    # names first: a rank with other names would not know which number is which
    head = [zlib.crc32(repr(names).encode()), len(names), own]
    device = like.device if isinstance(like, Tensor) else torch.device("cpu")
    size = max(_CAPACITY, len(names) + len(head))
    numbers = [*head, *same.values()]
    facts = torch.tensor([*numbers, *[0] * (size - len(numbers))], device=device)
    ranks = _gather(facts, group).tolist()
    if len({row[0] for row in ranks}) > 1:
        raise ValueError(f"{what}: its ranks were not given the same arguments")
    for i, name in enumerate(names, len(head)):
        values = [row[i] for row in ranks]
        if len(set(values)) > 1:
            shown = values if name.startswith(("the width", "the number")) else "not the same"
            raise ValueError(f"{name} is {shown} on the ranks of {what}: it must be one and same")
    return [row[2] for row in ranks]


_PER_TOKEN = (
    "old_per_token_logps",
    "ref_per_token_logps",
    "sampling_per_token_logps",
    "token_weights",
)
_CAPACITY = 160  # integers of an exchange: the same number whatever the ranks were given


def _needs_gradients(*tensors: Tensor | None) -> int:
    if not torch.is_grad_enabled():
        return 0
    return sum((getattr(x, "requires_grad", False) is True) << i for i, x in enumerate(tensors))


def _shape(x: object) -> int:
    shown = (tuple(x.shape), str(x.dtype)) if isinstance(x, Tensor) else type(x).__name__
    return zlib.crc32(repr(shown).encode())


def _fingerprint(value: object, mask: object) -> int:
    """An integer that other values hardly share; of a tensor, of its values where `mask` counts."""
    if not isinstance(value, Tensor):
        return zlib.crc32(repr(value).encode())
    x = value.detach()
    if isinstance(mask, Tensor) and mask.shape == x.shape and mask.device == x.device:
        x = torch.where(mask != 0, x, torch.zeros_like(x))
    x = x.to(torch.int64) if not x.is_floating_point() else x.double().view(torch.int64)
    x = x.reshape(-1)
    weights = torch.arange(1, x.numel() + 1, device=x.device).mul_(0x9E3779B97F4A7C1)
    # odd multipliers, and a shift that brings the high bits, which hold fp64's digits, down
    mixed = ((x ^ (x >> 29)) * (weights | 1)).sum()
    return int(mixed) ^ _shape(value)
