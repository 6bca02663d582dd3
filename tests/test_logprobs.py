"""linear_logprobs against the float64 reference: values and gradients of both outputs."""

from __future__ import annotations

import math
from typing import Any

import cases
import pytest
import torch
from oracle import DTYPES, TOLERANCE, Tolerance, assert_gradient, close, dtype_id
from torch import Tensor

from fused_grpo import linear_logprobs
from fused_grpo.reference import reference_logprobs

BACKENDS = ("chunked", "reference")


def head(
    tokens: tuple[int, ...] = (3, 7),
    vocab: int = 129,
    dim: int = 24,
    dtype: torch.dtype | None = None,
    std: float = 2.0,
) -> dict[str, Tensor]:
    """hidden [*tokens, H], weight [V, H], bias [V]; logits with the given standard deviation."""
    dtype = cases.DEFAULT_DTYPE if dtype is None else dtype
    return {
        "hidden": torch.randn(*tokens, dim, dtype=torch.float64).to(dtype),
        "weight": (torch.randn(vocab, dim, dtype=torch.float64) * std / math.sqrt(dim)).to(dtype),
        "bias": torch.randn(vocab, dtype=torch.float64).to(dtype),
    }


def compare(
    leaves: dict[str, Tensor],
    targets: Tensor,
    *,
    entropy: bool = True,
    weights: tuple[Tensor, Tensor] | None = None,
    tolerance: Tolerance | None = None,
    how: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Both outputs, and the gradients of sum(a * logps + b * entropy); (a, b) random or given."""
    tol = tolerance or TOLERANCE[leaves["hidden"].dtype]
    a, b = weights or (torch.randn(targets.shape).double(), torch.randn(targets.shape).double())
    results = []
    for exact in (True, False):
        dtype = torch.float64 if exact else leaves["hidden"].dtype
        args = {k: v.to(dtype, copy=True).requires_grad_() for k, v in leaves.items()}
        call = args | options | {"entropy": entropy}
        hidden, weight = call.pop("hidden"), call.pop("weight")
        if exact:
            logps, h = reference_logprobs(hidden, weight, targets, **call)
        else:
            out = linear_logprobs(hidden, weight, targets, **call, **(how or {}))
            logps, h = out.logps, out.entropy
        total = (a.to(logps.dtype) * logps).sum()
        if entropy:
            total = total + (b.to(logps.dtype) * h).sum()
        total.backward()
        results.append((logps, h, {k: v.grad for k, v in args.items()}))
    (want, want_h, want_grads), (got, got_h, grads) = results
    close(got, want, tol.logps, "logps")
    assert (got <= 0).all()
    if entropy:
        close(got_h, want_h, tol.logps, "entropy")
        vocab = leaves["weight"].shape[0]
        assert (got_h >= 0).all()
        assert (got_h <= math.log(vocab) + 1e-5).all()
    else:
        assert got_h is None
    for name, want_grad in want_grads.items():
        assert_gradient(name, grads[name], want_grad, leaves[name].dtype, tol.grads)
    return grads


@pytest.mark.both_backends
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("vocab", [127, 129, 257])
@pytest.mark.parametrize("chunk_bytes", [1 << 14, 100 << 20])
def test_random_head(vocab: int, dtype: torch.dtype, chunk_bytes: int) -> None:
    """N7, N11, R6: any upstream gradient of both outputs, with a bias, over several chunks."""
    leaves = head((5, 9), vocab, dtype=dtype)
    targets = torch.randint(vocab, (5, 9))
    targets[0, :4] = -100
    targets[4] = -100
    grads = compare(leaves, targets, how={"chunk_bytes": chunk_bytes})
    assert not grads["hidden"][targets == -100].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("only", ["logps", "entropy"])
def test_each_output_alone(only: str, backend: str) -> None:
    """N7: the entropy's gradient is not dropped when nothing asks for that of the logps."""
    leaves, targets = head(), torch.randint(129, (3, 7))
    ones, zeros = torch.ones(3, 7).double(), torch.zeros(3, 7).double()
    weights = (ones, zeros) if only == "logps" else (zeros, ones)
    compare(leaves, targets, weights=weights, how={"backend": backend})


@pytest.mark.both_backends
def test_upstream_with_zeros() -> None:
    """R6: the first upstream gradient is 0 and the first target ignored; the others count."""
    leaves, targets = head(), torch.randint(129, (3, 7))
    targets[0, 0] = -100
    a = torch.randn(3, 7).double()
    a[0, :3] = 0.0
    compare(leaves, targets, weights=(a, torch.zeros_like(a)))
    compare(leaves, targets, weights=(a, torch.zeros_like(a)), entropy=False)


OPTIONS: dict[str, dict[str, Any]] = {
    "temperature_0.5": {"temperature": 0.5},
    "temperature_1.5": {"temperature": 1.5},
    "logit_scale": {"logit_scale": 0.25},
    "logit_scale_negative": {"logit_scale": -1.3},
    "softcap": {"softcap": 3.0},
    "all": {"softcap": 4.0, "logit_scale": 1.6, "temperature": 0.7},
}


@pytest.mark.both_backends
@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("name", OPTIONS)
def test_head_options(name: str, dtype: torch.dtype, entropy: bool) -> None:
    """N8, N10: bias, then scale, then softcap, then temperature; for logps and entropy alike."""
    leaves = head((4, 6), dtype=dtype)
    how = {"chunk_bytes": 1 << 14}
    compare(leaves, torch.randint(129, (4, 6)), entropy=entropy, how=how, **OPTIONS[name])


@pytest.mark.both_backends
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_temperature_per_token(dtype: torch.dtype, softcap: float | None) -> None:
    leaves, targets = head((4, 6), dtype=dtype), torch.randint(129, (4, 6))
    temperature = torch.linspace(0.5, 2.0, 24).view(4, 6).double()
    temperature[1, 2] = 1.0
    how = {"chunk_bytes": 1 << 14}
    compare(leaves, targets, temperature=temperature.float(), softcap=softcap, how=how)


def test_temperature_per_token_equals_scalar_calls() -> None:
    leaves, targets = head((4,)), torch.randint(129, (4,))
    temperature = torch.tensor([0.5, 0.9, 1.0, 2.0]).double()
    together = linear_logprobs(**leaves, targets=targets, temperature=temperature, entropy=True)
    for i, t in enumerate(temperature.tolist()):
        one = linear_logprobs(**leaves, targets=targets, temperature=t, entropy=True)
        close(together.logps[i], one.logps[i], 1e-13, "logps")
        close(together.entropy[i], one.entropy[i], 1e-13, "entropy")


def test_temperature_of_ignored_tokens_is_inert() -> None:
    leaves, targets = head((4,)), torch.tensor([3, -100, 5, -100])
    temperature = torch.tensor([0.5, float("nan"), 2.0, 0.0]).double()
    clean = torch.tensor([0.5, 1.0, 2.0, 1.0]).double()
    got = linear_logprobs(**leaves, targets=targets, temperature=temperature)
    assert torch.equal(
        got.logps, linear_logprobs(**leaves, targets=targets, temperature=clean).logps
    )


def test_temperature_is_not_applied_twice_on_a_second_call() -> None:
    """N8: the op is idempotent; inputs stay as they were."""
    leaves, targets = head(dtype=torch.float32), torch.randint(129, (3, 7))
    first = linear_logprobs(**leaves, targets=targets, temperature=0.5, entropy=True)
    second = linear_logprobs(**leaves, targets=targets, temperature=0.5, entropy=True)
    assert torch.equal(first.logps, second.logps)
    assert torch.equal(first.entropy, second.entropy)


def test_softcap_caps() -> None:
    """N10: c tanh(x / c) on logits up to +-125 with c = 30: no log-prob below -2c - log V."""
    leaves = head((6,), 50, std=60.0)
    targets = torch.randint(50, (6,))
    out = linear_logprobs(**leaves, targets=targets, softcap=30.0)
    assert (leaves["hidden"] @ leaves["weight"].T).abs().max() > 100
    assert (out.logps >= -60 - math.log(50)).all()
    compare(leaves, targets, softcap=30.0)
    compare(
        {k: v.float() for k, v in leaves.items()},
        targets,
        softcap=30.0,
        tolerance=Tolerance(5e-5, 5e-5, 1e-4),  # logits of 125 have 4e-6 of rounding, times |h|
    )


@pytest.mark.both_backends
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_tiny_vocabularies(dtype: torch.dtype) -> None:
    """N1, N15: V = 1 has log-prob 0, entropy 0 and no gradient; V = 2 is a logistic regression."""
    for options in ({}, {"softcap": 2.0}, {"temperature": 0.5}):
        compare(head((5,), 1, dtype=dtype), torch.zeros(5, dtype=torch.long), **options)
        compare(head((5,), 2, dtype=dtype), torch.tensor([0, 1, 1, 0, 1]), **options)
    leaves = head((5,), 1, dtype=dtype)
    out = linear_logprobs(**leaves, targets=torch.zeros(5, dtype=torch.long), entropy=True)
    assert not out.logps.any()
    assert not out.entropy.any()


@pytest.mark.both_backends
@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0), (2, 3, 4)])
def test_leading_shapes(shape: tuple[int, ...]) -> None:
    """hidden [..., H] with targets [...] of any number of dimensions, empty ones included."""
    leaves = head(shape)
    targets = torch.randint(129, shape)
    out = linear_logprobs(**leaves, targets=targets, entropy=True)
    assert out.logps.shape == out.entropy.shape == shape
    grads = compare(leaves, targets)
    assert grads["weight"].shape == (129, 24)


