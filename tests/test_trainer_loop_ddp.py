"""Two processes train as one does, with every normaliser and with dynamic sampling.

This file is also the program that each process runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parent))
from scripted import scripted

from fused_grpo.trainer import GRPOTrainer

PROMPTS = ["e1", "v1", "e2", "v2", "e3", "v3x", "e4", "v4", "v5xy", "e5", "v6", "v7"]
WHOLE: dict[str, Any] = {"num_generations": 4, "rows": 16}
# a prompt's three completions divide unevenly, so that other prompts come in pairs
CUT: dict[str, Any] = {"num_generations": 3, "rows": 12, "dynamic_sample": True}
SCHEMES = ("sequence_mean", "nonempty_sequence_mean", "nonempty_fixed_length")
CASES: dict[str, dict[str, Any]] = {
    **{scheme: {**WHOLE, "aggregation": scheme} for scheme in (*SCHEMES, "group_mean")},
    "token_sum": {**WHOLE, "aggregation": "token_sum", "learning_rate": 1e-3},
    "uneven": {**WHOLE, "rows": 12, "dynamic_sample": True},  # one and a half groups each
    "dynamic": {**WHOLE, "dynamic_sample": True},
    "groups": {**WHOLE, "dynamic_sample": True, "aggregation": "group_mean"},
    "few": {**WHOLE, "dynamic_sample": True, "max_resample_times": 0, "loss_type": "grpo"},
    "cut": CUT,
    "ragged": {**CUT, "num_generations": 6, "max_resample_times": 1},
    "remax": {**CUT, "advantage_estimator": "remax", "overlong_buffer_len": 4},
    "controls": {**WHOLE, "use_adaptive_kl": True, "kl_horizon": 16, "sync_ref_model": True,
                 "ref_model_sync_steps": 1, "use_adaptive_entropy": True,
                 "entropy_target": 100.0},
}  # fmt: skip
LOGGED = ("loss", "grad_norm", "dynamic_sample/trained", "beta", "entropy_coef")
ALL = ("reward", "reward_std", "num_tokens", "dynamic_sample/rounds", "dynamic_sample/dropped")


def train(out: Path, case: str, world: int) -> GRPOTrainer:
    options = dict(CASES[case])
    rows = options.pop("rows")
    run = scripted(
        out,
        PROMPTS,
        **{"beta": 0.1, "mask_truncated_completions": True, **options},
        per_device_train_batch_size=rows // 2 // world,
        gradient_accumulation_steps=2,
        max_steps=3,
        ddp_backend="gloo" if "RANK" in os.environ else None,
    )
    run.train()
    return run


def entries(run: GRPOTrainer) -> list[dict[str, float]]:
    return [entry for entry in run.state.log_history if "grad_norm" in entry]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    done = subprocess.run(
        [*command, __file__, str(folder)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_as_one(
    tmp_path: Path, results: list[dict[str, Any]], case: str
) -> None:
    single = train(tmp_path, case, world=1)
    first, second = (result[case] for result in results)
    for name, parameter in single.model.state_dict().items():
        assert torch.equal(first["weights"][name], second["weights"][name]), name
        torch.testing.assert_close(first["weights"][name], parameter, atol=1e-6, rtol=1e-5)
    # where a group does not divide evenly, two processes draw a prompt more than one does
    names = LOGGED if CASES[case]["num_generations"] == 3 else LOGGED + ALL
    for one, two in zip(entries(single), first["logs"], strict=True):
        for name in names:
            if name in one:
                assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name
    if "dynamic_sample" in CASES[case]:
        assert sum(entry["dynamic_sample/dropped"] for entry in entries(single)) > 0


def main(out: str) -> None:
    torch.set_num_threads(1)
    results = {}
    for case in CASES:
        run = train(Path(out) / case, case, world=2)
        weights = run.accelerator.unwrap_model(run.model_wrapped).state_dict()
        results[case] = {"weights": weights, "logs": entries(run)}
    torch.save(results, Path(out) / f"{run.args.process_index}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
