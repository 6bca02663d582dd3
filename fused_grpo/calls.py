"""From checked arguments to a call of the head: temperature, reference, support."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fused_grpo.backends import CHUNKED, Backend
from fused_grpo.checks import check_head, check_number, check_range, check_targets, check_tensor
from fused_grpo.groups import VocabShard
from fused_grpo.ops import HeadCall, LogprobsFunction, ReferenceCall
from fused_grpo.passes import Needs, TokenValues
from fused_grpo.routed import Route
from fused_grpo.support import make_support

SAME = "same"
ADAPTER = "adapter on the head (lora_weight)"


def make_call(
    name: str,
    target: Tensor,
    index: Tensor,
    shape: torch.Size,
    hidden: Tensor,
    weight: Tensor,
    *,
    temperature: float | Tensor,
    logit_scale: float,
    softcap: float | None,
    chunk_bytes: int | None,
    check: bool | None,
    support: dict[str, Any] | None = None,
    reference: dict[str, Any] | None = None,
    backend: Backend = CHUNKED,
    counted: Tensor | None = None,
    shard: VocabShard | None = None,
    route: Route | None = None,
) -> HeadCall:
    """`name` and `shape` are those of the ids that hold the targets [n] at `index`; with `counted`
    [n] every position is a token, and these are the ones that count.

    Whatever is out of range at a counted token raises here, or poisons its results with NaN where
    raising would make a GPU wait.
    """
    vocab = weight.shape[0] if shard is None else shard.vocab
    given = flat_temperature("temperature", temperature, shape, index, hidden, weight, counted)
    target, flat = check_targets(name, target, given, vocab, check)
    kept, bad = make_support(support or {}, shape, index, vocab, check)
    if bad is not None and not (index.device.type == "cpu" if check is None else check):
        flat = torch.where(bad, torch.nan, flat)
    call = HeadCall(
        index,
        target,
        flat,
        logit_scale,
        softcap,
        chunk_bytes,
        kept,
        backend=backend,
        counted=counted,
        shard=shard,
        route=route,
    )
    if reference is None:
        return call
    bound = make_reference(call, shape, hidden, vocab, temperature=flat, check=check, **reference)
    return replace(call, reference=bound)


def make_reference(
    call: HeadCall,
    shape: torch.Size,
    hidden: Tensor,
    vocab: int,
    *,
    temperature: float | Tensor,
    check: bool | None,
    ref_hidden: Any,
    ref_weight: Any,
    ref_bias: Any,
    ref_temperature: Any,
    ref_logit_scale: Any,
    ref_softcap: Any,
    full: bool = False,
    top_k: int | None = None,
) -> ReferenceCall:
    """The reference's head, with the policy's options where none of its own are given."""
    scale = call.logit_scale if ref_logit_scale is None else ref_logit_scale
    softcap = call.softcap if ref_softcap == SAME else ref_softcap
    check_head(ref_hidden, ref_weight, ref_bias, scale, softcap, call.chunk_bytes, prefix="ref_")
    for name, value in (("ref_hidden", ref_hidden), ("ref_weight", ref_weight)):
        check_tensor(name, value, hidden.device, floating=True)
    if ref_hidden.shape[:-1] != hidden.shape[:-1]:
        raise ValueError(
            f"ref_hidden {list(ref_hidden.shape)} and hidden {list(hidden.shape)} differ in their "
            "leading dimensions: give the reference's states at the same positions"
        )
    if ref_weight.shape[0] != vocab:
        raise ValueError(
            f"ref_weight {list(ref_weight.shape)} and weight [{vocab}, H] differ in their "
            "vocabulary: a divergence needs one and the same"
        )
    if ref_temperature is not None:
        name = "ref_temperature"
        temperature = flat_temperature(
            name, ref_temperature, shape, call.index, ref_hidden, ref_weight
        )
        _, temperature = check_targets(name, call.target, temperature, vocab, check, of=name)
    return ReferenceCall(
        _two_or_three(ref_hidden.detach()),
        ref_weight.detach(),
        None if ref_bias is None else ref_bias.detach(),
        temperature,
        scale,
        softcap,
        full,
        None if top_k is None else min(int(top_k), vocab),
    )


def flat_temperature(
    name: str,
    value: float | Tensor,
    shape: torch.Size,
    index: Tensor,
    hidden: Tensor,
    weight: Tensor,
    counted: Tensor | None = None,
) -> float | Tensor:
    """A number as it is, or [n] of a tensor in the shape of the ids, 1 where one does not count."""
    if not isinstance(value, Tensor):
        check_number(name, value, lambda t: 0 < t < math.inf, "> 0")
        check_range(name, value, hidden, weight)
        return value
    check_tensor(name, value, hidden.device, floating=True)
    if value.shape != shape:
        raise ValueError(
            f"{name} has shape {list(value.shape)}: give a number, or one per token {list(shape)}"
        )
    flat = value.detach().reshape(-1)
    return flat[index] if counted is None else torch.where(counted, flat, 1)


def counted_positions(mask: Tensor | None, hidden: Tensor) -> Tensor:
    """[n] positions in the flattened leading dimensions of `hidden` that a mask counts."""
    lead = hidden.shape[:-1]
    if mask is None:
        return torch.arange(lead.numel(), device=hidden.device)
    check_tensor("mask", mask, hidden.device, floating=None)
    if mask.shape != lead:
        raise ValueError(f"mask has shape {list(mask.shape)}; it must be {list(lead)} like hidden")
    flat = mask.reshape(-1)
    if flat.device.type == "cpu" and not ((flat == 0) | (flat == 1)).all():
        raise ValueError("mask must be boolean or hold only 0 and 1")
    return (flat != 0).nonzero().squeeze(1)


def joined(
    hidden: Tensor, weight: Tensor, lora_hidden: Tensor | None, lora_weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A head without adapter that has the same logits: both products as one, for full logits."""
    if lora_hidden is None or lora_weight is None:
        return hidden, weight
    return torch.cat([hidden, lora_hidden], -1), torch.cat([weight, lora_weight], -1)


def _two_or_three(hidden: Tensor) -> Tensor:
    return hidden if hidden.dim() in (2, 3) else hidden.reshape(-1, hidden.shape[-1])


def token_values(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    call: HeadCall,
    entropy: bool,
    lora_hidden: Tensor | None = None,
    lora_weight: Tensor | None = None,
    statistics: bool = False,
) -> TokenValues:
    """[n] values of the counted tokens; log-probabilities, entropies and KL are differentiable."""
    hidden = _two_or_three(hidden)
    lora_hidden = None if lora_hidden is None else _two_or_three(lora_hidden)
    leaves = (hidden, weight, bias, lora_hidden, lora_weight)
    call = replace(call, statistics=statistics)
    if torch.is_grad_enabled():
        reference = call.reference_tensors
        logps, h, kl, ref, size, outside, more = LogprobsFunction.apply(
            *leaves, call, entropy, *reference
        )
        return TokenValues(logps, h, ref, kl, size, outside, more)
    tokens, head = call.bind(*leaves)
    needs = Needs(entropy=entropy, statistics=statistics)
    return call.head_pass(tokens, head, needs, None, call.bind_reference())
