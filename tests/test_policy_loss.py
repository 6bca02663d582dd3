"""GRPOLoss, policy_loss and upstream gradients: other ways into the same objective."""

from __future__ import annotations

import pytest
import torch
from cases import LEVELS, LOSS_TYPES, Case, exact_logps, make_case, pack
from oracle import DTYPES, TOLERANCE, assert_outputs_agree, check, close, dtype_id, ours
from torch import Tensor

from fused_grpo import GRPOLoss, GRPOLossOutput, grpo_loss, linear_logprobs, policy_loss
from fused_grpo.reference import reference_policy_loss


def test_module_equals_function() -> None:
    case = make_case(vocab=61, loss_type="grpo", beta=0.1, temperature=0.7, chunk_bytes=1 << 14)
    module = GRPOLoss(**case.options)
    want = ours(case).output
    got = module(case.hidden, case.weight, case.ids, case.advantages, **case.tensors)
    assert torch.equal(got.loss, want.loss)
    assert not list(module.parameters())
    assert "beta=0.1" in repr(module)


def chained(case: Case, reduction: str = "sum") -> tuple[GRPOLossOutput, dict[str, Tensor]]:
    """linear_logprobs followed by policy_loss on the case, and the gradients of its leaves."""
    leaves = {k: v.requires_grad_() for k, v in case.leaves().items()}
    head = ("temperature", "logit_scale", "softcap")
    options = {k: v for k, v in case.options.items() if k not in (*head, "entropy")}
    wants_entropy = bool(options.get("entropy_coef")) or case.options.get("entropy", False)
    logps = linear_logprobs(
        **leaves,
        targets=case.ids.masked_fill(~case.mask, -100),
        entropy=wants_entropy,
        **{k: v for k, v in case.options.items() if k in head},
    )
    out = policy_loss(
        logps.logps,
        case.advantages,
        entropies=logps.entropy,
        reduction=reduction,
        **case.tensors,
        **options,
    )
    (out.loss if reduction == "sum" else out.per_token_loss.sum()).backward()
    return out, {k: v.grad for k, v in leaves.items()}


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", LOSS_TYPES)
def test_policy_loss_on_logprobs_equals_grpo_loss(name: str, level: str, layout: str) -> None:
    case = make_case(
        vocab=61,
        bias=True,
        beta=0.2,
        entropy_coef=0.1,
        delta=1.7,
        temperature=0.8,
        importance_sampling_level=level,
        **LOSS_TYPES[name],
    )
    case = pack(case) if layout == "packed" else case
    fused = ours(case)
    out, grads = chained(case)
    no_head = {"zero_coefficient_fraction"}  # says which tokens skip the backward of the head
    assert_outputs_agree(out, fused.output, TOLERANCE[torch.float64], no_head)
    for key, grad in grads.items():
        close(grad, fused.grads[key], 1e-11, key)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_policy_loss_against_the_reference(reduction: str, dtype: torch.dtype) -> None:
    case = make_case(vocab=61, beta=0.2)
    vectors = {k: v.to(dtype) for k, v in case.tensors.items() if k != "completion_mask"}
    rest = {"completion_mask": case.mask, "beta": 0.2, "loss_type": "grpo"}
    logps = exact_logps(case).to(dtype)
    ours_, exact = logps.clone().requires_grad_(), logps.double().detach().clone().requires_grad_()
    got = policy_loss(ours_, case.advantages.to(dtype), **vectors, **rest, reduction=reduction)
    wide = {k: v.double() for k, v in vectors.items()}
    want = reference_policy_loss(exact, case.advantages.to(dtype).double(), **wide, **rest)
    tolerance = TOLERANCE[dtype if dtype == torch.float64 else torch.float32]
    assert_outputs_agree(got, want, tolerance, {"zero_coefficient_fraction"})
    (got.loss if reduction == "sum" else got.per_token_loss).sum().backward()
    (want.loss if reduction == "sum" else want.per_token_loss).sum().backward()
    assert ours_.grad.dtype == dtype
    assert not ours_.grad[~case.mask].any()
    rounding = {torch.bfloat16: 8e-3, torch.float16: 1e-3}.get(dtype, 1e-5)
    torch.testing.assert_close(ours_.grad.double(), exact.grad, rtol=rounding, atol=1e-7)


@pytest.mark.parametrize("level", LEVELS)
def test_upstream_gradient_scales(level: str) -> None:
    """Loss scaling, accumulation and arithmetic on the loss reach the gradients linearly."""
    case = make_case(vocab=61, ref=False, importance_sampling_level=level)
    want = ours(case)
    hidden, weight = (case.leaves()[k].requires_grad_() for k in ("hidden", "weight"))
    for factor in (2.0, 0.5):
        out = grpo_loss(hidden, weight, case.ids, case.advantages, **case.tensors, **case.options)
        (out.loss * factor + 1.0).backward()
    close(hidden.grad, 2.5 * want.grads["hidden"], 1e-12, "hidden")
    close(weight.grad, 2.5 * want.grads["weight"], 1e-12, "weight")


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("old", [True, False])
def test_reduction_none(level: str, old: bool, dtype: torch.dtype) -> None:
    """R6: every token has its own upstream gradient; that of the first one is 0."""
    case = make_case(
        vocab=61, dtype=dtype, old=old, beta=0.1, importance_sampling_level=level, bias=True
    )
    result = check(case, reduction="none", chunk_bytes=1 << 14)
    assert result.output.per_token_loss.shape == case.ids.shape
    assert result.output.per_token_loss.requires_grad


def test_reduction_none_then_weights_equals_sum() -> None:
    case = make_case(vocab=61, beta=0.1, loss_type="bnpo")
    hidden, weight = (case.leaves()[k].requires_grad_() for k in ("hidden", "weight"))
    out = grpo_loss(
        hidden,
        weight,
        case.ids,
        case.advantages,
        reduction="none",
        **case.tensors,
        **case.options,
    )
    (out.per_token_loss.sum() / case.mask.sum()).backward()
    want = ours(case)
    close(hidden.grad, want.grads["hidden"], 1e-12, "hidden")
    close(weight.grad, want.grads["weight"], 1e-12, "weight")


@pytest.mark.parametrize("loss_type", ["gspo", "luspo", "rloo", "gmpo", "grpo"])
def test_everything_masked_keeps_a_graph(loss_type: str) -> None:
    """S10: sums over sequences are differentiable where no token is left, too."""
    logps = torch.full((2, 3), -1.0, requires_grad=True)
    out = policy_loss(
        logps,
        torch.ones(2),
        completion_mask=torch.zeros(2, 3),
        old_per_token_logps=logps.detach(),
        loss_type=loss_type,
    )
    out.loss.backward()
    assert out.loss.detach() == 0
    assert logps.grad is not None
    assert not logps.grad.any()


def test_what_is_compared_with_gets_no_gradient() -> None:
    """Old and reference log-probabilities, advantages and ratios are constants, leaves or not."""
    logps = (-torch.rand(2, 3)).requires_grad_()
    tensors = {
        "old_per_token_logps": -torch.rand(2, 3),
        "ref_per_token_logps": -torch.rand(2, 3),
        "importance_sampling_ratio": torch.rand(2, 3),
    }
    tensors = {name: x.requires_grad_() for name, x in tensors.items()}
    advantages = torch.randn(2).requires_grad_()
    policy_loss(logps, advantages, beta=0.1, **tensors).loss.backward()
    assert logps.grad is not None
    assert all(x.grad is None for x in (advantages, *tensors.values()))
