"""GRPO training of transformers models with the fused loss."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fused_grpo.trainer.config import GRPOConfig
    from fused_grpo.trainer.isolation import isolated
    from fused_grpo.trainer.rewards import RewardError
    from fused_grpo.trainer.rollout import Rollout, RolloutError
    from fused_grpo.trainer.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer", "RewardError", "Rollout", "RolloutError", "isolated"]

# where they are, for when they are asked for: a verifier's process needs no transformers
_MODULES = {
    "GRPOConfig": "config",
    "GRPOTrainer": "trainer",
    "RewardError": "rewards",
    "Rollout": "rollout",
    "RolloutError": "rollout",
    "isolated": "isolation",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
