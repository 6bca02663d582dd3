"""`fused-grpo eval` and `fused-grpo ablate`: what is counted, paired, matched and skipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fused_grpo import cli
from fused_grpo.trainer import ablation, evaluation, models, passk
from fused_grpo.trainer.config import GRPOConfig
from fused_grpo.trainer.evaluation import Samples
from fused_grpo.trainer.prompts import whole
from fused_grpo.trainer.tasks import Task

CORRECT = [[True, False, True, False], [False] * 4, [True] * 4]
ANSWERS = [["7", "8", "7", None], ["1", "2", "3", "4"], ["5"] * 4]
SAMPLES = Samples(CORRECT, ANSWERS, tokens=240, length=4.0, failed=1)


def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float | None]:
    """A third of a right answer is what a wrong one is worth; "x" cannot be verified."""
    pairs = zip(completions, answer, strict=True)
    return [None if "x" in c else 1.0 if a in c else 1 / 3 for c, a in pairs]


def task(rows: int = 6) -> Task:
    held_out = [
        {"prompt": "abc"[: 1 + n % 3] * (n + 1), "answer": "abc"[n % 3]} for n in range(rows)
    ]
    return Task("letters", held_out[:2], held_out, reward, 8, None, answer_of=whole)


def config(**options: Any) -> GRPOConfig:
    return GRPOConfig("unused", max_completion_length=8, report_to="none", **options)


# ---- eval ---------------------------------------------------------------------------------------


def test_samples_are_counted_prompt_by_prompt() -> None:
    """The rows come back in their order, whatever order they were sampled in."""
    torch.manual_seed(0)
    model, tokenizer = models.tiny(torch.float32)
    seen: dict[str, list[str]] = {}

    def watching(prompts: Any, completions: Any, answer: Any, **_: Any) -> list[float | None]:
        for prompt, completion in zip(prompts, completions, strict=True):
            seen.setdefault(prompt, []).append(completion)
        return reward(completions, answer)

    given = task()
    watched = Task("letters", given.train, given.held_out, watching, 8, None, answer_of=whole)
    args = config(seed=3, per_device_eval_batch_size=8)
    found = evaluation.draw(model, tokenizer, watched, args, samples=4)
    texts = [seen[row["prompt"]] for row in given.held_out]
    assert [len(row) for row in texts] == [4] * 6
    values = [reward(t, [row["answer"]] * 4) for t, row in zip(texts, given.held_out, strict=True)]
    assert found.correct == [[value == 1.0 for value in row] for row in values]
    assert found.answers == [[whole(text) for text in row] for row in texts]
    assert found.failed == sum(value is None for row in values for value in row)
    assert 0 < found.length <= 8
    prompt_tokens = 4 * sum(len(row["prompt"]) for row in given.held_out)
    assert found.tokens == prompt_tokens + round(found.length * 24)
    again = evaluation.draw(model, tokenizer, given, args, samples=4)
    assert again == found
    other = evaluation.draw(model, tokenizer, given, config(seed=4), samples=4)
    assert other.answers != found.answers


def test_estimates_of_samples() -> None:
    assert SAMPLES.pass_at(1) == [0.5, 0.0, 1.0]
    assert SAMPLES.pass_at(2) == [1 - 1 / 6, 0.0, 1.0]
    assert SAMPLES.majority_at(4, seed=0) == [1.0, 0.0, 1.0]
    assert SAMPLES.tokens_per_sample == 20
    result = evaluation.describe(SAMPLES, [1, 4], level=0.9, seed=0)
    assert result["pass"][4].mean == pytest.approx(2 / 3)
    assert result["correct_per_prompt"] == [2, 0, 4]
    assert (result["failed"], result["tokens"]) == (1, 240)


def test_models_are_compared_prompt_by_prompt() -> None:
    better = Samples([[True] * 4] * 3, ANSWERS, 240, 4.0, 0)
    change = evaluation.compare(SAMPLES, better, [1, 4], 0.95, 0)
    assert change[1] == passk.bootstrap([0.5, 1.0, 0.0])
    assert change[4].mean == pytest.approx(1 / 3)


def test_untrained_samples_for_the_tokens_of_training(tmp_path: Path) -> None:
    entries = [{"step": 1, "num_tokens": 60.0}, {"step": 2, "num_tokens": 130.0}, {"step": 2}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(e)}\n" for e in entries))
    # a sample of each of 3 prompts takes 60 tokens
    found = evaluation.matched(tmp_path, SAMPLES, 0.95, 0)
    assert (found["G"], found["samples"], found["limited"]) == (3, 3, False)
    assert found["best_of_G"].mean == pytest.approx((1 + 0 + 1) / 3)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 2, "num_tokens": 6000.0}))
    found = evaluation.matched(tmp_path, SAMPLES, 0.95, 0)
    assert (found["G"], found["samples"], found["limited"]) == (101, 4, True)
    with pytest.raises(ValueError, match="no metrics"):
        evaluation.matched(tmp_path / "none", SAMPLES, 0.95, 0)


def test_the_eval_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An untrained and a trained model, in pairs; the same command gives the same file."""
    run = tmp_path / "run"
    train = ["train", "--model", "tiny", "--steps", "8", "--output-dir", str(run)]
    assert cli.main(train) == 0
    out = tmp_path / "eval.json"
    words = ["eval", "--model", "tiny", "--task", "digits", "--samples", "2", "--seed", "5"]
    words += ["--compare", str(run / "model"), "--match-run", str(run), "--output", str(out)]
    assert cli.main(words) == 0
    printed = capsys.readouterr().out
    assert "| difference to tiny, paired | pass@1 | pass@2 |" in printed
    assert "samples of each prompt untrained" in printed
    first = json.loads(out.read_text())
    assert [r["name"] for r in first["results"]] == ["tiny", str(run / "model")]
    assert first["prompts"] == len(first["results"][1]["correct_per_prompt"]) == 256
    base, trained = (r["pass"]["1"]["mean"] for r in first["results"])
    change = first["results"][1]["difference"]["1"]
    assert change["mean"] == pytest.approx(trained - base)
    assert change["low"] <= change["mean"] <= change["high"]
    assert cli.main(words) == 0
    assert json.loads(out.read_text()) == first


