"""grpo_loss as callers use it: layouts, dtypes, outputs, repeatability."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import LEVELS, LOSS_TYPES, make_case, pack
from oracle import DTYPES, check, close, dtype_id, ours

from fused_grpo import GRPOLossOutput, grpo_loss, linear_logprobs


def same(a: Any, b: Any, tol: float = 1e-12) -> None:
    """Two results of `ours` agree in loss and gradients."""
    close(a.output.loss, b.output.loss, tol, "loss")
    for name, grad in a.grads.items():
        close(grad, b.grads[name], tol, name)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", LOSS_TYPES)
def test_packed_equals_padded(name: str, level: str) -> None:
    """S15: the same sequences, dense or packed, [N, H] or [1, N, H]: same loss and gradients."""
    case = make_case(
        vocab=61,
        beta=0.1,
        entropy_coef=0.1,
        importance_sampling_level=level,
        **LOSS_TYPES[name],
    )
    dense, packed = ours(case), pack(case)
    flat = ours(packed)
    keep = torch.zeros(case.ids.shape, dtype=torch.bool)
    lengths = packed.tensors["cu_seqlens"].diff()
    for row, length in enumerate(lengths.tolist()):
        keep[row, :length] = True
    close(flat.output.loss, dense.output.loss, 1e-12, "loss")
    close(flat.grads["weight"], dense.grads["weight"], 1e-12, "weight")
    close(flat.grads["hidden"], dense.grads["hidden"][keep], 1e-12, "hidden")
    close(flat.output.per_token_logps, dense.output.per_token_logps[keep], 1e-12, "logps")
    for key, value in dense.output.metrics.items():
        close(flat.output.metrics[key], value, 1e-6, key)

    for ids in (packed.ids, packed.ids[None]):
        batched = ours(replace(packed, hidden=packed.hidden[None], ids=ids))
        close(batched.output.loss, dense.output.loss, 1e-12, "loss")
        assert batched.output.per_token_logps.shape == ids.shape
        assert batched.grads["hidden"].shape == (1, *packed.hidden.shape)
        close(batched.grads["hidden"][0], flat.grads["hidden"], 1e-12, "hidden")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_cu_seqlens_dtypes_and_empty_sequences(dtype: torch.dtype) -> None:
    """An empty sequence counts in B like a row that is masked altogether."""
    case = pack(make_case(vocab=61, ref=False, loss_type="grpo"))
    assert (case.tensors["cu_seqlens"].diff() == 0).any()
    case.tensors["cu_seqlens"] = case.tensors["cu_seqlens"].to(dtype)
    check(case)


def test_as_many_sequences_as_tokens() -> None:
    """[S] and [N] cannot be told apart when S == N: [S, 1] is one value per sequence."""
    case = pack(make_case(rows=2, width=2, vocab=13, mask="ones", ref=False))
    case.tensors["cu_seqlens"] = torch.tensor([0, 1, 1, 4, 4])
    case.advantages = torch.tensor([[1.0], [5.0], [-2.0], [7.0]]).double()
    case.options["loss_type"] = "bnpo"
    got = check(case)
    torch.testing.assert_close(ours(case.with_options(beta=0.0)).output.loss, got.output.loss)
    per_token = replace(case, tensors=case.tensors | {"cu_seqlens": torch.tensor([0, 1, 4])})
    same(got, ours(replace(per_token, advantages=torch.tensor([1.0, -2.0, -2.0, -2.0]).double())))


def test_advantages_and_corrections_per_sequence_and_per_token_agree() -> None:
    case = make_case(vocab=61, ref=False)
    shape = case.ids.shape
    case.tensors["importance_sampling_ratio"] = torch.linspace(0.2, 1.4, shape[0]).double()
    wide = replace(
        case,
        advantages=case.advantages[:, None].expand(shape),
        tensors=case.tensors
        | {
            "importance_sampling_ratio": case.tensors["importance_sampling_ratio"][:, None].expand(
                shape
            )
        },
    )
    same(ours(case), ours(wide))


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32]
)
def test_mask_dtypes(dtype: torch.dtype) -> None:
    case = make_case(vocab=61, ref=False)
    expected = ours(case)
    case.tensors["completion_mask"] = case.tensors["completion_mask"].to(dtype)
    assert torch.equal(ours(case).output.loss, expected.output.loss)


@pytest.mark.both_backends
def test_vectors_of_another_dtype() -> None:
    """Per-token vectors are taken in the loss's own dtype: bfloat16 and float64 ones work."""
    for dtype in (torch.bfloat16, torch.float64):
        case = make_case(vocab=61, dtype=torch.float32, beta=0.1)
        case.advantages = case.advantages.to(dtype)
        case.tensors["ref_per_token_logps"] = case.tensors["ref_per_token_logps"].to(dtype)
        check(case)


# Outputs


