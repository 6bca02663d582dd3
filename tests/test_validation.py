"""Bad input: ValueError or TypeError that names the argument, what was given and what fits."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fused_grpo import GRPOLoss, grpo_loss, linear_logprobs, policy_loss

B, T, H, V = 3, 5, 8, 20
N = B * T
BOUNDS = torch.tensor([0, 5, 9, 15])


def arguments(packed: bool = False, **changes: Any) -> dict[str, Any]:
    """A valid call, changed."""
    lead = (N,) if packed else (B, T)
    call: dict[str, Any] = {
        "hidden": torch.randn(*lead, H),
        "weight": torch.randn(V, H),
        "completion_ids": torch.randint(V, lead),
        "advantages": torch.randn(B),
    }
    if packed:
        call["cu_seqlens"] = BOUNDS
    return call | changes


def rejects(
    error: type[Exception],
    names: str,
    call: dict[str, Any],
    function: Callable[..., Any] = grpo_loss,
) -> None:
    """The call raises ``error`` with every word of ``names`` in its message."""
    with pytest.raises(error) as caught:
        function(**call)
    for name in names.split():
        assert name in str(caught.value), f"{name!r} is not in {str(caught.value)!r}"


def test_the_unchanged_call_is_valid() -> None:
    grpo_loss(**arguments())
    grpo_loss(**arguments(packed=True))


REF = torch.zeros(B, T)
NUMBERS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 0.0}, "temperature 0.0"),
    ({"temperature": -1.0}, "temperature -1.0"),
    ({"temperature": math.nan}, "temperature nan"),
    ({"temperature": math.inf}, "temperature inf"),
    ({"temperature": torch.zeros(B, T)}, "temperature"),
    ({"temperature": torch.ones(T)}, f"temperature {T}"),
    ({"softcap": 0.0}, "softcap 0.0"),
    ({"softcap": -30.0}, "softcap -30.0"),
    ({"softcap": math.nan}, "softcap nan"),
    ({"logit_scale": math.nan}, "logit_scale nan"),
    ({"logit_scale": math.inf}, "logit_scale inf"),
    ({"epsilon_low": -0.1}, "epsilon_low -0.1"),
    ({"epsilon_low": 1.0}, "epsilon_low 1.0"),
    ({"epsilon_low": math.nan}, "epsilon_low nan"),
    ({"epsilon_high": -0.1}, "epsilon_high -0.1"),
    ({"epsilon_high": math.nan}, "epsilon_high nan"),
    ({"delta": 1.0}, "delta 1.0"),
    ({"delta": 0.5}, "delta 0.5"),
    ({"delta": math.nan}, "delta nan"),
    ({"beta": -0.1, "ref_per_token_logps": REF}, "beta -0.1"),
    ({"beta": math.nan, "ref_per_token_logps": REF}, "beta nan"),
    ({"entropy_coef": math.nan}, "entropy_coef nan"),
    ({"entropy_coef": math.inf}, "entropy_coef inf"),
    ({"log_ratio_clamp": 0.0}, "log_ratio_clamp 0.0"),
    ({"log_ratio_clamp": -5.0}, "log_ratio_clamp -5.0"),
    ({"log_ratio_clamp": math.nan}, "log_ratio_clamp nan"),
    ({"num_items_in_batch": -1}, "num_items_in_batch -1"),
    ({"num_items_in_batch": math.nan}, "num_items_in_batch nan"),
    ({"num_items_in_batch": torch.ones(2)}, "num_items_in_batch"),
    ({"loss_type": "dr_grpo", "max_completion_length": 0}, "max_completion_length 0"),
    ({"chunk_bytes": 0}, "chunk_bytes 0"),
    ({"chunk_bytes": -1}, "chunk_bytes -1"),
]


@pytest.mark.parametrize(
    ("options", "names"), NUMBERS, ids=lambda x: x if isinstance(x, str) else ""
)
def test_numbers_out_of_range(options: dict[str, Any], names: str) -> None:
    """N17, R14: temperature 0, negative epsilons (a ratio passed as epsilon), NaN anywhere."""
    rejects(ValueError, names, arguments(**options))


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"loss_type": "ppo"}, "loss_type ppo grpo bnpo dr_grpo dapo"),
        ({"loss_type": "DAPO"}, "loss_type DAPO dapo"),
        ({"importance_sampling_level": "batch"}, "importance_sampling_level batch token sequence"),
        ({"reduction": "mean"}, "reduction mean sum none"),
        ({"backend": "cuda"}, "backend cuda auto chunked reference"),
    ],
)
def test_unknown_names(options: dict[str, Any], names: str) -> None:
    rejects(ValueError, names, arguments(**options))


@pytest.mark.parametrize("name", ["epsilon", "kl_coef", "epsilonlow", "num_items"])
def test_unknown_options(name: str) -> None:
    """A misspelt option is not swallowed, by the function or by the module."""
    rejects(TypeError, name, arguments(**{name: 0.1}))
    with pytest.raises(TypeError, match=name):
        GRPOLoss(**{name: 0.1})


def test_misspelt_names_are_told_what_was_meant() -> None:
    """Arguments as well as options."""
    rejects(TypeError, "temprature did you mean 'temperature'", arguments(temprature=0.7))
    rejects(TypeError, "epsilon_hi did you mean 'epsilon_high'", arguments(epsilon_hi=0.3))


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"beta": 0.1}, "beta ref_per_token_logps"),
        ({"ref_per_token_logps": REF}, "beta ref_per_token_logps"),
        ({"use_bias_correction_kl": True}, "use_bias_correction_kl beta"),
        ({"loss_type": "dr_grpo"}, "dr_grpo max_completion_length"),
        ({"loss_type": "grpo", "max_completion_length": 5}, "grpo max_completion_length"),
        ({"max_completion_length": 5}, "dapo max_completion_length"),
        ({"loss_type": "grpo", "num_items_in_batch": 5}, "grpo num_items_in_batch"),
        ({"loss_type": "bnpo", "num_items_in_batch": 5}, "bnpo num_items_in_batch"),
        (
            {"loss_type": "dr_grpo", "max_completion_length": 5, "num_items_in_batch": 5},
            "dr_grpo num_items_in_batch",
        ),
    ],
)
def test_options_that_do_not_combine(options: dict[str, Any], names: str) -> None:
    """I2: an option that would be ignored is an error."""
    rejects(ValueError, names, arguments(**options))


SHAPES: list[tuple[bool, dict[str, Any], str]] = [
    (False, {"hidden": torch.randn(B, T, H + 1)}, f"hidden weight {H + 1} {H}"),
    (False, {"hidden": torch.randn(B, T + 1, H)}, f"hidden completion_ids {T + 1} {T}"),
    (False, {"hidden": torch.randn(B + 1, T, H)}, f"hidden completion_ids {B + 1} {B}"),
    (False, {"hidden": torch.randn(N, H)}, f"hidden completion_ids {N}"),
    (False, {"hidden": torch.randn(T, B, H)}, "hidden completion_ids"),
    (False, {"hidden": torch.randn(B, T, V)}, f"hidden {V} logits"),
    (False, {"weight": torch.randn(V)}, f"weight [V, H] {V}"),
    (False, {"weight": torch.randn(V * H)}, f"weight {V * H} FSDP"),
    (False, {"weight": torch.empty(0)}, "weight 0 ZeRO"),
    (False, {"weight": torch.randn(H, V)}, "weight hidden"),
    (False, {"bias": torch.randn(V - 1)}, f"bias {V - 1} {V}"),
    (False, {"bias": torch.randn(1)}, f"bias 1 {V}"),
    (False, {"completion_ids": torch.zeros(B, T + 1, dtype=torch.long)}, "hidden completion_ids"),
    (False, {"completion_ids": torch.zeros(N, dtype=torch.long)}, "completion_ids"),
    (False, {"advantages": torch.randn(B + 1)}, f"advantages {B + 1} {B}"),
    (False, {"advantages": torch.randn(T)}, f"advantages {T} {B}"),
    (False, {"advantages": torch.randn(B, T - 1)}, f"advantages {T - 1} {T}"),
    (False, {"advantages": torch.randn(())}, "advantages"),
    (False, {"advantages": torch.randn(1)}, "advantages"),
    (False, {"completion_mask": torch.ones(B, T + 1)}, f"completion_mask {T + 1} {T}"),
    (False, {"completion_mask": torch.ones(B)}, f"completion_mask {B}"),
    (False, {"completion_mask": torch.ones(T)}, f"completion_mask {T}"),
    (False, {"old_per_token_logps": torch.zeros(B, T - 1)}, f"old_per_token_logps {T - 1} {T}"),
    (False, {"old_per_token_logps": torch.zeros(B)}, "old_per_token_logps"),
    (False, {"old_per_token_logps": torch.zeros(B, 1)}, "old_per_token_logps"),
    (False, {"ref_per_token_logps": torch.zeros(B, 1), "beta": 0.1}, "ref_per_token_logps"),
    (False, {"importance_sampling_ratio": torch.ones(1, T)}, "importance_sampling_ratio"),
    (False, {"importance_sampling_ratio": torch.ones(T)}, f"importance_sampling_ratio {T}"),
    (True, {"completion_ids": torch.zeros(N + 1, dtype=torch.long)}, "hidden completion_ids"),
    (True, {"completion_ids": torch.zeros(3, 5, dtype=torch.long)}, "completion_ids cu_seqlens"),
    (True, {"cu_seqlens": None}, "completion_ids cu_seqlens"),
    (True, {"cu_seqlens": torch.tensor([0, 5, 9])}, f"cu_seqlens {N}"),
    (True, {"cu_seqlens": torch.tensor([1, 5, 9, 15])}, f"cu_seqlens {N}"),
    (True, {"cu_seqlens": torch.tensor([0, 9, 5, 15])}, f"cu_seqlens {N}"),
    (True, {"cu_seqlens": torch.tensor([0, 5, 9, 16])}, f"cu_seqlens {N}"),
    (True, {"cu_seqlens": torch.tensor([[0, 5, 9, 15]])}, "cu_seqlens"),
    (True, {"cu_seqlens": torch.tensor([0])}, "cu_seqlens"),
    (True, {"advantages": torch.randn(B + 1)}, "advantages"),
    (True, {"completion_mask": torch.ones(N - 1)}, f"completion_mask {N - 1} {N}"),
    (True, {"old_per_token_logps": torch.zeros(B)}, "old_per_token_logps"),
]


@pytest.mark.parametrize(("packed", "changes", "names"), SHAPES)
def test_shapes(packed: bool, changes: dict[str, Any], names: str) -> None:
    """S13, S14, S16, S17, D2, D5: nothing broadcasts; both shapes are in the message."""
    rejects(ValueError, names, arguments(packed, **changes))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"hidden": torch.randint(9, (B, T, H))}, "hidden"),
        ({"weight": torch.randint(9, (V, H))}, "weight"),
        ({"weight": torch.randn(V, H, dtype=torch.complex64)}, "weight"),
        ({"bias": torch.randint(9, (V,))}, "bias"),
        ({"completion_ids": torch.randn(B, T)}, "completion_ids"),
        ({"completion_ids": torch.ones(B, T, dtype=torch.bool)}, "completion_ids"),
        ({"advantages": torch.ones(B, dtype=torch.long)}, "advantages"),
        ({"advantages": [0.0, 1.0, 2.0]}, "advantages"),
        ({"completion_mask": [[1] * T] * B}, "completion_mask"),
        ({"old_per_token_logps": torch.zeros(B, T, dtype=torch.long)}, "old_per_token_logps"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": None}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"softcap": "30"}, "softcap"),
        ({"logit_scale": None}, "logit_scale"),
        ({"epsilon_low": None}, "epsilon_low"),
        ({"epsilon_high": "0.2"}, "epsilon_high"),
        ({"delta": "4"}, "delta"),
        ({"beta": None}, "beta"),
        ({"entropy_coef": None}, "entropy_coef"),
        ({"log_ratio_clamp": "20"}, "log_ratio_clamp"),
        ({"num_items_in_batch": "7"}, "num_items_in_batch"),
        ({"loss_type": "dr_grpo", "max_completion_length": "7"}, "max_completion_length"),
        ({"chunk_bytes": "1MB"}, "chunk_bytes"),
        ({"cu_seqlens": [0, 5, 9, 15]}, "cu_seqlens"),
        ({"cu_seqlens": BOUNDS.float()}, "cu_seqlens"),
    ],
)
def test_types(changes: dict[str, Any], name: str) -> None:
    rejects(TypeError, name, arguments("cu_seqlens" in changes, **changes))


@pytest.mark.parametrize(
    "name",
    [
        "weight",
        "bias",
        "completion_ids",
        "advantages",
        "completion_mask",
        "old_per_token_logps",
        "ref_per_token_logps",
        "importance_sampling_ratio",
        "temperature",
    ],
)
def test_devices(name: str) -> None:
    """A tensor on another device is named together with both devices."""
    tensors = {
        "bias": torch.zeros(V),
        "completion_mask": torch.ones(B, T),
        "old_per_token_logps": REF,
        "ref_per_token_logps": REF,
        "importance_sampling_ratio": torch.ones(B, T),
        "temperature": torch.ones(B, T),
    }
    call = arguments(beta=0.1, **tensors)
    call[name] = call[name].to("meta")
    rejects(ValueError, f"{name} meta cpu", call)


@pytest.mark.parametrize("bad", [-1, -100, V, V + 7, 10**12])
@pytest.mark.parametrize("packed", [False, True])
def test_counted_ids_out_of_range(bad: int, packed: bool) -> None:
    """S8: a counted id outside [0, V) raises, also -100; a masked one is inert."""
    call = arguments(packed)
    call["completion_ids"].view(-1)[3] = bad
    rejects(ValueError, f"completion_ids {bad} {V}", call)
    mask = torch.ones_like(call["completion_ids"])
    mask.view(-1)[3] = 0
    grpo_loss(**call, completion_mask=mask)


@pytest.mark.parametrize("bad", [-1, V, 10**12])
def test_targets_out_of_range(bad: int) -> None:
    """S8: linear_logprobs takes ignore_index alone as not counted."""
    targets = torch.randint(V, (N,))
    targets[4] = bad
    with pytest.raises(ValueError, match=rf"targets.*{bad}") as caught:
        linear_logprobs(torch.randn(N, H), torch.randn(V, H), targets)
    assert str(V) in str(caught.value)


def test_unchecked_inputs_poison_their_token() -> None:
    """S8: with check_inputs=False a bad token gives NaN, never a plausible number."""
    hidden, weight, targets = torch.randn(4, H), torch.randn(V, H), torch.tensor([1, V, -1, 2])
    out = linear_logprobs(hidden, weight, targets, entropy=True, check_inputs=False)
    assert out.logps.isnan().tolist() == [False, True, True, False]
    assert out.entropy.isnan().tolist() == [False, True, True, False]
    temperature = torch.tensor([1.0, 0.0, -1.0, math.nan])
    out = linear_logprobs(
        hidden, weight, torch.tensor([1, 2, 3, 4]), temperature=temperature, check_inputs=False
    )
    assert out.logps.isnan().tolist() == [False, True, True, True]
    call = arguments()
    call["completion_ids"][0, 0] = V
    assert grpo_loss(**call, check_inputs=False).loss.isnan()
    rejects(ValueError, "completion_ids", call | {"check_inputs": True})


@pytest.mark.parametrize("values", [[0.5, 1.0], [2, 0], [-1, 1]])
def test_masks_hold_zeros_and_ones(values: list[float]) -> None:
    """A mask is no weight: 0.5 or 2 would silently count as 1."""
    mask = torch.ones(B, T)
    mask[0, :2] = torch.tensor(values).float()
    rejects(ValueError, "completion_mask 0 1", arguments(completion_mask=mask))


def test_errors_come_before_work() -> None:
    """With every argument bad, the call fails on the options, having touched no tensor."""
    with pytest.raises(ValueError, match="loss_type"):
        grpo_loss(**arguments(loss_type="x", hidden=torch.randn(B, T, H + 1)))


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "nope"},
        {"epsilon_low": 2.0},
        {"loss_type": "dr_grpo"},
        {"importance_sampling_level": "word"},
        {"delta": 0.3},
        {"use_bias_correction_kl": True},
    ],
)
def test_module_checks_its_options_when_built(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=re.escape(next(iter(options)))):
        GRPOLoss(**options)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"entropy_coef": 0.1}, "entropy_coef entropies"),
        ({"entropies": torch.zeros(B, T - 1)}, f"entropies {T - 1} {T}"),
        ({"advantages": torch.zeros(B + 1)}, "advantages"),
        ({"per_token_logps": torch.zeros(N)}, "cu_seqlens"),
        ({"beta": 0.1}, "beta ref_per_token_logps"),
        ({"loss_type": "nope"}, "loss_type nope"),
        ({"reduction": "mean"}, "reduction mean"),
    ],
)
def test_policy_loss(changes: dict[str, Any], names: str) -> None:
    call = {"per_token_logps": torch.zeros(B, T), "advantages": torch.zeros(B)} | changes
    rejects(ValueError, names, call, policy_loss)


@pytest.mark.parametrize(
    ("changes", "error", "names"),
    [
        ({"targets": torch.zeros(N + 1, dtype=torch.long)}, ValueError, f"targets {N + 1} {N}"),
        ({"targets": torch.zeros(N, 1, dtype=torch.long)}, ValueError, "targets"),
        ({"targets": torch.zeros(N)}, TypeError, "targets"),
        ({"hidden": torch.randn(N, H + 1)}, ValueError, "hidden weight"),
        ({"hidden": torch.randn(())}, ValueError, "hidden"),
        ({"temperature": torch.ones(N + 1)}, ValueError, "temperature"),
        ({"temperature": torch.ones(N, dtype=torch.long)}, TypeError, "temperature"),
        ({"temperature": -torch.ones(N)}, ValueError, "temperature"),
        ({"temperature": torch.full((N,), math.nan)}, ValueError, "temperature"),
        ({"backend": "nope"}, ValueError, "backend"),
    ],
)
def test_linear_logprobs(changes: dict[str, Any], error: type[Exception], names: str) -> None:
    call = {
        "hidden": torch.randn(N, H),
        "weight": torch.randn(V, H),
        "targets": torch.randint(V, (N,)),
    } | changes
    rejects(error, names, call, linear_logprobs)
