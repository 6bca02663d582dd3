"""Dynamic sampling: prompts that teach nothing are dropped, and others sampled in their place.

DAPO (arXiv 2503.14476, section 3.2). Everything is decided from the rewards of all processes, which
all of them have, so that they take the same number of rounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from fused_grpo.advantages import AGGREGATIONS, weighted_sum
from fused_grpo.estimators import equal_groups
from fused_grpo.trainer.config import GRPOConfig
from fused_grpo.trainer.rollout import Sample

Row = dict[str, Any]
# fields of a Sample that are padded on the left, and on both sides; the others on the right
PADDED_LEFT = ("prompt_ids", "prompt_mask")
PADDED_BOTH = ("routed_experts",)


@dataclass
class Round:
    """What was sampled at once.

    Attributes:
        rows, sample: of this process, an equal part of all.
        rewards, lengths, ended: [n, F], [n] tokens and [n], of all processes.
        greedy: [n] rewards of the greedy completion of each one's prompt (ReMax), of all processes.
    """

    rows: list[Row]
    sample: Sample
    rewards: Tensor
    lengths: Tensor
    ended: Tensor
    greedy: Tensor | None = None


def varying(rewards: Tensor, args: GRPOConfig) -> Tensor:
    """[P] whether the completions of a prompt differ in reward; `rewards` [P * G, F].

    As `zero_variance_fraction` has it, of the weighted sum; where each reward is normalised on its
    own, of any of them.
    """
    each = args.multi_objective_aggregation != AGGREGATIONS[0] or args.advantage_estimator == "gdpo"
    columns = rewards if each else weighted_sum(rewards, args.reward_weights)[:, None]
    span = args.dynamic_sample_range
    groups = columns.double().unflatten(0, (-1, args.num_generations))
    return ~torch.stack([equal_groups(column, span) for column in groups.unbind(2)]).all(0)


class ExtraPrompts:
    """Prompts beside those of the epoch: a function of the seed and the generation alone.

    They have no position that a checkpoint would have to know; an epoch comes to them in their turn
    as well.

    Args:
        dataset: rows by number.
        seed: of the order, together with the generation; None: those that follow in the dataset.
    """

    def __init__(self, dataset: Any, args: GRPOConfig) -> None:
        self.dataset, self.args = dataset, args
        seed = args.seed if args.data_seed is None else args.data_seed
        self.seed = seed if args.shuffle_dataset else None

    def order(self, generation: int) -> list[int]:
        """Row numbers, each once."""
        size = len(self.dataset)
        if self.seed is None:
            prompts = self.args.generation_batch_size // self.args.num_generations
            start = (generation % (size // prompts) + 1) * prompts
            return [(start + i) % size for i in range(size)]
        # another stream than that of the epochs, see GroupSampler
        stream = self.seed + 1_000_003 * generation + (1 << 40)
        generator = torch.Generator("cpu").manual_seed(stream)
        return torch.randperm(size, generator=generator, device="cpu").tolist()

    def beside(self, used: set[str], generation: int) -> Iterator[Row]:
        """Rows in that order; no prompt twice, and none of `used`."""
        used = set(used)
        for number in self.order(generation):
            row = self.dataset[number]
            name = str(row["prompt"])
            if name not in used:
                used.add(name)
                yield row


def shares(rows: list[Row], args: GRPOConfig) -> list[Row]:
    """This process's part of prompts [P] with all their completions: P * G / processes rows."""
    repeated = [row for row in rows for _ in range(args.num_generations)]
    size = len(repeated) // args.world_size
    return repeated[args.process_index * size :][:size]


