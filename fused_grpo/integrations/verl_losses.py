"""verl's policy losses by `fused_grpo.policy_loss`, with its configuration and its metrics."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fused_grpo.checks import check_choice
from fused_grpo.loss import GRPOLossOutput, policy_loss

Config = Any  # verl's ActorConfig, or a mapping of the same names


def _option(config: Config, name: str, default: Any = None) -> Any:
    value = config.get(name, None) if hasattr(config, "get") else getattr(config, name, None)
    return default if value is None else value


def _bounds(config: Config) -> tuple[float, float]:
    """(clip_ratio_low, clip_ratio_high), each clip_ratio where it is None."""
    ratio = _option(config, "clip_ratio", 0.2)
    return _option(config, "clip_ratio_low", ratio), _option(config, "clip_ratio_high", ratio)


def _epsilons(config: Config) -> dict[str, Any]:
    low, high = _bounds(config)
    return {"epsilon_low": low, "epsilon_high": high}


def _divergences(config: Config) -> dict[str, Any]:
    low, high = _bounds(config)
    return {
        "divergence_low": low,
        "divergence_high": high,
        "ratio_max": _option(config, "clip_ratio_c", 20.0),
    }


def _ratio_bounds(config: Config) -> dict[str, Any]:
    low, high = _bounds(config)
    return {"ratio_min": 1 - low, "ratio_max": 1 + high}


def _of_policy(config: Config, **names: tuple[str, Any]) -> dict[str, Any]:
    """Ours -> (the name under `policy_loss`, its default)."""
    options = _option(config, "policy_loss", {})
    return {ours: _option(options, theirs, default) for ours, (theirs, default) in names.items()}


def _clip_cov(config: Config) -> dict[str, Any]:
    names = {
        "cov_ratio": ("clip_cov_ratio", 2e-4),
        "cov_low": ("clip_cov_lb", 1.0),
        "cov_high": ("clip_cov_ub", 5.0),
    }
    seed = int(torch.randint(2**31, (), device="cpu"))  # of torch's generator, as verl's draw
    return _epsilons(config) | _of_policy(config, **names) | {"cov_seed": seed}


def _kl_cov(config: Config) -> dict[str, Any]:
    return _of_policy(config, cov_ratio=("kl_cov_ratio", 2e-4), cov_coef=("ppo_kl_coef", 1.0))


def _dro(config: Config) -> dict[str, Any]:
    beta = _of_policy(config, beta=("dro_beta", None))["beta"]
    if beta is None or not beta > 0:
        raise ValueError(f"policy_loss.dro_beta={beta} must be > 0 with loss_mode='fused_dro'")
    return {"log_ratio_penalty": beta / 2}


@dataclass(frozen=True)
class Seen:
    """What the metrics of a call look at, [B, T]."""

    log_ratio: Tensor
    advantages: Tensor
    mask: Tensor  # bool
    options: dict[str, Any]  # ours
    out: GRPOLossOutput

    @property
    def ratio(self) -> Tensor:
        return self.log_ratio.clamp(-20.0, 20.0).exp()

    def share(self, where: Tensor) -> Tensor:
        """Of the tokens that count; a mean, for values that are not booleans."""
        return torch.where(self.mask, where.float(), 0).sum() / self.mask.sum().clamp(min=1)


def _outside(seen: Seen) -> Tensor:
    return seen.out.metrics["clip_ratio/region_mean"]


def _beyond_ratios(seen: Seen) -> Tensor:
    low, high = seen.options["ratio_min"], seen.options["ratio_max"]
    return seen.share((seen.ratio < low) | (seen.ratio > high))


def _beyond_epsilons(seen: Seen, gains: bool) -> Tensor:
    x, a = seen.log_ratio, seen.advantages
    beyond = (x < -seen.options["epsilon_low"]) | (x > seen.options["epsilon_high"])
    return seen.share(beyond & ((a > 0) if gains else (a < 0)))


def _drawn(seen: Seen) -> Tensor:
    return seen.share((seen.out.per_token_loss == 0) & (seen.advantages != 0))


def _over_dual_clip(seen: Seen) -> Tensor:
    return seen.share((seen.ratio > seen.options["dual_clip"]) & (seen.advantages < 0))


def _over_cap(seen: Seen) -> Tensor:
    over = (seen.ratio > seen.options["ratio_max"]) & (seen.out.per_token_loss != 0)
    return seen.share(over)


def _kl(seen: Seen) -> Tensor:
    return seen.share(-seen.log_ratio)


def _clamped_kl(seen: Seen) -> Tensor:
    return seen.share(-seen.log_ratio.clamp(-20.0, 20.0))


def _none(seen: Seen) -> Tensor:
    return seen.log_ratio.new_zeros(())


def _logs(
    clipped: Callable[[Seen], Tensor] = _none,
    lower: Callable[[Seen], Tensor] = _none,
    kl: Callable[[Seen], Tensor] = _clamped_kl,
) -> dict[str, Callable[[Seen], Tensor]]:
    return {
        "actor/pg_clipfrac": clipped,
        "actor/ppo_kl": kl,
        "actor/pg_clipfrac_lower": lower,
    }


@dataclass(frozen=True)
class PolicyLoss:
    """One of verl's losses: the loss_type that computes it, its options, and what it logs."""

    loss_type: str
    options: Callable[[Config], dict[str, Any]]
    logs: dict[str, Callable[[Seen], Tensor]]
    log_ratio_clamp: float | None = 20.0
    mode: str | None = None  # of the aggregation, where verl fixes it
    by_row: bool = False  # the mean over rows, whatever the mode and the other ranks


