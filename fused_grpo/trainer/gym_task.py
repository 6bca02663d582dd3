"""Environments of reasoning-gym as tasks: its questions, and its own judgement of an answer."""

from __future__ import annotations

import functools
import json
import random
from typing import Any

from fused_grpo.trainer import verifiers
from fused_grpo.trainer.prompts import ANSWERS, PromptStyle
from fused_grpo.trainer.task_options import TaskOptions
from fused_grpo.trainer.tasks import Task

PREFIX = "reasoning-gym:"
NUM_TRAIN, NUM_HELD_OUT, NUM_EXAMPLES = 2048, 512, 64
LONGEST = 256  # tokens, where answers do not say how long completions may be
DRAWS = 20  # for each question wanted, before an environment counts as exhausted
# an environment draws question i with seed + i: the parts stay this far apart
NUM_PARTS, PART_SIZE = 3, 2**24

Entry = dict[str, Any]


def gym_task(name: str, options: TaskOptions) -> Task:
    """The task of "reasoning-gym:ENVIRONMENT".

    Held-out questions, worked examples and training questions are drawn in this order from seeds
    that do not meet, and a question that was drawn before is dropped: none is in two parts.

    Raises:
        MissingExtraError: reasoning-gym is not installed.
        ValueError: an unknown environment or option of it, or too few different questions.
    """
    options.check("reasoning-gym")
    environment = name.removeprefix(PREFIX)
    verifiers.need("reasoning_gym", name)
    from fused_grpo.trainer import judges_gym

    chat = options.get("prompt", "text") == "chat"
    answer_from = options.get("answer_from", "tag-or-last-line" if chat else "first-line")
    source = _Source(environment, options)
    held_out = source.draw(options.get("held_out", NUM_HELD_OUT))
    shots = options.get("shots", 0 if chat else 2)
    examples = [e for e in source.draw(NUM_EXAMPLES if shots else 0) if e["answer"] is not None]
    train = source.draw(options.get("train_rows", NUM_TRAIN), all_of_them=False)
    if len(examples) < shots or not train:
        raise source.too_few(f"{len(train)} are left to train on and {len(examples)} to show")
    style = PromptStyle(chat, options.system_prompt)
    rng = random.Random(options.get("task_seed", 0))
    continued = answer_from == "first-line" and not chat
    if continued and any("\n" in (e["answer"] or "").strip() for e in held_out + train):
        raise ValueError(f"{name} has answers of several lines: give --answer-from whole or tag")
    measurable = continued and all(e["answer"] is not None for e in held_out + train)
    score = functools.partial(
        judges_gym.environment_score, environment, json.dumps(options.options)
    )
    return Task(
        name=name.replace(":", "-"),
        train=[_row(e, rng.sample(examples, shots), style) for e in train],
        held_out=[_row(e, rng.sample(examples, shots), style) for e in held_out],
        reward=verifiers.VerifierReward(environment, score, ANSWERS[answer_from]),
        max_completion_length=None if measurable else LONGEST,
        stop="\n" if continued else None,
        answer_of=ANSWERS[answer_from],
        dropped=source.dropped,
    )


def _dataset(environment: str, options: dict[str, Any], seed: int, size: int) -> Any:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if environment not in DATASETS:
        raise ValueError(
            f"{PREFIX}{environment} is unknown; reasoning-gym has {', '.join(sorted(DATASETS))}"
        )
    for reserved in ("seed", "size"):
        if reserved in options:
            raise ValueError(f"task_options: {reserved} is set by --task-seed and --train-rows")
    try:
        return reasoning_gym.create_dataset(environment, seed=seed, size=size, **options)
    except (TypeError, AssertionError, ValueError) as error:
        known = vars(DATASETS[environment][1]()).keys() - {"seed", "size"}
        raise ValueError(
            f"{PREFIX}{environment} does not take the task options {options}: {error}; it has "
            f"{', '.join(sorted(known))}"
        ) from error


class _Source:
    """Draws different questions of an environment, part after part.

    Attributes:
        dropped: questions that were drawn again.
    """

    def __init__(self, environment: str, options: TaskOptions) -> None:
        self.environment, self.options = environment, options.options
        self.seed = options.get("task_seed", 0) * NUM_PARTS * PART_SIZE
        self.seen: set[str] = set()
        self.dropped = 0

    def draw(self, size: int, all_of_them: bool = True) -> list[Entry]:
        """The next part; fewer than `size` only where `all_of_them` are not needed."""
        limit = max(DRAWS * size, 1)
        data = _dataset(self.environment, self.options, self.seed, limit)
        self.seed += PART_SIZE
        part: list[Entry] = []
        for i in range(limit):
            if len(part) == size:
                break
            entry = data[i]
            if entry["question"] in self.seen:
                self.dropped += 1
            else:
                self.seen.add(entry["question"])
                part.append(entry)
        if all_of_them and len(part) < size:
            raise self.too_few(f"{size} are wanted")
        return part

    def too_few(self, wanted: str) -> ValueError:
        return ValueError(
            f"{PREFIX}{self.environment} with these options has only some {len(self.seen)} "
            f"different questions, and {wanted}: widen it with --task-options, or lower --held-out"
        )


def _row(entry: Entry, examples: list[Entry], style: PromptStyle) -> dict[str, Any]:
    shown = [(e["question"].strip(), e["answer"].strip()) for e in examples]
    prompt = style(entry["question"].strip(), shown)
    return {"prompt": prompt, "answer": entry["answer"], "entry": entry}
