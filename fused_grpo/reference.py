"""The specification: the GRPO loss on full logits, in plain torch with autograd.

Everything the fused code computes stands here once more, written in the most direct way: with
float64 inputs it is the oracle of the tests, and it is the eager baseline of the benchmarks. It
allocates the logits of all counted tokens, keeps them for the backward, and validates nothing.

It computes in the dtype of ``hidden`` and ``weight``, at least float32. Masked tokens are *selected
away* before anything else, so that whatever stands at their positions, NaN included, is inert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    **support: Any,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of ``targets`` [...] under ``hidden`` [..., H] and ``weight`` [V, H].

    Returns ``(logps, entropy or None)``, both of the shape of ``targets``; zero and without
    gradient where the target is ``ignore_index``. ``temperature``: a number, or one per target.
    ``support``: see :func:`reference_support`.
    """
    counted = targets != ignore_index
    z = _logits(hidden, weight, counted, bias, temperature, logit_scale, softcap)
    target = targets[counted].long()
    log_p = _log_softmax(z, reference_support(z, target, counted, **support)[0])
    logps = log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    zeros = torch.zeros(targets.shape, dtype=z.dtype, device=hidden.device)
    if not entropy:
        return zeros.masked_scatter(counted, logps), None
    return zeros.masked_scatter(counted, logps), zeros.masked_scatter(counted, _entropy(log_p))


@torch.no_grad()
def reference_statistics(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    names: Sequence[str],
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
) -> dict[str, Tensor]:
    """The ``outputs`` of ``linear_logprobs`` by name, shaped like ``targets``, 0 where ignored."""
    counted = targets != ignore_index
    z = _logits(hidden, weight, counted, bias, temperature, logit_scale, softcap)
    found = {
        "lse": z.logsumexp(-1),
        "log_sum_sq_probs": (2 * z.log_softmax(-1)).logsumexp(-1),
        "mean_logits": z.mean(-1),
        "is_top1": z.argmax(-1) == targets[counted],
    }
    return {
        name: torch.zeros(targets.shape, dtype=x.dtype, device=x.device).masked_scatter(counted, x)
        for name, x in found.items()
        if name in names
    }


def _logits(
    hidden: Tensor,
    weight: Tensor,
    counted: Tensor,
    bias: Tensor | None,
    temperature: float | Tensor,
    logit_scale: float,
    softcap: float | None,
) -> Tensor:
    """[n, V] of the counted positions."""
    dtype = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
    with torch.autocast(hidden.device.type, enabled=False):  # fp32 logits are the definition
        logits = hidden[counted].to(dtype) @ weight.to(dtype).T
    if bias is not None:
        logits = logits + bias.to(dtype)
    logits = logits * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if isinstance(temperature, Tensor):
        temperature = temperature.to(dtype).expand(counted.shape)[counted].unsqueeze(-1)
    return logits / temperature


def _log_softmax(z: Tensor, kept: Tensor | None) -> Tensor:
    return torch.log_softmax(z if kept is None else z.masked_fill(~kept, -torch.inf), dim=-1)


def _entropy(log_p: Tensor) -> Tensor:
    # p log p is 0 at p = 0; replacing log p = -inf keeps 0 * inf out of the value and the gradient.
    return -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(-1)


