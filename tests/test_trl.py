"""TRL's trainers with our head, and `FusedGRPOTrainer` against its `GRPOTrainer`, on real runs."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl", exc_type=ImportError)

import transformers
import trl
import trl_runs
from trl import GRPOConfig, GRPOTrainer

from fused_grpo.integrations import trl as integration
from fused_grpo.integrations import trl_options
from fused_grpo.integrations.trl import FusedGRPOTrainer, patch, unpatch

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
# every loss_type of a run or a batch with options that fit it
FITTING: dict[str, dict[str, Any]] = {"cispo": {"epsilon_high": 1.1}}
T, B = 6, 4


# ---- the head's function


def _arguments(dtype: torch.dtype = torch.float64, bias: bool = True) -> list[Any]:
    g = torch.Generator().manual_seed(5)
    hidden = torch.randn(11, 8, generator=g, dtype=torch.float64)
    weight = torch.randn(97, 8, generator=g, dtype=torch.float64)
    b = torch.randn(97, generator=g, dtype=torch.float64)
    leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight, b)]
    targets = torch.randint(97, (11,), generator=g)
    targets[:4] = (hidden[:4] @ weight.T + b).argmax(-1)
    return [leaves[0], leaves[1], leaves[2] if bias else None, targets]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("softcap", "scale"), [(None, 1.0), (3.0, 0.6)])
def test_all_outputs_and_gradients_are_those_of_trl(
    bias: bool, softcap: float | None, scale: float
) -> None:
    from trl.kernels import ChunkedLogProbFunction

    g = torch.Generator().manual_seed(6)
    upstream = [torch.randn(11, generator=g) for _ in range(2)]
    found = []
    for function in (ChunkedLogProbFunction, integration.HeadFunction):
        arguments = _arguments(torch.float32, bias)
        out = function.apply(*arguments, 0.7, 40, softcap, scale)
        leaves = [x for x in arguments[:3] if x is not None]
        total = sum((x * u).sum() for x, u in zip(out[:2], upstream, strict=True))
        found.append((out, torch.autograd.grad(total, leaves)))
        assert [x.requires_grad for x in out] == [True, True, False, False, False]
    for theirs, ours in zip(found[0][0], found[1][0], strict=True):
        assert theirs.dtype == ours.dtype
        if theirs.dtype == torch.bool:
            assert torch.equal(theirs, ours)
            assert 0 < ours.sum() < len(ours)
        else:
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)
    for theirs, ours in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


def test_only_the_outputs_that_are_asked_for() -> None:
    out = integration.HeadFunction.apply(*_arguments(), 1.0, 40, None, 1.0, ("log_probs",))
    assert out[0].dtype == torch.float64
    assert out[1:] == (None, None, None, None)


def test_a_head_that_zero3_has_partitioned_is_refused() -> None:
    """D2: Its weight has 0 elements outside of its forward: the message says so."""
    arguments = _arguments()
    arguments[1].ds_id = 0
    with pytest.raises(ValueError, match="ZeRO-3"):
        integration.HeadFunction.apply(*arguments, 1.0, 40)


# ---- patching


def test_the_patch_is_reversible_and_applied_once() -> None:
    """I5: Patching twice, or over somebody else's patch, is noticed."""
    utils, kernels = (
        importlib.import_module("trl.trainer.utils"),
        importlib.import_module("trl.kernels"),
    )
    original, where = kernels.ChunkedLogProbFunction, utils._use_triton
    with patch():
        assert utils._ChunkedLogProbFunction is integration.HeadFunction
        assert kernels.ChunkedLogProbFunction is integration.HeadFunction
        assert utils._use_triton(torch.device("cpu"))
        with pytest.raises(RuntimeError, match="trl is patched already"):
            patch()
    assert utils._ChunkedLogProbFunction is original
    assert kernels.ChunkedLogProbFunction is original
    assert utils._use_triton is where
    with pytest.raises(RuntimeError, match="trl is not patched"):
        unpatch()
    patch()
    unpatch()
    assert utils._ChunkedLogProbFunction is original


