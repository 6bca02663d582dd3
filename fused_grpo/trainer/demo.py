"""What `fused-grpo train` does: a model, a task, a run, and what came of it."""

from __future__ import annotations

import importlib.util
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fused_grpo.trainer import models
from fused_grpo.trainer.config import GRPOConfig
from fused_grpo.trainer.metrics import METRICS_FILE
from fused_grpo.trainer.tasks import Task
from fused_grpo.trainer.trainer import GRPOTrainer


@dataclass(frozen=True)
class Summary:
    """Greedy reward on the held-out prompts before and after, and where things are."""

    before: float
    after: float
    prompts: int
    steps: int
    seconds: float
    model: Path
    metrics: Path
    plot: Path | None

    def __str__(self) -> str:
        return (
            f"held-out reward (greedy, {self.prompts} prompts): {self.before:.3f} -> "
            f"{self.after:.3f} ({self.after - self.before:+.3f}) in {self.steps} steps, "
            f"{self.seconds:.0f} s\nmodel: {self.model}\n"
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
    options: dict[str, Any] = {"max_completion_length": task.max_completion_length}
    if task.stop is None:  # completions are meant to end there
        options["run_warning_thresholds"] = {"truncation": None}
    else:
        ids = tokenizer(task.stop, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            raise ValueError(
                f"task {task.name!r} ends completions with {task.stop!r}, which must be one token; "
                f"for this tokenizer it is {len(ids)}"
            )
        options["generation_kwargs"] = {"eos_token_id": [tokenizer.eos_token_id, ids[0]]}
    return options


def run(
    model: nn.Module, tokenizer: Any, task: Task, args: GRPOConfig, lora_rank: int | None
) -> Summary:
    """Evaluate, train, evaluate again, save and plot; everything goes to `args.output_dir`.

    `lora_rank` None trains all weights. The model that is saved, and evaluated at the
    end, has the adapter merged into its weights.
    """
    start = time.perf_counter()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=task.reward,
        args=args,
        train_dataset=task.train,
        eval_dataset=task.held_out,
        processing_class=tokenizer,
        peft_config=None if lora_rank is None else lora(lora_rank),
    )
    before = trainer.evaluate()["eval_reward"]
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    if lora_rank is not None:
        trainer.model = trainer.model.merge_and_unload()
    after = trainer.evaluate()["eval_reward"]
    out = Path(args.output_dir or ".")
    trainer.model.config.use_cache = True  # the Trainer turns it off
    trainer.model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
    plot = None
    if importlib.util.find_spec("matplotlib") is not None:
        from fused_grpo.trainer.plot import draw, load

        title = f"{task.name}: held-out {before:.2f} -> {after:.2f}"
        plot = draw(load([out]), out / "metrics.png", title=title)
    seconds = time.perf_counter() - start
    return Summary(
        before,
        after,
        len(task.held_out),
        trainer.state.global_step,
        seconds,
        out / "model",
        out / METRICS_FILE,
        plot,
    )
