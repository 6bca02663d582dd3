"""A head whose vocabulary is shared: every rank's results against full logits in float64."""

from __future__ import annotations

from typing import Any

import torch
from cases import HEAD_OPTIONS, Case, make_case, pack
from objective_cases import CORRECTIONS, OBJECTIVES, from_head, make
from oracle import TOLERANCE, Result, assert_gradient, assert_outputs_agree, close, oracle, run
from ranks import bounds, case, counted_collectives, everyone, of_all, same_bits, vocab_part, world
from torch import Tensor
from torch.nn import functional as F

from fused_grpo import grpo_loss, linear_logprobs

CUTS = {
    61: {2: [0, 17, 61], 4: [0, 1, 30, 31, 61]},
    129: {2: [0, 100, 129], 4: [0, 64, 65, 70, 129]},
}
SMALL = 1 << 13  # bytes of a chunk: several of them


def rows_of(full: Case) -> slice:
    return bounds(CUTS[full.weight.shape[0]][world()])


def on_ranks(full: Case, *, reduction: str = "sum", **how: Any) -> Result:
    how.setdefault("chunk_bytes", SMALL)
    got = run(
        lambda *a, **k: grpo_loss(*a, reduction=reduction, process_group=everyone(), **k),
        vocab_part(full, rows_of(full)),
        reduction=reduction,
        **how,
    )
    assert same_bits(got.output.per_token_logps)
    assert same_bits(got.output.loss)
    if got.grads["hidden"] is not None:
        assert same_bits(got.grads["hidden"])
    return got


def check_gradients(full: Case, got: Result, want: dict[str, Tensor | None], tol: float) -> None:
    part = rows_of(full)
    for name, expected in want.items():
        local = expected if expected is None or name == "hidden" else expected[part]
        dtype = full.leaves()[name].dtype
        if local is not None and name != "hidden":  # its error is measured by the whole
            assert expected is not None
            assert got.grads[name] is not None
            error = (got.grads[name].double() - local).norm() / expected.norm()
            assert got.grads[name].dtype == dtype
            assert error <= tol, f"{name}.grad: {error:.1e}"
        else:
            assert_gradient(name, got.grads[name], local, dtype, tol)


def head_options(full: Case, **how: Any) -> None:
    got = on_ranks(full, **how)
    how.pop("chunk_bytes", None)
    want = oracle(full, **how)
    tol = TOLERANCE[full.hidden.dtype]
    assert_outputs_agree(got.output, want.output, tol)
    check_gradients(full, got, want.grads, tol.grads)


def case_of(**options: Any) -> Case:
    options = {"bias": True, "ref": "beta" in options} | options
    return make_case(**options)


PER_TOKEN = torch.linspace(0.5, 1.5, 66, dtype=torch.float64).view(6, 11)
EVERYTHING = {"temperature": 0.7, "logit_scale": 0.4, "softcap": 3.0, "entropy_coef": 0.1}
HEADS: dict[str, dict[str, Any]] = {
    "plain": {"bias": False},
    "bias": {},
    "temperature": {"temperature": 0.7},
    "token_temperature": {"temperature": PER_TOKEN},
    "logit_scale": {"logit_scale": 0.4},
    "softcap": {"softcap": 3.0},
    "entropy": {"entropy_coef": 0.1},
    "kl": {"beta": 0.1},
    "sequence": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "everything": EVERYTHING | {"beta": 0.1},
    "fresh": {"old": False, "importance_sampling_level": "sequence"},
    "float32": EVERYTHING | {"dtype": torch.float32},
    "float32_plain": {"dtype": torch.float32, "loss_type": "grpo"},
    "bfloat16": {"dtype": torch.bfloat16},
    "steep": {"logit_std": 30.0},  # nearly all mass in one shard
}
for name, options in HEADS.items():
    worlds = [2, 4] if name in ("plain", "everything", "float32", "steep") else [2]
    case(head_options, worlds=worlds, of=name, full=case_of(**options))
for name, trainable in (("trunk", ["hidden"]), ("head", ["weight", "bias"]), ("bias", ["bias"])):
    case(head_options, of=f"only_{name}", full=case_of(**EVERYTHING), trainable=trainable)
    case(
        head_options,
        of=f"only_{name}_sequence",
        full=case_of(loss_type="grpo", importance_sampling_level="sequence"),
        trainable=trainable,
    )
for name, options in (("plain", {}), ("everything", EVERYTHING)):
    case(head_options, of=f"none_{name}", full=case_of(**options), reduction="none")
case(
    head_options,
    of="none_only_trunk",
    full=case_of(),
    reduction="none",
    trainable=["hidden"],
)
case(head_options, of="packed", full=pack(case_of(**EVERYTHING)))
case(head_options, of="one_chunk", full=case_of(**EVERYTHING), chunk_bytes=1 << 24)


def objectives(objective: dict[str, Any], correction: dict[str, Any], **more: Any) -> None:
    full = make(objective, {}, correction, **more)
    want_loss, want = from_head(full)
    got = on_ranks(full)
    tol = TOLERANCE[full.hidden.dtype]
    close(got.output.loss, want_loss, tol.loss, "loss")
    check_gradients(full, got, dict(want), tol.grads)


for name, objective in OBJECTIVES.items():
    case(objectives, worlds=[2], of=name, objective=objective, correction={}, beta=0.1)
for name in ("sequence_mask", "max_rejection"):
    case(objectives, worlds=[2], of=name, objective={}, correction=CORRECTIONS[name])
case(objectives, worlds=[2], of="quantile", objective={"top_entropy_quantile": 0.3}, correction={})


