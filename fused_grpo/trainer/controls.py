"""Coefficients of the loss that follow what the run measures."""

from __future__ import annotations

import math
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from fused_grpo.entropy import AdaptiveEntropy
from fused_grpo.kl import AdaptiveKL
from fused_grpo.trainer.config import GRPOConfig

FOLLOWS = {"entropy_coef": "entropy", "beta": "kl"}  # the metric of the loss, by the coefficient


class Controls:
    """The controllers that a `GRPOConfig` asks for; all processes use it together.

    Attributes:
        by_name: the controller of each coefficient.
    """

    def __init__(self, args: GRPOConfig, accelerator: Accelerator) -> None:
        wanted = {"entropy_coef": args.adaptive_entropy(), "beta": args.adaptive_kl()}
        self.by_name: dict[str, AdaptiveEntropy | AdaptiveKL] = {
            name: control for name, control in wanted.items() if control is not None
        }
        self.accelerator = accelerator
        self._reset()

    def _reset(self) -> None:
        # sums over the counted tokens of a step, and their number
        self._sums = torch.zeros(len(self.by_name) + 1, dtype=torch.float64)

    @property
    def coefficients(self) -> dict[str, float]:
        """Those of the next step."""
        return {name: control.current for name, control in self.by_name.items()}

    def observe(self, metrics: dict[str, Tensor], tokens: Tensor) -> None:
        """Takes the means over a micro-batch."""
        if self.by_name:
            sums = [metrics[FOLLOWS[name]] * tokens for name in self.by_name]
            self._sums += torch.stack([*sums, tokens]).double().cpu()

    def step(self) -> None:
        """The optimizer step is over: its means over all processes go to the controllers."""
        if not self.by_name:
            return
        *totals, tokens = self.accelerator.reduce(self._sums.to(self.accelerator.device)).tolist()
        for control, total in zip(self.by_name.values(), totals, strict=True):
            if math.isfinite(total):
                control.update(total / max(tokens, 1.0))
        self._reset()

    def state_dict(self) -> dict[str, Any]:
        """By the coefficient's name, the fields of its controller."""
        return {name: control.state() for name, control in self.by_name.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what `state_dict` gave; a controller that is new keeps its start."""
        for name, control in self.by_name.items():
            if name in state:
                self.by_name[name] = type(control)(**state[name])