def test_adapters_are_merged(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from fused_grpo.trainer.demo import lora

    torch.manual_seed(0)
    model, _ = models.tiny(torch.float32)
    ids = torch.arange(5)[None]
    plain = model(ids).logits
    from peft import get_peft_model

    adapted = get_peft_model(model, lora(2))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    expected = adapted.eval()(ids).logits
    adapted.save_pretrained(tmp_path)
    torch.manual_seed(0)
    again, _ = models.tiny(torch.float32)
    merged = models.with_adapter(again, str(tmp_path))
    assert not any("lora" in name for name, _ in merged.named_parameters())
    torch.testing.assert_close(merged(ids).logits, expected)
    assert (expected - plain).abs().max() > 0.1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--k", "9"], "--k 9 must lie between 1 and --samples 8"),
        (["--samples", "0"], "--samples 0 must be at least 1"),
        (["--steps", "3"], "eval does not know --steps 3"),
    ],
)
def test_wrong_options_of_eval(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["eval", "--model", "tiny", *words]) == 2
    assert message in capsys.readouterr().err


# ---- ablate -------------------------------------------------------------------------------------


def test_controls() -> None:
    given = Task("sums", [], [], reward, 8, None, answer_of=lambda text: text.strip() or None)
    lots = ablation.random_reward(given)(completions=["a"] * 2000, answer=["a"] * 2000)
    assert set(lots) == {0.0, 1.0}
    assert abs(sum(lots) - 1000) < 4 * (2000 / 4) ** 0.5
    shape = ablation.format_reward(given)
    assert shape(completions=["3", "12", "x", "", "-1.5"], answer=["7"] * 5) == [1, 1, 0, 0, 1]
    assert shape(completions=["3", "x"], answer=["Ann"] * 2) == [0, 1]
    assert shape(completions=["3", ""]) == [1, 0]
    conversation = [[{"role": "assistant", "content": "4"}]]
    assert shape(completions=conversation, answer=["7"]) == [1]


