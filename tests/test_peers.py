"""The losses of TRL 1.16, Liger 0.8.5 and verl 0.9.1, value and gradient, and where they differ.

Each library computes on the same log-probabilities in float64. What differs is a test of its own,
with the two formulas, so that a release that changes its mind shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cases import ragged_mask
from oracle import close
from peers import liger_loss, trl_loss, verl, verl_loss
from torch import Tensor

from fused_grpo import policy_loss, sampling_statistics, token_weights


@dataclass
class Data:
    """A padded batch of log-probabilities."""

    logps: Tensor
    old: Tensor
    ref: Tensor
    sampler: Tensor
    entropy: Tensor
    advantages: Tensor
    mask: Tensor

    @property
    def wide(self) -> Tensor:
        """[B, T] advantages."""
        return self.advantages[:, None].expand_as(self.logps).clone()


@pytest.fixture
def data() -> Data:
    """Rows of different lengths, both signs of advantage, ratios on both sides of each bound."""
    g = torch.Generator().manual_seed(2)
    shape = (6, 11)

    def normal(scale: float) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64) * scale

    logps = -normal(1.0).abs() - 0.05
    shift = torch.tensor([0.3, -0.3, -0.25, 0.25, 0.02, -0.02], dtype=torch.float64)
    old = (logps - normal(0.25) - shift[:, None]).clamp(max=-0.01)
    sign = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    return Data(
        logps=logps,
        old=old,
        ref=(logps + normal(0.4)).clamp(max=-0.01),
        sampler=old + normal(0.15),
        entropy=normal(1.0).abs(),
        advantages=sign * (0.3 + normal(1.0)[:, 0].abs()),
        mask=ragged_mask(*shape, "ragged"),
    )


def gradient(data: Data, loss: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """(value, dL/dlogps, dL/dentropy) of a loss of the two, the gradients where they count."""
    logps, entropy = data.logps.clone().requires_grad_(), data.entropy.clone().requires_grad_()
    value = loss(logps, entropy)
    grads = torch.autograd.grad(value, (logps, entropy), allow_unused=True, materialize_grads=True)
    return value.detach(), *(g * data.mask for g in grads)


def own(data: Data, tensors: dict[str, Tensor] | None = None, **options: Any) -> Any:
    given = {"old_per_token_logps": data.old} if tensors is None else tensors

    def loss(logps: Tensor, entropy: Tensor) -> Tensor:
        return policy_loss(
            logps,
            data.advantages,
            completion_mask=data.mask,
            entropies=entropy,
            **given,
            **options,
        ).loss

    return gradient(data, loss)


def same(got: Any, want: Any, tol: float = 1e-10) -> None:
    for name, a, b in zip(("loss", "logps", "entropy"), got, want, strict=True):
        close(a, b, tol, name)


# ---- TRL and Liger

SHARED: list[dict[str, Any]] = [
    {"loss_type": "grpo"},
    {"loss_type": "bnpo"},
    {"loss_type": "dr_grpo", "max_completion_length": 13},
    {"loss_type": "dapo", "epsilon_high": 0.28},
    {"loss_type": "dapo", "delta": 1.4},
    {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    {"loss_type": "sapo", "sapo_temperature_neg": 1.0625},  # TRL holds it in fp32
    {"loss_type": "vespo"},
    {"loss_type": "grpo", "beta": 0.3},
    {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": True},
    {
        "loss_type": "grpo",
        "beta": 0.3,
        "use_bias_correction_kl": True,
        "importance_sampling_level": "sequence",
    },
]


def peer_options(options: dict[str, Any]) -> dict[str, Any]:
    """Both take epsilon_high as given, not the lower one in its place."""
    return {"epsilon_high": 0.2} | options


def own_options(options: dict[str, Any]) -> dict[str, Any]:
    """luspo is sequence-level by definition here."""
    fixed = options["loss_type"] == "luspo"
    return {k: v for k, v in options.items() if not (fixed and k == "importance_sampling_level")}


def tensors_of(data: Data, options: dict[str, Any], ratio: bool) -> dict[str, Tensor]:
    tensors = {"old_per_token_logps": data.old}
    if options.get("beta"):
        tensors["ref_per_token_logps"] = data.ref
    if ratio:
        weight = (data.old - data.sampler).exp().clamp(max=1.2)
        tensors["importance_sampling_ratio"] = torch.where(data.mask.bool(), weight, 1.0)
    return tensors


@pytest.mark.parametrize("ratio", [False, True], ids=["plain", "ratio"])
@pytest.mark.parametrize("number", range(len(SHARED)))
def test_trl(data: Data, number: int, ratio: bool) -> None:
    options = SHARED[number]
    tensors = tensors_of(data, options, ratio)
    want = gradient(
        data,
        lambda logps, entropy: trl_loss(
            "grpo", logps, entropy, data.advantages, data.mask, tensors, **peer_options(options)
        ),
    )
    same(own(data, tensors, **own_options(options)), want)


@pytest.mark.parametrize("ratio", [False, True], ids=["plain", "ratio"])
@pytest.mark.parametrize("number", range(len(SHARED)))
def test_liger(data: Data, number: int, ratio: bool) -> None:
    options = SHARED[number]
    if ratio and options["loss_type"] == "luspo":
        pytest.skip("differs, see test_luspo_of_liger_with_a_ratio_per_token")
    tensors = tensors_of(data, options, ratio)
    names = {"importance_sampling_ratio": "vllm_is_ratio"}
    given = {names.get(name, name): value for name, value in tensors.items()}
    mask = data.mask.double()
    want = gradient(
        data,
        lambda logps, _: liger_loss(logps, data.advantages, mask, **given, **peer_options(options)),
    )
    same(own(data, tensors, **own_options(options)), want)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
@pytest.mark.parametrize(
    "options", [{"off_policy_mask_threshold": 0.05}, {"top_entropy_quantile": 0.4}]
)
def test_trl_masks(data: Data, options: dict[str, Any], loss_type: str) -> None:
    tensors = {"old_per_token_logps": data.old}
    if "off_policy_mask_threshold" in options:
        tensors["sampling_per_token_logps"] = data.sampler
        tensors["sampling_per_token_logps"][0, 2] = torch.nan
    want = gradient(
        data,
        lambda logps, entropy: trl_loss(
            "grpo",
            logps,
            entropy,
            data.advantages[:, None],
            data.mask,
            tensors,
            loss_type=loss_type,
            **options,
        ),
    )
    same(own(data, tensors, loss_type=loss_type, **options), want)


def test_trl_entropy_bonus_is_a_token_mean(data: Data) -> None:
    """The same as ours under token means; with other reductions ours follows the reduction."""
    for loss_type, equal in (("dapo", True), ("grpo", False)):
        want = gradient(
            data,
            lambda logps, entropy, name=loss_type: trl_loss(
                "grpo",
                logps,
                entropy,
                data.advantages,
                data.mask,
                {"old_per_token_logps": data.old},
                loss_type=name,
                entropy_coef=0.1,
            ),
        )
        got = own(data, loss_type=loss_type, entropy_coef=0.1)
        close(got[1], want[1], 1e-10, "logps")
        assert torch.allclose(got[2], want[2], rtol=1e-10) == equal


def test_trl_gmpo_and_rloo(data: Data) -> None:
    """Their trainers' losses; TRL's RLOO takes the sum of the old log-probs of a sequence."""
    old = {"old_per_token_logps": data.old}
    want = gradient(
        data,
        lambda logps, entropy: trl_loss(
            "gmpo",
            logps,
            entropy,
            data.advantages,
            data.mask,
            old,
            epsilon_low=0.3,
            epsilon_high=0.4,
        ),
    )
    same(own(data, loss_type="gmpo", epsilon_low=0.3, epsilon_high=0.4), want)
    sums = {"old_logps": (data.old * data.mask).sum(1)}
    want = gradient(
        data,
        lambda logps, entropy: trl_loss("rloo", logps, entropy, data.advantages, data.mask, sums),
    )
    same(own(data, loss_type="rloo"), want)


def test_cispo_cap_is_a_ratio_and_not_one_plus_epsilon(data: Data) -> None:
    """Difference: epsilon_high of TRL and Liger is CISPO's cap itself, and 0.2 unless it is set.

    With ours at the same cap both agree; their default caps every ratio, ours is 5.
    """
    for cap in (5.0, 1.1):
        want = gradient(
            data,
            lambda logps, entropy, cap=cap: trl_loss(
                "grpo",
                logps,
                entropy,
                data.advantages,
                data.mask,
                {"old_per_token_logps": data.old},
                loss_type="cispo",
                epsilon_high=cap,
            ),
        )
        same(own(data, loss_type="cispo", ratio_max=cap), want)
        want = gradient(
            data,
            lambda logps, _, cap=cap: liger_loss(
                logps,
                data.advantages,
                data.mask.double(),
                old_per_token_logps=data.old,
                loss_type="cispo",
                epsilon_high=cap,
            ),
        )
        same(own(data, loss_type="cispo", ratio_max=cap), want)
    _, capped, _ = gradient(
        data,
        lambda logps, entropy: trl_loss(
            "grpo",
            logps,
            entropy,
            data.advantages,
            data.mask,
            {"old_per_token_logps": data.old},
            loss_type="cispo",
        ),
    )
    everything = -0.2 * data.wide * data.mask / data.mask.sum()
    close(capped, everything, 1e-12, "every ratio is capped at 0.2")
    with pytest.raises(ValueError, match=r"ratio_max=0\.2 must be >= 1"):
        own(data, loss_type="cispo", ratio_max=0.2)


def test_luspo_of_the_triton_loss_weighs_by_the_square_of_the_length(data: Data) -> None:
    """Difference: Liger's Triton loss averages n_b L_bt over all [B, T], ours and TRL's sum L_bt
    over the sequence: sum_b n_b^2 L_b / (B T) against sum_b n_b L_b / B."""
    module = pytest.importorskip("liger_kernel.ops.grpo_loss")
    rows, width = data.mask.shape
    lengths = data.mask.sum(1, keepdim=True).double()
    losses = data.advantages[:, None] * data.mask
    theirs = module._reduce_loss(losses, data.mask.double(), "luspo", None, rows, width)
    close(theirs, (lengths**2 * data.advantages[:, None]).sum() / (rows * width), 1e-12, "theirs")
    ours = (token_weights(data.mask, "trl:luspo") * losses).sum()
    close(ours, (lengths * data.advantages[:, None]).sum() / rows, 1e-6, "ours")


def test_luspo_of_liger_with_a_ratio_per_token(data: Data) -> None:
    """Difference: with a weight per token Liger's fused luspo divides by the padded width too, and
    counts masked positions; ours and TRL's are the sum over the counted tokens."""
    tensors = tensors_of(data, {}, ratio=True)
    ratio, mask = tensors["importance_sampling_ratio"], data.mask.double()
    options = {"loss_type": "luspo", "importance_sampling_level": "sequence"}
    theirs = liger_loss(
        data.logps,
        data.advantages,
        mask,
        old_per_token_logps=data.old,
        vllm_is_ratio=ratio,
        **options,
    )
    plain = policy_loss(
        data.logps,
        data.advantages,
        completion_mask=data.mask,
        old_per_token_logps=data.old,
        loss_type="luspo",
        reduction="none",
    ).per_token_loss
    of_row = plain.sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    rows, width = mask.shape
    want = (of_row * ratio * mask.sum(1, keepdim=True)).sum() / (rows * width)
    close(theirs, want, 1e-10, "theirs")
    ours = own(data, tensors, loss_type="luspo")[0]
    close(ours, (of_row * ratio * mask).sum() / rows, 1e-10, "ours")


