"""PEFT on the head of a small random model: computed as PEFT computes it, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from tiny_models import assert_same_model, tiny
from torch import nn

from fused_grpo.integrations.models import add_head_forward, head_of, verify_head

NEW = hasattr(transformers, "HyperCLOVAXForCausalLM")
TARGETS = ["q_proj", "lm_head"]


def lora(**options: Any) -> LoraConfig:
    defaults = {"r": 4, "lora_alpha": 12, "target_modules": TARGETS, "init_lora_weights": False}
    return LoraConfig(**(defaults | options))


def wrapped(config: Any, family: str = "LlamaForCausalLM", **options: Any) -> PeftModel:
    """With a `head_fn`; adapters start at random, so that they show."""
    model: Any = get_peft_model(tiny(family, **options), config)
    add_head_forward(model)
    return model


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "rank 1": {"r": 1},
    "lora bias": {"lora_bias": True},
    "trained bias": {"bias": "all"},
    "alpha pattern": {"alpha_pattern": {"lm_head": 40}, "rank_pattern": {"lm_head": 7}},
}


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "PhiForCausalLM", "CohereForCausalLM"])
@pytest.mark.parametrize("name", CONFIGS)
def test_lora_on_the_head(name: str, family: str) -> None:
    """I1: with a bias (Phi), scaled logits (Cohere); gradients of both factors and of the trunk."""
    model = wrapped(lora(**CONFIGS[name]), family)
    verify_head(model)
    head = head_of(model)
    assert head.adapter is not None
    assert_same_model(model)
    assert_same_model(model, chunk_bytes=1 << 14, entropy=True)


def test_lora_changes_the_result() -> None:
    """Or the comparison above would say nothing."""
    model = wrapped(lora())
    hidden = torch.randn(2, 3, 32)
    with model.disable_adapter():
        plain = head_of(model).logits(hidden)
    assert (head_of(model).logits(hidden) - plain).abs().max() > 0.1


def test_a_frozen_weight_and_trained_factors() -> None:
    model = wrapped(lora())
    head = head_of(model)
    assert not head.weight.requires_grad
    assert head.adapter is not None
    assert head.adapter.weight.requires_grad
    assert head.adapter.hidden(torch.zeros(2, 32)).requires_grad


def test_dropout_of_the_adapters_input() -> None:
    """The same mask as PEFT draws after the same seed; none in eval mode."""
    model = wrapped(lora(lora_dropout=0.4)).train()
    assert_same_model(model)
    hidden = torch.ones(5, 32)
    adapter = head_of(model).adapter
    assert adapter is not None
    assert not torch.equal(adapter.hidden(hidden), adapter.hidden(hidden))
    model.eval()
    assert torch.equal(adapter.hidden(hidden), adapter.hidden(hidden))
    assert_same_model(model)


def test_several_active_adapters() -> None:
    """Of different ranks, one after another along r; then each of them alone."""
    model = wrapped(lora())
    model.add_adapter("second", lora(r=3, lora_alpha=5, use_rslora=True))
    model.add_adapter("elsewhere", lora(target_modules=["q_proj"]))
    for active, rank in ((["default", "second", "elsewhere"], 7), (["second"], 3)):
        model.base_model.set_adapter(active)
        head = head_of(model)
        assert head.adapter is not None
        assert head.adapter.weight.shape == (97, rank)
        verify_head(model)
        assert_same_model(model)
    model.base_model.set_adapter(["elsewhere"])
    assert head_of(model).adapter is None
    assert_same_model(model)


def test_scales_that_change_later_are_read() -> None:
    model = wrapped(lora())
    model.base_model.model.lm_head.scale_layer(2.5)
    verify_head(model)


def test_disabled_adapters() -> None:
    model = wrapped(lora())
    with model.disable_adapter():
        assert head_of(model).adapter is None
        verify_head(model)


@pytest.mark.parametrize("tied", [False, True])
def test_merged_adapters_are_in_the_weight(tied: bool) -> None:
    model = wrapped(lora(), tie_word_embeddings=tied)
    before = head_of(model).weight.clone()
    model.merge_adapter()
    assert head_of(model).adapter is None
    assert not torch.equal(head_of(model).weight, before)
    verify_head(model)
    with model.disable_adapter():  # PEFT takes them out of the weight again
        torch.testing.assert_close(head_of(model).weight, before)
        verify_head(model)


@pytest.mark.parametrize("options", [{}, {"target_modules": ["embed_tokens"]}], ids=str)
@pytest.mark.parametrize("ensured", [False, True])
def test_tied_embeddings(ensured: bool, options: dict[str, Any]) -> None:
    """LoRA on a tied head alone, on the embedding alone, or on both by the same factors."""
    config = lora(**({"target_modules": ["embed_tokens", "lm_head"]} | options))
    config.ensure_weight_tying = ensured
    model = wrapped(config, tie_word_embeddings=True)
    assert (head_of(model).adapter is not None) == (ensured or not options)
    verify_head(model)
    assert_same_model(model)


def test_the_inputs_and_vocabulary_of_a_head_that_is_cut() -> None:
    """Inkling scales the hidden states and drops the last entries, of the adapter as well."""
    model = wrapped(lora(target_modules=["lm_head"]), "InklingForCausalLM")
    assert head_of(model).adapter.weight.shape == (90, 4)
    verify_head(model)
    assert_same_model(model)


def test_a_fully_trained_copy_is_the_head() -> None:
    """D6: Of PEFT's modules_to_save the active copy counts."""
    model = wrapped(LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    weight = head_of(model).weight
    assert weight.requires_grad
    with torch.no_grad():
        weight.mul_(3.0)
    verify_head(model)
    assert_same_model(model)
    with model.disable_adapter():
        assert not head_of(model).weight.requires_grad
        verify_head(model)


def test_bf16_model_with_adapters_in_float32() -> None:
    """PEFT's default for a bf16 model. Its own logits are rounded; the fused ones are not."""
    base = tiny("LlamaForCausalLM").to(torch.bfloat16)
    model = get_peft_model(base, lora())
    add_head_forward(model)
    head = head_of(model)
    hidden = torch.randn(2, 5, 32).bfloat16()
    arguments = head.arguments(hidden)
    assert arguments["lora_hidden"].dtype == arguments["lora_weight"].dtype == torch.float32
    verify_head(model)


def test_adapters_put_into_the_model_itself() -> None:
    """Without PEFT's wrapper around it, as `model.add_adapter` of transformers does."""
    model: Any = tiny("LlamaForCausalLM")
    inject_adapter_in_model(lora(), model)
    add_head_forward(model)
    assert head_of(model).adapter is not None
    verify_head(model)
    assert_same_model(model)
    model.lm_head.enable_adapters(False)
    assert head_of(model).adapter is None
    verify_head(model)


def renamed(module: nn.Module) -> None:
    """As `fully_shard` does: an instance of a class of its own, made from the module's."""
    kind = type(module)
    module.__class__ = type(f"FSDP{kind.__name__}", (kind,), {"__module__": "torch"})


def test_classes_that_fsdp_puts_in_front() -> None:
    model: Any = tiny("HyperCLOVAXForCausalLM") if NEW else tiny("LlamaForCausalLM")
    inject_adapter_in_model(lora(), model)
    for module in (model.lm_head, model.model, model):
        renamed(module)
    assert head_of(model).adapter is not None
    verify_head(model)


def test_options_without_hidden_states_raise() -> None:
    """What ignores the adapter must not look as if it worked."""
    head = head_of(wrapped(lora()))
    with pytest.raises(ValueError, match=r"head\.arguments\(hidden\)"):
        _ = head.options
    assert head.arguments(torch.zeros(2, 32)).keys() == {
        "bias",
        "logit_scale",
        "softcap",
        "lora_hidden",
        "lora_weight",
    }


def dora() -> nn.Module:
    return get_peft_model(tiny("LlamaForCausalLM"), lora(use_dora=True))


def ia3() -> nn.Module:
    config = IA3Config(target_modules=["lm_head"], feedforward_modules=[])
    return get_peft_model(tiny("LlamaForCausalLM"), config)


def trained_tokens() -> nn.Module:
    config = lora(target_modules=["q_proj"], trainable_token_indices=[1, 2])
    return get_peft_model(tiny("LlamaForCausalLM", tie_word_embeddings=True), config)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (dora, "Dora"),
        (ia3, r"peft\.tuners\.ia3"),
        (trained_tokens, "TrainableTokensWrapper"),
    ],
)
def test_other_methods_raise(make: Any, message: str) -> None:
    """I1: No adapter on the head is silently left out."""
    with pytest.raises(ValueError, match=message):
        head_of(make())


def test_other_methods_elsewhere_are_fine() -> None:
    model = wrapped(lora(target_modules=["q_proj"], use_dora=True))
    verify_head(model)
    assert_same_model(model)


def test_an_adapter_for_each_row_raises() -> None:
    """PEFT hands `adapter_names` to its layers by hooks, which a loss on the weight goes past."""
    model = wrapped(lora())
    model.add_adapter("second", lora())
    ids = torch.tensor([[3, 4], [5, 6]])
    with pytest.raises(ValueError, match="adapter_names"):
        model(
            input_ids=ids,
            adapter_names=["default", "second"],
            head_fn=lambda hidden, head: head.logits(hidden),
        )
