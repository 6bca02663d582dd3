"""Properties of the calls of a head beside the loss: supports, routed gradients, mixed dtypes."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from fuzzing import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fused_grpo import grpo_loss, linear_kl, linear_logprobs, linear_support

SEEDS = st.integers(0, 10**6)


def normal_of(seed: int) -> Any:
    g = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)


# ---- a constant on all logits


RULES = st.sampled_from([{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 9, "min_p": 0.1}])


@examples(40)
@given(SEEDS, st.integers(1, 200), RULES, st.floats(-50, 50), st.sampled_from([0.5, 1.0, 3.0]))
def test_a_constant_moves_no_support(
    seed: int, vocab: int, rule: dict[str, Any], by: float, temperature: float
) -> None:
    normal = normal_of(seed)
    hidden, weight, bias = normal(2, 3, 4), normal(vocab, 4), normal(vocab)
    want = linear_support(hidden, weight, bias=bias, temperature=temperature, **rule)
    got = linear_support(hidden, weight, bias=bias + by, temperature=temperature, **rule)
    assert torch.equal(got, want)
    twice = linear_support(2 * hidden, weight, bias=2 * bias, temperature=2 * temperature, **rule)
    assert torch.equal(twice, want)


def routed_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor, ids: Tensor, **options: Any
) -> tuple[Tensor, list[Tensor]]:
    leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    a = torch.linspace(-1, 1.5, len(ids), dtype=torch.float64)
    out = grpo_loss(*leaves[:2], ids, a, bias=leaves[2], backward="routed", **options)
    out.loss.backward()
    return out.loss.detach(), [x.grad for x in leaves]


@examples(40)
@given(SEEDS, st.integers(2, 300), st.floats(-50, 50), st.sampled_from([0.5, 2.0**-3, 2.0**-6]))
def test_a_constant_moves_no_routed_gradient(seed: int, vocab: int, by: float, tau: float) -> None:
    """The same entries are kept: noise is compared with probabilities, not with logits."""
    normal = normal_of(seed)
    hidden, weight, bias = normal(3, 4, 4), 2 * normal(vocab, 4), normal(vocab)
    ids = torch.randint(vocab, (3, 4), generator=torch.Generator().manual_seed(seed))
    options = {"route_tau": tau, "route_seed": seed, "chunk_bytes": 1 << 13}
    loss, want = routed_gradients(hidden, weight, bias, ids, **options)
    moved, got = routed_gradients(hidden, weight, bias + by, ids, **options)
    torch.testing.assert_close(moved, loss, rtol=1e-10, atol=1e-10)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@examples(30)
@given(SEEDS, st.integers(2, 200), st.permutations(range(4)))
def test_rows_keep_their_noise_with_their_names(seed: int, vocab: int, order: list[int]) -> None:
    """`sequence_ids` are what it hangs on: another order of rows is another order of gradients."""
    normal = normal_of(seed)
    hidden, weight, bias = normal(4, 3, 4), 2 * normal(vocab, 4), normal(vocab)
    ids = torch.randint(vocab, (4, 3), generator=torch.Generator().manual_seed(seed))
    names = torch.tensor([11, 5, 8, 3])

    def gradient(rows: list[int]) -> Tensor:
        leaf = hidden[rows].requires_grad_()
        out = linear_logprobs(
            leaf,
            weight,
            ids[rows],
            bias=bias,
            backward="routed",
            route_tau=0.3,
            route_seed=seed,
            sequence_ids=names[rows],
        )
        out.logps.sum().backward()
        grad: Tensor = leaf.grad
        return grad

    want = gradient([0, 1, 2, 3])
    torch.testing.assert_close(gradient(order), want[order], rtol=1e-10, atol=1e-12)


# ---- mixed dtypes, fp64 among them


FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DTYPES = st.sampled_from(FLOATS)
CAST = st.sampled_from([None, torch.bfloat16, torch.float16])


@examples(120)
@given(SEEDS, DTYPES, DTYPES, DTYPES, DTYPES, CAST)
def test_any_four_dtypes(
    seed: int,
    states: torch.dtype,
    head: torch.dtype,
    added: torch.dtype,
    vectors: torch.dtype,
    cast: torch.dtype | None,
) -> None:
    """I7: results are fp64 where hidden states or weight are, else fp32; the values are those of
    the numbers that were given, and gradients come in their leaf's dtype."""
    normal = normal_of(seed)
    hidden, weight, bias = normal(2, 3, 5).to(states), normal(23, 5).to(head), normal(23).to(added)
    a, old = normal(2).to(vectors), -3 + 0.1 * normal(2, 3).to(vectors)
    ids = torch.randint(23, (2, 3), generator=torch.Generator().manual_seed(seed))
    other = normal(23, 5).to(head)

    def run(wide: bool) -> list[Tensor]:
        given = [x.double() if wide else x.clone() for x in (hidden, weight, bias)]
        leaves = [x.requires_grad_() for x in given]
        rest = [x.double() if wide else x for x in (a, old, other)]
        out = grpo_loss(
            *leaves[:2],
            ids,
            rest[0],
            bias=leaves[2],
            old_per_token_logps=rest[1],
            loss_type="importance_sampling",  # smooth: no clip for rounding to decide
            entropy=True,
        )
        out.loss.backward()
        values = linear_logprobs(leaves[0].detach(), leaves[1].detach(), ids, bias=leaves[2])
        kl = linear_kl(leaves[0].detach(), leaves[1].detach(), leaves[0].detach(), rest[2])
        results = [out.loss, out.per_token_logps, out.entropy, values.logps, kl]
        return [x.detach() for x in results] + [x.grad for x in leaves]

    with torch.autocast("cpu", dtype=cast or torch.bfloat16, enabled=cast is not None):
        got = run(False)
    want = run(True)
    result = torch.float64 if torch.float64 in (states, head) else torch.float32
    for x, y in itertools.islice(zip(got, want, strict=True), 5):
        assert x.dtype == result
        tol = 1e-9 if result == torch.float64 else 3e-5
        torch.testing.assert_close(x.double(), y, rtol=tol, atol=tol)
    for x, y, dtype in zip(got[5:], want[5:], (states, head, added), strict=True):
        assert x.dtype == dtype
        narrow = {torch.bfloat16, torch.float16} & {states, head, dtype}
        tol = 8e-3 if narrow else 1e-9 if result == dtype == torch.float64 else 3e-5
        assert (x.double() - y).norm() <= tol * y.norm() + 1e-6 * tol
