"""The loop: normalisers over micro-batches and iterations, the order of prompts, its options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import scripted
from test_trainer import config, first_step, logs, trainer

from fused_grpo.aggregation import SCHEMES
from fused_grpo.trainer.sampler import GroupSampler

PROMPTS = ["ab", "hello", "x=1+2", "no", "q: a"]


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name != "local_token_mean"])
def test_every_normaliser_is_that_of_the_optimizer_step(tmp_path: Path, scheme: str) -> None:
    """R2, R3: 16 rows at once or in four parts, some of them truncated and masked, with a KL."""

    def make(size: int, steps: int) -> Any:
        run = scripted(
            tmp_path,
            PROMPTS,
            aggregation=scheme,
            beta=0.5,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=steps,
            mask_truncated_completions=True,
        )
        with torch.no_grad():
            generator = torch.Generator().manual_seed(1)
            for parameter in run.policy.reference.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        return run

    whole, loss = first_step(make(16, 1))
    parts, accumulated = first_step(make(4, 4))
    assert abs(loss) > 1e-3
    assert accumulated == pytest.approx(loss, rel=1e-5)
    for name, grad in whole.items():
        torch.testing.assert_close(parts[name], grad, atol=1e-5, rtol=1e-4, msg=name)


def test_a_mean_over_tokens_of_a_micro_batch_is_what_it_says(tmp_path: Path) -> None:
    """bnpo: each micro-batch divides by its own tokens, and they are averaged."""
    run = scripted(tmp_path, PROMPTS, loss_type="bnpo", per_device_train_batch_size=4,
                   gradient_accumulation_steps=2)  # fmt: skip
    rows = [{"prompt": p} for p in PROMPTS[:2] for _ in range(4)]
    losses = []
    for batch in run.collector(rows).batches:
        counted = batch.completion_mask
        mean = (batch.advantages[:, None] * counted).sum() / counted.sum()
        loss = run.compute_loss(run.model, batch).detach()
        assert float(loss) == pytest.approx(-float(mean) / 2, abs=1e-6)
        losses.append(abs(float(loss)))
    assert max(losses) > 1e-3


def test_iterations_and_generations_take_their_micro_batches_in_turn(tmp_path: Path) -> None:
    """R2: Two optimizer steps of two micro-batches each, three times over, then new samples."""
    run = scripted(
        tmp_path,
        PROMPTS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        num_iterations=3,
        max_steps=8,
    )
    script: Any = run.collector.sampler
    seen: list[tuple[int, tuple[int, ...]]] = []
    original = run.compute_loss

    def compute_loss(model: Any, inputs: Any, **options: Any) -> Any:
        seen.append((len(script.asked), tuple(inputs.sequence_ids.tolist())))
        return original(model, inputs, **options)

    run.compute_loss = compute_loss  # type: ignore[method-assign]
    run.train()
    parts = [tuple(range(i, i + 4)) for i in (0, 4, 8, 12)]
    assert seen == [(1, part) for part in parts * 3] + [(2, part) for part in parts]
    assert logs(run, "ratio/max")[0] == pytest.approx(1, abs=1e-5)
    assert all(high > 1.0001 for high in logs(run, "ratio/max")[2:6])


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_epoch_has_each_prompt_once_in_whole_groups(world: int) -> None:
    orders = []
    for epoch in (0, 1):
        samplers = [
            GroupSampler(
                14,
                num_generations=6,
                batch_size=12,
                repeats=2,
                seed=3,
                epoch=lambda epoch=epoch: epoch,  # type: ignore[misc]
                rank=rank,
                world_size=world,
            )
            for rank in range(world)
        ]
        generations = list(zip(*samplers, strict=True))[::2]
        rows = [row for shares in generations for share in shares for row in share]
        assert all(len(share) == 12 // world for shares in generations for share in shares)
        groups = [rows[i : i + 6] for i in range(0, len(rows), 6)]
        assert all(len(set(group)) == 1 for group in groups)
        orders.append([group[0] for group in groups])
        assert sorted(orders[-1]) == list(range(14))
    assert orders[0] != orders[1]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_resample_times": 3}, ValueError, "max_resample_times=3 needs dynamic_sample"),
        ({"dynamic_sample_range": 0.1}, ValueError, "needs dynamic_sample"),
        (
            {"dynamic_sample": True, "max_resample_times": -1},
            ValueError,
            "max_resample_times=-1 must be >= 0",
        ),
        (
            {"dynamic_sample": True, "max_resample_times": 1.5},
            TypeError,
            "max_resample_times must be an integer, not float",
        ),
        ({"overlong_penalty_factor": 2.0}, ValueError, "needs overlong_buffer_len"),
        ({"overlong_buffer_len": 0}, ValueError, "overlong_buffer_len=0 must be >= 1"),
        (
            {"overlong_buffer_len": 7},
            ValueError,
            "overlong_buffer_len=7 must be at most max_completion_length=6",
        ),
        ({"reward_timeout": 0.0}, ValueError, "reward_timeout=0.0 must be > 0"),
        ({"reward_errors": "skip"}, ValueError, "reward_errors='skip' is unknown"),
        ({"sync_ref_model": True}, ValueError, "sync_ref_model needs beta > 0"),
        ({"beta": 0.1, "ref_model_sync_steps": 5}, ValueError, "=5 needs sync_ref_model"),
        (
            {"beta": 0.1, "sync_ref_model": True, "ref_model_mixup_alpha": 1.5},
            ValueError,
            r"ref_model_mixup_alpha=1.5 must be in \[0, 1\]",
        ),
        ({"use_adaptive_kl": True}, ValueError, "use_adaptive_kl needs beta > 0"),
        ({"beta": 0.1, "kl_target": 1.0}, ValueError, "kl_target=1.0 needs use_adaptive_kl"),
        (
            {"beta": 0.1, "use_adaptive_kl": True, "kl_horizon": 4},
            ValueError,
            "horizon=4 must be at least the batch of 8",
        ),
    ],
)
def test_options_that_do_not_fit(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        config(tmp_path, **options)


def test_dynamic_sampling_trains(tmp_path: Path) -> None:
    """With a sampler of its own and rewards of 0 and 1, as a task has them."""

    def starts_well(completions: list[str], **_: Any) -> list[float]:
        return [float(text[:1] in "abcdefghijklm" and text != "") for text in completions]

    run = trainer(
        tmp_path,
        starts_well,
        dynamic_sample=True,
        max_resample_times=2,
        max_steps=25,
        learning_rate=2e-2,
        per_device_train_batch_size=16,
        num_generations=8,
    )
    before = run.evaluate()["eval_reward"]
    run.train()
    assert run.evaluate()["eval_reward"] > before + 0.3
    trained, rounds = logs(run, "dynamic_sample/trained"), logs(run, "dynamic_sample/rounds")
    assert set(trained) <= {0, 1, 2}
    assert max(rounds) >= 1
