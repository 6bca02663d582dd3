"""The advantage estimators: groups of rewards in, advantages out. Each formula stands here once.

All of them agree on this: a NaN reward is left out of all statistics and gets exactly 0; so does a
group that teaches nothing, because its valid rewards are all equal (max == min, as seven times 0.1
has a rounding std) or because it has one. Only `reinforce_plus_plus` and `remax`, whose baselines
are not the group's, give such a group something.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """Rewards of P prompts with G completions each, fp64 [P, G]."""

    values: Tensor  # 0 where not valid
    valid: Tensor
    learns: Tensor  # [P, 1]

    @property
    def count(self) -> Tensor:
        """[P, 1] valid rewards, at least 1."""
        return self.valid.sum(1, keepdim=True).clamp_min(1)

    @property
    def centred(self) -> Tensor:
        """r - the mean of its group."""
        return self.values - self.values.sum(1, keepdim=True) / self.count

    def only(self, x: Tensor) -> Tensor:
        """`x` where a completion can learn, else exactly 0."""
        return torch.where(self.valid & self.learns, x, 0.0)


def grpo(
    groups: Groups,
    scale: str = "group",
    baseline: str = "mean",
    eps: float = 1e-4,
    ddof: int = 1,
) -> Tensor:
    """See `group_relative_advantages`."""
    x = groups.centred / _divisor(groups, scale, eps, ddof)
    if baseline == "leave_one_out":  # r_i - mean of the others = (r_i - mean) n / (n - 1)
        x = x * groups.count / (groups.count - 1).clamp_min(1)
    return groups.only(x)


def dr_grpo(groups: Groups) -> Tensor:
    """arXiv 2503.20783."""
    return groups.only(groups.centred)


def rloo(groups: Groups, scale: str = "none", eps: float = 1e-4, ddof: int = 1) -> Tensor:
    """arXiv 2402.14740."""
    return grpo(groups, scale, "leave_one_out", eps, ddof)


def rloo_std(groups: Groups, eps: float = 1e-6) -> Tensor:
    """Baseline and standard deviation (ddof 1) of the other completions, as in NeMo-RL."""
    n = groups.count
    mean = (groups.values.sum(1, keepdim=True) - groups.values) / (n - 1).clamp_min(1)
    x = groups.values - mean
    # of each completion's others, one row each: [P, G, G]
    itself = torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
    others = groups.valid[:, None] & ~itself
    deviation = torch.where(others, groups.values[:, None] - mean[:, :, None], 0.0)
    std = (deviation.square().sum(2) / (n - 2).clamp_min(1)).sqrt()
    high = torch.where(others, groups.values[:, None], -torch.inf).amax(2)
    low = torch.where(others, groups.values[:, None], torch.inf).amin(2)
    return groups.only(torch.where(high > low, x / (std + eps), x))


def reinforce_plus_plus(
    groups: Groups, lengths: Tensor | None = None, eps: float = 1e-4, ddof: int = 1
) -> Tensor:
    """arXiv 2501.03262, for one reward at the end and no discount."""
    return whitened(groups.values, groups.valid, lengths, eps, ddof)


def reinforce_plus_plus_baseline(
    groups: Groups, lengths: Tensor | None = None, eps: float = 1e-4, ddof: int = 1
) -> Tensor:
    """arXiv 2501.03262, with the group's mean as the baseline."""
    centred = groups.only(groups.centred)
    return groups.only(whitened(centred, groups.valid, lengths, eps, ddof))


def opo(groups: Groups, lengths: Tensor) -> Tensor:
    """arXiv 2505.23585: the baseline of least variance if a gradient's size is its length."""
    weights = torch.where(groups.valid, lengths, 0.0)
    total = weights.sum(1, keepdim=True)
    baseline = (weights * groups.values).sum(1, keepdim=True) / torch.where(total > 0, total, 1.0)
    return groups.only(groups.values - baseline)


