"""Completions from elsewhere than `generate`: the protocol is `fused_grpo.trainer.Rollout`."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from fused_grpo.trainer.config import GRPOConfig
from fused_grpo.trainer.rollout import Rollout

# imported when asked for: each needs what the others do not
MAKERS = {
    "generate": "fused_grpo.trainer.rollout:Sampler",
    "continuous_batching": "fused_grpo.trainer.rollouts.continuous:ContinuousBatching",
    "vllm": "fused_grpo.trainer.rollouts.colocated:ColocatedVLLM",
    "vllm_server": "fused_grpo.trainer.rollouts.servers:VLLMServer",
    "sglang_server": "fused_grpo.trainer.rollouts.servers:SGLangServer",
}


def make_rollout(model: nn.Module, tokenizer: Any, args: GRPOConfig) -> Rollout:
    """What `args` ask for.

    Raises:
        ImportError: its package is not installed.
        ValueError: it cannot do what the other arguments want.
    """
    module, name = MAKERS[args.rollout].split(":")
    rollout: Rollout = getattr(importlib.import_module(module), name)(model, tokenizer, args)
    return rollout
