"""Verifiers in worker processes: what goes wrong in one costs a sample, and nothing is left."""

from __future__ import annotations

import functools
import gc
import logging
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import verifiers

from fused_grpo.trainer import isolation
from fused_grpo.trainer.isolation import Isolated, isolated

TRAINER = Path(isolation.__file__).parent


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent counts as running."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def running(pid: int) -> bool:
    """The same of one whose parent is gone: a container may have nobody to wait for it."""
    status = Path(f"/proc/{pid}/stat")
    return alive(pid) and not (status.exists() and status.read_text().rsplit(")")[-1][1] == "Z")


def eventually(holds: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()


def samples(*texts: str) -> list[dict[str, Any]]:
    return [{"completion": text} for text in texts]


@pytest.fixture
def careful() -> Iterator[Isolated]:
    reward = isolated(verifiers.misbehave, timeout=2.0, workers=2)
    yield reward
    reward.close()


def test_results_come_in_order_and_none_stays_none(careful: Isolated) -> None:
    texts = ["x" * n for n in (3, 1, 4, 1, 5, 9, 2, 6)] + ["none", ""]
    assert careful.run(samples(*texts)) == [3, 1, 4, 1, 5, 9, 2, 6, None, 0]
    assert not careful.failures
    assert careful.run([]) == []


@pytest.mark.parametrize("bad", ["sleep", "regex"])
def test_a_verifier_that_hangs_costs_its_sample(careful: Isolated, bad: str) -> None:
    careful.run(samples("warm"))
    start = time.monotonic()
    assert careful.run(samples("ab", bad, "abc", "a", bad)) == [2, None, 3, 1, None]
    assert time.monotonic() - start < 30  # and not 600
    assert careful.failures == {"timeout": 2}
    assert careful.run(samples("again")) == [5]
    assert not careful.failures


@pytest.mark.parametrize("bad", ["exit", "segfault"])
def test_a_verifier_that_takes_its_process_down_costs_its_sample(
    careful: Isolated, bad: str
) -> None:
    assert careful.run(samples("ab", bad, bad, bad, "abc")) == [2, None, None, None, 3]
    assert careful.failures == {"crash": 3}


@pytest.mark.parametrize("bad", ["raise x", "quit"])
def test_a_verifier_that_raises_costs_its_sample(
    careful: Isolated, bad: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert careful.run(samples("ab", bad)) == [2, None]
    assert careful.failures == {"error": 1}
    assert "'misbehave' gave no reward for 1 of 2 samples (1 error)" in caplog.text
    assert bad in caplog.text
    assert ("ValueError: invalid literal" if bad == "raise x" else "SystemExit: 3") in caplog.text


def test_memory_is_limited() -> None:
    limited = isolated(verifiers.misbehave, workers=1, memory_mb=256)
    assert limited.run(samples("hog", "ab")) == [None, 2]
    assert limited.failures == {"error": 1}
    limited.close()
    free = isolated(verifiers.misbehave, workers=1)
    assert free.run(samples("hog", "ab")) == [3, 2]
    free.close()


def test_a_result_that_is_no_number_is_an_error() -> None:
    reward = isolated(verifiers.text, workers=1)
    assert reward.run(samples("a")) == [None]
    assert reward.failures == {"error": 1}
    reward.close()


def test_as_a_reward_function_it_gives_what_the_verifier_asks_for() -> None:
    reward = isolated(functools.partial(verifiers.named, bonus=0.5), workers=2)
    out = reward(
        prompts=["p", "pp"],
        completions=["a", "b"],
        completion_ids=[[1], [1, 2, 3]],
        answer=["x", ""],
        unused=[1, 2],
    )
    assert out == [111.5, 32.5]
    assert reward.__name__ == "named"
    scaled = isolated(verifiers.misbehave, workers=1)
    assert scaled(prompts=["p"], completions=["abc"], completion_ids=[[1]], scale=[2.0]) == [6]
    reward.close()
    scaled.close()


def test_workers_are_kept_between_calls_and_gone_afterwards() -> None:
    reward = isolated(verifiers.process_id, workers=2)
    pids = {int(pid or 0) for pid in reward.run(samples(*"abcdefgh"))}
    assert len(pids) <= 2
    assert {int(pid or 0) for pid in reward.run(samples(*"abcdefgh"))} <= pids
    assert os.getpid() not in pids
    assert reward._server is not None
    everybody = {*pids, reward._server.process.pid}
    assert all(map(alive, everybody))
    del reward
    gc.collect()
    assert eventually(lambda: not any(map(alive, everybody)))


def test_what_a_verifier_has_started_goes_with_it(careful: Isolated, tmp_path: Path) -> None:
    path = tmp_path / "pids"
    assert careful.run(samples(f"spawn {path}", "ab")) == [None, 2]
    worker, child = map(int, path.read_text().split())
    assert eventually(lambda: not alive(worker) and not running(child))


def test_a_worker_or_server_that_is_killed_meanwhile_is_replaced(careful: Isolated) -> None:
    assert careful.run(samples("a")) == [1]
    assert careful._server is not None
    os.kill(careful._server.idle[0].pid, signal.SIGKILL)
    time.sleep(0.1)
    assert careful.run(samples("ab", "abc")) == [2, 3]
    os.kill(careful._server.process.pid, signal.SIGTERM)  # as a scheduler does
    assert careful.run(samples("ab", "exit", "abc", "abcd")) == [2, None, 3, 4]
    os.kill(careful._server.process.pid, signal.SIGKILL)
    careful._server.process.wait()
    assert careful.run(samples("ab", "exit", "abc", "abcd")) == [2, None, 3, 4]


def test_a_killed_trainer_leaves_no_process(tmp_path: Path) -> None:
    path = tmp_path / "pids"
    trainer = os.fork()
    if trainer == 0:
        try:
            isolated(verifiers.misbehave, timeout=600).run(samples(f"spawn {path}"))
        finally:
            os._exit(1)
    assert eventually(lambda: path.exists() and len(path.read_text().split()) == 2)
    os.kill(trainer, signal.SIGKILL)
    os.waitpid(trainer, 0)
    pids = list(map(int, path.read_text().split()))
    assert eventually(lambda: not any(map(running, pids)))


SCRIPT = """
import sys, types
for name in ("fused_grpo", "fused_grpo.trainer"):  # spares the imports that take seconds
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [{folder!r}]
from fused_grpo.trainer.isolation import isolated

def verify(completion):
    return 2 * len(completion)

{guard}:
    print(isolated(verify).run([{{"completion": "abc"}}]))
"""


@pytest.mark.parametrize("guard", ['if __name__ == "__main__"', "if True"])
def test_a_verifier_of_the_script_itself(tmp_path: Path, guard: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(folder=str(TRAINER), guard=guard))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    if "__name__" in guard:
        assert done.stdout == "[6.0]\n", done.stderr
    else:
        assert done.returncode == 1
        assert "needs `if __name__ == '__main__':` around its training" in done.stderr


def test_a_verifier_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    reward = isolated(verifiers.length)
    reward._pickled = pickle.dumps(verifiers.length).replace(b"verifiers", b"nowhere_x")
    with pytest.raises(RuntimeError, match="No module named 'nowhere_x'"):
        reward.run(samples("a"))


def test_it_can_be_pickled_itself(careful: Isolated) -> None:
    assert careful.run(samples("a")) == [1]
    again = pickle.loads(pickle.dumps(careful))
    assert (again.timeout, again.workers) == (2.0, 2)
    assert again.run(samples("ab")) == [2]
    again.close()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"func": lambda completion: 0.0}, TypeError, "func must be a function of a module"),
        ({"func": 3}, TypeError, "func must be a function, not int"),
        ({"timeout": 0.0}, ValueError, "timeout=0.0 must be > 0"),
        ({"workers": 0}, ValueError, "workers=0 must be > 0"),
        ({"memory_mb": -1}, ValueError, "memory_mb=-1 must be > 0"),
    ],
)
def test_arguments_that_do_not_fit(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        isolated(**{"func": verifiers.length, **options})
