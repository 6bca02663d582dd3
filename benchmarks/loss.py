"""Compares implementations of the GRPO loss: `python -m benchmarks.loss` from the repository root.

One run checks every implementation against fp64, times all of them in turns, measures the peak
memory of each in a fresh process, and writes JSON, Markdown and a plot to benchmarks/results.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import heads, measure, memory, report
from benchmarks.data import Case, real_case, synthetic_case
from benchmarks.head_data import DEFAULT_MODELS, MODELS
from benchmarks.implementations import (
    IMPLEMENTATIONS,
    OURS,
    Feed,
    Implementation,
    exact,
    make_feed,
    silence_known_warnings,
)
from benchmarks.measure import progress

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SHAPES = {
    "real": lambda temperature: real_case(temperature),
    "qwen": lambda _: synthetic_case(vocab=151_936, hidden=1024, batch=6, length=80),
    "tiny": lambda _: synthetic_case(vocab=257, hidden=32, batch=4, length=12),
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loss", description=__doc__)
    add = parser.add_argument
    add(
        "--shape",
        nargs="+",
        choices=[*SHAPES, *MODELS],
        help="inputs: real and qwen on a CPU, the heads of models on a GPU by default",
    )
    add("--tokens", type=int, default=8192, help="N of the heads of models")
    add("--temperature", nargs="+", type=float, default=[1.0], help="of the real tokens")
    add("--dtype", nargs="+", choices=DTYPES, help="both on a CPU, bf16 on a GPU by default")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--only", nargs="+", metavar="NAME", help="names that contain one of these")
    add("--rounds", type=int, help="5, on a GPU 15 by default")
    add("--patience", type=float, default=3.0, help="slower than this times ours: 2 rounds only")
    add("--peak", choices=("all", "ours", "none"), default="all", help="whose memory to measure")
    add("--loss-type", choices=("dapo", "grpo"), default="dapo")
    add("--beta", type=float, default=0.0)
    add("--memory", action="store_true", help="instead: our peak memory as the tokens grow")
    add("--width", type=int, help="H of --memory, 64 by default")
    add("--quick", action="store_true", help="tiny inputs, two rounds: does everything run?")
    add("--name", help="of the files, <machine>-<name>.json and so on: loss or memory by default")
    add("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args(argv)
    on_gpu = args.device == "cuda"
    args.rounds = args.rounds or (15 if on_gpu else 5)
    args.dtype = args.dtype or (["bf16"] if on_gpu and not args.memory else list(DTYPES))
    if args.quick:
        args.rounds, args.peak = 2, "ours"
        args.tokens = min(args.tokens, 64)
        args.shape = args.shape or (["tiny-head"] if on_gpu else ["tiny"])
    args.shape = args.shape or (list(DEFAULT_MODELS) if on_gpu else ["real", "qwen"])
    args.heads = any(shape in MODELS for shape in args.shape)
    if args.heads and not all(shape in MODELS for shape in args.shape):
        parser.error("--shape: the heads of models run apart from " + ", ".join(SHAPES))
    args.name = args.name or (
        "quick-" * args.quick + ("memory" if args.memory else "heads" if args.heads else "loss")
    )
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("benchmarks.loss: --device cuda, but torch sees no GPU")
    silence_known_warnings()
    results: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.loss", *(argv or sys.argv[1:])]),
        "machine": measure.machine(args.device),
    }
    if args.memory:
        memory.main(args, results)
        return
    if args.heads:
        heads.main(args, results)
        return
    results["cases"] = []
    for shape in args.shape:
        for temperature in args.temperature if shape == "real" else [1.0]:
            for dtype in args.dtype:
                case = SHAPES[shape](temperature).to(DTYPES[dtype], args.device)
                case = replace(case, loss_type=args.loss_type, beta=args.beta)
                done = run_case(case, args) | {"dtype": dtype, "targets_apply": shape == "real"}
                results["cases"].append(done)
                print(report.table(done), flush=True)
    paths = report.write(results, args.out, args.name)
    print(report.legend())
    print("\n".join(f"wrote {path}" for path in paths))


def run_case(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    progress(case.describe())
    chosen, skipped = choose(args.only, case.hidden.dtype, args.quick)
    progress("the exact answer, in fp64")
    truth = exact(case)
    clipped = clipped_share(case, truth[1])
    feeds = {layout: make_feed(case, layout) for layout in ("padded", "counted")}
    errors = check_all(chosen, skipped, feeds, truth)
    del truth
    chosen = [item for item in chosen if item.key in errors]
    timings = time_all(case, chosen, feeds, args)
    del feeds
    base = timings.get(f"{OURS}/padded") or timings[chosen[0].key]
    rows = []
    for item in chosen:
        timing = timings[item.key]
        rows.append(
            {
                "name": item.name,
                "layout": item.layout,
                "ours": item.ours,
                "extra": item.extra,
                "note": item.note,
                "median_s": timing.median,
                "seconds": timing.seconds,
                "ours_over_it": report.summarize(timing, base),
                "errors": errors[item.key],
                "peak_bytes": peak(item, case, args.peak),
            }
        )
    return {
        "name": case.name,
        "description": case.describe(),
        "tokens": case.tokens,
        "padding": case.padding,
        "loss_type": case.loss_type,
        "beta": case.beta,
        "clipped": clipped,
        "gemm_s": timings["gemm"].median,
        "implementations": rows,
        "skipped": skipped,
    }


def check_all(
    chosen: list[Implementation],
    skipped: list[dict[str, str]],
    feeds: dict[str, Feed],
    truth: tuple[Tensor, ...],
) -> dict[str, dict[str, float]]:
    """Errors by implementation; one of another library's that fails joins the skipped ones."""
    errors = {}
    for item in chosen:
        progress(f"checking {item.key}")
        try:
            errors[item.key] = measure.errors(item, feeds[item.layout], truth)
        except Exception as error:
            if item.ours:
                raise
            reason = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            progress(f"skipping {item.key}: {reason}")
            skipped.append({"name": item.name, "layout": item.layout, "reason": reason})
    return errors


