"""What the numbers among the options of a loss must be, and which only some objectives take."""

from __future__ import annotations

import math
from collections.abc import Callable


def _between(low: float, high: float) -> Callable[[float], bool]:
    return lambda x: low <= x <= high


def _positive(x: float) -> bool:
    return 0 < x < math.inf


# option -> what it must be; None is allowed where it is the default, or means "off"
RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "epsilon_low": (lambda x: 0 <= x < 1, "in [0, 1)"),
    "epsilon_high": (lambda x: x >= 0, ">= 0: the bound is 1 + epsilon_high"),
    "delta": (lambda x: x > 1, "> 1: it bounds the ratio itself"),
    "dual_clip": (lambda x: x > 1, "> 1: it bounds the ratio itself"),
    "beta": (lambda x: x >= 0 and math.isfinite(x), ">= 0"),
    "entropy_coef": (math.isfinite, "finite"),
    "log_ratio_clamp": (lambda x: x > 0, "> 0, or None"),
    "ratio_min": (_between(0, 1), "in [0, 1]: it bounds the ratio itself, which starts at 1"),
    "ratio_max": (
        lambda x: x >= 1,
        ">= 1: it bounds the ratio itself, which starts at 1, and would clip every token",
    ),
    "sapo_temperature_pos": (_positive, "> 0"),
    "sapo_temperature_neg": (_positive, "> 0"),
    "vespo_k_pos": (_positive, "> 0"),
    "vespo_lambda_pos": (_positive, "> 0"),
    "vespo_k_neg": (_positive, "> 0"),
    "vespo_lambda_neg": (_positive, "> 0"),
    "divergence_low": (lambda x: x >= 0, ">= 0"),
    "divergence_high": (lambda x: x >= 0, ">= 0"),
    "log_ratio_penalty": (_positive, "> 0"),
    "cov_ratio": (lambda x: 0 < x <= 1, "in (0, 1]"),
    "cov_low": (math.isfinite, "finite"),
    "cov_high": (math.isfinite, "finite"),
    "cov_coef": (_positive, "> 0"),
    "cov_seed": (lambda x: isinstance(x, int), "an integer"),
    "positive_nll_coef": (lambda x: 0 <= x < math.inf, ">= 0"),
    "off_policy_mask_threshold": (math.isfinite, "finite, or None"),
    "top_entropy_quantile": (lambda x: 0 < x <= 1, "in (0, 1]: the share of tokens kept"),
    "kl_top_k": (lambda k: k >= 1 and k == int(k), "an integer >= 1"),
    "kl_clamp": (lambda x: x > 0, "> 0, or None"),
    "sampling_ratio_min": (lambda x: x >= 0, ">= 0, or None"),
    "sampling_ratio_max": (lambda x: x >= 1, ">= 1: the ratio of equal policies is 1"),
    "veto_ratio_min": (lambda x: 0 < x < 1, "in (0, 1), or None"),
    "veto_ratio_max": (lambda x: x > 1, "> 1, or None"),
}

# options that only some objectives take: those in no row raise when set
OF_OBJECTIVES = frozenset(
    {"importance_sampling_level", "epsilon_low", "epsilon_high", "delta", "dual_clip"}
    | {"log_ratio_clamp", "ratio_min", "ratio_max", "log_ratio_penalty"}
    | {"sapo_temperature_pos", "sapo_temperature_neg"}
    | {"vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"}
    | {"divergence_low", "divergence_high"}
    | {"cov_ratio", "cov_low", "cov_high", "cov_coef", "cov_seed"}
)

# (low, high) pairs of options
ORDERED = (
    ("cov_low", "cov_high"),
    ("sampling_ratio_min", "sampling_ratio_max"),
)
