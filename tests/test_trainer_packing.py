"""`padding_free`: the numbers of the padded forward, without a token of padding in the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from test_trainer import PROMPTS, config, first_step, letters, logs
from tiny_models import tiny as tiny_model
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fused_grpo.trainer import GRPOTrainer, packing
from fused_grpo.trainer.models import character_tokenizer, tiny
from fused_grpo.trainer.packing import Packing, check_packing, packed_inputs

LORA = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
HEAD_LORA = LoraConfig(
    r=4, lora_alpha=8, target_modules=["q_proj", "lm_head"], init_lora_weights=False
)


RAGGED = {"generation_kwargs": {"eos_token_id": list(range(20))}}  # a quarter of the tokens end
SGD = {"optim": "sgd", "learning_rate": 0.3, "lr_scheduler_type": "constant"}


def trainer(
    path: Path,
    packed: bool,
    model: nn.Module | None = None,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Any:
    torch.manual_seed(0)
    peft = options.pop("peft", None)
    model = tiny(dtype)[0] if model is None else model
    args = config(path, padding_free=packed, **(RAGGED | SGD | options))
    tokenizer = character_tokenizer()
    run = GRPOTrainer(model, letters, args, PROMPTS, PROMPTS, tokenizer, peft_config=peft)
    if run.policy.reference is not None:
        g = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for p in run.policy.reference.parameters():
                p.add_(0.05 * torch.randn(p.shape, generator=g, dtype=p.dtype))
    return run


def batches(run: Any) -> list[Any]:
    return run.collector([row for row in PROMPTS[:2] for _ in range(4)]).batches


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "parts of a batch": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "kl": {"beta": 0.3, "entropy_coef": 0.01, "temperature": 0.8},
    "grpo": {"loss_type": "grpo", "beta": 0.3},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "gspo": {"importance_sampling_level": "sequence", "loss_type": "grpo"},
    "sequence_token": {"importance_sampling_level": "sequence_token"},
    "sequence_sum": {"importance_sampling_level": "sequence_sum"},
    "reference states": {"beta": 0.3, "kl_estimator": "full"},
    "sampler": {"sampling_correction": "sequence_truncate", "sampling_ratio_max": 1.01},
    "support": {"keep_sampling_mask": True, "top_k": 5, "beta": 0.3},
    "group means": {"aggregation": "group_mean"},
    "truncated left out": {"mask_truncated_completions": True, "loss_type": "grpo"},
    "routed": {"backward": "routed", "loss_type": "grpo"},
    "lora": {"peft": LORA, "beta": 0.3},
    "lora on the head": {"peft": HEAD_LORA},
    "checkpointing": {"gradient_checkpointing": True, "beta": 0.1},
    "checkpointing, reentrant": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "checkpointing with lora": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
        "peft": LORA,
    },
}


@pytest.mark.parametrize("name", CASES)
def test_same_steps_as_padded(tmp_path: Path, name: str) -> None:
    """Three steps, two of them on samples of an older policy: losses, metrics and all weights."""
    options = {"num_iterations": 3, "max_steps": 3} | CASES[name]
    if name == "group means":
        options["per_device_train_batch_size"] = 4 * 2
    padded, packed = (trainer(tmp_path / str(p), p, **options) for p in (False, True))
    before = {k: v.clone() for k, v in packed.model.state_dict().items()}
    for run in (padded, packed):
        torch.manual_seed(1)
        run.train()
    batch = packed._generation.batches[0]
    assert len(set(batch.completion_mask.sum(1).tolist())) > 1  # ragged
    assert any(not torch.equal(v, before[k]) for k, v in packed.model.state_dict().items())
    for metric in ("loss", "grad_norm", "ratio/max", "entropy", "kl", "reward", "num_tokens"):
        want, got = logs(padded, metric), logs(packed, metric)
        assert got == pytest.approx(want, rel=1e-6, abs=1e-9), metric
    for (key, want), got in zip(
        padded.model.state_dict().items(), packed.model.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(got, want, atol=1e-8, rtol=1e-7, msg=key)


def test_gradients_in_single_precision(tmp_path: Path) -> None:
    """Each gradient of the first step, as near as fp32 allows."""
    padded, want = first_step(trainer(tmp_path / "a", False, dtype=torch.float32, beta=0.3))
    packed, loss = first_step(trainer(tmp_path / "b", True, dtype=torch.float32, beta=0.3))
    assert loss == pytest.approx(want, rel=1e-5)
    for name, grad in padded.items():
        torch.testing.assert_close(packed[name], grad, atol=1e-6, rtol=1e-4, msg=name)


def test_what_the_model_and_the_loss_are_given(tmp_path: Path) -> None:
    run = trainer(tmp_path, True)
    (batch,) = batches(run)
    inputs = batch.model_inputs(run.model)
    tokens = int(batch.attention_mask.sum())
    assert set(inputs) == {"input_ids", "position_ids"}
    assert inputs["input_ids"].shape == inputs["position_ids"].shape == (1, tokens)
    assert (inputs["position_ids"] == 0).sum() == len(batch)
    hidden = torch.randn(1, tokens, 4)
    assert batch.predicting(hidden).shape == (1, int(batch.completion_mask.sum()), 4)


def test_no_attention_across_sequences(tmp_path: Path) -> None:
    """Other tokens in the first row: not a bit of the other rows' states moves."""
    run = trainer(tmp_path, True)
    (batch,) = batches(run)
    first = int(batch.attention_mask[0].sum())
    inputs = batch.model_inputs(run.model)
    states = run.model.base_model(**inputs, use_cache=False)[0]
    inputs["input_ids"] = inputs["input_ids"].clone()
    inputs["input_ids"][0, :first] = 7
    moved = run.model.base_model(**inputs, use_cache=False)[0]
    assert torch.equal(states[:, first:], moved[:, first:])
    assert not torch.allclose(states[:, :first], moved[:, :first])


