"""The head of a transformers causal language model, and a forward that runs a loss on it.

A fused loss needs the hidden states before the head and the head itself, never logits. Reading
`model.lm_head.weight` from outside the model is how adapters, scaled logits and distributed
wrappers get lost silently, so `head_of` either understands a head completely or raises, and
`add_head_forward` runs the loss inside the model's own forward, where the hooks of DDP and
FSDP fire.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from fused_grpo.integrations.adapters import HeadAdapter, unwrapped
from fused_grpo.integrations.experts import auxiliary_loss
from fused_grpo.integrations.logits import logit_rules

HeadFn = Callable[[Tensor, "LanguageModelHead"], Any]


@dataclass(frozen=True)
class LanguageModelHead:
    """What makes logits: softcap((backbone(ids) @ weight.T + bias) * logit_scale).

    Attributes:
        backbone: the module whose first output, [B, L, H], goes into the head.
        weight: [V, H], the parameter itself (the embedding's, where they are tied), or the rows of
            it that the model's logits are cut to.
        bias: [V] or None.
        logit_scale: factor on the logits, before the softcap; one on the hidden states counts.
        softcap: c of c tanh(z / c), or None.
        adapter: LoRA on the head, or None; `weight` is without it.
        aux_loss: with `add_head_forward` and a mixture of experts that outputs its router's
            logits: the load-balancing loss times its coefficient, as the model adds it to its loss.
    """

    backbone: nn.Module
    weight: Tensor
    bias: Tensor | None
    logit_scale: float
    softcap: float | None
    adapter: HeadAdapter | None = None
    aux_loss: Tensor | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The keywords that `grpo_loss` and `linear_logprobs` take for this head.

        Raises:
            ValueError: LoRA on the head, whose keywords depend on the hidden states.
        """
        if self.adapter is not None:
            raise ValueError(
                "the head carries LoRA, whose part of the logits depends on the hidden states: "
                "use **head.arguments(hidden) in place of **head.options"
            )
        return {"bias": self.bias, "logit_scale": self.logit_scale, "softcap": self.softcap}

    def arguments(self, hidden: Tensor) -> dict[str, Any]:
        """The same for these hidden states [..., H], LoRA on the head included.

        Draws the adapter's dropout, so call it once for a loss, with what the loss is given.
        """
        if self.adapter is None:
            return self.options
        lora = {"lora_hidden": self.adapter.hidden(hidden), "lora_weight": self.adapter.weight}
        return replace(self, adapter=None).options | lora

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] for hidden [..., H], as the model computes them."""
        z = nn.functional.linear(hidden, self.weight, self.bias)
        if self.adapter is not None:
            z = z + (self.adapter.hidden(hidden) @ self.adapter.weight.T).to(z.dtype)
        z = z * self.logit_scale
        return z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)


def causal_lm(model: nn.Module) -> Any:
    """The transformers model inside wrappers of DDP, torch.compile and PEFT.

    Raises:
        ValueError: a PEFT method that works on the prompt (prompt or prefix tuning, ...): it
            acts in the wrapper's forward, which a loss on the inner model would bypass.
    """
    inner: Any = model
    while True:
        if hasattr(inner, "_orig_mod"):
            inner = inner._orig_mod
        elif isinstance(inner, nn.parallel.DistributedDataParallel):
            inner = inner.module
        elif hasattr(inner, "peft_config") and hasattr(inner, "get_base_model"):
            for name, config in inner.peft_config.items():
                if getattr(config, "is_prompt_learning", False):
                    raise ValueError(
                        f"model has the adapter {name!r} of type {config.peft_type}: prompt "
                        "learning is not supported; use LoRA or another method on weights"
                    )
            inner = inner.get_base_model()
        else:
            return inner


def is_sharded(model: nn.Module) -> bool:
    """Whether a forward of the model is a collective, which all ranks must come to (FSDP2)."""
    return hasattr(model, "set_reshard_after_forward")


def head_of(model: nn.Module) -> LanguageModelHead:
    """The head of a causal language model; see `LanguageModelHead`.

    Looks through PEFT, DDP and torch.compile, takes LoRA on the head along, and honours what the
    model's forward does to its logits, as far as `logits.logit_rules` knows it. `verify_head`
    compares the result with the model's own logits.

    Raises:
        TypeError: not a transformers model.
        ValueError: a head that is not one linear layer on the backbone's states, an adapter on it
            that is not LoRA, or logits that are made in a way that is not known.
    """
    inner = causal_lm(model)
    if not hasattr(inner, "get_output_embeddings") or not hasattr(inner, "config"):
        raise TypeError(f"model must be a transformers causal LM, not {type(inner).__name__}")
    name = type(inner).__name__
    if getattr(inner.config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder; a causal language model is needed")
    outer = inner.get_output_embeddings()
    head: Any
    head, adapter = unwrapped(outer, name)
    backbone, between = _parts(inner, outer)
    if type(head).forward is not nn.Linear.forward or backbone is inner or between:
        more = f", and {', '.join(between)}" if between else ""
        raise ValueError(
            f"the head of {name} ({type(head).__name__}{more}) is not one linear layer on a "
            "backbone's hidden states; give hidden states and weight to grpo_loss yourself"
        )
    rules = logit_rules(inner, inner.config.get_text_config(decoder=True))
    weight, bias = head.weight, head.bias
    if adapter is not None:
        bias = adapter.add_bias(bias)
    if rules.vocab is not None and rules.vocab < weight.shape[0]:
        weight, bias = weight[: rules.vocab], None if bias is None else bias[: rules.vocab]
        adapter = None if adapter is None else replace(adapter, vocab=rules.vocab)
    return LanguageModelHead(backbone, weight, bias, rules.scale, rules.softcap, adapter)


def _parts(model: Any, head: nn.Module | None) -> tuple[nn.Module, list[str]]:
    """(backbone, other children with parameters: they may stand between it and the head)."""
    others = {
        name: child
        for name, child in model.named_children()
        if child is not head and any(True for _ in child.parameters())
    }
    backbone = model.base_model
    if backbone is model and len(others) == 1:  # Llama 4: its prefix names no attribute
        backbone = next(iter(others.values()))
    return backbone, [name for name, child in others.items() if child is not backbone]


def add_head_forward(model: nn.Module) -> None:
    """Teach the forward of a causal language model the keyword `head_fn`.

    `model(input_ids=..., attention_mask=..., head_fn=f)` runs the backbone and returns
    `f(hidden [B, L, H], head)` instead of logits; without `head_fn` nothing changes. `model` may be
    wrapped in PEFT; wrap it in DDP afterwards. Does nothing the second time.

    A mixture of experts with `output_router_logits` (an argument or in its configuration) has its
    load-balancing loss in `head.aux_loss`, which is the caller's to add.
    """
    model = causal_lm(model)
    head_of(model)  # raises now rather than in the first step
    if getattr(model.forward, "takes_head_fn", False):
        return
    original = getattr(model.forward, "__func__", None)
    if original is None:
        raise ValueError(
            f"{type(model).__name__}.forward was replaced by a plain function, not a method"
        )

    @functools.wraps(original)  # generate() reads the signature
    def forward(self: Any, *args: Any, head_fn: HeadFn | None = None, **kwargs: Any) -> Any:
        if head_fn is None:
            return original(self, *args, **kwargs)
        backbone: Any = head_of(self).backbone
        kwargs.setdefault("use_cache", False)
        routed = kwargs.get("output_router_logits")
        if routed is None:
            routed = getattr(self.config, "output_router_logits", False)
        if routed:
            kwargs["output_router_logits"] = True
        outputs = backbone(*args, **kwargs)
        aux_loss = None
        if routed:
            aux_loss = auxiliary_loss(self, outputs.router_logits, kwargs.get("attention_mask"))

        def at_head(hidden: Tensor) -> Any:  # read here, where FSDP has made the weight whole
            return head_fn(hidden, replace(head_of(self), aux_loss=aux_loss))

        return _with_hooks_of(self.get_output_embeddings(), at_head, outputs[0])

    forward.takes_head_fn = True  # type: ignore[attr-defined]
    # a bound method rather than a closure, so that a deep copy of the model runs its own backbone
    model.forward = MethodType(forward, model)


def _with_hooks_of(head: Any, function: Callable[[Tensor], Any], hidden: Tensor) -> Any:
    """`function(hidden)`, as the forward of a head with FSDP's hooks, which gather its weight."""
    if not is_sharded(head):
        return function(hidden)
    head.forward = function
    try:
        return head(hidden)
    finally:
        del head.forward


