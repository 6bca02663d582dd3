"""Which of the ratios asked for are met, and why the others are not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.implementations import OURS, ROUTED
from benchmarks.tables import markdown

Case = dict[str, Any]

# Our time over the fastest other implementation's, by layout and dtype, on the real tokens.
TARGETS = {
    ("padded", "fp32"): 0.65,
    ("padded", "bf16"): 0.60,
    ("counted", "fp32"): 0.90,
    ("counted", "bf16"): 0.80,
}
ROUTED_TARGETS = {
    ("padded", "fp32"): 0.27,
    ("padded", "bf16"): 0.35,
    ("counted", "fp32"): 0.35,
    ("counted", "bf16"): 0.45,
}
# Of routed gradients: time over the product of the logits and over exact ones, in fp32, and error.
ROUTED_OVER_PRODUCT, ROUTED_OVER_EXACT, ROUTED_ERROR = 1.25, 0.45, 0.005
LOGP_ERROR = 1e-4  # of exact ones, for bf16 inputs

# On an H200 in bf16 with N = 8192, H = 4096, V = 151936: our time over the floor, or over a peer's.
GPU_TARGETS = (
    ("logprobs", "floor", 1.15),
    ("loss", "floor", 1.25),
    ("frozen", "floor", 1.25),
    ("loss", "TRL chunked", 0.75),
)
GPU_SHAPE = {"tokens": 8192, "width": 4096, "vocab": 151_936, "dtype": "bf16"}


@dataclass(frozen=True)
class Verdict:
    what: str
    over: str
    value: float | None  # None: not measured
    target: float
    reason: str = ""  # of a miss
    with_extras: str = ""  # the same over the fastest of all

    @property
    def holds(self) -> bool:
        return self.value is not None and self.value <= self.target

    @property
    def shown(self) -> tuple[str, str]:
        """Value and target as text: ratios, shares, or nats."""
        show = "{:.2f}" if self.target >= 0.1 else "{:.2%}" if self.target > 1e-3 else "{:.0e}"
        return "-" if self.value is None else show.format(self.value), show.format(self.target)

    @property
    def outcome(self) -> str:
        if self.value is None:
            return "not measured"
        return "holds" if self.holds else f"**missed**: {self.reason}"


def judge(case: Case) -> list[Verdict]:
    """All that is asked of a case: of the real tokens, or of a GPU's heads; nothing of others."""
    spec = case["spec"]
    if spec["source"] == "real" and case["task"] == "loss" and spec["device"] == "cpu":
        return _real(case)
    shape = {name: case[name] for name in GPU_SHAPE}
    if spec["device"] == "cuda" and shape == GPU_SHAPE:
        return [_gpu(case, *target) for target in GPU_TARGETS if target[0] == case["task"]]
    return []


def _real(case: Case) -> list[Verdict]:
    found = []
    # The targets are those of temperature 1; errors are to hold at cooler ones as well.
    for name, targets in ((OURS, TARGETS), (ROUTED, ROUTED_TARGETS)):
        row = _row(case, name, "padded")
        for layout in ("padded", "counted"):
            target = targets[layout, case["dtype"]]
            if row and case["spec"]["temperature"] == 1.0:
                found += _over_fastest(case, row, layout, target)
    exact, routed = _row(case, OURS, "padded"), _row(case, ROUTED, "padded")
    if exact and case["dtype"] == "bf16":
        error = exact["errors"]["logps_max"]
        found.append(Verdict("log-probabilities", "largest error, nats", error, LOGP_ERROR))
    if routed:
        error = max(routed["errors"]["dhidden"], routed["errors"]["dweight"])
        found.append(Verdict("routed", "relative error of dh and dW", error, ROUTED_ERROR))
    if exact and routed and case["dtype"] == "fp32":
        over = 1 / routed["ours_over_it"]["median"]
        found.append(Verdict("routed", "exact", over, ROUTED_OVER_EXACT))
        over = 3 * routed["over_floor"]["median"]
        found.append(Verdict("routed", "the bare product", over, ROUTED_OVER_PRODUCT))
    return found


