"""Gradients from kept (token, tile) pairs: grouped matrix products, of which none adds in memory.

    dz   logits of a pair once more, and from them g (1[v = y] - p / q) and its like   [pairs, tile]
    dW   a tile's rows: the sum over its pairs of dz h^T, one owner per block of the result
    dh   a pair's share dz W [pairs, H], then the sum of each token's shares, in order

dz is small and kept for all pairs; shares are formed for a run of tokens at a time. The
alternatives for dh: a token's tiles one after the other would read its r tiles of the weight for
one row each (r x 128 x H per token instead of per 64 pairs), and adding to dh in memory needs
atomics or as many launches as tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_grpo_kernels.common import finish_logits, on_device_of, round_to
from fused_grpo_kernels.registry import Config, KernelCase, Target, target_of
from fused_grpo_kernels.types import DTYPE_NAMES, Epilogue, RowStats


@triton.jit
def hidden_rows(hidden, index, length, stride_s, stride_t):
    """Pointers [m, 1] to the states at positions `index` of [sequences, length, H]."""
    sequence = index // length
    at = sequence * stride_s + (index - sequence * length) * stride_t
    return hidden + at[:, None]


@triton.jit
def block_dot(a, b, acc, WIDE: tl.constexpr, PRECISION: tl.constexpr):
    if WIDE:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=["length", "vocab"])
def pair_kernel(
    hidden,
    weight,
    bias,
    index,  # [n] int64, positions of the tokens
    token,  # [pairs]
    value,  # [pairs] 1 / q
    item_tile,  # [items] of each block of pairs: the tile,
    item_first,  # its first pair,
    item_last,  # and the end of the tile's pairs
    target,
    g,
    e,
    logps,
    one_minus_p,
    largest,
    shift,
    entropy,
    factor,
    out,  # [pairs, TILE]
    bias_out,  # [items, TILE] fp32 column sums, before dz is rounded; None: none
    length,
    vocab,
    width,
    stride_s,
    stride_t,
    stride_w,
    stride_k,
    inner,
    BM: tl.constexpr,
    BK: tl.constexpr,
    TILE: tl.constexpr,
    CAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERP: tl.constexpr,
):
    item = tl.program_id(0)
    first, last = tl.load(item_first + item), tl.load(item_last + item)
    if first >= last:
        return
    j = tl.load(item_tile + item)
    pair = first + tl.arange(0, BM)
    live = pair < last
    t = tl.load(token + pair, mask=live, other=0)
    k = tl.arange(0, BK)
    cols = j * TILE + tl.arange(0, TILE)
    at = hidden_rows(hidden, tl.load(index + t), length, stride_s, stride_t) + k[None, :]
    by = weight + tl.minimum(cols, vocab - 1).to(tl.int64)[:, None] * stride_w
    by += k.to(tl.int64)[None, :] * stride_k
    acc = tl.zeros((BM, TILE), dtype=tl.float32)
    for start in range(0, width, BK):
        inside = (start + k < width)[None, :]
        a = tl.load(at, mask=inside, other=0.0)
        b = tl.load(by, mask=inside, other=0.0)
        acc = block_dot(a, b.T, acc, WIDE or INTERP, PRECISION)
        at += BK
        by += BK * stride_k

    f = tl.load(factor + t)
    z = finish_logits(acc, bias, j * TILE, vocab, f, inner, TILE, CAP)
    # log p; logits are subtracted from each other first, as in the forward
    log_p = (z - tl.load(largest + t)[:, None]) - tl.load(shift + t)[:, None]
    gt, omp = tl.load(g + t), tl.load(one_minus_p + t)
    p = tl.exp(log_p)
    dz = -gt[:, None] * p
    own = gt * omp
    if ENTROPY:
        et, h, logp = tl.load(e + t), tl.load(entropy + t), tl.load(logps + t)
        dz -= tl.where(p == 0.0, 0.0, et[:, None] * p * (log_p + h[:, None]))
        p_own = tl.exp(logp)
        own -= tl.where(p_own == 0.0, 0.0, et * p_own * (logp + h))
    y = tl.load(target + t).to(tl.int32)
    hit = cols[None, :] == y[:, None]
    dz = tl.where(hit, own[:, None], dz * tl.load(value + pair, mask=live, other=0.0)[:, None])
    if CAP:
        tanh = z / f[:, None]
        dz *= 1.0 - tanh * tanh
    dz = tl.where((cols < vocab)[None, :], dz * (f * inner)[:, None], 0.0)
    if bias_out is not None:
        total = tl.sum(tl.where(live[:, None], dz, 0.0), 0)
        tl.store(bias_out + item.to(tl.int64) * TILE + tl.arange(0, TILE), total)
    to = out + pair.to(tl.int64)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    tl.store(to, round_to(dz, out.dtype.element_ty, INTERP), mask=live[:, None])


@triton.jit(do_not_specialize=["vocab", "first_pair"])
def share_kernel(
    dz,
    weight,
    item_tile,
    item_first,
    item_last,
    out,  # [pairs of a run, width] fp32
    vocab,
    width,
    first_pair,
    stride_w,
    stride_k,
    BM: tl.constexpr,
    BH: tl.constexpr,
    BV: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERP: tl.constexpr,
):
    parts = tl.cdiv(width, BH)
    item, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    first, last = tl.load(item_first + item), tl.load(item_last + item)
    if first >= last:
        return
    j = tl.load(item_tile + item)
    pair, h = first + tl.arange(0, BM), part * BH + tl.arange(0, BH)
    v = tl.arange(0, BV)
    at = dz + pair.to(tl.int64)[:, None] * TILE + v[None, :]
    acc = tl.zeros((BM, BH), dtype=tl.float32)
    for start in tl.static_range(0, TILE, BV):
        cols = j * TILE + start + v
        by = weight + cols.to(tl.int64)[:, None] * stride_w + h.to(tl.int64)[None, :] * stride_k
        a = tl.load(at + start, mask=(pair < last)[:, None], other=0.0)
        b = tl.load(by, mask=(cols < vocab)[:, None] & (h < width)[None, :], other=0.0)
        acc = block_dot(a, b, acc, WIDE or INTERP, PRECISION)
    to = out + (pair - first_pair).to(tl.int64)[:, None] * width + h[None, :]
    tl.store(to, acc, mask=(pair < last)[:, None] & (h < width)[None, :])


@triton.jit(do_not_specialize=["n", "first_token"])
def sum_kernel(
    shares,  # [pairs of a run, width] fp32
    order,  # [pairs] the run's pairs by token
    ends,  # [n + 1] the tokens' bounds in it
    index,
    out,  # [positions, width]
    n,
    first_token,
    width,
    BM: tl.constexpr,
    BH: tl.constexpr,
    INTERP: tl.constexpr,
):
    parts = tl.cdiv(width, BH)
    block, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    rows, h = block * BM + tl.arange(0, BM), part * BH + tl.arange(0, BH)
    first = tl.load(ends + rows, mask=rows < n, other=0)
    count = tl.load(ends + rows + 1, mask=rows < n, other=0) - first
    total = tl.zeros((BM, BH), dtype=tl.float32)
    for i in range(0, tl.max(count, 0)):
        pair = tl.load(order + first + i, mask=i < count, other=0)
        inside = (i < count)[:, None] & (h < width)[None, :]
        total += tl.load(
            shares + pair.to(tl.int64)[:, None] * width + h[None, :], mask=inside, other=0.0
        )
    to = tl.load(index + first_token + rows, mask=rows < n, other=0)
    at = out + to.to(tl.int64)[:, None] * width + h[None, :]
    kept = (count > 0)[:, None] & (h < width)[None, :]
    tl.store(at, round_to(total, out.dtype.element_ty, INTERP), mask=kept)


@triton.jit(do_not_specialize=["length", "vocab"])
def weight_kernel(
    dz,
    hidden,
    index,  # [pairs] int64 positions of the pairs' tokens, by tile
    order,  # [pairs] the pairs by tile
    bounds,  # [tiles + 1]
    out,  # [vocab, width]
    length,
    vocab,
    width,
    stride_s,
    stride_t,
    BP: tl.constexpr,
    BH: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERP: tl.constexpr,
):
    parts = tl.cdiv(width, BH)
    j, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    h, v = part * BH + tl.arange(0, BH), tl.arange(0, TILE)
    first, last = tl.load(bounds + j), tl.load(bounds + j + 1)
    acc = tl.zeros((TILE, BH), dtype=tl.float32)
    for start in range(first, last, BP):
        at = start + tl.arange(0, BP)
        live = (at < last)[:, None]
        pair = tl.load(order + at, mask=at < last, other=0)
        position = tl.load(index + at, mask=at < last, other=0)
        a = tl.load(dz + pair[:, None] * TILE + v[None, :], mask=live, other=0.0)
        by = hidden_rows(hidden, position, length, stride_s, stride_t) + h[None, :]
        b = tl.load(by, mask=live & (h < width)[None, :], other=0.0)
        acc = block_dot(a.T, b, acc, WIDE or INTERP, PRECISION)
    cols = j * TILE + v
    to = out + cols.to(tl.int64)[:, None] * width + h[None, :]
    inside = (cols < vocab)[:, None] & (h < width)[None, :]
    tl.store(to, round_to(acc, out.dtype.element_ty, INTERP), mask=inside)


@triton.jit(do_not_specialize=["vocab"])
def bias_kernel(
    sums,  # [items, TILE]
    order,  # [items] by tile
    bounds,  # [tiles + 1]
    out,  # [vocab]
    vocab,
    BP: tl.constexpr,
    TILE: tl.constexpr,
):
    j, v = tl.program_id(0), tl.arange(0, TILE)
    first, last = tl.load(bounds + j), tl.load(bounds + j + 1)
    total = tl.zeros((TILE,), dtype=tl.float32)
    for start in range(first, last, BP):
        at = start + tl.arange(0, BP)
        item = tl.load(order + at, mask=at < last, other=0)
        part = tl.load(sums + item[:, None] * TILE + v[None, :], mask=(at < last)[:, None], other=0)
        total += tl.sum(part, 0)
    cols = j * TILE + v
    tl.store(out + cols, total, mask=cols < vocab)


@dataclass(frozen=True)
class Items:
    """Blocks of pairs of one tile, of a run of pairs that stand by tile; empty ones at the end."""

    tile: Tensor  # [items]
    first: Tensor  # [items]
    last: Tensor  # [items] the end of the tile's pairs

    @staticmethod
    def of(tile: Tensor, first_pair: int, tiles: int, block: int) -> Items:
        """From the tiles of the pairs [m], ascending; waits for nothing."""
        device, m = tile.device, tile.numel()
        bounds = tile_bounds(tile, tiles)
        ends = (bounds.diff() + (block - 1)).div(block, rounding_mode="floor").cumsum(0)
        item = torch.arange(m // block + min(m, tiles), device=device)
        of_item = torch.searchsorted(ends, item, right=True)
        inside = of_item.clamp(max=tiles - 1)
        before = torch.cat([ends.new_zeros(1), ends])[inside]
        first = bounds[inside] + (item - before) * block
        last = torch.where(of_item < tiles, bounds[inside + 1], first)
        return Items(inside, first + first_pair, last + first_pair)


def tile_bounds(tile: Tensor, tiles: int) -> Tensor:
    """[tiles + 1] where the pairs of each tile begin, for tiles of pairs in ascending order."""
    every = torch.arange(tiles + 1, device=tile.device, dtype=tile.dtype)
    return torch.searchsorted(tile, every)


@dataclass(frozen=True)
class Operands:
    """Hidden states [..., H] (one or two leading dimensions, unit stride in H) and weight [V, H],
    of one dtype, or the states as fp32."""

    hidden: Tensor
    weight: Tensor
    tile: int
    grads: torch.dtype  # of dz: bf16, or fp32, for which the operands are converted

    @property
    def places(self) -> tuple[int, int, int]:
        """(length, stride of sequences, stride of positions)."""
        if self.hidden.dim() == 2:
            return 1, self.hidden.stride(0), 0
        return self.hidden.shape[1], self.hidden.stride(0), self.hidden.stride(1)

    @property
    def tiles(self) -> int:
        return int(triton.cdiv(self.weight.shape[0], self.tile))

    def switches(self, target: Target) -> dict[str, Any]:
        """Of the gradients' products: fp32 holds what dz needs, and TF32 every fp16 value."""
        knows_tf32 = target.backend == "cuda" or target.arch == "gfx942"
        halves = self.hidden.dtype == self.weight.dtype == torch.float16
        return {
            "WIDE": self.grads != torch.bfloat16,
            "PRECISION": "tf32" if halves and knows_tf32 else "ieee",
            "INTERP": target.backend == "interpreter",
        }


