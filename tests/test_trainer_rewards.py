"""Reward functions: coroutines, time limits, failures that are forgiven, punishment of length."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import verifiers
from scripted import LENGTH, letters, scripted
from test_trainer import logs

from fused_grpo.trainer import RewardError
from fused_grpo.trainer.isolation import isolated
from fused_grpo.trainer.rewards import compute_rewards, soft_overlong

BATCH: dict[str, Any] = {
    "prompts": ["p", "q", "r"],
    "completions": ["a", "bb", "ccc"],
    "completion_ids": [[1], [1, 2], [1, 2, 3]],
    "columns": {"answer": ["x", "y", "z"]},
}


def rewards(*funcs: Any, **options: Any) -> list[list[float]]:
    return compute_rewards(funcs, **BATCH, **options).T.tolist()


def length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


async def waits(completions: list[str], **_: Any) -> list[float]:
    await asyncio.sleep(0)
    return [-float(len(text)) for text in completions]


def fails(completions: list[str], **_: Any) -> list[float]:
    if "bb" in completions:
        raise KeyError("answer")
    return [0.0] * len(completions)


async def fails_later(completions: list[str], **_: Any) -> list[float]:
    await asyncio.sleep(0)
    return fails(completions)


def test_whatever_is_a_number() -> None:
    """In fp32, whatever torch's default is."""
    for values in ([True, False, True], [np.True_, np.float16(0), torch.tensor(1.0)]):
        assert rewards(lambda values=values, **_: values) == [[1.0, 0.0, 1.0]]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        third = compute_rewards([lambda **_: [1 / 3] * 3], **BATCH)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(third, torch.full((3, 1), 1 / 3, dtype=torch.float32))


# ---- coroutines ---------------------------------------------------------------------------------


def test_coroutines_and_functions_together() -> None:
    class Judge:
        async def __call__(self, completions: list[str], answer: list[str], **_: Any) -> Any:
            return [len(a) * 7 for a in answer]

    got = rewards(waits, length, Judge(), functools.partial(waits))
    assert got == [[-1, -2, -3], [1, 2, 3], [7, 7, 7], [-1, -2, -3]]


def test_coroutines_run_at_the_same_time_as_all_others() -> None:
    """Each waits for the others: one after the other, none would ever end."""
    meet = threading.Barrier(2, timeout=20)
    first, second = asyncio.Event(), asyncio.Event()

    async def one(completions: list[str], **_: Any) -> list[float]:
        first.set()
        await second.wait()
        await asyncio.to_thread(meet.wait)
        return [1.0] * 3

    async def two(completions: list[str], **_: Any) -> list[float]:
        second.set()
        await first.wait()
        return [2.0] * 3

    def plain(completions: list[str], **_: Any) -> list[float]:
        meet.wait()
        return [3.0] * 3

    assert rewards(one, two, plain, timeout=30.0) == [[1.0] * 3, [2.0] * 3, [3.0] * 3]


def test_all_calls_have_one_event_loop() -> None:
    """A client that a coroutine keeps from call to call belongs to its loop."""
    loops = []

    async def remember(completions: list[str], **_: Any) -> list[float]:
        loops.append(asyncio.get_running_loop())
        return [0.0] * 3

    rewards(remember)
    rewards(remember, remember)
    assert len(set(map(id, loops))) == 1
    assert loops[0].is_running()


def test_inside_a_running_loop() -> None:
    """As in a notebook, where the main thread has a loop of its own."""

    async def notebook() -> list[list[float]]:
        return rewards(waits)

    assert asyncio.run(notebook()) == [[-1, -2, -3]]


def test_a_coroutine_may_return_none_too() -> None:
    async def partly(completions: list[str], **_: Any) -> list[float | None]:
        return [None, 1.0, math.nan]

    (got,) = rewards(partly)
    assert [math.isnan(x) for x in got] == [True, False, True]


# ---- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("func", [fails, fails_later])
def test_a_failure_names_the_function_and_the_row(func: Any) -> None:
    match = rf"'{func.__name__}' raised KeyError: 'answer'; prompt: 'q', completion: 'bb'"
    with pytest.raises(RewardError, match=match) as error:
        rewards(length, func)
    assert isinstance(error.value.__cause__, KeyError)


