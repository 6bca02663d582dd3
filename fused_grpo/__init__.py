"""The GRPO loss fused with the language-model head."""

from fused_grpo.advantages import (
    compute_advantages,
    group_relative_advantages,
    multi_reward_advantages,
    zero_variance_fraction,
)
from fused_grpo.aggregation import token_weights
from fused_grpo.corrections import sampling_statistics
from fused_grpo.linear_kl import linear_kl
from fused_grpo.linear_support import linear_support
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
