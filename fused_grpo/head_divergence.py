"""KL(policy || reference) of two linear heads, without the logits of either ever being held."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_grpo.calls import SAME, counted_positions, make_call, token_values
from fused_grpo.checks import check_choice, check_head, check_number, check_transforms
from fused_grpo.memory import DEFAULT_CHUNK_BYTES
from fused_grpo.reference import reference_linear_kl

BACKENDS = ("auto", "chunked", "reference")


def linear_kl(
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
    ref_softcap: float | str | None = SAME,
    top_k: int | None = None,
    backend: str = "auto",
    check_inputs: bool | None = None,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> Tensor:
    """sum_v p_v log(p_v / r_v) at every position, over the whole vocabulary.

    p = softmax of the logits of (hidden, weight), r of those of (ref_hidden, ref_weight), both as
    in `linear_logprobs`. Differentiable in `hidden`, `weight` and `bias` for any upstream gradient,
    with dKL/dz_v = p_v (log p_v - log r_v - KL); the reference is a constant. Matmul work: 2NHV for
    each head, and 6NHV + 2NH_rV for the gradients.

    Args:
        hidden: [..., H] floating point.
        weight: [V, H].
        ref_hidden: [..., H_r], the same leading dimensions; H_r may be another width.
        ref_weight: [V, H_r].
        mask: [...] boolean or 0/1, what counts; elsewhere the result is 0 and nothing, NaN
            included, has an effect. None: everything.
        bias, ref_bias: [V].
        temperature, logit_scale, softcap: as in `linear_logprobs`.
        ref_temperature, ref_logit_scale, ref_softcap: the reference's; default: the policy's.
        top_k: the divergence of the k likeliest entries of p one by one and all others taken
            together, 0 <= KL_k <= KL (`divergence.TopEntries`). None: of all entries.
        backend, check_inputs, chunk_bytes: as in `linear_logprobs`.

    Returns:
        [...] fp32 (fp64 for fp64 inputs), >= 0; infinite where r_v = 0 < p_v.

    Raises:
        TypeError, ValueError: naming the argument, what was given and what fits.
    """
    check_transforms("linear_kl")
    check_choice("backend", backend, BACKENDS)
    check_head(hidden, weight, bias, logit_scale, softcap, chunk_bytes)
    if top_k is not None:
        check_number("top_k", top_k, lambda k: k >= 1 and k == int(k), "an integer >= 1, or None")
    lead = hidden.shape[:-1]
    index = counted_positions(mask, hidden)
    reference = {
        "ref_hidden": ref_hidden,
        "ref_weight": ref_weight,
        "ref_bias": ref_bias,
        "ref_temperature": ref_temperature,
        "ref_logit_scale": ref_logit_scale,
        "ref_softcap": ref_softcap,
    }
    call = make_call(
        "mask",
        torch.zeros_like(index),  # some entry has to be kept apart
        index,
        lead,
        hidden,
        weight,
        temperature=temperature,
        logit_scale=logit_scale,
        softcap=softcap,
        chunk_bytes=chunk_bytes,
        check=check_inputs,
        reference={**reference, "full": top_k is None, "top_k": top_k},
    )
    if backend == "reference":
        return reference_linear_kl(
            hidden,
            weight,
            mask=mask,
            bias=bias,
            temperature=temperature,
            logit_scale=logit_scale,
            softcap=softcap,
            top_k=top_k,
            **reference,  # type: ignore[arg-type]
        )
    kl = token_values(hidden, weight, bias, call, False).kl
    assert kl is not None
    return kl.new_zeros(lead.numel()).index_copy(0, index, kl).view(lead)
