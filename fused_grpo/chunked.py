"""The torch backend: one pass over a linear head, a chunk of tokens at a time.

For each chunk the logits are computed in fp32, turned in place into the softmax over all entries
*but the target*, and used for log-probabilities, entropies and, once the caller has said how much
each token counts, for both gradients. Nothing of size [tokens, vocabulary] outlives its chunk.

Leaving the target out is what keeps confident tokens exact: with d = logsumexp(others) - z_y,

    logp = -log(1 + e^d)          1 - p_y = sigmoid(d)          dz = g (1 - p_y) (1[v = y] - r_v)

where r is the softmax over the others. No difference of two nearly equal numbers appears.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from fused_grpo.memory import plan_chunks

# Rows of a chunk are finished a few at a time, so that the several passes over them stay in cache.
_BLOCK_BYTES = 2 * 2**20


@dataclass(frozen=True)
class Head:
    """A linear head: logits = softcap((hidden @ weight.T + bias) * logit_scale) / temperature."""

    weight: Tensor  # [V, H]
    bias: Tensor | None = None  # [V]
    logit_scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True)
class Tokens:
    """The tokens to project: where their hidden states are, and what they should predict."""

    hidden: Tensor  # [..., H], one or two leading dimensions, any strides
    index: Tensor  # [n] int64, positions in the flattened leading dimensions
    target: Tensor  # [n] int64, in [0, V)
    temperature: Tensor | float  # [n] or scalar

    def rows(self, span: slice) -> Tensor:
        """[c, H] hidden states of a span of tokens; copies that span only, whatever the strides."""
        index = self.index[span]
        if self.hidden.dim() == 2:
            return self.hidden[index]
        width = self.hidden.shape[1]
        return self.hidden[index // width, index % width]


@dataclass(frozen=True)
class Needs:
    """What to compute beside the log-probabilities."""

    hidden_grad: bool = False
    weight_grad: bool = False
    bias_grad: bool = False
    entropy: bool = False

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
    tokens: Tokens, head: Head, needs: Needs, coefficients: Coefficients | None, chunk_bytes: int
) -> HeadResult:
    """Log-probabilities (and entropies) of all tokens; with `coefficients`, the gradients of
    sum_t g_t logp_t + e_t entropy_t in the same pass.

    Matmul work: 2NHV without coefficients, 6NHV with both gradients, 4NHV with one of them.
    """
    hidden, weight = tokens.hidden, head.weight
    n, (vocab, width) = tokens.index.numel(), weight.shape
    dtype = compute_dtype(hidden, weight)
    needs = needs if coefficients is not None else Needs(entropy=needs.entropy)
    result = _empty_result(tokens, head, needs, dtype)
    plan = plan_chunks(chunk_bytes, vocab, width, dtype.itemsize)
    chunk = min(n, plan.tokens)
    buffer = torch.empty(chunk, vocab, dtype=dtype, device=hidden.device)
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, n, max(chunk, 1)):
            span = slice(start, min(start + chunk, n))
            _one_chunk(tokens, head, needs, coefficients, span, buffer, plan.tile, result)
    if result.weight_grad is not None:
        result.weight_grad = result.weight_grad.to(weight.dtype)
    if result.bias_grad is not None and head.bias is not None:
        result.bias_grad = result.bias_grad.to(head.bias.dtype)
    return result


def compute_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Logits are fp32 from fp32 accumulators for every input dtype, and fp64 for fp64 inputs."""
    return torch.float64 if torch.float64 in (hidden.dtype, weight.dtype) else torch.float32


def _empty_result(tokens: Tokens, head: Head, needs: Needs, dtype: torch.dtype) -> HeadResult:
    hidden, n = tokens.hidden, tokens.index.numel()

    def zeros(like: Tensor, as_dtype: torch.dtype) -> Tensor:
        return torch.zeros(like.shape, dtype=as_dtype, device=like.device)

    return HeadResult(
        logps=torch.empty(n, dtype=dtype, device=hidden.device),
        entropy=torch.empty(n, dtype=dtype, device=hidden.device) if needs.entropy else None,
        hidden_grad=zeros(hidden, hidden.dtype) if needs.hidden_grad else None,
        weight_grad=zeros(head.weight, dtype) if needs.weight_grad else None,
        bias_grad=zeros(head.bias, dtype) if needs.bias_grad and head.bias is not None else None,
    )