def config_of(name: str, target: Target, wide: bool, precision: str = "ieee") -> Config:
    """Of a kernel; `wide`: its product is one of fp32 operands, in this precision."""
    if target.backend == "interpreter":
        blocks = {
            "pair": {"BM": 32, "BK": 64},
            "share": {"BM": 32, "BH": 64, "BV": 32},
            "sum": {"BM": 32, "BH": 64},
            "weight": {"BP": 32, "BH": 64},
            "bias": {"BP": 16},
        }
        return Config(blocks[name], 1, 1)
    if name == "sum":
        return Config({"BM": 4, "BH": 256}, 4, 1)
    if name == "bias":
        return Config({"BP": 16}, 4, 1)
    stages = 2 if target.backend == "hip" else 3
    if wide:
        blocks = {
            "pair": {"BM": 64, "BK": 16},
            "share": {"BM": 64, "BH": 64, "BV": 32},
            "weight": {"BP": 16, "BH": 32} if precision == "ieee" else {"BP": 32, "BH": 64},
        }
        return Config(blocks[name], 8, 2)
    blocks = {
        "pair": {"BM": 64, "BK": 64},
        "share": {"BM": 64, "BH": 128, "BV": 64},
        "weight": {"BP": 32, "BH": 128},
    }
    return Config(blocks[name], 4 if name == "share" else 8, stages)


