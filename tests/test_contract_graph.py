"""What autograd may do with the result of any public call.

test_autograd_contract has this for `grpo_loss` and `linear_logprobs` on both backends (gradients
that belong to the caller, one leaf at a time, tied weights, views as leaves, autocast);
test_compiled has torch.compile; ranks_contract DDP.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from entry_points import (
    CONSTANT,
    DIFFERENTIABLE,
    ENTRIES,
    HEAD,
    POLICY,
    ROUTED,
    Entry,
    T,
    assert_same_bits,
    logprobs,
    loss,
    policy,
    results,
    tensors,
    upstream,
    with_leaves,
)
from objective_cases import HEAD as HEAD_OPTIONS
from objective_cases import OBJECTIVES, REDUCTIONS, leaves_of, make
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.gradcheck import GradcheckError
from torch.utils.checkpoint import checkpoint

from fused_grpo import policy_loss

REFERENCE = "grpo_loss reference"  # ordinary autograd on full logits
FUSED = [name for name in HEAD if name != REFERENCE]
SEQUENCES = Entry(
    lambda t: policy(t, loss_type="gspo", epsilon_low=0.2, epsilon_high=0.2), ("logps", "entropies")
)


def heads_of(entry: Entry, t: T) -> tuple[list[Tensor], list[Tensor]]:
    out = entry.call(t)[: entry.outputs]
    return out, [upstream(x) for x in out]


def grads_of(entry: Entry, t: T) -> list[Tensor]:
    return [t[name].grad for name in entry.leaves]


# ---- gradcheck


@pytest.mark.parametrize("name", [name for name in DIFFERENTIABLE if "routed" not in name])
def test_gradcheck(name: str) -> None:
    """fp64, all leaves and all differentiable outputs, undefined upstream gradients too."""
    entry = DIFFERENTIABLE[name]
    t = with_leaves(tensors(torch.float64), entry.leaves)

    def function(*leaves: Tensor) -> tuple[Tensor, ...]:
        return tuple(entry.call(t | dict(zip(entry.leaves, leaves, strict=True)))[: entry.outputs])

    assert torch.autograd.gradcheck(
        function, tuple(t[k] for k in entry.leaves), fast_mode=True, check_undefined_grad=True
    )


# Objectives that hold a ratio or a weight constant: their gradient is no derivative of the value,
# or that of the gradient, as the constant moves too when the log-probabilities do.
DETACHED = {"cispo", "cispo_bounds", "cispo_sequence", "vespo", "vespo_shapes", "dppo_tv"}
DETACHED |= {"dppo_kl", "gspo_token", "masked_importance_sampling"}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_first_and_second_derivatives_of_policy_loss(objective: str) -> None:
    """gradcheck and gradgradcheck; where a part is detached, of the loss with it as a constant."""
    case = make(OBJECTIVES[objective], REDUCTIONS["own"], {}, beta=0.2, entropy_coef=0.1)
    options = {k: v for k, v in case.options.items() if k not in (*HEAD_OPTIONS, "entropy")}
    logps, entropies = leaves_of(case)

    def function(logps: Tensor, entropies: Tensor) -> Tensor:
        return policy_loss(
            logps, case.advantages, entropies=entropies, **case.tensors, **options
        ).loss

    if objective in DETACHED:
        (first,) = torch.autograd.grad(function(logps, entropies), logps, create_graph=True)
        assert first.isfinite().all()
        second = objective == "gspo_token"
        check = torch.autograd.gradgradcheck if second else torch.autograd.gradcheck
        with pytest.raises(GradcheckError):
            check(function, (logps, entropies))
        return
    assert torch.autograd.gradcheck(function, (logps, entropies))
    assert torch.autograd.gradgradcheck(function, (logps, entropies))


# ---- the graph


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_backward_twice(name: str) -> None:
    """retain_graph: the same bits, added up; without it the second is an error that says so."""
    entry = DIFFERENTIABLE[name]
    t = with_leaves(tensors(), entry.leaves)
    out, by = heads_of(entry, t)
    torch.autograd.backward(out, by, retain_graph=True)
    once = [g.clone() for g in grads_of(entry, t)]
    torch.autograd.backward(out, by)
    assert_same_bits(grads_of(entry, t), [2 * g for g in once])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.backward(out, by)
    assert_same_bits(grads_of(entry, t), [2 * g for g in once])


@pytest.mark.parametrize("name", FUSED)
def test_second_derivatives_raise(name: str) -> None:
    """For every leaf: an error, never a gradient that silently lacks terms."""
    entry = HEAD[name]
    for leaf in entry.leaves:
        t = with_leaves(tensors(), entry.leaves)
        out, by = heads_of(entry, t)
        by = [x.requires_grad_() for x in by]
        (grad,) = torch.autograd.grad(out, t[leaf], by, create_graph=True)
        with pytest.raises(RuntimeError, match=r"once_differentiable|does not require grad"):
            grad.square().sum().backward()


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_every_combination_of_leaves(name: str) -> None:
    """Exactly the gradients that are asked for, and the same numbers whatever else is."""
    entry = DIFFERENTIABLE[name]
    everything = results(entry, tensors())
    want = dict(zip(entry.leaves, everything[-len(entry.leaves) :], strict=True))
    for count in range(1, len(entry.leaves) + 1):
        for wanted in itertools.combinations(entry.leaves, count):
            t = with_leaves(tensors(), wanted)
            out, by = heads_of(entry, t)
            assert all(x.requires_grad for x in out) or "entropies" in wanted
            torch.autograd.backward(
                [x for x in out if x.requires_grad],
                [b for b, x in zip(by, out, strict=True) if x.requires_grad],
            )
            for leaf in entry.leaves:
                if leaf not in wanted:
                    assert t[leaf].grad is None, (leaf, wanted)
                    continue
                got = t[leaf].grad
                # a frozen head's gradient is formed from dlogp/dh, rounded elsewhere
                assert (got - want[leaf]).norm() <= 1e-6 * want[leaf].norm(), (leaf, wanted)
    assert not any(x.requires_grad for x in entry.call(tensors()))


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_hooks_and_intermediate_gradients(name: str) -> None:
    """Hooks of leaves, of what is no leaf and of outputs see the gradients, and may change them."""
    entry = DIFFERENTIABLE[name]
    want = results(entry, tensors())[-len(entry.leaves) :]
    t = with_leaves(tensors(), entry.leaves)
    seen: list[Tensor] = []
    inner = t | {k: t[k] * 1.0 for k in entry.leaves}
    for k in entry.leaves:
        inner[k].retain_grad()
        t[k].register_hook(lambda g: seen.append(g.clone()))
    out, by = heads_of(entry, inner)
    for x in out:
        x.retain_grad()
        x.register_hook(lambda g: 2 * g)
    torch.autograd.backward(out, by)
    for x, b in zip(out, by, strict=True):
        assert torch.equal(x.grad, 2 * b)
    doubled = [2 * g for g in want]
    assert_same_bits([inner[k].grad for k in entry.leaves], doubled)
    assert_same_bits(grads_of(entry, t), doubled)
    assert len(seen) == len(entry.leaves)
    assert {g.shape for g in seen} == {g.shape for g in want}


NON_SCALAR = [n for n, e in DIFFERENTIABLE.items() if n.endswith("none") or n.startswith("linear")]


def expanded(x: Tensor) -> Tensor:
    return x[:1, :1].expand_as(x)


def transposed(x: Tensor) -> Tensor:
    return x.T.contiguous().T


def stepped(x: Tensor) -> Tensor:
    wide = torch.full((2 * x.shape[0], 3 * x.shape[1]), torch.nan, dtype=x.dtype)
    wide[::2, ::3] = x
    return wide[::2, ::3]


@pytest.mark.parametrize("layout", [expanded, transposed, stepped])
@pytest.mark.parametrize("name", NON_SCALAR)
def test_upstream_gradients_of_any_strides(name: str, layout: Callable[[Tensor], Tensor]) -> None:
    entry = DIFFERENTIABLE[name]
    found = []
    for change in (layout, lambda x: layout(x).contiguous()):
        t = with_leaves(tensors(), entry.leaves)
        out, by = heads_of(entry, t)
        torch.autograd.backward(out, [change(x) for x in by])
        found.append(grads_of(entry, t))
    assert_same_bits(*found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_upstream_gradients_of_another_dtype(name: str, dtype: torch.dtype) -> None:
    """Cast to that of the output, as torch does: gradients have the dtypes of their leaves."""
    entry = DIFFERENTIABLE[name]
    found = []
    for convert in (lambda x: x.to(dtype), lambda x: x.to(dtype).float()):
        t = with_leaves(tensors(), entry.leaves)
        out, by = heads_of(entry, t)
        torch.autograd.backward(out, [convert(x) for x in by])
        found.append(grads_of(entry, t))
    assert_same_bits(*found)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_unused_tensors_and_outputs(name: str) -> None:
    """allow_unused gives None for what had no part, an error without; one output at a time adds
    up to both."""
    entry = DIFFERENTIABLE[name]
    t = with_leaves(tensors(), entry.leaves)
    other = torch.ones(2, requires_grad=True)
    out, by = heads_of(entry, t)
    leaves = [t[k] for k in entry.leaves]
    *grads, none = torch.autograd.grad(
        out, [*leaves, other], by, allow_unused=True, retain_graph=True
    )
    assert none is None
    with pytest.raises(RuntimeError, match="allow_unused"):
        torch.autograd.grad(out, [*leaves, other], by, retain_graph=True)
    total = [torch.zeros_like(g) for g in grads]
    for x, b in zip(out, by, strict=True):
        for sums, g in zip(
            total, torch.autograd.grad(x, leaves, b, retain_graph=True), strict=True
        ):
            sums += g
    for a, b in zip(total, grads, strict=True):
        assert (a - b).norm() <= 1e-6 * b.norm()


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_are_added_to_what_is_there(name: str) -> None:
    """Into the buffer of `.grad`, whatever its strides: optimizers hold views of it."""
    entry = DIFFERENTIABLE[name]
    want = results(entry, tensors())[-len(entry.leaves) :]
    t = with_leaves(tensors(), entry.leaves)
    kept = []
    for k in entry.leaves:
        t[k].grad = torch.ones_like(t[k]).mT.contiguous().mT if t[k].dim() > 1 else None
        kept.append(t[k].grad)
    out, by = heads_of(entry, t)
    torch.autograd.backward(out, by)
    for k, before, g in zip(entry.leaves, kept, want, strict=True):
        if before is None:
            assert torch.equal(t[k].grad, g)
        else:
            assert t[k].grad is before
            assert torch.equal(before, 1 + g)


# ---- activation checkpointing


def unseeded(t: T) -> list[Tensor]:
    return loss(t, **ROUTED)


CHECKPOINTED = DIFFERENTIABLE | {
    "grpo_loss routed, unseeded": Entry(unseeded),
    "linear_logprobs routed, unseeded": Entry(
        lambda t: logprobs(t, entropy=True, **ROUTED), outputs=2
    ),
}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_checkpointing(name: str, reentrant: bool) -> None:
    """The same bits, with a dropout before and with noise that is drawn anew when recomputed."""
    entry = CHECKPOINTED[name]
    first = entry.leaves[0]

    def run(wrap: Callable[..., Any]) -> tuple[list[Tensor], Tensor]:
        torch.manual_seed(11)
        t = with_leaves(tensors(), entry.leaves)

        def function(*leaves: Tensor) -> tuple[Tensor, ...]:
            given = t | dict(zip(entry.leaves, leaves, strict=True))
            given[first] = torch.nn.functional.dropout(given[first], 0.2)
            return tuple(entry.call(given)[: entry.outputs])

        out = wrap(function, *(t[k] for k in entry.leaves))
        after = torch.rand(3)
        torch.rand(100)  # the generator moves on before the backward
        torch.autograd.backward(out, [upstream(x) for x in out])
        return [x.detach() for x in out] + grads_of(entry, t), after

    want, after = run(lambda f, *leaves: f(*leaves))
    got, moved = run(lambda f, *leaves: checkpoint(f, *leaves, use_reentrant=reentrant))
    values = len(got) - len(entry.leaves)
    if reentrant:  # its forward is one without gradients, which may take another path
        torch.testing.assert_close(got[:values], want[:values], rtol=1e-6, atol=1e-6)
    else:
        assert_same_bits(got[:values], want[:values])
    assert_same_bits(got[values:], want[values:])
    assert torch.equal(moved, after)


def test_unseeded_noise_is_drawn_anew() -> None:
    """Otherwise the test above would not see that it is kept."""
    a, b = (results(Entry(unseeded), tensors()) for _ in range(2))
    assert not all(torch.equal(x, y) for x, y in zip(a[-3:], b[-3:], strict=True))


# ---- torch.func


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "vjp": lambda f, x: torch.func.vjp(f, x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, x])),
    "hessian": lambda f, x: torch.func.hessian(f)(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "functionalize": lambda f, x: torch.func.grad(torch.func.functionalize(f))(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", [*HEAD, "linear_support"])
def test_transforms_raise(name: str, transform: str) -> None:
    entry, t = ENTRIES[name], tensors()
    called = {"GRPOLoss": "grpo_loss"}.get(name.split(" ")[0], name.split(" ")[0])
    with pytest.raises(RuntimeError, match=f"^{called} does not go through torch.func"):
        TRANSFORMS[transform](lambda x: entry.call(t | {"hidden": x})[0].sum(), t["hidden"])
    assert_same_bits(results(entry, t), results(entry, tensors()))


@pytest.mark.parametrize("name", FUSED)
def test_forward_mode_raises(name: str) -> None:
    entry = HEAD[name]
    for leaf in entry.leaves:
        t = tensors()
        with forward_ad.dual_level():
            t[leaf] = forward_ad.make_dual(t[leaf], torch.ones_like(t[leaf]))
            with pytest.raises(RuntimeError, match="no forward-mode derivatives"):
                entry.call(t)


@pytest.mark.parametrize(
    "entry", [*POLICY.values(), SEQUENCES], ids=[*POLICY, "policy_loss of sequence ratios"]
)
def test_policy_loss_goes_through_them(entry: Entry) -> None:
    """grad, vjp, jvp, vmap and hessian, against autograd."""
    t = tensors(torch.float64)

    def function(logps: Tensor) -> Tensor:
        return entry.call(t | {"logps": logps})[0].sum()

    x = t["logps"]
    leaf = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(function(leaf), leaf)
    assert torch.equal(torch.func.grad(function)(x), want)
    value, pull = torch.func.vjp(function, x)
    assert torch.equal(pull(torch.ones_like(value))[0], want)
    direction = torch.randn_like(x)
    _, slope = torch.func.jvp(function, (x,), (direction,))
    torch.testing.assert_close(slope, (want * direction).sum())
    torch.testing.assert_close(torch.func.jacfwd(function)(x), want)
    batch = torch.stack([x, x - 0.05, x - 0.5])
    torch.testing.assert_close(
        torch.func.vmap(function)(batch), torch.stack([function(row) for row in batch])
    )
    each = torch.func.vmap(torch.func.grad(function))(batch)
    torch.testing.assert_close(each[0], want)
    hessian = torch.func.hessian(function)(x)
    by_autograd = torch.autograd.functional.hessian(function, x)
    torch.testing.assert_close(hessian, by_autograd)
    assert hessian.abs().sum() > 0


# ---- arguments


def restrided(x: Tensor) -> Tensor:
    if x.dim() == 0:
        return x
    wide = x.new_zeros([2 * n for n in x.shape])
    view = wide[tuple(slice(None, None, 2) for _ in x.shape)]
    view.copy_(x)
    return view


@pytest.mark.parametrize("change", [torch.clone, restrided], ids=["contiguous", "strided"])
@pytest.mark.parametrize("name", ENTRIES)
def test_arguments_are_never_written(name: str, change: Callable[[Tensor], Tensor]) -> None:
    """Their bits, and the counters by which autograd knows of changes; nor is the upstream's."""
    entry = ENTRIES[name]
    t = {k: change(x) for k, x in tensors().items()}
    for k in entry.leaves:
        t[k] = t[k].detach().requires_grad_()
    versions = {k: x._version for k, x in t.items()}
    out, by = heads_of(entry, t)
    before = [(x.clone(), x._version) for x in by]
    if out:
        torch.autograd.backward(out, by, retain_graph=True)
        torch.autograd.backward(out, by)
    for k, x in tensors().items():
        assert torch.equal(t[k].detach(), x), k
        assert t[k]._version == versions[k], k
    for x, (bits, version) in zip(by, before, strict=True):
        assert torch.equal(x, bits)
        assert x._version == version


class Marked(Tensor):
    """A subclass as users make them: torch's functions keep it."""


@pytest.mark.parametrize("name", ENTRIES)
def test_subclasses_of_tensors(name: str) -> None:
    """Parameters, and a subclass without methods: the same bits as plain tensors."""
    entry = ENTRIES[name]
    want = results(entry, tensors())
    for kind in (nn.Parameter, lambda x: x.as_subclass(Marked)):
        t = tensors()
        for k, x in t.items():
            if kind is not nn.Parameter or k in entry.leaves:
                t[k] = kind(x)
        for k in entry.leaves:
            t[k] = t[k].requires_grad_()
        out, by = heads_of(entry, t)
        found = [x.detach() for x in entry.call(t)]
        if out:
            torch.autograd.backward(out, by)
        found += grads_of(entry, t)
        assert_same_bits([x.as_subclass(Tensor) for x in found], want)


@pytest.mark.parametrize("name", [*CONSTANT])
def test_constants_hang_on_no_graph(name: str) -> None:
    t = {k: x.requires_grad_() if x.is_floating_point() else x for k, x in tensors().items()}
    assert not any(x.requires_grad for x in CONSTANT[name].call(t))