@pytest.mark.parametrize("backend", ["auto", "chunked", "reference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_output_fields(dtype: torch.dtype, backend: str) -> None:
    case = make_case(vocab=61, dtype=dtype, beta=0.1, entropy=True)
    out = ours(case, backend=backend).output
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert isinstance(out, GRPOLossOutput)
    assert out.loss.dtype == wide
    assert out.loss.dim() == 0
    assert out.loss.requires_grad
    for name in ("per_token_loss", "per_token_logps", "entropy"):
        field = getattr(out, name)
        assert field.shape == case.ids.shape, name
        assert field.dtype == wide, name
        assert not field.requires_grad, name
        assert not field[~case.mask].any(), name
    for name, value in out.metrics.items():
        assert value.dim() == 0, name
        assert not value.requires_grad, name
    assert int(out.metrics["num_tokens"]) == int(case.mask.sum())
    silent = ours(case.with_options(entropy=False), backend=backend).output
    assert silent.entropy is None
    assert "entropy" not in silent.metrics


def test_kl_metric_only_with_a_reference() -> None:
    case = make_case(vocab=61, ref=False)
    assert "kl" not in ours(case).output.metrics


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_reference_backend(reduction: str, dtype: torch.dtype) -> None:
    """backend="reference" is the same function: same outputs, metrics, gradients."""
    case = make_case(vocab=61, dtype=dtype, bias=True, beta=0.1, entropy_coef=0.1, softcap=4.0)
    check(case, backend="reference", reduction=reduction)


@pytest.mark.both_backends(triton_if=lambda p: p["dtype"] == torch.bfloat16)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
def test_same_call_same_bits(dtype: torch.dtype) -> None:
    """Nothing accumulates in an order that varies, with one thread or several."""
    for threads in (1, 2):
        torch.set_num_threads(threads)
        case = make_case(rows=8, width=40, vocab=521, dtype=dtype, beta=0.1, entropy_coef=0.1)
        first, second = ours(case, chunk_bytes=1 << 17), ours(case, chunk_bytes=1 << 17)
        assert torch.equal(first.output.loss, second.output.loss)
        for name, grad in first.grads.items():
            assert torch.equal(grad, second.grads[name]), name


def test_several_threads_agree_with_the_oracle() -> None:
    torch.set_num_threads(2)
    check(make_case(rows=8, width=64, vocab=1031, dim=64, dtype=torch.float32, beta=0.1))


def test_no_grad_computes_the_same_values() -> None:
    """Without gradients: same numbers, no graph, nothing left on the leaves."""
    case = make_case(vocab=61, beta=0.1, entropy=True)
    want = ours(case).output
    hidden, weight = (case.leaves()[k].requires_grad_() for k in ("hidden", "weight"))
    with torch.no_grad():
        got = grpo_loss(hidden, weight, case.ids, case.advantages, **case.tensors, **case.options)
    assert not got.loss.requires_grad
    assert hidden.grad is None
    assert torch.equal(got.loss, want.loss)
    assert torch.equal(got.per_token_logps, want.per_token_logps)
    assert torch.equal(got.entropy, want.entropy)
    for name in want.metrics.keys() - {"zero_coefficient_fraction"}:  # there is no backward to skip
        close(got.metrics[name], want.metrics[name], 1e-12, name)


@pytest.mark.both_backends
def test_loss_logps_are_those_of_the_op() -> None:
    """S20: bit-identical, so that the first optimizer step after sampling has ratio 1."""
    for dtype in (torch.float32, torch.bfloat16):
        case = make_case(vocab=129, dtype=dtype, ref=False, temperature=0.8)
        with torch.no_grad():
            out = linear_logprobs(case.hidden, case.weight, case.ids, temperature=0.8)
        assert torch.equal(out.logps, ours(case).output.per_token_logps)


@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("old", [True, False])
def test_entropy_scale_gives_the_bonus_weights_of_its_own(
    per_token: bool, level: str, old: bool
) -> None:
    """Loss and gradients are those without a bonus, less the bonus written out on full logits."""
    g = torch.Generator().manual_seed(8)
    hidden = torch.randn(3, 5, 7, generator=g, dtype=torch.float64).requires_grad_()
    weight = torch.randn(31, 7, generator=g, dtype=torch.float64).requires_grad_()
    ids = torch.randint(31, (3, 5), generator=g)
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0], [1] * 5]).bool()
    advantages = torch.tensor([1.0, -0.5, 0.3], dtype=torch.float64)
    weights = torch.rand(3, 5, generator=g, dtype=torch.float64) + 0.1
    shape = (3, 5) if per_token else (3,)
    scale = torch.rand(shape, generator=g, dtype=torch.float64)
    options = {
        "completion_mask": mask,
        "token_weights": weights,
        "importance_sampling_level": level,
        "loss_type": "grpo",
    }
    if old:
        options["old_per_token_logps"] = torch.full((3, 5), -3.0, dtype=torch.float64)

    def outcome(loss: torch.Tensor) -> list[torch.Tensor]:
        return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]

    got = outcome(
        grpo_loss(
            hidden, weight, ids, advantages, entropy_coef=0.2, entropy_scale=scale, **options
        ).loss
    )
    plain = outcome(grpo_loss(hidden, weight, ids, advantages, **options).loss)
    p = (hidden @ weight.T).softmax(-1)
    entropy = -(p * p.log()).sum(-1)
    full = scale if per_token else scale[:, None]
    bonus = outcome((0.2 * weights * full * entropy)[mask].sum())
    for x, y, z in zip(got, plain, bonus, strict=True):
        torch.testing.assert_close(x, y - z, rtol=1e-10, atol=1e-12)
        assert z.abs().max() > 1e-3
