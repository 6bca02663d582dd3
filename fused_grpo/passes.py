"""What goes into a pass over the head, and what comes out."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from fused_grpo.support import Support
from fused_grpo.tiles import Head

T = TypeVar("T")

# of a pass, in the order of the autograd functions' leading arguments
GRADIENTS = ("hidden_grad", "weight_grad", "bias_grad", "lora_hidden_grad", "lora_weight_grad")


@dataclass(frozen=True)
class Tokens:
    """The tokens to project: where their hidden states are, and what they should predict."""

    hidden: Tensor  # [..., H], one or two leading dimensions, any strides
    index: Tensor  # [n] int64, positions in the flattened leading dimensions
    target: Tensor  # [n] int64, in [0, V)
    temperature: Tensor | float  # [n] or scalar
    support: Support | None = None  # None: the whole vocabulary
    counted: Tensor | None = None  # [n]; None: all. The others' hidden states are taken as zeros
    lora_hidden: Tensor | None = None  # [..., r], the leading dimensions of `hidden`

    def rows(self, span: slice) -> Tensor:
        """[c, H] hidden states of a span of tokens; copies that span only, whatever the strides."""
        return self._rows(self.hidden, span)

    def lora_rows(self, span: slice) -> Tensor | None:
        """[c, r], or None without an adapter."""
        return None if self.lora_hidden is None else self._rows(self.lora_hidden, span)

    def _rows(self, hidden: Tensor, span: slice) -> Tensor:
        index = self.index[span]
        if hidden.dim() == 2:
            rows = hidden[index]
        else:
            width = hidden.shape[1]
            rows = hidden[index // width, index % width]
        if self.counted is not None:
            rows.masked_fill_(~self.counted[span, None], 0)
        return rows

    def select(self, kept: Tensor) -> Tokens:
        """The tokens at `kept`."""
        return select_rows(self, kept, but=("hidden", "lora_hidden"))

    def padded(self, n: int) -> Tokens:
        """n tokens, the last one repeated."""
        have = self.index.numel()
        return self.select(torch.arange(n, device=self.index.device).clamp_(max=have - 1))

    def temperatures(self, span: slice, dtype: torch.dtype) -> Tensor | float:
        """[c, 1], or the one number of all."""
        if isinstance(self.temperature, Tensor):
            return self.temperature[span].to(dtype)[:, None]
        return self.temperature


@dataclass(frozen=True)
class Reference:
    """A second head over the same vocabulary, for the same tokens, without gradients.

    Its log-probabilities come out with the policy's. `full` and `top_k` say which divergence does,
    see `divergence`; at most one of them.
    """

    tokens: Tokens  # hidden [..., H_r]
    head: Head  # weight [V, H_r]
    full: bool = False
    top_k: int | None = None

    @property
    def kl(self) -> bool:
        return self.full or self.top_k is not None


@dataclass(frozen=True)
class Needs:
    """What to compute beside the log-probabilities."""

    hidden_grad: bool = False
    weight_grad: bool = False
    bias_grad: bool = False
    entropy: bool = False
    entropy_grad: bool = False
    kl_grad: bool = False
    lora_hidden_grad: bool = False
    lora_weight_grad: bool = False
    statistics: bool = False

    @property
    def any_grad(self) -> bool:
        return any(getattr(self, name) for name in GRADIENTS)

    @property
    def only_rows(self) -> bool:
        """Whether gradients of hidden states are all that is wanted."""
        heads = self.weight_grad or self.bias_grad or self.lora_weight_grad
        return self.any_grad and not heads


@dataclass
class TokenValues:
    """Per-token results [n] in the order of `Tokens.index`; None where nothing asks for them."""

    logps: Tensor
    entropy: Tensor | None = None
    ref_logps: Tensor | None = None
    kl: Tensor | None = None
    support_size: Tensor | None = None  # int64, entries that are kept
    outside: Tensor | None = None  # bool, whether the target is outside, and kept nevertheless
    statistics: Tensor | None = None  # [n, 4] see `statistics.STATISTICS`
    routing: Tensor | None = None  # [n, 3] what was kept, see `routed.Entries.statistics`

    def write(self, span: slice, part: TokenValues) -> None:
        for name, value in vars(part).items():
            if value is not None:
                getattr(self, name)[span] = value


@dataclass
class HeadResult(TokenValues):
    """The values, and gradients shaped like their tensors."""

    hidden_grad: Tensor | None = None
    weight_grad: Tensor | None = None
    bias_grad: Tensor | None = None
    lora_hidden_grad: Tensor | None = None
    lora_weight_grad: Tensor | None = None
    weight_grad_written: bool = False  # before that it holds nothing yet


def with_gradients(result: HeadResult, found: HeadResult) -> HeadResult:
    """`result` with the gradients of another pass."""
    return replace(result, **{name: getattr(found, name) for name in GRADIENTS})


@dataclass(frozen=True)
class Upstream:
    """dL/dlogp, dL/dentropy and dL/dkl of some tokens [c]; None: 0."""

    logps: Tensor
    entropy: Tensor | None = None
    kl: Tensor | None = None

    def __getitem__(self, rows: slice | Tensor) -> Upstream:
        return select_rows(self, rows)

    def live(self, logps: Tensor) -> Tensor:
        """[c] bool, which tokens send something back, from their log-probabilities."""
        # clamp and minimum give g = 0 at NaN, which must not pass for a token that is done
        live = (self.logps != 0) | logps.isnan()
        for more in (self.entropy, self.kl):
            live = live if more is None else live | (more != 0)
        return live

    def filled(self, count: int) -> Upstream:
        """[count] with zeros for the rows that only fill a chunk."""
        parts = (self.logps, self.entropy, self.kl)
        return Upstream(
            *(None if x is None else torch.cat([x, x.new_zeros(count - len(x))]) for x in parts)  # type: ignore[arg-type]
        )


class Waiting(Protocol):
    """What a routed pass keeps until dL/dlogp is known."""

    def gradients(
        self, tokens: Tokens, head: Head, needs: Needs, values: TokenValues, upstream: Upstream
    ) -> HeadResult: ...


# (span, the values of its tokens) -> what the loss makes of them
Coefficients = Callable[[slice, TokenValues], Upstream]


def select_rows(record: T, kept: slice | Tensor, but: Collection[str] = ()) -> T:
    """A dataclass of per-token tensors [c, ...], with the rows at `kept` only."""
    chosen = {
        f.name: value[kept]
        for f in fields(record)  # type: ignore[arg-type]
        if f.name not in but and isinstance(value := getattr(record, f.name), Tensor)
    }
    return replace(record, **chosen)  # type: ignore[type-var]