def _one_chunk(
    tokens: Tokens,
    head: Head,
    needs: Needs,
    coefficients: Coefficients | None,
    span: slice,
    buffer: Tensor,
    tile: int,
    result: HeadResult,
) -> None:
    rows = tokens.rows(span)
    temperature = tokens.temperature
    if isinstance(temperature, Tensor):
        temperature = temperature[span].to(buffer.dtype)[:, None]
    z = buffer[: rows.shape[0]]
    _logits(rows, temperature, head, tile, out=z)
    stats = _softmax_others(z, tokens.target[span], temperature, head, needs.entropy)
    result.logps[span] = stats.logps
    if result.entropy is not None and stats.entropy is not None:
        result.entropy[span] = stats.entropy
    if coefficients is None or not needs.any_grad:
        return
    g, e = coefficients(span, stats.logps, stats.entropy)
    live = (g != 0) if e is None else (g != 0) | (e != 0)
    kept = live.nonzero().squeeze(1)
    if kept.numel() == 0:
        return
    if kept.numel() < g.numel():  # tokens that cannot learn skip the backward
        _move_rows_up(z, kept)
        z, rows, g = z[: kept.numel()], rows[kept], g[kept]
        e = None if e is None else e[kept]
        stats = stats.select(kept)
        temperature = temperature[kept] if isinstance(temperature, Tensor) else temperature
    scale = _dlogits(z, stats, g, e, temperature, head)
    _accumulate(z, rows, scale, tokens.index[span][kept], head, tile, result)


def _logits(rows: Tensor, temperature: Tensor | float, head: Head, tile: int, out: Tensor) -> None:
    """rows @ weight.T into `out` [c, V]; without a softcap, scale and temperature go into the rows."""
    x = rows.to(out.dtype)
    if head.softcap is None:
        x = x * (head.logit_scale / temperature)
    linear = _linear_cpu if out.dtype == torch.float32 and _has_onednn(out) else F.linear
    for v in _tiles(out.shape[1], tile):
        out[:, v] = linear(x, head.weight[v].to(out.dtype))


def _tiles(size: int, tile: int) -> Iterator[slice]:
    return (slice(start, min(start + tile, size)) for start in range(0, size, tile))


def _has_onednn(x: Tensor) -> bool:
    return x.device.type == "cpu" and torch.backends.mkldnn.is_available()


def _linear_cpu(x: Tensor, weight: Tensor) -> Tensor:
    # oneDNN's fp32 product, which torch.mm does not pick for fp32: 1.1 to 1.3 times MKL's rate on
    # AMD, and the same fp32 accumulators.
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


@dataclass
class RowStats:
    """Statistics of a chunk's rows [c]; a row's `q` is its softmax with the target's logit set to
    the largest other one, so that p_v = kappa q_v for every v but the target."""

    target: Tensor  # int64
    logps: Tensor
    one_minus_p: Tensor  # 1 - p_target, accurate when p_target is near 1
    kappa: Tensor
    q_target: Tensor  # q at the target's column, in (0, 1/2]
    log_norm: Tensor  # log q_v = z_v - log_norm
    z_target: Tensor
    entropy: Tensor | None = None

    def select(self, kept: Tensor) -> RowStats:
        return replace(self, **{k: t[kept] for k, t in vars(self).items() if t is not None})


def _softmax_others(
    z: Tensor,
    target: Tensor,
    temperature: Tensor | float,
    head: Head,
    entropy: bool,
) -> RowStats:
    """Turns raw logits `z` [c, V] into q in place (see RowStats), but for the target's column."""
    c = z.shape[0]
    column = target[:, None]
    z_target, top, q_target = (z.new_empty(c, 1) for _ in range(3))
    spread = z.new_empty(c) if entropy else None
    for b in _blocks(z):
        zb, yb = z[b], column[b]
        _finish_logits(zb, temperature[b] if isinstance(temperature, Tensor) else temperature, head)
        z_target[b] = zb.gather(1, yb)
        zb.scatter_(1, yb, -torch.inf)
        top[b] = zb.amax(1, keepdim=True)
        zb.scatter_(
            1, yb, top[b].nan_to_num(neginf=0.0)
        )  # no other entry, or all at -inf: q = 1[target]
        torch.softmax(zb, 1, out=zb)
        q_target[b] = zb.gather(1, yb)
        if spread is not None:
            spread[b] = torch.special.entr(zb.scatter_(1, yb, 0.0)).sum(1)
    return _row_stats(target, z_target[:, 0], top[:, 0], q_target[:, 0], spread)


