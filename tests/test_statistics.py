"""The optional outputs of `linear_logprobs`, against full logits in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fused_grpo import linear_logprobs
from fused_grpo.statistics import STATISTICS

VOCAB, WIDTH = 203, 12


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(3, 7, WIDTH, generator=g, dtype=torch.float64)
    weight = torch.randn(VOCAB, WIDTH, generator=g, dtype=torch.float64)
    bias = torch.randn(VOCAB, generator=g, dtype=torch.float64)
    targets = torch.randint(VOCAB, (3, 7), generator=g)
    targets[0, :5] = (hidden[0, :5] @ weight.T + bias).argmax(-1)  # the likeliest ones, if uncapped
    targets[1, 2:5] = -100
    return hidden.to(dtype), weight.to(dtype), bias.to(dtype), targets


def expected(
    hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, options: dict[str, Any]
) -> dict[str, Tensor]:
    z = (hidden.double() @ weight.double().T + bias.double()) * options.get("logit_scale", 1.0)
    if "softcap" in options:
        z = options["softcap"] * torch.tanh(z / options["softcap"])
    z = z / options.get("temperature", 1.0)
    p = z.softmax(-1)
    found = {
        "lse": z.exp().sum(-1).log(),
        "log_sum_sq_probs": p.square().sum(-1).log(),
        "mean_logits": z.mean(-1),
        "is_top1": z.gather(-1, targets.clamp(min=0)[..., None])[..., 0] == z.amax(-1),
    }
    return {name: torch.where(targets == -100, 0, x) for name, x in found.items()}


@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize("chunk_bytes", [None, 60_000])
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7, "logit_scale": 1.3}, {"softcap": 2.0, "temperature": 0.5}]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_outputs_are_those_of_the_full_logits(
    backend: str, chunk_bytes: int | None, options: dict[str, Any], dtype: torch.dtype
) -> None:
    hidden, weight, bias, targets = inputs(dtype)
    options = {"bias": bias, **options}
    out = linear_logprobs(
        hidden,
        weight,
        targets,
        outputs=STATISTICS,
        backend=backend,
        chunk_bytes=chunk_bytes,
        **options,
    )
    options.pop("bias")
    bound = 1e-12 if dtype == torch.float64 else 1e-5  # fp32 logits of size 10
    for name, value in expected(hidden, weight, bias, targets, options).items():
        got = getattr(out, name)
        if name == "is_top1":
            assert got.dtype == torch.bool
            assert torch.equal(got, value.bool())
            assert 3 <= got.sum() < got.numel() - 3
        else:
            assert (got - value).abs().max() < bound * value.abs().max()
        assert not got.requires_grad


def test_outputs_see_an_adapter_on_the_head() -> None:
    hidden, weight, bias, targets = inputs()
    u, b = torch.randn(3, 7, 4, dtype=torch.float64), torch.randn(VOCAB, 4, dtype=torch.float64)
    got = linear_logprobs(
        hidden, weight, targets, bias=bias, outputs=STATISTICS, lora_hidden=u, lora_weight=b
    )
    joined = torch.cat([hidden, u], -1), torch.cat([weight, b], -1)
    for name, value in expected(*joined, bias, targets, {}).items():
        torch.testing.assert_close(getattr(got, name).double(), value.double())


def test_only_what_is_asked_for_comes_out() -> None:
    hidden, weight, _, targets = inputs()
    out = linear_logprobs(hidden, weight, targets, outputs=("mean_logits",))
    assert out.mean_logits is not None
    assert (out.lse, out.log_sum_sq_probs, out.is_top1, out.entropy) == (None,) * 4
    assert linear_logprobs(hidden, weight, targets).lse is None


@pytest.mark.parametrize("options", [{}, {"backward": "routed", "route_tau": 1e-9}])
@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_are_those_without_outputs(options: dict[str, Any], frozen: bool) -> None:
    hidden, weight, _, targets = inputs()
    hidden.requires_grad_()
    weight.requires_grad_(not frozen)
    leaves = [hidden] if frozen else [hidden, weight]
    g = torch.Generator().manual_seed(4)
    g_logps, g_entropy = (torch.randn(3, 7, generator=g, dtype=torch.float64) for _ in range(2))

    def gradients(**more: Any) -> list[Tensor]:
        out = linear_logprobs(hidden, weight, targets, entropy=not frozen, **options, **more)
        total = (out.logps * g_logps).sum()
        if out.entropy is not None:
            total = total + (out.entropy * g_entropy).sum()
        return list(torch.autograd.grad(total, leaves))

    for with_outputs, without in zip(gradients(outputs=STATISTICS), gradients(), strict=True):
        assert torch.equal(with_outputs, without)


def test_the_first_of_equal_entries_is_the_likeliest() -> None:
    hidden, weight = torch.ones(3, 2), torch.ones(90, 2)
    out = linear_logprobs(hidden, weight, torch.tensor([0, 1, 89]), outputs=("is_top1",))
    assert out.is_top1 is not None
    assert out.is_top1.tolist() == [True, False, False]


def test_extreme_logits() -> None:
    hidden = torch.eye(2).expand(4, 2, 2)[:, 0] * 1e4
    weight = torch.stack([torch.linspace(-1, 1, 33), torch.zeros(33)], 1)
    out = linear_logprobs(hidden, weight, torch.tensor([32, 0, 31, 1]), outputs=STATISTICS)
    assert out.lse is not None
    assert out.log_sum_sq_probs is not None
    assert torch.equal(out.lse, torch.full((4,), 1e4))
    assert torch.equal(out.log_sum_sq_probs, torch.zeros(4))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"outputs": ("lse", "lsse")}, ValueError, "outputs has lsse; there are lse, log_sum"),
        ({"outputs": "lse"}, TypeError, "outputs must be a tuple of names, not 'lse'"),
        ({"outputs": ("lse",), "support_top_k": 3}, ValueError, "not known with support_top_k"),
        ({"outputs": ("lse",), "backend": "triton"}, ValueError, "it has no outputs"),
    ],
)
def test_what_cannot_be_honoured_raises(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    hidden, weight, _, targets = inputs(torch.float32)
    with pytest.raises(error, match=message):
        linear_logprobs(hidden, weight, targets, **options)
