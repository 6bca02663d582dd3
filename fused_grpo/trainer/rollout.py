"""From prompts to completions: encoding, sampling with `generate`, and what of it counts."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
)

from fused_grpo.integrations.models import causal_lm, is_sharded
from fused_grpo.trainer.config import GRPOConfig

Prompt = str | list[dict[str, Any]]


@dataclass(frozen=True)
class Sample:
    """Prompts on the left, completions on the right, B rows each.

    Attributes:
        prompt_ids, prompt_mask: [B, P] integers and booleans, padded on the left.
        completion_ids, completion_mask: [B, T], the mask true up to the first end of sequence, that
            one included, and nowhere after it.
        ended: [B] whether a row has an end of sequence.
        sampling_logps: [B, T] log-probabilities as the sampler computed them, or None.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    ended: Tensor
    sampling_logps: Tensor | None = None

    def completions(self) -> list[list[int]]:
        """The token ids that were sampled in each row, its end of sequence included."""
        rows = zip(self.completion_ids.tolist(), self.completion_mask.sum(1).tolist(), strict=True)
        return [ids[:length] for ids, length in rows]


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


class Sampler:
    """Completions of a model under the sampling options of a `GRPOConfig`."""

    def __init__(self, model: nn.Module, tokenizer: Any, args: GRPOConfig) -> None:
        self.args, self.tokenizer = args, tokenizer
        self.extra: dict[str, Any] = dict(args.generation_kwargs or {})  # type: ignore[arg-type]
        known = getattr(causal_lm(model), "generation_config", None)
        eos = self.extra.pop("eos_token_id", None)
        if eos is None and known is not None:
            eos = known.eos_token_id
        if eos is None:
            eos = tokenizer.eos_token_id
        if eos is None:
            raise ValueError(
                "neither the model nor processing_class has an end-of-sequence token: set "
                "generation_kwargs={'eos_token_id': ...}"
            )
        self.eos_ids = [int(e) for e in (eos if isinstance(eos, (list, tuple)) else [eos])]
        pad = tokenizer.pad_token_id
        self.pad_id = self.eos_ids[0] if pad is None else int(pad)

    @torch.no_grad()
    def __call__(
        self, model: nn.Module, prompts: Sequence[Prompt], copies: int = 1, greedy: bool = False
    ) -> Sample:
        """Sample `copies` completions of each prompt, next to each other.

        Leaves `model` in eval mode.

        Args:
            model: with a `generate` method.
            prompts: texts or conversations.
            greedy: take the likeliest token instead.
        """
        model.eval()
        device = next(model.parameters()).device
        rows = encode_prompts(prompts, self.tokenizer, self.args.chat_template_kwargs)
        ids, mask = left_pad(rows, self.pad_id, device)
        extra: dict[str, Any] = {"synced_gpus": True} if is_sharded(model) else {}
        cache = _shared_prefix(model, ids, mask, copies) if copies > 1 else {}
        ids, mask = ids.repeat_interleave(copies, 0), mask.repeat_interleave(copies, 0)
        recorder = None
        if self.args.reads_sampler and not greedy:
            recorder = LogprobRecorder(self.args.temperature)
            cache["logits_processor"] = LogitsProcessorList([recorder])
        with _only_own_options(model):
            out = model.generate(  # type: ignore[operator]
                input_ids=ids,
                attention_mask=mask.long(),
                generation_config=self._generation_config(greedy),
                **cache,
                **extra,
                **_without_router(model),
            )
        completion_ids = out[:, ids.shape[1] :]
        counted, ended = completion_mask(completion_ids, self.eos_ids)
        logps = None if recorder is None else recorder.finish(out)
        return Sample(ids, mask, completion_ids, counted, ended, logps)

    def _generation_config(self, greedy: bool) -> GenerationConfig:
        args = self.args
        sampling: dict[str, Any] = {"do_sample": not greedy}
        if not greedy:
            sampling.update(
                temperature=args.temperature,
                top_p=args.top_p,
                top_k=args.top_k,
                min_p=args.min_p,
                repetition_penalty=args.repetition_penalty,
            )
        return GenerationConfig(
            max_new_tokens=args.max_completion_length,
            eos_token_id=self.eos_ids,
            pad_token_id=self.pad_id,
            **sampling,
            **self.extra,
        )


class LogprobRecorder(LogitsProcessor):
    """Log-probabilities of the tokens that `generate` samples, at its temperature.

    Of the whole distribution, as the loss takes them: before top_p, top_k and min_p.
    """

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature
        self._steps: list[Tensor] = []
        self._last: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._take(input_ids)
        self._last = torch.log_softmax(scores.float() / self.temperature, -1)
        return scores

    def finish(self, ids: Tensor) -> Tensor:
        """[B, T] of all tokens, once `generate` has returned `ids`."""
        self._take(ids)
        return torch.cat(self._steps, 1)

    def _take(self, ids: Tensor) -> None:
        if self._last is not None:
            self._steps.append(self._last.gather(1, ids[:, -1:]))


def completion_mask(completion_ids: Tensor, eos_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """([B, T] true up to and including the first end of sequence, [B] whether there is one).

    The padding after it is never looked at: its id is often that of the end of sequence itself.
    """
    is_eos = torch.isin(completion_ids, torch.tensor(eos_ids, device=completion_ids.device))
    seen_before = is_eos.long().cumsum(1) - is_eos.long()
    return seen_before == 0, is_eos.any(1)


@contextmanager
def _only_own_options(model: nn.Module) -> Iterator[None]:
    """Keep `generate` from filling in what the checkpoint's authors sample with (top_k=20, ...)."""
    inner: Any = causal_lm(model)
    saved = inner.generation_config
    inner.generation_config = GenerationConfig(
        bos_token_id=saved.bos_token_id, decoder_start_token_id=saved.decoder_start_token_id
    )
    try:
        yield
    finally:
        inner.generation_config = saved


def _without_router(model: nn.Module) -> dict[str, Any]:
    """Keeps a mixture of experts from making its auxiliary loss of single tokens."""
    routed = getattr(causal_lm(model).config, "output_router_logits", False)
    return {"output_router_logits": False} if routed else {}


def _shared_prefix(model: nn.Module, ids: Tensor, mask: Tensor, copies: int) -> dict[str, Any]:
    """A cache of each prompt but its last token, computed once for all copies.

    An empty dict where the model keeps another kind of state than keys and values: `generate` then
    reads every copy of the prompt, which gives the same result.
    """
    if is_sharded(model):  # all ranks must make the same forward passes, whatever their prompts
        return {}
    inner: Any = causal_lm(model)
    known = inspect.signature(inner.base_model.forward).parameters
    name = "cache" if "cache" in known else "past_key_values"
    if ids.shape[1] < 2 or name not in known or not _keeps_keys_and_values(inner):
        return {}
    cache = DynamicCache(config=inner.config)
    inputs: dict[str, Any] = {"input_ids": ids[:, :-1], "attention_mask": mask[:, :-1].long()}
    if "position_ids" in known:
        inputs["position_ids"] = positions(mask[:, :-1])
    # the wrapper's forward, not the backbone's: hooks of adapters and of sharding live there
    inputs |= {name: cache} | _without_router(model)
    model(**inputs, use_cache=True, head_fn=lambda hidden, head: None)
    cache.batch_repeat_interleave(copies)
    return {name: cache}


def _keeps_keys_and_values(model: Any) -> bool:
    cache = DynamicCache(config=model.config)
    known = ("DynamicLayer", "DynamicSlidingWindowLayer")
    return all(type(layer).__name__ in known for layer in cache.layers)