@pytest.mark.parametrize("loss_type", ["cispo", "sapo"])
def test_sequence_ratios_that_liger_refuses(data: Data, loss_type: str) -> None:
    """Difference: TRL and this package take them, Liger's fused loss does not."""
    tensors, level = {"old_per_token_logps": data.old}, "sequence"
    tau = {"sapo_temperature_neg": 1.0625} if loss_type == "sapo" else {}
    want = gradient(
        data,
        lambda logps, entropy: trl_loss(
            "grpo",
            logps,
            entropy,
            data.advantages[:, None],
            data.mask,
            tensors,
            loss_type=loss_type,
            importance_sampling_level=level,
            epsilon_high=5.0,
            **tau,
        ),
    )
    got = own(data, tensors, loss_type=loss_type, importance_sampling_level=level, **tau)
    same(got, want)
    with pytest.raises(ValueError, match="not supported"):
        liger_loss(
            data.logps,
            data.advantages,
            data.mask,
            old_per_token_logps=data.old,
            loss_type=loss_type,
            importance_sampling_level=level,
        )


def test_luspo_of_tokens_is_refused_here(data: Data) -> None:
    """Difference: TRL only warns about luspo with token ratios; here luspo has no such option."""
    assert trl_loss(
        "grpo",
        data.logps,
        data.entropy,
        data.advantages,
        data.mask,
        {"old_per_token_logps": data.old},
        loss_type="luspo",
    ).isfinite()
    with pytest.raises(ValueError, match="importance_sampling_level=sequence_sum is not used by"):
        own(data, loss_type="luspo", importance_sampling_level="sequence_sum")


