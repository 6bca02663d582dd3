"""Objectives: what a loss does with log-probabilities. Start with `registry.LOSS_TYPES`."""

from fused_grpo.objectives.metrics import metrics
from fused_grpo.objectives.objective import Objective
from fused_grpo.objectives.registry import LOSS_TYPES, LossType, register_objective
from fused_grpo.objectives.spec import LossSpec
from fused_grpo.objectives.terms import Terms, token_terms
from fused_grpo.objectives.view import TokenView

__all__ = [
    "LOSS_TYPES",
    "LossSpec",
    "LossType",
    "Objective",
    "Terms",
    "TokenView",
    "metrics",
    "register_objective",
    "token_terms",
]
