"""What of a model's configuration decides how much memory it takes; common models as numbers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer with gated feed-forward layers.

    Attributes:
        layers, hidden, intermediate, vocab: numbers of layers, H, I and V.
        heads, kv_heads, head_dim: of attention.
        tied: whether the head is the embedding.
        qk_norm: whether queries and keys are normalised.
        wide_norms: four norms a layer, in fp32, instead of two (Gemma).
        experts, top_k: of a mixture, whose experts are `intermediate` wide; 0: dense.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False
    qk_norm: bool = False
    wide_norms: bool = False
    experts: int = 0
    top_k: int = 0

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """Of one layer."""
        attention = 2 * self.hidden * (self.query_width + self.key_width)
        feed_forward = 3 * self.hidden * self.intermediate * max(1, self.experts)
        norms = (4 if self.wide_norms else 2) * self.hidden + 2 * self.head_dim * self.qk_norm
        return attention + feed_forward + self.hidden * self.experts + norms

    @property
    def parameters(self) -> int:
        """Of the whole model; biases of the attention, where there are any, left out."""
        ends = self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden
        return self.layers * self.layer_parameters + ends

    def adapter_parameters(self, rank: int) -> int:
        """Of LoRA on all linear layers but the head and the experts of a mixture."""
        h, q, k, i = self.hidden, self.query_width, self.key_width, self.intermediate
        widths = 2 * (h + q) + 2 * (h + k) + (0 if self.experts else 3 * (h + i))
        return self.layers * rank * widths


def _qwen3(layers: int, hidden: int, intermediate: int, heads: int, tied: bool) -> ModelShape:
    return ModelShape(layers, hidden, intermediate, heads, 8, 128, 151_936, tied, qk_norm=True)


def _qwen25(
    layers: int, hidden: int, intermediate: int, heads: int, kv: int, vocab: int = 152_064
) -> ModelShape:
    width = hidden // heads
    return ModelShape(layers, hidden, intermediate, heads, kv, width, vocab, vocab == 151_936)


def _gemma(
    layers: int, hidden: int, intermediate: int, heads: int, kv: int, width: int, vocab: int
) -> ModelShape:
    qk_norm = vocab > 260_000  # Gemma 3
    return ModelShape(
        layers, hidden, intermediate, heads, kv, width, vocab, True, qk_norm, wide_norms=True
    )


# from the models' config.json
SHAPES: dict[str, ModelShape] = {
    "SmolLM2-135M": ModelShape(30, 576, 1536, 9, 3, 64, 49_152, tied=True),
    "SmolLM2-360M": ModelShape(32, 960, 2560, 15, 5, 64, 49_152, tied=True),
    "SmolLM2-1.7B": ModelShape(24, 2048, 8192, 32, 32, 64, 49_152, tied=True),
    "Qwen3-0.6B": _qwen3(28, 1024, 3072, 16, True),
    "Qwen3-1.7B": _qwen3(28, 2048, 6144, 16, True),
    "Qwen3-4B": _qwen3(36, 2560, 9728, 32, True),
    "Qwen3-8B": _qwen3(36, 4096, 12_288, 32, False),
    "Qwen3-14B": _qwen3(40, 5120, 17_408, 40, False),
    "Qwen3-32B": _qwen3(64, 5120, 25_600, 64, False),
    "Qwen3-30B-A3B": ModelShape(
        48, 2048, 768, 32, 4, 128, 151_936, qk_norm=True, experts=128, top_k=8
    ),
    "Qwen2.5-0.5B": _qwen25(24, 896, 4864, 14, 2, 151_936),
    "Qwen2.5-1.5B": _qwen25(28, 1536, 8960, 12, 2, 151_936),
    "Qwen2.5-3B": _qwen25(36, 2048, 11_008, 16, 2, 151_936),
    "Qwen2.5-7B": _qwen25(28, 3584, 18_944, 28, 4),
    "Qwen2.5-14B": _qwen25(48, 5120, 13_824, 40, 8),
    "Qwen2.5-32B": _qwen25(64, 5120, 27_648, 40, 8),
    "Qwen2.5-72B": _qwen25(80, 8192, 29_568, 64, 8),
    "Llama-3.2-1B": ModelShape(16, 2048, 8192, 32, 8, 64, 128_256, tied=True),
    "Llama-3.2-3B": ModelShape(28, 3072, 8192, 24, 8, 128, 128_256, tied=True),
    "Llama-3.1-8B": ModelShape(32, 4096, 14_336, 32, 8, 128, 128_256),
    "Llama-3.1-70B": ModelShape(80, 8192, 28_672, 64, 8, 128, 128_256),
    "Mistral-7B-v0.3": ModelShape(32, 4096, 14_336, 32, 8, 128, 32_768),
    "phi-4": ModelShape(40, 5120, 17_920, 40, 10, 128, 100_352),
    "gemma-2-2b": _gemma(26, 2304, 9216, 8, 4, 256, 256_000),
    "gemma-2-9b": _gemma(42, 3584, 14_336, 16, 8, 256, 256_000),
    "gemma-2-27b": _gemma(46, 4608, 36_864, 32, 16, 128, 256_000),
    "gemma-3-1b": _gemma(26, 1152, 6912, 4, 1, 256, 262_144),
    "gemma-3-4b": _gemma(34, 2560, 10_240, 8, 4, 256, 262_208),
    "gemma-3-12b": _gemma(48, 3840, 15_360, 16, 8, 256, 262_208),
    "gemma-3-27b": _gemma(62, 5376, 21_504, 32, 16, 128, 262_208),
}
_SUFFIXES = ("-instruct", "-it", "-base", "-hf", "-chat", "-instruct-2507", "-thinking-2507")
_QK_NORM = ("qwen3", "qwen3_moe", "gemma3", "gemma3_text", "olmo2")
_WIDE_NORMS = ("gemma2", "gemma3", "gemma3_text")


def shape_of(model: Any) -> ModelShape:
    """The shape of a model given by name, by its configuration, or by the path of a config.json.

    Args:
        model: a name in `SHAPES`, with or without its organisation and "-Instruct", in any case; a
            path; a transformers configuration; a mapping like config.json; or a `ModelShape`.

    Raises:
        TypeError: something else.
        ValueError: an unknown name, or a configuration that lacks a number: names it.
    """
    if isinstance(model, ModelShape):
        return model
    if isinstance(model, Mapping):
        return _from_config(model)
    if hasattr(model, "get_text_config"):
        return _from_config(model.get_text_config().to_dict())
    if not isinstance(model, (str, os.PathLike)):
        raise TypeError(
            f"model must be a name, a path or a configuration, not {type(model).__name__}"
        )
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return _from_config(json.loads(path.read_text()))
    known = {name.lower(): shape for name, shape in SHAPES.items()}
    name = str(model).split("/")[-1].lower().removeprefix("meta-")
    for suffix in sorted(_SUFFIXES, key=len, reverse=True):
        name = name.removesuffix(suffix)
    if name not in known:
        raise ValueError(
            f"model={str(model)!r} is not known and no folder or file of that name has its "
            f"config.json; known: {', '.join(SHAPES)}"
        )
    return known[name]


def _from_config(config: Mapping[str, Any]) -> ModelShape:
    config = config.get("text_config") or config
    kind = config.get("model_type", "")
    experts = config.get("num_experts") or config.get("num_local_experts") or 0

    def number(name: str, *others: str) -> int:
        for each in (name, *others):
            value = config.get(each)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        raise ValueError(f"the configuration of the model ({kind or 'unnamed'}) has no {name}")

    hidden, heads = number("hidden_size", "n_embd"), number("num_attention_heads", "n_head")
    width = number("moe_intermediate_size", "intermediate_size") if experts else 0
    head_dim = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    return ModelShape(
        number("num_hidden_layers", "n_layer"),
        hidden,
        width or number("intermediate_size", "n_inner"),
        heads,
        kv_heads,
        head_dim,
        number("vocab_size"),
        bool(config.get("tie_word_embeddings", False)),
        kind in _QK_NORM,
        kind in _WIDE_NORMS,
        experts,
        number("num_experts_per_tok") if experts else 0,
    )
