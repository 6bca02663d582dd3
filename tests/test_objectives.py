"""Every objective, reduction and correction against the independent formulas of `formulas`."""

from __future__ import annotations

import itertools
from typing import Any

import formulas
import pytest
import torch
from objective_cases import (
    CORRECTIONS,
    GROUPS,
    OBJECTIVES,
    REDUCTIONS,
    applies,
    by_formula,
    by_policy_loss,
    formula_batch,
    from_head,
    fused,
    leaves_of,
    make,
    reduced,
)
from oracle import close

from fused_grpo.objectives import LOSS_TYPES

PAIRS = [
    (objective, correction)
    for objective, correction in itertools.product(OBJECTIVES, CORRECTIONS)
    if applies(OBJECTIVES[objective], CORRECTIONS[correction])
]


def agree(got: Any, want: Any, tol: float = 1e-10) -> None:
    """Loss and both gradients, elementwise; None is a gradient of zero."""
    close(got[0], want[0], tol, "loss")
    for name, a, b in (("logps", got[1], want[1]), ("entropy", got[2], want[2])):
        if a is None or b is None:
            assert all(x is None or not x.any() for x in (a, b)), name
        else:
            close(a, b, tol, f"gradient of {name}")


def test_every_objective_is_tested() -> None:
    """A new row of the table needs a formula of its own, and cases."""
    origins = {name: row.surrogate.__module__ for name, row in LOSS_TYPES.items()}
    own = {name for name, module in origins.items() if module.startswith("fused_grpo.objectives")}
    assert own == set(formulas.POLICY)
    assert own == {options.get("loss_type", "dapo") for options in OBJECTIVES.values()}


@pytest.mark.parametrize(("objective", "correction"), PAIRS)
def test_objective_by_reduction_by_correction(objective: str, correction: str) -> None:
    """The whole product, value and dL/dlogp, on log-probabilities."""
    case = make(OBJECTIVES[objective], {}, CORRECTIONS[correction])
    logps, entropy = leaves_of(case)
    batch = formula_batch(case, logps, entropy)
    losses = formulas.token_losses(batch)
    for name, reduction in REDUCTIONS.items():
        batch.options = reduced(formula_batch(case, logps, None).options, reduction)
        batch.groups = GROUPS.tolist()
        value = torch.where(case.mask, formulas.weights(batch) * losses, 0.0).sum()
        (want,) = torch.autograd.grad(value, logps, retain_graph=True)
        call = case.with_options()
        call.options = batch.options
        if name == "group_mean":
            call.tensors = case.tensors | {"group_ids": GROUPS}
        agree(by_policy_loss(call), (value, want, None))


@pytest.mark.parametrize(("objective", "correction"), PAIRS)
def test_without_old_log_probabilities(objective: str, correction: str) -> None:
    """Every ratio is 1, its gradient live, and the sampler is compared with this policy."""
    case = make(OBJECTIVES[objective], {}, CORRECTIONS[correction], old=False)
    agree(by_policy_loss(case), by_formula(case))


EXTRAS: dict[str, dict[str, Any]] = {
    "entropy": {"entropy_coef": 0.1},
    "positive_nll": {"positive_nll_coef": 0.2},
    "off_policy_mask": {"off_policy_mask_threshold": 0.05},
    "top_entropy": {"top_entropy_quantile": 0.4},
    "top_entropy_bonus": {"top_entropy_quantile": 0.4, "entropy_coef": -0.05},
    "kl": {"beta": 0.3},
    "kl_corrected": {"beta": 0.3, "use_bias_correction_kl": True, "kl_estimator": "k2"},
    "tight_clamp": {"log_ratio_clamp": 0.3, "beta": 0.3},
    "no_clamp": {"log_ratio_clamp": None, "beta": 0.3},
    "everything": {
        "beta": 0.3,
        "kl_estimator": "k3+",
        "kl_clamp": 0.2,
        "entropy_coef": 0.1,
        "positive_nll_coef": 0.2,
        "off_policy_mask_threshold": 0.05,
        "top_entropy_quantile": 0.7,
    },
}


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_with_everything_on_top(objective: str, extra: str) -> None:
    """KL, entropy bonus, likelihood of positives and masks join every objective alike."""
    for name in ("none", "token_truncate", "sequence_rejection"):
        if name == "none" or extra == "everything":
            case = make(OBJECTIVES[objective], {}, CORRECTIONS[name], **EXTRAS[extra])
            agree(by_policy_loss(case), by_formula(case))


@pytest.mark.parametrize("clamp", [None, 0.05])
@pytest.mark.parametrize("corrected", [False, True], ids=["plain", "corrected"])
@pytest.mark.parametrize(
    "estimator",
    ["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+", "k1_score", "k2_score", "k3_score"],
)
def test_kl_estimators(estimator: str, corrected: bool, clamp: float | None) -> None:
    options = {"kl_estimator": estimator, "use_bias_correction_kl": corrected, "kl_clamp": clamp}
    for level in (
        ("token", "sequence", "sequence_token", "sequence_sum") if corrected else ("token",)
    ):
        case = make({"importance_sampling_level": level}, {}, {}, beta=0.4, **options)
        agree(by_policy_loss(case), by_formula(case))


@pytest.mark.parametrize("old", [True, False], ids=["old", "fresh"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_fused_with_the_head(objective: str, layout: str, old: bool) -> None:
    """Gradients of hidden states, weight and bias, a few tokens to a chunk."""
    case = make(OBJECTIVES[objective], {}, {}, old=old, beta=0.2, entropy_coef=0.1)
    value, grads = from_head(case)
    got, got_grads, _ = fused(case, layout)
    close(got, value, 1e-10, "loss")
    for name, expected in grads.items():
        close(got_grads[name], expected, 1e-10, name)


@pytest.mark.parametrize("old", [True, False], ids=["old", "fresh"])
@pytest.mark.parametrize("correction", [c for c in CORRECTIONS if c != "none"])
@pytest.mark.parametrize("objective", ["dapo", "gspo", "vespo", "gmpo", "luspo"])
def test_corrections_fused_with_the_head(objective: str, correction: str, old: bool) -> None:
    """Corrections that wait for this policy's log-probs, and those known beforehand."""
    if not applies(OBJECTIVES[objective], CORRECTIONS[correction]):
        pytest.skip("refused, see test_objective_options")
    case = make(OBJECTIVES[objective], {}, CORRECTIONS[correction], old=old)
    value, grads = from_head(case)
    got, got_grads, _ = fused(case)
    close(got, value, 1e-10, "loss")
    for name, expected in grads.items():
        close(got_grads[name], expected, 1e-10, name)


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("objective", ["dapo", "gspo", "vespo", "cispo_sequence", "clip_cov"])
@pytest.mark.parametrize("old", [True, False], ids=["old", "fresh"])
def test_extras_fused_with_the_head(objective: str, extra: str, old: bool) -> None:
    more = EXTRAS[extra]
    if "off_policy_mask_threshold" in more and not old:
        pytest.skip("needs old or sampler log-probs")
    case = make(OBJECTIVES[objective], {}, {}, old=old, **more)
    value, grads = from_head(case)
    got, got_grads, _ = fused(case)
    close(got, value, 1e-10, "loss")
    for name, expected in grads.items():
        close(got_grads[name], expected, 1e-10, name)
