"""One adapter per implementation of the GRPO loss, a few lines each: eager code and ours here,
other packages in `peers.py`.

An adapter computes the loss and leaves the gradients in `feed.hidden.grad` and `feed.weight.grad`.
Every one gets the same numbers, either as the padded batch or as the counted tokens alone; picking
those out of the batch is done before the clock starts, which favours the others, not ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from benchmarks.data import Case, Spec


@dataclass
class Feed:
    """What an implementation is handed: [B, T, ...] tensors (padded) or [N, ...] ones (counted)."""

    case: Case
    hidden: Tensor  # leaf
    weight: Tensor  # leaf
    ids: Tensor
    advantages: Tensor  # one per token
    old: Tensor
    ref: Tensor
    token_weights: Tensor  # w_t, 0 at padding
    cu_seqlens: Tensor  # [B + 1] int32

    def forget(self) -> None:
        self.hidden.grad = self.weight.grad = None


Logprobs = Callable[[Feed], Tensor]
Run = Callable[[Feed], tuple[Tensor, Tensor | None]]  # -> loss, log-probabilities if there are any


@dataclass(frozen=True)
class Implementation:
    name: str
    layout: str  # "padded" or "counted"
    logprobs: Logprobs | None = None  # None: only the loss as a whole
    run: Run | None = None  # None: the plain loss on `logprobs`
    ours: bool = False
    extra: bool = False  # a way to speed up or sharpen eager code, beside what people run
    full: bool = False  # only with --full: hardly differs from another, or is slow
    compiled: bool = False  # takes seconds to start: left out of quick runs
    half_only: bool = False  # nothing new in fp32
    bytes_per_logit: float = 0.0  # that it holds at once
    note: str = ""
    # Why it cannot run on these inputs, or None
    missing: Callable[[Spec], str | None] = lambda spec: None

    @property
    def key(self) -> str:
        return f"{self.name}/{self.layout}"

    def reason_to_skip(self, spec: Spec, quick: bool = False) -> str | None:
        if reason := self.missing(spec):
            return reason
        if self.half_only and spec.dtype == "fp32":
            return "the same as another in fp32"
        if quick and self.compiled:
            return "compiling takes too long for --quick"
        room = 1 - spec.padding if self.layout == "padded" else 1.0
        needed = self.bytes_per_logit * spec.tokens * spec.vocab / room
        if needed > (available := free_memory(spec.device)):
            return f"its logits need {needed / 1e9:.0f} GB, {available / 1e9:.0f} GB are free"
        return None

    def call(self, feed: Feed, task: str) -> tuple[Tensor | None, Tensor | None]:
        """A task (see `Spec.task`): loss and log-probabilities, as far as it has them."""
        if task == "logprobs":
            with torch.no_grad():
                return None, present(self.logprobs)(feed)
        return (self.run or from_logprobs(present(self.logprobs)))(feed)


def free_memory(device: str) -> float:
    if device == "cuda":
        return float(torch.cuda.mem_get_info()[0])
    with open("/proc/meminfo") as file:
        return next(float(x.split()[1]) * 1024 for x in file if x.startswith("MemAvailable"))


def make_feed(case: Case, layout: str, dtype: torch.dtype | None = None) -> Feed:
    """`dtype`: of everything but the weight, for the exact answer, which holds that itself."""
    mask, lengths = case.mask, case.mask.sum(1)
    share = lengths[:, None] * len(lengths) if case.loss_type == "grpo" else lengths.sum()
    side = dtype or case.advantages.dtype
    weights = mask.to(side) / share.clamp(min=1)
    advantages = case.advantages[:, None].expand(mask.shape)
    pick: Callable[[Tensor], Tensor] = (lambda x: x[mask]) if layout == "counted" else Tensor.clone
    return Feed(
        case=case,
        hidden=pick(case.hidden).to(dtype or case.hidden.dtype).requires_grad_(dtype is None),
        weight=case.weight if dtype else case.weight.clone().requires_grad_(),
        ids=pick(case.ids),
        advantages=pick(advantages).to(side),
        old=pick(case.old).to(side),
        ref=pick(case.ref).to(side),
        token_weights=pick(weights),
        cu_seqlens=F.pad(lengths.cumsum(0), (1, 0)).int(),
    )


def clipped_loss(logps: Tensor, feed: Feed, span: slice = slice(None)) -> Tensor:
    """The loss that every implementation computes, from log-probabilities of a span of the feed."""
    case, advantages = feed.case, feed.advantages[span]
    ratio = torch.exp(logps - feed.old[span])
    clipped = ratio.clamp(1 - case.epsilon, 1 + case.epsilon)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    if case.beta:
        d = feed.ref[span] - logps
        loss = loss + case.beta * (torch.exp(d) - d - 1)
    return (loss * feed.token_weights[span]).sum()


def from_logprobs(logprobs: Logprobs) -> Run:
    """An implementation that only brings log-probabilities: the loss above by ordinary autograd."""

    def run(feed: Feed) -> tuple[Tensor, Tensor]:
        logps = logprobs(feed)
        loss = clipped_loss(logps, feed)
        loss.backward()
        return loss.detach(), logps.detach()

    return run


# --- eager torch ---------------------------------------------------------------------------------


def logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """As a model returns them: in the dtype of the weights, then fp32 for the softmax."""
    z = hidden @ weight.T
    z = z if z.dtype == torch.float64 else z.float()
    return z if temperature == 1.0 else z / temperature


def eager_log_softmax(feed: Feed) -> Tensor:
    z = logits(feed.hidden, feed.weight, feed.case.temperature)
    return torch.log_softmax(z, -1).gather(-1, feed.ids[..., None]).squeeze(-1)


def _cross_entropy(z: Tensor, ids: Tensor) -> Tensor:
    return -F.cross_entropy(z.flatten(0, -2), ids.flatten(), reduction="none").view(ids.shape)


def eager_cross_entropy(feed: Feed) -> Tensor:
    return _cross_entropy(logits(feed.hidden, feed.weight, feed.case.temperature), feed.ids)


def eager_fp32_head(feed: Feed) -> Tensor:
    """The exact logits of bf16 inputs, as with TRL's `cast_lm_head_to_fp32`."""
    z = logits(feed.hidden.float(), feed.weight.float(), feed.case.temperature)
    return _cross_entropy(z, feed.ids)


