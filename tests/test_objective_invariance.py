"""What must not change a loss: padding, packing, the order of sequences, chunks; and edge cases."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import Case
from objective_cases import CORRECTIONS, OBJECTIVES, applies, fused, make
from oracle import close, dtype_id
from torch import Tensor

from fused_grpo import grpo_loss, policy_loss
from fused_grpo.batch import make_batch
from fused_grpo.corrections import prepare
from fused_grpo.entropy import AdaptiveEntropy
from fused_grpo.objectives import LossSpec, Objective
from fused_grpo.objectives.objective import reach_of
from fused_grpo.passes import TokenValues

MIXES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sequence_rejection": CORRECTIONS["sequence_rejection"] | {"beta": 0.2},
    "geometric_mask": CORRECTIONS["geometric_mask"] | {"off_policy_mask_threshold": 0.05},
}
WHOLE = 1 << 30  # one chunk

# An order of the rows changes which tokens clip_cov draws, unless it draws all of them.
ROWS = [3, 0, 5, 1, 4, 2]


def mixed(objective: str, mix: str, old: bool) -> Case:
    options = MIXES[mix]
    if not applies(OBJECTIVES[objective], options):
        pytest.skip("refused, see test_objective_options")
    correction = {k: v for k, v in options.items() if k in ("rejection", "sampling_correction")}
    more = {k: v for k, v in options.items() if k not in correction}
    correction |= {k: more.pop(k) for k in list(more) if k.startswith("sampling_")}
    return make(OBJECTIVES[objective], {}, correction, old=old, **more)


@pytest.mark.parametrize(("mix", "old"), [*((mix, True) for mix in MIXES), ("plain", False)])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_layout_order_and_chunks_do_not_matter(objective: str, mix: str, old: bool) -> None:
    case = mixed(objective, mix, old)
    loss, grads, metrics = fused(case, chunk_bytes=WHOLE)

    def wider(x: Tensor) -> Tensor:
        return torch.cat([x, torch.full_like(x[:, :4], 0)], dim=1)

    def rows(x: Tensor) -> Tensor:
        return x[ROWS]

    padded = changed(case, wider, per_sequence=lambda x: x)
    ordered = changed(case, rows, per_sequence=rows)
    for other, layout, chunk, back in (
        (case, "padded", 1 << 12, lambda x: x),
        (case, "packed", 1 << 13, lambda x: x),
        (padded, "padded", 1 << 13, lambda x: x[:, :11]),
        (ordered, "packed", 1 << 13, lambda x: x[torch.tensor(ROWS).argsort()]),
    ):
        got, got_grads, got_metrics = fused(other, layout, chunk)
        close(got, loss, 1e-11, "loss")
        close(back(got_grads["hidden"]), grads["hidden"], 1e-11, "hidden")
        close(got_grads["weight"], grads["weight"], 1e-11, "weight")
        for name, value in metrics.items():
            close(got_metrics[name], value, 1e-6, name)


def changed(case: Case, per_token: Any, per_sequence: Any) -> Case:
    return replace(
        case,
        hidden=per_token(case.hidden),
        ids=per_token(case.ids),
        advantages=per_sequence(case.advantages),
        tensors={k: per_token(v) for k, v in case.tensors.items()},
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_lower_precision_follows_float64(objective: str, dtype: torch.dtype) -> None:
    """The vectors are fp32 for fp32 and bf16 heads; only the gradients are rounded to the leaf."""
    case = make(OBJECTIVES[objective], {}, {}, dtype=dtype)
    wide = replace(
        case,
        hidden=case.hidden.double(),
        weight=case.weight.double(),
        bias=case.bias.double(),
        advantages=case.advantages.double(),
        tensors={k: v.double() if v.is_floating_point() else v for k, v in case.tensors.items()},
    )
    loss, grads, _ = fused(case)
    want, wide_grads, _ = fused(wide)
    close(loss, want, 1e-4, "loss")
    for name, grad in wide_grads.items():
        error = (grads[name].double() - grad).norm() / grad.norm()
        assert error < (1e-4 if dtype == torch.float32 else 8e-3), f"{name}: {float(error):.1e}"


def reach(options: dict[str, Any], old: bool = False, sampler: bool = False) -> str:
    spec = LossSpec(**options)
    x = torch.zeros(2, 3)
    batch = make_batch(
        x,
        torch.ones(2),
        old_per_token_logps=x if old else None,
        sampling_per_token_logps=x if sampler else None,
        dtype=torch.float32,
    )
    return reach_of(spec, prepare(batch, spec))


@pytest.mark.parametrize(
    ("options", "old", "fresh"),
    [
        ({}, "token", "token"),
        ({"loss_type": "cispo"}, "token", "token"),
        ({"loss_type": "dppo_kl"}, "token", "token"),
        ({"importance_sampling_level": "sequence"}, "sequence", "fresh"),
        ({"importance_sampling_level": "sequence", "beta": 1.0}, "sequence", "fresh"),
        (
            {
                "importance_sampling_level": "sequence",
                "beta": 1.0,
                "use_bias_correction_kl": True,
            },
            "sequence",
            "sequence",
        ),
        ({"loss_type": "gspo"}, "sequence", "fresh"),
        ({"loss_type": "luspo"}, "sequence", "fresh"),
        ({"loss_type": "gmpo"}, "sequence", "fresh"),
        ({"loss_type": "vespo"}, "sequence", "fresh"),
        ({"loss_type": "clip_cov"}, "batch", "batch"),
        ({"loss_type": "kl_cov"}, "batch", "batch"),
        ({"top_entropy_quantile": 0.5}, "batch", "batch"),
        ({"off_policy_mask_threshold": 0.1}, "sequence", "sequence"),
        ({"entropy_coef": 0.1}, "token", "token"),
    ],
)
def test_what_a_gradient_depends_on(options: dict[str, Any], old: str, fresh: str) -> None:
    """The locality that decides on one pass; batch-level objectives are never local."""
    assert reach(options, old=True) == old
    assert reach(options) == fresh


@pytest.mark.parametrize(
    ("options", "with_old", "without"),
    [
        ({"sampling_correction": "token_mask"}, "token", "token"),
        ({"sampling_correction": "sequence_mask"}, "token", "sequence"),
        ({"sampling_correction": "geometric_mask"}, "token", "sequence"),
        ({"rejection": {"token_k1": 2.0}}, "token", "token"),
        ({"rejection": {"seq_mean_k3": 2.0}}, "token", "sequence"),
        ({"veto_ratio_min": 0.1}, "token", "sequence"),
        ({"sampling_correction": "monitor"}, "token", "token"),
        ({"loss_type": "gspo", "sampling_correction": "token_mask"}, "sequence", "sequence"),
    ],
)
def test_corrections_wait_for_the_log_probabilities_they_compare(
    options: dict[str, Any], with_old: str, without: str
) -> None:
    """Known beforehand where old log-probs are given; this policy's own otherwise."""
    assert reach(options, old=True, sampler=True) == with_old
    assert reach(options, sampler=True) == without


