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
from torch import nn
from transformers.models.auto import modeling_auto

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
