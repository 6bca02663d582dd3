"""Every surrogate once: (TokenView, LossSpec) -> the policy loss of each token [n].

Masks say what goes, so that a NaN stays and is seen.

Notation: l log-probability, rho ratio at its level, A advantage, sg() detached, tau a penalty. The
gradient is autograd of these lines on vectors of length n. docs/objectives.md has the table.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fused_grpo.objectives.view import TokenView
from fused_grpo.ratios import clamp_log_ratio, exp

if TYPE_CHECKING:
    from fused_grpo.objectives.spec import LossSpec


def clip(t: TokenView, spec: LossSpec) -> Tensor:
    """-min(min(rho, delta) A, clip(rho, 1 - eps_low, 1 + eps_high) A), at most dual_clip |A|.

    PPO (arXiv 1707.06347) with separate bounds (DAPO, arXiv 2503.14476), the two-sided clip of
    INTELLECT-2 (arXiv 2505.07291) and the dual clip (arXiv 1912.09729); at a bound the gradient
    passes.
    """
    clipped = t.ratio.clamp(1 - spec.epsilon_low, 1 + spec.upper)
    free = t.ratio if spec.delta is None else t.ratio.clamp(max=spec.delta)
    loss = -torch.minimum(free * t.advantages, clipped * t.advantages)
    if spec.dual_clip is None:
        return loss
    bound = -spec.dual_clip * t.advantages
    return torch.where(t.advantages < 0, torch.minimum(loss, bound), loss)


def cispo(t: TokenView, spec: LossSpec) -> Tensor:
    """-sg(clip(rho, ratio_min, ratio_max)) A l: clipped weights, no token without a gradient.

    MiniMax-M1, arXiv 2506.13585.
    """
    weight = t.ratio.detach().clamp(spec.option("ratio_min"), spec.option("ratio_max"))
    return -weight * t.advantages * t.logps


def sapo(t: TokenView, spec: LossSpec) -> Tensor:
    """-A (4 / tau) sigmoid(tau (rho - 1)), tau by the sign of A: a soft gate. arXiv 2511.20347."""
    tau = _by_sign(t, t.advantages > 0, spec.sapo_temperature_pos, spec.sapo_temperature_neg)
    return -t.advantages * (4 / tau) * torch.sigmoid(tau * (t.ratio - 1))


def vespo(t: TokenView, spec: LossSpec) -> Tensor:
    """-sg(phi(w)) A l, phi(w) = e^lambda w^k e^(-lambda w), w the ratio of the whole sequence.

    w includes the importance weights; ln w is kept in [ln 1e-8, 20]. arXiv 2602.10693.
    """
    low, high = math.log(1e-8), 20.0
    log_w = t.log_ratio.detach().clamp(-high, high)
    if t.weight is not None:
        log_w = log_w + t.weight.log().clamp(low, high)
    return -vespo_gain(t, spec, t.sequence_sum(log_w).clamp(low, high)) * t.advantages * t.logps


def vespo_gain(t: TokenView, spec: LossSpec, log_w: Tensor) -> Tensor:
    """phi(w) at ln w [n], its shape and rate by the sign of A."""
    gains = t.advantages >= 0
    k = _by_sign(t, gains, spec.vespo_k_pos, spec.vespo_k_neg)
    rate = _by_sign(t, gains, spec.vespo_lambda_pos, spec.vespo_lambda_neg)
    return (rate + k * log_w - rate * log_w.exp()).exp()


def _by_sign(t: TokenView, gains: Tensor, positive: float, negative: float) -> Tensor:
    return torch.where(gains, positive, torch.full_like(t.advantages, negative))


def gmpo(t: TokenView, spec: LossSpec) -> Tensor:
    """-A R, R = exp(mean over the sequence of the log-ratios, each clipped on the side A allows).

    The bounds are e^-eps_low and e^eps_high: epsilons are log-ratios here. arXiv 2507.20673.
    """
    clamped = t.log_ratio.clamp(-spec.epsilon_low, spec.upper)
    least, most = torch.minimum(t.log_ratio, clamped), torch.maximum(t.log_ratio, clamped)
    one_sided = torch.where(t.advantages < 0, most, t.log_ratio)
    one_sided = torch.where(t.advantages > 0, least, one_sided)
    mean = clamp_log_ratio(t.sequence_mean(one_sided), spec.log_ratio_clamp)
    return -t.advantages * exp(mean)


def reinforce(t: TokenView, spec: LossSpec) -> Tensor:
    """-A l: GPG (arXiv 2504.02546), REINFORCE; with weights as advantages, cross entropy."""
    return -t.advantages * t.logps


def importance_sampling(t: TokenView, spec: LossSpec) -> Tensor:
    """-rho A, unclipped."""
    return -t.ratio * t.advantages


def masked_importance_sampling(t: TokenView, spec: LossSpec) -> Tensor:
    """-sg(rho) A l where 1 - eps_low < rho < 1 + eps_high, and 0 elsewhere."""
    ratio = t.ratio.detach()
    beyond = (ratio <= 1 - spec.epsilon_low) | (ratio >= 1 + spec.upper)
    weight = torch.where(beyond, 0.0, ratio)  # a gradient of 0 times one that overflows is NaN
    return torch.where(beyond, 0.0, -weight * t.advantages * t.logps)


def dppo_tv(t: TokenView, spec: LossSpec) -> Tensor:
    """-sg(min(rho, ratio_max)) A l where |p - p_old| has not grown too far. arXiv 2602.04879."""
    return _truncated(t, spec, within_tv(t, spec))


def dppo_kl(t: TokenView, spec: LossSpec) -> Tensor:
    """As `dppo_tv`, bounded by the KL of the two binary distributions {this token, another}."""
    return _truncated(t, spec, within_kl(t, spec))


def _truncated(t: TokenView, spec: LossSpec, keep: Tensor) -> Tensor:
    weight = t.ratio.detach().clamp(max=spec.option("ratio_max"))
    return torch.where(keep, -weight * t.advantages * t.logps, 0.0)


def within_tv(t: TokenView, spec: LossSpec) -> Tensor:
    """[n] whether a token's probability may still move on in the direction of its advantage."""
    moved = t.logps.detach().exp() - t.old.exp()
    low, high = spec.option("divergence_low"), spec.option("divergence_high")
    return ~torch.where(t.advantages > 0, moved > high, moved < -low)


