"""The memory planner against what autograd and the loss really hold."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_tracker import MemoryTracker
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from fused_grpo import grpo_loss, plan_memory
from fused_grpo.cli import main
from fused_grpo.integrations.models import add_head_forward
from fused_grpo.memory import chunk_bytes_used
from fused_grpo.model_shapes import SHAPES, shape_of
from fused_grpo.plan import LOSSES, RESERVE, loss_memory, saved_per_token

CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig,
    "qwen3": Qwen3Config,
    "gemma3": Gemma3TextConfig,
    "qwen3_moe": Qwen3MoeConfig,
}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
TOKENS = 256


def config(kind: str, layers: int, **changes: Any) -> Any:
    options: dict[str, Any] = {
        "num_hidden_layers": layers,
        "hidden_size": 192,
        "intermediate_size": 320,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 250,
        "tie_word_embeddings": False,
        "attn_implementation": "sdpa",
    }
    if kind == "qwen3_moe":
        options |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    if kind == "gemma3":
        options["layer_types"] = ["full_attention"] * layers
    return CONFIGS[kind](**options | changes)


def saved_by_a_layer(kind: str, dtype: str, rank: int | None = None) -> float:
    """Bytes per token: what one layer more saves, weights aside."""
    saved = []
    for layers in (2, 3):
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(config(kind, layers), dtype=DTYPES[dtype])
        if rank is not None:
            lora = LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
            model = get_peft_model(model, lora)
            model.enable_input_require_grads()
        own = {p.untyped_storage()._cdata for p in model.parameters()}
        seen: dict[int, Any] = {}

        def keep(x: torch.Tensor, own: Any = own, seen: Any = seen) -> torch.Tensor:
            storage = x.untyped_storage()
            if storage._cdata not in own:
                seen[storage._cdata] = storage
            return x

        backbone = model.model if rank is None else model.base_model.model.model
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            backbone(input_ids=torch.randint(250, (1, TOKENS)))
        saved.append(sum(storage.nbytes() for storage in seen.values()))
    return (saved[1] - saved[0]) / TOKENS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", CONFIGS)
def test_what_a_layer_saves(kind: str, dtype: str) -> None:
    expected = saved_per_token(shape_of(config(kind, 2)), dtype)
    exact = kind in ("llama", "qwen3")
    assert saved_by_a_layer(kind, dtype) == pytest.approx(expected, rel=1e-9 if exact else 0.01)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_what_a_layer_with_an_adapter_saves(kind: str, dtype: str) -> None:
    rank = 4
    expected = saved_per_token(shape_of(config(kind, 2)), dtype, lora=True) + 7 * 4 * rank
    rel = 0.01 if kind == "gemma3" else 1e-9
    assert saved_by_a_layer(kind, dtype, rank) == pytest.approx(expected, rel=rel)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_peak_of_a_step(kind: str, dtype: str, checkpointing: bool) -> None:
    """Forward, loss and backward of a model: within 3 % of what lived at once."""
    tokens, vocab = 1536, 2000
    made = config(kind, 5, intermediate_size=768, vocab_size=vocab)
    model: Any = AutoModelForCausalLM.from_config(made, dtype=DTYPES[dtype]).train()
    add_head_forward(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.config.use_cache = False
    ids = torch.randint(vocab, (1, tokens + 1))

    def head_fn(hidden: torch.Tensor, head: Any) -> torch.Tensor:
        return grpo_loss(hidden, head.weight, ids[:, 1:], torch.ones(1), chunk_bytes=2**23).loss

    with MemoryTracker() as tracker:
        model(input_ids=ids[:, :-1], head_fn=head_fn).backward()
    plan = plan_memory(
        made, tokens, dtype=dtype, checkpointing=checkpointing, optimizer="sgd", device="cpu"
    )
    size = DTYPES[dtype].itemsize
    # gradients of earlier micro-batches, which the plan allows for, are not there; the head's is
    head = vocab * made.hidden_size * size
    expected = plan.peaks["backward"] - plan.parts["weights"] - plan.parts["gradients"] + head
    assert expected == pytest.approx(tracker.peak, rel=0.03)


GRID = [
    (tokens, vocab, hidden, dtype, loss, frozen)
    for tokens, vocab, hidden in ((1500, 32_000, 64), (6000, 50_257, 96), (300, 151_936, 32))
    for dtype in DTYPES
    for loss in LOSSES[:2]
    for frozen in (False, True)
]


@pytest.mark.parametrize(("tokens", "vocab", "hidden", "dtype", "loss", "frozen"), GRID)
def test_extra_memory_of_the_loss(
    tokens: int, vocab: int, hidden: int, dtype: str, loss: str, frozen: bool
) -> None:
    """Of tensors, within 5 % or 16 MB of the prediction; libraries' own memory is not seen here."""
    states = torch.randn(1, tokens, hidden, dtype=DTYPES[dtype]).requires_grad_()
    weight = 4 * torch.randn(vocab, hidden) / hidden**0.5  # logits of a trained model: +-4
    weight = weight.to(DTYPES[dtype]).requires_grad_(not frozen)
    options: dict[str, Any] = {}
    if loss.endswith("routed"):
        options = {"backward": "routed", "route_seed": 0}
    ids = torch.randint(vocab, (1, tokens))
    with MemoryTracker() as tracker:
        out = grpo_loss(states, weight, ids, torch.ones(1), **options)
        out.loss.backward()
    if options:
        options = {"kept_per_token": float(out.metrics["route/kept_per_token"])}
    predicted = loss_memory(
        tokens, vocab, hidden, dtype=dtype, loss=loss, frozen_head=frozen, device="cpu", **options
    )
    off = tracker.peak - (predicted.total - predicted.libraries)
    assert abs(off) <= max(0.05 * tracker.peak, 16e6)


