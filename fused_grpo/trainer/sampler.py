"""Which rows of the dataset a process reads for each generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.utils.data import Sampler


class GroupSampler(Sampler[list[int]]):
    """Batches of row numbers: each prompt `num_generations` times in a row, split over processes.

    Every item is the whole generation of one process; it is yielded `repeats` times, once for each
    micro-batch that is taken from it, so that the Trainer counts micro-batches and a resumed run
    skips the right number of them. Prompts that do not fill a generation are left out of
    their epoch.

    Args:
        num_prompts: rows of the dataset.
        num_generations: G.
        batch_size: completions of a generation over all processes, a multiple of G.
        repeats: micro-batches taken from a generation, over all its iterations.
        seed: of the order, together with the epoch; None: the order of the dataset.
        epoch: tells the epoch when iteration starts.
        rank, world_size: of this process.

    Raises:
        ValueError: fewer prompts than one generation takes.
    """

    def __init__(
        self,
        num_prompts: int,
        *,
        num_generations: int,
        batch_size: int,
        repeats: int,
        seed: int | None,
        epoch: Callable[[], int],
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.num_prompts, self.num_generations = num_prompts, num_generations
        self.prompts_per_batch = batch_size // num_generations
        self.repeats, self.seed, self.epoch = repeats, seed, epoch
        share = batch_size // world_size
        self.share = slice(rank * share, (rank + 1) * share)
        if num_prompts < self.prompts_per_batch:
            raise ValueError(
                f"train_dataset has {num_prompts} prompts, but a generation takes "
                f"{self.prompts_per_batch} ({batch_size} completions / num_generations="
                f"{num_generations})"
            )

    def __len__(self) -> int:
        return self.num_prompts // self.prompts_per_batch * self.repeats

    def __iter__(self) -> Iterator[list[int]]:
        if self.seed is None:
            order = torch.arange(self.num_prompts, device="cpu")
        else:
            generator = torch.Generator("cpu").manual_seed(self.seed + 1_000_003 * self.epoch())
            order = torch.randperm(self.num_prompts, generator=generator, device="cpu")
        for start in range(
            0, len(self) // self.repeats * self.prompts_per_batch, self.prompts_per_batch
        ):
            prompts = order[start : start + self.prompts_per_batch]
            rows = prompts.repeat_interleave(self.num_generations)[self.share].tolist()
            for _ in range(self.repeats):
                yield rows
