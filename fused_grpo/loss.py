"""The path of a loss, top to bottom: options -> TokenBatch -> head -> objective -> output."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from fused_grpo import compiled
from fused_grpo.backends import BACKENDS, choose, compaction
from fused_grpo.batch import TokenBatch, make_batch
from fused_grpo.checks import check_choice, check_head, check_targets, check_tensor
from fused_grpo.chunked import Needs
from fused_grpo.objectives import LossSpec, metrics, token_terms
from fused_grpo.ops import FusedLossFunction, HeadCall, LogprobsFunction
from fused_grpo.reference import ReferenceOutput, reference_logprobs, reference_loss
from fused_grpo.tiles import compute_dtype
from fused_grpo.triton_policy import make_objective


@dataclass
class LinearLogprobs:
    """Results of `linear_logprobs`, in the shape of `targets`; fp32, or fp64 for fp64 inputs."""

    logps: Tensor
    entropy: Tensor | None = None


@dataclass
class GRPOLossOutput:
    """Results of a loss; per-token fields are shaped like `completion_ids`, 0 where masked.

    Attributes:
        loss: 0-d, the weighted sum over tokens; with reduction="none" the per-token losses.
        per_token_loss: the loss of each token before its weight.
        per_token_logps: log-probabilities of the completion's tokens, detached.
        entropy: entropies of the next-token distributions, detached, where asked for.
        metrics: detached 0-d tensors by name, over the counted tokens.
    """

    loss: Tensor
    per_token_loss: Tensor
    per_token_logps: Tensor
    entropy: Tensor | None = None
    metrics: dict[str, Tensor] = field(default_factory=dict)


class LossOptions(TypedDict, total=False):
    """Options shared by `grpo_loss`, `GRPOLoss` and `policy_loss`; defaults: `LossSpec`."""

    loss_type: str
    importance_sampling_level: str
    epsilon_low: float
    epsilon_high: float | None
    delta: float | None
    beta: float
    use_bias_correction_kl: bool
    entropy_coef: float
    log_ratio_clamp: float | None
    num_items_in_batch: float | Tensor | None
    max_completion_length: int | None


def linear_logprobs(
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
    backend: str = "auto",
    check_inputs: bool | None = None,
    chunk_bytes: int | None = None,
    compact: bool | None = None,
) -> LinearLogprobs:
    """Log-probabilities (and entropies) of a linear head, without its logits ever being held.

    The same as

        z = softcap_tanh((hidden.float() @ weight.float().T + bias) * logit_scale) / temperature
        logps = torch.log_softmax(z, -1).gather(-1, targets[..., None])[..., 0]

    and differentiable in `hidden`, `weight` and `bias` for any upstream gradient of both outputs.

    Args:
        hidden: [..., H] floating point, any strides.
        weight: [V, H] floating point.
        targets: [...] integers in [0, V), or `ignore_index`, which gives 0 and no gradient.
        bias: [V].
        temperature: > 0; a number, or one per token [...].
        logit_scale: multiplies the logits before the softcap.
        softcap: c of c tanh(z / c), > 0.
        entropy: also return the entropies (nats), differentiable.
        backend: "triton" (kernels, for CUDA and ROCm; on a CPU only where TRITON_INTERPRET=1 was
            set before triton was imported), "chunked" (torch, a chunk of tokens at a time),
            "reference" (full logits, autograd), or "auto": triton on GPUs, else chunked.
        check_inputs: raise on targets or temperatures out of range. None: on a CPU only, as the
            check would make a GPU wait; there, without it, such a token's results are NaN.
        chunk_bytes: bound of the extra memory, gradients and one fp32 copy of a half-precision
            weight's gradient aside (see `memory`). None: 100 MiB, or 2 GiB on a GPU with triton.
        compact: leave out tokens that do not count or send nothing back; the host then waits for
            their number. False (triton only): never, shapes are fixed, and such tokens cost as much
            as others. None: True, but for the capture of a CUDA graph.

    Returns:
        fp32 results (fp64 for fp64 inputs), from fp32 logits with fp32 accumulators whatever the
        input dtypes.

    Raises:
        TypeError, ValueError: naming the argument, what was given and what fits.
    """
    if torch.compiler.is_compiling():
        settings = {
            "temperature": temperature,
            "logit_scale": logit_scale,
            "softcap": softcap,
            "entropy": entropy,
            "ignore_index": ignore_index,
            "backend": backend,
            "check_inputs": check_inputs,
            "chunk_bytes": chunk_bytes,
            "compact": compact,
        }
        return LinearLogprobs(*compiled.logprobs(hidden, weight, targets, bias, settings))
    check_choice("backend", backend, BACKENDS)
    check_head(hidden, weight, bias, logit_scale, softcap, chunk_bytes)
    check_tensor("targets", targets, hidden.device, floating=False)
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets has shape {list(targets.shape)}, hidden {list(hidden.shape)}: "
            "the leading dimensions must be the same"
        )
    head_backend = choose(backend, hidden, weight)
    compact = compaction(compact, head_backend.name, hidden.device)
    flat = targets.reshape(-1)
    counted = flat != ignore_index
    index = _positions(counted, compact)
    given_temperature = temperature
    temperature = _temperature(temperature, targets.shape, index, counted, compact, hidden.device)
    flat_target = flat[index] if compact else torch.where(counted, flat, 0)
    target, temperature = check_targets(
        "targets", flat_target.long(), temperature, weight.shape[0], check_inputs
    )
    if backend == "reference":
        return LinearLogprobs(
            *reference_logprobs(
                hidden,
                weight,
                targets,
                bias=bias,
                temperature=given_temperature,
                logit_scale=logit_scale,
                softcap=softcap,
                entropy=entropy,
                ignore_index=ignore_index,
            )
        )
    call = HeadCall(
        index,
        target,
        temperature,
        logit_scale,
        softcap,
        chunk_bytes,
        head_backend,
        None if compact else counted,
    )
    logps, h = _logprobs(hidden, weight, bias, call, entropy)

    def to_layout(values: Tensor) -> Tensor:
        if not compact:
            values = torch.where(counted, values, 0)
        return values.new_zeros(flat.shape).index_copy(0, index, values).view(targets.shape)

    return LinearLogprobs(to_layout(logps), None if h is None else to_layout(h))


def grpo_loss(
    hidden: Tensor,
    weight: Tensor,
    completion_ids: Tensor,
    advantages: Tensor,
    *,
    completion_mask: Tensor | None = None,
    old_per_token_logps: Tensor | None = None,
    ref_per_token_logps: Tensor | None = None,
    importance_sampling_ratio: Tensor | None = None,
    bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    reduction: str = "sum",
    backend: str = "auto",
    check_inputs: bool | None = None,
    chunk_bytes: int | None = None,
    compact: bool | None = None,
    **options: Unpack[LossOptions],
) -> GRPOLossOutput:
    """The GRPO loss of a linear head, with its gradients formed in one pass and no logits held.

    With logps = linear_logprobs(hidden, weight, completion_ids, ...), per counted token

        ratio = exp(logps - old)                              exp(mean over the sequence) at
        sequence level policy = -min(min(ratio, delta) A, clip(ratio, 1 - epsilon_low, 1 +
        epsilon_high) A) loss_t = policy * importance_sampling_ratio + beta * k3(ref - logps) -
        entropy_coef * entropy

    and loss = sum_t w_t loss_t, where loss_type chooses w_t. Matmul work is 6NHV (4NHV with a
    frozen head or a frozen trunk); tokens that are masked cost nothing, and those whose gradient
    is zero no backward.

    Args:
        hidden: [B, T, H]; packed: [N, H] or [1, N, H]. hidden[:, t] predicts completion_ids[:, t].
        weight: [V, H].
        completion_ids: [B, T]; packed: [N] or [1, N] with `cu_seqlens`. Integers in [0, V) where
            they count.
        advantages: one per sequence, [B] (packed: [S]), or one per token.
        completion_mask: what counts, in the shape of completion_ids, boolean or 0/1. None:
            everything. Whatever stands at other positions, NaN included, has no effect.
        old_per_token_logps: log-probs of the policy that sampled. None: this policy, detached:
            every ratio is 1 and the gradient is that of the live ratio.
        ref_per_token_logps: log-probs of the reference policy, needed if beta > 0.
        importance_sampling_ratio: weights on the policy term, per token or per sequence, detached.
        bias, temperature, logit_scale, softcap, backend, check_inputs, chunk_bytes, compact: as in
            `linear_logprobs`.
        cu_seqlens: [S + 1] integers, the bounds of packed sequences, from 0 to N.
        entropy: also return entropies and log their mean (implied by entropy_coef != 0).
        reduction: "sum", the weighted sum over tokens, or "none", the unweighted losses of all
            tokens, in the shape of completion_ids and differentiable for any upstream gradient
            (8NHV).
        loss_type: w_t, with n_b counted tokens in a sequence: "grpo" 1 / (n_b B), "bnpo" 1 /
            (counted tokens of this call), "dapo" 1 / num_items_in_batch (None: as bnpo), "dr_grpo"
            1 / (B max_completion_length). B counts fully masked sequences. Divisors are at least 1.
        importance_sampling_level: "token" or "sequence" (GSPO, arXiv 2507.18071).
        epsilon_low, epsilon_high: bounds of the clip, 0.2 and None (the same) by default.
        delta: upper bound of the ratio where the advantage is negative, > 1. None: none.
        beta: coefficient of the KL to the reference.
        use_bias_correction_kl: multiply k3 by the live ratio (DeepSeek-V3.2, arXiv 2512.02556).
        entropy_coef: coefficient of the entropy bonus, under the same w_t.
        log_ratio_clamp: log-ratios enter exp clamped to +- this, with gradient 0 beyond; None: as
            they are.
        num_items_in_batch: counted tokens of all accumulated calls and ranks ("dapo").
        max_completion_length: the constant of "dr_grpo".

    Returns:
        GRPOLossOutput. Its metrics: "clip_ratio/low_mean" (share with ratio < 1 - epsilon_low and
        A < 0), "clip_ratio/high_mean", "clip_ratio/region_mean" (either), "ratio/mean|min|max",
        "log_ratio/min|max", "log_ratio/clamped" (share), "effective_sample_size"
        ((sum r)^2 / (N sum r^2)), "num_tokens", "zero_coefficient_fraction" (tokens that skip the
        backward; only where this call forms gradients), and "kl" (the term as it enters the loss)
        and "entropy" where there are any.

    Raises:
        TypeError, ValueError: naming the argument, what was given and what fits. With everything
            masked nothing is raised: the loss is 0 and the gradients are zeros.
    """
    if torch.compiler.is_compiling():
        settings = {
            "completion_mask": completion_mask,
            "old_per_token_logps": old_per_token_logps,
            "ref_per_token_logps": ref_per_token_logps,
            "importance_sampling_ratio": importance_sampling_ratio,
            "cu_seqlens": cu_seqlens,
            "temperature": temperature,
            "logit_scale": logit_scale,
            "softcap": softcap,
            "entropy": entropy,
            "reduction": reduction,
            "backend": backend,
            "check_inputs": check_inputs,
            "chunk_bytes": chunk_bytes,
            "compact": compact,
            **options,
        }
        return GRPOLossOutput(
            *compiled.loss(hidden, weight, completion_ids, advantages, bias, settings)
        )
    spec = _spec(options, ref_per_token_logps)
    check_choice("backend", backend, BACKENDS)
    check_choice("reduction", reduction, ("sum", "none"))
    check_head(hidden, weight, bias, logit_scale, softcap, chunk_bytes)
    check_tensor("completion_ids", completion_ids, hidden.device, floating=False)
    if hidden.shape[:-1] != completion_ids.shape and not (
        cu_seqlens is not None and hidden.shape[:-1].numel() == completion_ids.numel()
    ):
        raise ValueError(
            f"hidden {list(hidden.shape)} and completion_ids {list(completion_ids.shape)} "
            "differ in their leading dimensions: hidden[:, t] predicts completion_ids[:, t]"
        )
    head_backend = choose(backend, hidden, weight)
    compact = compaction(compact, head_backend.name, hidden.device)
    batch = make_batch(
        completion_ids,
        advantages,
        completion_mask=completion_mask,
        old_per_token_logps=old_per_token_logps,
        ref_per_token_logps=ref_per_token_logps if spec.beta else None,
        importance_sampling_ratio=importance_sampling_ratio,
        cu_seqlens=cu_seqlens,
        dtype=compute_dtype(hidden, weight),
        compact=compact,
    )
    given_temperature = temperature
    temperature = _temperature(
        temperature, completion_ids.shape, batch.index, batch.counted, compact, hidden.device
    )
    target, temperature = check_targets(
        "completion_ids", batch.target, temperature, weight.shape[0], check_inputs
    )
    entropy = entropy or spec.entropy_coef != 0
    if backend == "reference":
        out = reference_loss(
            hidden,
            weight,
            completion_ids,
            advantages,
            completion_mask=completion_mask,
            old_per_token_logps=old_per_token_logps,
            ref_per_token_logps=ref_per_token_logps,
            importance_sampling_ratio=importance_sampling_ratio,
            bias=bias,
            cu_seqlens=cu_seqlens,
            temperature=given_temperature,
            logit_scale=logit_scale,
            softcap=softcap,
            entropy=entropy,
            **options,
        )
        return _from_reference(out, reduction)
    call = HeadCall(
        batch.index,
        target,
        temperature,
        logit_scale,
        softcap,
        chunk_bytes,
        head_backend,
        batch.counted,
    )
    if reduction == "none" or not torch.is_grad_enabled():
        logps, h = _logprobs(hidden, weight, bias, call, entropy)
        return _from_logps(logps, h, batch, spec, reduction)
    objective = make_objective(spec, batch, head_backend.name)
    loss, per_token, logps, h, g = FusedLossFunction.apply(
        hidden, weight, bias, call, objective, entropy
    )
    return _output(loss, per_token, logps, h, batch, objective.metrics(logps, h, g))


class GRPOLoss(nn.Module):
    """`grpo_loss` with its options bound: GRPOLoss(beta=0.04)(hidden, weight, ids, advantages).

    Takes every keyword of `grpo_loss`, here or in the call; the call's come first. Options are
    checked here.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        known = set(inspect.signature(grpo_loss).parameters) - {"options"}
        _spec({k: v for k, v in options.items() if k not in known}, None, bound=True)
        self.options = options

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        completion_ids: Tensor,
        advantages: Tensor,
        **options: Any,
    ) -> GRPOLossOutput:
        """See `grpo_loss`."""
        return grpo_loss(hidden, weight, completion_ids, advantages, **{**self.options, **options})

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


