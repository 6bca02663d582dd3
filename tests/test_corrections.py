"""Corrections from sampler log-probs by hand: unknown values, garbage, statistics."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import Case
from objective_cases import CORRECTIONS, make
from oracle import close, ours
from torch import Tensor

from fused_grpo import policy_loss, sampling_statistics
from fused_grpo.corrections import CORRECTIONS as MODES
from fused_grpo.corrections import REJECTIONS

MODE_OPTIONS = {name: options for name, options in CORRECTIONS.items() if options}
MODE_OPTIONS.pop("given")


def loss_of(sampler: Tensor, **options: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(loss, gradient, metrics) of two sequences of two tokens with old log-probs of -1."""
    logps = torch.full((2, 2), -1.0, dtype=torch.float64, requires_grad=True)
    out = policy_loss(
        logps,
        torch.tensor([1.0, -1.0], dtype=torch.float64),
        old_per_token_logps=torch.full((2, 2), -1.0, dtype=torch.float64),
        sampling_per_token_logps=sampler.double(),
        aggregation="token_sum",
        **options,
    )
    out.loss.backward()
    return out.loss.detach(), logps.grad, out.metrics


def test_every_mode_and_criterion_is_tested() -> None:
    modes = {options.get("sampling_correction") for options in MODE_OPTIONS.values()}
    assert set(MODES) <= modes
    assert len(REJECTIONS) == 11


LOG2 = math.log(2)
SAMPLER = torch.tensor([[-1 - LOG2, -1.0], [-1.0, math.nan]], dtype=torch.float64)
# ratios 2, 1; 1, unknown


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({"sampling_correction": "token_truncate"}, [[2, 1], [1, 1]]),
        ({"sampling_correction": "token_truncate", "sampling_ratio_max": 1.5}, [[1.5, 1], [1, 1]]),
        ({"sampling_correction": "token_mask", "sampling_ratio_max": 1.5}, [[0, 1], [1, 1]]),
        ({"sampling_correction": "sequence_truncate"}, [[2, 2], [1, 1]]),
        ({"sampling_correction": "sequence_mask", "sampling_ratio_max": 1.5}, [[0, 0], [1, 1]]),
        ({"sampling_correction": "geometric_truncate"}, [[2**0.5, 2**0.5], [1, 1]]),
        ({"sampling_correction": "geometric_mask", "sampling_ratio_max": 1.4}, [[0, 0], [1, 1]]),
        ({"sampling_correction": "monitor"}, [[1, 1], [1, 1]]),
        ({"rejection": {"token_k1": 1.5}}, [[0, 1], [1, 1]]),
        ({"rejection": {"seq_sum_k2": 0.2}}, [[0, 0], [1, 1]]),
        ({"rejection": {"seq_max_k3": 0.31}}, [[1, 1], [1, 1]]),
        ({"rejection": {"seq_max_k3": 0.30}}, [[0, 0], [1, 1]]),
        ({"veto_ratio_max": 1.9}, [[0, 0], [1, 1]]),
        ({"veto_ratio_max": 2.1}, [[1, 1], [1, 1]]),
    ],
)
def test_numbers_by_hand(options: dict[str, Any], weights: list[list[float]]) -> None:
    """T4: the gradient of a fresh token is -A times its weight; an unknown log-prob: ratio 1."""
    want = torch.tensor(weights, dtype=torch.float64)
    loss, gradient, _ = loss_of(SAMPLER, **options)
    signs = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    close(gradient, signs * want, 1e-12, "gradient")
    close(loss, (signs * want).sum(), 1e-12, "loss")


@pytest.mark.parametrize(
    ("mode", "weight"), [("token_truncate", 0.8), ("token_mask", 0.0), ("geometric_truncate", 0.8)]
)
def test_the_lower_bound(mode: str, weight: float) -> None:
    """A token that the sampler found twice as likely has ratio 1/2, below sampling_ratio_min."""
    sampler = torch.full((2, 2), -1.0 + LOG2, dtype=torch.float64)
    for low, want in ((0.8, weight), (0.4, 0.5), (None, 0.5)):
        _, gradient, _ = loss_of(sampler, sampling_correction=mode, sampling_ratio_min=low)
        signs = torch.tensor([[-1.0], [1.0]], dtype=torch.float64).expand(2, 2)
        close(gradient, signs * want, 1e-12, f"gradient, {low}")


def test_a_rejected_token_leaves_every_term_and_a_masked_weight_only_the_policy() -> None:
    kl = {"beta": 0.5, "ref_per_token_logps": torch.full((2, 2), -0.5, dtype=torch.float64)}
    gone, gradient, _ = loss_of(SAMPLER, rejection={"token_k1": 1.5}, **kl)
    assert float(gradient[0, 0]) == 0.0
    masked, gradient, _ = loss_of(
        SAMPLER, sampling_correction="token_mask", sampling_ratio_max=1.5, **kl
    )
    k3 = math.exp(0.5) - 1.5
    assert float(gradient[0, 0]) == pytest.approx(0.5 * (1 - math.exp(0.5)))
    assert float(masked - gone) == pytest.approx(0.5 * k3)


