"""The load-balancing loss of a mixture of experts, which is made beside its logits."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from fused_grpo.integrations.logits import forward_words


def auxiliary_loss(model: Any, router_logits: Any, attention_mask: Tensor | None) -> Tensor:
    """[] what a causal language model adds to its own loss: coefficient times load balance.

    Args:
        model: the transformers model; its module has the function, the model the rest.
        router_logits: of every layer, as its backbone outputs them.
        attention_mask: [B, L], where the loss is to leave out padding.

    Raises:
        ValueError: the model has no such loss, or its forward makes it in a way of its own.
    """
    config = model.config.get_text_config(decoder=True)

    def number(*names: str) -> Any:
        found = (getattr(owner, name, None) for name in names for owner in (model, config))
        return next((value for value in found if value is not None), None)

    modules = (sys.modules[kind.__module__] for kind in type(model).__mro__)  # FSDP's comes first
    found = (getattr(module, "load_balancing_loss_func", None) for module in modules)
    function = next((f for f in found if f is not None), None)
    coefficient = number("router_aux_loss_coef", "aux_loss_coef")
    experts, chosen = number("num_experts"), number("num_experts_per_tok")
    own_way = "sqrt" in forward_words(type(model).forward)  # Doge: the number of its keys
    if function is None or own_way or None in (router_logits, coefficient, experts, chosen):
        raise ValueError(
            f"output_router_logits: the auxiliary loss of {type(model).__name__} is not understood"
        )
    return coefficient * function(router_logits, experts, chosen, attention_mask)
