"""Routed gradients of a shared vocabulary: every rank's dh, and dW and db of its own rows, against
float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from ranks import (
    bounds,
    case,
    counted_collectives,
    everyone,
    of_all,
    rank,
    same_bits,
    summed,
    world,
)
from test_routed import TAU, VOCAB, WIDTH, exact_gradients, leaves, routed_gradients, tile
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from fused_grpo import grpo_loss, linear_logprobs, policy_loss, routed

CUTS = {2: [0, 1000, VOCAB], 4: [0, 1, 2500, 2540, VOCAB]}
SMALL = 700_000  # bytes of a chunk: 16 tokens


def mine(x: Any, name: str = "weight") -> Any:
    """This rank's rows of what has a row, or an entry, for each of the vocabulary."""
    return x[bounds(CUTS[world()])] if name in ("weight", "bias") else x


def part_of(call: dict[str, Any]) -> dict[str, Any]:
    return {name: mine(x, name) for name, x in call.items()}


def on_ranks(
    call: dict[str, Any], g: Tensor, e: Tensor | None, **options: Any
) -> dict[str, Tensor]:
    """`routed_gradients` of the rank's rows."""
    got = routed_gradients(part_of(call), g, e, process_group=everyone(), **options)
    assert same_bits(got["hidden"])
    return got


