"""The gradients of a chunk of tokens, from the softmaxes of its tiles by plain matrix products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_grpo.divergence import Divergence
from fused_grpo.memory import slices
from fused_grpo.passes import HeadResult, Upstream, select_rows
from fused_grpo.tiles import (
    Head,
    RowStats,
    TileSums,
    compute_dtype,
    entropy_term,
    row_blocks,
    rows_in_tile,
)


def product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Operands of the gradients' products: bf16 for bf16 inputs where it is fast, else as logits.

    fp16 has too little range for probabilities.
    """
    if hidden.dtype == weight.dtype == torch.bfloat16 and _fast_bf16(hidden):
        return torch.bfloat16
    return compute_dtype(hidden, weight)


def _fast_bf16(x: Tensor) -> bool:
    return x.device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()


# Libraries keep a program for each size of a product: tokens that learn come in few numbers.
_ROWS = 32


@dataclass
class Chunk:
    """A chunk of tokens after its forward, and rows that only fill it up."""

    rows: Tensor  # [c, H]
    index: Tensor  # [<= c] positions in the flattened hidden states, of the tokens
    target: Tensor  # [c]
    temperature: Tensor | float  # [c, 1] or a number
    sums: TileSums
    stats: RowStats
    divergence: Divergence | None
    exps: list[Tensor] | None  # the softmaxes of the tiles
    deltas: Tensor | None  # [c, V], see `ReferenceTiles`
    lora_rows: Tensor | None = None  # [c, r]

    def select(self, kept: Tensor) -> Chunk:
        """The tokens at `kept`, which ascends; the large arrays are moved within their memory.

        The last one is repeated up to a multiple of `_ROWS`, as far as there is room.
        """
        count = len(kept)
        size = min(count + -count % _ROWS, len(self.rows)) if count else 0
        kept = torch.cat([kept, kept[-1:].expand(size - count)])
        chosen = select_rows(self, kept, but=("exps", "deltas"))
        chosen.index = chosen.index[:count]
        for name in ("sums", "stats", "divergence"):
            part = getattr(self, name)
            setattr(chosen, name, None if part is None else select_rows(part, kept))
        if self.exps is not None:
            chosen.exps = [_move_rows_up(q, kept) for q in self.exps]
        if self.deltas is not None:
            chosen.deltas = _move_rows_up(self.deltas, kept)
        return chosen


def _move_rows_up(x: Tensor, kept: Tensor) -> Tensor:
    """x[kept] in the memory of x: kept ascends, so a row is read before another takes its place."""
    for b in row_blocks(x[: kept.numel()]):
        x[b] = x[kept[b]]
    return x[: kept.numel()]


def add_gradients(
    chunk: Chunk,
    upstream: Upstream,
    head: Head,
    tile: int,
    weight_tile: Callable[[slice], Tensor],
    result: HeadResult,
) -> None:
    """Adds a chunk's share of the gradients; tokens that cannot learn are skipped, exactly."""
    live = upstream.live(chunk.stats.logps)
    kept = live.nonzero().squeeze(1)
    index, dh = chunk.index, None
    if kept.numel() < live.numel():
        chunk = chunk.select(kept)
        upstream = upstream[kept].filled(len(chunk.rows))
    if kept.numel() > 0:
        shares = _shares(chunk, upstream, head)
        dh = _accumulate(chunk, shares, head, tile, weight_tile, result)
        dh = None if dh is None else dh[: len(chunk.index)]
    if result.hidden_grad is None:
        return
    flat = result.hidden_grad.view(-1, chunk.rows.shape[1])
    if head.shard is not None:  # of all tokens: the ranks' sums have one shape, come what may
        if dh is None or kept.numel() < index.numel():
            whole = chunk.stats.logps.new_zeros(index.numel(), flat.shape[1])
            dh = whole if dh is None else whole.index_copy_(0, kept, dh)
        flat[index] = head.shard.sum(dh).to(flat.dtype)
    elif dh is not None:
        flat[chunk.index] = dh.to(flat.dtype)


@dataclass
class Shares:
    """dL/d(raw logits) of a chunk: at the target, and elsewhere, with the softcap's factor,

    scale_j (q_v (a_j + b_j log q_v + c_j delta_v) + extra_v)
    """

    target: Tensor  # [c]
    scale: Tensor  # [c, J]
    a: Tensor | None  # [c, J]; None: the factor is 1
    b: Tensor | None  # [c, J]
    c: Tensor | None = None  # [c, J]
    extra: Tensor | None = None  # [c, k] at Divergence.ids


