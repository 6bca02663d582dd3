"""Two ranks of DeepSpeed's own ZeRO-3 against one process, run by `test_deepspeed.py`: prints the
largest difference of any parameter after two steps, and the smallest of their changes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fused_grpo import grpo_loss
from fused_grpo.distributed import full_weight

RANKS, BATCH, LENGTH, WIDTH, VOCAB, RATE = 2, 4, 6, 16, 203, 0.1
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": BATCH,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.trunk, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, part: list[Tensor], reduction: str, whole: Callable[..., Tensor]) -> Tensor:
        x, ids, advantages, old = part
        out = grpo_loss(
            torch.tanh(self.trunk(x)),
            whole(self.head.weight),
            ids,
            advantages,
            old_per_token_logps=old,
            bias=whole(self.head.bias),
            loss_type="grpo",
            reduction=reduction,
        )
        return out.loss.mean()


def part_of(rank: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(rank)
    shape = (BATCH, LENGTH)
    return [
        torch.randn(*shape, WIDTH, generator=g),
        torch.randint(0, VOCAB, shape, generator=g),
        torch.randn(BATCH, generator=g),
        torch.randn(*shape, generator=g) * 0.1 - 5,
    ]


def work(rank: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    import deepspeed

    torch.set_num_threads(1)
    file = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", file, rank=rank, world_size=RANKS)
    deepspeed.init_distributed("gloo")
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    for reduction in ("sum", "none"):
        engine.backward(engine(part_of(rank), reduction, full_weight))
        engine.step()
    found = {}
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            found[name] = parameter.detach().clone()
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")
    torch.distributed.barrier()


def main(folder: str) -> None:
    torch.multiprocessing.spawn(work, (folder,), nprocs=RANKS)  # type: ignore[attr-defined]
    found = torch.load(Path(folder) / "found.pt", weights_only=True)
    before, model = Model().state_dict(), Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for reduction in ("sum", "none"):
        optimizer.zero_grad()
        for rank in range(RANKS):
            (model(part_of(rank), reduction, lambda w: w) / RANKS).backward()
        optimizer.step()
    expected = model.state_dict()
    error = max(float((found[name] - expected[name]).abs().max()) for name in expected)
    moved = min(float((expected[name] - before[name]).abs().max()) for name in expected)
    print(f"error {error} moved {moved}")


if __name__ == "__main__":
    main(sys.argv[1])