@pytest.mark.parametrize("version", ["1.15.3", "1.17.0", "2.0.0", "1.160.0"])
def test_other_versions_are_refused(
    version: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(trl, "__version__", version)
    for act in (patch, lambda: trl_runs.trainer(FusedGRPOTrainer, tmp_path)):
        with pytest.raises(RuntimeError, match=f"trl {version} is not supported"):
            act()
    with pytest.raises(RuntimeError, match="not patched"):
        unpatch()


def test_another_signature_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """I6: A release whose function has changed is refused, not guessed at."""
    from trl.kernels import ChunkedLogProbFunction

    monkeypatch.setattr(ChunkedLogProbFunction, "forward", lambda ctx, hidden, weight: None)
    with pytest.raises(RuntimeError, match="forward takes ctx, hidden, weight, not ctx"):
        patch()


@pytest.mark.parametrize("kind", ["qwen2", "qwen2_moe"])
def test_a_patched_model_gives_all_outputs_and_leaves_out_what_is_masked(kind: str) -> None:
    """What trainers other than GRPO's read: every output, in the layout of the labels."""
    from trl.trainer.utils import add_fused_lm_head

    model = trl_runs.model(kind)
    outputs = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    add_fused_lm_head(model, temperature=0.8, outputs=outputs)
    g = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 40, (3, 9), generator=g)
    labels = ids.masked_fill(torch.rand(3, 9, generator=g) < 0.4, -100)
    more = {"output_router_logits": True} if kind == "qwen2_moe" else {}
    found = []
    for ours in (False, True):
        model.zero_grad()
        if ours:
            patch()
        try:
            out = model(input_ids=ids, labels=labels, fused_lm_head=True, **more)
            out.loss.backward()
        finally:
            if ours:
                unpatch()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append((dict(out), {k: v.clone() for k, v in grads.items()}))
    (theirs, their_grads), (ours_out, our_grads) = found
    assert set(theirs) == set(ours_out)
    assert {"loss", "is_top1", "label_mask", *outputs} <= set(theirs)
    for name, value in theirs.items():
        torch.testing.assert_close(ours_out[name], value, rtol=2e-5, atol=2e-5)
    assert len(their_grads) > 8
    for name, value in their_grads.items():
        torch.testing.assert_close(our_grads[name], value, rtol=1e-4, atol=2e-6)


# ---- one batch: `_compute_loss` of both


def _batch(seed: int = 0, **changes: Any) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([6, 3, 5, 1])
    mask = (torch.arange(T) < lengths[:, None]).long()
    batch = {
        "prompt_ids": torch.randint(3, 40, (B, 4), generator=g),
        "prompt_mask": torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 1, 1], [1, 1, 1, 1]]),
        "completion_ids": torch.randint(3, 40, (B, T), generator=g),
        "completion_mask": mask,
        "advantages": torch.tensor([1.1, -0.7, -1.4, 0.8]),
        "num_items_in_batch": torch.tensor(33),
    }
    return {**batch, **changes}


def _beside(logps: Tensor, scale: float, seed: int) -> Tensor:
    """Log-probabilities of a policy next to this one."""
    g = torch.Generator().manual_seed(seed)
    return logps + scale * torch.randn(logps.shape, generator=g)


def _losses(
    folder: Path, options: dict[str, Any], inputs: Any, kind: str = "qwen2", prepare: Any = None
) -> list[tuple[float, dict[str, Tensor], dict[str, Any]]]:
    """(loss, gradients, metrics) of TRL's trainer, and of ours."""
    found = []
    for cls in (GRPOTrainer, FusedGRPOTrainer):
        made = trl_runs.trainer(cls, folder, kind=kind, **options)
        made.current_gradient_accumulation_steps = 2
        made.model.train()
        batch = _batch()
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        with torch.no_grad():
            logps, _, _ = GRPOTrainer._get_per_token_logps_and_entropies(
                made, made.model, ids, attention, T
            )
        batch |= inputs(logps)
        if prepare is not None:
            prepare(made)
        loss = made._compute_loss(made.model, batch)
        loss.backward()
        loss = loss.detach()
        grads = {n: p.grad for n, p in made.model.named_parameters() if p.grad is not None}
        if cls is FusedGRPOTrainer:
            own = float(made.fused_loss)
            aux = made._metrics["train"].get("aux_loss", [0.0])[0]
            assert float(loss) == pytest.approx(
                own + made.router_aux_loss_coef * aux / 2 if aux else own, rel=1e-4, abs=1e-6
            )
        found.append((float(loss), grads, dict(made._metrics["train"])))
    return found


