"""The path of a loss, top to bottom: options -> TokenBatch -> head -> objective -> output."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_dataclass
from typing_extensions import Unpack

from fused_grpo import compiled, routed
from fused_grpo.backends import BACKENDS, choose, compaction
from fused_grpo.batch import TokenBatch, make_batch, positions
from fused_grpo.calls import ADAPTER, SAME, joined, make_call, token_values
from fused_grpo.checks import (
    check_choice,
    check_head,
    check_lora,
    check_tensor,
    check_transforms,
)
from fused_grpo.corrections import prepare
from fused_grpo.groups import join_sequences, join_vocab, rank_in
from fused_grpo.objectives import LossSpec, metrics, token_terms
from fused_grpo.objectives.inputs import (
    check_groups,
    check_reference,
    check_tensors,
    entropy_option,
)
from fused_grpo.objectives.options import LossOptions
from fused_grpo.ops import FusedLossFunction
from fused_grpo.passes import TokenValues
from fused_grpo.reference import (
    REFERENCE_LOSSES,
    ReferenceOutput,
    reference_logprobs,
    reference_loss,
    reference_policy_loss,
    reference_statistics,
    reference_support_of,
    token_losses,
)
from fused_grpo.routed import Route, RouteOptions
from fused_grpo.statistics import check_outputs, named
from fused_grpo.support import SupportOptions
from fused_grpo.tiles import compute_dtype
from fused_grpo.triton_policy import fixed_capacity, make_objective

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass
class LinearLogprobs:
    """Results of `linear_logprobs`, in the shape of `targets`; fp32, or fp64 for fp64 inputs.

    With a sampling support also the number of entries that are kept, and whether the target is
    outside, both by the same definition as `support/...` among the metrics of `grpo_loss`. The last
    four are the `outputs` that were asked for, constants (`is_top1` boolean).
    """

    logps: Tensor
    entropy: Tensor | None = None
    support_size: Tensor | None = None
    target_outside: Tensor | None = None
    lse: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    mean_logits: Tensor | None = None
    is_top1: Tensor | None = None


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


# FSDP looks for tensors in what a module returns: those that a backward starts from gather weights
for _output_class in (LinearLogprobs, GRPOLossOutput):
    register_dataclass(_output_class)


class LogprobsOptions(SupportOptions, RouteOptions, total=False):
    """Options of `linear_logprobs` for its support and its gradients."""


class GRPOOptions(LossOptions, LogprobsOptions, total=False):
    """Options of `grpo_loss` beside its tensors and the head's."""


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    lora_hidden: Tensor | None = None,
    lora_weight: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    outputs: Sequence[str] = (),
    ignore_index: int = -100,
    backend: str = "auto",
    check_inputs: bool | None = None,
    chunk_bytes: int | None = None,
    compact: bool | None = None,
    process_group: ProcessGroup | None = None,
    **options: Unpack[LogprobsOptions],
) -> LinearLogprobs:
    """Log-probabilities (and entropies) of a linear head, without its logits ever being held.

    The same as

        z = softcap_tanh((hidden.float() @ weight.float().T + bias) * logit_scale) / temperature
        logps = torch.log_softmax(z, -1).gather(-1, targets[..., None])[..., 0]

    and differentiable in `hidden`, `weight`, `bias`, `lora_hidden` and `lora_weight` for any
    upstream gradient of both outputs.

    Args:
        hidden: [..., H] floating point, any strides.
        weight: [V, H] floating point.
        targets: [...] integers in [0, V), or `ignore_index`, which gives 0 and no gradient.
        bias: [V].
        lora_hidden, lora_weight: [..., r] and [V, r], an adapter on the head: adds lora_hidden @
            lora_weight.T to hidden @ weight.T. With LoRA's B A (a hidden) x scaling: lora_hidden =
            scaling * A(dropout(hidden)), by ordinary autograd, and lora_weight = B.
        temperature: > 0; a number, or one per token [...].
        logit_scale: multiplies the logits before the softcap.
        softcap: c of c tanh(z / c), > 0.
        entropy: also return the entropies (nats), differentiable.
        outputs: more results by name, without gradients: "lse", logsumexp(z); "log_sum_sq_probs",
            log sum_v p_v^2; "mean_logits", the mean of z; "is_top1", whether the target is the
            likeliest entry, the first of equals. Not by triton, nor with a support.
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
        process_group: the ranks that share the vocabulary: each gives its rows [V_r, H] of the
            weight and [V_r] of the bias, in the order of the ranks, any V_r >= 1, and all give the
            same hidden states and the same targets, which are ids in [0, sum V_r). All get the same
            results to the last bit, the whole gradient of `hidden`, and their rows' of the weight.
            Forward and backward are collectives. See docs/integrations.md.
        support_top_k, support_top_p, support_min_p: normalise over the entries that a sampler could
            have drawn, see `support.SupportOptions`. The support is a constant; a target outside of
            it counts as kept.
        support_min_logp, support_min_logit, support_ids: other ways to say which entries those are.
        backward, route_tau, route_seed, route_weight_grad, sequence_ids: sparse, unbiased
            gradients, see `routed.RouteOptions`; sequence_ids in the shape of targets[..., 0], as
            the last dimension is that of positions.

    Returns:
        fp32 results (fp64 for fp64 inputs), from fp32 logits with fp32 accumulators whatever the
        input dtypes.

    Raises:
        TypeError, ValueError: naming the argument, what was given and what fits.
    """
    if torch.compiler.is_compiling():
        if outputs:
            raise ValueError(f"outputs={outputs!r} is not known under torch.compile")
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
            "lora_hidden": lora_hidden,
            "lora_weight": lora_weight,
            "process_group": process_group,
            **options,
        }
        return LinearLogprobs(*compiled.logprobs(hidden, weight, targets, bias, settings))
    check_transforms("linear_logprobs")
    shard = join_vocab(
        process_group,
        hidden,
        weight,
        bias,
        ignore_index,
        {"targets": targets, "temperature": temperature, "logit_scale": logit_scale}
        | {"softcap": softcap, "entropy": entropy}
        | {"backend": backend, "chunk_bytes": chunk_bytes, "options": sorted(options)}
        | dict(sorted(options.items())),
    )
    check_choice("backend", backend, BACKENDS)
    check_head(hidden, weight, bias, logit_scale, softcap, chunk_bytes)
    check_lora(hidden, weight, lora_hidden, lora_weight)
    check_tensor("targets", targets, hidden.device, floating=False)
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets has shape {list(targets.shape)}, hidden {list(hidden.shape)}: "
            "the leading dimensions must be the same"
        )
    support, routing = _split(_known(options, LogprobsOptions.__annotations__), SupportOptions)
    outputs = check_outputs(outputs)
    if outputs and support:
        raise ValueError(f"outputs={outputs!r} is not known with {', '.join(support)}")
    check_groups(process_group, None, backend, support, apart=(lora_weight, outputs))
    wants = _wants(support, adapter=lora_weight) or ("outputs" if outputs else None)
    wants = wants or _group(process_group=process_group)
    head_backend = choose(backend, hidden, weight, wants)
    compact = compaction(compact, head_backend.name, hidden.device, _is_routed(routing))
    flat = targets.reshape(-1)
    counted = flat != ignore_index
    index = positions(counted, compact)
    rows, length = targets.shape[:-1].numel(), targets.shape[-1] if targets.dim() else 1
    route = _route(routing, index // length, rows, backend, support, adapter=lora_weight)
    call = make_call(
        "targets",
        (flat[index] if compact else torch.where(counted, flat, 0)).long(),
        index,
        targets.shape,
        hidden,
        weight,
        temperature=temperature,
        logit_scale=logit_scale,
        softcap=softcap,
        chunk_bytes=chunk_bytes,
        check=check_inputs,
        support=support,
        backend=head_backend,
        counted=None if compact else counted,
        shard=shard,
        route=route,
    )
    if backend == "reference":
        head: dict[str, Any] = {
            "bias": bias,
            "temperature": temperature,
            "logit_scale": logit_scale,
            "softcap": softcap,
            "ignore_index": ignore_index,
            **support,
        }
        hidden, weight = joined(hidden, weight, lora_hidden, lora_weight)
        logps, h = reference_logprobs(hidden, weight, targets, entropy=entropy, **head)
        if outputs:
            return LinearLogprobs(
                logps, h, **reference_statistics(hidden, weight, targets, outputs, **head)
            )
        if call.support is None:
            return LinearLogprobs(logps, h)
        return LinearLogprobs(logps, h, *reference_support_of(hidden, weight, targets, **head))
    values = token_values(
        hidden, weight, bias, call, entropy, lora_hidden, lora_weight, bool(outputs)
    )

    def to_layout(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        if not compact:
            x = torch.where(counted, x, 0)
        return x.new_zeros(flat.shape).index_copy(0, index, x).view(targets.shape)

    out, *others = map(
        to_layout, (values.logps, values.entropy, values.support_size, values.outside)
    )
    assert out is not None
    found = {} if values.statistics is None else named(values.statistics, outputs)
    return LinearLogprobs(out, *others, **{name: to_layout(x) for name, x in found.items()})


def grpo_loss(
    hidden: Tensor,
    weight: Tensor,
    completion_ids: Tensor,
    advantages: Tensor,
    *,
    completion_mask: Tensor | None = None,
    old_per_token_logps: Tensor | None = None,
    ref_per_token_logps: Tensor | None = None,
    sampling_per_token_logps: Tensor | None = None,
    importance_sampling_ratio: Tensor | None = None,
    token_weights: Tensor | None = None,
    entropy_scale: Tensor | None = None,
    group_ids: Tensor | None = None,
    bias: Tensor | None = None,
    lora_hidden: Tensor | None = None,
    lora_weight: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ref_hidden: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    ref_temperature: float | Tensor | None = None,
    ref_logit_scale: float | None = None,
    ref_softcap: float | str | None = SAME,
    entropy: bool = False,
    reduction: str = "sum",
    backend: str = "auto",
    check_inputs: bool | None = None,
    chunk_bytes: int | None = None,
    compact: bool | None = None,
    process_group: ProcessGroup | None = None,
    sequence_group: ProcessGroup | None = None,
    **options: Unpack[GRPOOptions],
) -> GRPOLossOutput:
    """The GRPO loss of a linear head, with its gradients formed in one pass and no logits held.

    With logps = linear_logprobs(hidden, weight, completion_ids, ...), per counted token

        ratio  = exp(logps - old)                                   or that of its sequence
        policy = -min(min(ratio, delta) A, clip(ratio, 1 - epsilon_low, 1 + epsilon_high) A)
        loss_t = policy * importance weight + beta * kl - entropy_coef * entropy

    and loss = sum_t w_t loss_t, where loss_type chooses `policy` and w_t. Matmul work is 6NHV (4NHV
    with a frozen head or a frozen trunk); tokens that are masked cost nothing, and those whose
    gradient is zero no backward.

    Args:
        hidden: [B, T, H]; packed: [N, H] or [1, N, H]. hidden[:, t] predicts completion_ids[:, t].
        weight: [V, H].
        completion_ids: [B, T]; packed: [N] or [1, N] with `cu_seqlens`. Integers in [0, V) where
            they count.
        advantages: one per sequence, [B] (packed: [S]), or one per token. Where as many packed
            tokens as sequences leave open which: [S, 1] or [1, N].
        completion_mask: what counts, in the shape of completion_ids, boolean or 0/1. None:
            everything. Whatever stands at other positions, NaN included, has no effect.
        old_per_token_logps: log-probs of the policy that sampled. None: this policy, detached:
            every ratio is 1 and the gradient is that of the live ratio.
        ref_per_token_logps: log-probs of the reference policy, needed if beta > 0, or ref_hidden.
        ref_hidden, ref_weight, ref_bias: the reference's hidden states [..., H_r] at the same
            positions and its head [V, H_r], [V], from which its log-probabilities are computed in
            the same pass (2 N H_r V more); constants.
        ref_temperature, ref_logit_scale, ref_softcap: of the reference's head; default: the
            policy's.
        importance_sampling_ratio: weights on the policy term, per token or per sequence, detached.
        bias, lora_hidden, lora_weight, temperature, logit_scale, softcap: as in `linear_logprobs`.
        backend, check_inputs, chunk_bytes, compact, process_group: as there.
        sequence_group: the ranks that share the tokens of sequences (sequence or context
            parallelism): each gives a part of the tokens of the same B sequences, in the same
            order, [B, T_r] or packed with a bound for every sequence, any T_r. Ratios, masks and
            normalisers of whole sequences, and counts of tokens, are then over the ranks of this
            group; the ranks' losses add up to the loss, and their gradients of the weight to its
            gradient. Forward and, with reduction="none", backward are collectives; metrics are
            over the rank's own tokens.
        cu_seqlens: [S + 1] integers, the bounds of packed sequences, from 0 to N.
        entropy: also return entropies and log their mean (implied by entropy_coef != 0).
        reduction: "sum", the weighted sum over tokens, or "none", the unweighted losses of all
            tokens, in the shape of completion_ids and differentiable for any upstream gradient
            (8NHV).
        loss_type: an objective with its w_t (docs/objectives.md lists them), one that was added
            with `register_objective`, or "module:function". With n_b counted tokens in a sequence:
            "grpo" 1 / (n_b B), "bnpo" 1 / (counted tokens of this call), "dapo" 1 /
            num_items_in_batch (None: as bnpo), "dr_grpo" 1 / (B max_completion_length). B counts
            fully masked sequences. Divisors are at least 1.
        aggregation: another w_t: a name in `aggregation.SCHEMES` or `aggregation.PRESETS`.
        token_weights: w_t itself, in the shape of completion_ids; see `token_weights`.
        num_items_in_batch, num_sequences: counted tokens, and sequences, of all accumulated calls
            and ranks, for the schemes that divide by them.
        max_completion_length: the constant of "dr_grpo".
        group_ids: integers, one per sequence, for aggregation="group_mean".
        importance_sampling_level: "token"; "sequence", the mean over it (GSPO, arXiv 2507.18071);
            "sequence_token", its value with each token's own gradient; "sequence_sum", the product
            of the tokens' ratios.
        epsilon_low, epsilon_high: bounds of the clip, 0.2 and None (the same) by default.
        delta: upper bound of the ratio where the advantage is negative, > 1. None: none.
        dual_clip: upper bound of the loss there, in units of |A|, > 1. The same thing as delta,
            but for bounds below 1 + epsilon_high.
        ratio_min, ratio_max: bounds of the ratio itself (CISPO, DPPO).
        sapo_temperature_pos, sapo_temperature_neg: by the sign of the advantage.
        vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: by the sign of the advantage.
        divergence_low, divergence_high: how far a probability may fall, or rise (DPPO, prime).
        log_ratio_penalty: coefficient of the squared log-ratio (prime, DRO).
        cov_ratio, cov_low, cov_high, cov_coef, cov_seed: of clip_cov and kl_cov.
        positive_nll_coef: coefficient of -logp at tokens with A > 0, under the same w_t.
        off_policy_mask_threshold: no policy term for a sequence with A < 0 whose mean of sampler
            (old, where not given) - logp is larger (DeepSeek-V3.2, arXiv 2512.02556).
        top_entropy_quantile: the share of tokens, those of largest entropy, that keep policy term
            and entropy bonus (arXiv 2506.01939).
        beta: coefficient of the KL to the reference.
        kl_estimator: "k1", "k2", "k3", "abs"; "k1+", "k3+", "abs+" with the gradient of k2;
            "k1_score", "k2_score", "k3_score" times exp(logp - sg logp). With ref_hidden also
            "full", the divergence KL(pi || reference) over the whole vocabulary, and "top_k", that
            over the `kl_top_k` likeliest entries of the policy and the rest taken together (a lower
            bound, see `divergence.TopEntries`); both exact in value and gradient.
        kl_clamp: the estimate is clamped to +- this, with gradient 0 beyond. None: as it is.
        use_bias_correction_kl: multiply it by the live ratio (DeepSeek-V3.2, arXiv 2512.02556).
        entropy_coef: coefficient of the entropy bonus, under the same w_t.
        entropy_scale: factors on the bonus, per token or per sequence, for one with other weights
            v_t: v_t / w_t.
        log_ratio_clamp: log-ratios enter exp clamped to +- this, with gradient 0 beyond; None: as
            they are.
        sampling_per_token_logps: log-probs as the sampler reported them; NaN where unknown counts
            as a ratio of 1.
        sampling_correction: weights exp(old - sampler) on the policy term, or with old None
            exp(logp - sampler): "token_truncate", "token_mask", the same for "sequence" (product)
            and "geometric" (mean); "monitor" only logs; "bypass" puts the sampler's log-probs in
            the place of the old ones.
        sampling_ratio_min, sampling_ratio_max: the bounds, 0 and 3 by default.
        rejection: criterion -> bound: "token_", "seq_sum_", "seq_mean_" or "seq_max_" with "k1",
            "k2" or "k3", as in {"seq_mean_k3": 0.01}. All must hold for a token to count. For k1
            a bound u or pair (l, u) is of the ratio sampler / old.
        veto_ratio_min, veto_ratio_max: one token outside rejects its sequence.
        support_top_k, support_top_p, support_min_p: normalise policy and reference over the entries
            that the sampler could have drawn (see `support.SupportOptions`). Log-probabilities that
            are given (old_..., ref_...) must be over the same entries. A target outside counts as
            kept.
        support_min_logp, support_min_logit, support_ids: other ways to say which entries those are.

    Returns:
        GRPOLossOutput. Its metrics: "clip_ratio/low_mean" (share with A < 0 below the objective's
        lower bound), "clip_ratio/high_mean" (above the upper one with A > 0),
        "clip_ratio/region_mean" (either), where the objective has bounds; "ratio/mean|min|max",
        "log_ratio/min|max", "log_ratio/clamped" (share), "effective_sample_size"
        ((sum r)^2 / (N sum r^2)), "num_tokens", "zero_coefficient_fraction" (tokens that skip the
        backward; only where this call forms gradients); "kl" (the term as it enters the loss),
        "kl/log_ratio_clamped", "kl/clamped" (shares), "entropy", "policy_mask/dropped" (share) and
        "sampling/..." (`corrections.statistics`, "importance_ratio/mean|min|max",
        "effective_sample_size", "rejected") where there are any; with a support "support/size"
        (mean number of entries kept) and "support/target_outside" (share of the tokens outside of
        their own support).

    Raises:
        TypeError, ValueError: naming the argument, what was given and what fits. With everything
            masked nothing is raised: the loss is 0 and the gradients are zeros.
    """
    if torch.compiler.is_compiling():
        settings = {
            "completion_mask": completion_mask,
            "old_per_token_logps": old_per_token_logps,
            "ref_per_token_logps": ref_per_token_logps,
            "sampling_per_token_logps": sampling_per_token_logps,
            "importance_sampling_ratio": importance_sampling_ratio,
            "token_weights": token_weights,
            "entropy_scale": entropy_scale,
            "group_ids": group_ids,
            "ref_hidden": ref_hidden,
            "ref_weight": ref_weight,
            "ref_bias": ref_bias,
            "ref_temperature": ref_temperature,
            "ref_logit_scale": ref_logit_scale,
            "ref_softcap": ref_softcap,
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
            "lora_hidden": lora_hidden,
            "lora_weight": lora_weight,
            "process_group": process_group,
            "sequence_group": sequence_group,
            **options,
        }
        return GRPOLossOutput(
            *compiled.loss(hidden, weight, completion_ids, advantages, bias, settings)
        )
    check_transforms("grpo_loss")
    tensors: dict[str, Any] = {
        "old_per_token_logps": old_per_token_logps,
        "ref_per_token_logps": ref_per_token_logps,
        "sampling_per_token_logps": sampling_per_token_logps,
        "importance_sampling_ratio": importance_sampling_ratio,
        "token_weights": token_weights,
        "entropy_scale": entropy_scale,
        "group_ids": group_ids,
    }
    arguments = {"advantages": advantages, "reduction": reduction, "entropy": entropy}
    arguments |= tensors | options
    sequence_group = join_sequences(sequence_group, completion_ids, cu_seqlens, arguments)
    shard = join_vocab(
        process_group,
        hidden,
        weight,
        bias,
        completion_mask,
        {"completion_ids": completion_ids, "completion_mask": completion_mask}
        | {"cu_seqlens": cu_seqlens, "temperature": temperature, "logit_scale": logit_scale}
        | {"softcap": softcap, "backend": backend, "chunk_bytes": chunk_bytes}
        | {"sequence_group": sequence_group is not None}
        | arguments,
    )
    support, options_left = _split(options, SupportOptions)
    routing, loss_options = _split(options_left, RouteOptions)
    spec = _spec(loss_options)
    reference: dict[str, Any] = {
        "ref_hidden": ref_hidden,
        "ref_weight": ref_weight,
        "ref_bias": ref_bias,
        "ref_temperature": ref_temperature,
        "ref_logit_scale": ref_logit_scale,
        "ref_softcap": ref_softcap,
    }
    check_reference(spec, _given({"ref_per_token_logps": ref_per_token_logps} | reference))
    check_choice("backend", backend, BACKENDS)
    check_choice("reduction", reduction, ("sum", "none"))
    check_head(hidden, weight, bias, logit_scale, softcap, chunk_bytes)
    check_lora(hidden, weight, lora_hidden, lora_weight)
    check_tensor("completion_ids", completion_ids, hidden.device, floating=False)
    if hidden.shape[:-1] != completion_ids.shape and not (
        cu_seqlens is not None and hidden.shape[:-1].numel() == completion_ids.numel()
    ):
        raise ValueError(
            f"hidden {list(hidden.shape)} and completion_ids {list(completion_ids.shape)} "
            "differ in their leading dimensions: hidden[:, t] predicts completion_ids[:, t]"
        )
    given_reference = _given(reference)
    check_groups(shard, sequence_group, backend, support, given_reference, spec, (lora_weight,))
    wants = _wants(support, given_reference, lora_weight)
    wants = wants or _group(process_group=process_group, sequence_group=sequence_group)
    head_backend = choose(backend, hidden, weight, wants)
    compact = compaction(compact, head_backend.name, hidden.device, _is_routed(routing))
    if not compact:
        fixed_capacity(spec, tensors)
    batch = _batch(
        spec,
        completion_ids,
        advantages,
        tensors,
        reduction,
        completion_mask=completion_mask,
        cu_seqlens=cu_seqlens,
        dtype=compute_dtype(hidden, weight),
        compact=compact,
        group=sequence_group,
    )
    route = _route(routing, batch.sequence, len(batch.lengths), backend, support, spec, lora_weight)
    if route is not None:  # positions count from the rank's first
        keys = routed.keys_of_part(route.keys, -rank_in(sequence_group))
        route = replace(route, keys=keys)
    call = make_call(
        "completion_ids",
        batch.target,
        batch.index,
        completion_ids.shape,
        hidden,
        weight,
        temperature=temperature,
        logit_scale=logit_scale,
        softcap=softcap,
        chunk_bytes=chunk_bytes,
        check=check_inputs,
        support=support,
        reference=None
        if ref_hidden is None
        else {**reference, "full": spec.kl_estimator == "full", "top_k": spec.kl_top_k},
        backend=head_backend,
        counted=batch.counted,
        shard=shard,
        route=route,
    )
    entropy = entropy or spec.needs_entropy
    if backend == "reference":
        return _reference(
            spec,
            batch,
            (*joined(hidden, weight, lora_hidden, lora_weight), completion_ids, advantages),
            {"bias": bias, "temperature": temperature, "logit_scale": logit_scale}
            | {"softcap": softcap, "entropy": entropy, **support},
            tensors | {"completion_mask": completion_mask, "cu_seqlens": cu_seqlens},
            given_reference,
            loss_options,
            reduction,
        )
    if ref_hidden is not None and not spec.head_kl:  # filled by the head as it goes
        batch = replace(batch, ref=torch.zeros_like(batch.advantages))
    if reduction == "none" or not torch.is_grad_enabled():
        values = token_values(hidden, weight, bias, call, entropy, lora_hidden, lora_weight)
        return _from_values(values, batch, spec, reduction)
    objective = make_objective(spec, batch, head_backend.name)
    loss, per_token, g, *found = FusedLossFunction.apply(
        hidden, weight, bias, lora_hidden, lora_weight, call, objective, entropy
    )
    values = TokenValues(*found)
    logged = objective.metrics(values, g)
    if values.routing is not None:
        vocab = weight.shape[0] if shard is None else shard.vocab
        logged |= routed.metrics(values.routing, g, values.logps, vocab)
    return _output(loss, per_token, values, batch, logged)


class GRPOLoss(nn.Module):
    """`grpo_loss` with its options bound: GRPOLoss(beta=0.04)(hidden, weight, ids, advantages).

    Takes every keyword of `grpo_loss`, here or in the call; the call's come first. Options are
    checked here.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        known = set(inspect.signature(grpo_loss).parameters) - {"options"}
        left = {k: v for k, v in options.items() if k not in known}
        _, loss_options = _split(_split(left, SupportOptions)[1], RouteOptions)
        _spec(loss_options)
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
    sampling_per_token_logps: Tensor | None = None,
    importance_sampling_ratio: Tensor | None = None,
    token_weights: Tensor | None = None,
    entropy_scale: Tensor | None = None,
    group_ids: Tensor | None = None,
    entropies: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    reduction: str = "sum",
    sequence_group: ProcessGroup | None = None,
    **options: Unpack[LossOptions],
) -> GRPOLossOutput:
    """The loss of `grpo_loss` for callers who have log-probabilities already; ordinary autograd.

    Args:
        per_token_logps: [B, T] (packed: [N] or [1, N]) floating point, differentiable.
        entropies: the same shape, differentiable; needed if entropy_coef != 0, and for
            top_entropy_quantile.
        (others): as in `grpo_loss`.

    Raises:
        TypeError, ValueError: as `grpo_loss`.
    """
    tensors = {
        "old_per_token_logps": old_per_token_logps,
        "ref_per_token_logps": ref_per_token_logps,
        "sampling_per_token_logps": sampling_per_token_logps,
        "importance_sampling_ratio": importance_sampling_ratio,
        "token_weights": token_weights,
        "entropy_scale": entropy_scale,
        "group_ids": group_ids,
    }
    sequence_group = join_sequences(
        sequence_group,
        per_token_logps,
        cu_seqlens,
        {"advantages": advantages, "reduction": reduction, **tensors, **options},
    )
    spec = _spec(options)
    check_groups(None, sequence_group, "chunked", spec=spec)
    check_reference(spec, _given({"ref_per_token_logps": ref_per_token_logps}))
    check_choice("reduction", reduction, ("sum", "none"))
    check_tensor("per_token_logps", per_token_logps, None, floating=True)
    if spec.needs_entropy and entropies is None:
        raise ValueError(f"{entropy_option(spec)} needs entropies")
    if entropies is not None:
        check_tensor("entropies", entropies, per_token_logps.device, floating=True)
        if entropies.shape != per_token_logps.shape:
            raise ValueError(
                f"entropies has shape {list(entropies.shape)}, per_token_logps "
                f"{list(per_token_logps.shape)}; they must be the same"
            )
    dtype = torch.float64 if per_token_logps.dtype == torch.float64 else torch.float32
    batch = _batch(
        spec,
        per_token_logps,
        advantages,
        tensors,
        reduction,
        completion_mask=completion_mask,
        cu_seqlens=cu_seqlens,
        dtype=dtype,
        group=sequence_group,
    )
    logps = per_token_logps.reshape(-1)[batch.index].to(dtype)
    h = None if entropies is None else entropies.reshape(-1)[batch.index].to(dtype)
    return _from_values(TokenValues(logps, h), batch, spec, reduction)


def _group(**groups: ProcessGroup | None) -> str | None:
    """What of a call only chunked torch can do: the first group that is given."""
    return next((name for name, group in groups.items() if group is not None), None)


def _known(options: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    for name in options:
        if name not in names:
            arguments = {name for call in CALLS for name in inspect.signature(call).parameters}
            near = difflib.get_close_matches(name, sorted({*names, *arguments}), 1)
            meant = f" (did you mean {near[0]!r}?)" if near else ""
            raise TypeError(f"unknown option {name!r}{meant}; there are {', '.join(names)}")
    return dict(options)


def _split(options: Mapping[str, Any], kind: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the options of a TypedDict, the others)."""
    mine = {k: v for k, v in options.items() if k in kind.__annotations__}
    return mine, {k: v for k, v in options.items() if k not in mine}


def _wants(
    support: Mapping[str, Any],
    reference: Mapping[str, Any] = {},
    adapter: Tensor | None = None,
) -> str | None:
    """What of a call only chunked torch can do."""
    if adapter is not None:
        return ADAPTER
    return "reference head" if reference else "sampling support" if support else None


def _is_routed(options: Mapping[str, Any]) -> bool:
    return options.get("backward", "exact") == "routed" and options.get("route_tau") != 0


def _route(
    options: dict[str, Any],
    sequence: Tensor,
    num_sequences: int,
    backend: str,
    support: Mapping[str, Any],
    spec: LossSpec | None = None,
    adapter: Tensor | None = None,
) -> Route | None:
    route = routed.make_route(options, sequence, num_sequences)  # type: ignore[arg-type]
    if options.get("backward") != "routed":
        return route
    if backend == "reference":
        raise ValueError("backend='reference' has exact gradients only, not backward='routed'")
    if any(value is not None for value in support.values()):
        raise ValueError(f"backward='routed' does not know {', '.join(support)}: use 'exact'")
    if adapter is not None:
        raise ValueError("backward='routed' does not know lora_weight: use 'exact'")
    if spec is not None and spec.head_kl:
        raise ValueError(
            f"backward='routed' does not know kl_estimator={spec.kl_estimator!r}, whose gradient "
            "is not sparse: use 'exact'"
        )
    return route


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a reference that are set."""
    unset = (None, SAME)
    return {k: v for k, v in options.items() if isinstance(v, Tensor) or v not in unset}


def _spec(options: Mapping[str, Any]) -> LossSpec:
    return LossSpec(**_known(options, [f.name for f in fields(LossSpec)]))


def _batch(
    spec: LossSpec,
    tokens: Tensor,
    advantages: Tensor,
    tensors: dict[str, Any],
    reduction: str,
    **layout: Any,
) -> TokenBatch:
    """The batch of a loss, its tensors checked against its options and its corrections made."""
    check_tensors(spec, tensors)
    ratio = tensors["importance_sampling_ratio"]
    if spec.row.folds_weight and isinstance(ratio, Tensor) and ratio.numel() != tokens.numel():
        raise ValueError(
            f"importance_sampling_ratio has shape {list(ratio.shape)}: loss_type="
            f"{spec.loss_type!r} multiplies the ratios of a sequence's tokens, give one per token"
        )
    if reduction == "none" and tensors["token_weights"] is not None:
        raise ValueError("token_weights is given, but reduction='none' would ignore it")
    return prepare(make_batch(tokens, advantages, **tensors, **layout), spec)


def _from_values(
    values: TokenValues, batch: TokenBatch, spec: LossSpec, reduction: str
) -> GRPOLossOutput:
    """The loss by ordinary autograd from log-probabilities [n]."""
    if values.ref_logps is not None and batch.ref is not None:
        batch = replace(batch, ref=values.ref_logps)
    entropy = values.entropy if spec.needs_entropy else None
    per_token = token_terms(values.logps, batch, spec, entropy, values.kl).loss
    if reduction == "none":
        loss = batch.to_layout(per_token)
    else:
        loss = (per_token * spec.token_weights(batch)).sum()
    out = _output(loss, per_token.detach(), values, batch, metrics(values, None, batch, spec))
    return replace(out, per_token_loss=loss) if reduction == "none" else out


def _reference(
    spec: LossSpec,
    batch: TokenBatch,
    positional: tuple[Tensor, Tensor, Tensor, Tensor],
    head: dict[str, Any],
    tensors: dict[str, Any],
    reference: dict[str, Any],
    options: Mapping[str, Any],
    reduction: str,
) -> GRPOLossOutput:
    """Full logits: `reference_loss`, or for what it does not know its log-probs alone."""
    known: set[str] = set()
    for function in (reference_policy_loss, token_losses, reference_loss):
        known |= set(inspect.signature(function).parameters)
    extra = {name for name, value in tensors.items() if value is not None} - known
    known_level = spec.level in ("token", "sequence")
    known_kl = spec.kl_estimator == "k3" or spec.head_kl
    covered = spec.loss_type in REFERENCE_LOSSES and known_level and known_kl
    if covered and not extra | (set(options) - known):
        given = {name: value for name, value in tensors.items() if name in known}
        call: Any = reference_loss
        if reference:
            given.pop("ref_per_token_logps")
        return _from_reference(
            call(*positional, **head, **given, **reference, **options), reduction
        )
    hidden, weight, ids, _ = positional
    counted = batch.to_layout(torch.ones_like(batch.advantages)).bool()
    if reference:
        raise ValueError(
            f"backend='reference' knows {', '.join(reference)} only with the losses "
            f"{', '.join(REFERENCE_LOSSES)} and their own options"
        )
    logps, h, *_ = reference_logprobs(
        hidden.reshape(*ids.shape, hidden.shape[-1]),
        weight,
        ids.long().masked_fill(~counted, -100),
        **head,
    )
    flat = None if h is None else h.reshape(-1)[batch.index]
    values = TokenValues(logps.reshape(-1)[batch.index], flat)
    return _from_values(values, batch, spec, reduction)


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
    values: TokenValues,
    batch: TokenBatch,
    logged: dict[str, Tensor],
) -> GRPOLossOutput:
    entropy = values.entropy
    return GRPOLossOutput(
        loss=loss,
        per_token_loss=batch.to_layout(per_token),
        per_token_logps=batch.to_layout(values.logps.detach()),
        entropy=None if entropy is None else batch.to_layout(entropy.detach()),
        metrics=logged,
    )


CALLS = (grpo_loss, linear_logprobs, policy_loss)  # whose arguments a misspelt option may mean
