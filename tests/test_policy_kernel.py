"""The policy kernel computes what the torch objective and the fp64 reference compute."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import Case, make_case
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from oracle import TOLERANCE, Result, assert_gradient, assert_outputs_agree, check, ours
from pairwise import pairwise
from torch import Tensor

from fused_grpo import grpo_loss, objectives, triton_policy
from fused_grpo.aggregation import SCHEMES
from fused_grpo.batch import TokenBatch, make_batch
from fused_grpo.objectives import LOSS_TYPES, LossSpec, LossType, Objective, TokenView, surrogates
from fused_grpo.passes import TokenValues
from fused_grpo.ratios import LEVELS
from fused_grpo.reference import reference_policy_loss
from fused_grpo.triton_policy import KernelObjective, make_objective, unsupported

triton = pytest.importorskip("triton")
if not torch.cuda.is_available() and not triton.knobs.runtime.interpret:
    pytest.skip("triton was imported without TRITON_INTERPRET=1", allow_module_level=True)

import triton.language as tl  # noqa: E402

from fused_grpo_kernels import policy  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Rounding of a few fp32 operations, of an exponential at |d| <= 20 (whose argument alone carries
# 20 * 2^-24), and of sums of up to a few hundred such terms.
TOL = 3e-6
PHASES = (Phase.generate,)  # shrinking a failure would take minutes


@dataclass
class Batch:
    """Padded tensors of a policy loss, in fp32."""

    logps: Tensor
    advantages: Tensor
    tensors: dict[str, Tensor]
    entropies: Tensor

    def flat(
        self, dtype: torch.dtype = torch.float32, compact: bool = True
    ) -> tuple[TokenBatch, Tensor, Tensor]:
        """TokenBatch, log-probabilities [n] and entropies [n]."""
        names = ("completion_mask", "old_per_token_logps", "ref_per_token_logps")
        tensors = {name: self.tensors.get(name) for name in (*names, "importance_sampling_ratio")}
        batch = make_batch(
            self.logps, self.advantages, cu_seqlens=None, dtype=dtype, compact=compact, **tensors
        )
        flat = (x.reshape(-1)[batch.index].to(dtype) for x in (self.logps, self.entropies))
        return batch, *flat


def make(
    *,
    seed: int = 0,
    shape: tuple[int, int] = (5, 13),
    old: Tensor | None = None,
    ref: Tensor | None = None,
    importance: bool = False,
) -> Batch:
    """A ragged batch, its last sequence empty; `old` and `ref` are log-ratios to cycle through."""
    g = torch.Generator().manual_seed(seed)
    logps = -3 * torch.rand(shape, generator=g)
    mask = torch.rand(shape, generator=g) > 0.3
    mask[-1] = False
    tensors = {"completion_mask": mask}

    def spread(values: Tensor) -> Tensor:
        picked = torch.randint(len(values), shape, generator=g)
        return values[picked] + 1e-3 * torch.rand(shape, generator=g)

    if old is not None:
        tensors["old_per_token_logps"] = logps - spread(old)
    if ref is not None:
        tensors["ref_per_token_logps"] = logps + spread(ref)
    if importance:
        tensors["importance_sampling_ratio"] = torch.rand(shape, generator=g) * 2
    advantages = torch.randn(shape[0], generator=g)
    advantages[1] = 0.0
    batch = Batch(logps, advantages, tensors, 4 * torch.rand(shape, generator=g))
    return Batch(
        batch.logps.to(DEVICE),
        batch.advantages.to(DEVICE),
        {k: v.to(DEVICE) for k, v in tensors.items()},
        batch.entropies.to(DEVICE),
    )


def close(got: Tensor, want: Tensor, name: str, tol: float = TOL) -> None:
    torch.testing.assert_close(
        got.double(),
        want.double(),
        atol=tol,
        rtol=tol,
        equal_nan=True,
        msg=lambda m: f"{name}: {m}",
    )


def close_to_scale(got: Tensor, want: Tensor, name: str, tol: float = TOL) -> None:
    """Within tol of each value, or of the share of it that cancelled terms have left."""
    scale = want[want.isfinite()].abs().amax().clamp(min=1e-30)
    close(got / scale, want / scale, name, tol)


def run(objective: Objective, logps: Tensor, entropy: Tensor | None, spans: int = 1) -> Any:
    """(per-token loss, g, e, total, metrics), evaluated in `spans` spans."""
    parts, n = [], logps.numel()
    step = math.ceil(n / spans)
    for start in range(0, n, step):
        span = slice(start, min(start + step, n))
        values = TokenValues(logps[span], None if entropy is None else entropy[span])
        losses, upstream = objective.evaluate(span, values)
        parts.append((losses, upstream.logps, upstream.entropy))
    loss, g = (torch.cat([p[i] for p in parts]) for i in (0, 1))
    e = None if parts[0][2] is None else torch.cat([p[2] for p in parts])
    metrics = objective.metrics(TokenValues(logps, entropy), g)
    return loss, g, e, objective.total(loss), metrics


BOTH = (torch.float32, torch.float64)


def compare(
    batch: Batch, spec: LossSpec, spans: int = 1, dtypes: tuple[torch.dtype, ...] = BOTH
) -> None:
    """The kernel against the torch objective in fp32 and in fp64."""
    flat, logps, entropy = batch.flat()
    got = run(KernelObjective(spec, flat), logps, entropy, spans)
    for dtype in dtypes:
        want = run(Objective(spec, batch.flat(dtype)[0]), *batch.flat(dtype)[1:])
        agree(got, want)


def agree(got: Any, want: Any) -> None:
    """Two results of `run`."""
    for name, a, b in zip(("loss", "g", "e"), got, want, strict=False):
        assert (a is None) == (b is None)
        if a is not None:
            # one ratio of e^20 must not hide what the others are
            close(a, b, name) if name == "loss" else close_to_scale(a, b, name)
    close(got[3], want[3], "total", 2 * TOL)
    assert got[4].keys() == want[4].keys()
    for name, value in want[4].items():
        assert got[4][name].shape == ()
        close(got[4][name], value, name, 2 * TOL)


# --- options -------------------------------------------------------------------------------------

LOSSES = (
    {"loss_type": "grpo"},
    {"loss_type": "bnpo"},
    {"loss_type": "dapo"},
    {"loss_type": "dapo", "num_items_in_batch": 77},
    {"loss_type": "dapo", "num_items_in_batch": 0.25},  # counts as 1
    {"loss_type": "dr_grpo", "max_completion_length": 19},
)
# Log-ratios: tiny, inside and outside the clip, around the clamps; and far beyond exp's range.
RATIOS = torch.tensor([0.01, 0.0, 1e-6, -1e-6, 0.1, -0.15, 0.5, -0.9, 3.0, -3.0, 19.0, -25.0])
EXTREME = torch.tensor([40.0, -40.0, 88.0, -104.0, 300.0, -1e4, 0.3])

specs = st.fixed_dictionaries(
    {
        "loss": st.sampled_from(LOSSES),
        "importance_sampling_level": st.sampled_from(["token", "sequence"]),
        "epsilon_low": st.sampled_from([0.2, 0.0, 0.35]),
        "epsilon_high": st.sampled_from([None, 0.28, 4.0]),
        "delta": st.sampled_from([None, 1.7, 1.1]),
        "beta": st.sampled_from([0.0, 0.05]),
        "use_bias_correction_kl": st.booleans(),
        "entropy_coef": st.sampled_from([0.0, 0.01, -0.02]),
        "log_ratio_clamp": st.sampled_from([20.0, 2.5, math.inf, None]),
    }
)


def spec_of(drawn: dict[str, Any]) -> LossSpec:
    options = dict(drawn)
    options.update(options.pop("loss"))
    options["use_bias_correction_kl"] &= options["beta"] > 0
    return LossSpec(**options)


@given(specs, st.booleans(), st.booleans(), st.integers(0, 99))
@settings(max_examples=60, deadline=None, derandomize=True, phases=PHASES)
def test_kernel_agrees_with_torch_and_fp64_over_all_options(drawn, old, importance, seed):
    spec = spec_of(drawn)
    # away from the bounds by more than rounding, at token level; a mean may be anywhere
    batch = make(
        seed=seed,
        old=RATIOS[:9] if old else None,
        ref=RATIOS[:9] if spec.beta else None,
        importance=importance,
    )
    compare(batch, spec)


OBJECTIVES = [
    (name, level)
    for name, row in LOSS_TYPES.items()
    for level in LEVELS
    if row.surrogate in triton_policy.NUMBERS
    and (level == "token" or "importance_sampling_level" in row.takes)
]
NEEDED = {"dro": {"log_ratio_penalty": 0.3}, "dr_grpo": {"max_completion_length": 9}}
MORE = (
    {},
    {"beta": 0.1, "entropy_coef": 0.02, "dual_clip": 1.3},
    {"beta": 0.1, "use_bias_correction_kl": True, "aggregation": "nonempty_sequence_mean"},
)


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize(("name", "level"), OBJECTIVES)
def test_every_objective_that_it_knows_agrees_with_torch_in_fp64(name, level, old):
    row = LOSS_TYPES[name]
    for seed, more in enumerate(MORE):
        options = NEEDED.get(name, {}) | more
        if "dual_clip" not in row.takes:
            options.pop("dual_clip", None)
        if "aggregation" in options:
            options.pop("max_completion_length", None)
        if level != "token":
            options["importance_sampling_level"] = level
        spec = LossSpec(loss_type=name, **options)
        batch = make(
            seed=seed,
            old=RATIOS[:7] if old and spec.uses_old else None,
            ref=RATIOS[:9] if spec.beta else None,
            importance=seed == 1,
        )
        assert unsupported(spec, batch.flat()[0]) is None
        compare(batch, spec, dtypes=(torch.float64,))


@pytest.mark.parametrize("where", ["logps", "old_per_token_logps", "advantages"])
@pytest.mark.parametrize("name", sorted({name for name, _ in OBJECTIVES} - {"reinforce"}))
def test_nan_spreads_as_in_torch_with_every_objective(name, where):
    batch = make(old=RATIOS[3:8])
    row = int(batch.tensors["completion_mask"][0].nonzero()[0])
    hit = {"logps": batch.logps, "advantages": batch.advantages[:, None]} | batch.tensors
    hit[where][0, row if where != "advantages" else 0] = math.nan
    flat, logps, _ = batch.flat()
    spec = LossSpec(loss_type=name, **NEEDED.get(name, {}))
    got, want = (run(kind(spec, flat), logps, None) for kind in (KernelObjective, Objective))
    assert want[0].isnan().any()
    for what, a, b in zip(("loss", "g"), got, want, strict=False):
        close(a, b, what)
    for what, value in want[4].items():
        close(got[4][what], value, what)


GIVEN = {"max_completion_length": 19, "num_sequences": 7, "num_items_in_batch": 77}


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_of_weights(name, accumulates):
    scheme, batch = SCHEMES[name], make(old=RATIOS[:9])
    options = {k: v for k, v in GIVEN.items() if k in scheme.needs}
    if accumulates:
        options |= {k: v for k, v in GIVEN.items() if k in scheme.takes}
    spec = LossSpec(aggregation=name, entropy_coef=0.1, **options)
    groups = torch.tensor([4, 4, 1, 1, 1], device=DEVICE) if scheme.per == "group" else None
    results = []
    for dtype, kind in ((torch.float32, KernelObjective), (torch.float64, Objective)):
        flat, logps, entropy = batch.flat(dtype)
        flat = replace(flat, group_ids=groups)
        assert dtype == torch.float64 or unsupported(spec, flat) is None
        results.append(run(kind(spec, flat), logps, entropy))
    agree(*results)


@pytest.mark.parametrize("level", LEVELS)
def test_token_weights_of_the_caller(level):
    """A weight of 0 leaves nothing to send back at that token."""
    batch, results = make(old=RATIOS[:9], ref=RATIOS[:9]), []
    spec = LossSpec(beta=0.1, entropy_coef=0.1, importance_sampling_level=level)
    for dtype, kind in ((torch.float32, KernelObjective), (torch.float64, Objective)):
        flat, logps, entropy = batch.flat(dtype)
        weights = torch.linspace(-0.5, 1.0, logps.numel(), device=DEVICE).to(dtype)
        weights[::4] = 0
        flat = replace(flat, token_weights=weights)
        assert dtype == torch.float64 or unsupported(spec, flat) is None
        results.append(run(kind(spec, flat), logps, entropy))
    agree(*results)
    assert float(results[0][4]["zero_coefficient_fraction"]) > 0


@given(specs, st.integers(0, 99))
@settings(max_examples=25, deadline=None, derandomize=True, phases=PHASES)
def test_extreme_log_ratios_go_where_torch_sends_them(drawn, seed):
    """With no clamp e^300 is inf: what is not finite has to stand in the same places."""
    spec = replace(spec_of(drawn), importance_sampling_level="token", use_bias_correction_kl=False)
    compare_places(make(seed=seed, old=EXTREME, ref=EXTREME if spec.beta else None), spec)


def compare_places(batch: Batch, spec: LossSpec) -> None:
    flat, logps, entropy = batch.flat()
    got = run(KernelObjective(spec, flat), logps, entropy)
    want = run(Objective(spec, flat), logps, entropy)
    for name, a, b in zip(("loss", "g"), got, want, strict=False):
        # near the largest float an ulp decides between it, infinity, and inf - inf = NaN
        fits = [x.isfinite() & (x.abs() < 1e37) for x in (a, b)]
        assert torch.equal(*fits), name
        close(a[fits[0]], b[fits[0]], name, 1e-4)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("limit", [20.0, None])
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
@pytest.mark.parametrize(
    "where", ["logps", "old_per_token_logps", "ref_per_token_logps", "advantages"]
)
def test_nan_and_infinity_spread_as_in_torch(where, bad, limit, level):
    batch = make(old=RATIOS[3:8], ref=RATIOS[3:8])
    row = int(batch.tensors["completion_mask"][0].nonzero()[0])
    spec = LossSpec(
        beta=0.1, log_ratio_clamp=limit, importance_sampling_level=level, entropy_coef=0.1
    )
    clean = run(Objective(spec, batch.flat()[0]), *batch.flat()[1:])[0]
    hit = {"logps": batch.logps, "advantages": batch.advantages[:, None]} | batch.tensors
    hit[where][0, row if where != "advantages" else 0] = bad
    flat, logps, entropy = batch.flat()
    got = run(KernelObjective(spec, flat), logps, entropy)
    want = run(Objective(spec, flat), logps, entropy)
    assert not torch.equal(want[0], clean), "nothing was hit"
    for name, a, b in zip(("loss", "g", "e", "total"), got, want, strict=False):
        close(a, b, name)
    for name, value in want[4].items():
        close(got[4][name], value, name)


def test_the_fp64_reference_and_the_kernel_agree_end_to_end():
    batch = make(old=RATIOS[:9], ref=RATIOS[:9], importance=True)
    options = {
        "loss_type": "grpo",
        "beta": 0.1,
        "epsilon_high": 0.28,
        "delta": 1.7,
        "entropy_coef": 0.02,
        "use_bias_correction_kl": True,
    }
    for level in ("token", "sequence"):
        leaf = batch.logps.double().requires_grad_()
        want = reference_policy_loss(
            leaf,
            batch.advantages.double(),
            entropies=batch.entropies.double(),
            importance_sampling_level=level,
            **{k: v if v.dtype == torch.bool else v.double() for k, v in batch.tensors.items()},
            **options,
        )
        want.loss.backward()
        flat, logps, entropy = batch.flat()
        spec = LossSpec(importance_sampling_level=level, **options)
        loss, g, _, total, metrics = run(KernelObjective(spec, flat), logps, entropy)
        close(flat.to_layout(loss), want.per_token_loss.detach(), "per token")
        close_to_scale(flat.to_layout(g), leaf.grad, "g")
        close(total, want.loss.detach(), "loss")
        for name in want.metrics.keys() - {"zero_coefficient_fraction"}:
            close(metrics[name], want.metrics[name], name)


def test_the_corrected_kl_keeps_its_gradient_where_its_parts_cancel():
    """ratio k3 and -ratio expm1 both hold e^d: at d = 19 fp32 autograd has no digit left."""
    batch = make(old=torch.tensor([0.1, -0.4]), ref=torch.tensor([19.0, 17.0, -18.0, 0.3]))
    spec = LossSpec(beta=1.0, use_bias_correction_kl=True)
    flat, logps, entropy = batch.flat()
    got = run(KernelObjective(spec, flat), logps, entropy)[1]
    want = run(Objective(spec, batch.flat(torch.float64)[0]), *batch.flat(torch.float64)[1:])[1]
    assert ((got - want).abs() <= 2e-5 * want.abs()).all()


# --- bounds, series, sums ------------------------------------------------------------------------


@triton.jit
def _surrogate(ratio, a, value, slope, low, high, delta, dual, F: tl.constexpr, N: tl.constexpr):
    t = tl.arange(0, N)
    r, x = tl.load(ratio + t), tl.load(a + t)
    v, s, _, _, _ = F(x, x, r, r, x, low, high, delta, dual)
    tl.store(value + t, v)
    tl.store(slope + t, s)


@triton.jit
def _expm1_k3(d, expm1, k3, N: tl.constexpr):
    t = tl.arange(0, N)
    a, b = policy._expm1_and_k3(tl.load(d + t))
    tl.store(expm1 + t, a)
    tl.store(k3 + t, b)


@pytest.mark.parametrize(("delta", "dual"), [(None, None), (1.5, None), (None, 1.5)])
def test_ties_and_bounds_have_the_gradient_of_torch(delta, dual):
    low, high = 0.8, 1.25
    bounds = torch.tensor([low, high, 1.5, 1.0], dtype=torch.float32)
    others = torch.tensor([0.0, math.inf, math.nan, 7.0])
    around = [bounds.nextafter(bounds + step) for step in (-1, 0, 1)]
    ratio = torch.cat([*around, others])
    ratio, a = (
        x.reshape(-1)
        for x in torch.meshgrid(ratio, torch.tensor([2.0, -1.0, 0.0, 0.5]), indexing="ij")
    )
    leaf, a = ratio.to(DEVICE).requires_grad_(), a.to(DEVICE)
    spec = LossSpec(epsilon_low=1 - low, epsilon_high=high - 1, delta=delta, dual_clip=dual)
    want = surrogates.clip(SimpleNamespace(ratio=leaf, advantages=a), spec)
    (slope,) = torch.autograd.grad(want.sum(), leaf)
    got, got_slope = torch.empty_like(a), torch.empty_like(a)
    bound = (1 - spec.epsilon_low, 1 + spec.upper, delta, dual)
    _surrogate[(1,)](leaf.detach(), a, got, got_slope, *bound, policy.clip, a.numel())
    torch.testing.assert_close(got, want.detach(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(got_slope, slope, rtol=0, atol=0, equal_nan=True)


def test_the_mask_of_importance_sampling_takes_its_bounds_in():
    bounds = torch.tensor([0.75, 1.25], dtype=torch.float32)  # exact in fp32
    ratio = torch.cat([bounds.nextafter(bounds - 1), bounds, bounds.nextafter(bounds + 1)])
    ratio = torch.cat([ratio, torch.tensor([1.0, math.nan])]).to(DEVICE)
    a = torch.full_like(ratio, 1.5)
    spec = LossSpec(loss_type="masked_importance_sampling", epsilon_low=0.25, epsilon_high=0.25)
    tokens = SimpleNamespace(ratio=ratio, advantages=a, logps=a)
    want = surrogates.masked_importance_sampling(tokens, spec)
    got, slope = torch.empty_like(a), torch.empty_like(a)
    how = (0.75, 1.25, None, None, policy.masked_importance_sampling, a.numel())
    _surrogate[(1,)](ratio, a, got, slope, *how)
    assert (want == 0).sum() == 4
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_expm1_and_k3_are_accurate_near_zero_and_everywhere():
    magnitudes = torch.cat(
        [torch.logspace(-12, 1.3, 250), torch.tensor([1.0, 0.99999994, 1e-30, 0.0, 0.5, 2.0])]
    )
    d = torch.cat([magnitudes, -magnitudes]).to(DEVICE)
    expm1, k3 = torch.empty_like(d), torch.empty_like(d)
    _expm1_k3[(1,)](d, expm1, k3, d.numel())
    x = d.double()
    exact = torch.where(
        x.abs() < 0.1,  # a series in fp64, as the difference has lost its digits there
        sum(x**k / math.factorial(k) for k in range(2, 12)),
        torch.expm1(x) - x,
    )
    assert (k3 >= 0).all()
    assert ((k3 == 0) == (exact.float() == 0)).all()
    for got, want in ((expm1, torch.expm1(x)), (k3, exact)):
        normal = want.abs() > 1e-37
        assert ((got - want).abs()[normal] / want.abs()[normal]).amax() < 2e-6


def test_the_same_call_twice_gives_the_same_bits():
    batch = make(old=RATIOS, ref=RATIOS, shape=(8, 300))
    spec = LossSpec(beta=0.1, entropy_coef=0.1, importance_sampling_level="sequence")
    flat, logps, entropy = batch.flat()
    first, second = (run(KernelObjective(spec, flat), logps, entropy) for _ in range(2))
    for a, b in zip(first[:4], second[:4], strict=True):
        assert torch.equal(a, b)
    assert all(torch.equal(first[4][name], second[4][name]) for name in first[4])


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_sums_over_many_blocks_and_long_sequences(level):
    """More blocks than the second stage reads at once; sequences longer than a block, and empty."""
    shape = (3, 9000) if level == "token" else (4, 2600)
    batch = make(old=RATIOS[:9], ref=RATIOS[:9], shape=shape)
    spec = LossSpec(loss_type="grpo", beta=0.1, importance_sampling_level=level)
    if level == "token":
        assert int(batch.tensors["completion_mask"].sum()) > policy.BLOCK * policy.ROWS // 2
    # torch adds up a sequence in fp32 one by one, and is further from the truth than the kernel
    compare(batch, spec, dtypes=(torch.float64,) if level == "sequence" else BOTH)


@pytest.mark.parametrize("spans", [2, 3, 7])
@pytest.mark.parametrize("old", [True, False])
def test_totals_and_metrics_cover_all_spans(spans, old):
    batch = make(old=RATIOS[:9] if old else None, ref=RATIOS[:9])
    level = "token" if old else "sequence"  # local to a span without old log-probabilities
    spec = LossSpec(loss_type="grpo", beta=0.1, entropy_coef=0.1, importance_sampling_level=level)
    assert KernelObjective(spec, batch.flat()[0]).local
    compare(batch, spec, spans)


def test_many_partial_sums_are_added_with_their_extremes():
    g = torch.Generator().manual_seed(0)
    partials = torch.randn(3 * policy.ROWS + 5, policy.WIDTH.value, generator=g).to(DEVICE)
    out = policy.totals(partials)
    names = policy.COLUMNS
    for i, name in enumerate(names):
        column = partials[:, i].double()
        kind = name.rpartition("_")[2]
        want = {"min": column.amin(), "max": column.amax()}.get(kind, column.sum())
        close(out[i], want, name, 1e-6)
    partials[7, names.index("ratio_max")] = math.nan
    out = policy.totals(partials)
    assert out.isnan().nonzero().squeeze(1).tolist() == [names.index("ratio_max")]


# --- given weights, masks ------------------------------------------------------------------------


def test_given_weights_and_uncounted_tokens():
    """Tokens that do not count may hold anything; they get zeros and enter no sum."""
    batch = make(old=RATIOS[:9], ref=RATIOS[:9])
    flat, logps, _ = batch.flat()
    n = logps.numel()
    counted = torch.arange(n, device=DEVICE) % 3 != 1
    weights = torch.linspace(0.1, 1.0, n, device=DEVICE)
    spec = LossSpec(beta=0.1)
    options = KernelObjective(spec, flat)._options()
    poison = torch.where(counted, 0.0, math.nan)
    inputs = policy.Inputs(
        logps + poison,
        flat.advantages + poison,
        flat.old + poison,
        flat.ref + poison,
        counted=counted,
    )
    out = policy.policy_terms(inputs, policy.Weights(given=weights), options)
    leaf = logps.clone().requires_grad_()
    want = objectives.token_terms(leaf, flat, spec).loss
    (g,) = torch.autograd.grad((want * weights)[counted].sum(), leaf)
    close(out.loss, want.detach() * counted, "loss")
    close(out.g, g, "g")
    sums = dict(zip(policy.COLUMNS, policy.totals(out.partials), strict=False))
    close(sums["loss"], (want * weights)[counted].sum().detach(), "total")
    assert int(sums["count"]) == int(counted.sum())
    assert sums["ratio_max"].isfinite()


CAPACITY = pairwise({"loss": LOSSES, "old": (True, False), "level": ("token", "sequence")})


@pytest.mark.parametrize("row", CAPACITY, ids=str)
def test_with_a_fixed_capacity_only_counted_tokens_matter(row):
    loss, old, level = row["loss"], row["old"], row["level"]
    batch = make(old=RATIOS[:9] if old else None, ref=RATIOS[:9])
    spec = LossSpec(beta=0.1, entropy_coef=0.05, importance_sampling_level=level, **loss)
    flat, logps, entropy = batch.flat()
    want = run(KernelObjective(spec, flat), logps, entropy)
    mask = batch.tensors["completion_mask"]
    for x in (batch.logps, batch.entropies, *batch.tensors.values()):
        if x is not mask:
            x[~mask] = math.nan
    full, logps, entropy = batch.flat(compact=False)
    assert logps.numel() == mask.numel()
    assert type(make_objective(spec, full, "triton")) is KernelObjective
    got = run(KernelObjective(spec, full), logps, entropy)
    for name, a, b in zip(("loss", "g", "e"), got, want, strict=False):
        close_to_scale(a.view(mask.shape), flat.to_layout(b), name)
        assert not a[~mask.reshape(-1)].any()
    close(got[3], want[3], "total")
    for name, value in want[4].items():
        close(got[4][name], value, name)


def check_against_torch(case: Case, got: Result, **how: Any) -> None:
    """The torch backend in fp64, whose objectives other tests hold to formulas of their own."""
    want = ours(case, backend="chunked", convert=Tensor.double, **how)
    assert_outputs_agree(got.output, want.output, TOLERANCE[torch.float32])
    assert got.output.metrics.keys() == want.output.metrics.keys()
    for name, expected in want.grads.items():
        assert_gradient(name, got.grads[name], expected, torch.float32, 1e-5)


CAPABLE = [pair for pair in OBJECTIVES if pair[1] in triton_policy.CAPACITY_LEVELS]
CAPABLE = [(n, s) for n, s in CAPABLE if (LOSS_TYPES[n].level or s) in ("token", "sequence")]


@pytest.mark.parametrize(("reduction", "old"), [("sum", True), ("sum", False), ("none", True)])
@pytest.mark.parametrize(("name", "level"), CAPABLE)
def test_every_objective_with_a_fixed_capacity(name, level, reduction, old):
    """Through the public loss, against float64; `reduction="none"` is evaluated by torch."""
    options = dict(NEEDED.get(name, {}))
    if level != "token":
        options["importance_sampling_level"] = level
    old &= LossSpec(loss_type=name, **options).uses_old
    case = make_case(
        dtype=torch.float32, rows=3, width=5, vocab=33, dim=16, old=old, ref=False, loss_type=name,
        **options,
    )  # fmt: skip
    how = {"reduction": reduction, "backend": "triton", "compact": False}
    check_against_torch(case, ours(case, **how), reduction=reduction)


@pytest.mark.parametrize("name", sorted(set(SCHEMES) - {"group_mean"}))
def test_every_scheme_with_a_fixed_capacity(name):
    options = {k: v for k, v in GIVEN.items() if k in SCHEMES[name].needs}
    case = make_case(
        dtype=torch.float32, rows=3, width=5, vocab=33, dim=16, ref=False, aggregation=name,
        **options,
    )  # fmt: skip
    case.tensors["completion_mask"] = case.mask.clone()
    case.tensors["completion_mask"][1] = False  # an empty sequence
    check_against_torch(case, ours(case, backend="triton", compact=False))


def test_token_weights_with_a_fixed_capacity():
    case = make_case(dtype=torch.float32, rows=3, width=5, vocab=33, dim=16, beta=0.1)
    weights = torch.linspace(0.1, 2.0, case.ids.numel()).view(case.ids.shape)
    case.tensors["token_weights"] = weights.masked_fill(~case.mask, math.nan)
    check_against_torch(case, ours(case, backend="triton", compact=False))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"loss_type": "gspo_token"}, "the level is 'sequence_token'"),
        ({"loss_type": "rloo"}, "the level is 'sequence_sum'"),
        ({"loss_type": "gmpo"}, "no closed form"),
        ({"loss_type": "vespo"}, "no closed form"),
        ({"beta": 0.1, "kl_estimator": "k1"}, "kl_estimator='k1'"),
        ({"top_entropy_quantile": 0.5}, "top_entropy_quantile=0.5"),
        ({"aggregation": "group_mean"}, "divide by groups"),
    ],
    ids=str,
)
def test_a_fixed_capacity_refuses_what_needs_the_counted_tokens(options, reason):
    with pytest.raises(ValueError, match=f"compact=False.*{reason}"):
        triton_policy.fixed_capacity(LossSpec(**options), {})


@pytest.mark.parametrize("name", ["sampling_per_token_logps", "group_ids"])
def test_a_fixed_capacity_refuses_tensors_it_does_not_know(name):
    known = dict.fromkeys(triton_policy.CAPACITY_TENSORS, torch.ones(1))
    triton_policy.fixed_capacity(LossSpec(), known)
    with pytest.raises(ValueError, match=f"compact=False.*{name} is given"):
        triton_policy.fixed_capacity(LossSpec(), known | {name: torch.ones(1)})


def test_segment_mean_counts_only_what_counts():
    values = torch.arange(10.0, device=DEVICE)
    counted = values % 2 == 0
    offsets = torch.tensor([0, 4, 4, 9, 10], device=DEVICE)
    poisoned = torch.where(counted, values, math.nan)
    got = policy.per_segment(poisoned, offsets, counted=counted, addend=poisoned)
    want = torch.tensor([1.0, 0, 3, 0, 10, 0, 12, 0, 14, 0], device=DEVICE)
    assert torch.equal(got, want)


# --- what the kernel does not know ---------------------------------------------------------------


@dataclass(frozen=True)
class _NewerSpec(LossSpec):
    shape: float = 0.0


def test_an_option_the_kernel_does_not_know_stays_in_torch():
    flat = make().flat()[0]
    assert unsupported(_NewerSpec(), flat) is None
    assert "shape=1.0" in unsupported(_NewerSpec(shape=1.0), flat)
    assert type(make_objective(_NewerSpec(shape=1.0), flat, "triton")) is Objective
    assert type(make_objective(_NewerSpec(), flat, "triton")) is KernelObjective
    assert type(make_objective(_NewerSpec(), flat, "chunked")) is Objective


def test_a_surrogate_the_kernel_does_not_know_stays_in_torch(monkeypatch):
    def mine(view: TokenView, spec: LossSpec) -> Tensor:
        return -view.ratio * view.advantages

    monkeypatch.setitem(LOSS_TYPES, "mine", LossType(mine, "token_mean"))
    assert "mine" in unsupported(LossSpec(loss_type="mine"), make().flat()[0])


def test_a_penalty_on_the_log_ratio_of_a_sequence_stays_in_torch(monkeypatch):
    """Only an objective of one's own can take these functions to another level."""
    row = LossType(
        surrogates.dro, "token_mean", takes=LOSS_TYPES["cispo"].takes | {"log_ratio_penalty"}
    )
    monkeypatch.setitem(LOSS_TYPES, "mine", row)
    options = {"loss_type": "mine", "log_ratio_penalty": 0.1}
    assert unsupported(LossSpec(**options), make().flat()[0]) is None
    spec = LossSpec(importance_sampling_level="sequence", **options)
    assert "penalty" in unsupported(spec, make().flat()[0])


