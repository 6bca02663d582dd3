"""Memory and matmul work: what is allocated, what is saved, which tokens cost anything."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from memory_tracker import MatmulCounter, MemoryTracker, saved_bytes
from torch import Tensor

from fused_grpo import GRPOLossOutput, grpo_loss, linear_logprobs
from fused_grpo.memory import plan_chunks

H, V = 16, 600
CHUNK = 1 << 18
IDS = 12  # of `support_ids`
PER_TOKEN = 160  # bytes of vectors of length N: log-probs, advantages, weights, indices, ...

KINDS: dict[str, dict[str, Any]] = {
    "token": {},
    "token_old": {"old": True},
    "sequence": {"importance_sampling_level": "sequence"},
    "sequence_old": {"importance_sampling_level": "sequence", "old": True},
    "kl": {"ref": True, "beta": 0.1},
    "entropy": {"entropy_coef": 0.1},
    "none": {"reduction": "none"},
}
# with a second head, or a support
HEAD_KINDS: dict[str, dict[str, Any]] = {
    "ref_head": {"ref_head": True, "beta": 0.1},
    "ref_head_old": {
        "ref_head": True,
        "beta": 0.1,
        "old": True,
        "importance_sampling_level": "sequence",
    },
    "kl_full": {"ref_head": True, "beta": 0.1, "kl_estimator": "full"},
    "kl_top_k": {"ref_head": True, "beta": 0.1, "kl_estimator": "top_k", "kl_top_k": 8},
    "kl_none": {"ref_head": True, "beta": 0.1, "kl_estimator": "full", "reduction": "none"},
    "support_top_p": {"support_top_p": 0.9},
    "support_top_k": {"support_top_k": 5},
    "support_ids": {"ids": True},
    "everything": {
        "ref_head": True,
        "beta": 0.1,
        "kl_estimator": "full",
        "support_top_p": 0.9,
        "ids": True,
        "entropy_coef": 0.1,
    },
}


def few(parameters: dict[str, Any]) -> bool:
    """Interpreted kernels take long: one kind, in the dtype that a CPU needs not convert."""
    return parameters["kind"] == "token" and parameters.get("dtype") != torch.bfloat16


def batch(
    width: int = 128, dtype: torch.dtype = torch.float32, dim: int = H, **options: Any
) -> dict[str, Any]:
    """Arguments of grpo_loss; ``old``, ``ref``, ``ref_head`` and ``ids`` ask for those tensors."""
    rows = 4
    call: dict[str, Any] = {
        "hidden": torch.randn(rows, width, dim).to(dtype),
        "weight": torch.randn(V, dim).to(dtype),
        "completion_ids": torch.randint(V, (rows, width)),
        "advantages": torch.randn(rows),
        "chunk_bytes": CHUNK,
    }
    if options.pop("old", False):
        call["old_per_token_logps"] = torch.randn(rows, width) - 7
    if options.pop("ref", False):
        call["ref_per_token_logps"] = torch.randn(rows, width) - 7
    if options.pop("ref_head", False):
        call["ref_hidden"] = torch.randn(rows, width, dim).to(dtype)
        call["ref_weight"] = torch.randn(V, dim).to(dtype)
    if options.pop("ids", False):
        call["support_ids"] = torch.randint(V, (rows, width, IDS))
    return call | options


def train(call: dict[str, Any], frozen: tuple[str, ...] = ()) -> GRPOLossOutput:
    for name in ("hidden", "weight"):
        call[name].requires_grad_(name not in frozen)
    out = grpo_loss(**call)
    out.loss.sum().backward()
    return out


def track(call: dict[str, Any], frozen: tuple[str, ...] = ()) -> MemoryTracker:
    with MemoryTracker() as tracker:
        train(call, frozen)
    return tracker


def vector_bytes(call: dict[str, Any]) -> int:
    """Vectors of length N, and the ids of the counted tokens."""
    ids = 8 * IDS if "support_ids" in call else 0
    return call["completion_ids"].numel() * (PER_TOKEN + ids)


def gradient_bytes(call: dict[str, Any], frozen: tuple[str, ...] = ()) -> int:
    """The gradients themselves, and one float32 copy of that of a 16-bit weight."""
    total = 0
    for name in ("hidden", "weight"):
        x: Tensor = call[name]
        if name not in frozen:
            total += x.numel() * x.element_size()
            total += x.numel() * 4 if name == "weight" and x.element_size() == 2 else 0
    return total


@pytest.mark.both_backends(triton_if=lambda p: few(p) and not p["frozen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen", [(), ("weight",), ("hidden",)], ids=["none", "head", "trunk"])
@pytest.mark.parametrize("kind", KINDS)
def test_peak_stays_within_the_budget(
    kind: str, frozen: tuple[str, ...], dtype: torch.dtype
) -> None:
    """M1, M3: beyond the gradients, a call holds its chunk budget and some vectors."""
    for width in (64, 256):
        call = batch(width=width, dtype=dtype, **KINDS[kind])
        tracker = track(call, frozen)
        allowed = gradient_bytes(call, frozen) + CHUNK + vector_bytes(call)
        assert tracker.peak <= allowed, f"{tracker.peak - allowed} bytes over"
        logits = 4 * width * V * 4
        assert width == 64 or allowed < logits / 3, "the bound says nothing"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen", [(), ("weight",)], ids=["none", "head"])
@pytest.mark.parametrize("kind", ["token", "entropy"])
def test_peak_at_a_real_vocabulary(kind: str, frozen: tuple[str, ...], dtype: torch.dtype) -> None:
    """The same bound where the vectors are small beside the budget."""
    call = batch(dtype=dtype, **KINDS[kind])
    call |= {"weight": torch.randn(50_257, H).to(dtype), "chunk_bytes": 32 << 20}
    allowed = gradient_bytes(call, frozen) + (32 << 20) + vector_bytes(call)
    over = track(call, frozen).peak - allowed
    assert over <= 0, f"{over} bytes over"


@pytest.mark.parametrize(
    ("dtype", "frozen"),
    [(torch.float32, ()), (torch.bfloat16, ("weight",)), (torch.float32, ("hidden",))],
    ids=["fp32", "bf16-head", "fp32-trunk"],
)
@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_head_features_stay_within_the_budget(
    kind: str, dtype: torch.dtype, frozen: tuple[str, ...]
) -> None:
    """The planner knows what a reference head, its divergence and a support hold at once."""
    call = batch(width=192, dtype=dtype, **HEAD_KINDS[kind])
    tracker = track(call, frozen)
    allowed = gradient_bytes(call, frozen) + CHUNK + vector_bytes(call)
    assert tracker.peak <= allowed, f"{tracker.peak - allowed} bytes over"
    assert allowed < 4 * 192 * V * 4 / 2, "the bound says nothing"
    assert tracker.largest <= max(CHUNK, 4 * call["hidden"].numel(), 4 * call["weight"].numel())


@pytest.mark.parametrize("kind", ["kl_full", "kl_top_k", "support_top_p"])
def test_head_features_at_a_real_vocabulary(kind: str) -> None:
    call = batch(width=32, **HEAD_KINDS[kind])
    for name in {"weight", "ref_weight"} & call.keys():
        call[name] = torch.randn(50_257, H)
    call["chunk_bytes"] = 16 << 20
    allowed = gradient_bytes(call) + (16 << 20) + vector_bytes(call)
    over = track(call).peak - allowed
    assert over <= 0, f"{over} bytes over"


@pytest.mark.parametrize("kind", ["kl_full", "support_top_p", "support_ids"])
def test_no_grad_head_features_store_nothing_per_token(kind: str) -> None:
    """The divergence is summed as the tiles go by; a nucleus needs the logits of a chunk."""
    call = batch(width=192, **HEAD_KINDS[kind])
    with MemoryTracker() as tracker, torch.no_grad():
        out = grpo_loss(**call)
    assert tracker.peak <= CHUNK + vector_bytes(call)
    del out


@pytest.mark.both_backends(triton_if=few)
@pytest.mark.parametrize("kind", KINDS)
def test_no_tensor_of_tokens_by_vocabulary(kind: str) -> None:
    call = batch(width=256, **KINDS[kind])
    largest = track(call).largest
    assert largest <= max(CHUNK, 4 * call["hidden"].numel(), 4 * call["weight"].numel())


@pytest.mark.both_backends(triton_if=few)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_frozen_head_allocates_no_weight_gradient(kind: str, dtype: torch.dtype) -> None:
    """M4: no [V, H] buffer when the head is frozen, nor under no_grad."""
    call = batch(width=32, dtype=dtype, dim=64, chunk_bytes=1 << 16, **KINDS[kind])
    assert track(call, ("weight",)).largest < V * 64 * 2
    assert call["weight"].grad is None
    with MemoryTracker() as tracker, torch.no_grad():
        grpo_loss(**call)
    assert tracker.largest < V * 64 * 2


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_trunk_allocates_no_hidden_gradient(kind: str) -> None:
    """M4: no [N, H] buffer when nothing below the head trains."""
    call = batch(width=512, chunk_bytes=1 << 16, **KINDS[kind])
    tracker = track(call, ("hidden",))
    assert tracker.largest < call["hidden"].numel() * 4
    assert call["hidden"].grad is None


@pytest.mark.parametrize("entropy", [False, True])
def test_no_grad_logprobs_store_nothing_per_vocabulary_entry(entropy: bool) -> None:
    hidden, weight = torch.randn(1024, H), torch.randn(V, H)
    targets = torch.randint(V, (1024,))
    with MemoryTracker() as tracker, torch.no_grad():
        out = linear_logprobs(hidden, weight, targets, entropy=entropy, chunk_bytes=CHUNK)
    assert tracker.peak <= CHUNK + 1024 * PER_TOKEN
    del out
    assert tracker.live == 0


@pytest.mark.parametrize("kind", KINDS)
def test_saved_for_backward(kind: str) -> None:
    """M2, M3, M10: gradients or inputs are saved, and vectors: nothing else of the vocabulary."""
    call = batch(width=256, **KINDS[kind])
    for name in ("hidden", "weight"):
        call[name].requires_grad_()
    with saved_bytes() as saved:
        out = grpo_loss(**call)
    tensors = 4 * (call["hidden"].numel() + call["weight"].numel())
    assert saved["bytes"] <= tensors + 4 * 256 * PER_TOKEN
    del out


def test_saved_for_backward_logprobs() -> None:
    hidden = torch.randn(1024, H, requires_grad=True)
    weight = torch.randn(V, H, requires_grad=True)
    with saved_bytes() as saved:
        out = linear_logprobs(hidden, weight, torch.randint(V, (1024,)), entropy=True)
    assert saved["bytes"] <= 4 * (hidden.numel() + weight.numel()) + 1024 * PER_TOKEN
    del out


def test_chunk_bytes_bounds_training_too() -> None:
    """M3: a budget that is honoured for inference only bounds nothing."""
    call = batch(width=256)
    fixed = gradient_bytes(call) + 4 * 256 * PER_TOKEN
    peaks = [track(call | {"chunk_bytes": size}).peak for size in (1 << 17, 1 << 20, 1 << 22)]
    assert peaks == sorted(peaks)
    assert peaks[0] < fixed + (1 << 17)
    assert peaks[-1] > peaks[0] + (1 << 17), "the budget changes nothing"


# Work, in multiplications of matrix products


def work(call: dict[str, Any], frozen: tuple[str, ...] = ()) -> float:
    """Multiplications in units of N H V, N counting every position of the batch."""
    with MatmulCounter() as counter:
        train(call, frozen)
    return counter.count / (call["completion_ids"].numel() * H * V)


@pytest.mark.both_backends
@pytest.mark.parametrize("kind", ["token", "token_old", "kl", "entropy", "sequence"])
def test_one_pass_over_the_head(kind: str) -> None:
    """M9: Loss and both gradients in three products (6NHV): the logits are not recomputed."""
    call = batch(**KINDS[kind])
    call["advantages"] = torch.tensor([1.0, 2.0, 0.5, 1.5])
    if "old_per_token_logps" in call:  # ratios near 1: nothing is clipped away
        with torch.no_grad():
            out = grpo_loss(**call)
        call["old_per_token_logps"] = out.per_token_logps
    assert work(call) == pytest.approx(3.0)


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_one_pass_over_each_head(kind: str) -> None:
    """2NHV for a reference (8NHV in all), nothing for a support, though it needs all logits."""
    call = batch(width=16, chunk_bytes=64 << 20, **HEAD_KINDS[kind])
    call["advantages"] = torch.tensor([1.0, 2.0, 0.5, 1.5])
    if "old_per_token_logps" in call:
        with torch.no_grad():
            out = grpo_loss(**call)
        call["old_per_token_logps"] = out.per_token_logps
    expected = 4.0 if "ref_hidden" in call else 3.0
    if call.get("reduction") == "none":  # both heads again
        expected += 2.0
    assert work(call) == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["ref_head_old", "kl_full"])
def test_a_second_pass_reads_the_reference_only_for_its_divergence(kind: str) -> None:
    call = batch(**(HEAD_KINDS[kind] | KINDS["sequence_old"]))
    with torch.no_grad():
        call["old_per_token_logps"] = grpo_loss(**call).per_token_logps
    assert work(call) == pytest.approx(5.0 if kind == "ref_head_old" else 6.0)


@pytest.mark.both_backends
@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_side_skips_its_product(frozen: str) -> None:
    """4NHV with one gradient, for a LoRA model or a trained head alone; 2NHV without."""
    assert work(batch(), (frozen,)) == pytest.approx(2.0)
    call = batch()
    with MatmulCounter() as counter, torch.no_grad():
        grpo_loss(**call)
    assert counter.count == call["completion_ids"].numel() * H * V


@pytest.mark.both_backends
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_masked_tokens_cost_nothing(level: str) -> None:
    """M2: only tokens that count are projected."""
    call = batch(importance_sampling_level=level)
    mask = torch.zeros(4, 128)
    mask[:, :32] = 1
    assert work(call | {"completion_mask": mask}) == pytest.approx(3.0 / 4)
    assert work(call | {"completion_mask": torch.zeros(4, 128)}) == 0.0


@pytest.mark.both_backends(triton_if=lambda p: p["level"] == "token")
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_tokens_that_cannot_learn_skip_the_backward(level: str) -> None:
    """Advantage 0 (a group of equal rewards) or clipped: the forward's product alone.

    In one chunk: those that learn are filled up to a multiple of 32 rows in each.
    """
    call = batch(importance_sampling_level=level) | {"chunk_bytes": 2**30}
    call["advantages"] = torch.tensor([0.0, 1.0, 0.0, 0.0])
    assert work(call) == pytest.approx(1.0 + 2.0 / 4)
    with torch.no_grad():
        logps = grpo_loss(**call).per_token_logps
    call["advantages"] = torch.ones(4)
    call["old_per_token_logps"] = logps - torch.tensor([0.0, 1.0, 1.0, 1.0])[:, None]
    ratio_of_e_is_clipped = work(call)
    if level == "token":
        assert ratio_of_e_is_clipped == pytest.approx(1.0 + 2.0 / 4)
    assert work(call) <= 4.0


@pytest.mark.both_backends
def test_zero_coefficients_do_not_change_results() -> None:
    """Dropping such tokens from the backward is exact."""
    call = batch(width=64)
    call["advantages"] = torch.tensor([0.0, 1.0, 0.0, -2.0])
    train(call)
    alone = {k: (v[[1, 3]] if k != "weight" else v) for k, v in call.items() if k != "chunk_bytes"}
    alone |= {"hidden": call["hidden"].detach()[[1, 3]], "num_items_in_batch": 256}
    alone["weight"] = call["weight"].detach().clone()
    train(alone)
    torch.testing.assert_close(call["weight"].grad, alone["weight"].grad, rtol=1e-5, atol=1e-7)
    assert not call["hidden"].grad[[0, 2]].any()


# The planner


@pytest.mark.parametrize("vocab", [1, 127, 50_257, 262_144])
@pytest.mark.parametrize("width", [1, 576, 8192])
def test_plan_is_monotone_and_within_its_budget(vocab: int, width: int) -> None:
    """M6: a larger budget never gives a smaller chunk, and no plan is empty."""
    tokens = 0
    for budget in (1, 1 << 10, 1 << 16, 1 << 20, 100 << 20, 1 << 30, 1 << 36):
        plan = plan_chunks(budget, vocab, width)
        assert plan.tokens >= max(1, tokens)
        assert 1 <= plan.tile <= vocab
        assert plan.tokens == 1 or 4 * plan.tokens * vocab <= budget
        tokens = plan.tokens


LARGE = """
import resource, torch
from fused_grpo import grpo_loss

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

