"""Faults of others in trainers and rewards (docs/bug-list.md)."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import scripted
from test_trainer import config

from fused_grpo import compute_advantages, grpo_loss, linear_logprobs, policy_loss
from fused_grpo.trainer.rewards import compute_rewards

PROMPTS = ["ab", "hello", "no", "q: a", "x=1", "vw", "mean", "of"]


@pytest.mark.parametrize("steps", [(4, 2), (2, 2), (8, 2)], ids=lambda s: f"{s[0]}-{s[1]}")
def test_the_divisor_is_the_tokens_of_the_optimizer_step(
    tmp_path: Path, steps: tuple[int, int]
) -> None:
    """R2: the loss was half or four times itself where a generation spans several optimizer steps,
    as the divisor was that of the generation. Each micro-batch divides by the tokens of the
    micro-batches it is accumulated with, and the steps' loss is the mean over their tokens."""
    per_generation, accumulation = steps
    run = scripted(
        tmp_path,
        PROMPTS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=per_generation,
        max_steps=max(2, per_generation // accumulation),
        loss_type="dapo",
        learning_rate=0.0,
    )
    seen: list[tuple[int, float, torch.Tensor, torch.Tensor]] = []
    original = run.compute_loss

    def compute_loss(model: Any, inputs: Any, **options: Any) -> Any:
        loss = original(model, inputs, **options)
        row = inputs.completion_mask.sum(1)
        seen.append((int(inputs.num_items), float(loss.detach()), row, inputs.advantages))
        return loss

    run.compute_loss = compute_loss  # type: ignore[method-assign]
    run.train()
    logged = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    windows = [seen[i : i + accumulation] for i in range(0, len(seen), accumulation)]
    assert len(windows) == len(logged) >= 2
    for window, loss in zip(windows, logged, strict=True):
        tokens = sum(int(lengths.sum()) for _, _, lengths, _ in window)
        assert {items for items, *_ in window} == {tokens}
        # at ratio 1 a token's loss is minus its advantage
        want = -sum(float((lengths * a).sum()) for _, _, lengths, a in window) / tokens
        assert sum(share for _, share, *_ in window) == pytest.approx(want, rel=1e-5, abs=1e-7)
        assert loss == pytest.approx(want, rel=1e-4, abs=1e-6)
    assert any(abs(loss) > 1e-3 for loss in logged)


@pytest.mark.parametrize("steps", [(2, 4), (8, 32)])
def test_generations_that_are_no_multiple_of_a_step_are_refused(
    tmp_path: Path, steps: tuple[int, int]
) -> None:
    """R2: an optimizer step over several generations had a divisor of one. It is refused."""
    with pytest.raises(ValueError, match="must be a multiple of gradient_accumulation_steps"):
        config(tmp_path, steps_per_generation=steps[0], gradient_accumulation_steps=steps[1])


@pytest.mark.parametrize("absent", [None, math.nan])
def test_a_reward_that_is_missing_is_left_out(
    absent: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    """T1: one None or NaN among the rewards made the loss 0 and its gradient NaN. The others are
    compared among themselves, it gets advantage 0, and a group without rewards zeros and a word."""
    rewards = [1.0, absent, 0.0, 1.0, absent, absent, absent, absent]

    def func(prompts: list[str], **_: Any) -> list[Any]:
        return rewards

    with caplog.at_level(logging.WARNING):
        got = compute_rewards([func], ["a"] * 4 + ["b"] * 4, [""] * 8, [[0]] * 8, {})[:, 0]
    assert "5 of 8" in caplog.text
    advantages = compute_advantages(got, num_generations=4)
    valid = torch.tensor([1.0, 0.0, 1.0])
    want = (valid - 2 / 3) / (valid.std() + 1e-4)
    torch.testing.assert_close(advantages[[0, 2, 3]], want)
    assert not advantages[[1, 4, 5, 6, 7]].any()
    logps = torch.full((8, 2), -1.0, requires_grad=True)
    out = policy_loss(logps, advantages)
    out.loss.backward()
    assert float(out.loss.detach()) == pytest.approx(-float(advantages.mean()), abs=1e-7)
    torch.testing.assert_close(logps.grad, (-advantages / 16)[:, None].expand(8, 2))


def test_a_log_probability_that_the_sampler_lacks_is_a_ratio_of_one() -> None:
    """T4: NaN of a sampler passed (ratio < min) | (ratio > max), or crashed. At a counted token it
    is a weight of 1 for that token, the others keep theirs: e^0.5, 1, 2 at most."""
    logps = torch.tensor([[-1.0, -1.0, -1.0]]).double().requires_grad_()
    sampler = torch.tensor([[-1.5, math.nan, -4.0]]).double()
    out = policy_loss(
        logps,
        torch.ones(1).double(),
        sampling_per_token_logps=sampler,
        sampling_correction="token_truncate",
        sampling_ratio_max=2.0,
    )
    out.loss.backward()
    want = torch.tensor([[math.exp(0.5), 1.0, 2.0]]).double()
    torch.testing.assert_close(logps.grad, -want / 3)
    assert float(out.loss.detach()) == pytest.approx(-float(want.mean()))
    assert all(value.isfinite() for value in out.metrics.values())


def test_truncated_sampling_leaves_ratios_at_one() -> None:
    """T5: with top_p = 0.8 the mean ratio was 0.895, the mass that was kept, and runs collapsed.
    Over the kept entries the log-probability is the renormalised softmax's, and the ratio is 1."""
    z = torch.tensor([[0.5, 0.25, 0.15, 0.07, 0.03]]).log()
    kept = torch.tensor([0.5, 0.25, 0.15]) / 0.9
    for target in range(3):
        ids = torch.tensor([[target]])
        hidden = z[:, None].clone().requires_grad_()
        out = grpo_loss(
            hidden,
            torch.eye(5),
            ids,
            torch.ones(1),
            old_per_token_logps=kept[target].log().view(1, 1),
            support_top_p=0.85,
        )
        assert float(out.metrics["ratio/mean"]) == pytest.approx(1.0, abs=1e-6)
        assert float(out.per_token_logps[0, 0].detach()) == pytest.approx(
            math.log(kept[target]), abs=1e-6
        )
        out.loss.backward()
        want = torch.zeros(5)
        want[:3] = kept
        want[target] -= 1
        torch.testing.assert_close(hidden.grad[0, 0], want, rtol=1e-5, atol=1e-6)
        whole = linear_logprobs(hidden.detach(), torch.eye(5), ids).logps
        assert float((whole - kept[target].log()).exp()) == pytest.approx(0.9, abs=1e-6)


def test_groups_without_variance_keep_their_kl_until_they_are_masked() -> None:
    """T6: a group of equal rewards still has the KL's gradient, which surprised users. That is so
    by design: its k3 counts; masked, it leaves the numerator and the denominator."""
    rewards = torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    advantages = compute_advantages(rewards.flatten(), num_generations=2).double()
    assert not advantages[:2].any()
    logps = torch.full((4, 3), -1.0).double()
    ref = logps + torch.tensor([1.0, 1.0, 0.5, 0.5]).double()[:, None]
    logps.requires_grad_()
    k3 = [math.exp(d) - d - 1 for d in (1.0, 1.0, 0.5, 0.5)]
    options: dict[str, Any] = {"ref_per_token_logps": ref, "beta": 0.3}
    whole = policy_loss(logps, advantages, **options)
    want = sum(0.3 * k - float(a) for k, a in zip(k3, advantages, strict=True)) / 4
    assert float(whole.loss.detach()) == pytest.approx(want)
    whole.loss.backward()
    assert logps.grad[0, 0] == pytest.approx(0.3 * (1 - math.e) / 12)
    logps.grad = None
    mask = torch.tensor([[0] * 3] * 2 + [[1] * 3] * 2)
    masked = policy_loss(logps, advantages, completion_mask=mask, **options)
    want = sum(0.3 * k - float(a) for k, a in zip(k3[2:], advantages[2:], strict=True)) / 2
    assert float(masked.loss.detach()) == pytest.approx(want)
    masked.loss.backward()
    assert not logps.grad[:2].any()


@pytest.mark.parametrize("scale", [1.0, 100.0, 1e6])
def test_advantages_do_not_know_the_unit_of_another_prompt(scale: float) -> None:
    """T9: normalised over the batch, a prompt whose rewards are a hundred times larger drowned the
    others. Over groups, [0, 1, 1, 0] gives -+1 / 1.1547 for any scale, beside any other prompt."""
    base = torch.tensor([0.0, 1.0, 1.0, 0.0])
    rewards = torch.cat([base, scale * base]).double()
    got = compute_advantages(rewards, num_generations=4)
    std = 1 / math.sqrt(3)
    for i, unit in ((0, 1.0), (4, scale)):
        want = (base.double() - 0.5) * unit / (std * unit + 1e-4)
        torch.testing.assert_close(got[i : i + 4], want, rtol=1e-6, atol=1e-9)


def test_sentinels_of_masked_tokens_stay_out_of_the_metrics() -> None:
    """T11: the 1.0 that stands for 'no log-probability' at masked tokens made the logged entropy
    negative. Metrics are of counted tokens: entropy log 4, ratio 1, KL 0."""
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]])
    logps = torch.full((2, 4), -math.log(4.0)).double()
    sentinel = torch.where(mask.bool(), logps, 1.0)
    out = policy_loss(
        sentinel.clone().requires_grad_(),
        torch.tensor([1.0, -1.0]).double(),
        completion_mask=mask,
        old_per_token_logps=sentinel,
        ref_per_token_logps=torch.where(mask.bool(), logps, -1.0),
        entropies=torch.where(mask.bool(), math.log(4.0), -1.0).double(),
        beta=0.1,
    )
    assert float(out.metrics["entropy"]) == pytest.approx(math.log(4.0))
    assert float(out.metrics["ratio/mean"]) == 1.0
    assert float(out.metrics["kl"]) == 0.0
    assert float(out.loss.detach()) == pytest.approx(-1 / 3)
