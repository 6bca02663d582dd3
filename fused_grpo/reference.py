"""The specification: the GRPO loss on full logits, in plain torch with autograd.

Everything the fused code computes stands here once more, written in the most direct way: with
float64 inputs it is the oracle of the tests, and it is the eager baseline of the benchmarks. It
allocates the logits of all counted tokens, keeps them for the backward, and validates nothing.

It computes in the dtype of ``hidden`` and ``weight``, at least float32. Masked tokens are *selected
away* before anything else, so that whatever stands at their positions, NaN included, is inert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class ReferenceOutput:
    """What :func:`reference_loss` and :func:`reference_policy_loss` return.

    ``loss`` is the 0-d weighted sum over the counted tokens. The per-token fields have the shape of
    the token ids, hold zeros where masked, and stay attached to the graph; ``per_token_loss`` is
    without the weights. ``entropy`` is None unless asked for. ``metrics`` are detached 0-d tensors.
    """

    loss: Tensor
    per_token_loss: Tensor
    per_token_logps: Tensor
    entropy: Tensor | None
    metrics: dict[str, Tensor]


REFERENCE_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo")


def reference_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of ``targets`` [...] under ``hidden`` [..., H] and ``weight`` [V, H].

    Returns ``(logps, entropy or None)``, both of the shape of ``targets``; zero and without
    gradient where the target is ``ignore_index``. ``temperature``: a number, or one per target.
    """
    dtype = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
    counted = targets != ignore_index
    logits = hidden[counted].to(dtype) @ weight.to(dtype).T
    if bias is not None:
        logits = logits + bias.to(dtype)
    logits = logits * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if isinstance(temperature, Tensor):
        temperature = temperature.to(dtype).expand(targets.shape)[counted].unsqueeze(-1)
    log_p = torch.log_softmax(logits / temperature, dim=-1)

    logps = log_p.gather(-1, targets[counted].long().unsqueeze(-1)).squeeze(-1)
    zeros = torch.zeros(targets.shape, dtype=dtype, device=hidden.device)
    if not entropy:
        return zeros.masked_scatter(counted, logps), None
    # p log p is 0 at p = 0; replacing log p = -inf keeps 0 * inf out of the value and the gradient.
    plogp = log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)
    return zeros.masked_scatter(counted, logps), zeros.masked_scatter(counted, -plogp.sum(-1))


def reference_loss(
    hidden: Tensor,
    weight: Tensor,
    completion_ids: Tensor,
    advantages: Tensor,
    *,
    completion_mask: Tensor | None = None,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    **options: Any,
) -> ReferenceOutput:
    """The loss from hidden states: :func:`reference_logprobs`, then :func:`reference_policy_loss`.

    ``hidden`` is [B, T, H] with ids [B, T], or packed, with ``cu_seqlens`` among the ``options`` of
    :func:`reference_policy_loss`: [N, H] or [1, N, H] with ids [N] or [1, N]. ``entropy=True``
    reports entropies; they are also computed when ``entropy_coef`` needs them.
    """
    if completion_mask is None:
        completion_mask = torch.ones_like(completion_ids)
    logps, entropies = reference_logprobs(
        hidden.reshape(*completion_ids.shape, hidden.shape[-1]),
        weight,
        completion_ids.long().masked_fill(completion_mask == 0, -100),
        bias=bias,
        temperature=temperature,
        logit_scale=logit_scale,
        softcap=softcap,
        entropy=entropy or options.get("entropy_coef", 0.0) != 0,
    )
    return reference_policy_loss(
        logps, advantages, entropies=entropies, completion_mask=completion_mask, **options
    )