tokens, vocab, width = {tokens}, 49152, 64
torch.manual_seed(0)
hidden = torch.randn(1, tokens, width, requires_grad=True)
weight = torch.randn(vocab, width, requires_grad=True)
ids = torch.randint(vocab, (1, tokens))
options = {options}
if options.pop("old", False):
    options["old_per_token_logps"] = torch.full((1, tokens), -40.0)
grpo_loss(hidden[:, :8], weight, ids[:, :8], torch.ones(1)).loss.backward()  # warm up
hidden.grad = weight.grad = None
before = peak()
grpo_loss(hidden, weight, ids, torch.ones(1), **options).loss.backward()
print(peak() - before - 4 * (hidden.numel() + weight.numel()))
"""


def resident_growth(tokens: int, options: dict[str, Any]) -> int:
    """Growth of the resident set of a fresh process beyond the gradients, in bytes."""
    code = LARGE.format(tokens=tokens, options=options)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=True
    )
    return int(done.stdout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_come_in_few_sizes(dtype: torch.dtype) -> None:
    """Libraries keep a program for each: if every chunk left out another number of tokens, memory
    would grow with the tokens of a run."""
    tokens, vocab, width = 3000, 300, 16
    hidden = torch.randn(1, tokens, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, width, dtype=dtype, requires_grad=True)
    learns = torch.rand(1, tokens) < torch.linspace(0.1, 1, tokens)
    ids = torch.randint(vocab, (1, tokens))
    with MatmulCounter() as products:
        out = grpo_loss(hidden, weight, ids, learns.float(), chunk_bytes=400_000)
        out.loss.backward()
    assert len(products.shapes) > 3, "the gradients' products were not seen"
    assert len(products.shapes) < 20, sorted(products.shapes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"importance_sampling_level": "sequence", "old": True}],
    ids=["token", "sequence_old"],
)
def test_resident_memory_does_not_grow_with_tokens(options: dict[str, Any]) -> None:
    """4k, 32k and 64k tokens at V = 49,152: within 100 MiB, vectors and the allocator's slack."""
    for tokens in (4096, 32_768, 65_536):
        growth = resident_growth(tokens, options)
        assert growth <= (100 << 20) + tokens * PER_TOKEN + (30 << 20), (tokens, growth)
