"""KL to a reference head over the whole vocabulary, in the op and in the loss."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import make_case, pack, with_reference
from oracle import DTYPES, TOLERANCE, Tolerance, assert_gradient, check, close, dtype_id, ours
from torch import Tensor

from fused_grpo import grpo_loss, linear_kl, linear_logprobs, policy_loss
from fused_grpo.divergence import kl_terms
from fused_grpo.reference import reference_linear_kl

SMALL = 1 << 14  # bytes: several chunks and tiles


def heads(
    lead: tuple[int, ...] = (3, 7),
    vocab: int = 129,
    dim: int = 24,
    ref_dim: int = 24,
    dtype: torch.dtype = torch.float64,
    distance: float = 0.5,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(policy, reference): hidden, weight, bias of each; `ref_dim` other than `dim`: unrelated."""
    policy = {
        "hidden": torch.randn(*lead, dim).double(),
        "weight": torch.randn(vocab, dim).double() * 2 / math.sqrt(dim),
        "bias": torch.randn(vocab).double(),
    }
    reference = {
        "ref_hidden": torch.randn(*lead, ref_dim).double(),
        "ref_weight": torch.randn(vocab, ref_dim).double() * 2 / math.sqrt(ref_dim),
        "ref_bias": torch.randn(vocab).double(),
    }
    if ref_dim == dim:
        for name, x in policy.items():
            reference[f"ref_{name}"] = x + distance * reference[f"ref_{name}"]
    return (
        {k: v.to(dtype) for k, v in policy.items()},
        {k: v.to(dtype) for k, v in reference.items()},
    )


def compare(
    policy: dict[str, Tensor],
    reference: dict[str, Tensor],
    *,
    tolerance: Tolerance | None = None,
    trainable: tuple[str, ...] = ("hidden", "weight", "bias"),
    how: dict[str, Any] | None = None,
    **options: Any,
) -> Tensor:
    """Value, and gradients for a random upstream one, against the reference in float64."""
    tol = tolerance or TOLERANCE[policy["hidden"].dtype]
    upstream = torch.linspace(-1, 1.5, policy["hidden"].shape[:-1].numel()).double()
    upstream = upstream.view(policy["hidden"].shape[:-1])
    results = []
    for exact in (True, False):
        leaves = {k: (v.double() if exact else v).clone() for k, v in policy.items()}
        for name in trainable:
            leaves[name].requires_grad_()
        fixed = {k: (v.double() if exact else v).clone() for k, v in reference.items()}
        args = leaves | fixed
        call = [args.pop(k) for k in ("hidden", "weight", "ref_hidden", "ref_weight")]
        function = reference_linear_kl if exact else linear_kl
        kl = function(*call, **args, **options, **({} if exact else how or {}))
        (kl * upstream.to(kl.dtype)).sum().backward()
        assert all(x.grad is None for x in fixed.values())
        results.append((kl, {k: v.grad for k, v in leaves.items()}))
    (want, want_grads), (got, grads) = results
    close(got, want, tol.logps, "kl")
    assert (got >= 0).all()
    for name, grad in want_grads.items():
        assert_gradient(name, grads[name], grad, policy[name].dtype, tol.grads)
    return got


