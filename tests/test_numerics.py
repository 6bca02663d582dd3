"""Extreme logits: peaked, shifted, huge, -inf; where textbook formulas lose digits or give NaN."""

from __future__ import annotations

import math

import pytest
import torch
from cases import make_case
from oracle import check, dtype_id, ours
from torch import Tensor

from fused_grpo import linear_logprobs
from fused_grpo.reference import reference_logprobs


def from_logits(logits: Tensor) -> tuple[Tensor, Tensor]:
    """hidden [V, V] and weight [V, V] whose logits are the given ones [N, V] times 1, exactly."""
    return logits, torch.eye(logits.shape[-1], dtype=logits.dtype)


def gradients(
    logits: Tensor, targets: Tensor, a: float = 1.0, b: float = 0.0, **options: object
) -> tuple[Tensor, Tensor, Tensor]:
    """logps, entropy and d(a * logps + b * entropy)/dlogits; without entropies if b = 0."""
    hidden, weight = from_logits(logits)
    hidden = hidden.clone().requires_grad_()
    out = linear_logprobs(hidden, weight, targets, entropy=b != 0, **options)
    total = a * out.logps.sum()
    if b != 0:
        total = total + b * out.entropy.sum()
    total.backward()
    entropy = torch.zeros_like(out.logps) if out.entropy is None else out.entropy.detach()
    return out.logps.detach(), entropy, hidden.grad