def test_fp64_and_empty_batches_stay_in_torch():
    batch = make()
    assert "fp32" in unsupported(LossSpec(), batch.flat(torch.float64)[0])
    batch.tensors["completion_mask"][:] = False
    assert "no tokens" in unsupported(LossSpec(), batch.flat()[0])


@dataclass(frozen=True)
class _NewerBatch(TokenBatch):
    extra: Tensor | None = None


def test_a_field_of_a_batch_that_the_kernel_does_not_know_stays_in_torch():
    flat = make().flat()[0]
    newer = _NewerBatch(**{f.name: getattr(flat, f.name) for f in fields(flat)})
    assert unsupported(LossSpec(), newer) is None
    assert "extra" in unsupported(LossSpec(), replace(newer, extra=flat.advantages))


# --- the public loss -----------------------------------------------------------------------------


@pytest.fixture
def launches(monkeypatch):
    """What the loss launched: number of tokens, by call of the policy kernel."""
    seen = []
    true = policy.policy_terms

    def counting(inputs: Any, *args: Any, **options: Any) -> Any:
        seen.append(inputs.logps.numel())
        return true(inputs, *args, **options)

    monkeypatch.setattr(policy, "policy_terms", counting)
    return seen


PUBLIC = pairwise(
    {
        "loss": LOSSES,
        "level": ("token", "sequence"),
        "old": (True, False),
        "beta": (0.0, 0.1),
        "corrected": (True, False),
        "entropy_coef": (0.0, 0.02),
        "chunk_bytes": (None, 60_000),
    }
)