@pytest.mark.parametrize("func", [fails, fails_later])
def test_a_failure_can_cost_its_function_one_batch(
    func: Any, caplog: pytest.LogCaptureFixture
) -> None:
    failed: dict[str, int] = {}
    with caplog.at_level(logging.WARNING):
        got = rewards(length, func, errors="none", failed=failed)
    assert got[0] == [1, 2, 3]
    assert all(map(math.isnan, got[1]))
    assert failed == {"length": 0, func.__name__: 3}
    assert f"{func.__name__!r}: KeyError: 'answer'" in caplog.text


def test_wrong_results_are_never_forgiven() -> None:
    with pytest.raises(RewardError, match="returned 1 rewards for 3"):
        rewards(lambda **_: [1.0], errors="none")
    with pytest.raises(RewardError, match=r"returned inf.*prompt: 'p'"):
        rewards(lambda **_: [math.inf] * 3, errors="none")


def test_time_limit_of_a_function() -> None:
    release = threading.Event()

    def slow(completions: list[str], **_: Any) -> list[float]:
        release.wait(60)
        return [0.0] * 3

    failed: dict[str, int] = {}
    start = time.monotonic()
    got = rewards(slow, length, timeout=0.2, errors="none", failed=failed)
    assert time.monotonic() - start < 20
    assert all(map(math.isnan, got[0]))
    assert got[1] == [1, 2, 3]
    assert failed == {"slow": 3, "length": 0}
    calls = []

    def slower(completions: list[str], **_: Any) -> list[float]:
        calls.append(len(completions))
        return slow(completions)

    match = r"'slower' raised RewardTimeoutError: no answer within reward_timeout=0.2 s"
    with pytest.raises(RewardError, match=match):
        rewards(slower, timeout=0.2)
    assert calls == [3], "what takes too long is not tried again for each row"
    release.set()


def test_time_limit_of_a_coroutine() -> None:
    cancelled = threading.Event()

    async def slow(completions: list[str], **_: Any) -> list[float]:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return [0.0] * 3

    failed: dict[str, int] = {}
    got = rewards(slow, waits, timeout=0.2, errors="none", failed=failed)
    assert all(map(math.isnan, got[0]))
    assert got[1] == [-1, -2, -3]
    assert failed == {"slow": 3, "waits": 0}
    assert cancelled.wait(10)


def test_a_coroutine_that_blocks_the_loop_does_not_hold_later_ones() -> None:
    release = threading.Event()

    async def blocks(completions: list[str], **_: Any) -> list[float]:
        release.wait(60)
        return [0.0] * 3

    (got,) = rewards(blocks, timeout=0.1, errors="none")
    assert all(map(math.isnan, got))
    assert rewards(waits, timeout=10.0) == [[-1, -2, -3]]
    release.set()


def test_without_a_limit_functions_run_in_the_main_thread() -> None:
    """Where they may use signals, as some verifiers do."""
    threads = []

    def where(completions: list[str], **_: Any) -> list[float]:
        threads.append(threading.current_thread())
        return [0.0] * 3

    rewards(where)
    assert threads == [threading.main_thread()]


def test_an_isolated_verifier_costs_samples_and_tells_how_many() -> None:
    verifier = isolated(verifiers.misbehave, timeout=1.0)
    batch = BATCH | {"completions": ["exit", "bb", "raise x"]}
    failed: dict[str, int] = {}
    (got,) = compute_rewards([verifier], **batch, timeout=0.01, failed=failed).T.tolist()
    assert [math.isnan(x) for x in got] == [True, False, True]
    assert got[1] == 2
    assert failed == {"misbehave": 2}
    verifier.close()


def test_completions_that_nobody_scores_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """T1: with the prompt and the completion."""
    with caplog.at_level(logging.WARNING):
        rewards(lambda **_: [1.0, None, 2.0], lambda **_: [None, None, 1.0])
    assert "no reward function has a reward for 1 of 3 completions" in caplog.text
    assert "prompt: 'q', completion: 'bb'" in caplog.text


