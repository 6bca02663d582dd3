"""Completions that are written down: what is trained on depends on the prompts alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.models import tiny
from fused_grpo.trainer.rollout import Sample, completion_mask, encode_prompts, left_pad

LENGTH = 6


class Script:
    """Stands in for sampling: completion i of a prompt is always the same, whoever asks for it.

    A process whose part of the rows begins inside a group has the end of that group.
    """

    def __init__(self, tokenizer: Any, args: GRPOConfig) -> None:
        self.tokenizer, self.args = tokenizer, args
        self.asked: list[list[str]] = []

    def __call__(
        self, model: Any, prompts: list[str], copies: int = 1, greedy: bool = False
    ) -> Sample:
        if not greedy:
            self.asked.append(list(dict.fromkeys(prompts)))
        texts = [prompt for prompt in prompts for _ in range(copies)]
        ids, mask = left_pad(encode_prompts(texts, self.tokenizer, None), 0, torch.device("cpu"))
        places = [(text, 0) for text in texts] if greedy else self._places(texts)
        completions = torch.stack([self.completion(text, i) for text, i in places])
        # not longer than the longest of this call, as from a sampler
        width = int(completion_mask(completions, [0])[0].sum(1).max())
        completions = completions[:, :width]
        return Sample(ids, mask, completions, *completion_mask(completions, [0]))

    def sync(self, model: Any) -> None:
        pass

    def close(self) -> None:
        pass

    def completion(self, prompt: str, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * index + sum(map(ord, prompt)))
        row = torch.randint(2, 60, (LENGTH,), generator=generator)
        row[1 + (index + len(prompt)) % LENGTH :] = 0  # ragged; one in LENGTH is truncated
        return row

    def _places(self, texts: list[str]) -> list[tuple[str, int]]:
        group, places = self.args.num_generations, []
        first = next((i for i, t in enumerate(texts) if t != texts[0]), len(texts))
        skipped = (group - first) if self.args.process_index and first < group else 0
        for i, text in enumerate(texts):
            before = i if text == texts[0] else texts.index(text)
            places.append((text, skipped + i if text == texts[0] else i - before))
        return places


def letters(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Differs within a group, but not where the prompt begins with "e"."""
    share = [sum(c in "abcdefghijklm" for c in text) / LENGTH for text in completions]
    return [0.5 if p[0] == "e" else r for p, r in zip(prompts, share, strict=True)]


def scripted(out: Path, prompts: list[str], reward: Any = letters, **options: Any) -> GRPOTrainer:
    """A trainer whose completions are written down, with an optimizer that shows gradients."""
    torch.manual_seed(0)
    model, tokenizer = tiny(torch.float32)
    defaults: dict[str, Any] = {
        "output_dir": str(out),
        "max_steps": 2,
        "per_device_train_batch_size": 16,
        "num_generations": 4,
        "max_completion_length": LENGTH,
        "learning_rate": 0.1,
        "optim": "sgd",  # Adam would blow up the rounding of gradients near 0
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "max_grad_norm": 1e9,
    }
    args = GRPOConfig(**{**defaults, **options})
    rows = [{"prompt": text} for text in prompts]
    run = GRPOTrainer(model, reward, args, rows, rows, tokenizer)
    run.sampler = run.collector.sampler = Script(tokenizer, args)  # type: ignore[assignment]
    run.collector.dataset = rows
    return run
