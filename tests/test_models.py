"""`head_of` against the logits of real model classes, built small and random."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from fused_grpo import linear_logprobs
from fused_grpo.integrations.models import add_head_forward, causal_lm, head_of, verify_head

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
FAMILIES = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "gemma2": {"final_logit_softcapping": 0.05},
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 7.0},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "phi": {},  # its head has a bias
}


def build(family: str, **options: object) -> nn.Module:
    torch.manual_seed(0)
    known = {k: v for k, v in SIZES.items() if family != "gpt2" or "token" in k or "vocab" in k}
    config = AutoConfig.for_model(family, **{**known, **FAMILIES.get(family, {}), **options})
    model = AutoModelForCausalLM.from_config(config).eval()
    head = model.get_output_embeddings()
    if head.bias is not None:
        nn.init.normal_(head.bias)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_head_gives_the_models_own_log_probabilities(family: str) -> None:
    model = build(family)
    add_head_forward(model)
    verify_head(model)
    ids = torch.randint(2, 97, (3, 7))
    targets = ids.roll(-1, 1)
    expected = model(input_ids=ids).logits.float().log_softmax(-1)
    expected = expected.gather(-1, targets[..., None])[..., 0]
    got = model(
        input_ids=ids,
        head_fn=lambda hidden, head: linear_logprobs(hidden, head.weight, targets, **head.options),
    )
    torch.testing.assert_close(got.logps, expected, atol=2e-6, rtol=1e-5)


def test_head_forward_keeps_the_signature_and_survives_a_deep_copy() -> None:
    model = build("llama")
    add_head_forward(model)
    add_head_forward(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    ids = torch.tensor([[3, 4, 5]])
    assert other(input_ids=ids).logits.abs().max() == 0
    hidden = other(input_ids=ids, head_fn=lambda hidden, head: hidden)
    assert hidden.abs().max() == 0, "the copy ran the original's backbone"
    # generate() reads attention_mask from the signature and would ignore padding without it
    padded = model.generate(
        input_ids=torch.tensor([[1, 1, 3, 4, 5]]),
        attention_mask=torch.tensor([[0, 0, 1, 1, 1]]),
        max_new_tokens=4,
        do_sample=False,
    )
    plain = model.generate(input_ids=ids, max_new_tokens=4, do_sample=False)
    assert padded[0, 5:].tolist() == plain[0, 3:].tolist()


def test_lora_is_looked_through_and_takes_part() -> None:
    base = build("llama")
    model = get_peft_model(base, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    add_head_forward(model)
    head = head_of(model)
    assert causal_lm(model) is base
    assert head.weight is base.lm_head.weight
    ids = torch.tensor([[3, 4, 5]])
    expected = model(input_ids=ids).logits
    got = model(input_ids=ids, head_fn=lambda hidden, head: head.logits(hidden))
    torch.testing.assert_close(got, expected)
    with model.disable_adapter():
        without = model(input_ids=ids, head_fn=lambda hidden, head: head.logits(hidden))
    assert (without - expected).abs().max() > 1e-3


def test_an_adapter_on_the_head_raises() -> None:
    model = get_peft_model(build("llama"), LoraConfig(target_modules=["q_proj", "lm_head"]))
    with pytest.raises(ValueError, match=r"lm_head out of target_modules"):
        head_of(model)


def test_a_fully_trained_head_of_peft_is_the_active_copy() -> None:
    config = LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = get_peft_model(build("llama"), config)
    weight = head_of(model).weight
    assert weight.requires_grad
    with torch.no_grad():
        weight.mul_(3.0)
    verify_head(model)
    with model.disable_adapter():
        assert not head_of(model).weight.requires_grad


def test_prompt_learning_raises() -> None:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(ValueError, match="prompt learning"):
        head_of(get_peft_model(build("llama"), config))


def test_a_scale_that_no_attribute_tells_is_noticed() -> None:
    model = build("llama")
    original = model.lm_head.forward
    model.lm_head.forward = lambda hidden: original(hidden) / 4
    with pytest.raises(ValueError, match="not understood"):
        verify_head(model)


@pytest.mark.parametrize(
    ("model", "error"), [(nn.Linear(2, 2), TypeError), (build("llama").model, ValueError)]
)
def test_something_without_a_head_raises(model: nn.Module, error: type[Exception]) -> None:
    with pytest.raises(error, match="causal"):
        head_of(model)


def test_a_wrapped_head_of_two_layers_raises() -> None:
    model = build("llama")
    model.lm_head = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 97))
    with pytest.raises(ValueError, match="not one linear layer"):
        head_of(model)
