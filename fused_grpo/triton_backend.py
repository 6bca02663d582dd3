"""The Triton backend: the same pass over a head as `chunked`, by kernels and plain products.

Of each chunk of tokens, the forward keeps the exponentials of every vocabulary tile and a few
numbers per (token, tile); once the caller has said how much each token counts, one elementwise pass
turns the exponentials into the gradient of the logits, in place, and two products give those of
hidden states and weight. Nothing is computed twice and no logit is stored: 6NHV.

bf16 operands take the fused product (`fused_grpo_kernels.forward`), and so does fp16 without
gradients, whose range is too small for gradients of logits. All others go through torch's product
into fp32 and the same epilogue in place (`fused_grpo_kernels.fold`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fused_grpo.chunked import empty_result
from fused_grpo.memory import ChunkPlan, plan_triton, slices
from fused_grpo.passes import (
    Coefficients,
    HeadResult,
    Needs,
    Reference,
    Tokens,
    TokenValues,
    Upstream,
)
from fused_grpo.products import add_product, product, tensor_cores_for
from fused_grpo.tiles import Head
from fused_grpo_kernels import fold, forward
from fused_grpo_kernels.combine import combine
from fused_grpo_kernels.gradients import logit_gradients
from fused_grpo_kernels.registry import target_of
from fused_grpo_kernels.target import target_logits
from fused_grpo_kernels.types import Epilogue, RowStats, TileStats, empty_statistics


def unsupported(hidden: Tensor, weight: Tensor) -> str | None:
    """Why these tensors cannot take this backend; None: they can."""
    if torch.float64 in (hidden.dtype, weight.dtype):
        return "the kernels compute in fp32, and fp64 inputs promise fp64 results"
    try:
        target_of(hidden.device)
    except ValueError as error:
        return str(error)
    return None


def head_pass(
    tokens: Tokens,
    head: Head,
    needs: Needs,
    coefficients: Coefficients | None,
    chunk_bytes: int | None,
    reference: Reference | None = None,
    compact: bool = True,
) -> HeadResult:
    """As `chunked.head_pass`, without references and supports. Without `compact` nothing waits for
    the device, and tokens whose coefficients are 0 stay in the products, as rows of exact zeros."""
    needs = needs if coefficients is not None else Needs(entropy=needs.entropy)
    assert reference is None
    assert tokens.support is None
    result = empty_result(tokens, head, needs, None)
    if result.weight_grad is not None:
        result.weight_grad.zero_()
    n = tokens.index.numel()
    if n == 0:
        return result
    plan = plan_pass(tokens, head, needs, chunk_bytes)
    with torch.no_grad(), torch.autocast(tokens.hidden.device.type, enabled=False):
        work = Workspace.allocate(min(n, plan.tokens), plan.tile, tokens, head, needs)
        for span in slices(n, plan.tokens):
            chunk, values = forward_chunk(tokens, needs.entropy, span, work)
            result.write(span, values)
            if coefficients is not None:
                add_gradients(chunk, coefficients(span, values), work, result, compact)
    if result.weight_grad is not None:
        result.weight_grad = result.weight_grad.to(head.weight.dtype)
    if result.bias_grad is not None and head.bias is not None:
        result.bias_grad = result.bias_grad.to(head.bias.dtype)
    return result


def plan_pass(
    tokens: Tokens,
    head: Head,
    needs: Needs,
    chunk_bytes: int | None,
    reference: Reference | None = None,
) -> ChunkPlan:
    """Tokens per chunk, and vocabulary entries that are multiplied or converted at once."""
    kinds = Kinds.of(tokens.hidden, head.weight, needs.any_grad)
    return plan_triton(
        chunk_bytes,
        *head.weight.shape,
        kept=kinds.kept_bytes,
        operand=kinds.operand.itemsize,
        converts=kinds.converts,
        on_gpu=tokens.hidden.device.type != "cpu",
    )


@dataclass(frozen=True)
class Kinds:
    """Which product, and the dtypes of what stands between the products."""

    fused: bool
    operand: torch.dtype  # of the forward's product
    exps: torch.dtype | None  # None: not kept
    grads: torch.dtype  # of the gradients' products
    converts: bool  # whether a product takes the weight in another dtype than its own

    @staticmethod
    def of(hidden: Tensor, weight: Tensor, any_grad: bool) -> Kinds:
        operand = weight.dtype if hidden.dtype == weight.dtype else torch.float32
        grads = torch.bfloat16 if operand == torch.bfloat16 else torch.float32
        fused = forward.refusal(operand, weight, target_of(weight.device)) is None
        fused = fused and not (any_grad and grads == torch.float32)
        exps = None if not any_grad else torch.bfloat16 if fused else torch.float32
        converts = weight.dtype != operand or (any_grad and weight.dtype != grads)
        return Kinds(fused, operand, exps, grads, converts)

    @property
    def kept_bytes(self) -> int:
        """Of each (token, vocabulary entry), for the gradients."""
        if self.exps is None:
            return 0
        return self.exps.itemsize + (self.grads.itemsize if self.grads != self.exps else 0)


@dataclass
class Workspace:
    """What the chunks share."""

    head: Head
    bias: Tensor | None  # [V] fp32
    kinds: Kinds
    tile: int
    exps: Tensor | None  # [c, V] exponentials, for gradients only
    logits_grad: Tensor | None  # [c, V]; the memory of `exps` where the dtypes agree
    rows: int | None = None  # of torch's products, which round as their shape says; None: any

    @staticmethod
    def allocate(count: int, tile: int, tokens: Tokens, head: Head, needs: Needs) -> Workspace:
        kinds = Kinds.of(tokens.hidden, head.weight, needs.any_grad)
        exps = logits_grad = None
        if kinds.exps is not None:
            exps = _aligned_rows(count, head.weight, kinds.exps)
            same = kinds.exps == kinds.grads
            logits_grad = exps if same else _aligned_rows(count, head.weight, kinds.grads)
        bias = None if head.bias is None else head.bias.float().contiguous()
        return Workspace(head, bias, kinds, tile, exps, logits_grad)

    def statistics(
        self, rows: Tensor, target: Tensor, epilogue: Epilogue, exps: Tensor | None, spread: bool
    ) -> TileStats:
        weight = self.head.weight
        if self.kinds.fused:
            return forward.project(rows, weight, target, epilogue, spread=spread, exps=exps)
        vocab = weight.shape[0]
        width = fold.tile_width(rows.device)
        stats = empty_statistics(rows.shape[0], vocab, width, spread, rows.device)
        for v in slices(vocab, self.tile):
            w = weight[v].to(self.kinds.operand)
            x = self._product(rows, w.T, None if exps is None else exps[:, v])
            fold.fold(x, v.start, vocab, target, epilogue, stats, store=exps is not None)
        return stats

    def _product(self, rows: Tensor, w: Tensor, out: Tensor | None) -> Tensor:
        if self.rows is None or self.rows == len(rows):
            return product(rows, w, out=out)
        out = w.new_empty(len(rows), w.shape[1], dtype=torch.float32) if out is None else out
        for b in slices(len(rows), self.rows):
            product(rows[b], w, out=out[b])
        return out

    def hidden_grad(self, dz: Tensor) -> Tensor:
        """dz [c, V] @ weight -> [c, H] fp32."""
        weight = self.head.weight
        if weight.dtype == dz.dtype:
            return product(dz, weight)
        total = dz.new_zeros(dz.shape[0], weight.shape[1])
        for v in slices(weight.shape[0], self.tile):
            total.addmm_(dz[:, v], weight[v].to(dz.dtype))
        return total


def _aligned_rows(count: int, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """[count, V] with rows a multiple of 16 elements apart: what kernels and products like."""
    vocab = weight.shape[0]
    return weight.new_empty(count, -(-vocab // 16) * 16, dtype=dtype)[:, :vocab]


@dataclass
class Chunk:
    """A chunk of tokens after its forward."""

    rows: Tensor  # [c, H] operands
    index: Tensor  # [c] positions in the flattened hidden states
    target: Tensor  # [c]
    epilogue: Epilogue
    exps: Tensor | None  # [c, V]
    stats: TileStats
    per_row: RowStats


def forward_chunk(
    tokens: Tokens, entropy: bool, span: slice, work: Workspace
) -> tuple[Chunk, TokenValues]:
    """A chunk up to its values; fills the buffers of `work`."""
    head = work.head
    rows = tokens.rows(span).to(work.kinds.operand).contiguous()
    target, temperature = tokens.target[span], tokens.temperature
    if isinstance(temperature, Tensor):
        temperature = temperature[span].float().contiguous()
    else:
        temperature = torch.full_like(target, temperature, dtype=torch.float32)
    epilogue = Epilogue.of(work.bias, head.logit_scale, head.softcap, temperature)
    exps = None if work.exps is None else work.exps[: rows.shape[0]]
    stats = work.statistics(rows, target, epilogue, exps, entropy)
    per_row = combine(stats, target_logits(rows, head.weight, target, epilogue))
    if tokens.counted is not None:
        per_row = per_row.select(tokens.counted[span])
    values = TokenValues(per_row.logps, per_row.entropy if entropy else None)
    return Chunk(rows, tokens.index[span], target, epilogue, exps, stats, per_row), values


def add_gradients(
    chunk: Chunk, upstream: Upstream, work: Workspace, result: HeadResult, compact: bool
) -> None:
    """Adds a chunk's share of the gradients."""
    assert chunk.exps is not None
    assert work.logits_grad is not None
    rows, index = chunk.rows, chunk.index
    g, e = upstream.logps, upstream.entropy
    kept = _kept(upstream, chunk.per_row.logps) if compact else None
    if kept is not None:
        if kept.numel() == 0:
            return
        rows, index = rows[kept], index[kept]
    dz = work.logits_grad[: rows.shape[0]]
    bias_grad = logit_gradients(
        chunk.exps,
        chunk.target,
        chunk.stats,
        chunk.per_row,
        chunk.epilogue,
        g,
        e,
        kept,
        dz,
        result.bias_grad is not None,
    )
    _accumulate(dz, rows, index, bias_grad, work, result)


def _kept(upstream: Upstream, logps: Tensor) -> Tensor | None:
    """Positions of the tokens that send something back; None: all. The one wait for the device."""
    kept = upstream.live(logps).nonzero().squeeze(1)
    return None if kept.numel() == logps.numel() else kept


def _accumulate(
    dz: Tensor,
    rows: Tensor,
    index: Tensor,
    bias_grad: Tensor | None,
    work: Workspace,
    result: HeadResult,
) -> None:
    """Adds a chunk's share of the gradients, in fp32 whatever the operands."""
    with tensor_cores_for(rows.dtype):
        if result.hidden_grad is not None:
            flat = result.hidden_grad.view(-1, rows.shape[1])
            flat[index] = work.hidden_grad(dz).to(flat.dtype)
        if result.weight_grad is not None:
            add_product(result.weight_grad, dz.T, rows.to(dz.dtype))
    if result.bias_grad is not None and bias_grad is not None:
        result.bias_grad += bias_grad