def time_all(
    case: Case, chosen: list[Implementation], feeds: dict[str, Feed], args: argparse.Namespace
) -> dict[str, measure.Timing]:
    progress(f"timing, {args.rounds} rounds")
    runs: dict[str, Any] = {i.key: partial(i.run, feeds[i.layout]) for i in chosen}
    runs["gemm"] = measure.logits_gemm(case)

    def forget() -> None:  # freeing the last gradients is no part of anybody's time
        for feed in feeds.values():
            feed.forget()

    return measure.time_in_turns(runs, args.device, args.rounds, args.patience, forget)


def peak(item: Implementation, case: Case, whose: str) -> float | None:
    if whose == "none" or (whose == "ours" and not item.ours):
        return None
    progress(f"memory of {item.key}")
    try:
        return measure.peak_memory(item, case)
    except RuntimeError as error:  # another library's failure must not lose the times
        if item.ours:
            raise
        progress(f"no memory figure: {error}")
        return None


def clipped_share(case: Case, logps: Tensor) -> float:
    """Share of the counted tokens whose ratio is clipped: at beta = 0 they have no gradient."""
    ratio = torch.exp(logps - case.old[case.mask])
    advantages = case.advantages[:, None].expand(case.mask.shape)[case.mask]
    out = torch.where(advantages > 0, ratio > 1 + case.epsilon, ratio < 1 - case.epsilon)
    return float(out.double().mean())


def choose(
    only: list[str] | None, dtype: torch.dtype, quick: bool
) -> tuple[list[Implementation], list[dict[str, str]]]:
    """The implementations to run, and why the others of them cannot."""
    wanted = [
        i for i in IMPLEMENTATIONS if not only or i.name == OURS or any(o in i.name for o in only)
    ]
    skipped = {i: why for i in wanted if (why := i.reason_to_skip(dtype, quick))}
    for item, why in skipped.items():
        progress(f"skipping {item.key}: {why}")
    return (
        [i for i in wanted if i not in skipped],
        [{"name": i.name, "layout": i.layout, "reason": why} for i, why in skipped.items()],
    )


if __name__ == "__main__":
    main()
