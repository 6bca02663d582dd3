"""The verifier for mathematics: a module, so that its imports end before a sample's time begins."""

from __future__ import annotations

from typing import Any

import math_verify

from fused_grpo.trainer.judges_guard import guard


def mathematics(completion: str, answer: Any) -> float:
    """1 where math-verify finds the two mathematically equal.

    Raises:
        ValueError: the answer is no mathematics.
    """
    guard()
    gold = str(answer)
    gold = gold if "$" in gold or "\\boxed" in gold else f"${gold}$"
    # no limits of its own, which need signals: whoever runs this sets one
    known = math_verify.parse(gold, parsing_timeout=None)
    if not known:
        raise ValueError(f"math-verify reads no mathematics in the answer {answer!r}")
    given = math_verify.parse(completion, parsing_timeout=None)
    return float(math_verify.verify(known, given, timeout_seconds=None))