# ---- verl

VERL: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    # name, its configuration, our options
    (
        "vanilla",
        {"clip_ratio_high": 0.28, "clip_ratio_c": 3.0},
        {"epsilon_high": 0.28, "dual_clip": 3.0},
    ),
    ("vanilla", {"clip_ratio_c": 1.15}, {"dual_clip": 1.15}),
    ("gspo", {"clip_ratio": 0.05}, {"loss_type": "gspo_token", "epsilon_low": 0.05}),
    ("sapo", {"tau_pos": 1.0, "tau_neg": 1.05}, {"loss_type": "sapo"}),
    ("gpg", {}, {"loss_type": "reinforce"}),
    ("dro", {"policy_loss": {"dro_beta": 0.3}}, {"loss_type": "dro", "log_ratio_penalty": 0.15}),
    ("cispo", {}, {"loss_type": "cispo", "ratio_min": 0.8, "ratio_max": 1.2}),
    (
        "dppo_tv",
        {"clip_ratio": 0.05, "clip_ratio_c": 1.3},
        {
            "loss_type": "dppo_tv",
            "divergence_low": 0.05,
            "divergence_high": 0.05,
            "ratio_max": 1.3,
        },
    ),
    (
        "dppo_kl",
        {"clip_ratio": 0.01, "clip_ratio_c": 3.0},
        {
            "loss_type": "dppo_kl",
            "divergence_low": 0.01,
            "divergence_high": 0.01,
            "ratio_max": 3.0,
        },
    ),
    (
        "clip_cov",
        {"policy_loss": {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.3, "clip_cov_ub": 2.0}},
        {"loss_type": "clip_cov", "cov_ratio": 1.0, "cov_low": 0.3, "cov_high": 2.0},
    ),
    (
        "kl_cov",
        {"policy_loss": {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.3}},
        {"loss_type": "kl_cov", "cov_ratio": 0.2, "cov_coef": 0.3},
    ),
]
MODES = {
    "token-mean": {"batch_num_tokens": 55, "dp_size": 1},
    "token-sum": {},
    "seq-mean-token-sum": {"global_batch_size": 17, "dp_size": 1},
    "seq-mean-token-sum-norm": {"loss_scale_factor": 9},
    "seq-mean-token-mean": {},
}
OURS = {
    "token-mean": {"num_items_in_batch": 55},
    "seq-mean-token-sum": {"num_sequences": 17},
    "seq-mean-token-sum-norm": {"max_completion_length": 9},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("number", range(len(VERL)))
def test_verl(data: Data, number: int, weighted: bool, mode: str) -> None:
    """Every loss of its registry but geo_mean, under every loss_agg_mode."""
    name, theirs, ours = VERL[number]
    if name == "sapo" and mode != "seq-mean-token-mean":
        pytest.skip("verl's sapo has one reduction whatever is asked for")
    core, _ = verl()
    theirs = {k: core.Config(v) if isinstance(v, dict) else v for k, v in theirs.items()}
    weights = (data.old - data.sampler).exp().clamp(max=1.2) if weighted else None
    mask = data.mask.double()
    tensors = {"old_per_token_logps": data.old} if name != "gpg" else {}
    if weights is not None:
        tensors["importance_sampling_ratio"] = weights
    want = gradient(
        data,
        lambda logps, _: verl_loss(
            name, logps, data.wide, mask, data.old, mode, weights, MODES[mode], **theirs
        ),
    )
    options = {"aggregation": f"verl:{mode}"} | OURS.get(mode, {}) | ours
    # 1e-8 beside the lengths, and inside the binary KL's logarithm
    same(own(data, tensors, **options), want, 1e-8)


def test_verl_geo_mean_ignores_the_reduction(data: Data) -> None:
    """Difference: verl's GMPO is a mean over rows whatever loss_agg_mode says; ours follows it."""
    mask = data.mask.double()
    want = [
        gradient(
            data,
            lambda logps, _, mode=mode: verl_loss(
                "geo_mean", logps, data.wide, mask, data.old, mode, None, MODES[mode]
            ),
        )
        for mode in MODES
    ]
    for other in want:
        same(own(data, loss_type="gmpo"), other, 1e-7)
    followed = own(data, loss_type="gmpo", aggregation="verl:token-sum")
    assert (followed[0] - want[1][0]).abs() > 0.1


def test_verl_dppo_truncates_at_three(data: Data) -> None:
    """Difference: verl's code falls back to 20 for clip_ratio_c, but its configuration sets 3, and
    its divergence bound is clip_ratio, 0.2 for TV and KL alike; ours are 20, 0.2 and 0.05."""
    mask = data.mask.double()
    want = gradient(
        data,
        lambda logps, _: verl_loss("dppo_tv", logps, data.wide, mask, data.old),
    )
    same(own(data, loss_type="dppo_tv"), want)
    want = gradient(
        data,
        lambda logps, _: verl_loss("dppo_kl", logps, data.wide, mask, data.old),
    )
    same(own(data, loss_type="dppo_kl", divergence_low=0.2, divergence_high=0.2), want, 1e-8)


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "abs", "k1+", "k3+"])
def test_verl_kl(data: Data, name: str) -> None:
    """Its estimators; k3 is clamped to +-10 there, which kl_clamp does here, and only k3."""
    core, _ = verl()
    far = data.ref.clone()
    far[0, 0] = data.logps[0, 0] + 4.0  # k3 of 49.6
    clamp = {"kl_clamp": 10.0} if name in ("k3", "k3+") else {}
    want = gradient(
        data,
        lambda logps, _: core.agg_loss(
            core.kl_penalty(logps, far, name), data.mask.double(), "token-mean"
        ),
    )
    silent = Data(**{**vars(data), "advantages": torch.zeros_like(data.advantages)})
    got = own(silent, {"ref_per_token_logps": far}, beta=1.0, kl_estimator=name, **clamp)
    same(got, want)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("bounds", [(None, 1.1), (0.9, 1.1)], ids=["truncate", "mask"])