def logprobs(entropy: bool, trainable: list[str], **head: Any) -> None:
    """Any upstream gradient, and no gradients at all."""
    full = make_case(bias=True, vocab=61)
    part = rows_of(full)
    targets = full.ids.masked_fill(~full.mask, -100)
    wide = {k: v.requires_grad_(k in trainable) for k, v in full.leaves(Tensor.double).items()}
    z = F.linear(wide["hidden"], wide["weight"], wide["bias"])
    if "softcap" in head:
        z = head["softcap"] * torch.tanh(z / head["softcap"])
    log_p = (z / head.get("temperature", 1.0)).log_softmax(-1)
    counted = targets != -100
    logps = log_p.gather(-1, targets.clamp_min(0)[..., None])[..., 0] * counted
    h = -(log_p.exp() * log_p).sum(-1) * counted
    g, e = torch.randn(2, *targets.shape, dtype=torch.float64)
    (logps * g + (h * e if entropy else 0)).sum().backward()

    leaves = vocab_part(full, part).leaves()
    for name, x in leaves.items():
        x.requires_grad_(name in trainable)
    call = {"bias": leaves["bias"], "entropy": entropy, "chunk_bytes": SMALL, **head}
    out = linear_logprobs(
        leaves["hidden"], leaves["weight"], targets, process_group=everyone(), **call
    )
    assert same_bits(out.logps)
    close(out.logps, logps, 1e-11, "logps")
    total = (out.logps * g).sum()
    if out.entropy is not None:
        close(out.entropy, h, 1e-11, "entropy")
        total = total + (out.entropy * e).sum()
    total.backward()
    for name, x in leaves.items():
        want = wide[name].grad
        if want is not None and name != "hidden":
            want = want[part]
        assert_gradient(name, x.grad, want, torch.float64, 1e-9)
    with torch.no_grad():
        again = linear_logprobs(
            leaves["hidden"], leaves["weight"], targets, process_group=everyone(), **call
        )
    torch.testing.assert_close(again.logps, out.logps, rtol=0, atol=1e-12)


ALL = ["hidden", "weight", "bias"]
case(logprobs, of="plain", entropy=False, trainable=ALL)
case(logprobs, of="entropy", entropy=True, trainable=ALL)
case(logprobs, of="unit", entropy=False, trainable=["hidden"])
case(logprobs, of="capped", entropy=True, trainable=ALL, softcap=4.0, temperature=0.8)


def masked_out() -> None:
    """Everything masked, NaN in masked positions: zeros, and no rank waits."""
    full = case_of()
    full.tensors["completion_mask"] = torch.zeros_like(full.ids)
    full.hidden[:] = torch.nan
    got = on_ranks(full)
    assert got.output.loss == 0
    for name, gradient in got.grads.items():
        assert gradient is not None, name
        assert not gradient.any(), name


def shard_without_mass() -> None:
    """Entries of -inf: a whole shard, a target, and everything but the target."""
    full = make_case(bias=True, vocab=61, old=False, ref=False)
    assert full.bias is not None
    full.bias[CUTS[61][world()][1] :] = -torch.inf  # all shards but the first
    full.ids[full.mask] = 0
    if world() == 4:  # the first shard has one row: the distribution is a point
        full.bias[1] = 0.5
    want = oracle(full)
    got = on_ranks(full)
    assert_outputs_agree(got.output, want.output, TOLERANCE[torch.float64])
    check_gradients(full, got, want.grads, 1e-9)


def strongly_negative() -> None:
    """N1, N2: All logits near -300, and one peak that a single rank has: others took the maximum of
    a shard from 0, or counted its padding. As without the shift, and as fp64 has it."""
    full = make_case(bias=True, vocab=61, old=False, ref=False, entropy=True)
    assert full.bias is not None
    plain = oracle(full)
    full.bias -= 300.0
    full.bias[7] += 5.0
    want, got = oracle(full), on_ranks(full)
    assert_outputs_agree(got.output, want.output, TOLERANCE[torch.float64])
    check_gradients(full, got, want.grads, 1e-9)
    assert (got.output.per_token_logps <= 0).all()
    full.bias[7] -= 5.0
    got = on_ranks(full)
    close(got.output.per_token_logps, plain.output.per_token_logps, 1e-10, "logps")
    close(got.output.entropy, plain.output.entropy, 1e-10, "entropy")


def not_a_number() -> None:
    """A NaN in one rank's rows is seen by all."""
    full = case_of()
    full.weight[-1] = torch.nan
    got = on_ranks(full)
    assert got.output.per_token_logps[full.mask].isnan().all()
    assert got.output.loss.isnan()


def number_of_collectives() -> None:
    """D3: Two a chunk and one to begin with, for tokens that learn and tokens that do not."""
    full = case_of()
    part = vocab_part(full, rows_of(full))
    calls = []
    for scale in (1.0, 0.0):
        with counted_collectives() as called:
            leaves = part.leaves()
            leaves["hidden"].requires_grad_()
            leaves["weight"].requires_grad_()
            grpo_loss(
                leaves["hidden"],
                leaves["weight"],
                part.ids,
                scale * part.advantages,
                bias=leaves["bias"],
                chunk_bytes=SMALL,
                process_group=everyone(),
                **part.tensors,
            ).loss.backward()
        calls.append(list(called))
    assert calls[0] == calls[1]
    chunks = (len(calls[0]) - 1) // 2
    assert calls[0] == ["all_gather"] + ["all_gather", "all_reduce"] * chunks
    assert chunks > 1
    assert len({tuple(c) for c in of_all(calls[0])}) == 1


for function in (
    *(masked_out, shard_without_mass, strongly_negative, not_a_number),
    number_of_collectives,
):
    case(function)
assert not {k for k in HEAD_OPTIONS if not any(k in options for options in HEADS.values())}