def within_kl(t: TokenView, spec: LossSpec) -> Tensor:
    """[n] the same, by po (lo - l) + (1 - po) ln((1 - po) / (1 - p))."""
    logps, old = t.logps.detach(), t.old
    p, po = logps.exp(), old.exp()
    # a sampler's log-probability of what is certain may come out above 0
    rest, rest_old = ((-torch.expm1(x)).clamp(min=0) for x in (logps, old))
    tiny = 1e-8  # p rounds to 1
    kl = po * (old - logps) + rest_old * ((rest_old + tiny) / (rest + tiny)).log()
    low, high = spec.option("divergence_low"), spec.option("divergence_high")
    gains = (kl > high) & (p > po)
    return ~torch.where(t.advantages > 0, gains, (kl > low) & (p < po))


def prime(t: TokenView, spec: LossSpec) -> Tensor:
    """-rho A inside `within_tv`, plus tau (l - old)^2 everywhere: prime-rl's default."""
    return _penalised(t, spec, within_tv(t, spec))


def prime_ipo(t: TokenView, spec: LossSpec) -> Tensor:
    """-rho A where |p - p_old| <= divergence_high, plus tau (l - old)^2: prime-rl's ipo."""
    return _penalised(t, spec, within_band(t, spec))


def within_band(t: TokenView, spec: LossSpec) -> Tensor:
    """[n] whether a token's probability is near its old one."""
    moved = (t.logps.detach().exp() - t.old.exp()).abs()
    return ~(moved > spec.option("divergence_high"))


def _penalised(t: TokenView, spec: LossSpec, keep: Tensor) -> Tensor:
    policy = torch.where(keep, -t.ratio * t.advantages, 0.0)
    return policy + spec.option("log_ratio_penalty") * t.log_ratio.square()