def pair_block(target: Target) -> int:
    """Pairs per item; the same in all configurations."""
    return int(config_of("pair", target, False).constexprs["BM"])


def _constants(config: Config, **more: Any) -> dict[str, Any]:
    return {**config.constexprs, **more, **config.options}


def pair_gradients(
    operands: Operands,
    index: Tensor,
    token: Tensor,
    value: Tensor,
    items: Items,
    targets: Tensor,
    rows: RowStats,
    epilogue: Epilogue,
    g: Tensor,
    e: Tensor | None,
    out: Tensor,
    bias: bool,
) -> Tensor | None:
    """dL/d(product) of the items' pairs into out [pairs, tile], over q.

    Args:
        index: [n] int64 positions of the tokens. token: [pairs]. value: [pairs] 1 / q.
        targets, rows, epilogue, g, e: of the tokens [n].
        bias: also return the sums of each item [items, tile], fp32.
    """
    hidden, weight = operands.hidden, operands.weight
    shape = (items.tile.numel(), operands.tile)
    sums = torch.zeros(shape, dtype=torch.float32, device=hidden.device) if bias else None
    target = target_of(hidden.device)
    wide = hidden.dtype == torch.float32
    with on_device_of(hidden):
        pair_kernel[(items.tile.numel(),)](
            hidden,
            weight,
            epilogue.bias,
            index,
            token,
            value,
            items.tile,
            items.first,
            items.last,
            targets,
            g,
            e,
            rows.logps,
            rows.one_minus_p,
            rows.largest,
            rows.shift,
            rows.entropy if e is not None else None,
            epilogue.factor,
            out,
            sums,
            operands.places[0],
            *weight.shape,
            *operands.places[1:],
            *weight.stride(),
            epilogue.inner,
            **_constants(
                config_of("pair", target, wide),
                TILE=operands.tile,
                CAP=epilogue.capped,
                ENTROPY=e is not None,
                WIDE=wide,
                PRECISION="ieee",
                INTERP=target.backend == "interpreter",
            ),
        )
    return sums


