"""Causal language models of transformers' own classes, small and random, without a download.

Sizes are set on the configuration of any class by the names that configurations use. What acts on
logits (scales, caps, a cut vocabulary) is set away from the defaults, which are mostly 1 or None.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

from fused_grpo import linear_logprobs

VOCAB = 97
LIMIT = 30_000_000  # parameters; more means that a size has another name
SIZES: dict[str, Any] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 4),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("out_hidden_size", "projection_dim", "hidden_dim", "lru_width"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "dim_ff"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("head_dim", "dim_head", "v_head_dim", "kv_channels", "global_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "num_key_value_heads"), 2),
    **dict.fromkeys(("mamba_n_heads", "n_mamba_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "num_mel_bins"), 16),
    **dict.fromkeys(("linear_num_value_heads", "state_size", "qk_nope_head_dim"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("n_ctx", "n_positions", "max_seq_len", "max_position_embeddings"), 64),
    **dict.fromkeys(("eos_token_id", "pad_token_id", "pad_index", "n_group", "topk_group"), 1),
    "mamba_d_ssm": 64,
    "linear_num_key_heads": 2,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
    "embedding_dim": 32,
    "num_blocks": 2,
    "image_size": 28,
    "patch_size": 14,
    "max_source_positions": 32,
}
MROPE = re.compile(r"^(qwen2(_5)?_(vl|omni)|glm4v|glm46v|glm_ocr|paddleocr).*text")
LAYERS = ("layer_types", "mlp_layer_types", "layers_block_type")
LOGITS: dict[str, Any] = {
    "logit_scale": 0.3,
    "lm_head_multiplier": 0.6,
    "output_multiplier": 0.4,
    "logits_scaling": 7.0,
    "logits_mup_width_multiplier": 3.0,
    "final_logit_softcapping": 0.5,
    "logits_soft_cap": 0.5,
    "output_logit_soft_cap": 0.5,
    "unpadded_vocab_size": 90,
    "dim_model_base": 8,
}


def class_names() -> list[str]:
    """Everything that transformers' auto classes would load to generate text."""
    mappings = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")
    tables = [getattr(modeling_auto, f"MODEL_FOR_{m}_MAPPING_NAMES", {}) for m in mappings]
    return sorted({name for table in tables for name in table.values()})


def tiny_config(name: str, **options: Any) -> Any:
    config = getattr(transformers, name).config_class()
    _shrink(config)
    for key, value in options.items():
        setattr(config, key, value)
    return config


def _shrink(config: Any) -> None:
    for key, value in (SIZES | LOGITS).items():
        if _is_number(config, key):
            _try_set(config, key, value)
    for key in LAYERS:
        kinds = getattr(config, key, None)
        if isinstance(kinds, (list, tuple)):  # the last is often of another kind than the first
            _try_set(config, key, [kinds[0], kinds[-1]])
    if (
        _is_number(config, "kv_lora_rank") and config.kv_lora_rank
    ):  # latent attention has a key of its own per head
        _try_set(config, "num_key_value_heads", 4)
    if MROPE.search(config.model_type) and hasattr(config, "rope_parameters"):
        config.rope_parameters["mrope_section"] = [2, 1, 1]
    for part in list(vars(config).values()):
        if isinstance(part, transformers.PreTrainedConfig):
            _shrink(part)


def _is_number(config: Any, key: str) -> bool:
    try:
        return hasattr(config, key) and not isinstance(getattr(config, key), (list, tuple))
    except Exception:  # a property that has nothing to say, or differs from layer to layer
        return key in LOGITS or key == "head_dim"


def _try_set(config: Any, key: str, value: Any) -> None:
    with contextlib.suppress(AttributeError, NotImplementedError, ValueError, TypeError):
        setattr(config, key, value)


def tiny(name: str, **options: Any) -> nn.Module:
    """A model by the name of its class, in float32 and eval mode, with a bias that is not 0.

    Raises:
        Exception: whatever the class makes of sizes that do not fit it.
    """
    model_class, config = getattr(transformers, name), tiny_config(name, **options)
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class(config).parameters())
    if size > LIMIT:
        raise ValueError(f"{name} has {size} parameters")
    torch.manual_seed(0)
    model: Any = model_class(config).eval()
    head = model.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        nn.init.normal_(head.bias)
    return model


def gradients(model: nn.Module, logps: Tensor) -> dict[str, Tensor | None]:
    """Of a weighted sum, for everything in the model that trains."""
    weights = torch.linspace(-1, 1, logps.numel()).view(logps.shape)
    trained = {k: p for k, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad((logps * weights).sum(), tuple(trained.values()), allow_unused=True)
    return dict(zip(trained, found, strict=True))


def assert_same_model(model: nn.Module, **options: Any) -> None:
    """Log-probabilities, and the gradients of head and trunk, are those of the model's logits.

    `options` are given to `linear_logprobs` alone. Random numbers are those of one seed.
    """
    ids = torch.randint(2, 60, (3, 7))  # no family gives these a meaning
    targets = ids.roll(-1, 1)

    def run(**arguments: Any) -> Any:
        torch.manual_seed(11)
        return model(input_ids=ids, use_cache=False, **arguments)

    expected = run().logits.float().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    wanted = gradients(model, expected)
    got = run(
        head_fn=lambda hidden, head: linear_logprobs(
            hidden, head.weight, targets, **head.arguments(hidden), **options
        ),
    ).logps
    torch.testing.assert_close(got, expected, atol=5e-6, rtol=1e-5)
    size = sum(float(g.square().sum()) for g in wanted.values() if g is not None) ** 0.5
    assert size > 0
    for name, gradient in gradients(model, got).items():
        assert (gradient is None) == (wanted[name] is None), name
        if gradient is not None:
            error = float((gradient - wanted[name]).norm())
            assert error <= 1e-5 * size, f"{name}: {error / size:.1e}"
