"""Small runs for the tests of checkpoints: interrupted, resumed, compared bit for bit."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.models import tiny

PROMPTS = [{"prompt": text} for text in ("ab", "hello", "x=1+2", "no", "q: a")]
STEPS = 6

gc.freeze()  # the Trainer collects garbage whenever it starts: spare it what imports have made


class Crash(RuntimeError):
    """Stands for a killed process: nothing of the run is cleaned up."""


class CrashAt(TrainerCallback):
    """Raises once the checkpoint of a step is there, and training has gone on a little."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.on_pre_optimizer_step(args, state, control)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step >= self.step:
            raise Crash


def letters(completions: list[str], **_: Any) -> list[float]:
    return [sum(c in "abcdefghijklm" for c in text) / 5 for text in completions]


def config(path: Path, **options: Any) -> GRPOConfig:
    defaults = {
        "output_dir": str(path),
        "max_steps": STEPS,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "learning_rate": 1e-2,
        "save_strategy": "steps",
        "save_steps": 1,
        "disable_tqdm": True,
        "use_cpu": True,
        "report_to": "none",
    }
    return GRPOConfig(**{**defaults, **options})


def trainer(path: Path, reward: Any = letters, **options: Any) -> GRPOTrainer:
    """A run of the random model over characters, the same whenever it is made."""
    extra = {k: options.pop(k) for k in ("peft_config", "callbacks") if k in options}
    prompts = options.pop("prompts", PROMPTS)
    torch.manual_seed(options.pop("model_seed", 0))
    model, tokenizer = tiny(torch.float32)
    args = config(path, **options)
    return GRPOTrainer(model, reward, args, prompts, PROMPTS[:3], tokenizer, **extra)


def crash(path: Path, step: int, **options: Any) -> None:
    """Leaves in `path` what a run leaves that dies after the checkpoint of a step."""
    run = trainer(path, callbacks=[CrashAt(step)], **options)
    try:
        run.train()
    except Crash:
        return
    raise AssertionError("the run has not crashed")


def timeless(entries: list[dict[str, Any]]) -> list[str]:
    """Log entries without what a clock says, comparable with NaN in them."""
    clocks = ("time", "runtime", "per_second", "train_loss", "total_flos", "peak_gb")
    kept = [{k: v for k, v in e.items() if not k.endswith(clocks)} for e in entries]
    return [json.dumps(entry, sort_keys=True) for entry in kept]


def metrics(path: Path) -> list[str]:
    lines = (path / "metrics.jsonl").read_text().splitlines()
    return timeless([json.loads(line) for line in lines])


def tensors(value: Any, place: str = "") -> dict[str, torch.Tensor]:
    """The tensors in nested dicts and lists, and numbers as tensors."""
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, (list, tuple)):
        items = list(enumerate(value))
    else:
        return {} if value is None else {place: torch.as_tensor(value)}
    return {k: v for key, item in items for k, v in tensors(item, f"{place}/{key}").items()}


def assert_same(one: GRPOTrainer, two: GRPOTrainer) -> None:
    """Weights, optimizer, schedule, logs, controllers and the random state, bit for bit."""
    for part in ("model", "optimizer", "lr_scheduler"):
        left, right = (
            {k: v for k, v in tensors(getattr(run, part).state_dict()).items() if "_get" not in k}
            for run in (one, two)
        )
        assert left.keys() == right.keys()
        for name, tensor in left.items():
            assert torch.equal(tensor, right[name]), f"{part} {name}"
    assert timeless(one.state.log_history) == timeless(two.state.log_history)
    assert metrics(Path(one.args.output_dir)) == metrics(Path(two.args.output_dir))
    assert one.controls.state_dict() == two.controls.state_dict()
    assert one.state.num_input_tokens_seen == two.state.num_input_tokens_seen
