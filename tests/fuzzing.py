"""How many cases a property is tried with: a few, the same on every run, or by `make fuzz` many.

`scripts/fuzz.py` sets FUZZ_FACTOR: examples are then drawn anew, by a seed that it prints.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings

FACTOR = int(os.environ.get("FUZZ_FACTOR", "0"))


def examples(count: int) -> Callable[[Any], Any]:
    """`count` of them in CI, where a red test is the fault of the change under test alone."""
    return settings(
        max_examples=count * max(1, FACTOR),
        deadline=None,
        derandomize=not FACTOR,
        database=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
