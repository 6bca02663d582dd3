"""An adapter on the head, logits = h W^T + u B^T, against full logits in float64.

The oracle makes the logits itself, and gives them to the reference as hidden states of a head that
is the identity: nothing of how the code under test adds the two products is shared.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import REFERENCE_HEAD, Case, make_case, pack, with_reference
from memory_tracker import MatmulCounter, MemoryTracker
from oracle import DTYPES, TOLERANCE, assert_gradient, assert_outputs_agree, close, upstream
from torch import Tensor

from fused_grpo import grpo_loss, linear_logprobs, linear_support
from fused_grpo.exponentials import applies
from fused_grpo.reference import reference_logprobs, reference_loss
from fused_grpo.tiles import Head

LEAVES = ("hidden", "weight", "bias", "lora_hidden", "lora_weight")
TRAINED = ("hidden", "lora_hidden", "lora_weight")  # LoRA's usual: the weight is frozen


def adapter(case: Case, rank: int, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """u [..., r] and B [V, r]; together they move logits by about 1."""
    g = torch.Generator().manual_seed(5)
    u = torch.randn(*case.hidden.shape[:-1], rank, generator=g, dtype=torch.float64)
    b = torch.randn(len(case.weight), rank, generator=g, dtype=torch.float64) / math.sqrt(rank)
    dtype = dtype or case.hidden.dtype
    return {"lora_hidden": u.to(dtype), "lora_weight": b.to(dtype)}


def leaves_of(case: Case, lora: dict[str, Tensor], trainable: tuple[str, ...], wide: bool) -> Any:
    both = case.leaves() | {k: x.clone() for k, x in lora.items()}
    leaves = {k: x.double() if wide else x for k, x in both.items()}
    return {k: x.requires_grad_(k in trainable) for k, x in leaves.items()}


def full_logits(leaves: dict[str, Tensor]) -> Tensor:
    h, w, u, b = (leaves[k] for k in ("hidden", "weight", "lora_hidden", "lora_weight"))
    return h @ w.T + u @ b.T


def check(
    case: Case,
    rank: int = 3,
    *,
    trainable: tuple[str, ...] = LEAVES,
    reduction: str = "sum",
    lora_dtype: torch.dtype | None = None,
    **how: Any,
) -> None:
    """The loss, its per-token results, metrics, and the gradient of every leaf."""
    lora = adapter(case, rank, lora_dtype)
    tol = TOLERANCE[case.hidden.dtype]
    grads = []
    want = leaves_of(case, lora, trainable, wide=True)
    wide = {k: v.double() if k in REFERENCE_HEAD else v for k, v in case.tensors.items()}
    expected = reference_loss(
        full_logits(want),
        torch.eye(len(case.weight), dtype=torch.float64),
        case.ids,
        case.advantages,
        bias=want.get("bias"),
        **wide,
        **case.options,
    )
    got = leaves_of(case, lora, trainable, wide=False)
    output = grpo_loss(
        got["hidden"],
        got["weight"],
        case.ids,
        case.advantages,
        **{k: got[k] for k in got.keys() - {"hidden", "weight"}},
        **case.tensors,
        **case.options,
        reduction=reduction,
        **how,
    )
    assert_outputs_agree(output, expected, tol)
    for out, leaves in ((expected, want), (output, got)):
        if reduction == "none":
            (out.per_token_loss * upstream(case).to(out.per_token_loss)).sum().backward()
        else:
            out.loss.backward()
        grads.append({k: x.grad for k, x in leaves.items()})
    for name, gradient in grads[0].items():
        assert_gradient(name, grads[1][name], gradient, got[name].dtype, tol.grads)
    if grads[1].get("lora_hidden") is not None:
        masked = ~case.mask.view(case.hidden.shape[:-1])
        assert not grads[1]["lora_hidden"][masked].any()


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "head": {"bias": True, "softcap": 4.0, "logit_scale": 0.6, "temperature": 0.7},
    "temperatures": {"temperature": torch.linspace(0.6, 1.4, 66).view(6, 11)},
    "entropy": {"entropy_coef": 0.1, "beta": 0.1},
    "sequence": {"importance_sampling_level": "sequence", "loss_type": "grpo"},
    "fresh": {"old": False, "importance_sampling_level": "sequence"},
    "top_k": {"support_top_k": 40, "entropy_coef": 0.05},
}


def case_of(name: str, **more: Any) -> Case:
    options = OPTIONS[name]
    return make_case(ref="beta" in options, **options, **more)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_in_every_dtype(name: str, dtype: torch.dtype) -> None:
    """In chunks of a few tokens and tiles of 64 entries."""
    check(case_of(name, dtype=dtype), chunk_bytes=1 << 16)


@pytest.mark.parametrize("rank", [1, 2, 16, 40])
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("name", ["plain", "head", "sequence"])
def test_ranks_layouts_and_reductions(name: str, reduction: str, layout: str, rank: int) -> None:
    """A rank may exceed the width of the hidden states."""
    case = case_of(name, dtype=torch.float32)
    check(pack(case) if layout == "packed" else case, rank, reduction=reduction)


@pytest.mark.parametrize(
    "trainable",
    [TRAINED, ("lora_hidden",), ("lora_weight",), ("hidden", "lora_hidden"), ("hidden",), LEAVES],
    ids="+".join,
)
@pytest.mark.parametrize("name", ["plain", "head", "sequence"])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_each_leaf_may_be_frozen(name: str, trainable: tuple[str, ...], reduction: str) -> None:
    """Also where d logp / dh and d logp / du alone are formed first, for sequence levels."""
    case = case_of(name, dtype=torch.float32)
    check(case, trainable=trainable, reduction=reduction, chunk_bytes=1 << 15)


@pytest.mark.parametrize("lora_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adapters_in_another_dtype(lora_dtype: torch.dtype) -> None:
    """PEFT keeps adapters in float32 beside a bfloat16 model: their gradients are float32."""
    case = case_of("head", dtype=torch.bfloat16)
    check(case, lora_dtype=lora_dtype, trainable=TRAINED, chunk_bytes=1 << 16)


@pytest.mark.parametrize("estimator", ["k3", "full", "top_k"])
def test_beside_a_reference_head(estimator: str) -> None:
    """The reference is another head, without the adapter."""
    top_k = {"kl_top_k": 7} if estimator == "top_k" else {}
    case = make_case(dtype=torch.float32, ref=False, beta=0.2, kl_estimator=estimator, **top_k)
    check(with_reference(case), chunk_bytes=1 << 16)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("loss_type", ["dapo", "cispo"])
def test_backends(backend: str, loss_type: str) -> None:
    """`reference` too, for the losses it knows and for those it only has log-probabilities for."""
    case = make_case(ref=False, bias=True)
    lora = adapter(case, 3)
    results = []
    for name in (backend, "auto"):
        leaves = leaves_of(case, lora, LEAVES, wide=False)
        head = {k: leaves[k] for k in ("bias", "lora_hidden", "lora_weight")}
        out = grpo_loss(
            leaves["hidden"],
            leaves["weight"],
            case.ids,
            case.advantages,
            **head,
            **case.tensors,
            loss_type=loss_type,
            backend=name,
        )
        out.loss.backward()
        results.append([out.loss.detach(), *(x.grad for x in leaves.values())])
    for a, b in zip(*results, strict=True):
        close(a, b, 1e-10, "result")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("trainable", [LEAVES, TRAINED, ("hidden", "lora_hidden")], ids="+".join)
@pytest.mark.parametrize("entropy", [False, True])
def test_log_probabilities(entropy: bool, trainable: tuple[str, ...], dtype: torch.dtype) -> None:
    """For any upstream gradient, of [..., H] with three leading dimensions."""
    case = make_case(dtype=dtype, ref=False, old=False, softcap=5.0)
    lora = adapter(case, 3)
    tol, outs, grads = TOLERANCE[dtype], [], []
    for wide in (True, False):
        leaves = leaves_of(case, lora, trainable, wide)
        h, u = (leaves[k].view(2, 3, 11, -1) for k in ("hidden", "lora_hidden"))
        if wide:
            z = full_logits(leaves).view(2, 3, 11, -1)
            eye = torch.eye(len(case.weight), dtype=torch.float64)
            logps, ent = reference_logprobs(
                z, eye, case.ids.view(2, 3, 11), entropy=entropy, softcap=5.0
            )
        else:
            out = linear_logprobs(
                h,
                leaves["weight"],
                case.ids.view(2, 3, 11),
                lora_hidden=u,
                lora_weight=leaves["lora_weight"],
                entropy=entropy,
                softcap=5.0,
                chunk_bytes=1 << 16,
            )
            logps, ent = out.logps, out.entropy
        weights = torch.linspace(-1, 1, 66, dtype=torch.float64).view(2, 3, 11).to(logps)
        total = (weights * logps).sum()
        (total if ent is None else total + (weights.flip(-1) * ent).sum()).backward()
        outs.append([logps] if ent is None else [logps, ent])
        grads.append({k: x.grad for k, x in leaves.items()})
    for a, b in zip(*outs, strict=True):
        close(b, a, tol.logps, "value")
    for name, want in grads[0].items():
        assert_gradient(name, grads[1][name], want, dtype, tol.grads)


def test_gradcheck() -> None:
    case = make_case(rows=2, width=3, dim=4, vocab=9, ref=False, mask="ones")
    lora = adapter(case, 2)
    leaves = leaves_of(case, lora, LEAVES, wide=False)

    def logps(h: Tensor, w: Tensor, u: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        out = linear_logprobs(
            h, w, case.ids, lora_hidden=u, lora_weight=b, entropy=True, softcap=3.0
        )
        assert out.entropy is not None
        return out.logps, out.entropy

    assert torch.autograd.gradcheck(logps, tuple(leaves.values()))


def test_the_samplers_support_is_that_of_the_adapted_head() -> None:
    case = make_case(ref=False, old=False)
    lora = adapter(case, 3)
    wide = leaves_of(case, lora, (), wide=True)
    ids = linear_support(case.hidden, case.weight, top_k=5, mask=case.mask, **lora)
    expected = full_logits(wide).topk(5).indices.sort().values
    assert torch.equal(ids[case.mask], expected[case.mask])
    plain = linear_support(case.hidden, case.weight, top_k=5, mask=case.mask)
    assert not torch.equal(ids, plain)


# Work and memory


def big(
    rank: int, width: int = 32, dim: int = 64, vocab: int = 600, **options: Any
) -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    return {
        "hidden": torch.randn(4, width, dim, generator=g),
        "weight": torch.randn(vocab, dim, generator=g),
        "completion_ids": torch.randint(vocab, (4, width), generator=g),
        "advantages": torch.tensor([1.0, 2.0, 0.5, 1.5]),
        "lora_hidden": torch.randn(4, width, rank, generator=g),
        "lora_weight": torch.randn(vocab, rank, generator=g),
        "chunk_bytes": 1 << 16,
    } | options


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_frozen_weight_costs_no_gradient_buffer(level: str, dtype: torch.dtype) -> None:
    """4NHV and 6NrV, and nothing of the weight's size, though its adapter trains."""
    call = big(8, importance_sampling_level=level)
    call = {k: x.to(dtype) if k in LEAVES else x for k, x in call.items()}
    for name in TRAINED:
        call[name].requires_grad_()
    with MemoryTracker() as memory, MatmulCounter() as work:
        grpo_loss(**call).loss.backward()
    assert memory.largest < 600 * 64 * 2
    assert call["weight"].grad is None
    assert work.count == 4 * 32 * 600 * (2 * 64 + 3 * 8)


