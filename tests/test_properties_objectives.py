"""Properties that hold for every objective, KL, reduction, correction and head, on any batch.

Examples come from `drawn_cases`, which draws from the tables; `make fuzz` draws many more.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import Case
from drawn_cases import (
    MOVES,
    OF_THE_BATCH,
    SEEDS,
    Outcome,
    batches,
    evaluate,
    map_tokens,
    numbers,
)
from fuzzing import examples
from hypothesis import assume, given
from hypothesis import strategies as st
from objective_cases import OBJECTIVES, formula_batch
from torch import Tensor

from fused_grpo import linear_logprobs, linear_support, policy_loss
from fused_grpo.kl import ESTIMATORS
from fused_grpo.objectives import LOSS_TYPES, LossSpec

# a colon marks those that stand for another library's, which its own tests try
BUILT_IN = frozenset(name for name in LOSS_TYPES if ":" not in name)
# fp64 sums of some hundred terms, through ratios of up to e^3
ROUNDING = 1e-10


def near(got: Tensor | None, want: Tensor | None, name: str, tol: float = ROUNDING) -> None:
    """Elementwise, to `tol` of the largest entry; NaN (a metric over nothing) equals NaN."""
    assert (got is None) == (want is None), name
    if got is None or want is None or want.numel() == 0:
        return
    size = want.double().nan_to_num().abs().amax().clamp(min=1.0)
    torch.testing.assert_close(
        got.double() / size,
        want.double() / size,
        rtol=0,
        atol=tol,
        equal_nan=True,
        msg=lambda m: f"{name}: {m}",
    )


def test_the_tables_are_covered() -> None:
    """Every objective of the package is among those that batches are drawn from."""
    assert {o.get("loss_type", "dapo") for o in OBJECTIVES.values()} == BUILT_IN


# ---- against the formulas


def head_logits(case: Case, leaves: dict[str, Tensor]) -> Tensor:
    z = leaves["hidden"] @ leaves["weight"].T
    z = (z + leaves["bias"] if "bias" in leaves else z) * case.options["logit_scale"]
    cap, t = case.options["softcap"], case.options["temperature"]
    z = z if cap is None else cap * torch.tanh(z / cap)
    return z / (t[..., None] if isinstance(t, Tensor) else t)


def by_formulas(case: Case) -> Outcome:
    """`formulas`, which call nothing of the package, on full fp64 logits."""
    import formulas

    leaves = {k: v.requires_grad_() for k, v in case.leaves(Tensor.double).items()}
    log_p = head_logits(case, leaves).log_softmax(-1)
    logps = log_p.gather(-1, case.ids.long()[..., None])[..., 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    loss = formulas.loss(formula_batch(case, logps, entropy))
    scale = case.tensors.get("entropy_scale")
    if scale is not None:  # the bonus with factors is the plain one with another entropy
        loss = formulas.loss(formula_batch(case, logps, entropy * scale.double()))
    loss.backward()
    return Outcome(loss.detach(), {k: v.grad for k, v in leaves.items()}, {}, None)


@pytest.mark.parametrize("objective", OBJECTIVES)
@examples(6)
@given(data=st.data())
def test_any_batch_has_the_value_of_the_formula(objective: str, data: st.DataObject) -> None:
    """fp64 on full logits and dense masks, as the papers write it; all gradients."""
    # the quantile of the formulas is torch's, which rounds otherwise where it meets a value
    kinds = batches(objective, empty=False, heads=False, leave_out=("top_entropy_quantile",))
    case = data.draw(kinds)
    got, want = evaluate(case), by_formulas(case)
    near(got.loss, want.loss, "loss")
    for name, grad in want.grads.items():
        near(got.grads[name], grad, name)


# ---- what must not change a loss


def assert_unmoved(case: Case, data: st.DataObject) -> None:
    moves = data.draw(st.lists(st.sampled_from(sorted(MOVES)), min_size=1, max_size=3, unique=True))
    moves.sort(key=("typed", "packed").__contains__)  # the others know none of what these make
    moves.sort(key="packed".__eq__)
    want, moved, extra, back = evaluate(case), case, {}, []
    for name in moves:
        step = MOVES[name](moved, data)
        moved, extra = step.case, extra | (step.extra or {})
        back.append(step)
    got = evaluate(moved, **extra)
    near(got.loss, want.loss, f"loss after {moves}")
    for step in reversed(back):
        got.grads["hidden"] = step.hidden(got.grads["hidden"])
        for name in ("weight", "bias"):
            if name in got.grads:
                got.grads[name] = step.entries(got.grads[name])
    for name, grad in want.grads.items():
        near(got.grads[name], grad, f"{name} after {moves}")
    assert got.metrics.keys() == want.metrics.keys()
    for name, value in want.metrics.items():
        try:
            near(got.metrics[name], value, f"{name} after {moves}", 1e-5)
        except AssertionError:
            if not rounding_decides(case, name, value):
                raise


def rounding_decides(case: Case, name: str, value: Tensor) -> bool:
    """Whether a metric jumps when the states move in their last digits: then it says nothing.

    As where parts of a coefficient cancel, all but their rounding: ratio (|d| - d), sign(0).
    """
    for seed in range(16):
        noise = 1 + 1e-14 * numbers(seed)(*case.hidden.shape)
        moved = evaluate(replace(case, hidden=case.hidden * noise)).metrics[name]
        if abs(float(moved) - float(value)) > 1e-5 * max(1.0, abs(float(value))):
            return True
    return False


@pytest.mark.parametrize("objective", OBJECTIVES)
@examples(8)
@given(data=st.data())
def test_layout_order_chunks_and_names_do_not_matter(objective: str, data: st.DataObject) -> None:
    """Padding anywhere, packing, row order, chunks, the vocabulary's order, a constant on the
    logits, strides and dtypes of ids and masks: up to three at once."""
    assert_unmoved(data.draw(batches(objective)), data)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@examples(8)
@given(data=st.data())
def test_they_do_not_matter_to_a_kl(estimator: str, data: st.DataObject) -> None:
    assert_unmoved(data.draw(batches(estimator=estimator)), data)


GARBAGE = st.sampled_from([math.nan, math.inf, -math.inf, 1e30, -200.0])


@pytest.mark.parametrize("objective", OBJECTIVES)
@examples(6)
@given(data=st.data(), garbage=GARBAGE, token=st.sampled_from([-100, -1, 10**9]))
def test_masked_content_changes_no_bit(
    objective: str, data: st.DataObject, garbage: float, token: int
) -> None:
    """R11: of values, metrics and gradients; an upstream gradient may be garbage there too."""
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    case = data.draw(batches(objective, dtype=dtype))
    case.advantages = case.advantages.reshape(len(case.ids), -1).expand(case.ids.shape)
    off = ~case.mask
    mask = case.tensors["completion_mask"]

    def spoil(x: Tensor) -> Tensor:
        where = off.view(*off.shape, *[1] * (x.dim() - 2))
        return x.masked_fill(where, garbage if x.is_floating_point() else token)

    spoiled = map_tokens(case, spoil)
    spoiled.tensors["completion_mask"] = mask
    unreduced = data.draw(st.booleans())
    upstream = numbers(5)(*case.ids.shape) if unreduced else None
    want = evaluate(case, upstream)
    got = evaluate(spoiled, None if upstream is None else upstream.masked_fill(off, garbage))
    for name in ("loss", "per_token_loss", "per_token_logps"):
        assert same_bits(getattr(got.output, name), getattr(want.output, name)), name
    for name, value in (*want.grads.items(), *want.metrics.items()):
        other = got.grads[name] if name in want.grads else got.metrics[name]
        assert same_bits(other, value), name
    assert not got.grads["hidden"][off].any()


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(12345.0), b.nan_to_num(12345.0))


# ---- linearity and additivity


@pytest.mark.parametrize("objective", OBJECTIVES)
@examples(4)
@given(data=st.data(), alpha=st.floats(-3, 3), beta=st.floats(-3, 3))
def test_linear_in_the_upstream_gradient(
    objective: str, data: st.DataObject, alpha: float, beta: float
) -> None:
    """R6: of the token losses; a token with an upstream gradient of 0 sends nothing."""
    case = data.draw(batches(objective))
    normal = numbers(data.draw(SEEDS))
    first, second = normal(*case.ids.shape), normal(*case.ids.shape)
    first[normal(*case.ids.shape) > 0.5] = 0.0
    got = evaluate(case, alpha * first + beta * second)
    parts = [evaluate(case, x).grads for x in (first, second)]
    for name, grad in got.grads.items():
        near(grad, alpha * parts[0][name] + beta * parts[1][name], name)


def _loss_options(case: Case) -> dict[str, Any]:
    names = LossSpec.__dataclass_fields__
    return {k: v for k, v in case.options.items() if k in names}


def share(case: Case, part: Case) -> float:
    """Of a part in the loss of the whole: what the part's own divisor has to be corrected by."""
    spec = LossSpec(**_loss_options(case))
    over = spec.scheme.over
    given = {"tokens": spec.num_items_in_batch, "sequences": spec.num_sequences}
    given["nonempty"] = spec.num_sequences
    if over == "nothing" or given.get(over) is not None:
        return 1.0

    def count(c: Case) -> int:
        if over == "groups":
            return len(c.tensors["group_ids"].unique())
        if over == "sequences":
            return len(c.ids)
        return int(c.mask.sum() if over.endswith("tokens") else c.mask.any(1).sum())

    return max(count(part), 1) / max(count(case), 1)


