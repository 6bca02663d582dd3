"""Liger's fused GRPO loss, of 0.8.5, on this package's path.

    from fused_grpo.integrations.liger import FusedLinearGRPOLoss  # for LigerFusedLinearGRPOLoss

or `patch()`, which puts it in the place of Liger's own. Signatures, defaults, results and quirks
are Liger's (docs/integrations.md, "Liger"); `grpo_loss` has none of the quirks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from fused_grpo.checks import check_tensor
from fused_grpo.integrations.liger_options import LOG_HUGE, LOG_TINY, Options
from fused_grpo.integrations.patching import Patch, Replacement, check_version, holders
from fused_grpo.kl import k3
from fused_grpo.loss import grpo_loss, linear_logprobs, policy_loss

SUPPORTED = ("0.8.5",)


# ---- the loss


def fused_linear_grpo(
    _input: Tensor,
    weight: Tensor,
    selected_token_ids: Tensor,
    attention_mask: Tensor,
    advantages: Tensor,
    bias: Tensor | None = None,
    ref_per_token_logps: Tensor | None = None,
    old_per_token_logps: Tensor | None = None,
    ref_input: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    beta: float = 0.04,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    loss_type: str = "dapo",
    max_completion_length: int | None = None,
    importance_sampling_level: str = "token",
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    temperature: float = 1.0,
    compiled: bool = True,
    use_ref_model: bool = True,
    chunk_size: int = 1,
    vllm_is_ratio: Tensor | None = None,
    delta: float | None = None,
    use_bias_correction_kl: bool = False,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
    num_items_in_batch: float | Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`liger_kernel.chunked_loss.functional.liger_fused_linear_grpo`, argument for argument.

    See `FusedLinearGRPOLoss`, whose call it is with the options at hand.
    """
    given = locals()
    options = Options(**{f.name: given[f.name] for f in fields(Options)})
    _check_layout(_input, selected_token_ids, attention_mask, advantages)
    tensors = _reference(options, ref_per_token_logps, ref_input, ref_weight, ref_bias)
    if old_per_token_logps is not None:
        tensors["old_per_token_logps"] = old_per_token_logps
    ratio = _importance(vllm_is_ratio, attention_mask)
    head = {"bias": bias, "temperature": float(temperature)}
    call = _Call(_input, weight, selected_token_ids, attention_mask, advantages, head, tensors)
    if options.loss_type == "luspo":
        loss, metrics = _luspo(call, options, ratio)
    else:
        loss, metrics = _plain(call, options, ratio, num_items_in_batch)
    nothing = torch.zeros((), dtype=torch.float32, device=loss.device)
    logged = [metrics.get("kl", nothing)] if beta != 0 else []
    logged.append(metrics.get("clip_ratio/region_mean", nothing))
    return loss.float(), tuple(x.float() for x in logged)


@dataclass(frozen=True)
class _Call:
    """The tensors of a call; `tensors` holds those of the old and of the reference policy."""

    hidden: Tensor
    weight: Tensor
    ids: Tensor
    mask: Tensor
    advantages: Tensor
    head: dict[str, Any]
    tensors: dict[str, Any]


_Results = tuple[Tensor, Mapping[str, Tensor]]


def _plain(
    call: _Call, options: Options, ratio: Tensor | None, items: float | Tensor | None
) -> _Results:
    """Everything but luspo: `grpo_loss`."""
    extra = options.of_loss()
    if options.kind.counts_items:
        extra["num_items_in_batch"] = _items_per_rank(items, call.mask)
    if ratio is not None and options.loss_type == "vespo":
        # over all positions, masked or not, as Liger sums them
        total = ratio.float().log().clamp(LOG_TINY, LOG_HUGE).sum(1, keepdim=True)
        ratio = total.expand(call.ids.shape)
    out = grpo_loss(
        call.hidden,
        call.weight,
        call.ids,
        call.advantages,
        completion_mask=call.mask,
        importance_sampling_ratio=ratio,
        **call.head,
        **call.tensors,
        **extra,
    )
    return out.loss, out.metrics


def _luspo(call: _Call, options: Options, ratio: Tensor | None) -> _Results:
    """sum_b n_b sum_t loss_bt / (B width) over the loss as it is shaped, masked positions included.

    A sequence-level loss is [B, 1], and the sum is that of luspo; a KL or a weight per token makes
    it [B, T], as token-level ratios do.
    """
    rows, width = call.ids.shape
    by_token = options.importance_sampling_level == "token"
    wide_ratio = ratio is not None and ratio.shape[1] == width and width > 1
    if by_token or options.penalises or wide_ratio:
        return _wide_luspo(call, options, ratio, by_token)
    out = grpo_loss(
        call.hidden,
        call.weight,
        call.ids,
        call.advantages,
        completion_mask=call.mask,
        importance_sampling_ratio=ratio,
        token_weights=torch.full(
            (rows, width), 1 / rows, dtype=torch.float64, device=call.ids.device
        ),
        **call.head,
        **call.tensors,
        **options.of_loss(),
    )
    return out.loss, out.metrics


