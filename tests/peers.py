"""The loss functions of TRL, Liger and verl on log-probabilities, where they are installed.

verl is looked for under VERL_PATH (`pip install --no-deps --target DIR verl==0.9.1`); its modules
are read with stand-ins for what they import and the functions used here do not need.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

VERL_PATH = Path(os.environ.get("VERL_PATH", "/nonexistent")) / "verl"


class _Accelerator:
    """One process."""

    num_processes = 1
    sync_gradients = True

    def gather(self, x: Tensor) -> Tensor:
        return x

    def reduce(self, x: Tensor, reduction: str = "sum") -> Tensor:
        return x

    def pad_across_processes(self, x: Tensor, dim: int, pad_index: float) -> Tensor:
        return x


def trl_loss(
    trainer: str,
    logps: Tensor,
    entropy: Tensor,
    advantages: Tensor,
    mask: Tensor,
    tensors: dict[str, Tensor],
    **options: Any,
) -> Tensor:
    """`_compute_loss` of a TRL trainer, on a stand-in for the trainer; 'grpo', 'gmpo' or 'rloo'."""
    pytest.importorskip("trl", exc_type=ImportError)
    cls = _trl_trainer(trainer)
    o = {
        "loss_type": "dapo",
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "max_completion_length": None,
        "entropy_coef": 0.0,
    } | options
    names = ("delta", "use_bias_correction_kl", "sapo_temperature_pos", "sapo_temperature_neg")
    names += ("vespo_k_pos", "vespo_k_neg", "vespo_lambda_pos", "vespo_lambda_neg")
    defaults = dict(zip(names, (None, False, 1.0, 1.05, 2.0, 3.0, 3.0, 2.0), strict=True))
    args = SimpleNamespace(
        steps_per_generation=1, **{name: o.pop(name, defaults[name]) for name in names}
    )
    ratio = tensors.get("importance_sampling_ratio")
    this = SimpleNamespace(
        **o,
        args=args,
        accelerator=_Accelerator(),
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=o["entropy_coef"] != 0,
        current_gradient_accumulation_steps=1,
        use_vllm=ratio is not None,
        vllm_importance_sampling_correction=True,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *a, **k: (logps, entropy, None),
    )
    for name in ("get_off_policy_mask", "get_gamma_weights"):
        setattr(this, name, getattr(cls, name, None))
    if hasattr(cls, "get_high_entropy_mask"):
        this.get_high_entropy_mask = cls.get_high_entropy_mask.__get__(this)
    ids = torch.zeros_like(mask)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": advantages,
        "num_items_in_batch": mask.sum(),
        **tensors,
    }
    return cls._compute_loss(this, this.model, inputs)


def _trl_trainer(name: str) -> Any:
    if name == "gmpo":
        from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer

        return GMPOTrainer
    from trl import GRPOTrainer, RLOOTrainer

    return {"grpo": GRPOTrainer, "rloo": RLOOTrainer}[name]


def liger_loss(logps: Tensor, advantages: Tensor, mask: Tensor, **options: Any) -> Tensor:
    """Liger's loss of its fused head."""
    pytest.importorskip("liger_kernel")
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction

    options = {"epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.0} | options
    loss, _ = LigerFusedLinearGRPOFunction.ppo_loss_fn(logps, mask, advantages, mask, **options)
    return loss


@cache
def verl() -> tuple[ModuleType, ModuleType]:
    """(core_algos, rollout_corr_helper) of verl, or a skip."""
    if not VERL_PATH.exists():
        pytest.skip("verl is not under VERL_PATH")
    before = dict(sys.modules)

    def stand_in(name: str, **attributes: Any) -> None:
        module = ModuleType(name)
        module.__dict__.update(attributes)
        sys.modules[name] = module

    class Config(dict):  # type: ignore[type-arg]
        __getattr__ = dict.__getitem__

    other = type("Other", (), {})
    functional = _functions(
        VERL_PATH / "utils/torch_functional.py", ("masked_sum", "masked_mean", "masked_var")
    )
    stand_in("omegaconf", DictConfig=dict)
    for package in ("verl", "verl.trainer", "verl.workers"):
        stand_in(package)
    stand_in("verl.utils", as_torch_index=None, group_mean_std=None, torch_functional=functional)
    sys.modules["verl.utils.torch_functional"] = functional
    stand_in("verl.trainer.config", AlgoConfig=other)
    stand_in("verl.trainer.config.algorithm", RolloutCorrectionConfig=other)
    stand_in("verl.utils.import_utils", deprecated=lambda _: lambda function: function)
    stand_in("verl.workers.config", ActorConfig=Config)
    stand_in("verl.workers.config.actor", PolicyLossConfig=other)
    stand_in("verl.protocol", DataProto=other)
    try:
        core = _module("verl_core_algos", VERL_PATH / "trainer/ppo/core_algos.py")
        rollout = _module("verl_rollout", VERL_PATH / "trainer/ppo/rollout_corr_helper.py")
    finally:
        for name in list(sys.modules):
            if name.partition(".")[0] in ("verl", "omegaconf"):
                del sys.modules[name]
        sys.modules.update(before)  # the installed ones, if there are any
    core.Config = Config
    return core, rollout


def verl_loss(
    name: str,
    logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    old: Tensor,
    mode: str = "token-mean",
    weights: Tensor | None = None,
    scale: dict[str, Any] | None = None,
    **options: Any,
) -> Tensor:
    """A loss of verl's registry; `options` are those of its actor's configuration."""
    core, _ = verl()
    config = core.Config(
        {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None} | options,
        global_batch_info=scale or {},
    )
    function = core.get_policy_loss_fn(name)
    return function(old, logps, advantages, mask, mode, config, weights)[0]


def _module(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _functions(path: Path, names: tuple[str, ...]) -> ModuleType:
    """A module of some functions of a file, which cannot be imported whole."""
    tree = ast.parse(path.read_text())
    tree.body = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in names]
    module = ModuleType(path.stem)
    module.torch = torch  # type: ignore[attr-defined]
    exec(compile(tree, str(path), "exec"), module.__dict__)
    return module