@pytest.mark.parametrize("rank", [8, 512])
def test_the_planner_counts_the_rank(rank: int) -> None:
    """A chunk of hidden states [c, 16] is small beside that of an adapter's, [c, 512]."""
    call = big(rank, width=128, dim=16, vocab=200, chunk_bytes=1 << 19)
    for name in LEAVES:
        if name in call:
            call[name].requires_grad_()
    with MemoryTracker() as memory:
        grpo_loss(**call).loss.backward()
    gradients = sum(4 * call[name].numel() for name in LEAVES if name in call)
    over = memory.peak - gradients - (1 << 19) - 4 * 128 * 100
    assert over <= 0, f"{over} bytes over"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_exponentials_are_not_taken_without_the_adapter(dtype: torch.dtype) -> None:
    """Not out of the weight's product alone, which the adapter's would have to enter first."""
    weight = torch.zeros(4096, 4, dtype=dtype)
    head = Head(weight, lora_weight=weight[:, :1])
    assert not applies(weight[:2], head, 1.0, entropy=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_vocabulary_of_some_thousands(dtype: torch.dtype) -> None:
    check(make_case(dtype=dtype, vocab=4500, ref=False), chunk_bytes=1 << 20)


# What is refused

V, H = 129, 24
U, B = torch.zeros(6, 11, 2), torch.zeros(V, 2)


@pytest.mark.parametrize(
    ("lora", "error", "message"),
    [
        ({"lora_hidden": U}, ValueError, "lora_hidden needs lora_weight"),
        ({"lora_weight": B}, ValueError, "lora_weight needs lora_hidden"),
        ({"lora_hidden": U, "lora_weight": B[1:]}, ValueError, r"\[V, r\].*\[128, 2\]"),
        ({"lora_hidden": U, "lora_weight": B.T}, ValueError, r"\[V, r\].*\[2, 129\]"),
        ({"lora_hidden": U[..., :0], "lora_weight": B[:, :0]}, ValueError, "r >= 1"),
        ({"lora_hidden": U[..., :1], "lora_weight": B}, ValueError, r"must be \[6, 11, 2\]"),
        ({"lora_hidden": U[:1], "lora_weight": B}, ValueError, r"must be \[6, 11, 2\]"),
        ({"lora_hidden": U.long(), "lora_weight": B}, TypeError, "lora_hidden must be floating"),
        ({"lora_hidden": U, "lora_weight": 3.0}, TypeError, "lora_weight must be a torch.Tensor"),
        ({"lora_hidden": U, "lora_weight": B.to("meta")}, ValueError, "lora_weight is on meta"),
    ],
    ids=str,
)
def test_what_does_not_fit_raises(
    lora: dict[str, Any], error: type[Exception], message: str
) -> None:
    case = make_case(dtype=torch.float32, ref=False)
    with pytest.raises(error, match=message):
        grpo_loss(case.hidden, case.weight, case.ids, case.advantages, **case.tensors, **lora)
    with pytest.raises(error, match=message):
        linear_logprobs(case.hidden, case.weight, case.ids, **lora)


def test_triton_is_refused_by_name() -> None:
    pytest.importorskip("triton")
    case = make_case(dtype=torch.float32, ref=False)
    with pytest.raises(ValueError, match="it has no adapter on the head"):
        grpo_loss(
            case.hidden,
            case.weight,
            case.ids,
            case.advantages,
            **case.tensors,
            **adapter(case, 2),
            backend="triton",
        )


@pytest.mark.parametrize("tau", [None, 0.0])
def test_routed_gradients_refuse_it(tau: float | None) -> None:
    case = make_case(dtype=torch.float32, ref=False)
    call = adapter(case, 2) | {"backward": "routed", "route_tau": tau}
    with pytest.raises(ValueError, match="'routed' does not know lora_weight"):
        grpo_loss(case.hidden, case.weight, case.ids, case.advantages, **case.tensors, **call)
    with pytest.raises(ValueError, match="'routed' does not know lora_weight"):
        linear_logprobs(case.hidden, case.weight, case.ids, **call)


def test_compiled_calls_refuse_it() -> None:
    case = make_case(dtype=torch.float32, ref=False)
    lora = adapter(case, 2)

    def loss() -> Tensor:
        return grpo_loss(case.hidden, case.weight, case.ids, case.advantages, **lora).loss

    with pytest.raises(Exception, match=r"not take under torch\.compile"):
        torch.compile(loss, fullgraph=True, backend="eager")()
