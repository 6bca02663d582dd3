"""Statistics of a token's whole distribution beside its log-probability and entropy.

They are read off the logits as these are computed, tile after tile, and are constants: no gradient
goes through them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fused_grpo.tiles import LogitTiles, row_blocks

# lse: logsumexp(z). log_sum_sq_probs: log sum_v p_v^2. mean_logits: mean_v z_v. is_top1: whether
# the target is the likeliest entry, the first of equals.
STATISTICS = ("lse", "log_sum_sq_probs", "mean_logits", "is_top1")


def check_outputs(outputs: Sequence[str]) -> tuple[str, ...]:
    """TypeError, ValueError for anything but a sequence of names in STATISTICS."""
    if isinstance(outputs, str) or not all(isinstance(name, str) for name in outputs):
        raise TypeError(f"outputs must be a tuple of names, not {outputs!r}")
    unknown = sorted(set(outputs) - set(STATISTICS))
    if unknown:
        raise ValueError(f"outputs has {', '.join(unknown)}; there are {', '.join(STATISTICS)}")
    return tuple(outputs)


class WatchedTiles(LogitTiles):
    """Tiles of logits that add up what they return; `statistics` [c, 4] at the end."""

    def __init__(self, tiles: LogitTiles, target: Tensor) -> None:
        # around any LogitTiles, which know how the logits are made
        self.tiles, self.x, self.head, self.target = tiles, tiles.x, tiles.head, target
        c = len(self.x)
        self.largest = self.x.new_full((c,), -torch.inf)
        self.sums = self.x.new_zeros(3, c)  # of e^(z - largest), e^2(z - largest), and z
        self.first = torch.zeros_like(target)  # where the largest stands

    def __call__(self, v: slice) -> Tensor:
        z: Tensor = self.tiles(v)
        for rows in row_blocks(z):
            self._add(z[rows], v.start, rows)
        return z

    def _add(self, z: Tensor, start: int, rows: slice) -> None:
        before, total = self.largest[rows], self.sums[:, rows]
        top, where = z.max(1)
        now = torch.maximum(before, top)
        shift = torch.where(now == -torch.inf, 0.0, now)
        e = (z - shift[:, None]).exp_()
        faded = (before - shift).exp()
        total[0] = total[0] * faded + e.sum(1)
        total[1] = total[1] * faded.square() + e.square_().sum(1)
        total[2] += z.sum(1)
        self.first[rows] = torch.where(top > before, where + start, self.first[rows])
        self.largest[rows] = now

    @property
    def statistics(self) -> Tensor:
        total, squares, z = self.sums
        columns = (
            self.largest + total.log(),
            squares.log() - 2 * total.log(),
            z / self.head.weight.shape[0],
            (self.first == self.target).to(z.dtype),
        )
        return torch.stack(columns, 1)


def named(statistics: Tensor, outputs: Sequence[str]) -> dict[str, Tensor]:
    """[..., 4] -> the ones asked for, by name."""
    columns = dict(zip(STATISTICS, statistics.unbind(-1), strict=True))
    columns["is_top1"] = columns["is_top1"] != 0
    return {name: columns[name] for name in outputs}