def policy_loss(
    per_token_logps: Tensor,
    advantages: Tensor,
    *,
    completion_mask: Tensor | None = None,
    old_per_token_logps: Tensor | None = None,
    ref_per_token_logps: Tensor | None = None,
    importance_sampling_ratio: Tensor | None = None,
    entropies: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    reduction: str = "sum",
    **options: Unpack[LossOptions],
) -> GRPOLossOutput:
    """The loss of `grpo_loss` for callers who have log-probabilities already; ordinary autograd.

    Args:
        per_token_logps: [B, T] (packed: [N] or [1, N]) floating point, differentiable.
        entropies: the same shape, differentiable; needed if entropy_coef != 0.
        (others): as in `grpo_loss`.

    Raises:
        TypeError, ValueError: as `grpo_loss`.
    """
    spec = _spec(options, ref_per_token_logps)
    check_choice("reduction", reduction, ("sum", "none"))
    check_tensor("per_token_logps", per_token_logps, None, floating=True)
    if spec.entropy_coef != 0 and entropies is None:
        raise ValueError(f"entropy_coef={spec.entropy_coef} needs entropies")
    if entropies is not None:
        check_tensor("entropies", entropies, per_token_logps.device, floating=True)
        if entropies.shape != per_token_logps.shape:
            raise ValueError(
                f"entropies has shape {list(entropies.shape)}, per_token_logps "
                f"{list(per_token_logps.shape)}; they must be the same"
            )
    dtype = torch.float64 if per_token_logps.dtype == torch.float64 else torch.float32
    batch = make_batch(
        per_token_logps,
        advantages,
        completion_mask=completion_mask,
        old_per_token_logps=old_per_token_logps,
        ref_per_token_logps=ref_per_token_logps if spec.beta else None,
        importance_sampling_ratio=importance_sampling_ratio,
        cu_seqlens=cu_seqlens,
        dtype=dtype,
    )
    logps = per_token_logps.reshape(-1)[batch.index].to(dtype)
    h = None if entropies is None else entropies.reshape(-1)[batch.index].to(dtype)
    return _from_logps(logps, h, batch, spec, reduction)


