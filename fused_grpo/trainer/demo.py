"""What `fused-grpo train` does: a model, a task, a run, and what came of it."""

from __future__ import annotations

import importlib.util
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fused_grpo.trainer import models
from fused_grpo.trainer.config import GRPOConfig
from fused_grpo.trainer.metrics import METRICS_FILE
from fused_grpo.trainer.passk import Interval, bootstrap, paired_difference
from fused_grpo.trainer.rewards import RewardFunc
from fused_grpo.trainer.tasks import Task
from fused_grpo.trainer.trainer import GRPOTrainer

EVALUATION_FILE = "evaluation.json"


@dataclass(frozen=True)
class Summary:
    """Greedy rewards on the held-out prompts before and after, and where things are.

    Attributes:
        before, after: mean rewards.
        passed: pass@1 before and after, the share of right answers, and their paired difference.
    """

    before: float
    after: float
    passed: tuple[Interval, Interval, Interval]
    prompts: int
    steps: int
    seconds: float
    model: Path
    metrics: Path
    plot: Path | None

    def __str__(self) -> str:
        first, last, change = self.passed
        return (
            f"held-out reward (greedy, {self.prompts} prompts): {self.before:.3f} -> "
            f"{self.after:.3f} ({self.after - self.before:+.3f}) in {self.steps} steps, "
            f"{self.seconds:.0f} s\n"
            f"held-out pass@1 (greedy, the same prompts): {first.mean:.3f} -> {last.mean:.3f}, "
            f"difference {change.mean:+.3f}, {change.level:.0%} interval [{change.low:+.3f}, "
            f"{change.high:+.3f}] (paired bootstrap)\n"
            f"model: {self.model}\n"
            f"metrics: {self.metrics}\nplot: {self.plot or 'needs matplotlib'}"
        )


def default_dtype(full: bool) -> torch.dtype:
    """bf16 where its matmuls are fast; fp32 for full training, whose updates bf16 would lose."""
    if full:
        return torch.float32
    if torch.cuda.is_available():
        return torch.bfloat16
    fast = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
    return torch.bfloat16 if fast else torch.float32


def lora(rank: int) -> Any:
    """A LoRA configuration for all linear layers but the head.

    Raises:
        MissingExtraError: peft is not installed.
    """
    if importlib.util.find_spec("peft") is None:
        raise models.MissingExtraError(
            "LoRA needs peft, which is not installed here. Install the demo extra, `pip install "
            "'fused-grpo[demo]'`, or train all weights with --full"
        )
    from peft import LoraConfig

    return LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )


def task_options(task: Task, tokenizer: Any) -> dict[str, Any]:
    """The sampling options of a `GRPOConfig` that a task asks for."""
    options: dict[str, Any] = {"max_completion_length": completion_length(task, tokenizer)}
    if task.fills:
        options["run_warning_thresholds"] = {"truncation": None}
    if task.stop is not None:
        ids = tokenizer(task.stop, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            raise ValueError(
                f"task {task.name!r} ends completions with {task.stop!r}, which must be one token; "
                f"for this tokenizer it is {len(ids)}"
            )
        options["generation_kwargs"] = {"eos_token_id": [tokenizer.eos_token_id, ids[0]]}
    return options


def completion_length(task: Task, tokenizer: Any) -> int:
    """The most tokens of a completion: what the task says, or the longest answer and its end."""
    if task.max_completion_length is not None:
        return task.max_completion_length
    answers = {" " + row["answer"].strip() for row in task.train + task.held_out}
    encoded = tokenizer(sorted(answers), add_special_tokens=False)["input_ids"]
    return max(map(len, encoded)) + 1


def check_prompts(task: Task, tokenizer: Any) -> None:
    """ValueError if the task has conversations and the tokenizer no template for them."""
    conversations = not isinstance(task.train[0]["prompt"], str)
    if conversations and not tokenizer.chat_template:
        raise ValueError(
            f"task {task.name!r} has conversations, and this model's tokenizer no chat template: "
            "use --prompt text"
        )


def run(
    model: nn.Module,
    tokenizer: Any,
    task: Task,
    args: GRPOConfig,
    lora_rank: int | None,
    control: RewardFunc | None = None,
) -> Summary:
    """Evaluate, train, evaluate again, save and plot; everything goes to `args.output_dir`.

    `lora_rank` None trains all weights. The model that is saved, and evaluated at the
    end, has the adapter merged into its weights. `control` is trained on in the place of the task's
    reward, which is then only measured.
    """
    start = time.perf_counter()
    check_prompts(task, tokenizer)
    if control is not None:
        args.reward_weights = [0.0, 1.0]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[task.reward] if control is None else [task.reward, control],
        args=args,
        train_dataset=task.train,
        eval_dataset=task.held_out,
        processing_class=tokenizer,
        peft_config=None if lora_rank is None else lora(lora_rank),
    )
    if trainer.is_fsdp_enabled:
        raise ValueError(
            "this command trains whole copies of a model: for FSDP write a script, see "
            "docs/trainer-distributed.md"
        )
    before = _held_out(trainer)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    if lora_rank is not None:
        trainer.model = trainer.model.merge_and_unload()
    after = _held_out(trainer)
    out = Path(args.output_dir or ".")
    result = passed(before, after, task.correct)
    plot = None
    if trainer.is_world_process_zero():
        trainer.model.config.use_cache = True  # the Trainer turns it off
        trainer.model.save_pretrained(out / "model")
        tokenizer.save_pretrained(out / "model")
        _write(out / EVALUATION_FILE, before, after, result)
        if importlib.util.find_spec("matplotlib") is not None:
            from fused_grpo.trainer.plot import draw, load

            title = f"{task.name}: held-out {_mean(before):.2f} -> {_mean(after):.2f}"
            plot = draw(load([out]), out / "metrics.png", title=title)
    trainer.accelerator.wait_for_everyone()
    seconds = time.perf_counter() - start
    return Summary(
        _mean(before),
        _mean(after),
        result,
        len(task.held_out),
        trainer.state.global_step,
        seconds,
        out / "model",
        out / METRICS_FILE,
        plot,
    )


def _held_out(trainer: GRPOTrainer) -> list[float]:
    """The task's reward of a greedy completion of each prompt, in the same order every time."""
    trainer.evaluate()
    return trainer.eval_rewards[:, 0].tolist()


def _write(
    path: Path, before: list[float], after: list[float], result: tuple[Interval, ...]
) -> None:
    """Rewards of each held-out prompt, None where one could not be verified, and pass@1."""
    rewards = {
        name: [None if reward != reward else reward for reward in values]
        for name, values in (("before", before), ("after", after))
    }
    intervals = dict(zip(("before", "after", "difference"), result, strict=True))
    content = {"rewards": rewards, "pass@1": {k: v.json() for k, v in intervals.items()}}
    path.write_text(json.dumps(content, indent=1) + "\n")


def _mean(rewards: list[float]) -> float:
    """Of the rewards that there are: NaN is a completion that could not be verified."""
    return float(torch.tensor(rewards, dtype=torch.float64).nanmean())


def passed(
    before: list[float], after: list[float], correct: float
) -> tuple[Interval, Interval, Interval]:
    """pass@1 of two lists of rewards of the same prompts, and their paired difference."""
    first, last = ([float(r >= correct) for r in rewards] for rewards in (before, after))
    return bootstrap(first), bootstrap(last), paired_difference(first, last)
