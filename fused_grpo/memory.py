"""How large the chunks are: the formula that bounds the extra memory of a call."""

from __future__ import annotations

from typing import NamedTuple

DEFAULT_CHUNK_BYTES = 100 * 2**20
# Vocabulary entries per matmul: larger tiles fall out of cache, smaller ones become matrix-vector
# products, which sum bf16 operands in bf16.
_MIN_TILE, _MAX_TILE = 64, 4096


class ChunkPlan(NamedTuple):
    """Tokens per chunk, vocabulary entries per tile."""

    tokens: int
    tile: int


def plan_chunks(chunk_bytes: int, vocab: int, width: int, itemsize: int = 4) -> ChunkPlan:
    """The largest chunk that keeps a pass over the head inside `chunk_bytes`.

    A pass holds, for c tokens and tiles of v vocabulary entries,

        c V        the chunk's logits
        c v        one tile of them, before it is stored
        2 v H      a tile of the weight and of its gradient, in the dtype of the logits
        4 c H      hidden states, scaled hidden states, their gradient, one temporary

    numbers of `itemsize` bytes (8 for fp64 inputs, else 4). One token is the minimum, whatever the
    budget.
    """
    tile = min(vocab, max(_MIN_TILE, min(_MAX_TILE, chunk_bytes // (8 * 2 * width * itemsize))))
    left = chunk_bytes // itemsize - 2 * tile * width
    tokens = left // (vocab + tile + 4 * width)
    return ChunkPlan(max(1, tokens - tokens % 8 if tokens > 8 else tokens), tile)
