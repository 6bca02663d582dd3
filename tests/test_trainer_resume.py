"""A run that was interrupted and resumed is the run that was not, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from trainer_runs import PROMPTS, STEPS, assert_same, crash, letters, trainer

LORA = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", lora_dropout=0.5)
# 5 prompts make 2 generations of 2 prompts an epoch, so that there are epochs' ends in 6 steps
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "inside an epoch": ({}, 3),
    "at an epoch's end": ({"lr_scheduler_type": "cosine", "warmup_steps": 2}, 4),
    "adapter with dropout": (
        {"peft_config": LORA, "beta": 0.1, "disable_dropout": False, "weight_decay": 0.1},
        3,
    ),
    "accumulation": ({"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}, 3),
    "inside an iteration": ({"num_iterations": 2}, 3),
    "inside a generation": ({"steps_per_generation": 2, "per_device_train_batch_size": 4}, 3),
    "inside everything": (
        {
            "steps_per_generation": 4,
            "gradient_accumulation_steps": 2,
            "num_iterations": 2,
            "per_device_train_batch_size": 2,
            "off_policy_mask_threshold": 0.5,
        },
        3,
    ),
    "adaptive entropy": (
        {
            "use_adaptive_entropy": True,
            "entropy_target": 4.36,  # the entropy comes from above, so that the coefficient turns
            "entropy_coef": 0.3,
            "entropy_coef_delta": 0.1,
            "num_iterations": 2,
        },
        3,
    ),
    "adaptive KL and a reference that moves": (
        {
            "beta": 0.1,
            "use_adaptive_kl": True,
            "kl_target": 1e-3,
            "sync_ref_model": True,
            "ref_model_sync_steps": 2,
            "num_iterations": 2,
        },
        3,
    ),
    "dynamic sampling": ({"dynamic_sample": True, "num_iterations": 2}, 3),
    "routed gradients": ({"backward": "routed", "route_tau": 0.05, "num_iterations": 2}, 3),
    "reference": ({"beta": 0.3, "num_iterations": 2}, 3),
    "states of the reference": ({"beta": 0.3, "kl_estimator": "full", "num_iterations": 2}, 3),
    "sampler's support": ({"top_k": 9, "keep_sampling_mask": True, "num_iterations": 2}, 3),
    "sampler's log-probabilities": (
        {"sampling_correction": "token_truncate", "num_iterations": 2},
        3,
    ),
    "evaluations": ({"eval_strategy": "steps", "eval_steps": 2}, 3),
    "between two logs": ({"logging_steps": 4, "num_iterations": 2}, 3),
    "saved less often": ({"save_steps": 2}, 3),
    "saved by epoch": ({"save_strategy": "epoch"}, 3),
}


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_is_the_run_that_never_stopped(tmp_path: Path, case: str) -> None:
    options, step = CASES[case]
    whole = trainer(tmp_path / "whole", **{**options, "save_strategy": "no"})
    whole.train()
    after = torch.rand(3)
    crash(tmp_path / "cut", step, **options)
    torch.manual_seed(99)  # another process
    resumed = trainer(tmp_path / "cut", **options)
    resumed.train(resume_from_checkpoint=True)
    assert torch.equal(torch.rand(3), after), "random state"
    assert_same(whole, resumed)


@pytest.mark.parametrize("step", range(1, STEPS))
def test_resuming_at_every_step_of_generations_that_last_three(tmp_path: Path, step: int) -> None:
    options = {"num_iterations": 3, "max_steps": STEPS + 1, "beta": 0.1}
    whole = trainer(tmp_path / "whole", **{**options, "save_strategy": "no"})
    whole.train()
    crash(tmp_path / "cut", step, **options)
    resumed = trainer(tmp_path / "cut", **options)
    resumed.train(resume_from_checkpoint=True)
    assert_same(whole, resumed)


def test_nothing_is_sampled_again_inside_a_generation(tmp_path: Path) -> None:
    """The reward function, and with it what was sampled, is not asked twice."""
    options = {"num_iterations": 3, "max_steps": 3}
    crash(tmp_path, 2, **options)

    def never(**_: Any) -> list[float]:
        raise AssertionError("sampled again")

    never.__name__ = letters.__name__
    resumed = trainer(tmp_path, never, **options)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 3


def test_the_reference_stays_the_model_that_the_run_began_with(tmp_path: Path) -> None:
    options = {"beta": 0.3, "learning_rate": 5e-2}
    first = trainer(tmp_path, **options)
    begun = {n: p.clone() for n, p in first.model.named_parameters()}
    first.train()
    resumed = trainer(tmp_path, **{**options, "max_steps": STEPS + 1})
    resumed.train(resume_from_checkpoint=True)
    for name, parameter in resumed.policy.reference.named_parameters():
        assert torch.equal(parameter, begun[name]), name
    assert resumed.state.log_history[-2]["kl"] > 1e-3
    assert not torch.equal(resumed.model.lm_head.weight, begun["model.embed_tokens.weight"])


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    whole = trainer(tmp_path)
    whole.train()
    again = trainer(tmp_path)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == STEPS
    for (name, a), b in zip(whole.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_a_run_resumed_twice_with_more_steps(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", lr_scheduler_type="constant")
    whole.train()
    for steps in (2, 4, STEPS):
        run = trainer(tmp_path / "parts", max_steps=steps, lr_scheduler_type="constant")
        run.train(resume_from_checkpoint=True)
    for (name, a), b in zip(whole.model.named_parameters(), run.model.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_another_learning_rate_is_used_after_a_resume(tmp_path: Path) -> None:
    options = {"lr_scheduler_type": "linear", "weight_decay": 0.0}
    crash(tmp_path, 3, **options)
    resumed = trainer(tmp_path, **{**options, "learning_rate": 2e-3, "weight_decay": 0.1})
    resumed.train(resume_from_checkpoint=True)
    rates = [entry["learning_rate"] for entry in resumed.state.log_history if "loss" in entry]
    before = [1e-2 * (1 - i / STEPS) for i in range(3)]
    after = [2e-3 * (1 - i / STEPS) for i in range(3, STEPS)]
    assert rates == pytest.approx(before + after)
    assert {group["weight_decay"] for group in resumed.optimizer.param_groups} == {0.0, 0.1}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 7}, "seed: 42 in the checkpoint, 7 now"),
        ({"data_seed": 7}, "data_seed: None in the checkpoint, 7 now"),
        ({"shuffle_dataset": False}, "shuffle_dataset: True"),
        ({"prompts": PROMPTS[:4]}, "dataset: 5 prompts.*4 prompts"),
        ({"prompts": [*PROMPTS[:4], {"prompt": "other"}]}, "dataset: 5 prompts.*5 prompts"),
        ({"model_seed": 1}, "base_weights.*the reference"),
        ({"peft_config": LORA}, "model: LlamaForCausalLM"),
    ],
)
def test_another_run_is_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    crash(tmp_path, 1, beta=0.1)
    with pytest.raises(ValueError, match=f"belongs to another run: .*{message}"):
        trainer(tmp_path, **{"beta": 0.1, **changed}).train(resume_from_checkpoint=True)


SEEN: dict[str, Any] = {
    "progress": "lines",
    "run_warnings": False,
    "log_completions": True,
    "num_completions_to_print": 1,
}  # no bit moves


def test_what_has_merely_changed_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    crash(tmp_path, 1, num_iterations=2)
    run = trainer(
        tmp_path, num_iterations=2, num_generations=2, epsilon=0.3, logging_steps=2, **SEEN
    )
    run.train(resume_from_checkpoint=True)
    (told,) = [r.message for r in caplog.records if r.message.startswith("changed since")]
    assert "num_generations: 4 -> 2" in told
    assert "epsilon: 0.2 -> 0.3" in told
    for silent in ("logging", *SEEN):
        assert silent not in told
    assert run.state.global_step == STEPS