def _shares(chunk: Chunk, upstream: Upstream, head: Head) -> Shares:
    """From dlogp/dz = 1[v = y] - p, dH/dz_v = -p_v (log p_v + H) and dKL/dz_v = p_v (log p_v -
    log r_v - KL), with p_v = P_j q_v."""
    stats, temperature = chunk.stats, chunk.temperature
    jacobian = head.logit_scale / temperature  # of the linear part, [c, 1] or a number
    p_tile, p_target = stats.log_scale.exp(), stats.logps.exp()
    g, e, k = upstream.logps, upstream.entropy, upstream.kl
    at_target = target_share(stats.logps, stats.one_minus_p, stats.entropy, upstream)
    a, b, c, extra = -g[:, None] * p_tile, None, None, None
    if e is not None and stats.entropy is not None:
        h = stats.entropy
        a = a - e[:, None] * (p_tile * h[:, None] + torch.xlogy(p_tile, p_tile))
        b = -e[:, None] * p_tile
    if k is not None and chunk.divergence is not None:
        d = chunk.divergence
        at_target = at_target + k * p_target * (d.at_target - d.kl)
        a = a + k[:, None] * p_tile * (d.shift - d.kl[:, None])
        c = None if chunk.deltas is None else k[:, None] * p_tile
        extra = None if d.extra is None else k[:, None] * d.extra
    at_target = at_target[:, None] * jacobian
    if head.softcap is None and b is None and c is None and extra is None:
        return Shares(at_target[:, 0], a * jacobian, None, None)
    if head.softcap is not None:
        at_target = at_target * cap_slope(chunk.sums.z_target[:, None], temperature, head)
    scale = torch.ones_like(a) * jacobian
    b = torch.zeros_like(a) if b is None else b
    return Shares(at_target[:, 0], scale, a, b, c, extra)


def target_share(
    logps: Tensor, one_minus_p: Tensor, entropy: Tensor | None, upstream: Upstream
) -> Tensor:
    """[c] dL/dz at the target from log-probability and entropy."""
    share = upstream.logps * one_minus_p
    if upstream.entropy is not None and entropy is not None:
        share = share + upstream.entropy * (entropy_term(logps) - logps.exp() * entropy)
    return share


def cap_slope(z: Tensor, temperature: Tensor | float, head: Head) -> Tensor:
    """1 - tanh^2 from finished logits z = c tanh(x / c) / temperature."""
    if head.softcap is None:
        return torch.ones_like(z)
    return 1 - (z * (temperature / head.softcap)).square()


def _accumulate(
    chunk: Chunk,
    shares: Shares,
    head: Head,
    tile: int,
    weight_tile: Callable[[slice], Tensor],
    result: HeadResult,
) -> Tensor | None:
    """The products, with sums in fp32 (fp64) whatever the operands; returns dh [c, H]."""
    rows, target, exps = chunk.rows, chunk.target, chunk.exps
    assert exps is not None
    weight, dtype = head.weight, shares.scale.dtype
    product = product_dtype(rows, weight)
    x = rows.to(dtype)
    at_target = shares.target[:, None]
    dh = torch.zeros_like(x) if result.hidden_grad is not None else None
    one_softmax = shares.scale.shape[1] == 1  # of all tiles
    scaled: Tensor | None = None
    lora = _LoraGradients.of(chunk, head, result)
    for j, v in enumerate(slices(weight.shape[0], tile)):
        dz, scale = exps[j][:, : v.stop - v.start], shares.scale[:, 0 if one_softmax else j, None]
        if shares.a is not None:
            dz = _dlogits(chunk, shares, j, v, head)
        if result.bias_grad is not None:
            result.bias_grad[v] += dz.T.to(dtype) @ scale[:, 0]
        if lora is not None:
            lora.add_tile(dz.to(dtype), scale, v)
        dz = dz.to(product)
        if dh is not None:
            w = weight[v] if weight.dtype == product else weight_tile(v)
            dh += dz @ w if one_softmax else (dz @ w).to(dtype).mul_(scale)
        if result.weight_grad is not None:
            if scaled is None or not one_softmax:
                scaled = (x * scale).to(product)
            _add_product(result.weight_grad[v], dz.T, scaled, result.weight_grad_written)
    if dh is not None and one_softmax:
        dh.mul_(shares.scale)
    if result.weight_grad is not None:
        result.weight_grad_written = True
    if head.shard is None:
        if dh is not None:
            dh.addcmul_(weight[target].to(dtype), at_target)
    else:  # only the targets whose rows are here
        here = rows_in_tile(target, weight.shape[0])
        target, at_target, x = target[here], at_target[here], x[here]
        if dh is not None:
            dh[here] += weight[target].to(dtype) * at_target
    if result.weight_grad is not None:
        add_rows(result.weight_grad, target, x * at_target)
    if result.bias_grad is not None:
        add_rows(result.bias_grad, target, at_target[:, 0])
    if lora is not None:
        lora.finish(chunk, at_target)
    return dh