def errors(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """Of the whole gradients, whose parts the ranks have."""
    out = {}
    for name, expected in want.items():
        square = (got[name].double() - mine(expected, name)).square().sum()
        square = square if name == "hidden" else summed(square)
        out[name] = (square.sqrt() / expected.norm()).item()
    return out


def the_mean_converges(head: str, entropy: bool) -> None:
    """As on one process: the error falls as 1 / sqrt(draws), to a few parts of a thousand."""
    call, g = leaves(16, head), torch.randn(16)
    e = torch.randn(16) * 0.1 if entropy else None
    want, found = exact_gradients(call, g, e), []
    for copies in (48, 768):
        of_copies = None if e is None else e.expand(copies, -1)
        got = on_ranks(tile(call, copies), g.expand(copies, -1), of_copies)
        mean = {k: (v.sum(0) if k == "hidden" else v).double() / copies for k, v in got.items()}
        found.append(errors(mean, want))
    for name in want:
        few, many = found[0][name], found[1][name]
        assert many < 0.01, (name, found)
        assert 0.15 < many / few < 0.42, (name, found)


def small_tau(head: str, entropy: bool) -> None:
    """Dense rows and others: the exact gradient."""
    call, g = leaves(20, head), torch.randn(20)
    call["hidden"][::3] *= 3  # peaked
    e = torch.randn(20) if entropy else None
    want = exact_gradients(call, g, e)
    for how in ({}, {"chunk_bytes": SMALL}, {"route_weight_grad": "exact"}):
        got = on_ranks(call, g, e, route_tau=1e-10, **how)
        assert max(errors(got, want).values()) < 2e-5


for name, entropy, worlds in (
    ("plain", False, [2, 4]),
    ("plain", True, [2]),
    ("everything", False, [2]),
    ("everything", True, [2, 4]),
):
    of = name + ("_entropy" if entropy else "")
    case(the_mean_converges, worlds=worlds, of=of, head=name, entropy=entropy)
    case(small_tau, worlds=worlds, of=of, head=name, entropy=entropy)


@contextmanager
def recorded() -> Iterator[list[routed.Entries]]:
    """What is kept meanwhile, chunk after chunk."""
    found: list[routed.Entries] = []
    original = routed.Gradients.add

    def add(self: Any, span: slice, entries: routed.Entries, *rest: Any) -> None:
        found.append(entries)
        original(self, span, entries, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routed.Gradients, "add", add)
        yield found


def dense_rows_are_those_of_all_ranks() -> None:
    """What counts is what the whole vocabulary is expected to keep: flat rows are dense, rows that
    are flat in the first shard and nothing elsewhere, or peaked, are not."""
    call, g = leaves(30), torch.randn(30)
    first = CUTS[2][1]
    call["bias"] = torch.zeros(VOCAB)
    call["hidden"][:, 0] = 0.0
    call["weight"][:, 0] = 0.0
    call["weight"][:first, 0] = 1.0
    call["hidden"][:, 1:] *= 0.05
    call["hidden"][10:20, 0] = 12.0  # nothing is left for the last shard
    call["hidden"][20:] = 3 * torch.randn(10, WIDTH)
    want = exact_gradients(call, g, None)["hidden"]
    with recorded() as found:
        got = on_ranks(call, g, None, route_tau=2.0**-11)["hidden"]
    dense = torch.cat([entries.dense for entries in found])
    assert same_bits(dense)
    assert dense[:10].all()
    assert not dense[10:].any()
    error = (got - want).norm(dim=1) / want.norm(dim=1)
    assert (error[dense] < 1e-5).all()
    assert (error[20:] > 1e-4).all()


def ranks_have_noise_of_their_own() -> None:
    """The same rows on both ranks, flat enough that 1 of 64 entries is kept."""
    n, half = 64, 2048
    weight = (torch.randn(half, WIDTH) * 0.1).repeat(2, 1)
    hidden = torch.randn(n, WIDTH).requires_grad_()
    rows = weight[rank() * half : (rank() + 1) * half]
    with recorded() as found:
        linear_logprobs(
            hidden,
            rows,
            torch.zeros(n, dtype=torch.int64),
            backward="routed",
            route_tau=2.0**-6,
            route_seed=3,
            process_group=everyone(),
        ).logps.sum().backward()
    check_kept_apart(found, half)


def check_kept_apart(found: list[routed.Entries], columns: int) -> None:
    """Of 64 tokens 1 of 64 entries is kept, and the two ranks' have no more in common than by
    chance."""
    kept, start = torch.zeros(64, columns, dtype=torch.bool), 0
    for entries in found:
        kept[start + entries.row, entries.column] = True
        start += len(entries.dense)
    first, second = of_all(kept)
    by_chance = 64 * columns / 64**2
    assert abs(first.sum().item() / (64 * by_chance) - 1) < 0.3
    assert (first & second).sum().item() < 2 * by_chance
    assert first.any(0).sum() > 0.5 * columns  # nor do all tokens keep the same


def same_call_same_bits() -> None:
    call, g = leaves(40, "bias"), torch.randn(40)
    runs = [on_ranks(call, g, None, chunk_bytes=chunk) for chunk in (None, None, SMALL)]
    for name in runs[0]:
        assert torch.equal(runs[0][name], runs[1][name])
        change = (runs[2][name] - runs[0][name]).norm()
        assert change <= 1e-5 * runs[0][name].norm()


def only(trainable: list[str]) -> None:
    """Without the head's gradients, or the trunk's: those that are left do not change."""
    call, g = part_of(leaves(20, "bias")), torch.randn(20)
    grads = []
    for names in (["hidden", "weight", "bias"], trainable):
        leaf = {k: call[k].clone().requires_grad_(k in names) for k in ("hidden", "weight", "bias")}
        out = linear_logprobs(
            leaf["hidden"],
            leaf["weight"],
            call["targets"],
            bias=leaf["bias"],
            backward="routed",
            route_tau=TAU,
            route_seed=1,
            process_group=everyone(),
        )
        (out.logps * g).sum().backward()
        grads.append({k: x.grad for k, x in leaf.items()})
    for name in ("hidden", "weight", "bias"):
        if name in trainable:
            assert torch.equal(grads[1][name], grads[0][name])
        else:
            assert grads[1][name] is None


def losses(level: str, weight_grad: str) -> None:
    """grpo_loss's values are those of exact gradients, its gradients those of linear_logprobs with
    the same noise; a dense dW is the exact one."""
    call = leaves(36)
    shape, advantages = (3, 12), torch.tensor([1.0, -0.5, 2.0])
    old = linear_logprobs(call["hidden"], call["weight"], call["targets"]).logps.view(shape)
    old, targets = old + torch.randn(shape) * 0.2, call["targets"].view(shape)
    loss = {
        "old_per_token_logps": old,
        "importance_sampling_level": level,
        "entropy_coef": 0.01,
    }
    options = {
        "backward": "routed",
        "route_tau": TAU,
        "route_seed": 1,
        "route_weight_grad": weight_grad,
        "chunk_bytes": SMALL,
        "process_group": everyone(),
    }

    def leaf(weight: Tensor) -> tuple[Tensor, Tensor]:
        return call["hidden"].clone().requires_grad_(), weight.clone().requires_grad_()

    hidden, weight = leaf(call["weight"])
    exact = grpo_loss(hidden.view(3, 12, WIDTH), weight, targets, advantages, **loss)
    exact.loss.backward()
    want = {"hidden": hidden.grad, "weight": weight.grad}
    hidden, weight = leaf(mine(call["weight"]))
    out = grpo_loss(hidden.view(3, 12, WIDTH), weight, targets, advantages, **loss, **options)
    out.loss.backward()
    got = {"hidden": hidden.grad, "weight": weight.grad}
    assert same_bits(out.per_token_logps)
    assert same_bits(hidden.grad)
    torch.testing.assert_close(out.loss, exact.loss, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(out.per_token_logps, exact.per_token_logps, rtol=1e-5, atol=1e-6)
    found = errors(got, {k: x.double() for k, x in want.items()})
    assert 1e-3 < found["hidden"] < 0.3
    assert (found["weight"] < 1e-5) == (weight_grad == "exact")

    hidden, weight = leaf(mine(call["weight"]))
    values = linear_logprobs(hidden.view(3, 12, WIDTH), weight, targets, entropy=True, **options)
    logps, h = values.logps.detach().requires_grad_(), values.entropy.detach().requires_grad_()
    policy_loss(logps, advantages, entropies=h, **loss).loss.backward()
    torch.autograd.backward([values.logps, values.entropy], [logps.grad, h.grad])
    for x, y in ((got["hidden"], hidden.grad), (got["weight"], weight.grad)):
        assert (x - y).norm() < 1e-4 * y.norm()


for level in ("token", "sequence"):
    for weight_grad in ("routed", "exact"):
        of = f"{level}_{weight_grad}"
        case(losses, worlds=[2], of=of, level=level, weight_grad=weight_grad)


def not_a_number() -> None:
    """A NaN in one rank's rows is seen by all."""
    call, g = leaves(20), torch.ones(20)
    call["weight"][-1] = torch.nan
    got = on_ranks(call, g, None)
    assert got["hidden"].isnan().all()
    assert got["weight"].isnan().any(1).all()


def shard_without_mass() -> None:
    """Entries of -inf in all shards but the first: the others keep nothing."""
    call, g = leaves(20, "bias"), torch.randn(20)
    first = CUTS[2][1]
    call["bias"][first:] = -torch.inf
    call["targets"] %= first
    want = exact_gradients(call, g, None)
    for tau, error in ((TAU, 0.5), (1e-10, 2e-5)):
        got = on_ranks(call, g, None, route_tau=tau)
        assert max(errors(got, want).values()) < error
        assert rank() == 0 or not got["weight"].any()


def lone_nan_token() -> None:
    call, g = leaves(20), torch.ones(20)
    call["hidden"][4] = torch.nan
    got = on_ranks(call, g, None)
    assert got["hidden"][4].isnan().all()
    assert not got["hidden"][[3, 5]].isnan().any()
    assert got["weight"].isnan().all()


def number_of_collectives() -> None:
    """D3: Three a chunk, for tokens that learn and tokens that do not, one for the metrics and one
    to begin with; dense rows add their pass's, of which all ranks have the same."""
    call = part_of(leaves(48))
    for tau, dense in ((TAU, 0.0), (1e-10, 1.0)):
        calls = []
        for scale in (1.0, 0.0):
            hidden, weight = (call[k].clone().requires_grad_() for k in ("hidden", "weight"))
            with counted_collectives() as called:
                out = grpo_loss(
                    hidden.view(4, 12, WIDTH),
                    weight,
                    call["targets"].view(4, 12),
                    scale * torch.tensor([1.0, 0.0, 2.0, -1.0]),
                    backward="routed",
                    route_tau=tau,
                    chunk_bytes=SMALL,
                    process_group=everyone(),
                )
                out.loss.backward()
            assert out.metrics["route/dense_fraction"] == dense
            calls.append(list(called))
        assert calls[0] == calls[1]
        assert len({tuple(c) for c in of_all(calls[0])}) == 1
        routed_part = ["all_gather"] + 3 * ["all_gather", "all_reduce", "all_reduce"]
        routed_part += ["all_reduce"]
        of_dense = calls[0][len(routed_part) :]
        assert calls[0][: len(routed_part)] == routed_part
        assert of_dense == ["all_gather", "all_reduce"] * (len(of_dense) // 2)
        assert bool(of_dense) == bool(dense)


def nothing_counts() -> None:
    call = part_of(leaves(6))
    hidden, weight = (call[k].clone().requires_grad_() for k in ("hidden", "weight"))
    out = grpo_loss(
        hidden.view(2, 3, WIDTH),
        weight,
        call["targets"].view(2, 3),
        torch.ones(2),
        completion_mask=torch.zeros(2, 3, dtype=torch.bool),
        backward="routed",
        process_group=everyone(),
    )
    out.loss.backward()
    assert out.loss == 0
    assert not hidden.grad.any()
    assert not weight.grad.any()


def metrics_are_of_the_whole_vocabulary() -> None:
    call = leaves(120)
    call["hidden"][12:] *= (
        3  # peaked: no row is near the bound, which depends on the groups' places
    )
    call["hidden"][:12] *= 0.05
    found = []
    for weight, group in ((call["weight"], None), (mine(call["weight"]), everyone())):
        out = grpo_loss(
            call["hidden"].view(10, 12, WIDTH).clone().requires_grad_(),
            weight,
            call["targets"].view(10, 12),
            torch.ones(10),
            backward="routed",
            route_tau=2.0**-11,
            route_seed=0,
            process_group=group,
        )
        found.append({k: x for k, x in out.metrics.items() if k.startswith("route/")})
    assert len(found[0]) == 3
    assert abs(found[1]["route/dense_fraction"] - 0.1) < 1e-6
    for name, value in found[1].items():
        assert same_bits(value)
        assert abs(value / found[0][name] - 1) < 0.1, (name, found)


def dtypes(dtype: torch.dtype) -> None:
    call, g = leaves(64, "bias", dtype=dtype), torch.randn(64)
    want = exact_gradients(call, g, None)
    got = on_ranks(call, g, None, route_tau=2.0**-9)
    assert {x.dtype for x in got.values()} == {dtype}
    assert all(1e-3 < error < 0.1 for error in errors(got, want).values())


for dtype in (torch.bfloat16, torch.float16, torch.float64):
    case(dtypes, worlds=[2], of=str(dtype).removeprefix("torch."), dtype=dtype)


def another_seed() -> None:
    """Options that differ on the ranks are told to all."""
    call = part_of(leaves(6))
    for name, value in (("route_seed", rank()), ("route_tau", 0.5 / (1 + rank()))):
        options = {"backward": "routed", name: value, "process_group": everyone()}
        with pytest.raises(ValueError, match=f"{name} is not the same"):
            linear_logprobs(call["hidden"], call["weight"], call["targets"], **options)
        with pytest.raises(ValueError, match=f"{name} is not the same"):
            grpo_loss(
                call["hidden"][None],
                call["weight"],
                call["targets"][None],
                torch.ones(1),
                **options,
            )


def parts_of_sequences(level: str) -> None:
    """Ranks that share the tokens of four sequences; of four ranks two share the vocabulary, too.
    The mean over copies of the sequences comes to the exact gradient."""
    call = leaves(20, "bias")
    old = linear_logprobs(call["hidden"], call["weight"], call["targets"], bias=call["bias"]).logps
    batch = {
        "hidden": call["hidden"].view(4, 5, WIDTH),
        "completion_ids": call["targets"].view(4, 5),
        "old_per_token_logps": (old + torch.randn(20) * 0.2).view(4, 5),
    }
    advantages = torch.tensor([1.0, -0.5, 2.0, 0.7])

    def gradients(copies: int, time: slice, rows: slice, **options: Any) -> dict[str, Tensor]:
        mine = {k: x[:, time].repeat(copies, *[1] * (x.dim() - 1)) for k, x in batch.items()}
        leaf = {
            "hidden": mine["hidden"],
            "weight": call["weight"][rows],
            "bias": call["bias"][rows],
        }
        leaf = {k: x.clone().requires_grad_() for k, x in leaf.items()}
        grpo_loss(
            **(mine | leaf),
            advantages=advantages.repeat(copies),
            loss_type="grpo",
            importance_sampling_level=level,
            **options,
        ).loss.backward()
        grads = {k: x.grad for k, x in leaf.items()}
        grads["hidden"] = grads["hidden"].view(copies, 4, -1, WIDTH).sum(0)
        return grads

    want = gradients(1, slice(0, 5), slice(0, VOCAB))
    mesh = init_device_mesh("cpu", (2, world() // 2), mesh_dim_names=("time", "vocab"))
    groups = {"sequence_group": mesh.get_group("time")}
    time, rows = bounds([0, 3, 5], mesh.get_local_rank("time")), slice(0, VOCAB)
    if world() == 4:
        groups["process_group"] = mesh.get_group("vocab")
        rows = bounds(CUTS[2], mesh.get_local_rank("vocab"))
    found = []
    for copies in (32, 512):
        options = {"backward": "routed", "route_tau": TAU, "route_seed": 1, **groups}
        got = gradients(copies, time, rows, **options)
        error = {"hidden": (got["hidden"] - want["hidden"][:, time]).norm()}
        for name in ("weight", "bias"):
            error[name] = (summed(got[name], groups["sequence_group"]) - want[name][rows]).norm()
        found.append({k: (x / want[k].norm()).item() for k, x in error.items()})
    for name in want:
        few, many = found[0][name], found[1][name]
        assert many < 0.02, (name, found)
        assert 0.1 < many / few < 0.5, (name, found)


for level in ("token", "sequence"):
    case(parts_of_sequences, of=level, level=level)


def parts_have_noise_of_their_own() -> None:
    """The same tokens on both ranks of a sequence_group, flat as above."""
    weight, hidden = torch.randn(4096, WIDTH) * 0.1, torch.randn(4, 16, WIDTH).requires_grad_()
    with recorded() as found:
        grpo_loss(
            hidden,
            weight,
            torch.zeros(4, 16, dtype=torch.int64),
            torch.ones(4),
            backward="routed",
            route_tau=2.0**-6,
            route_seed=3,
            sequence_group=everyone(),
        ).loss.backward()
    check_kept_apart(found, 4096)


case(dense_rows_are_those_of_all_ranks, worlds=[2])
for trainable in (["hidden"], ["weight", "bias"], ["bias"]):
    case(only, worlds=[2], of="_".join(trainable), trainable=trainable)
for function in (same_call_same_bits, not_a_number, number_of_collectives):
    case(function, of="routed")
for function in (
    ranks_have_noise_of_their_own,
    parts_have_noise_of_their_own,
    lone_nan_token,
    shard_without_mass,
    nothing_counts,
    metrics_are_of_the_whole_vocabulary,
    another_seed,
):
    case(function, worlds=[2], of="routed")