@pytest.mark.parametrize("objective", [name for name in OBJECTIVES if name not in OF_THE_BATCH])
@examples(6)
@given(data=st.data())
def test_the_loss_of_a_union_is_the_weighted_sum_of_its_parts(
    objective: str, data: st.DataObject
) -> None:
    """R3: for all reductions; parts may be empty, or hold nothing that counts."""
    case = data.draw(batches(objective, leave_out=("top_entropy_quantile",)))
    rows = len(case.ids)
    groups = case.tensors.get("group_ids", torch.arange(rows))
    flags = data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows), label="parts")
    first = torch.tensor(flags)[(groups[:, None] == groups).int().argmax(1)]  # no group is split
    whole, loss = evaluate(case), torch.zeros((), dtype=torch.float64)
    totals = {k: torch.zeros_like(v) for k, v in whole.grads.items()}
    for side in (first, ~first):
        part = map_tokens(case, lambda x: x[side], lambda x: x[side])  # noqa: B023
        got, weight = evaluate(part), share(case, part)
        loss += weight * got.loss
        for name, grad in got.grads.items():
            if name == "hidden":
                totals[name][side] = weight * grad
            else:
                totals[name] += weight * grad
    near(loss, whole.loss, "loss")
    for name, grad in whole.grads.items():
        near(totals[name], grad, name)


