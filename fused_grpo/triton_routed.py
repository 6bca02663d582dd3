"""The routed backward by kernels: whole tiles of the vocabulary are kept, see `routed`.

The forward stores no exponentials, only its sums of each (token, tile of 128 entries): the exact
masses S of the tiles, once the token's sum is known. A pair stays with probability
q = min(1, S / tau) and then counts 1 / q; the target's tile always stays. Once dL/dlogp is known
the logits of the kept pairs are computed again, and grouped products give both gradients: 2NHV and
6 x 128 H for each pair, instead of 6NHV.

A pair is one tile of the statistics, not two, which would multiply 1.2 to 1.7 times as much for the
same error (docs/kernels.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fused_grpo.chunked import empty_result
from fused_grpo.memory import GPU_CHUNK_BYTES, plan_triton, slices
from fused_grpo.passes import (
    Coefficients,
    HeadResult,
    Needs,
    Reference,
    Tokens,
    TokenValues,
    Upstream,
    select_rows,
    with_gradients,
)
from fused_grpo.routed import Route
from fused_grpo.tiles import Head
from fused_grpo.triton_backend import (
    Chunk,
    Kinds,
    Workspace,
    add_gradients,
    forward_chunk,
    head_pass,
)
from fused_grpo_kernels import pairs as kernels
from fused_grpo_kernels import routed as selection
from fused_grpo_kernels.registry import target_of
from fused_grpo_kernels.types import Epilogue, RowStats

# A pair's share of grouped products runs at about half the rate of a dense one (estimated), and
# the exact path computes the logits of its tokens once more.
_DENSE_SHARE = 0.25
# Vocabulary entries and rows of torch's products, where it makes them: fixed, so that a token's
# masses have the same bits in every chunk.
_TILE, _ROWS, _INTERPRETED_ROWS = 4096, 128, 16


def routed_pass(
    tokens: Tokens,
    head: Head,
    needs: Needs,
    coefficients: Coefficients | None,
    chunk_bytes: int | None,
    route: Route,
    reference: Reference | None = None,
) -> tuple[HeadResult, Pending]:
    """`routed.routed_pass` by kernels. `HeadResult.routing` [n, 3] has of each token the entries of
    its kept tiles (at most V - 1; V where it takes the exact path), and the variance and the sum of
    squares of its tiles' masses, each tile taken as one entry.

    Matmul work: 2NHV and that of the pairs, 4NHV with an exact dW, for which `coefficients` must be
    given.
    """
    assert reference is None
    assert tokens.support is None
    assert tokens.counted is None
    n = tokens.index.numel()
    result = empty_result(tokens, head, Needs(entropy=needs.entropy), None)
    routing = result.routing = result.logps.new_zeros(n, 3)
    state = Pending.empty(tokens, head, needs, route, chunk_bytes)
    if n:
        with torch.no_grad(), torch.autocast(tokens.hidden.device.type, enabled=False):
            _forward(state, result, routing, tokens, head, needs, coefficients)
    if coefficients is None:
        return result, state
    upstream = Upstream(state.g, state.e if state.has_e else None)
    return with_gradients(result, state.gradients(tokens, head, needs, result, upstream)), state


def _forward(
    state: Pending,
    result: HeadResult,
    routing: Tensor,
    tokens: Tokens,
    head: Head,
    needs: Needs,
    coefficients: Coefficients | None,
) -> None:
    n, route = tokens.index.numel(), state.route
    exact = state.exact_weight
    stored = Needs() if exact is None else needs
    kinds = Kinds.of(tokens.hidden, head.weight, stored.any_grad)
    device = tokens.hidden.device
    rows = _INTERPRETED_ROWS if device.type == "cpu" else _ROWS
    count = min(n + -n % rows, _chunk_tokens(state.chunk_bytes, head, kinds, rows, device))
    tokens, keys = tokens.padded(n + -n % rows), route.keys
    keys = torch.cat([keys, keys.new_zeros(len(tokens.index) - n)])
    work = Workspace.allocate(count, min(_TILE, head.weight.shape[0]), tokens, head, stored)
    work.rows = rows
    for span in slices(len(tokens.index), count):
        real = slice(span.start, min(span.stop, n))
        chunk, values = forward_chunk(tokens, needs.entropy, span, work)
        values = select_rows(values, slice(real.stop - real.start))
        result.write(real, values)
        live, upstream = torch.arange(span.start, span.stop, device=device) < n, None
        if coefficients is not None:
            upstream = coefficients(real, values).filled(len(live))
            live &= state.take(span, upstream, chunk.per_row.logps)
        routing[real] = state.select(real, chunk, keys[span], live, head)
        if exact is not None and upstream is not None:
            add_gradients(chunk, upstream, work, exact, compact=True)


def _chunk_tokens(
    chunk_bytes: int | None, head: Head, kinds: Kinds, rows: int, device: torch.device
) -> int:
    plan = plan_triton(
        chunk_bytes,
        *head.weight.shape,
        kept=kinds.kept_bytes,
        operand=kinds.operand.itemsize,
        converts=kinds.converts,
        on_gpu=device.type != "cpu",
    )
    return max(rows, plan.tokens - plan.tokens % rows)


@dataclass
class Pending:
    """The kept pairs of all tokens, until dL/dlogp is known, and what their gradients need."""

    route: Route
    chunk_bytes: int | None
    run_pairs: int  # pairs whose shares of dh are formed at a time
    rows: RowStats  # of the tokens [n]
    factor: Tensor  # [n], of `Epilogue`
    dense: Tensor  # [n] tokens that take the exact path
    g: Tensor  # [n] dL/dlogp and
    e: Tensor  # [n] dL/dentropy, where they are known during the pass
    exact_weight: HeadResult | None  # dW and db, where they are dense
    parts: list[selection.Pairs]
    tile: int = 0
    has_e: bool = False

    @staticmethod
    def empty(
        tokens: Tokens, head: Head, needs: Needs, route: Route, chunk_bytes: int | None
    ) -> Pending:
        n, width = tokens.index.numel(), head.weight.shape[1]
        floats = torch.zeros(9, n, dtype=torch.float32, device=tokens.hidden.device)
        logps, one_minus_p, largest, shift, z_target, entropy, factor, g, e = floats.unbind()
        rows = RowStats(
            logps, one_minus_p, largest, shift, z_target, entropy if needs.entropy else None
        )
        dense = torch.zeros(n, dtype=torch.bool, device=tokens.hidden.device)
        exact = None
        if route.dense_weight_grad(needs):
            exact = empty_result(tokens, head, replace(needs, hidden_grad=False), None)
            if exact.weight_grad is not None:
                exact.weight_grad.zero_()
        run = (chunk_bytes or GPU_CHUNK_BYTES) // 4 // (4 * width)
        return Pending(route, chunk_bytes, run, rows, factor, dense, g, e, exact, [])

    def take(self, span: slice, upstream: Upstream, logps: Tensor) -> Tensor:
        """Notes dL/dlogp and dL/dentropy [c]; returns which tokens send something back."""
        count = len(self.g[span])
        self.g[span] = upstream.logps[:count]
        if upstream.entropy is not None:
            self.e[span], self.has_e = upstream.entropy[:count], True
        return upstream.live(logps)

    def select(self, span: slice, chunk: Chunk, keys: Tensor, live: Tensor, head: Head) -> Tensor:
        """Adds the pairs that are kept of a chunk, whose rows beyond `span` only fill it; returns
        `HeadResult.routing`."""
        count, tile = span.stop - span.start, chunk.stats.tile
        pairs, dense, routing = selection.select(
            chunk.stats,
            chunk.per_row,
            chunk.target,
            keys,
            live,
            self.route.tau,
            _DENSE_SHARE * chunk.stats.top.shape[0],
            span.start,
            self.run_pairs,
        )
        for name, mine in vars(self.rows).items():
            if mine is not None:
                mine[span] = getattr(chunk.per_row, name)[:count]
        self.factor[span] = chunk.epilogue.factor[:count]
        self.dense[span] = dense[:count]
        self.parts.append(pairs)
        self.tile = tile
        vocab = head.weight.shape[0]
        entries = (routing[:, 0] * tile).clamp(max=vocab - 1)
        routing[:, 0] = torch.where(dense, float(vocab), entries)
        return routing[:count]

    def gradients(
        self, tokens: Tokens, head: Head, needs: Needs, values: TokenValues, upstream: Upstream
    ) -> HeadResult:
        """From dL/dlogp and dL/dentropy [n] of all tokens; may be called again."""
        if self.exact_weight is not None:
            needs = replace(needs, weight_grad=False, bias_grad=False)
        result = empty_result(tokens, head, replace(needs, weight_grad=False), None)
        if tokens.index.numel():
            with torch.no_grad(), torch.autocast(tokens.hidden.device.type, enabled=False):
                self._add_gradients(tokens, head, needs, upstream, result)
        elif needs.weight_grad:
            result.weight_grad = torch.zeros_like(head.weight)
        if self.exact_weight is not None:
            result.weight_grad = self.exact_weight.weight_grad
            result.bias_grad = self.exact_weight.bias_grad
        if result.weight_grad is not None:
            result.weight_grad = result.weight_grad.to(head.weight.dtype)
        if result.bias_grad is not None and head.bias is not None:
            result.bias_grad = result.bias_grad.to(head.bias.dtype)
        return result

    def _add_gradients(
        self, tokens: Tokens, head: Head, needs: Needs, upstream: Upstream, result: HeadResult
    ) -> None:
        g, e = upstream.logps.float().contiguous(), upstream.entropy
        e = None if e is None else e.float().contiguous()
        upstream = Upstream(g, e)
        live = upstream.live(self.rows.logps)
        if needs.any_grad:
            self._routed(tokens, head, needs, g, e, live, result)
        at = (live & self.dense).nonzero().squeeze(1)
        if at.numel() == 0 or not needs.any_grad:
            return

        of_dense = upstream[at]
        needs = replace(needs, entropy=e is not None)
        exact = head_pass(
            tokens.select(at), head, needs, lambda span, _: of_dense[span], self.chunk_bytes
        )
        for name in ("hidden_grad", "weight_grad", "bias_grad"):
            mine, more = getattr(result, name), getattr(exact, name)
            if mine is not None and more is not None:
                mine += more

    def _routed(
        self,
        tokens: Tokens,
        head: Head,
        needs: Needs,
        g: Tensor,
        e: Tensor | None,
        live: Tensor,
        result: HeadResult,
    ) -> None:
        kinds = Kinds.of(tokens.hidden, head.weight, any_grad=True)
        hidden, index = _states(tokens, kinds)
        operands = kernels.Operands(hidden, head.weight, self.tile, kinds.grads)
        token, tile, value, runs = self._pairs_of(live)
        bias = None if head.bias is None else head.bias.float().contiguous()
        inner = 1.0 if head.softcap is None else head.logit_scale / head.softcap
        epilogue = Epilogue(bias, self.factor, inner, head.softcap is not None)
        dz = torch.empty(len(token), self.tile, dtype=kinds.grads, device=token.device)
        block = kernels.pair_block(target_of(token.device))
        start, sums, tiles_of_sums = 0, [], []
        for m, first_token, count in runs:
            run = slice(start, start + m)
            items = kernels.Items.of(tile[run], start, operands.tiles, block)
            of_tokens = (tokens.target, self.rows, epilogue, g, e)
            more = kernels.pair_gradients(
                operands, index, token, value, items, *of_tokens, dz, result.bias_grad is not None
            )
            if more is not None:
                sums.append(more)
                tiles_of_sums.append(items.tile)
            if result.hidden_grad is not None:
                where = (start, token[run], first_token, count, tokens.index)
                kernels.add_up_hidden(operands, dz, items, *where, result.hidden_grad)
            start += m
        if result.bias_grad is not None and sums:
            result.bias_grad += kernels.bias_gradient(
                operands, torch.cat(sums), torch.cat(tiles_of_sums)
            )
        if needs.weight_grad:
            same = tokens.hidden.dtype == head.weight.dtype and not bool(self.dense.any())
            dtype = head.weight.dtype if same else torch.float32
            result.weight_grad = torch.empty(head.weight.shape, dtype=dtype, device=dz.device)
            by_tile, order = tile.sort(stable=True)
            bounds = kernels.tile_bounds(by_tile, operands.tiles)
            at = index[token[order].long()]
            kernels.weight_gradient(operands, dz, at, order, bounds, result.weight_grad)

    def _pairs_of(self, live: Tensor) -> tuple[Tensor, Tensor, Tensor, list[tuple[int, int, int]]]:
        """(token, tile, value, runs) of the tokens that send something back."""
        token, tile, value = (
            torch.cat([getattr(part, name) for part in self.parts])
            for name in ("token", "tile", "value")
        )
        runs = [run for part in self.parts for run in part.runs]
        kept = live.index_select(0, token).nonzero().squeeze(1)
        if len(kept) < len(token):
            ends = torch.tensor([m for m, _, _ in runs], device=token.device).cumsum(0)
            counts = torch.searchsorted(kept, ends).diff(prepend=ends.new_zeros(1)).tolist()
            runs = [(m, *rest) for m, (_, *rest) in zip(counts, runs, strict=True)]
            token, tile, value = token[kept], tile[kept], value[kept]
        return token, tile, value, [run for run in runs if run[0]]


def _states(tokens: Tokens, kinds: Kinds) -> tuple[Tensor, Tensor]:
    """(hidden states, positions [n] in their flattened leading dimensions) for the kernels."""
    if tokens.hidden.dtype == kinds.operand and tokens.hidden.stride(-1) == 1:
        return tokens.hidden, tokens.index
    n = tokens.index.numel()
    rows = tokens.rows(slice(0, n)).to(kinds.operand).contiguous()
    return rows, torch.arange(n, device=rows.device)
