"""What autograd, autocast and modules may expect of the ops, beyond the right numbers."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import math
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Case, make_case
from oracle import assert_gradient, close, oracle, ours
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fused_grpo import GRPOLoss, GRPOLossOutput, grpo_loss, linear_logprobs, policy_loss

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def call(case: Case, hidden: Tensor, weight: Tensor, **extra: Any) -> GRPOLossOutput:
    """grpo_loss of the case on other leaves."""
    return grpo_loss(
        hidden, weight, case.ids, case.advantages, **case.tensors, **case.options, **extra
    )


def small() -> Case:
    return make_case(rows=3, width=7, dim=16, vocab=37, beta=0.1)


# gradcheck: float64 logits make finite differences meaningful


@pytest.mark.parametrize("chunk_bytes", [1 << 11, 100 << 20])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("temperature", ["scalar", "token"])
def test_gradcheck_logprobs(
    temperature: str, entropy: bool, with_bias: bool, softcap: float | None, chunk_bytes: int
) -> None:
    """N7: random weights on both outputs, through bias, scale, softcap and temperature."""
    hidden = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 4, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(11, dtype=torch.float64, requires_grad=True) if with_bias else None
    targets = torch.tensor([3, -100, 10, 0, 7])
    t = torch.linspace(0.5, 2.0, 5).double() if temperature == "token" else 0.7

    def function(hidden: Tensor, weight: Tensor, *bias: Tensor) -> tuple[Tensor, ...]:
        out = linear_logprobs(
            hidden,
            weight,
            targets,
            bias=bias[0] if bias else None,
            temperature=t,
            logit_scale=1.3,
            softcap=softcap,
            entropy=entropy,
            chunk_bytes=chunk_bytes,
        )
        return (out.logps, out.entropy) if entropy else (out.logps,)

    leaves = (hidden, weight) if bias is None else (hidden, weight, bias)
    assert torch.autograd.gradcheck(function, leaves, check_undefined_grad=True)


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_gradcheck_loss(level: str, reduction: str) -> None:
    """The whole loss, away from its kinks, with KL and entropy."""
    case = make_case(
        rows=2,
        width=4,
        dim=3,
        vocab=7,
        mask="ragged",
        beta=0.3,
        entropy_coef=0.2,
        importance_sampling_level=level,
        use_bias_correction_kl=True,
    )

    def function(hidden: Tensor, weight: Tensor) -> Tensor:
        out = call(case, hidden, weight, reduction=reduction)
        return out.loss if reduction == "sum" else out.per_token_loss

    assert torch.autograd.gradcheck(
        function, tuple(case.leaves()[k].requires_grad_() for k in ("hidden", "weight"))
    )


# The graph


@pytest.mark.both_backends
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_backward_twice(level: str, reduction: str) -> None:
    """retain_graph: the second backward adds the same gradient; saved tensors are not consumed."""
    case = small().with_options(importance_sampling_level=level)
    hidden, weight = (case.leaves()[k].requires_grad_() for k in ("hidden", "weight"))
    out = call(case, hidden, weight, reduction=reduction)
    scalar = out.loss if reduction == "sum" else out.per_token_loss.sum()
    scalar.backward(retain_graph=True)
    once = [hidden.grad.clone(), weight.grad.clone()]
    scalar.backward()
    assert torch.equal(hidden.grad, 2 * once[0])
    assert torch.equal(weight.grad, 2 * once[1])


@pytest.mark.both_backends
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_gradients_belong_to_the_caller(level: str, reduction: str) -> None:
    """Changing a gradient in place (zero_grad, clipping) does not change the next backward's."""
    case = small().with_options(importance_sampling_level=level)
    leaves = [case.leaves()[k].requires_grad_() for k in ("hidden", "weight")]
    out = call(case, *leaves, reduction=reduction)
    scalar = out.loss.sum()
    first = torch.autograd.grad(scalar, leaves, retain_graph=True)
    want = [g.clone() for g in first]
    for g in first:
        g.zero_()
    scalar.backward(retain_graph=True)
    for leaf, g in zip(leaves, want, strict=True):
        assert torch.equal(leaf.grad, g)
        leaf.grad.zero_()
    scalar.backward()
    for leaf, g in zip(leaves, want, strict=True):
        assert torch.equal(leaf.grad, g)


def test_backward_twice_logprobs() -> None:
    hidden = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(20, 8, dtype=torch.float64, requires_grad=True)
    out = linear_logprobs(hidden, weight, torch.randint(20, (5,)), entropy=True)
    results = []
    for a, b in ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0)):
        total = (a * out.logps + b * out.entropy).sum()
        results.append(torch.autograd.grad(total, (hidden, weight), retain_graph=True))
    for first, second, both in zip(*results, strict=True):
        torch.testing.assert_close(first + second, both)


