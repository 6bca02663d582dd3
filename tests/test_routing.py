"""Experts that were chosen once are used again, and everything else is computed anew."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from rollout_server import Server
from test_trainer import PROMPTS, config, first_step, letters, logs
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from fused_grpo.integrations.routing import check_routing, recording, replaying
from fused_grpo.trainer import GRPOTrainer
from fused_grpo.trainer.models import character_tokenizer, tiny

EXPERTS, CHOSEN, LAYERS = 8, 2, 3
LORA = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")


def mixture(dtype: torch.dtype = torch.float32, **more: Any) -> tuple[Any, Any]:
    """A tiny Qwen3-MoE over characters, the middle one of its layers dense."""
    tokenizer = character_tokenizer()
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=32,
            moe_intermediate_size=16,
            num_hidden_layers=LAYERS + 1,
            mlp_only_layers=[1],
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_experts=EXPERTS,
            num_experts_per_tok=CHOSEN,
            norm_topk_prob=True,
            max_position_embeddings=128,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.eos_token_id,
            **more,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # the others have no fp64
    return model.to(dtype).eval(), tokenizer


def trainer(path: Path, peft: Any = None, **options: Any) -> GRPOTrainer:
    model, tokenizer = mixture()
    args = config(path, **options)
    return GRPOTrainer(model, letters, args, PROMPTS, PROMPTS, tokenizer, peft_config=peft)


def routers(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if type(m).__name__ == "Qwen3MoeTopKRouter"]


@contextmanager
def used(model: nn.Module) -> Iterator[list[list[Tensor]]]:
    """What the experts are called with, read off the routers' outputs."""
    found: list[list[Tensor]] = [[] for _ in routers(model)]

    def keep(calls: list[Tensor]) -> Callable[..., None]:
        return lambda module, args, out: calls.append(out[2].clone())

    handles = [
        router.register_forward_hook(keep(calls))
        for router, calls in zip(routers(model), found, strict=True)
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def another(experts: Tensor) -> Tensor:
    return (experts + 3) % EXPERTS


# ---- the forward --------------------------------------------------------------------------------


def test_what_is_recorded_is_what_the_routers_chose() -> None:
    model, _ = mixture()
    ids = torch.randint(1, 60, (3, 7))
    with recording(model) as tape, used(model) as seen, torch.no_grad():
        model(input_ids=ids)
    experts = tape.experts(3)
    assert experts.shape == (3, 7, LAYERS, CHOSEN)
    assert experts.dtype == torch.int16
    for layer, (chosen,) in enumerate(seen):
        assert torch.equal(experts[:, :, layer].long(), chosen.view(3, 7, CHOSEN))
    assert "forward" not in vars(model.model.layers[0].mlp)
    assert len(experts.unique()) > 4


def test_replay_of_the_same_experts_changes_no_bit() -> None:
    model, _ = mixture()
    ids = torch.randint(1, 60, (3, 7))
    with recording(model) as tape, torch.no_grad():
        plain = model(input_ids=ids).logits
    with replaying(model, tape.experts(3)), torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, plain)
    with replaying(model, another(tape.experts(3))), torch.no_grad():
        assert (model(input_ids=ids).logits - plain).abs().max() > 0.1
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, plain)