@pytest.mark.both_backends
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_target_dtypes_and_strides(dtype: torch.dtype) -> None:
    """S8: the integer type and the strides of the targets do not matter."""
    leaves = head((4, 6))
    wide = torch.randint(100, (6, 8))
    expected = linear_logprobs(**leaves, targets=wide[:, ::2].T.contiguous())
    got = linear_logprobs(**leaves, targets=wide.to(dtype)[:, ::2].T)
    assert torch.equal(got.logps, expected.logps)


def test_ignore_index() -> None:
    """S8: another ignore_index, also one inside the vocabulary; -100 is then out of range."""
    leaves, targets = head((5,)), torch.tensor([7, 3, 7, 4, 3])
    out = linear_logprobs(**leaves, targets=targets, ignore_index=7, entropy=True)
    assert not out.logps[[0, 2]].any()
    assert not out.entropy[[0, 2]].any()
    assert (out.logps[[1, 3, 4]] < 0).all()
    compare(leaves, targets, ignore_index=7)
    with pytest.raises(ValueError, match="targets"):
        linear_logprobs(**leaves, targets=torch.tensor([7, 3, -100, 4, 3]), ignore_index=7)


def test_all_ignored() -> None:
    """S10: nothing to do is zeros attached to the graph, and zero gradients."""
    grads = compare(head((5,)), torch.full((5,), -100))
    assert not any(g.any() for g in grads.values())