def outputs() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    case = small()
    targets = case.ids.masked_fill(~case.mask, -100)
    return {
        "loss": lambda h, w: call(case, h, w).loss,
        "sequence": lambda h, w: call(case, h, w, importance_sampling_level="sequence").loss,
        "none": lambda h, w: call(case, h, w, reduction="none").per_token_loss.sum(),
        "logprobs": lambda h, w: linear_logprobs(h, w, targets).logps.sum(),
        "entropy": lambda h, w: linear_logprobs(h, w, targets, entropy=True).entropy.sum(),
    }


@pytest.mark.parametrize("name", ["loss", "sequence", "none", "logprobs", "entropy"])
def test_second_derivatives_raise(name: str) -> None:
    """create_graph: an error, never a gradient that silently lacks terms."""
    case = small()
    hidden, weight = (case.leaves()[k].requires_grad_() for k in ("hidden", "weight"))
    value = outputs()[name](hidden, weight)

    (grad,) = torch.autograd.grad(value, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|does not require grad"):
        grad.square().sum().backward()


@pytest.mark.both_backends
@pytest.mark.parametrize("name", ["loss", "sequence", "none", "logprobs", "entropy"])
def test_unused_leaves_get_no_gradient(name: str) -> None:
    """S1, I13: what is computed follows the leaves that need it."""
    case = small()
    for frozen in ("hidden", "weight"):
        leaves = {k: v.requires_grad_(k != frozen) for k, v in case.leaves().items()}
        value = outputs()[name](leaves["hidden"], leaves["weight"])
        value.backward()
        assert leaves[frozen].grad is None
        other = "weight" if frozen == "hidden" else "hidden"
        assert leaves[other].grad.abs().sum() > 0
    leaves = case.leaves()
    assert not outputs()[name](leaves["hidden"], leaves["weight"]).requires_grad


@pytest.mark.both_backends
@pytest.mark.parametrize("name", ["loss", "sequence", "none", "logprobs", "entropy"])
def test_gradient_of_one_leaf_only(name: str) -> None:
    """autograd.grad for one of two leaves, and hooks, see the same gradients as backward."""
    case = small()
    hidden, weight = (case.leaves()[k].requires_grad_() for k in ("hidden", "weight"))
    outputs()[name](hidden, weight).backward()
    seen: list[Tensor] = []
    other = case.leaves()["hidden"].requires_grad_()
    other.register_hook(seen.append)
    value = outputs()[name](other, weight)
    (grad,) = torch.autograd.grad(value, other)
    assert torch.equal(grad, hidden.grad)
    assert torch.equal(seen[0], hidden.grad)


@pytest.mark.both_backends
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_inputs_are_never_written(level: str, reduction: str) -> None:
    """Bit-identical inputs after forward and backward, masked garbage included."""
    case = make_case(
        vocab=37, beta=0.1, entropy_coef=0.1, bias=True, importance_sampling_level=level
    )
    case.tensors["importance_sampling_ratio"] = torch.rand(case.ids.shape).double()
    before = copy.deepcopy(case)
    hidden, weight, bias = (case.leaves()[k].requires_grad_() for k in ("hidden", "weight", "bias"))
    out = call(case, hidden, weight, bias=bias, reduction=reduction)
    upstream = torch.rand_like(out.loss)
    kept = upstream.clone()
    out.loss.backward(upstream)
    assert torch.equal(upstream, kept)
    assert torch.equal(hidden, before.hidden)
    assert torch.equal(weight, before.weight)
    assert torch.equal(bias, before.bias)
    assert torch.equal(case.ids, before.ids)
    assert torch.equal(case.advantages, before.advantages)
    for name, x in case.tensors.items():
        assert torch.equal(x, before.tensors[name]), name


def test_inputs_changed_before_backward_are_an_error_or_harmless() -> None:
    """D6: the weight is updated between forward and backward: an error, or right numbers."""
    case = small()
    want = ours(case)
    hidden, weight = (case.leaves()[k].requires_grad_() for k in ("hidden", "weight"))
    out = call(case, hidden, weight)
    with torch.no_grad():
        weight.mul_(3.0)
    try:
        out.loss.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)  # noqa: PT017
    else:
        assert torch.equal(hidden.grad, want.grads["hidden"])
        assert torch.equal(weight.grad, want.grads["weight"])


# Strides


