"""How large the chunks are: the formula that bounds the extra memory of a call."""

from __future__ import annotations

from typing import NamedTuple

DEFAULT_CHUNK_BYTES = 100 * 2**20

# Vocabulary entries per matmul: larger tiles fall out of cache, smaller ones become matrix-vector
# products, which sum bf16 operands in bf16.
_MIN_TILE, _MAX_TILE = 64, 4096
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
    """
    per_token = vocab * stored + tile * (itemsize + 2) + 4 * width * itemsize
    return tokens * per_token + 2 * tile * width * itemsize


def plan_chunks(
    chunk_bytes: int, vocab: int, width: int, stored: int = 4, itemsize: int = 4
) -> ChunkPlan:
    """The largest chunk for which `chunk_bytes_used` stays inside `chunk_bytes`.

    One token and a tile of 64 entries are the minimum, whatever the budget.
    """
    weight_share = chunk_bytes // 5  # two tiles of the weight get at most this
    tile = min(_MAX_TILE, weight_share // (2 * width * itemsize))
    tile = min(vocab, max(_MIN_TILE, tile))

    left = chunk_bytes - chunk_bytes_used(0, tile, vocab, width, stored, itemsize)
    per_token = chunk_bytes_used(1, tile, vocab, width, stored, itemsize) - (chunk_bytes - left)
    tokens = max(1, left // per_token)
    if stored == 0:
        tokens = min(tokens, _FORWARD_TOKENS)
    return ChunkPlan(tokens - tokens % 8 if tokens > 8 else tokens, tile)
