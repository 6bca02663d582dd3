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
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_grpo.memory import ChunkPlan, plan_chunks
from fused_grpo.tiles import (
    Head,
    RowStats,
    TileSums,
    compute_dtype,
    entropy_term,
    row_blocks,
    row_statistics,
    slices,
    tile_softmax,
)


@dataclass(frozen=True)
class Tokens:
    """The tokens to project: where their hidden states are, and what they should predict."""

    hidden: Tensor  # [..., H], one or two leading dimensions, any strides
    index: Tensor  # [n] int64, positions in the flattened leading dimensions
    target: Tensor  # [n] int64, in [0, V)
    temperature: Tensor | float  # [n] or scalar
    counted: Tensor | None = None  # [n]; None: all. The others' hidden states are taken as zeros

    def rows(self, span: slice) -> Tensor:
        """[c, H] hidden states of a span of tokens; copies that span only, whatever the strides."""
        index = self.index[span]
        if self.hidden.dim() == 2:
            rows = self.hidden[index]
        else:
            width = self.hidden.shape[1]
            rows = self.hidden[index // width, index % width]
        if self.counted is not None:
            rows.masked_fill_(~self.counted[span, None], 0)
        return rows


@dataclass(frozen=True)
class Needs:
    """What to compute beside the log-probabilities."""

    hidden_grad: bool = False
    weight_grad: bool = False
    bias_grad: bool = False
    entropy: bool = False
    entropy_grad: bool = False

    @property
    def any_grad(self) -> bool:
        return self.hidden_grad or self.weight_grad or self.bias_grad


@dataclass
class HeadResult:
    """Per-token results in the order of `Tokens.index`, gradients shaped like their tensors."""

    logps: Tensor  # [n]
    entropy: Tensor | None  # [n]
    hidden_grad: Tensor | None  # like hidden
    weight_grad: Tensor | None  # like weight
    bias_grad: Tensor | None  # like bias


# (span, logps[c], entropy[c] | None) -> dL/dlogp [c], dL/dentropy [c] or None
Coefficients = Callable[[slice, Tensor, Tensor | None], tuple[Tensor, Tensor | None]]


def head_pass(
    tokens: Tokens,
    head: Head,
    needs: Needs,
    coefficients: Coefficients | None,
    chunk_bytes: int | None,
    compact: bool = True,
) -> HeadResult:
    """Log-probabilities (and entropies) of all tokens; with `coefficients`, the gradients of
    sum_t g_t logp_t + e_t entropy_t in the same pass.

    Tokens that send nothing back are always left out: `compact` is for backends that need not.

    Matmul work: 2NHV without coefficients, 6NHV with both gradients, 4NHV with one of them.
    """
    needs = needs if coefficients is not None else Needs(entropy=needs.entropy)
    result = empty_result(tokens, head, needs)
    n, plan = tokens.index.numel(), plan_pass(tokens, head, needs, chunk_bytes)
    work = _Workspace.allocate(min(n, plan.tokens), plan.tile, tokens, head, needs)
    with torch.no_grad(), torch.autocast(tokens.hidden.device.type, enabled=False):
        for span in slices(n, plan.tokens):
            _one_chunk(tokens, head, needs, coefficients, span, work, result)
    if result.weight_grad is not None:
        result.weight_grad = result.weight_grad.to(head.weight.dtype)
    if result.bias_grad is not None and head.bias is not None:
        result.bias_grad = result.bias_grad.to(head.bias.dtype)
    return result


def plan_pass(tokens: Tokens, head: Head, needs: Needs, chunk_bytes: int | None) -> ChunkPlan:
    """The chunks of a pass; softmaxes are kept for the gradients only."""
    (vocab, width), itemsize = head.weight.shape, compute_dtype(tokens.hidden, head.weight).itemsize
    stored = _stored_dtype(tokens.hidden, head, needs).itemsize if needs.any_grad else 0
    return plan_chunks(chunk_bytes, vocab, width, stored, itemsize)


def product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Operands of the gradients' products: bf16 for bf16 inputs where it is fast, else as logits.

    fp16 has too little range for probabilities.
    """
    if hidden.dtype == weight.dtype == torch.bfloat16 and _fast_bf16(hidden):
        return torch.bfloat16
    return compute_dtype(hidden, weight)


def _stored_dtype(hidden: Tensor, head: Head, needs: Needs) -> torch.dtype:
    """Softmaxes wait as operands of the products, unless their logarithms are wanted again."""
    if needs.entropy_grad or head.softcap is not None:
        return compute_dtype(hidden, head.weight)
    return product_dtype(hidden, head.weight)


def _fast_bf16(x: Tensor) -> bool:
    return x.device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def empty_result(tokens: Tokens, head: Head, needs: Needs) -> HeadResult:
    hidden, n = tokens.hidden, tokens.index.numel()
    dtype = compute_dtype(hidden, head.weight)

    def zeros(like: Tensor, as_dtype: torch.dtype) -> Tensor:
        return torch.zeros(like.shape, dtype=as_dtype, device=like.device)

    return HeadResult(
        logps=torch.empty(n, dtype=dtype, device=hidden.device),
        entropy=torch.empty(n, dtype=dtype, device=hidden.device) if needs.entropy else None,
        hidden_grad=zeros(hidden, hidden.dtype) if needs.hidden_grad else None,
        weight_grad=zeros(head.weight, dtype) if needs.weight_grad else None,
        bias_grad=zeros(head.bias, dtype) if needs.bias_grad and head.bias is not None else None,
    )


@dataclass
class _Workspace:
    """Buffers that the chunks share."""

    tile: int
    weight: Tensor  # [V, H]
    converted: Tensor | None  # [tile, H] a tile of the weight as fp32, where it is not
    exps: Tensor | None  # [c, V] softmaxes of the tiles, for gradients only

    @staticmethod
    def allocate(tokens: int, tile: int, of: Tokens, head: Head, needs: Needs) -> _Workspace:
        weight, dtype = head.weight, compute_dtype(of.hidden, head.weight)
        converted, exps = None, None
        if needs.any_grad:
            stored = _stored_dtype(of.hidden, head, needs)
            exps = weight.new_empty(tokens, weight.shape[0], dtype=stored)
        if weight.dtype != dtype:
            converted = weight.new_empty(tile, weight.shape[1], dtype=dtype)
        return _Workspace(tile, weight, converted, exps)

    def weight_tile(self, v: slice) -> Tensor:
        """[v, H] in the dtype of the logits; valid until the next call."""
        if self.converted is None:
            return self.weight[v]
        return self.converted[: v.stop - v.start].copy_(self.weight[v])


def _one_chunk(
    tokens: Tokens,
    head: Head,
    needs: Needs,
    coefficients: Coefficients | None,
    span: slice,
    work: _Workspace,
    result: HeadResult,
) -> None:
    rows, target, temperature = tokens.rows(span), tokens.target[span], tokens.temperature
    if isinstance(temperature, Tensor):
        temperature = temperature[span].to(result.logps.dtype)[:, None]
    exps = None if work.exps is None else work.exps[: rows.shape[0]]
    sums = tile_softmax(
        rows, target, temperature, head, work.tile, work.weight_tile, exps, needs.entropy
    )
    stats = row_statistics(sums)
    result.logps[span] = stats.logps
    if result.entropy is not None and stats.entropy is not None:
        result.entropy[span] = stats.entropy
    if coefficients is None or exps is None:
        return
    g, e = coefficients(span, stats.logps, stats.entropy)
    # clamp and minimum give g = 0 at NaN, which must not pass for a token that is done
    live = (g != 0) | stats.logps.isnan()
    kept = (live if e is None else live | (e != 0)).nonzero().squeeze(1)
    index = tokens.index[span]
    if kept.numel() < g.numel():  # tokens that cannot learn skip the backward
        exps = _move_rows_up(exps, kept)
        rows, target, g, index = rows[kept], target[kept], g[kept], index[kept]
        sums, stats = sums.select(kept), stats.select(kept)
        e = None if e is None else e[kept]
        temperature = temperature[kept] if isinstance(temperature, Tensor) else temperature
    if kept.numel() > 0:
        shares = _shares(sums, stats, g, e, temperature, head)
        _accumulate(exps, rows, index, target, shares, temperature, head, work, result)


def _move_rows_up(x: Tensor, kept: Tensor) -> Tensor:
    """x[kept] in the memory of x: kept ascends, so no row is read after it was written."""
    for b in row_blocks(x[: kept.numel()]):
        x[b] = x[kept[b]]
    return x[: kept.numel()]


@dataclass
class Shares:
    """dL/d(raw logits) of a chunk: at the target, and scale_j q_v (a_j + b_j log q_v) elsewhere."""

    target: Tensor  # [c]
    scale: Tensor  # [c, J]
    a: Tensor | None  # [c, J]; None: the factor is 1
    b: Tensor | None  # [c, J]
    log_norm: Tensor  # [c, J], log q_v = z_v - log_norm_j


def _shares(
    sums: TileSums,
    stats: RowStats,
    g: Tensor,
    e: Tensor | None,
    temperature: Tensor | float,
    head: Head,
) -> Shares:
    """From dlogp/dz = 1[v = y] - p and dH/dz_v = -p_v (log p_v + H), with p_v = P_j q_v."""
    log_norm = sums.top - sums.q_top.log()
    jacobian = head.logit_scale / temperature  # of the linear part, [c, 1] or a number
    p_tile = stats.log_scale.exp()
    at_target = g * stats.one_minus_p
    a, b = -g[:, None] * p_tile, None
    if e is not None and stats.entropy is not None:
        h = stats.entropy
        at_target = at_target + e * (entropy_term(stats.logps) - stats.logps.exp() * h)
        a = a - e[:, None] * (p_tile * h[:, None] + torch.xlogy(p_tile, p_tile))
        b = -e[:, None] * p_tile
    at_target = at_target[:, None] * jacobian
    if head.softcap is None and b is None:
        return Shares(at_target[:, 0], a * jacobian, None, None, log_norm)
    if head.softcap is not None:
        tanh = sums.z_target[:, None] * (temperature / head.softcap)
        at_target = at_target * (1 - tanh.square())
    scale = torch.ones_like(a) * jacobian
    return Shares(at_target[:, 0], scale, a, torch.zeros_like(a) if b is None else b, log_norm)


def _accumulate(
    exps: Tensor,
    rows: Tensor,
    index: Tensor,
    target: Tensor,
    shares: Shares,
    temperature: Tensor | float,
    head: Head,
    work: _Workspace,
    result: HeadResult,
) -> None:
    """Adds a chunk's share of the gradients, with sums in fp32 (fp64) whatever the operands."""
    weight, dtype = head.weight, shares.scale.dtype
    product = product_dtype(rows, weight)
    x = rows.to(dtype)
    at_target = shares.target[:, None]
    dh = weight[target].to(dtype).mul_(at_target) if result.hidden_grad is not None else None
    for j, v in enumerate(slices(weight.shape[0], work.tile)):
        dz, scale = exps[:, v], shares.scale[:, j, None]
        if shares.a is not None:
            dz = _dlogits(dz, shares, j, temperature, head)
        if result.bias_grad is not None:
            result.bias_grad[v] += dz.T.to(dtype) @ scale[:, 0]
        dz = dz.to(product)
        if dh is not None:
            w = weight[v] if weight.dtype == product else work.weight_tile(v)
            dh.addcmul_((dz @ w).to(dtype), scale)
        if result.weight_grad is not None:
            _add_product(result.weight_grad[v], dz.T, (x * scale).to(product))
    if dh is not None and result.hidden_grad is not None:
        flat = result.hidden_grad.view(-1, rows.shape[1])
        flat[index] = dh.to(flat.dtype)
    if result.weight_grad is not None:
        _add_rows(result.weight_grad, target, x * at_target)
    if result.bias_grad is not None:
        _add_rows(result.bias_grad, target, shares.target)


def _dlogits(q: Tensor, shares: Shares, j: int, temperature: Tensor | float, head: Head) -> Tensor:
    """q (a + b log q) of a tile, and through the softcap's derivative 1 - tanh^2."""
    assert shares.a is not None
    assert shares.b is not None
    dz = torch.empty_like(q, memory_format=torch.contiguous_format)
    for r in row_blocks(dz):
        log_q = q[r].clamp_min(torch.finfo(q.dtype).tiny).log_()
        torch.addcmul(shares.a[r, j, None], shares.b[r, j, None], log_q, out=dz[r]).mul_(q[r])
        if head.softcap is not None:
            t = temperature[r] if isinstance(temperature, Tensor) else temperature
            tanh = log_q.add_(shares.log_norm[r, j, None]).mul_(t / head.softcap)
            dz[r].mul_(1 - tanh.square_())
    return dz


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


def _add_rows(total: Tensor, index: Tensor, rows: Tensor) -> None:
    """total[index[i]] += rows[i], in an order that does not change from call to call."""
    if total.device.type == "cpu":
        total.index_add_(0, index, rows)
    else:  # sorts the index; index_add_ would use atomics
        total.index_put_((index,), rows, accumulate=True)