def test_packing_there_and_back() -> None:
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]]).bool()
    counted = torch.tensor([[1, 1], [0, 0], [1, 0]]).bool()
    layout = Packing.of(mask, counted)
    assert layout.cu_seqlens.tolist() == [0, 2, 2, 3]
    places = torch.arange(9.0)[None, :, None]
    assert layout.states(places).flatten().tolist() == [1, 2, 7]
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    assert layout.flat(values).tolist() == [[1, 2, 5]]
    assert layout.rows(layout.flat(values), -1).tolist() == [[1, 2], [-1, -1], [5, -1]]


def test_nothing_counts(tmp_path: Path) -> None:
    """Every completion is cut off and left out: zero loss, zero gradients, no error."""
    run = trainer(tmp_path, True, mask_truncated_completions=True, max_completion_length=1)
    run.collector.sampler.eos_ids = [-1]
    grads, loss = first_step(run)
    assert loss == 0
    assert not any(grad.any() for grad in grads.values())


# ---- attention ----------------------------------------------------------------------------------


def by_bounds(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
    """What flash attention does with `cu_seq_lens_q`: every sequence by itself, no mask at all."""
    bounds = options.pop("cu_seq_lens_q", None)
    if bounds is None:
        return sdpa_attention_forward(module, q, k, v, mask, **options)
    assert mask is None
    assert torch.equal(bounds, options.pop("cu_seq_lens_k"))
    lengths = bounds.diff()
    assert bounds.dtype == torch.int32
    assert options.pop("max_length_q") == options.pop("max_length_k") == int(lengths.max())
    parts = [
        sdpa_attention_forward(module, *qkv, None, is_causal=True, **options)[0]
        for qkv in zip(*(x.split(lengths.tolist(), 2) for x in (q, k, v)), strict=True)
    ]
    return torch.cat(parts, 1), None


# eager attention takes its softmax in fp32
@pytest.mark.parametrize(("attention", "error"), [("eager", 1e-6), ("by_bounds", 1e-9)])
def test_other_attentions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attention: str, error: float
) -> None:
    """The same gradients, of the policy and of a reference. Sampling stays with sdpa: without a
    mask the stand-in would see padding."""
    AttentionInterface.register("by_bounds", by_bounds)
    monkeypatch.setattr(packing, "uses_flash", lambda model: attention == "by_bounds")
    want, loss = first_step(trainer(tmp_path / "a", False, beta=0.3))
    run = trainer(tmp_path / "b", True, beta=0.3)
    sampler = run.collector.sampler

    def use(implementation: str) -> None:
        for model in (run.model, run.policy.reference):
            model.set_attn_implementation(implementation)

    def sample(*args: Any, **kwargs: Any) -> Any:
        use("sdpa")
        out = sampler(*args, **kwargs)
        use(attention)
        return out

    run.collector.sampler = sample
    got, again = first_step(run)
    check_packing(run.model)
    inputs = run._generation.batches[0].model_inputs(run.model)
    assert ("cu_seq_lens_q" in inputs) == (attention == "by_bounds")
    assert again == pytest.approx(loss, rel=1e-6)
    for name, grad in want.items():
        torch.testing.assert_close(got[name], grad, atol=error, rtol=100 * error, msg=name)


