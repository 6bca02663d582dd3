"""The README's tables from the committed results: `python -m benchmarks.readme` (--check: compare).

A table stands between `<!-- results: fp32 -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "amd-epyc-2cpu-loss.json"
README = ROOT / "README.md"

# name among the implementations, layout, name in the README
ROWS = (
    ("fused-grpo", "padded", "fused-grpo"),
    ("fused-grpo, routed", "padded", 'fused-grpo, `backward="routed"`'),
    ("eager", "padded", "eager"),
    ("eager, fp32 head", "counted", "eager, fp32 head"),
    ("eager", "counted", "eager"),
    ("eager, torch.compile", "counted", "eager, `torch.compile`"),
    ("Liger", "padded", "Liger 0.8.5"),
    ("TRL chunked", "counted", "TRL 1.16's head"),
    ("torch linear_cross_entropy", "counted", "torch `linear_cross_entropy`"),
)


def tables(results: dict[str, Any]) -> dict[str, str]:
    """By dtype: of the case with real tokens at temperature 1."""
    return {
        case["dtype"]: table(case)
        for case in results["cases"]
        if case["targets_apply"] and "T=1:" in case["description"]
    }


def table(case: dict[str, Any]) -> str:
    rows = {(r["name"], r["layout"]): r for r in case["implementations"]}
    lines = [
        f"| {case['dtype']} | fed | time (s) | ours / it | extra memory (MB) "
        "| logp error, mean / max | error of dh, dW |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, layout, shown in ROWS:
        if row := rows.get((name, layout)):
            error, peak = row["errors"], row["peak_bytes"]
            lines.append(
                f"| {shown} | {layout} | {row['median_s']:.2f} "
                f"| {row['ours_over_it']['median']:.2f} "
                f"| {'-' if peak is None else f'{peak / 1e6:.0f}'} "
                f"| {error['logps_mean']:.0e} / {error['logps_max']:.0e} "
                f"| {error['dhidden']:.1e}, {error['dweight']:.1e} |"
            )
    return "\n".join(lines)


def filled(text: str, found: dict[str, str]) -> str:
    """A README with its tables replaced."""

    def replace(match: re.Match[str]) -> str:
        return f"{match[1]}\n{found[match[2]]}\n{match[3]}"

    return re.sub(r"(<!-- results: (\w+) -->)\n.*?\n(<!-- end -->)", replace, text, flags=re.S)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 where they differ")
    args = parser.parse_args(argv)
    before = README.read_text()
    after = filled(before, tables(json.loads(RESULTS.read_text())))
    if args.check:
        return int(after != before)
    README.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
