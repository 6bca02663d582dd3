"""A loss bound to a batch: per-token losses and their gradient g_t = dL/dlogp_t.

g_t is autograd of the whole on vectors of length N, so nothing here knows about vocabularies or
hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_grpo import corrections
from fused_grpo.batch import TokenBatch
from fused_grpo.objectives.metrics import metrics
from fused_grpo.objectives.spec import LossSpec
from fused_grpo.objectives.terms import (
    entropy_bonus,
    make_view,
    other_terms,
    policy_term,
    token_terms,
)
from fused_grpo.passes import TokenValues, Upstream


@dataclass(frozen=True)
class _Fresh:
    """The policy term where every ratio is 1: base + slope * logp, with g [n] known beforehand."""

    base: Tensor
    slope: Tensor
    g: Tensor

    @staticmethod
    def of(spec: LossSpec, batch: TokenBatch, weights: Tensor) -> _Fresh:
        def loss(logps: Tensor) -> Tensor:
            return policy_term(make_view(logps, batch, spec, None, batch.weight_is), spec)

        zeros = torch.zeros_like(weights)
        base, (g, *_) = _values_and_gradients(loss, weights, zeros)
        assert g is not None
        with torch.no_grad():
            slope = loss(torch.ones_like(weights)) - base
        return _Fresh(base, slope, g)


class Objective:
    """A loss bound to a batch: log-probabilities in, per-token losses and g_t = dL/dlogp_t out.

    `local` says whether a span of tokens can be evaluated without the others, so that gradients
    leave in one pass over the head. Objectives that look at whole sequences are local too when
    there are no old log-probs: every ratio is then 1 whatever the log-probabilities, the policy's
    share of g_t is known before the head runs, and its loss is linear in the token's log-prob.
    """

    def __init__(self, spec: LossSpec, batch: TokenBatch) -> None:
        self.spec, self.batch = spec, batch
        self.weights = spec.token_weights(batch)
        self._e = torch.zeros_like(self.weights) if spec.entropy_gradient else None
        self._k = torch.zeros_like(self.weights) if spec.head_kl else None
        reach = reach_of(spec, batch)
        self._fresh = _Fresh.of(spec, batch, self.weights) if reach == "fresh" else None
        self.local = reach in ("token", "fresh")
        # whether an evaluation is a collective: then every rank makes one, whatever tokens it has
        self.spans_ranks = batch.group is not None and not self.local

    def evaluate(self, span: slice, values: TokenValues) -> tuple[Tensor, Upstream]:
        """([c] per-token losses, their gradients) of a span of tokens."""
        batch, spec, fresh = self.batch[span], self.spec, self._fresh

        def loss(logps: Tensor, entropy: Tensor | None, kl: Tensor | None) -> Tensor:
            if fresh is None:
                return token_terms(logps, batch, spec, entropy, kl).loss
            policy = (fresh.base[span] + fresh.slope[span] * logps).detach()
            view = make_view(logps, batch, _BY_TOKEN, entropy, None)
            others, _ = other_terms(view, batch, spec, kl)
            bonus = 0.0 if entropy is None else entropy_bonus(entropy, batch, spec)
            return policy + others - bonus

        entropy = values.entropy if spec.needs_entropy else None
        kl = values.kl if spec.head_kl else None
        losses, (g, e, k) = _values_and_gradients(
            loss, self.weights[span], values.logps, entropy, kl
        )
        assert g is not None
        if fresh is not None:
            g = g + fresh.g[span]
        for kept, part in ((self._e, e), (self._k, k)):
            if kept is not None and part is not None:
                kept[span] = part
        return losses, Upstream(g, self.entropy_gradient(span), self.kl_gradient(span))

    def entropy_gradient(self, span: slice) -> Tensor | None:
        """[c] dL/dentropy_t of tokens that have been evaluated."""
        return None if self._e is None else self._e[span]

    def kl_gradient(self, span: slice) -> Tensor | None:
        """[c] dL/dkl_t, of a KL summed over the vocabulary, of tokens that have been evaluated."""
        return None if self._k is None else self._k[span]

    def total(self, per_token: Tensor) -> Tensor:
        """The loss [], of the per-token losses [n] of all tokens."""
        return (per_token * self.weights).sum()

    def metrics(self, values: TokenValues, g: Tensor | None) -> dict[str, Tensor]:
        """`metrics` of all tokens, once they have been evaluated."""
        upstream = None if g is None else Upstream(g, self._e, self._k)
        return metrics(values, upstream, self.batch, self.spec)


_BY_TOKEN = LossSpec()


def reach_of(spec: LossSpec, batch: TokenBatch) -> str:
    """What a token's gradient depends on: "token", "sequence" or "batch"; "fresh" where it would be
    "sequence", but every ratio is 1."""
    if spec.row.locality == "batch" or spec.top_entropy_quantile < 1:
        return "batch"
    waits = corrections.waits_for_logps(batch, spec)
    if spec.off_policy_mask_threshold is not None or (waits and corrections.spans_sequences(spec)):
        return "sequence"
    if spec.row.locality == "token" and spec.level == "token":
        return "token"
    fresh = batch.old is None and spec.row.fresh and not waits
    return "fresh" if fresh and not spec.use_bias_correction_kl else "sequence"


def _values_and_gradients(
    loss: Callable[..., Tensor], weights: Tensor, *inputs: Tensor | None
) -> tuple[Tensor, list[Tensor | None]]:
    """loss(*inputs) [n], and the gradients of its weighted sum with respect to the inputs."""
    with torch.enable_grad():
        leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
        values = loss(*leaves)
        present = [x for x in leaves if x is not None]
        total = (values * weights).sum()
        if not total.requires_grad:  # a constant objective
            grads = [torch.zeros_like(x) for x in present]
        else:
            grads = list(
                torch.autograd.grad(total, present, allow_unused=True, materialize_grads=True)
            )
    found = iter(grads)
    return values.detach(), [None if x is None else next(found) for x in leaves]
