"""A long completion trained under a memory limit: `python -m benchmarks.long_context`.

A small model with a real vocabulary takes optimizer steps on a completion of 32,768 tokens, through
`GRPOTrainer`, whose sampling alone is replaced by fixed tokens. Every run is a process of its own
under the same limit on its address space (`ulimit -v`): with the fused loss, and with an eager one
on full logits, which are [32768, 151936] x 4 bytes = 19.9 GB. Both recompute activations, and the
eager one is given the completion's logits only, not the prompt's.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

GB = 1e9
PROMPT = 64
WORKER = "--worker"
HEADS = ("eager", "fused")


def build(vocab: int, width: int, layers: int) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=2**17,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config)


class FixedTokens:
    """In the sampler's place: a completion of full length and one of 64 tokens, always the same."""

    def __init__(self, vocab: int, length: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.prompt = torch.randint(2, vocab, (1, PROMPT), generator=generator)
        self.completions = torch.randint(2, vocab, (2, length), generator=generator)
        self.mask = torch.arange(length) < torch.tensor([[length], [64]])

    def __call__(self, model: Any, prompts: Any, copies: int = 1, greedy: bool = False) -> Any:
        from fused_grpo.trainer.rollout import Sample

        prompt = self.prompt.expand(2, -1)
        ended = torch.ones(2, dtype=torch.bool)
        return Sample(prompt, torch.ones_like(prompt).bool(), self.completions, self.mask, ended)


def eager_loss(self: Any, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
    """`compute_loss` on full logits, in fp32: what a trainer without a fused head does."""
    length = inputs.completion_ids.shape[1]
    logits = model(**inputs.model_inputs(self.model), logits_to_keep=length).logits.float()
    logps = logits.log_softmax(-1).gather(-1, inputs.completion_ids[..., None])[..., 0]
    ratio = (logps - logps.detach()).exp()
    policy = -(ratio * inputs.advantages[:, None])
    return torch.where(inputs.completion_mask, policy, 0).sum() / inputs.num_items


def worker(row: dict[str, Any]) -> None:
    """Trains in this process under the limit, and prints what it took as the last line."""
    from fused_grpo.trainer import GRPOConfig, GRPOTrainer
    from fused_grpo.trainer.models import character_tokenizer

    torch.set_num_threads(row["threads"])
    resource.setrlimit(resource.RLIMIT_AS, (row["limit"], row["limit"]))
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            folder,
            max_steps=row["steps"],
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            num_generations=2,
            max_completion_length=row["length"],
            gradient_checkpointing=True,
            padding_free=True,
            learning_rate=1e-3,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        model = build(row["vocab"], row["width"], row["layers"])
        kind = {"compute_loss": eager_loss} if row["head"] == "eager" else {}
        trainer: Any = type("Trainer", (GRPOTrainer,), kind)(
            model,
            lambda completions, **_: [1.0, 0.0],
            args,
            [{"prompt": "a"}],
            processing_class=character_tokenizer(),
        )
        trainer.collector.sampler = FixedTokens(row["vocab"], row["length"])
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    found = {
        "seconds": seconds,
        "peak_rss": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }
    print(json.dumps(found | {name: [e[name] for e in logs] for name in ("loss", "grad_norm")}))


def run(row: dict[str, Any]) -> dict[str, Any]:
    """`row` and what a fresh process made of it: its results, or how it ended."""
    command = [sys.executable, "-m", "benchmarks.long_context", WORKER, json.dumps(row)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "Error" in line]
        return row | {"failed": (errors or [f"exit status {done.returncode}"])[-1]}
    return row | json.loads(done.stdout.splitlines()[-1])


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, a row per run."""
    lines = ["| head | limit (GB) | full logits (GB) | steps | seconds a step | peak RSS (GB) |"]
    lines.append("|---|---|---|---|---|---|")
    for row in rows:
        logits = row["length"] * row["vocab"] * 4 / GB
        start = f"| {row['head']} | {row['limit'] / GB:.1f} | {logits:.1f} | "
        if "failed" in row:
            what = "out of memory" if "allocate memory" in row["failed"] else row["failed"]
            lines.append(f"{start}0: {what} | | |")
        else:
            each = row["seconds"] / row["steps"]
            lines.append(f"{start}{row['steps']} | {each:.0f} | {row['peak_rss'] / GB:.2f} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Runs both losses, prints a table, writes `OUT/NAME-long-context.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=32_768, help="tokens of the completion")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=int, default=6 * 10**9, help="bytes of address space")
    parser.add_argument("--head", choices=HEADS, nargs="+", default=HEADS)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--name", default="run", help="of the machine")
    options = vars(parser.parse_args(argv))
    heads, out, name = (options.pop(key) for key in ("head", "out", "name"))
    rows = [run({"head": head, **options}) for head in heads]
    print(table(rows))
    if out is not None:
        result = {"machine": platform.platform(), "torch": torch.__version__, "runs": rows}
        (out / f"{name}-long-context.json").write_text(json.dumps(result, indent=1) + "\n")
    return rows


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        worker(json.loads(sys.argv[2]))
    else:
        main()
