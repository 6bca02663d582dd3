"""The table of objectives, and how to add one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fused_grpo.checks import check_choice, imported_function
from fused_grpo.objectives import surrogates
from fused_grpo.objectives.view import TokenView

if TYPE_CHECKING:
    from fused_grpo.objectives.spec import LossSpec

Surrogate = Callable[[TokenView, "LossSpec"], Tensor]
LOCALITIES = ("token", "sequence", "batch")


@dataclass(frozen=True)
class LossType:
    """A name: its surrogate, its scheme of token weights, and what it takes.

    Attributes:
        surrogate: (TokenView, LossSpec) -> [n].
        scheme: of `aggregation.SCHEMES`.
        locality: what a token's gradient depends on beside the token, at a ratio of "token" level.
        takes: the options of `LossSpec` that have an effect with it, beside those of every
            objective; any other that is set raises.
        level: the level of the ratio where it is fixed; None: `importance_sampling_level`.
        defaults: of options whose default in `LossSpec` is None.
        needs: options without a default.
        uses_old: whether it depends on old log-probabilities.
        fresh: whether, where every ratio is 1 whatever the log-probabilities, g_t does not depend
            on them: then sequence-level objectives can be evaluated a chunk at a time.
        folds_weight: whether it takes care of `TokenView.weight` itself.
        entropy: whether it needs `TokenView.entropy`.
        clipped: (TokenView, LossSpec) -> the tokens outside the bounds with A < 0, with A > 0.
    """

    surrogate: Surrogate
    scheme: str
    locality: str = "token"
    takes: frozenset[str] = frozenset()
    level: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    uses_old: bool = True
    fresh: bool = True
    folds_weight: bool = False
    entropy: bool = False
    clipped: Callable[[TokenView, LossSpec], tuple[Tensor, Tensor]] | None = None


_RATIO = frozenset({"log_ratio_clamp"})
_LEVEL = _RATIO | {"importance_sampling_level"}
_EPSILONS = _RATIO | {"epsilon_low", "epsilon_high"}
_CLIP = _EPSILONS | {"delta", "dual_clip"}
_DIVERGENCES = _RATIO | {"divergence_low", "divergence_high"}
_SAPO = frozenset({"sapo_temperature_pos", "sapo_temperature_neg"})
_VESPO = frozenset({"vespo_k_pos", "vespo_k_neg", "vespo_lambda_pos", "vespo_lambda_neg"})
_TV = {"divergence_low": 0.2, "divergence_high": 0.2}


def _clip(scheme: str, level: str | None = None) -> LossType:
    takes = _CLIP if level else _CLIP | _LEVEL
    return LossType(
        surrogates.clip, scheme, takes=takes, level=level, clipped=surrogates.outside_clip
    )


LOSS_TYPES: dict[str, LossType] = {
    "grpo": _clip("sequence_mean"),
    "bnpo": _clip("local_token_mean"),
    "dr_grpo": _clip("fixed_length"),
    "dapo": _clip("token_mean"),
    "gspo": _clip("sequence_mean", level="sequence"),
    "gspo_token": _clip("sequence_mean", level="sequence_token"),
    "luspo": _clip("sequence_sum", level="sequence"),
    "rloo": _clip("sequence_mean", level="sequence_sum"),
    "cispo": LossType(
        surrogates.cispo,
        "token_mean",
        takes=_LEVEL | {"ratio_min", "ratio_max"},
        defaults={"ratio_min": 0.0, "ratio_max": 5.0},
        clipped=surrogates.outside_ratio,
    ),
    "sapo": LossType(surrogates.sapo, "sequence_mean", takes=_LEVEL | _SAPO),
    "vespo": LossType(
        surrogates.vespo, "token_mean", locality="sequence", takes=_VESPO, folds_weight=True
    ),
    "gmpo": LossType(
        surrogates.gmpo,
        "sequence_mean",
        locality="sequence",
        takes=_EPSILONS,
        clipped=surrogates.outside_log_clip,
    ),
    "reinforce": LossType(surrogates.reinforce, "token_mean", uses_old=False),
    "importance_sampling": LossType(surrogates.importance_sampling, "token_mean", takes=_LEVEL),
    "masked_importance_sampling": LossType(
        surrogates.masked_importance_sampling,
        "token_mean",
        takes=_EPSILONS | _LEVEL,
        clipped=surrogates.outside_clip,
    ),
    "dppo_tv": LossType(
        surrogates.dppo_tv,
        "token_mean",
        takes=_DIVERGENCES | {"ratio_max"},
        defaults={**_TV, "ratio_max": 20.0},
        clipped=surrogates.outside_tv,
    ),
    "dppo_kl": LossType(
        surrogates.dppo_kl,
        "token_mean",
        takes=_DIVERGENCES | {"ratio_max"},
        defaults={"divergence_low": 0.05, "divergence_high": 0.05, "ratio_max": 20.0},
        clipped=surrogates.outside_kl,
    ),
    "prime": LossType(
        surrogates.prime,
        "token_mean",
        takes=_DIVERGENCES | {"log_ratio_penalty"},
        defaults={**_TV, "log_ratio_penalty": 1e-3},
        clipped=surrogates.outside_tv,
    ),
    "prime_ipo": LossType(
        surrogates.prime_ipo,
        "token_mean",
        takes=_RATIO | {"divergence_high", "log_ratio_penalty"},
        defaults={"divergence_high": 0.1, "log_ratio_penalty": 1e-3},
        clipped=surrogates.outside_band,
    ),
    "dro": LossType(
        surrogates.dro,
        "token_mean",
        takes=frozenset({"log_ratio_penalty"}),
        needs=("log_ratio_penalty",),
    ),
    "clip_cov": LossType(
        surrogates.clip_cov,
        "token_mean",
        locality="batch",
        takes=_CLIP | {"cov_ratio", "cov_low", "cov_high", "cov_seed"},
        defaults={"cov_ratio": 2e-4, "cov_low": 1.0, "cov_high": 5.0},
        clipped=surrogates.outside_clip,
    ),
    "kl_cov": LossType(
        surrogates.kl_cov,
        "token_mean",
        locality="batch",
        takes=_RATIO | {"cov_ratio", "cov_coef"},
        defaults={"cov_ratio": 2e-4, "cov_coef": 1.0},
    ),
}


def register_objective(
    name: str,
    *,
    scheme: str = "token_mean",
    locality: str = "batch",
    entropy: bool = False,
) -> Callable[[Surrogate], Surrogate]:
    """Makes a function of log-probabilities a loss_type; its gradient is autograd's.

        @register_objective("squared", locality="token")
        def squared(tokens, spec):
            return -tokens.ratio * tokens.advantages + 0.1 * tokens.log_ratio.square()

        grpo_loss(..., loss_type="squared")

    The function gets a `TokenView` of the counted tokens, flat vectors of length n, and the
    `LossSpec`, and returns the policy loss of each token [n]; sequences are summed over with
    `tokens.sequence_sum(values)`. Masks, weights, KL, entropy bonus and corrections are added
    around it as for any other. From the command line and in a `GRPOConfig`, "module:function" names
    a function of an installed module without registering it.

    Args:
        name: of the loss_type; not one that exists.
        scheme: of its token weights, a name in `aggregation.SCHEMES`.
        locality: "token" if a token's loss depends on nothing but that token, which allows one pass
            over the head; "sequence" if on the token's sequence; "batch" (always right) on all.
        entropy: whether the function reads `tokens.entropy`, which it may differentiate.

    Raises:
        ValueError: a name that is taken, an unknown scheme or locality.
    """
    row = _custom_row(scheme, locality, entropy)

    def register(function: Surrogate) -> Surrogate:
        if not callable(function):
            raise TypeError(f"an objective must be a function, not {type(function).__name__}")
        # running a notebook's cell or reloading a module defines the same function again
        if name in LOSS_TYPES and _origin(LOSS_TYPES[name].surrogate) != _origin(function):
            raise ValueError(f"loss_type {name!r} exists already; choose another name")
        LOSS_TYPES[name] = row(function)
        return function

    return register


def _origin(function: Surrogate) -> tuple[str, str]:
    return getattr(function, "__module__", ""), getattr(function, "__qualname__", repr(function))


def _custom_row(scheme: str, locality: str, entropy: bool) -> Callable[[Surrogate], LossType]:
    from fused_grpo.aggregation import scheme_named

    scheme_named(scheme)
    check_choice("locality", locality, LOCALITIES)
    takes = _LEVEL | _CLIP | _DIVERGENCES | {"ratio_min", "ratio_max", "log_ratio_penalty"}

    def row(function: Surrogate) -> LossType:
        # which options a function reads is not known, and neither is its gradient at ratio 1
        return LossType(
            function, scheme, locality=locality, takes=takes, fresh=False, entropy=entropy
        )

    return row


def loss_type_row(name: str) -> LossType:
    """The row of a loss_type; "module:function" is imported the first time.

    Raises:
        ValueError: an unknown name, a module or function that does not exist.
        TypeError: a name that is not a string.
    """
    if not isinstance(name, str):
        raise TypeError(f"loss_type must be a string, not {type(name).__name__}")
    if name not in LOSS_TYPES and ":" in name:
        function = imported_function("loss_type", name)
        known = [row for row in LOSS_TYPES.values() if row.surrogate is function]
        LOSS_TYPES[name] = (
            known[0] if known else _custom_row("token_mean", "batch", False)(function)
        )
    check_choice("loss_type", name, LOSS_TYPES)
    return LOSS_TYPES[name]