def test_verl_importance_weights(data: Data, level: str, bounds: tuple[Any, float]) -> None:
    _, rollout = verl()
    low, high = bounds
    threshold = high if low is None else f"{low}_{high}"
    mask = data.mask.double()
    weights, stats = rollout.compute_rollout_correction_weights(
        data.old - data.sampler, mask, level, threshold
    )
    how = "truncate" if low is None else "mask"
    tensors = {"old_per_token_logps": data.old}
    want = own(data, tensors | {"importance_sampling_ratio": weights})
    tensors["sampling_per_token_logps"] = data.sampler
    options = {"sampling_correction": f"{level}_{how}", "sampling_ratio_max": high}
    options |= {} if low is None else {"sampling_ratio_min": low}
    same(own(data, tensors, **options), want)
    out = policy_loss(data.logps, data.advantages, completion_mask=data.mask, **tensors, **options)
    share = float(out.metrics["sampling/effective_sample_size"])
    assert share == pytest.approx(stats["rollout_is_eff_sample_size"], rel=1e-6)
    mean = float(out.metrics["sampling/importance_ratio/mean"])
    assert mean == pytest.approx(stats["rollout_is_mean"], rel=1e-6)


@pytest.mark.parametrize(
    ("criterion", "bound", "threshold"),
    [
        ("token_k1", 1.15, "1.15"),
        ("token_k1", (0.9, 1.2), "0.9_1.2"),
        ("token_k2", 0.01, "0.01"),
        ("token_k3", 0.01, "0.01"),
        ("seq_sum_k1", 1.3, "1.3"),
        ("seq_sum_k2", 0.05, "0.05"),
        ("seq_sum_k3", 0.05, "0.05"),
        ("seq_mean_k1", (0.97, 1.03), "0.97_1.03"),
        ("seq_mean_k2", 0.011, "0.011"),
        ("seq_mean_k3", 0.011, "0.011"),
        ("seq_max_k2", 0.02, "0.02"),
        ("seq_max_k3", 0.02, "0.02"),
    ],
)
def test_verl_rejection(data: Data, criterion: str, bound: Any, threshold: str) -> None:
    """Its eleven criteria. verl leaves rejected tokens out of the mask; the divisors are given."""
    _, rollout = verl()
    kept, stats = rollout.compute_rollout_rejection_mask(
        data.old - data.sampler, data.mask.double(), criterion, threshold
    )
    assert 0 < stats[f"rollout_rs_{criterion}_masked_fraction"] < 1
    tensors = {"old_per_token_logps": data.old, "sampling_per_token_logps": data.sampler}
    got = own(data, tensors, rejection={criterion: bound}, num_items_in_batch=40)
    fewer = Data(**{**vars(data), "mask": kept.long()})
    want = own(fewer, num_items_in_batch=40)
    same(got, want)
    out = policy_loss(
        data.logps,
        data.advantages,
        completion_mask=data.mask,
        rejection={criterion: bound},
        **tensors,
    )
    assert float(out.metrics["sampling/rejected"]) == pytest.approx(
        stats["rollout_rs_masked_fraction"]
    )


