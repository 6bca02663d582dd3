"""Every option of the loss through `GRPOConfig`, `GRPOTrainer` and the command line."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from test_trainer import config, first_step, logs, trainer
from transformers import LlamaForCausalLM

from fused_grpo import LossSpec, cli
from fused_grpo.objectives import LOSS_TYPES
from fused_grpo.trainer import GRPOConfig
from fused_grpo.trainer.batches import logps_of
from fused_grpo.trainer.loss_args import FROM_BATCHES

EXTRA = {"dro": {"log_ratio_penalty": 0.1}}


def test_the_config_has_every_option_of_the_loss() -> None:
    ours = {"epsilon_low" if f.name == "epsilon" else f.name for f in fields(GRPOConfig)}
    assert {f.name for f in fields(LossSpec)} - set(FROM_BATCHES) <= ours


def test_defaults_are_those_of_the_loss(tmp_path: Path) -> None:
    assert config(tmp_path).loss_spec == LossSpec()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_objective_trains(tmp_path: Path, loss_type: str) -> None:
    """Two passes over a generation: the second has old log-probabilities."""
    run = trainer(tmp_path, loss_type=loss_type, num_iterations=2, **EXTRA.get(loss_type, {}))
    run.train()
    assert all(math.isfinite(x) for x in logs(run, "loss"))
    assert max(logs(run, "grad_norm")) > 0


REDUCTIONS: list[dict[str, Any]] = [
    {"loss_type": "luspo"},
    {"loss_type": "cispo"},
    {"loss_type": "gspo"},
    {"aggregation": "nonempty_sequence_mean"},
    {"aggregation": "verl:seq-mean-token-sum-norm"},
    {"aggregation": "token_sum"},
]


@pytest.mark.parametrize("options", REDUCTIONS, ids=lambda o: "-".join(o.values()))
def test_loss_does_not_depend_on_the_accumulation(tmp_path: Path, options: dict[str, Any]) -> None:
    """The divisors are those of the optimizer step; a truncated row is empty in some."""

    def make(size: int, steps: int) -> Any:
        run = trainer(
            tmp_path / f"{size}",
            per_device_train_batch_size=size,
            gradient_accumulation_steps=steps,
            mask_truncated_completions=True,
            **options,
        )
        with torch.no_grad():
            run.model.lm_head.weight[0] *= 4  # ends come early: ragged lengths
        return run

    whole, loss = first_step(make(8, 1))
    parts, accumulated = first_step(make(2, 4))
    assert accumulated == pytest.approx(loss, rel=1e-5, abs=1e-6)
    assert any(grad.abs().max() > 1e-3 for grad in whole.values())
    for name, grad in whole.items():
        torch.testing.assert_close(parts[name], grad, atol=1e-6, rtol=1e-4, msg=name)


def test_empty_rows_leave_the_divisor_of_their_scheme(tmp_path: Path) -> None:
    """Truncated rows count among B in sequence_mean, and do not in nonempty_sequence_mean."""
    grads, seen = {}, []
    for name in ("sequence_mean", "nonempty_sequence_mean"):
        run = trainer(tmp_path / name, aggregation=name, mask_truncated_completions=True)
        with torch.no_grad():
            run.model.lm_head.weight[0] *= 4
        original = run.collector

        def generate(rows: Any, original: Any = original) -> Any:
            made = original(rows)
            seen.extend(made.batches)
            return made

        run.collector = generate
        grads[name], _ = first_step(run)
    filled = int((seen[0].completion_mask.sum(1) > 0).sum())
    assert 0 < filled < 8
    for name, grad in grads["sequence_mean"].items():
        other = grads["nonempty_sequence_mean"][name]
        torch.testing.assert_close(other, grad * 8 / filled, atol=1e-6, rtol=1e-4, msg=name)


def test_groups_of_a_micro_batch(tmp_path: Path) -> None:
    options = {"aggregation": "group_mean", "num_generations": 4}
    whole, loss = first_step(trainer(tmp_path / "a", **options))
    split = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    parts, accumulated = first_step(trainer(tmp_path / "b", **options, **split))
    assert accumulated == pytest.approx(loss, rel=1e-5, abs=1e-6)
    for name, grad in whole.items():
        torch.testing.assert_close(parts[name], grad, atol=1e-6, rtol=1e-4, msg=name)
    with pytest.raises(ValueError, match="must be a multiple of num_generations=4"):
        config(tmp_path, aggregation="group_mean", per_device_train_batch_size=2)


def test_sampler_log_probabilities_are_those_of_the_policy(tmp_path: Path) -> None:
    """What `generate` sampled with, at the temperature, against a pass over the whole text."""
    run = trainer(
        tmp_path, sampling_correction="monitor", temperature=0.7, top_k=8, learning_rate=0.0
    )
    seen: list[Any] = []
    original = run.collector

    def generate(rows: Any) -> Any:
        made = original(rows)
        seen.extend(made.batches)
        return made

    run.collector = generate  # type: ignore[method-assign]
    run.args.max_steps = 1
    run.train()
    (batch,) = seen
    with torch.no_grad():
        logps = run.model(**batch.model_inputs(run.model), head_fn=logps_of(batch, run.args))
    gap = (logps - batch.sampling_logps)[batch.completion_mask]
    assert gap.abs().max() < 1e-4
    assert logs(run, "sampling/logp_difference/max")[0] < 1e-4
    assert logs(run, "sampling/ppl_ratio")[0] == pytest.approx(1.0, abs=1e-4)


def test_corrections_reach_the_loss(tmp_path: Path) -> None:
    """A sampler that is off by 0.1 nats a token: weights of e^0.1, and rejection of everything."""

    def make(name: str, **options: Any) -> Any:
        run = trainer(tmp_path / name, **options)
        original = run.collector

        def generate(rows: Any) -> Any:
            made = original(rows)
            for batch in made.batches:
                if batch.sampling_logps is not None:
                    batch.sampling_logps = batch.sampling_logps - 0.1
            return made

        run.collector = generate  # type: ignore[method-assign]
        return run

    plain, _ = first_step(make("plain"))
    weighted, _ = first_step(make("weighted", sampling_correction="token_truncate"))
    rejected, _ = first_step(make("rejected", rejection='{"seq_mean_k1": [0.95, 1.05]}'))
    for name, grad in plain.items():
        expected = grad * math.exp(0.1)
        torch.testing.assert_close(weighted[name], expected, atol=1e-6, rtol=1e-3, msg=name)
        assert not rejected[name].any()


def test_off_policy_mask_brings_its_old_log_probabilities(tmp_path: Path) -> None:
    run = trainer(tmp_path, off_policy_mask_threshold=0.01, num_iterations=2, learning_rate=0.1)
    run.train()
    dropped = logs(run, "policy_mask/dropped")
    assert dropped[0] == 0.0
    assert all(0 <= x <= 1 for x in dropped)


def test_entropy_coefficient_follows_the_entropy(tmp_path: Path) -> None:
    """Above the target nothing is applied; below it the coefficient rises from step to step."""
    low = trainer(
        tmp_path / "low",
        use_adaptive_entropy=True,
        entropy_target=100.0,
        entropy_coef_delta=0.01,
        max_steps=3,
        gradient_accumulation_steps=2,
    )
    low.train()
    assert logs(low, "entropy_coef") == pytest.approx([0.0, 0.01, 0.02])
    assert low.controls.by_name["entropy_coef"].coef == pytest.approx(0.03)
    entropies = logs(low, "entropy")
    assert low.controls.by_name["entropy_coef"].last == pytest.approx(entropies[-1], rel=1e-4)
    high = trainer(
        tmp_path / "high", use_adaptive_entropy=True, entropy_coef=0.5, entropy_target=1e-6
    )
    high.train()
    assert logs(high, "entropy_coef") == [0.0, 0.0]
    assert high.controls.by_name["entropy_coef"].coef == pytest.approx(0.49)


def test_entropy_coefficient_of_a_resumed_run(tmp_path: Path) -> None:
    options = {"use_adaptive_entropy": True, "entropy_target": 100.0, "save_strategy": "steps"}
    first = trainer(tmp_path, **options, save_steps=1, max_steps=2)
    first.train()
    again = trainer(tmp_path, **options, save_steps=1, max_steps=3)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert logs(again, "entropy_coef")[-1] == pytest.approx(0.01)
    assert again.controls.by_name["entropy_coef"].coef == pytest.approx(0.015)


def test_own_objective_in_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trainer_losses.py").write_text(
        "def loss(tokens, spec):\n    return -tokens.ratio * tokens.advantages\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    want, _ = first_step(trainer(tmp_path / "a", loss_type="importance_sampling"))
    got, _ = first_step(trainer(tmp_path / "b", loss_type="trainer_losses:loss"))
    for name, grad in want.items():
        torch.testing.assert_close(got[name], grad, atol=1e-7, rtol=1e-5, msg=name)


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An objective of one's own, a rejection as JSON, and any field of the config."""
    (tmp_path / "command_losses.py").write_text(
        "def loss(tokens, spec):\n    return -tokens.ratio * tokens.advantages\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    arguments = ["train", "--model", "tiny", "--steps", "1", "--output-dir", str(tmp_path / "run")]
    arguments += ["--loss-type", "command_losses:loss", "--aggregation", "verl:token-mean"]
    arguments += ["--rejection", '{"token_k3": 0.5}', "--kl_estimator", "k2", "--beta", "0.1"]
    arguments += ["--use_adaptive_entropy", "--save_strategy", "steps", "--save_steps", "1"]
    assert cli.main(arguments) == 0
    saved = tmp_path / "run" / "checkpoint-1" / "training_args.bin"
    args = torch.load(saved, weights_only=False)
    assert args.rejection == {"token_k3": 0.5}
    assert (args.loss_type, args.kl_estimator) == ("command_losses:loss", "k2")
    assert LlamaForCausalLM.from_pretrained(tmp_path / "run" / "model") is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "cispo", "epsilon_high": 5.0}, "epsilon_high=5.0 is not used .*ratio_max"),
        ({"loss_type": "cispo", "ratio_max": 0.2}, "ratio_max=0.2 must be >= 1"),
        ({"rejection": "{"}, "rejection='{' is not JSON"),
        ({"rejection": '{"token_k9": 1}'}, "'token_k9' is unknown"),
        ({"entropy_target": 0.5}, "entropy_target=0.5 needs use_adaptive_entropy"),
        ({"use_adaptive_entropy": True, "entropy_coef": 2.0}, "coef=2.0"),
        ({"loss_type": "no_such_module:loss"}, "no function 'loss'"),
        ({"aggregation": "mean"}, "aggregation='mean' is unknown"),
        ({"loss_type": "sapo", "delta": 2.0}, "delta=2.0 is not used by loss_type='sapo'"),
    ],
)
def test_options_that_do_not_fit(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **options)