@dataclass
class _LoraGradients:
    """Those of an adapter, whose products are too narrow for anything but the logits' dtype: few
    columns become matrix-vector products, which sum bf16 operands in bf16."""

    u: Tensor  # [c, r]
    weight: Tensor  # [V, r]
    rows: Tensor | None  # [c, r] the gradient of u, growing
    result: HeadResult

    @staticmethod
    def of(chunk: Chunk, head: Head, result: HeadResult) -> _LoraGradients | None:
        wanted = (result.lora_hidden_grad, result.lora_weight_grad)
        if chunk.lora_rows is None or head.lora_weight is None or wanted == (None, None):
            return None
        u = chunk.lora_rows.to(compute_dtype(chunk.rows, head.weight))
        rows = None if result.lora_hidden_grad is None else torch.zeros_like(u)
        return _LoraGradients(u, head.lora_weight, rows, result)

    def add_tile(self, dz: Tensor, scale: Tensor, v: slice) -> None:
        if self.rows is not None:
            self.rows += (dz @ self.weight[v].to(dz.dtype)).mul_(scale)
        if self.result.lora_weight_grad is not None:
            self.result.lora_weight_grad[v].addmm_(dz.T, self.u * scale)

    def finish(self, chunk: Chunk, at_target: Tensor) -> None:
        if self.rows is not None and self.result.lora_hidden_grad is not None:
            self.rows.addcmul_(self.weight[chunk.target].to(self.rows.dtype), at_target)
            flat = self.result.lora_hidden_grad.view(-1, self.u.shape[1])
            flat[chunk.index] = self.rows[: len(chunk.index)].to(flat.dtype)
        if self.result.lora_weight_grad is not None:
            add_rows(self.result.lora_weight_grad, chunk.target, self.u * at_target)


def _dlogits(chunk: Chunk, shares: Shares, j: int, v: slice, head: Head) -> Tensor:
    """The logits' gradient in a tile but for `scale`; see `Shares`."""
    assert shares.a is not None
    assert shares.b is not None
    assert chunk.exps is not None
    q = chunk.exps[j][:, : v.stop - v.start]
    dz = torch.empty_like(q, memory_format=torch.contiguous_format)
    log_norm = chunk.sums.log_norm(j)[:, None]
    for r in row_blocks(dz):
        log_q = q[r].clamp_min(torch.finfo(q.dtype).tiny).log_()
        torch.addcmul(shares.a[r, j, None], shares.b[r, j, None], log_q, out=dz[r])
        if shares.c is not None and chunk.deltas is not None:
            dz[r].addcmul_(shares.c[r, j, None], chunk.deltas[r, v])
        dz[r].mul_(q[r])
        if head.softcap is not None:
            t = chunk.temperature[r] if isinstance(chunk.temperature, Tensor) else chunk.temperature
            dz[r].mul_(cap_slope(log_q.add_(log_norm[r]), t, head))
    if shares.extra is not None:
        _add_entries(dz, chunk, shares.extra, v, head)
    return dz


def _add_entries(dz: Tensor, chunk: Chunk, extra: Tensor, v: slice, head: Head) -> None:
    """What single entries of a tile have beyond its formula; no entry occurs twice in a row."""
    d = chunk.divergence
    assert d is not None
    assert d.ids is not None
    assert d.z is not None
    here = (d.ids >= v.start) & (d.ids < v.stop) & (extra != 0)
    row, k = here.nonzero(as_tuple=True)
    t = chunk.temperature[row, 0] if isinstance(chunk.temperature, Tensor) else chunk.temperature
    column = d.ids[row, k] - v.start
    dz[row, column] += extra[row, k] * cap_slope(d.z[row, k], t, head)


def _add_product(total: Tensor, a: Tensor, b: Tensor, written: bool) -> None:
    """total += a @ b; total = a @ b where nothing was written to it before."""
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, beta=int(written), out=total)
    elif written:
        total += a @ b
    else:
        total.copy_(a @ b)


def add_rows(total: Tensor, index: Tensor, rows: Tensor) -> None:
    """total[index[i]] += rows[i], in an order that does not change from call to call."""
    if total.device.type == "cpu":
        total.index_add_(0, index, rows)
    else:  # sorts the index; index_add_ would use atomics
        total.index_put_((index,), rows, accumulate=True)
