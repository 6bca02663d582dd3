"""On a GPU: the Triton backend in 16-bit dtypes, real sizes, graphs, and under torch.compile.

    pytest -m gpu                                                needs a CUDA or ROCm device
    FUSED_GRPO_DRY_RUN=1 TRITON_INTERPRET=1 pytest -m gpu        the same code on a CPU, tiny sizes

The dry run keeps these tests alive on machines without a GPU; it says nothing about one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import Case, make_case, pack
from oracle import TOLERANCE, assert_gradient, check, close, oracle, ours
from pairwise import pairwise
from torch import Tensor

from fused_grpo import grpo_loss, linear_logprobs
from fused_grpo.reference import reference_logprobs

ON_GPU = torch.cuda.is_available()
DRY_RUN = not ON_GPU and os.environ.get("FUSED_GRPO_DRY_RUN") == "1"
DEVICE = "cuda" if ON_GPU else "cpu"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (ON_GPU or DRY_RUN), reason="no GPU that torch can use"),
]
only_on_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU, not a dry run")

HALF = (torch.bfloat16, torch.float16)
SIZE = (
    {"rows": 7, "width": 61, "vocab": 4099, "dim": 576}
    if ON_GPU
    else {"rows": 3, "width": 5, "vocab": 67, "dim": 16}
)
LARGE = (
    {"rows": 16, "width": 301, "vocab": 151_936, "dim": 1024}
    if ON_GPU
    else {"rows": 3, "width": 6, "vocab": 129, "dim": 16}
)


def on_device(case: Case) -> Case:
    def move(x: Any) -> Any:
        return x.to(DEVICE) if isinstance(x, Tensor) else x

    return replace(
        case,
        **{k: move(getattr(case, k)) for k in ("hidden", "weight", "ids", "advantages", "bias")},
        tensors={k: move(x) for k, x in case.tensors.items()},
        options={k: move(x) for k, x in case.options.items()},
    )


# --- values and gradients ------------------------------------------------------------------------

ROWS = pairwise(
    {
        "dtype": (*HALF, torch.float32),
        "mask": ("holes", "ones", "tail"),
        "bias": (False, True),
        "old": (True, False),
        "level": ("token", "sequence"),
        "head": ({}, {"softcap": 8.0}, {"logit_scale": 0.4, "temperature": 0.7}),
        "entropy_coef": (0.0, 0.03),
        "packed": (False, True),
        "chunk_bytes": (None, 3_000_000),
    }
)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_loss_and_gradients_agree_with_fp64(row):
    case = make_case(
        **SIZE,
        dtype=row["dtype"],
        mask=row["mask"],
        bias=row["bias"],
        old=row["old"],
        beta=0.1,
        loss_type="grpo",
        importance_sampling_level=row["level"],
        entropy_coef=row["entropy_coef"],
        **row["head"],
    )
    case = on_device(pack(case) if row["packed"] else case)
    check(case, backend="triton", chunk_bytes=row["chunk_bytes"])


@pytest.mark.parametrize("trainable", [("hidden",), ("weight",), ("hidden", "weight")], ids=str)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_frozen_parts(trainable, reduction):
    case = on_device(make_case(**SIZE, dtype=torch.bfloat16, beta=0.1))
    check(case, backend="triton", trainable=trainable, reduction=reduction)


@pytest.mark.parametrize("dtype", HALF)
def test_a_real_vocabulary(dtype):
    case = on_device(make_case(**LARGE, dtype=dtype, beta=0.1))
    check(case, backend="triton")


@pytest.mark.parametrize("dtype", HALF)
def test_logprobs_and_entropy_for_any_upstream_gradient(dtype):
    case = on_device(make_case(**SIZE, dtype=dtype, bias=True))
    leaves = case.leaves()
    wide = case.leaves(Tensor.double)
    for x in (*leaves.values(), *wide.values()):
        x.requires_grad_()
    options = {"temperature": 0.8, "softcap": 10.0}
    targets = case.ids.masked_fill(~case.mask, -100)
    got = linear_logprobs(
        leaves["hidden"],
        leaves["weight"],
        targets,
        bias=leaves["bias"],
        entropy=True,
        backend="triton",
        **options,
    )
    want = reference_logprobs(
        wide["hidden"], wide["weight"], targets, bias=wide["bias"], entropy=True, **options
    )
    assert got.entropy is not None
    up = torch.linspace(-1, 1, targets.numel(), device=DEVICE).view(targets.shape)
    (got.logps * up + got.entropy * up.flip(0)).sum().backward()
    (want[0] * up + want[1] * up.flip(0)).sum().backward()
    close(got.logps, want[0], 1e-4, "logps")
    close(got.entropy, want[1], 1e-4, "entropy")
    assert (got.logps <= 0).all()
    for name, leaf in leaves.items():
        error = (leaf.grad.double() - wide[name].grad).norm() / wide[name].grad.norm()
        assert error < TOLERANCE[dtype].grads, (name, float(error))


def test_auto_takes_triton_on_a_gpu_and_agrees_with_chunked():
    case = on_device(make_case(**SIZE, dtype=torch.bfloat16, beta=0.1))
    auto, triton, chunked = (ours(case, backend=b) for b in ("auto", "triton", "chunked"))
    if ON_GPU:
        assert torch.equal(auto.output.loss, triton.output.loss)
    close(triton.output.per_token_logps, chunked.output.per_token_logps, 1e-4, "logps")
    for name, grad in triton.grads.items():
        assert (grad.double() - chunked.grads[name]).norm() < 5e-3 * chunked.grads[name].norm()


@pytest.mark.parametrize("change", ["unaligned weight", "strided hidden", "odd width"])
def test_operands_that_the_fused_product_does_not_take(change):
    size = SIZE | {"dim": 17} if change == "odd width" else SIZE
    case = make_case(**size, dtype=torch.bfloat16, beta=0.1)
    case = on_device(case)
    if change == "unaligned weight":  # two bytes past an aligned address
        store = torch.empty(case.weight.numel() + 1, dtype=case.weight.dtype, device=DEVICE)
        store[1:] = case.weight.reshape(-1)
        case.weight = store[1:].view(case.weight.shape)
    if change == "strided hidden":
        case.hidden = case.hidden.transpose(0, 1).contiguous().transpose(0, 1)
    convert = lambda x: x.detach()  # noqa: E731  a clone would straighten them
    want = ours(case, backend="chunked")
    got = ours(case, backend="triton", convert=convert)
    close(got.output.per_token_logps, want.output.per_token_logps, 1e-4, "logps")
    assert torch.isfinite(got.grads["weight"]).all()


# --- bits, memory, waiting -----------------------------------------------------------------------


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("dtype", HALF)
def test_the_same_call_twice_gives_the_same_bits(dtype, level):
    case = on_device(
        make_case(
            **LARGE, dtype=dtype, beta=0.1, entropy_coef=0.01, importance_sampling_level=level
        )
    )
    first, second = (ours(case, backend="triton") for _ in range(2))
    assert torch.equal(first.output.loss, second.output.loss)
    assert torch.equal(first.output.per_token_logps, second.output.per_token_logps)
    for name, value in first.output.metrics.items():
        assert torch.equal(value, second.output.metrics[name]), name
    for name, grad in first.grads.items():
        assert torch.equal(grad, second.grads[name]), name


# --- routed gradients ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
def test_routed_gradients_that_keep_everything_are_exact(monkeypatch, dtype):
    monkeypatch.setattr("fused_grpo.triton_routed._DENSE_SHARE", 2.0)
    case = on_device(make_case(**SIZE, dtype=dtype, bias=True, beta=0.1, entropy_coef=0.03))
    routed = {"backward": "routed", "route_tau": 1e-12, "route_seed": 1}
    want, got = oracle(case), ours(case, backend="triton", **routed)
    for name, expected in want.grads.items():
        grad = got.grads[name]
        assert_gradient(name, grad, expected, case.leaves()[name].dtype, TOLERANCE[dtype].grads)


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
def test_routed_gradients_keep_the_same_in_every_chunk(monkeypatch, dtype):
    """The same bits twice; in other chunks the same tiles, so that gradients agree to rounding."""
    monkeypatch.setattr("fused_grpo.triton_routed._DENSE_SHARE", 2.0)
    case = on_device(make_case(**SIZE, dtype=dtype, beta=0.1))
    routed = {"backward": "routed", "route_tau": 0.05, "route_seed": 1, "backend": "triton"}
    first, again = (ours(case, **routed) for _ in range(2))
    chunked = ours(case, **routed, chunk_bytes=1)
    exact = ours(case, backend="triton")
    for name, grad in first.grads.items():
        assert torch.equal(grad, again.grads[name])
        tol = 1e-5 if dtype == torch.float32 else TOLERANCE[dtype].grads
        error = (chunked.grads[name] - grad).double().norm() / grad.double().norm()
        assert error < tol, (name, float(error))
        assert not torch.equal(grad, exact.grads[name])


@only_on_gpu
def test_memory_stays_inside_the_budget():
    case = on_device(make_case(**LARGE, dtype=torch.bfloat16, beta=0.1))
    budget = 512 * 2**20
    ours(case, backend="triton", chunk_bytes=budget)  # workspaces of the libraries
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = ours(case, backend="triton", chunk_bytes=budget)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    grads = sum(g.nbytes for g in result.grads.values() if g is not None)
    leaves = case.hidden.nbytes + case.weight.nbytes  # `ours` clones them
    fp32_weight_gradient = 4 * case.weight.numel()
    assert peak <= budget + grads + leaves + fp32_weight_gradient


def call(case: Case, hidden: Tensor, weight: Tensor, **options: Any) -> Any:
    return grpo_loss(
        hidden,
        weight,
        case.ids,
        case.advantages,
        backend="triton",
        **case.tensors,
        **case.options,
        **options,
    )


@only_on_gpu
def test_without_compaction_nothing_waits_for_the_device():
    case = on_device(make_case(**SIZE, dtype=torch.bfloat16, beta=0.1))
    leaves = case.leaves()
    for x in leaves.values():
        x.requires_grad_()
    call(case, **leaves, compact=False).loss.backward()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(case, **leaves, compact=False).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@only_on_gpu
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_cuda_graph_replays_the_loss_on_new_numbers(level):
    case = on_device(
        make_case(**SIZE, dtype=torch.bfloat16, beta=0.1, importance_sampling_level=level)
    )
    other = on_device(
        make_case(**SIZE, seed=1, dtype=torch.bfloat16, beta=0.1, importance_sampling_level=level)
    )
    leaves = {k: x.requires_grad_() for k, x in case.leaves().items()}

    def step() -> Any:
        out = call(case, **leaves, compact=False)
        out.loss.backward()
        return out

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    for x in leaves.values():
        x.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for name, x in leaves.items():
        x.data.copy_(getattr(other, name))
    case.ids.copy_(other.ids)
    case.advantages.copy_(other.advantages)
    for name, x in case.tensors.items():
        x.copy_(other.tensors[name])
    graph.replay()
    torch.cuda.synchronize()
    want = ours(other, backend="triton", compact=False)
    close(out.loss, want.output.loss, 1e-6, "loss")
    for name, x in leaves.items():
        assert torch.equal(x.grad, want.grads[name]), name


@only_on_gpu
def test_torch_compile_without_a_graph_break():
    case = on_device(make_case(**SIZE, dtype=torch.bfloat16, beta=0.1))
    leaves = {k: x.requires_grad_() for k, x in case.leaves().items()}

    @torch.compile(fullgraph=True)
    def compiled(hidden: Tensor, weight: Tensor) -> Tensor:
        return call(case, hidden * 1.0, weight).loss * 2.0

    compiled(**leaves).backward()
    want = ours(case, backend="triton")
    for name, x in leaves.items():
        error = (x.grad.double() / 2 - want.grads[name]).norm() / want.grads[name].double().norm()
        assert error < 5e-3, name


def test_autocast_and_gradient_checkpointing():
    case = on_device(make_case(**SIZE, dtype=torch.bfloat16, beta=0.1))
    want = ours(case, backend="triton")
    leaves = {k: x.requires_grad_() for k, x in case.leaves().items()}
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        loss = torch.utils.checkpoint.checkpoint(
            lambda h, w: call(case, h, w).loss, *leaves.values(), use_reentrant=False
        )
    loss.backward()
    assert torch.equal(loss.detach(), want.output.loss.detach())
    for name, x in leaves.items():
        assert torch.equal(x.grad, want.grads[name]), name


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_a_device_that_is_not_the_current_one():
    """D9: Launches go to the device of the tensors."""
    case = make_case(**SIZE, dtype=torch.bfloat16, beta=0.1)
    here = ours(on_device(case), backend="triton")
    with torch.cuda.device(1):
        there = ours(on_device(case), backend="triton")  # tensors on cuda:0
    assert torch.equal(here.output.loss, there.output.loss)


# --- sizes ---------------------------------------------------------------------------------------


def _plain(n: int, vocab: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator(DEVICE).manual_seed(0)
    hidden = torch.randn(n, dim, generator=g, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.randn(vocab, dim, generator=g, device=DEVICE, dtype=torch.bfloat16)
    return hidden, weight / dim**0.5, torch.randint(vocab, (n,), generator=g, device=DEVICE)


def _needs_memory(gib: float) -> None:
    if ON_GPU and torch.cuda.mem_get_info()[0] < gib * 2**30:
        pytest.skip(f"needs {gib} GiB of free GPU memory")


@pytest.mark.parametrize("n", [70_001 if ON_GPU else 70, (1 << 20) + 3 if ON_GPU else 131])
def test_more_tokens_than_a_grid_axis_holds(n):
    _needs_memory(8)
    hidden, weight, targets = _plain(n, 131, 32)
    for x in (hidden, weight):
        x.requires_grad_()
    logps = linear_logprobs(hidden, weight, targets, backend="triton").logps
    logps.sum().backward()
    picked = torch.tensor([0, 1, n // 2, n - 2, n - 1], device=DEVICE)
    want, _ = reference_logprobs(hidden[picked].double(), weight.double(), targets[picked])
    close(logps[picked], want, 1e-4, "logps")
    p = torch.softmax(hidden[picked].detach().double() @ weight.detach().double().T, -1)
    want_dh = weight.detach().double()[targets[picked]] - p @ weight.detach().double()
    assert (hidden.grad[picked].double() - want_dh).norm() < 5e-3 * want_dh.norm()


@only_on_gpu
def test_offsets_beyond_32_bits():
    """S4: A weight of 2^31 elements and more, and hidden states of as many."""
    _needs_memory(40)
    hidden, weight, targets = _plain(64, 1_000_000, 2304)
    targets[0] = weight.shape[0] - 1
    logps = linear_logprobs(hidden, weight, targets, backend="triton").logps
    z = hidden.float() @ weight.float().T
    close(logps, torch.log_softmax(z, -1).gather(1, targets[:, None])[:, 0], 1e-3, "logps")
    del weight, z
    hidden, weight, targets = _plain(1_000_000, 257, 2304)
    logps = linear_logprobs(hidden, weight, targets, backend="triton").logps
    z = hidden[-64:].float() @ weight.float().T
    want = torch.log_softmax(z, -1).gather(1, targets[-64:, None])[:, 0]
    close(logps[-64:], want, 1e-3, "logps")


# --- compute-sanitizer ---------------------------------------------------------------------------

SANITIZED = """
import torch
from fused_grpo import grpo_loss
g = torch.Generator("cuda").manual_seed(0)
for dtype, vocab, dim in (("bfloat16", 1003, 80), ("float16", 513, 48), ("float32", 257, 33)):
    like = {"device": "cuda", "dtype": getattr(torch, dtype), "generator": g}
    hidden = torch.randn(3, 43, dim, **like).requires_grad_()
    weight = torch.randn(vocab, dim, **like).requires_grad_()
    ids = torch.randint(vocab, (3, 43), device="cuda", generator=g)
    for level in ("token", "sequence"):
        out = grpo_loss(hidden, weight, ids, torch.randn(3, device="cuda"), backend="triton",
                        old_per_token_logps=-5 - torch.rand(3, 43, device="cuda"),
                        importance_sampling_level=level, entropy_coef=0.01)
        out.loss.backward()
torch.cuda.synchronize()
"""


@only_on_gpu
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="no compute-sanitizer here")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck"])
def test_compute_sanitizer(tool):
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
    command += ["--kernel-regex", "kns=_kernel", sys.executable, "-c", SANITIZED]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=290,
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
