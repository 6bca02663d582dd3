"""Times of a handful of our own calls, for pytest-benchmark: `make bench-regression`.

Not collected by an ordinary test run. Times of different days are hard to compare on a machine that
others use: `over_product` in the saved results is each case's median over that of the bare logits
product beside it.
"""

from __future__ import annotations

import statistics
import time
from functools import cache
from typing import Any

import pytest

from benchmarks.data import Case, Spec
from benchmarks.implementations import OURS, ROUTED, implementations
from benchmarks.measure import logits_gemm, task_feed

pytest.importorskip("pytest_benchmark")

CASES = {
    "exact-bf16": (OURS, Spec()),
    "exact-fp32": (OURS, Spec(dtype="fp32")),
    "routed-bf16": (ROUTED, Spec()),
    "routed-fp32": (ROUTED, Spec(dtype="fp32")),
    "frozen-bf16": (OURS, Spec(task="frozen")),
    "logprobs-bf16": (OURS, Spec(task="logprobs")),
    "half of the tokens without a gradient": (OURS, Spec(zero=0.5)),
}


@cache
def built(dtype: str, zero: float) -> Case:
    return Spec(dtype=dtype, zero=zero).build()


@pytest.mark.parametrize("name", CASES)
def test_time(name: str, benchmark: Any) -> None:
    implementation, spec = CASES[name]
    item = next(i for i in implementations() if i.key == f"{implementation}/counted")
    feed = task_feed(built(spec.dtype, spec.zero), "counted", spec.task)
    product, seconds = logits_gemm(feed.case), []

    def beside() -> None:
        feed.forget()
        start = time.perf_counter()
        product()
        seconds.append(time.perf_counter() - start)

    benchmark.pedantic(
        item.call, args=(feed, spec.task), setup=beside, rounds=5, warmup_rounds=1, iterations=1
    )
    if benchmark.stats is not None:  # None with --benchmark-disable
        over = benchmark.stats.stats.median / statistics.median(seconds)
        benchmark.extra_info["over_product"] = round(over, 3)