def test_failures_in_a_run(tmp_path: Path) -> None:
    calls = []

    def sometimes(completions: list[str], **_: Any) -> list[float]:
        calls.append(1)
        if len(calls) == 2:
            raise ConnectionError("no judge")
        return [float(len(text)) for text in completions]

    run = scripted(
        tmp_path, ["ab", "cd", "ef", "gh"], [letters, sometimes], reward_errors="none", max_steps=3
    )
    run.train()
    assert logs(run, "rewards/sometimes/failed") == [0, 16, 0]
    assert logs(run, "rewards/letters/failed") == [0, 0, 0]
    means = logs(run, "rewards/sometimes/mean")
    assert [math.isnan(mean) for mean in means] == [False, True, False]
    assert logs(run, "reward")[1] == pytest.approx(logs(run, "rewards/letters/mean")[1])
    assert all(math.isfinite(loss) for loss in logs(run, "loss"))
    calls[:] = [1]
    strict = scripted(tmp_path, ["ab", "cd", "ef", "gh"], [letters, sometimes])
    with pytest.raises(RewardError, match="ConnectionError: no judge"):
        strict.train()


# ---- length -------------------------------------------------------------------------------------


def test_punishment_of_length_by_hand() -> None:
    lengths = torch.tensor([0, 12, 16, 17, 18, 19, 20, 25])
    expected = [0, 0, 0, -0.25, -0.5, -0.75, -1, -1]
    assert soft_overlong(lengths, 20, 4).tolist() == expected
    assert soft_overlong(lengths, 20, 4, 0.5).tolist() == [0.5 * x for x in expected]
    assert soft_overlong(torch.tensor([5, 10, 20]), 20, 20).tolist() == [-0.25, -0.5, -1]


def test_punishment_of_length_as_that_of_trl() -> None:
    theirs = pytest.importorskip("trl.rewards").get_soft_overlong_punishment(20, 7)
    lengths = range(0, 21)
    expected = theirs(completion_ids=[[0] * n for n in lengths])
    got = soft_overlong(torch.tensor(list(lengths)), 20, 7)
    torch.testing.assert_close(got, torch.tensor(expected), atol=1e-7, rtol=1e-6)


def test_punishment_is_a_reward_of_training(tmp_path: Path) -> None:
    prompts = ["ab", "cd", "ef", "gh"]
    run = scripted(
        tmp_path,
        prompts,
        [letters],
        reward_weights=[2.0],
        overlong_buffer_len=3,
        overlong_penalty_factor=0.5,
        scale_rewards="none",
    )
    (batch,) = run.collector([{"prompt": p} for p in prompts for _ in range(4)]).batches
    lengths = batch.completion_mask.sum(1)
    texts = run.processing_class.batch_decode(batch.completion_ids, skip_special_tokens=True)
    names = [p for p in prompts for _ in range(4)]
    expected = 2 * torch.tensor(letters(names, texts)) + soft_overlong(lengths, LENGTH, 3, 0.5)
    centred = (expected.view(4, 4) - expected.view(4, 4).mean(1, keepdim=True)).flatten()
    torch.testing.assert_close(batch.advantages, centred)
    metrics = run._metrics.drain()
    assert metrics["reward"] == pytest.approx(float(expected.mean()))
    mean = soft_overlong(lengths, LENGTH, 3, 0.5).mean()
    assert metrics["rewards/overlong/mean"] == pytest.approx(float(mean)) != 0
    assert not [name for name in run.evaluate() if "overlong" in name]


def test_punishment_makes_no_reward_where_there_is_none(tmp_path: Path) -> None:
    values = [1.0, None, 0.0, 1.0] + [None] * 12
    run = scripted(
        tmp_path, ["ab", "cd", "ef", "gh"], lambda prompts, **_: values, overlong_buffer_len=6
    )
    names = ["ab", "cd", "ef", "gh"]
    (batch,) = run.collector([{"prompt": p} for p in names for _ in range(4)]).batches
    assert batch.advantages[1] == 0
    assert (batch.advantages[4:] == 0).all()
    assert (batch.advantages[[0, 2, 3]] != 0).all()


def test_a_group_varies_by_its_rewards_and_not_by_its_lengths(tmp_path: Path) -> None:
    prompts = ["e1", "v1", "e2", "v2"]
    run = scripted(
        tmp_path, prompts, dynamic_sample=True, max_resample_times=0, overlong_buffer_len=6
    )
    run.collector([{"prompt": p} for p in prompts for _ in range(4)])
    metrics = run._metrics.drain()
    assert metrics["dynamic_sample/dropped"] == 2
