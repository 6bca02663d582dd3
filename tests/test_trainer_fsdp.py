"""`GRPOTrainer` under FSDP2: two processes, each with half of every weight, train as one does."""

from __future__ import annotations

import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ranks_trainer
import torch
from ranks_trainer import CASES, greedy, train, trainer
from transformers import LlamaForCausalLM

LOGGED = ("loss", "grad_norm", "reward", "entropy", "num_tokens")


def start(out: Path, names: list[str], *launcher: str, sharding: str = "arguments") -> None:
    """Runs the cases in processes that `launcher` starts, and waits."""
    ranks_trainer.build(untied=False)[0].save_pretrained(out / "model")
    program = [ranks_trainer.__file__, str(out), ",".join(names), sharding]
    command = [sys.executable, "-m", *launcher, *program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two processes have left what became of all cases: their start takes longest."""
    out = tmp_path_factory.mktemp("two")
    start(out, list(CASES), "torch.distributed.run", "--nproc_per_node=2", "--standalone")
    return out


def ranks(folder: Path, name: str) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{name}-{rank}.pt", weights_only=False) for rank in (0, 1)]


def same(got: dict[str, Any], want: dict[str, Any]) -> None:
    for key, weight in want["weights"].items():
        torch.testing.assert_close(got["weights"][key], weight, atol=2e-6, rtol=1e-5, msg=key)
    assert got["eval"] == pytest.approx(want["eval"], rel=1e-6)
    for one, other in zip(want["logs"], got["logs"], strict=True):
        for name in set(LOGGED) & set(one):
            assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_as_one(two: Path, tmp_path: Path, name: str) -> None:
    """D1, D4: weights, metrics, an evaluation with uneven shares; the same bits on both ranks."""
    first, second = ranks(two, name)
    assert first["sharded"]
    for key, weight in first["weights"].items():
        assert torch.equal(weight, second["weights"][key]), key
    same(first, train(tmp_path, CASES[name] | {"resume": False}))


@pytest.mark.parametrize("name", [name for name in CASES if "resume" in CASES[name]])
def test_a_resumed_run_ends_as_the_uninterrupted_one(two: Path, name: str) -> None:
    for rank in ranks(two, name):
        for key, weight in rank["weights"].items():
            assert torch.equal(rank["resumed"]["weights"][key], weight), key
        assert rank["resumed"]["eval"] == rank["eval"]


def test_a_checkpoint_is_that_of_the_model(two: Path) -> None:
    """transformers loads it, as if one process had saved it."""
    saved = two / "resumed" / f"checkpoint-{ranks_trainer.STEPS}"
    model = LlamaForCausalLM.from_pretrained(saved)
    for key, weight in ranks(two, "resumed")[0]["weights"].items():
        assert torch.equal(model.state_dict()[key], weight), key


def test_sampling_from_shards(two: Path, tmp_path: Path) -> None:
    """Prompts, lengths and the number of steps differ between the ranks; one process with the
    whole weights finds the same completions."""
    run = trainer(tmp_path, CASES["untied"])
    found = ranks(two, "untied")
    run.model.load_state_dict(found[0]["weights"])
    steps = []
    for prompts, result in zip(ranks_trainer.SAMPLED, found, strict=True):
        want = greedy(run, prompts, result["ends"])
        assert result["sampled"] == want
        steps.append(max(map(len, want)))
    assert steps[0] < steps[1]


# ---- other ways to start ------------------------------------------------------------------------

ACCELERATE = {
    "FSDP": """
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_reshard_after_forward: true
  fsdp_cpu_ram_efficient_loading: true
""",
    "MULTI_GPU": "",  # processes of their own, which use the CPU here
}


@pytest.mark.parametrize("kind", ["FSDP", pytest.param("MULTI_GPU", marks=pytest.mark.slow)])
def test_accelerate_launch(two: Path, tmp_path: Path, kind: str) -> None:
    """Its file decides how the weights lie; with FSDP one process alone reads the checkpoint."""
    file = tmp_path / "accelerate.yaml"
    file.write_text(f"distributed_type: {kind}\nnum_processes: 2\n{ACCELERATE[kind]}")
    launcher = ("accelerate.commands.launch", "--config_file", str(file), "--main_process_port=0")
    start(tmp_path, ["named"], *launcher, sharding="launcher")
    first, second = ranks(tmp_path, "named")
    assert first["sharded"] == (kind == "FSDP")
    for key, weight in first["weights"].items():
        assert torch.equal(weight, second["weights"][key]), key
    same(first, ranks(two, "named")[0])


@pytest.mark.slow
def test_two_nodes(two: Path, tmp_path: Path) -> None:
    """Two agents that find each other at an address, as on two machines, one process each."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    launcher = ["torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", "--rdzv_id=test"]
    launcher += ["--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{port}"]
    with ThreadPoolExecutor() as nodes:
        jobs = [nodes.submit(start, tmp_path, ["tied", "resumed"], *launcher) for _ in range(2)]
        for job in jobs:
            job.result()
    for name in ("tied", "resumed"):
        same(ranks(tmp_path, name)[0], ranks(two, name)[0])
