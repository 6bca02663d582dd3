"""Calling reward functions and checking what they return."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fused_grpo.trainer.rollout import Sample

RewardFunc = Callable[..., Sequence[float | None]]


class RewardError(RuntimeError):
    """A reward function raised, or returned something other than one number per completion."""


def reward_name(func: RewardFunc) -> str:
    """The name under which a reward function appears in logs and errors."""
    inner = func.func if isinstance(func, functools.partial) else func
    return getattr(inner, "__name__", type(inner).__name__)


def compute_rewards(
    funcs: Sequence[RewardFunc],
    prompts: list[Any],
    completions: list[Any],
    completion_ids: list[list[int]],
    columns: dict[str, list[Any]],
) -> Tensor:
    """[B, F] fp32 rewards, NaN where a function returned None or NaN.

    Each function is called once, as
    `f(prompts=..., completions=..., completion_ids=..., **columns)` with lists of length B, and
    returns B numbers or None.

    Raises:
        RewardError: naming the function, the prompt and the completion.
    """
    rewards = torch.full((len(prompts), len(funcs)), math.nan)
    for i, func in enumerate(funcs):
        batch = {
            "prompts": prompts,
            "completions": completions,
            "completion_ids": completion_ids,
            **columns,
        }
        try:
            values = func(**batch)
        except Exception as error:
            row = _failing_row(func, batch)
            raise RewardError(
                f"reward function {reward_name(func)!r} raised {type(error).__name__}: {error}; "
                + _where(batch, row)
            ) from error
        rewards[:, i] = _checked(values, func, batch)
    return rewards


def score(
    funcs: Sequence[RewardFunc], rows: list[dict[str, Any]], sample: Sample, tokenizer: Any
) -> Tensor:
    """[B, F] rewards of the completions of dataset rows, on their device; NaN where there is none.

    The completion of a conversation is a message, [{"role": "assistant", "content": text}].
    """
    ids = sample.completions()
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    prompts = [row["prompt"] for row in rows]
    completions: list[Any] = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
    rewards = compute_rewards(funcs, prompts, completions, ids, columns)
    return rewards.to(sample.completion_ids.device)


def _checked(values: Any, func: RewardFunc, batch: dict[str, list[Any]]) -> Tensor:
    name, expected = reward_name(func), len(batch["prompts"])
    if isinstance(values, Tensor):
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise RewardError(
            f"reward function {name!r} returned {type(values).__name__}, not a list of {expected} "
            f"numbers; {_where(batch, 0)}"
        )
    if len(values) != expected:
        raise RewardError(
            f"reward function {name!r} returned {len(values)} rewards for {expected} completions; "
            + _where(batch, 0)
        )
    out = torch.full((expected,), math.nan)
    for row, value in enumerate(values):
        try:
            out[row] = math.nan if value is None else float(value)
        except (TypeError, ValueError) as error:
            raise RewardError(
                f"reward function {name!r} returned {value!r}, not a number or None; "
                + _where(batch, row)
            ) from error
        if math.isinf(out[row]):
            raise RewardError(
                f"reward function {name!r} returned {value!r}: rewards must be finite; "
                + _where(batch, row)
            )
    return out


def _failing_row(func: RewardFunc, batch: dict[str, list[Any]]) -> int:
    """The first row on which `func` fails alone; 0 if it only fails on the whole."""
    # the run is over in any case, and a message with the wrong prompt helps nobody
    for row in range(len(batch["prompts"])):
        try:
            func(**{name: [column[row]] for name, column in batch.items()})
        except Exception:
            return row
    return 0


def _where(batch: dict[str, list[Any]], row: int) -> str:
    return f"prompt: {batch['prompts'][row]!r}, completion: {batch['completions'][row]!r}"
