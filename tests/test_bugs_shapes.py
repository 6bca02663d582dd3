"""Faults of others in shapes, masks, labels and indexing (docs/bug-list.md)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fused_grpo import grpo_loss, linear_logprobs

H, V = 12, 37


def by_hand(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    logp = (hidden.double() @ weight.double().T).log_softmax(-1)
    return logp.gather(-1, ids[..., None])[..., 0]


@pytest.mark.both_backends
@pytest.mark.parametrize("unreduced", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_what_lies_below_the_head_trains_through_a_view(rows: int, unreduced: bool) -> None:
    """S1, I13: everything below lm_head trained with a gradient of zero, since an operator copied a
    view that is not contiguous with gradients off and then asked the copy. Hidden states made by a
    layer as [T, B, H] and given as [B, T, H]: that layer's gradients are those of fp64."""
    below, x = torch.randn(H, 8), torch.randn(7, rows + 1, 8)
    weight, ids, a = torch.randn(V, H), torch.randint(V, (rows, 7)), torch.randn(rows, 7)
    exact = below.double().requires_grad_()
    states = (x.double() @ exact.T).transpose(0, 1)[:rows]
    # advantages a at ratio 1: the gradient is that of -mean(a logp)
    (-a.double() * by_hand(states, weight, ids) / a.numel()).sum().backward()
    below.requires_grad_()
    hidden = (x @ below.T).transpose(0, 1)[:rows]
    assert not hidden.is_contiguous()
    if unreduced:
        out = linear_logprobs(hidden, weight, ids)
        (-a / a.numel() * out.logps).sum().backward()
    else:
        grpo_loss(hidden, weight, ids, a).loss.backward()
    torch.testing.assert_close(below.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)
    assert exact.grad.norm() > 0.1


@pytest.mark.parametrize("masked", [-100, -1, V, 2**40, -(2**40)])
@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_masked_labels_of_any_value_are_inert(kind: str, masked: int) -> None:
    """S8: a label outside the vocabulary gave logp = -logsumexp and a gradient without its one-hot.
    Where masked, any label leaves the loss of the others: their mean, by hand, and no gradient."""
    hidden, weight = torch.randn(2, 4, H).double(), torch.randn(V, H).double()
    ids, mask = torch.randint(V, (2, 4)), torch.tensor([[1, 0, 0, 1], [0, 1, 1, 1]])
    want = by_hand(hidden, weight, ids)[mask.bool()]
    hidden.requires_grad_()
    given = ids.masked_fill(mask == 0, masked)
    args: dict[str, Any] = {"completion_mask": mask}
    if kind == "packed":
        args = {"completion_mask": mask.view(-1), "cu_seqlens": torch.tensor([0, 4, 8])}
        out = grpo_loss(hidden.view(8, H), weight, given.view(8), torch.ones(2), **args)
    else:
        out = grpo_loss(hidden, weight, given, torch.ones(2), **args)
    out.loss.backward()
    torch.testing.assert_close(out.per_token_logps.view(2, 4)[mask.bool()], want)
    assert float(out.loss.detach()) == pytest.approx(-1.0)
    assert not hidden.grad[mask == 0].any()


@pytest.mark.both_backends
def test_dense_and_packed_tokens_have_the_same_numbers() -> None:
    """S15: packed inputs crashed or gave other per-token numbers than dense ones. [B, T, H],
    [1, N, H] and [N, H] of the same tokens: the same log-probabilities and entropies, bit for bit,
    and those of fp64."""
    hidden, weight, ids = torch.randn(2, 5, H), torch.randn(V, H), torch.randint(V, (2, 5))
    shapes = ((2, 5), (1, 10), (10,))
    outs = [
        linear_logprobs(hidden.reshape(*s, H), weight, ids.reshape(s), entropy=True) for s in shapes
    ]
    for out, shape in zip(outs, shapes, strict=True):
        assert out.logps.shape == out.entropy.shape == shape
        assert torch.equal(out.logps.view(-1), outs[0].logps.view(-1))
        assert torch.equal(out.entropy.view(-1), outs[0].entropy.view(-1))
    torch.testing.assert_close(
        outs[0].logps.double(), by_hand(hidden, weight, ids), rtol=1e-5, atol=1e-5
    )


@pytest.mark.both_backends
def test_a_square_head_is_vocabulary_by_hidden() -> None:
    """S17: logits were taken for hidden states where H == V. A square weight is [V, H], never its
    transpose, and what comes in is multiplied by it: nothing is guessed."""
    hidden, weight, ids = torch.randn(4, H), torch.randn(H, H), torch.tensor([0, 3, 7, 11])
    got = linear_logprobs(hidden, weight, ids).logps.double()
    torch.testing.assert_close(got, by_hand(hidden, weight, ids), rtol=1e-5, atol=1e-5)
    assert (got - by_hand(hidden, weight.T, ids)).abs().min() > 1e-2
    assert (got - hidden.double().log_softmax(-1).gather(1, ids[:, None])[:, 0]).abs().min() > 1e-2


@pytest.mark.both_backends
@pytest.mark.parametrize("rows", [1, 5, 7])
def test_batches_that_are_no_multiple_of_a_group(rows: int) -> None:
    """S13: losses crashed, or broadcast a mask of 25 over 24 log-probabilities, where the batch was
    no multiple of the group. Rows are independent: any number gives the mean over its tokens."""
    hidden, weight = torch.randn(rows, 4, H), torch.randn(V, H)
    ids, advantages = torch.randint(V, (rows, 4)), torch.randn(rows)
    mask = torch.ones(rows, 4, dtype=torch.long)
    mask[0, 2:] = 0
    old = by_hand(hidden, weight, ids).float() - 0.1
    out = grpo_loss(hidden, weight, ids, advantages, completion_mask=mask, old_per_token_logps=old)
    per_token = -(advantages.double() * torch.tensor(0.1).double().exp())[:, None] * mask
    assert float(out.loss) == pytest.approx(float(per_token.sum() / mask.sum()), rel=1e-4)
    for width in (3, 5):
        with pytest.raises(ValueError, match="completion_mask") as raised:
            grpo_loss(hidden, weight, ids, advantages, completion_mask=torch.ones(rows, width))
        assert f"[{rows}, {width}]" in str(raised.value)
        assert f"[{rows}, 4]" in str(raised.value)


@pytest.mark.both_backends
@pytest.mark.parametrize("last", [1, 2, 5])
def test_only_the_last_tokens_of_many_count(last: int) -> None:
    """S18: with labels in the last turn only, a fused loss looked fine and its gradients were zero.
    300 tokens, several chunks of masked ones before those that count: gradients of -mean logp."""
    hidden, weight = torch.randn(2, 300, H), torch.randn(V, H)
    ids, mask = torch.randint(V, (2, 300)), torch.zeros(2, 300)
    mask[:, -last:] = 1
    exact = [x.double().requires_grad_() for x in (hidden, weight)]
    by_hand(*exact, ids)[mask.bool()].mean().neg().backward()
    leaves = [x.requires_grad_() for x in (hidden, weight)]
    ids = ids.masked_fill(mask == 0, -100)
    grpo_loss(
        *leaves, ids, torch.ones(2), completion_mask=mask, chunk_bytes=1 << 13
    ).loss.backward()
    for got, want in zip(leaves, exact, strict=True):
        torch.testing.assert_close(got.grad.double(), want.grad, rtol=1e-4, atol=1e-6)
        assert want.grad.abs().max() > 1e-2
