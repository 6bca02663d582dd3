"""The torch backend: one pass over a linear head, by chunks of tokens and tiles of vocabulary.

For each chunk the logits are computed in fp32, tile by tile; each tile becomes a softmax of its
own, and a few numbers per token say what share of the whole it has. They give log-probabilities
and entropies. Once the caller has said how much each token counts, the tiles, kept for this chunk
only, give both gradients by plain matrix products: with P_j the factor between a tile's softmax q
and the true one,

    p_v = P_j q_v for v in tile j            dh = sum_j (-g P_j) (q_j @ W_j) + g (1 - p_y) W_y

The target is left out of the tiles and added apart, which keeps confident tokens exact: with
d = logsumexp(others) - z_y,

    logp = -log(1 + e^d)                     1 - p_y = sigmoid(d)

No difference of two nearly equal numbers appears, and logp <= 0.

A reference head, where there is one, goes through the same tiles beside the policy's
(`divergence`), and a sampling support leaves entries out before anything is made of them
(`support`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fused_grpo.divergence import ReferenceTiles
from fused_grpo.exponentials import applies, exponentials
from fused_grpo.gradients import Chunk, add_gradients
from fused_grpo.memory import slices
from fused_grpo.passes import (
    Coefficients,
    HeadResult,
    Needs,
    Reference,
    Tokens,
    TokenValues,
)
from fused_grpo.statistics import STATISTICS, WatchedTiles
from fused_grpo.tiles import (
    Head,
    LogitTiles,
    TileSums,
    add_up_groups,
    compute_dtype,
    one_softmax,
    row_statistics,
    tile_softmax,
)
from fused_grpo.vocab_parallel import shard_statistics
from fused_grpo.workspace import Workspace, plan_pass

_REDONE = 32  # rows at a time that `exponentials` leaves: their tiles need memory of their own


def head_pass(
    tokens: Tokens,
    head: Head,
    needs: Needs,
    coefficients: Coefficients | None,
    chunk_bytes: int | None,
    reference: Reference | None = None,
    compact: bool = True,
) -> HeadResult:
    """Log-probabilities (and what else is asked for) of all tokens; with `coefficients`, the
    gradients of sum_t g_t logp_t + e_t entropy_t + k_t kl_t in the same pass.

    Tokens that send nothing back are always left out: `compact` is for backends that need not.

    Matmul work: 2NHV without coefficients, 6NHV with both gradients, 4NHV with one of them, and
    2NH_rV for a reference.
    """
    if coefficients is None:
        needs = Needs(entropy=needs.entropy, statistics=needs.statistics)
    result = empty_result(tokens, head, needs, reference)
    plan = plan_pass(tokens, head, needs, chunk_bytes, reference)
    work = Workspace.allocate(plan, tokens, head, needs, reference)
    with torch.no_grad(), torch.autocast(tokens.hidden.device.type, enabled=False):
        for span in slices(tokens.index.numel(), plan.tokens):
            chunk, values = forward_chunk(tokens, head, needs, span, work, reference)
            result.write(span, values)
            if coefficients is not None:
                upstream = coefficients(span, values)
                add_gradients(chunk, upstream, head, work.tile, work.weight_tile, result)
    if result.weight_grad is not None:
        if not result.weight_grad_written:
            result.weight_grad.zero_()
        result.weight_grad = result.weight_grad.to(head.weight.dtype)
    if result.bias_grad is not None and head.bias is not None:
        result.bias_grad = result.bias_grad.to(head.bias.dtype)
    if result.lora_weight_grad is not None and head.lora_weight is not None:
        result.lora_weight_grad = result.lora_weight_grad.to(head.lora_weight.dtype)
    return result


def empty_result(
    tokens: Tokens, head: Head, needs: Needs, reference: Reference | None
) -> HeadResult:
    hidden, n = tokens.hidden, tokens.index.numel()
    dtype = compute_dtype(hidden, head.weight)

    def values(wanted: bool, dtype: torch.dtype = dtype) -> Tensor | None:
        return torch.empty(n, dtype=dtype, device=hidden.device) if wanted else None

    def zeros(like: Tensor | None, wanted: bool, as_dtype: torch.dtype) -> Tensor | None:
        if like is None or not wanted:
            return None
        return torch.zeros(like.shape, dtype=as_dtype, device=like.device)

    return HeadResult(
        logps=torch.empty(n, dtype=dtype, device=hidden.device),
        entropy=values(needs.entropy),
        ref_logps=values(reference is not None),
        kl=values(reference is not None and reference.kl),
        support_size=values(tokens.support is not None, torch.int64),
        outside=values(tokens.support is not None, torch.bool),
        statistics=torch.empty(n, len(STATISTICS), dtype=dtype, device=hidden.device)
        if needs.statistics
        else None,
        hidden_grad=zeros(hidden, needs.hidden_grad, hidden.dtype),
        # written by the first chunk that has a share in it
        weight_grad=torch.empty_like(head.weight, dtype=dtype) if needs.weight_grad else None,
        bias_grad=zeros(head.bias, needs.bias_grad, dtype),
        lora_hidden_grad=None
        if tokens.lora_hidden is None
        else zeros(tokens.lora_hidden, needs.lora_hidden_grad, tokens.lora_hidden.dtype),
        lora_weight_grad=zeros(head.lora_weight, needs.lora_weight_grad, dtype),
    )


def forward_chunk(
    tokens: Tokens,
    head: Head,
    needs: Needs,
    span: slice,
    work: Workspace,
    reference: Reference | None,
) -> tuple[Chunk, TokenValues]:
    """A chunk up to its values; fills the buffers of `work`."""
    rows, lora_rows = tokens.rows(span), tokens.lora_rows(span)
    target = head.local(tokens.target[span])
    temperature = tokens.temperatures(span, compute_dtype(rows, head.weight))
    work = work.rows(len(rows))
    logits = LogitTiles(rows, temperature, head, work.weight_tile, lora_rows)
    beside = None if reference is None else _reference_tiles(reference, span, work)
    watched = None
    if needs.statistics:
        logits = watched = WatchedTiles(logits, target)
    plain = tokens.support is None and beside is None and watched is None and head.shard is None
    within = None
    if plain and applies(rows, head, tokens.temperature, needs.entropy):
        sums = _exponentials(logits, rows, target, work)
    else:
        support = None if tokens.support is None else tokens.support[span]
        sums, within = tile_softmax(
            logits,
            target,
            work.tile,
            work.exps,
            needs.entropy,
            support,
            beside,
            work.groups,
            work.logits,
        )
    stats = row_statistics(sums) if head.shard is None else shard_statistics(sums, head.shard)
    values, divergence = TokenValues(stats.logps, stats.entropy), None
    if watched is not None:
        values.statistics = watched.statistics
    if within is not None:
        values = replace(
            values, support_size=within.size, outside=within.lacks(target, sums.z_target)
        )
    if beside is not None:
        values.ref_logps, divergence = beside.finish(sums, stats)
        values.kl = None if divergence is None else divergence.kl
    chunk = Chunk(
        rows,
        tokens.index[span],
        target,
        temperature,
        sums,
        stats,
        divergence,
        work.exps,
        work.deltas,
        lora_rows,
    )
    return chunk, values


def _exponentials(logits: LogitTiles, rows: Tensor, target: Tensor, work: Workspace) -> TileSums:
    """`exponentials`, with the rows that are out of its range computed by `tile_softmax`."""
    tile, exps = work.tile, work.exps
    sums, groups, bad = exponentials(logits, rows, target, tile, exps)
    if bool(bad.all()):
        return tile_softmax(logits, target, tile, exps, False, groups=work.groups)[0]
    if work.groups is not None:
        work.groups.copy_(groups)
    for some in bad.nonzero().squeeze(1).split(_REDONE):
        buffers = None
        if exps is not None:
            buffers = [logits.x.new_zeros(len(some), q.shape[1]) for q in exps]
        of_tiles, _ = tile_softmax(logits.select(some), target[some], tile, buffers, False)
        merged, shares = one_softmax(of_tiles)
        for name in ("top", "mass", "q_top", "z_target"):
            getattr(sums, name)[some] = getattr(merged, name)
        for j, q in enumerate(buffers or ()):
            q.mul_(shares[:, j, None])
            assert exps is not None
            exps[j][some] = q.to(exps[j].dtype)
            if work.groups is not None:
                add_up_groups(q, j * tile, groups[: len(some)])
        if work.groups is not None:
            work.groups[some] = groups[: len(some)]
    return sums


def _reference_tiles(reference: Reference, span: slice, work: Workspace) -> ReferenceTiles:
    tokens, head = reference.tokens, reference.head
    rows = tokens.rows(span)
    assert work.ref_weight_tile is not None
    temperature = tokens.temperatures(span, compute_dtype(rows, head.weight))
    logits = LogitTiles(rows, temperature, head, work.ref_weight_tile)
    return ReferenceTiles(logits, full=reference.full, top_k=reference.top_k, deltas=work.deltas)
