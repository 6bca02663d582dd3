"""verl's policy losses and heads by ours: against a table of verl's own results, and against verl.

`verl_numbers.json` was written by `verl_numbers.py` from verl 0.9.1, so that its values are checked
where verl is not installed. The tests marked with `the_real_one` need it importable.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import verl_numbers as numbers
from oracle import close
from torch import Tensor

from fused_grpo import linear_logprobs
from fused_grpo.integrations import verl as integration
from fused_grpo.integrations.verl import FusedLinearForPPO, linear_cross_entropy
from fused_grpo.integrations.verl_losses import LOSSES, MODES, compute_policy_loss

TABLE = json.loads(numbers.FILE.read_text())
ROOT = Path(__file__).parent.parent


def ours(name: str, case: str, **changes: Any) -> dict[str, Any]:
    """Our loss `name` on the inputs of a case."""

    def function(**arguments: Any) -> Any:
        return compute_policy_loss(name, **{**arguments, **changes})

    return numbers.run_loss(function, case, numbers.config(name, numbers.CASES[case][1]))


def same(got: dict[str, Any], want: dict[str, Any], tol: float) -> None:
    assert got["loss"] == pytest.approx(want["loss"], rel=tol, abs=tol)
    assert set(got["metrics"]) == set(want["metrics"])
    for key, value in want["metrics"].items():
        assert isinstance(got["metrics"][key], float)
        assert got["metrics"][key] == pytest.approx(value, rel=1e-6, abs=1e-6), key
    close(got["grad"], torch.tensor(want["grad"], dtype=torch.float64), tol, "gradient")


# ---- values


@pytest.mark.parametrize("case", numbers.CASES)
@pytest.mark.parametrize("name", numbers.CONFIGS)
def test_losses(name: str, case: str) -> None:
    """Every loss under every loss_agg_mode: value, dL/dlog_prob, metrics."""
    # verl has 1e-8 beside lengths and inside the binary KL
    same(ours(name, case), TABLE["losses"][name][case], 1e-7)


def test_the_table_covers_every_loss_and_mode() -> None:
    assert set(TABLE["losses"]) == set(LOSSES)
    assert {mode for mode, *_ in numbers.CASES.values()} == set(MODES)
    for name, cases in TABLE["losses"].items():
        assert set(cases) == set(numbers.CASES)
        # every case but those of losses with one reduction moves the loss
        values = {round(case["loss"], 9) for case in cases.values()}
        assert len(values) > (1 if name in ("geo_mean", "sapo") else 6)


def test_the_inputs_reach_every_branch() -> None:
    """Clip fractions above 0 wherever a loss logs one that can be."""
    for name, cases in TABLE["losses"].items():
        for key, value in cases["token-mean"]["metrics"].items():
            fixed = key == "actor/pg_clipfrac_lower" and name in ("gspo", "cispo", "sapo")
            fixed |= key == "actor/pg_clipfrac" and name == "sapo"
            assert (value == 0) == fixed, (name, key)


def test_losses_take_attributes_as_well_as_mappings() -> None:
    options = numbers.config("clip_cov", {})
    nested = SimpleNamespace(**options["policy_loss"])
    config = SimpleNamespace(**{**options, "policy_loss": nested})
    same(
        ours("clip_cov", "token-mean", config=config),
        TABLE["losses"]["clip_cov"]["token-mean"],
        1e-7,
    )


def test_everything_masked_gives_zero() -> None:
    """Where verl's token mean is 0 / 0."""
    empty = torch.zeros(numbers.ROWS, numbers.WIDTH)
    for name in LOSSES:
        got = ours(name, "token-mean", response_mask=empty)
        assert got["loss"] == 0
        assert not got["grad"].any()
        assert not any(got["metrics"].values())