def _wide_luspo(call: _Call, options: Options, ratio: Tensor | None, by_token: bool) -> _Results:
    """Where the loss is [B, T]: by autograd from log-probabilities of all positions."""
    ref_logps, old = _reference_logps(call), call.tensors.get("old_per_token_logps")
    logps = linear_logprobs(call.hidden, call.weight, call.ids, **call.head).logps
    spec = options.of_loss()
    with torch.no_grad():
        seen = policy_loss(
            logps.detach(),
            call.advantages,
            completion_mask=call.mask,
            old_per_token_logps=old,
            ref_per_token_logps=ref_logps,
            **spec,
        )
    losses = policy_loss(
        logps,
        call.advantages,
        completion_mask=None if by_token else call.mask,
        old_per_token_logps=old,
        reduction="none",
        **{k: v for k, v in spec.items() if k not in ("beta", "use_bias_correction_kl")},
    ).per_token_loss
    lengths = call.mask.to(logps.dtype).sum(1, keepdim=True)
    log_ratio = logps - (logps.detach() if old is None else old)
    if not by_token:
        n = lengths.clamp(min=1)
        losses = losses.sum(1, keepdim=True) / n
        log_ratio = torch.where(call.mask != 0, log_ratio, 0).sum(1, keepdim=True) / n
    losses = losses if ratio is None else losses * ratio
    if ref_logps is not None:
        kl = k3(ref_logps - logps)
        kl = kl * log_ratio.exp() if options.use_bias_correction_kl else kl
        losses = losses + options.beta * kl
    return (losses * lengths).sum() / (logps.shape[0] * losses.shape[1]), seen.metrics


def _reference_logps(call: _Call) -> Tensor | None:
    """[B, T] of the reference, computed where its hidden states are given."""
    if "ref_hidden" not in call.tensors:
        return call.tensors.get("ref_per_token_logps")
    head = {"bias": call.tensors["ref_bias"], "temperature": call.head["temperature"]}
    with torch.no_grad():
        hidden, weight = call.tensors["ref_hidden"], call.tensors["ref_weight"]
        return linear_logprobs(hidden, weight, call.ids, **head).logps


def _check_layout(hidden: Tensor, ids: Tensor, mask: Tensor, advantages: Tensor) -> None:
    for name, value, floating in (
        ("_input", hidden, True),
        ("selected_token_ids", ids, False),
        ("attention_mask", mask, None),
        ("advantages", advantages, True),
    ):
        check_tensor(name, value, None, floating=floating)
    if hidden.dim() != 3 or ids.shape != hidden.shape[:2] or mask.shape != ids.shape:
        raise ValueError(
            f"_input {list(hidden.shape)}, selected_token_ids {list(ids.shape)} and attention_mask "
            f"{list(mask.shape)} must be [B, T, H], [B, T] and [B, T]"
        )
    if advantages.shape != ids.shape[:1]:
        raise ValueError(
            f"advantages has shape {list(advantages.shape)}; it must be [{ids.shape[0]}], one per "
            "sequence, as in Liger (grpo_loss takes one per token)"
        )


def _reference(
    options: Options,
    logps: Tensor | None,
    hidden: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
) -> dict[str, Any]:
    """What `grpo_loss` is given of the reference: nothing where Liger would not use it."""
    if not options.use_ref_model:
        return {}
    if logps is None and hidden is None:
        raise ValueError("use_ref_model=True needs ref_per_token_logps or ref_input")
    if logps is not None and hidden is not None:
        warnings.warn(
            "Both ref_per_token_logps and ref_input are provided. Using ref_per_token_logps.",
            stacklevel=4,
        )
    if not options.penalises:
        return {}
    if logps is not None:
        return {"ref_per_token_logps": logps}
    if weight is None:
        raise ValueError("ref_input needs ref_weight")
    return {"ref_hidden": hidden, "ref_weight": weight, "ref_bias": bias}


def _importance(ratio: Tensor | None, mask: Tensor) -> Tensor | None:
    """[B, 1] or [B, T], of vllm_is_ratio."""
    if ratio is None:
        return None
    check_tensor("vllm_is_ratio", ratio, None, floating=True)
    rows, width = mask.shape
    if ratio.shape not in ((rows,), (rows, 1), (rows, width)):
        raise ValueError(
            f"vllm_is_ratio has shape {list(ratio.shape)}; it must be [{rows}], [{rows}, 1] or "
            f"[{rows}, {width}]"
        )
    return ratio.unsqueeze(-1) if ratio.dim() == 1 else ratio


