"""One case: every implementation checked against fp64, timed in turns, its peak memory taken."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks import measure
from benchmarks.data import Case, Spec
from benchmarks.implementations import Feed, Implementation, implementations
from benchmarks.measure import Timing, progress, task_feed
from benchmarks.truth import Truth, exact

# Bare products of the logits' size (2NHV) that a task needs at least: its floor.
PRODUCTS = {"logprobs": 1, "frozen": 2, "loss": 3}

# Dense 16-bit and fp32 (no TF32) rates by the makers' data sheets, TFLOP/s, for the roofline.
RATES = {
    "B200": {"bf16": 2250, "fp32": 75},
    "H200": {"bf16": 989, "fp32": 67},
    "H100": {"bf16": 989, "fp32": 67},
    "A100": {"bf16": 312, "fp32": 19.5},
}


@dataclass(frozen=True)
class Settings:
    rounds: int = 5
    patience: float = 3.0  # slower than this times ours: two rounds only
    full: bool = False
    quick: bool = False
    only: Sequence[str] = ()  # names that contain one of these, and ours


def choose(
    spec: Spec, settings: Settings, keys: Sequence[str] = ()
) -> tuple[list[Implementation], list[dict[str, str]]]:
    """The implementations to run (`keys`: of these), and why the others of them cannot."""
    items = [i for i in implementations() if _takes_part(i, spec.task, settings.full, keys)]
    if settings.only:
        items = [i for i in items if i.ours or any(name in i.name for name in settings.only)]
    skipped = {i: why for i in items if (why := i.reason_to_skip(spec, settings.quick))}
    return (
        [i for i in items if i not in skipped],
        [{"name": i.name, "layout": i.layout, "reason": why} for i, why in skipped.items()],
    )


def _takes_part(item: Implementation, task: str, full: bool, keys: Sequence[str]) -> bool:
    if keys:
        return item.key in keys
    if task == "loss":
        return full or not item.full
    # Without padding for all, in what people run.
    has_it = item.logprobs is not None or task == "frozen"
    usual = item.ours or full or not (item.full or item.half_only)
    return item.layout == "counted" and has_it and usual


def run(spec: Spec, settings: Settings, keys: Sequence[str] = ()) -> dict[str, Any]:
    """Errors and times of a case; `peaks` adds the memory."""
    case = spec.build()
    progress(f"{case.describe()}, {spec.dtype}, {spec.task}")
    chosen, skipped = choose(spec, settings, keys)
    truth = exact(case, spec.task != "logprobs")
    layouts = sorted({item.layout for item in chosen})
    feeds = {layout: task_feed(case, layout, spec.task) for layout in layouts}
    errors = check_all(chosen, skipped, feeds, truth, spec.task)
    about = describe(spec, case, truth)
    del truth
    chosen = [item for item in chosen if item.key in errors]
    timings = time_all(case, spec, chosen, feeds, settings)
    product = timings["product"]
    flops = 2 * case.tokens * case.hidden.shape[-1] * case.weight.shape[0]
    rows = []
    for item in chosen:
        timing = timings[item.key]
        floor = [x / PRODUCTS[spec.task] for x in timing.ratios(product)]
        rate = PRODUCTS[spec.task] * flops / timing.median / 1e12
        rows.append(
            {
                "key": item.key,
                "name": item.name,
                "layout": item.layout,
                "ours": item.ours,
                "extra": item.extra,
                "note": item.note,
                "median_s": timing.median,
                "seconds": timing.seconds,
                "ours_over_it": spread(timings[chosen[0].key].ratios(timing)),
                "over_floor": spread(floor),
                "tflops": rate,
                "roofline": roofline(rate, spec),
                "errors": errors[item.key],
            }
        )
    return about | {"gemm_s": product.median, "implementations": rows, "skipped": skipped}


def describe(spec: Spec, case: Case, truth: Truth) -> dict[str, Any]:
    """What the case came out as."""
    counted = case.advantages[:, None].expand(case.mask.shape)[case.mask]
    return {
        "key": spec.key,
        "spec": spec.to_json(),
        "name": case.name,
        "description": case.describe(),
        "dtype": spec.dtype,
        "task": spec.task,
        "tokens": case.tokens,
        "vocab": case.weight.shape[0],
        "width": case.hidden.shape[-1],
        "padding": case.padding,
        "zero": float((truth.coefficients == 0).double().mean()),
        "without_advantage": float((counted == 0).double().mean()),
        "entropy": mean_entropy(case),
        "loss_type": case.loss_type,
        "beta": case.beta,
    }


@torch.no_grad()
def mean_entropy(case: Case) -> float:
    """Nats, of up to 512 counted tokens spread over the batch."""
    hidden = case.hidden[case.mask]
    hidden = hidden[:: max(1, len(hidden) // 512)].float()
    weight = case.weight.float()
    logp = [torch.log_softmax(h @ weight.T / case.temperature, -1) for h in hidden.split(64)]
    return float(torch.cat([-(x.exp() * x).sum(-1) for x in logp]).mean())


def check_all(
    chosen: list[Implementation],
    skipped: list[dict[str, str]],
    feeds: dict[str, Feed],
    truth: Truth,
    task: str,
) -> dict[str, dict[str, float]]:
    """Errors by implementation; one of another library's that fails joins the skipped ones."""
    errors = {}
    for item in chosen:
        progress(f"checking {item.key}")
        try:
            errors[item.key] = measure.errors(item, feeds[item.layout], truth, task)
        except Exception as error:
            if item.ours:
                raise
            reason = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            progress(f"skipping {item.key}: {reason}")
            skipped.append({"name": item.name, "layout": item.layout, "reason": reason})
        feeds[item.layout].forget()
    return errors


