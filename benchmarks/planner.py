"""The planner's prediction of the loss's extra memory beside what was measured:
`python -m benchmarks.planner`.

Each measurement is one loss call with its backward in a fresh process, by resident memory, the
libraries' included. Writes JSON to benchmarks/results and the table of docs/memory.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.measure import machine, peak_of, run_fresh
from benchmarks.report import result_path

SHAPES = ((2048, 49_152, 576), (8192, 49_152, 128), (1024, 151_936, 256), (16_384, 32_000, 64))
KINDS = ("exact", "routed", "frozen head", "values only")
DTYPES = ("bfloat16", "float32")
BOUND, SHARE = 16e6, 0.05  # a prediction may be off by the larger of the two
DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "memory.md"


def main(argv: list[str] | None = None) -> int:
    """Exit status 1 if a prediction is off by more than it may be."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="one small shape, nothing is written")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args(argv)
    shapes = ((64, 1000, 32),) if args.quick else SHAPES
    rows = []
    for dtype, shape, kind in itertools.product(DTYPES, shapes, KINDS):
        row = {"dtype": dtype, "shape": shape, "kind": kind, "device": args.device}
        command = [sys.executable, "-m", "benchmarks.planner", "--worker", json.dumps(row)]
        rows.append(row | run_fresh(command))
        print(line(rows[-1]), flush=True)
    if not args.quick:
        write(rows, machine(args.device), args.out)
    return int(any(off(row) > 1 for row in rows))


def measure_one(row: dict[str, Any]) -> dict[str, float]:
    """Peak bytes of one call in this process, and what the planner says of it."""
    import torch

    from fused_grpo import grpo_loss
    from fused_grpo.plan import loss_memory

    (tokens, vocab, hidden), kind = row["shape"], row["kind"]
    dtype, device = getattr(torch, row["dtype"]), row["device"]

    def call(tokens: int, vocab: int, hidden: int) -> Any:
        torch.manual_seed(0)
        states = torch.randn(1, tokens, hidden, device=device).to(dtype)
        # logits of +-5: routed gradients keep as many entries as of a trained model's
        weight = (5 * torch.randn(vocab, hidden, device=device) / hidden**0.5).to(dtype)
        ids = torch.randint(vocab, (1, tokens), device=device)
        states.requires_grad_(kind != "values only")
        weight.requires_grad_(kind in ("exact", "routed"))
        advantages, options = torch.ones(1, device=device), {}
        if kind == "routed":
            options = {"backward": "routed", "route_seed": 0}

        def run() -> float:
            out = grpo_loss(states, weight, ids, advantages, **options)
            if kind != "values only":
                out.loss.backward()
            return float(out.metrics.get("route/kept_per_token", 0.0))

        return run

    call(16, 128, 16)()  # loads what the libraries load on first use
    run, kept = call(tokens, vocab, hidden), []
    peak = peak_of(lambda: kept.append(run()), device)
    frozen = kind not in ("exact", "routed")
    predicted = loss_memory(
        tokens,
        vocab,
        hidden,
        dtype=row["dtype"],
        loss="fused-grpo, routed" if kind == "routed" else "fused-grpo",
        frozen_head=frozen,
        frozen_trunk=kind == "values only",
        device=device,
        kept_per_token=kept[0],
    )
    return {"measured": peak, "predicted": predicted.total, "gradients": predicted.gradients}


def off(row: dict[str, Any]) -> float:
    """The error of a prediction as a share of what it may be; above 1 is too much."""
    return abs(row["predicted"] - row["measured"]) / max(BOUND, SHARE * row["measured"])


def line(row: dict[str, Any]) -> str:
    n, v, h = row["shape"]
    numbers = (row["measured"], row["predicted"], row["predicted"] - row["measured"])
    text = " | ".join(f"{x / 1e6:.1f}" for x in numbers)
    return f"| {row['dtype']} | {row['kind']} | {n:,} | {v:,} | {h} | {text} |"


HEADER = """\
| dtype | gradients | tokens | V | H | measured (MB) | predicted (MB) | difference (MB) |
|---|---|---|---|---|---|---|---|"""


def table(rows: list[dict[str, Any]]) -> str:
    return "\n".join([HEADER, *map(line, rows)])


def write(rows: list[dict[str, Any]], on: dict[str, Any], folder: Path) -> None:
    """The JSON, and the table of the document."""
    path = result_path(on, folder, "planner").with_suffix(".json")
    command = "python -m benchmarks.planner"
    path.write_text(json.dumps({"machine": on, "command": command, "rows": rows}, indent=1) + "\n")
    DOCUMENT.write_text(with_table(DOCUMENT.read_text(), rows))
    print(f"wrote {path} and {DOCUMENT}")


def with_table(text: str, rows: list[dict[str, Any]]) -> str:
    """The document with the table of `rows` between its marks."""
    start, end = "<!-- results: planner -->\n", "\n<!-- end -->"
    before, rest = text.split(start)
    return before + start + table(rows) + end + rest.split(end, 1)[1]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        print(json.dumps(measure_one(json.loads(sys.argv[2]))))
    else:
        sys.exit(main())
