"""The public calls as operators of their own, for torch.compile: one opaque node each.

Under the compiler `grpo_loss` and `linear_logprobs` go through these; inside, they are called as
ever. The shapes of all results follow from those of the arguments, so nothing breaks the graph,
and what depends on the data (which tokens count, which send nothing back) stays inside. Gradients
of a summed loss are formed in the forward, those of per-token results by computing them again.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fused_grpo.kl import HEAD_KL
from fused_grpo.objectives.registry import loss_type_row
from fused_grpo.support import SupportOptions

# Tensors that a call may be given by name, in the order of the operators' arguments.
_SUPPORT_TENSORS = ("support_min_logp", "support_min_logit", "support_ids")
_LOSS_TENSORS = (
    "completion_mask",
    "old_per_token_logps",
    "ref_per_token_logps",
    "importance_sampling_ratio",
    "token_weights",
    "entropy_scale",
    "group_ids",
    "ref_hidden",
    "ref_weight",
    "ref_bias",
    "ref_temperature",
    *_SUPPORT_TENSORS,
    "sequence_ids",
    "cu_seqlens",
    "temperature",
    "num_items_in_batch",
    "num_sequences",
)
_LOGPROBS_TENSORS = ("temperature", *_SUPPORT_TENSORS, "sequence_ids")
_LORA = ("lora_hidden", "lora_weight")
_GROUPS = ("process_group", "sequence_group")
_NONE = (0,)  # the shape of a result that was not asked for


def _refuse(call: str, given: dict[str, Any], *names: str) -> None:
    for name in names:
        if name in given:
            raise ValueError(f"{name} is given, which {call} does not take under torch.compile")


def _split(options: dict[str, Any], names: tuple[str, ...]) -> tuple[list[Tensor | None], str]:
    """Options as a call takes them -> optional tensors, and a line "name=value" for each other."""
    tensors = [x if isinstance(x, Tensor) else None for x in [options.get(n) for n in names]]
    lines = [
        name + "=" + repr(value)
        for name, value in options.items()
        if value is not None and not isinstance(value, Tensor)
    ]
    return tensors, "\n".join(lines)


def _join(names: tuple[str, ...], tensors: Sequence[Tensor | None], lines: str) -> dict[str, Any]:
    pairs = (line.split("=", 1) for line in lines.splitlines())
    options = {name: ast.literal_eval(value) for name, value in pairs}
    return options | {n: x for n, x in zip(names, tensors, strict=True) if x is not None}


def _metric_names(options: dict[str, Any], formed: bool) -> list[str]:
    """The metrics of a call, sorted. `formed`: its gradients are formed in the forward."""
    names = ["effective_sample_size", "num_tokens", "log_ratio/clamped"]
    names += ["ratio/mean", "ratio/min", "ratio/max", "log_ratio/min", "log_ratio/max"]
    if loss_type_row(options.get("loss_type", "dapo")).clipped is not None:
        names += ["clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"]
    if options.get("beta"):
        names.append("kl")
        if options.get("kl_estimator") not in HEAD_KL:
            names += ["kl/log_ratio_clamped", "kl/clamped"]
    masks = options.get("off_policy_mask_threshold") is not None
    names += ["policy_mask/dropped"] if masks or options.get("top_entropy_quantile", 1) < 1 else []
    if any(name in options for name in SupportOptions.__annotations__):
        names += ["support/size", "support/target_outside"]
    names += ["entropy"] if _has_entropy(options) else []
    if formed and options.get("backward") == "routed" and options.get("route_tau") != 0:
        names += ["route/kept_per_token", "route/dense_fraction", "route/relative_noise"]
    return sorted([*names, "zero_coefficient_fraction"] if formed else names)


def _has_entropy(options: dict[str, Any]) -> bool:
    quantile = options.get("top_entropy_quantile", 1) < 1
    row = loss_type_row(options.get("loss_type", "dapo"))
    return bool(options.get("entropy") or options.get("entropy_coef") or quantile or row.entropy)


@contextlib.contextmanager
def _autograd() -> Iterator[None]:
    """An operator runs below autograd; the calls in here bring their own."""
    key = torch._C.DispatchKey.AutogradFunctionality
    before = torch._C._dispatch_tls_is_dispatch_key_excluded(key)
    torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        with torch.enable_grad():
            yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, before)


def _results_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)


def _leaves(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor | None]:
    def leaf(x: Tensor, need: bool) -> Tensor:
        return x.detach().requires_grad_(need)

    return (
        leaf(hidden, needs[0]),
        leaf(weight, needs[1]),
        None if bias is None else leaf(bias, needs[2]),
    )


def _gradients(
    values: Sequence[Tensor], leaves: Sequence[Tensor | None], upstream: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor, Tensor]:
    """Of hidden states, weight and bias; empty where none is needed."""
    wanted = [x for x in leaves if x is not None and x.requires_grad]
    found = iter(torch.autograd.grad(values, wanted, upstream) if wanted else ())
    hidden, weight, bias = (
        next(found) if x is not None and x.requires_grad else values[0].new_empty(_NONE)
        for x in leaves
    )
    return hidden, weight, bias


def _fake_gradients(
    leaves: Sequence[Tensor | None], needs: Sequence[bool], like: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight, bias = (
        like.new_empty(x.shape, dtype=x.dtype) if x is not None and need else like.new_empty(_NONE)
        for x, need in zip(leaves, needs, strict=True)
    )
    return hidden, weight, bias


def _kept(grads: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor | None]:
    return [x if need else None for x, need in zip(grads, needs, strict=True)]


# --- the loss ------------------------------------------------------------------------------------


@torch.library.custom_op("fused_grpo::loss", mutates_args=())
def _loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    advantages: Tensor,
    tensors: Sequence[Tensor | None],
    lines: str,
    needs: Sequence[bool],
    formed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, per_token_loss, logps, entropy, metrics, dhidden, dweight, dbias)."""
    from fused_grpo.loss import grpo_loss

    options = _join(_LOSS_TENSORS, tensors, lines)
    h, w, b = leaves = _leaves(hidden, weight, bias, [need and formed for need in needs])
    with _autograd() if formed else torch.no_grad():
        out = grpo_loss(h, w, ids, advantages, bias=b, **options)
        grads = _gradients([out.loss], leaves, [None])
    none = out.loss.new_empty(_NONE)
    one_apart = options.get("reduction") != "none"
    return (
        out.loss.detach(),
        out.per_token_loss.detach() if one_apart else none,
        out.per_token_logps,
        none.clone() if out.entropy is None else out.entropy,
        torch.stack([out.metrics[k].float() for k in _metric_names(options, formed)]),
        *grads,
    )