def add_up_hidden(
    operands: Operands,
    dz: Tensor,
    items: Items,
    first_pair: int,
    token: Tensor,
    first_token: int,
    tokens: int,
    index: Tensor,
    out: Tensor,
) -> None:
    """Writes dh of a run of tokens to rows `index` of out [positions, H], contiguous.

    Args:
        dz: [all pairs, tile]. token: [m] those of the run's pairs, the first being `first_pair`.
        index: [n] positions of all tokens. Tokens without pairs are left as they are.
    """
    weight, m = operands.weight, token.numel()
    vocab, width = weight.shape
    target = target_of(weight.device)
    switches = operands.switches(target)
    config = config_of("share", target, switches["WIDE"], switches["PRECISION"])
    shares = torch.empty((m, width), dtype=torch.float32, device=weight.device)
    by_token, order = token.sort(stable=True)
    every = torch.arange(first_token, first_token + tokens + 1, device=weight.device)
    ends = torch.searchsorted(by_token, every.to(token.dtype))
    with on_device_of(weight):
        parts = triton.cdiv(width, config.constexprs["BH"])
        share_kernel[(items.tile.numel() * parts,)](
            dz,
            weight,
            items.tile,
            items.first,
            items.last,
            shares,
            vocab,
            width,
            first_pair,
            *weight.stride(),
            **_constants(config, TILE=operands.tile, **switches),
        )
        config = config_of("sum", target, False)
        blocks = triton.cdiv(tokens, config.constexprs["BM"])
        sum_kernel[(blocks * triton.cdiv(width, config.constexprs["BH"]),)](
            shares,
            order,
            ends,
            index,
            out,
            tokens,
            first_token,
            width,
            **_constants(config, INTERP=switches["INTERP"]),
        )