def test_the_losses_beside_ours() -> None:
    """Eager holds three fp32 arrays of the logits' size, TRL a tile and both gradients in fp32."""
    eager = loss_memory(8192, 151_936, 4096, loss="eager")
    assert eager.logits == 12 * 8192 * 151_936
    assert eager.gradients == 2 * 4096 * (8192 + 151_936)
    trl = loss_memory(8192, 151_936, 4096, loss="TRL 1.16")
    assert (trl.logits, trl.sums) == (2 * 4096 * 32_768, 4 * 4096 * (8192 + 151_936))
    ours = loss_memory(8192, 151_936, 4096)
    assert ours.sums == 4 * 4096 * 151_936
    routed = loss_memory(8192, 151_936, 4096, loss="fused-grpo, routed")
    assert routed.total < ours.total
    assert loss_memory(8192, 151_936, 4096, frozen_head=True).sums == 0
    assert ours.total < trl.total + 2.2e9
    assert ours.total < eager.total / 2


def test_our_extra_memory_does_not_grow_with_the_tokens() -> None:
    for device in ("cpu", "cuda"):
        small, *more = (
            loss_memory(n, 151_936, 1024, device=device, frozen_trunk=True).logits
            for n in (16_384, 131_072, 2**20)
        )
        assert all(x <= small for x in more)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("options", [{}, {"lora_r": 16}, {"checkpointing": False}], ids=str)
def test_the_longest_context_is_the_longest(loss: str, options: dict[str, Any]) -> None:
    plan = plan_memory("Qwen3-1.7B", 4096, 2, 24, loss=loss, **options)
    assert plan.longest is not None
    assert plan.longest > 0
    assert plan.fits == (plan.longest >= 4096)
    assert plan_memory("Qwen3-1.7B", plan.longest, 2, 24, loss=loss, **options).fits
    assert not plan_memory("Qwen3-1.7B", plan.longest + 1, 2, 24, loss=loss, **options).fits


def test_what_saves_memory_makes_the_context_longer() -> None:
    def longest(**options: Any) -> int:
        found = plan_memory("Qwen3-8B", 1024, 1, 96, **options).longest
        assert found is not None
        return found

    plain = longest()
    assert longest(loss="eager") < plain
    assert longest(checkpointing=False) < plain
    assert longest(reference=True) < plain
    assert longest(dtype="float32") == 0
    for better in ({"lora_r": 16}, {"optimizer": "adamw_8bit"}, {"shards": 8}):
        assert longest(**better) > plain, better
    assert longest(lora_r=16, reference=True) == longest(lora_r=16)


def test_a_smaller_budget_where_only_that_fits() -> None:
    """The chunks shrink before the plan says that nothing fits, and what is left is enough."""
    options: dict[str, Any] = {"optimizer": "sgd", "device": "cuda"}
    free = plan_memory("Qwen3-0.6B", 64, **options)
    assert free.chunk_bytes is None
    tight = plan_memory("Qwen3-0.6B", 32_768, prompt=0, **options)
    memory = (tight.peaks["loss"] - 1e9) / (1 - RESERVE) / 1e9
    if memory * 1e9 * (1 - RESERVE) > tight.peaks["backward"]:
        plan = plan_memory("Qwen3-0.6B", 32_768, 1, memory, **options)
        assert plan.fits
        assert plan.chunk_bytes is not None
        assert plan.parts["loss: logits"] <= plan.chunk_bytes