def remax(groups: Groups, greedy_rewards: Tensor) -> Tensor:
    """arXiv 2310.10505."""
    x = groups.values - greedy_rewards[:, None]
    return torch.where(groups.valid & ~x.isnan(), x, 0.0)


def pass_at_k(groups: Groups, scale: str = "group", eps: float = 1e-4, ddof: int = 1) -> Tensor:
    """arXiv 2503.19595: what the best completion adds to the best of the others."""
    candidates = torch.where(groups.valid, groups.values, -torch.inf)
    width = candidates.shape[1]
    if width < 2:
        return torch.zeros_like(candidates)
    best = candidates.topk(2, 1)
    gain = (best.values[:, :1] - best.values[:, 1:]) / _divisor(groups, scale, eps, ddof)
    x = torch.zeros_like(candidates).scatter(1, best.indices[:, :1], gain)
    return groups.only(x)


def maxrl(groups: Groups, eps: float = 1e-6) -> Tensor:
    """arXiv 2602.02710, for rewards >= 0: each success counts as much as its prompt is hard."""
    if groups.values.device.type == "cpu" and bool((groups.values < 0).any()):
        raise ValueError("rewards must be >= 0 with estimator='maxrl': it divides by their mean")
    mean = groups.values.sum(1, keepdim=True) / groups.count
    return groups.only(groups.centred / (mean + eps))


def gpg(groups: Groups) -> Tensor:
    """arXiv 2504.02546: scaled up by the share of completions with a reward that is not 0."""
    scored = groups.valid.sum() / groups.values.count_nonzero().clamp_min(1)
    return groups.only(groups.centred * scored)


ESTIMATORS: dict[str, Callable[..., Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "rloo_std": rloo_std,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "opo": opo,
    "remax": remax,
    "pass_at_k": pass_at_k,
    "maxrl": maxrl,
    "gpg": gpg,
}


def _divisor(groups: Groups, scale: str, eps: float, ddof: int) -> Tensor | float:
    if scale == "none":
        return 1.0
    if scale == "group":
        return _std(groups.centred, groups.valid, 1, ddof) + eps
    values, valid = groups.values.reshape(1, -1), groups.valid.reshape(1, -1)
    mean = values.sum(1, keepdim=True) / valid.sum(1, keepdim=True).clamp_min(1)
    return _std(values - mean, valid, 1, ddof) + eps


def _std(centred: Tensor, valid: Tensor, dim: int, ddof: int) -> Tensor:
    squares = torch.where(valid, centred, 0.0).square().sum(dim, keepdim=True)
    return (squares / (valid.sum(dim, keepdim=True) - ddof).clamp_min(1)).sqrt()


def whitened(x: Tensor, valid: Tensor, lengths: Tensor | None, eps: float, ddof: int) -> Tensor:
    """(x - mean) / (std + eps) over all valid ones, 0 elsewhere and where all are equal.

    With `lengths`, each counts as often as it has tokens.
    """
    weights = torch.where(valid, torch.ones_like(x) if lengths is None else lengths, 0.0)
    total = weights.sum().clamp_min(1)
    low = torch.where(weights > 0, x, torch.inf).amin() if x.numel() else x.sum()
    high = torch.where(weights > 0, x, -torch.inf).amax() if x.numel() else x.sum()
    centred = x - (weights * x).sum() / total
    std = ((weights * centred.square()).sum() / (total - ddof).clamp_min(1)).sqrt()
    return torch.where(valid & (high > low), centred / (std + eps), 0.0)


def equal_groups(grouped: Tensor, span: float = 0.0) -> Tensor:
    """[P] of [P, G]: the valid rewards of a group span at most `span`, or it has none."""
    # max == min rather than std == 0: seven times 0.1 has a rounding std
    nan = grouped.isnan()
    if grouped.shape[1] == 0:
        return nan.all(1)
    low = torch.where(nan, torch.inf, grouped).amin(1)
    high = torch.where(nan, -torch.inf, grouped).amax(1)
    return high - low <= span
