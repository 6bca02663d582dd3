"""Our peak memory as the tokens grow: `python -m benchmarks.loss --memory`.

Each measurement is one loss call with its backward in a fresh process. What is left beyond the
inputs, both gradients and the fp32 gradient of a bf16 weight has to fit the chunk budget, whatever
the number of tokens.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import peak_of, run_fresh

VOCAB = 49_152
WIDTH = 64  # small, so that 65,536 tokens take a minute: the logits do not depend on it
SIZES = ((8, 512), (64, 512), (1, 65_536))  # sequences, tokens in each
OBJECTIVES = ("token level, old given", "token level, old=None", "sequence level, old given")
BUDGET = 100 * 2**20  # the default chunk_bytes


def main(args: Any, results: dict[str, Any]) -> None:
    """Measures every size, dtype and objective; prints a table and writes it."""
    sizes = ((2, 16), (4, 16)) if args.quick else SIZES
    vocab, width = (1024, 32) if args.quick else (VOCAB, args.width or WIDTH)
    rows = []
    print(HEADER.format(vocab=vocab, width=width), flush=True)
    for dtype in args.dtype:
        for batch, length in sizes:
            for objective in OBJECTIVES:
                row = {"dtype": dtype, "batch": batch, "length": length, "objective": objective}
                row |= {"vocab": vocab, "width": width, "device": args.device}
                command = [sys.executable, "-m", "benchmarks.memory", json.dumps(row)]
                rows.append(row | run_fresh(command))
                print(line(rows[-1]), flush=True)
    results["memory"] = rows
    write(results, vocab, width, args.out, args.name)


def measure_one(row: dict[str, Any]) -> dict[str, float]:
    """Peak bytes of one call in this process, and the parts of it that are no one's choice."""
    from fused_grpo import grpo_loss

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[row["dtype"]]

    def inputs(batch: int, length: int, vocab: int, width: int) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        return (
            torch.randn(batch, length, width, dtype=dtype, device=row["device"]).requires_grad_(),
            (torch.randn(vocab, width, device=row["device"]) / width**0.5).to(dtype),
            torch.randint(vocab, (batch, length), device=row["device"]),
            torch.linspace(-1.0, 1.5, batch, device=row["device"]),
            torch.full((batch, length), -math.log(vocab), device=row["device"]),
        )

    def call(hidden: Tensor, weight: Tensor, ids: Tensor, advantages: Tensor, old: Tensor) -> None:
        level = "sequence" if row["objective"].startswith("sequence") else "token"
        given = None if row["objective"].endswith("None") else old
        grpo_loss(
            hidden,
            weight,
            ids,
            advantages,
            old_per_token_logps=given,
            importance_sampling_level=level,
            # No ratio is clipped: every token takes part in the backward.
            epsilon_low=0.99,
            epsilon_high=1e6,
        ).loss.backward()

    def leaves(*size: int) -> tuple[Tensor, ...]:
        hidden, weight, *rest = inputs(*size)
        return hidden, weight.requires_grad_(), *rest

    call(*leaves(2, 8, 128, 16))  # loads what the libraries load on first use
    tensors = leaves(row["batch"], row["length"], row["vocab"], row["width"])
    peak = peak_of(lambda: call(*tensors), row["device"])
    hidden, weight = tensors[:2]
    return {
        "peak_bytes": peak,
        "gradient_bytes": hidden.nbytes + weight.nbytes,
        "fp32_gradient_bytes": 0 if dtype == torch.float32 else 4 * weight.numel(),
    }


HEADER = """
Peak memory of grpo_loss with its backward, V = {vocab}, H = {width}, fresh processes, MB (10^6)

| dtype | B x T | objective | beyond the inputs | gradients | fp32 dW of a bf16 weight | left | \
of the 105 MB budget |
|---|---|---|---|---|---|---|---|"""


def line(row: dict[str, Any]) -> str:
    parts = (row["peak_bytes"], row["gradient_bytes"], row["fp32_gradient_bytes"])
    left = parts[0] - parts[1] - parts[2]
    numbers = " | ".join(f"{x / 1e6:.1f}" for x in (*parts, left))
    return (
        f"| {row['dtype']} | {row['batch']} x {row['length']} | {row['objective']} "
        f"| {numbers} | {left / BUDGET:.2f} |"
    )


def write(results: dict[str, Any], vocab: int, width: int, folder: Path, what: str) -> None:
    from benchmarks.report import result_path

    table = "\n".join([HEADER.format(vocab=vocab, width=width), *map(line, results["memory"])])
    base = result_path(results["machine"], folder, what)
    base.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    base.with_suffix(".md").write_text(f"`{results['command']}`\n{table}\n")
    print(f"\nwrote {base.with_suffix('.json')} and .md")


if __name__ == "__main__":
    print(json.dumps(measure_one(json.loads(sys.argv[1]))))
