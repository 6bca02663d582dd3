"""What passes between the launchers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Epilogue:
    """From products x = h W^T to logits: factor_t (x + b), or factor_t tanh(inner (x + b))."""

    bias: Tensor | None  # [V]
    factor: Tensor  # [c] fp32: scale / temperature; with a softcap, cap / temperature
    inner: float  # 1; with a softcap, scale / cap
    capped: bool

    @staticmethod
    def of(
        bias: Tensor | None, scale: float, softcap: float | None, temperature: Tensor
    ) -> Epilogue:
        """`temperature` [c] fp32."""
        outer, inner = (scale, 1.0) if softcap is None else (softcap, scale / softcap)
        return Epilogue(bias, outer / temperature, inner, softcap is not None)


@dataclass(frozen=True)
class TileStats:
    """Of each (tile, token), the target left out; see `common`. All fp32."""

    top: Tensor  # [J, c]
    mass: Tensor  # [J, c]
    spread: Tensor | None  # [J, c]
    tile: int


@dataclass(frozen=True)
class RowStats:
    """Of each token [c], fp32; p_v = e_v exp(top_j - largest - shift) for v in tile j."""

    logps: Tensor
    one_minus_p: Tensor  # accurate where p is near 1
    largest: Tensor
    shift: Tensor
    z_target: Tensor
    entropy: Tensor | None

    def select(self, counted: Tensor) -> RowStats:
        """With 0 as the log-probability, 1 - p and entropy of the others."""

        def zero(x: Tensor) -> Tensor:
            return torch.where(counted, x, 0)

        entropy = None if self.entropy is None else zero(self.entropy)
        logps, one_minus_p = zero(self.logps), zero(self.one_minus_p)
        return replace(self, logps=logps, one_minus_p=one_minus_p, entropy=entropy)


def empty_statistics(
    tokens: int, vocab: int, tile: int, spread: bool, device: torch.device
) -> TileStats:
    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    shape = (-(-vocab // tile), tokens)
    return TileStats(floats(*shape), floats(*shape), floats(*shape) if spread else None, tile)