@pytest.mark.parametrize("objective", OBJECTIVES)
@examples(3)
@given(data=st.data())
def test_unreduced_losses_with_weights_are_the_loss(objective: str, data: st.DataObject) -> None:
    """sum_t w_t loss_t with the w_t of `token_weights`, and the same from `policy_loss`."""
    case = data.draw(batches(objective, heads=False))
    spec = LossSpec(**_loss_options(case))
    want = evaluate(case)
    w = _weights(case, spec)
    got = evaluate(case, w)
    near((got.loss * w).sum(), want.loss, "loss")
    for name, grad in want.grads.items():
        near(got.grads[name], grad, name)
    from_logps = policy_loss(
        want.output.per_token_logps,
        case.advantages,
        entropies=want.output.entropy,
        **case.tensors,
        **_loss_options(case),
    )
    near(from_logps.loss, want.loss, "policy_loss")


def _weights(case: Case, spec: LossSpec) -> Tensor:
    from fused_grpo import token_weights

    scheme = spec.aggregation or spec.row.scheme
    names = ("num_items_in_batch", "num_sequences", "max_completion_length")
    given = {k: getattr(spec, k) for k in names if getattr(spec, k) is not None}
    groups = case.tensors.get("group_ids")
    out = token_weights(case.tensors["completion_mask"], scheme, group_ids=groups, **given)
    assert out.dtype == torch.float32
    exact = out.double()  # of integers: rounded once, so that fp64 comes back
    return torch.where(exact > 0, 1 / (1 / exact).round(), 0.0)