def eager_low_precision(feed: Feed) -> Tensor:
    z = feed.hidden @ feed.weight.T
    z = z if feed.case.temperature == 1.0 else z / feed.case.temperature
    return _cross_entropy(z, feed.ids).float()


def eager_in_chunks(feed: Feed, size: int = 256) -> tuple[Tensor, Tensor]:
    """What a careful user can write: a backward per chunk, since the weights w_t are known."""
    total, logps = torch.zeros((), device=feed.ids.device), []
    for start in range(0, len(feed.ids), size):
        span = slice(start, start + size)
        z = logits(feed.hidden[span], feed.weight, feed.case.temperature)
        logps.append(_cross_entropy(z, feed.ids[span]))
        loss = clipped_loss(logps[-1], feed, span)
        loss.backward()
        total += loss.detach()
    return total, torch.cat(logps).detach()


@cache
def _compiled() -> Callable[[Tensor, Tensor, Tensor, float], Tensor]:
    def logprobs(hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float) -> Tensor:
        return _cross_entropy(logits(hidden, weight, temperature), ids)

    return torch.compile(logprobs, dynamic=False)


def eager_compiled(feed: Feed) -> Tensor:
    return _compiled()(feed.hidden, feed.weight, feed.ids, feed.case.temperature)


def torch_linear_cross_entropy(feed: Feed) -> Tensor:
    """reduction="none", the only form that takes a coefficient per token; the temperature rides on
    the hidden states. Its scalar forms (6NHV) cannot give this loss: g_t depends on the
    log-probabilities, and they weigh all tokens alike. Its default options (32 tokens at a time,
    fp32 accumulation) are several times slower on a CPU than these."""
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=512, acc_policy="balanced")
    x = feed.hidden if feed.case.temperature == 1.0 else feed.hidden / feed.case.temperature
    nll = F.linear_cross_entropy(x, feed.weight, feed.ids, reduction="none", options=options)
    return -nll.float()


