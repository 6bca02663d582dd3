"""KL(policy || reference) over the whole vocabulary, from tiles of both heads' logits.

With the mass P_j of tile j under the policy, R_j under the reference, and the target y apart, the
chain rule of the divergence gives a sum without large cancelling terms:

    KL(p || r) = KL((p_y, P) || (r_y, R)) + sum_j P_j KL(p / P_j || r / R_j in tile j)
    dKL/dz_v = p_v (log p_v - log r_v - KL)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fused_grpo.checks import wide_dtype
from fused_grpo.tiles import (
    LogitTiles,
    RowStats,
    TileSums,
    row_blocks,
    row_statistics,
    softmax_with_top,
    take_out_target,
)

# stands for log(p / r) where p is 0: finite, so that p log(p / r) is 0
_NO_MASS = -1e4


def kl_terms(p: Tensor, r: Tensor, delta: Tensor) -> Tensor:
    """p log(p / r) - p + r >= 0 with delta = log(p / r): sums to the KL, accurate for p near r.

    The second form keeps r where p has vanished and exp(-delta) would overflow.
    """
    near = torch.expm1(-delta).add_(delta).mul_(p)
    return torch.where(delta > -1, near, torch.addcmul(r - p, p, delta))


def _finite(delta: Tensor) -> Tensor:
    """In place: log(p / r) where p is 0, whatever r. NaN logits still show, in p or r itself."""
    return delta.nan_to_num_(nan=_NO_MASS, posinf=torch.inf, neginf=_NO_MASS)


@dataclass
class Divergence:
    """The KL of a chunk's tokens, and what its gradient needs.

    log(p_v / r_v) is `shift` plus what `deltas` hold for v (0 for top-k, where `ids` say more).
    """

    kl: Tensor  # [c]
    shift: Tensor  # [c, J] or [c, 1]
    at_target: Tensor  # [c]
    ids: Tensor | None = None  # [c, k], -1 where there is none
    z: Tensor | None = None  # [c, k] their logits
    extra: Tensor | None = None  # [c, k] p_v (log(p_v / r_v) - shift)


class ReferenceTiles:
    """The reference's logits of a chunk, seen next to the policy's.

    `full` and `top_k` choose the divergence; with neither, only the targets' log-probabilities are
    wanted. `deltas` [c, V] is filled with log(p_v / P_j) - log(r_v / R_j) for the gradient of the
    full divergence.
    """

    def __init__(
        self, logits: LogitTiles, *, full: bool, top_k: int | None, deltas: Tensor | None
    ) -> None:
        self.logits, self.full, self.top_k, self.deltas = logits, full, top_k, deltas

    def start(self, like: TileSums, restricted: bool) -> None:
        """`restricted`: the policy's logits are -inf outside of a support, the reference's too."""
        self.restricted = restricted
        self.sums = TileSums.empty(like.top, like.top.shape[0], like.top.shape[1], entropy=False)
        self.tile_kl = torch.empty_like(like.top) if self.full else None
        self.entries = None if self.top_k is None else TopEntries(self.top_k, like.top)

    def read(self, z: Tensor, target: Tensor, v: slice, j: int) -> None:
        """Takes in the reference's tile; `z`: the policy's logits, -inf at target and outside."""
        s = self.logits(v).to(z.dtype)
        take_out_target(s, target - v.start, self.sums.z_target)
        if self.restricted:
            s.masked_fill_(z == -torch.inf, -torch.inf)
        if self.entries is not None:
            self.entries.update(z, s, v.start)
        if self.tile_kl is not None:
            self._delta = torch.empty_like(z) if self.deltas is None else self.deltas[:, v]
            torch.sub(z, s, out=self._delta)
        sums = self.sums
        sums.top[:, j], sums.mass[:, j], sums.q_top[:, j] = softmax_with_top(s)
        self._s = s

    def compare(self, q: Tensor, policy: TileSums, j: int) -> None:
        """Once the policy's tile is a softmax: its share of the full divergence."""
        if self.tile_kl is None:
            return
        both = (policy, self.sums)
        # an empty tile has mass 0: dividing by 1 instead leaves its entries 0
        mass, ref_mass = (torch.where(x.mass[:, j] < 0.5, 1.0, x.mass[:, j]) for x in both)
        shift = (policy.top[:, j] - self.sums.top[:, j] + (mass / ref_mass).log())[:, None]
        unit = (1 / (mass * policy.q_top[:, j]))[:, None]
        ref_unit = (1 / (ref_mass * self.sums.q_top[:, j]))[:, None]
        for b in row_blocks(q):
            delta = _finite(self._delta[b].sub_(shift[b]))
            p, r = q[b] * unit[b], self._s[b].mul_(ref_unit[b])
            self.tile_kl[b, j] = kl_terms(p, r, delta).sum(1)

    def finish(self, policy: TileSums, stats: RowStats) -> tuple[Tensor, Divergence | None]:
        """([c] the targets' log-probabilities under the reference, the divergence if any)."""
        reference = row_statistics(self.sums)
        if self.entries is not None:
            return reference.logps, self.entries.divergence(policy.z_target, self.sums.z_target)
        if self.tile_kl is None:
            return reference.logps, None
        log_p, log_r = (
            torch.cat([own.log_scale + (sums.mass * sums.q_top).log(), own.logps[:, None]], 1)
            for own, sums in ((stats, policy), (reference, self.sums))
        )
        p, delta = log_p.exp(), _finite(log_p - log_r)
        within = torch.where(p[:, :-1] > 0, p[:, :-1] * self.tile_kl, 0.0)
        kl = kl_terms(p, log_r.exp(), delta).sum(1) + within.sum(1)
        kl = torch.where(stats.logps.isnan() | reference.logps.isnan(), torch.nan, kl)
        return reference.logps, Divergence(kl, delta[:, :-1], delta[:, -1])