def time_all(
    case: Case,
    spec: Spec,
    chosen: list[Implementation],
    feeds: dict[str, Feed],
    settings: Settings,
) -> dict[str, Timing]:
    progress(f"timing, {settings.rounds} rounds")
    runs: dict[str, Callable[[], Any]]
    runs = {i.key: partial(i.call, feeds[i.layout], spec.task) for i in chosen}
    runs["product"] = measure.logits_gemm(case)

    def forget() -> None:  # freeing the last gradients is no part of anybody's time
        for feed in feeds.values():
            feed.forget()

    for call in runs.values() if spec.device == "cuda" else ():  # tunes, and loads workspaces
        forget()
        call()
    timings = measure.time_in_turns(runs, spec.device, settings.rounds, settings.patience, forget)
    progress("timed")
    forget()
    gc.collect()
    if spec.device == "cuda":
        torch.cuda.empty_cache()
    return timings


def peaks(result: dict[str, Any], whose: str = "all") -> None:
    """Adds the peak memory of each implementation, in a fresh process each; `whose`: all, ours."""
    spec = Spec(**result["spec"])
    items = {item.key: item for item in implementations()}
    for row in result["implementations"]:
        if row.get("peak_bytes") is not None or (whose == "ours" and not row["ours"]):
            continue
        progress(f"memory of {row['key']}")
        try:
            row["peak_bytes"] = measure.peak_memory(spec, items[row["key"]])
        except RuntimeError as error:  # another library's failure must not lose the times
            if row["ours"]:
                raise
            progress(f"no memory figure: {error}")


def spread(ratios: list[float]) -> dict[str, float]:
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}


def roofline(tflops: float, spec: Spec) -> float | None:
    """Share of what the GPU's data sheet promises; None on a CPU and on GPUs that RATES lacks."""
    if spec.device != "cuda":
        return None
    name = torch.cuda.get_device_name()
    rates = next((rates for chip, rates in RATES.items() if chip in name), None)
    return None if rates is None else tflops / rates[spec.dtype]


def with_dtypes(spec: Spec, *dtypes: str) -> list[Spec]:
    return [replace(spec, dtype=dtype) for dtype in dtypes]
