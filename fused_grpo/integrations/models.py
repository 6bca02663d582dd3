"""The head of a transformers causal language model, and a forward that runs a loss on it.

A fused loss needs the hidden states before the head and the head itself, never logits. Reading
`model.lm_head.weight` from outside the model is how adapters, scaled logits and distributed
wrappers get lost silently, so `head_of` either understands a head completely or raises, and
`add_head_forward` runs the loss inside the model's own forward, where the hooks of DDP and
FSDP fire.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

HeadFn = Callable[[Tensor, "LanguageModelHead"], Any]


@dataclass(frozen=True)
class LanguageModelHead:
    """What makes logits: softcap((backbone(ids) @ weight.T + bias) * logit_scale).

    Attributes:
        backbone: the module whose first output, [B, L, H], goes into the head.
        weight: [V, H], the parameter itself (the embedding's, where they are tied).
        bias: [V] or None.
        logit_scale: factor on the logits, before the softcap.
        softcap: c of c tanh(z / c), or None.
    """

    backbone: nn.Module
    weight: Tensor
    bias: Tensor | None
    logit_scale: float
    softcap: float | None

    @property
    def options(self) -> dict[str, Any]:
        """The keywords that `grpo_loss` and `linear_logprobs` take for this head."""
        return {"bias": self.bias, "logit_scale": self.logit_scale, "softcap": self.softcap}

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] for hidden [..., H], as the model computes them."""
        z = nn.functional.linear(hidden, self.weight, self.bias) * self.logit_scale
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


def head_of(model: nn.Module) -> LanguageModelHead:
    """The head of a causal language model; see `LanguageModelHead`.

    Looks through PEFT, DDP and torch.compile, and honours `final_logit_softcapping` (Gemma),
    `logit_scale` (Cohere), `logits_scaling` (Granite, a divisor), `lm_head_multiplier` (Falcon-H1).

    Raises:
        TypeError: not a transformers model.
        ValueError: an adapter on the head, or a head that is not one linear layer.
    """
    inner = causal_lm(model)
    if not hasattr(inner, "get_output_embeddings") or not hasattr(inner, "config"):
        raise TypeError(f"model must be a transformers causal LM, not {type(inner).__name__}")
    name = type(inner).__name__
    if getattr(inner.config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder; a causal language model is needed")
    head = _active_copy(inner.get_output_embeddings(), name)
    weight, bias = getattr(head, "weight", None), getattr(head, "bias", None)
    backbone = inner.base_model
    if not isinstance(weight, Tensor) or backbone is inner:
        raise ValueError(
            f"the head of {name} ({type(head).__name__}) is not one linear layer on a backbone's "
            "hidden states; give hidden states and weight to grpo_loss yourself"
        )
    text = inner.config.get_text_config(decoder=True)
    softcap = getattr(text, "final_logit_softcapping", None)
    return LanguageModelHead(
        backbone,
        weight,
        bias,
        _logit_scale(text, name),
        None if softcap is None else float(softcap),
    )


def add_head_forward(model: nn.Module) -> None:
    """Teach the forward of a causal language model the keyword `head_fn`.

    `model(input_ids=..., attention_mask=..., head_fn=f)` runs the backbone and returns
    `f(hidden [B, L, H], head)` instead of logits; without `head_fn` nothing changes. `model` may be
    wrapped in PEFT; wrap it in DDP afterwards. Does nothing the second time.
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
    def forward(self: nn.Module, *args: Any, head_fn: HeadFn | None = None, **kwargs: Any) -> Any:
        if head_fn is None:
            return original(self, *args, **kwargs)
        head = head_of(self)
        kwargs.setdefault("use_cache", False)
        return head_fn(head.backbone(*args, **kwargs)[0], head)

    forward.takes_head_fn = True  # type: ignore[attr-defined]
    # a bound method rather than a closure, so that a deep copy of the model runs its own backbone
    model.forward = MethodType(forward, model)


@torch.no_grad()
def verify_head(model: nn.Module) -> None:
    """Compare the model's logits on a few tokens with those of `head_of(model)`.

    A model may scale its logits by a rule that no configuration attribute tells.

    Raises:
        ValueError: they differ.
    """
    model = causal_lm(model)
    head = head_of(model)
    training = model.training
    model.eval()
    ids = torch.arange(1, 5, device=head.weight.device)[None] % head.weight.shape[0]
    expected = model(input_ids=ids, use_cache=False).logits.float()
    got = head.logits(head.backbone(input_ids=ids, use_cache=False)[0]).float()
    model.train(training)
    scale = max(expected.abs().max().item(), 1e-6)
    error = (got[..., : expected.shape[-1]] - expected).abs().max().item() / scale
    bound = 1e-4 if head.weight.dtype in (torch.float32, torch.float64) else 5e-2
    if not error <= bound:
        raise ValueError(
            f"the head of {type(model).__name__} is not understood: its logits are not "
            f"softcap((hidden @ weight.T + bias) * {head.logit_scale}), off by {error:.1e} of the "
            "maximum"
        )


def _active_copy(head: Any, name: str) -> Any:
    """The head itself, or the copy that PEFT's `modules_to_save` trains in its place."""
    if head is None:
        raise ValueError(f"{name} has no output embeddings: it is not a causal language model")
    if hasattr(head, "modules_to_save"):
        adapter = getattr(head, "active_adapter", "default")
        adapter = adapter[0] if isinstance(adapter, list) else adapter
        disabled = getattr(head, "disable_adapters", False)
        return head.original_module if disabled else head.modules_to_save[adapter]
    if hasattr(head, "base_layer") or hasattr(head, "token_adapter"):
        raise ValueError(
            f"the head of {name} carries an adapter ({type(head).__name__}), which a loss on its "
            "weight alone would ignore: leave lm_head out of target_modules, or train it in full "
            "with modules_to_save"
        )
    return head


def _logit_scale(config: Any, name: str) -> float:
    """The factor on the logits. Each model family calls it differently, Granite divides."""
    scale = 1.0
    for key, power in (("logit_scale", 1), ("lm_head_multiplier", 1), ("logits_scaling", -1)):
        value = getattr(config, key, None)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value:
            raise ValueError(f"config.{key}={value!r} of {name} is not a number other than 0")
        scale *= float(value) ** power
    if not math.isfinite(scale):
        raise ValueError(f"{name} scales its logits by {scale}")
    return scale