@torch.no_grad()
def reference_support(
    z: Tensor,
    target: Tensor,
    counted: Tensor,
    *,
    support_top_k: int | None = None,
    support_top_p: float | None = None,
    support_min_p: float | None = None,
    support_min_logp: Tensor | None = None,
    support_min_logit: Tensor | None = None,
    support_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The entries over which ``z`` [n, V] is normalised, as booleans [n, V].

    An entry is kept if it passes every condition, see ``support.SupportOptions``; the target is
    kept in any case. Also returns where that was needed, [n].
    """
    kept = torch.ones_like(z, dtype=torch.bool)
    if support_top_k is not None:
        kept &= z >= z.sort(descending=True).values[:, min(support_top_k, z.shape[1]) - 1, None]
    if support_top_p is not None and support_top_p < 1:
        p, order = _log_softmax(z, kept).exp().sort(descending=True, stable=True)
        before = p.cumsum(-1) - p
        last = z.gather(1, order).masked_fill(before >= support_top_p, torch.inf).amin(-1)
        kept &= z >= last[:, None]
    p = torch.softmax(z, -1)
    if support_min_p is not None:
        kept &= p >= support_min_p * p.amax(-1, keepdim=True)
    if support_min_logp is not None:
        kept &= torch.log_softmax(z, -1) >= support_min_logp[counted][:, None]
    if support_min_logit is not None:
        kept &= z >= support_min_logit[counted][:, None]
    if support_ids is not None:
        ids = support_ids[counted].long()
        listed = torch.zeros(len(z), z.shape[1] + 1, dtype=torch.bool, device=z.device)
        kept &= listed.scatter(1, ids.masked_fill(ids < 0, z.shape[1]), True)[:, :-1]
    outside = ~kept.gather(1, target[:, None])[:, 0]
    return kept.scatter(1, target[:, None], True), outside


def reference_support_of(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None,
    temperature: float | Tensor,
    logit_scale: float,
    softcap: float | None,
    ignore_index: int,
    **support: Any,
) -> tuple[Tensor, Tensor]:
    """(how many entries are kept, whether the target is outside), both of the shape of targets."""
    counted = targets != ignore_index
    with torch.no_grad():
        z = _logits(hidden, weight, counted, bias, temperature, logit_scale, softcap)
    kept, outside = reference_support(z, targets[counted].long(), counted, **support)
    size = torch.zeros(targets.shape, dtype=torch.int64, device=z.device)
    return (
        size.masked_scatter(counted, kept.sum(-1)),
        counted.masked_scatter(counted, outside),
    )


def reference_kl(log_p: Tensor, log_r: Tensor, top_k: int | None = None) -> Tensor:
    """[n] KL(p || r) of distributions [n, V].

    With ``top_k`` that of the ``top_k`` largest entries of p, one by one, and of all others taken
    together.
    """
    if top_k is not None and top_k < log_p.shape[1]:
        top = log_p.topk(top_k).indices
        log_p, log_r = (
            torch.cat([x.gather(1, top), x.scatter(1, top, -torch.inf).logsumexp(-1, True)], -1)
            for x in (log_p, log_r)
        )
    never = log_p == -torch.inf
    ratio = log_p.masked_fill(never, 0.0) - log_r.masked_fill(never, 0.0)
    return (log_p.exp() * ratio).sum(-1)


def reference_linear_kl(
    hidden: Tensor,
    weight: Tensor,
    ref_hidden: Tensor,
    ref_weight: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    ref_bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    ref_temperature: float | Tensor | None = None,
    logit_scale: float = 1.0,
    ref_logit_scale: float | None = None,
    softcap: float | None = None,
    ref_softcap: float | str | None = "same",
    top_k: int | None = None,
) -> Tensor:
    """KL(p || r) of two heads at every position that ``mask`` [...] counts, 0 elsewhere."""
    lead = hidden.shape[:-1]
    counted = torch.ones(lead, dtype=torch.bool) if mask is None else mask.bool()
    policy: dict[str, Any] = {
        "temperature": temperature,
        "logit_scale": logit_scale,
        "softcap": softcap,
    }
    z = _logits(hidden, weight, counted, bias, **policy)
    with torch.no_grad():
        own = _own_options(policy, ref_temperature, ref_logit_scale, ref_softcap)
        z_r = _logits(ref_hidden, ref_weight, counted, ref_bias, **own)
    kl = reference_kl(_log_softmax(z, None), _log_softmax(z_r.to(z.dtype), None), top_k)
    return torch.zeros(lead, dtype=z.dtype, device=z.device).masked_scatter(counted, kl)


def _own_options(
    policy: dict[str, Any],
    temperature: float | Tensor | None,
    logit_scale: float | None,
    softcap: float | str | None,
) -> dict[str, Any]:
    """The options of the reference's head: the policy's, where none are given."""
    own = dict(policy)
    own |= {} if temperature is None else {"temperature": temperature}
    own |= {} if logit_scale is None else {"logit_scale": logit_scale}
    return own | ({} if softcap == "same" else {"softcap": softcap})


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
    ref_hidden: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    ref_temperature: float | Tensor | None = None,
    ref_logit_scale: float | None = None,
    ref_softcap: float | str | None = "same",
    kl_estimator: str = "k3",
    kl_top_k: int | None = None,
    **options: Any,
) -> ReferenceOutput:
    """The loss from hidden states: log-probabilities, then :func:`reference_policy_loss`.

    ``hidden`` is [B, T, H] with ids [B, T], or packed, with ``cu_seqlens`` among the ``options`` of
    :func:`reference_policy_loss`: [N, H] or [1, N, H] with ids [N] or [1, N]. ``entropy=True``
    reports entropies; they are also computed when ``entropy_coef`` needs them. ``options`` may hold
    those of :func:`reference_support`, which then restrict policy and reference alike.
    """
    shape = completion_ids.shape
    counted = torch.ones(shape, dtype=torch.bool, device=hidden.device)
    if completion_mask is not None:
        counted = completion_mask.reshape(shape) != 0
    support = {k: options.pop(k) for k in list(options) if k.startswith("support_")}
    policy: dict[str, Any] = {
        "temperature": temperature,
        "logit_scale": logit_scale,
        "softcap": softcap,
    }
    z = _logits(hidden.reshape(*shape, hidden.shape[-1]), weight, counted, bias, **policy)
    target = completion_ids[counted].long()
    kept, outside = reference_support(z, target, counted, **support)
    log_p = _log_softmax(z, kept)
    parts: dict[str, Tensor | None] = {}
    if support:
        parts = {
            "support/size": kept.sum(-1),
            "support/target_outside": outside,
        }
    kl = None
    if ref_hidden is not None and ref_weight is not None:
        with torch.no_grad():
            own = _own_options(policy, ref_temperature, ref_logit_scale, ref_softcap)
            z_r = _logits(
                ref_hidden.reshape(*shape, ref_hidden.shape[-1]),
                ref_weight,
                counted,
                ref_bias,
                **own,
            )
            log_r = _log_softmax(z_r.to(z.dtype), kept)
        if kl_estimator == "k3":
            options["ref_per_token_logps"] = _restored(log_r, target, counted)
        else:
            kl = _zeros(counted, z).masked_scatter(counted, reference_kl(log_p, log_r, kl_top_k))
    wanted = entropy or options.get("entropy_coef", 0.0) != 0
    return reference_policy_loss(
        _restored(log_p, target, counted),
        advantages,
        entropies=_zeros(counted, z).masked_scatter(counted, _entropy(log_p)) if wanted else None,
        kl=kl,
        parts=parts,
        completion_mask=completion_mask,
        **options,
    )


def _zeros(counted: Tensor, like: Tensor) -> Tensor:
    return torch.zeros(counted.shape, dtype=like.dtype, device=like.device)


def _restored(log_p: Tensor, target: Tensor, counted: Tensor) -> Tensor:
    """The targets' log-probabilities in the layout of ``counted``."""
    return _zeros(counted, log_p).masked_scatter(counted, log_p.gather(1, target[:, None])[:, 0])


def reference_policy_loss(
    per_token_logps: Tensor,
    advantages: Tensor,
    *,
    entropies: Tensor | None = None,
    kl: Tensor | None = None,
    parts: dict[str, Tensor | None] | None = None,
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
    the other tensors one per token. ``options`` are those of :func:`token_losses`. ``kl`` is one
    summed over the vocabulary, ``parts`` [n] are what metrics are made of beside the loss's own.
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
        whole = x.shape in ((num_sequences,), (num_sequences, 1))
        return x.reshape(-1)[sequence].to(dtype) if whole else per_token(x)

    logp = per_token(per_token_logps)
    constants: dict[str, Any] = {
        "old": logp.detach() if old_per_token_logps is None else per_token(old_per_token_logps),
        "ref": None if ref_per_token_logps is None else per_token(ref_per_token_logps),
        "advantage": per_sequence_or_token(advantages),
        "correction": (
            1.0
            if importance_sampling_ratio is None
            else per_sequence_or_token(importance_sampling_ratio)
        ),
        "sequence": sequence,
        "lengths": lengths,
        **options,
    }
    divisor = {
        "grpo": lambda: lengths[sequence] * num_sequences,
        "bnpo": lambda: len(sequence),
        "dr_grpo": lambda: num_sequences * max_completion_length,  # type: ignore[operator]
        "dapo": lambda: len(sequence) if num_items_in_batch is None else num_items_in_batch,
    }[loss_type]()
    divisor = torch.as_tensor(divisor, dtype=dtype, device=logp.device).clamp(min=1)

    entropy = None if entropies is None else per_token(entropies)
    whole_kl = None if kl is None else per_token(kl)
    token_loss, own_parts = token_losses(logp, entropy, whole_kl, **constants)
    # Once more on leaves: which tokens would send nothing back to the head?
    # Inference mode's tensors are no leaves and enter no graph: their copies are and do.
    with torch.inference_mode(False), torch.enable_grad():
        leaves: list[Any] = [
            None if x is None else x.detach().clone().requires_grad_()
            for x in (logp, entropy, whole_kl)
        ]
        copies: dict[str, Any] = {
            k: x.clone() if isinstance(x, Tensor) else x for k, x in constants.items()
        }
        again, _ = token_losses(*leaves, **copies)
        grads = torch.autograd.grad(
            (again / divisor.clone()).sum(),
            [x for x in leaves if x is not None],
            allow_unused=True,
        )
    idle = torch.stack([g == 0 for g in grads if g is not None]).all(dim=0)
    own_parts |= {"entropy": entropy, "zero_coefficient_fraction": idle, **(parts or {})}

    def restore(x: Tensor) -> Tensor:
        zeros = torch.zeros(shape, dtype=dtype, device=logp.device)
        return zeros.masked_scatter(counted.view(shape), x)

    return ReferenceOutput(
        loss=(token_loss / divisor).sum(),
        per_token_loss=restore(token_loss),
        per_token_logps=restore(logp),
        entropy=None if entropy is None else restore(entropy),
        metrics=_metrics(own_parts),
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
    whole_kl: Tensor | None,
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
    if whole_kl is not None:
        kl = whole_kl
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
