"""Short runs of the trainer on a random model over characters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.models import tiny

PROMPTS = [{"prompt": text} for text in ("ab", "hello", "x=1+2", "no", "q: a")]


def letters(completions: list[str], **_: Any) -> list[float]:
    """Differs between completions, so that groups teach something."""
    return [sum(c in "abcdefghijklm" for c in text) / 5 for text in completions]


def make(path: Path, reward: Any = letters, **options: Any) -> GRPOTrainer:
    """A trainer of two steps with two groups of four, silent unless `options` say otherwise."""
    torch.manual_seed(0)
    model, tokenizer = tiny(torch.float32)
    defaults = {
        "output_dir": str(path),
        "max_steps": 2,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "progress": "none",
        "use_cpu": True,
    }
    args = GRPOConfig(**{**defaults, **options})
    return GRPOTrainer(model, reward, args, PROMPTS, PROMPTS, tokenizer)


def lines(path: Path) -> list[dict[str, Any]]:
    """The entries of a file of JSON lines, every line of it a strict one."""

    def refuse(text: str) -> None:
        raise ValueError(f"{text} is not JSON")

    text = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line, parse_constant=refuse) for line in text]