@torch.no_grad()
def verify_head(model: Any) -> None:
    """Compare the model's logits on a few tokens with those of `head_of(model)`.

    Twice: as they are, and with the head's input scaled until logits are large, as those of a
    trained model: a softcap hardly shows in the small logits of a random one.

    Raises:
        ValueError: they differ, in their values or their number.
    """
    model = causal_lm(model)
    head = head_of(model)
    training = model.training
    model.eval()
    try:
        ids = torch.arange(1, 5, device=head.weight.device)[None] % head.weight.shape[0]
        hidden = head.backbone(input_ids=ids, use_cache=False)[0]
        largest = head.logits(hidden).abs().max().item()
        for factor in (1.0, 100 / max(largest, 1e-6)):
            with _scaled_input(model.get_output_embeddings(), factor):
                expected = model(input_ids=ids, use_cache=False).logits.float()
            _compare(type(model).__name__, head, head.logits(hidden * factor).float(), expected)
    finally:
        model.train(training)


def _compare(name: str, head: LanguageModelHead, got: Tensor, expected: Tensor) -> None:
    bound = 1e-4 if head.weight.dtype in (torch.float32, torch.float64) else 5e-2
    error = float("inf")
    if got.shape == expected.shape:
        error = (got - expected).abs().max().item() / max(expected.abs().max().item(), 1e-6)
    if not error <= bound:
        raise ValueError(
            f"the head of {name} is not understood: its logits {list(expected.shape)} are not "
            f"softcap((hidden @ weight.T + bias) * {head.logit_scale}) {list(got.shape)}, off by "
            f"{error:.1e} of the maximum"
        )


@contextmanager
def _scaled_input(head: nn.Module, factor: float) -> Iterator[None]:
    hook = head.register_forward_pre_hook(lambda _, args: (args[0] * factor, *args[1:]))
    try:
        yield
    finally:
        hook.remove()