def test_verl_statistics(data: Data) -> None:
    _, rollout = verl()
    want = rollout.compute_offpolicy_metrics(data.old, data.sampler, data.mask.double())
    got = sampling_statistics(data.old, data.sampler, completion_mask=data.mask)
    names = {
        "kl": "kl",
        "k3": "k3_kl",
        "chi2_token": "chi2_token",
        "chi2_seq": "chi2_seq",
        "policy_ppl": "training_ppl",
        "sampler_ppl": "rollout_ppl",
        "ppl_ratio": "ppl_ratio",
        "log_ppl_diff": "log_ppl_diff",
        "log_ppl_diff_abs": "log_ppl_abs_diff",
        "log_ppl_diff_max": "log_ppl_diff_max",
        "log_ppl_diff_min": "log_ppl_diff_min",
    }
    for ours, theirs in names.items():
        # its means have 1e-8 beside their divisor
        assert float(got[ours]) == pytest.approx(want[theirs], rel=1e-7, abs=1e-8), ours


def test_delta_below_the_clip_keeps_its_gradient() -> None:
    """Difference, from reading: between delta and 1 + epsilon_high Liger's Triton loss gives a bad
    token no gradient, although its value is rho |A| there; here, as in TRL, it is -A rho."""
    logps = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    out = policy_loss(
        logps,
        torch.tensor([-1.0], dtype=torch.float64),
        old_per_token_logps=logps.detach() - torch.tensor(1.15).double().log(),
        delta=1.1,
        epsilon_high=0.4,
    )
    out.loss.backward()
    assert float(out.loss.detach()) == pytest.approx(1.15)
    assert float(logps.grad) == pytest.approx(1.15)
