"""The reference that follows the policy, and coefficients that follow what is measured."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scripted import scripted
from test_trainer import LORA, logs, trainer
from transformers import TrainerCallback

from fused_grpo.kl import AdaptiveKL
from fused_grpo.trainer.trainer import GRPOTrainer


def weights(model: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def recorded(run: GRPOTrainer) -> list[list[torch.Tensor]]:
    """The policy's weights before the first optimizer step and after each, as the run goes."""
    out = [weights(run.model)]

    class Record(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            out.append(weights(run.model))

    run.add_callback(Record)
    return out


# ---- the reference ------------------------------------------------------------------------------


def test_reference_moves_as_the_formula_says(tmp_path: Path) -> None:
    alpha, every = 0.3, 2
    run = trainer(
        tmp_path,
        beta=0.1,
        sync_ref_model=True,
        ref_model_mixup_alpha=alpha,
        ref_model_sync_steps=every,
        max_steps=5,
    )
    steps = recorded(run)
    run.train()
    expected = [w.double() for w in steps[0]]
    for done in (2, 4):
        pairs = zip(expected, steps[done], strict=True)
        expected = [(1 - alpha) * r + alpha * p.double() for r, p in pairs]
    got = weights(run.policy.reference)
    for one, two, start in zip(got, expected, steps[0], strict=True):
        torch.testing.assert_close(one.double(), two, atol=1e-7, rtol=1e-6)
        assert not torch.equal(one, start)
    assert not any(p.requires_grad or p.grad is not None for p in run.policy.reference.parameters())


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_reference_moves_as_that_of_trl(tmp_path: Path, alpha: float) -> None:
    callbacks = pytest.importorskip("trl.trainer.callbacks")
    run = trainer(tmp_path, beta=0.1, sync_ref_model=True, ref_model_mixup_alpha=alpha)
    theirs = copy.deepcopy(run.policy.reference)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.add_(torch.randn(parameter.shape))
    run.policy.sync_reference(alpha)
    callbacks.SyncRefModelCallback._sync_target_model(run.model, theirs, alpha)
    for one, two in zip(run.policy.reference.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, two)
    if alpha == 1:
        same = zip(run.policy.reference.parameters(), run.model.parameters(), strict=True)
        assert all(torch.equal(one, two) for one, two in same)


def test_defaults_are_those_of_trl(tmp_path: Path) -> None:
    theirs = pytest.importorskip("trl.trainer.grpo_config").GRPOConfig
    ours = trainer(tmp_path).args
    for name in ("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"):
        assert getattr(ours, name) == theirs.__dataclass_fields__[name].default


def test_the_kl_falls_when_the_reference_has_moved(tmp_path: Path) -> None:
    options: dict[str, Any] = {"beta": 1e-3, "max_steps": 4, "learning_rate": 2e-2}
    fixed = trainer(tmp_path / "a", **options)
    fixed.train()
    follow = {"sync_ref_model": True, "ref_model_mixup_alpha": 1.0, "ref_model_sync_steps": 2}
    synced = trainer(tmp_path / "b", **options, **follow)
    synced.train()
    before, after = logs(fixed, "kl"), logs(synced, "kl")
    assert after[:2] == before[:2]
    assert abs(after[2]) < 1e-6 < 1e-2 < before[2]
    assert after[3] > 1e-5


def test_a_moved_reference_survives_a_checkpoint(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "beta": 0.1,
        "sync_ref_model": True,
        "ref_model_sync_steps": 1,
        "lr_scheduler_type": "constant",
    }
    whole = trainer(tmp_path / "a", max_steps=4, save_strategy="steps", save_steps=2, **options)
    whole.train()
    second = trainer(tmp_path / "b", max_steps=4, **options)
    second.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    for one, two in (
        (whole.policy.reference, second.policy.reference),
        (whole.model, second.model),
    ):
        for a, b in zip(one.parameters(), two.parameters(), strict=True):
            assert torch.equal(a, b)
    assert not trainer(tmp_path / "c", beta=0.1).policy.state_dict(), "it can be made again"


def test_the_reference_of_an_adapter_cannot_move(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sync_ref_model=True needs a reference of its own"):
        trainer(tmp_path, peft=LORA, beta=0.1, sync_ref_model=True)


# ---- the coefficient of the KL ------------------------------------------------------------------


def test_adaptive_kl_by_hand() -> None:
    control = AdaptiveKL(target=0.1, horizon=100, batch_size=10, coef=0.5)
    control.update(0.11)  # 10 % above
    assert control.current == pytest.approx(0.5 * 1.01, rel=1e-12)
    control.update(9.0)  # far above: at most a fifth
    assert control.current == pytest.approx(0.5 * 1.01 * 1.02, rel=1e-12)
    control.update(-1.0)
    assert control.current == pytest.approx(0.5 * 1.01 * 1.02 * 0.98, rel=1e-12)
    control.update(0.1)
    assert AdaptiveKL(**control.state()) == control
    whole = AdaptiveKL(target=1, horizon=100, batch_size=1, coef=1.0)
    for _ in range(100):
        whole.update(5.0)
    assert whole.coef == pytest.approx(1.002**100)


@pytest.mark.parametrize(
    "options", [{"target": 0.0}, {"coef": 0.0}, {"batch_size": 0}, {"horizon": 5, "batch_size": 8}]
)
def test_adaptive_kl_with_numbers_that_do_not_fit(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        AdaptiveKL(**options)


def test_beta_follows_the_kl(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "beta": 0.2,
        "use_adaptive_kl": True,
        "kl_target": 1e-3,
        "kl_horizon": 64,
        "gradient_accumulation_steps": 2,
        "learning_rate": 3e-2,
        "max_steps": 4,
    }
    run = trainer(tmp_path, **options)
    run.train()
    kls, betas = logs(run, "kl"), logs(run, "beta")
    expected = [0.2]
    for kl in kls:
        error = min(max(kl / 1e-3 - 1, -0.2), 0.2)
        expected.append(expected[-1] * (1 + error * 16 / 64))
    assert betas == pytest.approx(expected[:-1], rel=1e-4)
    assert run.controls.by_name["beta"].coef == pytest.approx(expected[-1], rel=1e-4)
    assert betas[1] < betas[0], "no KL yet: it falls"
    assert betas[-1] > min(betas), "then it rises"


def test_the_coefficient_reaches_the_loss(tmp_path: Path) -> None:
    """With rewards that teach nothing the loss is beta times the KL."""

    def flat(prompts: list[str], **_: Any) -> list[float]:
        return [0.0] * len(prompts)

    run = scripted(
        tmp_path, ["ab", "cd", "ef", "gh"], flat, beta=0.5, use_adaptive_kl=True, kl_horizon=64
    )
    with torch.no_grad():
        for parameter in run.policy.reference.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    run.train()
    for loss, beta, kl in zip(logs(run, "loss"), logs(run, "beta"), logs(run, "kl"), strict=True):
        assert kl > 1e-3
        assert loss == pytest.approx(beta * kl, rel=1e-5)
    assert logs(run, "beta")[0] != logs(run, "beta")[1]


def test_beta_of_a_resumed_run(tmp_path: Path) -> None:
    options: dict[str, Any] = {"beta": 0.2, "use_adaptive_kl": True, "kl_horizon": 64}
    options |= {"lr_scheduler_type": "constant", "save_strategy": "steps", "save_steps": 2}
    whole = trainer(tmp_path / "a", max_steps=4, **options)
    whole.train()
    second = trainer(tmp_path / "b", max_steps=4, **options)
    second.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert second.controls.state_dict() == whole.controls.state_dict()
    assert second.controls.by_name["beta"].coef != 0.2


def test_both_coefficients_at_once(tmp_path: Path) -> None:
    run = trainer(
        tmp_path,
        beta=0.2,
        use_adaptive_kl=True,
        use_adaptive_entropy=True,
        entropy_target=100.0,
        max_steps=3,
    )
    run.train()
    assert logs(run, "entropy_coef") == pytest.approx([0.0, 0.005, 0.01])
    assert logs(run, "beta")[2] < logs(run, "beta")[0]
    control = SimpleNamespace(**run.controls.state_dict()["entropy_coef"])
    assert control.last == pytest.approx(logs(run, "entropy")[-1], rel=1e-4)
