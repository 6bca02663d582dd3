"""The exact answer of a case in fp64, a few hundred tokens at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks.implementations import clipped_loss, make_feed

if TYPE_CHECKING:
    from benchmarks.data import Case

CHUNK = 256  # tokens of fp64 logits at once
WHOLE = 2**27  # entries of a weight whose gradient is compared whole: 1 GB in fp64


@dataclass(frozen=True)
class Truth:
    """Of the counted tokens; `rows`: those of the weight that `dweight` has, None for all."""

    loss: Tensor
    logps: Tensor  # [N]
    coefficients: Tensor  # dL / dlogp, [N]
    dhidden: Tensor  # [N, H]
    dweight: Tensor  # [V or len(rows), H]
    rows: Tensor | None


@torch.no_grad()
def exact(case: Case, gradients: bool = True) -> Truth:
    """For the numbers of `case` as they are; without gradients, those are empty."""
    # Only the head is large: the rest is a few numbers per token.
    feed = make_feed(case, "counted", torch.float64)
    weight = case.weight.double()
    logps, lse = _logps(feed.hidden, weight, feed.ids, case.temperature)
    with torch.enable_grad():
        leaf = logps.clone().requires_grad_()
        loss = clipped_loss(leaf, feed)
        (g,) = torch.autograd.grad(loss, leaf)
    dh, dw, rows = feed.hidden.new_empty(0), feed.hidden.new_empty(0), None
    if gradients:
        rows = None if weight.numel() <= WHOLE else some_rows(feed.ids)
        dh, dw = _gradients(feed.hidden, weight, feed.ids, g / case.temperature, lse, rows, case)
    return Truth(loss.detach(), logps, g, dh, dw, rows)


def some_rows(ids: Tensor, count: int = 64) -> Tensor:
    """Rows of the weight to compare: half are targets, half are whatever stands first."""
    first = torch.arange(count // 2, device=ids.device)
    return torch.cat([ids[: count // 2], first]).unique()


def _logps(hidden: Tensor, weight: Tensor, ids: Tensor, t: float) -> tuple[Tensor, Tensor]:
    logps, lse = [], []
    for h, y in zip(hidden.split(CHUNK), ids.split(CHUNK), strict=True):
        z = h @ weight.T / t
        lse.append(torch.logsumexp(z, -1))
        logps.append(z.gather(1, y[:, None]).squeeze(1) - lse[-1])
    return torch.cat(logps), torch.cat(lse)


def _gradients(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    g: Tensor,
    lse: Tensor,
    rows: Tensor | None,
    case: Case,
) -> tuple[Tensor, Tensor]:
    dh = torch.empty_like(hidden)
    dw = torch.zeros_like(weight if rows is None else weight[rows])
    for start in range(0, len(ids), CHUNK):
        span = slice(start, start + CHUNK)
        dz = (hidden[span] @ weight.T / case.temperature - lse[span, None]).exp_().neg_()
        dz.scatter_add_(1, ids[span, None], torch.ones_like(dz[:, :1]))
        dz *= g[span, None]
        torch.mm(dz, weight, out=dh[span])
        picked = dz if rows is None else dz[:, rows]
        dw.addmm_(picked.T, hidden[span])
    return dh, dw