# --- ours ----------------------------------------------------------------------------------------


def our_logprobs(feed: Feed, **options: Any) -> Tensor:
    from fused_grpo import linear_logprobs

    return linear_logprobs(
        feed.hidden, feed.weight, feed.ids, temperature=feed.case.temperature, **options
    ).logps


def fused_grpo(feed: Feed, **options: Any) -> tuple[Tensor, Tensor]:
    from fused_grpo import grpo_loss

    case = feed.case
    packed = feed.hidden.dim() == 2
    given: dict[str, Any] = {
        "completion_mask": None if packed else case.mask,
        "cu_seqlens": feed.cu_seqlens if packed else None,
        "old_per_token_logps": feed.old,
        "ref_per_token_logps": feed.ref if case.beta else None,
        "loss_type": case.loss_type,
        "epsilon_low": case.epsilon,
        "beta": case.beta,
        "temperature": case.temperature,
    } | options
    out = grpo_loss(feed.hidden, feed.weight, feed.ids, case.advantages, **given)
    out.loss.backward()
    return out.loss.detach(), out.per_token_logps


ROUTING = {"backward": "routed", "route_seed": 0}
OURS, ROUTED, COMPILED = "fused-grpo", "fused-grpo, routed", "eager, torch.compile"
our_routed = partial(fused_grpo, **ROUTING)

_ours = partial(Implementation, ours=True)
_extra = partial(Implementation, extra=True)


@cache
def implementations() -> tuple[Implementation, ...]:
    """All of them: the first one is what the others are compared with."""
    from benchmarks.peers import PEERS

    # fp32 logits, their softmax and their gradient: 12 bytes; measured in docs/memory.md
    eager = {"logprobs": eager_log_softmax, "bytes_per_logit": 12.0}
    entropy = {"logprobs": eager_cross_entropy, "bytes_per_logit": 12.0, "full": True}
    wide = {"logprobs": eager_fp32_head, "bytes_per_logit": 12.0, "half_only": True}
    wide["note"] = "hidden.float() @ weight.float().T"
    compiled = {"logprobs": eager_compiled, "bytes_per_logit": 8.0, "compiled": True}
    compiled["note"] = "inductor"
    return (
        _ours(OURS, "padded", our_logprobs, fused_grpo),
        _ours(OURS, "counted", our_logprobs, fused_grpo, full=True, note="packed"),
        _ours(ROUTED, "padded", None, our_routed, note="sparse gradients"),
        _ours(ROUTED, "counted", None, our_routed, full=True, note="sparse gradients"),
        Implementation("eager", "padded", note="log_softmax, as users run it", **eager),
        _extra("eager, cross_entropy", "padded", **entropy),
        _extra("eager, fp32 head", "padded", full=True, **wide),
        _extra(COMPILED, "padded", **compiled),
        Implementation("eager", "counted", **eager),
        _extra("eager, cross_entropy", "counted", **entropy),
        _extra("eager, fp32 head", "counted", **wide),
        _extra(
            "eager, low precision",
            "counted",
            eager_low_precision,
            bytes_per_logit=6.0,
            half_only=True,
            note="cross_entropy on the logits as they are, no fp32 copy",
        ),
        _extra(
            "eager, 256 at a time",
            "counted",
            run=eager_in_chunks,
            full=True,
            note="a backward per chunk of tokens",
        ),
        _extra(COMPILED, "counted", **compiled),
        *PEERS,
        Implementation(
            "torch linear_cross_entropy",
            "counted",
            torch_linear_cross_entropy,
            note="512 tokens at a time, accumulated in the dtype of the inputs",
        ),
    )


def present(x: Any) -> Any:
    assert x is not None
    return x
