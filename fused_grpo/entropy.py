"""A coefficient of the entropy bonus that follows the entropy."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass


@dataclass
class AdaptiveEntropy:
    """Raises the coefficient while the entropy is at most the target, and lowers it otherwise.

    Skywork-OR1 (arXiv 2505.22312). The bonus is applied, as `current` says, only in steps after one
    whose entropy was at most the target.

        control = AdaptiveEntropy(target=0.2)
        loss = grpo_loss(..., entropy_coef=control.current, entropy=True)
        control.update(mean_entropy)       # nats per token, of the whole optimizer step

    Attributes:
        target: nats per token.
        step: how far one update moves the coefficient.
        low, high: its bounds.
        coef: its value, at first that of the first step.
        last: the entropy of the last update.

    Raises:
        ValueError: bounds out of order, a target or step that is not > 0.
    """

    target: float = 0.2
    step: float = 0.005
    low: float = 0.0
    high: float = 1.0
    coef: float = 0.0
    last: float = math.inf

    def __post_init__(self) -> None:
        for name in ("target", "step"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be > 0")
        if not 0 <= self.low <= self.coef <= self.high:
            raise ValueError(
                f"0 <= low={self.low} <= coef={self.coef} <= high={self.high} must hold"
            )

    @property
    def current(self) -> float:
        """The coefficient of the next step."""
        return self.coef if self.last <= self.target else 0.0

    def update(self, entropy: float) -> None:
        """Takes the mean entropy of a step, in nats per token."""
        move = self.step if entropy <= self.target else -self.step
        self.coef = min(max(self.coef + move, self.low), self.high)
        self.last = entropy

    def state(self) -> dict[str, float]:
        """Its fields, to be given to the constructor again."""
        return asdict(self)
