"""GRPO training of transformers models with the fused loss."""

from fused_grpo.trainer.config import GRPOConfig
from fused_grpo.trainer.isolation import isolated
from fused_grpo.trainer.rewards import RewardError
from fused_grpo.trainer.rollout import Rollout, RolloutError
from fused_grpo.trainer.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer", "RewardError", "Rollout", "RolloutError", "isolated"]
