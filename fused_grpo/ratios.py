"""Log-ratios of tokens and of whole sequences, on flat vectors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fused_grpo.groups import max_over_ranks, sum_over_ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class _Sums(torch.autograd.Function):
    """[n, ...] -> [S, ...]: the sums of segments. torch's own has one derivative, and no batches.

    A sum per segment rather than scattered adds, which are not deterministic on a GPU.
    """

    @staticmethod
    def forward(values: Tensor, lengths: Tensor) -> Tensor:
        return torch.segment_reduce(values, "sum", lengths=lengths, initial=0, unsafe=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.count = inputs[0].shape[0]
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Spread.apply(grad, ctx.saved_tensors[0], ctx.count), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        sums: Tensor = _Sums.apply(tangent, ctx.saved_tensors[0])
        return sums

    @staticmethod
    def vmap(_: Any, dims: tuple[int, None], values: Tensor, lengths: Tensor) -> tuple[Tensor, int]:
        return _Sums.apply(values.movedim(dims[0], -1).contiguous(), lengths), -1


class _Spread(torch.autograd.Function):
    """[S, ...] -> [n, ...]: each segment's value at all of its places, the transpose of `_Sums`."""

    @staticmethod
    def forward(values: Tensor, lengths: Tensor, count: int) -> Tensor:
        return values.repeat_interleave(lengths, 0, output_size=count)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
        ctx.count = inputs[2]
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Sums.apply(grad.contiguous(), ctx.saved_tensors[0]), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        spread: Tensor = _Spread.apply(tangent, ctx.saved_tensors[0], ctx.count)
        return spread

    @staticmethod
    def vmap(
        _: Any, dims: tuple[int, None, None], values: Tensor, lengths: Tensor, count: int
    ) -> tuple[Tensor, int]:
        return _Spread.apply(values.movedim(dims[0], -1), lengths, count), -1


def per_sequence(values: Tensor, lengths: Tensor, reduce: str = "sum") -> Tensor:
    """[n] -> [S]: "sum" or "max" (of values >= 0) over each sequence, 0 for an empty one.

    `lengths` [S] are of the sequences as they stand in `values`, and add up to n.
    """
    if values.numel() == 0:
        return values.sum() + values.new_zeros(lengths.shape)  # 0 with a graph, as of any other
    if reduce == "sum":
        sums: Tensor = _Sums.apply(values, lengths)
        return sums
    return torch.segment_reduce(values, reduce, lengths=lengths, initial=0, unsafe=True)


@dataclass(frozen=True)
class Sequences:
    """Which of the S sequences the n tokens of a vector belong to.

    With a `group` its ranks hold parts of the same sequences, and every reduction is over all of
    them: one collective for its value, one for its gradient, whether a rank has tokens or not.
    """

    index: Tensor  # [n] int64, ascending
    here: Tensor  # [S] int64, how many of the n tokens
    lengths: Tensor  # [S] int64, how many tokens count, on all ranks
    group: ProcessGroup | None = None

    def total(self, values: Tensor, reduce: str = "sum") -> Tensor:
        """[n] -> [S], as `per_sequence`; over ranks only the sum is differentiable."""
        part = per_sequence(values, self.here, reduce)
        if self.group is None:
            return part
        if reduce == "max":
            return max_over_ranks(part, self.group)
        # a rank without tokens stays in the graph: its backward, too, takes part in a collective
        return sum_over_ranks(part if values.numel() else part + values.sum(), self.group)

    def mean(self, values: Tensor) -> Tensor:
        """[n] -> [S], differentiable."""
        return self.total(values) / self.lengths.clamp_min(1)


def _mean(log_ratio: Tensor, sequences: Sequences) -> Tensor:
    return sequences.mean(log_ratio)[sequences.index]


def _straight_through(log_ratio: Tensor, sequences: Sequences) -> Tensor:
    return _mean(log_ratio.detach(), sequences) + (log_ratio - log_ratio.detach())


def _sum(log_ratio: Tensor, sequences: Sequences) -> Tensor:
    return sequences.total(log_ratio)[sequences.index]


# level of the ratio -> its logarithm, from the logarithms of the tokens' ratios
LEVELS: dict[str, Callable[[Tensor, Sequences], Tensor]] = {
    "token": lambda log_ratio, sequences: log_ratio,
    "sequence": _mean,
    "sequence_token": _straight_through,
    "sequence_sum": _sum,
}


def clamp_log_ratio(log_ratio: Tensor, limit: float | None) -> Tensor:
    """Clamped to +- limit: exp stays finite, and the gradient is 0 beyond; None: as it is."""
    return log_ratio if limit is None else log_ratio.clamp(-limit, limit)


class _Exponential(torch.autograd.Function):
    """e^x - `less`, whose gradient is 0 where that of the result is, infinite or not."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, less: int) -> Tensor:
        return torch.expm1(x) if less else torch.exp(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        ctx.less = inputs[1]
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Exponential.slope(ctx, grad), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return _Exponential.slope(ctx, tangent)

    @staticmethod
    def slope(ctx: Any, by: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return torch.where((by == 0) & (y == torch.inf), 0.0, by * (y + ctx.less))


def exp(x: Tensor) -> Tensor:
    """e^x. Where it is infinite and a clip or a clamp has switched it off, the gradient is 0, as it
    is for any finite value, and not the NaN of 0 times infinity."""
    y: Tensor = _Exponential.apply(x, 0)
    return y


def expm1(x: Tensor) -> Tensor:
    """e^x - 1, as `exp`."""
    y: Tensor = _Exponential.apply(x, 1)
    return y
