"""What is measured: means over processes, shares, throughput, and what a run's file holds."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import watched_runs

from fused_grpo.trainer.metrics import MetricLog, Throughput, peak_memory, reward_metrics
from fused_grpo.trainer.progress import SHOWN

# what docs/trainer-monitoring.md promises of every step
NAMES = {
    *("reward", "reward_std", "frac_reward_zero_std", "entropy", "kl", "tokens_per_second"),
    *("rewards/letters/mean", "rewards/letters/std", "rewards/letters/missing"),
    *("completions/mean_length", "completions/clipped_ratio", "step_time", "num_tokens"),
    *("ratio/max", "clip_ratio/region_mean", "effective_sample_size", "grad_norm", "loss"),
    *("memory/peak_gb", "learning_rate"),
}


def test_processes_count_by_their_weights() -> None:
    """Entropies of 3 tokens here and of 1 there: the mean over tokens, not over processes."""
    logs = [MetricLog(), MetricLog()]
    logs[0].add({"entropy": 1.0, "ratio/max": 2.0, "completions/min_length": 5.0}, weight=3)
    logs[1].add({"entropy": 5.0, "ratio/max": 7.0, "completions/min_length": 4.0, "late": 1.0})
    parts: list[Any] = []
    logs[1].drain(lambda own: parts.extend(own) or own)
    merged = logs[0].drain(lambda own: [*own, *parts])
    expected = {"entropy": 2.0, "ratio/max": 7.0, "completions/min_length": 4.0, "late": 1.0}
    assert merged == expected
    assert logs[0].drain() == {}


def test_nan_is_left_out_whatever_it_weighs() -> None:
    log = MetricLog()
    log.add({"a": math.nan, "b/max": math.nan}, weight=100)
    log.add({"a": torch.tensor(2.0), "b/max": torch.tensor(-1.0)}, weight=torch.tensor(0.5))
    log.add({"c": math.nan})
    out = log.drain()
    assert (out["a"], out["b/max"]) == (2.0, -1.0)
    assert math.isnan(out["c"])


def test_the_share_of_missing_rewards_is_of_each_function() -> None:
    rewards = torch.tensor([[1.0, math.nan], [0.0, math.nan], [1.0, math.nan], [1.0, 2.0]])
    out = reward_metrics(rewards, rewards.nansum(1), ["a", "b"], 2)
    assert out["rewards/a/missing"] == 0
    assert out["rewards/b/missing"] == 0.75


def test_tokens_per_second_are_those_since_the_last_log() -> None:
    rate = Throughput()
    state = SimpleNamespace(num_input_tokens_seen=1000, global_step=10)
    rate.on_train_begin(None, state, None)  # a resumed run: what came before does not count
    state.num_input_tokens_seen, state.global_step = 1600, 13
    assert rate(state, 0.5) == {"tokens_per_second": 600 / 1.5}
    state.num_input_tokens_seen, state.global_step = 1700, 14
    assert rate(state, 2.0) == {"tokens_per_second": 50}
    assert math.isnan(rate(state, 2.0)["tokens_per_second"])


def test_peak_memory_is_that_of_this_process() -> None:
    status = Path("/proc/self/status")
    if torch.cuda.is_available() or not status.exists():
        pytest.skip("compared with what Linux says of a process without a GPU")
    block = torch.ones(25_000_000)  # 0.1 GB
    peak = peak_memory()["memory/peak_gb"]
    del block
    (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmHWM")]
    assert peak == pytest.approx(int(line.split()[1]) * 1024 / 1e9, rel=0.01)


def test_a_run_measures_what_is_promised(tmp_path: Path) -> None:
    run = watched_runs.make(tmp_path, beta=0.1, max_steps=3)
    run.train()
    entries = [e for e in watched_runs.lines(tmp_path / "metrics.jsonl") if "loss" in e]
    assert [entry["step"] for entry in entries] == [1, 2, 3]
    for entry in entries:
        assert not {n for n in NAMES if not isinstance(entry.get(n), (int, float))}
    assert {metric for _, metric in SHOWN} <= NAMES
    tokens = [0.0] + [entry["num_tokens"] for entry in entries]
    for before, entry in zip(tokens, entries, strict=False):
        expected = (entry["num_tokens"] - before) / entry["step_time"]
        assert entry["tokens_per_second"] == pytest.approx(expected, rel=1e-9)
    logged = {name for name in run.state.log_history[0] if name in NAMES}
    assert logged == NAMES, "trackers get what the file gets"


def test_masked_completions_leave_the_metrics_of_tokens(tmp_path: Path) -> None:
    """T11: All but the ended completions are masked; what is logged is of those that count."""
    run = watched_runs.make(tmp_path, mask_truncated_completions=True, max_steps=1)
    with torch.no_grad():
        run.model.lm_head.weight[0] *= 4
    seen: list[Any] = []
    original = run.collector.__call__

    class Keep:
        def __call__(self, rows: Any) -> Any:
            seen.append(original(rows))
            return seen[-1]

    run.collector = Keep()  # type: ignore[assignment]
    weights = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    run.train()
    (batch,) = seen[0].batches
    counted = batch.completion_mask
    assert counted.any()
    assert not counted.any(1).all()
    run.model.load_state_dict(weights, strict=False)
    run.model.eval()
    with torch.no_grad():
        logits = run.model(**batch.model_inputs(run.model)).logits[:, -counted.shape[1] :]
    logps = logits.double().log_softmax(-1)
    entropy = -(logps.exp() * logps).sum(-1)
    (logged,) = [e["entropy"] for e in run.state.log_history if "entropy" in e]
    assert logged == pytest.approx(entropy[counted].mean().item(), rel=1e-5)
    assert logged >= 0
    assert abs(entropy[counted].mean() - entropy.mean()) > 1e-3