def transposed(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def sliced(x: Tensor) -> Tensor:
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 5), float("nan"), dtype=x.dtype)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def offset(x: Tensor) -> Tensor:
    long = torch.full((x.shape[0], x.shape[1] + 3, *x.shape[2:]), float("nan"), dtype=x.dtype)
    long[:, 3:] = x
    return long[:, -x.shape[1] :]


def column_major(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


# bf16 weights of other strides take another product: see test_backends
@pytest.mark.both_backends(triton_if=lambda p: p["dtype"] == torch.float32)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [transposed, sliced, offset, column_major])
@pytest.mark.parametrize("which", ["hidden", "weight", "both"])
def test_non_contiguous_leaves(
    which: str, layout: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    """S1, S3: views of any strides train; the gradient reaches the base of the view."""
    case = make_case(rows=3, width=7, dim=16, vocab=37, dtype=dtype, ref=False)
    want = ours(case)
    bases = case.leaves()
    leaves = {k: v.requires_grad_() for k, v in bases.items()}
    shaped = {
        k: (layout(v) if which in (k, "both") and (k == "hidden" or layout is not offset) else v)
        for k, v in leaves.items()
    }
    call(case, shaped["hidden"], shaped["weight"]).loss.backward()
    for name, leaf in leaves.items():
        close(leaf.grad, want.grads[name], 1e-6 if dtype != torch.float64 else 1e-12, name)


def test_base_of_a_transposed_view_trains() -> None:
    """S1: hidden is [T, B, H] seen as [B, T, H]; a copy made without grad must not hide it."""
    case = small()
    want = ours(case)
    base = case.hidden.transpose(0, 1).contiguous().requires_grad_()
    weight = case.weight.clone().requires_grad_()
    call(case, base.transpose(0, 1), weight).loss.backward()
    torch.testing.assert_close(base.grad.transpose(0, 1), want.grads["hidden"])


def test_expanded_inputs() -> None:
    """Stride-0 hidden states and vectors: gradients sum over the expanded dimension."""
    case = make_case(rows=3, width=7, dim=16, vocab=37, ref=False, old=False, mask="ones")
    row = torch.randn(1, 1, 16, dtype=torch.float64, requires_grad=True)
    case.advantages = torch.tensor(1.5).double().expand(3)
    case.ids = case.ids[:, :1].expand(3, 7)
    call(case, row.expand(3, 7, 16), case.weight).loss.backward()
    dense = row.detach().repeat(3, 7, 1).requires_grad_()
    call(case, dense, case.weight).loss.backward()
    torch.testing.assert_close(row.grad, dense.grad.sum((0, 1), keepdim=True))


def test_non_contiguous_vectors() -> None:
    case = make_case(vocab=37, beta=0.1)
    want = ours(case)
    case.tensors = {k: transposed(v) for k, v in case.tensors.items()}
    case.ids = transposed(case.ids)
    case.advantages = torch.stack([case.advantages, case.advantages + 9], dim=1)[:, 0]
    got = ours(case)
    assert torch.equal(got.output.loss, want.output.loss)
    assert torch.equal(got.grads["weight"], want.grads["weight"])


# Dtypes, autocast, modules


@pytest.mark.both_backends(triton_if=lambda p: p["autocast"] is None)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("hidden_dtype", "weight_dtype"), list(itertools.product(FLOATS, FLOATS)))
def test_mixed_dtypes(
    hidden_dtype: torch.dtype, weight_dtype: torch.dtype, autocast: torch.dtype | None
) -> None:
    """I7: all pairs of dtypes, in and out of autocast; gradients come back in the leaf's dtype."""
    case = make_case(rows=3, width=7, dim=16, vocab=37, beta=0.1, bias=True, dtype=torch.float32)
    case.hidden, case.weight = case.hidden.to(hidden_dtype), case.weight.to(weight_dtype)
    want = oracle(case)
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        got = ours(case)
    assert got.output.loss.dtype == torch.float32
    # The logits are float32 everywhere: autocast rounds nothing either.
    close(got.output.per_token_logps, want.output.per_token_logps, 1e-4, "logps")
    close(got.output.loss, want.output.loss, 2e-4, "loss")
    for name, dtype in (
        ("hidden", hidden_dtype),
        ("weight", weight_dtype),
        ("bias", torch.float32),
    ):
        assert_gradient(name, got.grads[name], want.grads[name], dtype, 5e-3)


@pytest.mark.both_backends
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_no_bit(dtype: torch.dtype, reduction: str) -> None:
    """I7: no product inside the op is cast, in the forward or in the backward."""
    case = make_case(vocab=37, beta=0.1, bias=True, dtype=dtype)
    plain = ours(case, reduction=reduction)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = ours(case, reduction=reduction)
    assert torch.equal(plain.output.loss, cast.output.loss)
    for name, grad in plain.grads.items():
        assert torch.equal(cast.grads[name], grad), name


