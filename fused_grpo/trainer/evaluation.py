"""What `fused-grpo eval` does: samples of the held-out prompts, verified, and what they say."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from torch import nn

from fused_grpo.integrations.models import add_head_forward
from fused_grpo.trainer import demo, models
from fused_grpo.trainer.config import GRPOConfig
from fused_grpo.trainer.metrics import METRICS_FILE, read_metrics
from fused_grpo.trainer.passk import (
    Interval,
    bootstrap,
    majority_at_k,
    matched_samples,
    paired_difference,
    pass_at_k,
    table,
)
from fused_grpo.trainer.rewards import score
from fused_grpo.trainer.rollout import Sampler
from fused_grpo.trainer.tasks import Task

KS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Samples:
    """n verified completions of each of M prompts, in the order of the task's rows.

    Attributes:
        correct: [M][n] whether a completion is right; one that could not be verified is not.
        answers: [M][n] the answer in it, None without one.
        tokens: read and sampled, over all completions.
        length: mean tokens of a completion.
        failed: completions that could not be verified.
    """

    correct: list[list[bool]]
    answers: list[list[str | None]]
    tokens: int
    length: float
    failed: int

    @property
    def number(self) -> int:
        """n, completions per prompt."""
        return len(self.correct[0])

    @property
    def tokens_per_sample(self) -> float:
        return self.tokens / (len(self.correct) * self.number)

    def pass_at(self, k: int) -> list[float]:
        """[M] estimates of pass@k."""
        return [pass_at_k(self.number, sum(row), k) for row in self.correct]

    def majority_at(self, k: int, seed: int) -> list[float]:
        """[M] estimates of maj@k."""
        rows = zip(self.answers, self.correct, strict=True)
        return [
            majority_at_k(answers, right, k, seed + i) for i, (answers, right) in enumerate(rows)
        ]


def draw(
    model: nn.Module,
    tokenizer: Any,
    task: Task,
    args: GRPOConfig,
    samples: int,
    greedy: bool = False,
) -> Samples:
    """Verified completions of the held-out prompts, under the sampling options of `args`.

    `args.per_device_eval_batch_size` completions are sampled at once. The same model, seed and
    batch size give the same completions.
    """
    set_seed(args.seed)
    add_head_forward(model)
    sampler = Sampler(model, tokenizer, args)
    rows = task.held_out
    order = sorted(range(len(rows)), key=lambda i: len(str(rows[i]["prompt"])))  # less padding
    size = max(args.per_device_eval_batch_size // samples, 1)
    correct: dict[int, list[bool]] = {}
    answers: dict[int, list[str | None]] = {}
    tokens = sampled = failed = 0
    for start in range(0, len(order), size):
        chosen = order[start : start + size]
        sample = sampler(model, [rows[i]["prompt"] for i in chosen], samples, greedy)
        ids = sample.completions()
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        asked = [rows[i] for i in chosen for _ in range(samples)]
        rewards = score([task.reward], asked, sample, tokenizer)[:, 0]
        sampled += sum(map(len, ids))
        tokens += sum(map(len, ids)) + int(sample.prompt_mask.sum())
        failed += int(rewards.isnan().sum())
        for place, i in enumerate(chosen):
            own = slice(place * samples, (place + 1) * samples)
            correct[i] = (rewards[own] >= task.correct).tolist()  # NaN is not
            answers[i] = [task.answer_of(text) for text in texts[own]]
    return Samples(
        [correct[i] for i in range(len(rows))],
        [answers[i] for i in range(len(rows))],
        tokens,
        sampled / (len(rows) * samples),
        failed,
    )


def describe(samples: Samples, ks: Sequence[int], level: float, seed: int) -> dict[str, Any]:
    """pass@k and maj@k with their intervals, and what the completions cost."""
    return {
        "pass": {k: bootstrap(samples.pass_at(k), level, seed) for k in ks},
        "maj": {k: bootstrap(samples.majority_at(k, seed), level, seed) for k in ks},
        "mean_length": samples.length,
        "tokens": samples.tokens,
        "failed": samples.failed,
        "correct_per_prompt": [sum(row) for row in samples.correct],
    }


def compare(
    base: Samples, other: Samples, ks: Sequence[int], level: float, seed: int
) -> dict[int, Interval]:
    """For each k the difference of pass@k, other minus base, over the same prompts."""
    return {k: paired_difference(base.pass_at(k), other.pass_at(k), level, seed) for k in ks}


def matched(run: Path, base: Samples, level: float, seed: int) -> dict[str, Any]:
    """Best-of-G and maj@G of the untrained model, for the tokens that a training run has cost.

    G is `passk.matched_samples`; where it is more than there are samples, their number is taken
    and "limited" is true. Best of G with the verifier is pass@G: it needs the verifier to choose.

    Raises:
        ValueError: there are no metrics of a run.
    """
    spent = [e["num_tokens"] for e in read_metrics(run / METRICS_FILE) if "num_tokens" in e]
    if not spent:
        raise ValueError(f"match_run={str(run)!r} has no {METRICS_FILE} with the tokens of a run")
    wanted = matched_samples(spent[-1], len(base.correct), base.tokens_per_sample)
    group = min(wanted, base.number)
    return {
        "train_tokens": spent[-1],
        "G": wanted,
        "samples": group,
        "limited": group < wanted,
        "best_of_G": bootstrap(base.pass_at(group), level, seed),
        "maj_at_G": bootstrap(base.majority_at(group, seed), level, seed),
    }


def main(options: argparse.Namespace, task: Task) -> int:
    """The command: evaluates, prints tables, writes `options.output`; gives the exit status."""
    samples = 1 if options.greedy else options.samples
    ks = _ks(options.k, samples)
    torch.manual_seed(options.seed)  # tiny is random
    pairs = [(options.model, options.adapter)]
    pairs += [(model, None) for model in options.compare]
    pairs += [(options.model, adapter) for adapter in options.compare_adapter]
    drawn: list[Samples] = []
    results: list[dict[str, Any]] = []
    for model_name, adapter in pairs:
        name = model_name if adapter is None else f"{model_name} + {adapter}"
        print(f"{name}: {samples} x {len(task.held_out)} completions", flush=True)
        drawn.append(_draw(model_name, adapter, task, options, samples))
        result = describe(drawn[-1], ks, options.level, options.seed)
        if len(drawn) > 1:
            change = compare(drawn[0], drawn[-1], ks, options.level, options.seed)
            result["difference"] = change
        results.append({"model": model_name, "adapter": adapter, "name": name, **result})
    report = {
        "task": task.name,
        "prompts": len(task.held_out),
        "samples": samples,
        "sampling": "greedy" if options.greedy else f"temperature {options.temperature:g}",
        "seed": options.seed,
        "level": options.level,
        "results": results,
    }
    if options.match_run:
        run = Path(options.match_run)
        report["matched"] = matched(run, drawn[0], options.level, options.seed)
    Path(options.output).write_text(json.dumps(report, indent=1, default=Interval.json) + "\n")
    print(render(report, ks), f"\nwritten: {options.output}")
    return 0


def _ks(given: list[int] | None, samples: int) -> list[int]:
    if samples < 1:
        raise ValueError(f"--samples {samples} must be at least 1")
    if given is None:
        return [k for k in KS if k <= samples]
    wrong = [k for k in given if not 1 <= k <= samples]
    if wrong:
        raise ValueError(f"--k {wrong[0]} must lie between 1 and --samples {samples}")
    return sorted(set(given))


def _draw(
    model_name: str, adapter: str | None, task: Task, options: argparse.Namespace, samples: int
) -> Samples:
    dtype = (
        demo.default_dtype(full=False) if options.dtype == "auto" else getattr(torch, options.dtype)
    )
    model, tokenizer = models.load(model_name, dtype)
    if adapter is not None:
        model = models.with_adapter(model, adapter)
    demo.check_prompts(task, tokenizer)
    sampling = demo.task_options(task, tokenizer)
    if options.max_completion_length is not None:
        sampling["max_completion_length"] = options.max_completion_length
    args = GRPOConfig(
        output_dir=str(Path(options.output).parent),
        temperature=options.temperature,
        seed=options.seed,
        per_device_eval_batch_size=options.batch_size,
        report_to="none",
        **sampling,
    )
    return draw(model.to(args.device), tokenizer, task, args, samples, options.greedy)


def render(report: dict[str, Any], ks: Sequence[int]) -> str:
    """The report as Markdown tables."""
    level = f"{report['level']:.0%}"
    head = f"\n{report['task']}, {report['prompts']} held-out prompts, {report['samples']} samples "
    head += f"each ({report['sampling']}), {level} bootstrap intervals over prompts\n"
    rows = [
        [r["name"], *(r["pass"][k] for k in ks), f"{r['mean_length']:.1f}", r["failed"]]
        for r in report["results"]
    ]
    header = ["model", *(f"pass@{k}" for k in ks), "tokens", "not verified"]
    parts = [head, table(rows, header)]
    changes = [[r["name"], *r["difference"].values()] for r in report["results"][1:]]
    if changes:
        first = report["results"][0]["name"]
        header = [f"difference to {first}, paired", *(f"pass@{k}" for k in ks)]
        parts += ["", table(changes, header)]
    if "matched" in report:
        m = report["matched"]
        parts.append(
            f"\ntraining took {m['train_tokens']:,.0f} tokens: G = {m['G']} samples of each prompt "
            f"untrained\nbest of {m['samples']} by the verifier {m['best_of_G']}, majority of "
            f"{m['samples']} {m['maj_at_G']}"
            + (f" (limited by --samples: {m['G']} are matched)" if m["limited"] else "")
        )
    return "\n".join(parts)
