"""The product that returns exponentials: its accuracy, its range, and when it is used."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fused_grpo import exponentials, grpo_loss, linear_logprobs
from fused_grpo.reference import reference_logprobs
from fused_grpo.tiles import Head, LogitTiles

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
    monkeypatch.setattr(exponentials, "_EXACT_SHARE", 2.0)
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


def test_applies_only_to_plain_logits() -> None:
    hidden, weight = torch.zeros(2, 4).bfloat16(), torch.zeros(3, 4).bfloat16()
    plain = Head(weight)
    assert exponentials.applies(hidden, plain, 1.0, False)
    assert exponentials.applies(hidden, Head(weight, logit_scale=0.5), 0.5, False)
    assert not exponentials.applies(hidden.float(), plain, 1.0, False)
    assert not exponentials.applies(hidden, Head(weight.float()), 1.0, False)
    assert not exponentials.applies(hidden, Head(weight, softcap=30.0), 1.0, False)
    assert not exponentials.applies(hidden, Head(weight, bias=torch.zeros(3)), 1.0, False)
    assert not exponentials.applies(hidden, plain, 0.7, False)
    assert not exponentials.applies(hidden, plain, torch.ones(2), False)
    assert not exponentials.applies(hidden, plain, 1.0, True)


def test_applies_to_large_vocabularies_in_fp32() -> None:
    hidden, weight = torch.zeros(2, 4), torch.zeros(4096, 4)
    plain = Head(weight)
    assert exponentials.applies(hidden, plain, 0.7, False)
    assert exponentials.applies(hidden, Head(weight, bias=torch.zeros(4096)), 1.0, False)
    assert exponentials.applies(hidden.half(), Head(weight.half()), 1.0, False)
    assert not exponentials.applies(hidden.double(), Head(weight.double()), 1.0, False)
    assert not exponentials.applies(hidden, Head(weight[:4095]), 1.0, False)
    assert not exponentials.applies(hidden, Head(weight, softcap=30.0), 1.0, False)
    assert not exponentials.applies(hidden, plain, torch.ones(2), False)
    assert not exponentials.applies(hidden, plain, 1.0, True)


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.6}, {"logit_scale": 0.3, "temperature": 0.7, "bias": True}]
)
@pytest.mark.parametrize("spread", [0.01, 2.0, 8.0])
@pytest.mark.parametrize("vocab", [4096, 4099, 50_257])
def test_fp32(vocab: int, spread: float, options: dict[str, Any]) -> None:
    """Values and gradients with the range of real logits, and beyond it (8.0: up to +-40)."""
    hidden, weight, targets = leaves(40, vocab, spread)
    kwargs = dict(options)
    call = [hidden.float().requires_grad_(), weight.float().requires_grad_()]
    if kwargs.pop("bias", False):
        call.append(torch.randn(vocab).requires_grad_())
    wide = [x.detach().double().requires_grad_() for x in call]
    upstream = torch.randn(40)
    got = linear_logprobs(*call[:2], targets, bias=dict(enumerate(call)).get(2), **kwargs).logps
    want = reference_logprobs(*wide[:2], targets, bias=dict(enumerate(wide)).get(2), **kwargs)[0]
    assert (got.double() - want).abs().max() < 2e-5
    assert (got <= 0).all()
    (got * upstream).sum().backward()
    (want * upstream.double()).sum().backward()
    for x, y in zip(call, wide, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        assert (x.grad - y.grad).norm() < 2e-5 * y.grad.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_out_of_range_are_computed_the_other_way(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits shifted by -90 to 90, NaN in one row: values and gradients, and nothing for others."""
    hidden, weight, targets = leaves(48, 4099, 2.0)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    weight[:, 0] = 1.0
    hidden[:, 0] = torch.linspace(-90, 90, 48)
    redone = []
    original = LogitTiles.select
    monkeypatch.setattr(LogitTiles, "select", lambda x, r: redone.append(len(r)) or original(x, r))
    leaf = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    wide = [x.double().requires_grad_() for x in (hidden, weight)]
    got = linear_logprobs(*leaf, targets).logps
    assert 10 < sum(redone) < 40
    want = reference_logprobs(*wide, targets)[0]
    assert (got.double() - want).abs().max() < (1e-4 if dtype == torch.bfloat16 else 5e-5)
    got.sum().backward()
    want.sum().backward()
    bound = 0.01 if dtype == torch.bfloat16 else 5e-5
    for x, y in zip(leaf, wide, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        assert (x.grad - y.grad).norm() < bound * y.grad.norm()
    hidden[7] = torch.nan
    with_nan = linear_logprobs(hidden, weight, targets).logps
    assert with_nan[7].isnan()
    others = torch.arange(48) != 7
    assert torch.equal(with_nan[others], got.detach()[others])


def test_where_no_row_is_in_range_the_product_is_not_even_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GPT-2's logits lie around -100."""
    hidden, weight, targets = leaves(48, 4099, 2.0)
    weight[:, 0] = 1.0
    hidden[:, 0] = -90

    def product(*_: Any) -> None:
        raise AssertionError("a product for nothing")

    monkeypatch.setattr(exponentials._Plain, "__call__", product)
    got = linear_logprobs(hidden.float(), weight.float(), targets).logps
    assert (got.double() - exact(hidden, weight, targets)).abs().max() < 5e-5


def test_equal_logits_need_the_dither(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it 4,099 equal entries round alike, and the sum is off by as much as each of them.

    With it they are off by 6.3e-5 at worst, next to a power of two, where the spacing doubles;
    1,024 rows are sure to come near one.
    """
    hidden, weight, targets = leaves(1024, 4099, 1.0)
    weight[:] = weight[0].clone()
    want = exact(hidden, weight, targets)
    with_dither = (linear_logprobs(hidden, weight, targets).logps.double() - want).abs().max()
    monkeypatch.setattr(exponentials, "dither", lambda vocab: torch.zeros(vocab))
    without = (linear_logprobs(hidden, weight, targets).logps.double() - want).abs().max()
    assert with_dither < 7e-5
    assert without > 5e-4


@pytest.mark.parametrize("stride", [1, 2, 3, 7, 64])
def test_the_dither_is_even(stride: int) -> None:
    """Means of rounding errors over 512 entries that are all alike, wherever they lie."""
    shift = exponentials.dither(512 * stride)[::stride]
    x = torch.linspace(1, 2, 257, dtype=torch.float64)[:, None]
    rounded_once = (x * shift.double().exp()).bfloat16().double() * (-shift.double()).exp()
    assert ((rounded_once / x - 1).mean(1)).abs().max() < 1e-4


def test_the_entries_set_aside_are_few() -> None:
    """Sums that grow from tile to tile make every early entry look large for a while."""
    rows = torch.zeros(2, 8).bfloat16()
    head = Head(torch.zeros(12 * 4096, 8).bfloat16())
    logits = LogitTiles(rows, 1.0, head, lambda v: head.weight[v])
    sums = exponentials._Rounded(logits, rows, torch.zeros(12 * 4096), 4096)
    for j in range(12):
        tile = torch.rand(2, 4096) * 2.0**j
        tile[:, :120] = 2.0**j * 1000
        sums.set_aside(tile, 4096 * j, tile.view(2, 128, 32).sum(2))
        assert 0 < sums.large[0].numel() <= 2 * 512
