"""One run in a directory; signals end it with a checkpoint, in one process and in two.

This file is also the program that gets the signals.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from run_holder import GUARDS, HOLD, holder
from trainer_runs import STEPS, assert_same, letters, trainer
from transformers import TrainerCallback

from fused_grpo.trainer import checkpoints
from fused_grpo.trainer.guards import Interrupted, RunLock, RunLockedError, StopSignals

TWO_SIGNALS = (
    GUARDS
    + """
with guards["StopSignals"]():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(guards["ECHO_S"] + 0.2)
    print("still here", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    print("too late", flush=True)
"""
)


def test_a_second_run_in_a_directory_is_refused_until_the_first_is_dead(tmp_path: Path) -> None:
    other = holder(tmp_path)
    try:
        message = f"belongs to a run that is still going, process {other.pid} on "
        with pytest.raises(RunLockedError, match=message):
            trainer(tmp_path).train()
        with pytest.raises(RunLockedError, match=message):
            trainer(tmp_path).evaluate()
        assert not (tmp_path / "metrics.jsonl").exists()
    finally:
        other.kill()
        other.wait()
    assert json.loads((tmp_path / "run.lock").read_text())["pid"] == other.pid  # stale
    run = trainer(tmp_path, max_steps=1)
    run.train()
    assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()
    holder(tmp_path).kill()  # and the run has given it back


def test_a_lock_is_counted(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    lock.acquire()
    lock.acquire()
    lock.release()
    check = [sys.executable, "-c", HOLD, str(tmp_path)]
    assert "RunLockedError" in subprocess.run(check, capture_output=True, text=True).stderr
    assert lock.held
    lock.release()
    assert subprocess.run(check, input="", capture_output=True, text=True).returncode == 0


class Send(TrainerCallback):
    """Sends a signal to this process in the middle of a step."""

    def __init__(self, step: int, *numbers: int) -> None:
        self.step, self.numbers = step, numbers

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step - 1:
            for number in self.numbers:
                os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("options", [{}, {"save_strategy": "no"}], ids=["saving", "not saving"])
def test_a_signal_ends_the_step_saves_and_exits(
    tmp_path: Path, number: int, options: dict[str, Any]
) -> None:
    """The second one comes within a second, as torchrun and a terminal both send one."""
    before = signal.getsignal(number)
    more = {"num_iterations": 2, **options}
    whole = trainer(tmp_path / "whole", num_iterations=2, save_strategy="no")
    whole.train()
    run = trainer(tmp_path / "run", callbacks=[Send(3, number, number)], **more)
    with pytest.raises(Interrupted, match=r"after step 3.*checkpoint-3.*resume_from_") as stopped:
        run.train()
    assert stopped.value.code == 128 + number
    assert signal.getsignal(number) is before
    assert run.state.global_step == 3
    resumed = trainer(tmp_path / "run", **more)
    resumed.train(resume_from_checkpoint=True)
    assert_same(whole, resumed)


def test_a_signal_in_the_last_step_still_ends_the_program(tmp_path: Path) -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        run = trainer(tmp_path, callbacks=[Send(STEPS, signal.SIGTERM)])
        with pytest.raises(Interrupted):
            run.train()
        assert checkpoints.last_good(tmp_path)[0] == tmp_path / f"checkpoint-{STEPS}"
        assert not received
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_second_signal_exits_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", TWO_SIGNALS], capture_output=True, text=True)
    assert done.returncode == -signal.SIGTERM
    assert done.stdout == "still here\n"
    assert "SIGTERM: saving after this step" in done.stderr


def test_signals_are_left_alone_outside_the_main_thread() -> None:
    import threading

    before = signal.getsignal(signal.SIGTERM)

    def run() -> None:
        with StopSignals():
            assert signal.getsignal(signal.SIGTERM) is before

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


# ---- two processes ------------------------------------------------------------------------------


def launch(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    return subprocess.Popen(
        [*command, __file__, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_torchrun_passes_a_signal_on_and_two_processes_resume(tmp_path: Path) -> None:
    """Both agree on the step, whichever noticed first; a NaN on one of them is skipped by both."""
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    launched = launch("--slow", str(cut))
    while launched.poll() is None and not (cut / "checkpoint-2").exists():
        time.sleep(0.05)
    launched.send_signal(signal.SIGTERM)
    printed, _ = launched.communicate(timeout=120)
    good, problems = checkpoints.last_good(cut)
    assert good is not None, printed[-3000:]
    assert not problems
    step = int(good.name.split("-")[1])
    for rank in (0, 1):
        told = json.loads((cut / f"stopped-{rank}.json").read_text())
        assert told == {"code": 128 + signal.SIGTERM, "step": step}, printed[-3000:]
    assert step < 8
    launched = launch(str(cut), str(whole))
    printed, _ = launched.communicate(timeout=120)
    assert launched.returncode == 0, printed[-3000:]
    results = [torch.load(run / f"end-{rank}.pt") for run in (whole, cut) for rank in (0, 1)]
    for other in results[1:]:
        for name, tensor in results[0].items():
            assert torch.equal(tensor, other[name]), name
    assert results[0]["skipped"] == 1


def main(out: Path, slow: bool) -> None:
    rank = int(os.environ["RANK"])
    run = trainer(
        out,
        lambda completions, **_: letters(completions),
        max_steps=8,
        num_iterations=3,
        num_generations=8,
        per_device_train_batch_size=8,
        ddp_backend="gloo",
        save_total_limit=2,
    )
    original = run.compute_loss

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        loss = original(*args, **kwargs)
        if slow:
            time.sleep(0.3 + 0.2 * rank)
        return loss * float("nan") if run.state.global_step == 5 and rank == 1 else loss

    run.compute_loss = compute_loss  # type: ignore[method-assign]
    try:
        run.train(resume_from_checkpoint=True)
    except Interrupted as stopped:
        told = {"code": stopped.code, "step": run.state.global_step}
        (out / f"stopped-{rank}.json").write_text(json.dumps(told))
        raise
    weights = run.accelerator.unwrap_model(run.model_wrapped).state_dict()
    torch.save({**weights, "skipped": torch.tensor(run.watch.skipped)}, out / f"end-{rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        if name != "--slow":
            main(Path(name), "--slow" in sys.argv)