# ---- ranges


HEADS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([1e-2, 0.6, 1.0, 30.0]),
        "logit_scale": st.sampled_from([1.0, 0.05, 16.0]),
        "softcap": st.sampled_from([None, 1.0, 30.0]),
    }
)


@examples(150)
@given(
    SEEDS,
    st.integers(1, 300),
    st.sampled_from([1e-30, 1e-3, 1.0, 30.0, 1e4]),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    HEADS,
    st.sampled_from([None, "top_k", "top_p", "min_p"]),
)
def test_ranges_of_all_outputs(
    seed: int, vocab: int, std: float, dtype: torch.dtype, head: dict[str, Any], support: str | None
) -> None:
    """N1, N18: logp <= 0, 0 <= entropy <= log of what is kept, 1 / V <= sum p^2 <= 1."""
    normal = numbers(seed)
    hidden = normal(5, 4).to(dtype)
    weight = (normal(vocab, 4) * std / 2).to(dtype)
    targets = torch.randint(vocab, (5,), generator=torch.Generator().manual_seed(seed))
    targets[:3] = (hidden.double() @ weight.double().T).argmax(-1)[:3]
    value = {"top_k": 7, "top_p": 0.7, "min_p": 0.1}.get(support or "")
    kept = {} if support is None else {f"support_{support}": value}
    outputs = () if kept else ("lse", "log_sum_sq_probs", "mean_logits", "is_top1")
    out = linear_logprobs(hidden, weight, targets, entropy=True, outputs=outputs, **head, **kept)
    size = out.support_size if kept else torch.full((5,), vocab)
    assert (out.logps <= 0).all()
    assert (out.entropy >= 0).all()
    most = size.double().log()
    assert (out.entropy.double() <= most + 1e-6 * most.clamp(min=1.0)).all()
    assert ((size >= 1) & (size <= vocab)).all()
    if not kept:
        assert (out.log_sum_sq_probs <= 0).all()
        assert (out.log_sum_sq_probs >= -math.log(vocab) * (1 + 1e-6) - 1e-6).all()
        assert (out.lse >= out.mean_logits - 1e-6 * out.mean_logits.abs()).all()
        assert (out.logps[out.is_top1] >= -math.log(vocab) * (1 + 1e-6) - 1e-6).all()


@examples(200)
@given(
    st.lists(st.floats(-60, 60, width=32), min_size=1, max_size=8),
    st.sampled_from([torch.float64, torch.float32]),
    st.sampled_from(["k2", "k3", "abs", "k3+", "abs+", "k2_score", "k3_score"]),
    st.integers(-45, 0),
)
def test_estimates_of_a_divergence_are_not_negative(
    values: list[float], dtype: torch.dtype, estimator: str, power: int
) -> None:
    """k3 >= 0, where rounding is all there is of it too, and 0 at equal log-probabilities."""
    d = torch.tensor([values], dtype=dtype) * 2.0**power
    logps = torch.full_like(d, -0.75)
    options = {"beta": 1.0, "kl_estimator": estimator}
    out = policy_loss(logps, d.new_zeros(1), ref_per_token_logps=logps + d, **options)
    assert (out.per_token_loss >= 0).all()
    same = policy_loss(logps, d.new_zeros(1), ref_per_token_logps=logps.clone(), **options)
    assert not same.per_token_loss.any()


