"""How large the chunks are: the formula that bounds the extra memory of a call."""

from __future__ import annotations

import math
from typing import NamedTuple

DEFAULT_CHUNK_BYTES = 100 * 2**20

# Rows of a tile are worked on a few at a time, so that several passes over them stay in cache.
BLOCK_BYTES = 2**20

# Vocabulary entries per matmul: larger tiles fall out of cache, smaller ones become matrix-vector
# products, which sum bf16 operands in bf16.
_MIN_TILE, _MAX_TILE = 64, 4096
_FORWARD_TOKENS = 512  # without gradients nothing is gained by more
_VECTOR_BYTES = 128  # per token: ids, masks, log-probabilities, losses and their like


class ChunkPlan(NamedTuple):
    """Tokens per chunk, vocabulary entries per tile."""

    tokens: int
    tile: int


def chunk_bytes_used(
    tokens: int, tile: int, vocab: int, width: int, stored: int, itemsize: int = 4
) -> int:
    """Bytes a pass over the head holds at once, gradients and vectors of length N aside.

    For c tokens and tiles of v vocabulary entries:

        c V stored               the chunk's exponentials, `stored` bytes each; 0 without gradients
        c v (itemsize + 2)       one tile of logits, or of their gradient and its rounded copy
        2 v H itemsize           a tile of the weight as fp32, and of its gradient
        4 c H itemsize           hidden states, scaled hidden states, their gradient, one temporary
        16 c V / v itemsize      what is known of each token and tile
        2 BLOCK_BYTES            temporaries of a block of rows, at most two tiles
    """
    numbers = tile + 4 * width + 16 * math.ceil(vocab / tile)
    per_token = vocab * stored + 2 * tile + numbers * itemsize
    blocks = 2 * min(BLOCK_BYTES, tokens * tile * itemsize)
    return tokens * per_token + 2 * tile * width * itemsize + blocks


def plan_chunks(
    chunk_bytes: int, vocab: int, width: int, stored: int = 4, itemsize: int = 4, tokens: int = 0
) -> ChunkPlan:
    """The largest chunk for which `chunk_bytes_used` stays inside `chunk_bytes`.

    A fifth is left to what the matrix libraries allocate themselves, and up to half of the rest to
    the vectors of all `tokens` of the call. One token and a tile of 64 entries are the minimum,
    whatever the budget.
    """
    chunk_bytes -= chunk_bytes // 5
    chunk_bytes -= min(chunk_bytes // 2, _VECTOR_BYTES * tokens)
    weight_share = chunk_bytes // 5  # two tiles of the weight get at most this
    tile = min(_MAX_TILE, weight_share // (2 * width * itemsize))
    tile = min(vocab, max(_MIN_TILE, tile - tile % _MIN_TILE))

    def used(c: int) -> int:
        return chunk_bytes_used(c, tile, vocab, width, stored, itemsize)

    many = 2 + BLOCK_BYTES // (tile * itemsize)  # from here on blocks are at their largest
    per_token = used(many + 1) - used(many)
    fits = many + (chunk_bytes - used(many)) // per_token
    if fits < many:
        fits = max(1, chunk_bytes - used(0)) // (used(1) - used(0))
    fits = max(1, fits)
    if stored == 0:
        fits = min(fits, _FORWARD_TOKENS)
    return ChunkPlan(fits - fits % 8 if fits > 8 else fits, tile)
