"""The comparison: `python -m benchmarks.report` from the repository root.

Runs every part that the README shows, each case checked against fp64 before it is timed; writes
JSON, Markdown and a plot per part to benchmarks/results, and then the tables of README and docs. A
case is saved as soon as it is measured, so `--resume` goes on where a run was stopped.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import measure
from benchmarks.measure import progress

FOLDER = Path(__file__).resolve().parent / "results"
Results = dict[str, Any]


def result_path(machine: dict[str, Any], folder: Path, what: str) -> Path:
    """<folder>/<machine>-<what>, without a suffix; creates the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^a-z0-9]+", "-", f"{machine['device']} {machine['cores']}cpu".lower())
    return folder / f"{name.strip('-')}-{what}"


def parse(argv: list[str] | None) -> argparse.Namespace:
    from benchmarks.parts import PARTS

    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    add = parser.add_argument
    add("--only", nargs="+", choices=PARTS, metavar="PART", help=", ".join(PARTS))
    add("--full", action="store_true", help="large shapes, all dtypes and implementations: hours")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--implementations", nargs="+", metavar="NAME", help="names with one of these, and ours")
    add("--rounds", type=int, help="5, on a GPU 15, of the sweeps 3")
    add("--patience", type=float, default=3.0, help="slower than this times ours: 2 rounds only")
    add("--memory", choices=("all", "ours", "none"), default="all", help="whose to measure")
    add("--quick", action="store_true", help="tiny inputs, two rounds: does everything run?")
    add("--resume", action="store_true", help="keep what the same commit has measured already")
    add("--render", action="store_true", help="only tables and plots, from the JSON there is")
    add("--out", type=Path, default=FOLDER, help="tables of the documents: only by default")
    args = parser.parse_args(argv)
    if args.quick and args.out == FOLDER and not args.render:
        parser.error("--quick needs --out: its numbers are no results")
    return args


def main(argv: list[str] | None = None) -> None:
    from benchmarks.parts import PARTS, Choice, default_parts
    from benchmarks.peers import silence_known_warnings

    args = parse(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("benchmarks.report: --device cuda, but torch sees no GPU")
    silence_known_warnings()
    choice = Choice(settings(args), args.device, args.memory)
    machine, start = measure.machine(args.device), time.perf_counter()
    command = shlex.join(["python", "-m", "benchmarks.report", *(argv or sys.argv[1:])])
    for part in args.only or (PARTS if args.render else default_parts(choice)):
        base = result_path(machine, args.out, part)
        if not args.render:
            run_part(part, choice, {"command": command, "machine": machine}, base, args.resume)
        if base.with_suffix(".json").exists():
            render(part, base)
            print(base.with_suffix(".md").read_text(), flush=True)
    if args.out == FOLDER:
        from benchmarks import readme

        readme.main([])
    progress(f"{(time.perf_counter() - start) / 60:.1f} minutes")


def settings(args: argparse.Namespace) -> Any:
    from benchmarks.compare import Settings

    rounds = args.rounds or (2 if args.quick else 15 if args.device == "cuda" else 5)
    only = tuple(args.implementations or ())
    return Settings(rounds, args.patience, args.full, args.quick, only)


def run_part(part: str, choice: Any, about: Results, base: Path, resume: bool) -> None:
    """Measures the cases of a part, the memory after all times; saves after each."""
    from benchmarks.parts import PARTS

    path = base.with_suffix(".json")
    old = json.loads(path.read_text())["cases"] if resume and path.exists() else []
    commit = about["machine"]["commit"]
    kept = {case["key"]: case for case in old if case["measured"]["commit"] == commit}
    jobs = list(PARTS[part](choice))
    cases: list[Results] = []
    for job in jobs:
        if job.key not in kept:
            kept[job.key] = measured(job.measure, commit)
        cases.append(kept[job.key])
        save(path, about, cases)
    for job, case in zip(jobs, cases, strict=True):
        if job.memory is not None:
            job.memory(case)
            save(path, about, cases)


def measured(call: Any, commit: str | None) -> Results:
    load, start = measure.machine("cpu")["load_average"], time.perf_counter()
    result = call()
    stamp = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    seconds = round(time.perf_counter() - start, 1)
    return result | {"measured": {"commit": commit, "utc": stamp, "seconds": seconds, "load": load}}


def save(path: Path, about: Results, cases: list[Results]) -> None:
    partial_path = path.with_suffix(".tmp")
    partial_path.write_text(json.dumps(about | {"cases": cases}, indent=1) + "\n")
    partial_path.replace(path)  # a run that is stopped here must not leave half a file


def render(part: str, base: Path) -> None:
    """Markdown and plot beside the JSON."""
    from benchmarks import plots, tables

    results = json.loads(base.with_suffix(".json").read_text())
    base.with_suffix(".md").write_text(tables.page(part, results))
    plots.draw(part, results, base.with_suffix(".png"))


if __name__ == "__main__":
    main()
