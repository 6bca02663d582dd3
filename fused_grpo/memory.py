"""How large the chunks are: the formula that bounds the extra memory of a call."""

from __future__ import annotations

import math
from collections.abc import Iterator
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
# A routed pass depends on the head alone for its tiles, so that every budget gives the same bits;
# and on multiples of so many rows, since products of one row (MKL: of few) round differently.
_ROUTED_MIN_TILE, _ROUTED_TILE_ENTRIES, ROUTED_ROWS = 512, 2**22, 16
_TRITON_TILE, _TRITON_MIN_TILE = 16384, 1024
_FORWARD_TOKENS = 512  # without gradients nothing is gained by more
VECTOR_BYTES = 128  # per token: ids, masks, log-probabilities, losses and their like
# Of a routed pass: two vectors that its noise is read from; with the seed changes what they hold.
NOISE_WINDOWS, NOISE_ROWS = 2**16, 2**12
NOISE_BYTES = 4 * (NOISE_WINDOWS + 32 * NOISE_ROWS)
# Of an entry that is kept: while it is found, while it waits, while the weight's gradient forms.
FOUND_BYTES, WAITING_BYTES, SUMMED_BYTES = 56, 12, 32


def slices(size: int, tile: int) -> Iterator[slice]:
    return (slice(start, min(start + tile, size)) for start in range(0, size, tile))


class ChunkPlan(NamedTuple):
    """Tokens per chunk, vocabulary entries per tile."""

    tokens: int
    tile: int


class Extra(NamedTuple):
    """What a pass has beside the policy's whole distribution; see `chunk_bytes_used`."""

    ref_width: int = 0  # H_r of a reference head
    top_k: int = 0  # entries of a top-k divergence
    ids: int = 0  # K of support_ids
    cutoff: bool = False  # a support that is found in all logits of a token
    support: bool = False
    groups: bool = False  # a routed pass, which adds up groups of neighbours


PLAIN = Extra()


def cutoff_rows(tokens: int, vocab: int) -> int:
    """Rows whose support is looked for at a time: sorting takes up to 48 bytes an entry."""
    return max(1, min(tokens, BLOCK_BYTES // (48 * vocab)))


def chunk_bytes_used(
    tokens: int,
    tile: int,
    vocab: int,
    width: int,
    stored: int,
    itemsize: int = 4,
    extra: Extra = PLAIN,
) -> int:
    """Bytes a pass over the head holds at once, gradients and vectors of length N aside.

    For c tokens and tiles of v vocabulary entries:

        c V stored               the chunk's exponentials, `stored` bytes each; 0 without gradients
        c v (itemsize + 2)       one tile of logits, or of their gradient and its rounded copy
        2 v H itemsize           a tile of the weight as fp32, and of its gradient
        4 c H itemsize           hidden states, scaled hidden states, their gradient, one temporary
        16 c V / v itemsize      what is known of each token and tile
        2 BLOCK_BYTES            temporaries of a block of rows, at most two tiles

    With a reference head of width H_r also

        c v 2 itemsize           its tile of logits, and the difference of the two
        v H_r itemsize           a tile of its weight as fp32
        2 c H_r itemsize         its hidden states, and the scaled ones
        16 c V / v itemsize      what is known of each token and tile
        3 BLOCK_BYTES            temporaries of a block of rows, at most three tiles
        160 c k                  the k entries of a top-k divergence, and what they compete with

    and with a sampling support

        2 c v                    which entries of a tile are kept
        40 c K                   `support_ids`, and where a tile's are
        48 V max(1, rows)        the rows that are sorted at a time, if any (`cutoff_rows`)

    A routed pass forms no gradient of a tile (c v 2 and v H itemsize less), but has

        c V (itemsize + 16) / 32  what is known of each token and group
    """
    tiles = math.ceil(vocab / tile)
    numbers, weights, blocks = tile + 4 * width + 16 * tiles, 2 * width, 2
    per_token = vocab * stored + 2 * tile + 160 * extra.top_k + 40 * extra.ids
    if extra.ref_width:
        numbers += 2 * tile + 2 * extra.ref_width + 16 * tiles
        weights, blocks = weights + extra.ref_width, blocks + 3
    if extra.support:
        per_token += 2 * tile
    if extra.groups:
        per_token += vocab * (itemsize + 16) // 32 - 2 * tile
        weights -= width
    total = tokens * (per_token + numbers * itemsize) + tile * weights * itemsize
    total += blocks * min(BLOCK_BYTES, tokens * tile * itemsize)
    return total + (48 * vocab * cutoff_rows(tokens, vocab) if extra.cutoff else 0)


def plan_chunks(
    chunk_bytes: int | None,
    vocab: int,
    width: int,
    stored: int = 4,
    itemsize: int = 4,
    extra: Extra = PLAIN,
    tokens: int = 0,
) -> ChunkPlan:
    """The largest chunk for which `chunk_bytes_used` stays inside `chunk_bytes`.

    A fifth is left to what the matrix libraries allocate themselves, `NOISE_BYTES` to a routed
    pass, and up to half of the rest to the vectors of all `tokens` of the call. One token and a
    tile of 64 entries are the minimum, whatever the budget.
    """
    if chunk_bytes is None:
        chunk_bytes = DEFAULT_CHUNK_BYTES
    chunk_bytes -= chunk_bytes // 5
    if extra.groups:
        chunk_bytes -= min(chunk_bytes // 2, NOISE_BYTES)
    chunk_bytes -= min(chunk_bytes // 2, VECTOR_BYTES * tokens)
    weight_share = chunk_bytes // 6  # the tiles of the weights get at most this
    tile = min(_MAX_TILE, weight_share // ((2 * width + extra.ref_width) * itemsize))
    tile = min(vocab, max(_MIN_TILE, tile - tile % _MIN_TILE))
    if extra.groups:
        tile = min(vocab, routed_tile(width))

    def fits(c: int) -> bool:
        used = chunk_bytes_used(c, tile, vocab, width, stored, itemsize, extra)
        return used <= chunk_bytes

    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    low = low if stored else min(low, _FORWARD_TOKENS)
    low = low - low % 8 if low > 8 else low
    if extra.groups:
        low = max(ROUTED_ROWS, low - low % ROUTED_ROWS)
    if tokens > low:  # chunks of one size: a small last one costs nearly as much as a whole one
        low = math.ceil(tokens / math.ceil(tokens / low))
    if extra.groups:
        low += -low % ROUTED_ROWS
    return ChunkPlan(low, tile)


def routed_tile(width: int) -> int:
    """Vocabulary entries per product of a routed pass."""
    tile = 1 << (_ROUTED_TILE_ENTRIES // width).bit_length() - 1
    return min(_MAX_TILE, max(_ROUTED_MIN_TILE, tile))


def waiting_entries(chunk_bytes: int | None) -> int:
    """Entries of a routed pass that wait at most before they are added to the weight's gradient."""
    return (DEFAULT_CHUNK_BYTES if chunk_bytes is None else chunk_bytes) // 128


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
