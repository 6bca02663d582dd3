"""The GRPO loss fused with the language-model head."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fused_grpo.advantages import (
        compute_advantages,
        group_relative_advantages,
        multi_reward_advantages,
        zero_variance_fraction,
    )
    from fused_grpo.aggregation import token_weights
    from fused_grpo.corrections import sampling_statistics
    from fused_grpo.head_divergence import linear_kl
    from fused_grpo.loss import (
        GRPOLoss,
        GRPOLossOutput,
        LinearLogprobs,
        grpo_loss,
        linear_logprobs,
        policy_loss,
    )
    from fused_grpo.objectives import LossSpec, TokenView, register_objective
    from fused_grpo.plan import plan_memory
    from fused_grpo.sampler_support import linear_support

__version__ = "0.1.0"

__all__ = [
    "GRPOLoss",
    "GRPOLossOutput",
    "LinearLogprobs",
    "LossSpec",
    "TokenView",
    "compute_advantages",
    "group_relative_advantages",
    "grpo_loss",
    "linear_kl",
    "linear_logprobs",
    "linear_support",
    "multi_reward_advantages",
    "plan_memory",
    "policy_loss",
    "register_objective",
    "sampling_statistics",
    "token_weights",
    "zero_variance_fraction",
]

# where they are, for when they are asked for: planning memory needs no torch
_MODULES = {
    "GRPOLoss": "loss",
    "GRPOLossOutput": "loss",
    "LinearLogprobs": "loss",
    "LossSpec": "objectives",
    "TokenView": "objectives",
    "compute_advantages": "advantages",
    "group_relative_advantages": "advantages",
    "grpo_loss": "loss",
    "linear_kl": "head_divergence",
    "linear_logprobs": "loss",
    "linear_support": "sampler_support",
    "multi_reward_advantages": "advantages",
    "plan_memory": "plan",
    "policy_loss": "loss",
    "register_objective": "objectives",
    "sampling_statistics": "corrections",
    "token_weights": "aggregation",
    "zero_variance_fraction": "advantages",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
