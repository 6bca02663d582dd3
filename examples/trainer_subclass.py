"""A subclass of `transformers.Trainer` with a GRPO loss: before, and with the fused one.

    python examples/trainer_subclass.py [--steps 6]

The rows hold completions with their advantages, as a rollout would have left them. `Before` takes
logits from the model; `After` lets the loss run inside of the model's forward, where the hooks of
DDP and FSDP fire and LoRA on the head is seen.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments

from fused_grpo import grpo_loss
from fused_grpo.integrations.models import add_head_forward
from fused_grpo.trainer.models import tiny

PROMPT = 4


class Before(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        logits = model(input_ids=inputs["ids"]).logits[:, PROMPT - 1 : -1].float()  # [B, T, V]
        targets, mask = inputs["ids"][:, PROMPT:], inputs["mask"]
        logps = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
        ratio = (logps - inputs["old_logps"]).exp()
        a = inputs["advantages"][:, None]
        loss = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
        return (loss * mask).sum() / mask.sum()


class After(Trainer):
    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        add_head_forward(model)
        super().__init__(model, *args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        def loss_of(hidden: Tensor, head: Any) -> Tensor:
            hidden = hidden[:, PROMPT - 1 : -1]
            return grpo_loss(
                hidden,
                head.weight,
                inputs["ids"][:, PROMPT:],
                inputs["advantages"],
                completion_mask=inputs["mask"],
                old_per_token_logps=inputs["old_logps"],
                **head.arguments(hidden),
            ).loss

        return model(input_ids=inputs["ids"], head_fn=loss_of)


def rows(vocabulary: int, count: int = 32) -> list[dict[str, Tensor]]:
    """Random completions of 3 to 8 tokens, padded, near a uniform policy."""
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 9, (count,), generator=g)
    return [
        {
            "ids": torch.randint(2, vocabulary, (PROMPT + 8,), generator=g),
            "mask": (torch.arange(8) < n).float(),
            "advantages": torch.randn((), generator=g),
            "old_logps": -torch.tensor(vocabulary).log() + 0.3 * torch.randn(8, generator=g),
        }
        for n in lengths
    ]


def run(kind: type[Trainer], steps: int) -> tuple[list[float], Any]:
    """(the loss that every step logged, the trained model)."""
    torch.manual_seed(0)
    model, tokenizer = tiny(torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=4,
            learning_rate=3e-3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            remove_unused_columns=False,
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = kind(model, options, train_dataset=rows(len(tokenizer)))
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], model


def main(arguments: list[str] | None = None) -> tuple[list[float], list[float], float]:
    """(losses before, losses after, largest difference of the trained weights)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6)
    steps = parser.parse_args(arguments).steps
    before, one = run(Before, steps)
    after, other = run(After, steps)
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    apart = max(float((a - b).detach().abs().max()) for a, b in pairs)
    for step, (a, b) in enumerate(zip(before, after, strict=True)):
        print(f"step {step}: {a:.7f} before, {b:.7f} after")
    print(f"weights differ by at most {apart:.1e}")
    return before, after, apart


if __name__ == "__main__":
    main()