def _same(found: list[tuple[float, dict[str, Tensor], dict[str, Any]]]) -> None:
    (loss, grads, metrics), (our_loss, our_grads, our_metrics) = found
    assert our_loss == pytest.approx(loss, rel=1e-5, abs=1e-6)
    assert set(our_metrics) == set(metrics)
    for name, values in metrics.items():
        assert our_metrics[name] == pytest.approx(values, rel=1e-5, abs=1e-6, nan_ok=True), name
    assert set(our_grads) == set(grads)
    assert max(float(g.abs().max()) for g in grads.values()) > 1e-3
    for name, g in grads.items():
        error = float((our_grads[name] - g).abs().max())
        assert error <= 2e-5 * max(float(g.abs().max()), 1e-3), name


def _differs(one: Any, other: Any) -> bool:
    return any(float((one[1][k] - g).abs().max()) > 1e-5 for k, g in other[1].items())


def _old(logps: Tensor) -> dict[str, Tensor]:
    return {"old_per_token_logps": _beside(logps, 0.4, 1)}


def _reference(logps: Tensor) -> dict[str, Tensor]:
    return _old(logps) | {"ref_per_token_logps": _beside(logps, 0.5, 2)}


# option -> (options, what the batch gets from the log-probabilities)
OPTIONS: dict[str, tuple[dict[str, Any], Any]] = {
    "old": ({}, _old),
    "sequence": ({"importance_sampling_level": "sequence"}, _old),
    "kl": ({"beta": 0.3}, _reference),
    "kl_plain": ({"beta": 0.3, "use_bias_correction_kl": False}, _reference),
    "sequence_kl": ({"beta": 0.3, "importance_sampling_level": "sequence"}, _reference),
    "entropy": ({"entropy_coef": 0.2}, _old),
    "quantile": ({"top_entropy_quantile": 0.4}, _old),
    "quantile_entropy": ({"top_entropy_quantile": 0.4, "entropy_coef": 0.2}, _old),
    "off_policy": ({"off_policy_mask_threshold": 0.05, "entropy_coef": 0.2}, _old),
    "off_policy_sampler": (
        {"off_policy_mask_threshold": 0.3},
        lambda logps: _old(logps)
        | {
            "sampling_per_token_logps": (
                _beside(logps, 0.2, 3) + torch.tensor([[0], [1], [0], [1]])
            ).index_fill(1, torch.tensor([2]), torch.nan)
        },
    ),
    "tool_mask": (
        {"entropy_coef": 0.2, "beta": 0.1},
        lambda logps: _reference(logps)
        | {"tool_mask": torch.tensor([[1, 1, 0, 0, 1, 1], [1] * 6, [1, 0, 0, 1, 1, 1], [0] * 6])},
    ),
    "truncated": (
        {"mask_truncated_completions": True},
        lambda logps: _old(logps)
        | {"completion_mask": _batch()["completion_mask"] * torch.tensor([[0], [1], [0], [1]])},
    ),
    "advantages_per_token": (
        {},
        lambda logps: _old(logps) | {"advantages": _beside(torch.zeros(B, T), 1.0, 4)},
    ),
}  # fmt: skip
SPECIFIC: dict[str, list[dict[str, Any]]] = {
    "grpo": [{"epsilon": 0.1, "epsilon_high": 0.4}, {"delta": 1.2}],
    "dr_grpo": [{"max_completion_length": 9}],
    "luspo": [{"importance_sampling_level": "sequence", "epsilon": 0.05}],
    "cispo": [{"epsilon_high": 1.3}],
    "sapo": [{"sapo_temperature_pos": 0.5, "sapo_temperature_neg": 2.0}],
    "vespo": [
        {"vespo_k_pos": 1.5, "vespo_lambda_pos": 1.1, "vespo_k_neg": 2.0},
        {"vespo_lambda_neg": 3.0},
    ],
}


