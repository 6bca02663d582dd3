"""What a transformers model does to its logits, read from its forward and its configuration.

A configuration attribute says little by itself: Granite divides by `logits_scaling`, HyperCLOVA X
multiplies, and a vision model around Cohere's text model leaves its `logit_scale` out. So a rule
applies where the model's own forward names the attribute, and a forward that names something
which looks like such a rule, but is none of these, is not understood.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from dataclasses import dataclass
from types import CodeType
from typing import Any

# name in the forward -> power of its value in the factor on the logits
SCALES = {
    "logit_scale": 1,  # Cohere
    "lm_head_multiplier": 1,  # Falcon-H1
    "output_multiplier": 1,  # Muse
    "logits_scaling": -1,  # Granite; MiniCPM3, on the hidden states
    "logits_mup_width_multiplier": -1,  # Inkling, on the hidden states
}
# families in which one of these acts the other way round
INVERTED = {"HyperCLOVAX": "logits_scaling"}
CAPS = (
    "final_logit_softcapping",  # Gemma and many after it
    "logits_soft_cap",  # RecurrentGemma
    "output_logit_soft_cap",  # xLSTM
)
# module of a forward that caps with the configuration's value of this name
CAP_MODULES = {"logit_softcap": "final_logit_softcapping"}  # Inkling 2
VOCABULARIES = ("unpadded_vocab_size",)  # logits are cut to so many entries
MINICPM = "dim_model_base"  # hidden states are divided by hidden_size / dim_model_base
KNOWN = {*SCALES, *CAPS, *CAP_MODULES, *VOCABULARIES, MINICPM, "soft_cap"}
LOOKS_LIKE_A_RULE = re.compile(
    r"scal(e|ing)|multipl(y|ier)|soft_?cap|capping|mup|temperature|unpadded|logits?_bias"
    r"|vocabulary|masked_embedding|(pre|post)_projection|dim_model|streams"
)


@dataclass(frozen=True)
class LogitRules:
    """logits = softcap((head(hidden)) * scale)[..., :vocab]."""

    scale: float
    softcap: float | None
    vocab: int | None


def logit_rules(model: Any, config: Any) -> LogitRules:
    """The rules of a causal language model; `config` is that of its text model.

    Raises:
        ValueError: its forward does something else to its logits, or a value is out of range.
    """
    name = type(model).__name__
    words = forward_words(type(model).forward)
    unknown = sorted(w for w in words - KNOWN if LOOKS_LIKE_A_RULE.search(w))
    if unknown:
        raise ValueError(
            f"the head of {name} is not understood: its forward uses {', '.join(unknown)}; give "
            "hidden states and weight to grpo_loss yourself, with what that does to the logits"
        )

    def value(key: str) -> Any:
        # some keep it on the model
        return getattr(config, key, getattr(model, key, None)) if key in words else None

    scale = 1.0
    for key, power in SCALES.items():
        factor = _number(key, value(key), name)
        inverted = any(key == k and _is_of(f, model) for f, k in INVERTED.items())
        scale *= 1.0 if factor is None else factor ** (-power if inverted else power)
    base = _number(MINICPM, value(MINICPM), name)
    scale *= 1.0 if base is None else base / config.hidden_size
    caps = [value(key) for key in CAPS]
    caps += [getattr(config, key, None) for word, key in CAP_MODULES.items() if word in words]
    cap = next((_number("softcap", c, name) for c in caps if c is not None), None)
    vocab = next((value(key) for key in VOCABULARIES if value(key) is not None), None)
    if not math.isfinite(scale) or scale == 0:
        raise ValueError(f"{name} scales its logits by {scale}")
    return LogitRules(scale, cap, vocab)


def _is_of(family: str, model: Any) -> bool:
    """By the names of its classes: FSDP puts one of its own in front."""
    return any(kind.__name__.startswith(family) for kind in type(model).__mro__)


def _number(key: str, value: Any, name: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value:
        raise ValueError(f"config.{key}={value!r} of {name} is not a number other than 0")
    return float(value)


@functools.lru_cache(maxsize=64)
def forward_words(forward: Any) -> frozenset[str]:
    """The attributes, functions and short strings that a forward names."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return frozenset() if code is None else frozenset(_words_of(code))


def _words_of(code: CodeType) -> set[str]:
    words = set(code.co_names) | set(code.co_varnames)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            words |= _words_of(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            words.add(constant)
    return words
