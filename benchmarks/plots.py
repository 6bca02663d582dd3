"""The figures: bars of every case, and lines against tokens and the other axes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import routing, scaling
from benchmarks.parts import AXES, SWEPT
from benchmarks.tables import along

Case = dict[str, Any]


def draw(part: str, results: dict[str, Any], path: Path) -> None:
    cases = results["cases"]
    if part == "routing":
        routing.plot(cases, path)
    elif part == "sweeps":
        sweeps(cases, path)
    elif part == "scaling":
        lines(cases, path)
    else:
        bars(cases, path)


def _subplots(*size: int, **options: Any) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(*size, squeeze=False, layout="constrained", **options)


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    # No date and no version of matplotlib inside: the same results give the same file.
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def bars(cases: list[Case], path: Path) -> None:
    """Time, memory, and error against time, a row of panels per case."""
    most = max(len(c["implementations"]) for c in cases)
    height = (0.32 * most + 1.2) * len(cases)
    figure, axes = _subplots(len(cases), 3, figsize=(17, height))
    for (left, middle, right), case in zip(axes, cases, strict=True):
        rows = case["implementations"][::-1]
        labels = [f"{r['name']} ({r['layout']})" for r in rows]
        colors = ["tab:green" if r["ours"] else "tab:gray" for r in rows]
        left.barh(labels, [r["median_s"] for r in rows], color=colors)
        left.axvline(case["gemm_s"], color="black", linewidth=0.8, linestyle=":")
        left.set_xlabel("seconds (dotted: one bare logits product)")
        left.set_title(f"{case['name']}, {case['dtype']}, {case['task']}", fontsize=10)
        middle.barh(labels, [(r.get("peak_bytes") or 0) / 1e6 for r in rows], color=colors)
        middle.set_xlabel("extra memory with gradients, MB")
        middle.set_yticklabels([])
        error_against_time(right, rows)
    _save(figure, path)


def error_against_time(panel: Any, rows: list[Case]) -> None:
    """Largest error of a log-probability against time; lower and further left is better."""
    for row in rows:
        x, y = row["median_s"], row["errors"]["logps_max"]
        panel.plot(x, y, "o", color="tab:green" if row["ours"] else "tab:gray")
        panel.annotate(row["name"], (x, y), fontsize=7, xytext=(3, 3), textcoords="offset points")
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel("seconds")
    panel.set_ylabel("largest logp error, nats")


def lines(cases: list[Case], path: Path) -> None:
    """Time per token and extra memory against tokens."""
    figure, ((left, right),) = _subplots(1, 2, figsize=(11, 3.8))
    dtype = cases[0]["dtype"]
    found = [case for case in cases if case["dtype"] == dtype]
    for kind in scaling.KINDS:
        points = [(c["tokens"], r) for c in found for r in c["rows"] if r["kind"] == kind]
        tokens = [n for n, _ in points]
        left.plot(tokens, [r["seconds"] / n * 1e6 for n, r in points], "o-", label=kind)
        right.plot(tokens, [scaling.extra(r) / 1e6 for _, r in points], "o-", label=kind)
    for panel in (left, right):
        panel.set_xscale("log", base=2)
        panel.set_xlabel(f"tokens (V = {found[0]['vocab']:,}, {dtype})")
    left.set_ylim(0)
    left.set_ylabel("time per token, µs")
    right.set_yscale("log")
    right.set_ylabel("extra memory, MB")
    right.legend(fontsize=7)
    _save(figure, path)


def sweeps(cases: list[Case], path: Path) -> None:
    """Time along every axis."""
    figure, axes = _subplots(2, 3, figsize=(14, 7))
    for panel, axis in zip(axes.flatten(), AXES, strict=True):
        found = along(cases, axis)
        for key in SWEPT:
            points = [(c, r) for c in found for r in c["implementations"] if r["key"] == key]
            x = [c["spec"][axis] for c, _ in points]
            panel.plot(x, [r["median_s"] for _, r in points], "o-", label=key.replace("/", ", "))
        panel.set_xlabel(axis)
        panel.set_ylabel("seconds")
        if axis in ("tokens", "vocab", "width"):
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
        else:
            panel.set_ylim(0)
    axes[0, 0].legend(fontsize=7)
    _save(figure, path)