_PLAIN: dict[str, Any] = {}


def _without(loss_type: str, folder: Path) -> Any:
    """Our outcome without options, computed once."""
    if loss_type not in _PLAIN:
        common = {"loss_type": loss_type, **FITTING.get(loss_type, {})}
        _PLAIN[loss_type] = _losses(folder, common, _old)[1]
    return _PLAIN[loss_type]


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_batch(loss_type: str, option: str, tmp_path: Path) -> None:
    """Loss, every gradient, every metric; with and without the option."""
    options, inputs = OPTIONS[option]
    options = {"loss_type": loss_type, **FITTING.get(loss_type, {}), **options}
    if loss_type == "vespo" and options.get("importance_sampling_level") == "sequence":
        with pytest.raises(ValueError, match="refuses importance_sampling_level='sequence'"):
            trl_runs.trainer(FusedGRPOTrainer, tmp_path, **options)
        return
    found = _losses(tmp_path, options, inputs)
    _same(found)
    assert option == "old" or _differs(found[1], _without(loss_type, tmp_path))


@pytest.mark.parametrize(
    ("loss_type", "options"), [(name, o) for name, more in SPECIFIC.items() for o in more]
)
def test_options_of_one_loss(loss_type: str, options: dict[str, Any], tmp_path: Path) -> None:
    common = {"loss_type": loss_type, **FITTING.get(loss_type, {})}
    found = _losses(tmp_path, {**common, **options}, _old)
    _same(found)
    assert _differs(found[1], _without(loss_type, tmp_path))


