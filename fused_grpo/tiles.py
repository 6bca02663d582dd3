"""From hidden states to tiles of probabilities: logits, softmaxes, log-probabilities, entropies."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from fused_grpo.memory import BLOCK_BYTES, slices
from fused_grpo.support import ChunkSupport, Support

if TYPE_CHECKING:
    from fused_grpo.divergence import ReferenceTiles
    from fused_grpo.groups import VocabShard

GROUP = 32  # neighbours in the vocabulary whose common mass the routed backward looks at first


@dataclass(frozen=True)
class Head:
    """A linear head: logits = softcap((hidden @ weight.T + bias) * logit_scale) / temperature.

    With an adapter, hidden @ weight.T + lora_hidden @ lora_weight.T in place of the first product.
    """

    weight: Tensor  # [V, H]
    bias: Tensor | None = None  # [V]
    logit_scale: float = 1.0
    softcap: float | None = None
    lora_weight: Tensor | None = None  # [V, r]
    shard: VocabShard | None = None  # weight and bias hold these rows of a larger head

    @property
    def rank(self) -> int:
        return 0 if self.lora_weight is None else self.lora_weight.shape[1]

    @property
    def rows(self) -> int:
        """Of the weight; where there are shards, of the largest: all ranks plan alike."""
        return self.weight.shape[0] if self.shard is None else self.shard.largest

    @property
    def vocab(self) -> int:
        """Of the whole head."""
        return self.weight.shape[0] if self.shard is None else self.shard.vocab

    def local(self, target: Tensor) -> Tensor:
        """Rows of `weight`, from ids; outside of [0, V_r) where another shard has them."""
        return target if self.shard is None else target - self.shard.start


def compute_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Logits are fp32 from fp32 accumulators for every input dtype, and fp64 for fp64 inputs."""
    return torch.float64 if torch.float64 in (hidden.dtype, weight.dtype) else torch.float32


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

    @staticmethod
    def empty(like: Tensor, tokens: int, tiles: int, entropy: bool) -> TileSums:
        top, mass, q_top = (like.new_empty(tokens, tiles) for _ in range(3))
        spread = like.new_empty(tokens, tiles) if entropy else None
        return TileSums(top, mass, q_top, spread, like.new_empty(tokens))

    def log_norm(self, j: int | slice) -> Tensor:
        """log q_v = z_v - log_norm of its tile."""
        return self.top[:, j] - self.q_top[:, j].log()


class LogitTiles:
    """The logits of a chunk of tokens [c, H], computed a tile of vocabulary at a time."""

    def __init__(
        self,
        rows: Tensor,
        temperature: Tensor | float,
        head: Head,
        weight_tile: Callable[[slice], Tensor],
        lora_rows: Tensor | None = None,
    ) -> None:
        self.temperature, self.head, self.weight_tile = temperature, head, weight_tile
        dtype = compute_dtype(rows, head.weight)
        self.x = rows.to(dtype)
        self.u = None if lora_rows is None else lora_rows.to(dtype)
        if head.softcap is None:  # scale and temperature go into the rows, which are fewer
            self.x = self.x * (head.logit_scale / temperature)
            self.u = None if self.u is None else self.u * (head.logit_scale / temperature)
        on_cpu = dtype == torch.float32 and _has_onednn(self.x)
        self._linear = linear_cpu if on_cpu else F.linear

    def __call__(self, v: slice) -> Tensor:
        """[c, v], the caller's to change."""
        z = self._linear(self.x, self.weight_tile(v))
        if self.u is not None and self.head.lora_weight is not None:
            z.addmm_(self.u, self.head.lora_weight[v].to(z.dtype).T)
        _finish_logits(z, self.temperature, self.head, v)
        return z

    def select(self, rows: Tensor) -> LogitTiles:
        """Of the tokens at `rows`."""
        chosen = copy.copy(self)
        chosen.x = self.x[rows]
        chosen.u = None if self.u is None else self.u[rows]
        if isinstance(self.temperature, Tensor):
            chosen.temperature = self.temperature[rows]
        return chosen


def tile_softmax(
    logits: LogitTiles,
    target: Tensor,
    tile: int,
    exps: list[Tensor] | None,
    entropy: bool,
    support: Support | None = None,
    reference: ReferenceTiles | None = None,
    groups: Tensor | None = None,
    kept: Tensor | None = None,
) -> tuple[TileSums, ChunkSupport | None]:
    """The forward of a chunk; fills `exps`, tile by tile, with q, 0 at the target, where it is
    given, and `groups` with the sums of its groups of GROUP neighbours.

    Where a support has to be found in all logits first, `kept` [c, V] holds these meanwhile; `exps`
    may be its tiles.
    """
    c, vocab = logits.x.shape[0], logits.head.weight.shape[0]
    read: Callable[[slice], Tensor] = logits
    within = None
    if support is not None:
        if support.needs_logits:
            read = _kept_logits(logits, tile, kept)
        cutoff = support.cutoff(kept)
        within = ChunkSupport(support, cutoff, target)
    sums = TileSums.empty(logits.x, c, len(range(0, vocab, tile)), entropy)
    if logits.head.shard is not None:  # it may have no column here
        sums.z_target.zero_()
    if reference is not None:
        reference.start(sums, within is not None)
    for j, v in enumerate(slices(vocab, tile)):
        z = read(v)
        take_out_target(z, target - v.start, sums.z_target)
        if within is not None:
            within.restrict(z, v)
        if reference is not None:
            reference.read(z, target, v, j)
        q = z
        if exps is not None and exps[j].dtype == z.dtype and reference is None:
            q = exps[j][:, : z.shape[1]]
        sums.top[:, j], sums.mass[:, j], sums.q_top[:, j] = softmax_with_top(z, q)
        if reference is not None:
            reference.compare(q, sums, j)
        if exps is not None and q is z:
            exps[j][:, : z.shape[1]] = z
        if groups is not None and exps is not None:
            add_up_groups(exps[j], v.start, groups)
        if sums.spread is not None:
            for b in row_blocks(q):
                sums.spread[b, j] = torch.special.entr(q[b]).sum(1)
    return sums, within


