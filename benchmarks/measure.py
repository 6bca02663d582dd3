"""Errors, times taken in turns, and peak memory in a fresh process."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.data import Case, Spec
from benchmarks.implementations import Feed, Implementation, implementations, make_feed, present
from benchmarks.truth import Truth

ROOT = Path(__file__).resolve().parent.parent


def progress(text: str) -> None:
    print(f"# {text}", file=sys.stderr, flush=True)


# --- errors --------------------------------------------------------------------------------------


def errors(item: Implementation, feed: Feed, truth: Truth, task: str) -> dict[str, float]:
    """Against fp64: loss (absolute), logps in nats (mean, max), gradients (relative, Frobenius), as
    far as the task has them."""
    feed.forget()
    loss, logps = item.call(feed, task)
    if logps is None:  # it keeps them to itself
        with torch.no_grad():
            logps = present(item.logprobs)(feed)
    padded = item.layout == "padded"
    logps = logps[feed.case.mask] if padded else logps
    difference = (logps.double() - truth.logps).abs()
    found = {"logps_mean": float(difference.mean()), "logps_max": float(difference.max())}
    if task == "logprobs":
        return found
    dh = present(feed.hidden.grad)
    found["loss"] = abs(float(present(loss)) - float(truth.loss))
    found["dhidden"] = _relative(dh[feed.case.mask] if padded else dh, truth.dhidden)
    if task == "loss":
        dw = present(feed.weight.grad)
        found["dweight"] = _relative(dw if truth.rows is None else dw[truth.rows], truth.dweight)
    return found


def _relative(x: Tensor, truth: Tensor) -> float:
    return float((x.double() - truth).norm() / truth.norm().clamp(min=1e-300))


# --- time ----------------------------------------------------------------------------------------


@dataclass
class Timing:
    """Seconds of the first rounds, all of them unless it was slow (see `time_in_turns`)."""

    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def ratios(self, base: Timing) -> list[float]:
        """This over `base`, round by round: what disturbs a round disturbs both."""
        return [a / b for a, b in zip(self.seconds, base.seconds, strict=False)]


def time_in_turns(
    runs: dict[str, Callable[[], Any]],
    device: str,
    rounds: int,
    patience: float,
    before_each: Callable[[], None],
) -> dict[str, Timing]:
    """Times the runs in turns, A B C A B C ...; each must have run once before.

    A run slower than `patience` times the first one takes part in two rounds only: the minutes are
    better spent on those that might be the fastest.
    """
    timings: dict[str, Timing] = {name: Timing([]) for name in runs}
    first = next(iter(timings.values()))
    for i in range(rounds):
        for name, call in runs.items():
            if i < 2 or timings[name].median <= patience * first.median:
                timings[name].seconds.append(_undisturbed(call, device, before_each))
        last = ", ".join(f"{t.seconds[-1]:.3f}" for t in timings.values())
        progress(f"round {i + 1} of {rounds}, in seconds: {last}")
    return timings


def _undisturbed(call: Callable[[], Any], device: str, before: Callable[[], None]) -> float:
    """Seconds of a turn; taken again, twice at most, if other processes had the cores in it."""
    turns = []
    for _ in range(3):
        before()
        waited, seconds = _waited_for_a_core(), _seconds(call, device)
        waited = _waited_for_a_core() - waited
        turns.append((waited / (seconds * torch.get_num_threads()), seconds))
        if turns[-1][0] < 0.03:
            break
    return min(turns)[1]


def _waited_for_a_core() -> float:
    """Seconds that the threads of this process were ready to run but did not; 0 if unknown."""
    total = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        total += int(path.read_text().split()[1])
    return total / 1e9


def _seconds(call: Callable[[], Any], device: str) -> float:
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def logits_gemm(case: Case) -> Callable[[], None]:
    """The yardstick: one product hidden @ weight.T of the counted tokens, 2NHV."""
    hidden, weight = case.hidden[case.mask], case.weight

    def product() -> None:
        hidden @ weight.T

    return product


# --- memory --------------------------------------------------------------------------------------


def peak_memory(spec: Spec, item: Implementation) -> float:
    """Peak bytes beyond the inputs, the gradients included, of one call in a fresh process."""
    order = {"spec": spec.to_json(), "key": item.key}
    return run_fresh([sys.executable, "-m", "benchmarks.measure", json.dumps(order)])["peak"]


def run_fresh(command: list[str]) -> dict[str, Any]:
    """Runs a command at the repository root and returns the JSON of its last line."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def peak_of(call: Callable[[], Any], device: str) -> float:
    """Bytes by which the memory of this process rises above its level at the start of `call`."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = float(torch.cuda.memory_allocated())
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    # Free blocks that the allocator keeps would otherwise be used without showing up.
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the kernel's high-water mark starts again here
    before = _status_bytes("VmRSS")
    call()
    return _status_bytes("VmHWM") - before


def _status_bytes(key: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return float(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}: peak memory needs Linux")


def _peak_in_this_process(order: dict[str, Any]) -> float:
    spec = Spec(**order["spec"])
    item = next(i for i in implementations() if i.key == order["key"])
    case = spec.build()
    # Thread pools, code and constants of the libraries are no part of the loss: load them first.
    # So is a compilation, which belongs to one shape.
    small = replace(spec, source="synthetic", tokens=32, vocab=512, width=64).build()
    item.call(task_feed(case if item.compiled else small, item.layout, spec.task), spec.task)
    feed = task_feed(case, item.layout, spec.task)
    return peak_of(lambda: item.call(feed, spec.task), spec.device)


def task_feed(case: Case, layout: str, task: str) -> Feed:
    feed = make_feed(case, layout)
    feed.weight.requires_grad_(task == "loss")
    return feed


# --- the machine ---------------------------------------------------------------------------------


PACKAGES = ("torch", "triton", "fused-grpo", "liger-kernel", "trl", "transformers", "verl")
PACKAGES += ("cut-cross-entropy", "quack-kernels")


def machine(device: str) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "load_average": os.getloadavg()[0],
        "commit": commit(),
    }


def commit() -> str | None:
    """With a + if the loss itself has changed since; None outside a repository."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--", "fused_grpo", "kernels")
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + "+" * bool(changed)


def _git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(x.split(":")[1].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    for found in distributions(name=name, path=[*sys.path, os.environ.get("VERL_PATH", "")]):
        return found.version
    return None


if __name__ == "__main__":
    print(json.dumps({"peak": _peak_in_this_process(json.loads(sys.argv[1]))}))
