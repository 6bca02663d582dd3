"""Results as JSON, Markdown and a plot."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

from benchmarks.implementations import ROUTED
from benchmarks.measure import Timing

# Our time over the fastest other implementation's, by layout and dtype.
TARGETS = {
    ("padded", "fp32"): 0.65,
    ("padded", "bf16"): 0.60,
    ("counted", "fp32"): 0.90,
    ("counted", "bf16"): 0.80,
}
# The same of routed gradients; and over the product of the logits alone and over exact ones, fp32.
ROUTED_TARGETS = {
    ("padded", "fp32"): 0.27,
    ("padded", "bf16"): 0.35,
    ("counted", "fp32"): 0.35,
    ("counted", "bf16"): 0.45,
}
ROUTED_OVER_PRODUCT, ROUTED_OVER_EXACT = 1.25, 0.45
ROUTED_ERROR = 0.005


def write(results: dict[str, Any], folder: Path, what: str) -> list[Path]:
    """Writes <machine>-<what>.json, .md and .png; returns their paths."""
    base = result_path(results["machine"], folder, what)
    paths = [base.with_suffix(suffix) for suffix in (".json", ".md", ".png")]
    paths[0].write_text(json.dumps(results, indent=1) + "\n")
    paths[1].write_text(markdown(results))
    plot(results, paths[2])
    return paths


def result_path(machine: dict[str, Any], folder: Path, what: str) -> Path:
    """<folder>/<machine>-<what>, without a suffix; creates the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^a-z0-9]+", "-", f"{machine['device']} {machine['cores']}cpu".lower())
    return folder / f"{name.strip('-')}-{what}"


def markdown(results: dict[str, Any]) -> str:
    machine = results["machine"]
    packages = ", ".join(f"{k} {v}" for k, v in machine["packages"].items() if v)
    head = (
        f"{machine['device']}, {machine['cores']} cores, {machine['threads']} threads; {packages}\n"
        f"\n`{results['command']}`\n"
    )
    return "\n".join([head, *(table(case) for case in results["cases"]), legend()])


def table(case: dict[str, Any]) -> str:
    lines = [
        f"### {case['description']}, {case['dtype']}",
        "",
        f"Loss {case['loss_type']}, beta {case['beta']}; the ratio of {case['clipped']:.1%} of the "
        f"counted tokens is clipped. One logits product: {case['gemm_s']:.3f} s.",
        "",
        "| implementation | fed | time (s) | ours / it | extra memory (MB) | loss error "
        "| logp error mean / max | dh error | dW error |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_row(item) for item in case["implementations"]),
        "",
        *_verdicts(case),
        "",
    ]
    for item in case["skipped"]:
        lines.append(f"Skipped: {item['name']} ({item['reason']}).")
    return "\n".join(lines)


def _row(item: dict[str, Any]) -> str:
    error, ratio = item["errors"], item["ours_over_it"]
    spread = f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})"
    seconds = f"{item['median_s']:.2f}" if item["median_s"] > 0.1 else f"{item['median_s']:.2g}"
    peak = item["peak_bytes"]
    return (
        f"| {item['name']} | {item['layout']} | {seconds} | {spread} "
        f"| {'-' if peak is None else f'{peak / 1e6:.0f}'} | {error['loss']:.1e} "
        f"| {error['logps_mean']:.1e} / {error['logps_max']:.1e} "
        f"| {error['dhidden']:.1e} | {error['dweight']:.1e} |"
    )


def verdict(
    case: dict[str, Any], layout: str, extras: bool, routed: bool = False
) -> dict[str, Any] | None:
    """Our time (on the padded batch) over that of the fastest other implementation of a layout,
    with or without the extra ways to speed up eager code; `routed`: that of routed gradients."""
    rows = case["implementations"]
    others = [r for r in rows if r["layout"] == layout and not r["ours"]]
    others = [r for r in others if extras or not r["extra"]]
    if not others or not any(r["ours"] for r in rows):
        return None
    fastest = max(others, key=lambda r: r["ours_over_it"]["median"])
    ratio, target = fastest["ours_over_it"]["median"], TARGETS.get((layout, case["dtype"]))
    if routed:
        item = routed_item(case)
        if item is None:
            return None
        ratio /= item["ours_over_it"]["median"]
        target = ROUTED_TARGETS.get((layout, case["dtype"]))
    return {
        "layout": layout,
        "extras": extras,
        "fastest": fastest["name"],
        "ratio": ratio,
        "target": target,
        "holds": None if target is None else ratio <= target,
    }


