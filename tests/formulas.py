"""The losses once more, in float64 on padded [B, T] tensors, as the papers write them.

Nothing here calls the package. Sums over a sequence are sums over a row under its mask, weights are
counted with loops, and each correction is spelled out, so that a mistake of the package in its flat
vectors, segments, tables or detached parts shows as a difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Batch:
    """Everything a loss may need, [B, T] float64; the log-probabilities differentiable."""

    logps: Tensor
    mask: Tensor
    advantages: Tensor  # [B, T]
    old: Tensor | None = None
    ref: Tensor | None = None
    sampler: Tensor | None = None
    given_ratio: Tensor | None = None  # [B, T]
    entropy: Tensor | None = None
    groups: list[int] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def option(self, name: str, default: Any) -> Any:
        value = self.options.get(name)
        return default if value is None else value

    @property
    def count(self) -> Tensor:
        return self.mask.sum(1, keepdim=True).clamp(min=1)

    def total(self, x: Tensor) -> Tensor:
        """[B, 1] sums of rows, over the tokens that count."""
        return torch.where(self.mask, x, 0.0).sum(1, keepdim=True)

    def log_ratio(self) -> Tensor:
        """[B, T] l - lo."""
        old = self.logps.detach() if self.old is None else self.old
        if self.options.get("sampling_correction") == "bypass":
            old = torch.where(self.sampler.isnan(), self.logps.detach(), self.sampler)
        return self.logps - old

    def old_or_live(self) -> Tensor:
        return (self.logps - self.log_ratio()).detach()

    def clamp(self, x: Tensor) -> Tensor:
        limit = self.options.get("log_ratio_clamp", 20.0)
        return x if limit is None else torch.clamp(x, -limit, limit)

    def ratio(self, level: str) -> Tensor:
        """[B, T] the ratio at a level."""
        d = self.log_ratio()
        if level == "sequence":
            d = (self.total(d) / self.count).expand_as(d)
        elif level == "sequence_sum":
            d = self.total(d).expand_as(d)
        elif level == "sequence_token":
            d = (self.total(d) / self.count).detach() + self.logps - self.logps.detach()
        return torch.exp(self.clamp(d))


def ppo_clip(b: Batch, level: str) -> Tensor:
    r, a = b.ratio(level), b.advantages
    low = b.option("epsilon_low", 0.2)
    high = b.option("epsilon_high", low)
    plain = -r * a
    if b.options.get("delta"):
        plain = torch.where(r > b.options["delta"], -b.options["delta"] * a, plain)
    clipped = -torch.clamp(r, 1 - low, 1 + high) * a
    loss = torch.maximum(plain, clipped)
    if b.options.get("dual_clip"):
        c = b.options["dual_clip"]
        loss = torch.where((a < 0) & (loss > -c * a), -c * a, loss)
    return loss


def cispo(b: Batch, level: str) -> Tensor:
    r = b.ratio(level).detach()
    weight = torch.clamp(r, b.option("ratio_min", 0.0), b.option("ratio_max", 5.0))
    return -weight * b.advantages * b.logps


def sapo(b: Batch, level: str) -> Tensor:
    r, a = b.ratio(level), b.advantages
    out = torch.zeros_like(r)
    for chosen, tau in (
        (a > 0, b.option("sapo_temperature_pos", 1.0)),
        (a <= 0, b.option("sapo_temperature_neg", 1.05)),
    ):
        gate = 4 / tau / (1 + torch.exp(-tau * (r - 1)))
        out = out + torch.where(chosen, -gate * a, 0.0)
    return out


def vespo(b: Batch, level: str) -> Tensor:
    floor = math.log(1e-8)
    log_w = b.total(torch.clamp(b.log_ratio().detach(), -20, 20))
    weight = importance_weight(b)
    if weight is not None:
        log_w = log_w + b.total(torch.clamp(torch.log(weight), floor, 20))
    log_w = torch.clamp(log_w, floor, 20).expand_as(b.logps)
    gains = b.advantages >= 0
    k, lam = torch.empty_like(log_w), torch.empty_like(log_w)
    k[gains], k[~gains] = b.option("vespo_k_pos", 2.0), b.option("vespo_k_neg", 3.0)
    lam[gains], lam[~gains] = b.option("vespo_lambda_pos", 3.0), b.option("vespo_lambda_neg", 2.0)
    phi = torch.exp(lam) * torch.exp(log_w) ** k * torch.exp(-lam * torch.exp(log_w))
    return -phi * b.advantages * b.logps


def gmpo(b: Batch, level: str) -> Tensor:
    d, a = b.log_ratio(), b.advantages
    low = b.option("epsilon_low", 0.2)
    high = b.option("epsilon_high", low)
    d = torch.where((a > 0) & (d > high), torch.full_like(d, high), d)
    d = torch.where((a < 0) & (d < -low), torch.full_like(d, -low), d)
    return -a * torch.exp(b.clamp(b.total(d) / b.count))


def reinforce(b: Batch, level: str) -> Tensor:
    return -b.advantages * b.logps


def importance_sampling(b: Batch, level: str) -> Tensor:
    return -b.advantages * b.ratio(level)


def masked_importance_sampling(b: Batch, level: str) -> Tensor:
    r = b.ratio(level).detach()
    low = b.option("epsilon_low", 0.2)
    keep = (r > 1 - low) & (r < 1 + b.option("epsilon_high", low))
    return -torch.where(keep, r, 0.0) * b.advantages * b.logps


def _tv_mask(b: Batch) -> Tensor:
    change = b.logps.detach().exp() - b.old_or_live().exp()
    up, down = b.option("divergence_high", 0.2), b.option("divergence_low", 0.2)
    return torch.where(b.advantages > 0, change <= up, change >= -down)


def dppo_tv(b: Batch, level: str) -> Tensor:
    r = torch.clamp(b.ratio("token").detach(), max=b.option("ratio_max", 20.0))
    return -b.advantages * r * b.logps * _tv_mask(b)


def dppo_kl(b: Batch, level: str) -> Tensor:
    lp, lo = b.logps.detach(), b.old_or_live()
    p, po = lp.exp(), lo.exp()
    rest, rest_o = torch.clamp(1 - p, min=0), torch.clamp(1 - po, min=0)
    kl = po * (lo - lp) + rest_o * torch.log((rest_o + 1e-8) / (rest + 1e-8))
    up, down = b.option("divergence_high", 0.05), b.option("divergence_low", 0.05)
    keep = torch.where(b.advantages > 0, (kl <= up) | (p <= po), (kl <= down) | (p >= po))
    r = torch.clamp(b.ratio("token").detach(), max=b.option("ratio_max", 20.0))
    return -b.advantages * r * b.logps * keep


def prime(b: Batch, level: str) -> Tensor:
    penalty = b.option("log_ratio_penalty", 1e-3) * b.log_ratio() ** 2
    return -b.advantages * b.ratio("token") * _tv_mask(b) + penalty


def prime_ipo(b: Batch, level: str) -> Tensor:
    change = (b.logps.detach().exp() - b.old_or_live().exp()).abs()
    keep = change <= b.option("divergence_high", 0.1)
    penalty = b.option("log_ratio_penalty", 1e-3) * b.log_ratio() ** 2
    return -b.advantages * b.ratio("token") * keep + penalty


def dro(b: Batch, level: str) -> Tensor:
    beta = 2 * b.options["log_ratio_penalty"]
    return -(b.advantages * b.logps - 0.5 * beta * b.log_ratio() ** 2)


def _covariance(b: Batch) -> Tensor:
    """[B, T], minus infinity where masked."""
    a, lp = b.advantages[b.mask], b.logps.detach()[b.mask]
    cov = (b.advantages - a.mean()) * (b.logps.detach() - lp.mean())
    return torch.where(b.mask, cov, -math.inf)


def clip_cov(b: Batch, level: str) -> Tensor:
    """With cov_ratio=1, where every candidate is drawn."""
    assert b.options["cov_ratio"] == 1.0
    r, a, cov = b.ratio("token").detach(), b.advantages, _covariance(b)
    low = b.option("epsilon_low", 0.2)
    high = b.option("epsilon_high", low)
    clipped = ((a > 0) & (r > 1 + high)) | ((a < 0) & (r < 1 - low))
    drawn = (cov > b.option("cov_low", 1.0)) & (cov < b.option("cov_high", 5.0)) & ~clipped
    return ppo_clip(b, "token") * ~drawn


def kl_cov(b: Batch, level: str) -> Tensor:
    cov = _covariance(b).flatten()
    number = max(1, math.floor(b.option("cov_ratio", 2e-4) * int(b.mask.sum())))
    chosen = torch.zeros_like(cov, dtype=torch.bool)
    chosen[cov.topk(number).indices] = True
    penalty = b.option("cov_coef", 1.0) * b.log_ratio().abs() * chosen.view_as(b.mask)
    return -b.advantages * b.ratio("token") + penalty


POLICY: dict[str, tuple[Callable[[Batch, str], Tensor], str, str | None]] = {
    # name: formula, weights, level where it is fixed
    "grpo": (ppo_clip, "sequence_mean", None),
    "bnpo": (ppo_clip, "token_mean", None),
    "dr_grpo": (ppo_clip, "fixed_length", None),
    "dapo": (ppo_clip, "token_mean", None),
    "gspo": (ppo_clip, "sequence_mean", "sequence"),
    "gspo_token": (ppo_clip, "sequence_mean", "sequence_token"),
    "luspo": (ppo_clip, "sequence_sum", "sequence"),
    "rloo": (ppo_clip, "sequence_mean", "sequence_sum"),
    "cispo": (cispo, "token_mean", None),
    "sapo": (sapo, "sequence_mean", None),
    "vespo": (vespo, "token_mean", "token"),
    "gmpo": (gmpo, "sequence_mean", "token"),
    "reinforce": (reinforce, "token_mean", "token"),
    "importance_sampling": (importance_sampling, "token_mean", None),
    "masked_importance_sampling": (masked_importance_sampling, "token_mean", None),
    "dppo_tv": (dppo_tv, "token_mean", "token"),
    "dppo_kl": (dppo_kl, "token_mean", "token"),
    "prime": (prime, "token_mean", "token"),
    "prime_ipo": (prime_ipo, "token_mean", "token"),
    "dro": (dro, "token_mean", "token"),
    "clip_cov": (clip_cov, "token_mean", "token"),
    "kl_cov": (kl_cov, "token_mean", "token"),
}


# ---- train-inference corrections


def _gap(b: Batch) -> Tensor:
    """[B, T] old - sampler, 0 where unknown and where masked."""
    trained = b.logps.detach()
    if b.old is not None and b.options.get("sampling_correction") != "bypass":
        trained = b.old
    d = trained - b.sampler
    return torch.where(b.sampler.isnan() | ~b.mask, 0.0, d)


def importance_weight(b: Batch) -> Tensor | None:
    mode = b.options.get("sampling_correction")
    if mode in (None, "monitor", "bypass"):
        return b.given_ratio
    d = _gap(b)
    kind, how = mode.split("_")
    if kind == "sequence":
        d = d.sum(1, keepdim=True).expand_as(d)
    elif kind == "geometric":
        d = (d.sum(1, keepdim=True) / b.count).expand_as(d)
    w = torch.exp(b.clamp(d))
    low, high = b.option("sampling_ratio_min", 0.0), b.option("sampling_ratio_max", 3.0)
    if how == "truncate":
        return torch.clamp(w, low, high)
    return torch.where((w < low) | (w > high), 0.0, w)


def kept(b: Batch) -> Tensor:
    """[B, T] false where a criterion rejects a token."""
    keep = torch.ones_like(b.mask)
    if b.sampler is None:
        return keep
    d = b.clamp(_gap(b))
    for name, bound in (b.options.get("rejection") or {}).items():
        where, k = name.rsplit("_", 1)
        x = {"k1": -d, "k2": d**2 / 2, "k3": torch.exp(d) - 1 - d}[k]
        if where != "token":
            row = {
                "seq_sum": lambda x: b.total(x),
                "seq_mean": lambda x: b.total(x) / b.count,
                "seq_max": lambda x: torch.where(b.mask, x, 0.0).amax(1, keepdim=True),
            }[where](x)
            x = row.expand_as(x)
        if k == "k1":
            low, high = bound if isinstance(bound, tuple) else (1 / bound, bound)
            keep &= (torch.exp(x) >= low) & (torch.exp(x) <= high)
        else:
            keep &= x <= bound
    low, high = b.options.get("veto_ratio_min"), b.options.get("veto_ratio_max")
    w = torch.exp(d)
    outlier = torch.zeros_like(b.mask)
    if low is not None:
        outlier |= w < low
    if high is not None:
        outlier |= w > high
    return keep & ~(outlier & b.mask).any(1, keepdim=True)


# ---- KL, masks, bonuses


def kl(b: Batch, level: str) -> Tensor:
    name = b.option("kl_estimator", "k3")
    d = b.ref - b.logps
    kind = name[:-1] if name.endswith("+") else name.removesuffix("_score")
    if kind == "k3":
        inside = b.clamp(d)
        value = torch.exp(inside) - inside - 1
    else:
        value = {"k1": -d, "k2": d**2 / 2, "abs": d.abs()}[kind]
    limit = b.options.get("kl_clamp")
    if limit is not None:
        value = torch.clamp(value, -limit, limit)
    if name.endswith("+"):  # value of the estimator, gradient of k2
        square = d**2 / 2
        value = value.detach() + square - square.detach()
    if name.endswith("_score"):
        value = value * torch.exp(b.logps - b.logps.detach())
    return value * b.ratio(level) if b.options.get("use_bias_correction_kl") else value


def active(b: Batch) -> Tensor:
    """[B, T] where the policy term acts."""
    out = chosen(b)
    threshold = b.options.get("off_policy_mask_threshold")
    if threshold is not None:
        x = b.old_or_live() if b.sampler is None else b.sampler
        gap = torch.where(x.isnan(), 0.0, x - b.logps.detach())
        out &= (b.advantages >= 0) | (b.total(gap) / b.count <= threshold)
    return out


def chosen(b: Batch) -> Tensor:
    """[B, T] where the entropy bonus acts, and the policy term if nothing else is against it."""
    share = b.option("top_entropy_quantile", 1.0)
    if share >= 1:
        return torch.ones_like(b.mask)
    h = b.entropy.detach()
    return h >= torch.quantile(h[b.mask], 1 - share)


def token_losses(b: Batch) -> Tensor:
    """[B, T] the loss of every token."""
    formula, _, fixed = POLICY[b.option("loss_type", "dapo")]
    level = fixed or b.option("importance_sampling_level", "token")
    loss = formula(b, level)
    weight = importance_weight(b)
    if weight is not None and formula is not vespo:
        loss = loss * weight
    acts = active(b)
    loss = torch.where(acts, loss, 0.0)
    if b.option("beta", 0.0):
        loss = loss + b.options["beta"] * kl(b, level)
    loss = loss - b.option("positive_nll_coef", 0.0) * torch.where(b.advantages > 0, b.logps, 0.0)
    if b.option("entropy_coef", 0.0):
        loss = loss - b.options["entropy_coef"] * torch.where(chosen(b), b.entropy, 0.0)
    return torch.where(kept(b), loss, 0.0)


# ---- reductions


def weights(b: Batch) -> Tensor:
    """[B, T] w_t, counted row by row."""
    scheme = b.option("aggregation", POLICY[b.option("loss_type", "dapo")][1])
    rows, lengths = len(b.mask), b.mask.sum(1).tolist()
    tokens, filled = sum(lengths), sum(n > 0 for n in lengths)
    number = float(b.option("num_sequences", 0)) or None
    out = torch.zeros_like(b.logps)
    for row, n in enumerate(lengths):
        if scheme.startswith("nonempty_"):
            over, kind = number or max(filled, 1), scheme.removeprefix("nonempty_")
        else:
            over, kind = number or rows, scheme
        if kind == "sequence_mean":
            value = 1 / (max(n, 1) * over)
        elif kind == "sequence_sum":
            value = 1 / over
        elif kind == "fixed_length":
            value = 1 / (b.options["max_completion_length"] * over)
        elif kind == "token_sum":
            value = 1.0
        elif kind == "local_token_mean":
            value = 1 / max(tokens, 1)
        elif kind == "token_mean":
            value = 1 / float(b.option("num_items_in_batch", max(tokens, 1)))
        elif kind == "group_mean":
            mates = [m for m, g in zip(lengths, b.groups, strict=True) if g == b.groups[row]]
            value = 1 / (max(sum(mates), 1) * len(set(b.groups)))
        else:
            raise AssertionError(scheme)
        out[row] = value
    return torch.where(b.mask, out, 0.0)


def loss(b: Batch, given_weights: Tensor | None = None) -> Tensor:
    """sum over the counted tokens of w_t loss_t."""
    w = weights(b) if given_weights is None else given_weights
    return torch.where(b.mask, w * token_losses(b), 0.0).sum()