@pytest.mark.parametrize("shape", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_importance_weights_of_vllm(loss_type: str, shape: str, tmp_path: Path) -> None:
    """R1: vLLM is not there, its weights are: as TRL's generation hands them to the loss."""

    def inputs(logps: Tensor) -> dict[str, Tensor]:
        ratio = _beside(torch.zeros(B, T), 0.5, 5).exp() * 1.2
        ratio[1] = 0.0  # masked by the correction
        mask = _batch()["completion_mask"].bool()
        ratio = ratio[:, :1] if shape == "sequence" else ratio.where(mask, torch.ones(()))
        return _old(logps) | {"importance_sampling_ratio": ratio}

    def pretend(made: Any) -> None:
        made.use_vllm, made.vllm_importance_sampling_correction = True, True

    options = {"loss_type": loss_type, **FITTING.get(loss_type, {})}
    found = _losses(tmp_path, options, inputs, prepare=pretend)
    _same(found)
    assert _differs(found[1], _without(loss_type, tmp_path))


def test_what_a_tool_wrote_is_inert(tmp_path: Path) -> None:
    """I3: However unlikely it is: TRL multiplies by 0 what stands there."""
    tool_mask = torch.tensor([[1, 1, 0, 0, 1, 1], [1] * 6, [1, 0, 0, 1, 1, 1], [1] * 6])
    found = []
    for there in (-3.0, -300.0):
        made = trl_runs.trainer(FusedGRPOTrainer, tmp_path)
        made.current_gradient_accumulation_steps = 1
        old = torch.full((B, T), -3.0).where(tool_mask.bool(), torch.tensor(there))
        batch = _batch(tool_mask=tool_mask, old_per_token_logps=old)
        loss = made._compute_loss(made.model, batch)
        loss.backward()
        found.append((loss.detach(), made.model.get_output_embeddings().weight.grad))
    assert found[0][0].isfinite()
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("open_gate", [True, False])
def test_the_adaptive_entropy_bonus_is_gated(open_gate: bool, tmp_path: Path) -> None:
    options = {"use_adaptive_entropy": True, "entropy_coef": 0.3, "entropy_target": 1.0}

    def after_a_step(made: Any) -> None:
        made._last_world_entropy = 0.9 if open_gate else 1.1

    found = _losses(tmp_path, options, _old, prepare=after_a_step)
    _same(found)
    plain = _losses(tmp_path, {}, _old)[1]
    assert _differs(found[1], plain) == open_gate


def test_the_experts_auxiliary_loss(tmp_path: Path) -> None:
    """I2: It is part of the loss where the model makes it."""
    options = {"router_aux_loss_coef": 0.5}
    found = _losses(tmp_path, options, _old, kind="qwen2_moe")
    _same(found)
    assert found[1][2]["aux_loss"][0] > 0.5
    none = _losses(tmp_path, {"router_aux_loss_coef": 0.0}, _old, kind="qwen2_moe")
    assert _differs(found[1], none[1])


def test_everything_masked_gives_zero_gradients(tmp_path: Path) -> None:
    made = trl_runs.trainer(FusedGRPOTrainer, tmp_path)
    made.current_gradient_accumulation_steps = 1
    loss = made._compute_loss(made.model, _batch(completion_mask=torch.zeros(B, T).long()))
    loss.backward()
    assert loss.item() == 0
    for p in made.model.parameters():
        assert p.grad is not None
        assert not p.grad.any()


def test_gradients_scale_with_the_upstream_gradient(tmp_path: Path) -> None:
    grads = []
    for factor in (1.0, 0.25):
        made = trl_runs.trainer(FusedGRPOTrainer, tmp_path)
        made.current_gradient_accumulation_steps = 1
        (made._compute_loss(made.model, _batch()) * factor).backward()
        grads.append(made.model.get_output_embeddings().weight.grad)
    torch.testing.assert_close(grads[1], 0.25 * grads[0], rtol=1e-5, atol=1e-8)


def test_the_head_is_passed_over_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fused_grpo import chunked, ops
    from fused_grpo.backends import CHUNKED

    passes = []

    def counted(*args: Any) -> Any:
        passes.append(args[3] is not None)  # coefficients: gradients in the same pass
        return chunked.head_pass(*args)

    counting = dataclasses.replace(CHUNKED, head_pass=counted)
    monkeypatch.setattr("fused_grpo.loss.choose", lambda *_: counting)
    assert ops.CHUNKED is CHUNKED
    made = trl_runs.trainer(FusedGRPOTrainer, tmp_path, entropy_coef=0.1)
    made.current_gradient_accumulation_steps = 1
    made._compute_loss(made.model, _batch()).backward()
    assert passes == [True]


def test_evaluation_forms_no_gradients(tmp_path: Path) -> None:
    values = []
    for cls in (GRPOTrainer, FusedGRPOTrainer):
        made = trl_runs.trainer(cls, tmp_path)
        made.current_gradient_accumulation_steps = 2
        made.model.eval()
        with torch.no_grad():
            loss = made._compute_loss(made.model, _batch())
        assert not loss.requires_grad
        values.append((float(loss), dict(made._metrics["eval"])))
    assert values[1][0] == pytest.approx(values[0][0], rel=1e-5)
    assert set(values[1][1]) == set(values[0][1]) != set()


# ---- options


def test_every_option_of_grpo_config_is_classified() -> None:
    """I2, R1: A new option is honoured or refused before it can be dropped."""
    common = {f.name for f in dataclasses.fields(transformers.TrainingArguments)}
    own = {f.name for f in dataclasses.fields(GRPOConfig)} - common
    assert own == trl_options.USED | trl_options.LEFT_TO_TRL
    assert not trl_options.USED & trl_options.LEFT_TO_TRL


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "cispo"}, "refuses epsilon_high=0.2: loss_type='cispo' bounds"),
        ({"off_policy_mask_threshold": -0.1}, "refuses off_policy_mask_threshold=-0.1"),
        ({"loss_type": "vespo", "vespo_lambda_neg": 1e-5}, "refuses vespo_lambda_neg"),
        ({"torch_compile": True}, "refuses torch_compile=True"),
        ({"delta": 0.9}, "delta=0.9 must be > 1"),
        ({"top_entropy_quantile": 0.0}, "top_entropy_quantile=0.0 must be in"),
        ({"fused_options": {"beta": 0.1}}, "fused_options has beta; there are backend"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        trl_runs.trainer(FusedGRPOTrainer, tmp_path, **options)


# ---- whole runs: 10 optimizer steps

RUNS: dict[str, dict[str, Any]] = {
    "steps_per_generation": {"gradient_accumulation_steps": 2, "steps_per_generation": 4},
    "iterations": {"num_iterations": 2, "gradient_accumulation_steps": 2, "beta": 0.05},
    "entropy": {"rollout": True, "entropy_coef": 0.05, "steps_per_generation": 2},
    "adaptive": {
        "rollout": True,
        "use_adaptive_entropy": True,
        "entropy_target": 2.0,
        "num_iterations": 2,
    },
    "truncated": {"rollout": True, "mask_truncated_completions": True, "num_iterations": 2},
    "sequence": {
        "rollout": True,
        "importance_sampling_level": "sequence",
        "num_iterations": 2,
        "epsilon": 0.01,
    },
    "quantile": {"rollout": True, "top_entropy_quantile": 0.5, "num_iterations": 2},
    "off_policy": {"rollout": True, "off_policy_mask_threshold": 0.01, "num_iterations": 2},
    "peft": {"peft_config": None, "beta": 0.05, "num_iterations": 2},
    "moe": {"kind": "qwen2_moe", "router_aux_loss_coef": 0.1, "rollout": True},
    "tool_mask": {"rollout": True, "steps_per_generation": 2, "entropy_coef": 0.05},
}


def _agree(runs: list[tuple[list[dict[str, float]], dict[str, Tensor]]]) -> None:
    logs, parameters = runs[0]
    assert sum("loss" in entry for entry in logs) == 10
    assert len({entry["grad_norm"] for entry in logs if "grad_norm" in entry}) > 5
    for other, others in runs[1:]:
        for theirs, ours in zip(logs, other, strict=True):
            assert ours.keys() == theirs.keys()
            for name, value in theirs.items():
                if value is None or isinstance(value, str):
                    assert ours[name] == value
                else:  # fp32 rounding, amplified by ten steps of AdamW
                    assert float(ours[name]) == pytest.approx(float(value), rel=1e-3, abs=2e-5), (
                        name
                    )
        for name, value in parameters.items():
            torch.testing.assert_close(others[name], value, rtol=1e-3, atol=1e-4)


def _runs(folder: Path, options: dict[str, Any]) -> None:
    options = dict(options)
    if "peft_config" in options:
        peft = pytest.importorskip("peft")
        options["peft_config"] = peft.LoraConfig(
            r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
        )
    runs = [trl_runs.train(trl_runs.trainer(GRPOTrainer, folder, **options))]
    with patch():
        runs.append(trl_runs.train(trl_runs.trainer(GRPOTrainer, folder, **options)))
    runs.append(trl_runs.train(trl_runs.trainer(FusedGRPOTrainer, folder, **options)))
    _agree(runs)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_runs_of_every_loss(loss_type: str, tmp_path: Path) -> None:
    more = {"num_iterations": 2, "gradient_accumulation_steps": 2, "beta": 0.05, "rollout": True}
    _runs(tmp_path, {"loss_type": loss_type, **FITTING.get(loss_type, {}), **more})


@pytest.mark.parametrize("run", RUNS)
def test_runs_with_options(run: str, tmp_path: Path) -> None:
    _runs(tmp_path, RUNS[run])


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_runs_of_every_loss_with_options(loss_type: str, run: str, tmp_path: Path) -> None:
    if loss_type == "vespo" and run == "sequence":
        pytest.skip("refused, see test_a_batch")
    _runs(tmp_path, {"loss_type": loss_type, **FITTING.get(loss_type, {}), **RUNS[run]})


def test_the_routed_backward_trains_as_well(tmp_path: Path) -> None:
    fused = {"backward": "routed", "route_tau": 1e-9, "route_seed": 0}
    runs = [
        trl_runs.train(trl_runs.trainer(FusedGRPOTrainer, tmp_path, fused_options=options))
        for options in (None, fused)
    ]
    _agree(runs)