WINDOWED = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Qwen3ForCausalLM", WINDOWED | {"use_sliding_window": True}),
        ("Gemma3ForCausalLM", WINDOWED),
        ("Qwen3MoeForCausalLM", {}),
        ("Phi3ForCausalLM", {}),
    ],
)
def test_classes_of_transformers(name: str, options: dict[str, Any]) -> None:
    """Sequences longer than a window, packed and alone."""
    model = tiny_model(name, **options).eval()
    check_packing(model)
    ids = torch.randint(2, 90, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(9) < torch.tensor([[9], [4], [7]])
    packed = model.base_model(**packed_inputs(ids, mask, model), use_cache=False)[0]
    alone = [
        model.base_model(row[m][None], use_cache=False)[0] for row, m in zip(ids, mask, strict=True)
    ]
    torch.testing.assert_close(packed, torch.cat(alone, 1), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("MambaForCausalLM", "padding_free=True needs position_ids.*Mamba"),
        ("Qwen3NextForCausalLM", "linear_attention of Qwen3NextForCausalLM"),
        ("BloomForCausalLM", "needs position_ids"),
    ],
)
def test_models_that_are_not_known_to_be_safe(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_packing(tiny_model(name))


def test_models_that_mix_sequences(tmp_path: Path) -> None:
    """One that takes positions and does nothing with them is found out by its numbers."""
    model = tiny(torch.float32)[0]
    backbone = model.model
    forward = backbone.forward
    backbone.forward = lambda input_ids, position_ids=None, **kw: forward(input_ids, **kw)
    with pytest.raises(ValueError, match=r"does not keep packed sequences apart.*off by"):
        trainer(tmp_path, True, model)


def test_an_attention_that_is_not_known(tmp_path: Path) -> None:
    AttentionInterface.register("my_attention", sdpa_attention_forward)
    model = tiny(torch.float32)[0]
    model.set_attn_implementation("my_attention")
    with pytest.raises(ValueError, match=r"attn_implementation='my_attention'.*sdpa"):
        check_packing(model)


# ---- the budget ---------------------------------------------------------------------------------


def test_chunk_bytes_reaches_every_pass_over_the_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fused_grpo.trainer import batches as module

    seen: dict[str, int] = {}
    for name in ("grpo_loss", "linear_logprobs", "linear_support"):
        original = getattr(module, name)

        def call(*args: Any, name: str = name, original: Any = original, **kwargs: Any) -> Any:
            seen[name] = kwargs["chunk_bytes"]
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, call)
    run = trainer(
        tmp_path,
        True,
        chunk_bytes=2**15,
        keep_sampling_mask=True,
        top_k=5,
        beta=0.1,
        num_iterations=2,
        off_policy_mask_threshold=1.0,
    )
    run.train()
    assert seen == dict.fromkeys(("grpo_loss", "linear_logprobs", "linear_support"), 2**15)


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), ("1G", TypeError)])
def test_budgets_that_are_none(tmp_path: Path, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="chunk_bytes"):
        config(tmp_path, chunk_bytes=value)
