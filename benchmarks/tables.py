"""Results as Markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from benchmarks import scaling
from benchmarks.compare import PRODUCTS
from benchmarks.implementations import OURS, ROUTED
from benchmarks.parts import AXES, SWEPT

Case = dict[str, Any]
Row = dict[str, Any]

# name among the implementations, layout, name in the README
SHOWN = (
    (OURS, "padded", "fused-grpo"),
    (ROUTED, "padded", 'fused-grpo, `backward="routed"`'),
    ("eager", "padded", "eager"),
    ("eager, torch.compile", "padded", "eager, `torch.compile`"),
    ("eager, fp32 head", "counted", "eager, fp32 head"),
    ("eager", "counted", "eager"),
    ("eager, torch.compile", "counted", "eager, `torch.compile`"),
    ("Liger", "padded", "Liger 0.8.5"),
    ("TRL chunked", "counted", "TRL 1.16's head"),
    ("verl torch", "counted", "verl 0.9.1's head"),
    ("torch linear_cross_entropy", "counted", "torch `linear_cross_entropy`"),
)


def markdown(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    names = list(head)
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join(lines)


def seconds(x: float) -> str:
    return f"{x:.2f}" if x >= 0.095 else f"{x:.2g}"


def megabytes(x: float | None) -> str:
    return "-" if x is None else f"{x / 1e6:.0f}"


def about(results: dict[str, Any]) -> str:
    """The machine, the versions, the commit, and the command."""
    machine = results["machine"]
    packages = ", ".join(f"{k} {v}" for k, v in machine["packages"].items() if v)
    commits = sorted({case["measured"]["commit"] or "unknown" for case in results["cases"]})
    return (
        f"{machine['device']}, {machine['cores']} cores, {machine['threads']} threads; "
        f"Python {machine['python']}, {packages}; commit {', '.join(commits)}."
    )


# --- loss and tasks ------------------------------------------------------------------------------


def full(case: Case) -> str:
    """Everything that is known about a case."""
    floor = PRODUCTS[case["task"]]
    head = ["implementation", "fed", "time (s)", "ours / it", f"it / {floor} bare products"]
    head += ["extra memory (MB)", "loss error", "logp error mean / max", "dh error", "dW error"]
    if gpu := any(row["roofline"] is not None for row in case["implementations"]):
        head += ["TFLOP/s", "share of the roofline"]
    lines = [f"### {case['description']}, {case['dtype']}, {case['task']}", ""]
    lines += [
        f"Loss {case['loss_type']}, beta {case['beta']}; {case['zero']:.1%} of the counted tokens "
        f"have no gradient, {case['without_advantage']:.1%} no advantage; mean entropy "
        f"{case['entropy']:.2f} nat. One bare logits product: {seconds(case['gemm_s'])} s.",
        "",
        markdown(head, (_full(row, gpu) for row in case["implementations"])),
        "",
    ]
    lines += [f"Skipped: {s['name']}, {s['layout']} ({s['reason']})." for s in case["skipped"]]
    if not gpu:
        lines.append("No share of the roofline: that is for GPUs, whose rates are known.")
    return "\n".join([*lines, ""])


def _full(row: Row, gpu: bool) -> list[str]:
    error = row["errors"]
    cells = [row["name"], row["layout"], seconds(row["median_s"]), _spread(row["ours_over_it"])]
    cells += [_spread(row["over_floor"]), megabytes(row.get("peak_bytes")), _error(error, "loss")]
    cells += [f"{error['logps_mean']:.1e} / {error['logps_max']:.1e}"]
    cells += [_error(error, "dhidden"), _error(error, "dweight")]
    if gpu:
        share = row["roofline"]
        cells += [f"{row['tflops']:.3g}", "-" if share is None else f"{share:.0%}"]
    return cells


def _spread(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})"


def _error(error: dict[str, float], name: str) -> str:
    return f"{error[name]:.1e}" if name in error else "-"


def short(case: Case) -> str:
    """The README's table of a case with loss and both gradients."""
    rows = {(r["name"], r["layout"]): r for r in case["implementations"]}
    head = [case["dtype"], "fed", "time (s)", "ours / it", "extra memory (MB)"]
    head += ["logp error, mean / max", "error of dh, dW"]
    lines = []
    for name, layout, shown in SHOWN:
        if row := rows.get((name, layout)):
            error = row["errors"]
            cells = [shown, layout, seconds(row["median_s"])]
            cells += [f"{row['ours_over_it']['median']:.2f}", megabytes(row.get("peak_bytes"))]
            cells += [f"{error['logps_mean']:.0e} / {error['logps_max']:.0e}"]
            lines.append([*cells, f"{error['dhidden']:.1e}, {error['dweight']:.1e}"])
    return markdown(head, lines)


def tasks(cases: list[Case], dtype: str = "bf16") -> str:
    """Log-probabilities alone and a frozen head, side by side."""
    by_task = {case["task"]: case for case in cases if case["dtype"] == dtype}
    names = {"logprobs": "log-probabilities only", "frozen": "frozen head"}
    found = {
        task: {row["name"]: row for row in by_task[task]["implementations"]}
        for task in names
        if task in by_task
    }
    shown = {name: text for name, layout, text in SHOWN if layout == "counted"}
    shown = {OURS: "fused-grpo", ROUTED: SHOWN[1][2]} | shown
    head, lines = [dtype], []
    for task in found:
        head += [f"{names[task]}: time (s)", "ours / it", "error"]
    for name, text in shown.items():
        cells = [text]
        for task, rows in found.items():
            row = rows.get(name)
            cells += _task(row, "logps_max" if task == "logprobs" else "dhidden")
        if any(cell != "-" for cell in cells[1:]):
            lines.append(cells)
    return markdown(head, lines)


