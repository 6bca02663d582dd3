"""Extreme heads and batches: the fp64 answer of the same formula, or a clear error.

A table of inputs, each met by `linear_logprobs`, `grpo_loss`, `linear_support` and, from their
log-probabilities, `policy_loss`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Case
from oracle import Tolerance, check, dtype_id
from torch import Tensor

from fused_grpo import grpo_loss, linear_logprobs, linear_support, policy_loss
from fused_grpo.reference import reference_logprobs

INF = math.inf
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def plain(rows: int = 3, width: int = 4, dim: int = 8, vocab: int = 37) -> Case:
    hidden, weight = torch.randn(rows, width, dim).double(), torch.randn(vocab, dim).double()
    ids = torch.randint(vocab, (rows, width))
    mask = torch.ones(rows, width, dtype=torch.bool)
    return Case(hidden, weight, ids, torch.randn(rows).double(), None, {"completion_mask": mask})


def with_bias(make: Callable[[int], Tensor], vocab: int = 37) -> Callable[[], Case]:
    def case() -> Case:
        made = plain(vocab=vocab)
        made.bias = make(vocab).double()
        return made

    return case


def scaled(hidden: float = 1.0, weight: float = 1.0) -> Callable[[], Case]:
    def case() -> Case:
        made = plain()
        made.hidden, made.weight = made.hidden * hidden, made.weight * weight
        return made

    return case


def masked(*rows: int) -> Callable[[], Case]:
    def case() -> Case:
        made = plain()
        made.tensors["completion_mask"][list(rows)] = False
        return made

    return case


def unlikely_targets() -> Case:
    """logp near -1e4 for every token."""
    made = plain()
    made.bias = torch.zeros(37).double()
    made.bias[made.ids.unique()] = -1e4
    return made


def certain_targets() -> Case:
    """All tokens are one, 1e4 above the rest: logp = 0 to the last bit, and no gradient."""
    made = plain()
    made.ids = torch.full_like(made.ids, 5)
    made.bias = torch.zeros(37).double()
    made.bias[5] = 1e4
    return made


def holes(keep: int) -> Callable[[int], Tensor]:
    def bias(vocab: int) -> Tensor:
        out = torch.full((vocab,), -INF)
        out[torch.randperm(vocab)[:keep]] = 0.0
        return out

    return bias


def of_shape(**shape: int) -> Callable[[], Case]:
    return lambda: plain(**shape)


def reachable(case: Case) -> Case:
    """Targets that have a probability."""
    if case.bias is not None and case.bias.isinf().any():
        some = (case.bias > -INF).nonzero()[:, 0]
        case.ids = some[case.ids % len(some)]
    return case


CASES: dict[str, Callable[[], Case]] = {
    "logits +-1e4": with_bias(lambda v: torch.where(torch.rand(v) < 0.5, -1e4, 1e4)),
    "logits up to 1e4": with_bias(lambda v: torch.linspace(-1e4, 1e4, v)),
    "targets at -1e4": unlikely_targets,
    "targets at +1e4": certain_targets,
    "half at -inf": with_bias(holes(18)),
    "all but one at -inf": with_bias(holes(1)),
    "a tile at -inf": with_bias(lambda v: torch.where(torch.arange(v) < 512, -INF, 0.0), 700),
    "V = 1": of_shape(vocab=1),
    "V = 2": of_shape(vocab=2),
    # torch's product of fewer rows or columns adds up all V one after the other: off by 1e-4
    "V = 262,144": of_shape(rows=4, width=4, dim=16, vocab=262_144),
    "H = 1": of_shape(dim=1),
    "N = 1": of_shape(rows=1, width=1),
    "N = 0, no rows": of_shape(rows=0),
    "N = 0, no columns": of_shape(width=0),
    "all rows masked": masked(0, 1, 2),
    "one row masked": masked(1),
    "all but one masked": masked(0, 2),
    "denormal states": scaled(hidden=1e-41),
    "denormal weight": scaled(weight=1e-41),
    "products of no size": scaled(hidden=1e-30, weight=1e-30),
    "V = H = N = 1": of_shape(rows=1, width=1, dim=1, vocab=1),
}
# What gradients may be off by beside their size: a hundred times what fp32 tells apart there, and
# elsewhere what is left of terms that cancel.
DENORMAL = 100 * 2.0**-149
FLOOR = {"denormal states": DENORMAL, "denormal weight": DENORMAL, "products of no size": 0.0}
LARGEST = "V = 262,144"  # a minute and more, interpreted: the kernels have 151,936 elsewhere


def stretched(case: Case, dtype: torch.dtype) -> float:
    """Rounding of logits of that size in fp32 (fp64): what log-probabilities may be off by."""
    z = case.hidden.double() @ case.weight.double().T
    z = z if case.bias is None else z + case.bias.double()
    size = float(z[z.isfinite()].abs().amax()) if z.isfinite().any() else 0.0
    return 4 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps * size


def rounded(name: str, dtype: torch.dtype) -> Case:
    torch.manual_seed(0)
    case = reachable(CASES[name]())
    vectors = torch.promote_types(dtype, torch.float32)
    case.hidden, case.weight = case.hidden.to(dtype), case.weight.to(dtype)
    case.bias = None if case.bias is None else case.bias.to(dtype)
    case.advantages = case.advantages.to(vectors)
    return case


@pytest.mark.both_backends(triton_if=lambda p: p["dtype"] == torch.float32 and p["name"] != LARGEST)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("name", CASES)
def test_logprobs(name: str, dtype: torch.dtype) -> None:
    """Values, entropies and every gradient, for an upstream gradient of both."""
    case = rounded(name, dtype)
    targets = case.ids.masked_fill(~case.mask, -100)
    by = [torch.randn(targets.shape).double() for _ in range(2)]

    def run(function: Any, leaves: dict[str, Tensor], **options: Any) -> list[Tensor]:
        leaves = {k: v.requires_grad_() for k, v in leaves.items()}
        bias = leaves.get("bias")
        out = function(leaves["hidden"], leaves["weight"], targets, bias=bias, entropy=True)
        logps, entropy = (out.logps, out.entropy) if hasattr(out, "logps") else out
        total = (logps * by[0].to(logps)).sum() + (entropy * by[1].to(entropy)).sum()
        total.backward()
        return [logps.detach(), entropy.detach(), *(v.grad for v in leaves.values())]

    got = run(linear_logprobs, case.leaves())
    want = run(reference_logprobs, case.leaves(Tensor.double))
    tol = stretched(case, dtype) + 1e-5 if dtype != torch.float64 else 1e-9
    for a, b in zip(got[:2], want[:2], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=tol)
    coarse = max({torch.float64: 1e-9, torch.float32: 2e-5}.get(dtype, 8e-3), tol)
    for a, b in zip(got[2:], want[2:], strict=True):
        assert a.isfinite().all()
        assert (a.double() - b).norm() <= coarse * b.norm() + FLOOR.get(name, coarse * 1e-3)


@pytest.mark.both_backends(triton_if=lambda p: p["dtype"] == torch.float32 and p["name"] != LARGEST)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("name", CASES)
def test_loss(name: str, dtype: torch.dtype) -> None:
    """The loss, its metrics and gradients, with old log-probabilities, and from `policy_loss`."""
    case = rounded(name, dtype)
    wide = case.leaves(Tensor.double)
    targets = case.ids.masked_fill(~case.mask, -100)
    logps, _ = reference_logprobs(wide["hidden"], wide["weight"], targets, bias=wide.get("bias"))
    vectors = torch.promote_types(dtype, torch.float32)
    off = torch.where(torch.rand(logps.shape) < 0.5, 0.05, -0.4).double()
    case.tensors["old_per_token_logps"] = (logps - off).to(vectors)
    slack = stretched(case, dtype)
    base = {torch.float64: 1e-9, torch.float32: 2e-5}.get(dtype, 8e-3)
    tol = Tolerance(slack + 1e-5, base + 4 * slack, 1e-4 + 4 * slack, FLOOR.get(name, 0.0))
    if dtype == torch.float64:
        tol = Tolerance(1e-8, 1e-8, 1e-8)
    got = check(case, tolerance=tol).output
    from_logps = policy_loss(got.per_token_logps, case.advantages, **case.tensors)
    torch.testing.assert_close(from_logps.loss, got.loss, rtol=1e-5, atol=1e-6)


RULES: list[dict[str, Any]] = [{"top_k": 2}, {"top_p": 0.7}, {"min_p": 0.3}]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=dtype_id)
@pytest.mark.parametrize("name", CASES)
def test_support(name: str, dtype: torch.dtype, rule: dict[str, Any]) -> None:
    """Against the rules spelled out in fp64: entries without a probability are in no support."""
    case = rounded(name, dtype)
    exact = {torch.float64: {"top_k", "min_p"}}.get(dtype, {"min_p"})
    if ("denormal" in name or "no size" in name) and not exact & rule.keys():
        pytest.skip("which of equal probabilities come first is rounding's to say")
    mask = case.tensors["completion_mask"]
    ids = linear_support(case.hidden, case.weight, bias=case.bias, mask=mask, **rule)
    z = case.hidden.double() @ case.weight.double().T
    z = z if case.bias is None else z + case.bias.double()
    p = z.softmax(-1)
    if "top_k" in rule:
        kth = z.topk(min(2, z.shape[-1])).values[..., -1:] if z.numel() else z.new_zeros(1)
        kept = z >= kth
    elif "min_p" in rule:
        kept = p >= 0.3 * p.amax(-1, keepdim=True) if p.numel() else p > 0
    else:
        order = p.sort(-1, descending=True)
        before = order.values.cumsum(-1) - order.values
        kept = torch.zeros_like(p, dtype=torch.bool).scatter(-1, order.indices, before < 0.7)
    kept &= (z > -INF) & mask[..., None]
    for row, want in zip(ids.flatten(0, 1), kept.flatten(0, 1), strict=True):
        assert row[row >= 0].tolist() == want.nonzero()[:, 0].tolist()


# ---- many tokens


def test_a_million_tokens() -> None:
    """N = 2^20, H = 2, V = 3: values and gradients by the formula on full fp64 logits."""
    n = 1 << 20
    hidden, weight = torch.randn(1024, 1024, 2), torch.randn(3, 2)
    ids, a = torch.randint(3, (1024, 1024)), torch.randn(1024)
    mask = torch.rand(1024, 1024) < 0.9
    exact = [x.double().requires_grad_() for x in (hidden, weight)]
    logps = (exact[0] @ exact[1].T).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    old = logps.detach() - 0.05
    policy = -(logps - old).exp() * a.double()[:, None]
    want = torch.where(mask, policy, 0.0).sum() / mask.sum()
    want.backward()
    want = want.detach()
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    tensors = {"completion_mask": mask, "old_per_token_logps": old.float()}
    out = grpo_loss(*leaves, ids, a, **tensors)
    out.loss.backward()
    assert int(out.metrics["num_tokens"]) == int(mask.sum())
    assert float(out.loss.detach()) == pytest.approx(float(want), rel=1e-4, abs=1e-6)
    for leaf, x in zip(leaves, exact, strict=True):
        # a thirtieth of its 2^20 terms is left when they have been added up
        assert (leaf.grad.double() - x.grad).norm() < 3e-5 * x.grad.norm()
    from_logps = policy_loss(out.per_token_logps, a, **tensors).loss
    assert float(from_logps) == pytest.approx(float(want), rel=1e-4, abs=1e-6)
    plain = linear_logprobs(hidden.view(n, 2), weight, ids.view(n)).logps
    torch.testing.assert_close(plain.double(), logps.detach().view(n), rtol=1e-5, atol=1e-5)
    ids = linear_support(hidden, weight, top_k=2)
    likely = (hidden.double() @ weight.double().T).argmin(-1, keepdim=True)
    assert not (ids == likely).any()


# ---- strides


def transposed(x: Tensor) -> Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def stepped(x: Tensor) -> Tensor:
    wide = torch.full([3 * n for n in x.shape], 77, dtype=x.dtype)
    view = wide[tuple(slice(1, None, 3) for _ in x.shape)]
    view.copy_(x)
    return view


def expanded(x: Tensor) -> Tensor:
    """The first row only, by a stride of 0."""
    return x[:1].expand_as(x)


def overlapping(x: Tensor) -> Tensor:
    """A window that moves by one element a row."""
    flat = x.reshape(-1)
    last = x.shape[-1]
    return flat.as_strided(x.shape, (*[1] * (x.dim() - 1), 1)) if last else x


@pytest.mark.both_backends(triton_if=lambda p: p["dtype"] == torch.float32)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize("layout", [transposed, stepped, expanded, overlapping])
def test_strides_of_every_tensor(layout: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    """Every argument at once with these strides: the results of its contiguous copy."""
    torch.manual_seed(0)
    case = rounded("half at -inf", dtype)
    assert case.bias is not None
    case.bias = case.bias.nan_to_num(neginf=-3.0)
    case.tensors["old_per_token_logps"] = -torch.rand(case.ids.shape, dtype=case.advantages.dtype)
    case.options["temperature"] = 0.5 + torch.rand(case.ids.shape, dtype=case.advantages.dtype)
    names = ("hidden", "weight", "bias", "ids", "advantages")
    views = {n: layout(getattr(case, n)) for n in names}
    tensors = {n: layout(x) for n, x in case.tensors.items()}
    options = {n: layout(x) for n, x in case.options.items()}

    def run(change: Callable[[Tensor], Tensor]) -> list[Tensor]:
        given = {n: change(x) for n, x in views.items()}
        leaves = [given[n].detach().requires_grad_() for n in ("hidden", "weight", "bias")]
        more = {n: change(x) for n, x in (tensors | options).items()}
        out = grpo_loss(
            *leaves[:2], given["ids"], given["advantages"], bias=leaves[2], entropy=True, **more
        )
        out.loss.backward()
        head = {"bias": leaves[2], "temperature": more["temperature"]}
        ids = linear_support(*leaves[:2], top_k=5, mask=more["completion_mask"], **head)
        del more["temperature"]
        losses = policy_loss(change(out.per_token_logps), given["advantages"], **more)
        results = [out.loss, out.per_token_logps, out.entropy, losses.loss]
        if layout is not expanded:  # where all rows of the weight are one, rounding makes the order
            results.append(ids)
        return [x.detach() for x in results] + [x.grad for x in leaves]

    # another order of the same sums, where a product takes transposed operands
    tol = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 8e-3}[dtype]
    for got, want in zip(run(lambda x: x), run(Tensor.contiguous), strict=True):
        torch.testing.assert_close(got, want, rtol=tol, atol=tol)


BLOCK = 2**31


@pytest.fixture
def far(tmp_path: Path) -> Callable[[Tensor], Tensor]:
    """[3, ...] with rows 2^31 elements apart, in a file of holes that takes no memory."""

    def place(x: Tensor) -> Tensor:
        path = tmp_path / f"holes{len(list(tmp_path.iterdir()))}"
        row = x[0].numel()
        size = 2 * BLOCK + row
        with path.open("wb") as file:
            file.truncate(size * x.element_size())
        flat = torch.from_file(str(path), shared=True, size=size, dtype=x.dtype)
        strides = torch.empty(x.shape[1:]).stride()
        view = flat.as_strided(x.shape, (BLOCK, *strides))
        view.copy_(x)
        return view

    return place


def test_offsets_that_32_bits_do_not_hold(far: Callable[[Tensor], Tensor]) -> None:
    """Every tensor of every call with rows 2^31 elements apart: the results of the near ones."""
    torch.manual_seed(0)
    near = {
        "hidden": torch.randn(3, 4, 8),
        "weight": torch.randn(3, 8),
        "completion_ids": torch.randint(3, (3, 4)),
        "advantages": torch.randn(3, 4),
        "completion_mask": torch.rand(3, 4) < 0.8,
        "old_per_token_logps": -torch.rand(3, 4),
        "temperature": 0.5 + torch.rand(3, 4),
    }

    def run(given: dict[str, Tensor]) -> list[Tensor]:
        given = dict(given)
        leaves = {n: given[n].detach().requires_grad_() for n in ("hidden", "weight")}
        out = grpo_loss(**(given | leaves))
        out.loss.backward()
        mask, t = given["completion_mask"], given["temperature"]
        ids = linear_support(**leaves, top_p=0.5, mask=mask, temperature=t)
        rest = {k: given[k] for k in ("advantages", "completion_mask")}
        logps = given["old_per_token_logps"].detach().requires_grad_()
        policy_loss(logps, **rest, old_per_token_logps=given["temperature"]).loss.backward()
        grads = [x.grad for x in (*leaves.values(), logps)]
        return [out.loss.detach(), out.per_token_logps, ids, *grads]

    for got, want in zip(run({k: far(v) for k, v in near.items()}), run(near), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


# ---- numbers out of range, and what is no distribution


@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softcap": 1e300}, r"softcap=1e\+300 is out of the range of the logits' torch.float32"),
        ({"softcap": 1e-300}, r"softcap=1e-300 is out"),
        ({"logit_scale": 1e300}, r"logit_scale=1e\+300 is out"),
        ({"temperature": 1e-300}, r"temperature=1e-300 is out"),
        ({"temperature": 1e300}, r"temperature=1e\+300 is out"),
    ],
)
def test_numbers_that_fp32_does_not_hold(
    options: dict[str, float], message: str, backend: str
) -> None:
    """1e300 became infinity, and all log-probabilities NaN; in fp64 it is a number like others."""
    hidden, weight, ids = torch.randn(2, 4), torch.randn(6, 4), torch.tensor([1, 2])
    with pytest.raises(ValueError, match=message):
        linear_logprobs(hidden, weight, ids, backend=backend, **options)
    if options not in ({"logit_scale": 1e300}, {"temperature": 1e-300}):
        wide = linear_logprobs(hidden.double(), weight.double(), ids, backend=backend, **options)
        assert wide.logps.isfinite().all()


@pytest.mark.both_backends
@pytest.mark.parametrize(
    "bias", [[-INF] * 6, [0.0, INF, 0.0, 0.0, 0.0, 0.0], [INF, INF, 0.0, 0.0, 0.0, 0.0]], ids=str
)
def test_what_is_no_distribution_is_nan(bias: list[float]) -> None:
    """As in fp64: a logit that overflowed was logp 0 and entropy 0, which is certainty."""
    leaves = [torch.randn(2, 4), torch.randn(6, 4), torch.tensor(bias)]
    leaves = [x.requires_grad_() for x in leaves]
    ids = torch.tensor([0, 1])
    out = linear_logprobs(*leaves[:2], ids, bias=leaves[2], entropy=True)
    want, entropy = reference_logprobs(*leaves[:2], ids, bias=leaves[2], entropy=True)
    assert torch.equal(out.logps.isnan(), want.isnan())
    assert torch.equal(out.entropy.isnan(), entropy.isnan())
    assert out.logps.isnan().all()
    (out.logps.sum() + out.entropy.sum()).backward()
    assert leaves[0].grad.isnan().all()


def test_a_broken_token_keeps_every_entry() -> None:
    """NaN logits had an empty support, and with it, in the loss, a log-probability of 0."""
    hidden, weight = torch.randn(2, 4), torch.randn(6, 4)
    hidden[0] = math.nan
    for rule in RULES:
        ids = linear_support(hidden, weight, **rule)
        assert ids[0].tolist() == list(range(6))
        logps = linear_logprobs(hidden, weight, torch.tensor([1, 2]), support_ids=ids).logps
        assert logps[0].isnan()
        assert logps[1].isfinite()


def test_tensors_without_values() -> None:
    x = torch.empty(2, 4, device="meta")
    ids = torch.empty(2, dtype=torch.long, device="meta")
    for call in (
        lambda: linear_logprobs(x, x, ids),
        lambda: linear_support(x, x, top_k=1),
        lambda: grpo_loss(x[None], x, ids[None], x[0, :1]),
        lambda: policy_loss(x, x[:, 0]),
    ):
        with pytest.raises(ValueError, match="is on the meta device, where tensors have no values"):
            call()
