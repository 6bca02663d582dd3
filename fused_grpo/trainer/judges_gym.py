"""The judgement of reasoning-gym's environments; see `judges_math` for why it is a module."""

from __future__ import annotations

import functools
import json
from typing import Any

import reasoning_gym

from fused_grpo.trainer.judges_guard import guard


def environment_score(
    environment: str, options: str, completion: str, entry: dict[str, Any]
) -> float:
    """What an environment with these options, as JSON, gives for an answer, 1 being right.

    0 for one that it cannot read: some raise where others give 0.
    """
    judge = _judge(environment, options)
    guard()
    try:
        return float(judge.score_answer(completion, entry))
    except Exception:
        return 0.0


@functools.lru_cache(maxsize=4)
def _judge(environment: str, options: str) -> Any:
    return reasoning_gym.create_dataset(environment, seed=0, size=1, **json.loads(options))
