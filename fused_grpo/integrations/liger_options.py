"""What Liger's fused GRPO loss takes, and the two objectives that are its own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fused_grpo.checks import check_choice, check_number
from fused_grpo.objectives import LOSS_TYPES, LossSpec, LossType, TokenView
from fused_grpo.objectives.surrogates import vespo_gain

LOG_TINY, LOG_HUGE = math.log(1e-8), 20.0


def _cispo(t: TokenView, spec: LossSpec) -> Tensor:
    """-sg(min(rho, epsilon_high)) A l: the cap is epsilon_high itself, below 1 as well."""
    return -t.ratio.detach().clamp(max=spec.upper) * t.advantages * t.logps


def _over_cap(t: TokenView, spec: LossSpec) -> tuple[Tensor, Tensor]:
    over = (t.ratio > spec.upper) & (t.advantages > 0)
    return torch.zeros_like(over), over


def _vespo(t: TokenView, spec: LossSpec) -> Tensor:
    """As `surrogates.vespo`; `t.weight` is ln of the importance weights' product, summed by the
    caller over masked positions too, and a gain that overflows is 0."""
    log_w = t.sequence_sum(t.log_ratio.detach().clamp(-LOG_HUGE, LOG_HUGE))
    if t.weight is not None:
        log_w = log_w + t.weight
    gain = vespo_gain(t, spec, log_w.clamp(LOG_TINY, LOG_HUGE))
    return -gain.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) * t.advantages * t.logps


_VESPO = ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
LOSS_TYPES["liger:cispo"] = LossType(
    _cispo, "token_mean", takes=frozenset({"epsilon_high", "log_ratio_clamp"}), clipped=_over_cap
)
LOSS_TYPES["liger:vespo"] = LossType(
    _vespo,
    "token_mean",
    locality="sequence",
    takes=frozenset({*_VESPO, "log_ratio_clamp"}),
    folds_weight=True,
)


@dataclass(frozen=True)
class Options:
    """Liger's options; see `FusedLinearGRPOLoss`."""

    beta: float = 0.04
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    loss_type: str = "dapo"
    max_completion_length: int | None = None
    importance_sampling_level: str = "token"
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    temperature: float = 1.0
    compiled: bool = True
    use_ref_model: bool = True
    chunk_size: int = 1
    delta: float | None = None
    use_bias_correction_kl: bool = False
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0

    def __post_init__(self) -> None:
        check_choice("loss_type", self.loss_type, _KINDS)
        check_choice("importance_sampling_level", self.importance_sampling_level, _LEVELS)
        if self.importance_sampling_level == "sequence" and self.loss_type not in _CLIPPED:
            raise ValueError(
                "Sequence-level importance sampling is not supported for "
                f"loss_type={self.loss_type!r}, as in Liger; use importance_sampling_level='token'"
            )
        check_number("epsilon_high", self.epsilon_high, lambda x: x >= 0, ">= 0")
        check_number("chunk_size", self.chunk_size, lambda x: x >= 1 and x == int(x), ">= 1")
        if self.loss_type == "dr_grpo" and self.max_completion_length is None:
            raise ValueError("loss_type='dr_grpo' needs max_completion_length")

    @property
    def kind(self) -> Kind:
        return _KINDS[self.loss_type]

    @property
    def penalises(self) -> bool:
        """Whether a KL enters the loss: without a reference it is 0, and so is its gradient."""
        return self.beta != 0 and self.use_ref_model

    def of_loss(self) -> dict[str, Any]:
        """The options of `policy_loss` and `grpo_loss`."""
        options = {name: getattr(self, name) for name in self.kind.takes}
        for name in ("vespo_lambda_pos", "vespo_lambda_neg"):
            if name in options:
                options[name] = max(options[name], 1e-4)
        if self.penalises:
            options |= {"beta": self.beta, "use_bias_correction_kl": self.use_bias_correction_kl}
        return options | {"loss_type": self.kind.loss_type, "log_ratio_clamp": None}


@dataclass(frozen=True)
class Kind:
    """A loss_type of Liger: ours, and which of the options it reads."""

    loss_type: str
    takes: tuple[str, ...]
    counts_items: bool = False  # whether num_items_in_batch has an effect


_LEVELS = ("token", "sequence")
_CLIP = ("epsilon_low", "epsilon_high", "delta", "importance_sampling_level")
_KINDS = {
    "grpo": Kind("grpo", _CLIP),
    "bnpo": Kind("bnpo", _CLIP),
    "dr_grpo": Kind("dr_grpo", (*_CLIP, "max_completion_length")),
    "dapo": Kind("dapo", _CLIP, counts_items=True),
    "luspo": Kind("dapo", _CLIP),  # with token weights of its own
    "cispo": Kind("liger:cispo", ("epsilon_high",), counts_items=True),
    "sapo": Kind("sapo", ("sapo_temperature_pos", "sapo_temperature_neg")),
    "vespo": Kind("liger:vespo", _VESPO, counts_items=True),
}
_CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