def dro(t: TokenView, spec: LossSpec) -> Tensor:
    """-A l + tau (l - old)^2: DRO, arXiv 2405.19107, with tau = half its beta."""
    return -t.advantages * t.logps + spec.option("log_ratio_penalty") * t.log_ratio.square()


def covariances(t: TokenView) -> Tensor:
    """[n] (A - mean A) (l - mean l) over the tokens of the call, detached."""
    a, logps = t.advantages, t.logps.detach()
    return (a - a.mean()) * (logps - logps.mean())


def clip_cov(t: TokenView, spec: LossSpec) -> Tensor:
    """`clip`, with no gradient for a few tokens drawn from those of large covariance.

    max(1, floor(cov_ratio n)) of the unclipped tokens with cov_low < covariance < cov_high are
    drawn, by `cov_seed`. arXiv 2505.22617.
    """
    return torch.where(covariance_clipped(t, spec), 0.0, clip(t, spec))


def covariance_clipped(t: TokenView, spec: LossSpec) -> Tensor:
    """[n] the tokens that `clip_cov` draws."""
    covariance, (low, high) = covariances(t), outside_clip(t, spec)
    inside = (covariance > spec.option("cov_low")) & (covariance < spec.option("cov_high"))
    inside &= ~(low | high)
    # one number per position, so that the draw does not depend on the device or its kernels
    generator = torch.Generator("cpu").manual_seed(spec.cov_seed)
    draw = torch.rand(inside.numel(), generator=generator, dtype=torch.float32, device="cpu")
    order = torch.where(inside, draw.to(inside.device), 2.0).argsort()
    chosen = torch.zeros_like(inside)
    chosen[order[: _count(inside, spec)]] = True
    return chosen & inside


def kl_cov(t: TokenView, spec: LossSpec) -> Tensor:
    """-rho A, plus cov_coef |l - old| on the max(1, floor(cov_ratio n)) largest covariances.

    arXiv 2505.22617.
    """
    covariance = covariances(t)
    chosen = torch.zeros_like(covariance, dtype=torch.bool)
    chosen[covariance.argsort(descending=True, stable=True)[: _count(covariance, spec)]] = True
    penalty = spec.option("cov_coef") * t.log_ratio.abs()
    return -t.ratio * t.advantages + torch.where(chosen, penalty, 0.0)


def _count(tokens: Tensor, spec: LossSpec) -> int:
    return max(1, int(spec.option("cov_ratio") * tokens.numel()))


def outside_clip(t: TokenView, spec: LossSpec) -> tuple[Tensor, Tensor]:
    """([n] below the lower bound with A < 0, [n] above the upper one with A > 0)."""
    return outside(t, 1 - spec.epsilon_low, 1 + spec.upper)


def outside_log_clip(t: TokenView, spec: LossSpec) -> tuple[Tensor, Tensor]:
    """The same for bounds on the log-ratio."""
    return outside(t, math.exp(-spec.epsilon_low), math.exp(spec.upper))


def outside_ratio(t: TokenView, spec: LossSpec) -> tuple[Tensor, Tensor]:
    """The same for bounds on the ratio itself."""
    return outside(t, spec.option("ratio_min"), spec.option("ratio_max"))


def outside(t: TokenView, low: float, high: float) -> tuple[Tensor, Tensor]:
    return (t.ratio < low) & (t.advantages < 0), (t.ratio > high) & (t.advantages > 0)


def outside_tv(t: TokenView, spec: LossSpec) -> tuple[Tensor, Tensor]:
    """The tokens that `within_tv` leaves out, by the sign of A."""
    return _left_out(t, within_tv(t, spec))


def outside_kl(t: TokenView, spec: LossSpec) -> tuple[Tensor, Tensor]:
    """The tokens that `within_kl` leaves out, by the sign of A."""
    return _left_out(t, within_kl(t, spec))


def outside_band(t: TokenView, spec: LossSpec) -> tuple[Tensor, Tensor]:
    """The tokens that `prime_ipo` leaves out, by the sign of A."""
    return _left_out(t, within_band(t, spec))


def _left_out(t: TokenView, keep: Tensor) -> tuple[Tensor, Tensor]:
    return ~keep & (t.advantages < 0), ~keep & (t.advantages > 0)
