"""Shapes of models: their parameters against transformers and published counts, and look-up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from fused_grpo.model_shapes import SHAPES, ModelShape, shape_of

CLASSES = {
    "SmolLM2-135M": LlamaConfig,
    "Llama-3.2-1B": LlamaConfig,
    "Llama-3.1-8B": LlamaConfig,
    "Qwen3-0.6B": Qwen3Config,
    "Qwen3-8B": Qwen3Config,
    "Qwen2.5-0.5B": Qwen2Config,
    "gemma-2-2b": Gemma2Config,
    "gemma-3-1b": Gemma3TextConfig,
    "Qwen3-30B-A3B": Qwen3MoeConfig,
}
# in billions, from the models' cards
PUBLISHED = {
    "SmolLM2-135M": 0.135,
    "SmolLM2-360M": 0.362,
    "SmolLM2-1.7B": 1.71,
    "Qwen3-0.6B": 0.6,
    "Qwen3-1.7B": 1.72,
    "Qwen3-4B": 4.0,
    "Qwen3-8B": 8.2,
    "Qwen3-14B": 14.8,
    "Qwen3-32B": 32.8,
    "Qwen3-30B-A3B": 30.5,
    "Qwen2.5-0.5B": 0.49,
    "Qwen2.5-1.5B": 1.54,
    "Qwen2.5-3B": 3.09,
    "Qwen2.5-7B": 7.61,
    "Qwen2.5-14B": 14.7,
    "Qwen2.5-32B": 32.5,
    "Qwen2.5-72B": 72.7,
    "Llama-3.2-1B": 1.23,
    "Llama-3.2-3B": 3.21,
    "Llama-3.1-8B": 8.03,
    "Llama-3.1-70B": 70.6,
    "Mistral-7B-v0.3": 7.25,
    "phi-4": 14.7,
    "gemma-2-2b": 2.61,
    "gemma-2-9b": 9.24,
    "gemma-2-27b": 27.2,
    "gemma-3-1b": 1.0,
    "gemma-3-4b": 3.88,
    "gemma-3-12b": 11.8,
    "gemma-3-27b": 27.0,
}


def config_of(name: str, **changes: Any) -> Any:
    shape = SHAPES[name]
    options: dict[str, Any] = {
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
    }
    if shape.experts:
        options |= {"moe_intermediate_size": shape.intermediate, "num_experts": shape.experts}
        options |= {"num_experts_per_tok": shape.top_k}
    else:
        options["intermediate_size"] = shape.intermediate
    return CLASSES[name](**options | changes)


def test_every_shape_is_checked() -> None:
    assert PUBLISHED.keys() == SHAPES.keys()


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_those_published(name: str) -> None:
    assert SHAPES[name].parameters / 1e9 == pytest.approx(PUBLISHED[name], rel=0.01)


@pytest.mark.parametrize("name", CLASSES)
def test_parameters_are_those_of_transformers(name: str) -> None:
    """But for attention's biases, which are left out: under 0.1 %."""
    layers = min(4, SHAPES[name].layers)
    config = config_of(name, num_hidden_layers=layers, attn_implementation="eager")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = shape_of(config)
    count = sum(p.numel() for p in model.parameters())
    assert shape.parameters == pytest.approx(count, rel=1e-3)
    if name != "Qwen2.5-0.5B":
        assert shape.parameters == count
    assert shape_of(config_of(name)) == SHAPES[name]


@pytest.mark.parametrize("rank", [1, 16])
def test_parameters_of_an_adapter_are_those_of_peft(rank: int) -> None:
    from peft import LoraConfig, get_peft_model

    config = config_of("Qwen3-0.6B", num_hidden_layers=2, vocab_size=64)
    model = AutoModelForCausalLM.from_config(config)
    adapted: Any = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"))
    count = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert shape_of(config).adapter_parameters(rank) == count


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "qwen3-8b", "Qwen3-8B-Base", "someone/QWEN3-8B"])
def test_names(name: str) -> None:
    assert shape_of(name) is SHAPES["Qwen3-8B"]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "SmolLM2-135M"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("google/gemma-3-4b-it", "gemma-3-4b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen3-30B-A3B"),
    ],
)
def test_names_as_the_hub_has_them(name: str, shape: str) -> None:
    assert shape_of(name) is SHAPES[shape]


def test_a_config_json_by_path_and_as_a_mapping(tmp_path: Path) -> None:
    config = config_of("Qwen3-8B").to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    for model in (tmp_path, str(tmp_path), tmp_path / "config.json", config):
        assert shape_of(model) == SHAPES["Qwen3-8B"]
    assert shape_of({"text_config": config}) == SHAPES["Qwen3-8B"]
    assert shape_of(SHAPES["phi-4"]) is SHAPES["phi-4"]


def test_what_a_configuration_may_leave_out() -> None:
    config = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
    config |= {"num_attention_heads": 4, "vocab_size": 100}
    assert shape_of(config) == ModelShape(2, 64, 128, 4, 4, 16, 100)


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        ("gpt-5", ValueError, r"model='gpt-5' is not known .*Qwen3-8B"),
        (3, TypeError, "model must be a name, a path or a configuration, not int"),
        (
            {"model_type": "llama"},
            ValueError,
            r"configuration of the model \(llama\) has no hidden_size",
        ),
        (
            {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": -1},
            ValueError,
            "has no num_hidden_layers",
        ),
    ],
)
def test_unknown_models(model: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        shape_of(model)
