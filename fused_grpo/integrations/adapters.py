"""PEFT on a head: LoRA computed beside the weight, a fully trained copy in its place."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class LoraPart:
    """One adapter: scaling * B(A(dropout(hidden)))."""

    down: nn.Linear  # A, [r, H]
    up: nn.Linear  # B, [V, r]
    dropout: nn.Module
    scaling: float


@dataclass(frozen=True)
class HeadAdapter:
    """The adapters that are active on a head, one after another along r."""

    parts: tuple[LoraPart, ...]
    vocab: int | None = None  # entries that the model keeps, where it cuts its logits

    def hidden(self, hidden: Tensor) -> Tensor:
        """[..., r] of [..., H]: what `lora_hidden` takes, in the dtype of the adapters.

        Draws the adapters' dropout where they are in training mode.
        """
        rows = [p.down(p.dropout(hidden.to(p.down.weight.dtype))) * p.scaling for p in self.parts]
        return rows[0] if len(rows) == 1 else torch.cat(rows, -1)

    @property
    def weight(self) -> Tensor:
        """[V, r]: what `lora_weight` takes."""
        up = [p.up.weight for p in self.parts]
        whole = up[0] if len(up) == 1 else torch.cat(up, -1)
        return whole if self.vocab is None else whole[: self.vocab]

    def add_bias(self, bias: Tensor | None) -> Tensor | None:
        """The head's bias [V] with those of the adapters (`lora_bias`)."""
        for part in self.parts:
            if part.up.bias is not None:
                own = part.up.bias * part.scaling
                bias = own if bias is None else bias + own
        return bias


def unwrapped(head: Any, name: str) -> tuple[nn.Module, HeadAdapter | None]:
    """(the linear layer of a head, the adapter that acts on it now if there is one).

    Follows PEFT's own forward: adapters that are disabled or merged into the weight are left out,
    and a copy trained by `modules_to_save` stands for the original.

    Raises:
        ValueError: DoRA and all other methods that are not plain LoRA.
    """
    if head is None:
        raise ValueError(f"{name} has no output embeddings: it is not a causal language model")
    if hasattr(head, "modules_to_save"):
        return _trained_copy(head), None
    lora = sys.modules.get("peft.tuners.lora.layer")
    if lora is not None and getattr(type(head), "forward", None) is lora.Linear.forward:
        return head.base_layer, _lora(head, name)
    if hasattr(head, "base_layer") or hasattr(head, "token_adapter"):
        raise ValueError(
            f"the head of {name} carries an adapter of type {type(head).__module__}."
            f"{type(head).__name__}, which a loss on its weight would ignore: LoRA on a plain "
            "linear layer is understood; leave lm_head out of target_modules, or train it in full "
            "with modules_to_save"
        )
    return head, None


def _trained_copy(head: Any) -> nn.Module:
    active = head.active_adapters if hasattr(head, "active_adapters") else [head.active_adapter]
    disabled = getattr(head, "disable_adapters", False) or not active
    return head.original_module if disabled else head.modules_to_save[active[0]]


def _lora(head: Any, name: str) -> HeadAdapter | None:
    if head.disable_adapters and head.merged:
        head.unmerge()  # as its forward does
    if head.disable_adapters or head.merged:
        return None
    if any("adapter_names" in getattr(h, "keywords", {}) for h in head._forward_pre_hooks.values()):
        raise ValueError(f"adapter_names on the head of {name}: one adapter for all rows is needed")
    parts = []
    for adapter in head.active_adapters:
        if adapter not in head.lora_A:
            continue
        variant = getattr(head, "lora_variant", {}).get(adapter)
        if variant is not None or getattr(head, "use_dora", {}).get(adapter):
            raise ValueError(
                f"the adapter {adapter!r} on the head of {name} is not plain LoRA but "
                f"{type(variant).__name__ if variant is not None else 'DoRA'}: its logits are not "
                "W h + scaling B A h; leave lm_head out of target_modules"
            )
        down, up = head.lora_A[adapter], head.lora_B[adapter]
        parts.append(LoraPart(down, up, head.lora_dropout[adapter], float(head.scaling[adapter])))
    return HeadAdapter(tuple(parts)) if parts else None
