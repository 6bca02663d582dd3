"""Log-ratios of tokens and of whole sequences, on flat vectors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def per_sequence(values: Tensor, lengths: Tensor, reduce: str = "sum") -> Tensor:
    """[n] -> [S]: "sum" or "max" (of values >= 0) over each sequence, 0 for an empty one.

    `lengths` [S] are of the sequences as they stand in `values`, and add up to n.
    """
    if values.numel() == 0:
        return values.sum() + values.new_zeros(lengths.shape)  # 0 with a graph, as of any other
    # a sum per segment rather than scattered adds, which are not deterministic on a GPU
    return torch.segment_reduce(values, reduce, lengths=lengths, initial=0, unsafe=True)


def _mean(log_ratio: Tensor, sequence: Tensor, lengths: Tensor) -> Tensor:
    return (per_sequence(log_ratio, lengths) / lengths.clamp_min(1))[sequence]


def _straight_through(log_ratio: Tensor, sequence: Tensor, lengths: Tensor) -> Tensor:
    value = _mean(log_ratio.detach(), sequence, lengths)
    return value + (log_ratio - log_ratio.detach())


def _sum(log_ratio: Tensor, sequence: Tensor, lengths: Tensor) -> Tensor:
    return per_sequence(log_ratio, lengths)[sequence]


# level of the ratio -> its logarithm, from the logarithms of the tokens' ratios
LEVELS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "token": lambda log_ratio, sequence, lengths: log_ratio,
    "sequence": _mean,
    "sequence_token": _straight_through,
    "sequence_sum": _sum,
}


def clamp_log_ratio(log_ratio: Tensor, limit: float | None) -> Tensor:
    """Clamped to +- limit: exp stays finite, and the gradient is 0 beyond; None: as it is."""
    return log_ratio if limit is None else log_ratio.clamp(-limit, limit)