def _blocks(z: Tensor) -> Iterator[slice]:
    rows = z.shape[0]
    if z.device.type == "cpu":
        rows = max(1, _BLOCK_BYTES // (z.shape[1] * z.element_size()))
    return _tiles(z.shape[0], rows)


def _finish_logits(z: Tensor, temperature: Tensor | float, head: Head) -> None:
    """Bias, scale, softcap and temperature, in this order, in place."""
    if head.softcap is None:
        if head.bias is not None:
            z.add_(head.bias.to(z.dtype) * (head.logit_scale / temperature))
        return
    if head.bias is not None:
        z.add_(head.bias)
    z.mul_(head.logit_scale / head.softcap).tanh_().mul_(head.softcap / temperature)


def _row_stats(
    target: Tensor, z_target: Tensor, top: Tensor, q_target: Tensor, spread: Tensor | None
) -> RowStats:
    others = 1 / q_target - 1  # sum over the others of exp(z - top): at least 1, so nothing cancels
    # logsumexp(others) - z_target; the logits are subtracted first, so that their size does not matter
    d = torch.where(others > 0.5, (top - z_target) + others.log(), -torch.inf)
    zero = torch.zeros_like(d)
    one_minus_p = torch.sigmoid(d)
    stats = RowStats(
        target=target,
        logps=-torch.logaddexp(zero, d),
        one_minus_p=one_minus_p,
        kappa=one_minus_p / (1 - q_target).clamp_min(torch.finfo(d.dtype).tiny),
        q_target=q_target,
        log_norm=top - q_target.log(),
        z_target=z_target,
    )
    if spread is not None:
        # entropy of the others' softmax r, then of the split between the target and the others
        inside = (spread / (1 - q_target) + torch.log1p(-q_target)).clamp_min(0)
        split = one_minus_p * torch.logaddexp(zero, -d) + _entr(stats.logps)
        stats.entropy = torch.where(others > 0.5, one_minus_p * inside + split, zero)
    return stats


def _entr(logp: Tensor) -> Tensor:
    """-p log p, 0 at p = 0."""
    p = logp.exp()
    return torch.where(p > 0, -p * logp, 0.0)


def _move_rows_up(z: Tensor, kept: Tensor) -> None:
    """z[:k] = z[kept] in place: kept ascends, so no row is read after it was written."""
    for b in _blocks(z[: kept.numel()]):
        z[b] = z[kept[b]]


def _dlogits(
    z: Tensor,
    stats: RowStats,
    g: Tensor,
    e: Tensor | None,
    temperature: Tensor | float,
    head: Head,
) -> Tensor:
    """Turns q into `z` with dL/d(raw logits) = scale[:, None] * z; returns scale [c]."""
    column = stats.target[:, None]
    jacobian = head.logit_scale / temperature  # of the linear part
    if isinstance(jacobian, Tensor):
        jacobian = jacobian[:, 0]
    if e is None and head.softcap is None:
        z.scatter_(1, column, stats.q_target[:, None] - 1)
        return -g * stats.kappa * jacobian
    at_target, linear, log_linear = _dz_terms(stats, g, e)
    for b in _blocks(z):
        zb = z[b]
        log_q = zb.clamp_min(torch.finfo(z.dtype).tiny).log_()
        factor = torch.addcmul(linear[b, None], log_linear[b, None], log_q)
        zb.mul_(factor).scatter_(1, column[b], at_target[b, None])
        if head.softcap is not None:
            t = temperature[b] if isinstance(temperature, Tensor) else temperature
            capped = log_q.add_(stats.log_norm[b, None]).scatter_(
                1, column[b], stats.z_target[b, None]
            )
            zb.mul_(1 - capped.mul_(t / head.softcap).square_())
    return torch.ones_like(g) * jacobian


def _dz_terms(stats: RowStats, g: Tensor, e: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """dL/dz: its value at the target, and (a, b) of q_v (a + b log q_v) elsewhere.

    From dlogp/dz = 1[v = y] - p and dH/dz_v = -p_v (log p_v + H), with p_v = kappa q_v.
    """
    at_target = g * stats.one_minus_p
    linear = -g * stats.kappa
    if e is None or stats.entropy is None:
        return at_target, linear, torch.zeros_like(g)
    kappa, h = stats.kappa, stats.entropy
    at_target = at_target + e * (_entr(stats.logps) - stats.logps.exp() * h)
    return at_target, linear - e * (kappa * h + torch.xlogy(kappa, kappa)), -e * kappa


def _accumulate(
    z: Tensor,
    rows: Tensor,
    scale: Tensor,
    index: Tensor,
    head: Head,
    tile: int,
    result: HeadResult,
) -> None:
    """Adds the chunk's share of the gradients; dL/d(raw logits) = scale[:, None] * z."""
    weight, dtype = head.weight, z.dtype
    if result.bias_grad is not None:
        result.bias_grad.addmv_(z.T, scale)
    if rows.dtype == weight.dtype == torch.bfloat16 and _fast_bf16(z):
        z, dtype = _round_in_place(z), torch.bfloat16
    scaled = (rows * scale[:, None]).to(dtype) if result.weight_grad is not None else None
    grad = scale.new_zeros(rows.shape) if result.hidden_grad is not None else None
    for v in _tiles(z.shape[1], tile):
        if grad is not None:
            grad += z[:, v] @ weight[v].to(dtype)
        if result.weight_grad is not None and scaled is not None:
            _add_product(result.weight_grad[v], z[:, v].T, scaled)
    if grad is not None and result.hidden_grad is not None:
        flat = result.hidden_grad.view(-1, rows.shape[1])
        flat[index] = grad.mul_(scale[:, None]).to(flat.dtype)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, summed over chunks in total's dtype (fp32 or fp64) even for bf16 operands."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


def _fast_bf16(z: Tensor) -> bool:
    return z.device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _round_in_place(z: Tensor) -> Tensor:
    """z [c, V] rounded to bf16, each row in the first half of its fp32 row: no second buffer."""
    half = z.view(torch.bfloat16)[:, : z.shape[1]]
    for b in _blocks(z):
        half[b] = z[b].bfloat16()
    return half