@pytest.mark.parametrize("top_k", [None, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("vocab", [127, 129, 257])
def test_random_heads(vocab: int, dtype: torch.dtype, top_k: int | None) -> None:
    """N1: sizes that are no multiple of a tile, over several chunks, any upstream gradient."""
    policy, reference = heads((5, 9), vocab, dtype=dtype)
    mask = torch.ones(5, 9)
    mask[0, :4] = mask[4] = 0
    got = compare(policy, reference, mask=mask, top_k=top_k, how={"chunk_bytes": SMALL})
    assert not got[mask == 0].any()
    assert (got[mask == 1] > 0.01).all()


OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "scale": {"logit_scale": -1.3},
    "softcap": {"softcap": 3.0},
    "all": {"temperature": 0.7, "logit_scale": 1.6, "softcap": 4.0},
    "own": {
        "temperature": 0.7,
        "ref_temperature": 1.1,
        "logit_scale": 1.6,
        "ref_logit_scale": 0.5,
        "softcap": 4.0,
        "ref_softcap": None,
    },
    "own_softcap": {"ref_softcap": 2.0},
}


@pytest.mark.parametrize("top_k", [None, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("name", OPTIONS)
def test_head_options(name: str, dtype: torch.dtype, top_k: int | None) -> None:
    """N9, N10: the reference has the policy's options, each of them once, unless given its own."""
    policy, reference = heads((4, 6), dtype=dtype)
    compare(policy, reference, top_k=top_k, how={"chunk_bytes": SMALL}, **OPTIONS[name])


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("top_k", [None, 5])
def test_temperature_per_token(top_k: int | None, softcap: float | None) -> None:
    policy, reference = heads((4, 6))
    temperature = torch.linspace(0.5, 2.0, 24).view(4, 6).double()
    more = {"top_k": top_k, "softcap": softcap, "how": {"chunk_bytes": SMALL}}
    compare(policy, reference, temperature=temperature, **more)
    own = temperature.flip(0)
    compare(policy, reference, temperature=temperature, ref_temperature=own, **more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize("top_k", [None, 16])
def test_a_real_vocabulary(top_k: int | None, dtype: torch.dtype) -> None:
    policy, reference = heads((1, 12), 50_257, 16, dtype=dtype)
    compare(policy, reference, top_k=top_k, how={"chunk_bytes": 4 << 20})


def test_a_reference_of_another_width_and_dtype() -> None:
    policy, reference = heads(ref_dim=40, dtype=torch.float32)
    compare(policy, {k: v.bfloat16() for k, v in reference.items()}, how={"chunk_bytes": SMALL})
    compare({k: v.bfloat16() for k, v in policy.items()}, reference)
    compare(policy, {k: v.double() for k, v in reference.items()})


@pytest.mark.parametrize(
    "trainable", [("hidden",), ("weight",), ("bias",), ("weight", "bias")], ids="-".join
)
@pytest.mark.parametrize("top_k", [None, 5])
def test_frozen_sides(trainable: tuple[str, ...], top_k: int | None) -> None:
    policy, reference = heads()
    compare(policy, reference, trainable=trainable, top_k=top_k)


def test_a_head_tied_to_the_embedding() -> None:
    """The weight's gradient comes from both of its uses; the reference is a copy of it before."""
    table = (torch.randn(50, 12).double() * 0.7).requires_grad_()
    ids, before = torch.randint(50, (4, 5)), torch.randn(50, 12).double()
    grads = []
    for function in (linear_kl, reference_linear_kl):
        table.grad = None
        hidden = torch.tanh(table[ids])
        function(hidden, table, before[ids], before).sum().backward()
        grads.append(table.grad)
    assert_gradient("table", grads[0], grads[1], torch.float64, 1e-9)


def test_gradcheck() -> None:
    policy, reference = heads((2, 3), 11, 4, 5)
    leaves = [x.requires_grad_() for x in policy.values()]
    for top_k in (None, 3):

        def kl(h: Tensor, w: Tensor, b: Tensor, k: int | None = top_k) -> Tensor:
            ref = (reference["ref_hidden"], reference["ref_weight"])
            return linear_kl(h, w, *ref, bias=b, ref_bias=reference["ref_bias"], top_k=k)

        assert torch.autograd.gradcheck(kl, leaves)


# ---- properties ---------------------------------------------------------------------------------


def test_equal_policies() -> None:
    """Exactly 0, with a gradient of exactly 0, however large the logits are."""
    for scale in (1.0, 50.0):
        policy, _ = heads(dtype=torch.float32)
        hidden = (scale * policy["hidden"]).requires_grad_()
        weight = policy["weight"].requires_grad_()
        for top_k in (None, 4):
            kl = linear_kl(hidden, weight, hidden.detach(), weight.detach(), top_k=top_k)
            assert not kl.any()
            kl.sum().backward()
            assert not hidden.grad.any()
            assert not weight.grad.any()


@pytest.mark.parametrize("distance", [1e-1, 1e-2, 1e-3])
def test_near_policies(distance: float) -> None:
    """Small divergences keep their digits in fp32, where log p - log r cancels: KL of 1e-6 is no
    noise, and its sign is right."""
    policy, reference = heads((40,), 1000, dtype=torch.float32, distance=distance)
    policy, reference = (
        {k: v for k, v in x.items() if "bias" not in k} for x in (policy, reference)
    )
    got = linear_kl(**policy, **reference)
    want = reference_linear_kl(**{k: v.double() for k, v in (policy | reference).items()})
    assert want.max() < 10 * distance**2
    # a log-ratio is off by the rounding of its logits, about 1e-6
    bound = 1e-6 + 5e-6 / distance
    assert ((got.double() - want).abs() <= bound * want).all()


@pytest.mark.parametrize("top_k", [None, 8])
@pytest.mark.parametrize("distance", [1e-1, 1e-2, 1e-3])
def test_gradients_of_near_policies(distance: float, top_k: int | None) -> None:
    """p (log(p / r) - KL) is as good as the log-ratio, which is about `distance` and carries the
    rounding of two logits, 1e-6."""
    policy, reference = heads((40,), 1000, dtype=torch.float32, distance=distance)
    compare(policy, reference, top_k=top_k, tolerance=Tolerance(1e-6, 2e-6 / distance, 1e-6))


def test_top_k_grows_to_the_full_divergence() -> None:
    policy, reference = heads((30,))
    full = linear_kl(**policy, **reference)
    previous = torch.zeros_like(full)
    for k in (1, 2, 5, 20, 100, 127):
        now = linear_kl(**policy, **reference, top_k=k)
        assert (now >= previous - 1e-12).all()
        assert (now < full).all()
        previous = now
    for k in (128, 129, 1000):
        close(linear_kl(**policy, **reference, top_k=k), full, 1e-12, "kl")


def test_top_k_by_hand() -> None:
    """p = (0.5, 0.3, 0.15, 0.05), r = (0.25, 0.25, 0.25, 0.25): two entries and a rest of 0.2."""
    p = torch.tensor([[0.15, 0.5, 0.05, 0.3]], dtype=torch.float64)
    uniform = torch.zeros(1, 4).double()
    got = linear_kl(p.log(), torch.eye(4).double(), uniform, torch.eye(4).double(), top_k=2)
    want = 0.5 * math.log(2) + 0.3 * math.log(1.2) + 0.2 * math.log(0.2 / 0.5)
    assert float(got) == pytest.approx(want, abs=1e-14)
    full = linear_kl(p.log(), torch.eye(4).double(), uniform, torch.eye(4).double())
    assert float(full) == pytest.approx(float((p * (4 * p).log()).sum()), abs=1e-14)


def test_kl_is_the_mean_of_the_sampled_estimate() -> None:
    """E_y [log p_y - log r_y] over all y is the divergence."""
    policy, reference = heads((1,), 60)
    ids = torch.arange(60)
    ours = linear_logprobs(
        policy["hidden"].expand(60, -1), policy["weight"], ids, bias=policy["bias"]
    ).logps
    theirs = linear_logprobs(
        reference["ref_hidden"].expand(60, -1),
        reference["ref_weight"],
        ids,
        bias=reference["ref_bias"],
    ).logps
    close(linear_kl(**policy, **reference)[0], (ours.exp() * (ours - theirs)).sum(), 1e-12, "kl")


@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_shift_of_all_logits(shift: float) -> None:
    """N2: a constant on all logits of either head changes nothing."""
    policy, reference = heads()
    want = linear_kl(**policy, **reference)
    for which in ("bias", "ref_bias"):
        moved = policy | reference
        moved[which] = moved[which] + shift
        close(linear_kl(**moved), want, 1e-10, which)


@pytest.mark.parametrize("top_k", [None, 5])
def test_entries_without_mass(top_k: int | None) -> None:
    """N6: -inf in the policy's bias is p = 0; in both, as for padded rows of a vocabulary, too."""
    policy, reference = heads(dtype=torch.float32)
    policy["bias"][40:100] = -math.inf  # whole tiles of 64, too
    compare(policy, reference, top_k=top_k, trainable=("hidden", "weight"), how={"chunk_bytes": 1})
    reference["ref_bias"][50:90] = -math.inf
    compare(policy, reference, top_k=top_k, trainable=("hidden", "weight"), how={"chunk_bytes": 1})


def test_a_reference_without_mass_where_the_policy_has_some() -> None:
    policy, reference = heads(dtype=torch.float32)
    reference["ref_bias"][70] = -math.inf
    assert (linear_kl(**policy, **reference) == math.inf).all()


def test_far_policies() -> None:
    """Log-ratios of hundreds of nats, where exp overflows and probabilities vanish.

    The gradient p (log(p / r) - KL) of a certain entry is a difference of two such numbers: in fp32
    it is as good as KL times the rounding of a float, which is 0 beside 1.
    """
    policy, reference = heads()
    policy["hidden"], reference["ref_hidden"] = 60 * policy["hidden"], -60 * reference["ref_hidden"]
    for top_k in (None, 3):
        got = compare(policy, reference, top_k=top_k)
        assert got.max() > 300
        single = {k: v.float() for k, v in (policy | reference).items()}
        want = linear_kl(**{k: v.double() for k, v in single.items()}, top_k=top_k)
        single["hidden"].requires_grad_()
        kl = linear_kl(**single, top_k=top_k)
        close(kl, want, 1e-5, "kl")
        kl.sum().backward()
        assert single["hidden"].grad.isfinite().all()


def test_kl_terms() -> None:
    p = torch.tensor([0.5, 0.5, 0.0, 1e-30, 0.2]).double()
    r = torch.tensor([0.5, 1e-3, 0.3, 1.0, 0.2 * (1 + 1e-9)]).double()
    delta = torch.where(p > 0, (p / r).log(), -1e4)
    got = kl_terms(p, r, delta)
    want = torch.tensor([0.0, 0.5 * math.log(500) - 0.5 + 1e-3, 0.3, 1.0, 0.2 * 0.5e-18]).double()
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-19)


@pytest.mark.parametrize("top_k", [None, 5])
def test_chunking_changes_nothing(top_k: int | None) -> None:
    policy, reference = heads((6, 7), 300)
    want = linear_kl(**policy, **reference, top_k=top_k)
    for size in (1, 1 << 12, 1 << 15, 1 << 18):
        got = linear_kl(**policy, **reference, top_k=top_k, chunk_bytes=size)
        close(got, want, 1e-12, f"chunk_bytes={size}")


def test_backends_and_no_grad() -> None:
    policy, reference = heads()
    want = linear_kl(**policy, **reference, backend="reference")
    assert not linear_kl(**policy, **reference).requires_grad
    close(linear_kl(**policy, **reference), want, 1e-12, "kl")
    policy["hidden"].requires_grad_()
    with torch.no_grad():
        close(linear_kl(**policy, **reference), want, 1e-12, "kl")


def test_masked_values_are_inert() -> None:
    """N5: NaN in either head's states at a masked position reaches nothing."""
    policy, reference = heads()
    mask = torch.ones(3, 7)
    mask[1, 2:5] = 0
    policy["hidden"][1, 2], reference["ref_hidden"][1, 3] = math.nan, math.inf
    compare(policy, reference, mask=mask)


def test_nan_that_counts_is_seen() -> None:
    for name in ("hidden", "ref_hidden"):
        args = {k: v for part in heads() for k, v in part.items()}
        args[name][0, 2] = math.nan
        for top_k in (None, 5):
            got = linear_kl(**args, top_k=top_k)
            assert got.isnan().sum() == 1
            assert got[0, 2].isnan()


def test_empty_and_all_masked() -> None:
    policy, reference = heads((0,))
    compare(policy, reference)
    policy, reference = heads()
    compare(policy, reference, mask=torch.zeros(3, 7))


def test_a_changed_reference_is_noticed() -> None:
    """D6: the backward reads the reference again: a change in between raises."""
    policy, reference = heads()
    policy["hidden"].requires_grad_()
    kl = linear_kl(**policy, **reference)
    reference["ref_weight"].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kl.sum().backward()


# ---- in the loss --------------------------------------------------------------------------------

ESTIMATORS: dict[str, dict[str, Any]] = {
    "k3": {},
    "full": {"kl_estimator": "full"},
    "top_k": {"kl_estimator": "top_k", "kl_top_k": 7},
}


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("vocab", [127, 129, 257])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_loss(estimator: str, vocab: int, dtype: torch.dtype, packed: bool) -> None:
    """The reference in the same call: loss, metrics and gradients on ragged masks."""
    case = make_case(
        vocab=vocab, dtype=dtype, bias=True, softcap=6.0, beta=0.3, **ESTIMATORS[estimator]
    )
    case = with_reference(case)
    check(pack(case) if packed else case, chunk_bytes=SMALL)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_loss_at_a_real_vocabulary(estimator: str, packed: bool) -> None:
    """Both heads and a support together, over several chunks."""
    case = make_case(
        vocab=50_257,
        dim=16,
        rows=3,
        width=6,
        dtype=torch.bfloat16,
        beta=0.3,
        support_top_p=0.9,
        support_top_k=300,
        **ESTIMATORS[estimator],
    )
    case = with_reference(case)
    check(pack(case) if packed else case, chunk_bytes=4 << 20)


HOW: dict[str, dict[str, Any]] = {
    "sequence": {"importance_sampling_level": "sequence"},
    "fresh": {"old": False},
    "sequence_fresh": {"importance_sampling_level": "sequence", "old": False},
    "entropy": {"entropy_coef": 0.1},
    "temperature": {"temperature": 0.7, "logit_scale": 1.3, "ref_temperature": 0.9},
    "own_head": {"logit_scale": 1.3, "ref_logit_scale": 0.6, "ref_softcap": 3.0},
}


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("how", HOW)
def test_loss_options(how: str, estimator: str, reduction: str) -> None:
    """One pass, two passes, and autograd over per-token values."""
    case = with_reference(make_case(beta=0.3, bias=True, **HOW[how], **ESTIMATORS[estimator]))
    check(case, reduction=reduction, chunk_bytes=SMALL)
    check(case, reduction=reduction, chunk_bytes=100 << 20)


@pytest.mark.parametrize(
    "trainable", [("hidden",), ("weight", "bias"), ("hidden", "weight")], ids="-".join
)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_loss_frozen(estimator: str, level: str, trainable: tuple[str, ...]) -> None:
    case = make_case(beta=0.3, bias=True, importance_sampling_level=level, **ESTIMATORS[estimator])
    check(with_reference(case, dim=10), trainable=trainable, chunk_bytes=SMALL)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_loss_with_everything(estimator: str) -> None:
    temperature = torch.linspace(0.6, 1.4, 66).view(6, 11).double()
    case = make_case(
        beta=0.2,
        temperature=temperature,
        softcap=5.0,
        logit_scale=1.2,
        bias=True,
        entropy_coef=0.05,
        delta=1.7,
        loss_type="grpo",
        **ESTIMATORS[estimator],
    )
    case = with_reference(case)
    for layout in (case, pack(case)):
        check(layout, chunk_bytes=SMALL)


def test_reference_log_probabilities_in_the_same_call() -> None:
    """What a call of linear_logprobs gives, bit for bit, with the same chunks."""
    case = with_reference(make_case(beta=0.3, bias=True, dtype=torch.float32, mask="ones"))
    ref = {k.removeprefix("ref_"): v for k, v in case.tensors.items() if k.startswith("ref_")}
    logps = linear_logprobs(**ref, targets=case.ids).logps
    tensors = {k: v for k, v in case.tensors.items() if not k.startswith("ref_")}
    apart = ours(replace(case, tensors=tensors | {"ref_per_token_logps": logps}))
    together = ours(case)
    for name in ("loss", "per_token_loss", "per_token_logps"):
        assert torch.equal(getattr(apart.output, name), getattr(together.output, name)), name
    for name, grad in together.grads.items():
        close(grad, apart.grads[name], 1e-6, name)


def test_backend_reference_in_the_loss() -> None:
    for name, estimator in ESTIMATORS.items():
        case = with_reference(make_case(beta=0.3, **estimator))
        close(ours(case, backend="reference").output.loss, ours(case).output.loss, 1e-12, name)


def test_zero_advantages_still_pull_to_the_reference() -> None:
    """T6: groups without variance have no policy gradient; that of the KL stays."""
    case = with_reference(make_case(beta=0.3, kl_estimator="full"))
    case.advantages.zero_()
    got = check(case)
    assert got.grads["hidden"].any()
    assert got.output.metrics["zero_coefficient_fraction"] == 0


def test_masked_values_are_inert_in_the_loss() -> None:
    case = with_reference(make_case(beta=0.3, kl_estimator="full"))
    clean = ours(case)
    case.tensors["ref_hidden"][~case.mask] = math.nan
    case.hidden[~case.mask] = math.inf
    dirty = ours(case)
    assert torch.equal(clean.output.loss, dirty.output.loss)
    assert torch.equal(clean.grads["weight"], dirty.grads["weight"])


def test_the_reference_gets_no_gradient() -> None:
    for estimator in ESTIMATORS.values():
        case = with_reference(make_case(beta=0.3, bias=True, **estimator))
        for name in ("ref_hidden", "ref_weight", "ref_bias"):
            case.tensors[name].requires_grad_()
        hidden = case.hidden.clone().requires_grad_()
        out = grpo_loss(
            hidden,
            case.weight,
            case.ids,
            case.advantages,
            bias=case.bias,
            **case.tensors,
            **case.options,
        )
        out.loss.backward()
        assert hidden.grad.any()
        assert all(case.tensors[f"ref_{n}"].grad is None for n in ("hidden", "weight", "bias"))


# ---- bad input ----------------------------------------------------------------------------------

B, T, H, V = 2, 3, 4, 9
REF = {"ref_hidden": torch.randn(B, T, H), "ref_weight": torch.randn(V, H)}


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        (REF, "ref_hidden beta"),
        ({"beta": 0.1, "ref_hidden": REF["ref_hidden"]}, "ref_hidden ref_weight"),
        ({"beta": 0.1, "ref_weight": REF["ref_weight"]}, "ref_hidden ref_weight"),
        ({"beta": 0.1, "ref_bias": torch.zeros(V)}, "ref_hidden ref_weight"),
        ({"beta": 0.1, "ref_softcap": 2.0}, "ref_hidden ref_weight"),
        (
            {"beta": 0.1, **REF, "ref_per_token_logps": torch.zeros(B, T)},
            "ref_per_token_logps both",
        ),
        ({"beta": 0.1, "kl_estimator": "full"}, "kl_estimator full ref_hidden"),
        (
            {"beta": 0.1, "kl_estimator": "full", "ref_per_token_logps": torch.zeros(B, T)},
            "kl_estimator full ref_hidden",
        ),
        ({"kl_estimator": "full"}, "kl_estimator full beta"),
        ({"beta": 0.1, **REF, "kl_estimator": "exact"}, "kl_estimator exact k3 full top_k"),
        ({"beta": 0.1, **REF, "kl_estimator": "top_k"}, "kl_top_k top_k"),
        ({"beta": 0.1, **REF, "kl_top_k": 3}, "kl_top_k 3"),
        ({"beta": 0.1, **REF, "kl_estimator": "top_k", "kl_top_k": 0}, "kl_top_k 0"),
        ({"beta": 0.1, **REF, "kl_estimator": "top_k", "kl_top_k": 1.5}, "kl_top_k 1.5"),
        (
            {"beta": 0.1, **REF, "kl_estimator": "full", "use_bias_correction_kl": True},
            "use_bias_correction_kl full",
        ),
        ({"beta": 0.1, **REF, "ref_hidden": torch.randn(B, T + 1, H)}, f"ref_hidden {T + 1} {T}"),
        ({"beta": 0.1, **REF, "ref_weight": torch.randn(V + 1, H)}, f"ref_weight {V + 1} {V}"),
        ({"beta": 0.1, **REF, "ref_weight": torch.randn(V, H + 1)}, "ref_hidden ref_weight"),
        ({"beta": 0.1, **REF, "ref_bias": torch.zeros(V + 1)}, f"ref_bias {V + 1}"),
        ({"beta": 0.1, **REF, "ref_temperature": 0.0}, "ref_temperature 0.0"),
        ({"beta": 0.1, **REF, "ref_temperature": torch.zeros(B, T)}, "ref_temperature"),
        ({"beta": 0.1, **REF, "ref_temperature": torch.ones(T)}, f"ref_temperature {T}"),
        ({"beta": 0.1, **REF, "ref_logit_scale": math.inf}, "ref_logit_scale inf"),
        ({"beta": 0.1, **REF, "ref_softcap": -1.0}, "ref_softcap -1.0"),
        ({"beta": 0.1, **REF, "ref_hidden": torch.randn(B, T, H, device="meta")}, "meta"),
    ],
)
def test_bad_input(changes: dict[str, Any], names: str) -> None:
    """I15: log-probabilities of a reference beside its hidden states are refused."""
    call = {
        "hidden": torch.randn(B, T, H),
        "weight": torch.randn(V, H),
        "completion_ids": torch.randint(V, (B, T)),
        "advantages": torch.randn(B),
    }
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the words are checked below)
        grpo_loss(**call, **changes)
    assert all(name in str(caught.value) for name in names.split()), caught.value