class TopEntries:
    """The k largest logits so far of each token, the reference's there, and both sums of the rest.

    The divergence is that of the k likeliest entries of the policy, one by one, and of all others
    taken together:

        KL_k = sum_{v in K} p_v log(p_v / r_v) + p_rest log(p_rest / r_rest)
        dKL_k/dz_v = p_v (f_v - KL_k),  f_v = log(p_v / r_v) in K, log(p_rest / r_rest) outside

    0 <= KL_k <= KL; it grows with k and is the full divergence from k = V - 1 on.
    """

    def __init__(self, k: int, like: Tensor) -> None:
        c = like.shape[0]
        self.z, self.reference = (like.new_full((c, k), -torch.inf) for _ in range(2))
        self.ids = torch.full((c, k), -1, dtype=torch.int64, device=like.device)
        self.rest, self.reference_rest = (like.new_full((c,), -torch.inf) for _ in range(2))

    def update(self, z: Tensor, reference: Tensor, start: int) -> None:
        k = self.z.shape[1]
        for b in row_blocks(z):
            best, column = z[b].topk(min(k, z.shape[1]))
            # kept and new entries compete; what loses, and what never ran, adds to the rest
            values = torch.cat([self.z[b], best], 1)
            others = torch.cat([self.reference[b], reference[b].gather(1, column)], 1)
            ids = torch.cat([self.ids[b], column + start], 1)
            won = values.topk(k).indices
            for rest, all_, entries in (
                (self.rest, z[b], values),
                (self.reference_rest, reference[b], others),
            ):
                never = torch.logsumexp(all_.scatter(1, column, -torch.inf), 1)
                lost = torch.logsumexp(entries.scatter(1, won, -torch.inf), 1)
                rest[b] = torch.logaddexp(rest[b], torch.logaddexp(never, lost))
            self.z[b], self.reference[b] = values.gather(1, won), others.gather(1, won)
            self.ids[b] = ids.gather(1, won)

    def divergence(self, z_target: Tensor, reference_target: Tensor) -> Divergence:
        """Lets the target, which the tiles lack, compete for its place among the k."""
        inside = z_target >= self.z[:, -1]
        member = torch.ones_like(self.ids, dtype=torch.bool)
        member[:, -1] = ~inside
        logs = []
        for z, target, rest in (
            (self.z, z_target, self.rest),
            (self.reference, reference_target, self.reference_rest),
        ):
            out = torch.where(inside, z[:, -1], target)  # of the last entry and the target
            atoms = torch.cat(
                [
                    z.masked_fill(~member, -torch.inf),
                    torch.where(inside, target, -torch.inf)[:, None],
                    torch.logaddexp(rest, out)[:, None],
                ],
                1,
            ).to(wide_dtype(z))
            logs.append(atoms - torch.logsumexp(atoms, 1, keepdim=True))
        log_p, log_r = logs
        p, delta = log_p.exp(), _finite(log_p - log_r)
        kl = kl_terms(p, log_r.exp(), delta).sum(1)
        rest_shift = torch.where(p[:, -1] > 0, delta[:, -1], 0.0)
        at_target = torch.where(inside, delta[:, -2], rest_shift)
        extra = torch.where(
            member & (p[:, :-2] > 0), p[:, :-2] * (delta[:, :-2] - rest_shift[:, None]), 0.0
        )
        dtype = z_target.dtype
        return Divergence(
            kl.to(dtype),
            rest_shift[:, None].to(dtype),
            at_target.to(dtype),
            self.ids,
            self.z,
            extra.to(dtype),
        )
