"""Log-probabilities over the sampling support: which entries are kept, values and gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import HEAD_OPTIONS, Case, exact_logps, make_case, pack, with_reference
from oracle import DTYPES, TOLERANCE, assert_gradient, check, close, dtype_id, ours
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fused_grpo import GRPOLoss, grpo_loss, linear_logprobs
from fused_grpo.reference import reference_logprobs

SMALL = 1 << 14  # bytes: several chunks and tiles


def head(
    lead: tuple[int, ...] = (3, 7),
    vocab: int = 129,
    dtype: torch.dtype = torch.float64,
    std: float = 2.0,
) -> dict[str, Tensor]:
    return {
        "hidden": torch.randn(*lead, 24).double().to(dtype),
        "weight": (torch.randn(vocab, 24).double() * std / math.sqrt(24)).to(dtype),
        "bias": torch.randn(vocab).double().to(dtype),
    }


def random_ids(lead: tuple[int, ...], vocab: int, k: int = 20) -> Tensor:
    """Different ids in each row, between 1 and k of them, padded with -1 anywhere."""
    ids = torch.rand(*lead, vocab).argsort(-1)[..., :k]
    return ids.masked_fill(torch.rand(ids.shape) < 0.3, -1)


def support_of(kind: str, lead: tuple[int, ...], vocab: int) -> dict[str, Any]:
    per_token = torch.linspace(-1.0, 1.0, math.prod(lead)).view(lead)
    return {
        "top_k": {"support_top_k": 9},
        "top_p": {"support_top_p": 0.8},
        "min_p": {"support_min_p": 0.05},
        "min_logp": {"support_min_logp": per_token - 5.0},
        "min_logit": {"support_min_logit": per_token + 0.3},
        "ids": {"support_ids": random_ids(lead, vocab)},
        "sampler": {"support_top_k": 40, "support_top_p": 0.9, "support_min_p": 0.01},
        "all": {
            "support_top_k": 60,
            "support_top_p": 0.97,
            "support_min_p": 0.001,
            "support_min_logp": per_token - 8.0,
            "support_min_logit": per_token - 2.0,
            "support_ids": random_ids(lead, vocab, 100),
        },
    }[kind]


KINDS = ("top_k", "top_p", "min_p", "min_logp", "min_logit", "ids", "sampler", "all")


def compare(
    leaves: dict[str, Tensor],
    targets: Tensor,
    support: dict[str, Any],
    *,
    trainable: tuple[str, ...] = ("hidden", "weight", "bias"),
    how: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Both outputs, and the gradients of a weighted sum of them, against float64."""
    tol = TOLERANCE[leaves["hidden"].dtype]
    a = torch.linspace(-1, 1.5, targets.numel()).double().view(targets.shape)
    results = []
    for exact in (True, False):
        args = {k: (v.double() if exact else v).clone() for k, v in leaves.items()}
        for name in trainable:
            args[name].requires_grad_()
        call = {"targets": targets, "entropy": True, **args, **options, **support}
        if exact:
            logps, entropy = reference_logprobs(**call)
        else:
            out = linear_logprobs(**call, **(how or {}))
            logps, entropy = out.logps, out.entropy
        (a.to(logps.dtype) * logps + a.flip(0).to(logps.dtype) * entropy).sum().backward()
        results.append((logps, entropy, {k: v.grad for k, v in args.items()}))
    (want, want_entropy, want_grads), (got, got_entropy, grads) = results
    close(got, want, tol.logps, "logps")
    close(got_entropy, want_entropy, tol.logps, "entropy")
    assert (got <= 0).all()
    for name, grad in want_grads.items():
        assert_gradient(name, grads[name], grad, leaves[name].dtype, tol.grads)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("vocab", [127, 129, 257])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(kind: str, vocab: int, dtype: torch.dtype) -> None:
    """T5: the full softmax, renormalised over a subset; the subset is a constant."""
    targets = torch.randint(vocab, (5, 9))
    targets[0, :4] = targets[4] = -100
    support = support_of(kind, (5, 9), vocab)
    out = compare(head((5, 9), vocab, dtype), targets, support, how={"chunk_bytes": SMALL})
    counted = targets != -100
    assert (out.support_size[counted] < vocab).any()
    assert (out.support_size[counted] >= 1).all()
    assert not out.support_size[~counted].any()
    assert not out.target_outside[~counted].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("kind", KINDS)