def test_the_log_ratio_of_gspo_is_bounded_on_both_sides() -> None:
    """Difference: verl bounds it above only, by e^10; below e^-10 a ratio counts as e^-10."""
    x = numbers.loss_inputs()
    far = x["log_prob"] + 12.0  # ratios of e^-12
    gains = x["advantages"].abs()
    got = ours("gspo", "token-mean", old_log_prob=far, advantages=gains)
    counted = x["response_mask"].sum()
    want = -torch.exp(torch.tensor(-10.0)) * (gains * x["response_mask"]).sum() / counted
    assert got["loss"] == pytest.approx(float(want), rel=1e-6)
    assert abs(got["loss"]) < 1e-4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_agg_mode": "mean"}, "loss_agg_mode='mean' is unknown"),
        ({"config": None}, "config is needed"),
        ({"config": {"global_batch_info": {"dp_size": 2}}}, "dp_size=2 needs batch_num_tokens"),
        ({"config": {"clip_ratio": 1.5}}, r"epsilon_low=1\.5 must be in"),
        ({"config": {"clip_ratio_c": 0.9}}, r"dual_clip=0\.9 must be > 1"),
        ({"response_mask": torch.full((4, 6), 0.5)}, "completion_mask must be boolean"),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ours("vanilla", "token-mean", **changes)


def test_refused_names_and_dro_without_beta() -> None:
    with pytest.raises(ValueError, match="name='ppo' is unknown"):
        compute_policy_loss("ppo", *(torch.zeros(1, 1) for _ in range(4)))
    with pytest.raises(ValueError, match="dro_beta=None must be > 0"):
        ours("dro", "token-mean", config={})


# ---- heads


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_head(temperature: float, packed: bool) -> None:
    want = TABLE["heads"][str(temperature)]
    for head in (FusedLinearForPPO(), FusedLinearForPPO(64, "liger")):
        got = numbers.run_head(head, temperature, packed)
        for name, value in want.items():
            close(got[name].flatten(), torch.tensor(value), 1e-5, name)


def test_head_of_the_triton_backend_is_flat() -> None:
    want = TABLE["heads"]["0.6"]
    got = numbers.run_head(linear_cross_entropy, 0.6, packed=False)
    for name, value in want.items():
        close(got[name].flatten(), torch.tensor(value), 1e-5, name)
    x = numbers.head_inputs()
    logps, entropy = linear_cross_entropy(x["hidden"], x["weight"], x["ids"], 1.0, "none", None)
    assert logps.shape == entropy.shape == (numbers.ROWS * numbers.WIDTH,)