def weight_gradient(
    operands: Operands, dz: Tensor, index: Tensor, order: Tensor, bounds: Tensor, out: Tensor
) -> None:
    """Writes dW to out [V, H], all of it.

    Args:
        order: [pairs] int64, the rows of dz by tile; index: [pairs] int64, the positions of their
            tokens; bounds: [tiles + 1] int64 those of the tiles.
    """
    target = target_of(dz.device)
    switches = operands.switches(target)
    config = config_of("weight", target, switches["WIDE"], switches["PRECISION"])
    vocab, width = operands.weight.shape
    length, stride_s, stride_t = operands.places
    with on_device_of(dz):
        weight_kernel[(operands.tiles * triton.cdiv(width, config.constexprs["BH"]),)](
            dz,
            operands.hidden,
            index,
            order,
            bounds,
            out,
            length,
            vocab,
            width,
            stride_s,
            stride_t,
            **_constants(config, TILE=operands.tile, **switches),
        )


def bias_gradient(operands: Operands, sums: Tensor, tile: Tensor) -> Tensor:
    """[V] fp32 from sums [items, tile] of items of the tiles `tile` [items]."""
    vocab = operands.weight.shape[0]
    out = torch.empty(vocab, dtype=torch.float32, device=sums.device)
    config = config_of("bias", target_of(sums.device), False)
    by_tile, order = tile.sort(stable=True)
    bounds = tile_bounds(by_tile, operands.tiles)
    with on_device_of(sums):
        bias_kernel[(operands.tiles,)](
            sums, order, bounds, out, vocab, **_constants(config, TILE=operands.tile)
        )
    return out


