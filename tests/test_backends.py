"""The one choice of backend, fixed shapes, and launches on the right device."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import LEVELS, make_case, pack
from oracle import TOLERANCE as TOLERANCES
from oracle import assert_gradient, assert_outputs_agree, check, dtype_id, oracle, ours
from torch import Tensor

from fused_grpo import backends, grpo_loss, linear_logprobs
from fused_grpo.memory import GPU_CHUNK_BYTES, plan_triton, triton_bytes_used

pytest.importorskip("triton")

from fused_grpo_kernels.common import on_device_of

CPU = torch.device("cpu")
NAN = float("nan")


def tensors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(3, 16, dtype=dtype), torch.randn(9, 16, dtype=dtype)


# --- the choice ----------------------------------------------------------------------------------


def test_auto_is_torch_on_a_cpu() -> None:
    """D9: Tensors of a CPU go to torch; interpreted kernels are for those who ask by name."""
    assert backends.choose("auto", *tensors()) is backends.CHUNKED
    assert backends.choose("chunked", *tensors()) is backends.CHUNKED
    assert backends.choose("triton", *tensors()).name == "triton"


def test_auto_is_triton_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA from compute capability 8.0 on, and ROCm; not for fp64."""

    def chosen(dtype: torch.dtype = torch.bfloat16) -> str:
        x = SimpleNamespace(device=torch.device("cuda", 0), dtype=dtype)
        return backends.choose("auto", x, x).name

    properties = SimpleNamespace(major=9, minor=0, gcnArchName="gfx942:sramecc+", warp_size=64)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert chosen() == "triton"
    assert chosen(torch.float64) == "chunked"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert chosen() == "chunked"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert chosen() == "triton"


def test_triton_by_name_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """I14: whether a backend can do a call is asked of it, and it gives the reason."""
    with pytest.raises(ValueError, match=r"backend=\"triton\".*fp64"):
        backends.choose("triton", *tensors(torch.float64))
    from triton import knobs

    monkeypatch.setattr(knobs.runtime, "interpret", False)
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        grpo_loss(
            *tensors(),
            torch.zeros(3, dtype=torch.long),
            torch.ones(1),
            backend="triton",
            cu_seqlens=torch.tensor([0, 3]),
        )
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match="not installed"):
        backends.choose("triton", *tensors())


@pytest.mark.parametrize("backend", ["auto", "chunked", "reference"])
def test_fixed_shapes_need_triton(backend: str) -> None:
    with pytest.raises(ValueError, match="compact=False"):
        linear_logprobs(
            *tensors(), torch.zeros(3, dtype=torch.long), backend=backend, compact=False
        )


