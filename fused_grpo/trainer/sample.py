"""Prompts as token ids, completions with what counts of them, and who makes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

Prompt = str | list[dict[str, Any]]


class RolloutError(RuntimeError):
    """Sampling failed for a reason that lies outside this process: a server, an engine."""


@dataclass(frozen=True)
class Sample:
    """Prompts on the left, completions on the right, B rows each.

    Attributes:
        prompt_ids, prompt_mask: [B, P] integers and booleans, padded on the left.
        completion_ids, completion_mask: [B, T], the mask true up to the first end of sequence, that
            one included, and nowhere after it.
        ended: [B] whether a row has an end of sequence.
        sampling_logps: [B, T] log-probabilities as the sampler computed them, NaN where it does not
            know one, or None.
        routed_experts: [B, P + T - 1, layers, K] the experts that the sampler used for each token
            but the last, whose state predicts nothing; or None.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    ended: Tensor
    sampling_logps: Tensor | None = None
    routed_experts: Tensor | None = None

    def completions(self) -> list[list[int]]:
        """The token ids that were sampled in each row, its end of sequence included."""
        rows = zip(self.completion_ids.tolist(), self.completion_mask.sum(1).tolist(), strict=True)
        return [ids[:length] for ids, length in rows]


class Rollout(Protocol):
    """Where completions come from."""

    def __call__(
        self, model: nn.Module, prompts: Sequence[Prompt], copies: int = 1, greedy: bool = False
    ) -> Sample:
        """Sample `copies` completions of each prompt, next to each other.

        Args:
            model: the policy; whoever samples elsewhere has its weights from `sync`.
            prompts: texts or conversations, those of this process.
            greedy: take the likeliest token instead; log-probabilities and experts are left out.

        Raises:
            RolloutError: there is no answer, or one that cannot be used.
        """

    def sync(self, model: nn.Module) -> None:
        """The policy's weights may have changed since the last call.

        The trainer calls it before every generation and evaluation, on all processes together.
        """

    def close(self) -> None:
        """Give back what is held outside of Python: memory of an engine, files."""


@dataclass(frozen=True)
class Completion:
    """Token ids, the end of sequence included where there is one, and their log-probabilities.

    `experts` [P + T - 1, layers, K] as lists or an array, where the sampler tells them.
    """

    ids: list[int]
    logps: list[float] | None = None
    experts: Any = None


def encode_prompts(prompts: Sequence[Prompt], tokenizer: Any, template: Any) -> list[list[int]]:
    """Token ids of texts, and of conversations through the chat template with a turn opened."""
    encoded: list[list[int]] = []
    for prompt in prompts:
        if isinstance(prompt, str):
            ids = tokenizer(prompt)["input_ids"]
        else:
            text = tokenizer.apply_chat_template(
                prompt, tokenize=False, add_generation_prompt=True, **(template or {})
            )
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise ValueError(f"the prompt {prompt!r} has no tokens: generation needs at least one")
        encoded.append(ids)
    return encoded


def left_pad(rows: list[list[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """([B, P] ids, [B, P] boolean mask). Only the mask says what is padding."""
    width = max(map(len, rows))
    ids = [[pad_id] * (width - len(row)) + row for row in rows]
    mask = [[False] * (width - len(row)) + [True] * len(row) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def positions(mask: Tensor) -> Tensor:
    """[B, L] position of each token among those of its row that are not padding."""
    return (mask.long().cumsum(1) - 1).clamp_min(0)


def completion_mask(completion_ids: Tensor, eos_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """([B, T] true up to and including the first end of sequence, [B] whether there is one).

    The padding after it is never looked at: its id is often that of the end of sequence itself.
    """
    is_eos = torch.isin(completion_ids, torch.tensor(eos_ids, device=completion_ids.device))
    seen_before = is_eos.long().cumsum(1) - is_eos.long()
    return seen_before == 0, is_eos.any(1)


def sample_of(
    prompts: list[list[int]],
    completions: Sequence[Completion],
    eos_ids: Sequence[int],
    pad_id: int,
    device: torch.device,
) -> Sample:
    """Padded tensors of prompts and their completions, one row each.

    Log-probabilities and experts are there if every completion has them.
    """
    ids, mask = left_pad(prompts, pad_id, device)
    longest = max(len(row.ids) for row in completions)

    def padded(rows: list[list[Any]], fill: Any) -> Tensor:
        return torch.tensor([row + [fill] * (longest - len(row)) for row in rows], device=device)

    completion_ids = padded([row.ids for row in completions], pad_id)
    # not read off the padding, whose id may be any token's
    counted = padded([[True] * len(row.ids) for row in completions], False)
    counted &= completion_mask(completion_ids, eos_ids)[0]
    is_end = torch.isin(completion_ids, torch.tensor(eos_ids, device=device))
    logps = [row.logps for row in completions if row.logps is not None]
    experts = [row.experts for row in completions if row.experts is not None]
    whole = len(experts) == len(completions)
    return Sample(
        ids,
        mask,
        completion_ids,
        counted,
        (is_end & counted).any(1),
        padded(logps, math.nan) if len(logps) == len(completions) else None,
        _padded_experts(experts, prompts, ids.shape[1], longest).to(device) if whole else None,
    )


def _padded_experts(
    experts: list[Any], prompts: list[list[int]], width: int, longest: int
) -> Tensor:
    """[B, width + longest - 1, layers, K], 0 where there is no token."""
    rows = [torch.as_tensor(row, dtype=torch.int16) for row in experts]
    out = rows[0].new_zeros(len(rows), width + longest - 1, *rows[0].shape[1:])
    for place, row, prompt in zip(out, rows, prompts, strict=True):
        start = width - len(prompt)
        place[start : start + len(row)] = row
    return out