def _spec(
    options: Mapping[str, Any], ref_per_token_logps: Tensor | None, bound: bool = False
) -> LossSpec:
    known = [f.name for f in fields(LossSpec)]
    for name in options:
        if name not in known:
            raise TypeError(f"unknown option {name!r}; the loss knows {', '.join(known)}")
    spec = LossSpec(**options)
    if not bound and spec.beta > 0 and ref_per_token_logps is None:
        raise ValueError(f"beta={spec.beta} needs ref_per_token_logps")
    if spec.beta == 0 and ref_per_token_logps is not None:
        raise ValueError("ref_per_token_logps is given, but beta=0 would ignore it: set beta > 0")
    return spec


def _temperature(
    temperature: float | Tensor,
    shape: torch.Size,
    index: Tensor,
    counted: Tensor | None,
    compact: bool,
    device: torch.device,
) -> float | Tensor:
    """Of the tokens [n]; 1 where one does not count."""
    if not isinstance(temperature, Tensor):
        return temperature
    check_tensor("temperature", temperature, device, floating=True)
    if temperature.shape != shape:
        raise ValueError(
            f"temperature has shape {list(temperature.shape)}: give a number, or one per token "
            f"{list(shape)}"
        )
    flat = temperature.detach().reshape(-1)
    if compact or counted is None:
        return flat[index]
    return torch.where(counted, flat, 1)


