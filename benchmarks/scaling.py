"""Time per token and extra memory from 4k to 128k tokens, each point in a fresh process.

A narrow head with a real vocabulary: the logits are what the memory is about, and they do not
depend on the width. Extra memory is what is left beyond the inputs, both gradients, and the fp32
sums of a 16-bit weight's gradient; ours has to stay inside the chunk budget, whatever the number of
tokens.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.data import Case, Spec
from benchmarks.implementations import (
    ROUTING,
    Feed,
    eager_log_softmax,
    free_memory,
    from_logprobs,
    fused_grpo,
    our_logprobs,
)
from benchmarks.measure import peak_of, progress, run_fresh, task_feed

VOCAB, WIDTH = 32_768, 128
TOKENS = (4096, 32_768, 131_072)
BUDGET = 100 * 2**20  # the default chunk_bytes on a CPU
ENOUGH = 5.0  # seconds of calls after which a median is taken


@dataclass(frozen=True)
class Kind:
    """What is called, the task (see `Spec.task`), and the tokens it is shown at by default."""

    call: Callable[[Feed], Any]
    task: str = "loss"
    tokens: tuple[int, ...] = TOKENS
    sums: bool = True  # fp32 sums of a 16-bit weight's gradient are no one's choice
    bytes_per_logit: float = 0.0


SHORT = (4096, 32_768)
KINDS = {
    "exact": Kind(fused_grpo),
    "routed": Kind(partial(fused_grpo, **ROUTING), sums=False),
    "log-probabilities": Kind(our_logprobs, "logprobs"),
    "frozen head": Kind(fused_grpo, "frozen", SHORT),
    "exact, old=None": Kind(partial(fused_grpo, old_per_token_logps=None), tokens=SHORT),
    "exact, sequence-level ratios": Kind(
        partial(fused_grpo, importance_sampling_level="sequence"), tokens=SHORT
    ),
    "eager": Kind(
        from_logprobs(eager_log_softmax),
        tokens=(4096, 131_072),
        sums=False,
        bytes_per_logit=12.0,
    ),
}

QUICK = ("exact", "eager")


def run(tokens: int, dtype: str, device: str, full: bool, quick: bool) -> dict[str, Any]:
    """All kinds at one number of tokens."""
    vocab, width = (512, 32) if quick else (VOCAB, WIDTH)
    spec = Spec(tokens=tokens, vocab=vocab, width=width, dtype=dtype, device=device)
    progress(f"scaling: {tokens} tokens, {dtype}")
    rows, skipped = [], []
    with TemporaryDirectory() as folder:
        path = Path(folder) / "case.pt"
        case = spec.build()
        torch.save({f.name: getattr(case, f.name) for f in fields(case)}, path)
        del case
        progress("timing, in fresh processes")
        for name, kind in KINDS.items():
            if not (name in QUICK if quick else full or tokens in kind.tokens):
                continue
            needed, free = kind.bytes_per_logit * tokens * vocab, free_memory(device)
            if needed > 0.8 * free:
                reason = f"its logits need {needed / 1e9:.0f} GB, {free / 1e9:.0f} GB are free"
                skipped.append({"kind": name, "needed": needed, "reason": reason})
                continue
            progress(f"  {name}")
            order = {"kind": name, "path": str(path)}
            command = [sys.executable, "-m", "benchmarks.scaling", json.dumps(order)]
            rows.append({"kind": name, **run_fresh(command)})
        progress("timed")
    size = {"tokens": tokens, "vocab": vocab, "width": width, "dtype": dtype}
    return {"key": f"{dtype}, {tokens}", **size, "rows": rows, "skipped": skipped}


def measure_one(order: dict[str, str]) -> dict[str, Any]:
    """In this process: peak bytes of the first call, the parts of it that are no one's choice,
    seconds, and the error of 64 log-probabilities."""
    kind, case = KINDS[order["kind"]], Case(**torch.load(order["path"], weights_only=True))
    device = case.hidden.device.type
    small = Spec(tokens=32, vocab=512, width=16, device=device).build()
    small = small.to(case.hidden.dtype, device)
    call(kind, task_feed(small, "counted", kind.task))  # loads what the libraries load on first use
    feed = task_feed(case, "counted", kind.task)
    kept: list[Any] = []
    seconds = []

    def timed() -> None:
        start = time.perf_counter()
        kept[:] = [call(kind, feed)]
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)

    peak = peak_of(timed, device)
    while sum(seconds) < ENOUGH and len(seconds) < 4:
        feed.forget()
        timed()
    grads = [x for x in (feed.hidden, feed.weight) if x.requires_grad and kind.task != "logprobs"]
    sums = kind.sums and kind.task == "loss" and case.weight.itemsize == 2
    # The first call touches its memory for the first time: it counts only where it is the only one.
    return {
        "peak_bytes": peak,
        "gradient_bytes": sum(x.nbytes for x in grads),
        "sum_bytes": 4 * case.weight.numel() if sums else 0,
        "seconds": statistics.median(seconds[1:] or seconds),
        "logps_max": logps_error(kept[0], feed),
    }


def call(kind: Kind, feed: Feed) -> torch.Tensor:
    """The log-probabilities of a call."""
    with torch.set_grad_enabled(kind.task != "logprobs"):
        found = kind.call(feed)
    return (found[1] if isinstance(found, tuple) else found).detach()


def logps_error(logps: torch.Tensor, feed: Feed, count: int = 64) -> float:
    """The largest of the first tokens', against fp64, in nats."""
    with torch.no_grad():
        z = feed.hidden[:count].double() @ feed.weight.double().T
        exact = torch.log_softmax(z, -1).gather(1, feed.ids[:count, None]).squeeze(1)
        return float((logps[:count].double() - exact).abs().max())


def extra(row: dict[str, Any]) -> float:
    return row["peak_bytes"] - row["gradient_bytes"] - row["sum_bytes"]


if __name__ == "__main__":
    print(json.dumps(measure_one(json.loads(sys.argv[1]))))
