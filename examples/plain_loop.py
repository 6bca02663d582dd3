"""A plain PyTorch loop of reinforcement learning: its loss before, and with the fused one.

    python examples/plain_loop.py [--steps 8]

Two runs from the same seed, one with each loss, on a tiny random model that is rewarded for vowels.
Everything but the loss is shared, and the losses agree to rounding. What changes is marked.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fused_grpo import group_relative_advantages, grpo_loss
from fused_grpo.trainer.models import tiny

GROUP, PROMPT, NEW = 8, 5, 10
EPSILON, BETA, TEMPERATURE = 0.2, 0.04, 0.9


@dataclass
class Batch:
    """A group of completions of one prompt."""

    ids: Tensor  # [B, PROMPT + NEW]
    advantages: Tensor  # [B]
    mask: Tensor  # [B, NEW], up to the first end of sequence
    old_logps: Tensor  # [B, NEW] of the policy that sampled
    ref_logps: Tensor  # [B, NEW]

    @property
    def completion_ids(self) -> Tensor:
        return self.ids[:, PROMPT:]


# --- before -----------------------------------------------------------------------------------


def loss_before(model: Any, batch: Batch) -> Tensor:
    logits = model(input_ids=batch.ids).logits[:, PROMPT - 1 : -1].float()  # [B, T, V]
    logps = (logits / TEMPERATURE).log_softmax(-1)
    logps = logps.gather(-1, batch.completion_ids[..., None])[..., 0]
    ratio = (logps - batch.old_logps).exp()
    a = batch.advantages[:, None]
    policy = -torch.minimum(ratio * a, ratio.clamp(1 - EPSILON, 1 + EPSILON) * a)
    d = batch.ref_logps - logps
    loss = policy + BETA * (d.exp() - d - 1)
    return (loss * batch.mask).sum() / batch.mask.sum()


# --- after ------------------------------------------------------------------------------------


def loss_after(model: Any, batch: Batch) -> Tensor:
    hidden = model.model(input_ids=batch.ids).last_hidden_state[:, PROMPT - 1 : -1]  # [B, T, H]
    return grpo_loss(
        hidden,
        model.lm_head.weight,
        batch.completion_ids,
        batch.advantages,
        completion_mask=batch.mask,
        old_per_token_logps=batch.old_logps,
        ref_per_token_logps=batch.ref_logps,
        epsilon_low=EPSILON,
        beta=BETA,
        temperature=TEMPERATURE,
    ).loss


# --- the rest, which stays as it is -------------------------------------------------------------


@torch.no_grad()
def logps_of(model: Any, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits[:, PROMPT - 1 : -1].float() / TEMPERATURE
    return logits.log_softmax(-1).gather(-1, ids[:, PROMPT:, None])[..., 0]


@torch.no_grad()
def sample(model: Any, reference: Any, tokenizer: Any) -> Batch:
    prompt = torch.randint(2, len(tokenizer), (1, PROMPT)).expand(GROUP, -1)
    ids = prompt
    for _ in range(NEW):
        p = (model(input_ids=ids).logits[:, -1].float() / TEMPERATURE).softmax(-1)
        ids = torch.cat([ids, torch.multinomial(p, 1)], 1)
    completions = ids[:, PROMPT:]
    ended = (completions == tokenizer.eos_token_id).long()
    mask = (ended.cumsum(1) - ended == 0).long()
    texts = [
        tokenizer.decode(row[keep.bool()]) for row, keep in zip(completions, mask, strict=True)
    ]
    rewards = torch.tensor([sum(c in "aeiou" for c in text) / NEW for text in texts])
    advantages = group_relative_advantages(rewards, GROUP)
    return Batch(ids, advantages, mask, logps_of(model, ids), logps_of(reference, ids))


def train(loss_of: Callable[[Any, Batch], Tensor], steps: int) -> tuple[list[float], Any]:
    """(loss of every update, the trained model)."""
    torch.manual_seed(0)
    model, tokenizer = tiny(torch.float32)
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        batch = sample(model, reference, tokenizer)
        for _ in range(2):  # the second time the ratios are no longer 1
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, model


def main(arguments: list[str] | None = None) -> tuple[list[float], list[float], float]:
    """(losses before, losses after, largest difference of the trained weights)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8, help="batches, two updates each")
    steps = parser.parse_args(arguments).steps
    before, one = train(loss_before, steps)
    after, other = train(loss_after, steps)
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    apart = max(float((a - b).detach().abs().max()) for a, b in pairs)
    print(f"{'update':>6} {'before':>12} {'after':>12}")
    for update, (a, b) in enumerate(zip(before, after, strict=True)):
        print(f"{update:6} {a:12.7f} {b:12.7f}")
    print(f"weights differ by at most {apart:.1e}")
    return before, after, apart


if __name__ == "__main__":
    main()
