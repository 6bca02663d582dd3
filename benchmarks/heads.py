"""The heads of real models on a GPU: `python -m benchmarks.loss --device cuda`.

For each model's (H, V), in one process and in turns: the bare logits product, then per task every
implementation. Three tasks, in units of that product (2NHV):

    logprobs   no gradients                    one product at least
    loss       loss and both gradients         three (hidden, weight and the forward)
    frozen     loss and the hidden gradient    two

Ratios are taken round by round against the product of the same run; peers that are not installed
are named as skipped. Log-probabilities of all tokens are checked against fp64, gradients on some of
their rows, so that nothing of size [N, V] is held in fp64.
"""

from __future__ import annotations

import gc
import inspect
import json
import statistics
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import measure
from benchmarks.data import Case
from benchmarks.head_data import head_case, truth, weight_rows
from benchmarks.implementations import (
    Feed,
    Run,
    eager_log_softmax,
    from_logprobs,
    fused_grpo,
    liger,
    liger_logprobs,
    make_feed,
    present,
    trl_chunked,
)
from benchmarks.measure import progress
from benchmarks.report import result_path

PRODUCTS = {"logprobs": 1, "loss": 3, "frozen": 2}  # the floor of each task

# On an H200 in bf16 with N = 8192, H = 4096, V = 151936: our time over the floor, or over a peer's.
TARGETS = (
    ("logprobs", "floor", 1.15),
    ("loss", "floor", 1.25),
    ("frozen", "floor", 1.25),
    ("loss", "TRL chunked", 0.75),
)
TARGET_SHAPE = {"tokens": 8192, "width": 4096, "vocab": 151_936, "dtype": "bf16"}


def verl_logprobs(feed: Feed) -> Tensor:
    """verl's Triton kernel; its arguments differ between releases."""
    from verl.utils.kernel.linear_cross_entropy import LinearCrossEntropy  # type: ignore

    known = {
        "temperature": feed.case.temperature,
        "reduction": "none",
        "dist_process_group": None,
    }
    names = list(inspect.signature(LinearCrossEntropy.forward).parameters)[4:]
    rest = [known[name] for name in names]
    logps, _ = LinearCrossEntropy.apply(feed.hidden, feed.weight, feed.ids, *rest)
    return logps


def our_logprobs(feed: Feed) -> Tensor:
    from fused_grpo import linear_logprobs

    return linear_logprobs(
        feed.hidden, feed.weight, feed.ids, temperature=feed.case.temperature
    ).logps


@dataclass(frozen=True)
class Head:
    """An implementation: log-probabilities alone, and the whole loss with its backward."""

    name: str
    logprobs: Callable[[Feed], Tensor]
    loss: Run
    package: str = "torch"
    layout: str = "counted"


OURS = "fused-grpo"
HEADS = (
    Head(OURS, our_logprobs, fused_grpo),
    Head("eager", eager_log_softmax, from_logprobs(eager_log_softmax)),
    Head("TRL chunked", trl_chunked, from_logprobs(trl_chunked), "trl"),
    Head("Liger", liger_logprobs, liger(compiled=False), "liger_kernel", "padded"),
    Head("verl", verl_logprobs, from_logprobs(verl_logprobs), "verl"),
)


# --- measuring -----------------------------------------------------------------------------------


def errors(case: Case, head: Head, exact: tuple[Tensor, Tensor, Tensor]) -> dict[str, float]:
    """Log-probabilities (largest, nats), gradients on some rows (relative)."""
    logps, dh, dw = exact
    feed = make_feed(case, head.layout)
    with torch.no_grad():
        got = head.logprobs(feed).flatten().double()
    head.loss(feed)
    hidden_grad = present(feed.hidden.grad).flatten(0, -2)[: len(dh)].double()
    weight_grad = present(feed.weight.grad)[weight_rows(case)].double()
    return {
        "logps_max": float((got - logps).abs().max()),
        "dhidden": float((hidden_grad - dh).norm() / dh.norm()),
        "dweight": float((weight_grad - dw).norm() / dw.norm()),
    }


def task(head: Head, name: str, feed: Feed) -> Callable[[], None]:
    """One call of a task on a feed whose weight needs a gradient only in "loss"."""

    def run() -> None:
        if name == "logprobs":
            with torch.no_grad():
                head.logprobs(feed)
        else:
            head.loss(feed)

    return run


def run_case(case: Case, args: Namespace) -> dict[str, Any]:
    """All tasks and implementations on one head; what fails is named and left out."""
    exact = truth(case)
    skipped: dict[str, str] = {}
    checked: dict[str, dict[str, float]] = {}
    for head in HEADS:
        if args.only and head.name != OURS and not any(o in head.name for o in args.only):
            continue
        progress(f"checking {head.name}")
        try:
            checked[head.name] = errors(case, head, exact)
        except Exception as error:  # a peer that cannot run must not stop the others
            if head.name == OURS:
                raise
            skipped[head.name] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
            progress(f"skipping {head.name}: {skipped[head.name]}")
        _forget()
    heads = [head for head in HEADS if head.name in checked]
    rows = [row for name in PRODUCTS for row in time_task(name, case, heads, args)]
    width, vocab = case.hidden.shape[-1], case.weight.shape[0]
    dtype = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(case.hidden.dtype, "fp32")
    shape = {"tokens": case.tokens, "width": width, "vocab": vocab, "dtype": dtype}
    verdicts = [judge(rows, *target) for target in TARGETS]
    return {
        "name": case.name,
        **shape,
        "errors": checked,
        "rows": rows,
        "skipped": skipped,
        "verdicts": verdicts,
        "targets_apply": shape == TARGET_SHAPE and "H200" in measure.machine(args.device)["device"],
    }


