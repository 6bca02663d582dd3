"""The public calls under torch.compile: one graph without a break, the same bits as without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import Case, make_case, pack
from torch import Tensor

from fused_grpo import compiled, grpo_loss, linear_logprobs

BACKENDS = ("chunked", "triton")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch.compiler.reset()


def compile_whole(function: Any) -> Any:
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def run(function: Any, case: Case, trainable: tuple[str, ...]) -> list[Tensor | None]:
    """What `function(hidden, weight, bias)` returns, and the gradients of its first result."""
    leaves = {k: x.requires_grad_(k in trainable) for k, x in case.leaves().items()}
    first, *rest = function(leaves["hidden"], leaves["weight"], leaves.get("bias"))
    first.backward()
    return [first.detach(), *(x.detach() for x in rest), *(x.grad for x in leaves.values())]


def assert_same(function: Any, case: Case, trainable: tuple[str, ...]) -> None:
    plain = run(function, case, trainable)
    whole = run(compile_whole(function), case, trainable)
    assert len(plain) == len(whole)
    for a, b in zip(plain, whole, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert torch.equal(a, b)


LOSSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {
        "bias": True,
        "beta": 0.1,
        "entropy_coef": 0.1,
        "softcap": 4.0,
        "logit_scale": 0.7,
        "importance_sampling_level": "sequence",
        "loss_type": "grpo",
    },
    "tensors": {
        "temperature": torch.linspace(0.6, 1.4, 66).view(6, 11),
        "num_items_in_batch": torch.tensor(37.0),
    },
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize(
    ("name", "layout"), [("plain", "padded"), ("everything", "packed"), ("tensors", "padded")]
)
def test_loss(name: str, layout: str, reduction: str, backend: str) -> None:
    """I12: With work before and after it in the same graph; every result and every gradient."""
    options = LOSSES[name]
    case = make_case(dtype=torch.float32, vocab=61, ref="beta" in options, **options)
    case = pack(case) if layout == "packed" else case

    def step(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        out = grpo_loss(
            hidden * 1.0,
            weight,
            case.ids,
            case.advantages,
            bias=bias,
            reduction=reduction,
            backend=backend,
            **case.tensors,
            **case.options,
        )
        extra = () if out.entropy is None else (out.entropy,)
        metrics = [out.metrics[k] for k in sorted(out.metrics)]
        return (out.loss * 2.0).sum(), out.per_token_loss, out.per_token_logps, *extra, *metrics

    assert_same(step, case, ("hidden", "weight", "bias"))


@pytest.mark.parametrize("trainable", [("hidden",), ("weight",)], ids=["trunk", "head"])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_one_leaf_of_the_loss(reduction: str, trainable: tuple[str, ...]) -> None:
    case = make_case(dtype=torch.float32, vocab=61, ref=False)

    def step(hidden: Tensor, weight: Tensor, _: None) -> tuple[Tensor]:
        out = grpo_loss(
            hidden, weight, case.ids, case.advantages, reduction=reduction, **case.tensors
        )
        return (out.loss.sum(),)

    assert_same(step, case, trainable)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("entropy", [False, True])
def test_logprobs(entropy: bool, backend: str) -> None:
    """I12: Compiled as eager, for lengths that were not compiled before."""
    case = make_case(dtype=torch.float32, vocab=61, bias=True)
    targets = case.ids.masked_fill(~case.mask, -100)

    def step(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        out = linear_logprobs(
            hidden * 1.0,
            weight,
            targets,
            bias=bias,
            temperature=0.8,
            entropy=entropy,
            backend=backend,
        )
        total = (out.logps * torch.linspace(-1, 1, 66).view(6, 11)).sum()
        total = total + 0.3 * out.entropy.sum() if out.entropy is not None else total
        return total, out.logps

    assert_same(step, case, ("hidden", "weight", "bias"))


def test_without_gradients() -> None:
    case = make_case(dtype=torch.float32, vocab=61, ref=False)

    def step(hidden: Tensor, weight: Tensor) -> tuple[Tensor, int]:
        out = grpo_loss(hidden, weight, case.ids, case.advantages, **case.tensors)
        return out.loss, len(out.metrics)

    with torch.no_grad():
        plain, whole = step(case.hidden, case.weight), compile_whole(step)(case.hidden, case.weight)
    assert torch.equal(plain[0], whole[0])
    assert plain[1] == whole[1]


def test_errors_arrive() -> None:
    case = make_case(dtype=torch.float32, vocab=61, ref=False)

    def step(hidden: Tensor, weight: Tensor) -> Tensor:
        return grpo_loss(hidden, weight, case.ids + 61, case.advantages).loss

    with pytest.raises(ValueError, match="completion_ids holds"):
        compile_whole(step)(case.hidden, case.weight)


def test_operators_keep_their_contract() -> None:
    """Schemas and shapes as declared: nothing written to, nothing aliased."""
    case = make_case(dtype=torch.float32, vocab=61, ref=False)
    leaves = [x.requires_grad_() for x in (case.hidden, case.weight)]
    targets = case.ids.masked_fill(~case.mask, -100)
    lines = "entropy=True\nbackend='chunked'"
    tests = ("test_schema", "test_faketensor")
    for needs in ([True, True, False], [False, True, False]):
        tensors = [None] * len(compiled._LOGPROBS_TENSORS)
        args = (*leaves, None, targets, tensors, lines, needs)
        torch.library.opcheck(compiled._logprobs, args, test_utils=tests)
    tensors = [case.tensors["completion_mask"], *[None] * (len(compiled._LOSS_TENSORS) - 1)]
    lines = "reduction='sum'\nentropy=True"
    args = (*leaves, None, case.ids, case.advantages, tensors, lines, [True, True, False], True)
    torch.library.opcheck(compiled._loss, args, test_utils=tests)
