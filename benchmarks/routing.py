"""Error and cost of the routed backward against tau and entropy.

Real tokens at several sampling temperatures; for each tau the relative error of dh and dW against
exact gradients (fp32), the entries kept per token, the noise that the metrics estimate, and the
time over that of exact gradients, taken in turns.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.compare import mean_entropy
from benchmarks.data import Case, Spec, real_case
from benchmarks.measure import progress
from fused_grpo import grpo_loss

EXPONENTS = (6, 8, 9, 10, 11, 12, 13, 14)


def run(temperature: float, rounds: int, quick: bool) -> dict[str, Any]:
    """All tau at one temperature."""
    tiny = Spec(tokens=48, vocab=257, width=32, dtype="fp32", temperature=temperature)
    case = tiny.build() if quick else real_case(temperature)
    progress("timing, in turns with exact gradients")
    rows = [
        measure(case, exponent, rounds) for exponent in (EXPONENTS[-2:] if quick else EXPONENTS)
    ]
    progress("timed")
    return {
        "key": f"T={temperature:g}",
        "temperature": temperature,
        "tokens": case.tokens,
        "entropy": mean_entropy(case),
        "rows": rows,
    }


def measure(case: Case, exponent: int, rounds: int) -> dict[str, Any]:
    options = {"backward": "routed", "route_tau": 2.0**-exponent, "route_seed": 0}
    truth, found = gradients(case, {}), gradients(case, options)
    progress(f"routing: T={case.temperature:g}, tau = 2^-{exponent}")
    return {
        "exponent": exponent,
        "dh": relative(found["dh"], truth["dh"]),
        "dw": relative(found["dw"], truth["dw"]),
        "noise": float(found["metrics"]["route/relative_noise"]),
        "kept": float(found["metrics"]["route/kept_per_token"]),
        "over_exact": in_turns(case, options, rounds),
    }


def gradients(case: Case, options: dict[str, Any]) -> dict[str, Any]:
    hidden, weight = (x.detach().requires_grad_() for x in (case.hidden, case.weight))
    out = grpo_loss(
        hidden,
        weight,
        case.ids,
        case.advantages,
        completion_mask=case.mask,
        old_per_token_logps=case.old,
        temperature=case.temperature,
        **options,
    )
    dh, dw = torch.autograd.grad(out.loss, [hidden, weight])
    return {"dh": dh, "dw": dw, "metrics": out.metrics}


def relative(x: Tensor, y: Tensor) -> float:
    return float((x - y).double().norm() / y.double().norm())


def in_turns(case: Case, options: dict[str, Any], rounds: int) -> float:
    """Median over rounds of routed time / exact time."""
    ratios = []
    for _ in range(rounds + 1):
        seconds = []
        for choice in (options, {}):
            start = time.perf_counter()
            gradients(case, choice)
            seconds.append(time.perf_counter() - start)
        ratios.append(seconds[0] / seconds[1])
    return statistics.median(ratios[1:])


def table(case: dict[str, Any]) -> str:
    lines = [
        f"T = {case['temperature']}: {case['tokens']} tokens, mean entropy {case['entropy']:.2f}",
        "",
        "| tau | kept per token | dh error | dW error | estimated noise | time over exact |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| 2^-{r['exponent']} | {r['kept']:.0f} | {r['dh']:.2%} | {r['dw']:.2%} "
        f"| {r['noise']:.2%} | {r['over_exact']:.2f} |"
        for r in case["rows"]
    ]
    return "\n".join(lines)


def page(cases: list[dict[str, Any]]) -> list[str]:
    return ["\n\n".join(map(table, cases))]


def plot(cases: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (error, kept, cost) = pyplot.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for case in cases:
        x = [2.0 ** -r["exponent"] for r in case["rows"]]
        label = f"T = {case['temperature']}, {case['entropy']:.2f} nat"
        line = error.plot(x, [100 * r["dh"] for r in case["rows"]], "o-", label=f"dh, {label}")
        color = line[0].get_color()
        dw = [100 * r["dw"] for r in case["rows"]]
        error.plot(x, dw, "s--", color=color, label=f"dW, {label}")
        kept.plot(x, [r["kept"] for r in case["rows"]], "o-", label=label)
        cost.plot(x, [r["over_exact"] for r in case["rows"]], "o-", label=label)
    for axes, title in ((error, "error (%)"), (kept, "kept per token"), (cost, "time / exact")):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("tau")
        axes.set_title(title)
    error.set_yscale("log")
    kept.set_yscale("log")
    cost.set_ylim(0)
    error.legend(fontsize=7)
    cost.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
