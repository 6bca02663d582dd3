"""Two processes at one server: each asks for its share, the first hands over the weights.

This file is also the program that each process runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from fused_grpo.trainer import GRPOConfig, GRPOTrainer, RolloutError
from fused_grpo.trainer.models import tiny

PROMPTS = [{"prompt": text} for text in ("ab", "hello", "x=1+2", "no")]
STEPS = 3


def letters(completions: list[str], **_: Any) -> list[float]:
    return [sum(c in "abcdefghijklm" for c in text) / 5 for text in completions]


def trainer(url: str, out: str, **more: Any) -> GRPOTrainer:
    torch.manual_seed(0)
    model, tokenizer = tiny(torch.float32)
    args = GRPOConfig(
        out,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=5,
        learning_rate=3e-2,
        sampling_correction="monitor",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=url,
        server_retries=0,
        **more,
    )
    return GRPOTrainer(model, letters, args, PROMPTS, PROMPTS[:1], tokenizer)


def test_two_processes_at_one_server(tmp_path: Path) -> None:
    from rollout_server import Server

    torch.manual_seed(0)
    model, tokenizer = tiny(torch.float32)
    server = Server(model, tokenizer.eos_token_id)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    try:
        done = subprocess.run(
            [*command, __file__, server.url, str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=200,
        )
    finally:
        server.close()
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(server.loaded) == STEPS, "the first process alone hands over the weights"
    assert len(server.sampled("/v1/completions")) == 2 * STEPS
    for rank in (0, 1):
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        assert "the server did not get the weights: " in seen["error"]
        if rank == 0:
            assert len(seen["gaps"]) == STEPS
            assert max(seen["gaps"]) < 2e-5


def main(url: str, out: str) -> None:
    torch.set_num_threads(1)
    run = trainer(url, out)
    run.train()
    logged = [e for e in run.state.log_history if "grad_norm" in e]
    seen = {"gaps": [entry["sampling/logp_difference/max"] for entry in logged]}
    occupied = Path(out) / "file"
    if run.args.process_index == 0:
        occupied.write_text("no folder")
    run.accelerator.wait_for_everyone()
    try:
        trainer(url, out, weight_sync_dir=str(occupied)).train()
    except RolloutError as error:
        seen["error"] = str(error)
    (Path(out) / f"{os.environ['RANK']}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