def test_weights_and_gradients_are_those_of_the_formula() -> None:
    """A block written out: probabilities of the present scores, at the experts that are given."""
    model, _ = mixture(torch.float64)
    block = model.model.layers[0].mlp
    hidden = torch.randn(2, 5, 32, dtype=torch.float64)
    chosen = torch.stack([torch.randperm(EXPERTS)[:CHOSEN] for _ in range(10)])

    def formula(hidden: Tensor) -> Tensor:
        probabilities = (hidden.view(-1, 32) @ block.gate.weight.T).softmax(-1)
        weights = torch.stack([p[c] for p, c in zip(probabilities, chosen, strict=True)])
        weights = weights / weights.sum(-1, keepdim=True)
        rows = []
        for x, experts, ws in zip(hidden.view(-1, 32), chosen, weights, strict=True):
            total = torch.zeros(32, dtype=torch.float64)
            for expert, w in zip(experts, ws, strict=True):
                gate, up = (block.experts.gate_up_proj[expert] @ x).chunk(2)
                total = total + w * (
                    block.experts.down_proj[expert] @ (nn.functional.silu(gate) * up)
                )
            rows.append(total)
        return torch.stack(rows).view(2, 5, 32)

    upstream = torch.randn(2, 5, 32, dtype=torch.float64)
    results = []
    for forward in (block, formula):
        x = hidden.clone().requires_grad_()
        block.zero_grad()
        if forward is block:
            with replaying(_alone(model, block), chosen.view(2, 5, 1, CHOSEN)):
                out = block(x)
                (out * upstream).sum().backward()
        else:
            out = formula(x)
            (out * upstream).sum().backward()
        results.append([out.detach(), x.grad, *(p.grad.clone() for p in block.parameters())])
    for got, want in zip(*results, strict=True):
        assert want.abs().max() > 1e-3
        # the router's softmax is fp32 in the model
        torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-6)


def _alone(model: Any, block: nn.Module) -> Any:
    """Something with this block only, and the configuration of the model."""
    alone = nn.Module()
    alone.block, alone.config = block, model.config
    return alone


def test_recomputed_activations_use_the_same_experts() -> None:
    model, _ = mixture()
    ids = torch.randint(1, 60, (2, 6))
    with recording(model) as tape, torch.no_grad():
        model(input_ids=ids)
    experts = another(tape.experts(2))
    gradients = []
    for checkpointing in (False, True):
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        with replaying(model, experts), used(model) as seen:
            model(input_ids=ids).logits.square().mean().backward()
        assert {len(calls) for calls in seen} == {1 + checkpointing}
        for layer, calls in enumerate(seen):
            for chosen in calls:
                assert torch.equal(chosen.view(2, 6, CHOSEN), experts[:, :, layer].long())
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
    for name, grad in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], grad, atol=1e-7, rtol=1e-5, msg=name)


# ---- the trainer --------------------------------------------------------------------------------


@pytest.mark.parametrize("copies", [1, 3])
def test_sampled_experts_are_those_of_one_pass_over_the_text(tmp_path: Path, copies: int) -> None:
    """Prompts of several lengths, their keys and values shared; padding chooses nothing of note."""
    run = trainer(tmp_path, router_replay=True)
    assert run.args.router_replay == "R3"
    sample = run.sampler(run.model, ["ab", "a longer prompt"], copies=copies)
    width = sample.prompt_ids.shape[1]
    rows, length = sample.completion_ids.shape
    assert sample.routed_experts.shape == (rows, width + length - 1, LAYERS, CHOSEN)
    for i, completion in enumerate(sample.completions()):
        prompt = sample.prompt_ids[i][sample.prompt_mask[i]]
        ids = torch.cat([prompt, torch.tensor(completion)])[None, :-1]
        with recording(run.model) as tape, torch.no_grad():
            run.model(input_ids=ids)
        start = width - len(prompt)
        got = sample.routed_experts[i, start : start + ids.shape[1]]
        assert torch.equal(got.sort(-1).values, tape.experts(1)[0].sort(-1).values)
    assert run.sampler(run.model, ["ab"], greedy=True).routed_experts is None


