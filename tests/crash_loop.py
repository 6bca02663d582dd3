"""Trains, is killed at random moments, is resumed, and compares with a run that was never killed.

    python tests/crash_loop.py FOLDER KILLS [SEED]

prints its figures as JSON; exit status 0 if every run directory stayed readable and every run ended
with the same bits. One process imports everything and forks the runs, so that kills are cheap.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from trainer_runs import metrics, tensors, timeless, trainer

from fused_grpo.trainer import checkpoints
from fused_grpo.trainer.metrics import read_metrics

STEPS, LONGEST_S, SAVE_S = 12, 2.5, 0.15
OPTIONS: dict[str, Any] = {
    "max_steps": STEPS,
    "save_total_limit": 2,
    "num_iterations": 2,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 4,
    "per_device_train_batch_size": 4,
    "beta": 0.1,
    "use_adaptive_entropy": True,
    "entropy_target": 4.36,
    "entropy_coef": 0.3,
    "eval_strategy": "steps",
    "eval_steps": 5,
}


def start(folder: Path) -> int:
    """The process id of a child that trains, or goes on training, in `folder`."""
    child = os.fork()
    if child:
        return child
    try:
        log = os.open(folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        torch.manual_seed(time.time_ns())  # nothing may depend on what the process starts with
        trainer(folder, **OPTIONS).train(resume_from_checkpoint=True)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def ended(child: int, until: float) -> int | None:
    """The exit status of a child that ends before `until`, else None."""
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return None


def wait_to_kill(child: int, folder: Path, rng: random.Random) -> int | None:
    """Until a random moment, every other time one while a checkpoint is being saved."""
    if rng.random() < 0.5:
        return ended(child, time.monotonic() + rng.uniform(0, LONGEST_S))
    skipped, until = rng.randrange(6), time.monotonic() + 2 * LONGEST_S
    draft, was_there = folder / checkpoints.SAVING, True
    while time.monotonic() < until:
        status = ended(child, time.monotonic() + 0.004)
        if status is not None:
            return status
        there = draft.exists()
        if there and not was_there:
            if not skipped:
                break
            skipped -= 1
        was_there = there
    return ended(child, time.monotonic() + rng.uniform(0, SAVE_S))


def check_readable(folder: Path) -> int:
    """The step of the last good checkpoint; AssertionError: something there is broken."""
    good, problems = checkpoints.last_good(folder)
    assert not problems, problems
    read_metrics(folder / "metrics.jsonl")
    if good is None:
        return 0
    assert load_file(good / "model.safetensors")
    return int(json.loads((good / "trainer_state.json").read_text())["global_step"])


def result(folder: Path) -> tuple[dict[str, torch.Tensor], list[str], list[str]]:
    """(all tensors, log, metrics) at the end of a run."""
    last = folder / f"checkpoint-{STEPS}"
    found = tensors(load_file(last / "model.safetensors"), "model")
    for name in ("optimizer.pt", "scheduler.pt"):
        state = torch.load(last / name, weights_only=True)
        found |= tensors({k: v for k, v in state.items() if "_get" not in k}, name)
    history = json.loads((last / "trainer_state.json").read_text())["log_history"]
    return found, timeless(history), metrics(folder)


def main(root: Path, wanted: int, seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    rng, began = random.Random(seed), time.monotonic()
    root.mkdir(parents=True, exist_ok=True)
    assert os.waitpid(start(root / "whole"), 0)[1] == 0, (root / "whole.log").read_text()
    expected = result(root / "whole")
    kills = inside = runs = 0
    while kills < wanted:
        runs += 1
        folder, reached = root / f"run-{runs}", 0
        while True:
            child = start(folder)
            status = None
            if kills < wanted:
                status = wait_to_kill(child, folder, rng)
            if status is None and kills < wanted:
                os.kill(child, signal.SIGKILL)
                kills += 1
            if status is None:
                status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            inside += (folder / checkpoints.SAVING).exists()
            step = check_readable(folder)
            assert step >= reached, f"went back from step {reached} to {step}"
            reached = step
            if status == 0:
                break
            assert status == -signal.SIGKILL, folder.with_suffix(".log").read_text()[-3000:]
        found = result(folder)
        assert found[0].keys() == expected[0].keys()
        for name, tensor in expected[0].items():
            assert torch.equal(found[0][name], tensor), name
        assert found[1:] == expected[1:], "logs"
    seconds = round(time.monotonic() - began, 1)
    return {"kills": kills, "while_saving": inside, "runs": runs, "seconds": seconds}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int((*sys.argv, 0)[3]))))
