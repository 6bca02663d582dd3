"""What FSDP2 asks of a trainer beyond what accelerate does: CPUs, and a sharded reference."""

from __future__ import annotations

import os
from typing import Any

from accelerate import Accelerator, DistributedType, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin, fsdp2_prepare_model, str_to_bool
from torch import nn

from fused_grpo.integrations.models import causal_lm, is_sharded


def use_fsdp_on_cpu(trainer: Any) -> None:
    """Shard on CPUs as well, where accelerate takes no notice of FSDP and torch has it."""
    accelerator, options = trainer.accelerator, trainer.args.fsdp_plugin_args
    asked = options is not None or str_to_bool(os.environ.get("ACCELERATE_USE_FSDP", "false"))
    if not asked or accelerator.distributed_type != DistributedType.MULTI_CPU:
        return
    state = accelerator.state
    state.fsdp_plugin = FullyShardedDataParallelPlugin(**(options or {}))
    # as accelerate does on GPUs: in the state of the processes too, which the other reads again
    state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
    trainer.is_fsdp_enabled = True


def loads_once() -> bool:
    """Whether transformers has one process of each machine load, and FSDP spread the weights."""
    names = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")
    return all(str_to_bool(os.environ.get(name, "false")) for name in names)


def has_weights() -> bool:
    """Whether this process has a model's weights before they are sharded."""
    return not loads_once() or os.environ.get("LOCAL_RANK", "0") == "0"


def check_weights(model: nn.Module) -> None:
    """ValueError before a model's weights have been spread over the processes."""
    if loads_once() and not is_sharded(model):
        raise ValueError(
            "the weights are with one process until training begins: train first, or set "
            "fsdp_cpu_ram_efficient_loading: false"
        )


def shard(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """Shards a frozen model as accelerate shards the one that learns.

    The head's weight stays whole after a forward, as the loss may read it then.
    """
    model = fsdp2_prepare_model(accelerator, model)
    head: Any = causal_lm(model).get_output_embeddings()
    if is_sharded(head):
        head.set_reshard_after_forward(False)
    return model


def check_distribution(trainer: Any) -> None:
    """ValueError where sampling or the loss would run on something else than whole weights."""
    if trainer.args.n_gpu > 1:
        raise ValueError(
            f"{trainer.args.n_gpu} GPUs in one process: start one process each, with `accelerate "
            "launch` or `torchrun`, or set CUDA_VISIBLE_DEVICES"
        )
    if trainer.is_deepspeed_enabled:
        raise ValueError(
            "DeepSpeed is not supported by this trainer: shard with FSDP2 (see docs/trainer-"
            "distributed.md), or call the loss in a loop of your own (docs/integrations.md)"
        )
    if trainer.is_fsdp_enabled and trainer.accelerator.state.fsdp_plugin.fsdp_version != 2:
        raise ValueError(
            "FSDP version 1 hides the head's weight in a flat one: use version 2, with "
            "fsdp_config={'version': 2}, or fsdp_version: 2 in the file of accelerate"
        )