@pytest.mark.parametrize(
    ("changes", "error", "name"),
    [
        ({"ref_hidden": torch.randint(9, (B, T, H))}, TypeError, "ref_hidden"),
        ({"ref_weight": None}, TypeError, "ref_weight"),
        ({"ref_softcap": "cap"}, TypeError, "ref_softcap"),
        ({"ref_temperature": "hot"}, TypeError, "ref_temperature"),
        ({"mask": torch.ones(B, T + 1)}, ValueError, "mask"),
        ({"mask": torch.full((B, T), 0.5)}, ValueError, "mask"),
        ({"mask": [[1] * T] * B}, TypeError, "mask"),
        ({"top_k": 0}, ValueError, "top_k"),
        ({"top_k": "3"}, TypeError, "top_k"),
        ({"backend": "cuda"}, ValueError, "backend"),
        ({"temperature": 0.0}, ValueError, "temperature"),
    ],
)
def test_bad_input_of_the_op(changes: dict[str, Any], error: type[Exception], name: str) -> None:
    call = {"hidden": torch.randn(B, T, H), "weight": torch.randn(V, H), **REF} | changes
    with pytest.raises(error, match=name):
        linear_kl(**call)


def test_policy_loss_has_no_head() -> None:
    """It knows one log-probability per token: options of the head are errors, not ignored."""
    logps, advantages = torch.zeros(B, T), torch.zeros(B)
    with pytest.raises(ValueError, match=r"kl_estimator='full' needs ref_hidden"):
        policy_loss(logps, advantages, beta=0.1, kl_estimator="full")
    for name in ("ref_hidden", "support_top_k"):
        with pytest.raises(TypeError, match=name):
            policy_loss(logps, advantages, **{name: 3})
