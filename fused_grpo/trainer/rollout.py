"""Sampling in the process that trains, with transformers' `generate`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fused_grpo.integrations.models import causal_lm, is_sharded
from fused_grpo.integrations.routing import recording
from fused_grpo.trainer.config import GRPOConfig
from fused_grpo.trainer.sample import (
    Completion,
    Prompt,
    Rollout,
    RolloutError,
    Sample,
    completion_mask,
    encode_prompts,
    left_pad,
    positions,
    sample_of,
)

__all__ = [
    "Completion",
    "LogprobRecorder",
    "Prompt",
    "Rollout",
    "RolloutError",
    "Sample",
    "Sampler",
    "TokenRollout",
    "check_sample",
    "completion_mask",
    "encode_prompts",
    "left_pad",
    "positions",
    "sample_of",
]


def check_sample(sample: Sample, args: GRPOConfig, model: nn.Module, rows: int) -> None:
    """ValueError where a rollout leaves out what the options are about.

    RolloutError: it has token ids that the model does not have, log-probabilities of another shape,
    or not as many completions as `rows`.
    """
    config = getattr(causal_lm(model), "config", None)
    vocab = getattr(config and config.get_text_config(), "vocab_size", None)
    ids = sample.completion_ids[sample.completion_mask]
    if vocab is not None and ids.numel():
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocab:
            raise RolloutError(
                f"the rollout sampled token id {low if low < 0 else high}, and the model has ids "
                f"from 0 to {vocab - 1}: does the sampler run the same model and tokenizer?"
            )
    logps = sample.sampling_logps
    if logps is not None and logps.shape != sample.completion_ids.shape:
        raise RolloutError(
            f"the rollout reports log-probabilities of shape {list(logps.shape)} for token ids of "
            f"shape {list(sample.completion_ids.shape)}"
        )
    for wanted, value, what in (
        (args.reads_sampler, sample.sampling_logps, "log-probabilities, which a correction reads"),
        (args.router_replay == "R3", sample.routed_experts, "experts, which router_replay reads"),
    ):
        if wanted and value is None:
            raise ValueError(f"the rollout reports no {what}")
    if len(sample.completion_ids) != rows:
        raise RolloutError(
            f"the rollout made {len(sample.completion_ids)} completions where {rows} were asked for"
        )


class TokenRollout:
    """What every rollout has in common: prompts become token ids, tokens become a `Sample`.

    Whoever samples from token ids defines `complete`.

    Attributes:
        eos_ids: a completion ends with one of these.
        extra: `generation_kwargs` that are not ours.
        truncates: whether log-probabilities are over what top_k, top_p and min_p left; None: as the
            loss takes them.
    """

    truncates: bool | None = True

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
        self._check_logps()

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        return encode_prompts(prompts, self.tokenizer, self.args.chat_template_kwargs)

    def __call__(
        self, model: nn.Module, prompts: Sequence[Prompt], copies: int = 1, greedy: bool = False
    ) -> Sample:
        """See `Rollout`."""
        ids = self.encode(prompts)
        rows = self.complete(model, ids, copies, greedy)
        repeated = [row for row in ids for _ in range(copies)]
        device = next(model.parameters()).device
        return sample_of(repeated, rows, self.eos_ids, self.pad_id, device)

    def complete(
        self, model: nn.Module, prompts: list[list[int]], copies: int, greedy: bool
    ) -> list[Completion]:
        """`copies` completions of each prompt, next to each other."""
        raise NotImplementedError

    def generation_config(self, greedy: bool) -> GenerationConfig:
        """Of transformers, for those who sample with the policy itself."""
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

    def sync(self, model: nn.Module) -> None:
        """Nothing to do where the policy itself samples."""

    def close(self) -> None:
        """Nothing is held."""

    def _check_logps(self) -> None:
        args = self.args
        if not args.reads_sampler or self.truncates is None:
            return
        rules = f"top_k={args.top_k}, top_p={args.top_p}, min_p={args.min_p}"
        if self.truncates and args.truncates_sampling and not args.keep_sampling_mask:
            raise ValueError(
                f"{type(self).__name__} reports log-probabilities over the tokens that {rules} "
                "leave, and the loss takes them over the whole vocabulary: set "
                "keep_sampling_mask=True, or sample from all tokens"
            )
        if args.keep_sampling_mask and not self.truncates:
            raise ValueError(
                f"{type(self).__name__} reports log-probabilities over the whole vocabulary, and "
                f"with keep_sampling_mask the loss takes them over what {rules} leave"
            )
        if args.repetition_penalty != 1 and self.truncates:
            raise ValueError(
                f"repetition_penalty={args.repetition_penalty} is in the log-probabilities of "
                f"{type(self).__name__} and not in those of the loss"
            )


class Sampler(TokenRollout):
    """Completions by transformers' `generate`, with the keys and values of each prompt shared."""

    truncates = None  # as the loss takes them

    @torch.no_grad()
    def __call__(
        self, model: nn.Module, prompts: Sequence[Prompt], copies: int = 1, greedy: bool = False
    ) -> Sample:
        """See `Rollout`. Leaves `model` in eval mode."""
        model.eval()
        device = next(model.parameters()).device
        ids, mask = left_pad(self.encode(prompts), self.pad_id, device)
        record = self.args.router_replay == "R3" and not greedy
        with recording(model, record) as prefix:
            cache = _shared_prefix(model, ids, mask, copies) if copies > 1 else {}
        shared = None if prefix is None else prefix.experts(len(ids))
        ids, mask = ids.repeat_interleave(copies, 0), mask.repeat_interleave(copies, 0)
        recorder = None
        if self.args.reads_sampler and not greedy:
            recorder = LogprobRecorder(self.args.temperature, self.args.sampler_support)
            cache["logits_processor"] = LogitsProcessorList([recorder])
        extra: dict[str, Any] = {"synced_gpus": True} if is_sharded(model) else {}
        with only_own_options(model), recording(model, record) as tape:
            out = model.generate(  # type: ignore[operator]
                input_ids=ids,
                attention_mask=mask.long(),
                generation_config=self.generation_config(greedy),
                **cache,
                **extra,
                **_without_router(model),
            )
        completion_ids = out[:, ids.shape[1] :]
        counted, ended = completion_mask(completion_ids, self.eos_ids)
        logps = None if recorder is None else recorder.finish(out)
        experts = None
        if record:
            experts = tape.experts(len(ids))
            if shared is not None:
                experts = torch.cat([shared.repeat_interleave(copies, 0), experts], 1)
            experts = experts[:, : out.shape[1] - 1]  # a rank may make passes for others' sake
        return Sample(ids, mask, completion_ids, counted, ended, logps, experts)


