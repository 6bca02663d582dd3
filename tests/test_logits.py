"""What is read from a model's forward, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from tiny_models import tiny

from fused_grpo.integrations.logits import forward_words, logit_rules
from fused_grpo.integrations.models import head_of


def model_with(body: str) -> Any:
    """An object whose class has this forward."""
    space: dict[str, Any] = {}
    exec(f"def forward(self, hidden):\n    {body}", space)
    return type("Other", (), {"forward": space["forward"]})()


RULES: dict[str, tuple[str, dict[str, Any], tuple[float, float | None, int | None]]] = {
    "nothing": ("return self.lm_head(hidden)", {"logit_scale": 3.0}, (1.0, None, None)),
    "cohere": ("return hidden * self.logit_scale", {"logit_scale": 3.0}, (3.0, None, None)),
    "granite": ("return hidden / self.c.logits_scaling", {"logits_scaling": 4}, (0.25, None, None)),
    "by name": (
        "return getattr(self.c, 'final_logit_softcapping', None)",
        {"final_logit_softcapping": 30.0},
        (1.0, 30.0, None),
    ),
    "off": (
        "return self.c.final_logit_softcapping",
        {"final_logit_softcapping": None},
        (1.0, None, None),
    ),
    "minicpm": (
        "return self.lm_head(hidden / (self.c.hidden_size / self.c.dim_model_base))",
        {"hidden_size": 64, "dim_model_base": 16},
        (0.25, None, None),
    ),
    "two": (
        "return self.c.output_multiplier * self.c.lm_head_multiplier",
        {"output_multiplier": 2.0, "lm_head_multiplier": 3.0},
        (6.0, None, None),
    ),
    "cut": (
        "return hidden[..., : self.c.unpadded_vocab_size]",
        {"unpadded_vocab_size": 9},
        (1.0, None, 9),
    ),
    "inside": (
        "return (lambda z: z * self.logit_scale)(hidden)",
        {"logit_scale": 3.0},
        (3.0, None, None),
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_applies_where_the_forward_names_it(name: str) -> None:
    body, config, (scale, softcap, vocab) = RULES[name]
    rules = logit_rules(model_with(body), SimpleNamespace(**config))
    assert (rules.scale, rules.softcap, rules.vocab) == (scale, softcap, vocab)


@pytest.mark.parametrize(
    "body",
    [
        "return hidden * self.config.logits_multiplier",
        "return self.lm_head(hidden) * self.width_mult_scale",
        "return hidden / self.config.head_temperature",
        "return self.lm_head(hidden) + self.final_logits_bias",
        "return self.cap(hidden, self.config.lm_softcap)",
        "return getattr(self.config, 'mup_base_width')",
    ],
)
def test_what_looks_like_a_rule_and_is_not_known_raises(body: str) -> None:
    with pytest.raises(ValueError, match="Other is not understood: its forward uses"):
        logit_rules(model_with(body), SimpleNamespace())


@pytest.mark.parametrize("value", [0, True, "x", float("inf"), float("nan")])
def test_a_value_that_is_no_factor_raises(value: Any) -> None:
    model = model_with("return hidden * self.logit_scale")
    with pytest.raises(ValueError, match=r"logit_scale|scales its logits"):
        logit_rules(model, SimpleNamespace(logit_scale=value))


def test_the_words_are_those_of_the_function_inside_its_decorators() -> None:
    words = forward_words(transformers.Gemma2ForCausalLM.forward)
    assert {"final_logit_softcapping", "tanh", "lm_head"} <= words


def test_the_same_attribute_acts_in_one_class_and_not_in_another() -> None:
    """Both have Cohere's text model, whose configuration says logit_scale = 0.3 here."""
    assert head_of(tiny("Cohere2ForCausalLM")).logit_scale == 0.3
    assert head_of(tiny("Cohere2VisionForConditionalGeneration")).logit_scale == 1.0
