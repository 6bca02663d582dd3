"""`head_of` against the logits of real model classes, built small and random."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tiny_models import VOCAB, assert_same_model, class_names, tiny
from torch import nn

from fused_grpo.integrations.models import add_head_forward, causal_lm, head_of, verify_head

# what every version has to understand; the sweep below takes in all others that transformers has
FAMILIES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "SmolLM3ForCausalLM",
    "PhiForCausalLM",  # its head has a bias
    "Phi3ForCausalLM",
    "GPT2LMHeadModel",
    "GPTJForCausalLM",
    "GPTNeoXForCausalLM",
    "OPTForCausalLM",
    "NemotronForCausalLM",
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "RecurrentGemmaForCausalLM",
    "CohereForCausalLM",
    "Cohere2ForCausalLM",
    "GraniteForCausalLM",
    "GraniteMoeForCausalLM",
    "FalconH1ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Llama4ForCausalLM",
    "Qwen3MoeForCausalLM",
    "MixtralForCausalLM",
    "GptOssForCausalLM",
    "MambaForCausalLM",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "PaliGemmaForConditionalGeneration",
    "Cohere2VisionForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
)
# some are younger than the oldest version that is tested
NEWER = tuple(
    name
    for name in (
        "MiniCPM3ForCausalLM",
        "HyperCLOVAXForCausalLM",
        "HyperCLOVAXVisionV2ForConditionalGeneration",
        "NanoChatForCausalLM",
        "InklingForCausalLM",
        "MuseGlimmerForConditionalGeneration",
        "xLSTMForCausalLM",
    )
    if hasattr(transformers, name)
)


def build(family: str, **options: object) -> nn.Module:
    return tiny(family, **options)


@pytest.mark.parametrize("tied", [False, True], ids=["own", "tied"])
@pytest.mark.parametrize("family", FAMILIES + NEWER)
def test_the_models_own_log_probabilities(family: str, tied: bool) -> None:
    model = build(family, tie_word_embeddings=tied)
    add_head_forward(model)
    verify_head(model)
    assert_same_model(model)


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "GPT2LMHeadModel", "Gemma2ForCausalLM"])
def test_a_tied_head_is_the_embeddings_parameter(family: str) -> None:
    """D11: A head without a weight of its own is found, and trains."""
    model = build(family, tie_word_embeddings=True)
    assert head_of(model).weight is model.get_input_embeddings().weight


def outcome(name: str) -> tuple[str, str]:
    """(what became of a class: checked, refused or not built; why, or its head)."""
    try:
        model = tiny(name)
        with torch.no_grad():
            model(input_ids=torch.arange(1, 5)[None], use_cache=False)
    except Exception as error:
        return "not built", repr(error)
    try:
        head = head_of(model)
    except (ValueError, TypeError) as error:
        return "refused", str(error)
    verify_head(model)  # whatever is accepted has to be right
    rules = [] if head.bias is None else ["bias"]
    rules += [] if head.logit_scale == 1 else [f"scale {head.logit_scale:.3g}"]
    rules += [] if head.softcap is None else [f"softcap {head.softcap:g}"]
    rules += [] if len(head.weight) == VOCAB else [f"cut to {len(head.weight)}"]
    return "checked", ", ".join(rules)


def test_every_class_of_transformers_is_right_or_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """None is accepted with a head that gives other logits; prints the table of those checked."""
    found = {name: outcome(name) for name in class_names()}
    checked = {name: rules for name, (how, rules) in found.items() if how == "checked"}
    refused = [name for name, (how, _) in found.items() if how == "refused"]
    assert set(FAMILIES + NEWER) <= checked.keys()
    with capsys.disabled():
        print(f"\n{len(checked)} heads checked, {len(refused)} refused; those of them with more")
        print("than a weight:")
        for name, rules in checked.items():
            if rules:
                print(f"  {name:45} {rules}")
        print("the others: " + ", ".join(n for n, rules in checked.items() if not rules))
        print("refused: " + ", ".join(refused))
    assert len(checked) >= 120
    for name in ("BertLMHeadModel", "RobertaForCausalLM", "ModernBertDecoderForCausalLM"):
        assert name in refused, "it transforms hidden states between backbone and head"


def test_what_the_model_takes_beside_the_ids_reaches_its_backbone() -> None:
    """I4: images and their token types are lost where a backbone is called by hand."""
    model = build("LlamaForCausalLM")
    add_head_forward(model)
    given, forward = {}, model.model.forward

    def seen(
        *args: Any, pixel_values: Any = None, token_type_ids: Any = None, **kwargs: Any
    ) -> Any:
        given.update(pixel_values=pixel_values, token_type_ids=token_type_ids)
        return forward(*args, **kwargs)

    model.model.forward = seen
    extra = {"pixel_values": torch.ones(1), "token_type_ids": torch.zeros(1, 3)}
    model(input_ids=torch.tensor([[3, 4, 5]]), head_fn=lambda hidden, head: hidden, **extra)
    for name, value in extra.items():
        assert given[name] is value, name


def test_head_forward_keeps_the_signature_and_survives_a_deep_copy() -> None:
    model = build("LlamaForCausalLM")
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
    """I1: An adapter on the head is used and trained."""
    base = build("LlamaForCausalLM")
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


def test_prompt_learning_raises() -> None:
    """I1: What a fused head would bypass is refused."""
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(ValueError, match="prompt learning"):
        head_of(get_peft_model(build("LlamaForCausalLM"), config))


def test_a_scale_that_no_attribute_tells_is_noticed() -> None:
    model = build("LlamaForCausalLM")
    original = model.lm_head.forward
    model.lm_head.forward = lambda hidden: original(hidden) / 4
    with pytest.raises(ValueError, match="not understood"):
        verify_head(model)


@pytest.mark.parametrize(
    ("model", "error"),
    [(nn.Linear(2, 2), TypeError), (build("LlamaForCausalLM").model, ValueError)],
)
def test_something_without_a_head_raises(model: nn.Module, error: type[Exception]) -> None:
    with pytest.raises(error, match="causal"):
        head_of(model)


def test_a_wrapped_head_of_two_layers_raises() -> None:
    model = build("LlamaForCausalLM")
    model.lm_head = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 97))
    with pytest.raises(ValueError, match="not one linear layer"):
        head_of(model)


def test_a_cap_that_hardly_shows_is_noticed() -> None:
    """Logits of a random model are near 0, where c tanh(z / c) is z to five digits."""
    model = build("LlamaForCausalLM")
    original = model.lm_head.forward
    model.lm_head.forward = lambda hidden: 50 * torch.tanh(original(hidden) / 50)
    with pytest.raises(ValueError, match="not understood"):
        verify_head(model)


def test_another_number_of_logits_is_noticed() -> None:
    model = build("LlamaForCausalLM")
    original = model.lm_head.forward
    model.lm_head.forward = lambda hidden: original(hidden)[..., :90]
    with pytest.raises(ValueError, match="not understood"):
        verify_head(model)


def test_verifying_leaves_the_model_as_it_was() -> None:
    model = build("LlamaForCausalLM").train()
    verify_head(model)
    assert model.training
    assert not model.lm_head._forward_pre_hooks
    assert not any(p.grad is not None for p in model.parameters())
