"""What can be said about a task besides its name."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import Any

from fused_grpo.trainer.prompts import ANSWERS

PROMPTS = ("text", "chat")
# the kinds of tasks and the options that each of them honours
HONOURS = {
    "a built-in task": (),
    "reasoning-gym": (
        *("options", "prompt", "shots", "system_prompt", "answer_from"),
        *("train_rows", "held_out", "task_seed"),
    ),
    "a JSON-lines file": (
        *("verifier", "prompt_column", "answer_column", "prompt", "system_prompt", "answer_from"),
        *("held_out", "held_out_file", "held_out_share"),
    ),
}


@dataclass(frozen=True)
class TaskOptions:
    """Options of `make_task`; None is the default of the kind of task.

    Attributes:
        options: of the reasoning-gym environment's configuration.
        prompt: "text" to be continued, or "chat" through the chat template.
        shots: worked examples before each question.
        system_prompt: the system message, or the first paragraph of a text.
        answer_from: which part of a completion is verified, a key of `prompts.ANSWERS`.
        train_rows, held_out: how many prompts there are for training and, at most, for evaluation.
        task_seed: of the environment's questions.
        verifier: see `verifiers.make_verifier`.
        prompt_column, answer_column: of a JSON-lines file.
        held_out_file: a second file, or
        held_out_share: the share of the one file, chosen by a hash of each prompt.
    """

    options: dict[str, Any] = field(default_factory=dict)
    prompt: str | None = None
    shots: int | None = None
    system_prompt: str | None = None
    answer_from: str | None = None
    train_rows: int | None = None
    held_out: int | None = None
    task_seed: int | None = None
    verifier: str | None = None
    prompt_column: str | None = None
    answer_column: str | None = None
    held_out_file: str | None = None
    held_out_share: float | None = None

    def __post_init__(self) -> None:
        for name, low in (("shots", 0), ("train_rows", 1), ("held_out", 1), ("task_seed", 0)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise ValueError(f"{name}={value} must be at least {low}")
        for name, known in (("prompt", PROMPTS), ("answer_from", tuple(ANSWERS))):
            value = getattr(self, name)
            if value is not None and value not in known:
                raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(known)}")
        if self.held_out_share is not None and not 0 < self.held_out_share < 1:
            raise ValueError(f"held_out_share={self.held_out_share} must lie between 0 and 1")
        if self.held_out_share is not None and self.held_out_file is not None:
            raise ValueError("give held_out_file or held_out_share, not both")

    def check(self, kind: str) -> None:
        """ValueError if an option was given that a task of this kind does not know."""
        for option in fields(self):
            given = getattr(self, option.name)
            if given not in (None, {}) and option.name not in HONOURS[kind]:
                raise ValueError(f"{option.name}={given!r} does not apply to {kind}")

    def get(self, name: str, default: Any) -> Any:
        """An option, or `default` where it was not given."""
        value = getattr(self, name)
        return default if value is None else value


def parse_options(words: list[str]) -> dict[str, Any]:
    """KEY=VALUE words as a dict, the values being JSON where they are and text otherwise."""
    out = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not key or not equals:
            raise ValueError(f"task_options: {word!r} is not KEY=VALUE")
        try:
            out[key] = json.loads(value)
        except json.JSONDecodeError:
            out[key] = value
    return out
