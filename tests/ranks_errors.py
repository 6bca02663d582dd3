"""Bad arguments with a group: they raise on every rank, and none is left waiting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Case, make_case
from ranks import bounds, case, everyone, rank, time_part, vocab_part, world

from fused_grpo import grpo_loss, linear_logprobs, policy_loss
from fused_grpo.distributed import union_token_weights


def call(mine: Case, **how: Any) -> Any:
    leaves = {k: v.requires_grad_() for k, v in mine.leaves().items()}
    return grpo_loss(
        leaves["hidden"],
        leaves["weight"],
        mine.ids,
        mine.advantages,
        bias=leaves.get("bias"),
        **mine.tensors,
        **(mine.options | how),
    )


def part_of(full: Case) -> Case:
    cuts = [0, 50, 129] if world() == 2 else [0, 50, 60, 70, 129]
    return vocab_part(full, bounds(cuts))


def plain(**options: Any) -> Case:
    return make_case(mask="ragged", ref=False, **options)


def last(changed: Case, mine: Case) -> Case:
    """What only the last rank is given."""
    return changed if rank() == world() - 1 else mine


def other_id(mine: Case) -> Case:
    ids = mine.ids.clone()
    ids[0, 0] = (ids[0, 0] + 1) % 129
    return replace(mine, ids=ids)


def other_old(mine: Case) -> Case:
    old = mine.tensors["old_per_token_logps"].clone()
    old[0, 0] += 1e-12
    return replace(mine, tensors=mine.tensors | {"old_per_token_logps": old})


# what the last rank is given -> what all are told
WRONG: dict[str, tuple[Callable[[Case], Case], str]] = {
    "width": (lambda c: replace(c, weight=c.weight[:, :-1]), r"the width of weight.*\[24"),
    "flat": (lambda c: replace(c, weight=c.weight.reshape(-1)), "the width of weight"),
    "no_rows": (lambda c: replace(c, weight=c.weight[:0]), r"at least one row"),
    "dtype": (lambda c: replace(c, weight=c.weight.float()), "the dtype of weight"),
    "bias": (lambda c: replace(c, bias=c.weight[:, 0]), "whether there is a bias"),
    "tokens": (lambda c: time_part(c, slice(0, 5)), "the shape and dtype of hidden"),
    "id": (other_id, "completion_ids is not the same"),
    "old": (other_old, "old_per_token_logps is not the same"),
    "advantages": (lambda c: replace(c, advantages=-c.advantages), "advantages is not the same"),
    "option": (lambda c: c.with_options(softcap=3.0), "softcap is not the same"),
    "more": (lambda c: c.with_options(delta=2.0), "not given the same arguments"),
}


def one_wrong(change: Callable[[Case], Case], told: str) -> None:
    mine = part_of(plain())
    with pytest.raises(ValueError, match=told):
        call(last(change(mine), mine), process_group=everyone())


for name, (change, told) in WRONG.items():
    worlds = [2, 4] if name in ("width", "no_rows", "id") else [2]
    case(one_wrong, worlds=worlds, of=name, change=change, told=told)


def not_a_tensor() -> None:
    mine = part_of(plain())
    weight: Any = "lm_head" if rank() == 0 else mine.weight
    with pytest.raises(ValueError, match="the width of weight"):
        linear_logprobs(mine.hidden, weight, mine.ids, process_group=everyone())


def masked_ids_may_differ() -> None:
    mine = part_of(plain())
    mine.ids[~mine.mask] = rank()
    call(mine, process_group=everyone()).loss.backward()


def out_of_range() -> None:
    mine = part_of(plain())
    mine.ids[0, 0] = 129
    with pytest.raises(ValueError, match=r"completion_ids holds 129.*\[0, 129\)"):
        call(mine, process_group=everyone())
    with pytest.raises(ValueError, match=r"targets holds 129.*\[0, 129\)"):
        linear_logprobs(mine.hidden, mine.weight, mine.ids, process_group=everyone())


# options that go with no shared vocabulary -> what is said
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "support": ({"support_top_k": 5}, "support_top_k does not go with process_group"),
    "reference": ({"backend": "reference"}, "backend='reference' does not know"),
    "triton": ({"backend": "triton"}, 'backend="triton"'),
    "routed_triton": ({"backend": "triton", "backward": "routed"}, 'backend="triton"'),
}


def refused(options: dict[str, Any], told: str) -> None:
    mine = part_of(plain())
    with pytest.raises(ValueError, match=told):
        call(mine, process_group=everyone(), **options)
    with pytest.raises(ValueError, match=told):
        linear_logprobs(mine.hidden, mine.weight, mine.ids, process_group=everyone(), **options)


for name, (options, told) in REFUSED.items():
    case(refused, worlds=[2], of=name, options=options, told=told)


def reference_head() -> None:
    mine = part_of(plain())
    given = {"ref_hidden": mine.hidden, "ref_weight": mine.weight, "beta": 0.1}
    with pytest.raises(ValueError, match=r"ref_hidden does not go.*linear_logprobs"):
        call(mine, process_group=everyone(), **given)


def under_the_compiler() -> None:
    mine = part_of(plain())
    is_compiling = torch.compiler.is_compiling
    torch.compiler.is_compiling = lambda: True
    try:
        for name in ("process_group", "sequence_group"):
            with pytest.raises(ValueError, match=f"{name} is given.*torch.compile"):
                call(mine, **{name: everyone()})
        with pytest.raises(ValueError, match=r"process_group is given.*torch.compile"):
            linear_logprobs(mine.hidden, mine.weight, mine.ids, process_group=everyone())
    finally:
        torch.compiler.is_compiling = is_compiling


def not_in_the_group() -> None:
    """Only members take part; the others are told so, and the members do not wait for them."""
    group = dist.new_group([0, 1])
    full = plain()
    mine = vocab_part(full, bounds([0, 50, 129], min(rank(), 1)))
    if rank() < 2:
        call(mine, process_group=group).loss.backward()
        return
    for name in ("process_group", "sequence_group"):
        with pytest.raises(TypeError, match=f"{name} must be a torch.distributed.ProcessGroup"):
            call(mine, **{name: group})


def not_a_group() -> None:
    mine = plain()
    for name in ("process_group", "sequence_group"):
        with pytest.raises(TypeError, match=f"{name} must be a torch.distributed.ProcessGroup"):
            call(mine, **{name: "tp"})
    with pytest.raises(TypeError, match="sequence_group must be"):
        union_token_weights(mine.mask, sequence_group=3)  # type: ignore[arg-type]


# what the last rank is given -> what all ranks of a sequence_group are told
WRONG_PARTS: dict[str, tuple[Callable[[Case], Case], str]] = {
    "sequences": (
        lambda c: make_case(rows=5, mask="ragged", ref=False, loss_type="dapo"),
        r"the number of sequences is \[6.*5\]",
    ),
    "option": (lambda c: c.with_options(epsilon_low=0.1), "not given the same arguments"),
    "value": (lambda c: c.with_options(loss_type="gspo"), "loss_type is not the same"),
    "tensor": (lambda c: replace(c, tensors={}), "old_per_token_logps is not the same"),
    "advantages": (lambda c: replace(c, advantages=-c.advantages), "advantages is not the same"),
}


def one_wrong_part(change: Callable[[Case], Case], told: str) -> None:
    mine = plain(loss_type="dapo")
    with pytest.raises(ValueError, match=told):
        call(last(change(mine), mine), sequence_group=everyone())


for name, (change, told) in WRONG_PARTS.items():
    case(one_wrong_part, worlds=[2], of=name, change=change, told=told)


def not_over_ranks() -> None:
    """What looks at all tokens of a call, not at sequences."""
    mine = plain()
    for options in (
        {"loss_type": "clip_cov", "cov_ratio": 0.5, "cov_low": 0.1, "cov_high": 2.0},
        {"loss_type": "kl_cov", "cov_ratio": 0.5},
        {"top_entropy_quantile": 0.2},
    ):
        with pytest.raises(ValueError, match="looks at all tokens of a call"):
            call(mine, sequence_group=everyone(), **options)
    with pytest.raises(ValueError, match="looks at all tokens of a call"):
        policy_loss(
            mine.tensors["old_per_token_logps"],
            mine.advantages,
            old_per_token_logps=mine.tensors["old_per_token_logps"],
            sequence_group=everyone(),
            loss_type="kl_cov",
            cov_ratio=0.5,
        )
    for backend in ("reference", "triton"):
        with pytest.raises(ValueError, match=f"backend=.{backend}"):
            call(mine, sequence_group=everyone(), backend=backend)


for function in (not_a_tensor, masked_ids_may_differ, out_of_range, not_over_ranks):
    case(function)
for function in (reference_head, under_the_compiler, not_a_group):
    case(function, worlds=[2])
case(not_in_the_group, worlds=[4])