@pytest.mark.parametrize("width", [32, 50])
@pytest.mark.parametrize("kind", ["contiguous", "columns", "rows", "unaligned"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)
def test_either_product_for_16_bits(dtype: torch.dtype, kind: str, width: int) -> None:
    """Strides and widths that the fused product refuses take torch's, with the same promise."""
    case = make_case(vocab=150, dim=width, dtype=dtype, bias=True, ref=False, entropy_coef=0.1)
    base = torch.full((151, width + 48), NAN, dtype=dtype)
    view = {
        "contiguous": lambda: base.new_empty(150, width),
        "columns": lambda: base.new_empty(width, 150).T,
        "rows": lambda: base[:150, 16 : 16 + width],
        "unaligned": lambda: base.view(-1)[1 : 1 + 150 * width].view(150, width),
    }[kind]()
    view.copy_(case.weight)
    leaves = {k: x.requires_grad_() for k, x in case.leaves().items()}
    leaves["weight"] = view.detach().requires_grad_()
    out = grpo_loss(
        leaves["hidden"],
        leaves["weight"],
        case.ids,
        case.advantages,
        bias=leaves["bias"],
        backend="triton",
        **case.tensors,
        **case.options,
    )
    out.loss.backward()
    want = oracle(case)
    assert_outputs_agree(out, want.output, TOLERANCES[dtype])
    for name, leaf in leaves.items():
        assert_gradient(name, leaf.grad, want.grads[name], dtype, TOLERANCES[dtype].grads)


# --- fixed shapes --------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
def test_fixed_shapes_compute_the_same(
    dtype: torch.dtype, level: str, reduction: str, layout: str
) -> None:
    """Against float64 on the counted tokens alone; NaN at the others reaches no result."""
    case = make_case(
        vocab=61,
        dim=32,
        dtype=dtype,
        bias=True,
        beta=0.1,
        entropy_coef=0.1,
        importance_sampling_level=level,
        loss_type="grpo",
    )
    case = pack(case) if layout == "packed" else case
    want = oracle(case, reduction=reduction)
    off = ~case.mask
    spoiled = replace(case, hidden=case.hidden.clone(), tensors=dict(case.tensors))
    spoiled.hidden[off] = NAN
    for name in ("old_per_token_logps", "ref_per_token_logps"):
        spoiled.tensors[name] = case.tensors[name].masked_fill(off, NAN)
    got = ours(spoiled, backend="triton", compact=False, reduction=reduction)
    tol = TOLERANCES[dtype]
    assert_outputs_agree(got.output, want.output, tol)
    for name, expected in want.grads.items():
        assert_gradient(name, got.grads[name], expected, dtype, tol.grads)
    assert not got.grads["hidden"][off].any()


@pytest.mark.parametrize("trainable", [("hidden",), ("weight", "bias")], ids=["head", "trunk"])
def test_fixed_shapes_with_a_frozen_side(trainable: tuple[str, ...]) -> None:
    case = make_case(vocab=61, dtype=torch.float32, bias=True, ref=False)
    check(case, backend="triton", trainable=trainable, **{"chunk_bytes": 1 << 15})
    want = oracle(case, trainable=trainable)
    got = ours(case, backend="triton", compact=False, trainable=trainable)
    for name, expected in want.grads.items():
        assert_gradient(name, got.grads[name], expected, torch.float32, 1e-5)


def test_fixed_shapes_with_everything_masked() -> None:
    case = make_case(vocab=61, dtype=torch.float32, beta=0.1, entropy=True)
    case.tensors["completion_mask"] = torch.zeros_like(case.ids)
    got = ours(case, backend="triton", compact=False)
    assert float(got.output.loss.detach()) == 0.0
    assert all(torch.isfinite(v) for v in got.output.metrics.values())
    assert not any(g.any() for g in got.grads.values())


WAITS = ("item", "tolist", "nonzero", "cpu", "numpy", "__bool__", "__int__", "__float__")


@contextlib.contextmanager
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever makes a host wait for a GPU raises, but inside Triton's interpreter."""
    interpreter = sys.modules["triton.runtime.interpreter"].__file__

    def guard(name: str, original: Any) -> Any:
        def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not any(f.filename == interpreter for f in traceback.extract_stack(limit=12)):
                raise AssertionError(f"Tensor.{name} waits for the device")
            return original(self, *args, **kwargs)

        return method

    with monkeypatch.context() as patch:
        for name in WAITS:
            patch.setattr(Tensor, name, guard(name, getattr(Tensor, name)), raising=False)
        yield


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_fixed_shapes_never_wait(
    reduction: str, level: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(
        vocab=61, dtype=torch.float32, beta=0.1, entropy_coef=0.1, importance_sampling_level=level
    )
    case = pack(case) if layout == "packed" else case
    case.tensors["completion_mask"] = case.mask
    leaves = [x.requires_grad_() for x in (case.hidden, case.weight)]
    how = {"backend": "triton", "check_inputs": False, "reduction": reduction}

    def step(compact: bool) -> None:
        out = grpo_loss(
            *leaves,
            case.ids,
            case.advantages,
            compact=compact,
            **how,
            **case.tensors,
            **case.options,
        )
        # kept graphs skip a comparison that only a CPU makes
        torch.autograd.backward(out.loss, torch.ones_like(out.loss), retain_graph=True)

    step(False)
    with no_waiting(monkeypatch):
        step(False)
        with pytest.raises(AssertionError, match="waits"):
            step(True)


# --- devices and memory --------------------------------------------------------------------------


def test_launches_go_to_the_device_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """D9: Triton launches on the current device, whatever its arguments are on."""
    entered = []

    @contextlib.contextmanager
    def device(index: torch.device) -> Iterator[None]:
        entered.append(index)
        yield
        entered.append("left")

    monkeypatch.setattr(torch.cuda, "device", device)
    with on_device_of(SimpleNamespace(device=torch.device("cuda", 1))):
        assert entered == [torch.device("cuda", 1)]
    assert entered[-1] == "left"
    with on_device_of(torch.zeros(1)):
        assert len(entered) == 2


def test_every_launcher_enters_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel launch of a call happens inside `on_device_of`."""
    from fused_grpo_kernels import combine, fold, forward, gradients, target

    inside: list[Tensor] = []
    launched = []

    @contextlib.contextmanager
    def guard(x: Tensor) -> Iterator[None]:
        inside.append(x)
        yield
        inside.pop()

    class Watched:
        def __init__(self, name: str, kernel: Any) -> None:
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid: Any) -> Any:
            assert inside, self.name
            launched.append(self.name)
            return self.kernel[grid]

    for module, kernel in (
        (forward, "head_kernel"),
        (target, "target_kernel"),
        (fold, "fold_kernel"),
        (combine, "combine_kernel"),
        (gradients, "gradients_kernel"),
    ):
        original = getattr(module, kernel)
        monkeypatch.setattr(module, "on_device_of", guard)
        monkeypatch.setattr(module, kernel, Watched(kernel, original))
    for dtype in (torch.float32, torch.bfloat16):
        check(make_case(vocab=61, dim=32, dtype=dtype, ref=False), backend="triton")
    assert len(set(launched)) == 5


@pytest.mark.parametrize("vocab", [1, 127, 50_257, 262_144])
@pytest.mark.parametrize("width", [1, 576, 8192])
@pytest.mark.parametrize("kept", [0, 2, 4, 6])
@pytest.mark.parametrize("converts", [False, True])
def test_plan_is_monotone_and_within_its_budget(
    converts: bool, kept: int, width: int, vocab: int
) -> None:
    how = {"kept": kept, "operand": 2, "converts": converts}
    before = 0
    for budget in (1, 1 << 20, 100 << 20, GPU_CHUNK_BYTES, 16 << 30):
        plan = plan_triton(budget, vocab, width, on_gpu=True, **how)
        assert plan.tokens >= max(before, 1)
        assert 1 <= plan.tile <= vocab
        if plan.tokens > 1:
            assert triton_bytes_used(*plan, vocab, width, **how) <= budget
        before = plan.tokens
    default = plan_triton(None, 151_936, 4096, kept=2, operand=2, converts=False, on_gpu=True)
    assert default.tokens >= 4096
