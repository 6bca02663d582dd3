"""The loop's share of `GRPOConfig`: what is trained on, what it is compared with, who judges it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from fused_grpo.checks import check_choice, check_number
from fused_grpo.kl import AdaptiveKL
from fused_grpo.trainer.loss_args import arg

REWARD_ERRORS = ("raise", "none")


@dataclass
class LoopArguments:
    """docs/trainer-loop.md has the formula and the source of each."""

    dynamic_sample: bool = arg(
        False,
        "Drop prompts whose completions have equal rewards, and sample others instead (DAPO).",
    )
    max_resample_times: int = arg(
        10, "Rounds of other prompts in a generation; 0: drop and sample none."
    )
    dynamic_sample_range: float = arg(
        0.0, "Rewards of a prompt that span no more than this count as equal."
    )
    overlong_buffer_len: int | None = arg(
        None, "Punish the last so many tokens before max_completion_length (DAPO)."
    )
    overlong_penalty_factor: float = arg(1.0, "The punishment at max_completion_length.")
    reward_timeout: float | None = arg(
        None, "Seconds for one call of a reward function; isolated() has its own."
    )
    reward_errors: str = arg(
        "raise",
        "A reward function that raises or times out: 'raise' ends the run, 'none' leaves the "
        "function's rewards of that batch out.",
    )
    sync_ref_model: bool = arg(False, "Move the reference towards the policy.")
    ref_model_mixup_alpha: float = arg(0.6, "How far: the policy's share.")
    ref_model_sync_steps: int = arg(512, "How often, in optimizer steps.")
    use_adaptive_kl: bool = arg(False, "Let beta follow the KL, starting from its value.")
    kl_target: float = arg(0.1, "The KL that it steers to, in nats per token.")
    kl_horizon: int = arg(10000, "Completions over which beta may change by a fifth.")

    @property
    def reward_calls(self) -> dict[str, Any]:
        """The options of `rewards.score`."""
        return {"timeout": self.reward_timeout, "errors": self.reward_errors}

    def adaptive_kl(self) -> AdaptiveKL | None:
        """A controller of beta, where it is wanted."""
        if not self.use_adaptive_kl:
            return None
        config: Any = self
        rows = config.per_device_train_batch_size * config.gradient_accumulation_steps
        return AdaptiveKL(
            target=self.kl_target,
            horizon=self.kl_horizon,
            batch_size=rows * config.world_size,
            coef=config.beta,
        )

    def check_loop(self) -> None:
        """TypeError or ValueError for options that do not fit."""
        config: Any = self
        for name, holds, must in NUMBERS:
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), holds, must)
        for name in ("max_resample_times", "overlong_buffer_len", "ref_model_sync_steps"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"{name} must be an integer, not {type(value).__name__}")
        check_choice("reward_errors", self.reward_errors, REWARD_ERRORS)
        for name, options in NEEDED_BY.items():
            given = [n for n in options if getattr(self, n) != DEFAULTS[n]]
            if given and not getattr(self, name):
                raise ValueError(f"{given[0]}={getattr(self, given[0])} needs {name}")
        for name in ("sync_ref_model", "use_adaptive_kl"):
            if getattr(self, name) and not config.beta > 0:
                raise ValueError(f"{name} needs beta > 0, not {config.beta}")
        length = config.max_completion_length
        if self.overlong_buffer_len is not None and self.overlong_buffer_len > length:
            raise ValueError(
                f"overlong_buffer_len={self.overlong_buffer_len} must be at most "
                f"max_completion_length={length}"
            )


Holds = Callable[[float], bool]
NUMBERS: tuple[tuple[str, Holds, str], ...] = (
    ("max_resample_times", lambda x: x >= 0, ">= 0"),
    ("dynamic_sample_range", lambda x: 0 <= x < math.inf, ">= 0"),
    ("overlong_buffer_len", lambda x: x >= 1, ">= 1, or None"),
    ("overlong_penalty_factor", lambda x: 0 < x < math.inf, "> 0"),
    ("reward_timeout", lambda x: 0 < x < math.inf, "> 0, or None"),
    ("ref_model_mixup_alpha", lambda x: 0 <= x <= 1, "in [0, 1]"),
    ("ref_model_sync_steps", lambda x: x >= 1, ">= 1"),
    ("kl_target", lambda x: 0 < x < math.inf, "> 0"),
    ("kl_horizon", lambda x: x >= 1, ">= 1"),
)
DEFAULTS = {f.name: f.default for f in fields(LoopArguments)}
# an option that has no effect raises
NEEDED_BY = {
    "dynamic_sample": ("max_resample_times", "dynamic_sample_range"),
    "overlong_buffer_len": ("overlong_penalty_factor",),
    "sync_ref_model": ("ref_model_mixup_alpha", "ref_model_sync_steps"),
    "use_adaptive_kl": ("kl_target", "kl_horizon"),
}
