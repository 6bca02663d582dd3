"""Real runs of TRL's trainer on a tiny model with a tiny tokenizer, both made here."""

from __future__ import annotations

import functools
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

WORDS = [f"w{i}" for i in range(40)]


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def save_with_bytes(folder: Path) -> None:
    """A model with a tokenizer of single bytes, as a script loads them by name."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    symbols = ["<pad>", "<eos>", "<unk>", *sorted(ByteLevel.alphabet())]
    Qwen2Tokenizer(
        vocab={symbol: i for i, symbol in enumerate(symbols)},
        merges=[],
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
    ).save_pretrained(folder)
    model(vocab_size=len(symbols)).save_pretrained(folder)


def model(kind: str = "qwen2", **changes: Any) -> Any:
    """With weights large enough for distributions that are not flat."""
    import transformers

    size: dict[str, Any] = {
        "vocab_size": len(WORDS) + 3,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    name = "Qwen2"
    if kind == "qwen2_moe":
        name = "Qwen2Moe"
        size |= {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 8,
            "decoder_sparse_step": 1,
        }
    config = getattr(transformers, f"{name}Config")(**{**size, **changes})
    torch.manual_seed(11)
    made = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        made.get_output_embeddings().weight.mul_(8.0)
    return made


@functools.cache
def saved(kind: str) -> tempfile.TemporaryDirectory[str]:
    """Where the reference model is loaded from; gone with the process."""
    folder: tempfile.TemporaryDirectory[str] = tempfile.TemporaryDirectory()
    model(kind).save_pretrained(folder.name)
    return folder


def prefers_low_ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Spread out enough that every group has advantages of both signs."""
    return [sum(1.0 / (1 + i % 7) for i in ids) / max(len(ids), 1) for ids in completion_ids]


def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Random completions whose middle a tool has written, and the sampler's log-probabilities.

    Every completion gets a prompt of its own: the first tokens after one and the same would have
    equal entropies, and rounding would decide which of them a quantile keeps.
    """
    draw = random.Random(2 * trainer.state.global_step + trainer.accelerator.process_index)
    out: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "env_mask": []}
    for _ in prompts:
        length = draw.randint(2, 6)
        tool = range(1, draw.randint(1, length))
        out["prompt_ids"].append([draw.randrange(3, 40) for _ in range(draw.randint(2, 4))])
        end = [1] if draw.random() < 0.6 else [draw.randrange(3, 40)]  # or cut off
        ids = [draw.randrange(3, 40) for _ in range(length - 1)]
        out["completion_ids"].append(ids + end)
        out["logprobs"].append([-4 * draw.random() for _ in range(length)])
        out["env_mask"].append([0 if i in tool else 1 for i in range(length)])
    return out


def trainer(cls: Any, folder: Path, kind: str = "qwen2", **options: Any) -> Any:
    """A trainer of `cls`; the same seeds, whatever the class."""
    from datasets import Dataset
    from trl import GRPOConfig

    more = {k: options.pop(k) for k in ("peft_config", "fused_options") if k in options}
    if options.pop("rollout", False):
        more["rollout_func"] = rollout
    policy = model(kind)
    policy.config._name_or_path = saved(kind).name
    draw = random.Random(5)
    prompts = [" ".join(draw.choices(WORDS, k=3 + i % 3)) for i in range(16)]
    given = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 10,
        "learning_rate": 5e-3,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
        "bf16": False,
        "dataloader_num_workers": 0,
        **options,
    }
    return cls(
        model=policy,
        reward_funcs=prefers_low_ids,
        args=GRPOConfig(**given),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer(),
        **more,
    )


TIMES = ("runtime", "per_second", "step_time", "flos")


def train(made: Any) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """(what each step logged, the parameters at the end)."""
    torch.manual_seed(7)
    made.train()
    logs = [
        {k: v for k, v in entry.items() if not any(name in k for name in TIMES)}
        for entry in made.state.log_history
    ]
    return logs, {name: p.detach().clone() for name, p in made.model.named_parameters()}
