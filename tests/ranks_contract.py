"""The bare loss as the forward of a module under DDP: gradients as of one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from entry_points import ROUTED, tensors
from ranks import case, rank, same_bits, world
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fused_grpo import grpo_loss, linear_logprobs

ROWS = {2: [0, 2, 3]}


class Head(nn.Module):
    """Weight and bias, and a layer that the forward may leave out."""

    def __init__(self) -> None:
        super().__init__()
        t = tensors()
        self.weight, self.bias = nn.Parameter(t["weight"]), nn.Parameter(t["bias"])
        self.scale = nn.Parameter(torch.ones(8))
        self.unused = nn.Linear(2, 2)

    def forward(self, part: slice, leave_out: bool, kind: str) -> Tensor:
        t = tensors()
        hidden, ids, a, mask = (t[k][part] for k in ("hidden", "ids", "advantages", "mask"))
        hidden = hidden * self.scale
        weights = mask / t["mask"].sum()
        if kind == "logprobs":
            logps = linear_logprobs(hidden, self.weight, ids, bias=self.bias).logps
            loss = -(logps * a[:, None] * weights).sum()
        else:
            how: dict[str, Any] = {"completion_mask": mask, "token_weights": weights}
            if kind == "routed":
                keys = torch.arange(3)[part]
                how |= ROUTED | {"route_seed": 7, "sequence_ids": keys}
            loss = grpo_loss(hidden, self.weight, ids, a, bias=self.bias, **how).loss
        return loss if leave_out else loss + 0 * self.unused(torch.ones(2)).sum()


def bare_loss(kind: str, **options: bool) -> None:
    """D1: with the losses' sum over ranks, DDP's mean is a `world`-th of the whole gradient."""
    leave_out = options.get("find_unused_parameters", False)
    alone = Head()
    alone(slice(0, 3), leave_out, kind).backward()
    ours = DistributedDataParallel(Head(), **options)
    part = slice(*ROWS[world()][rank() : rank() + 2])
    for step in range(3):  # static graphs are recorded in the first
        ours.zero_grad()
        ours(part, leave_out, kind).backward()
        for (name, got), want in zip(
            ours.module.named_parameters(), alone.parameters(), strict=True
        ):
            if name.startswith("unused"):
                assert got.grad is None or not got.grad.any()
                continue
            assert got.grad is not None, (name, step)
            assert same_bits(got.grad)
            error = (got.grad * world() - want.grad).norm()
            assert error <= 1e-5 * want.grad.norm(), (name, step, float(error))
    dist.barrier()


for kind in ("loss", "routed", "logprobs"):
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        case(
            bare_loss, worlds=[2], of=f"{kind}-{next(iter(options), 'plain')}", kind=kind, **options
        )
