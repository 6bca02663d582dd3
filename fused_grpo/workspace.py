"""The buffers that the chunks of a pass share, and how large the chunks may be."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fused_grpo.gradients import product_dtype
from fused_grpo.memory import ChunkPlan, Extra, plan_chunks, slices
from fused_grpo.passes import Needs, Reference, Tokens
from fused_grpo.tiles import GROUP, Head, compute_dtype


def plan_pass(
    tokens: Tokens,
    head: Head,
    needs: Needs,
    chunk_bytes: int | None,
    reference: Reference | None = None,
    routed: bool = False,
) -> ChunkPlan:
    """The chunks of a pass; something is kept per vocabulary entry for gradients, and for supports
    that are found in all logits of a token."""
    vocab, width = head.rows, head.weight.shape[1]
    dtype = compute_dtype(tokens.hidden, head.weight)
    stored = 0
    if _keeps_entries(tokens, needs):
        stored = _stored_dtype(tokens, head, needs).itemsize
    if _keeps_deltas(needs, reference):
        stored += dtype.itemsize
    extra = _extra(tokens, reference)._replace(groups=routed)
    n = tokens.index.numel()
    # an adapter's products have r columns where the head's have H
    return plan_chunks(chunk_bytes, vocab, width + head.rank, stored, dtype.itemsize, extra, n)


def _keeps_entries(tokens: Tokens, needs: Needs) -> bool:
    return needs.any_grad or (tokens.support is not None and tokens.support.needs_logits)


def _keeps_deltas(needs: Needs, reference: Reference | None) -> bool:
    return needs.any_grad and needs.kl_grad and reference is not None and reference.full


def _stored_dtype(tokens: Tokens, head: Head, needs: Needs) -> torch.dtype:
    """Softmaxes wait as operands of the products, unless more is made of them, or of the logits."""
    exact = needs.entropy_grad or needs.kl_grad or head.softcap is not None
    if exact or (tokens.support is not None and tokens.support.needs_logits):
        return compute_dtype(tokens.hidden, head.weight)
    return product_dtype(tokens.hidden, head.weight)


def _extra(tokens: Tokens, reference: Reference | None) -> Extra:
    ids = tokens.support.ids if tokens.support is not None else None
    kept = 0 if ids is None else ids.shape[1]
    needs_logits = tokens.support is not None and tokens.support.needs_logits
    width = top_k = 0
    if reference is not None:
        width = reference.head.weight.shape[1]
        top_k = reference.top_k or 0
    return Extra(width, top_k, kept, needs_logits, tokens.support is not None)


class WeightTiles:
    """The weight of a head [V, H], a tile at a time, in the dtype of the logits."""

    def __init__(self, hidden: Tensor, head: Head, tile: int) -> None:
        dtype = compute_dtype(hidden, head.weight)
        self.weight = head.weight
        self._converted = None
        if self.weight.dtype != dtype:
            self._converted = self.weight.new_empty(tile, self.weight.shape[1], dtype=dtype)

    def __call__(self, v: slice) -> Tensor:
        """[v, H]; valid until the next call."""
        if self._converted is None:
            return self.weight[v]
        return self._converted[: v.stop - v.start].copy_(self.weight[v])


@dataclass
class Workspace:
    """Buffers of a pass."""

    tile: int
    weight_tile: WeightTiles
    ref_weight_tile: WeightTiles | None
    exps: list[Tensor] | None  # [c, v] each: the softmaxes of the tiles
    logits: Tensor | None  # [c, V] their memory, where a support is found in all logits first
    groups: Tensor | None  # [c, V / GROUP] sums over `exps`, whose last tile zeros fill up for them
    slabs: Tensor | None  # [c V / GROUP, GROUP] the memory of `exps`, where there are groups
    deltas: Tensor | None  # [c, V] see `ReferenceTiles`

    def rows(self, count: int) -> Workspace:
        """The buffers of a chunk of `count` tokens."""

        def first(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[:count]

        exps = None if self.exps is None else [x[:count] for x in self.exps]
        return replace(
            self,
            exps=exps,
            logits=first(self.logits),
            groups=first(self.groups),
            deltas=first(self.deltas),
        )

    @staticmethod
    def allocate(
        plan: ChunkPlan,
        tokens: Tokens,
        head: Head,
        needs: Needs,
        reference: Reference | None,
        routed: bool = False,
    ) -> Workspace:
        count, vocab = min(tokens.index.numel(), plan.tokens), head.weight.shape[0]
        dtype = compute_dtype(tokens.hidden, head.weight)

        def buffer(width: int, dtype: torch.dtype = dtype) -> Tensor:
            return head.weight.new_empty(count, width, dtype=dtype)

        exps = logits = groups = slabs = deltas = ref_weight_tile = None
        if tokens.support is not None and tokens.support.needs_logits:
            logits = buffer(vocab)
            exps = [logits[:, v] for v in slices(vocab, plan.tile)]
        elif routed:
            groups = buffer(-(-vocab // GROUP))
            slabs = buffer(groups.shape[1] * GROUP, _stored_dtype(tokens, head, needs))
            slabs = slabs.view(-1, GROUP)
            per_tile = -(-plan.tile // GROUP)
            exps = [
                slabs[count * g.start : count * g.stop].view(count, -1)
                for g in slices(groups.shape[1], per_tile)
            ]
            exps[-1].zero_()
        elif _keeps_entries(tokens, needs):
            stored = _stored_dtype(tokens, head, needs)
            exps = [buffer(v.stop - v.start, stored) for v in slices(vocab, plan.tile)]
        if _keeps_deltas(needs, reference):
            deltas = buffer(vocab)
        if reference is not None:
            ref_weight_tile = WeightTiles(reference.tokens.hidden, reference.head, plan.tile)
        weight_tile = WeightTiles(tokens.hidden, head, plan.tile)
        return Workspace(
            plan.tile, weight_tile, ref_weight_tile, exps, logits, groups, slabs, deltas
        )
