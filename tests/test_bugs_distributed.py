"""Faults of others with wrapped and sharded weights (docs/bug-list.md), as one process shows them.

What needs several is in `ranks_*.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_models import build
from torch import Tensor, nn

from fused_grpo import grpo_loss, linear_logprobs
from fused_grpo.integrations.models import add_head_forward

H, V = 12, 37


def by_hand(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    logp = (hidden.double() @ weight.double().T).log_softmax(-1)
    return logp.gather(-1, ids[..., None])[..., 0]


def test_hooks_of_the_heads_module_do_not_fire_and_those_of_the_model_do() -> None:
    """D7: reading a head's weight without calling the head broke gathers that hang on its forward
    hooks. That is how it is here too, and documented: the head's module is not called, the model's
    forward and the gradient hooks of the parameter are, and the gradient is right."""
    model = build("LlamaForCausalLM", tie_word_embeddings=False)
    add_head_forward(model)
    fired: list[str] = []
    model.lm_head.register_forward_hook(lambda *_: fired.append("head"))
    model.register_forward_hook(lambda *_: fired.append("model"))
    weight = model.lm_head.weight
    weight.register_post_accumulate_grad_hook(lambda _: fired.append("gradient"))
    ids = torch.tensor([[3, 4, 5, 6]])

    def loss(hidden: Tensor, head: Any) -> Tensor:
        return grpo_loss(
            hidden[:, :-1], head.weight, ids[:, 1:], torch.ones(1), **head.arguments(hidden)
        ).loss

    model(input_ids=ids, head_fn=loss).backward()
    assert fired == ["model", "gradient"]
    got = weight.grad.clone()
    weight.grad = None
    logits = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    logits.gather(-1, ids[:, 1:, None]).mean().neg().backward()
    assert fired == ["model", "gradient", "head", "model", "gradient"]
    torch.testing.assert_close(got, weight.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.both_backends
@pytest.mark.parametrize("kind", ["flat", "split"])
def test_a_weight_that_is_a_view_trains_its_base_and_stays_as_it_is(kind: str) -> None:
    """D6: with FSDP's flat parameter, of which the head's weight is a view, 'a view was modified in
    place'. A view of a flat parameter and a part of a split: the base's gradient is that of fp64,
    zero outside of the view, and nothing that was given is written to."""
    flat = torch.randn(5 + V * H + 7)
    hidden, ids, a = torch.randn(2, 4, H), torch.randint(V, (2, 4)), torch.tensor([1.0, -0.5])

    def view(base: Tensor) -> Tensor:
        if kind == "flat":
            return base[5 : 5 + V * H].view(V, H)
        return base.split([5, V * H, 7])[1].view(V, H)

    exact = flat.double().requires_grad_()
    (-a.double()[:, None] * by_hand(hidden, view(exact), ids)).mean().backward()
    before = flat.clone(), hidden.clone()
    base, states = nn.Parameter(flat), hidden.requires_grad_()
    grpo_loss(states, view(base), ids, a).loss.backward()
    torch.testing.assert_close(base.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)
    assert not base.grad[:5].any()
    assert not base.grad[-7:].any()
    assert torch.equal(base.detach(), before[0])
    assert torch.equal(states.detach(), before[1])


@pytest.mark.parametrize("call", ["loss", "logprobs"])
@pytest.mark.parametrize(
    ("shape", "word"), [((0,), "ZeRO-3"), ((V * H,), "FSDP"), ((0, H), "weight")]
)
def test_a_weight_that_is_not_there_says_who_has_it(
    call: str, shape: tuple[int, ...], word: str
) -> None:
    """D2, D5: 'size of tensor a (0) must match b (4096)' and 'vec(65667072)' came from partitioned
    and flattened weights. The error names the argument, its shape and what has cut it."""
    hidden, weight, ids = torch.randn(1, 3, H), torch.zeros(*shape), torch.zeros(1, 3).long()
    function, rest = (grpo_loss, [torch.ones(1)]) if call == "loss" else (linear_logprobs, [])
    with pytest.raises(ValueError, match="weight") as raised:
        function(hidden, weight, ids, *rest)
    assert word in str(raised.value)
