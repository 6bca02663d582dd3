"""What rounding does to a GRPO step: `python -m benchmarks.precision` from the repository root.

Every implementation gets the same numbers, real tokens in bf16 and in fp32, and is compared with
fp64 on those numbers: log-probabilities, decisions of the clip, ratios of sequences, gradients.
Writes benchmarks/results/*-precision.json and the table of docs/precision.md; --table: only that.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import measure
from benchmarks.data import Case, Spec
from benchmarks.implementations import implementations, make_feed, present
from benchmarks.report import result_path
from benchmarks.truth import exact

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
COMMITTED = RESULTS / "amd-epyc-2cpu-precision.json"
PAGE = ROOT / "docs" / "precision.md"
DTYPES = ("bf16", "fp32")
SEQUENCE_EPSILON = 4e-4  # GSPO's bound of the ratio of a sequence (arXiv:2507.18071, section 5.1)

# implementation, layout, name in the table
SHOWN = (
    ("fused-grpo", "padded", "fused-grpo"),
    ("eager", "counted", "eager"),
    ("eager, fp32 head", "counted", "eager, fp32 head"),
    ("eager, low precision", "counted", "eager, no fp32 copy of the logits"),
    ("TRL chunked", "counted", "TRL 1.16's head"),
    ("Liger log-probs", "counted", "Liger 0.8.5's head"),
    ("torch linear_cross_entropy", "counted", "torch `linear_cross_entropy`"),
)
HEADS = (
    ("logp error, mean / max (nat)", lambda e: f"{e['mean']:.0e} / {e['max']:.0e}"),
    ("clip decided otherwise", lambda e: f"{e['flips']:.2%}"),
    ("sequences clipped by rounding", lambda e: f"{e['sequences']:.0%}"),
    ("error of dh, dW", lambda e: f"{e['dhidden']:.1e}, {e['dweight']:.1e}"),
)


def errors(case: Case, logps: Tensor, truth: Tensor) -> dict[str, float]:
    """Of log-probabilities [N] of the counted tokens, against the exact ones."""
    gap = (logps.double() - truth).abs()
    mask, lengths = case.mask, case.mask.sum(1)
    sums = torch.zeros(mask.shape, dtype=torch.float64).masked_scatter(mask, logps.double() - truth)
    apart = (sums.sum(1) / lengths.clamp(min=1)).exp() - 1
    flips = clipped(case, logps.double()) != clipped(case, truth)
    return {
        "mean": float(gap.mean()),
        "max": float(gap.max()),
        "flips": float(flips.double().mean()),
        "sequences": float((apart.abs() > SEQUENCE_EPSILON)[lengths > 0].double().mean()),
    }


def clipped(case: Case, logps: Tensor) -> Tensor:
    """Whether the clip holds a counted token back, so that it sends no gradient, [N]."""
    ratio = torch.exp(logps - case.old[case.mask].double())
    advantages = case.advantages[:, None].expand(case.mask.shape)[case.mask]
    return torch.where(advantages > 0, ratio > 1 + case.epsilon, ratio < 1 - case.epsilon)


def run(spec: Spec) -> list[dict[str, Any]]:
    """Rows of the table, for those that are installed and give log-probabilities."""
    case = spec.build()
    truth = exact(case)
    found = {(item.name, item.layout): item for item in implementations()}
    rows = []
    for name, layout, shown in SHOWN:
        item = found[name, layout]
        if item.reason_to_skip(spec):
            continue
        measure.progress(f"{spec.dtype}: {item.key}")
        feed = make_feed(case, layout)
        logps = present(item.call(feed, "loss")[1])
        logps = logps[case.mask] if layout == "padded" else logps
        gradients = measure.errors(item, make_feed(case, layout), truth, "loss")
        row = errors(case, logps, truth.logps)
        row |= {k: gradients[k] for k in ("dhidden", "dweight")}
        rows.append({"name": shown, "dtype": spec.dtype, "errors": row})
    return rows


def table(results: dict[str, Any]) -> str:
    head = ["inputs", "head", *(title for title, _ in HEADS)]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in results["rows"]:
        cells = [row["dtype"], row["name"], *(shown(row["errors"]) for _, shown in HEADS)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def filled(text: str, results: dict[str, Any]) -> str:
    """A page with its table replaced."""
    start, end = "<!-- results: precision -->", "<!-- end -->"
    return re.sub(
        f"({start})\n.*?\n({end})", lambda m: f"{m[1]}\n{table(results)}\n{m[2]}", text, flags=re.S
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.precision", description=__doc__)
    parser.add_argument("--table", action="store_true", help="the page from committed results")
    parser.add_argument("--quick", action="store_true", help="tiny inputs, printed, not written")
    args = parser.parse_args(argv)
    if args.quick:
        tiny = [Spec(tokens=48, vocab=257, width=32, padding=0.27, dtype=name) for name in DTYPES]
        print(table({"rows": [row for spec in tiny for row in run(spec)]}))
        return 0
    path = COMMITTED
    if not args.table:
        machine = measure.machine("cpu")
        specs = [Spec(source="real", dtype=name) for name in DTYPES]
        rows = [row for spec in specs for row in run(spec)]
        results = {"machine": machine, "case": specs[0].build().describe(), "rows": rows}
        path = result_path(machine, RESULTS, "precision").with_suffix(".json")
        path.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(filled(PAGE.read_text(), json.loads(path.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
