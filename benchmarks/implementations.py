"""One adapter per implementation of the GRPO loss, a few lines each.

An adapter computes the loss and leaves the gradients in `feed.hidden.grad` and `feed.weight.grad`.
Every one gets the same numbers, either as the padded batch or as the counted tokens alone; picking
those out of the batch is done before the clock starts, which favours the others, not ours.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.data import Case


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


Run = Callable[[Feed], tuple[Tensor, Tensor | None]]  # -> loss, log-probabilities if there are any


@dataclass(frozen=True)
class Implementation:
    name: str
    layout: str  # "padded" or "counted"
    run: Run
    package: str = "torch"
    ours: bool = False
    compiled: bool = False  # takes seconds to start: left out of quick runs
    half_only: bool = False  # nothing new in fp32
    extra: bool = False  # a way to speed up or sharpen eager code, beside what people run
    note: str = ""

    def reason_to_skip(self, dtype: torch.dtype, quick: bool = False) -> str | None:
        """Why it does not run here, or None."""
        if find_spec(self.package) is None:
            return f"{self.package} is not installed"
        if self.half_only and dtype.itemsize > 2:
            return "the same as another in fp32"
        return "compiling takes too long for --quick" if quick and self.compiled else None

    @property
    def key(self) -> str:
        return f"{self.name}/{self.layout}"


def make_feed(case: Case, layout: str) -> Feed:
    mask, lengths = case.mask, case.mask.sum(1)
    share = lengths[:, None] * len(lengths) if case.loss_type == "grpo" else lengths.sum()
    weights = mask.to(case.advantages.dtype) / share.clamp(min=1)
    advantages = case.advantages[:, None].expand(mask.shape)
    pick: Callable[[Tensor], Tensor] = (lambda x: x[mask]) if layout == "counted" else Tensor.clone
    return Feed(
        case=case,
        hidden=pick(case.hidden).requires_grad_(),
        weight=case.weight.clone().requires_grad_(),
        ids=pick(case.ids),
        advantages=pick(advantages),
        old=pick(case.old),
        ref=pick(case.ref),
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


def from_logprobs(logprobs: Callable[[Feed], Tensor]) -> Run:
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


# --- other packages ------------------------------------------------------------------------------


def trl_chunked(feed: Feed) -> Tensor:
    """TRL's fused head, with its trainer's arguments; on a CPU its trainer feeds it padding too."""
    from trl.kernels import ChunkedLogProbFunction

    hidden, weight = feed.hidden.flatten(0, -2), feed.weight
    logps, *_ = ChunkedLogProbFunction.apply(
        hidden, weight, None, feed.ids.flatten(), feed.case.temperature, 32768, None, 1.0, ()
    )
    return logps.view(feed.ids.shape)


@cache
def _liger_module(compiled: bool, beta: float, case_key: tuple[Any, ...]) -> torch.nn.Module:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss  # type: ignore

    epsilon, loss_type, temperature = case_key
    return LigerFusedLinearGRPOLoss(
        beta=beta,
        use_ref_model=beta != 0,
        compiled=compiled,
        epsilon_low=epsilon,
        epsilon_high=epsilon,
        loss_type=loss_type,
        temperature=temperature,
    )


def liger(compiled: bool) -> Run:
    def run(feed: Feed) -> tuple[Tensor, None]:
        case = feed.case
        module = _liger_module(
            compiled, case.beta, (case.epsilon, case.loss_type, case.temperature)
        )
        loss, _ = module(
            feed.hidden,
            feed.weight,
            feed.ids,
            case.mask.to(feed.old.dtype),
            case.advantages,
            old_per_token_logps=feed.old,
            ref_per_token_logps=feed.ref if case.beta else None,
        )
        loss.backward()
        return loss.detach(), None

    return run


def liger_logprobs(feed: Feed) -> Tensor:
    """The log-probabilities inside Liger's loss, on their own: it returns none itself."""
    from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase  # type: ignore

    hidden = feed.hidden if feed.hidden.dim() == 3 else feed.hidden[None]
    ids = feed.ids.view(hidden.shape[:-1])
    logps = LigerFusedLinearPPOBase.chunk_forward(
        hidden, feed.weight, ids, temperature=feed.case.temperature
    )
    return logps.view(feed.ids.shape)


# --- ours ----------------------------------------------------------------------------------------


