"""Each script in examples/ runs, and its loss before is its loss after."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["plain_loop", "trainer_subclass"])
def test_the_loss_before_is_the_loss_after(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Over some updates, of which each starts where the one before has led."""
    before, after, apart = load(name).main(["--steps", "4"])
    assert len(before) == len(after) >= 4
    assert max(map(abs, before)) > 0.05
    assert after == pytest.approx(before, abs=2e-6)
    assert apart < 1e-4  # Adam divides by the gradient's size, so that rounding shows
    assert "differ by at most" in capsys.readouterr().out


def test_one_update_has_the_gradient_of_the_plain_loss() -> None:
    example = load("plain_loop")
    model, tokenizer = example.tiny(torch.float32)
    batch = example.sample(model, model, tokenizer)
    batch.old_logps = batch.old_logps + 0.2 * torch.randn_like(batch.old_logps)
    grads = []
    for loss_of in (example.loss_before, example.loss_after):
        loss = loss_of(model, batch)
        grads.append(torch.autograd.grad(loss, list(model.parameters())))
    for want, got in zip(*grads, strict=True):
        assert (got - want).norm() <= 1e-5 * want.norm() + 1e-8


BANDIT = {"plain": [], "all terms": ["--beta", "0.3", "--entropy-coef", "0.1"]}


@pytest.mark.parametrize("name", BANDIT)
def test_the_bandit_learns_the_best_answer(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example, path = load("bandit"), tmp_path / "bandit.png"
    history = example.main(["--plot", str(path), *BANDIT[name]])
    assert history.fused == pytest.approx(history.plain, abs=1e-6)
    assert history.policy[0][1] < 0.5
    assert history.policy[-1].argmax() == 1
    assert history.reward[-1] > 0.75
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if "clipped" in line]) == 13
    assert "█" in lines[-2]
    assert path.read_bytes().startswith(b"\x89PNG")


def test_what_the_bandit_says_about_its_options(tmp_path: Path) -> None:
    """The clip bounds how far one group moves the policy; KL and entropy keep it undecided."""
    example, plot = load("bandit"), ["--plot", str(tmp_path / "b.png")]

    def run(*options: str) -> Any:
        return example.main([*options, *plot, "--steps", "40"])

    clipped = run("--updates", "20")
    free = run("--updates", "20", "--epsilon", "0.99", "--epsilon-high", "1e6")
    assert free.kl[0] > 5 * clipped.kl[0]
    plain = run()
    assert run("--beta", "1").kl[-1] < 0.5 * plain.kl[-1]
    assert run("--entropy-coef", "1").entropy[-1] > 2 * plain.entropy[-1]


def test_they_run_as_scripts(tmp_path: Path) -> None:
    """From another folder, as a reader would."""
    command = [sys.executable, str(EXAMPLES / "bandit.py"), "--steps", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "bandit.png").exists()