def routed_item(case: dict[str, Any]) -> dict[str, Any] | None:
    return next((r for r in case["implementations"] if r["name"] == ROUTED), None)


def _verdicts(case: dict[str, Any]) -> list[str]:
    lines = []
    for routed, ours in ((False, "ours"), (True, "routed")):
        for layout, fed in (("padded", "the padded batch"), ("counted", "only the counted tokens")):
            for extras, whom in ((False, "eager, TRL, Liger and torch"), (True, "all others")):
                if found := verdict(case, layout, extras, routed):
                    outcome = _outcome(case, found)
                    lines.append(f"- fed {fed}, {ours} over the fastest of {whom}: {outcome}")
    return lines + _routed_verdicts(case)


def _routed_verdicts(case: dict[str, Any]) -> list[str]:
    """Of routed gradients: time over the logits' product and over exact gradients, and error."""
    item = routed_item(case)
    if item is None:
        return []
    over_exact = 1 / item["ours_over_it"]["median"]
    over_product = item["median_s"] / case["gemm_s"]
    error = max(item["errors"]["dhidden"], item["errors"]["dweight"])
    lines = [
        f"- routed over exact: {over_exact:.2f}",
        f"- routed over the product: {over_product:.2f}",
    ]
    lines.append(f"- routed, larger error of dh and dW: {error:.2%}")
    targets = [ROUTED_OVER_EXACT, ROUTED_OVER_PRODUCT, ROUTED_ERROR]
    found = [over_exact, over_product, error]
    for i, (value, target) in enumerate(zip(found, targets, strict=True)):
        if case["targets_apply"] and (case["dtype"] == "fp32" or i == 2):
            bound = f"{target:.1%}" if i == 2 else f"{target:.2f}"
            lines[i] += f", target {bound}: {'holds' if value <= target else 'MISSED'}"
    return lines


def _outcome(case: dict[str, Any], found: dict[str, Any]) -> str:
    text = f"{found['ratio']:.2f} ({found['fastest']})"
    if found["target"] is None or not case["targets_apply"]:
        return text
    return f"{text}, target {found['target']:.2f}: {'holds' if found['holds'] else 'MISSED'}"


def legend() -> str:
    return (
        "Times are medians of rounds in which all implementations take turns in one process; "
        "`ours / it` is taken round by round (median, range). Ours is fed the padded batch unless "
        "it says packed; others are fed what the column says, the counted tokens being picked out "
        "before the clock starts. Extra memory is the peak of a fresh process beyond the inputs, "
        "both gradients included. Errors are against fp64 on the same inputs: loss absolute, "
        "log-probabilities in nats, gradients relative (Frobenius).\n"
    )


def summarize(timing: Timing, ours: Timing) -> dict[str, float]:
    ratios = ours.ratios(timing)
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}


def plot(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    cases = results["cases"]
    rows = max(len(c["implementations"]) for c in cases)
    figure, axes = plt.subplots(
        len(cases), 2, figsize=(13, (0.32 * rows + 1.2) * len(cases)), squeeze=False
    )
    for (left, right), case in zip(axes, cases, strict=True):
        items = case["implementations"][::-1]
        labels = [f"{i['name']} ({i['layout']})" for i in items]
        colors = ["tab:green" if i["ours"] else "tab:gray" for i in items]
        left.barh(labels, [i["median_s"] for i in items], color=colors)
        left.axvline(case["gemm_s"], color="black", linewidth=0.8, linestyle=":")
        left.set_xlabel("seconds (dotted: one logits product)")
        left.set_title(f"{case['name']}, {case['dtype']}", fontsize=10)
        right.barh(labels, [(i["peak_bytes"] or 0) / 1e6 for i in items], color=colors)
        right.set_xlabel("extra memory with gradients, MB")
        right.set_yticklabels([])
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
