"""Faults put into the loss on purpose, one at a time: do the tests notice?

    python scripts/mutants.py [--only TEXT] [--jobs N]

makes a copy of the sources for each, runs the tests that concern the file until one fails, prints
what survived and, when all ran, writes docs/mutants.md.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "mutants.md"
FLOOR = 0.95

# file -> the test modules that run, the quickest first
TESTS = {
    "fused_grpo/kl.py": "worked_examples log_ratios policy_loss trainer_policy extremes objectives",
    "fused_grpo/ratios.py": "worked_examples log_ratios policy_loss extremes objectives",
    "fused_grpo/aggregation.py": "aggregation worked_examples reductions masks",
    "fused_grpo/estimators.py": "advantages advantage_estimators worked_examples",
    "fused_grpo/advantages.py": "advantages advantage_estimators",
    "fused_grpo/corrections.py": "corrections objectives",
    "fused_grpo/batch.py": "masks validation properties",
    "fused_grpo/objectives/surrogates.py": "worked_examples policy_loss extremes objectives",
    "fused_grpo/objectives/terms.py": (
        "worked_examples policy_loss extremes autograd_contract objectives"
    ),
    "fused_grpo/tiles.py": "logprobs numerics loss_options extremes_head",
    "fused_grpo/chunked.py": "logprobs loss_options exponentials bf16",
    "fused_grpo/gradients.py": "logprobs numerics loss_options",
    "fused_grpo/exponentials.py": "exponentials bf16 extremes_head",
    "fused_grpo/routed.py": "routed",
    "fused_grpo/support.py": "support sampler_support",
    "fused_grpo/divergence.py": "head_divergence",
    "kernels/fused_grpo_kernels/gradients.py": "kernels logprobs",
    "kernels/fused_grpo_kernels/forward.py": "kernels logprobs",
}


@dataclass(frozen=True)
class Mutant:
    """`old`, which stands once in a file, becomes `new`."""

    file: str
    old: str
    new: str
    what: str


def _of(file: str, *changes: tuple[str, str, str]) -> list[Mutant]:
    return [Mutant(file, old, new, what) for what, old, new in changes]


MUTANTS = [
    *_of(
        "fused_grpo/kl.py",
        ("k1 with the wrong sign", "    return -d\n", "    return d\n"),
        ("k2 without its half", "d.square() / 2", "d.square()"),
        ("k3 without -d", "return expm1(d) - d", "return expm1(d)"),
        ("the value clamped on one side", "raw.clamp(-clamp, clamp)", "raw.clamp(max=clamp)"),
        ("straight through k1's gradient", "gradient = k2(d)", "gradient = k1(d)"),
        ("score with the wrong sign", "since = d.detach() - d ", "since = d - d.detach() "),
        ("scored k3 without its constant", "value.detach() + (1 + now) -", "value.detach() -"),
        ("scored k3 with the wrong sign", "(now - d).exp()", "(d - now).exp()"),
        ("scored k3 where it is clamped", "inside = (bounded == d) & ~beyond", "inside = d == d"),
        ("k3 unbounded", "if how.exponential else d", "if not how.exponential else d"),
        ("adaptive beta falls", "1 + error * self", "1 - error * self"),
    ),
    *_of(
        "fused_grpo/ratios.py",
        ("a mean over tokens that do not count", "self.lengths.clamp_min(1)", "(self.lengths + 1)"),
        ("sequence ratio is the sum", "sequences.mean(log_ratio)[", "sequences.total(log_ratio)["),
        ("straight through, attached", "(log_ratio - log_ratio.detach())", "0 * log_ratio"),
        ("clamp on one side", "log_ratio.clamp(-limit, limit)", "log_ratio.clamp(max=limit)"),
        ("0 times infinity", "torch.where((by == 0) & (y == torch.inf), 0.0, by *", "(by *"),
        ("expm1's slope", "by * (y + ctx.less)", "by * y"),
    ),
    *_of(
        "fused_grpo/aggregation.py",
        ("no least divisor", "(1 / divisor.clamp_min(1))", "(1 / divisor)"),
        ("empty sequences count in nonempty", "(batch.whole_lengths > 0)", "(batch.lengths >= 0)"),
        ("items ignored", "_known(given.num_items_in_batch, batch", "_known(None, batch"),
        ("fixed length by one more", "_known(given.max_completion_length, 1)", "1.0"),
        ("groups by sequence", "totals[groups][batch", "batch.lengths[batch"),
        ("dapo by the sequence", '"trl:dapo": "token_mean"', '"trl:dapo": "sequence_mean"'),
    ),
    *_of(
        "fused_grpo/estimators.py",
        ("ddof ignored", "keepdim=True) - ddof)", "keepdim=True))"),
        ("eps left out", "1, ddof) + eps\n    values", "1, ddof)\n    values"),
        (
            "leave one out by n + 1",
            "groups.count / (groups.count - 1)",
            "groups.count / groups.count",
        ),
        (
            "NaN rewards count as 0",
            "torch.where(self.valid & self.learns, x",
            "torch.where(self.learns, x",
        ),
        ("equal groups learn", "return high - low <= span", "return high - low < span"),
        ("greedy reward added", "groups.values - greedy_rewards", "groups.values + greedy_rewards"),
        ("maxrl without its mean", "groups.centred / (mean + eps)", "groups.centred"),
        ("opo by count", "(weights * groups.values).sum(1", "(groups.valid * groups.values).sum(1"),
        ("whitened without a mean", "centred = x - (weights", "centred = x - 0 * (weights"),
    ),
    *_of(
        "fused_grpo/advantages.py",
        ("weights of rewards ignored", "(rewards * _weights(weights, rewards))", "(rewards)"),
        ("no whitening after the sum", "valid & learns, result", "valid & learns, total"),
        ("share of groups that learn", "equal.float().sum()", "(~equal).float().sum()"),
    ),
    *_of(
        "fused_grpo/corrections.py",
        (
            "sampler over policy",
            "policy.detach() - batch.sampler",
            "batch.sampler - policy.detach()",
        ),
        ("unknown is not 1", "torch.where(batch.sampler.isnan(), 0.0, d)", "d"),
        ("no lower bound", "return ratio.clamp(low, high)", "return ratio.clamp(max=high)"),
        ("masked is clamped", "(ratio > high), 0.0, ratio)", "(ratio > high), high, ratio)"),
        (
            "veto of single tokens",
            "(batch.sequences.total(outliers) == 0)[batch.sequence]",
            "(outliers == 0)",
        ),
        ("attached weights", "d = policy.detach() - batch", "d = policy - batch"),
    ),
    *_of(
        "fused_grpo/batch.py",
        ("the mask inverted", "return flat != 0", "return flat == 0"),
        ("lengths of all positions", "counted.cumsum(0)])", "torch.ones_like(counted).cumsum(0)])"),
        ("packed bounds off by one", "right=True)", "right=False)"),
        ("attached inputs", "value = value.detach()\n        s =", "s ="),
    ),
    *_of(
        "fused_grpo/objectives/surrogates.py",
        ("maximum for minimum", "-torch.minimum(free * t.adv", "-torch.maximum(free * t.adv"),
        (
            "epsilons swapped",
            "t.ratio.clamp(1 - spec.epsilon_low, 1 + spec.upper)",
            "t.ratio.clamp(1 - spec.upper, 1 + spec.epsilon_low)",
        ),
        ("delta ignored", "t.ratio.clamp(max=spec.delta)", "t.ratio"),
        (
            "dual clip of gains",
            "torch.where(t.advantages < 0, torch.minimum(loss, bound)",
            "torch.where(t.advantages > 0, torch.minimum(loss, bound)",
        ),
        (
            "cispo attached",
            't.ratio.detach().clamp(spec.option("ratio_min")',
            't.ratio.clamp(spec.option("ratio_min")',
        ),
        ("sapo without 4", "(4 / tau) * torch", "(1 / tau) * torch"),
        (
            "gmpo one-sided on the wrong side",
            "torch.where(t.advantages < 0, most,",
            "torch.where(t.advantages > 0, most,",
        ),
        (
            "unclipped inside alone",
            "torch.where(beyond, 0.0, -weight",
            "torch.where(~beyond, 0.0, -weight",
        ),
        ("dppo's bounds swapped", "moved > high, moved < -low", "moved > low, moved < -high"),
        ("covariance uncentred", "(a - a.mean()) *", "a *"),
        (
            "the penalty's sign",
            "-t.ratio * t.advantages + torch.where(chosen, penalty",
            "-t.ratio * t.advantages - torch.where(chosen, penalty",
        ),
        (
            "clip metrics by the ratio alone",
            "(t.ratio < low) & (t.advantages < 0)",
            "(t.ratio < low)",
        ),
    ),
    *_of(
        "fused_grpo/objectives/terms.py",
        ("old is the reference", "level_of(logps - old, batch", "level_of(old - logps, batch"),
        ("KL without beta", "loss = spec.beta * penalty.value", "loss = penalty.value"),
        ("KL the other way", "d = batch.ref - view.logps", "d = view.logps - batch.ref"),
        (
            "the correction of the KL detached",
            "ratio, value = view.ratio, penalty.value",
            "ratio, value = view.ratio.detach(), penalty.value",
        ),
        (
            "the corrected k3 without its score",
            "together = ratio.detach() * scored_k3(value, d)",
            "together = ratio.detach() * value",
        ),
        (
            "entropy raises the loss",
            "loss = loss - _select(learns, entropy",
            "loss = loss + _select(learns, entropy",
        ),
        (
            "infinity times an advantage of 0",
            "(ratio == torch.inf) & (batch.advantages == 0)",
            "(ratio == torch.inf) & (batch.advantages != batch.advantages)",
        ),
        (
            "the corrected k3 where its ratio is clamped",
            "moves & ~penalty.input_clamped",
            "~penalty.input_clamped",
        ),
        ("importance weights dropped", "loss = loss * view.weight", "loss = loss * 1"),
        ("rejected tokens stay", "Terms(_select(keep, loss), view", "Terms(loss, view"),
        (
            "the positive term of all",
            "torch.where(view.advantages > 0, view.logps",
            "torch.where(view.advantages < 9, view.logps",
        ),
        (
            "off-policy mask of gains",
            "(view.advantages < 0) & moved",
            "(view.advantages > 0) & moved",
        ),
        (
            "the quantile from below",
            "1 - spec.top_entropy_quantile))",
            "spec.top_entropy_quantile))",
        ),
        (
            "old attached",
            "old = logps.detach() if batch.old is None",
            "old = logps if batch.old is None",
        ),
    ),
    *_of(
        "fused_grpo/tiles.py",
        (
            "no temperature",
            "self.x * (head.logit_scale / temperature)\n            self.u",
            "self.x * head.logit_scale\n            self.u",
        ),
        (
            "no scale",
            "self.x * (head.logit_scale / temperature)\n            self.u",
            "self.x / temperature\n            self.u",
        ),
        ("the cap off by a factor", ".mul_(head.softcap / temperature)", ".mul_(head.softcap)"),
        (
            "bias after the cap",
            "z.mul_(head.logit_scale / head.softcap).tanh_()",
            "z.mul_(1 / head.softcap).tanh_()",
        ),
        (
            "the last column left out",
            "(column >= 0) & (column < width)",
            "(column >= 0) & (column < width - 1)",
        ),
        (
            "the first column left out",
            "((column >= 0) & (column < width))",
            "((column > 0) & (column < width))",
        ),
        ("the target stays among the others", "z[hit, column[hit]] = -torch.inf", "pass"),
        (
            "log-probabilities with the sign",
            "logps = -torch.logaddexp(zero, d)",
            "logps = torch.logaddexp(zero, d)",
        ),
        (
            "infinity is certainty",
            "torch.where(sums.z_target[:, None] == torch.inf, torch.nan, d)",
            "d + 0",
        ),
        ("entropy without the target", "(entropy_term(logps) + others)", "(others)"),
        ("the first entry lost", "q[:, 0] = first * q_top", "q[:, 0] = 0 * q_top"),
    ),
    *_of(
        "fused_grpo/chunked.py",
        ("unwritten weight gradient", "result.weight_grad.zero_()", "pass"),
        (
            "rows out of range keep their values",
            "getattr(sums, name)[some] = getattr(merged, name)",
            "pass",
        ),
    ),
    *_of(
        "fused_grpo/gradients.py",
        (
            "p added",
            "a, b, c, extra = -g[:, None] * p_tile",
            "a, b, c, extra = g[:, None] * p_tile",
        ),
        (
            "no 1 - p at the target",
            "share = upstream.logps * one_minus_p",
            "share = upstream.logps * 1",
        ),
        (
            "the entropy's mean left out",
            "e[:, None] * (p_tile * h[:, None] + torch",
            "e[:, None] * (torch",
        ),
        (
            "the cap's slope left out",
            "return 1 - (z * (temperature / head.softcap)).square()",
            "return torch.ones_like(z)",
        ),
        (
            "temperature missing in the gradient",
            "jacobian = head.logit_scale / temperature  #",
            "jacobian = head.logit_scale  #",
        ),
        (
            "weight gradient without the target",
            "add_rows(result.weight_grad, target, x * at_target)",
            "pass",
        ),
        (
            "hidden gradient without the target",
            "dh.addcmul_(weight[target].to(dtype), at_target)",
            "pass",
        ),
        (
            "bias gradient without the target",
            "add_rows(result.bias_grad, target, at_target[:, 0])",
            "pass",
        ),
        (
            "chunks overwrite one another",
            "torch.addmm(total, a, b, beta=int(written)",
            "torch.addmm(total, a, b, beta=0",
        ),
    ),
    *_of(
        "fused_grpo/exponentials.py",
        (
            "the dither stays in",
            "self.undither = offset + shift, shift.neg().exp_()",
            "self.undither = offset + shift, shift.exp()",
        ),
        ("large entries at another shift", "z.sub_(_RAISED_SHIFT)", "z.sub_(_SHIFT)"),
        ("small weights are lost", "_RAISED = 2.0**80", "_RAISED = 1.0"),
        ("large entries stay rounded", "exp_().sub_(value))", "exp_().mul_(0))"),
        ("no row is out of range", "bad |= ~((mass", "bad &= ~((mass"),
        (
            "the bias without temperature",
            "head.bias.to(x.dtype) * (head.logit_scale / logits.temperature)",
            "head.bias.to(x.dtype) * head.logit_scale",
        ),
    ),
    *_of(
        "fused_grpo/routed.py",
        ("unweighted entries", "value = ratio.clamp(min=1).mul_(tau)", "value = ratio * tau"),
        ("more than one may be expected", "mass.clamp_(max=1), route)", "mass, route)"),
        ("dense rows are routed", "live = live & ~entries.dense", "pass"),
        (
            "the target's share left out",
            "at_target = at_target * (jacobian * entries.target_slope)",
            "at_target = at_target * 0",
        ),
        ("entropy's term left out", "weight -= (e * jacobian)", "weight -= 0 * (e * jacobian)"),
        (
            "the last batch is not added",
            "        self._flush()\n        if self.dense:",
            "        if self.dense:",
        ),
        ("rows of a sum left out", "total[rows] += more[rows]", "pass"),
        ("one seed for all", "noise = _uniform(route.seed, 1,", "noise = _uniform(0, 1,"),
    ),
    *_of(
        "fused_grpo/support.py",
        (
            "strictly above the cutoff",
            "z.masked_fill_(z < self.cutoff[:, None]",
            "z.masked_fill_(z <= self.cutoff[:, None]",
        ),
        ("the nucleus one short", "(upto - share < top_p)", "(upto < top_p)"),
        (
            "min_p of the sum",
            "z.amax(1) + math.log(self.min_p)",
            "torch.logsumexp(z, 1) + math.log(self.min_p)",
        ),
        ("ids at a tile's end", "(self.ids < v.stop)).nonzero", "(self.ids < v.stop - 1)).nonzero"),
        ("the target is inside", "outside |= z_target < self.cutoff", "pass"),
    ),
    *_of(
        "fused_grpo/divergence.py",
        ("outside a support", "s.masked_fill_(z == -torch.inf, -torch.inf)", "pass"),
        (
            "the reference's target stays",
            "take_out_target(s, target - v.start, self.sums.z_target)",
            "pass",
        ),
        ("the rest left out", "torch.logaddexp(rest, out)[:, None]", "out[:, None]"),
        ("top-k ids without their tile", "column + start], 1)", "column], 1)"),
        ("without the mass of the tiles", "+ (mass / ref_mass).log())[:, None]", ")[:, None]"),
    ),
    *_of(
        "kernels/fused_grpo_kernels/gradients.py",
        ("p added", "dz = -gt[:, None] * p", "dz = gt[:, None] * p"),
        ("the target like the others", "dz = tl.where(hit, own[:, None], dz)", "dz = dz"),
        ("the cap's slope left out", "dz *= 1.0 - tanh * tanh", "dz *= 1.0"),
        (
            "the last column left out",
            "live[:, None] & (cols < vocab)[None, :]",
            "live[:, None] & (cols < vocab - 1)[None, :]",
        ),
        (
            "bias of columns beyond the end",
            "tl.sum(tl.where(inside, dz, 0.0), 0)",
            "tl.sum(dz, 0) * 0",
        ),
        (
            "idle rows keep their values",
            "dz = tl.where(idle[:, None], 0.0, dz * (f * inner)[:, None])",
            "dz = dz * (f * inner)[:, None]",
        ),
    ),
    *_of(
        "kernels/fused_grpo_kernels/forward.py",
        ("columns of the next tile", "first = j * BN + half * (BN // 2)", "first = j * BN"),
        (
            "the end of the width left out",
            "inside = (start + k < width)[None, :]",
            "inside = (start + k < width - 1)[None, :]",
        ),
    ),
]


NONE = Mutant("pyproject.toml", "", "", "no fault")


def outcome(mutant: Mutant, tests: str) -> int:
    """pytest's exit status in a copy of the sources that has the fault."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = Path(name)
        for part in ("fused_grpo", "kernels", "tests", "benchmarks", "scripts"):
            skip = shutil.ignore_patterns("__pycache__", "results")
            shutil.copytree(ROOT / part, folder / part, ignore=skip)
        for file in ("pyproject.toml", "README.md", "CHANGELOG.md"):
            shutil.copy(ROOT / file, folder / file)
        if mutant is not NONE:
            path = folder / mutant.file
            path.write_text(path.read_text().replace(mutant.old, mutant.new))
        files = [f"tests/test_{test}.py" for test in tests.split()]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "--no-header", *files]
        paths = os.pathsep.join([name, str(folder / "kernels")])
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider", "--timeout=0"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        # a fault that takes the process down is found as well; 3 to 5 are pytest's own troubles
        if done.returncode in (3, 4, 5) or (mutant is NONE and done.returncode):
            raise RuntimeError(f"{mutant}: pytest ended with {done.returncode}\n{done.stdout}")
        return done.returncode


