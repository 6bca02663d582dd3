"""The autograd functions: the log-probabilities of a head, and a loss fused with it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fused_grpo.backends import CHUNKED, Backend
from fused_grpo.checks import no_forward_mode
from fused_grpo.groups import VocabShard
from fused_grpo.memory import ChunkPlan
from fused_grpo.objectives import Objective
from fused_grpo.passes import (
    GRADIENTS,
    Coefficients,
    HeadResult,
    Needs,
    Reference,
    Tokens,
    TokenValues,
    Upstream,
    Waiting,
    with_gradients,
)
from fused_grpo.routed import Route
from fused_grpo.support import Support
from fused_grpo.tiles import Head


@dataclass(frozen=True)
class ReferenceCall:
    """A reference head, and what of it is wanted beside its log-probabilities."""

    hidden: Tensor  # [..., H_r], the leading dimensions of the policy's
    weight: Tensor  # [V, H_r]
    bias: Tensor | None
    temperature: Tensor | float  # [n] or scalar
    logit_scale: float
    softcap: float | None
    full: bool = False  # the divergence over the whole vocabulary
    top_k: int | None = None  # that over the k likeliest entries and the rest


@dataclass(frozen=True)
class HeadCall:
    """What a pass over the head needs beside hidden states, weight and bias."""

    index: Tensor  # [n] positions of the counted tokens in the flattened hidden states
    target: Tensor  # [n]
    temperature: Tensor | float  # [n] or scalar
    logit_scale: float
    softcap: float | None
    chunk_bytes: int | None
    support: Support | None = None
    reference: ReferenceCall | None = None
    backend: Backend = CHUNKED
    counted: Tensor | None = None  # [n] with a fixed capacity: which of the tokens count
    shard: VocabShard | None = None  # weight and bias hold these rows of a larger head
    route: Route | None = None  # None: exact gradients
    statistics: bool = False  # beside log-probabilities, see `statistics`

    def bind(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        lora_hidden: Tensor | None = None,
        lora_weight: Tensor | None = None,
    ) -> tuple[Tokens, Head]:
        return (
            Tokens(
                hidden,
                self.index,
                self.target,
                self.temperature,
                self.support,
                self.counted,
                lora_hidden,
            ),
            Head(weight, bias, self.logit_scale, self.softcap, lora_weight, self.shard),
        )

    def head_pass(
        self,
        tokens: Tokens,
        head: Head,
        needs: Needs,
        coefficients: Coefficients | None,
        reference: Reference | None = None,
    ) -> HeadResult:
        compact = self.counted is None
        return self.backend.head_pass(
            tokens, head, needs, coefficients, self.chunk_bytes, reference, compact
        )

    def routed_pass(
        self,
        tokens: Tokens,
        head: Head,
        needs: Needs,
        coefficients: Coefficients | None,
        reference: Reference | None = None,
    ) -> tuple[HeadResult, Waiting]:
        """As `head_pass`; without `coefficients`, what is kept until they are known."""
        assert self.route is not None
        return self.backend.routed_pass(
            tokens, head, needs, coefficients, self.chunk_bytes, self.route, reference
        )

    def entries_can_wait(self, needs: Needs) -> bool:
        """Whether a routed pass needs no gradient of the loss before its end."""
        if self.route is None or not needs.any_grad:
            return False
        return not self.route.dense_weight_grad(needs)

    def plan_pass(
        self, tokens: Tokens, head: Head, needs: Needs, reference: Reference | None = None
    ) -> ChunkPlan:
        return self.backend.plan_pass(tokens, head, needs, self.chunk_bytes, reference)

    def bind_reference(self) -> Reference | None:
        ref = self.reference
        if ref is None:
            return None
        tokens = Tokens(ref.hidden, self.index, self.target, ref.temperature)
        head = Head(ref.weight, ref.bias, ref.logit_scale, ref.softcap)
        return Reference(tokens, head, ref.full, ref.top_k)

    @property
    def reference_tensors(self) -> tuple[Tensor | None, ...]:
        ref = self.reference
        return (None, None, None) if ref is None else (ref.hidden, ref.weight, ref.bias)


class LogprobsFunction(torch.autograd.Function):
    """(logps, entropy, kl, reference's logps, support size, target outside, statistics), [n] or
    None each; the first three are differentiable. The backward computes the logits again, a chunk
    at a time.

    Where only the hidden states need a gradient and no entropy or KL is asked for, u_t =
    dlogp_t/dh_t is formed in the forward instead: 4NHV in all rather than 6NHV, for any upstream
    gradient. Routed gradients wait as kept entries: 2NHV.
    """

    jvp = staticmethod(no_forward_mode)  # type: ignore[assignment]

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        lora_hidden: Tensor | None,
        lora_weight: Tensor | None,
        call: HeadCall,
        entropy: bool,
        *reference: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        leaves = (hidden, weight, bias, lora_hidden, lora_weight)
        needs, bound = _needs(ctx, entropy), call.bind_reference()
        needs = replace(needs, statistics=call.statistics)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.needs = call, needs
        pending: Waiting | None = None
        plain = needs.only_rows and not entropy and not (bound is not None and bound.kl)
        ctx.unit = plain and call.route is None
        operands = call.bind(*leaves)
        if call.entries_can_wait(needs):
            with_entropy = replace(needs, entropy_grad=entropy)
            result, pending = call.routed_pass(*operands, with_entropy, None, bound)
        else:
            coefficients = _unit_coefficients if ctx.unit else None
            result = call.head_pass(*operands, needs, coefficients, bound)
        if ctx.unit:
            ctx.save_for_backward(result.hidden_grad, result.lora_hidden_grad)
        else:  # the reference's, too, so that a change in between is noticed
            ctx.save_for_backward(*leaves, *reference)
        ctx.pending = pending
        values = (result.logps, result.entropy)
        ctx.values = TokenValues(*(None if x is None else x.detach() for x in values))  # type: ignore[arg-type]
        constants = (result.ref_logps, result.support_size, result.outside, result.statistics)
        ctx.mark_non_differentiable(*(t for t in constants if t is not None))
        return result.logps, result.entropy, result.kl, *constants

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, g: Tensor | None, e: Tensor | None, k: Tensor | None, *_: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        call: HeadCall = ctx.call
        none = (None,) * 5
        if g is None:
            g = torch.zeros_like(ctx.values.logps)
        if ctx.unit:
            u, lora_u = (_scale_rows(u, call.index, g) for u in ctx.saved_tensors)
            return u, None, None, lora_u, None, *none

        known = Upstream(g, e, k)

        def upstream(span: slice, _: TokenValues) -> Upstream:
            return known[span]

        operands = call.bind(*ctx.saved_tensors[:5])
        asked = {"entropy": e is not None, "entropy_grad": e is not None}
        needs = replace(ctx.needs, **asked, kl_grad=k is not None, statistics=False)
        if ctx.pending is not None:
            result = ctx.pending.gradients(*operands, needs, ctx.values, Upstream(g, e))
        elif call.route is not None:
            result = call.routed_pass(*operands, needs, upstream)[0]
        else:
            reference = None if k is None else call.bind_reference()
            result = call.head_pass(*operands, needs, upstream, reference)
        return *gradients(result), *none


class FusedLossFunction(torch.autograd.Function):
    """sum_t w_t loss_t with its gradients formed in the forward: the backward only scales them.

    Returns (loss [], per-token losses [n], g [n], and the fields of TokenValues); only the loss is
    differentiable.
    """

    jvp = staticmethod(no_forward_mode)  # type: ignore[assignment]

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        lora_hidden: Tensor | None,
        lora_weight: Tensor | None,
        call: HeadCall,
        objective: Objective,
        entropy: bool,
    ) -> tuple[Tensor | None, ...]:
        needs = _needs(ctx, entropy, objective)
        leaves = (hidden, weight, bias, lora_hidden, lora_weight)
        result, per_token, g = loss_pass(leaves, call, objective, needs)
        ctx.save_for_backward(*gradients(result))
        loss = objective.total(per_token)
        outputs = (per_token, g, *(getattr(result, f.name) for f in fields(TokenValues)))
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


def gradients(result: HeadResult) -> tuple[Tensor | None, ...]:
    """In the order of the functions' leading arguments."""
    return tuple(getattr(result, name) for name in GRADIENTS)


def loss_pass(
    leaves: tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None],
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
    tokens, head = call.bind(*leaves)
    reference = call.bind_reference()
    n = call.index.numel()
    everything = slice(0, n)
    dtype = objective.weights.dtype
    per_token = torch.zeros(n, dtype=dtype, device=tokens.hidden.device)
    g = torch.zeros_like(per_token)

    def known(span: slice, _: TokenValues) -> Upstream:
        return Upstream(g[span], objective.entropy_gradient(span), objective.kl_gradient(span))

    def evaluate(span: slice, values: TokenValues) -> Upstream:
        if values.ref_logps is not None and objective.batch.ref is not None:
            objective.batch.ref[span] = values.ref_logps
        per_token[span], upstream = objective.evaluate(span, values)
        g[span] = upstream.logps
        return upstream

    if needs.any_grad and call.route is not None:
        result = _routed_loss_pass(call, tokens, head, needs, reference, objective, evaluate, known)
        return result, per_token, g
    plan = call.plan_pass(tokens, head, needs, reference)
    alone = objective.local or (n <= plan.tokens and (n > 0 or not objective.spans_ranks))
    if needs.any_grad and alone:
        result = call.head_pass(tokens, head, needs, evaluate, reference)
        return result, per_token, g
    unit = needs.only_rows and not needs.entropy_grad and not needs.kl_grad
    first = _unit_coefficients if unit else None
    result = call.head_pass(tokens, head, needs, first, reference)
    evaluate(everything, result)
    if unit:
        for name in ("hidden_grad", "lora_hidden_grad"):
            setattr(result, name, _scale_rows(getattr(result, name), call.index, g, in_place=True))
    elif needs.any_grad:
        again = reference if needs.kl_grad else None
        second = call.head_pass(tokens, head, needs, known, again)
        result = with_gradients(result, second)
    return result, per_token, g


def _routed_loss_pass(
    call: HeadCall,
    tokens: Tokens,
    head: Head,
    needs: Needs,
    reference: Reference | None,
    objective: Objective,
    evaluate: Coefficients,
    known: Coefficients,
) -> HeadResult:
    """One pass whatever the objective, as kept entries can wait; two where an exact dW cannot."""
    everything = slice(0, call.index.numel())
    if objective.local:
        return call.routed_pass(tokens, head, needs, evaluate, reference)[0]
    if call.entries_can_wait(needs):
        result, pending = call.routed_pass(tokens, head, needs, None, reference)
        evaluate(everything, result)
        upstream = known(everything, result)
        return with_gradients(result, pending.gradients(tokens, head, needs, result, upstream))
    result = call.head_pass(tokens, head, needs, None, reference)
    evaluate(everything, result)
    second, _ = call.routed_pass(tokens, head, needs, known)
    return replace(with_gradients(result, second), routing=second.routing)


def _needs(ctx: Any, entropy: bool, objective: Objective | None = None) -> Needs:
    # what autograd asks for, not what a saved tensor's requires_grad says: a copy made in here has
    # none
    wanted = dict(zip(GRADIENTS, ctx.needs_input_grad, strict=False))
    needs = Needs(**wanted, entropy=entropy)
    if objective is None:
        return needs
    spec = objective.spec
    return replace(needs, entropy_grad=spec.entropy_gradient, kl_grad=spec.head_kl)


def _unit_coefficients(_: slice, values: TokenValues) -> Upstream:
    return Upstream(torch.ones_like(values.logps))


def _scale_rows(
    u: Tensor | None, index: Tensor, g: Tensor, in_place: bool = False
) -> Tensor | None:
    """u [..., H], whose rows are 0 but for those at `index`, with row index[i] times g[i]."""
    if u is None:
        return None
    per_row = torch.zeros(u.shape[:-1], dtype=g.dtype, device=u.device)
    per_row.view(-1)[index] = g
    return u.mul_(per_row[..., None]) if in_place else (u * per_row[..., None]).to(u.dtype)