def outcome(rewards: list[float], lengths: list[float]) -> dict[str, Any]:
    change = passk.Interval(0.1, 0.05, 0.2, 0.95).json()
    return {
        "before": 0.1,
        "after": 0.5,
        "pass": [change] * 3,
        "rewards": rewards,
        "lengths": lengths,
    }


def test_lengths_are_compared_at_the_same_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablation, "SMOOTHED", 1)
    runs = {
        "grpo": [outcome([0.0, 0.4, 0.8], [10, 20, 30]), outcome([0.2, 0.4, 1.0], [10, 20, 40])],
        "dapo": [outcome([0.1, 0.2, 0.6], [8, 8, 12])],
        "random_reward": [outcome([0.1, 0.1, 0.1], [8, 8, 8])],
    }
    report = ablation.summarise(runs)
    assert report["matched_reward"] == 0.6  # the control's 0.1 does not count
    found = {n: v["length_at_matched_reward"] for n, v in report["variants"].items()}
    # between step 2 (reward 0.4, length 20) and step 3 (0.9, 35)
    assert found == {"grpo": pytest.approx(20 + 15 * 0.4), "dapo": 12, "random_reward": None}
    text = ablation.render({"seeds": [0, 1], **report})
    assert "| random_reward |" in text
    assert "not reached" in text


def test_the_ablate_command_and_what_it_skips(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["ablate", "--model", "tiny", "--task", "digits", "--steps", "3", "--seeds", "0"]
    words += ["--variants", "grpo", "random_reward", "--output-dir", str(tmp_path)]
    rest = ["--num-generations", "4"]
    assert cli.main([*words, *rest]) == 0
    report = json.loads((tmp_path / "ablation.json").read_text())
    assert list(report["variants"]) == ["grpo", "random_reward"]
    assert (tmp_path / "ablation.png").read_bytes().startswith(b"\x89PNG")
    metrics = [
        json.loads(line)
        for line in (tmp_path / "random_reward/seed-0/metrics.jsonl").read_text().splitlines()
    ]
    steps = [entry for entry in metrics if "completions/mean_length" in entry and "loss" in entry]
    assert len(steps) == 3
    for entry in steps:  # trained on the lot, the task's reward measured
        assert entry["reward"] == pytest.approx(entry["rewards/lot/mean"])
        assert "rewards/digit_share/mean" in entry
    measured = report["variants"]["random_reward"]["rewards"]
    assert measured[0] == pytest.approx(steps[0]["rewards/digit_share/mean"])
    capsys.readouterr()
    stamp = (tmp_path / "grpo/seed-0/metrics.jsonl").stat().st_mtime_ns
    (tmp_path / "random_reward/seed-0" / ablation.SUMMARY_FILE).unlink()  # as if it had been killed
    assert cli.main([*words, *rest]) == 0
    printed = capsys.readouterr().out
    assert "grpo, seed 0: finished before" in printed
    assert "random_reward, seed 0\n" in printed
    assert (tmp_path / "grpo/seed-0/metrics.jsonl").stat().st_mtime_ns == stamp
    again = json.loads((tmp_path / "ablation.json").read_text())
    assert again["variants"]["grpo"] == report["variants"]["grpo"]
    assert cli.main(words) == 2
    assert "holds a run of other options" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--variants", "ppo"], "--variants 'ppo' is unknown; choose of grpo, no_std"),
        (["--loss-type", "dapo"], "--loss-type is set by the variants"),
        (["--scale-rewards=none"], "is set by the variants"),
    ],
)
def test_wrong_options_of_ablate(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["ablate", "--model", "tiny", "--output-dir", str(tmp_path), *words]) == 2
    assert message in capsys.readouterr().err