@pytest.mark.parametrize("name", MODE_OPTIONS)
@pytest.mark.parametrize("loss_type", ["dapo", "gspo", "gmpo"])
def test_masked_positions_have_no_effect(name: str, loss_type: str) -> None:
    """N5: NaN, infinity or a huge log-prob of the sampler at a masked position."""
    case = make({"loss_type": loss_type}, {}, MODE_OPTIONS[name])
    want = ours(case)
    for garbage in (math.nan, math.inf, -math.inf, 1e30):
        sampler = case.tensors["sampling_per_token_logps"]
        case.tensors["sampling_per_token_logps"] = torch.where(case.mask, sampler, garbage)
        got = ours(case, chunk_bytes=1 << 13)
        close(got.output.loss, want.output.loss, 1e-12, "loss")
        for key, grad in want.grads.items():
            close(got.grads[key], grad, 1e-12, key)
        for key, value in want.output.metrics.items():
            close(got.output.metrics[key], value, 1e-6, key)


@pytest.mark.parametrize("loss_type", ["dapo", "gspo", "dppo_tv", "prime", "cispo", "vespo"])
def test_bypass_is_the_sampler_as_old_policy(loss_type: str) -> None:
    """DPPO and prime-rl against the sampler, verl's bypass_mode, slime's use-rollout-logprobs."""
    case = make({"loss_type": loss_type}, {}, CORRECTIONS["bypass"])
    known = case.tensors["sampling_per_token_logps"].nan_to_num(-2.0)
    case.tensors["sampling_per_token_logps"] = known
    got = ours(case)
    plain = make({"loss_type": loss_type}, {}, {})
    plain.tensors["old_per_token_logps"] = known
    want = ours(plain)
    close(got.output.loss, want.output.loss, 1e-12, "loss")
    for key, grad in want.grads.items():
        close(got.grads[key], grad, 1e-12, key)


def test_statistics_of_equal_policies_are_zero() -> None:
    logps = -torch.rand(3, 4, dtype=torch.float64)
    got = sampling_statistics(logps, logps.clone())
    for name in ("kl", "k3", "chi2_token", "chi2_seq", "log_ppl_diff", "logp_difference/max"):
        assert float(got[name]) == pytest.approx(0.0, abs=1e-15), name
    assert float(got["ppl_ratio"]) == pytest.approx(1.0)
    close(got["policy_ppl"], got["sampler_ppl"], 1e-12, "perplexity")


def test_statistics_of_nothing_and_of_unknowns_are_finite() -> None:
    """T4: NaN from a sampler is a ratio of 1 in the statistics."""
    logps = -torch.rand(2, 3)
    for mask in (torch.zeros(2, 3), torch.tensor([[0, 0, 0], [1, 0, 1]])):
        for sampler in (logps, torch.full((2, 3), math.nan)):
            for value in sampling_statistics(logps, sampler, completion_mask=mask).values():
                assert value.isfinite()


def test_statistics_packed() -> None:
    case: Case = make({}, {}, CORRECTIONS["monitor"])
    old, sampler = (case.tensors[f"{n}_per_token_logps"] for n in ("old", "sampling"))
    padded = sampling_statistics(old, sampler, completion_mask=case.mask)
    counted = case.mask.sum(1)
    bounds = torch.cat([counted.new_zeros(1), counted.cumsum(0)])
    packed = sampling_statistics(old[case.mask], sampler[case.mask], cu_seqlens=bounds)
    for name, value in padded.items():
        close(packed[name], value, 1e-12, name)


def test_metrics_of_the_corrections() -> None:
    _, _, metrics = loss_of(
        SAMPLER, sampling_correction="token_truncate", rejection={"token_k1": 1.5}
    )
    assert float(metrics["sampling/rejected"]) == 0.25
    assert float(metrics["sampling/importance_ratio/mean"]) == pytest.approx(1.25)
    assert float(metrics["sampling/importance_ratio/max"]) == pytest.approx(2.0)
    assert float(metrics["sampling/importance_ratio/min"]) == pytest.approx(1.0)
    assert float(metrics["sampling/effective_sample_size"]) == pytest.approx(25 / (4 * 7))
    assert float(metrics["sampling/kl"]) == pytest.approx(-LOG2 / 4)
    assert float(metrics["sampling/k3"]) == pytest.approx((2 - LOG2 - 1) / 4)
    assert float(metrics["sampling/chi2_token"]) == pytest.approx(7 / 4 - 1)