def time_task(name: str, case: Case, heads: list[Head], args: Namespace) -> list[dict[str, Any]]:
    progress(f"timing {name}, {args.rounds} rounds")
    feeds = {layout: make_feed(case, layout) for layout in {head.layout for head in heads}}
    for feed in feeds.values():
        feed.weight.requires_grad_(name == "loss")
    runs: dict[str, Any] = {head.name: task(head, name, feeds[head.layout]) for head in heads}
    runs["product"] = measure.logits_gemm(case)

    def forget() -> None:
        for feed in feeds.values():
            feed.forget()

    for call in runs.values():  # compiles, tunes, and loads workspaces
        forget()
        call()
    timings = measure.time_in_turns(runs, args.device, args.rounds, args.patience, forget)
    product, n = timings["product"], case.tokens
    flops = 2 * n * case.hidden.shape[-1] * case.weight.shape[0]
    rows = []
    for head in heads:
        forget()
        _forget()
        timing = timings[head.name]
        ratios = [x / PRODUCTS[name] for x in timing.ratios(product)]
        rows.append(
            {
                "task": name,
                "name": head.name,
                "median_s": timing.median,
                "over_floor": statistics.median(ratios),
                "over_floor_range": [min(ratios), max(ratios)],
                "tflops": PRODUCTS[name] * flops / timing.median / 1e12,
                "product_s": product.median,
                "peak_bytes": measure.peak_of(runs[head.name], args.device),
            }
        )
    return rows


def judge(rows: list[dict[str, Any]], name: str, over: str, limit: float) -> dict[str, Any]:
    """Our time of a task over its floor, or over a peer's time; `ratio` None: not measured."""
    mine = {row["name"]: row for row in rows if row["task"] == name}
    ratio = None
    if over == "floor":
        ratio = mine[OURS]["over_floor"]
    elif over in mine:
        ratio = mine[OURS]["median_s"] / mine[over]["median_s"]
    return {"task": name, "over": over, "limit": limit, "ratio": ratio}


def _forget() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# --- the command ---------------------------------------------------------------------------------


def main(args: Namespace, results: dict[str, Any]) -> None:
    """Runs the chosen models and dtypes; prints tables and writes JSON and Markdown."""
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    results["heads"] = []
    for name in args.shape:
        for dtype in args.dtype:
            progress(f"{name}, {dtype}, {args.tokens} tokens")
            case = head_case(name, args.tokens, args.device, dtypes[dtype])
            results["heads"].append(run_case(case, args))
            print(table(results["heads"][-1]), flush=True)
            del case
            _forget()
    base = result_path(results["machine"], args.out, args.name)
    base.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    tables = "\n".join(map(table, results["heads"]))
    machine = results["machine"]
    packages = ", ".join(f"{k} {v}" for k, v in machine["packages"].items() if v)
    head = f"{machine['device']}; {packages}\n\n`{results['command']}`\n\n"
    base.with_suffix(".md").write_text(head + tables)
    print(f"wrote {base.with_suffix('.json')} and .md")


def table(case: dict[str, Any]) -> str:
    n, width, vocab = case["tokens"], case["width"], case["vocab"]
    lines = [
        f"### {case['name']}: N = {n}, H = {width}, V = {vocab}, {case['dtype']}",
        "",
        "Floor: the bare logits product, times 1 (logprobs), 3 (loss) or 2 (frozen head).",
        "",
        "| task | implementation | ms | time / floor (range) | TFLOP/s "
        "| share of the product's rate | peak MB |",
        "|---|---|---|---|---|---|---|",
        *map(_line, case["rows"]),
        "",
        "| implementation | logp error, nats | dh error | dW error |",
        "|---|---|---|---|",
        *(
            f"| {name} | {e['logps_max']:.1e} | {e['dhidden']:.1e} | {e['dweight']:.1e} |"
            for name, e in case["errors"].items()
        ),
        "",
    ]
    lines += [f"Skipped: {name} ({why})." for name, why in case["skipped"].items()]
    lines += [_verdict(v, case["targets_apply"]) for v in case["verdicts"]]
    return "\n".join([*lines, ""])


def _line(row: dict[str, Any]) -> str:
    low, high = row["over_floor_range"]
    return (
        f"| {row['task']} | {row['name']} | {row['median_s'] * 1e3:.3g} "
        f"| {row['over_floor']:.2f} ({low:.2f} to {high:.2f}) | {row['tflops']:.3g} "
        f"| {1 / row['over_floor']:.0%} | {row['peak_bytes'] / 1e6:.0f} |"
    )


def _verdict(verdict: dict[str, Any], applies: bool) -> str:
    over = "its floor" if verdict["over"] == "floor" else verdict["over"]
    text = f"- {verdict['task']}, ours over {over}: "
    if verdict["ratio"] is None:
        return text + f"not measured, target {verdict['limit']:.2f}"
    text += f"{verdict['ratio']:.2f}, target {verdict['limit']:.2f}"
    if not applies:
        return text + " (set for an H200 in bf16 at N = 8192, H = 4096, V = 151936)"
    return text + (": holds" if verdict["ratio"] <= verdict["limit"] else ": MISSED")
