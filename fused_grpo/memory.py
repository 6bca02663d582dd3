"""How large the chunks are: the formula that bounds the extra memory of a call."""

from __future__ import annotations

import math
from typing import NamedTuple

DEFAULT_CHUNK_BYTES = 100 * 2**20
# On a GPU: 4,096 tokens and more at a vocabulary of 152 k. Products then run at full rate, and the
# weight's gradient is read and written few times.
GPU_CHUNK_BYTES = 2 * 2**30

# Rows of a tile are worked on a few at a time, so that several passes over them stay in cache.
BLOCK_BYTES = 2**20

# Vocabulary entries per matmul: larger tiles fall out of cache, smaller ones become matrix-vector
# products, which sum bf16 operands in bf16.
_MIN_TILE, _MAX_TILE = 64, 4096
_TRITON_TILE, _TRITON_MIN_TILE = 16384, 1024
_FORWARD_TOKENS = 1024  # without gradients nothing is gained by more


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
    chunk_bytes: int | None, vocab: int, width: int, stored: int = 4, itemsize: int = 4
) -> ChunkPlan:
    """The largest chunk for which `chunk_bytes_used` stays inside `chunk_bytes`.

    One token and a tile of 64 entries are the minimum, whatever the budget.
    """
    if chunk_bytes is None:
        chunk_bytes = DEFAULT_CHUNK_BYTES
    chunk_bytes -= chunk_bytes // 6  # left to what the matrix libraries allocate themselves
    weight_share = chunk_bytes // 5  # two tiles of the weight get at most this
    tile = min(_MAX_TILE, weight_share // (2 * width * itemsize))
    tile = min(vocab, max(_MIN_TILE, tile))

    def used(tokens: int) -> int:
        return chunk_bytes_used(tokens, tile, vocab, width, stored, itemsize)

    many = 2 + BLOCK_BYTES // (tile * itemsize)  # from here on blocks are at their largest
    per_token = used(many + 1) - used(many)
    tokens = many + (chunk_bytes - used(many)) // per_token
    if tokens < many:
        tokens = max(1, chunk_bytes - used(0)) // (used(1) - used(0))
    tokens = max(1, tokens)
    if stored == 0:
        tokens = min(tokens, _FORWARD_TOKENS)
    return ChunkPlan(tokens - tokens % 8 if tokens > 8 else tokens, tile)


def triton_bytes_used(
    tokens: int, tile: int, vocab: int, width: int, *, kept: int, operand: int, converts: bool
) -> int:
    """Bytes the Triton backend holds at once, gradients and vectors of length N aside.

    For c tokens and v = `tile` vocabulary entries at once:

        c V kept                 exponentials and the logits' gradient; 0 without gradients
        c v 4                    products in fp32, where nothing is kept and the product is torch's
        12 c (V / 128 + 1)       what is known of each token and tile
        c H (2 operand + 12)     hidden states, those left of them, their gradient, one temporary
        v H 4                    a part of the weight in another dtype, where one is needed
    """
    per_token = vocab * kept + 12 * (math.ceil(vocab / 128) + 1) + width * (2 * operand + 12)
    per_token += 0 if kept else 4 * tile
    return tokens * per_token + (4 * tile * width if converts else 0)


def plan_triton(
    chunk_bytes: int | None,
    vocab: int,
    width: int,
    *,
    kept: int,
    operand: int,
    converts: bool,
    on_gpu: bool,
) -> ChunkPlan:
    """The largest chunk for which `triton_bytes_used` stays inside `chunk_bytes`; see there.

    One token is the minimum. The tile is a multiple of every kernel's.
    """
    if chunk_bytes is None:
        chunk_bytes = GPU_CHUNK_BYTES if on_gpu else DEFAULT_CHUNK_BYTES
    tile = _TRITON_TILE if not kept else vocab
    if converts:
        fits = chunk_bytes // (5 * 4 * width)
        tile = max(_TRITON_MIN_TILE, min(tile, fits - fits % _TRITON_MIN_TILE))
    tile = min(tile, vocab)

    def used(tokens: int) -> int:
        return triton_bytes_used(
            tokens, tile, vocab, width, kept=kept, operand=operand, converts=converts
        )

    tokens = max(1, (chunk_bytes - used(0)) // (used(1) - used(0)))
    return ChunkPlan(tokens - tokens % 128 if tokens > 128 else tokens, tile)