# in the order in which `generate` applies them, which is that of GRPOConfig.sampler_support
WARPERS: dict[str, Callable[[Any], LogitsProcessor]] = {
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
}


class LogprobRecorder(LogitsProcessor):
    """Log-probabilities of the tokens that `generate` samples, at its temperature.

    As the loss takes them: of the whole distribution, before top_p, top_k and min_p, or over what
    these leave where `support` has them.
    """

    def __init__(self, temperature: float, support: dict[str, Any] | None = None) -> None:
        self.temperature = temperature
        self._warpers = [WARPERS[name](value) for name, value in (support or {}).items()]
        self._steps: list[Tensor] = []
        self._last: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._take(input_ids)
        tempered = scores.float() / self.temperature
        for warper in self._warpers:
            tempered = warper(input_ids, tempered)
        self._last = torch.log_softmax(tempered, -1)
        return scores

    def finish(self, ids: Tensor) -> Tensor:
        """[B, T] of all tokens, once `generate` has returned `ids`."""
        self._take(ids)
        return torch.cat(self._steps, 1)

    def _take(self, ids: Tensor) -> None:
        if self._last is not None:
            self._steps.append(self._last.gather(1, ids[:, -1:]))


@contextmanager
def only_own_options(model: nn.Module) -> Iterator[None]:
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