def reference_policy_loss(
    per_token_logps: Tensor,
    advantages: Tensor,
    *,
    entropies: Tensor | None = None,
    completion_mask: Tensor | None = None,
    old_per_token_logps: Tensor | None = None,
    ref_per_token_logps: Tensor | None = None,
    importance_sampling_ratio: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    loss_type: str = "dapo",
    num_items_in_batch: float | Tensor | None = None,
    max_completion_length: int | None = None,
    **options: Any,
) -> ReferenceOutput:
    """The loss from log-probabilities [B, T], or [N] packed by ``cu_seqlens`` [S + 1].

    ``advantages`` and ``importance_sampling_ratio`` hold one value per sequence or one per token,
    the other tensors one per token. ``options`` are those of :func:`token_losses`.
    """
    shape = per_token_logps.shape
    dtype = torch.promote_types(per_token_logps.dtype, torch.float32)
    sequence, num_sequences = _sequence_of_each_token(per_token_logps, cu_seqlens)
    if completion_mask is None:
        completion_mask = torch.ones_like(per_token_logps)
    counted = completion_mask.reshape(-1) != 0
    sequence = sequence[counted]
    lengths = torch.bincount(sequence, minlength=num_sequences)

    def per_token(x: Tensor) -> Tensor:
        return x.reshape(-1)[counted].to(dtype)

    def per_sequence_or_token(x: Tensor) -> Tensor:
        return x.reshape(-1)[sequence].to(dtype) if x.numel() == num_sequences else per_token(x)

    logp = per_token(per_token_logps)
    losses: Callable[..., tuple[Tensor, dict[str, Tensor | None]]] = partial(
        token_losses,
        old=logp.detach() if old_per_token_logps is None else per_token(old_per_token_logps),
        ref=None if ref_per_token_logps is None else per_token(ref_per_token_logps),
        advantage=per_sequence_or_token(advantages),
        correction=(
            1.0
            if importance_sampling_ratio is None
            else per_sequence_or_token(importance_sampling_ratio)
        ),
        sequence=sequence,
        lengths=lengths,
        **options,
    )
    divisor = {
        "grpo": lambda: lengths[sequence] * num_sequences,
        "bnpo": lambda: len(sequence),
        "dr_grpo": lambda: num_sequences * max_completion_length,  # type: ignore[operator]
        "dapo": lambda: len(sequence) if num_items_in_batch is None else num_items_in_batch,
    }[loss_type]()
    divisor = torch.as_tensor(divisor, dtype=dtype, device=logp.device).clamp(min=1)

    entropy = None if entropies is None else per_token(entropies)
    token_loss, parts = losses(logp, entropy)
    # Once more on leaves: which tokens would send nothing back to the head?
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (logp, entropy) if x is not None]
        again, _ = losses(leaves[0], (*leaves[1:], None)[0])
        grads = torch.autograd.grad((again / divisor).sum(), leaves, allow_unused=True)
    idle = torch.stack([g == 0 for g in grads if g is not None]).all(dim=0)
    parts |= {"entropy": entropy, "zero_coefficient_fraction": idle}

    def restore(x: Tensor) -> Tensor:
        zeros = torch.zeros(shape, dtype=dtype, device=logp.device)
        return zeros.masked_scatter(counted.view(shape), x)

    return ReferenceOutput(
        loss=(token_loss / divisor).sum(),
        per_token_loss=restore(token_loss),
        per_token_logps=restore(logp),
        entropy=None if entropy is None else restore(entropy),
        metrics=_metrics(parts),
    )


def _sequence_of_each_token(tokens: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, int]:
    """Index of the sequence that each token belongs to [N], and the number of sequences."""
    if cu_seqlens is None:
        rows, width = tokens.shape
        return torch.arange(rows, device=tokens.device).repeat_interleave(width), rows
    lengths = cu_seqlens.long().diff()
    return torch.arange(len(lengths), device=tokens.device).repeat_interleave(lengths), len(lengths)


def token_losses(
    logp: Tensor,
    entropy: Tensor | None,
    *,
    old: Tensor,
    ref: Tensor | None,
    advantage: Tensor,
    correction: Tensor | float,
    sequence: Tensor,
    lengths: Tensor,
    importance_sampling_level: str = "token",
    epsilon_low: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    use_bias_correction_kl: bool = False,
    entropy_coef: float = 0.0,
    log_ratio_clamp: float | None = 20.0,
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Loss of each counted token, vectors [N] throughout, and what the metrics are made of."""
    limit = torch.inf if log_ratio_clamp is None else log_ratio_clamp
    low, high = 1 - epsilon_low, 1 + (epsilon_low if epsilon_high is None else epsilon_high)

    log_ratio = logp - old
    if importance_sampling_level == "sequence":
        sums = torch.zeros_like(lengths, dtype=logp.dtype).index_add(0, sequence, log_ratio)
        log_ratio = (sums / lengths.clamp(min=1))[sequence]
    ratio = log_ratio.clamp(-limit, limit).exp()

    unclipped = ratio if delta is None else ratio.clamp(max=delta)
    loss = -torch.minimum(unclipped * advantage, ratio.clamp(low, high) * advantage) * correction
    kl = None
    if ref is not None:
        d = (ref - logp).clamp(-limit, limit)
        kl = d.exp() - d - 1
        kl = kl * ratio if use_bias_correction_kl else kl
        loss = loss + beta * kl
    if entropy is not None:
        loss = loss - entropy_coef * entropy
    return loss, {
        "ratio": ratio,
        "log_ratio": log_ratio,
        "kl": kl,
        "log_ratio/clamped": log_ratio.abs() > limit,
        "clip_ratio/low_mean": (advantage < 0) & (ratio < low),
        "clip_ratio/high_mean": (advantage > 0) & (ratio > high),
    }


@torch.no_grad()
def _metrics(parts: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """Means, shares and extremes over the counted tokens; zero when there are none."""
    values = {name: x.double() for name, x in parts.items() if x is not None}
    ratio, log_ratio = values.pop("ratio"), values.pop("log_ratio")
    count = len(ratio)
    values["clip_ratio/region_mean"] = (
        values["clip_ratio/low_mean"] + values["clip_ratio/high_mean"]
    )
    metrics = {name: x.sum() / max(count, 1) for name, x in values.items()}
    for name, x in {"ratio": ratio, "log_ratio": log_ratio}.items():
        metrics[f"{name}/min"] = x.amin() if count else x.sum()
        metrics[f"{name}/max"] = x.amax() if count else x.sum()
    square = ratio.square().sum()
    metrics["effective_sample_size"] = ratio.sum().square() / (count * square) if count else square
    metrics["num_tokens"] = ratio.new_tensor(count)
    return metrics
