"""The auxiliary loss of a mixture of experts, beside a `head_fn` as beside logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny
from torch import Tensor

from fused_grpo.integrations.models import add_head_forward

FAMILIES = (
    "MixtralForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "GptOssForCausalLM",
    "GraniteMoeForCausalLM",
    "OlmoeForCausalLM",
    "PhimoeForCausalLM",
    "JetMoeForCausalLM",
    "Qwen3VLMoeForConditionalGeneration",
)
IDS = torch.arange(2, 18).view(2, 8)
MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1] * 8])


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {k: g for k, g in zip(names, found, strict=True) if g is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_the_models_own(family: str) -> None:
    """Its share of the model's loss, with padding left out, and every gradient of it."""
    model: Any = tiny(family)
    add_head_forward(model)
    call = {"input_ids": IDS, "attention_mask": MASK, "output_router_logits": True}
    own = model(**call, labels=IDS)
    without = model(**(call | {"output_router_logits": False}), labels=IDS)
    head = model(**call, head_fn=lambda hidden, head: head)
    assert head.aux_loss is not None
    torch.testing.assert_close(head.aux_loss, own.loss - without.loss, atol=2e-6, rtol=1e-4)
    coefficient = (head.aux_loss / own.aux_loss).item()
    wanted = gradients(model, coefficient * own.aux_loss)
    for name, gradient in gradients(model, head.aux_loss).items():
        torch.testing.assert_close(gradient, wanted[name], atol=1e-8, rtol=1e-5)


def test_the_configuration_may_ask_for_it() -> None:
    model: Any = tiny("MixtralForCausalLM", output_router_logits=True)
    add_head_forward(model)
    assert model(input_ids=IDS, head_fn=lambda _, head: head).aux_loss > 0
    off = model(input_ids=IDS, output_router_logits=False, head_fn=lambda _, head: head)
    assert off.aux_loss is None


@pytest.mark.parametrize("family", ["DogeForCausalLM", "LlamaForCausalLM"])
def test_another_way_to_make_it_raises(family: str) -> None:
    model: Any = tiny(family)
    add_head_forward(model)
    with pytest.raises((ValueError, AttributeError), match="router_logits"):
        model(input_ids=IDS, output_router_logits=True, head_fn=lambda _, head: head)


def test_it_is_found_behind_a_class_that_fsdp_puts_in_front() -> None:
    model: Any = tiny("MixtralForCausalLM", output_router_logits=True)
    add_head_forward(model)
    plain = model(input_ids=IDS, head_fn=lambda _, head: head).aux_loss
    kind = type(model)
    model.__class__ = type(f"FSDP{kind.__name__}", (kind,), {"__module__": "torch"})
    torch.testing.assert_close(model(input_ids=IDS, head_fn=lambda _, h: h).aux_loss, plain)
