"""What runs in a verifier's process, which starts the sooner the less is imported here."""

from __future__ import annotations

import functools
import json
import re
from typing import Any


def exact(completion: str, answer: Any) -> float:
    """1 where the two are the same text, blanks around both aside."""
    return float(completion.strip() == str(answer).strip())


def regex(pattern: str, completion: str, answer: Any = None) -> float:
    """1 where the pattern is found, and its first group, if it has any, is the answer."""
    found = re.search(pattern, completion)
    if found is None:
        return 0.0
    return 1.0 if found.re.groups == 0 else exact(found.group(1) or "", answer)


def mathematics(completion: str, answer: Any) -> float:
    """1 where math-verify finds the two mathematically equal.

    Raises:
        ValueError: the answer is no mathematics.
    """
    import math_verify

    gold = str(answer)
    gold = gold if "$" in gold or "\\boxed" in gold else f"${gold}$"
    # no limits of its own, which need signals: whoever runs this sets one
    known = math_verify.parse(gold, parsing_timeout=None)
    if not known:
        raise ValueError(f"math-verify reads no mathematics in the answer {answer!r}")
    given = math_verify.parse(completion, parsing_timeout=None)
    return float(math_verify.verify(known, given, timeout_seconds=None))


def environment_score(
    environment: str, options: str, completion: str, entry: dict[str, Any]
) -> float:
    """What an environment of reasoning-gym gives for an answer, 1 being right."""
    return float(_judge(environment, options).score_answer(completion, entry))


@functools.lru_cache(maxsize=4)
def _judge(environment: str, options: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(environment, seed=0, size=1, **json.loads(options))