@pytest.mark.parametrize("mode", ["R2", "R3"])
@pytest.mark.parametrize(
    "more",
    [{}, {"gradient_checkpointing": True}, {"peft": LORA}, {"padding_free": True}],
    ids=["plain", "checkpointing", "lora", "packed"],
)
def test_training_uses_the_experts_that_were_recorded(
    tmp_path: Path, mode: str, more: dict[str, Any]
) -> None:
    """In the second pass over a generation the weights have moved, and the choice would have."""
    run = trainer(
        tmp_path,
        router_replay=mode,
        num_iterations=2,
        max_steps=2,
        learning_rate=0.05,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        **more,
    )
    checked: list[bool] = []
    original = run.training_step

    def step(model: nn.Module, inputs: Any, items: Any = None) -> Tensor:
        with used(run.model) as seen:
            loss = original(model, inputs, items)
        at = (run._micro_step - 1) % run.args.generation_steps
        batch = run._generation.batches[at]
        shape = batch.experts.shape
        assert batch.routed_experts.shape[:2] == batch.input_ids.shape
        for layer, calls in enumerate(seen):
            chosen = calls[-1].view(*shape[:2], CHOSEN)
            assert torch.equal(chosen, batch.experts[:, :, layer].long())
        with recording(run.model) as tape, torch.no_grad():
            run.model(**batch.model_inputs(run.model), use_cache=False)
        checked.append(torch.equal(tape.experts(shape[0]), batch.experts))
        return loss

    run.training_step = step
    run.train()
    assert len(checked) == 4
    assert not all(checked[2:]), "without replay the second pass would have chosen others"


def test_replay_closes_the_gap_to_a_sampler_that_rounds_in_another_way(tmp_path: Path) -> None:
    """Experts in fours whose scores are equal but for a rounding error, which the sampler's
    routers make in another direction: its log-probabilities are then those of other experts."""

    def level(model: Any, nudge: float) -> None:
        with torch.no_grad():
            for router in routers(model):
                for i in range(EXPERTS):
                    router.weight[i] = router.weight[i - i % 4] * (1 + nudge * (i % 4))

    gaps = {}
    for mode in (None, "R3"):
        run = trainer(
            tmp_path / str(mode),
            router_replay=mode,
            sampling_correction="monitor",
            max_steps=1,
            learning_rate=0.0,
        )
        level(run.model, 1e-6)
        nudged = copy.deepcopy(run.model)
        level(nudged, -1e-6)
        original = run.sampler

        def sample(model: Any, *args: Any, **kwargs: Any) -> Any:
            return original(nudged, *args, **kwargs)  # noqa: B023

        run.collector.sampler = sample  # type: ignore[assignment]
        run.train()
        gaps[mode] = logs(run, "sampling/logp_difference/max")[0]
    assert gaps[None] > 0.1
    assert gaps["R3"] < 2e-5


def test_gradients_without_replay_differ_and_with_it_are_those_of_fixed_experts(
    tmp_path: Path,
) -> None:
    """On fresh samples the sampler's choice is the trainer's: replay changes only rounding."""
    plain, loss = first_step(trainer(tmp_path / "a"))
    replayed, same = first_step(trainer(tmp_path / "b", router_replay="R3"))
    assert same == pytest.approx(loss, abs=1e-6)
    for name, grad in plain.items():
        torch.testing.assert_close(replayed[name], grad, atol=1e-5, rtol=1e-4, msg=name)
    router_grads = [grad for name, grad in replayed.items() if "gate.weight" in name]
    assert len(router_grads) == LAYERS
    assert all(grad.abs().max() > 1e-6 for grad in router_grads)


def test_the_reference_goes_through_experts_of_its_own(tmp_path: Path) -> None:
    run = trainer(tmp_path, router_replay="R3", beta=0.1, max_steps=1)
    with torch.no_grad():
        for router in routers(run.policy.reference):
            router.weight.neg_()
    with used(run.policy.reference) as seen:
        (batch,) = run.collector([row for row in PROMPTS[:2] for _ in range(4)]).batches
    chosen = seen[0][0].view(*batch.input_ids.shape, CHOSEN)
    assert not torch.equal(chosen, batch.routed_experts[:, :, 0].long())


def test_auxiliary_loss_with_replay(tmp_path: Path) -> None:
    run = trainer(tmp_path, router_replay="R3", max_steps=1)
    run.model.config.output_router_logits = True
    run.train()
    assert logs(run, "aux_loss")[0] > 0


