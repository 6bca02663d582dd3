"""bfloat16 heads without entropy, bias or softcap: exponentials may be rounded, logps may not.

Log-probabilities stay within 1e-4 of float64 on the same numbers, whatever the logits: peaked,
flat, equal, far apart. Rounding errors of a sum are independent only if its terms are.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import LEVELS, exact_logps, make_case, pack
from oracle import check, close, ours
from torch import Tensor

from fused_grpo import linear_logprobs
from fused_grpo.reference import reference_logprobs

BF16 = torch.bfloat16


def small(parameters: dict[str, Any]) -> bool:
    return parameters["vocab"] <= 1000


def head(tokens: int, vocab: int, dim: int, std: float = 1.0) -> tuple[Tensor, Tensor]:
    """hidden [tokens, dim] and weight [vocab, dim]; logits of the given standard deviation."""
    hidden = torch.randn(tokens, dim).to(BF16)
    return hidden, (torch.randn(vocab, dim) * std / dim**0.5).to(BF16)


def check_logps(
    hidden: Tensor, weight: Tensor, targets: Tensor, rows: float = 1e-2, **options: Any
) -> None:
    """logps to 1e-4; gradients to 0.5 %, and each row of dh to ``rows``; no_grad alike."""
    upstream = torch.linspace(-1, 2, len(targets))
    exact = [x.double().requires_grad_() for x in (hidden, weight)]
    want = reference_logprobs(*exact, targets)[0]
    (want * upstream.double()).sum().backward()
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    got = linear_logprobs(*leaves, targets, **options).logps
    close(got, want, 1e-4, "logps")
    assert (got <= 0).all()
    with torch.no_grad():
        close(linear_logprobs(hidden, weight, targets, **options).logps, want, 1e-4, "no_grad")
    (got * upstream).sum().backward()
    for leaf, x in zip(leaves, exact, strict=True):
        error = (leaf.grad.double() - x.grad).norm()
        assert error <= 5e-3 * x.grad.norm() + 1e-30, f"{error / x.grad.norm():.2e}"
    error = (leaves[0].grad.double() - exact[0].grad).norm(dim=1)
    norms = exact[0].grad.norm(dim=1)
    assert (error <= rows * norms + 1e-6 * norms.amax() + 1e-30).all()


@pytest.mark.both_backends(triton_if=small)
@pytest.mark.parametrize("kind", ["random", "likely"])
@pytest.mark.parametrize("std", [0.1, 1.0, 3.0, 10.0, 30.0])
@pytest.mark.parametrize("vocab", [257, 4099])
def test_random_logits(vocab: int, std: float, kind: str) -> None:
    """From flat to peaked; random targets may be e^100 times less likely than the best entry."""
    hidden, weight = head(24, vocab, 48, std)
    targets = torch.randint(vocab, (24,))
    if kind == "likely":
        targets = (hidden.float() @ weight.float().T).argmax(-1)
    check_logps(hidden, weight, targets)


@pytest.mark.both_backends(triton_if=small)
@pytest.mark.parametrize("vocab", [2, 257, 600, 4099, 50_257])
@pytest.mark.parametrize("equal", ["hidden", "weight", "rows"])
def test_equal_logits(equal: str, vocab: int) -> None:
    """An untrained head, or a padded vocabulary: equal terms have equal rounding errors."""
    for seed in range(8):
        torch.manual_seed(seed)
        hidden, weight = head(8, vocab, 16, 2.0)
        targets = torch.randint(vocab, (8,))
        if equal == "hidden":
            hidden.zero_()
        elif equal == "weight":
            weight.zero_()
        else:
            kept = weight[targets].clone()
            weight[:] = weight[0].clone()
            weight[targets] = kept
        want = reference_logprobs(hidden.double(), weight.double(), targets)[0]
        close(linear_logprobs(hidden, weight, targets).logps, want, 1e-4, f"seed {seed}")


@pytest.mark.both_backends(triton_if=lambda p: p["repeats"] == 513)
@pytest.mark.parametrize("repeats", [3, 64, 511, 513, 1024, 3000])
def test_groups_of_equal_logits(repeats: int) -> None:
    """Most of the mass in entries that are all alike, each above or below 2^-9 of the sum."""
    for seed in range(8):
        torch.manual_seed(seed)
        hidden, weight = head(8, 4099, 16, 1.0)
        weight[:repeats] = (4 * hidden.float().mean(0) + 0.1 * torch.randn(16)).to(BF16)
        targets = torch.randint(repeats, 4099, (8,))
        want = reference_logprobs(hidden.double(), weight.double(), targets)[0]
        close(linear_logprobs(hidden, weight, targets).logps, want, 1e-4, f"seed {seed}")


@pytest.mark.both_backends
@pytest.mark.parametrize("gap", [20.0, 37.0, 39.0, 41.0, 60.0, 200.0, 3e4])
def test_an_unlikely_target_among_ordinary_ones(gap: float) -> None:
    """A target e^gap times less likely than the rest, in one row of the chunk: all rows hold."""
    hidden, weight = head(12, 257, 32)
    weight[:, 0], hidden[:, 0] = 0.0, 1.0
    weight[7, 0] = -gap
    targets = torch.randint(8, 257, (12,))
    targets[5] = 7
    check_logps(hidden, weight, targets)


@pytest.mark.both_backends
@pytest.mark.parametrize("gap", [5.0, 12.0, 20.0, 30.0, 41.0, 60.0, 84.0, 200.0])
def test_confident_rows_among_ordinary_ones(gap: float) -> None:
    """N13, N18: a target e^gap times as likely as the rest: 1 - p to 1 %, down to 1e-13."""
    hidden, weight = head(12, 257, 32)
    weight[:, 0], hidden[:, 0] = 0.0, 0.0
    weight[7, 0], hidden[5, 0] = gap, 1.0
    targets = torch.randint(8, 257, (12,))
    targets[5] = 7
    check_logps(hidden, weight, targets)
    if gap <= 30:
        exact = hidden[5:6].double(), weight.double()
        others = torch.arange(257) != 7
        z = (exact[0] @ exact[1].T)[0]
        want = -torch.nn.functional.softplus(z[others].logsumexp(0) - z[7], threshold=1e9)
        got = linear_logprobs(hidden[5:6], weight, targets[5:6]).logps[0]
        torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=1e-30)


@pytest.mark.both_backends
@pytest.mark.parametrize("dim", [1, 2, 7, 63, 65])
def test_any_width(dim: int) -> None:
    hidden, weight = head(9, 131, dim, 2.0)
    check_logps(hidden, weight, torch.randint(131, (9,)), rows=2e-2)


@pytest.mark.both_backends
@pytest.mark.parametrize("shift", [-300.0, -40.0, 40.0, 300.0])
def test_common_shift(shift: float) -> None:
    """N2: all logits near -300 or 300 have the log-probs of those near 0."""
    hidden, weight = head(9, 131, 16, 2.0)
    hidden[:, 0], weight[:, 0] = 1.0, shift
    targets = torch.randint(131, (9,))
    want = reference_logprobs(hidden.double(), weight.double(), targets)[0]
    close(linear_logprobs(hidden, weight, targets).logps, want, 1e-4, "logps")


@pytest.mark.both_backends
@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 64])
def test_repeated_targets_and_token_counts(tokens: int) -> None:
    """Targets that occur many times add up in dW; 1, 7, 8 and 9 tokens end blocks differently."""
    hidden, weight = head(tokens, 131, 32, 2.0)
    check_logps(hidden, weight, torch.full((tokens,), 5))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("old", [True, False])
def test_loss_at_a_real_size(level: str, old: bool) -> None:
    """576 dimensions and 4,099 entries, over several chunks, padded and packed."""
    case = make_case(
        rows=4,
        width=40,
        dim=576,
        vocab=4099,
        dtype=BF16,
        ref=False,
        old=old,
        logit_std=4.0,
        importance_sampling_level=level,
    )
    check(case, chunk_bytes=1 << 20)
    check(pack(case))


def test_one_path_or_another_agree() -> None:
    """Asking for entropies, another budget or no gradient moves logps by less than 1e-4."""
    case = make_case(rows=4, width=40, dim=64, vocab=4099, dtype=BF16, ref=False, old=False)
    want = exact_logps(case)
    for options in ({}, {"entropy": True}, {"temperature": torch.ones(4, 40)}):
        for chunk_bytes in (1 << 16, 1 << 20, 100 << 20):
            got = ours(case.with_options(**options), chunk_bytes=chunk_bytes).output
            close(got.per_token_logps, want, 1e-4, f"{options} {chunk_bytes}")


@pytest.mark.both_backends
def test_first_ratio_is_one() -> None:
    """S20: log-probabilities of a no-grad call give ratios of 1 in the loss that follows."""
    case = make_case(rows=4, width=40, dim=64, vocab=4099, dtype=BF16, ref=False, old=False)
    with torch.no_grad():
        targets = case.ids.masked_fill(~case.mask, -100)
        old = linear_logprobs(case.hidden, case.weight, targets).logps
    case.tensors["old_per_token_logps"] = old
    metrics = ours(case).output.metrics
    assert abs(float(metrics["log_ratio/max"])) < 1e-4
    assert abs(float(metrics["log_ratio/min"])) < 1e-4


@pytest.mark.both_backends
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_is_seen_and_stays_in_its_row(bad: float) -> None:
    hidden, weight = head(9, 131, 16, 2.0)
    targets = torch.randint(131, (9,))
    want = linear_logprobs(hidden, weight, targets).logps
    hidden[4, 3] = bad
    got = linear_logprobs(hidden, weight, targets).logps
    assert got.isnan().tolist() == [i == 4 for i in range(9)]
    rest = torch.arange(9) != 4
    close(got[rest], want[rest], 1e-4, "other rows")


@pytest.mark.both_backends
def test_minus_infinity_in_the_weight() -> None:
    """Entries that cannot occur, by a weight of -inf on a positive coordinate."""
    hidden, weight = head(9, 131, 16, 2.0)
    hidden[:, 0] = hidden[:, 0].abs() + 0.5
    targets = torch.randint(100, (9,))
    weight[100:, 0] = -float("inf")
    want = reference_logprobs(hidden.double(), weight[:100].double(), targets)[0]
    close(linear_logprobs(hidden, weight, targets).logps, want, 1e-4, "logps")