def _over_fastest(case: Case, row: Case, layout: str, target: float) -> list[Verdict]:
    """Over the fastest other one of a layout that people run; over that of all on the side."""
    usual, every = (fastest(case, layout, extras) for extras in (False, True))
    if usual is None or every is None:
        return []
    ratio, of_all = (_ratio(row, other) for other in (usual, every))
    what = "routed" if row["name"] == ROUTED else "exact"
    return [
        Verdict(
            what,
            f"{usual['name']}, {layout}",
            ratio,
            target,
            _why(case, row, usual, target),
            f"{of_all:.2f} ({every['name']})",
        )
    ]


def fastest(case: Case, layout: str, extras: bool) -> Case | None:
    """The fastest other implementation that is fed a layout, with or without the extra ways to
    speed up eager code, such as compiling it."""
    rows = [r for r in case["implementations"] if r["layout"] == layout and not r["ours"]]
    rows = [r for r in rows if extras or not r["extra"]]
    return max(rows, key=lambda r: r["ours_over_it"]["median"], default=None)


def _ratio(row: Case, other: Case) -> float:
    """Both are known against the first implementation, round by round."""
    return other["ours_over_it"]["median"] / row["ours_over_it"]["median"]


def _why(case: Case, row: Case, other: Case, target: float) -> str:
    """What stands in the way: the bare products, or what is done beside them."""
    count = 1 if row["name"] == ROUTED else 3
    products, ours, theirs = count * case["gemm_s"], row["median_s"], other["median_s"]
    named = "the bare product" if count == 1 else "the three bare products"
    if ours <= products:
        return f"{ours:.2f} s are below {named} by `torch.mm`, {products:.2f} s, already"
    room = target * theirs - products
    if room < 0:
        share = products / theirs
        return f"{named} alone would be {share:.2f}: {products:.2f} s of {theirs:.2f} s"
    return f"{ours - products:.2f} s beside {named}, the target leaves room for {room:.2f} s"


def _gpu(case: Case, task: str, over: str, limit: float) -> Verdict:
    ours = _row(case, OURS, "counted") or _row(case, OURS, "padded")
    assert ours is not None
    ratio = ours["over_floor"]["median"] if over == "floor" else None
    if other := _row(case, over, "counted"):
        ratio = _ratio(ours, other)
    named = "its floor of bare products" if over == "floor" else over
    return Verdict(task, named, ratio, limit, "see the table")


def _row(case: Case, name: str, layout: str) -> Case | None:
    rows = case["implementations"]
    return next((r for r in rows if (r["name"], r["layout"]) == (name, layout)), None)


def table(cases: list[Case]) -> str:
    lines = []
    for case in cases:
        data = f"{case['dtype']}, T = {case['spec']['temperature']:g}"
        for v in judge(case):
            value, target = v.shown
            lines.append([data, v.what, v.over, value, target, v.outcome, v.with_extras or "-"])
    head = ["case", "ours", "over", "measured", "at most", "", "over the fastest of all"]
    return markdown(head, lines)


def summary(cases: list[Case]) -> str:
    """How many targets are met, and which are not, in one sentence."""
    found = [(case["dtype"], v) for case in cases for v in judge(case)]
    missed = [
        f"{dtype} {v.what} over {v.over} ({v.shown[0]} for {v.shown[1]})"
        for dtype, v in found
        if v.value is not None and not v.holds
    ]
    met = sum(v.holds for _, v in found)
    text = f"Of {len(found)} ratios and errors that were aimed at, {met} are met"
    return f"{text}; missed: {'; '.join(missed)}." if missed else text + "."


def page(cases: list[Case]) -> list[str]:
    if not any(map(judge, cases)):
        return []
    return ["### Targets", "", table(cases), ""]
