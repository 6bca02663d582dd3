"""The options of a loss: one frozen dataclass, checked when it is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from fused_grpo.aggregation import Divisors, Scheme, check_divisors, scheme_named
from fused_grpo.batch import TokenBatch
from fused_grpo.checks import check_choice, check_number
from fused_grpo.corrections import CORRECTIONS, check_rejection
from fused_grpo.kl import ESTIMATORS, HEAD_KL
from fused_grpo.objectives.ranges import OF_OBJECTIVES, ORDERED, RANGES
from fused_grpo.objectives.registry import LossType, loss_type_row
from fused_grpo.ratios import LEVELS

Bounds = float | tuple[float, float]


@dataclass(frozen=True)
class LossSpec:
    """The options of a loss, checked. See `grpo_loss` and docs/objectives.md for their meaning."""

    loss_type: str = "dapo"
    importance_sampling_level: str = "token"
    epsilon_low: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = False
    entropy_coef: float = 0.0
    log_ratio_clamp: float | None = 20.0
    num_items_in_batch: float | Tensor | None = None
    max_completion_length: int | None = None
    # reductions
    aggregation: str | None = None
    num_sequences: float | Tensor | None = None
    # objectives
    dual_clip: float | None = None
    ratio_min: float | None = None
    ratio_max: float | None = None
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    divergence_low: float | None = None
    divergence_high: float | None = None
    log_ratio_penalty: float | None = None
    cov_ratio: float | None = None
    cov_low: float | None = None
    cov_high: float | None = None
    cov_coef: float | None = None
    cov_seed: int = 0
    # on top of any objective
    positive_nll_coef: float = 0.0
    off_policy_mask_threshold: float | None = None
    top_entropy_quantile: float = 1.0
    # KL
    kl_estimator: str = "k3"
    kl_top_k: int | None = None
    kl_clamp: float | None = None
    # train-inference corrections
    sampling_correction: str | None = None
    sampling_ratio_min: float | None = None
    sampling_ratio_max: float | None = None
    rejection: Mapping[str, Bounds] | None = None
    veto_ratio_min: float | None = None
    veto_ratio_max: float | None = None

    def __post_init__(self) -> None:
        row = self.row
        if self.aggregation is not None:
            scheme_named(self.aggregation)
        check_choice("importance_sampling_level", self.importance_sampling_level, LEVELS)
        check_choice("kl_estimator", self.kl_estimator, (*ESTIMATORS, *HEAD_KL))
        if self.sampling_correction is not None:
            check_choice("sampling_correction", self.sampling_correction, CORRECTIONS)
        for name, (holds, must) in RANGES.items():
            value = getattr(self, name)
            if value is not None or name in _NEVER_NONE:
                check_number(name, value, holds, must)
        check_rejection(self.rejection)
        self._check_head_kl()
        self._check_applies(row, self._changed())
        self._check_pairs()
        check_divisors(self.scheme, self._reduction, self._given_divisors())

    def _check_applies(self, row: LossType, changed: frozenset[str]) -> None:
        """ValueError for an option that would have no effect."""
        for name in sorted(OF_OBJECTIVES & changed - row.takes):
            if name == "log_ratio_clamp" and self._takes_exp:
                continue
            fits = ", ".join(sorted(row.takes)) or "none"
            raise ValueError(
                f"{name}={getattr(self, name)} is not used by loss_type={self.loss_type!r}; its "
                f"options: {fits}"
            )
        for name in row.needs:
            if getattr(self, name) is None:
                raise ValueError(f"loss_type={self.loss_type!r} needs {name}")
        for name, (holds, needed) in REQUIRES.items():
            if name in changed and not holds(self):
                raise ValueError(f"{name}={getattr(self, name)} needs {needed}")

    def _check_pairs(self) -> None:
        if self.delta is not None and self.dual_clip is not None:
            raise ValueError(
                f"delta={self.delta} and dual_clip={self.dual_clip} bound the same tokens: "
                "give one of them"
            )
        correction = CORRECTIONS.get(self.sampling_correction or "")
        if self.row.folds_weight and correction is not None and correction.level != "token":
            raise ValueError(
                f"sampling_correction={self.sampling_correction!r}: loss_type={self.loss_type!r} "
                "multiplies the ratios of a sequence's tokens; use token_truncate or token_mask"
            )
        for low_name, high_name in ORDERED:
            low, high = self.option(low_name), self.option(high_name)
            if low is not None and high is not None and low >= high:
                raise ValueError(f"{low_name}={low} must be below {high_name}={high}")

    def _check_head_kl(self) -> None:
        if (self.kl_top_k is None) == (self.kl_estimator == "top_k"):
            raise ValueError(
                f"kl_top_k={self.kl_top_k} with kl_estimator={self.kl_estimator!r}: 'top_k' needs "
                "the number of entries, and nothing else takes one"
            )
        for name in ("use_bias_correction_kl", "kl_clamp"):
            if self.head_kl and name in self._changed():
                raise ValueError(
                    f"{name} does not apply to kl_estimator={self.kl_estimator!r}: it is for "
                    "estimates from sampled tokens, this one is summed over the vocabulary"
                )

    def _changed(self) -> frozenset[str]:
        """The options that are not at their defaults."""
        return frozenset(
            f.name
            for f in fields(self)
            if getattr(self, f.name) is not f.default and getattr(self, f.name) != f.default
        )

    @property
    def _reduction(self) -> str:
        if self.aggregation is None:
            return f"loss_type={self.loss_type!r}"
        return f"aggregation={self.aggregation!r}"

    def _given_divisors(self) -> dict[str, object]:
        names = ("num_items_in_batch", "num_sequences", "max_completion_length")
        return {name: getattr(self, name) for name in names}

    @property
    def row(self) -> LossType:
        return loss_type_row(self.loss_type)

    @property
    def scheme(self) -> Scheme:
        """Of the token weights."""
        return scheme_named(self.row.scheme if self.aggregation is None else self.aggregation)

    @property
    def level(self) -> str:
        """Of the ratio: that of the objective, or `importance_sampling_level`."""
        return self.row.level or self.importance_sampling_level

    @property
    def upper(self) -> float:
        """epsilon_high, or epsilon_low where it is None."""
        return self.epsilon_low if self.epsilon_high is None else self.epsilon_high

    def option(self, name: str) -> Any:
        """The value of an option, or the objective's default where it is None."""
        value = getattr(self, name)
        return self.row.defaults.get(name) if value is None else value

    @property
    def corrects(self) -> bool:
        """Whether sampler log-probs weigh or reject tokens."""
        return self.rejects or self.sampling_correction not in (None, "monitor", "bypass")

    @property
    def rejects(self) -> bool:
        vetoes = self.veto_ratio_min is not None or self.veto_ratio_max is not None
        return vetoes or bool(self.rejection)

    @property
    def bypass(self) -> bool:
        """Whether the sampler's log-probs stand for the old ones."""
        return self.sampling_correction == "bypass"

    @property
    def needs_sampler(self) -> bool:
        return self.rejects or self.sampling_correction is not None

    @property
    def uses_old(self) -> bool:
        """Whether old log-probabilities have an effect."""
        by_loss = self.row.uses_old or self.use_bias_correction_kl
        by_sampler = self.needs_sampler or self.off_policy_mask_threshold is not None
        return (by_loss or by_sampler) and not self.bypass

    @property
    def needs_entropy(self) -> bool:
        """Whether the value of the entropies has an effect."""
        return self.entropy_gradient or self.top_entropy_quantile < 1

    @property
    def entropy_gradient(self) -> bool:
        """Whether the loss is differentiated with respect to them."""
        return self.entropy_coef != 0 or self.row.entropy

    @property
    def head_kl(self) -> bool:
        """Whether the KL is summed over the vocabulary, in the head, and not a token's estimate."""
        return self.beta > 0 and self.kl_estimator in HEAD_KL

    @property
    def _takes_exp(self) -> bool:
        estimated = self.beta > 0 and not self.head_kl
        kl = estimated and (
            self.use_bias_correction_kl or ESTIMATORS[self.kl_estimator].exponential
        )
        return kl or self.corrects

    def token_weights(self, batch: TokenBatch) -> Tensor:
        """[n] w_t of loss = sum_t w_t loss_t."""
        if batch.token_weights is not None:
            return batch.token_weights
        return self.scheme.weights(
            batch,
            Divisors(self.num_items_in_batch, self.num_sequences, self.max_completion_length),
        )


_NEVER_NONE = frozenset(
    f.name for f in fields(LossSpec) if f.default is not None and f.name != "log_ratio_clamp"
)


def _penalises(spec: LossSpec) -> bool:
    return spec.beta > 0


def _weighs(spec: LossSpec) -> bool:
    return spec.sampling_correction not in (None, "monitor", "bypass")


# option -> (whether it has something to act on, what it needs)
REQUIRES: dict[str, tuple[Callable[[LossSpec], bool], str]] = {
    "use_bias_correction_kl": (_penalises, "beta > 0: there is no KL to correct"),
    "kl_estimator": (_penalises, "beta > 0: there is no KL to estimate"),
    "kl_top_k": (_penalises, "beta > 0: there is no KL to compute"),
    "kl_clamp": (_penalises, "beta > 0: there is no KL to clamp"),
    "sampling_ratio_min": (_weighs, "a sampling_correction that truncates or masks"),
    "sampling_ratio_max": (_weighs, "a sampling_correction that truncates or masks"),
    "sampling_correction": (
        lambda spec: not spec.bypass or spec.row.uses_old or spec.use_bias_correction_kl,
        "an objective with a ratio to old log-probabilities",
    ),
}
