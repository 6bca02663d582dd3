"""`FusedGRPOTrainer` and TRL's trainer, each on two processes: the same losses and weights.

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

LOSS_TYPES = ("dapo", "grpo")


def program(folder: Path) -> None:
    import trl_runs
    from trl import GRPOTrainer

    from fused_grpo.integrations.trl import FusedGRPOTrainer

    torch.set_num_threads(1)
    found: list[Any] = []
    for loss_type in LOSS_TYPES:
        options = {
            "loss_type": loss_type,
            "rollout": True,
            "max_steps": 4,
            "gradient_accumulation_steps": 2,
            "num_iterations": 2,
            "entropy_coef": 0.05,
        }
        for cls in (GRPOTrainer, FusedGRPOTrainer):
            made = trl_runs.trainer(cls, folder, **options)
            assert made.accelerator.num_processes == 2
            found.append(trl_runs.train(made))
    with pytest.raises(ValueError, match=r"refuses top_entropy_quantile=0\.5"):
        trl_runs.trainer(FusedGRPOTrainer, folder, top_entropy_quantile=0.5)
    torch.save(found, folder / f"{os.environ['RANK']}.pt")


def test_two_processes_train_as_with_trl(tmp_path: Path) -> None:
    """D1: The loss runs inside the wrapped model, so that its hooks fire."""
    pytest.importorskip("trl", exc_type=ImportError)
    root = Path(__file__).parent.parent
    paths = [str(root), str(root / "kernels"), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    done = subprocess.run(
        [*command, __file__, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in (0, 1))
    for i in range(0, len(first), 2):
        (logs, weights), (our_logs, ours) = first[i : i + 2]
        steps = [entry for entry in logs if "grad_norm" in entry]
        assert len(steps) == 4
        for theirs, mine in zip(steps, our_logs[: len(steps)], strict=True):
            assert mine.keys() == theirs.keys()
            for name, value in theirs.items():
                assert float(mine[name]) == pytest.approx(float(value), rel=1e-4, abs=1e-5), name
        for name, value in ours.items():
            torch.testing.assert_close(value, weights[name], rtol=1e-3, atol=1e-4)
            assert torch.equal(value, second[i + 1][1][name])  # ranks stay together


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parent))
    program(Path(sys.argv[1]))
