"""The arguments of `GRPOTrainer`: those of transformers' Trainer and TRL's names for the rest."""

# ruff: noqa: RUF009 (arg is dataclasses.field, one call per field)

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainingArguments

from fused_grpo.advantages import AGGREGATIONS
from fused_grpo.estimators import ESTIMATORS
from fused_grpo.kl import HEAD_KL
from fused_grpo.trainer.loop_args import LoopArguments
from fused_grpo.trainer.loss_args import LossArguments, arg
from fused_grpo.trainer.monitor_args import MonitorArguments
from fused_grpo.trainer.rollout_args import RolloutArguments
from fused_grpo.trainer.secrecy import without_secrets

# what the trainer sets itself, or what would hide where a completion ends
RESERVED_GENERATION_KWARGS = frozenset(
    {"do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_length"}
    | {"max_new_tokens", "num_return_sequences", "num_beams", "return_dict_in_generate"}
    | {"stop_strings", "stopping_criteria"}
)


# the estimators that scale_rewards applies to
SCALED = ("grpo", "gdpo", "pass_at_k")


@dataclass
class GRPOConfig(
    LoopArguments, MonitorArguments, RolloutArguments, LossArguments, TrainingArguments
):
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
        "transformers_continuous_batching_config",
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
    top_p: float = arg(1.0, "Nucleus sampling; see keep_sampling_mask.")
    top_k: int = arg(0, "Sample from the k likeliest tokens only; 0: from all.")
    min_p: float | None = arg(None, "Drop tokens below this share of the likeliest one.")
    keep_sampling_mask: bool = arg(
        False,
        "Take log-probabilities over the tokens that top_k, top_p and min_p left to the sampler.",
    )
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
    padding_free: bool = arg(
        False, "Give the model a micro-batch as one row of tokens without padding."
    )
    mask_truncated_completions: bool = arg(
        False, "Leave completions that did not end within max_completion_length out of the loss."
    )
    # nothing lost
    max_nonfinite_steps: int = arg(
        10, "Stop after so many steps in a row whose loss or gradient was not finite."
    )
    max_failed_saves: int = arg(
        3, "Stop after so many checkpoints in a row that could not be written."
    )
    # rewards and advantages
    reward_weights: list[float] | None = arg(None, "One per reward function; default: all 1.")
    scale_rewards: str = arg(
        "group", "What divides the advantages: the std of the 'group' or the 'batch', or 'none'."
    )
    advantage_estimator: str = arg(
        "grpo",
        "grpo, dr_grpo, rloo, rloo_std, reinforce_plus_plus, reinforce_plus_plus_baseline, gdpo, "
        "opo, remax, pass_at_k, maxrl or gpg; all but grpo and pass_at_k have their own scale.",
    )
    multi_objective_aggregation: str = arg(
        "sum_then_normalize",
        "Several rewards: 'sum_then_normalize', or 'normalize_then_sum' (GDPO).",
    )

    def __post_init__(self) -> None:
        # before the parent, which reads the environment and starts devices
        self._check_numbers()
        if isinstance(self.scale_rewards, bool):  # TRL allows both
            self.scale_rewards = "group" if self.scale_rewards else "none"
        self._check_advantages()
        if self.remove_unused_columns:
            raise ValueError(
                "remove_unused_columns=True would keep the columns from the reward functions"
            )
        if self.label_smoothing_factor or self.auto_find_batch_size:
            raise ValueError("label_smoothing_factor and auto_find_batch_size do not apply to GRPO")
        if isinstance(self.rejection, str):  # the parent would parse it too late
            self.rejection = _json("rejection", self.rejection)
        self.check_loss()
        self.check_loop()
        self.check_rollout()
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        if processes > 1 and not torch.accelerator.is_available():
            self.use_cpu = True  # else the processes would not find one another
        super().__post_init__()
        if processes != self.world_size:
            raise ValueError(
                f"WORLD_SIZE={processes} processes were started, and this one is in a group of "
                f"{self.world_size}: set use_cpu=True to train on CPUs, or start it by `torchrun`"
            )
        self._check_generation_kwargs()
        self._check_batch()
        self.adaptive_kl()
        self.check_monitor()

    @property
    def sampler_support(self) -> dict[str, Any]:
        """What `linear_support` takes to find the sampler's support; empty if it is not kept."""
        given = {
            "top_k": self.top_k or None,
            "top_p": self.top_p if self.top_p < 1 else None,
            "min_p": self.min_p or None,
        }
        return {k: v for k, v in given.items() if v is not None and self.keep_sampling_mask}

    @property
    def reuses_samples(self) -> bool:
        """Whether the policy moves between sampling a completion and the last use of it."""
        return self.num_iterations > 1 or self.generation_steps > self.gradient_accumulation_steps

    @property
    def needs_reference_states(self) -> bool:
        """Whether the reference's log-probabilities depend on what the loss computes."""
        return self.beta > 0 and (self.kl_estimator in HEAD_KL or self.keep_sampling_mask)

    @property
    def generation_steps(self) -> int:
        """Micro-batches sampled at once."""
        return self.steps_per_generation or self.gradient_accumulation_steps

    @property
    def generation_batch_size(self) -> int:
        """Completions sampled at once, over all processes."""
        return self.per_device_train_batch_size * self.generation_steps * self.world_size

    @property
    def advantage_options(self) -> dict[str, Any]:
        """The options of `multi_reward_advantages` that stay the same in every step."""
        options: dict[str, Any] = {
            "weights": self.reward_weights,
            "aggregation": self.multi_objective_aggregation,
            "estimator": self.advantage_estimator,
        }
        if self.advantage_estimator in SCALED:
            options["scale"] = self.scale_rewards
        return options

    def _check_advantages(self) -> None:
        _choice("scale_rewards", self.scale_rewards, ("group", "batch", "none"))
        _choice("advantage_estimator", self.advantage_estimator, (*ESTIMATORS, "gdpo"))
        aggregation = self.multi_objective_aggregation
        _choice("multi_objective_aggregation", aggregation, AGGREGATIONS)
        if self.scale_rewards != "group" and self.advantage_estimator not in SCALED:
            raise ValueError(
                f"scale_rewards={self.scale_rewards!r} does not apply to advantage_estimator="
                f"{self.advantage_estimator!r}, only to {', '.join(SCALED)}"
            )
        if self.advantage_estimator == "remax" and aggregation != AGGREGATIONS[0]:
            raise ValueError(
                f"multi_objective_aggregation={aggregation!r} does not apply to remax, whose "
                "baseline is the sum of the rewards of one greedy completion"
            )

    def _check_numbers(self) -> None:
        for name, low in (
            ("num_generations", 2),
            ("max_completion_length", 1),
            ("num_iterations", 1),
            ("max_nonfinite_steps", 1),
            ("max_failed_saves", 1),
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
        if self.keep_sampling_mask and (self.repetition_penalty != 1 or not self.sampler_support):
            raise ValueError(
                f"keep_sampling_mask=True with top_k={self.top_k}, top_p={self.top_p}, min_p="
                f"{self.min_p}, repetition_penalty={self.repetition_penalty}: it needs one of the "
                "first three, and no penalty, which changes what they leave"
            )
        _number("epsilon", self.epsilon, lambda x: 0 <= x < 1, "in [0, 1)")
        for weight in self.reward_weights or ():
            _number("reward_weights", weight, math.isfinite, "finite")

    def to_dict(self) -> dict[str, Any]:
        """What run.json, checkpoints and trackers are told: without passwords and tokens."""
        shown: dict[str, Any] = without_secrets(super().to_dict())
        return shown

    def __getstate__(self) -> dict[str, Any]:
        """Pickled without them too: `training_args.bin` goes into checkpoints and to the Hub."""
        state: dict[str, Any] = without_secrets(vars(self), None)
        return state

    def __copy__(self) -> GRPOConfig:
        """With all it has, as copies would otherwise be made of `__getstate__`."""
        new = object.__new__(type(self))
        vars(new).update(vars(self))
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> GRPOConfig:
        new = object.__new__(type(self))
        memo[id(self)] = new
        vars(new).update(copy.deepcopy(vars(self), memo))
        return new

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
