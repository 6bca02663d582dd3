"""What an objective sees of a batch: flat vectors over the counted tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fused_grpo.ratios import Sequences


@dataclass(frozen=True)
class TokenView:
    """The n counted tokens, sequence after sequence; every tensor is [n] unless said otherwise.

    Attributes:
        logps: log-probabilities under the policy, differentiable.
        advantages: A_t, one per token.
        old: log-probs of the policy that the ratio is taken against, detached.
        log_ratio: logps - old at the level of the ratio, before its clamp; differentiable.
        ratio: exp of it, clamped by `log_ratio_clamp`; differentiable.
        weight: importance weights of the policy term, detached, or None. They are multiplied in
            afterwards, unless the objective is registered with `folds_weight`.
        entropy: entropies, or None where neither the options nor the objective ask for them.
        sequences: where the S sequences stand; see `sequence_sum` and `sequence_mean`.
    """

    logps: Tensor
    advantages: Tensor
    old: Tensor
    log_ratio: Tensor
    ratio: Tensor
    weight: Tensor | None
    entropy: Tensor | None
    sequences: Sequences

    @property
    def sequence(self) -> Tensor:
        """int64, which of the S sequences a token belongs to."""
        return self.sequences.index

    @property
    def lengths(self) -> Tensor:
        """[S] int64, counted tokens of each sequence."""
        return self.sequences.lengths

    def sequence_sum(self, values: Tensor) -> Tensor:
        """[n] -> [n]: the sum over the counted tokens of each token's sequence; differentiable."""
        return self.sequences.total(values)[self.sequence]

    def sequence_mean(self, values: Tensor) -> Tensor:
        """[n] -> [n]: the mean over the counted tokens of each token's sequence."""
        return self.sequences.mean(values)[self.sequence]
