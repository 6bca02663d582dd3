"""The loss's share of `GRPOConfig`: every option of `fused_grpo.LossSpec`, with its help."""

# ruff: noqa: RUF009 (arg is dataclasses.field, one call per field)

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from fused_grpo.aggregation import Scheme, scheme_named
from fused_grpo.checks import check_number
from fused_grpo.entropy import AdaptiveEntropy
from fused_grpo.objectives import LossSpec
from fused_grpo.objectives.registry import loss_type_row
from fused_grpo.routed import RouteOptions, check_route_options

# set by the trainer, from the batches of an optimizer step
FROM_BATCHES = ("num_items_in_batch", "num_sequences", "max_completion_length")


def arg(default: Any, text: str) -> Any:
    """A dataclass field with the help that the command line shows."""
    return field(default=default, metadata={"help": text})


@dataclass
class LossArguments:
    """Options of the loss; docs/objectives.md explains them, `epsilon` being `epsilon_low`."""

    loss_type: str = arg(
        "dapo", "An objective of docs/objectives.md, or module:function of an installed module."
    )
    aggregation: str | None = arg(None, "Other token weights than the objective's own.")
    importance_sampling_level: str = arg(
        "token", "'token', 'sequence' (GSPO), 'sequence_token' or 'sequence_sum'."
    )
    epsilon: float = arg(0.2, "Lower bound of the clip is 1 - epsilon.")
    epsilon_high: float | None = arg(None, "Upper bound is 1 + epsilon_high; default: epsilon.")
    delta: float | None = arg(None, "Bound of the ratio for negative advantages, > 1.")
    dual_clip: float | None = arg(None, "Bound of the loss for negative advantages, > 1.")
    ratio_min: float | None = arg(None, "Lower bound of the ratio itself (cispo: 0).")
    ratio_max: float | None = arg(None, "Upper bound of the ratio itself (cispo: 5, dppo: 20).")
    sapo_temperature_pos: float = arg(1.0, "SAPO's temperature for positive advantages.")
    sapo_temperature_neg: float = arg(1.05, "SAPO's temperature for the others.")
    vespo_k_pos: float = arg(2.0, "VESPO's k for advantages >= 0.")
    vespo_lambda_pos: float = arg(3.0, "VESPO's lambda for advantages >= 0.")
    vespo_k_neg: float = arg(3.0, "VESPO's k for negative advantages.")
    vespo_lambda_neg: float = arg(2.0, "VESPO's lambda for negative advantages.")
    divergence_low: float | None = arg(None, "How far a probability may fall (dppo, prime).")
    divergence_high: float | None = arg(None, "How far a probability may rise (dppo, prime).")
    log_ratio_penalty: float | None = arg(None, "Of the squared log-ratio (dro, prime).")
    cov_ratio: float | None = arg(None, "Share of tokens that clip_cov and kl_cov take (2e-4).")
    cov_low: float | None = arg(None, "Smallest covariance that clip_cov takes (1).")
    cov_high: float | None = arg(None, "Largest covariance that clip_cov takes (5).")
    cov_coef: float | None = arg(None, "Coefficient of kl_cov's penalty (1).")
    cov_seed: int = arg(0, "Of the tokens that clip_cov draws.")
    log_ratio_clamp: float | None = arg(20.0, "Log-ratios enter exp clamped to +- this.")
    positive_nll_coef: float = arg(0.0, "Coefficient of -logp where the advantage is positive.")
    off_policy_mask_threshold: float | None = arg(
        None, "Drop bad sequences that moved further than this, in nats per token."
    )
    top_entropy_quantile: float = arg(1.0, "Share of tokens that learn, by entropy.")
    beta: float = arg(0.0, "Coefficient of the KL to the reference; 0 loads no reference.")
    kl_estimator: str = arg(
        "k3",
        "k1, k2, k3, abs; k1+, k3+, abs+; k1_score, k2_score, k3_score; 'full' or 'top_k' from the "
        "whole vocabulary.",
    )
    kl_top_k: int | None = arg(None, "Entries of kl_estimator='top_k' beside the rest.")
    kl_clamp: float | None = arg(None, "The KL of a token is clamped to +- this.")
    use_bias_correction_kl: bool = arg(False, "Multiply the KL by the ratio (DeepSeek-V3.2).")
    entropy_coef: float = arg(0.0, "Coefficient of the entropy bonus.")
    use_adaptive_entropy: bool = arg(False, "Let the coefficient follow the entropy.")
    entropy_coef_min: float = arg(0.0, "Its lower bound.")
    entropy_coef_max: float = arg(1.0, "Its upper bound.")
    entropy_coef_delta: float = arg(0.005, "How far an optimizer step moves it.")
    entropy_target: float = arg(0.2, "It rises while the entropy, in nats, is at most this.")
    sampling_correction: str | None = arg(
        None, "token_, sequence_ or geometric_ truncate or mask; monitor; bypass."
    )
    sampling_ratio_min: float | None = arg(None, "Lower bound of its weights (0).")
    sampling_ratio_max: float | None = arg(None, "Upper bound of its weights (3).")
    rejection: dict[str, Any] | str | None = arg(
        None, 'Criteria and bounds that tokens must meet, as in {"seq_mean_k3": 0.01}.'
    )
    veto_ratio_min: float | None = arg(None, "One token below rejects its sequence.")
    veto_ratio_max: float | None = arg(None, "One token above rejects its sequence.")

    backward: str = arg("exact", "Gradients: 'exact', or 'routed' (docs/routed-backward.md).")
    route_tau: float | None = arg(None, "Likelier entries are always kept (2^-12); 0 is exact.")
    route_weight_grad: str = arg("routed", "The head's own gradient: 'routed' or 'exact'.")
    chunk_bytes: int | None = arg(
        None, "Memory of the loss beside its gradients (100 MiB; 2 GiB on a GPU with triton)."
    )

    def route_options(self, step: int) -> dict[str, Any]:
        """Of `grpo_loss`, in an optimizer step: the noise follows from the seed and the step."""
        if self.backward == "exact":
            return {}
        return {**self._routing, "route_seed": (self.seed << 32) + step}  # type: ignore[attr-defined]

    @property
    def _routing(self) -> RouteOptions:
        return {
            "backward": self.backward,
            "route_tau": self.route_tau,
            "route_weight_grad": self.route_weight_grad,
        }

    @property
    def head_options(self) -> dict[str, Any]:
        """Of everything that passes over the head."""
        return {} if self.chunk_bytes is None else {"chunk_bytes": self.chunk_bytes}

    @property
    def loss_options(self) -> dict[str, Any]:
        """The options of `grpo_loss` that stay the same in every step."""
        names = {f.name for f in fields(LossSpec)} - {*FROM_BATCHES, "epsilon_low"}
        options = {name: getattr(self, name) for name in names} | {"epsilon_low": self.epsilon}
        if "max_completion_length" in self.scheme.takes:
            options["max_completion_length"] = self.max_completion_length  # type: ignore[attr-defined]
        return options

    @property
    def scheme(self) -> Scheme:
        """Of the token weights."""
        return scheme_named(self.aggregation or loss_type_row(self.loss_type).scheme)

    @property
    def loss_spec(self) -> LossSpec:
        """The same, checked."""
        return LossSpec(**self.loss_options)

    @property
    def reads_sampler(self) -> bool:
        """Whether the log-probabilities that the sampler reports are wanted."""
        return self.loss_spec.needs_sampler

    @property
    def needs_old(self) -> bool:
        """Whether old log-probabilities are needed where they are those of this policy."""
        return self.off_policy_mask_threshold is not None and not self.reads_sampler

    def adaptive_entropy(self) -> AdaptiveEntropy | None:
        """A controller of the entropy bonus, where it is wanted."""
        if not self.use_adaptive_entropy:
            return None
        return AdaptiveEntropy(
            target=self.entropy_target,
            step=self.entropy_coef_delta,
            low=self.entropy_coef_min,
            high=self.entropy_coef_max,
            coef=self.entropy_coef,
        )

    def check_loss(self) -> None:
        """TypeError or ValueError for options that do not fit."""
        spec = self.loss_spec
        self.adaptive_entropy()
        check_route_options(self._routing)
        if self.chunk_bytes is not None:
            check_number("chunk_bytes", self.chunk_bytes, lambda b: b >= 1, ">= 1, or None")
        if self.backward == "routed" and (spec.head_kl or self.sampler_support):  # type: ignore[attr-defined]
            option = f"kl_estimator={spec.kl_estimator!r}" if spec.head_kl else "keep_sampling_mask"
            raise ValueError(f"backward='routed' does not know {option}: use 'exact'")
        if not self.use_adaptive_entropy:
            given = [n for n in _ADAPTIVE if getattr(self, n) != _ADAPTIVE[n]]
            if given:
                raise ValueError(f"{given[0]}={getattr(self, given[0])} needs use_adaptive_entropy")
        if "group_ids" in spec.scheme.needs:
            size = self.per_device_train_batch_size  # type: ignore[attr-defined]
            group = self.num_generations  # type: ignore[attr-defined]
            if size % group:
                raise ValueError(
                    f"aggregation={self.aggregation!r} needs whole groups in a micro-batch: "
                    f"per_device_train_batch_size={size} must be a multiple of "
                    f"num_generations={group}"
                )


_ADAPTIVE = {
    f.name: f.default
    for f in fields(LossArguments)
    if f.name.startswith("entropy_") and f.name != "entropy_coef"
}
