"""Faults of others in numerics (docs/bug-list.md), where no other test holds the right value.

The right value is written out here, apart from `fused_grpo.reference`.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_grpo import grpo_loss, linear_logprobs

HEADS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.5, "softcap": 30.0, "logit_scale": 1.6},
    {"temperature": 0.7, "softcap": 30.0},
    {"temperature": 1.5, "logit_scale": 0.25},
)


def logits_by_hand(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Bias, then scale, then softcap, then temperature, in fp64."""
    z = hidden.double() @ weight.double().T
    z = (z if bias is None else z + bias.double()) * logit_scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    return z / temperature


def by_hand(z: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """log p(target) and entropy of fp64 logits."""
    logp = z - z.logsumexp(-1, keepdim=True)
    return logp.gather(-1, targets[..., None])[..., 0], -(logp.exp() * logp).sum(-1)


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("vocab", [50_257, 128_257, 129_920, 151_665, 151_936])
def test_peaked_logits_over_real_vocabularies(vocab: int) -> None:
    """N1: users saw log-probabilities of up to +123, as columns that pad the last tile to its width
    each added exp(0). Here all logits are near -50 but one, at -37: log-probabilities, entropies
    and the weight's gradient, the last tile's rows among them, are those of fp64."""
    hidden = torch.cat([torch.ones(3, 1), 0.1 * torch.randn(3, 3)], 1)
    weight = torch.cat([torch.full((vocab, 1), -50.0), torch.randn(vocab, 3)], 1)
    weight[vocab // 2, 0] = -37.0
    targets = torch.tensor([vocab // 2, vocab - 1, 0])
    exact = [x.double().requires_grad_() for x in (hidden, weight)]
    want, want_entropy = by_hand(logits_by_hand(*exact), targets)
    (want.sum() + 0.3 * want_entropy.sum()).backward()
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    out = linear_logprobs(*leaves, targets, entropy=True)
    (out.logps.sum() + 0.3 * out.entropy.sum()).backward()
    assert want[0] > -1
    assert want[1] < -12
    assert (out.logps <= 0).all()
    torch.testing.assert_close(out.logps.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.entropy.double(), want_entropy, rtol=2e-5, atol=2e-5)
    for got, reference in zip(leaves, exact, strict=True):
        assert relative(got.grad, reference.grad) < 1e-5
    last = slice(vocab - vocab % 128 if vocab % 128 else vocab - 128, vocab)
    assert relative(leaves[1].grad[last], exact[1].grad[last]) < 1e-4


@pytest.mark.both_backends
@pytest.mark.parametrize("options", HEADS, ids=["all", "softcap", "scale"])
def test_order_of_bias_scale_softcap_and_temperature(options: dict[str, Any]) -> None:
    """N8, N10, N11: caps written as z tanh(z / c) capped nothing, scales came after the cap, the
    entropy lacked the temperature, the bias counted once per tile of the hidden size. Logits reach
    +-125 and the hidden size is two tiles: both outputs, all gradients, against the formula."""
    hidden, bias = torch.randn(5, 160), 5 * torch.randn(129)
    weight = torch.randn(129, 160) * 3.2
    targets = torch.tensor([0, 1, 64, 127, 128])
    raw = logits_by_hand(hidden, weight, bias)
    targets[0] = raw[0].argmax()
    assert raw.abs().max() > 110
    results = []
    for dtype in (torch.float64, torch.float32):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (hidden, weight, bias)]
        if dtype == torch.float64:
            logps, entropy = by_hand(logits_by_hand(*leaves, **options), targets)
        else:
            out = linear_logprobs(*leaves[:2], targets, bias=leaves[2], entropy=True, **options)
            logps, entropy = out.logps, out.entropy
        (logps.sum() - 0.5 * entropy.sum()).backward()
        results.append((logps, entropy, *(x.grad for x in leaves)))
    want, got = results
    assert (got[0] <= 0).all()
    for a, b in zip(got[:2], want[:2], strict=True):
        # logits of +-125 from 160 products have 1e-5 of fp32's rounding, 2e-4 through 1 / T and 1.6
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=2e-4)
    for a, b in zip(got[2:], want[2:], strict=True):
        assert relative(a, b) < 2e-4


@pytest.mark.both_backends
@pytest.mark.parametrize("options", HEADS, ids=["all", "softcap", "scale"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_first_ratio_is_exactly_one_whatever_the_head(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """N9, N10: a step-1 KL of 0.24 and first ratios of 2.0 came from a temperature or a cap that
    one of the two passes lacked. Old log-probabilities of the same weights give ratio 1, KL 0 and
    clip nothing, to the bit."""
    hidden, weight = torch.randn(3, 9, 32).to(dtype), (8 * torch.randn(129, 32)).to(dtype)
    bias, ids = torch.randn(129).to(dtype), torch.randint(129, (3, 9))
    with torch.no_grad():
        old = linear_logprobs(hidden, weight, ids, bias=bias, **options).logps
    out = grpo_loss(
        hidden.requires_grad_(),
        weight.requires_grad_(),
        ids,
        torch.tensor([1.0, -1.0, 0.5]),
        bias=bias,
        old_per_token_logps=old,
        ref_per_token_logps=old,
        beta=0.1,
        **options,
    )
    for name in ("ratio/min", "ratio/max", "ratio/mean"):
        assert float(out.metrics[name]) == 1.0
    assert float(out.metrics["kl"]) == 0.0
    assert float(out.loss.detach()) == pytest.approx(-0.5 / 3, abs=1e-7)


@pytest.mark.both_backends
def test_float16_products_beyond_its_range_have_the_right_gradients() -> None:
    """N16: fp16 hidden states of 500 times fp16 weights of 4 give logits of 128,000: inf in fp16.
    Log-probabilities and both gradients are those of fp64, rounded once."""
    hidden, weight = torch.full((2, 64), 500.0), torch.full((3, 64), 4.0)
    hidden[1, ::2] = -500.0
    weight[1, 0], weight[2, 1] = 3.998046875, 4.00390625  # neighbours of 4 in fp16
    targets = torch.tensor([0, 1])
    exact = [x.double().requires_grad_() for x in (hidden, weight)]
    z = logits_by_hand(*exact)
    assert z.max() > 65504
    want, _ = by_hand(z, targets)
    want.sum().backward()
    leaves = [x.half().requires_grad_() for x in (hidden, weight)]
    out = linear_logprobs(*leaves, targets)
    out.logps.sum().backward()
    torch.testing.assert_close(out.logps.double(), want, rtol=1e-5, atol=1e-5)
    assert want.min() < -0.5
    for got, reference in zip(leaves, exact, strict=True):
        assert relative(got.grad, reference.grad) < 2e-3


@pytest.mark.both_backends
def test_temperature_of_a_thousandth_has_the_values_of_fp64() -> None:
    """N17: near a temperature of 0 others divided by 0 or lost their gradients. Two logits a
    thousandth apart at T = 0.001: p = 1 / (1 + e^-1), and its gradients times 1,000."""
    gap = 2.0**-10
    hidden = torch.tensor([[1.0, 0.0]]).requires_grad_()
    weight = torch.tensor([[1.0, 0.0], [1.0 - gap, 0.0], [0.5, 0.0]])
    out = linear_logprobs(hidden, weight, torch.tensor([0]), temperature=gap, entropy=True)
    p = 1 / (1 + math.exp(-1))
    assert float(out.logps.detach()) == pytest.approx(math.log(p), rel=1e-6)
    entropy = -p * math.log(p) - (1 - p) * math.log(1 - p)
    assert float(out.entropy.detach()) == pytest.approx(entropy, rel=1e-5)
    out.logps.sum().backward()
    # sum_j (1[j = 0] - p_j) w_j / T, with w_0 - w_1 = T: two terms of 275 in fp32
    assert float(hidden.grad[0, 0]) == pytest.approx(1 - p, abs=275 * 2**-22)


@pytest.mark.parametrize("chunks", [1, 8, 64, 256])
def test_rounding_of_the_weight_gradient_is_that_of_one_rounding(chunks: int) -> None:
    """N12: summed in bf16, dW was off by 0.16 % in one chunk and by 2.1 % in 256. The error is that
    of rounding the inputs' products and the result once, however many chunks there are."""
    hidden, weight = torch.randn(512, 32).bfloat16(), torch.randn(257, 32).bfloat16()
    targets, a = torch.randint(257, (512,)), torch.rand(512)
    exact = weight.double().requires_grad_()
    (a.double() * by_hand(logits_by_hand(hidden, exact), targets)[0]).sum().backward()
    weight.requires_grad_()
    size = 2 * 4 * (257 + 4 * 32) * (512 // chunks) + (1 << 13)
    (a * linear_logprobs(hidden, weight, targets, chunk_bytes=size).logps).sum().backward()
    assert relative(weight.grad, exact.grad) < 2.5e-3  # 2^-9, and bf16 gradients of the logits


@pytest.mark.parametrize("vocab", [2, 32, 100_003])
def test_gradients_point_where_those_of_fp64_point(vocab: int) -> None:
    """N15: filtered and bf16-summed gradients pointed elsewhere. Exact ones are the default: cosine
    above 0.9999 for the whole weight, bf16 inputs, from 2 entries to 100,003."""
    hidden, weight = torch.randn(24, 16).bfloat16(), torch.randn(vocab, 16).bfloat16()
    targets = torch.randint(vocab, (24,))
    exact = weight.double().requires_grad_()
    by_hand(logits_by_hand(hidden, exact), targets)[0].sum().backward()
    weight.requires_grad_()
    linear_logprobs(hidden, weight, targets).logps.sum().backward()
    got, want = weight.grad.double(), exact.grad
    assert float((got * want).sum() / (got.norm() * want.norm())) > 0.9999
    # and nothing is dropped: every row that fp64 moves by more than bf16's smallest is moved
    assert torch.equal(got.abs().amax(1) > 0, want.abs().amax(1) > 0)
