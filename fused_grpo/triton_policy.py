"""The objective by the Triton policy kernel, where it knows the loss; imports triton when used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fused_grpo.aggregation import OVER, PER, Divisors, as_scalar
from fused_grpo.batch import TokenBatch
from fused_grpo.objectives import LossSpec, Objective
from fused_grpo.passes import TokenValues, Upstream
from fused_grpo.ratios import clamp_log_ratio

if TYPE_CHECKING:
    from fused_grpo_kernels import policy as kernel

# Options that the kernel honours; any other keeps it out unless it has its default value. The same
# for the fields of a batch, unless they are None.
KNOWN_OPTIONS = {
    "loss_type",
    "importance_sampling_level",
    "epsilon_low",
    "epsilon_high",
    "delta",
    "beta",
    "use_bias_correction_kl",
    "entropy_coef",
    "log_ratio_clamp",
    "num_items_in_batch",
    "max_completion_length",
    "aggregation",
    "num_sequences",
}
# Names of torch surrogates in `objectives` that have a closed form in the kernel, and schemes of
# weights that it forms itself; it is given those of other schemes.
KNOWN_SURROGATES = {"clip"}
KNOWN_LEVELS = {"token", "sequence"}
KNOWN_FIELDS = {
    *("index", "target", "sequence", "lengths", "shape"),
    *("advantages", "old", "ref", "weight_is", "counted", "spans"),
}


def unknown_option(spec: LossSpec) -> str | None:
    """An option that the kernel does not know and that has an effect, or None."""
    for option in fields(spec):
        value, default = getattr(spec, option.name), option.default
        same = value is default or (not isinstance(value, Tensor) and value == default)
        if option.name not in KNOWN_OPTIONS and not same:
            return f"the policy kernel does not know {option.name}={value!r}"
    return None


def unsupported(spec: LossSpec, batch: TokenBatch) -> str | None:
    """Why the kernel cannot take this loss, or None. What it does not know stays in torch."""
    reason = unknown_option(spec)
    if reason is not None:
        return reason
    for part in fields(batch):
        if part.name not in KNOWN_FIELDS and getattr(batch, part.name) is not None:
            return f"the policy kernel does not know {part.name} of a batch"
    if spec.row.surrogate.__name__ not in KNOWN_SURROGATES:
        return f"loss_type={spec.loss_type!r} has no closed form in the policy kernel"
    if spec.level not in KNOWN_LEVELS:
        return f"the policy kernel has no level {spec.level!r}"
    if batch.advantages.dtype != torch.float32:
        return f"the policy kernel computes in fp32, the batch is {batch.advantages.dtype}"
    if batch.index.numel() == 0:
        return "there are no tokens to launch for"
    return None


def fixed_capacity(spec: LossSpec, tensors: Mapping[str, Tensor | None]) -> None:
    """ValueError for a loss that needs to know how many tokens count (`compact=False`)."""
    known = ("old_per_token_logps", "ref_per_token_logps", "importance_sampling_ratio")
    more = [name for name, x in tensors.items() if x is not None and name not in known]
    reason = f"{more[0]} is given" if more else unknown_option(spec)
    if reason is None and spec.row.surrogate.__name__ not in KNOWN_SURROGATES:
        reason = f"loss_type={spec.loss_type!r} is another"
    if reason is None and spec.level not in KNOWN_LEVELS:
        reason = f"the level is {spec.level!r}"
    if reason is None and spec.scheme.over not in ("local_tokens", "tokens", "sequences"):
        reason = f"the weights divide by {spec.scheme.over!r}"
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
        batch, fresh = self.batch[span], self._fresh is not None
        offsets = None
        if self.spec.level == "sequence" and not fresh:
            bounds = torch.arange(batch.lengths.numel() + 1, device=batch.lengths.device)
            offsets = torch.searchsorted(batch.sequence, bounds)
        out = self._kernel.policy_terms(
            self._inputs(batch, values.logps, values.entropy, offsets),
            self._weights(span),
            self._options(),
            apart=fresh,
        )
        self._partials[span.start or 0], self._sums = out.partials, None
        g = out.g if self._fresh is None else out.g + self._fresh.g[span]
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
            "clip_ratio/low_mean": mean["clip_low"],
            "clip_ratio/high_mean": mean["clip_high"],
            # no token is both: one has A < 0, the other A > 0
            "clip_ratio/region_mean": mean["clip_low"] + mean["clip_high"],
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
        if spec.beta != 0:
            assert self.batch.ref is not None
            d = self.batch.select(self.batch.ref - values.logps)
            beyond = clamp_log_ratio(d, spec.log_ratio_clamp) != d
            out["kl"] = mean["kl"]
            out["kl/log_ratio_clamped"] = beyond.sum() / count
            out["kl/clamped"] = torch.zeros_like(mean["kl"])
        if values.entropy is not None:
            out["entropy"] = mean["entropy"]
        if g is not None:
            # a launch does not know the part that arrives through a sequence
            by_token = spec.level == "token"
            idle = mean["idle"] if by_token else (sums["count"] - (g != 0).sum()) / count
            out["zero_coefficient_fraction"] = idle * (spec.entropy_coef == 0)
        return out

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

    def _inputs(
        self, batch: TokenBatch, logps: Tensor, entropy: Tensor | None, offsets: Tensor | None
    ) -> kernel.Inputs:
        def flat(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.detach().contiguous()

        return self._kernel.Inputs(
            logps=logps.detach().contiguous(),
            advantages=batch.advantages.contiguous(),
            old=flat(batch.old),
            ref=flat(batch.ref) if self.spec.beta != 0 else None,
            importance=flat(batch.weight_is),
            entropy=flat(entropy),
            counted=flat(batch.counted),
            offsets=offsets,
        )

    def _weights(self, span: slice) -> kernel.Weights:
        batch, spec, weights = self.batch, self.spec, self._kernel.Weights
        scheme = spec.scheme
        if (scheme.per, scheme.over) == ("sequence", "sequences") and spec.num_sequences is None:
            return weights(sequence=batch.sequence[span].contiguous(), lengths=batch.lengths)
        if scheme.per not in ("token", "fixed"):
            return weights(given=self.weights[span].contiguous())
        given = Divisors(spec.num_items_in_batch, spec.num_sequences, spec.max_completion_length)
        per, over = PER[scheme.per](batch, given), OVER[scheme.over](batch, given)
        like = batch.advantages
        return weights(divisor=as_scalar(per, like) * as_scalar(over, like))

    def _options(self) -> kernel.Options:
        spec = self.spec
        return self._kernel.Options(
            surrogate=spec.row.surrogate.__name__,
            low=1 - spec.epsilon_low,
            high=1 + spec.upper,
            delta=spec.delta,
            beta=spec.beta or None,
            corrected=spec.use_bias_correction_kl,
            coef=spec.entropy_coef or None,
            limit=spec.log_ratio_clamp,
        )
