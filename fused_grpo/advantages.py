"""Group-relative advantages: how good each completion was among those of its prompt."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fused_grpo.checks import check_choice, check_number, check_tensor


def group_relative_advantages(
    rewards: Tensor,
    num_generations: int | None = None,
    *,
    scale: str = "group",
    baseline: str = "mean",
    eps: float = 1e-4,
    ddof: int = 1,
) -> Tensor:
    """(r - baseline) / (std + eps) within each prompt's group (GRPO, arXiv 2402.03300, equation 4).

    Args:
        rewards: [P, G], or flat [P * G] with the completions of a prompt next to each other.
        num_generations: G; required for flat rewards, checked against [P, G] ones.
        scale: what divides: "group", the std of the group; "batch", the std of all valid rewards;
            "none", nothing (Dr. GRPO, arXiv 2503.20783).
        baseline: "mean" of the group, or "leave_one_out", the mean of its other rewards (RLOO,
            arXiv 2402.14740).
        eps: added to the std.
        ddof: of the std: 1 divides by G - 1 (as TRL does), 0 by G.

    Returns:
        The advantages in the shape of `rewards`, fp32 (fp64 for fp64 rewards). A group whose valid
        rewards are all equal, and a group with a single valid one, give exactly 0. A NaN reward is
        left out of all statistics and gets 0.

    Raises:
        ValueError: unknown `scale` or `baseline`, a size that G does not divide, an infinite
            reward.
        TypeError: rewards that are not a tensor of numbers.
    """
    grouped = _grouped(rewards, num_generations)
    check_choice("scale", scale, ("group", "batch", "none"))
    check_choice("baseline", baseline, ("mean", "leave_one_out"))
    check_number("ddof", ddof, lambda n: n in (0, 1), "0 or 1")
    check_number("eps", eps, lambda x: 0 <= x < math.inf, ">= 0")
    valid, learns = ~grouped.isnan(), ~_equal_groups(grouped)
    values = torch.where(valid, grouped, 0.0)
    count = valid.sum(1, keepdim=True)
    centred = values - values.sum(1, keepdim=True) / count.clamp_min(1)
    if scale == "none":
        divisor = torch.ones_like(centred)
    else:
        spread = (
            _std(centred, valid, 1, ddof) if scale == "group" else _batch_std(values, valid, ddof)
        )
        divisor = spread + eps
    if baseline == "leave_one_out":  # r_i - mean of the others = (r_i - mean) n / (n - 1)
        centred = centred * count / (count - 1).clamp_min(1)
    advantages = torch.where(valid & learns[:, None], centred / divisor, 0.0)
    return advantages.view(rewards.shape)


def zero_variance_fraction(rewards: Tensor, num_generations: int | None = None) -> Tensor:
    """Share of groups that teach nothing, all valid rewards being equal or at most one (0-d).

    Arguments as for `group_relative_advantages`.
    """
    equal = _equal_groups(_grouped(rewards, num_generations))
    return equal.float().sum() / max(equal.numel(), 1)


def _grouped(rewards: Tensor, num_generations: int | None) -> Tensor:
    check_tensor("rewards", rewards, None, floating=None)
    if rewards.dim() not in (1, 2):
        raise ValueError(f"rewards must be [P, G] or [P * G], not {list(rewards.shape)}")
    if num_generations is None:
        if rewards.dim() == 1:
            raise ValueError(f"rewards are flat {list(rewards.shape)}: give num_generations")
        num_generations = rewards.shape[1]
    if rewards.dim() == 2 and rewards.shape[1] != num_generations:
        raise ValueError(
            f"rewards {list(rewards.shape)} hold groups of {rewards.shape[1]}, "
            f"num_generations={num_generations}"
        )
    if num_generations < 1 or rewards.numel() % num_generations:
        raise ValueError(
            f"{rewards.numel()} rewards cannot be divided into groups of "
            f"num_generations={num_generations}"
        )
    values = rewards.detach().to(torch.float64 if rewards.dtype == torch.float64 else torch.float32)
    if values.device.type == "cpu" and values.isinf().any():
        raise ValueError("rewards must be finite, or NaN where a completion could not be scored")
    return values.reshape(-1, num_generations)


def _equal_groups(grouped: Tensor) -> Tensor:
    # max == min rather than std == 0: seven times 0.1 has a rounding std
    nan = grouped.isnan()
    if grouped.shape[1] == 0:
        return nan.all(1)
    low = torch.where(nan, torch.inf, grouped).amin(1)
    high = torch.where(nan, -torch.inf, grouped).amax(1)
    return high <= low


def _std(centred: Tensor, valid: Tensor, dim: int, ddof: int) -> Tensor:
    squares = torch.where(valid, centred, 0.0).square().sum(dim, keepdim=True)
    return (squares / (valid.sum(dim, keepdim=True) - ddof).clamp_min(1)).sqrt()


def _batch_std(values: Tensor, valid: Tensor, ddof: int) -> Tensor:
    flat, keep = values.reshape(1, -1), valid.reshape(1, -1)
    mean = flat.sum(1, keepdim=True) / keep.sum(1, keepdim=True).clamp_min(1)
    return _std(flat - mean, keep, 1, ddof)
