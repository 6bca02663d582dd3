"""Two processes train as one does: the same losses, the same weights on both, groups cut in two.

This file is also the program that each process runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.models import tiny
from fused_grpo.trainer.rollout import Sample, completion_mask, encode_prompts, left_pad

PROMPTS = [{"prompt": text} for text in ("ab", "hello", "x=1+2", "no")]
GROUP, LENGTH, STEPS = 8, 5, 3
LOSS_TYPES = ("dapo", "grpo")
LOGGED = ("loss", "grad_norm", "reward", "reward_std", "kl", "entropy", "num_tokens")


class Script:
    """Stands in for sampling: completion i of a prompt is always the same, whoever asks for it."""

    def __init__(self, tokenizer: Any, rank: int) -> None:
        self.tokenizer, self.rank = tokenizer, rank

    def __call__(self, model: Any, prompts: list[str], copies: int = 1) -> Sample:
        rows = encode_prompts(prompts, self.tokenizer, None)
        ids, mask = left_pad(rows, 0, torch.device("cpu"))
        ids, mask = ids.repeat_interleave(copies, 0), mask.repeat_interleave(copies, 0)
        parts = []
        for row in rows:
            generator = torch.Generator().manual_seed(sum(row))
            group = torch.randint(2, 60, (GROUP, LENGTH), generator=generator)
            for i, row_of_group in enumerate(group):
                row_of_group[1 + i % LENGTH :] = 0  # ragged
            parts.append(group[self.rank * copies :][:copies])
        completions = torch.cat(parts)
        return Sample(ids, mask, completions, *completion_mask(completions, [0]))


def letters(completions: list[str], **_: Any) -> list[float]:
    return [sum(c in "abcdefghijklm" for c in text) / LENGTH for text in completions]


def train(out: Path, size: int, loss_type: str) -> GRPOTrainer:
    torch.manual_seed(0)
    model, tokenizer = tiny(torch.float32)
    args = GRPOConfig(
        str(out / loss_type),
        max_steps=STEPS,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=2 if size < GROUP else 1,
        num_generations=GROUP,
        max_completion_length=LENGTH,
        learning_rate=0.1,
        optim="sgd",  # Adam would blow up the rounding of gradients near 0
        loss_type=loss_type,
        beta=0.1,
        save_strategy="no",
        disable_tqdm=True,
        log_completions=True,
        use_cpu=True,
        ddp_backend="gloo" if "RANK" in os.environ else None,
    )
    run = GRPOTrainer(model, letters, args, PROMPTS, PROMPTS, tokenizer)
    run.collector.sampler = Script(tokenizer, args.process_index)  # type: ignore[assignment]
    run.train()
    return run


def completions(folder: Path) -> list[dict[str, Any]]:
    """What was logged of them, in an order that does not depend on who sampled what."""
    text = (folder / "completions.jsonl").read_text()
    entries = [json.loads(line) for line in text.splitlines()]
    return sorted(entries, key=lambda e: (e["step"], e["prompt"], e["completion"], e["length"]))


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    """D1, R3, R12, T3: Gradients are averaged, and groups are cut in two."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    done = subprocess.run(
        [*command, __file__, str(tmp_path)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for loss_type in LOSS_TYPES:
        single = train(tmp_path / "one", GROUP, loss_type)
        files = [tmp_path / f"{loss_type}-{rank}.pt" for rank in (0, 1)]
        first, second = (torch.load(file, weights_only=False) for file in files)
        for name, parameter in single.model.state_dict().items():
            assert torch.equal(first["weights"][name], second["weights"][name]), name
            torch.testing.assert_close(
                first["weights"][name], parameter, atol=1e-6, rtol=1e-5, msg=name
            )
        whole, halves = (completions(tmp_path / n / loss_type) for n in ("one", "two"))
        assert len(whole) == GROUP * STEPS
        for one, two in zip(whole, halves, strict=True):
            assert two.pop("advantage") == pytest.approx(one.pop("advantage"), abs=1e-6)
            assert two == one
        logged = [entry for entry in single.state.log_history if "grad_norm" in entry]
        for one, two in zip(logged, first["logs"], strict=True):
            for name in LOGGED:
                assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name


def main(out: str) -> None:
    torch.set_num_threads(1)
    for loss_type in LOSS_TYPES:
        run = train(Path(out) / "two", GROUP // 4, loss_type)
        logged = [entry for entry in run.state.log_history if "grad_norm" in entry]
        weights = run.accelerator.unwrap_model(run.model_wrapped).state_dict()
        file = Path(out) / f"{loss_type}-{run.args.process_index}.pt"
        torch.save({"weights": weights, "logs": logged}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
