"""Verifiable tasks: prompts whose completions a program can check, for demonstrations and tests.

Prompts for training and for evaluation share nothing that would let a model remember answers: see
each task. They are the same in every run; a seed only changes the order of training.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fused_grpo.trainer.prompts import first_line, whole
from fused_grpo.trainer.rewards import RewardFunc
from fused_grpo.trainer.task_options import TaskOptions

NUM_TRAIN, NUM_HELD_OUT = 2048, 256
# of the answers that the addition task knows, those kept for evaluation
HELD_OUT_SHARE = 0.27
WORDS = """
apple arm bag ball bank bear bell bird boat bone book box bread bridge cake card cat chair city
clock cloud coat corn cow cup desk dog door dress drum ear egg eye farm fire fish flag foot fork
fox frog game gate girl glass goat gold hair hand hat hill horse house ice jar key king kite knee
lake lamp leaf leg lion map milk moon mouse nail neck nest nose oil page park pen pig pipe plane
plate pool rain ring road rock roof room rope rose sail salt sand school sea seed ship shirt shoe
shop sky snow sock star stone sun table tail tent tooth town toy train tree truck wall wave wheel
wind wing wolf wood
"""


def exact_match(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 where the first line of a completion is the answer, blanks around it aside."""
    lines = (completion.split("\n")[0].strip() for completion in completions)
    return [float(line == right) for line, right in zip(lines, answer, strict=True)]


def digit_share(completions: list[Any], **_: Any) -> list[float]:
    """The share of digits among the characters of a completion."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


@dataclass(frozen=True)
class Task:
    """A verifiable task: rows with a "prompt" and what the reward function asks for.

    Attributes:
        reward: a reward function as `GRPOTrainer` takes it.
        max_completion_length: tokens that an answer needs, its end included; None: as many as the
            longest "answer" of the rows takes.
        stop: a text of one token that ends a completion, as the end-of-sequence token does.
        answer_of: the answer in a completion's text, None without one; what majorities vote on.
        correct: a reward of at least this is a right answer, which pass@k counts.
        fills: completions are meant to be as long as they may.
        dropped: rows left out because another part, or an earlier row, has the same question.
    """

    name: str
    train: list[dict[str, Any]] = field(repr=False)
    held_out: list[dict[str, Any]] = field(repr=False)
    reward: RewardFunc
    max_completion_length: int | None
    stop: str | None
    answer_of: Callable[[str], str | None] = first_line
    correct: float = 1.0
    fills: bool = False
    dropped: int = 0

    def __str__(self) -> str:
        return (
            f"{self.name}: {len(self.train):,} prompts for training, {len(self.held_out):,} held "
            f"out, {self.dropped:,} repeated ones dropped"
        )


def addition(shots: int = 4) -> Task:
    """Sums of two digits after worked examples: "1+5=6" ... "3+4=", to be completed with "7".

    No pair of digits of an evaluation question, in either order, is ever shown in training.
    """
    pairs = [(a, b) for a in range(10) for b in range(a, 10)]
    random.Random(0).shuffle(pairs)
    held = round(HELD_OUT_SHARE * len(pairs))
    held_out, known = pairs[:held], pairs[held:]

    def row(rng: random.Random, questions: list[tuple[int, int]]) -> dict[str, Any]:
        sums = [rng.sample(rng.choice(known), 2) for _ in range(shots)]
        sums.append(rng.sample(rng.choice(questions), 2))
        *lines, question = [f"{a}+{b}={a + b}" for a, b in sums]
        prompt, answer = question.split("=")
        return {"prompt": "\n".join([*lines, prompt + "="]), "answer": answer}

    return Task(
        "addition",
        _distinct(lambda rng: row(rng, known), NUM_TRAIN, seed=1),
        _distinct(lambda rng: row(rng, held_out), NUM_HELD_OUT, seed=2),
        exact_match,
        max_completion_length=3,
        stop="\n",
    )


def copying() -> Task:
    """Repeat the last of four words after one example: "a b c d -> d", "e f g h ->".

    Evaluation uses words that training never does.
    """
    words = WORDS.split()
    random.Random(0).shuffle(words)
    known, new = words[: 2 * len(words) // 3], words[2 * len(words) // 3 :]

    def row(rng: random.Random, vocabulary: list[str]) -> dict[str, Any]:
        *drawn, last = rng.sample(vocabulary, 8)
        shown, asked = drawn[:4], [*drawn[4:], last]
        prompt = f"{' '.join(shown)} -> {shown[-1]}\n{' '.join(asked)} ->"
        return {"prompt": prompt, "answer": last}

    return Task(
        "copying",
        _distinct(lambda rng: row(rng, known), NUM_TRAIN, seed=1),
        _distinct(lambda rng: row(rng, new), NUM_HELD_OUT, seed=2),
        exact_match,
        max_completion_length=3,
        stop="\n",
    )


def digits() -> Task:
    """Write digits, whatever the prompt: learnt in seconds, even by a random model."""

    def row(rng: random.Random) -> dict[str, Any]:
        return {"prompt": "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=8))}

    rows = _distinct(row, NUM_TRAIN + NUM_HELD_OUT, seed=1)
    train, held_out = rows[:NUM_TRAIN], rows[NUM_TRAIN:]
    return Task(
        "digits",
        train,
        held_out,
        digit_share,
        max_completion_length=8,
        stop=None,
        answer_of=whole,
        fills=True,
    )


TASKS: dict[str, Callable[[], Task]] = {"addition": addition, "copying": copying, "digits": digits}


def make_task(name: str, options: TaskOptions | None = None) -> Task:
    """A built-in task, "reasoning-gym:ENVIRONMENT", or that of a JSON-lines file.

    Raises:
        ValueError: there is none of that name, or it does not take the options.
        MissingExtraError: it needs a package that is not installed.
        OSError: the file cannot be read.
    """
    from fused_grpo.trainer.gym_task import PREFIX, gym_task
    from fused_grpo.trainer.jsonl_task import jsonl_task

    options = options or TaskOptions()
    if name.startswith(PREFIX):
        return gym_task(name, options)
    if name.endswith((".jsonl", ".ndjson")):
        return jsonl_task(name, options)
    if name not in TASKS:
        raise ValueError(
            f"task={name!r} is unknown; choose one of {', '.join(TASKS)}, {PREFIX}ENVIRONMENT, or "
            "a file of JSON lines, FILE.jsonl"
        )
    options.check("a built-in task")
    return TASKS[name]()


def _distinct(
    make: Callable[[random.Random], dict[str, Any]], count: int, seed: int
) -> list[dict[str, Any]]:
    """`count` rows with different prompts."""
    rng, rows = random.Random(seed), dict[str, dict[str, Any]]()
    while len(rows) < count:
        row = make(rng)
        rows[row["prompt"]] = row
    return list(rows.values())