def test_zero_coefficient_tokens_are_counted() -> None:
    """A token that a mask silences sends nothing, its entropy bonus included."""
    case = make({}, {}, {}, top_entropy_quantile=0.4, entropy_coef=0.1)
    _, _, metrics = fused(case)
    assert float(metrics["policy_mask/dropped"]) == pytest.approx(0.6, abs=0.03)
    dropped = float(metrics["policy_mask/dropped"])
    assert float(metrics["zero_coefficient_fraction"]) == pytest.approx(dropped)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("fill", ["nothing", "one token", "one sequence"])
def test_edge_batches(objective: str, fill: str) -> None:
    """All masked: loss 0, gradients 0, finite metrics. One token, one sequence: finite."""
    case = make(OBJECTIVES[objective], {}, {}, beta=0.1, entropy_coef=0.1)
    mask = torch.zeros_like(case.mask)
    if fill == "one token":
        mask[2, 1] = True
    elif fill == "one sequence":
        mask[2] = case.mask[2]
    case.tensors["completion_mask"] = mask
    case.ids[~mask] = -100
    loss, grads, metrics = fused(case)
    for name, value in {"loss": loss, **grads, **metrics}.items():
        assert value.isfinite().all(), name
    if fill == "nothing":
        assert float(loss) == 0.0
        assert not any(grad.any() for grad in grads.values())


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_advantages_of_zero_teach_nothing(objective: str) -> None:
    """A group of one, or of equal rewards: every policy gradient is 0 without a penalty."""
    case = make(OBJECTIVES[objective], {}, {}, old=False)
    case.advantages.zero_()
    _, grads, _ = fused(case)
    assert not any(grad.any() for grad in grads.values())


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_nan_that_counts_is_seen_and_one_that_does_not_is_inert(objective: str) -> None:
    case = make(OBJECTIVES[objective], {}, {})
    if "old_per_token_logps" not in case.tensors:
        pytest.skip("takes no old log-probabilities")
    want, _, _ = fused(case)
    old = case.tensors["old_per_token_logps"]
    case.tensors["old_per_token_logps"] = torch.where(case.mask, old, math.nan)
    got, grads, _ = fused(case)
    close(got, want, 1e-12, "loss")
    assert all(grad.isfinite().all() for grad in grads.values())
    case.tensors["old_per_token_logps"] = old.clone()
    case.tensors["old_per_token_logps"][0, 0] = math.nan
    poisoned, _, _ = fused(case)
    assert poisoned.isnan()


