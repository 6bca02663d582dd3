"""Calling reward functions and checking what they return."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fused_grpo.trainer.reward_calls import RewardTimeoutError, call_all, call_once
from fused_grpo.trainer.rollout import Sample

logger = logging.getLogger(__name__)

# a function or a coroutine function
RewardFunc = Callable[..., Sequence[float | None] | Awaitable[Sequence[float | None]]]


LARGEST = torch.finfo(torch.float32).max
TEXTS = (str, bytes, bytearray)  # sequences, or numbers to `float`, and never rewards


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
    timeout: float | None = None,
    errors: str = "raise",
    failed: dict[str, int] | None = None,
) -> Tensor:
    """[B, F] fp32 rewards, NaN where a function returned None or NaN.

    Each function is called once, as
    `f(prompts=..., completions=..., completion_ids=..., **columns)` with lists of length B, and
    returns B numbers or None. Coroutine functions run at the same time.

    Args:
        timeout: seconds for each call.
        errors: what becomes of a function that raises or runs out of time: "raise", or "none", NaN
            for the batch. A function that returns something else than rewards always raises.
        failed: gets the number of completions that each function has left without a reward by
            failing, by its name, where that may happen.

    Raises:
        RewardError: naming the function, the prompt and the completion.
    """
    rewards = torch.full((len(prompts), len(funcs)), math.nan, dtype=torch.float32)
    batch = {
        "prompts": prompts,
        "completions": completions,
        "completion_ids": completion_ids,
        **columns,
    }
    counts: dict[str, int] = {} if failed is None else failed
    for i, (func, values) in enumerate(zip(funcs, call_all(funcs, batch, timeout), strict=True)):
        name = reward_name(func)
        if not isinstance(values, BaseException):
            rewards[:, i] = _checked(values, func, batch)
            lost = sum(getattr(func, "failures", {}).values())  # of an isolated verifier
        elif errors == "raise":
            raise RewardError(_why(func, values, batch, timeout)) from values
        else:
            lost = len(prompts)
            logger.warning("reward function %r: %s: %s", name, type(values).__name__, values)
        if errors != "raise" or hasattr(func, "failures"):
            counts[name] = counts.get(name, 0) + lost
    if len(unscored := rewards.isnan().all(1).nonzero()):
        logger.warning(
            "no reward function has a reward for %d of %d completions, which teach nothing; %s",
            len(unscored),
            len(rewards),
            _where(batch, int(unscored[0])),
        )
    return rewards


def score(
    funcs: Sequence[RewardFunc],
    rows: list[dict[str, Any]],
    sample: Sample,
    tokenizer: Any,
    **options: Any,
) -> Tensor:
    """[B, F] rewards of the completions of dataset rows, on their device; NaN where there is none.

    The completion of a conversation is a message, [{"role": "assistant", "content": text}]. For
    `options` see `compute_rewards`.
    """
    ids = sample.completions()
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    prompts = [row["prompt"] for row in rows]
    completions: list[Any] = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
    rewards = compute_rewards(funcs, prompts, completions, ids, columns, **options)
    return rewards.to(sample.completion_ids.device)


def _checked(values: Any, func: RewardFunc, batch: dict[str, list[Any]]) -> Tensor:
    name, expected = reward_name(func), len(batch["prompts"])
    if isinstance(values, (Tensor, np.ndarray)):
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, TEXTS):
        raise RewardError(
            f"reward function {name!r} returned {type(values).__name__}, not a list of {expected} "
            f"numbers; {_where(batch, 0)}"
        )
    if len(values) != expected:
        raise RewardError(
            f"reward function {name!r} returned {len(values)} rewards for {expected} completions; "
            + _where(batch, 0)
        )
    out = torch.full((expected,), math.nan, dtype=torch.float32)
    for row, value in enumerate(values):
        try:
            if isinstance(value, TEXTS):  # "0.5" may be an answer that was never scored
                raise TypeError("a text")
            number = math.nan if value is None else float(value)
        except Exception as error:  # of whatever the value's own __float__ does
            raise RewardError(
                f"reward function {name!r} returned {value!r}, not a number or None; "
                + _where(batch, row)
            ) from error
        if abs(number) > LARGEST:
            raise RewardError(
                f"reward function {name!r} returned {value!r}: rewards must be finite; "
                + _where(batch, row)
            )
        out[row] = number
    return out


def soft_overlong(lengths: Tensor, longest: int, buffer: int, factor: float = 1.0) -> Tensor:
    """[B] the punishment for lengths [B] near the limit (DAPO, arXiv 2503.14476, equation 13).

    0 up to `longest - buffer` tokens, then falling evenly to -factor at `longest`.
    """
    return factor * ((longest - buffer - lengths) / buffer).clamp(-1, 0)


def _why(
    func: RewardFunc, error: BaseException, batch: dict[str, list[Any]], timeout: float | None
) -> str:
    # one that takes too long is not tried again, row by row
    row = 0 if isinstance(error, RewardTimeoutError) else _failing_row(func, batch, timeout)
    return (
        f"reward function {reward_name(func)!r} raised {type(error).__name__}: {error}; "
        + _where(batch, row)
    )


def _failing_row(func: RewardFunc, batch: dict[str, list[Any]], timeout: float | None) -> int:
    """The first row on which `func` fails alone; 0 if it only fails on the whole."""
    # the run is over in any case, and a message with the wrong prompt helps nobody
    for row in range(len(batch["prompts"])):
        try:
            call_once(func, {name: [column[row]] for name, column in batch.items()}, timeout)
        except KeyboardInterrupt:
            raise
        except BaseException:
            return row
    return 0


def _where(batch: dict[str, list[Any]], row: int) -> str:
    return f"prompt: {batch['prompts'][row]!r}, completion: {batch['completions'][row]!r}"