def _task(row: Row | None, error: str) -> list[str]:
    if row is None:
        return ["-"] * 3
    cells = [seconds(row["median_s"]), f"{row['ours_over_it']['median']:.2f}"]
    return [*cells, f"{row['errors'][error]:.0e}"]


def skipped(cases: list[Case]) -> str:
    """What did not run, and why: once each."""
    found = {(s["name"], s["reason"]): None for case in cases for s in case["skipped"]}
    return markdown(["not run", "because"], found)


# --- scaling and sweeps --------------------------------------------------------------------------


def scaled(cases: list[Case], dtype: str = "bf16", kinds: Iterable[str] = scaling.KINDS) -> str:
    """Time per token and extra memory, a row per number of tokens."""
    cases = [case for case in cases if case["dtype"] == dtype]
    measured = {row["kind"] for case in cases for row in case["rows"]}
    kinds = [kind for kind in kinds if kind in measured]
    lines = []
    for case in cases:
        rows = {row["kind"]: row for row in case["rows"]}
        needed = {s["kind"]: s["needed"] for s in case["skipped"]}
        cells = [f"{case['tokens']:,}"]
        for kind in kinds:
            if kind in needed:
                cells.append(f"does not fit: {needed[kind] / 1e9:.0f} GB")
            elif row := rows.get(kind):
                each = row["seconds"] / case["tokens"] * 1e6
                cells.append(f"{each:.0f} µs, {scaling.extra(row) / 1e6:.0f} MB")
            else:
                cells.append("-")
        lines.append(cells)
    return markdown(["tokens", *kinds], lines)


def sweep(cases: list[Case], axis: str) -> str:
    """Time and the larger error of dh and dW along an axis; the other axes at their defaults."""
    lines = []
    for case in along(cases, axis):
        rows = {row["key"]: row for row in case["implementations"]}
        cells = [_value(axis, case)]
        for key in SWEPT:
            row = rows.get(key)
            if row is None:
                cells.append("-")
                continue
            error = max(row["errors"]["dhidden"], row["errors"]["dweight"])
            cells.append(f"{seconds(row['median_s'])} ({error:.0e})")
        lines.append(cells)
    return markdown([axis, *(key.replace("/", ", ") for key in SWEPT)], lines)


def along(cases: list[Case], axis: str) -> list[Case]:
    """The cases of one axis: those that differ in nothing else from the most common values."""
    specs = [case["spec"] for case in cases]
    common = {name: max(values, key=values.count) for name, values in _columns(specs).items()}
    others = [name for name in common if name != axis]
    found = [c for c in cases if all(c["spec"][name] == common[name] for name in others)]
    return sorted(found, key=lambda case: case["spec"][axis])


def _columns(specs: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [spec[name] for spec in specs] for name in specs[0]} if specs else {}


def _value(axis: str, case: Case) -> str:
    """The value that the inputs came out with."""
    shares = {"padding": "padding", "zero": "without_advantage"}
    if axis in shares:
        return f"{case[shares[axis]]:.0%}"
    return f"{case['entropy']:.1f}" if axis == "entropy" else f"{case[axis]:,}"


# --- the files beside the JSON -------------------------------------------------------------------

LEGEND = (
    "Times are medians of rounds in which all implementations take turns in one process; ratios "
    "are taken round by round (median, range). Ours is fed the padded batch unless it says so; "
    "others are fed what the column says, the counted tokens being picked out before the clock "
    "starts. Extra memory is the peak of a fresh process beyond the inputs, gradients included. "
    "Errors are against fp64 on the same inputs: loss absolute, log-probabilities in nats, "
    "gradients relative (Frobenius)."
)


def _scaling_page(cases: list[Case]) -> list[str]:
    dtypes = dict.fromkeys(case["dtype"] for case in cases)
    size = f"V = {cases[0]['vocab']:,}, H = {cases[0]['width']}"
    note = "time per token, extra memory beyond inputs, gradients and their fp32 sums"
    return [f"### {dtype}, {size}: {note}\n\n{scaled(cases, dtype)}\n" for dtype in dtypes]


def _compare_page(cases: list[Case]) -> list[str]:
    from benchmarks import verdicts

    return [*map(full, cases), *verdicts.page(cases), LEGEND]


def _sweep_page(cases: list[Case]) -> list[str]:
    axes = [f"### {axis}: seconds (error)\n\n{sweep(cases, axis)}\n" for axis in AXES]
    return [*axes, *_compare_page(cases)]


PAGES: dict[str, Callable[[list[Case]], list[str]]] = {
    "scaling": _scaling_page,
    "sweeps": _sweep_page,
}


def page(part: str, results: dict[str, Any]) -> str:
    """The Markdown file beside a part's JSON."""
    from benchmarks import routing

    make = {"routing": routing.page, **PAGES}.get(part, _compare_page)
    lines = [about(results), f"\n`{results['command']}`\n", *make(results["cases"])]
    return "\n".join(lines).rstrip() + "\n"