def _positions(counted: Tensor, compact: bool) -> Tensor:
    """[n] the tokens' positions: of those that count, or all."""
    if compact:
        return counted.nonzero().squeeze(1)
    return torch.arange(counted.numel(), device=counted.device)


def _logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    call: HeadCall,
    entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """[n] log-probabilities and entropies of the counted tokens, differentiable."""
    if hidden.dim() not in (2, 3):
        hidden = hidden.reshape(-1, hidden.shape[-1])
    if torch.is_grad_enabled():
        return LogprobsFunction.apply(hidden, weight, bias, call, entropy)
    tokens, head = call.bind(hidden, weight, bias)
    result = call.head_pass(tokens, head, Needs(entropy=entropy), None)
    return result.logps, result.entropy


def _from_logps(
    logps: Tensor, entropy: Tensor | None, batch: TokenBatch, spec: LossSpec, reduction: str
) -> GRPOLossOutput:
    """The loss by ordinary autograd from log-probabilities [n]."""
    per_token = token_terms(logps, batch, spec).loss
    if spec.entropy_coef != 0 and entropy is not None:
        per_token = per_token - spec.entropy_coef * entropy
    if reduction == "none":
        loss = batch.to_layout(per_token)
    else:
        loss = (per_token * spec.token_weights(batch)).sum()
    logged = metrics(logps.detach(), entropy, None, batch, spec)
    out = _output(loss, per_token.detach(), logps.detach(), entropy, batch, logged)
    return replace(out, per_token_loss=loss) if reduction == "none" else out


def _from_reference(out: ReferenceOutput, reduction: str) -> GRPOLossOutput:
    per_token = out.per_token_loss
    return GRPOLossOutput(
        loss=per_token if reduction == "none" else out.loss,
        per_token_loss=per_token if reduction == "none" else per_token.detach(),
        per_token_logps=out.per_token_logps.detach(),
        entropy=None if out.entropy is None else out.entropy.detach(),
        metrics=out.metrics,
    )


def _output(
    loss: Tensor,
    per_token: Tensor,
    logps: Tensor,
    entropy: Tensor | None,
    batch: TokenBatch,
    logged: dict[str, Tensor],
) -> GRPOLossOutput:
    return GRPOLossOutput(
        loss=loss,
        per_token_loss=batch.to_layout(per_token),
        per_token_logps=batch.to_layout(logps),
        entropy=None if entropy is None else batch.to_layout(entropy.detach()),
        metrics=logged,
    )