class TiedModel(nn.Module):
    """Embedding -> one layer -> loss on the embedding's own weight."""

    def __init__(self, vocab: int, dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.layer = nn.Linear(dim, dim)

    def forward(self, ids: Tensor, fused: bool) -> Tensor:
        hidden = torch.tanh(self.layer(self.embedding(ids)))[:, :-1]
        targets, advantages = ids[:, 1:], torch.linspace(-1, 1, len(ids)).to(hidden.dtype)
        if fused:
            return grpo_loss(hidden, self.embedding.weight, targets, advantages).loss
        logps = torch.log_softmax(hidden @ self.embedding.weight.T, -1)
        logps = logps.gather(2, targets[..., None])[..., 0]
        ratio = (logps - logps.detach()).exp()
        return -(ratio * advantages[:, None]).mean()


def test_tied_weight() -> None:
    """The head is the embedding: its gradient is the sum of both uses."""
    model = TiedModel(31, 8).double()
    ids = torch.randint(31, (4, 9))
    grads = []
    for fused in (True, False):
        model.zero_grad()
        model(ids, fused).backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.both_backends
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_checkpointing(level: str, use_reentrant: bool) -> None:
    """Recomputed in the backward pass: the same gradients."""
    case = small().with_options(importance_sampling_level=level)
    want = ours(case)
    hidden, weight = (case.leaves()[k].requires_grad_() for k in ("hidden", "weight"))
    loss = checkpoint(
        lambda h, w: call(case, h, w).loss, hidden, weight, use_reentrant=use_reentrant
    )
    loss.backward()
    assert torch.equal(hidden.grad, want.grads["hidden"])
    assert torch.equal(weight.grad, want.grads["weight"])


def test_module_copies_and_pickles() -> None:
    module = GRPOLoss(loss_type="grpo", beta=0.1, epsilon_high=0.28, temperature=0.9)
    case = make_case(vocab=37, loss_type="grpo")
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    copies.append(torch.load(buffer, weights_only=False))
    want = module(case.hidden, case.weight, case.ids, case.advantages, **case.tensors).loss
    for other in copies:
        got = other(case.hidden, case.weight, case.ids, case.advantages, **case.tensors).loss
        assert torch.equal(got, want)


def test_outputs_and_their_graph_are_freed() -> None:
    """No growth over many calls: nothing global or cyclic holds tensors of past calls."""

    def step() -> None:
        case = make_case(vocab=37, beta=0.1)
        for reduction in ("sum", "none"):
            ours(case, reduction=reduction)

    def alive() -> int:
        gc.collect()
        return sum(issubclass(type(x), Tensor) for x in gc.get_objects())

    step()
    before = alive()
    for _ in range(10):
        step()
    assert alive() <= before


def test_graph_is_freed_without_the_garbage_collector() -> None:
    """A reference cycle through saved tensors would keep the hidden states until gc runs."""
    gc.collect()
    gc.disable()
    try:
        case = small()
        leaves = [case.leaves()[k].requires_grad_() for k in ("hidden", "weight")]
        freed: list[int] = []
        hidden = leaves[0] * 1.0
        weakref.finalize(hidden, freed.append, 1)
        call(case, hidden, leaves[1]).loss.backward()
        del hidden
        assert freed == [1]
    finally:
        gc.enable()


def test_inference_mode_and_no_grad() -> None:
    case = small()
    want = ours(case).output.loss
    leaves = [case.leaves()[k].requires_grad_() for k in ("hidden", "weight")]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = call(case, *leaves)
            assert not out.loss.requires_grad
            assert torch.equal(out.loss, want.detach())


def test_policy_loss_is_ordinary_autograd() -> None:
    """policy_loss: gradcheck, and second derivatives that are right."""
    logps = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -1.0]).double()
    old, ref = logps.detach() - 0.05, logps.detach() - 0.3

    def function(x: Tensor) -> Tensor:
        vectors = {"old_per_token_logps": old, "ref_per_token_logps": ref}
        return policy_loss(x, advantages, beta=0.5, **vectors).loss

    assert torch.autograd.gradcheck(function, (logps,))
    (grad,) = torch.autograd.grad(function(logps), logps, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), logps)
    # -A ratio has the second derivative -A ratio, and k3 has e^d, here with d = -0.3.
    curvature = -advantages[:, None] * math.exp(0.05) + 0.5 * math.exp(-0.3)
    torch.testing.assert_close(second, (curvature / 6).expand(2, 3))