@pytest.mark.parametrize("form", ["npy", "lists"])
def test_experts_of_a_server(tmp_path: Path, form: str) -> None:
    model, tokenizer = mixture()
    server = Server(model, tokenizer.eos_token_id, moe=True)

    def as_lists(answer: Any) -> Any:
        import base64
        import io

        import numpy as np

        for choice in answer["choices"]:
            packed = base64.b64decode(choice["routed_experts"])
            whole = np.load(io.BytesIO(packed)).tolist()
            count = len(choice["prompt_token_ids"])
            answer["prompt_routed_experts"] = whole[:count]
            choice["routed_experts"] = whole[count:]
        return answer

    try:
        if form == "lists":
            server.spoil = as_lists
        served = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server.url}
        run = trainer(
            tmp_path, router_replay="R3", sampling_correction="monitor", max_steps=2, **served
        )
        run.train()
        assert max(logs(run, "sampling/logp_difference/max")) < 2e-5
        sample = run.sampler(run.model, ["ab", "longer"], copies=2)
        prompt, completion = sample.prompt_ids[-1], sample.completions()[-1]
        ids = torch.cat([prompt, torch.tensor(completion)])[None, :-1]
        with recording(server.model) as tape, torch.no_grad():
            server.model(input_ids=ids)
        assert torch.equal(sample.routed_experts[-1, : ids.shape[1]], tape.experts(1)[0])
        server.moe, server.spoil = False, None
        with pytest.raises(RuntimeError, match=r"no routed_experts.*--enable-return-routed-exper"):
            run.sampler(run.model, ["ab"])
    finally:
        server.close()


# ---- models -------------------------------------------------------------------------------------

SMALL = {
    **{"vocab_size": 80, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
}
LATENT = {
    **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
    **{"v_head_dim": 8, "first_k_dense_replace": 1, "num_key_value_heads": 4},
    **{"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
}
LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
MODELS = {
    "mixtral": LOCAL,
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": LOCAL,
    "deepseek_v3": LATENT,
    "glm4_moe": {"n_routed_experts": 8, "num_experts_per_tok": 2},
    "granitemoe": LOCAL,
    "minimax_m2": LOCAL,
    "deepseek_v2": LATENT,
    "qwen3_next": {"num_experts": 8, "num_experts_per_tok": 2},
    "llama4_text": {"num_local_experts": 8, "num_experts_per_tok": 1},
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 2},
    "jamba": {"num_experts": 8, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("name", MODELS)
def test_routers_of_other_models(name: str) -> None:
    options = {**SMALL, **MODELS[name]}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.1)
    check_routing(model)


def test_models_whose_routing_is_not_known(tmp_path: Path) -> None:
    dense, tokenizer = tiny(torch.float32)
    args = config(tmp_path, router_replay="R3")
    with pytest.raises(ValueError, match="no block of experts was found in LlamaForCausalLM"):
        GRPOTrainer(dense, letters, args, PROMPTS, None, tokenizer)
    odd = AutoModelForCausalLM.from_config(AutoConfig.for_model("phimoe", **SMALL, **LOCAL))
    with pytest.raises(ValueError, match=r"\[0, 0\] times, or in a way that is not a topk"):
        check_routing(odd)


def test_experts_of_another_shape() -> None:
    model, _ = mixture()
    ids = torch.randint(1, 60, (2, 5))
    with recording(model) as tape, torch.no_grad():
        model(input_ids=ids)
    experts = tape.experts(2)
    with (
        pytest.raises(ValueError, match="2 blocks of experts were recorded, the model has 3"),
        replaying(model, experts[:, :, :2]),
    ):
        pass
    with pytest.raises(ValueError, match=r"\[8, 2\] were recorded for scores of 10 tokens"):  # noqa: SIM117
        with replaying(model, experts[:, :4]):
            model(input_ids=ids)
    with torch.no_grad():
        model(input_ids=ids)  # nothing is left behind