@pytest.mark.parametrize("row", PUBLIC, ids=str)
def test_the_public_loss_uses_it_and_agrees_with_fp64(row, launches):
    case = make_case(
        dtype=torch.float32,
        rows=5,
        width=9,
        vocab=67,
        dim=16,
        old=row["old"],
        ref=row["beta"] > 0,
        importance_sampling_level=row["level"],
        beta=row["beta"],
        use_bias_correction_kl=row["corrected"] and row["beta"] > 0,
        entropy_coef=row["entropy_coef"],
        **row["loss"],
    )
    check(case, backend="triton", chunk_bytes=row["chunk_bytes"])
    assert sum(launches) >= int(case.mask.sum())


@pytest.mark.parametrize("chunk_bytes", [None, 60_000])
@pytest.mark.parametrize(("name", "level"), OBJECTIVES)
def test_every_objective_through_the_public_loss(name, level, chunk_bytes, launches):
    options = dict(NEEDED.get(name, {}))
    if level != "token":
        options["importance_sampling_level"] = level
    old = LossSpec(loss_type=name, **options).uses_old and chunk_bytes is None
    case = make_case(
        dtype=torch.float32, rows=3, width=5, vocab=67, dim=16, old=old, ref=True, beta=0.1,
        entropy_coef=0.02, loss_type=name, **options,
    )  # fmt: skip
    check_against_torch(case, ours(case, backend="triton", chunk_bytes=chunk_bytes))
    assert sum(launches) >= int(case.mask.sum())