def fused_grpo(feed: Feed, **options: Any) -> tuple[Tensor, Tensor]:
    from fused_grpo import grpo_loss

    case = feed.case
    packed = feed.hidden.dim() == 2
    out = grpo_loss(
        feed.hidden,
        feed.weight,
        feed.ids,
        case.advantages,
        completion_mask=None if packed else case.mask,
        cu_seqlens=feed.cu_seqlens if packed else None,
        old_per_token_logps=feed.old,
        ref_per_token_logps=feed.ref if case.beta else None,
        loss_type=case.loss_type,
        epsilon_low=case.epsilon,
        beta=case.beta,
        temperature=case.temperature,
        **options,
    )
    out.loss.backward()
    return out.loss.detach(), out.per_token_logps


def fused_grpo_routed(feed: Feed) -> tuple[Tensor, Tensor]:
    return fused_grpo(feed, backward="routed", route_seed=0)


OURS, ROUTED = "fused-grpo", "fused-grpo, routed"

IMPLEMENTATIONS = (
    Implementation(OURS, "padded", fused_grpo, ours=True),
    Implementation("fused-grpo, packed", "counted", fused_grpo, ours=True),
    Implementation(ROUTED, "padded", fused_grpo_routed, ours=True, note="sparse gradients"),
    Implementation(
        "eager", "padded", from_logprobs(eager_log_softmax), note="log_softmax, as users run it"
    ),
    Implementation(
        "eager, cross_entropy", "padded", from_logprobs(eager_cross_entropy), extra=True
    ),
    Implementation(
        "eager, fp32 head",
        "padded",
        from_logprobs(eager_fp32_head),
        half_only=True,
        extra=True,
        note="hidden.float() @ weight.float().T",
    ),
    Implementation(
        "eager, torch.compile",
        "padded",
        from_logprobs(eager_compiled),
        compiled=True,
        extra=True,
        note="inductor",
    ),
    Implementation("TRL chunked", "padded", from_logprobs(trl_chunked), "trl"),
    Implementation("Liger", "padded", liger(compiled=False), "liger_kernel"),
    Implementation(
        "Liger, compiled", "padded", liger(compiled=True), "liger_kernel", compiled=True
    ),
    Implementation("eager", "counted", from_logprobs(eager_log_softmax)),
    Implementation(
        "eager, cross_entropy", "counted", from_logprobs(eager_cross_entropy), extra=True
    ),
    Implementation(
        "eager, fp32 head",
        "counted",
        from_logprobs(eager_fp32_head),
        half_only=True,
        extra=True,
        note="hidden.float() @ weight.float().T",
    ),
    Implementation(
        "eager, low precision",
        "counted",
        from_logprobs(eager_low_precision),
        half_only=True,
        extra=True,
        note="cross_entropy on the logits as they are, no fp32 copy",
    ),
    Implementation(
        "eager, 256 at a time",
        "counted",
        eager_in_chunks,
        extra=True,
        note="a backward per chunk of tokens",
    ),
    Implementation(
        "eager, torch.compile",
        "counted",
        from_logprobs(eager_compiled),
        compiled=True,
        extra=True,
        note="inductor",
    ),
    Implementation("TRL chunked", "counted", from_logprobs(trl_chunked), "trl"),
    Implementation(
        "Liger log-probs",
        "counted",
        from_logprobs(liger_logprobs),
        "liger_kernel",
        extra=True,
        note="the log-probabilities of its loss, and the plain loss",
    ),
    Implementation(
        "torch linear_cross_entropy",
        "counted",
        from_logprobs(torch_linear_cross_entropy),
        note="512 tokens at a time, accumulated in the dtype of the inputs",
    ),
)


def exact(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, logps [N], dhidden [N, H], dweight) in fp64 for the numbers of `case` as they are."""
    feed = make_feed(case.to(torch.float64, case.ids.device), "counted")
    loss, logps = from_logprobs(eager_log_softmax)(feed)
    dh, dw = feed.hidden.grad, feed.weight.grad
    return loss, present(logps), present(dh), present(dw)


def present(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


def silence_known_warnings() -> None:
    # Liger's compiled loss and torch's options object warn once per call about their own internals.
    warnings.filterwarnings("ignore", module=r"torch\._dynamo.*|liger_kernel.*|trl.*")
