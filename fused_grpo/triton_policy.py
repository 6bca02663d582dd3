"""The objective by the Triton policy kernel, where it knows the loss; imports triton when used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fused_grpo.aggregation import OVER, PER, Divisors, as_scalar
from fused_grpo.batch import TokenBatch
from fused_grpo.objectives import LossSpec, Objective, surrogates
from fused_grpo.passes import TokenValues, Upstream

if TYPE_CHECKING:
    from fused_grpo_kernels import policy as kernel

Numbers = tuple[float | None, ...]

# The surrogates that have a closed form in the kernel, and the numbers that it takes.
NUMBERS: dict[Callable[..., Tensor], Callable[[LossSpec], Numbers]] = {
    surrogates.clip: lambda s: (1 - s.epsilon_low, 1 + s.upper, s.delta, s.dual_clip),
    surrogates.cispo: lambda s: (s.option("ratio_min"), s.option("ratio_max")),
    surrogates.sapo: lambda s: (s.sapo_temperature_pos, s.sapo_temperature_neg),
    surrogates.reinforce: lambda s: (),
    surrogates.importance_sampling: lambda s: (),
    surrogates.masked_importance_sampling: lambda s: (1 - s.epsilon_low, 1 + s.upper),
    surrogates.dppo_tv: lambda s: (*_divergences(s), s.option("ratio_max")),
    surrogates.prime: lambda s: (*_divergences(s), s.option("log_ratio_penalty")),
    surrogates.prime_ipo: lambda s: (s.option("divergence_high"), s.option("log_ratio_penalty")),
    surrogates.dro: lambda s: (s.option("log_ratio_penalty"),),
}


def _divergences(spec: LossSpec) -> Numbers:
    return spec.option("divergence_low"), spec.option("divergence_high")


# Options that the kernel honours; any other keeps it out unless it has its default value. The same
# for the fields of a batch, unless they are None.
HONOURED = {
    *("loss_type", "importance_sampling_level", "log_ratio_clamp", "beta", "entropy_coef"),
    *("use_bias_correction_kl", "num_items_in_batch", "max_completion_length"),
    *("aggregation", "num_sequences"),
    *("epsilon_low", "epsilon_high", "delta", "dual_clip", "ratio_min", "ratio_max"),
    *("sapo_temperature_pos", "sapo_temperature_neg", "divergence_low", "divergence_high"),
    "log_ratio_penalty",
}
FIELDS = {
    *("index", "target", "sequence", "lengths", "shape", "advantages", "old", "ref", "weight_is"),
    *("counted", "spans", "token_weights", "group_ids"),
}
# What torch computes as well where some tokens do not count: what is known before the head runs,
# and a call without gradients, are evaluated there.
CAPACITY_LEVELS = {"token", "sequence"}
CAPACITY_TENSORS = {
    *("old_per_token_logps", "ref_per_token_logps", "importance_sampling_ratio", "token_weights"),
}


def unknown_loss(spec: LossSpec) -> str | None:
    """What of a loss the kernel does not know and has an effect, or None."""
    for option in fields(spec):
        value, default = getattr(spec, option.name), option.default
        same = value is default or (not isinstance(value, Tensor) and value == default)
        if option.name not in HONOURED and not same:
            return f"the policy kernel does not know {option.name}={value!r}"
    row = spec.row
    known = any(row.surrogate is surrogate for surrogate in NUMBERS)
    if not known or row.folds_weight or row.entropy:
        return f"loss_type={spec.loss_type!r} has no closed form in the policy kernel"
    if spec.level != "token" and spec.option("log_ratio_penalty") is not None:
        return f"the policy kernel has no penalty on log-ratios of level {spec.level!r}"
    return None


def unsupported(spec: LossSpec, batch: TokenBatch) -> str | None:
    """Why the kernel cannot take this loss, or None. What it does not know stays in torch."""
    reason = unknown_loss(spec)
    if reason is not None:
        return reason
    for part in fields(batch):
        if part.name not in FIELDS and getattr(batch, part.name) is not None:
            return f"the policy kernel does not know {part.name} of a batch"
    if batch.advantages.dtype != torch.float32:
        return f"the policy kernel computes in fp32, the batch is {batch.advantages.dtype}"
    if batch.index.numel() == 0:
        return "there are no tokens to launch for"
    return None


def fixed_capacity(spec: LossSpec, tensors: Mapping[str, Tensor | None]) -> None:
    """ValueError for a loss that needs to know how many tokens count (`compact=False`)."""
    more = [name for name, x in tensors.items() if x is not None and name not in CAPACITY_TENSORS]
    reason = f"{more[0]} is given" if more else unknown_loss(spec)
    if reason is None and spec.level not in CAPACITY_LEVELS:
        reason = f"the level is {spec.level!r}"
    if reason is None and spec.scheme.per == "group":
        reason = "the weights divide by groups"
    if reason is not None:
        raise ValueError(f"compact=False knows only what the policy kernel does: {reason}")


def make_objective(spec: LossSpec, batch: TokenBatch, backend: str) -> Objective:
    """The objective of a call: by the kernel if the backend is "triton" and it knows the loss."""
    if backend == "triton" and unsupported(spec, batch) is None:
        return KernelObjective(spec, batch)
    return Objective(spec, batch)


class KernelObjective(Objective):
    """`Objective` in one launch per span of tokens, which also forms the total and the metrics.

    The total and the metrics are those of the spans that were evaluated, each once.
    """

    def __init__(self, spec: LossSpec, batch: TokenBatch) -> None:
        from fused_grpo_kernels import policy

        self._kernel = policy
        self._partials: dict[int, Tensor] = {}  # by the first token of the span
        self._sums: Tensor | None = None
        super().__init__(spec, batch)

    def evaluate(self, span: slice, values: TokenValues) -> tuple[Tensor, Upstream]:
        """See `Objective.evaluate`; the launch forms all of it."""
        fresh = self._fresh
        out = self._kernel.policy_terms(
            self._inputs(self.batch[span], values.logps, values.entropy),
            self._weights(span),
            self._options(),
            apart=fresh is not None,
        )
        self._partials[span.start or 0], self._sums = out.partials, None
        g = out.g if fresh is None else out.g + fresh.g[span]
        if self._e is not None and out.g_entropy is not None:
            self._e[span] = out.g_entropy
        return out.loss, Upstream(g, self.entropy_gradient(span))

    def total(self, per_token: Tensor) -> Tensor:
        """See `Objective.total`: the weighted sum that the launches formed."""
        return self._totals()["loss"].clone()  # a view could not be divided in place

    def metrics(self, values: TokenValues, g: Tensor | None) -> dict[str, Tensor]:
        """See `objectives.metrics`, from the sums that the launches formed."""
        sums, spec = self._totals(), self.spec
        count = sums["count"].clamp_min(1)
        mean = self._named(self._whole() / count)
        tiny = torch.finfo(count.dtype).tiny

        def extreme(name: str) -> Tensor:  # infinite where nothing counts
            return torch.where(sums["count"] > 0, sums[name], 0)

        out = {
            "ratio/mean": mean["ratio"],
            "ratio/min": extreme("ratio_min"),
            "ratio/max": extreme("ratio_max"),
            "log_ratio/min": extreme("log_ratio_min"),
            "log_ratio/max": extreme("log_ratio_max"),
            "log_ratio/clamped": mean["clamped"],
            "effective_sample_size": sums["ratio"].square()
            / (count * sums["ratio_squared"]).clamp_min(tiny),
            "num_tokens": sums["count"],
        }
        if spec.row.clipped is not None:
            out["clip_ratio/low_mean"] = mean["clip_low"]
            out["clip_ratio/high_mean"] = mean["clip_high"]
            # no token is both: one has A < 0, the other A > 0
            out["clip_ratio/region_mean"] = mean["clip_low"] + mean["clip_high"]
        if spec.beta != 0:
            out["kl"] = mean["kl"]
            out["kl/log_ratio_clamped"] = mean["kl_clamped"]
            out["kl/clamped"] = torch.zeros_like(mean["kl"])  # kl_clamp stays in torch
        if values.entropy is not None:
            out["entropy"] = mean["entropy"]
        if g is not None:
            out["zero_coefficient_fraction"] = self._idle(g, sums, count)
        return out

    def _idle(self, g: Tensor, sums: dict[str, Tensor], count: Tensor) -> Tensor:
        if self.spec.level == "token":
            return sums["idle"] / count
        # a launch does not know the part that arrives through a sequence; what does not count is 0
        busy = g != 0 if self._e is None else (g != 0) | (self._e != 0)
        return (sums["count"] - busy.sum()) / count

    def _totals(self) -> dict[str, Tensor]:
        return self._named(self._whole())

    def _named(self, columns: Tensor) -> dict[str, Tensor]:
        return dict(zip(self._kernel.COLUMNS, columns.unbind(), strict=False))

    def _whole(self) -> Tensor:
        """[WIDTH] sums, minima and maxima over all spans; formed once."""
        if self._sums is None:
            parts = [self._partials[start] for start in sorted(self._partials)]
            self._sums = self._kernel.totals(parts[0] if len(parts) == 1 else torch.cat(parts))
        return self._sums

    def _inputs(self, batch: TokenBatch, logps: Tensor, entropy: Tensor | None) -> kernel.Inputs:
        def flat(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.detach().contiguous()

        level, offsets = self.spec.level, None
        if level != "token" and self._fresh is None:
            bounds = torch.arange(batch.lengths.numel() + 1, device=logps.device)
            offsets = torch.searchsorted(batch.sequence, bounds)
        return self._kernel.Inputs(
            logps=logps.detach().contiguous(),
            advantages=batch.advantages.contiguous(),
            old=flat(batch.old),
            ref=flat(batch.ref) if self.spec.beta != 0 else None,
            importance=flat(batch.weight_is),
            entropy=flat(entropy),
            counted=flat(batch.counted),
            offsets=offsets,
            level=level,
        )

    def _weights(self, span: slice) -> kernel.Weights:
        batch, spec, weights = self.batch, self.spec, self._kernel.Weights
        scheme, like = spec.scheme, batch.advantages
        if batch.token_weights is not None or scheme.per == "group":
            return weights(given=self.weights[span].contiguous())
        given = Divisors(spec.num_items_in_batch, spec.num_sequences, spec.max_completion_length)
        over = as_scalar(OVER[scheme.over](batch, given), like)
        if scheme.per == "sequence":
            sequence = batch.sequence[span].contiguous()
            return weights(divisor=over, sequence=sequence, lengths=batch.lengths)
        return weights(divisor=over * as_scalar(PER[scheme.per](batch, given), like))

    def _options(self) -> kernel.Options:
        spec = self.spec
        return self._kernel.Options(
            surrogate=spec.row.surrogate.__name__,
            numbers=NUMBERS[spec.row.surrogate](spec),
            beta=spec.beta or None,
            corrected=spec.use_bias_correction_kl,
            coef=spec.entropy_coef or None,
            limit=spec.log_ratio_clamp,
        )
