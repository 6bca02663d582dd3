"""The options of a loss as keyword arguments, for type checkers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from torch import Tensor


class LossOptions(TypedDict, total=False):
    """Options shared by `grpo_loss`, `GRPOLoss` and `policy_loss`; defaults: `LossSpec`."""

    loss_type: str
    importance_sampling_level: str
    epsilon_low: float
    epsilon_high: float | None
    delta: float | None
    beta: float
    use_bias_correction_kl: bool
    entropy_coef: float
    log_ratio_clamp: float | None
    num_items_in_batch: float | Tensor | None
    max_completion_length: int | None
    aggregation: str | None
    num_sequences: float | Tensor | None
    dual_clip: float | None
    ratio_min: float | None
    ratio_max: float | None
    sapo_temperature_pos: float
    sapo_temperature_neg: float
    vespo_k_pos: float
    vespo_lambda_pos: float
    vespo_k_neg: float
    vespo_lambda_neg: float
    divergence_low: float | None
    divergence_high: float | None
    log_ratio_penalty: float | None
    cov_ratio: float | None
    cov_low: float | None
    cov_high: float | None
    cov_coef: float | None
    cov_seed: int
    positive_nll_coef: float
    off_policy_mask_threshold: float | None
    top_entropy_quantile: float
    kl_estimator: str
    kl_top_k: int | None
    kl_clamp: float | None
    sampling_correction: str | None
    sampling_ratio_min: float | None
    sampling_ratio_max: float | None
    rejection: Mapping[str, float | tuple[float, float]] | None
    veto_ratio_min: float | None
    veto_ratio_max: float | None
