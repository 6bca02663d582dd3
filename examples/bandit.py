"""A bandit laboratory: one prompt, four answers, and what a GRPO loss makes of a policy over them.

    python examples/bandit.py [--epsilon 0.2] [--beta 0.3] [--entropy-coef 0.1] [--plot FILE]

An answer is one token, the policy a head [4, 1] behind a hidden state of 1. Every step samples a
group, standardises its rewards within the group and takes some updates with clipped ratios, a KL
to the policy it started from, and an entropy bonus. Things to try (means over 12 seeds):

    (nothing)                      the best answer ends at 0.99
    --beta 0.3, --beta 1           at 0.92, at 0.68: the KL holds it where it started
    --updates 20                   the first group moves the policy by a KL of 0.03
    ... --epsilon 0.99 --epsilon-high 1e6      by 0.61: nothing is clipped
    ... --samples 4 --learning-rate 5          two seeds of twelve end at a wrong answer for good,
                                               as a group of equal answers teaches nothing
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from fused_grpo import group_relative_advantages, grpo_loss

REWARDS = torch.tensor([0.2, 0.9, 0.4, 0.1])
ANSWERS = "ABCD"
BLOCKS = " ▏▎▍▌▋▊▉█"


@dataclass
class History:
    """A row per step: what the policy was, and the last update's loss by both definitions."""

    policy: list[Tensor] = field(default_factory=list)  # [4] each
    reward: list[float] = field(default_factory=list)  # expected
    entropy: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)  # to the start
    clipped: list[float] = field(default_factory=list)  # share of the samples
    fused: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)

    def add(self, weight: Tensor, start: Tensor, **rest: float) -> None:
        log_p, log_start = weight[:, 0].log_softmax(0), start[:, 0].log_softmax(0)
        p = log_p.exp()
        self.policy.append(p)
        self.reward.append(float(p @ REWARDS))
        self.entropy.append(float(-(p * log_p).sum()))
        self.kl.append(float((p * (log_p - log_start)).sum()))
        for name, value in rest.items():
            getattr(self, name).append(value)


def plain_loss(
    weight: Tensor, ids: Tensor, advantages: Tensor, old: Tensor, ref: Tensor, o: argparse.Namespace
) -> Tensor:
    """The same loss written out. Shapes [G]."""
    log_p = weight[:, 0].log_softmax(0)
    logps = log_p[ids]
    ratio = (logps - old).exp()
    high = o.epsilon if o.epsilon_high is None else o.epsilon_high
    clipped = ratio.clamp(1 - o.epsilon, 1 + high)
    policy = -torch.minimum(ratio * advantages, clipped * advantages)
    d = ref - logps
    entropy = -(log_p.exp() * log_p).sum()
    return (policy + o.beta * (d.exp() - d - 1) - o.entropy_coef * entropy).mean()


def bars(policy: Tensor, width: int = 12) -> str:
    """One bar for each answer, in eighths of a character."""
    parts = []
    for answer, p in zip(ANSWERS, policy.tolist(), strict=True):
        eighths = round(p * width * 8)
        bar = BLOCKS[8] * (eighths // 8) + (BLOCKS[eighths % 8] if eighths % 8 else "")
        parts.append(f"{answer} {p:4.2f} {bar:{width}}")
    return "  ".join(parts)


def train(o: argparse.Namespace) -> History:
    torch.manual_seed(o.seed)
    weight = torch.zeros(4, 1, requires_grad=True)
    start = weight.detach().clone()
    optimizer = torch.optim.SGD([weight], lr=o.learning_rate)
    history = History()
    for step in range(o.steps):
        with torch.no_grad():
            log_p = weight[:, 0].log_softmax(0)
            ids = torch.multinomial(log_p.exp(), o.samples, replacement=True)
            old, ref = log_p[ids], start[:, 0].log_softmax(0)[ids]
            advantages = group_relative_advantages(REWARDS[ids], o.samples)
        for _ in range(o.updates):
            out = grpo_loss(
                torch.ones(o.samples, 1, 1),  # hidden states: one token each
                weight,
                ids[:, None],
                advantages,
                old_per_token_logps=old[:, None],
                ref_per_token_logps=ref[:, None] if o.beta else None,
                epsilon_low=o.epsilon,
                epsilon_high=o.epsilon_high,
                beta=o.beta,
                entropy_coef=o.entropy_coef,
            )
            plain = plain_loss(weight, ids, advantages, old, ref, o).item()
            optimizer.zero_grad()
            out.loss.backward()
            optimizer.step()
        clipped = out.metrics["clip_ratio/region_mean"].item()
        history.add(weight.detach(), start, clipped=clipped, fused=out.loss.item(), plain=plain)
        if step % o.every == 0 or step == o.steps - 1:
            numbers = f"reward {history.reward[-1]:.2f}  entropy {history.entropy[-1]:.2f}"
            numbers += f"  kl {history.kl[-1]:.2f}  clipped {clipped:4.0%}"
            print(f"{step:4}  {bars(history.policy[-1])}  {numbers}")
    return history


def plot(history: History, path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed (pip install 'fused-grpo[demo]')")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 6))
    for i, (answer, reward) in enumerate(zip(ANSWERS, REWARDS.tolist(), strict=True)):
        top.plot([float(p[i]) for p in history.policy], label=f"{answer}, reward {reward:.1f}")
    top.set(ylabel="probability", ylim=(0, 1))
    for name in ("reward", "entropy", "kl", "clipped"):
        bottom.plot(getattr(history, name), label=name)
    bottom.set(xlabel="step")
    for axes in (top, bottom):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"wrote {path}")


def main(arguments: list[str] | None = None) -> History:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--samples", type=int, default=16, help="of a group")
    parser.add_argument("--updates", type=int, default=4, help="with the same group")
    parser.add_argument("--epsilon", type=float, default=0.2)
    parser.add_argument("--epsilon-high", type=float, help="default: epsilon")
    parser.add_argument("--beta", type=float, default=0.0)
    parser.add_argument("--entropy-coef", type=float, default=0.0)
    parser.add_argument("--learning-rate", type=float, default=0.2)
    parser.add_argument("--every", type=int, default=5, help="print every so many steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, default=Path("bandit.png"))
    options = parser.parse_args(arguments)
    history = train(options)
    plot(history, options.plot)
    return history


if __name__ == "__main__":
    main()
