"""Steps that are not finite change nothing, are counted and explained, and end the run in time."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_runs import tensors, trainer
from transformers import TrainerCallback

from fused_grpo.trainer import GRPOTrainer
from fused_grpo.trainer.nonfinite import NonFiniteError

STEPS = 5


class Snapshots(TrainerCallback):
    """Weights, optimizer and schedule after every step."""

    def __init__(self) -> None:
        self.run: Any = None
        self.seen: list[dict[str, torch.Tensor]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        parts = {n: getattr(self.run, n).state_dict() for n in ("model", "optimizer")}
        parts["scheduler"] = {"last_epoch": self.run.lr_scheduler.last_epoch}
        self.seen.append({name: t.clone() for name, t in tensors(parts).items()})


def poisoned(
    path: Path, where: Any, value: float, **options: Any
) -> tuple[GRPOTrainer, list[dict[str, torch.Tensor]]]:
    """A run whose loss, or gradient alone, is `value` in the micro-batches that `where` picks."""
    snapshots = Snapshots()
    run = trainer(path, callbacks=[snapshots], **{"max_steps": STEPS, **options})
    snapshots.run = run
    original, calls = run.compute_loss, [0]

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        loss = original(*args, **kwargs)
        calls[0] += 1
        if where == "gradient" and run.state.global_step == 2:
            weight = run.model.lm_head.weight
            weight.register_hook(once(lambda grad: grad * value))
        elif where != "gradient" and where(run.state.global_step, calls[0]):
            loss = loss * value
        return loss

    run.compute_loss = compute_loss  # type: ignore[method-assign]
    return run, snapshots.seen


def once(change: Any) -> Any:
    """A hook of a gradient that acts the first time only."""
    done: list[bool] = []

    def hook(grad: torch.Tensor) -> torch.Tensor | None:
        if done:
            return None
        done.append(True)
        return torch.as_tensor(change(grad))

    return hook


# the gradient's norm is computed in either case, and clipped or not
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_step_that_is_not_finite_changes_nothing(
    tmp_path: Path, where: str, value: float, max_grad_norm: float
) -> None:
    pick: Any = "gradient" if where == "gradient" else lambda step, call: step == 2
    run, seen = poisoned(tmp_path, pick, value, max_grad_norm=max_grad_norm, save_strategy="no")
    run.train()
    moved = [
        any(not torch.equal(before[n], after[n]) for n in before if n.startswith("/model"))
        for before, after in pairwise(seen)
    ]
    assert moved == [True, False, True, True]
    assert seen[1].keys() == seen[2].keys()
    for name, tensor in seen[1].items():
        assert torch.equal(tensor, seen[2][name]), name
    steps = [int(s["/optimizer/state/0/step"]) for s in seen]
    assert steps == [1, 2, 2, 3, 4]
    assert [int(s["/scheduler/last_epoch"]) for s in seen] == [1, 2, 2, 3, 4]
    counted = [e["skipped_steps"] for e in run.state.log_history if "skipped_steps" in e]
    assert counted == [0, 0, 1, 1, 1]
    assert all(tensor.isfinite().all() for tensor in seen[-1].values())


def test_one_bad_micro_batch_spoils_its_step_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
    run, seen = poisoned(tmp_path, lambda step, call: call == 3, math.nan, **options)
    run.train()
    assert [int(s["/optimizer/state/0/step"]) for s in seen[1:]] == [1, 2, 3, 4]
    (told,) = [r.message for r in caplog.records if "is skipped" in r.message]
    assert told.startswith("step 2 is skipped, 1 in a row: its loss or its gradient (norm nan)")
    assert "micro-batch 1 of 2: loss nan" in told
    assert "micro-batch 2 of 2: loss 0" in told or "micro-batch 2 of 2: loss -" in told


def test_the_entropy_controller_does_not_learn_from_it(tmp_path: Path) -> None:
    options = {"use_adaptive_entropy": True, "entropy_target": 4.5, "entropy_coef": 0.3}
    run, _ = poisoned(tmp_path, lambda step, call: False, math.nan, **options)
    original = run.compute_loss

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        loss = original(*args, **kwargs)
        if run.state.global_step == 2:
            run.controls._sums *= math.nan
            return loss * math.nan
        return loss

    run.compute_loss = compute_loss  # type: ignore[method-assign]
    run.train()
    control: Any = run.controls.by_name["entropy_coef"]
    assert math.isfinite(control.last)
    assert control.coef == pytest.approx(0.3 + 0.005 * (STEPS - 1))


def test_the_run_stops_with_its_state_and_says_why(tmp_path: Path) -> None:
    """A hidden state that overflows for a while: the weights themselves are fine."""
    run, seen = poisoned(
        tmp_path, lambda step, call: False, 1.0, max_nonfinite_steps=2, num_iterations=STEPS
    )
    overflow = run.model.model.norm.register_forward_hook(
        lambda module, args, out: (
            out.index_fill(1, torch.tensor([out.shape[1] - 2]), math.inf)
            if run.state.global_step >= 2
            else out
        )
    )
    with pytest.raises(NonFiniteError) as error:
        run.train()
    words = str(error.value)
    assert "step 4 is skipped, 2 in a row" in words
    assert "micro-batch 1 of 1: loss nan" in words
    assert "log-probabilities not finite, the first (row 0, token " in words
    assert "largest |log-ratio|" in words
    assert "hidden states not finite at 8 of " in words
    assert "All weights are finite." in words
    assert f"The state is in {tmp_path / 'checkpoint-4'}" in words
    assert "would meet the same numbers again" in words
    for name, tensor in seen[1].items():
        assert torch.equal(tensor, seen[3][name]), name
    # resumed unchanged it says so at once, and does not try twice more
    overflow.remove()
    again, seen = poisoned(tmp_path, lambda *_: True, math.nan, max_nonfinite_steps=2)
    with pytest.raises(NonFiniteError, match="step 5 is skipped, 3 in a row"):
        again.train(resume_from_checkpoint=True)
    assert len(seen) == 1
    # and a good step ends the count
    good, seen = poisoned(tmp_path, lambda *_: False, 1.0, max_steps=7, max_nonfinite_steps=2)
    good.train(resume_from_checkpoint=True)
    assert good.watch.in_a_row == 0
    assert good.watch.skipped == 3


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    run, _ = poisoned(tmp_path, lambda step, call: False, 1.0, max_nonfinite_steps=1)
    with torch.no_grad():
        run.model.model.norm.weight[3] = math.nan
    run.sampler.extra["renormalize_logits"] = False

    def uniform(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(len(args[0]), 1, dtype=torch.long)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "multinomial", uniform)
        with pytest.raises(NonFiniteError, match=r"1 weight tensors are not finite, among them mo"):
            run.train()


def test_how_many_may_follow_each_other_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_nonfinite_steps=0 must be at least 1"):
        trainer(tmp_path, max_nonfinite_steps=0)