def killed(mutant: Mutant) -> tuple[Mutant, bool, float]:
    """Whether a test fails, and the seconds until then."""
    start = time.monotonic()
    status = outcome(mutant, TESTS[mutant.file])
    return mutant, status != 0, time.monotonic() - start


def table(results: list[tuple[Mutant, bool, float]]) -> str:
    found = sum(dead for _, dead, _ in results)
    lines = [
        "# Faults put in on purpose",
        "",
        f"{found} of {len(results)} faults in the loss ({found / len(results):.0%}), put in one at "
        "a time by `python scripts/mutants.py`, make a test fail.",
        "",
        "| file | fault | |",
        "|---|---|---|",
    ]
    for mutant, dead, _ in results:
        lines.append(f"| `{mutant.file}` | {mutant.what} | {'found' if dead else '**survived**'} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Exit status 1 if more than one in twenty survives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="those whose file or words hold this text")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    chosen = [m for m in MUTANTS if args.only in f"{m.file} {m.what}"]
    results = []
    with ThreadPoolExecutor(args.jobs) as pool:
        # tests that fail anyway would find every fault
        used = sorted({test for m in chosen for test in TESTS[m.file].split()})
        list(pool.map(lambda test: outcome(NONE, test), used))
        for mutant, dead, seconds in pool.map(killed, chosen):
            results.append((mutant, dead, seconds))
            verdict = "found" if dead else "SURVIVED"
            print(f"{verdict} {seconds:5.0f} s  {mutant.file}: {mutant.what}", flush=True)
    if len(chosen) == len(MUTANTS):
        DOCUMENT.write_text(table(results))
    share = sum(dead for _, dead, _ in results) / len(results)
    print(f"{share:.1%} of {len(results)} found")
    return int(share < FLOOR)


if __name__ == "__main__":
    sys.exit(main())
