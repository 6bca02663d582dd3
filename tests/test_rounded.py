"""The bf16 product that returns exponentials: its accuracy, its range, and when it is used."""

from __future__ import annotations

import pytest
import torch

from fused_grpo import grpo_loss, linear_logprobs, rounded
from fused_grpo.reference import reference_logprobs
from fused_grpo.tiles import Head

pytestmark = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no fast bf16"
)


def leaves(n: int, vocab: int, spread: float, width: int = 64) -> tuple[torch.Tensor, ...]:
    """Hidden states and weight whose logits have deviation `spread`, and sampled targets."""
    hidden = torch.randn(n, width).bfloat16()
    weight = (torch.randn(vocab, width) * spread / width**0.5).bfloat16()
    targets = torch.distributions.Categorical(logits=hidden.float() @ weight.float().T).sample()
    return hidden, weight, targets


def exact(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return reference_logprobs(hidden.double(), weight.double(), targets)[0]


@pytest.mark.parametrize("spread", [0.01, 1.0, 3.0, 8.0])
@pytest.mark.parametrize("vocab", [1, 2, 63, 64, 127, 50_257])
def test_logps_are_within_1e_4(vocab: int, spread: float) -> None:
    """Flat and peaked rows, and vocabularies that are no multiple of the groups of 64."""
    call = leaves(96, vocab, spread)
    got = linear_logprobs(*call).logps
    torch.testing.assert_close(got.double(), exact(*call), rtol=0, atol=1e-4)
    assert (got <= 0).all()


def test_the_sum_of_rounded_exponentials_alone_would_not_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The exact recomputation of the largest entries is what keeps the bound."""
    call = leaves(512, 257, 2.0)
    monkeypatch.setattr(rounded, "_EXACT_SHARE", 2.0)
    error = (linear_logprobs(*call).logps.double() - exact(*call)).abs().max()
    assert error > 3e-4


def test_confident_tokens_keep_their_gradient() -> None:
    """N13: 1 - p of 1e-3 to 1e-8, where p rounds to 1."""
    hidden = torch.eye(8).bfloat16()
    weight = torch.zeros(300, 8).bfloat16()
    weight[5] = torch.linspace(12, 24, 8).bfloat16()
    hidden.requires_grad_(True)
    targets = torch.full((8,), 5)
    linear_logprobs(hidden, weight, targets).logps.sum().backward()
    want = hidden.detach().double().requires_grad_(True)
    exact(want, weight, targets).sum().backward()
    assert hidden.grad is not None
    assert want.grad is not None
    got, expected = hidden.grad.diagonal().double(), want.grad.diagonal()
    assert ((got - expected) / expected).abs().max() < 0.01


@pytest.mark.parametrize("gap", [30.0, 38.0, 42.0, 60.0, 200.0])
def test_unlikely_targets(gap: float) -> None:
    """A target far below the largest logit is in range, or the chunk is computed the other way."""
    hidden, weight, targets = leaves(16, 257, 1.0)
    hidden[:, 0], weight[:, 0] = 1.0, 0.0
    weight[7, 0], targets[3] = gap, 9
    call = hidden, weight, targets
    got = linear_logprobs(*call).logps.double()
    torch.testing.assert_close(got, exact(*call), rtol=1e-5, atol=1e-4)


def test_loss_and_log_probs_agree_bit_for_bit() -> None:
    """S20, T7: at the first step the ratio is 1, not nearly 1, whatever the paths' chunks are."""
    hidden, weight, targets = leaves(200, 1000, 2.0)
    with torch.no_grad():
        old = linear_logprobs(hidden, weight, targets).logps
    hidden.requires_grad_(True)
    weight.requires_grad_(True)
    out = grpo_loss(
        hidden[None], weight, targets[None], torch.ones(1), old_per_token_logps=old[None]
    )
    assert out.metrics["ratio/min"] == out.metrics["ratio/max"] == 1


def test_applies_only_to_plain_bf16_logits() -> None:
    hidden, weight = torch.zeros(2, 4).bfloat16(), torch.zeros(3, 4).bfloat16()
    plain = Head(weight)
    assert rounded.applies(hidden, plain, 1.0, False)
    assert rounded.applies(hidden, Head(weight, logit_scale=0.5), 0.5, False)
    assert not rounded.applies(hidden.float(), plain, 1.0, False)
    assert not rounded.applies(hidden, Head(weight.float()), 1.0, False)
    assert not rounded.applies(hidden, Head(weight, softcap=30.0), 1.0, False)
    assert not rounded.applies(hidden, Head(weight, bias=torch.zeros(3)), 1.0, False)
    assert not rounded.applies(hidden, plain, 0.7, False)
    assert not rounded.applies(hidden, plain, torch.ones(2), False)
    assert not rounded.applies(hidden, plain, 1.0, True)


def test_equal_logits_need_the_dither(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it 4,099 equal entries round alike, and the sum is off by as much as each of them."""
    hidden, weight, targets = leaves(64, 4099, 1.0)
    weight[:] = weight[0].clone()
    want = exact(hidden, weight, targets)
    with_dither = (linear_logprobs(hidden, weight, targets).logps.double() - want).abs().max()
    monkeypatch.setattr(rounded, "dither", lambda vocab: torch.zeros(vocab).bfloat16())
    without = (linear_logprobs(hidden, weight, targets).logps.double() - want).abs().max()
    assert with_dither < 5e-5
    assert without > 5e-4


@pytest.mark.parametrize("stride", [1, 2, 3, 7, 64])
def test_the_dither_is_even(stride: int) -> None:
    """Means of rounding errors over 512 entries that are all alike, wherever they lie."""
    shift = rounded.dither(512 * stride)[::stride].float()
    x = torch.linspace(1, 2, 257, dtype=torch.float64)[:, None]
    rounded_once = (x * shift.double().exp()).bfloat16().double() * (-shift.double()).exp()
    assert ((rounded_once / x - 1).mean(1)).abs().max() < 1e-4


def test_the_entries_kept_aside_are_few() -> None:
    """Sums that grow from tile to tile make every early entry look large for a while."""
    sums = rounded._Sums(torch.zeros(2))
    for j in range(12):
        tile = torch.rand(2, 4096) * 2.0**j
        tile[:, :120] = 2.0**j * 1000
        sums.add(tile, 4096 * j)
        assert 0 < sums.large[0].numel() <= 2 * 512
