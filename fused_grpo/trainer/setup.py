"""What `GRPOTrainer` checks and prepares before the first step."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn

from fused_grpo.integrations.models import causal_lm
from fused_grpo.trainer import loading
from fused_grpo.trainer.config import GRPOConfig
from fused_grpo.trainer.rewards import RewardFunc
from fused_grpo.trainer.rows import is_row

RESERVED_COLUMNS = ("prompts", "completions", "completion_ids")


def load_model(model: str | nn.Module, args: GRPOConfig, peft_config: Any) -> nn.Module:
    """The model by name or as given, with `peft_config`'s adapter around it if there is one."""
    options: Any = args.model_init_kwargs or {}
    if isinstance(model, str):
        model = loading.load_model(model, **options)
    elif options:
        raise ValueError("model_init_kwargs apply to a model given by name, not to a model object")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a name or a transformers model, not {type(model).__name__}")
    if peft_config is not None:
        if is_peft(model):
            raise ValueError("model has an adapter already: give peft_config or a PEFT model")
        from peft import get_peft_model

        wrapped: Any = model
        return get_peft_model(wrapped, peft_config)
    return model


def is_peft(model: nn.Module) -> bool:
    """Whether adapters can be switched off to get the reference model."""
    return hasattr(model, "peft_config") and hasattr(model, "disable_adapter")


def frozen_copy(model: nn.Module) -> nn.Module:
    """A copy of the model as it is now, in eval mode and without gradients."""
    return copy.deepcopy(model).eval().requires_grad_(False)


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout to 0: of dropout modules, and the rates that attention keeps as numbers."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def check_reward_funcs(
    funcs: RewardFunc | Sequence[RewardFunc], weights: Sequence[float] | None
) -> list[RewardFunc]:
    """The reward functions as a list. TypeError, ValueError: none, not callable, wrong weights."""
    out = list(funcs) if isinstance(funcs, (list, tuple)) else [funcs]
    if not out:
        raise ValueError("reward_funcs is empty: give at least one function")
    for func in out:
        if isinstance(func, nn.Module) or not callable(func):
            raise TypeError(
                f"reward_funcs must be functions, not {type(func).__name__}; wrap a reward model "
                "in a function of (prompts, completions, **columns)"
            )
    if weights is not None and len(weights) != len(out):
        raise ValueError(f"reward_weights has {len(weights)} entries for {len(out)} reward_funcs")
    return out  # type: ignore[return-value]


def check_dataset(name: str, dataset: Any) -> None:
    """TypeError, ValueError unless `dataset` has rows by number with a "prompt"."""
    if dataset is None:
        return
    if isinstance(dataset, dict) and name == "eval_dataset":
        for key, part in dataset.items():
            check_dataset(f"{name}[{key!r}]", part)
        return
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"{name} must have a length and rows by number (a list of dicts, a "
            f"datasets.Dataset), not be a {type(dataset).__name__}; streams are not supported"
        )
    if len(dataset) == 0:
        raise ValueError(f"{name} is empty")
    row = dataset[0]
    if not is_row(row):
        raise ValueError(f'{name} must hold dicts with a "prompt" (text or messages), not {row!r}')
    clash = [column for column in RESERVED_COLUMNS if column in row]
    if clash:
        raise ValueError(
            f"{name} has columns {clash}, which reward functions get from the trainer; rename them"
        )


def model_name(model: nn.Module) -> str:
    """The name or path a model was loaded from, "" if it was built in memory."""
    return getattr(getattr(causal_lm(model), "config", None), "_name_or_path", "") or ""
