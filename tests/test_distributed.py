"""Two and four processes against one: shared vocabularies and sequences, DDP, FSDP2, ZeRO-3."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import ranks
import torch
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException
from torch.utils._pytree import tree_leaves

from fused_grpo import grpo_loss, linear_logprobs

RESULTS: dict[int, list[dict[str, str]]] = {}


def results(world: int, folder: Path) -> list[dict[str, str]]:
    """case -> what became of it, for each rank."""
    if world not in RESULTS:
        RESULTS[world] = [{} for _ in range(world)]
        try:
            torch.multiprocessing.spawn(ranks.work, (world, str(folder)), nprocs=world)
        except (ProcessExitedException, ProcessRaisedException) as error:
            print(error)  # its case says why, and those after it that they never ran
        files = [folder / f"{i}.json" for i in range(world)]
        RESULTS[world] = [json.loads(f.read_text()) if f.exists() else {} for f in files]
    return RESULTS[world]


@pytest.mark.parametrize(
    ("world", "name"), [(world, name) for world in (2, 4) for name in ranks.names(world)]
)
def test_on_ranks(world: int, name: str, tmp_path: Path) -> None:
    of_ranks = [result.get(name, "never ran") for result in results(world, tmp_path)]
    assert of_ranks == [ranks.PASSED] * world, "\n".join(of_ranks)


def test_outputs_show_their_tensors() -> None:
    """FSDP starts its backward from the tensors it finds in what a module returns."""
    hidden = torch.ones(2, 3, 4, requires_grad=True)
    ids, advantages = torch.zeros(2, 3, dtype=torch.long), torch.ones(2)
    loss = grpo_loss(hidden, torch.ones(5, 4), ids, advantages)
    values = linear_logprobs(hidden, torch.ones(5, 4), ids)
    assert any(x is loss.loss for x in tree_leaves(loss))
    assert any(x is values.logps for x in tree_leaves(values))
