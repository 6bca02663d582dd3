"""Sequences whose tokens lie on several ranks: sums of the ranks' losses and gradients against the
independent formulas on full logits in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from cases import Case
from objective_cases import CORRECTIONS, OBJECTIVES, REDUCTIONS, from_head, leaves_of, make
from oracle import TOLERANCE, assert_gradient, close, upstream
from ranks import (
    bounds,
    case,
    counted_collectives,
    everyone,
    of_all,
    rank,
    summed,
    time_part,
    vocab_part,
    world,
)

from fused_grpo import grpo_loss, policy_loss
from fused_grpo.objectives import LOSS_TYPES

# with four ranks one has no token at all, and one a single position
CUTS = {2: [0, 4, 11], 4: [0, 3, 3, 10, 11]}
SMALL = 1 << 13


def packed_part(full: Case, part: slice) -> Case:
    """The positions of the part, sequence after sequence, with a bound for each of them."""
    cut = time_part(full, part)
    rows, width = cut.ids.shape
    shape = (rows, width)
    tensors = {k: v.reshape(-1) if v.shape[:2] == shape else v for k, v in cut.tensors.items()}
    tensors["cu_seqlens"] = torch.arange(rows + 1) * width
    return replace(cut, hidden=cut.hidden.flatten(0, 1), ids=cut.ids.reshape(-1), tensors=tensors)


def check(full: Case, packed: bool = False, **how: Any) -> None:
    part = bounds(CUTS[world()])
    want_loss, want = from_head(full)
    mine = packed_part(full, part) if packed else time_part(full, part)
    leaves = {k: v.requires_grad_() for k, v in mine.leaves().items()}
    how.setdefault("chunk_bytes", SMALL)
    out = grpo_loss(
        leaves["hidden"],
        leaves["weight"],
        mine.ids,
        mine.advantages,
        bias=leaves["bias"],
        sequence_group=everyone(),
        **mine.tensors,
        **mine.options,
        **how,
    )
    out.loss.backward()
    tol = TOLERANCE[full.hidden.dtype]
    close(summed(out.loss), want_loss, tol.loss, "loss")
    expected = want["hidden"]
    gradient = leaves["hidden"].grad
    assert gradient is not None
    error = gradient.view_as(expected[:, part]).double() - expected[:, part]
    assert error.norm() <= tol.grads * expected.norm(), f"hidden: {error.norm():.1e}"
    for name in ("weight", "bias"):
        gradient = leaves[name].grad
        assert gradient is not None
        assert_gradient(name, summed(gradient), want[name], full.hidden.dtype, tol.grads)


def objectives(objective: dict[str, Any], **more: Any) -> None:
    check(make(objective, {}, {}, **more))


for name in ("gspo", "rloo", "vespo_shapes", "gmpo"):
    case(objectives, worlds=[4], of=f"sp-{name}-of_four", objective=OBJECTIVES[name], beta=0.1)
    case(
        objectives, worlds=[4], of=f"sp-{name}-fresh_of_four", objective=OBJECTIVES[name], old=False
    )
NOT_OVER_RANKS = [name for name, row in LOSS_TYPES.items() if row.locality == "batch"]
for name, objective in OBJECTIVES.items():
    if objective.get("loss_type") not in NOT_OVER_RANKS:
        case(objectives, worlds=[2], of=f"sp-{name}", objective=objective, beta=0.1)
        case(objectives, worlds=[2], of=f"sp-{name}-fresh", objective=objective, old=False)


def reductions(objective: dict[str, Any], reduction: dict[str, Any]) -> None:
    """D8, S14: Tokens of a sequence on several ranks: the divisors are of all of them."""
    check(make(objective, reduction, {}))


SEQUENCE = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
for name, reduction in REDUCTIONS.items():
    case(reductions, worlds=[2], of=f"sp-{name}-token", objective={}, reduction=reduction)
    case(reductions, worlds=[4], of=f"sp-{name}-sequence", objective=SEQUENCE, reduction=reduction)


def corrections(objective: dict[str, Any], correction: dict[str, Any], old: bool) -> None:
    check(make(objective, {}, correction, old=old))


for name, correction in CORRECTIONS.items():
    for old, world_size in ((True, 4), (False, 2)):
        case(
            corrections,
            worlds=[world_size],
            of=f"sp-{name}{'' if old else '-without_old'}",
            objective=SEQUENCE,
            correction=correction,
            old=old,
        )


def options_over_sequences(options: dict[str, Any], how: dict[str, Any]) -> None:
    options = dict(options)
    check(make(options, {}, {}, dtype=options.pop("dtype", torch.float64)), **how)


ON_TOP: dict[str, dict[str, Any]] = {
    "off_policy_mask": {"off_policy_mask_threshold": 0.05},
    "corrected_kl": SEQUENCE | {"beta": 0.1, "use_bias_correction_kl": True},
    "positives": SEQUENCE | {"positive_nll_coef": 0.1},
    "entropy": SEQUENCE | {"entropy_coef": 0.05},
    "float32": SEQUENCE | {"dtype": torch.float32, "entropy_coef": 0.05, "beta": 0.1},
}
for name, options in ON_TOP.items():
    case(options_over_sequences, of=f"sp-{name}", options=options, how={})
case(options_over_sequences, of="sp-packed", options=SEQUENCE, how={"packed": True})
case(options_over_sequences, of="sp-one_chunk", options=SEQUENCE, how={"chunk_bytes": 1 << 24})


def unreduced() -> None:
    """reduction="none": a sequence's ratio carries gradients from every rank's upstream."""
    full = make(SEQUENCE, {}, {})
    part = bounds(CUTS[world()])
    weights = upstream(full)
    # w_t is what formulas multiply by; the reduction is the same for both
    full.tensors["token_weights"] = weights
    want_loss, want = from_head(full)
    mine = time_part(full, part)
    del mine.tensors["token_weights"]
    leaves = {k: v.requires_grad_() for k, v in mine.leaves().items()}
    out = grpo_loss(
        leaves["hidden"],
        leaves["weight"],
        mine.ids,
        mine.advantages,
        bias=leaves["bias"],
        sequence_group=everyone(),
        reduction="none",
        **mine.tensors,
        **mine.options,
    )
    loss = (out.loss * weights[:, part]).sum()
    loss.backward()
    close(summed(loss), want_loss, 1e-11, "loss")
    gradient = leaves["weight"].grad
    assert gradient is not None
    assert_gradient("weight", summed(gradient), want["weight"], torch.float64, 1e-9)


def of_logprobs() -> None:
    """`policy_loss`: the gradient of every rank's log-probabilities."""
    full = make(OBJECTIVES["gspo"], {}, CORRECTIONS["sequence_mask"])
    part = bounds(CUTS[world()])
    logps, _ = leaves_of(full)
    whole = policy_loss(logps, full.advantages, **full.tensors, **full.options)
    whole.loss.backward()
    mine = time_part(full, part)
    local = logps.detach()[:, part].clone().requires_grad_()
    out = policy_loss(
        local, mine.advantages, sequence_group=everyone(), **mine.tensors, **mine.options
    )
    out.loss.backward()
    close(summed(out.loss), whole.loss, 1e-12, "loss")
    assert local.grad is not None
    assert logps.grad is not None
    torch.testing.assert_close(local.grad, logps.grad[:, part], rtol=1e-10, atol=1e-13)