def refill(
    first: Round, extra: ExtraPrompts, generation: int, sample: Any, args: GRPOConfig
) -> list[Round]:
    """Rounds of other prompts until as many vary as `first` has, there are none or it was tried
    `max_resample_times`. `sample` makes a Round of rows of this process."""
    group = args.num_generations
    missing = int((~varying(first.rewards, args)).sum())
    names = gather_object([str(row["prompt"]) for row in first.rows])
    prompts = extra.beside(set(names), generation)
    unit = args.world_size // math.gcd(args.world_size, group)  # prompts that divide evenly
    rounds: list[Round] = []
    while missing > 0 and len(rounds) < args.max_resample_times:
        rows = list(islice(prompts, math.ceil(missing / unit) * unit))
        rows = rows[: len(rows) // unit * unit]
        if not rows:
            break
        rounds.append(sample(shares(rows, args)))
        missing -= int(varying(rounds[-1].rewards, args).sum())
    return rounds


@dataclass(frozen=True)
class Choice:
    """Which groups, numbered as they were drawn, take part in a generation, and where.

    Attributes:
        groups: one for each of its places.
        trained: whether it is trained on; where too few vary, others hold the remaining places and
            count nowhere.
    """

    groups: list[int]
    trained: list[bool]

    @staticmethod
    def of(varies: Tensor, places: int) -> Choice:
        """The first that vary, spread evenly over processes and optimizer steps."""
        kept = varies.nonzero().flatten().tolist()[:places]
        others = iter((~varies).nonzero().flatten().tolist())
        held = {i * places // len(kept): group for i, group in enumerate(kept)}
        groups = [held[i] if i in held else next(others) for i in range(places)]
        return Choice(groups, [i in held for i in range(places)])

    def rows(self, num_generations: int) -> list[int]:
        """The numbers of their completions."""
        return [g * num_generations + i for g in self.groups for i in range(num_generations)]


def dynamic_metrics(rounds: Sequence[Round], varies: Tensor, choice: Choice) -> dict[str, Any]:
    """Rounds beyond the first, and prompts that were sampled, dropped and are trained on.

    Those neither dropped nor trained on were more than there is room for.
    """
    return {
        "dynamic_sample/rounds": len(rounds) - 1,
        "dynamic_sample/sampled": len(varies),
        "dynamic_sample/dropped": int((~varies).sum()),
        "dynamic_sample/trained": sum(choice.trained),
    }


def brought(
    rounds: Sequence[Round], wanted: list[int], args: GRPOConfig
) -> tuple[list[Row], Sample]:
    """This process's part of the rows `wanted`, numbered over the rounds, from whoever has them:
    (rows, sample)."""
    if wanted == list(range(len(wanted))):  # the first round as it is
        return rounds[0].rows, rounds[0].sample
    size = len(wanted) // args.world_size
    mine = wanted[args.process_index * size :][:size]
    device = rounds[0].sample.prompt_ids.device
    parts: list[tuple[list[int], list[Row], Sample]] = []
    start, needed = 0, set(wanted)
    for one in rounds:
        first = start + args.process_index * len(one.rows)
        here = [i for i in range(len(one.rows)) if first + i in needed]
        numbers = [first + i for i in here]
        parts.append((numbers, [one.rows[i] for i in here], select(one.sample, here)))
        start += len(one.rows) * args.world_size
    if args.world_size > 1:
        parts = gather_object([(n, r, moved(s, torch.device("cpu"))) for n, r, s in parts])
    place = {number: i for i, number in enumerate(n for part in parts for n in part[0])}
    rows = [row for part in parts for row in part[1]]
    order = [place[number] for number in mine]
    whole = joined([part[2] for part in parts])
    return [rows[i] for i in order], moved(select(whole, order), device)


def select(sample: Sample, rows: list[int]) -> Sample:
    """Some rows of a sample."""
    return _mapped(sample, lambda name, x: x[rows])


def moved(sample: Sample, device: torch.device) -> Sample:
    """The same on a device."""
    return _mapped(sample, lambda name, x: x.to(device))


def joined(samples: Sequence[Sample]) -> Sample:
    """The rows of all, padded to the longest prompt and completion; what one lacks is None."""
    width = max(s.prompt_ids.shape[1] for s in samples)
    length = max(s.completion_ids.shape[1] for s in samples)
    padded = []
    for sample in samples:
        left = width - sample.prompt_ids.shape[1]
        right = length - sample.completion_ids.shape[1]

        def pad(name: str, x: Tensor, left: int = left, right: int = right) -> Tensor:
            if x.dim() < 2:
                return x
            before = left if name in PADDED_LEFT + PADDED_BOTH else 0
            after = 0 if name in PADDED_LEFT else right
            sides = [(*x.shape[:1], n, *x.shape[2:]) for n in (before, after)]
            return torch.cat([x.new_zeros(sides[0]), x, x.new_zeros(sides[1])], 1)

        padded.append(_mapped(sample, pad))
    columns = {f.name: [getattr(s, f.name) for s in padded] for f in fields(padded[0])}
    whole: dict[str, Any] = {
        n: None if any(x is None for x in c) else torch.cat(c) for n, c in columns.items()
    }
    return replace(padded[0], **whole)


def _mapped(sample: Sample, change: Any) -> Sample:
    given = {f.name: getattr(sample, f.name) for f in fields(sample)}
    return replace(sample, **{n: change(n, x) for n, x in given.items() if x is not None})
