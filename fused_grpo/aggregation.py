"""Every reduction is a weight per token: loss = sum_t w_t loss_t.

One function per scheme and one table; a loss_type names its scheme in `objectives.LOSS_TYPES`. The
loss is that of this call: divide by the number of accumulation steps, or multiply by the number of
data-parallel ranks whose gradients are averaged, where the scheme's divisor does not already say
so (`dapo` with `num_items_in_batch`, the counted tokens of all calls and ranks, needs the factor
of ranks only).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fused_grpo.batch import TokenBatch


def sequence_mean(batch: TokenBatch, _: float | Tensor | None) -> Tensor:
    """1 / (n_b B): the mean over the B sequences, fully masked ones included, of their token means.

    GRPO, arXiv 2402.03300.
    """
    lengths = batch.lengths[batch.sequence].clamp_min(1)
    return 1 / (lengths * batch.lengths.numel()).to(batch.advantages.dtype)


def token_mean(batch: TokenBatch, num_items: float | Tensor | None) -> Tensor:
    """1 / num_items, or 1 / (counted tokens of this call): DAPO, arXiv 2503.14476."""
    return _constant(batch, batch.count if num_items is None else num_items)


def fixed_length(batch: TokenBatch, length: float | Tensor | None) -> Tensor:
    """1 / (B max_completion_length): a constant, no length bias (Dr. GRPO, arXiv 2503.20783)."""
    assert length is not None
    return _constant(batch, length * batch.lengths.numel())


def _constant(batch: TokenBatch, divisor: float | Tensor) -> Tensor:
    like = batch.advantages
    return (1 / as_scalar(divisor, like).clamp_min(1)).expand(like.shape)


def as_scalar(value: float | Tensor, like: Tensor) -> Tensor:
    """0-d, dtype and device of `like`. A number is filled in: a copy would end a graph capture."""
    if isinstance(value, Tensor):
        return value.detach().to(like).reshape(())
    return like.new_full((), value)


# scheme -> (weights, the option that sets its divisor, whether it must be given)
SCHEMES: dict[
    str, tuple[Callable[[TokenBatch, float | Tensor | None], Tensor], str | None, bool]
] = {
    "sequence_mean": (sequence_mean, None, False),
    "local_token_mean": (token_mean, None, False),
    "token_mean": (token_mean, "num_items_in_batch", False),
    "fixed_length": (fixed_length, "max_completion_length", True),
}
