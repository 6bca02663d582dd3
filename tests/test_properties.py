"""Properties that hold for any mask, shape and option (hypothesis)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from cases import Case, make_case, pack
from fuzzing import examples
from hypothesis import given
from hypothesis import strategies as st
from oracle import check, close, oracle, ours
from torch import Tensor

from fused_grpo import group_relative_advantages, linear_logprobs, policy_loss

few = examples(40)

SCHEMES = st.sampled_from(
    [
        {"loss_type": "grpo"},
        {"loss_type": "bnpo"},
        {"loss_type": "dr_grpo", "max_completion_length": 5},
        {"loss_type": "dapo"},
        {"loss_type": "dapo", "num_items_in_batch": 3},
    ]
)


@st.composite
def cases(draw: st.DrawFn, dtype: torch.dtype = torch.float64, empty: bool = True) -> Case:
    """A batch with any mask (rows and whole batches may be empty), and any options."""
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    options: dict[str, Any] = dict(draw(SCHEMES))
    options |= {
        "importance_sampling_level": draw(st.sampled_from(["token", "sequence"])),
        "temperature": draw(st.sampled_from([1.0, 0.6])),
        "softcap": draw(st.sampled_from([None, 3.0])),
        "delta": draw(st.sampled_from([None, 1.7])),
        "entropy_coef": draw(st.sampled_from([0.0, 0.1])),
    }
    beta = draw(st.sampled_from([0.0, 0.2]))
    if beta:
        options |= {"beta": beta, "use_bias_correction_kl": draw(st.booleans())}
    case = make_case(
        seed=draw(st.integers(0, 10**6)),
        rows=rows,
        width=width,
        dim=draw(st.integers(1, 5)),
        vocab=draw(st.integers(1, 40)),
        dtype=dtype,
        mask="ones",
        bias=draw(st.booleans()),
        old=draw(st.booleans()),
        ref=beta > 0,
        **options,
    )
    flags = draw(st.lists(st.booleans(), min_size=rows * width, max_size=rows * width))
    mask = torch.tensor(flags).view(rows, width)
    if not empty:
        mask[0, 0] = True
    case.tensors["completion_mask"] = mask
    return case


def agree(a: Any, b: Any, tol: float = 1e-11) -> None:
    close(a.output.loss, b.output.loss, tol, "loss")
    close(a.grads["weight"], b.grads["weight"], tol, "weight")
    for name, value in a.output.metrics.items():
        close(value, b.output.metrics[name], 1e-5, name)


@few
@given(cases(), st.sampled_from(["sum", "none"]))
def test_any_batch_equals_the_reference(case: Case, reduction: str) -> None:
    check(case, reduction=reduction)


@few
@given(cases())
def test_packed_equals_padded(case: Case) -> None:
    agree(ours(pack(case)), ours(case))


@few
@given(cases(), st.data())
def test_row_order_is_irrelevant(case: Case, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(case.ids))))
    shuffled = replace(
        case,
        hidden=case.hidden[order],
        ids=case.ids[order],
        advantages=case.advantages[order],
        tensors={k: v[order] for k, v in case.tensors.items()},
    )
    want, got = ours(case), ours(shuffled)
    agree(got, want)
    close(got.grads["hidden"], want.grads["hidden"][order], 1e-11, "hidden")


@few
@given(cases(), st.integers(1, 5))
def test_padding_is_irrelevant(case: Case, extra: int) -> None:
    def wider(x: Tensor) -> Tensor:
        return torch.cat([x, x.new_zeros(len(x), extra, *x.shape[2:])], dim=1)

    padded = replace(
        case,
        hidden=wider(case.hidden),
        ids=wider(case.ids),
        tensors={k: wider(v) for k, v in case.tensors.items()},
    )
    want, got = ours(case), ours(padded)
    agree(got, want)
    close(got.grads["hidden"], wider(want.grads["hidden"]), 1e-11, "hidden")


@few
@given(cases(), st.integers(1, 1 << 14), st.integers(1, 1 << 14))
def test_chunk_size_is_irrelevant(case: Case, first: int, second: int) -> None:
    """The budget moves rounding alone, even where it is too small for a single token."""
    a, b = ours(case, chunk_bytes=first), ours(case, chunk_bytes=second)
    agree(a, b)
    close(a.grads["hidden"], b.grads["hidden"], 1e-11, "hidden")
    close(a.output.per_token_logps, b.output.per_token_logps, 1e-12, "logps")


GARBAGE = st.sampled_from([math.nan, math.inf, -math.inf, 1e30, -200.0])


@few
@given(cases(dtype=torch.float32), GARBAGE, st.sampled_from([-100, -1, 10**9]))
def test_masked_content_is_inert(case: Case, garbage: float, token: int) -> None:
    """R11: what stands at a masked position changes no bit of any result."""
    off = ~case.mask
    per_token = replace(case, advantages=case.advantages[:, None].expand(case.ids.shape))
    spoiled = replace(
        per_token,
        hidden=case.hidden.masked_fill(off[..., None], garbage),
        ids=case.ids.masked_fill(off, token),
        advantages=per_token.advantages.masked_fill(off, garbage),
        tensors={
            k: (v if k == "completion_mask" else v.masked_fill(off, garbage))
            for k, v in case.tensors.items()
        },
    )
    want, got = ours(per_token), ours(spoiled)
    assert torch.equal(got.output.loss, want.output.loss)
    for name, grad in want.grads.items():
        assert torch.equal(got.grads[name], grad), name
    for name, value in want.output.metrics.items():
        assert torch.equal(got.output.metrics[name], value), name
    assert not got.grads["hidden"][off].any()


@few
@given(cases(empty=False), st.integers(0, 3))
def test_micro_batches_add_up(case: Case, cut: int) -> None:
    """R3: with the global token count given, gradients add up over any split of the rows."""
    case.options.pop("max_completion_length", None)
    case.options |= {"loss_type": "dapo", "num_items_in_batch": int(case.mask.sum())}
    whole, total = ours(case), torch.zeros_like(case.weight)
    for part in (slice(0, cut), slice(cut, None)):
        rows = replace(
            case,
            hidden=case.hidden[part],
            ids=case.ids[part],
            advantages=case.advantages[part],
            tensors={k: v[part] for k, v in case.tensors.items()},
        )
        total += ours(rows).grads["weight"]
    close(total, whole.grads["weight"], 1e-11, "weight")


@few
@given(cases(empty=False))
def test_metrics_are_in_range(case: Case) -> None:
    metrics = {k: float(v) for k, v in ours(case).output.metrics.items()}
    shares = [k for k in metrics if k.startswith("clip_ratio/")]
    for name in [*shares, "zero_coefficient_fraction", "log_ratio/clamped"]:
        assert 0 <= metrics[name] <= 1, name
    assert 0 < metrics["effective_sample_size"] <= 1 + 1e-6
    assert metrics["ratio/min"] <= metrics["ratio/mean"] * (1 + 1e-6)
    assert metrics["ratio/mean"] <= metrics["ratio/max"] * (1 + 1e-6)
    assert metrics.get("kl", 0.0) >= 0
    assert metrics.get("entropy", 0.0) >= 0
    assert metrics["num_tokens"] == int(case.mask.sum())


@few
@given(cases())
def test_the_loss_is_linear_in_the_advantages(case: Case) -> None:
    """Per token and without KL and entropy: scaling advantages by 3 scales loss and gradients."""
    case = replace(case, tensors={k: v for k, v in case.tensors.items() if not k.startswith("ref")})
    case.options = {
        k: v
        for k, v in case.options.items()
        if k not in ("beta", "use_bias_correction_kl", "entropy_coef")
    }
    want, got = ours(case), ours(replace(case, advantages=3 * case.advantages))
    close(got.output.loss, 3 * want.output.loss, 1e-11, "loss")
    close(got.grads["weight"], 3 * want.grads["weight"], 1e-11, "weight")


LOGIT_STD = st.sampled_from([1e-3, 1.0, 10.0, 300.0, 1e4])


@few
@given(
    st.integers(0, 10**6),
    st.integers(1, 300),
    LOGIT_STD,
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)
def test_ranges_of_logps_and_entropy(seed: int, vocab: int, std: float, dtype: torch.dtype) -> None:
    """N1, N18: logp <= 0 and entropy in [0, log V], strictly, whatever the logits."""
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(5, 4, generator=g).to(dtype)
    weight = (torch.randn(vocab, 4, generator=g) * std / 2).to(dtype)
    targets = torch.randint(vocab, (5,), generator=g)
    # Sampled tokens are mostly the likely ones.
    targets[:3] = (hidden.double() @ weight.double().T).argmax(-1)[:3]
    out = linear_logprobs(hidden, weight, targets, entropy=True)
    assert (out.logps <= 0).all()
    assert (out.entropy >= 0).all()
    assert (out.entropy <= math.log(vocab) + 1e-6 * max(1.0, math.log(vocab))).all()


@few
@given(st.integers(0, 10**6), st.floats(-3, 3), st.floats(-3, 3), st.booleans())
def test_linear_in_the_upstream_gradient(seed: int, alpha: float, beta: float, bias: bool) -> None:
    """R6: grad(alpha a + beta b) = alpha grad(a) + beta grad(b), per token and per output."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    leaves = [normal(6, 4).requires_grad_(), normal(13, 4).requires_grad_()]
    extra = normal(13).requires_grad_() if bias else None
    leaves += [extra] if extra is not None else []
    targets = torch.randint(13, (6,), generator=g)
    targets[2] = -100
    out = linear_logprobs(*leaves[:2], targets, bias=extra, entropy=True, softcap=4.0)
    upstream = [(normal(6), normal(6)) for _ in range(2)]
    mixed = tuple(alpha * a + beta * b for a, b in zip(*upstream, strict=True))

    def grads(weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return torch.autograd.grad((out.logps, out.entropy), leaves, weights, retain_graph=True)

    for got, a, b in zip(grads(mixed), *(grads(u) for u in upstream), strict=True):
        torch.testing.assert_close(got, alpha * a + beta * b, rtol=1e-9, atol=1e-11)


FLOATS = st.floats(-30, 30)


@few
@given(st.lists(st.tuples(FLOATS, FLOATS, FLOATS, st.floats(-3, 3)), min_size=1, max_size=8))
def test_bounds_of_the_token_loss(rows: list[tuple[float, float, float, float]]) -> None:
    """-min(...) is never below what the clip allows, and k3 >= 0 with equality at ref == logp."""
    logp, old, ref, advantage = torch.tensor(rows, dtype=torch.float64).T[:, None]
    vectors = {"old_per_token_logps": old}
    loss = policy_loss(logp, advantage, **vectors).per_token_loss
    assert (loss >= -1.2 * advantage.clamp(min=0) + 0.8 * (-advantage).clamp(min=0) - 1e-12).all()
    k3 = policy_loss(logp, 0 * advantage, ref_per_token_logps=ref, beta=1.0, **vectors)
    assert (k3.per_token_loss >= -1e-12).all()
    same = policy_loss(logp, 0 * advantage, ref_per_token_logps=logp.clone(), beta=1.0, **vectors)
    assert not same.per_token_loss.any()


@few
@given(
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(0, 10**6),
    st.sampled_from(["group", "batch", "none"]),
    st.sampled_from(["mean", "leave_one_out"]),
)
def test_advantages(prompts: int, size: int, seed: int, scale: str, baseline: str) -> None:
    """Zero mean in each group; a constant added to a group's rewards changes nothing."""
    g = torch.Generator().manual_seed(seed)
    rewards = torch.randint(0, 4, (prompts, size), generator=g).double()
    options: dict[str, Any] = {"scale": scale, "baseline": baseline}
    got = group_relative_advantages(rewards, **options)
    torch.testing.assert_close(got.mean(1), torch.zeros(prompts).double(), rtol=0, atol=1e-12)
    assert not got[rewards.amax(1) == rewards.amin(1)].any()
    if scale != "batch":
        shifted = group_relative_advantages(rewards + 8.0, **options)
        torch.testing.assert_close(shifted, got, rtol=1e-9, atol=1e-12)
    order = torch.randperm(size, generator=g)
    permuted = group_relative_advantages(rewards[:, order], **options)
    torch.testing.assert_close(permuted, got[:, order], rtol=1e-9, atol=1e-12)


@few
@given(cases(empty=False), st.floats(-50, 50))
def test_a_constant_in_the_bias_is_irrelevant(case: Case, constant: float) -> None:
    """Softmax is shift invariant (without a softcap)."""
    case = case.with_options(softcap=None)
    case.bias = torch.zeros(len(case.weight), dtype=torch.float64)
    want = oracle(case)
    got = ours(replace(case, bias=case.bias + constant))
    close(got.output.loss, want.output.loss, 1e-10, "loss")
    close(got.grads["weight"], want.grads["weight"], 1e-10, "weight")