LOSSES: dict[str, PolicyLoss] = {
    "vanilla": PolicyLoss(
        "dapo",
        lambda c: _epsilons(c) | {"dual_clip": _option(c, "clip_ratio_c", 3.0)},
        _logs(_outside, _over_dual_clip),
    ),
    "gspo": PolicyLoss("gspo_token", _epsilons, _logs(_outside, kl=_kl), log_ratio_clamp=10.0),
    "sapo": PolicyLoss(
        "sapo",
        lambda c: {
            "sapo_temperature_pos": _option(c, "tau_pos", 1.0),
            "sapo_temperature_neg": _option(c, "tau_neg", 1.05),
        },
        _logs(),
        mode="seq-mean-token-mean",
    ),
    "gpg": PolicyLoss("reinforce", lambda c: {}, {}),
    "cispo": PolicyLoss("cispo", _ratio_bounds, _logs(_beyond_ratios)),
    "dppo_tv": PolicyLoss("dppo_tv", _divergences, _logs(_outside, _over_cap)),
    "dppo_kl": PolicyLoss("dppo_kl", _divergences, _logs(_outside, _over_cap)),
    "clip_cov": PolicyLoss(
        "clip_cov",
        _clip_cov,
        {"actor/pg_clipfrac": _drawn, "actor/ppo_kl": _kl},
        log_ratio_clamp=None,
    ),
    "kl_cov": PolicyLoss(
        "kl_cov",
        _kl_cov,
        {"actor/ppo_kl": lambda seen: seen.share(seen.log_ratio.abs())},
        log_ratio_clamp=None,
    ),
    "geo_mean": PolicyLoss(
        "gmpo",
        _epsilons,
        _logs(
            functools.partial(_beyond_epsilons, gains=True),
            functools.partial(_beyond_epsilons, gains=False),
            kl=_kl,
        ),
        log_ratio_clamp=None,
        by_row=True,
    ),
    "dro": PolicyLoss("dro", _dro, {"actor/ppo_kl": _kl}),
}
# loss_agg_mode -> the number in verl's global_batch_info that it divides by, and ours
MODES = {
    "token-mean": ("batch_num_tokens", "num_items_in_batch"),
    "token-sum": (None, None),
    "seq-mean-token-sum": ("global_batch_size", "num_sequences"),
    "seq-mean-token-sum-norm": ("global_batch_size", "num_sequences"),
    "seq-mean-token-mean": ("global_batch_size", "num_sequences"),
}


def compute_policy_loss(
    name: str,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Config = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """verl's policy loss `name` (a key of `LOSSES`) by `fused_grpo.policy_loss`.

    Args:
        old_log_prob, log_prob, advantages, response_mask: [B, T]; the mask boolean or 0/1.
        loss_agg_mode: a key of `MODES`; "sapo" and "geo_mean" have one of their own, as in verl.
        config: verl's actor configuration: clip_ratio, clip_ratio_low, clip_ratio_high,
            clip_ratio_c, tau_pos, tau_neg, policy_loss, and global_batch_info with dp_size,
            batch_num_tokens, global_batch_size and loss_scale_factor.
        rollout_is_weights: [B, T] importance weights on the policy term.

    Returns:
        (loss [], metrics as numbers, under verl's names).

    Raises:
        ValueError: no configuration, an unknown mode, a global number that dp_size > 1 needs, and
            what `policy_loss` refuses.
    """
    check_choice("name", name, LOSSES)
    check_choice("loss_agg_mode", loss_agg_mode, MODES)
    if config is None:
        raise ValueError("config is needed: the actor's, with clip_ratio and the rest")
    loss = LOSSES[name]
    mask = response_mask != 0
    options = loss.options(config) | {"loss_type": loss.loss_type}
    info = _option(config, "global_batch_info", {})
    dp_size = 1 if loss.by_row else info.get("dp_size", 1)
    if loss.by_row:
        reduction: dict[str, Any] = {"aggregation": "sequence_mean"}
    else:
        reduction = _reduction(loss.mode or loss_agg_mode, info, dp_size, mask.shape[-1])
    if loss.loss_type != "reinforce":
        options["old_per_token_logps"] = old_log_prob
        if loss.loss_type != "dro":
            options["log_ratio_clamp"] = loss.log_ratio_clamp
    if rollout_is_weights is not None:
        weights = rollout_is_weights
        options["importance_sampling_ratio"] = (
            _geometric_mean(weights, mask) if loss.by_row else weights
        )
    out = policy_loss(log_prob, advantages, completion_mask=response_mask, **options, **reduction)
    with torch.no_grad():
        log_ratio = torch.where(mask, log_prob.detach() - old_log_prob, 0)
        seen = Seen(log_ratio, advantages, mask, options, out)
        found = [log(seen).float() for log in loss.logs.values()]
        numbers = torch.stack(found).tolist() if found else []
    return out.loss * dp_size, dict(zip(loss.logs, numbers, strict=True))


def _reduction(mode: str, info: dict[str, Any], dp_size: int, width: int) -> dict[str, Any]:
    theirs, ours = MODES[mode]
    options: dict[str, Any] = {"aggregation": f"verl:{mode}"}
    if theirs is not None and ours is not None:
        options[ours] = info.get(theirs)
        if options[ours] is None and dp_size > 1:
            raise ValueError(f"loss_agg_mode={mode!r} with dp_size={dp_size} needs {theirs}")
    if mode == "seq-mean-token-sum-norm":
        scale = info.get("loss_scale_factor")
        options["max_completion_length"] = width if scale is None else scale
    return options


def _geometric_mean(weights: Tensor, mask: Tensor) -> Tensor:
    """[B] of the weights that count; 1 where none does."""
    logs = torch.where(mask, (weights + 1e-10).log(), 0)
    return (logs.sum(-1) / mask.sum(-1).clamp(min=1)).exp()
