"""The epilogue of `forward` over logits that another matrix product has written: the fallback.

For operands that the fused product does not take (fp32, odd alignments, older GPUs): products in
fp32 [tokens, slice of the vocabulary] become exponentials in place, a tile at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_grpo_kernels.common import (
    exponentials,
    finish_logits,
    on_device_of,
)
from fused_grpo_kernels.registry import Config, KernelCase, Target, target_of
from fused_grpo_kernels.types import Epilogue, TileStats


@triton.jit(do_not_specialize=["n", "vocab", "first_tile", "tiles"])
def fold_kernel(
    x,  # [n, tiles * TILE], from entry first_tile * TILE of the vocabulary on
    bias,
    target,
    factor,
    top_out,
    mass_out,
    spread_out,
    n,
    vocab,
    first_tile,
    tiles,
    stride_x,
    inner,
    BM: tl.constexpr,
    TILE: tl.constexpr,
    CAP: tl.constexpr,
    STORE: tl.constexpr,
):
    m, local = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    first = (first_tile + local) * TILE
    rows, offset = m * BM + tl.arange(0, BM), tl.arange(0, TILE)
    inside = (rows < n)[:, None] & (first + offset < vocab)[None, :]
    at = x + rows.to(tl.int64)[:, None] * stride_x + (local * TILE + offset)[None, :]
    f = tl.load(factor + rows, mask=rows < n, other=0.0)
    y = tl.load(target + rows, mask=rows < n, other=-1).to(tl.int32)
    raw = tl.load(at, mask=inside, other=0.0)
    z = finish_logits(raw, bias, first, vocab, f, inner, TILE, CAP)
    e = exponentials(z, top_out, mass_out, spread_out, rows, first, y, n, vocab, TILE)
    if STORE:
        tl.store(at, e, mask=inside)


def config_of(target: Target) -> Config:
    if target.backend == "interpreter":
        return Config({"BM": 64, "TILE": 64}, 1, 1)
    return Config({"BM": 16, "TILE": 128}, 4, 1)


def tile_width(device: torch.device) -> int:
    """Vocabulary entries per tile."""
    return int(config_of(target_of(device)).constexprs["TILE"])


def fold(
    x: Tensor,
    first: int,
    vocab: int,
    targets: Tensor,
    epilogue: Epilogue,
    stats: TileStats,
    store: bool,
) -> None:
    """Fills in `stats` for the vocabulary entries first, first + 1, ... of fp32 products x [c, v].

    `first` is a multiple of the tile. With `store`, x becomes the exponentials, 0 at the target.
    """
    target = target_of(x.device)
    config = config_of(target)
    n, tiles = x.shape[0], triton.cdiv(x.shape[1], stats.tile)
    with on_device_of(x):
        fold_kernel[(triton.cdiv(n, config.constexprs["BM"]) * tiles,)](
            x,
            epilogue.bias,
            targets,
            epilogue.factor,
            stats.top,
            stats.mass,
            stats.spread,
            n,
            vocab,
            first // stats.tile,
            tiles,
            x.stride(0),
            epilogue.inner,
            **config.constexprs,
            CAP=epilogue.capped,
            STORE=store,
            **config.options,
        )


def cases(target: Target) -> Iterator[KernelCase]:
    config = config_of(target)
    for everything in (False, True):
        signature = {
            "x": "*fp32",
            "bias": "*fp32" if everything else "constexpr",
            "target": "*i64",
            "factor": "*fp32",
            "top_out": "*fp32",
            "mass_out": "*fp32",
            "spread_out": "*fp32" if everything else "constexpr",
            **dict.fromkeys(("n", "vocab", "first_tile", "tiles", "stride_x"), "i32"),
            "inner": "fp32",
        }
        absent = {name: None for name, kind in signature.items() if kind == "constexpr"}
        flags = {"CAP": everything, "STORE": True}
        yield KernelCase(
            name="fold(bias+cap+spread+store)" if everything else "fold(store)",
            fn=fold_kernel,
            signature=signature,
            constexprs={**absent, **config.constexprs, **flags},
            config=config,
            dtype="fp32",
            divisible=("x", "target", "factor", "stride_x"),
        )