def test_output_dtypes() -> None:
    """Float32 for every 16- and 32-bit input, float64 for float64 ones."""
    for dtype in DTYPES:
        leaves = head((2,), dtype=dtype)
        out = linear_logprobs(**leaves, targets=torch.tensor([1, 2]), entropy=True)
        expected = torch.float64 if dtype == torch.float64 else torch.float32
        assert out.logps.dtype == out.entropy.dtype == expected


def test_backends_agree() -> None:
    leaves, targets = head(), torch.randint(129, (3, 7))
    outs = [
        linear_logprobs(**leaves, targets=targets, entropy=True, softcap=4.0, backend=b)
        for b in ("auto", *BACKENDS)
    ]
    for out in outs[1:]:
        close(out.logps, outs[0].logps, 1e-12, "logps")
        close(out.entropy, outs[0].entropy, 1e-12, "entropy")


@pytest.mark.both_backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
def test_no_grad_and_grad_agree_bit_for_bit(dtype: torch.dtype) -> None:
    """S20: old log-probs from a no-grad call equal those of the loss: the first ratio is 1."""
    leaves, targets = head((8, 9), dtype=dtype), torch.randint(129, (8, 9))
    with torch.no_grad():
        old = linear_logprobs(**leaves, targets=targets)
    grad = {k: v.requires_grad_() for k, v in leaves.items()}
    assert torch.equal(linear_logprobs(**grad, targets=targets).logps, old.logps)