# ---- details of single objectives


def flat(n: int, **options: Any) -> tuple[Objective, Tensor]:
    """An objective over one sequence of n tokens, and log-probs at which to evaluate it."""
    g = torch.Generator().manual_seed(1)
    logps = -torch.rand(1, n, generator=g, dtype=torch.float64) * 3
    spec = LossSpec(**options)
    batch = make_batch(
        logps,
        torch.randn(1, n, generator=g, dtype=torch.float64),
        old_per_token_logps=logps - 0.01,
        dtype=torch.float64,
    )
    return Objective(spec, batch), logps[0]


@pytest.mark.parametrize(("ratio", "count"), [(2e-4, 1), (0.01, 10), (0.0119, 11)])
def test_clip_cov_draws_as_many_as_asked_for_and_by_its_seed(ratio: float, count: int) -> None:
    def silent(seed: int) -> Tensor:
        objective, logps = flat(
            1000, loss_type="clip_cov", cov_ratio=ratio, cov_low=0.2, cov_seed=seed
        )
        g = objective.evaluate(slice(0, 1000), TokenValues(logps))[1].logps
        covariance = objective.batch.advantages - objective.batch.advantages.mean()
        covariance = covariance * (logps - logps.mean())
        chosen = g == 0
        assert ((covariance[chosen] > 0.2) & (covariance[chosen] < 5)).all()
        return chosen

    first = silent(0)
    assert int(first.sum()) == count
    assert torch.equal(first, silent(0))
    assert not torch.equal(first, silent(1))


