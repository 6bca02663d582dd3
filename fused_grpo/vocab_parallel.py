"""A head whose vocabulary is sharded over the ranks of a process group.

Every rank computes the logits of its own rows W_r, tile by tile as ever. Per chunk of tokens there
is one exchange of four numbers a token (the shard's largest logit, its mass, its share of the
entropy, and the target's logit where the shard has it), from which every rank computes the same
statistics to the last bit: log-probabilities, and with them clips and gradients g_t, cannot differ
between ranks. P_j is then the factor between a tile's softmax and the distribution over the whole
vocabulary, so that everything after it (`gradients`) knows p_v of its own rows and nothing else
has to be told. dW_r and db_r stay where they are; dh = sum_r dZ_r W_r is summed over the ranks,
once per chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fused_grpo.groups import VocabShard
from fused_grpo.tiles import RowStats, TileSums, row_statistics, tiles_spread


def shard_statistics(sums: TileSums, shard: VocabShard) -> RowStats:
    """`row_statistics` over all shards, from the tiles of this one, whose z_target [c] is 0 where
    another has the target; completes it."""
    mine, log_scale = _one_tile(sums)
    spread = torch.zeros_like(sums.z_target) if mine.spread is None else mine.spread[:, 0]
    numbers = torch.stack([mine.top[:, 0], mine.mass[:, 0], spread, sums.z_target])
    top, mass, spread, z_target = shard.gather(numbers).permute(1, 2, 0)
    sums.z_target.copy_(z_target.sum(1))  # one of them is not 0: exact
    everything = TileSums(
        top, mass, _share_of_largest(mass), None if mine.spread is None else spread, sums.z_target
    )
    stats = row_statistics(everything)
    stats.log_scale = stats.log_scale[:, shard.rank, None] + log_scale
    return stats


def _one_tile(sums: TileSums) -> tuple[TileSums, Tensor]:
    """(the shard as one tile [c, 1], log of the factors [c, J] from its tiles' softmaxes to its
    own)."""
    empty = sums.mass < 0.5
    top = torch.where(empty, -torch.inf, sums.top).amax(1, keepdim=True)
    top = torch.where(top == -torch.inf, 0.0, top)
    relative = torch.where(empty, -torch.inf, sums.top - top)
    mass = (sums.mass * relative.exp()).sum(1, keepdim=True)
    log_scale = relative - sums.q_top.log() - mass.log()
    log_scale = torch.where(empty, -torch.inf, log_scale)
    spread = None
    if sums.spread is not None:
        spread = tiles_spread(sums, log_scale.exp()).sum(1, keepdim=True)
    return TileSums(top, mass, _share_of_largest(mass), spread, sums.z_target), log_scale


def _share_of_largest(mass: Tensor) -> Tensor:
    return torch.where(mass < 0.5, 1.0, 1 / mass)