def add_up_groups(q: Tensor, start: int, groups: Tensor) -> Tensor:
    """Writes the sums of a tile's groups of GROUP neighbours into their place in `groups`, which is
    returned; its first column is `start`."""
    first, count = start // GROUP, q.shape[1] // GROUP
    of_tile = groups[:, first : first + count]
    return torch.sum(q.unflatten(1, (-1, GROUP)), 2, dtype=groups.dtype, out=of_tile)


def _kept_logits(logits: LogitTiles, tile: int, kept: Tensor | None) -> Callable[[slice], Tensor]:
    """Fills `kept` [c, V], and reads copies of its tiles."""
    assert kept is not None
    for v in slices(kept.shape[1], tile):
        kept[:, v] = logits(v)
    return lambda v: kept[:, v].contiguous() if kept.shape[1] > tile else kept[:, v].clone()


def softmax_with_top(z: Tensor, q: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """z [c, v] -> q, in place where no other is given; returns (top, mass, q_top), see TileSums.

    torch's softmax is one pass over memory where exp, sum and their like are one each, but keeps
    its sum to itself: so the first logit gives its place to the largest, whose share tells the sum
    of the rest, and is added back afterwards.
    """
    largest = z.amax(1)
    top = torch.where(largest == -torch.inf, 0.0, largest)
    first = (z[:, 0] - top).exp()
    z[:, 0] = top
    q = z if q is None else q
    torch.softmax(z, 1, out=q)
    q_top = q[:, 0].clone()
    q[:, 0] = first * q_top
    return top, (1 / q_top - 1) + first, q_top


def _has_onednn(x: Tensor) -> bool:
    return x.device.type == "cpu" and torch.backends.mkldnn.is_available()


def linear_cpu(x: Tensor, weight: Tensor, bias: Tensor | None = None, then: str = "none") -> Tensor:
    """oneDNN's product, followed by a function of each element on its way to memory.

    torch.mm does not pick it for fp32: 1.1 to 1.3 times MKL's rate on AMD, and the same fp32
    accumulators. It refuses a weight whose rows overlap in memory, so that is copied.
    """
    (n, m), (down, right) = weight.shape, weight.stride()
    if down < m * right and right < n * down:
        weight = weight.contiguous()
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, then, [], "")


def row_blocks(z: Tensor) -> Iterator[slice]:
    rows = z.shape[0]
    if z.device.type == "cpu":
        rows = max(1, BLOCK_BYTES // (z.shape[1] * z.element_size()))
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


def rows_in_tile(column: Tensor, width: int) -> Tensor:
    """The rows [m] whose target's column, counted from the tile's first, lies in the tile."""
    return ((column >= 0) & (column < width)).nonzero().squeeze(1)


def take_out_target(z: Tensor, column: Tensor, z_target: Tensor) -> None:
    """Moves the logits of targets that lie in this tile to `z_target`, leaving -inf."""
    hit = rows_in_tile(column, z.shape[1])
    if hit.numel():
        z_target[hit] = z[hit, column[hit]]
        z[hit, column[hit]] = -torch.inf


def one_softmax(sums: TileSums) -> tuple[TileSums, Tensor]:
    """Tiles as one softmax of the row, and [c, J] the factors that make it of theirs."""
    empty = sums.mass < 0.5
    lse = torch.logsumexp(torch.where(empty, -torch.inf, sums.top + sums.mass.log()), 1, True)
    nothing = lse == -torch.inf
    shares = (sums.top - sums.q_top.log() - lse).exp().masked_fill_(empty, 0)
    ones = torch.ones_like(lse)
    top, mass = lse.masked_fill(nothing, 0), ones.masked_fill(nothing, 0)
    return TileSums(top, mass, ones, None, sums.z_target), shares


@dataclass
class RowStats:
    """Statistics of a chunk's tokens."""

    logps: Tensor  # [c]
    one_minus_p: Tensor  # [c] 1 - p_target, accurate when p_target is near 1
    log_scale: Tensor  # [c, J] log P_j, where p_v = P_j q_v
    entropy: Tensor | None  # [c]


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
    # infinity over infinity, not the whole: what overflowed must not look like certainty
    d = torch.where(sums.z_target[:, None] == torch.inf, torch.nan, d)
    zero = torch.zeros_like(d)
    logps = -torch.logaddexp(zero, d)[:, 0]
    log_others = -torch.logaddexp(zero, -d)  # log(1 - p_target)
    log_scale = relative - sums.q_top.log() - lse + log_others
    log_scale = torch.where(empty, -torch.inf, log_scale)
    entropy = None
    if sums.spread is not None:
        scale = log_scale.exp()
        others = tiles_spread(sums, scale).sum(1)
        entropy = (entropy_term(logps) + others).clamp_min(0)
    return RowStats(logps, torch.sigmoid(d)[:, 0], log_scale, entropy)


def tiles_spread(sums: TileSums, scale: Tensor) -> Tensor:
    """[c, J] sum over a tile of -p log p, where p = scale q."""
    assert sums.spread is not None
    return scale * sums.spread - sums.mass * sums.q_top * torch.xlogy(scale, scale)


def entropy_term(logp: Tensor) -> Tensor:
    """-p log p, 0 at p = 0."""
    p = logp.exp()
    return torch.where(p == 0, 0.0, -p * logp)