@_loss.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    advantages: Tensor,
    tensors: Sequence[Tensor | None],
    lines: str,
    needs: Sequence[bool],
    formed: bool,
) -> tuple[Tensor, ...]:
    options = _join(_LOSS_TENSORS, tensors, lines)
    per_token = hidden.new_empty(ids.shape, dtype=_results_dtype(hidden, weight))
    none, apart = per_token.new_empty(_NONE), options.get("reduction") != "none"
    entropy = _has_entropy(options)
    count = len(_metric_names(options, formed))
    return (
        per_token.new_empty(()) if apart else torch.empty_like(per_token),
        torch.empty_like(per_token) if apart else none,
        torch.empty_like(per_token),
        torch.empty_like(per_token) if entropy else none.clone(),
        per_token.new_empty(count, dtype=torch.float32),
        *_fake_gradients((hidden, weight, bias), [need and formed for need in needs], per_token),
    )


@torch.library.custom_op("fused_grpo::loss_backward", mutates_args=())
def _loss_backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    advantages: Tensor,
    tensors: Sequence[Tensor | None],
    lines: str,
    needs: Sequence[bool],
    upstream: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of unreduced losses, from an upstream gradient of each."""
    from fused_grpo.loss import grpo_loss

    options = _join(_LOSS_TENSORS, tensors, lines)
    h, w, b = leaves = _leaves(hidden, weight, bias, needs)
    with _autograd():
        out = grpo_loss(h, w, ids, advantages, bias=b, **options)
        return _gradients([out.loss], leaves, [upstream])


@_loss_backward.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    advantages: Tensor,
    tensors: Sequence[Tensor | None],
    lines: str,
    needs: Sequence[bool],
    upstream: Tensor,
) -> tuple[Tensor, ...]:
    return _fake_gradients((hidden, weight, bias), needs, upstream)


def _save_loss(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *head, ids, advantages, tensors, lines, needs, formed = inputs
    ctx.needs, ctx.formed, ctx.lines = needs, formed, lines
    ctx.save_for_backward(*(output[5:] if formed else (*head, ids, advantages, *tensors)))


def _backward_loss(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Any, ...]:
    if ctx.formed:
        grads = [(t * upstream).to(t.dtype) for t in ctx.saved_tensors]
    else:
        *head, ids, advantages = ctx.saved_tensors[:5]
        tensors = list(ctx.saved_tensors[5:])
        grads = _loss_backward(*head, ids, advantages, tensors, ctx.lines, ctx.needs, upstream)
    return *_kept(grads, ctx.needs), None, None, None, None, None, None


_loss.register_autograd(_backward_loss, setup_context=_save_loss)


def loss(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    advantages: Tensor,
    bias: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, dict[str, Tensor]]:
    """`grpo_loss` under the compiler: (loss, per-token losses, logps, entropy, metrics)."""
    given = {name: x for name, x in options.items() if x is not None}
    _refuse("grpo_loss", given, "sampling_per_token_logps", "sampling_correction", "rejection")
    _refuse("grpo_loss", given, *_LORA, *_GROUPS)
    tensors, lines = _split(given, _LOSS_TENSORS)
    apart = options["reduction"] != "none"
    formed = apart and torch.is_grad_enabled()
    needs = [x is not None and x.requires_grad for x in (hidden, weight, bias)]
    total, per_token, logps, entropy, metrics, *_ = _loss(
        hidden, weight, bias, ids, advantages, tensors, lines, needs, formed
    )
    named = dict(zip(_metric_names(options, formed), metrics.detach().unbind(), strict=True))
    has_entropy = _has_entropy(options)
    return (
        total,
        per_token.detach() if apart else total,
        logps.detach(),
        entropy.detach() if has_entropy else None,
        named,
    )


# --- log-probabilities ---------------------------------------------------------------------------


@torch.library.custom_op("fused_grpo::logprobs", mutates_args=())
def _logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    tensors: Sequence[Tensor | None],
    lines: str,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    from fused_grpo.loss import linear_logprobs

    with torch.no_grad():
        options = _join(_LOGPROBS_TENSORS, tensors, lines)
        out = linear_logprobs(hidden, weight, targets, bias=bias, **options)
    return out.logps, out.logps.new_empty(_NONE) if out.entropy is None else out.entropy


@_logprobs.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    tensors: Sequence[Tensor | None],
    lines: str,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    logps = hidden.new_empty(targets.shape, dtype=_results_dtype(hidden, weight))
    entropy = _join(_LOGPROBS_TENSORS, tensors, lines).get("entropy")
    return logps, torch.empty_like(logps) if entropy else logps.new_empty(_NONE)


@torch.library.custom_op("fused_grpo::logprobs_backward", mutates_args=())
def _logprobs_backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    tensors: Sequence[Tensor | None],
    lines: str,
    needs: Sequence[bool],
    g: Tensor,
    e: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    from fused_grpo.loss import linear_logprobs

    options = _join(_LOGPROBS_TENSORS, tensors, lines)
    h, w, b = leaves = _leaves(hidden, weight, bias, needs)
    with _autograd():
        out = linear_logprobs(h, w, targets, bias=b, **options)
        if e is None or out.entropy is None:
            return _gradients([out.logps], leaves, [g])
        return _gradients([out.logps, out.entropy], leaves, [g, e])


@_logprobs_backward.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    tensors: Sequence[Tensor | None],
    lines: str,
    needs: Sequence[bool],
    g: Tensor,
    e: Tensor | None,
) -> tuple[Tensor, ...]:
    return _fake_gradients((hidden, weight, bias), needs, g)


def _save_logprobs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *head, targets, tensors, lines, needs = inputs
    ctx.needs, ctx.lines = needs, lines
    ctx.has_entropy = output[1].shape == output[0].shape and "entropy=True" in lines
    ctx.save_for_backward(*head, targets, *tensors)


def _backward_logprobs(ctx: Any, g: Tensor, e: Tensor) -> tuple[Any, ...]:
    *head, targets = ctx.saved_tensors[:4]
    tensors = list(ctx.saved_tensors[4:])
    grads = _logprobs_backward(
        *head, targets, tensors, ctx.lines, ctx.needs, g, e if ctx.has_entropy else None
    )
    return *_kept(grads, ctx.needs), None, None, None, None


_logprobs.register_autograd(_backward_logprobs, setup_context=_save_logprobs)


def logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """`linear_logprobs` under the compiler: (logps, entropy)."""
    options = {name: x for name, x in options.items() if x is not None}
    _refuse("linear_logprobs", options, *_LORA, *_GROUPS)
    tensors, lines = _split(options, _LOGPROBS_TENSORS)
    needs = [x is not None and x.requires_grad for x in (hidden, weight, bias)]
    logps, entropy = _logprobs(hidden, weight, bias, targets, tensors, lines, needs)
    return logps, entropy if options["entropy"] else None