# ---- other paths to the same numbers


def settled(case: Case) -> bool:
    """Whether rounding decides nothing: the loss barely moves with the log-probabilities."""
    if "old_per_token_logps" not in case.tensors:
        return True
    losses = []
    for by in (-1e-3, 0.0, 1e-3):
        moved = dict(case.tensors)
        moved["old_per_token_logps"] = case.tensors["old_per_token_logps"] + by
        wide = Case(case.hidden, case.weight, case.ids, case.advantages, case.bias, moved)
        wide.options = case.options
        out = evaluate(_wide(wide))
        losses.append(torch.cat([g.flatten() for g in out.grads.values()]))
    size = losses[1].norm().clamp(min=1e-6)
    return bool(((losses[0] - losses[1]).norm() + (losses[2] - losses[1]).norm()) < 0.1 * size)


def _wide(case: Case) -> Case:
    def wide(x: Any) -> Any:
        return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

    return Case(
        wide(case.hidden),
        wide(case.weight),
        case.ids,
        wide(case.advantages),
        wide(case.bias),
        {k: wide(v) for k, v in case.tensors.items()},
        {k: wide(v) for k, v in case.options.items()},
    )


# What a threshold decides, rounding may decide otherwise.
SMOOTH = (
    "sampling_correction",
    "rejection",
    "veto_ratio_min",
    "veto_ratio_max",
    "sampling_ratio_min",
    "sampling_ratio_max",
    "off_policy_mask_threshold",
    "top_entropy_quantile",
    "kl_clamp",
)
NARROW = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("objective", [name for name in OBJECTIVES if name not in OF_THE_BATCH])
@examples(5)
@given(data=st.data())
def test_any_mix_of_dtypes_follows_fp64(objective: str, data: st.DataObject) -> None:
    """I7: hidden states, weight, bias and vectors of any dtype, with autocast or without, padded or
    packed; logits are fp32, and gradients come in the dtype of their leaf."""
    case = data.draw(batches(objective, heads=False, empty=False, leave_out=SMOOTH))
    dtypes = data.draw(st.lists(st.sampled_from(NARROW), min_size=4, max_size=4), label="dtypes")
    case.hidden, case.weight = case.hidden.to(dtypes[0]), case.weight.to(dtypes[1])
    case.bias = None if case.bias is None else case.bias.to(dtypes[2])
    case.advantages = case.advantages.to(dtypes[3])
    for name, value in case.tensors.items():
        if value.is_floating_point():
            case.tensors[name] = value.to(dtypes[3])
    assume(settled(case))
    want, cast = evaluate(_wide(case)), data.draw(st.sampled_from([None, *NARROW[1:]]))
    with torch.autocast("cpu", dtype=cast or torch.bfloat16, enabled=cast is not None):
        got = evaluate(case)
    assert got.loss.dtype == torch.float32
    near(got.output.per_token_logps, want.output.per_token_logps, "logps", 1e-5)
    near(got.loss, want.loss, "loss", 1e-4)
    for name, grad in want.grads.items():
        leaf = getattr(case, name)
        assert got.grads[name].dtype == leaf.dtype
        tol = 1e-4 if leaf.dtype == torch.float32 and torch.float32 in dtypes[:2] else 8e-3
        error = (got.grads[name].double() - grad).norm()
        assert error <= tol * grad.norm() + 1e-6, f"{name}: {float(error / grad.norm()):.1e}"