def no_gradients() -> None:
    full = make(SEQUENCE, {}, {})
    mine = time_part(full, bounds(CUTS[world()]))
    with torch.no_grad():
        out = grpo_loss(
            mine.hidden,
            mine.weight,
            mine.ids,
            mine.advantages,
            bias=mine.bias,
            sequence_group=everyone(),
            **mine.tensors,
            **mine.options,
        )
    close(summed(out.loss), from_head(full)[0], 1e-11, "loss")


def number_of_collectives() -> None:
    """D3, D8: The same on every rank, whatever tokens and chunks it has."""
    full = make(SEQUENCE | {"beta": 0.1}, {}, CORRECTIONS["sequence_mask"])
    with counted_collectives() as called:
        check(full)
    assert len(called) > 6
    assert len({tuple(c) for c in of_all(called)}) == 1


def both_groups() -> None:
    """Two ranks share the vocabulary, two the tokens."""
    groups: dict[str, dist.ProcessGroup] = {}
    for name, lists in (("vocab", ([0, 1], [2, 3])), ("time", ([0, 2], [1, 3]))):
        for members in lists:
            group = dist.new_group(members)
            if rank() in members:
                groups[name] = group
    full = make(SEQUENCE | {"entropy_coef": 0.05, "beta": 0.1}, {}, {})
    want_loss, want = from_head(full)
    rows, part = bounds([0, 50, 61], rank() % 2), bounds([0, 3, 11], rank() // 2)
    mine = vocab_part(time_part(full, part), rows)
    leaves = {k: v.requires_grad_() for k, v in mine.leaves().items()}
    out = grpo_loss(
        leaves["hidden"],
        leaves["weight"],
        mine.ids,
        mine.advantages,
        bias=leaves["bias"],
        process_group=groups["vocab"],
        sequence_group=groups["time"],
        chunk_bytes=SMALL,
        **mine.tensors,
        **mine.options,
    )
    out.loss.backward()
    close(summed(out.loss, groups["time"]), want_loss, 1e-11, "loss")
    for name in ("weight", "bias"):
        gradient = leaves[name].grad
        assert gradient is not None
        error = summed(gradient, groups["time"]) - want[name][rows]
        assert error.norm() <= 1e-9 * want[name].norm(), name
    assert leaves["hidden"].grad is not None
    error = leaves["hidden"].grad - want["hidden"][:, part]
    assert error.norm() <= 1e-9 * want["hidden"].norm()


for function in (unreduced, of_logprobs, no_gradients):
    case(function, of="sp")
case(number_of_collectives, of="sp")
case(both_groups, worlds=[4])
