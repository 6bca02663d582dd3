"""Routing replay: a forward of a mixture of experts that uses experts chosen before.

Which experts a token gets is decided by the largest of its router's scores, and a rounding error is
enough to decide otherwise. A policy that is compared with its sampler through other experts is
compared with another function. Replay keeps the choice and computes everything else anew: the
router's weights of the chosen experts are those of the present scores, gradient included (R3 of
arXiv:2510.11370; R2 if the choice is that of the trainer's own earlier forward).

The choice is read and replaced where the model makes it, at the `topk` over the scores of all
experts in the block that holds them, so that no formula of a router is written down twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fused_grpo.integrations.models import causal_lm

CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k", "num_experts_per_token")


class Tape:
    """The experts that each block chose, call by call."""

    def __init__(self, blocks: int) -> None:
        self.calls: list[list[Tensor]] = [[] for _ in range(blocks)]

    def experts(self, rows: int) -> Tensor | None:
        """[rows, tokens of all calls, blocks, K] int16; None if there was no call."""
        if not any(self.calls):
            return None
        blocks = []
        for calls in self.calls:
            parts = [chosen.reshape(rows, -1, chosen.shape[-1]) for chosen in calls]
            blocks.append(torch.cat(parts, 1))
        return torch.stack(blocks, 2)


def check_routing(model: nn.Module) -> None:
    """ValueError unless the experts of every block can be recorded and replaced."""
    inner = causal_lm(model)
    ids = torch.arange(1, 5, device=next(inner.parameters()).device)[None]
    training = inner.training
    inner.eval()
    try:
        with torch.no_grad(), recording(inner) as tape:
            inner(input_ids=ids, use_cache=False)
        if not all(len(calls) == 1 for calls in tape.calls):
            raise ValueError(
                f"router_replay: the blocks of {type(inner).__name__} choose their experts "
                f"{[len(calls) for calls in tape.calls]} times, or in a way that is not a topk "
                "over all of them"
            )
        other = (tape.experts(1) + 1) % _number(_blocks(inner)[0])
        with torch.no_grad(), recording(inner) as again, replaying(inner, other):
            inner(input_ids=ids, use_cache=False)
        if not torch.equal(again.experts(1), other):
            raise ValueError(f"router_replay: {type(inner).__name__} does not use what is replayed")
    finally:
        inner.train(training)


@contextmanager
def recording(model: nn.Module, active: bool = True) -> Iterator[Any]:
    """A `Tape` of the forwards inside; None where that is not wanted."""
    if not active:
        yield None
        return
    blocks = _blocks(causal_lm(model))
    tape = Tape(len(blocks))

    def taking(calls: list[Tensor]) -> Callable[..., Any]:
        def choose(scores: Tensor, k: int, *args: Any, **kwargs: Any) -> Any:
            found = torch.topk(scores, k, *args, **kwargs)
            calls.append(found.indices.to(torch.int16))
            return found

        return choose

    with _choosing(model, blocks, [taking(calls) for calls in tape.calls]):
        yield tape


@contextmanager
def replaying(model: nn.Module, experts: Tensor | None) -> Iterator[None]:
    """Forwards inside, and what a backward inside computes again, use these experts.

    Args:
        experts: [B, L, blocks, K] for inputs of B rows and L tokens; None changes nothing.

    Raises:
        ValueError: another number of blocks, tokens or experts than the model asks for.
    """
    if experts is None:
        yield
        return
    blocks = _blocks(causal_lm(model))
    if experts.shape[2] != len(blocks):
        raise ValueError(
            f"{experts.shape[2]} blocks of experts were recorded, the model has {len(blocks)}"
        )

    def giving(chosen: Tensor) -> Callable[..., Any]:
        def choose(scores: Tensor, k: int, *args: Any, **kwargs: Any) -> Any:
            if chosen.shape != (len(scores), k):
                raise ValueError(
                    f"experts of {list(chosen.shape)} were recorded for scores of {len(scores)} "
                    f"tokens, {k} experts each"
                )
            return torch.return_types.topk((scores.gather(-1, chosen), chosen))

        return choose

    columns = experts.long().flatten(0, 1).unbind(1)
    with _choosing(model, blocks, [giving(chosen) for chosen in columns]):
        yield


class _TopK(TorchFunctionMode):
    """Puts `choose` in the place of `topk` over all experts."""

    def __init__(self, experts: int, k: int, choose: Callable[..., Any]) -> None:
        super().__init__()
        self.experts, self.k, self.choose = experts, k, choose

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.topk, Tensor.topk):
            scores = args[0] if args else kwargs["input"]
            k = args[1] if len(args) > 1 else kwargs["k"]
            if scores.dim() == 2 and (scores.shape[1], k) == (self.experts, self.k):
                rest = {n: v for n, v in kwargs.items() if n not in ("input", "k")}
                return self.choose(scores, k, *args[2:], **rest)
        return func(*args, **kwargs)


@contextmanager
def _choosing(model: nn.Module, blocks: list[Any], choices: list[Any]) -> Iterator[None]:
    config = causal_lm(model).config.get_text_config(decoder=True)
    k = next((v for v in (getattr(config, name, None) for name in CHOSEN) if v is not None), None)
    if k is None:
        raise ValueError(f"router_replay: no number of experts per token in {type(config)}")
    with ExitStack() as stack:
        for block, choose in zip(blocks, choices, strict=True):
            stack.enter_context(_inside(block, _TopK(_number(block), k, choose)))
        yield


@contextmanager
def _inside(block: Any, mode: _TopK) -> Iterator[None]:
    """The mode is entered in the block's forward, for that may run on a thread of autograd."""
    replaced, original = "forward" in vars(block), block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return original(*args, **kwargs)

    block.forward = forward
    try:
        yield
    finally:
        if replaced:
            block.forward = original
        else:
            del block.forward


def _blocks(model: nn.Module) -> list[Any]:
    """The modules that hold experts, in order of the layers."""
    found = [m for m in model.modules() if _number(m) is not None]
    if not found:
        raise ValueError(f"router_replay: no block of experts was found in {type(model).__name__}")
    return found


def _number(block: Any) -> Any:
    """Of its experts, which an adapter may be wrapped around; None if it holds none."""
    experts: Any = getattr(block, "experts", None)
    while hasattr(experts, "get_base_layer") and not hasattr(experts, "num_experts"):
        experts = experts.get_base_layer()
    return getattr(experts, "num_experts", None)
