"""Covering arrays: every pair of option values meets in some row, in few rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch


def pairwise(factors: dict[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Rows in which every value of every factor meets every value of every other one (greedy)."""
    names = list(factors)
    missing = {
        (a, x, b, y)
        for a, b in itertools.combinations(range(len(names)), 2)
        for x in range(len(factors[names[a]]))
        for y in range(len(factors[names[b]]))
    }
    g = torch.Generator().manual_seed(seed)
    table: list[dict[str, Any]] = []
    while missing:
        a, x, b, y = min(missing)
        row = {a: x, b: y}
        for column in torch.randperm(len(names), generator=g).tolist():
            if column in row:
                continue

            gains = [
                sum(_pair(column, value, c, v) in missing for c, v in row.items())
                for value in range(len(factors[names[column]]))
            ]
            row[column] = gains.index(max(gains))
        missing -= {_pair(a, row[a], b, row[b]) for a, b in itertools.combinations(row, 2)}
        table.append({name: factors[name][row[i]] for i, name in enumerate(names)})
    return table


def _pair(a: int, x: int, b: int, y: int) -> tuple[int, int, int, int]:
    return (a, x, b, y) if a < b else (b, y, a, x)