# --- the static gate -----------------------------------------------------------------------------

_DIVISIBLE = (
    *("hidden", "weight", "dz", "out", "shares", "sums"),
    *("width", "stride_s", "stride_t", "stride_w"),
)
_SIZES = ("length", "vocab", "width", "stride_s", "stride_t", "stride_w", "first_token", "n")
_FLOATS = ("bias", "value", "g", "e", "logps", "one_minus_p", "largest", "shift", "entropy")
_KINDS = (
    dict.fromkeys(_SIZES, "i32")
    | dict.fromkeys((*_FLOATS, "factor", "shares", "sums", "bias_out"), "*fp32")
    | dict.fromkeys(("index", "target", "order", "ends", "bounds"), "*i64")
    | dict.fromkeys(("item_tile", "item_first", "item_last"), "*i64")
    | {"token": "*i32", "inner": "fp32", "first_pair": "i32"}
)


def cases(target: Target) -> Iterator[KernelCase]:
    """Hidden states and weight of one dtype, or both as fp32 where they differ: the states are
    converted before, the weight inside."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    for hidden, weight in ((bf16, bf16), (fp16, fp16), (fp32, fp32), (fp32, bf16), (fp32, fp16)):
        grads = bf16 if hidden == bf16 else fp32
        of = {"hidden": hidden, "weight": weight, "dz": grads}
        like = Operands(torch.empty(1, 1, dtype=hidden), torch.empty(1, 1, dtype=weight), 1, grads)
        switches = like.switches(target)
        product = {**switches, "WIDE": hidden == fp32, "PRECISION": "ieee"}
        for cap in (False, True):
            flags = {**product, "CAP": cap, "ENTROPY": cap}
            absent = () if cap else ("bias", "e", "entropy", "bias_out")
            yield _case("pair", pair_kernel, target, of | {"out": grads}, flags, absent)
        yield _case("share", share_kernel, target, of | {"out": fp32}, switches)
        if hidden != weight:
            continue
        for out in dict.fromkeys((hidden, fp32)):
            yield _case("weight", weight_kernel, target, of | {"out": out}, switches)
        yield _case("sum", sum_kernel, target, {"out": hidden}, switches)
    yield _case("bias", bias_kernel, target, {"out": fp32}, switches)


def _case(
    name: str,
    fn: Any,
    target: Target,
    dtypes: dict[str, torch.dtype],
    switches: dict[str, Any],
    absent: tuple[str, ...] = (),
) -> KernelCase:
    config = config_of(name, target, switches["WIDE"], switches["PRECISION"])
    constants = {**config.constexprs, **switches, "TILE": 128, "stride_k": 1}
    constants = {k: v for k, v in constants.items() if k in fn.arg_names} | dict.fromkeys(absent)
    used = {k: DTYPE_NAMES[x] for k, x in dtypes.items() if k in fn.arg_names}
    kinds = _KINDS | {k: f"*{x}" for k, x in used.items()}
    inputs = ",".join(x for k, x in used.items() if k != "out")
    tf32 = switches["PRECISION"] == "tf32"
    multiplies = name in ("pair", "share", "weight")
    flags = {"bias+cap+entropy": switches.get("CAP"), "tf32": multiplies and tf32}
    options = "+".join(flag for flag, on in flags.items() if on)
    return KernelCase(
        name=f"routed_{name}[{inputs}->{used['out']}]({options})",
        fn=fn,
        signature={arg: kinds[arg] for arg in fn.arg_names if arg not in constants}
        | dict.fromkeys(absent, "constexpr"),
        constexprs=constants,
        config=config,
        dtype=next(iter(used.values())),
        needs_mma=multiplies and (tf32 or not switches["WIDE"]),
        divisible=tuple(k for k in _DIVISIBLE if k in fn.arg_names),
    )