@pytest.mark.parametrize("memory", [0, 0.5, 10.0])
def test_no_room_at_all(memory: float) -> None:
    plan = plan_memory("Qwen3-8B", 4096, 1, memory)
    assert plan.longest == 0
    assert not plan.fits


@pytest.mark.parametrize("vocab", [1, 17, 10**7])
@pytest.mark.parametrize("tokens", [0, 1, 2**20])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("loss", LOSSES)
def test_edges(loss: str, device: str, tokens: int, vocab: int) -> None:
    found = loss_memory(tokens, vocab, 64, loss=loss, device=device)
    assert found.total >= found.gradients == 2 * 64 * (tokens + vocab)
    if tokens == 0:
        assert found.logits <= chunk_bytes_used(0, vocab, vocab, 64, 2, 4)
    plan = plan_memory("SmolLM2-135M", tokens, device=device, loss=loss)
    assert plan.peak >= plan.parts["weights"]


@settings(max_examples=100, deadline=None)
@given(
    context=st.integers(0, 300_000),
    memory=st.floats(0, 500),
    name=st.sampled_from(sorted(SHAPES)),
    loss=st.sampled_from(LOSSES),
    lora=st.sampled_from([None, 8]),
    shards=st.integers(1, 64),
)
def test_plans_are_consistent(
    context: int, memory: float, name: str, loss: str, lora: int | None, shards: int
) -> None:
    plan = plan_memory(name, context, 1, memory, loss=loss, lora_r=lora, shards=shards)
    assert plan.longest is not None
    assert all(value >= 0 for value in plan.parts.values())
    assert plan.fits == (plan.peak <= memory * 1e9 * (1 - RESERVE) + 1)
    if plan.fits and context:
        assert plan.longest >= context
    if context > plan.longest:
        assert not plan.fits


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"context": -1}, ValueError, "context=-1 must be at least 0"),
        ({"context": 1.5}, TypeError, "context must be an integer, not float"),
        ({"batch": 0}, ValueError, "batch=0 must be at least 1"),
        ({"gpu_memory": -3}, ValueError, "gpu_memory=-3 must be a number of GB"),
        ({"gpu_memory": float("nan")}, ValueError, "gpu_memory=nan"),
        ({"dtype": "int8"}, ValueError, "dtype='int8' is unknown; choose one of bfloat16"),
        ({"optimizer": "lion"}, ValueError, "optimizer='lion' is unknown"),
        ({"loss": "liger"}, ValueError, "loss='liger' is unknown"),
        ({"device": "tpu"}, ValueError, "device='tpu' is unknown"),
        ({"lora_r": 0}, ValueError, "lora_r=0 must be at least 1"),
        ({"shards": 0}, ValueError, "shards=0 must be at least 1"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        plan_memory(**{"model": "Qwen3-8B", "context": 128} | options)
    with pytest.raises(ValueError, match="hidden=0 must be at least 1"):
        loss_memory(1, 1, 0)
    with pytest.raises(ValueError, match="chunk_bytes=0 must be at least 1"):
        loss_memory(1, 1, 1, chunk_bytes=0)


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Eager logits of 128 k tokens alone are 239 GB; an adapter makes ours fit in 80."""
    command = ["plan", "--model", "Qwen3-8B", "--context", "131072", "--gpu-memory", "80"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "Qwen3-8B: 8.19 B parameters" in text
    assert "238.97" in text
    assert text.count("DOES NOT FIT") == len(LOSSES)
    assert main([*command, "--lora", "16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plans"]["fused-grpo"]["longest"] > 3 * found["plans"]["eager"]["longest"] > 0
    assert found["model"]["vocab"] == 151_936


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--model", "nothing"], "model='nothing' is not known"),
        (["--batch", "0"], "batch=0 must be at least 1"),
        (["--verbose"], "plan does not know --verbose"),
    ],
)
def test_wrong_commands(extra: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "Qwen3-8B", "--context", "1024", *extra]) == 2
    assert message in capsys.readouterr().err


def test_where_nothing_is_saved_the_plan_shows_it() -> None:
    """M11: 64 tokens of a small model's vocabulary take less as eager logits than in our chunks."""
    few, many = (
        {name: loss_memory(n, 32_000, 768, loss=name).total for name in LOSSES}
        for n in (64, 65_536)
    )
    assert few["eager"] < few["fused-grpo"]
    assert many["eager"] > 100 * few["eager"] > many["fused-grpo"]