@pytest.mark.parametrize("backend", ["triton", "reference"])
@examples(25)
@given(data=st.data())
def test_backends_agree(backend: str, data: st.DataObject) -> None:
    """The kernels, interpreted, and full logits, with all that they know."""
    if backend == "triton":
        pytest.importorskip("triton")
    dtype = torch.float32 if backend == "triton" else torch.float64
    left = SMOOTH if backend == "triton" else ()
    case = data.draw(batches(dtype=dtype, heads=False, leave_out=left))
    if backend == "triton":
        assume(settled(case))
    want, got = evaluate(_wide(case)), evaluate(case, backend=backend)
    tol = 1e-4 if backend == "triton" else ROUNDING
    near(got.output.per_token_logps, want.output.per_token_logps, "logps", tol / 10)
    near(got.loss, want.loss, "loss", tol)
    for name, grad in want.grads.items():
        near(got.grads[name], grad, name, tol)


@examples(40)
@given(
    SEEDS,
    st.integers(1, 200),
    st.sampled_from([{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.5}]),
    HEADS,
    st.sampled_from([1 << 12, 100 << 20]),
)
def test_the_ids_of_a_sampler_are_its_support(
    seed: int, vocab: int, rule: dict[str, Any], head: dict[str, Any], chunk_bytes: int
) -> None:
    """`linear_support` then `support_ids` is the rule itself; renaming entries renames the ids."""
    normal = numbers(seed)
    hidden, weight = normal(2, 3, 4), normal(vocab, 4)
    targets = torch.randint(vocab, (2, 3), generator=torch.Generator().manual_seed(seed))
    ids = linear_support(hidden, weight, chunk_bytes=chunk_bytes, **rule, **head)
    by_rule = linear_logprobs(
        hidden, weight, targets, **head, **{f"support_{k}": v for k, v in rule.items()}
    )
    by_ids = linear_logprobs(hidden, weight, targets, support_ids=ids, **head)
    near(by_ids.logps, by_rule.logps, "logps")
    assert torch.equal(by_ids.support_size, by_rule.support_size)
    assert torch.equal(by_ids.target_outside, by_rule.target_outside)
    order = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))
    moved = linear_support(hidden, weight[order], **rule, **head)
    names = torch.where(moved >= 0, order[moved.clamp(min=0)], vocab).sort(-1).values
    assert torch.equal(torch.where(names == vocab, -1, names), ids)


# ---- routed gradients


@examples(12)
@given(
    SEEDS,
    st.integers(2, 600),
    st.sampled_from([2.0**-3, 2.0**-6]),
    st.sampled_from([0.0, 0.2]),
    st.sampled_from([{}, {"softcap": 5.0}, {"temperature": 0.5, "logit_scale": 1.5}]),
)
def test_routed_gradients_are_right_on_average(
    seed: int, vocab: int, tau: float, entropy: float, head: dict[str, Any]
) -> None:
    """Against the exact gradient of logp (+ entropy), over the same token drawn 4,000 times.

    Bernstein's inequality with the variance that was seen: beyond these bounds once in 10^8.
    """
    copies, normal = 4000, numbers(seed)
    hidden, weight = normal(4).float(), (2 * normal(vocab, 4)).float()
    target = torch.randint(vocab, (), generator=torch.Generator().manual_seed(seed))

    def grad(rows: int, **options: Any) -> Tensor:
        leaf = hidden.expand(rows, 1, 4).clone().requires_grad_()
        targets = target.expand(rows, 1)
        out = linear_logprobs(leaf, weight, targets, entropy=entropy > 0, **head, **options)
        total = out.logps.sum() + (entropy * out.entropy.sum() if entropy else 0.0)
        total.backward()
        return leaf.grad[:, 0].double()

    exact = grad(1)[0]
    draws = grad(copies, backward="routed", route_tau=tau, route_seed=seed)
    error = (draws.mean(0) - exact).abs()
    largest = (draws - exact).abs().amax(0)
    log = 19.0
    bound = (2 * draws.var(0) * log / copies).sqrt() + 2 * largest * log / (3 * copies)
    assert (error <= bound + 1e-5 * (1 + exact.abs())).all()
