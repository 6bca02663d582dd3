"""The arguments of `GRPOTrainer`: those of transformers' Trainer and TRL's names for the rest."""

# ruff: noqa: RUF009 (arg is dataclasses.field, one call per field)

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import TrainingArguments

from fused_grpo.trainer.loss_args import LossArguments, arg

# what the trainer sets itself, or what would hide where a completion ends
RESERVED_GENERATION_KWARGS = frozenset(
    {"do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_length"}
    | {"max_new_tokens", "num_return_sequences", "num_beams", "return_dict_in_generate"}
    | {"stop_strings", "stopping_criteria"}
)


@dataclass
class GRPOConfig(LossArguments, TrainingArguments):
    """Arguments of `GRPOTrainer`; every argument of `transformers.TrainingArguments` works too.

    One optimizer step takes per_device_train_batch_size * gradient_accumulation_steps * (number of
    processes) completions, `num_generations` for each prompt; a group may be split over
    micro-batches and processes.

    Raises:
        TypeError, ValueError: naming the argument, what was given and what fits.
    """

    # the parent parses JSON strings for these
    _VALID_DICT_FIELDS = [  # noqa: RUF012
        *TrainingArguments._VALID_DICT_FIELDS,
        "model_init_kwargs",
        "generation_kwargs",
        "chat_template_kwargs",
        "rejection",
    ]

    learning_rate: float = arg(1e-6, "Peak learning rate.")
    logging_steps: float = arg(1, "Log every so many optimizer steps.")
    remove_unused_columns: bool = arg(
        False, "Must be False: the columns of the dataset go to the reward functions."
    )
    # model
    model_init_kwargs: dict[str, Any] | str | None = arg(
        None, "Keywords of `from_pretrained`, where the model is given by name."
    )
    disable_dropout: bool = arg(
        True, "Set every dropout to 0, so that the ratio is 1 on fresh samples."
    )
    # sampling
    num_generations: int = arg(8, "Completions per prompt: the group size G.")
    max_completion_length: int = arg(256, "Longest completion, in tokens.")
    temperature: float = arg(1.0, "Of sampling, and of the log-probabilities in the loss.")
    top_p: float = arg(1.0, "Nucleus sampling; the loss still takes the whole distribution.")
    top_k: int = arg(0, "Sample from the k likeliest tokens only; 0: from all.")
    min_p: float | None = arg(None, "Drop tokens below this share of the likeliest one.")
    repetition_penalty: float = arg(1.0, "Above 1: discourage repetition. 1: off.")
    generation_kwargs: dict[str, Any] | str | None = arg(
        None, "More keywords of `model.generate`, such as eos_token_id."
    )
    chat_template_kwargs: dict[str, Any] | str | None = arg(
        None, "Keywords of `apply_chat_template`, for prompts that are conversations."
    )
    shuffle_dataset: bool = arg(True, "Draw the prompts in a new order every epoch.")
    steps_per_generation: int | None = arg(
        None,
        "Micro-batches sampled at once, a multiple of gradient_accumulation_steps (the default).",
    )
    num_iterations: int = arg(1, "Passes over each generation.")
    mask_truncated_completions: bool = arg(
        False, "Leave completions that did not end within max_completion_length out of the loss."
    )
    # rewards and advantages
    reward_weights: list[float] | None = arg(None, "One per reward function; default: all 1.")
    scale_rewards: str = arg(
        "group", "What divides the advantages: the std of the 'group' or the 'batch', or 'none'."
    )

    def __post_init__(self) -> None:
        # before the parent, which reads the environment and starts devices
        self._check_numbers()
        if isinstance(self.scale_rewards, bool):  # TRL allows both
            self.scale_rewards = "group" if self.scale_rewards else "none"
        _choice("scale_rewards", self.scale_rewards, ("group", "batch", "none"))
        if self.remove_unused_columns:
            raise ValueError(
                "remove_unused_columns=True would keep the columns from the reward functions"
            )
        if self.label_smoothing_factor or self.auto_find_batch_size:
            raise ValueError("label_smoothing_factor and auto_find_batch_size do not apply to GRPO")
        if isinstance(self.rejection, str):  # the parent would parse it too late
            self.rejection = _json("rejection", self.rejection)
        self.check_loss()
        super().__post_init__()
        self._check_generation_kwargs()
        self._check_batch()

    @property
    def generation_steps(self) -> int:
        """Micro-batches sampled at once."""
        return self.steps_per_generation or self.gradient_accumulation_steps

    @property
    def generation_batch_size(self) -> int:
        """Completions sampled at once, over all processes."""
        return self.per_device_train_batch_size * self.generation_steps * self.world_size

    def _check_numbers(self) -> None:
        for name, low in (
            ("num_generations", 2),
            ("max_completion_length", 1),
            ("num_iterations", 1),
            ("top_k", 0),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an integer, not {type(value).__name__}")
            if value < low:
                raise ValueError(f"{name}={value} must be at least {low}")
        _number("temperature", self.temperature, lambda x: 0 < x < math.inf, "> 0")
        _number("top_p", self.top_p, lambda x: 0 < x <= 1, "in (0, 1]")
        if self.min_p is not None:
            _number("min_p", self.min_p, lambda x: 0 <= x <= 1, "in [0, 1], or None")
        _number("repetition_penalty", self.repetition_penalty, lambda x: x > 0, "> 0")
        _number("epsilon", self.epsilon, lambda x: 0 <= x < 1, "in [0, 1)")
        for weight in self.reward_weights or ():
            _number("reward_weights", weight, math.isfinite, "finite")

    def _check_generation_kwargs(self) -> None:
        clash = RESERVED_GENERATION_KWARGS & set(self.generation_kwargs or ())
        if clash:
            raise ValueError(
                f"generation_kwargs must not hold {', '.join(sorted(clash))}: sampling has "
                "arguments of its own; a completion ends at eos_token_id or max_completion_length"
            )

    def _check_batch(self) -> None:
        steps, gas = self.generation_steps, self.gradient_accumulation_steps
        if steps < 1 or steps % gas:
            raise ValueError(
                f"steps_per_generation={steps} must be a multiple of "
                f"gradient_accumulation_steps={gas}"
            )
        size, group = self.generation_batch_size, self.num_generations
        if size % group == 0:
            return
        groups = [g for g in range(2, size + 1) if size % g == 0]
        unit = group // math.gcd(group, steps * self.world_size)
        raise ValueError(
            f"num_generations={group} does not divide the {size} completions of a generation: "
            f"per_device_train_batch_size={self.per_device_train_batch_size} * {steps} micro-"
            f"batches * {self.world_size} process(es). num_generations that fit: "
            f"{', '.join(map(str, groups)) or 'none'}; per_device_train_batch_size that fit: "
            f"{unit}, {2 * unit}, {3 * unit}, ..."
        )


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name}={text!r} is not JSON: {error}") from error


def _number(name: str, value: object, holds: Callable[[float], bool], must: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    if not holds(value):
        raise ValueError(f"{name}={value} must be {must}")


def _choice(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(known)}")
