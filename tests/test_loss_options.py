"""Every option of grpo_loss against the float64 reference: loss, log-probabilities, all gradients.

One table covers all pairs of option values; one list takes each option alone, so that a failure
names its cause. Fused losses drop options silently when each path lists them anew (R1, I2).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import Case, exact_logps, make_case, pack, ragged_mask
from oracle import DTYPES, check, dtype_id, ours
from pairwise import pairwise

FACTORS: dict[str, tuple[Any, ...]] = {
    "vocab": (127, 129, 257),
    "layout": ("padded", "packed"),
    "mask": ("holes", "ragged", "ones", "tail"),
    "importance_sampling_level": ("token", "sequence"),
    "reduction_scheme": ("grpo", "bnpo", "dr_grpo", "dapo", "dapo_int", "dapo_tensor"),
    "old": (True, False),
    "kl": ("none", "k3", "corrected"),
    "delta": (None, 1.7),
    "epsilon": ((0.2, None), (0.1, 0.28)),
    "entropy_coef": (0.0, 0.05, -0.02),
    "softcap": (None, 5.0),
    "logit_scale": (1.0, 0.6),
    "temperature": (1.0, 0.7, "token"),
    "bias": (False, True),
    "correction": ("none", "token", "column", "sequence"),
    "advantages": ("sequence", "token"),
    "log_ratio_clamp": (20.0, None, 0.5),
    "reduction": ("sum", "none"),
    "trainable": (("hidden", "weight", "bias"), ("hidden",), ("weight", "bias")),
    "chunk_bytes": (1 << 14, 100 << 20),
}
ROWS = pairwise(FACTORS)


def scheme(name: str, case: Case) -> dict[str, Any]:
    """Options of one of the reductions."""
    return {
        "dr_grpo": {"loss_type": "dr_grpo", "max_completion_length": 16},
        "dapo_int": {"loss_type": "dapo", "num_items_in_batch": 37},
        "dapo_tensor": {"loss_type": "dapo", "num_items_in_batch": torch.tensor(37)},
    }.get(name, {"loss_type": name})


def temperature(row: dict[str, Any]) -> float | torch.Tensor:
    """A number, or one per token of a [6, 11] batch."""
    if row["temperature"] == "token":
        return torch.linspace(0.6, 1.4, 66).view(6, 11)
    return row["temperature"]


def correction(kind: str, case: Case) -> torch.Tensor:
    """Importance sampling ratios of each accepted shape, one of them 0."""
    ratios = torch.linspace(0.0, 1.9, case.ids.numel(), dtype=case.advantages.dtype)
    ratios = ratios.view(case.ids.shape)
    return {"token": ratios, "column": ratios[:, -1:], "sequence": ratios[:, -1]}[kind]


def build(row: dict[str, Any], dtype: torch.dtype) -> Case:
    """The case of one row of the table."""
    low, high = row["epsilon"]
    options: dict[str, Any] = {
        "importance_sampling_level": row["importance_sampling_level"],
        "epsilon_low": low,
        "epsilon_high": high,
        "delta": row["delta"],
        "entropy_coef": row["entropy_coef"],
        "softcap": row["softcap"],
        "logit_scale": row["logit_scale"],
        "temperature": temperature(row),
        "log_ratio_clamp": row["log_ratio_clamp"],
        "entropy": row["entropy_coef"] != 0,
    }
    case = make_case(
        vocab=row["vocab"],
        dtype=dtype,
        mask=row["mask"],
        bias=row["bias"],
        old=row["old"],
        ref=row["kl"] != "none",
        **options,
    )
    case.options |= scheme(row["reduction_scheme"], case)
    if row["kl"] != "none":
        case.options |= {"beta": 0.1, "use_bias_correction_kl": row["kl"] == "corrected"}
    if row["correction"] != "none":
        case.tensors["importance_sampling_ratio"] = correction(row["correction"], case)
    if row["advantages"] == "token":
        noise = torch.randn(case.ids.shape, dtype=case.advantages.dtype)
        case.advantages = case.advantages[:, None] + noise
    return pack(case) if row["layout"] == "packed" else case


@pytest.mark.both_backends(triton_if=lambda p: p["dtype"] == DTYPES[1 + p["number"] % 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("number", range(len(ROWS)))
def test_every_pair_of_options(number: int, dtype: torch.dtype) -> None:
    """R1: one differential test over the product of the options."""
    row = ROWS[number]
    how = {k: row[k] for k in ("reduction", "trainable", "chunk_bytes")}
    check(build(row, dtype), **how)


ALONE: dict[str, dict[str, Any]] = {
    "defaults": {},
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo", "max_completion_length": 13},
    "items": {"num_items_in_batch": 5},
    "items_float": {"num_items_in_batch": 5.5},
    "items_tensor": {"num_items_in_batch": torch.tensor(5)},
    "items_float_tensor": {"num_items_in_batch": torch.tensor(5.0)},
    "sequence": {"importance_sampling_level": "sequence"},
    "sequence_grpo": {"importance_sampling_level": "sequence", "loss_type": "grpo"},
    "epsilon_low": {"epsilon_low": 0.1},
    "epsilon_high": {"epsilon_high": 0.28},
    "epsilon_zero": {"epsilon_low": 0.0, "epsilon_high": 0.0},
    "delta": {"delta": 1.7},
    "delta_below_clip": {"delta": 1.05, "epsilon_high": 0.28},
    "beta": {"beta": 0.3},
    "beta_corrected": {"beta": 0.3, "use_bias_correction_kl": True},
    "beta_corrected_sequence": {
        "beta": 0.3,
        "use_bias_correction_kl": True,
        "importance_sampling_level": "sequence",
    },
    "entropy_coef": {"entropy_coef": 0.1},
    "entropy_coef_negative": {"entropy_coef": -0.1},
    "entropy_reported": {"entropy": True},
    "clamp_off": {"log_ratio_clamp": None},
    "clamp_tight": {"log_ratio_clamp": 0.5, "beta": 0.3},
    "clamp_tight_sequence": {"log_ratio_clamp": 0.5, "importance_sampling_level": "sequence"},
    "temperature": {"temperature": 0.6},
    "temperature_high": {"temperature": 1.5, "entropy_coef": 0.1},
    "logit_scale": {"logit_scale": 0.3},
    "softcap": {"softcap": 3.0},
    "head": {"softcap": 4.0, "logit_scale": 1.7, "temperature": 0.8, "entropy_coef": 0.1},
}


@pytest.mark.both_backends(triton_if=lambda p: p["layout"] == "padded")
@pytest.mark.parametrize("old", [True, False], ids=["old", "fresh"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("name", ALONE)
def test_each_option_alone(name: str, layout: str, old: bool) -> None:
    options = ALONE[name]
    case = make_case(vocab=61, old=old, ref="beta" in options, bias=True, **options)
    check(pack(case) if layout == "packed" else case, chunk_bytes=1 << 14)


def difference(a: Case, b: Case) -> float:
    """Largest change of any result between two calls."""
    first, second = ours(a), ours(b)
    changes = [(first.output.loss - second.output.loss).detach().abs()]
    for name, grad in first.grads.items():
        assert grad is not None
        changes.append((grad - second.grads[name]).abs().max())
    return float(max(changes))


# bnpo is dapo without a token count; entropies are only reported; no log-ratio here reaches 20.
INERT = ("defaults", "bnpo", "entropy_reported", "clamp_off")


@pytest.mark.parametrize("name", [k for k in ALONE if k not in INERT])
def test_every_option_is_consumed(name: str) -> None:
    """I2: an option that is accepted changes the result."""
    options = ALONE[name]
    case = make_case(vocab=61, bias=True, ref="beta" in options, log_ratio_clamp=20.0)
    # A reference without beta is an error, so the plain call has a beta that differs.
    plain = case.with_options(beta=0.2) if "beta" in options else case
    assert difference(plain, case.with_options(**options)) > 1e-6


@pytest.mark.both_backends
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("kind", ["token", "column", "sequence"])
def test_correction_scales_the_policy_term_alone(kind: str, dtype: torch.dtype) -> None:
    """R1: a ratio of 0.01 scales the gradient by exactly that; the KL term is left alone."""
    case = make_case(vocab=61, dtype=dtype, ref=False, mask="ragged")
    scaled = make_case(vocab=61, dtype=dtype, ref=False, mask="ragged")
    factor = correction(kind, case).fill_(2.0**-7)
    scaled.tensors["importance_sampling_ratio"] = factor
    plain, got = ours(case), ours(scaled)
    for name in ("hidden", "weight"):
        expected = plain.grads[name].double() * 2.0**-7
        error = (got.grads[name].double() - expected).norm() / expected.norm()
        assert error < 1e-3 if dtype == torch.float16 else error < 1e-6
    # With advantages of zero only the KL term is left, and the correction must not touch it.
    kl = make_case(vocab=61, dtype=dtype, beta=0.5, mask="ragged")
    kl.advantages.zero_()
    plain = ours(kl)
    kl.tensors["importance_sampling_ratio"] = factor
    got = ours(kl)
    assert torch.equal(got.output.loss, plain.output.loss)
    assert torch.equal(got.grads["hidden"], plain.grads["hidden"])


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo"])
def test_old_none_means_this_policy_detached(level: str, loss_type: str) -> None:
    """T7: old=None has the loss and the gradient of old=logps.detach(), and ratio 1."""
    case = make_case(
        vocab=61, old=False, beta=0.1, loss_type=loss_type, importance_sampling_level=level
    )
    absent = ours(case)
    case.tensors["old_per_token_logps"] = absent.output.per_token_logps.clone()
    given = ours(case)
    torch.testing.assert_close(absent.output.loss, given.output.loss, atol=1e-12, rtol=1e-12)
    for name in ("hidden", "weight"):
        torch.testing.assert_close(absent.grads[name], given.grads[name], atol=1e-12, rtol=1e-10)
    for result in (absent, given):
        metrics = result.output.metrics
        assert float(metrics["ratio/mean"]) == pytest.approx(1.0, abs=1e-12)
        assert float(metrics["clip_ratio/region_mean"]) == 0.0
    assert float(absent.output.metrics["ratio/min"]) == 1.0
    assert float(absent.output.metrics["ratio/max"]) == 1.0


def test_temperature_is_applied_once_and_to_both() -> None:
    """N8, N9: with old and reference log-probs of the same tempered policy, ratio 1 and KL 0."""
    case = make_case(vocab=61, old=False, ref=False, temperature=0.6, softcap=5.0, beta=0.2)
    logps = exact_logps(case)
    case.tensors |= {"old_per_token_logps": logps, "ref_per_token_logps": logps.clone()}
    metrics = check(case).output.metrics
    assert float(metrics["ratio/mean"]) == pytest.approx(1.0, abs=1e-12)
    assert float(metrics["kl"]) == pytest.approx(0.0, abs=1e-12)


def test_bias_correction_changes_the_gradient_on_policy() -> None:
    """R15: at ratio 1 the corrected k3 has the gradient of the reverse KL, logp - ref."""
    case = make_case(vocab=61, old=False, beta=1.0, use_bias_correction_kl=True, mask="ragged")
    case.advantages.zero_()
    got = ours(case)
    reverse = make_case(vocab=61, old=False, ref=False, mask="ragged")
    gap = exact_logps(case) - case.tensors["ref_per_token_logps"]
    reverse.advantages = -gap
    want = ours(reverse)
    torch.testing.assert_close(got.grads["weight"], want.grads["weight"], atol=1e-12, rtol=1e-9)
    plain = ours(case.with_options(use_bias_correction_kl=False))
    assert (plain.grads["weight"] - want.grads["weight"]).norm() > 0.05 * want.grads[
        "weight"
    ].norm()


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
def test_only_the_last_tokens_count(level: str, dtype: torch.dtype) -> None:
    """S18: long masked stretches before the counted tokens do not zero their gradients."""
    case = make_case(
        width=40, vocab=61, mask="tail", dtype=dtype, ref=False, importance_sampling_level=level
    )
    assert torch.equal(case.mask, ragged_mask(6, 40, "tail").bool())
    got = check(case, chunk_bytes=1 << 13)
    assert got.grads["weight"].abs().sum() > 0


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
def test_real_vocabulary(dtype: torch.dtype, layout: str) -> None:
    """N1: a vocabulary that no tile divides, with every option of the head on."""
    case = make_case(
        rows=3,
        width=9,
        dim=16,
        vocab=50_257,
        dtype=dtype,
        bias=True,
        beta=0.1,
        entropy_coef=0.02,
        softcap=8.0,
        temperature=0.9,
        delta=1.7,
    )
    check(pack(case) if layout == "packed" else case)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_real_vocabulary_plain_head(level: str) -> None:
    """N15: no entry of a gradient is left out for being small."""
    case = make_case(
        rows=3,
        width=9,
        dim=16,
        vocab=50_257,
        dtype=torch.float32,
        ref=False,
        importance_sampling_level=level,
    )
    check(case, chunk_bytes=1 << 20)
