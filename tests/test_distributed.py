"""Two and four processes against one: shared vocabularies and sequences, DDP, FSDP2, ZeRO-3."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import ranks
import torch.multiprocessing
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

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
