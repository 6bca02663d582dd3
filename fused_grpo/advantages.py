"""Advantages: how good each completion was, beside the others of its prompt or of the batch.

Every estimator is one function on groups of rewards and one row of `ESTIMATORS`. All of them agree
on this: a NaN reward is left out of all statistics and gets exactly 0; so does a group that teaches
nothing, because its valid rewards are all equal (max == min, as seven times 0.1 has a rounding std)
or because it has one. Only `reinforce_plus_plus` and `remax`, whose baselines are not the group's,
give such a group something.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fused_grpo.checks import check_choice, check_number, check_tensor, wide_dtype

AGGREGATIONS = ("sum_then_normalize", "normalize_then_sum")


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
    options = {"scale": scale, "baseline": baseline, "eps": eps, "ddof": ddof}
    return compute_advantages(rewards, num_generations, estimator="grpo", **options)


def compute_advantages(
    rewards: Tensor, num_generations: int | None = None, *, estimator: str = "grpo", **options: Any
) -> Tensor:
    """Advantages by the name of their estimator; the names are those of `ESTIMATORS`.

    Args:
        rewards, num_generations: as for `group_relative_advantages`.
        estimator: with n valid rewards in a group, their mean m and standard deviation s,

            grpo        (r - m) / (s + eps); see `group_relative_advantages` for its options
            dr_grpo     r - m
            rloo        r - mean of the others; takes `scale`, default "none"
            rloo_std    (r - mean of the others) / (their std + eps), undivided where that std is 0
            reinforce_plus_plus           (r - mean) / (std + eps) over the batch
            reinforce_plus_plus_baseline  r - m, then the same over the batch
            opo         r - sum of lengths * r / sum of lengths
            remax       r - the reward of the greedy completion
            pass_at_k   (r_max - r_second) / (s + eps) for the best completion, 0 for the others;
                        takes `scale`
            maxrl       (r - m) / (m + eps), for rewards >= 0
            gpg         (r - m) * B / (rewards that are not 0)

        options: those of the estimator: `eps` (1e-4; maxrl 1e-6), `ddof` (1), `scale`, `baseline`;
            `lengths`, counted tokens in the shape of `rewards`, which opo needs and the
            reinforce_plus_plus ones take for statistics over tokens instead of completions;
            `greedy_rewards` [P] of remax.

    Returns:
        As `group_relative_advantages`.

    Raises:
        ValueError, TypeError: as there; an unknown estimator, or an option that it does not take.
    """
    grouped = _grouped(rewards, num_generations)
    check_choice("estimator", estimator, ESTIMATORS)
    function = ESTIMATORS[estimator]
    known = list(inspect.signature(function).parameters.values())[1:]
    for name in options:
        if name not in [p.name for p in known]:
            raise ValueError(
                f"{name} does not apply to estimator={estimator!r}, which takes "
                f"{', '.join(p.name for p in known) or 'no options'}"
            )
    for parameter in known:
        if parameter.default is parameter.empty and options.get(parameter.name) is None:
            raise ValueError(f"estimator={estimator!r} needs {parameter.name}")
    _check_options(options, grouped)
    valid = ~grouped.isnan()
    groups = Groups(torch.where(valid, grouped, 0.0), valid, ~_equal_groups(grouped)[:, None])
    result = function(groups, **options)
    return result.view(rewards.shape).to(_result_dtype(rewards))


def multi_reward_advantages(
    rewards: Tensor,
    num_generations: int,
    *,
    weights: Sequence[float] | Tensor | None = None,
    aggregation: str = "sum_then_normalize",
    estimator: str = "grpo",
    **options: Any,
) -> Tensor:
    """Advantages [B] of completions with R rewards each, [B, R]; NaN where one does not apply.

    Args:
        rewards: [P * G, R], the completions of a prompt next to each other.
        weights: R numbers, default all 1.
        aggregation: "sum_then_normalize": the estimator on the weighted sums of what is valid.
            "normalize_then_sum" (GDPO, arXiv 2601.05242): the estimator on each reward, the
            weighted sum of the results, and (x - mean) / (std + 1e-4) of that over the batch, so
            that no reward drowns another that varies less.
        estimator, options: as for `compute_advantages`; "gdpo" is grpo, normalised then summed.

    Raises:
        ValueError, TypeError: as `compute_advantages`.
    """
    check_tensor("rewards", rewards, None, floating=None)
    if rewards.dim() != 2:
        raise ValueError(f"rewards must be [P * G, R], not {list(rewards.shape)}")
    if estimator == "gdpo":
        estimator, aggregation = "grpo", "normalize_then_sum"
    check_choice("aggregation", aggregation, AGGREGATIONS)
    w = _weights(weights, rewards)
    if aggregation == "sum_then_normalize":
        total = weighted_sum(rewards, w)
        return compute_advantages(total, num_generations, estimator=estimator, **options)
    parts = [
        compute_advantages(column, num_generations, estimator=estimator, **options)
        for column in rewards.unbind(1)
    ]
    dtype = wide_dtype(rewards)
    total = (torch.stack(parts, 1).to(dtype) * w.to(dtype)).sum(1, keepdim=True)
    valid = ~rewards.isnan().all(1, keepdim=True)
    equal = [_equal_groups(_grouped(column, num_generations)) for column in rewards.unbind(1)]
    learns = ~torch.stack(equal, 1).all(1).repeat_interleave(num_generations)[:, None]
    result = _whitened(total, valid, None, 1e-4, 1)
    return torch.where(valid & learns, result, 0.0)[:, 0].to(_result_dtype(rewards))


def weighted_sum(rewards: Tensor, weights: Sequence[float] | Tensor | None = None) -> Tensor:
    """[B, R] -> [B]: the weighted sum of the valid ones, NaN where there are none."""
    total = (rewards * _weights(weights, rewards)).nansum(1)
    return torch.where(rewards.isnan().all(1), torch.nan, total)


def zero_variance_fraction(rewards: Tensor, num_generations: int | None = None) -> Tensor:
    """Share of groups that teach nothing, all valid rewards being equal or at most one (0-d).

    Arguments as for `group_relative_advantages`.
    """
    equal = _equal_groups(_grouped(rewards, num_generations))
    return equal.float().sum() / max(equal.numel(), 1)


# ---- the estimators: groups of rewards -> [P, G] ------------------------------------------------


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
    return _whitened(groups.values, groups.valid, lengths, eps, ddof)


def reinforce_plus_plus_baseline(
    groups: Groups, lengths: Tensor | None = None, eps: float = 1e-4, ddof: int = 1
) -> Tensor:
    """arXiv 2501.03262, with the group's mean as the baseline."""
    centred = groups.only(groups.centred)
    return groups.only(_whitened(centred, groups.valid, lengths, eps, ddof))


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


