"""From hidden states to tiles of probabilities: logits, softmaxes, log-probabilities, entropies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from fused_grpo.memory import BLOCK_BYTES


@dataclass(frozen=True)
class Head:
    """A linear head: logits = softcap((hidden @ weight.T + bias) * logit_scale) / temperature."""

    weight: Tensor  # [V, H]
    bias: Tensor | None = None  # [V]
    logit_scale: float = 1.0
    softcap: float | None = None


def compute_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Logits are fp32 from fp32 accumulators for every input dtype, and fp64 for fp64 inputs."""
    return torch.float64 if torch.float64 in (hidden.dtype, weight.dtype) else torch.float32


def slices(size: int, tile: int) -> Iterator[slice]:
    return (slice(start, min(start + tile, size)) for start in range(0, size, tile))


@dataclass
class TileSums:
    """What the forward keeps of each (token, tile) [c, J], the target left out.

    A tile is stored as q, with q_v = q_top exp(z_v - top).
    """

    top: Tensor  # the largest logit; 0 where the tile holds no other entry, or only -inf
    mass: Tensor  # sum of exp(z - top): 0 where the tile is empty, else at least 1
    q_top: Tensor
    spread: Tensor | None  # -sum of q log q
    z_target: Tensor  # [c]

    def select(self, kept: Tensor) -> TileSums:
        return replace(self, **{k: t[kept] for k, t in vars(self).items() if t is not None})


def tile_softmax(
    rows: Tensor,
    target: Tensor,
    temperature: Tensor | float,
    head: Head,
    tile: int,
    weight_tile: Callable[[slice], Tensor],
    exps: Tensor | None,
    entropy: bool,
) -> TileSums:
    """The forward of a chunk; fills `exps` [c, V] with E, 0 at the target, where it is given."""
    vocab = head.weight.shape[0]
    dtype = compute_dtype(rows, head.weight)
    x = rows.to(dtype)
    if head.softcap is None:  # scale and temperature go into the rows, which are fewer
        x = x * (head.logit_scale / temperature)
    linear = _linear_cpu if dtype == torch.float32 and _has_onednn(x) else F.linear
    shape = (rows.shape[0], len(range(0, vocab, tile)))
    top, mass, q_top = (x.new_empty(shape) for _ in range(3))
    spread = x.new_empty(shape) if entropy else None
    z_target = x.new_empty(shape[0])
    for j, v in enumerate(slices(vocab, tile)):
        z = linear(x, weight_tile(v))
        _finish_logits(z, temperature, head, v)
        _take_out_target(z, target - v.start, z_target)
        top[:, j], mass[:, j], q_top[:, j] = _softmax_with_top(z)
        if exps is not None:
            exps[:, v] = z
        if spread is not None:
            for b in row_blocks(z):
                spread[b, j] = torch.special.entr(z[b]).sum(1)
    return TileSums(top, mass, q_top, spread, z_target)


def _softmax_with_top(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """z [c, v] -> q in place; returns (top, mass, q_top), see TileSums.

    torch's softmax is one pass over memory where exp, sum and their like are one each, but keeps
    its sum to itself: so the first logit gives its place to the largest, whose share tells the sum
    of the rest, and is added back afterwards.
    """
    largest = z.amax(1)
    top = torch.where(largest == -torch.inf, 0.0, largest)
    first = (z[:, 0] - top).exp()
    z[:, 0] = top
    torch.softmax(z, 1, out=z)
    q_top = z[:, 0].clone()
    z[:, 0] = first * q_top
    return top, (1 / q_top - 1) + first, q_top


def _has_onednn(x: Tensor) -> bool:
    return x.device.type == "cpu" and torch.backends.mkldnn.is_available()


def _linear_cpu(x: Tensor, weight: Tensor) -> Tensor:
    # oneDNN's fp32 product, which torch.mm does not pick for fp32: 1.1 to 1.3 times MKL's rate on
    # AMD, and the same fp32 accumulators.
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def row_blocks(z: Tensor, block_bytes: int = BLOCK_BYTES) -> Iterator[slice]:
    rows = z.shape[0]
    if z.device.type == "cpu":
        rows = max(1, block_bytes // (z.shape[1] * z.element_size()))
    return slices(z.shape[0], rows)


def _finish_logits(z: Tensor, temperature: Tensor | float, head: Head, v: slice) -> None:
    """Bias, scale, softcap and temperature, in this order, in place."""
    bias = None if head.bias is None else head.bias[v].to(z.dtype)
    if head.softcap is None:
        if bias is not None:
            z.add_(bias * (head.logit_scale / temperature))
        return
    if bias is not None:
        z.add_(bias)
    z.mul_(head.logit_scale / head.softcap).tanh_().mul_(head.softcap / temperature)


def _take_out_target(z: Tensor, column: Tensor, z_target: Tensor) -> None:
    """Moves the logits of targets that lie in this tile to `z_target`, leaving -inf."""
    hit = ((column >= 0) & (column < z.shape[1])).nonzero().squeeze(1)
    if hit.numel():
        z_target[hit] = z[hit, column[hit]]
        z[hit, column[hit]] = -torch.inf


@dataclass
class RowStats:
    """Statistics of a chunk's tokens."""

    logps: Tensor  # [c]
    one_minus_p: Tensor  # [c] 1 - p_target, accurate when p_target is near 1
    log_scale: Tensor  # [c, J] log P_j, where p_v = P_j q_v
    entropy: Tensor | None  # [c]

    def select(self, kept: Tensor) -> RowStats:
        return replace(self, **{k: t[kept] for k, t in vars(self).items() if t is not None})


def row_statistics(sums: TileSums) -> RowStats:
    empty = sums.mass < 0.5
    largest = torch.where(empty, -torch.inf, sums.top).amax(1, keepdim=True)
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    # logits are subtracted from each other first, so that their common size does not matter
    relative = sums.top - largest
    lse = torch.logsumexp(
        torch.where(empty, -torch.inf, relative + sums.mass.log()), 1, keepdim=True
    )
    d = lse + (largest - sums.z_target[:, None])
    zero = torch.zeros_like(d)
    logps = -torch.logaddexp(zero, d)[:, 0]
    log_others = -torch.logaddexp(zero, -d)  # log(1 - p_target)
    log_scale = relative - sums.q_top.log() - lse + log_others
    log_scale = torch.where(empty, -torch.inf, log_scale)
    entropy = None
    if sums.spread is not None:
        scale = log_scale.exp()
        others = scale * sums.spread - sums.mass * sums.q_top * torch.xlogy(scale, scale)
        entropy = (entropy_term(logps) + others.sum(1)).clamp_min(0)
    return RowStats(logps, torch.sigmoid(d)[:, 0], log_scale, entropy)


def entropy_term(logp: Tensor) -> Tensor:
    """-p log p, 0 at p = 0."""
    p = logp.exp()
    return torch.where(p > 0, -p * logp, 0.0)