@pytest.mark.both_backends
@pytest.mark.parametrize("b", [0.0, 1e-30], ids=["logps", "and_entropy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize("gap", [2.2, 4.6, 6.9, 11.5, 13.8, 16.0, 25.0, 80.0])
def test_confident_targets(gap: float, dtype: torch.dtype, b: float) -> None:
    """N13, N18: with p up to 1 - 1e-35, logp <= 0 and 1 - p keeps its relative accuracy.

    logsumexp minus the target's logit has lost everything by 1 - p = 1e-7 in float32.
    """
    logits = torch.full((3, 40), -gap)
    logits[:, 7] = 0.0
    logits[1] += 3.0
    logits[2] -= 50.0
    logits = logits.to(dtype)
    targets = torch.full((3,), 7)
    logps, _, grad = gradients(logits, targets, 1.0, b)
    exact = logits.double().requires_grad_()
    others = torch.where(torch.arange(40) == 7, -torch.inf, exact).logsumexp(-1) - exact[:, 7]
    want = -torch.nn.functional.softplus(others, threshold=1e9)
    want.sum().backward()
    assert (logps <= 0).all()
    torch.testing.assert_close(logps.double(), want, rtol=2e-5, atol=1e-30)
    rtol = 2e-5 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(grad.double()[:, 7], exact.grad[:, 7], rtol=rtol, atol=1e-30)
    torch.testing.assert_close(grad.double(), exact.grad, rtol=rtol, atol=1e-30)


@pytest.mark.both_backends
@pytest.mark.parametrize("p", [0.9, 0.99, 0.999, 0.99999, 1 - 1e-6])
def test_confident_targets_in_the_loss(p: float) -> None:
    """N13: confident tokens dominate in RL; dh and dW of the loss hold 1e-5 in float32."""
    case = make_case(dtype=torch.float32, vocab=61, dim=61, old=False, ref=False, mask="ragged")
    case.weight = torch.eye(61)
    logits = torch.randn((*case.ids.shape, 61)) * 0.5
    logits.scatter_(2, case.ids.clamp(min=0)[..., None], math.log(p / (1 - p)) + math.log(60))
    case.hidden = logits
    check(case)


@pytest.mark.both_backends
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=dtype_id)
@pytest.mark.parametrize("shift", [-1e4, -1e2, 1e2, 1e4])
def test_shift_invariance(shift: float, dtype: torch.dtype) -> None:
    """N2: f(z) = f(z + c): the running maximum starts at -inf and padding is -inf, never 0."""
    # Multiples of 1/64: adding the shift is exact in both dtypes.
    logits = (torch.randn(5, 129) * 64).round().to(dtype) / 64
    targets = torch.randint(129, (5,))
    results = [gradients(z, targets, 1.0, 0.5) for z in (logits, logits + shift)]
    for plain, shifted in zip(*results, strict=True):
        torch.testing.assert_close(shifted, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.both_backends
@pytest.mark.parametrize("vocab", [1, 2, 127, 129, 257, 1000])
def test_peaked_logits_with_ragged_vocabulary(vocab: int) -> None:
    """N1: every logit near -50 but one: a column of padding at 0 would dominate the sum."""
    logits = -50 + torch.randn(4, vocab)
    logits[:, vocab // 2] = -45.0
    targets = torch.full((4,), vocab // 2)
    targets[0] = vocab - 1
    logps, entropy, grad = gradients(logits, targets, 1.0, 0.3)
    exact = logits.double().requires_grad_()
    want, want_entropy = reference_logprobs(exact, torch.eye(vocab).double(), targets, entropy=True)
    (want + 0.3 * want_entropy).sum().backward()
    assert (logps <= 0).all()
    torch.testing.assert_close(logps.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), want_entropy, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad.double(), exact.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.both_backends
def test_logits_between_minus_300_and_minus_200() -> None:
    """N2."""
    logits = -300 + 100 * torch.rand(4, 129)
    logps, entropy, grad = gradients(logits, torch.tensor([0, 1, 64, 128]), 1.0, 1.0)
    want = torch.log_softmax(logits.double(), -1)
    rows = torch.arange(4)
    torch.testing.assert_close(logps.double(), want[rows, [0, 1, 64, 128]], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(entropy.double(), -(want.exp() * want).sum(-1), rtol=1e-5, atol=1e-5)
    assert torch.isfinite(grad).all()


@pytest.mark.both_backends
@pytest.mark.parametrize("b", [0.0, 1.0], ids=["logps", "and_entropy"])
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e3, 1e20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
def test_huge_and_tiny_logits(scale: float, dtype: torch.dtype, b: float) -> None:
    """Finite values and gradients, and the right limits: uniform, or all mass on the largest."""
    logits = (torch.randn(4, 33).to(dtype).double() * scale).to(dtype)
    best = logits.float().argmax(-1)
    logps, entropy, grad = gradients(logits, best, 1.0, b)
    assert torch.isfinite(logps).all()
    assert torch.isfinite(entropy).all()
    assert torch.isfinite(grad).all()
    if scale < 1e-3:
        torch.testing.assert_close(logps, torch.full((4,), -math.log(33)), rtol=1e-6, atol=0)
        if b:
            torch.testing.assert_close(entropy, torch.full((4,), math.log(33)), rtol=1e-6, atol=0)
    if scale > 1e3:
        assert not logps.any()
        assert not entropy.any()
        assert not grad.any()


@pytest.mark.both_backends
def test_impossible_targets_have_hugely_negative_logps() -> None:
    """A target 1e4 nats below the rest has logp -1e4 - log 8 and a plain gradient."""
    logits = torch.zeros(2, 9)
    logits[:, 3] = -1e4
    logps, _, grad = gradients(logits, torch.tensor([3, 4]))
    torch.testing.assert_close(logps, torch.tensor([-1e4 - math.log(8), -math.log(8)]))
    expected = torch.full((2, 9), -1 / 8)
    expected[:, 3] = torch.tensor([1.0, 0.0])
    expected[1, 4] = 1 - 1 / 8
    torch.testing.assert_close(grad, expected)


INF = float("inf")


@pytest.mark.both_backends
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize(
    "masked",
    [
        [1],
        [0, 2],
        list(range(128, 256)),  # a whole tile of the vocabulary
        list(range(299)),  # all but the target
    ],
    ids=["one", "two", "tile", "all_others"],
)
def test_classes_of_zero_probability(masked: list[int], dtype: torch.dtype) -> None:
    """N6: a bias of -inf (padded vocabulary rows) is the same as not having those rows."""
    vocab = 300
    hidden = torch.randn(4, 16, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocab, 16, dtype=torch.float64).mul(0.3).to(dtype)
    keep = torch.ones(vocab, dtype=torch.bool)
    keep[masked] = False
    bias = torch.where(keep, 0.0, -INF).to(dtype)
    targets = torch.tensor([299, 299, 299, 299])
    leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    out = linear_logprobs(*leaves[:2], targets, bias=leaves[2], entropy=True)
    (out.logps + 0.5 * out.entropy).sum().backward()

    exact = [hidden.double().requires_grad_(), weight[keep].double().requires_grad_()]
    position = int(keep[:299].sum())
    want, entropy = reference_logprobs(*exact, torch.full((4,), position), entropy=True)
    (want + 0.5 * entropy).sum().backward()
    tol = {"rtol": 1e-5, "atol": 1e-5} if dtype != torch.bfloat16 else {"rtol": 1e-2, "atol": 2e-3}
    torch.testing.assert_close(out.logps.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.entropy.double(), entropy, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(leaves[0].grad.double(), exact[0].grad, **tol)
    torch.testing.assert_close(leaves[1].grad[keep].double(), exact[1].grad, **tol)
    assert not leaves[1].grad[~keep].any()
    assert not leaves[2].grad[~keep].any()
    assert torch.isfinite(leaves[2].grad).all()


@pytest.mark.both_backends
def test_entropy_of_two_classes_equals_categorical() -> None:
    """N6: [0, -inf], [0, 0, -inf] and the extremes of float16."""
    for row in ([0.0, -INF], [0.0, 0.0, -INF], [1.0, 0.0, -INF]):
        bias = torch.tensor(row)
        out = linear_logprobs(
            torch.zeros(1, 4), torch.zeros(len(row), 4), torch.tensor([0]), bias=bias, entropy=True
        )
        finite = bias[bias.isfinite()]
        expected = torch.distributions.Categorical(logits=finite).entropy()
        torch.testing.assert_close(out.entropy[0], expected)
    half = torch.tensor([[65504.0, -65504.0]], dtype=torch.float16)
    logps, entropy, grad = gradients(half, torch.tensor([0]), 1.0, 1.0)
    assert not logps.any()
    assert not entropy.any()
    assert not grad.any()


@pytest.mark.both_backends
@pytest.mark.parametrize("target_logit", [-INF, -1e30])
def test_target_of_zero_probability(target_logit: float) -> None:
    """logp is -inf (or as negative), nothing is NaN, and the other rows are untouched."""
    bias = torch.zeros(6)
    bias[2] = target_logit
    hidden = torch.randn(3, 4, requires_grad=True)
    weight = torch.randn(6, 4)
    targets = torch.tensor([1, 2, 3])
    out = linear_logprobs(hidden, weight, targets, bias=bias, entropy=True)
    assert out.logps[1] <= -1e29
    assert not out.logps.isnan().any()
    assert torch.isfinite(out.entropy).all()
    clean = linear_logprobs(hidden, weight, torch.tensor([1, 1, 3]), bias=bias)
    assert torch.equal(out.logps[[0, 2]], clean.logps[[0, 2]])
    (out.logps * torch.tensor([1.0, 0.0, 1.0])).sum().backward()
    assert torch.isfinite(hidden.grad).all()


@pytest.mark.both_backends
def test_float16_logits_beyond_65504() -> None:
    """N16: float16 inputs whose logits overflow float16: float32 accumulators hold them."""
    hidden = torch.full((2, 64), 500.0, dtype=torch.float16)
    hidden[1, ::2] = -500.0
    weight = torch.full((3, 64), 4.0, dtype=torch.float16)
    weight[1] = 3.9
    logits = hidden.double() @ weight.double().T
    assert logits.max() > 65504
    out = linear_logprobs(hidden, weight, torch.tensor([0, 1]), entropy=True)
    want = torch.log_softmax(logits, -1)[[0, 1], [0, 1]]
    torch.testing.assert_close(out.logps.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.both_backends
def test_temperature_near_zero() -> None:
    """N17: T = 1e-3 is finite and greedy."""
    logits = torch.randn(4, 33)
    best = logits.argmax(-1)
    logps, entropy, grad = gradients(logits, best, 1.0, 1.0, temperature=1e-3)
    assert torch.isfinite(grad).all()
    assert (logps > -1e-2).all()
    assert (entropy < 1e-1).all()


@pytest.mark.both_backends(triton_if=lambda p: p["chunks"] == 8)
@pytest.mark.parametrize("chunks", [1, 8, 64, 256])
def test_weight_gradient_does_not_lose_digits_with_chunks(chunks: int) -> None:
    """N12: dW of a bfloat16 weight is summed in float32 however many chunks there are."""
    case = make_case(
        rows=16, width=32, vocab=257, dim=32, dtype=torch.bfloat16, mask="ones", ref=False
    )
    bytes_per_token = 4 * (257 + 4 * 32)
    check(case, chunk_bytes=2 * bytes_per_token * (512 // chunks) + (1 << 13))


@pytest.mark.both_backends
def test_bfloat16_inputs_equal_their_float32_values() -> None:
    """N14: the same numbers as float32 tensors give the same log-probabilities and loss."""
    case = make_case(dtype=torch.bfloat16, vocab=257, ref=False, entropy=True)
    wide = make_case(dtype=torch.bfloat16, vocab=257, ref=False, entropy=True)
    wide.hidden, wide.weight = wide.hidden.float(), wide.weight.float()
    got, want = check(case).output, check(wide).output
    torch.testing.assert_close(got.per_token_logps, want.per_token_logps, rtol=0, atol=3e-6)
    torch.testing.assert_close(got.entropy, want.entropy, rtol=0, atol=3e-6)
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-5, atol=1e-6)


@pytest.mark.both_backends
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("bad", [float("nan"), INF, -INF])
def test_nan_at_a_counted_token_is_seen(bad: float, reduction: str, level: str) -> None:
    """A broken forward pass gives NaN in its log-prob, the loss and both gradients, as eager does.

    Masks select NaN away where nothing counts; where something counts, hiding it would train on.
    """
    case = make_case(vocab=61, dtype=torch.float32, ref=False, importance_sampling_level=level)
    case.hidden[1, 3] = bad
    result = ours(case, reduction=reduction)
    logps = result.output.per_token_logps
    assert logps[1, 3].isnan()
    assert logps.isnan().sum() == 1
    assert result.output.loss.isnan().any()
    assert result.grads["hidden"][1, 3].isnan().all()
    assert torch.isfinite(result.grads["hidden"][2]).all()
    assert result.grads["weight"].isnan().any()


@pytest.mark.both_backends
def test_nan_in_the_weight_is_seen() -> None:
    case = make_case(vocab=61, dtype=torch.float32, ref=False)
    case.weight[7, 3] = float("nan")
    result = ours(case)
    assert result.output.per_token_logps[case.mask].isnan().all()
    assert result.output.loss.isnan()
