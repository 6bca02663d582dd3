"""Transformers' continuous batching: rows join and leave a running batch, over a paged cache."""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from torch import nn

from fused_grpo.integrations.models import causal_lm
from fused_grpo.trainer.config import GRPOConfig
from fused_grpo.trainer.rollout import TokenRollout, only_own_options
from fused_grpo.trainer.sample import Completion, RolloutError

PAGE = 16  # tokens of the cache that are given out together, where there is no GPU to ask


class ContinuousBatching(TokenRollout):
    """`generate_batch` of the policy itself.

    Its log-probabilities are those it samples with, over what top_k, top_p and min_p leave. On a
    GPU the size of its cache follows from the memory that is free, elsewhere from the prompts.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, args: GRPOConfig) -> None:
        super().__init__(model, tokenizer, args)
        given = args.transformers_continuous_batching_config or {}
        self.options: dict[str, Any] = json.loads(given) if isinstance(given, str) else dict(given)
        if not hasattr(causal_lm(model), "generate_batch"):
            raise ValueError(f"{type(causal_lm(model)).__name__} has no generate_batch")

    @torch.no_grad()
    def complete(
        self, model: nn.Module, prompts: list[list[int]], copies: int, greedy: bool
    ) -> list[Completion]:
        from transformers import ContinuousBatchingConfig

        model.eval()
        inner = causal_lm(model)
        wants_logps = self.args.reads_sampler and not greedy
        rows = [prompt for prompt in prompts for _ in range(copies)]
        options = {
            "return_logprobs": wants_logps,
            # or it would be drawn in another way than the rest of a run
            "seed": int(torch.randint(2**31, ())),
            **self._sizes(rows, inner.device),
            **self.options,
        }
        with only_own_options(model):
            found = inner.generate_batch(
                rows,
                generation_config=self.generation_config(greedy),
                continuous_batching_config=ContinuousBatchingConfig(**options),
                progress_bar=False,
            )
        answers = list(found.values())
        failed = next((answer.error for answer in answers if answer.error is not None), None)
        if failed is not None or len(answers) != len(rows):
            raise RolloutError(
                f"continuous batching finished {len(answers)} of {len(rows)} completions: {failed}"
            )
        return [_completion(answer, wants_logps) for answer in answers]

    def _sizes(self, rows: list[list[int]], device: torch.device) -> dict[str, Any]:
        if device.type == "cuda":
            return {}
        longest = max(map(len, rows)) + self.args.max_completion_length
        return {
            "page_size": PAGE,
            "num_blocks": len(rows) * math.ceil(longest / PAGE) + 1,
            "max_batch_tokens": max(256, longest),
            "use_cuda_graph": False,
            "use_async_batching": False,
        }


def _completion(answer: Any, wants_logps: bool) -> Completion:
    ids = list(answer.generated_tokens)
    if not wants_logps:
        return Completion(ids)
    if len(answer.logprobs) != len(ids):
        raise RolloutError(
            f"continuous batching: {len(answer.logprobs)} log-probabilities for {len(ids)} tokens"
        )
    return Completion(ids, list(answer.logprobs))