def test_the_loss_can_be_divided_in_place():
    case = make_case(dtype=torch.float32, rows=3, width=4, vocab=33, dim=16, beta=0.1)
    whole = ours(case, backend="triton")
    hidden = case.hidden.clone().requires_grad_()
    loss = grpo_loss(
        hidden,
        case.weight,
        case.ids,
        case.advantages,
        backend="triton",
        **case.tensors,
        **case.options,
    ).loss
    loss /= 4
    loss.backward()
    torch.testing.assert_close(hidden.grad * 4, whole.grads["hidden"])


def test_the_public_loss_takes_torch_where_the_kernel_cannot(launches, monkeypatch):
    monkeypatch.setitem(
        LOSS_TYPES, "dapo", LossType(lambda t, spec: -(t.ratio - 1) * t.advantages, "token_mean")
    )
    case = make_case(dtype=torch.float32, rows=3, width=4, vocab=33, dim=16, ref=False)
    chunked, triton_ = (ours(case, backend=name) for name in ("chunked", "triton"))
    assert not launches
    close(triton_.output.loss.detach(), chunked.output.loss.detach(), "loss", 1e-5)


def test_the_tables_name_what_exists():
    assert set(policy.SURROGATES) == {f.__name__ for f in triton_policy.NUMBERS}
    assert set(policy._OPTIONS_OF) == set(policy.SURROGATES)
    assert set(LossSpec.__dataclass_fields__) >= triton_policy.HONOURED
    assert len(policy.COLUMNS) <= policy.WIDTH.value
    kinds = [name.rpartition("_")[2] for name in policy.COLUMNS]
    assert kinds.index("min") == policy._SUMS.value
    assert kinds.index("max") == policy._MINIMA.value