def _items_per_rank(items: float | Tensor | None, mask: Tensor) -> float | Tensor | None:
    """The divisor of the token mean: num_items_in_batch, or all ranks' tokens, over the ranks."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    world = torch.distributed.get_world_size() if distributed else 1
    if items is None:
        if world == 1:
            return None
        items = mask.sum().float()
        torch.distributed.all_reduce(items)
    return items / world


class FusedLinearGRPOLoss(nn.Module):
    """`LigerFusedLinearGRPOLoss` of Liger 0.8.5: the same constructor, call and results.

    Kept as they are there, with the loss of `grpo_loss` otherwise:

    - cispo caps the ratio at `epsilon_high` itself, 0.2 unless it is set, and has no lower bound;
    - luspo with token-level ratios, a KL or a weight per token divides by the padded width as well,
      and sums over masked positions; their ids must then be in the vocabulary;
    - vespo multiplies the importance weights of masked positions too; a gain that overflows is 0;
    - without a reference (`use_ref_model=False`) the KL is 0, whatever `beta`;
    - both `ref_per_token_logps` and `ref_input`: a warning, and the first is used;
    - dapo, cispo and vespo divide by `num_items_in_batch` over the number of ranks, or by the mean
      over ranks of their tokens; the others ignore it, as they do every option that is not theirs;
    - log-ratios are not clamped; loss and metrics are fp32.

    Not kept: logits are fp32 from fp32 accumulators and gradients summed in fp32, where Liger's are
    rounded to the dtype of `_input` and `weight`; a masked position has no effect, NaN included
    (luspo's exceptions aside); ids out of range raise. What Liger asserts raises ValueError.

    Args:
        beta, use_ref_model, use_bias_correction_kl, temperature: as there. `beta` < 0 and
            temperature <= 0 raise in the call.
        epsilon_low, epsilon_high, loss_type, importance_sampling_level, max_completion_length: as
            there.
        sapo_temperature_pos, sapo_temperature_neg: as there.
        vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: as there. vespo_k <= 0 raises
            in the call.
        delta: upper bound of the ratio; at most 1 raises in the call, as it would clip every token.
        compiled, chunk_size: without effect: nothing needs compiling, and chunks are chosen by
            memory.

    Call: (_input [B, T, H], lin_weight [V, H], selected_token_ids [B, T], attention_mask [B, T],
    advantages [B], bias [V], ref_per_token_logps [B, T], old_per_token_logps [B, T], ref_input
    [B, T, H_r], ref_weight [V, H_r], ref_bias [V], vllm_is_ratio [B], [B, 1] or [B, T],
    num_items_in_batch) -> (loss [], (kl [] if beta != 0, share of clipped tokens [])).
    """

    def __init__(
        self,
        beta: float = 0.04,
        compiled: bool = True,
        use_ref_model: bool = True,
        chunk_size: int = 1,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        loss_type: str = "dapo",
        max_completion_length: int | None = None,
        importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        temperature: float = 1.0,
        delta: float | None = None,
        use_bias_correction_kl: bool = False,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
    ) -> None:
        super().__init__()
        given = locals()
        for name in ("sapo_temperature_pos", "sapo_temperature_neg", "delta"):
            if given[name] is not None and given[name] <= 0:
                raise ValueError(f"{name} must be positive, got {given[name]}")
        # attributes, as in Liger: code that sets one afterwards is honoured
        for f in fields(Options):
            setattr(self, f.name, given[f.name])

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        selected_token_ids: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: float | Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        options = {f.name: getattr(self, f.name) for f in fields(Options)}
        return fused_linear_grpo(
            _input,
            lin_weight,
            selected_token_ids,
            attention_mask,
            advantages,
            bias,
            ref_per_token_logps,
            old_per_token_logps,
            ref_input,
            ref_weight,
            ref_bias,
            vllm_is_ratio=vllm_is_ratio,
            num_items_in_batch=num_items_in_batch,
            **options,
        )


# ---- in Liger's place


def _replacements() -> list[Replacement]:
    check_version("liger-kernel", SUPPORTED)
    from liger_kernel.chunked_loss import functional, grpo_loss

    ours: list[tuple[object, Callable[..., Any]]] = [
        (grpo_loss.LigerFusedLinearGRPOLoss, FusedLinearGRPOLoss),
        (functional.liger_fused_linear_grpo, fused_linear_grpo),
    ]
    return [
        (module, name, new)
        for old, new in ours
        for module, name in holders(("liger_kernel", "trl"), old)
    ]


_PATCH = Patch("liger_kernel's fused GRPO loss", _replacements)


def patch() -> Patch:
    """Puts ours in the place of `LigerFusedLinearGRPOLoss` and `liger_fused_linear_grpo`, in every
    module of Liger and TRL that has imported them. Also usable as `with patch():`.

    Losses that were made before keep what they were made of, and so does
    `LigerFusedLinearGRPOFunction`, the autograd function inside them.

    Raises:
        RuntimeError: Liger is not installed or not 0.8.5, or it is patched already.
    """
    return _PATCH.apply()


def unpatch() -> None:
    """Puts Liger's own back.

    Raises:
        RuntimeError: it is not patched, or something else has taken the same place since.
    """
    _PATCH.undo()
