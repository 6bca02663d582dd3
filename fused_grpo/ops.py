"""The autograd functions: the log-probabilities of a head, and a loss fused with it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fused_grpo.backends import Backend
from fused_grpo.chunked import Coefficients, HeadResult, Needs, Tokens
from fused_grpo.memory import ChunkPlan
from fused_grpo.objectives import Objective
from fused_grpo.tiles import Head


@dataclass(frozen=True)
class HeadCall:
    """What a pass over the head needs beside hidden states, weight and bias."""

    index: Tensor  # [n] positions of the counted tokens in the flattened hidden states
    target: Tensor  # [n]
    temperature: Tensor | float  # [n] or scalar
    logit_scale: float
    softcap: float | None
    chunk_bytes: int | None
    backend: Backend
    counted: Tensor | None = None  # [n] with a fixed capacity: which of the tokens count

    def bind(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tokens, Head]:
        return (
            Tokens(hidden, self.index, self.target, self.temperature, self.counted),
            Head(weight, bias, self.logit_scale, self.softcap),
        )

    def head_pass(
        self, tokens: Tokens, head: Head, needs: Needs, coefficients: Coefficients | None
    ) -> HeadResult:
        compact = self.counted is None
        return self.backend.head_pass(tokens, head, needs, coefficients, self.chunk_bytes, compact)

    def plan_pass(self, tokens: Tokens, head: Head, needs: Needs) -> ChunkPlan:
        return self.backend.plan_pass(tokens, head, needs, self.chunk_bytes)


class LogprobsFunction(torch.autograd.Function):
    """(logps [n], entropy [n] | None); the backward computes the logits again, a chunk at a time.

    Where only the hidden states need a gradient and no entropy is asked for, u_t = dlogp_t/dh_t is
    formed in
    the forward instead: 4NHV in all rather than 6NHV, for any upstream gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        call: HeadCall,
        entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        needs = _needs(ctx, entropy, False)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.needs = call, needs
        ctx.unit = _only_hidden(needs) and not entropy
        coefficients = _unit_coefficients if ctx.unit else None
        result = call.head_pass(*call.bind(hidden, weight, bias), needs, coefficients)
        ctx.save_for_backward(*((result.hidden_grad,) if ctx.unit else (hidden, weight, bias)))
        ctx.dtype = result.logps.dtype
        return result.logps, result.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor | None, e: Tensor | None) -> tuple[Tensor | None, ...]:
        call: HeadCall = ctx.call
        if g is None:
            g = torch.zeros_like(call.index if e is None else e, dtype=ctx.dtype)
        if ctx.unit:
            (u,) = ctx.saved_tensors
            return _scale_rows(u, call.index, g), None, None, None, None

        def upstream(span: slice, *_: Tensor | None) -> tuple[Tensor, Tensor | None]:
            return g[span], None if e is None else e[span]

        needs = replace(ctx.needs, entropy=e is not None, entropy_grad=e is not None)
        result = call.head_pass(*call.bind(*ctx.saved_tensors), needs, upstream)
        return result.hidden_grad, result.weight_grad, result.bias_grad, None, None


class FusedLossFunction(torch.autograd.Function):
    """sum_t w_t loss_t with its gradients formed in the forward: the backward only scales them.

    Returns (loss [], per-token losses [n], logps [n], entropy [n] | None, g [n]); only the loss is
    differentiable.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        call: HeadCall,
        objective: Objective,
        entropy: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        result, per_token, g = loss_pass(
            hidden,
            weight,
            bias,
            call,
            objective,
            _needs(ctx, entropy, objective.spec.entropy_coef != 0),
        )
        ctx.save_for_backward(result.hidden_grad, result.weight_grad, result.bias_grad)
        loss = objective.total(per_token)
        outputs = (per_token, result.logps, result.entropy, g)
        ctx.mark_non_differentiable(*(t for t in outputs if t is not None))
        return loss, *outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        grads = ctx.saved_tensors
        # handing the buffers over as they are saves a [V, H] copy in the usual case; with
        # retain_graph they are wanted again, and the caller may change what it gets
        kept = torch._C._autograd._get_current_graph_task_keep_graph()
        if kept or upstream.device.type != "cpu" or upstream != 1:
            grads = tuple(None if t is None else (t * upstream).to(t.dtype) for t in grads)
        return *grads, None, None, None


def loss_pass(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    call: HeadCall,
    objective: Objective,
    needs: Needs,
) -> tuple[HeadResult, Tensor, Tensor]:
    """(head result with gradients, per-token losses [n], g [n]).

    One pass over the head where g_t is known inside the chunk: for objectives local to a token,
    and for any when all tokens fit in one chunk. Otherwise the log-probabilities come first, and a
    second pass computes the logits again; a frozen head is spared that, its u_t = dlogp_t/dh_t
    being formed in the first.
    """
    tokens, head = call.bind(hidden, weight, bias)
    n = call.index.numel()
    everything = slice(0, n)
    dtype = objective.weights.dtype
    per_token = torch.zeros(n, dtype=dtype, device=hidden.device)
    g = torch.zeros_like(per_token)

    def evaluate(
        span: slice, logps: Tensor, entropy: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        per_token[span], g[span], e = objective.evaluate(span, logps, entropy)
        return g[span], e

    def known(span: slice, *_: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return g[span], objective.entropy_gradient(span)

    plan = call.plan_pass(tokens, head, needs)
    if needs.any_grad and (objective.local or n <= plan.tokens):
        return call.head_pass(tokens, head, needs, evaluate), per_token, g
    unit = _only_hidden(needs) and objective.spec.entropy_coef == 0
    result = call.head_pass(tokens, head, needs, _unit_coefficients if unit else None)
    evaluate(everything, result.logps, result.entropy)
    if unit and result.hidden_grad is not None:
        result.hidden_grad = _scale_rows(result.hidden_grad, call.index, g, in_place=True)
    elif needs.any_grad:
        second = call.head_pass(tokens, head, needs, known)
        result = HeadResult(
            result.logps,
            result.entropy,
            second.hidden_grad,
            second.weight_grad,
            second.bias_grad,
        )
    return result, per_token, g


def _needs(ctx: Any, entropy: bool, entropy_grad: bool) -> Needs:
    # what autograd asks for, not what a saved tensor's requires_grad says: a copy made in here has
    # none
    hidden, weight, bias = ctx.needs_input_grad[:3]
    return Needs(hidden, weight, bias, entropy, entropy_grad)


def _only_hidden(needs: Needs) -> bool:
    return needs.hidden_grad and not (needs.weight_grad or needs.bias_grad)


def _unit_coefficients(_: slice, logps: Tensor, __: Tensor | None) -> tuple[Tensor, None]:
    return torch.ones_like(logps), None


def _scale_rows(u: Tensor, index: Tensor, g: Tensor, in_place: bool = False) -> Tensor:
    """u [..., H], whose rows are 0 but for those at `index`, with row index[i] times g[i]."""
    per_row = torch.zeros(u.shape[:-1], dtype=g.dtype, device=u.device)
    per_row.view(-1)[index] = g
    return u.mul_(per_row[..., None]) if in_place else (u * per_row[..., None]).to(u.dtype)
