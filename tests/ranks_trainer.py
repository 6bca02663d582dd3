"""What each of two processes trains in `test_trainer_fsdp`, and one process for comparison."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from peft import LoraConfig
from test_trainer_ddp import GROUP, PROMPTS, Script, letters
from transformers import LlamaConfig, LlamaForCausalLM

from fused_grpo.integrations.models import is_sharded
from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.models import tiny

STEPS = 3
LORA = LoraConfig(
    r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False
)
OWN = ("untied", "peft", "sharded", "resume", "fsdp", "named")  # of `train`, not of the config
EVALUATED = [*PROMPTS, {"prompt": "five"}]  # one row more than ranks share evenly
SAMPLED = (["x=1+2", "hello"], ["ab", "q", "zz"])
ENDS = {"eos_token_id": list(range(25))}

EACH = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer", "Linear"]}  # the head is one

ADAM = {"optim": "adamw_torch", "adam_epsilon": 0.01}  # small gradients stay small

MOVING = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1}
ADAPTIVE = {"use_adaptive_kl": True, "kl_horizon": 16}

# what a rank does, and one process with all the data as well
CASES: dict[str, dict[str, Any]] = {
    "tied": {"beta": 0.1},
    "named": {"named": True, "beta": 0.1},
    "untied": {"untied": True, "loss_type": "grpo"},
    "clipped": {"max_grad_norm": 0.05},
    "padding_free": {"padding_free": True, "beta": 0.1},
    "checkpointing": {"gradient_checkpointing": True},
    "checkpointing by FSDP": {"fsdp": {"activation_checkpointing": True}, "untied": True},
    "iterations": {"num_iterations": 3, "untied": True},
    "lora": {"peft": LORA, "beta": 0.1},
    "full KL": {"beta": 0.1, "kl_estimator": "full"},
    "head by itself": {"untied": True, "fsdp": EACH, "beta": 0.1, "kl_estimator": "full"},
    "routed head": {"backward": "routed", "route_tau": 0.0, "untied": True},
    "resumed": {"resume": True, **MOVING, **ADAPTIVE, "max_grad_norm": 0.5, **ADAM},
    "resumed from shards": {"resume": True, "sharded": True, **ADAM, **MOVING},
}


def build(untied: bool) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model: Any
    model, tokenizer = tiny(torch.float32)
    if untied:
        options = model.config.to_dict() | {"tie_word_embeddings": False}
        model = LlamaForCausalLM(LlamaConfig(**options)).eval()
    return model, tokenizer


def trainer(out: Path, options: dict[str, Any], saved: Path | None = None) -> GRPOTrainer:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    own = {name: options[name] for name in OWN if name in options}
    model, tokenizer = build(own.get("untied", False))
    if saved is not None and own.get("named"):
        model = str(saved)
    shard = {}
    if ranks > 1 and own.get("fsdp", {}) is not None:
        kind = "SHARDED_STATE_DICT" if own.get("sharded") else "FULL_STATE_DICT"
        wrap = own.get("fsdp", {})
        shard = {"fsdp": True, "fsdp_config": {"version": 2, "state_dict_type": kind, **wrap}}
    defaults = {
        "max_steps": STEPS,
        "per_device_train_batch_size": GROUP // 2 if ranks == 1 else GROUP // 4,
        "gradient_accumulation_steps": 2,
        "num_generations": GROUP,
        "max_completion_length": 5,
        "learning_rate": 0.05,
        "optim": "sgd",  # Adam would blow up the rounding of gradients near 0
        "per_device_eval_batch_size": 1,
        "save_strategy": "steps" if own.get("resume") else "no",
        "save_steps": 2,
        "disable_tqdm": True,
        "report_to": "none",
        "use_cpu": True,
        "generation_kwargs": ENDS,
        "ddp_backend": "gloo" if ranks > 1 else None,
    }
    options = {name: value for name, value in options.items() if name not in OWN}
    args = GRPOConfig(str(out), **(defaults | shard | options))
    run = GRPOTrainer(
        model, letters, args, PROMPTS, EVALUATED, tokenizer, peft_config=own.get("peft")
    )
    run.collector.sampler = Script(tokenizer, args.process_index)  # type: ignore[assignment]
    return run


def state(run: GRPOTrainer) -> dict[str, Any]:
    """All weights, whole, on every rank; what was logged; what an evaluation finds."""
    weights = {}
    for name, tensor in run.model.state_dict().items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        weights[name] = whole.detach().clone()
    evaluated = run.evaluate()
    evaluated = {k: v for k, v in evaluated.items() if "runtime" not in k}
    logged = [entry for entry in run.state.log_history if "grad_norm" in entry]
    return {"weights": weights, "logs": logged, "eval": evaluated}


def greedy(run: GRPOTrainer, prompts: list[str], ends: list[int]) -> list[list[int]]:
    run.sampler.eos_ids = ends
    return run.sampler(run.model, prompts, copies=2, greedy=True).completions()


def train(out: Path, options: dict[str, Any], saved: Path | None = None) -> dict[str, Any]:
    run = trainer(out, options, saved)
    run.train()
    result = state(run)
    result["sharded"] = is_sharded(run.model)
    ends = sorted({ids[0] for ids in gather_object(greedy(run, SAMPLED[0], [-1]))})
    result["ends"] = ends  # of rank 0's prompts, which are through after one step
    result["sampled"] = greedy(run, SAMPLED[run.args.process_index], ends)
    if options.get("resume"):
        again = trainer(out, options)
        again.train(resume_from_checkpoint=str(out / "checkpoint-2"))
        result["resumed"] = state(again)
    return result


def main(out: str, names: str, sharding: str = "arguments") -> None:
    """Cases `names`, with commas; `sharding` "launcher" leaves it to the command that started."""
    torch.set_num_threads(1)
    how = {"fsdp": None} if sharding == "launcher" else {}
    for name in names.split(","):
        folder = Path(out)
        result = train(folder / name, CASES[name] | how, folder / "model")
        torch.save(result, folder / f"{name}-{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