# ---- statistics ---------------------------------------------------------------------------------


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


def _whitened(x: Tensor, valid: Tensor, lengths: Tensor | None, eps: float, ddof: int) -> Tensor:
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


def _equal_groups(grouped: Tensor) -> Tensor:
    # max == min rather than std == 0: seven times 0.1 has a rounding std
    nan = grouped.isnan()
    if grouped.shape[1] == 0:
        return nan.all(1)
    low = torch.where(nan, torch.inf, grouped).amin(1)
    high = torch.where(nan, -torch.inf, grouped).amax(1)
    return high <= low


# ---- arguments ----------------------------------------------------------------------------------


def _result_dtype(rewards: Tensor) -> torch.dtype:
    return torch.float64 if rewards.dtype == torch.float64 else torch.float32


def _grouped(rewards: Tensor, num_generations: int | None) -> Tensor:
    """[P, G] in fp64 where the device has it: the squares of 1e30 are still numbers."""
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
    values = rewards.detach().to(wide_dtype(rewards))
    if values.device.type == "cpu" and values.isinf().any():
        raise ValueError("rewards must be finite, or NaN where a completion could not be scored")
    return values.reshape(-1, num_generations)


def _check_options(options: dict[str, Any], grouped: Tensor) -> None:
    """Checks what is given; puts `lengths` and `greedy_rewards` into the shape of the groups."""
    if "scale" in options:
        check_choice("scale", options["scale"], ("group", "batch", "none"))
    if "baseline" in options:
        check_choice("baseline", options["baseline"], ("mean", "leave_one_out"))
    if "ddof" in options:
        check_number("ddof", options["ddof"], lambda n: n in (0, 1), "0 or 1")
    if "eps" in options:
        check_number("eps", options["eps"], lambda x: 0 <= x < math.inf, ">= 0")
    for name, shape in (("lengths", grouped.shape), ("greedy_rewards", grouped.shape[:1])):
        value = options.get(name)
        if value is None:
            continue
        check_tensor(name, value, grouped.device, floating=None)
        if value.numel() != shape.numel() or value.dim() > 2:
            raise ValueError(
                f"{name} has shape {list(value.shape)}: with rewards of {grouped.shape[0]} groups "
                f"of {grouped.shape[1]} it must be {list(shape)}"
            )
        options[name] = value.detach().to(grouped.dtype).reshape(shape)
    lengths = options.get("lengths")
    if lengths is not None and lengths.device.type == "cpu" and not (lengths >= 0).all():
        raise ValueError("lengths must be >= 0")


def _weights(weights: Sequence[float] | Tensor | None, rewards: Tensor) -> Tensor:
    """[R] in the dtype of the rewards, at least fp32."""
    dtype, count = _result_dtype(rewards), rewards.shape[1]
    if weights is None:
        return torch.ones(count, dtype=dtype, device=rewards.device)
    w = torch.as_tensor(weights, dtype=dtype, device=rewards.device)
    if w.shape != (count,) or not w.isfinite().all():
        raise ValueError(f"weights {weights} must be {count} finite numbers, one per reward")
    return w