def test_kl_counters() -> None:
    """How many tokens met the clamp of the log-ratio, and that of the value."""
    logps = torch.full((1, 4), -1.0, dtype=torch.float64)
    ref = logps + torch.tensor([0.0, 2.5, 3.5, -30.0], dtype=torch.float64)
    options = {"beta": 1.0, "ref_per_token_logps": ref, "kl_clamp": 10.0}
    metrics = policy_loss(logps, torch.zeros(1), **options).metrics
    assert float(metrics["kl/log_ratio_clamped"]) == 0.25
    assert float(metrics["kl/clamped"]) == 0.5  # e^3.5 - 4.5 = 28.6, and 19 at the clamp of -20
    for estimator in ("k1", "k2", "abs"):
        metrics = policy_loss(logps, torch.zeros(1), kl_estimator=estimator, **options).metrics
        assert float(metrics["kl/log_ratio_clamped"]) == 0.0
    metrics = policy_loss(
        logps, torch.zeros(1), beta=1.0, ref_per_token_logps=ref, log_ratio_clamp=None
    ).metrics
    assert float(metrics["kl/log_ratio_clamped"]) == float(metrics["kl/clamped"]) == 0.0


def test_clip_metrics_follow_the_objective() -> None:
    """Bounds of the objective itself; none where it has none."""
    logps = torch.full((1, 4), -1.0)
    old = logps - torch.tensor([0.0, 0.3, 2.0, -0.5])
    for options, low, high in (
        ({}, 0.25, 0.0),
        ({"loss_type": "cispo"}, 0.0, 0.0),
        ({"loss_type": "cispo", "ratio_min": 0.9}, 0.25, 0.0),
        ({"loss_type": "gmpo", "epsilon_low": 0.6}, 0.0, 0.0),
        ({"loss_type": "dppo_tv", "divergence_low": 0.1}, 0.25, 0.0),
        ({"loss_type": "prime_ipo"}, 0.5, 0.0),
    ):
        metrics = policy_loss(
            logps, torch.tensor([-1.0]), old_per_token_logps=old, **options
        ).metrics
        assert float(metrics["clip_ratio/low_mean"]) == low, options
        assert float(metrics["clip_ratio/high_mean"]) == high, options
    for name in ("sapo", "vespo", "importance_sampling"):
        metrics = policy_loss(
            logps, torch.tensor([-1.0]), old_per_token_logps=old, loss_type=name
        ).metrics
        assert not any(key.startswith("clip_ratio") for key in metrics), name


def test_group_of_one_through_the_loss() -> None:
    """G = 1, one row, packed or not: the same number."""
    hidden, weight = torch.randn(1, 3, 4), torch.randn(7, 4)
    ids, a = torch.tensor([[1, 2, 3]]), torch.tensor([0.5])
    for name in ("grpo", "gspo", "gmpo", "vespo", "rloo"):
        padded = grpo_loss(hidden, weight, ids, a, loss_type=name).loss
        packed = grpo_loss(
            hidden[0], weight, ids[0], a, loss_type=name, cu_seqlens=torch.tensor([0, 3])
        ).loss
        close(padded, packed, 1e-6, name)
        assert padded.isfinite()


def test_adaptive_entropy() -> None:
    """Skywork-OR1: up while the entropy is low, down otherwise, applied only where it was low."""
    control = AdaptiveEntropy(target=0.2, step=0.01, high=0.02)
    assert control.current == 0.0
    currents = []
    for entropy in (0.1, 0.1, 0.1, 0.3, 0.1, 0.2):
        control.update(entropy)
        currents.append(round(control.current, 9))
    assert currents == [0.01, 0.02, 0.02, 0.0, 0.02, 0.02]
    assert AdaptiveEntropy(**control.state()) == control
    for wrong, message in (
        ({"target": 0.0}, "target=0.0 must be > 0"),
        ({"step": math.inf}, "step=inf must be > 0"),
        ({"coef": 2.0}, "high=1.0 must hold"),
        ({"low": -1.0}, "low=-1.0"),
    ):
        with pytest.raises(ValueError, match=message):
            AdaptiveEntropy(**wrong)


def test_every_pair_of_objective_and_mix_is_met() -> None:
    """The product above skips what is refused only."""
    met = [
        pair
        for pair in itertools.product(OBJECTIVES, MIXES)
        if applies(OBJECTIVES[pair[0]], MIXES[pair[1]])
    ]
    assert len(met) >= 3 * len(OBJECTIVES) - 2