def test_dtypes_are_verls() -> None:
    """Its torch backend rounds entropies to the dtype of the hidden states, the others do not."""
    x = numbers.head_inputs()
    half = [x[name].bfloat16() for name in ("hidden", "weight")]
    exact = linear_logprobs(half[0], half[1], x["ids"], entropy=True)
    logps, entropy = FusedLinearForPPO()(*half, x["ids"])
    assert (logps.dtype, entropy.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(logps, exact.logps)
    assert exact.entropy is not None
    assert torch.equal(entropy, exact.entropy.bfloat16())
    logps, entropy = FusedLinearForPPO(impl_backend="liger")(*half, x["ids"].int())
    assert torch.equal(entropy, exact.entropy)


def test_refused_by_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    x = numbers.head_inputs()
    given = (x["hidden"], x["weight"], x["ids"])
    with pytest.raises(ValueError, match="impl_backend='triton' is unknown"):
        FusedLinearForPPO(impl_backend="triton")
    with pytest.raises(ValueError, match="reduction='mean' is unknown"):
        linear_cross_entropy(*given, 1.0, "mean")
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    with pytest.raises(ValueError, match="vocabulary is split"):
        linear_cross_entropy(*given, 1.0, "none", object())


# ---- patch and registry, on stand-ins for verl's modules


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """Modules named as verl's that hold what is replaced; one imports it under another name."""
    head, kernel, registry = type("FusedLinearForPPO", (), {}), object(), {}

    def register_policy_loss(name: str) -> Any:
        return lambda function: registry.setdefault(name, function)

    contents: dict[str, dict[str, Any]] = {
        "verl": {},
        "verl.utils": {},
        "verl.utils.experimental": {},
        "verl.utils.kernel": {},
        "verl.trainer": {},
        "verl.trainer.ppo": {},
        "verl.utils.experimental.torch_functional": {"FusedLinearForPPO": head},
        "verl.utils.kernel.linear_cross_entropy": {"linear_cross_entropy": kernel},
        "verl.models.mcore.model_forward_fused": {"linear_cross_entropy": kernel, "other": head},
        "verl.trainer.ppo.core_algos": {
            "POLICY_LOSS_REGISTRY": registry,
            "register_policy_loss": register_policy_loss,
        },
    }
    modules = {}
    for name, attributes in contents.items():
        module = ModuleType(name)
        module.__path__ = []  # type: ignore[attr-defined]
        module.__dict__.update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        if parent in modules:
            setattr(modules[parent], last, module)
        modules[name] = module
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9.1")
    return modules


def test_patch_replaces_every_import_and_unpatch_restores(
    stand_in: dict[str, ModuleType],
) -> None:
    torch_module = stand_in["verl.utils.experimental.torch_functional"]
    kernel_module = stand_in["verl.utils.kernel.linear_cross_entropy"]
    mcore = stand_in["verl.models.mcore.model_forward_fused"]
    head, kernel = torch_module.FusedLinearForPPO, kernel_module.linear_cross_entropy
    with integration.patch():
        assert torch_module.FusedLinearForPPO is mcore.other is FusedLinearForPPO
        assert kernel_module.linear_cross_entropy is linear_cross_entropy
        assert mcore.linear_cross_entropy is linear_cross_entropy
        with pytest.raises(RuntimeError, match="patched already"):
            integration.patch()
    assert torch_module.FusedLinearForPPO is mcore.other is head
    assert kernel_module.linear_cross_entropy is mcore.linear_cross_entropy is kernel
    with pytest.raises(RuntimeError, match="is not patched"):
        integration.unpatch()


def test_register_and_unregister(stand_in: dict[str, ModuleType]) -> None:
    registry = stand_in["verl.trainer.ppo.core_algos"].POLICY_LOSS_REGISTRY
    names = integration.register()
    assert names == list(registry) == [f"fused_{name}" for name in LOSSES]
    got = numbers.run_loss(registry["fused_gspo"], "weighted", numbers.config("gspo", {}))
    same(got, TABLE["losses"]["gspo"]["weighted"], 1e-7)
    with pytest.raises(RuntimeError, match="of these names already: fused_vanilla"):
        integration.register()
    integration.unregister()
    assert not registry
    with pytest.raises(RuntimeError, match="not registered"):
        integration.unregister()


def test_plugin_does_both(stand_in: dict[str, ModuleType]) -> None:
    sys.modules.pop("fused_grpo.integrations.verl_plugin", None)
    importlib.import_module("fused_grpo.integrations.verl_plugin")
    head = stand_in["verl.utils.experimental.torch_functional"].FusedLinearForPPO
    assert head is FusedLinearForPPO
    assert stand_in["verl.trainer.ppo.core_algos"].POLICY_LOSS_REGISTRY
    integration.unpatch()
    integration.unregister()


@pytest.mark.parametrize("version", ["0.9.0", "0.10.0"])
def test_unknown_versions_raise(
    stand_in: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    for function in (integration.patch, integration.register):
        with pytest.raises(RuntimeError, match=rf"verl {version} is not supported.*0\.9\.1"):
            function()


def test_without_verl() -> None:
    if importlib.util.find_spec("verl") is not None:
        pytest.skip("verl is installed")
    with pytest.raises(RuntimeError, match="verl is not installed"):
        integration.patch()


# ---- the example


def overrides() -> dict[str, str]:
    text = (ROOT / "examples/verl_config/overrides.txt").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def test_the_example_names_what_exists() -> None:
    found = overrides()
    actor = "actor_rollout_ref.actor"
    assert found[f"{actor}.policy_loss.loss_mode"].removeprefix("fused_") in LOSSES
    assert found[f"{actor}.loss_agg_mode"] in MODES
    backend = found["actor_rollout_ref.model.fused_kernel_options.impl_backend"]
    assert backend in integration.BACKENDS
    text = (ROOT / "examples/verl_config/overrides.txt").read_text()
    assert all(name in text for name in LOSSES)
    script = (ROOT / "examples/verl_config/run.sh").read_text()
    (module,) = [s.split("=")[1] for s in script.split() if s.startswith("VERL_USE_EXTERNAL")]
    assert importlib.util.find_spec(module) is not None


def test_the_example_starts_verl_with_its_overrides(tmp_path: Path) -> None:
    """What run.sh runs, with a program that prints its arguments in the place of Python."""
    fake = tmp_path / "python3"
    fake.write_text('#!/bin/sh\necho "$VERL_USE_EXTERNAL_MODULES"\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    done = subprocess.run(
        [ROOT / "examples/verl_config/run.sh", "data.train_files=x y"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    module, *arguments = done.stdout.splitlines()
    assert module == "fused_grpo.integrations.verl_plugin"
    lines = [f"{k}={v}" for k, v in overrides().items()]
    assert arguments == ["-m", "verl.trainer.main_ppo", *lines, "data.train_files=x y"]


# ---- with verl itself


@pytest.fixture
def the_real_one() -> ModuleType:
    """verl, where it and what it imports are installed."""
    try:
        return importlib.import_module("verl")
    except ImportError as error:
        pytest.skip(f"verl cannot be imported: {error}")


@pytest.mark.parametrize("mode", MODES)
def test_every_loss_of_its_registry(the_real_one: ModuleType, mode: str) -> None:
    """Ours next to its own, called through its registry with its configuration classes."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, get_policy_loss_fn
    from verl.workers.config.actor import ActorConfig, PolicyLossConfig

    assert set(POLICY_LOSS_REGISTRY) - {"bypass_mode"} == set(LOSSES)
    integration.register()
    try:
        for name, given in numbers.CONFIGS.items():
            options = {k: v for k, v in given.items() if k != "policy_loss"}
            low_high = {"clip_ratio_low": None, "clip_ratio_high": None}
            config = ActorConfig(
                strategy="fsdp",
                rollout_n=4,
                ppo_micro_batch_size_per_gpu=1,
                policy_loss=PolicyLossConfig(**given.get("policy_loss", {})),
                **(low_high | options),
            )
            case = next(c for c, (m, *_) in numbers.CASES.items() if m == mode)
            info = {"dp_size": 2, "batch_num_tokens": 31, "global_batch_size": 7}
            config.global_batch_info.update(info, loss_scale_factor=None)
            want, got = (
                numbers.run_loss(get_policy_loss_fn(prefix + name), case, config)
                for prefix in ("", "fused_")
            )
            same(got, want | {"grad": want["grad"].tolist()}, 1e-7)
    finally:
        integration.unregister()


def test_its_forward_with_and_without_the_patch(the_real_one: ModuleType) -> None:
    """`forward_with_torch_backend` on a tiny model: log-probabilities, entropies, gradients."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from verl.models.transformers.dense_common import forward_with_torch_backend
    from verl.utils.experimental import torch_functional

    sizes = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 37, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, tie_word_embeddings=False))
    ids = torch.arange(14).reshape(2, 7) * 5 % 37

    def run() -> list[Tensor]:
        model.zero_grad()
        out = forward_with_torch_backend(model, input_ids=ids, return_dict=True, temperature=0.7)
        (out.log_probs.sum() + out.entropy.square().sum()).backward()
        return [out.log_probs, out.entropy, *(p.grad.clone() for p in model.parameters())]

    want = run()
    with integration.patch():
        assert torch_functional.FusedLinearForPPO is FusedLinearForPPO
        got = run()
    assert torch_functional.FusedLinearForPPO is not FusedLinearForPPO
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        close(a, b, 1e-5, str(i))


def test_verl_imports_the_plugin(the_real_one: ModuleType) -> None:
    code = """
import verl
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils.experimental.torch_functional import FusedLinearForPPO
print(get_policy_loss_fn("fused_gspo").args, FusedLinearForPPO.__module__)
"""
    modules = {"VERL_USE_EXTERNAL_MODULES": "fused_grpo.integrations.verl_plugin"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | modules, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "('gspo',) fused_grpo.integrations.verl"


def test_the_example_fits_its_configuration(the_real_one: ModuleType) -> None:
    """Hydra accepts the overrides: every one of them names an option that exists."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    assert the_real_one.__file__ is not None
    folder = Path(the_real_one.__file__).parent / "trainer/config"
    with initialize_config_dir(str(folder), version_base=None):
        config = compose("ppo_trainer", [f"{k}={v}" for k, v in overrides().items()])
    for name, value in overrides().items():
        assert str(OmegaConf.select(config, name)) == value
