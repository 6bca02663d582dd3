"""Every option changes the loss or is refused; what is refused says why."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import formulas
import pytest
import torch
from cases import Case, make_case
from objective_cases import drop_unused, sampler_logps

from fused_grpo import LossSpec, grpo_loss, policy_loss
from fused_grpo.kl import HEAD_KL
from fused_grpo.objectives import LOSS_TYPES
from fused_grpo.objectives.options import LossOptions
from fused_grpo.support import SupportOptions

# option -> (a value that is not the default, options without which it cannot act)
FLIPS: dict[str, tuple[Any, dict[str, Any]]] = {
    "loss_type": ("cispo", {}),
    "importance_sampling_level": ("sequence", {}),
    "epsilon_low": (0.05, {}),
    "epsilon_high": (0.05, {}),
    "delta": (1.02, {}),
    "beta": (0.3, {"beta": 0.1}),
    "use_bias_correction_kl": (True, {"beta": 0.1}),
    "entropy_coef": (0.1, {}),
    "log_ratio_clamp": (0.1, {}),
    "num_items_in_batch": (50, {}),
    "max_completion_length": (7, {"loss_type": "dr_grpo", "max_completion_length": 11}),
    "aggregation": ("token_sum", {}),
    "num_sequences": (50, {"loss_type": "grpo"}),
    "dual_clip": (1.02, {}),
    "ratio_min": (0.9, {"loss_type": "cispo"}),
    "ratio_max": (1.3, {"loss_type": "cispo"}),
    "sapo_temperature_pos": (0.5, {"loss_type": "sapo"}),
    "sapo_temperature_neg": (0.5, {"loss_type": "sapo"}),
    "vespo_k_pos": (1.5, {"loss_type": "vespo"}),
    "vespo_lambda_pos": (1.5, {"loss_type": "vespo"}),
    "vespo_k_neg": (1.5, {"loss_type": "vespo"}),
    "vespo_lambda_neg": (1.5, {"loss_type": "vespo"}),
    "divergence_low": (1e-6, {"loss_type": "dppo_tv"}),
    "divergence_high": (1e-3, {"loss_type": "dppo_tv"}),
    "log_ratio_penalty": (0.5, {"loss_type": "prime"}),
    "cov_ratio": (0.5, {"loss_type": "kl_cov"}),
    "cov_low": (3.0, {"loss_type": "clip_cov", "cov_ratio": 1.0}),
    "cov_high": (1.2, {"loss_type": "clip_cov", "cov_ratio": 1.0}),
    "cov_coef": (0.3, {"loss_type": "kl_cov"}),
    "cov_seed": (1, {"loss_type": "clip_cov", "cov_low": 0.1}),
    "positive_nll_coef": (0.1, {}),
    "off_policy_mask_threshold": (0.0, {}),
    "top_entropy_quantile": (0.3, {}),
    "kl_estimator": ("k2", {"beta": 0.1}),
    "kl_top_k": (7, {"beta": 0.1, "kl_estimator": "top_k", "kl_top_k": 2}),
    "kl_clamp": (0.05, {"beta": 0.1}),
    "sampling_correction": ("token_mask", {"sampling_correction": "monitor"}),
    "sampling_ratio_min": (0.95, {"sampling_correction": "token_truncate"}),
    "sampling_ratio_max": (1.0, {"sampling_correction": "token_truncate"}),
    "rejection": ({"token_k2": 0.005}, {"sampling_correction": "monitor"}),
    "veto_ratio_min": (0.7, {"sampling_correction": "monitor"}),
    "veto_ratio_max": (1.05, {"sampling_correction": "monitor"}),
}
# tensor or other argument of grpo_loss -> options without which it cannot act
ADAPTER: dict[str, Any] = {
    "lora_hidden": torch.linspace(-1, 1, 132, dtype=torch.float64).view(6, 11, 2),
    "lora_weight": torch.linspace(-1, 2, 122, dtype=torch.float64).view(61, 2),
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(ADAPTER, ADAPTER),
    "completion_mask": {},
    "old_per_token_logps": {},
    "ref_per_token_logps": {"beta": 0.1},
    "sampling_per_token_logps": {"sampling_correction": "token_truncate"},
    "importance_sampling_ratio": {},
    "token_weights": {},
    "entropy_scale": {"entropy_coef": 0.1},
    "group_ids": {"aggregation": "group_mean"},
    "bias": {},
    "temperature": {},
    "logit_scale": {},
    "softcap": {},
    "ref_hidden": {"beta": 0.1, "kl_estimator": "full"},
    "ref_weight": {"beta": 0.1, "kl_estimator": "full"},
    "ref_bias": {"beta": 0.1, "kl_estimator": "full"},
    "ref_temperature": {"beta": 0.1, "kl_estimator": "full"},
    "ref_logit_scale": {"beta": 0.1, "kl_estimator": "full"},
    "ref_softcap": {"beta": 0.1, "kl_estimator": "full"},
    "support_top_k": {},
    "support_top_p": {},
    "support_min_p": {},
    "support_min_logp": {},
    "support_min_logit": {},
    "support_ids": {},
}
# layout, reporting and execution, which other modules test
NEUTRAL = {
    "cu_seqlens",
    "entropy",
    "reduction",
    "backend",
    "check_inputs",
    "chunk_bytes",
    "compact",
    "process_group",
    "sequence_group",
}
NEUTRAL |= {"hidden", "weight", "completion_ids", "advantages", "options"}


def case_of(options: dict[str, Any]) -> Case:
    """With old log-probs, and a reference or a sampler where the options read one."""
    case = make_case(vocab=61, ref=bool(options.get("beta")), bias=True, **options)
    old = case.tensors["old_per_token_logps"]
    old[1] -= 0.2  # a bad sequence that has become likelier, and a good one that has not
    old[2] += 0.2
    if options.get("sampling_correction"):
        case.tensors["sampling_per_token_logps"] = sampler_logps(case)
    if options.get("kl_estimator") in HEAD_KL:
        del case.tensors["ref_per_token_logps"]
        g = torch.Generator().manual_seed(7)
        for name, like in (("ref_hidden", case.hidden), ("ref_weight", case.weight)):
            case.tensors[name] = like + 0.3 * torch.randn(like.shape, generator=g, dtype=like.dtype)
    if options.get("aggregation") == "group_mean":
        case.tensors["group_ids"] = torch.tensor([1, 1, 2, 2, 2, 3])
    drop_unused(case)
    return case


def call(case: Case, **changes: Any) -> list[torch.Tensor]:
    """The loss and all gradients."""
    leaves = {k: v.requires_grad_() for k, v in case.leaves().items()}
    given = {**case.tensors, "bias": leaves["bias"], **case.options, **changes}
    out = grpo_loss(leaves["hidden"], leaves["weight"], case.ids, case.advantages, **given)
    out.loss.backward()
    return [out.loss.detach(), leaves["hidden"].grad, leaves["weight"].grad]


def differs(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return any(float((x - y).abs().max()) > 1e-7 for x, y in zip(a, b, strict=True))


CHANGES: dict[str, Any] = {
    "temperature": 0.7,
    "logit_scale": 0.5,
    "softcap": 3.0,
    "bias": torch.linspace(-1, 1, 61, dtype=torch.float64),
    "ref_bias": torch.linspace(-1, 1, 61, dtype=torch.float64),
    "ref_temperature": 0.7,
    "ref_logit_scale": 0.5,
    "ref_softcap": 3.0,
    "support_top_k": 5,
    "support_top_p": 0.5,
    "support_min_p": 0.3,
}


def other(name: str, case: Case) -> Any:
    """Another value of an argument, with the same shape."""
    if name in CHANGES:
        return CHANGES[name]
    if name == "support_ids":
        return torch.arange(9).expand(*case.ids.shape, 9)
    if name in ADAPTER:
        return ADAPTER[name] * 1.1
    if name in ("ref_hidden", "ref_weight"):
        return case.tensors[name] * 1.1
    if name in ("support_min_logp", "support_min_logit"):
        return torch.full(case.ids.shape, -4.0 if name == "support_min_logp" else 0.0)
    g = torch.Generator().manual_seed(3)
    noise = torch.randn(case.ids.shape, generator=g, dtype=torch.float64).abs() * 0.5
    if name == "completion_mask":
        return case.mask.index_fill(1, torch.tensor(4), False)
    if name == "group_ids":
        return torch.tensor([1, 2, 2, 2, 2, 3])
    return case.tensors.get(name, torch.zeros_like(noise)) - noise


def outcome(before: dict[str, Any], option: str, value: Any) -> str:
    """ "changed", "silent", or "refused" where the option, or its companion, is an error."""
    try:
        changed = differs(result(before), result({**before, option: value}))
    except (ValueError, TypeError):
        return "refused"
    return "changed" if changed else "silent"


def test_flipping_any_option_changes_the_loss_or_raises() -> None:
    """All options of LossSpec, with every objective, and all arguments of `grpo_loss`.

    Where an option is made to act it must change the loss; with every other objective it must
    change the loss or be refused.
    """
    assert set(FLIPS) == {f.name for f in fields(LossSpec)} == set(LossOptions.__annotations__)
    for option, (value, setting) in FLIPS.items():
        assert outcome(setting, option, value) == "changed", option
    fixed = ("loss_type", "max_completion_length")
    outcomes = {
        (name, option): outcome({"loss_type": name} | needs(name) | plain(setting), option, value)
        for name in formulas.POLICY
        for option, (value, setting) in FLIPS.items()
        if option not in fixed
    }
    assert not [pair for pair, how in outcomes.items() if how == "silent"]
    assert sum(how == "refused" for how in outcomes.values()) > 200
    names = set(grpo_loss.__kwdefaults__) | {"hidden", "weight", "completion_ids", "advantages"}
    names |= set(SupportOptions.__annotations__)
    assert names | {"options"} == set(ARGUMENTS) | NEUTRAL
    for name, setting in ARGUMENTS.items():
        case = case_of(setting)
        assert differs(call(case), call(case, **{name: other(name, case)})), name


def needs(name: str) -> dict[str, Any]:
    """Options without which an objective is refused."""
    extra = {"max_completion_length": 11} if name == "dr_grpo" else {}
    return extra | dict.fromkeys(LOSS_TYPES[name].needs, 0.1)


def plain(setting: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in setting.items() if k not in ("loss_type", "max_completion_length")}


def result(options: dict[str, Any]) -> list[torch.Tensor]:
    return call(case_of(options))


T2 = torch.zeros(2, 3)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"loss_type": "cispo", "ratio_max": 0.2}, "ratio_max=0.2 must be >= 1"),
    ({"loss_type": "cispo", "ratio_min": 1.5}, "ratio_min=1.5 must be in"),
    ({"loss_type": "cispo", "epsilon_high": 5.0}, "epsilon_high=5.0 is not used by .*ratio_max"),
    ({"loss_type": "cispo", "delta": 2.0}, "delta=2.0 is not used by loss_type='cispo'"),
    ({"loss_type": "sapo", "epsilon_low": 0.1}, "epsilon_low=0.1 is not used .*sapo_temperature"),
    ({"loss_type": "gspo", "importance_sampling_level": "sequence"}, "is not used by .*gspo"),
    ({"loss_type": "luspo", "importance_sampling_level": "sequence_sum"}, "is not used by .*luspo"),
    ({"loss_type": "reinforce", "log_ratio_clamp": 3.0}, "log_ratio_clamp=3.0 is not used by"),
    ({"loss_type": "reinforce", "old_per_token_logps": T2}, "old_per_token_logps .*'reinforce'"),
    (
        {"loss_type": "reinforce", "sampling_correction": "bypass"},
        "needs an objective",
    ),
    ({"loss_type": "dro"}, "loss_type='dro' needs log_ratio_penalty"),
    ({"loss_type": "clip_cov", "cov_low": 6.0}, "cov_low=6.0 must be below cov_high=5.0"),
    ({"delta": 2.0, "dual_clip": 2.0}, "give one of them"),
    ({"dual_clip": 1.0}, "dual_clip=1.0 must be > 1"),
    ({"aggregation": "mean"}, "aggregation='mean' is unknown; choose one of sequence_mean"),
    ({"aggregation": "token_sum", "num_items_in_batch": 3}, "not used by aggregation='token_sum'"),
    ({"aggregation": "fixed_length"}, "aggregation='fixed_length' needs max_completion_length"),
    ({"aggregation": "group_mean"}, "aggregation='group_mean' needs group_ids"),
    ({"group_ids": torch.arange(2)}, "only aggregation='group_mean'"),
    ({"aggregation": "group_mean", "group_ids": torch.arange(3)}, r"group_ids has shape \[3\]"),
    ({"token_weights": T2, "num_items_in_batch": 4}, "token_weights .*num_items_in_batch"),
    ({"token_weights": T2, "reduction": "none"}, "token_weights .*reduction='none'"),
    ({"kl_estimator": "k2"}, "kl_estimator=k2 needs beta > 0"),
    ({"kl_clamp": 1.0}, "kl_clamp=1.0 needs beta > 0"),
    ({"kl_estimator": "k4", "beta": 0.1, "ref_per_token_logps": T2}, "'k4' is unknown"),
    ({"sampling_per_token_logps": T2}, "nothing uses it: set sampling_correction"),
    ({"sampling_correction": "token_mask"}, "token_mask needs sampling_per_token_logps"),
    ({"rejection": {"token_k1": 2.0}}, "rejection=.* needs sampling_per_token_logps"),
    ({"rejection": {"token_k4": 2.0}}, "rejection='token_k4' is unknown"),
    ({"rejection": {"token_k1": 0.5}}, "> 1, or a pair"),
    ({"rejection": {"seq_mean_k1": (2.0, 1.0)}}, "0 < low < high"),
    ({"rejection": {"seq_max_k3": -1.0}}, "must be > 0"),
    ({"rejection": {}}, "must map criteria to bounds"),
    ({"sampling_correction": "none"}, "sampling_correction='none' is unknown"),
    ({"sampling_ratio_max": 2.0}, "needs a sampling_correction that truncates or masks"),
    (
        {
            "sampling_correction": "bypass",
            "sampling_per_token_logps": T2,
            "old_per_token_logps": T2,
        },
        "'bypass' puts the sampler's log-probs in its place",
    ),
    (
        {
            "sampling_correction": "token_mask",
            "sampling_per_token_logps": T2,
            "importance_sampling_ratio": T2,
        },
        "importance_sampling_ratio is given, but .*computes it",
    ),
    (
        {"loss_type": "vespo", "sampling_correction": "sequence_mask"},
        "use token_truncate or token_mask",
    ),
    (
        {"loss_type": "vespo", "importance_sampling_ratio": torch.ones(2)},
        "multiplies the ratios of a sequence's tokens",
    ),
    ({"off_policy_mask_threshold": 0.1}, "needs sampling_per_token_logps or old_per_token_logps"),
    ({"top_entropy_quantile": 0.5}, "top_entropy_quantile=0.5 needs entropies"),
    ({"top_entropy_quantile": 0.0}, "top_entropy_quantile=0.0 must be in"),
    ({"loss_type": 3}, "loss_type must be a string"),
    ({"loss_type": "no_such_module:loss"}, "no function 'loss' in an installed module"),
    ({"loss_type": "math:pi"}, "is not a function"),
]


@pytest.mark.parametrize(
    ("options", "message"), REFUSED, ids=[str(number) for number in range(len(REFUSED))]
)
def test_what_is_refused_says_why(options: dict[str, Any], message: str) -> None:
    """I2, I14: Refusals are pinned, so that none outlives its reason."""
    with pytest.raises((ValueError, TypeError), match=message):
        policy_loss(-torch.ones(2, 3), torch.ones(2), **options)


def test_fresh_samples_are_never_clipped_by_cispo() -> None:
    """The upper bound is a ratio: nothing is clipped at ratio 1, and the gradient is -A."""
    logps = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    out = policy_loss(logps, torch.tensor([0.7]), loss_type="cispo", aggregation="token_sum")
    out.loss.backward()
    assert torch.equal(logps.grad, torch.full((1, 2), -0.7))
    assert float(out.metrics["clip_ratio/region_mean"]) == 0.0