def test_with_head_options(kind: str, dtype: torch.dtype) -> None:
    """Thresholds are on finished logits: after bias, scale, softcap, each token's temperature."""
    targets = torch.randint(129, (4, 6))
    options = {
        "softcap": 4.0,
        "logit_scale": 1.6,
        "temperature": torch.linspace(0.5, 1.5, 24).view(4, 6),
    }
    compare(head((4, 6), dtype=dtype), targets, support_of(kind, (4, 6), 129), **options)


@pytest.mark.parametrize("trainable", [("hidden",), ("weight",), ("bias",)], ids="-".join)
@pytest.mark.parametrize("kind", ["top_p", "min_logit", "ids"])
def test_frozen_sides(kind: str, trainable: tuple[str, ...]) -> None:
    targets = torch.randint(129, (3, 7))
    compare(head(), targets, support_of(kind, (3, 7), 129), trainable=trainable)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize(
    ("kind", "std", "sizes"),
    [
        ("top_p", 0.5, (10_000, 30_000)),  # a flat distribution has a large nucleus
        ("top_p", 3.0, (256, 4096)),
        ("top_p", 8.0, (1, 256)),
        ("sampler", 3.0, (1, 41)),
        ("min_logp", 3.0, (1, 50_000)),
        ("ids", 3.0, (1, 21)),
    ],
)
def test_a_real_vocabulary(
    kind: str, std: float, sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    targets = torch.randint(50_257, (2, 5))
    leaves = head((2, 5), 50_257, dtype, std=std)
    support = support_of(kind, (2, 5), 50_257)
    if kind == "min_logp":
        support["support_min_logp"] = support["support_min_logp"] - 6
    out = compare(leaves, targets, support, how={"chunk_bytes": 8 << 20})
    assert sizes[0] <= out.support_size.double().mean() <= sizes[1]
    assert out.support_size.max() < 50_257


def test_a_head_tied_to_the_embedding() -> None:
    table = (torch.randn(50, 12).double() * 0.7).requires_grad_()
    ids, targets = torch.randint(50, (4, 5)), torch.randint(50, (4, 5))
    grads = []
    for function in (
        lambda *a, **k: linear_logprobs(*a, **k).logps,
        lambda *a, **k: reference_logprobs(*a, **k)[0],
    ):
        table.grad = None
        function(torch.tanh(table[ids]), table, targets, support_top_k=7).sum().backward()
        grads.append(table.grad)
    assert_gradient("table", grads[0], grads[1], torch.float64, 1e-9)


# ---- which entries ------------------------------------------------------------------------------


def kept_by(leaves: dict[str, Tensor], support: dict[str, Any]) -> Tensor:
    """[n, V] by the results alone: an entry is outside where it says so as the target."""
    n, vocab = leaves["hidden"].shape[0], leaves["weight"].shape[0]
    every = leaves | {"hidden": leaves["hidden"][:, None].expand(n, vocab, -1)}
    targets = torch.arange(vocab).expand(n, vocab)
    spread = {
        k: v[:, None].expand(n, vocab, *v.shape[1:]) if isinstance(v, Tensor) else v
        for k, v in support.items()
    }
    return ~linear_logprobs(**every, targets=targets, **spread).target_outside


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 5},
        {"top_p": 0.3},
        {"top_p": 0.9},
        {"top_p": 0.999},
        {"min_p": 0.1},
        {"top_k": 20, "top_p": 0.7},
        {"top_k": 30, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_against_the_processors_of_transformers(options: dict[str, Any]) -> None:
    """The same entries, and the same probabilities, as `generate` samples from."""
    leaves, temperature = head((20,)), 0.8
    scores = (leaves["hidden"] @ leaves["weight"].T + leaves["bias"]) / temperature
    for name, warper in (
        ("top_k", TopKLogitsWarper),
        ("top_p", TopPLogitsWarper),
        ("min_p", MinPLogitsWarper),
    ):
        if name in options:
            scores = warper(options[name])(None, scores)
    support = {f"support_{k}": v for k, v in options.items()} | {"temperature": temperature}
    kept = kept_by(leaves, support)
    assert torch.equal(kept, scores > -math.inf)
    targets = scores.softmax(-1).multinomial(1)[:, 0]
    got = linear_logprobs(**leaves, targets=targets, entropy=True, **support)
    want = scores.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    close(got.logps, want, 1e-12, "logps")
    close(got.entropy, torch.distributions.Categorical(logits=scores).entropy(), 1e-7, "entropy")
    assert torch.equal(got.support_size, kept.sum(1))


def by_probability(p: list[float]) -> dict[str, Tensor]:
    """A head whose one token has these probabilities."""
    return {
        "hidden": torch.tensor([p], dtype=torch.float64).log(),
        "weight": torch.eye(len(p), dtype=torch.float64),
    }


@pytest.mark.parametrize(
    ("support", "kept"),
    [
        ({"support_top_k": 1}, [0]),
        ({"support_top_k": 2}, [0, 2, 3]),  # 0.2 twice: a tie is not cut
        ({"support_top_k": 4}, [0, 1, 2, 3]),
        ({"support_top_k": 99}, [0, 1, 2, 3, 4]),
        ({"support_top_p": 1e-9}, [0]),  # never nothing
        ({"support_top_p": 0.39}, [0]),
        ({"support_top_p": 0.41}, [0, 2, 3]),
        ({"support_top_p": 0.81}, [0, 1, 2, 3]),
        ({"support_top_p": 1.0}, [0, 1, 2, 3, 4]),
        ({"support_min_p": 0.49}, [0, 2, 3]),
        ({"support_min_p": 0.0}, [0, 1, 2, 3, 4]),
        ({"support_min_p": 1.0}, [0]),
        ({"support_min_logp": torch.tensor([math.log(0.14)])}, [0, 1, 2, 3]),
        ({"support_min_logit": torch.tensor([math.log(0.16)])}, [0, 2, 3]),
        ({"support_min_logit": torch.tensor([-math.inf])}, [0, 1, 2, 3, 4]),
        ({"support_ids": torch.tensor([[4, -1, 1, 4]])}, [1, 4]),
        # top_p is of what top_k leaves: 0.4 of 0.8 is a half
        ({"support_top_k": 3, "support_top_p": 0.49}, [0]),
        ({"support_top_k": 3, "support_top_p": 0.51}, [0, 2, 3]),
        ({"support_top_k": 3, "support_ids": torch.tensor([[1, 2]])}, [2]),
    ],
    ids=str,
)
def test_by_hand(support: dict[str, Any], kept: list[int]) -> None:
    leaves = by_probability([0.4, 0.15, 0.2, 0.2, 0.05])
    got = kept_by(leaves, support)[0].nonzero()[:, 0].tolist()
    assert got == kept
    p = leaves["hidden"][0].exp()
    target = torch.tensor([kept[-1]])
    out = linear_logprobs(**leaves, targets=target, **support)
    assert float(out.logps) == pytest.approx(float((p[kept[-1]] / p[kept].sum()).log()), abs=1e-12)
    assert out.support_size.tolist() == [len(kept)]


def test_a_target_outside_counts_as_kept() -> None:
    """Entries 0 and 2, and the target 1: 0.15 of 0.75. It is reported, not dropped."""
    leaves = by_probability([0.4, 0.15, 0.2, 0.2, 0.05])
    ids = torch.tensor([[0, 2, -1]])
    out = linear_logprobs(**leaves, targets=torch.tensor([1]), support_ids=ids)
    assert float(out.logps) == pytest.approx(math.log(0.15 / 0.75), abs=1e-12)
    assert out.target_outside.tolist() == [True]
    assert out.support_size.tolist() == [3]
    inside = linear_logprobs(**leaves, targets=torch.tensor([2]), support_ids=ids)
    assert inside.target_outside.tolist() == [False]
    assert inside.support_size.tolist() == [2]


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_only_the_target(dtype: torch.dtype) -> None:
    """Log-prob and entropy 0, no gradient: sampled greedily, or with K = 0 ids."""
    leaves = {k: v.requires_grad_() for k, v in head((4,), dtype=dtype).items()}
    logits = leaves["hidden"] @ leaves["weight"].T + leaves["bias"]
    best = logits.detach().double().argmax(-1)
    for support in (
        {"support_top_k": 1},
        {"support_top_p": 1e-6},
        {"support_min_logit": torch.full((4,), math.inf)},
        {"support_ids": torch.full((4, 2), -1)},
        {"support_ids": torch.empty(4, 0, dtype=torch.long)},
    ):
        out = linear_logprobs(**leaves, targets=best, entropy=True, **support)
        assert not out.logps.any()
        assert not out.entropy.any()
        (out.logps + out.entropy).sum().backward()
        assert not any(x.grad.any() for x in leaves.values())


def test_keeping_everything_changes_nothing() -> None:
    leaves, targets = head(), torch.randint(129, (3, 7))
    plain = linear_logprobs(**leaves, targets=targets, entropy=True)
    for support in (
        {"support_top_k": 129},
        {"support_top_p": 1.0},
        {"support_min_p": 0.0},
        {"support_ids": torch.arange(129).expand(3, 7, 129)},
    ):
        got = linear_logprobs(**leaves, targets=targets, entropy=True, **support)
        assert torch.equal(got.logps, plain.logps)
        assert torch.equal(got.entropy, plain.entropy)
        assert (got.support_size == 129).all()
        assert not got.target_outside.any()


def test_ids_of_the_sampler_stay_when_the_policy_moves() -> None:
    """T5: the bias that truncation puts on ratios is gone: E_sampler[ratio] is 1 over the
    sampler's support, and the new policy's mass in it without one."""
    sampler, vocab = head((1,), 60), 60
    policy = sampler | {"hidden": sampler["hidden"] + 0.3 * torch.randn(1, 24)}
    kept = kept_by(sampler, {"support_top_p": 0.8})[0].nonzero()[:, 0]
    n = len(kept)
    ids = kept.expand(n, n)

    def logps(leaves: dict[str, Tensor], **support: Any) -> Tensor:
        every = leaves | {"hidden": leaves["hidden"].expand(n, -1)}
        return linear_logprobs(**every, targets=kept, **support).logps

    old, new = logps(sampler, support_ids=ids), logps(policy, support_ids=ids)
    assert float(old.exp().sum()) == pytest.approx(1.0, abs=1e-12)
    assert float((old.exp() * (new - old).exp()).sum()) == pytest.approx(1.0, abs=1e-12)
    biased = float((old.exp() * (logps(policy) - old).exp()).sum())
    assert biased == pytest.approx(float(logps(policy).exp().sum()))
    assert biased < 0.9
    assert n < vocab


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_dtypes_and_strides_of_ids(dtype: torch.dtype) -> None:
    leaves, targets = head(), torch.randint(129, (3, 7))
    ids = random_ids((3, 7), 129)
    want = linear_logprobs(**leaves, targets=targets, support_ids=ids)
    wide = torch.zeros(7, 3, 40, dtype=dtype)
    wide[..., ::2] = ids.transpose(0, 1).to(dtype)
    got = linear_logprobs(**leaves, targets=targets, support_ids=wide[..., ::2].transpose(0, 1))
    assert torch.equal(got.logps, want.logps)


@pytest.mark.parametrize("kind", KINDS)
def test_chunking_changes_nothing(kind: str) -> None:
    leaves, targets = head((6, 7), 300), torch.randint(300, (6, 7))
    support = support_of(kind, (6, 7), 300)
    want = linear_logprobs(**leaves, targets=targets, entropy=True, **support)
    for size in (1, 1 << 13, 1 << 16):
        got = linear_logprobs(**leaves, targets=targets, entropy=True, chunk_bytes=size, **support)
        close(got.logps, want.logps, 1e-12, "logps")
        close(got.entropy, want.entropy, 1e-12, "entropy")
        assert torch.equal(got.support_size, want.support_size)


def test_entries_without_mass() -> None:
    """Padded rows of a vocabulary with bias -inf are outside of any support."""
    leaves = head(dtype=torch.float32)
    leaves["bias"][100:] = -math.inf
    targets = torch.randint(100, (3, 7))
    for kind in KINDS:
        support = support_of(kind, (3, 7), 100)
        compare(leaves, targets, support, trainable=("hidden", "weight"))
        assert (linear_logprobs(**leaves, targets=targets, **support).support_size <= 100).all()


# ---- in the loss --------------------------------------------------------------------------------


def case_with(kind: str, **options: Any) -> Case:
    """Old and reference log-probabilities are near those over the support, as a sampler's are."""
    case = make_case(ref=options.get("beta", 0) > 0, **options)
    support = support_of(kind, (6, 11), case.weight.shape[0])
    head_options = {k: v for k, v in case.options.items() if k in HEAD_OPTIONS}
    over = reference_logprobs(
        **case.leaves(Tensor.double),
        targets=case.ids.masked_fill(~case.mask, -100),
        **head_options,
        **support,
    )[0]
    moved = over - exact_logps(case)
    for name in ("old_per_token_logps", "ref_per_token_logps"):
        if name in case.tensors:
            x = case.tensors[name]
            case.tensors[name] = (x.double() + moved).to(x.dtype)
    return case.with_options(**support)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("kind", KINDS)
def test_loss(kind: str, dtype: torch.dtype, packed: bool) -> None:
    """Loss, log-probabilities, metrics (support/... among them) and gradients on ragged masks."""
    case = case_with(kind, dtype=dtype, bias=True, beta=0.2, entropy_coef=0.02)
    got = check(pack(case) if packed else case, chunk_bytes=SMALL)
    metrics = got.output.metrics
    assert 1 <= metrics["support/size"] < 129
    assert 0 < metrics["support/target_outside"] < 1


@pytest.mark.parametrize("estimator", ["k3", "full", "top_k"])
@pytest.mark.parametrize("kind", ["top_p", "ids", "min_logit"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_loss_with_a_reference_head(kind: str, estimator: str, level: str) -> None:
    """The reference is normalised over the same entries, whoever chose them."""
    case = case_with(
        kind,
        bias=True,
        beta=0.2,
        softcap=5.0,
        importance_sampling_level=level,
        kl_estimator=estimator,
        **({"kl_top_k": 4} if estimator == "top_k" else {}),
    )
    case = with_reference(case)
    for reduction in ("sum", "none"):
        check(case, reduction=reduction, chunk_bytes=SMALL)
    check(pack(case), chunk_bytes=SMALL)


@pytest.mark.parametrize("trainable", [("hidden",), ("weight",)], ids="-".join)
@pytest.mark.parametrize("kind", ["sampler", "ids"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_loss_frozen(kind: str, level: str, trainable: tuple[str, ...]) -> None:
    case = case_with(kind, importance_sampling_level=level)
    check(case, trainable=trainable, chunk_bytes=SMALL)


@pytest.mark.parametrize("kind", KINDS)
def test_backend_reference(kind: str) -> None:
    case = case_with(kind)
    want, got = ours(case), ours(case, backend="reference")
    close(got.output.loss, want.output.loss, 1e-12, "loss")
    leaves, targets = head(), torch.randint(129, (3, 7))
    support = support_of(kind, (3, 7), 129)
    a, b = (
        linear_logprobs(**leaves, targets=targets, backend=backend, **support)
        for backend in ("reference", "chunked")
    )
    close(a.logps, b.logps, 1e-12, "logps")
    assert torch.equal(a.support_size, b.support_size)
    assert torch.equal(a.target_outside, b.target_outside)


def test_module() -> None:
    case = make_case()
    loss = GRPOLoss(support_top_k=5)
    call = (case.hidden, case.weight, case.ids, case.advantages)
    got = loss(*call, **{k: v for k, v in case.tensors.items() if "ref" not in k})
    assert got.metrics["support/size"] < 7


def test_masked_values_are_inert() -> None:
    """N5, S8: NaN, inf and ids out of range at masked positions reach nothing."""
    case = case_with("all", old=False)
    clean = ours(case)
    masked = ~case.mask
    case.hidden[masked] = math.nan
    case.options["support_min_logp"][masked] = math.nan
    case.options["support_min_logit"][masked] = math.inf
    case.options["support_ids"][masked] = 10**9
    dirty = ours(case)
    assert torch.equal(clean.output.loss, dirty.output.loss)
    assert torch.equal(clean.grads["weight"], dirty.grads["weight"])
    for name, value in clean.output.metrics.items():
        assert torch.equal(value, dirty.output.metrics[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_nan_that_counts_is_seen(kind: str) -> None:
    leaves, targets = head(), torch.randint(129, (3, 7))
    leaves["hidden"][1, 2, 3] = math.nan
    out = linear_logprobs(**leaves, targets=targets, entropy=True, **support_of(kind, (3, 7), 129))
    assert out.logps.isnan().nonzero().tolist() == [[1, 2]]


def test_everything_masked() -> None:
    case = case_with("all")
    case.tensors["completion_mask"] = torch.zeros_like(case.ids)
    got = check(case)
    assert got.output.loss == 0


def test_inputs_are_untouched() -> None:
    case = case_with("all")
    before = {k: v.clone() for k, v in case.options.items() if isinstance(v, Tensor)}
    ours(case)
    assert all(torch.equal(v, case.options[k]) for k, v in before.items())


# ---- bad input ----------------------------------------------------------------------------------

N, H, V = 6, 4, 9


@pytest.mark.parametrize(
    ("support", "error", "names"),
    [
        ({"support_top_k": 0}, ValueError, "support_top_k 0"),
        ({"support_top_k": 2.5}, ValueError, "support_top_k 2.5"),
        ({"support_top_k": "5"}, TypeError, "support_top_k"),
        ({"support_top_k": True}, TypeError, "support_top_k"),
        ({"support_top_p": 0.0}, ValueError, "support_top_p 0.0"),
        ({"support_top_p": 1.1}, ValueError, "support_top_p 1.1"),
        ({"support_top_p": math.nan}, ValueError, "support_top_p nan"),
        ({"support_min_p": -0.1}, ValueError, "support_min_p -0.1"),
        ({"support_min_p": 1.1}, ValueError, "support_min_p 1.1"),
        ({"support_min_logp": -3.0}, TypeError, "support_min_logp"),
        ({"support_min_logp": torch.zeros(N + 1)}, ValueError, f"support_min_logp {N + 1} {N}"),
        ({"support_min_logp": torch.zeros(N).long()}, TypeError, "support_min_logp"),
        ({"support_min_logit": torch.zeros(1)}, ValueError, f"support_min_logit {N}"),
        ({"support_min_logit": torch.full((N,), math.nan)}, ValueError, "support_min_logit NaN"),
        (
            {"support_min_logit": torch.zeros(N, device="meta")},
            ValueError,
            "support_min_logit meta",
        ),
        ({"support_ids": torch.zeros(N).long()}, ValueError, f"support_ids {N} K"),
        ({"support_ids": torch.zeros(N + 1, 3).long()}, ValueError, f"support_ids {N + 1} {N}"),
        ({"support_ids": torch.zeros(N, 3)}, TypeError, "support_ids"),
        ({"support_ids": torch.full((N, 3), V)}, ValueError, f"support_ids {V}"),
        ({"support_ids": torch.full((N, 3), -2)}, ValueError, f"support_ids {V} -1"),
        ({"top_k": 3}, TypeError, "top_k support_top_k"),
    ],
)
def test_bad_input(support: dict[str, Any], error: type[Exception], names: str) -> None:
    hidden, weight = torch.randn(N, H), torch.randn(V, H)
    targets, bounds = torch.randint(V, (N,)), torch.tensor([0, 2, N])
    for call in (
        lambda: linear_logprobs(hidden, weight, targets, **support),
        lambda: grpo_loss(hidden, weight, targets, torch.ones(2), cu_seqlens=bounds, **support),
    ):
        with pytest.raises(error) as caught:
            call()
        if "top_k" not in support:
            assert all(name in str(caught.value) for name in names.split()), caught.value


def test_unchecked_inputs_poison_their_token() -> None:
    """S8: without the check a bad threshold or id gives NaN, never a plausible number."""
    hidden, weight, targets = torch.randn(3, H), torch.randn(V, H), torch.tensor([1, 2, 3])
    for support in (
        {"support_min_logit": torch.tensor([-9.0, math.nan, -9.0])},
        {"support_ids": torch.tensor([[1, 2], [2, V], [3, -1]])},
    ):
        out = linear_logprobs(hidden, weight, targets, check_inputs=False, **support)
        assert out.logps.isnan().tolist() == [False, True, False]
