"""Sampling through servers: a real one over HTTP, in the dialects of vLLM and of SGLang."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_server import Server, drop, half, hang, status
from test_routing import mixture
from test_trainer import LORA, PROMPTS, config, letters, logs

from fused_grpo import cli
from fused_grpo.integrations.models import causal_lm
from fused_grpo.trainer import GRPOTrainer, RolloutError
from fused_grpo.trainer.models import tiny
from fused_grpo.trainer.rollouts.weights import merged_weights

DIALECTS = ["vllm", "sglang"]
FAST = {"server_retries": 2, "vllm_server_timeout": 2.0}
SAMPLED = {"vllm": "/v1/completions", "sglang": "/generate"}


@pytest.fixture
def server() -> Iterator[Server]:
    torch.manual_seed(0)
    model, tokenizer = tiny(torch.float32)
    running = Server(model, tokenizer.eos_token_id)
    yield running
    running.close()


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fused_grpo.trainer.rollouts.http.Http.wait", 0.01)
    monkeypatch.setattr("fused_grpo.trainer.rollouts.http.Http.longest_wait", 0.05)


def options(url: str, dialect: str) -> dict[str, Any]:
    if dialect == "sglang":
        return {"sglang_server_base_url": url, **FAST}
    return {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, **FAST}


def trainer(
    path: Path,
    url: str,
    dialect: str = "vllm",
    peft: Any = None,
    reward: Any = letters,
    **more: Any,
) -> GRPOTrainer:
    torch.manual_seed(0)
    model, tokenizer = tiny(torch.float32)
    args = config(path, **(options(url, dialect) | more))
    return GRPOTrainer(model, reward, args, PROMPTS, PROMPTS, tokenizer, peft_config=peft)


# ---- what comes back ----------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
def test_greedy_completions_are_those_of_generate(
    tmp_path: Path, server: Server, dialect: str
) -> None:
    run = trainer(tmp_path, server.url, dialect)
    prompts = ["ab", "a longer prompt", "xyz"]
    run.sampler.sync(run.model)
    got = run.sampler(run.model, prompts, copies=2, greedy=True)
    torch.manual_seed(0)
    model, tokenizer = tiny(torch.float32)
    local = GRPOTrainer(model, letters, config(tmp_path), PROMPTS, None, tokenizer)
    want = local.sampler(local.model, prompts, copies=2, greedy=True)
    assert got.completions() == want.completions()
    assert torch.equal(got.prompt_ids, want.prompt_ids)
    assert torch.equal(got.prompt_mask, want.prompt_mask)
    assert torch.equal(got.ended, want.ended)
    assert len(server.sampled(SAMPLED[dialect])) == 3, "one request for each prompt"


@pytest.mark.parametrize("dialect", DIALECTS)
def test_ends_and_padding(tmp_path: Path, server: Server, dialect: str) -> None:
    """Ragged rows whose padding has the id of the end of sequence."""
    with torch.no_grad():
        server.model.lm_head.weight[0] *= 8
    run = trainer(tmp_path, server.url, dialect)
    sample = run.sampler(run.model, ["ab", "hello"], copies=24)
    rows = sample.completions()
    lengths = {len(row) for row in rows}
    assert 1 in lengths
    assert len(lengths) > 2
    for row, ended in zip(rows, sample.ended.tolist(), strict=True):
        assert ended == (row[-1] == 0)
        assert 0 not in row[:-1]
        assert ended or len(row) == 6
    assert sample.prompt_ids[::24].tolist()[1] == [9, 6, 13, 13, 16]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("more", [{}, {"temperature": 0.6}], ids=["plain", "tempered"])
def test_ratio_is_one_on_fresh_samples(
    tmp_path: Path, server: Server, dialect: str, more: dict[str, Any]
) -> None:
    run = trainer(
        tmp_path, server.url, dialect, sampling_correction="token_truncate", max_steps=3, **more
    )
    run.train()
    for name in ("sampling/logp_difference/max", "sampling/logp_difference/mean"):
        assert max(logs(run, name)) < 2e-5
    assert logs(run, "sampling/importance_ratio/max") == pytest.approx([1.0] * 3, abs=2e-5)
    assert logs(run, "sampling/importance_ratio/min") == pytest.approx([1.0] * 3, abs=2e-5)
    assert len(server.loaded) == 3, "the server has the weights of every step"
    assert not list(Path(server.loaded[0]).parent.glob("policy-000001"))


def test_kept_support_of_a_server_with_processed_log_probabilities(
    tmp_path: Path, server: Server
) -> None:
    run = trainer(
        tmp_path,
        server.url,
        sampling_correction="monitor",
        keep_sampling_mask=True,
        top_k=5,
        temperature=0.8,
        max_steps=2,
    )
    run.train()
    assert max(logs(run, "sampling/logp_difference/max")) < 2e-5


@pytest.mark.parametrize(
    ("dialect", "more", "message"),
    [
        ("vllm", {"top_k": 5}, "VLLMServer reports log-probabilities over the tokens that top_k=5"),
        ("vllm", {"repetition_penalty": 1.2}, "repetition_penalty=1.2 is in the log-prob"),
        ("sglang", {"top_k": 5, "keep_sampling_mask": True}, "over the whole vocabulary"),
    ],
)
def test_log_probabilities_of_another_distribution(
    tmp_path: Path, server: Server, dialect: str, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, server.url, dialect, sampling_correction="monitor", **more)
    trainer(tmp_path, server.url, dialect, **more)  # where nothing reads them


@pytest.mark.parametrize("dialect", DIALECTS)
def test_log_probabilities_without_the_temperature_are_found_out(
    tmp_path: Path, server: Server, dialect: str
) -> None:
    server.processed = False
    run = trainer(tmp_path, server.url, dialect, temperature=0.6, sampling_correction="token_mask")
    with pytest.raises(RolloutError, match=r"without the temperature, and temperature=0.6: start"):
        run.train()
    at_one = trainer(tmp_path / "b", server.url, dialect, sampling_correction="token_mask")
    at_one.train()
    assert max(logs(at_one, "sampling/logp_difference/max")) < 2e-5


# ---- training -----------------------------------------------------------------------------------


def test_training_through_a_server_raises_the_reward(tmp_path: Path, server: Server) -> None:
    run = trainer(
        tmp_path,
        server.url,
        sampling_correction="sequence_mask",
        per_device_train_batch_size=16,
        num_generations=8,
        max_steps=12,
        learning_rate=4e-2,
    )
    before = run.evaluate()["eval_reward"]
    run.train()
    after = run.evaluate()
    assert after["eval_reward"] > before + 0.3
    torch.manual_seed(0)
    _, tokenizer = tiny(torch.float32)
    local = GRPOTrainer(run.model, letters, config(tmp_path / "l"), None, PROMPTS, tokenizer)
    same = local.evaluate()
    for name in ("eval_reward", "eval_completions/mean_length"):
        assert same[name] == pytest.approx(after[name], abs=1e-6), "the server has these weights"


def test_a_server_in_a_process_of_its_own(tmp_path: Path) -> None:
    port_file = tmp_path / "port"
    program = Path(__file__).parent / "rollout_server.py"
    process = subprocess.Popen([sys.executable, str(program), str(port_file)])
    try:
        for _ in range(600):
            if port_file.exists() and port_file.read_text():
                break
            time.sleep(0.1)
        run = trainer(tmp_path, port_file.read_text(), sampling_correction="monitor")
        run.train()
        assert max(logs(run, "sampling/logp_difference/max")) < 2e-5
        process.kill()
        process.wait()
        with pytest.raises(RolloutError, match=r"was tried 3 times in .* s, at last Connection"):
            run.sampler(run.model, ["ab"])
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("how", ["disk", "adapter"])
def test_adapters_reach_the_server(tmp_path: Path, server: Server, dialect: str, how: str) -> None:
    run = trainer(
        tmp_path,
        server.url,
        dialect,
        LORA,
        sampling_correction="monitor",
        weight_sync=how,
        learning_rate=5e-2,
        max_steps=4,
    )
    run.train()
    assert max(logs(run, "sampling/logp_difference/max")) < 5e-5
    assert bool(server.loaded) == (how == "disk")
    names = {body.get("model") for body in server.sampled("/v1/completions")}
    names |= {body.get("lora_path") for body in server.sampled("/generate")}
    if how == "adapter":
        assert {f"policy-00000{i}" for i in (1, 2, 3, 4)} <= names
        assert list(server.adapters) == ["policy-000004"]


def test_merged_weights_leave_the_adapter_as_it_is() -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    base, _ = tiny(torch.float32)
    plain = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"])
    wrapped = get_peft_model(base, plain)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.1)
    before = {name: p.clone() for name, p in wrapped.named_parameters()}
    merged = dict(merged_weights(wrapped))
    assert all(torch.equal(p, before[name]) for name, p in wrapped.named_parameters())
    fresh, _ = tiny(torch.float32)
    assert set(merged) == set(fresh.state_dict())
    fresh.config.tie_word_embeddings = False
    fresh.lm_head.weight = torch.nn.Parameter(fresh.lm_head.weight.clone())
    fresh.load_state_dict(merged)
    ids = torch.tensor([[3, 4, 5]])
    torch.testing.assert_close(fresh(ids).logits, wrapped.eval()(ids).logits, atol=2e-5, rtol=1e-5)


def test_merged_weights_of_adapted_experts() -> None:
    """PEFT wraps one adapter around another there, one for each parameter of the experts."""
    from peft import LoraConfig, get_peft_model

    base, _ = mixture()
    state = {name: p.clone() for name, p in base.state_dict().items()}
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    wrapped = get_peft_model(
        base, LoraConfig(r=2, target_modules=["q_proj"], target_parameters=parameters)
    )
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.3)
    merged = dict(merged_weights(wrapped))
    assert set(merged) == set(state)
    assert sum(not torch.equal(merged[name], p) for name, p in state.items()) == 4 + 2 * 3
    fresh, _ = mixture()
    fresh.load_state_dict(merged)
    ids = torch.tensor([[3, 4, 5]])
    torch.testing.assert_close(fresh(ids).logits, wrapped.eval()(ids).logits, atol=1e-4, rtol=1e-4)


def test_a_server_that_keeps_its_weights(tmp_path: Path) -> None:
    """It needs no development mode; the ratio says how far the policy has gone."""
    torch.manual_seed(0)
    model, tokenizer = tiny(torch.float32)
    server = Server(model, tokenizer.eos_token_id, dev_mode=False)
    try:
        with pytest.raises(RolloutError, match=r"no /collective_rpc.*VLLM_SERVER_DEV_MODE=1"):
            trainer(tmp_path, server.url)
        with pytest.raises(RolloutError, match=r"no /v1/load_lora_adapter.*--enable-lora"):
            trainer(tmp_path, server.url, peft=LORA, weight_sync="adapter")
        kept = {"weight_sync": "none", "learning_rate": 5e-2}
        run = trainer(
            tmp_path, server.url, sampling_correction="token_truncate", max_steps=3, **kept
        )
        run.train()
        gaps = logs(run, "sampling/logp_difference/max")
        assert gaps[0] < 2e-5
        assert gaps[2] > 1e-2
        asked = len(server.sampled("/v1/completions"))
        run.evaluate()
        assert len(server.sampled("/v1/completions")) == asked, "it is not the policy's any more"
        for correction in (None, "monitor"):
            with pytest.raises(ValueError, match="weight_sync='none' samples from other weights"):
                trainer(tmp_path, server.url, sampling_correction=correction, **kept)
    finally:
        server.close()


# ---- faults -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault", [status(500), status(503, Retry_After="0"), status(429), drop, half]
)
def test_what_passes_is_tried_again(tmp_path: Path, server: Server, fault: Any) -> None:
    run = trainer(tmp_path, server.url)
    server.faults = [fault, fault]
    sample = run.sampler(run.model, ["ab"], copies=2)
    assert len(sample.completions()) == 2
    assert len(server.sampled("/v1/completions")) == 3


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (status(500), r"tried 3 times in \d.* status 500 .*told to answer 500"),
        (drop, r"POST http://127.0.0.1:\d+/v1/completions was tried 3 times .*Remote"),
        (half, r"tried 3 times .*IncompleteRead"),
    ],
)
def test_what_does_not_pass_says_what_was_tried(
    tmp_path: Path, server: Server, fault: Any, message: str
) -> None:
    run = trainer(tmp_path, server.url)
    server.faults = [fault] * 9
    with pytest.raises(RolloutError, match=message):
        run.sampler(run.model, ["ab"])


def test_a_request_that_is_wrong_is_sent_once(tmp_path: Path, server: Server) -> None:
    run = trainer(tmp_path, server.url)
    server.faults = [status(400)]
    with pytest.raises(RolloutError, match=r"/v1/completions refused: status 400 .*answer 400"):
        run.sampler(run.model, ["ab"])
    assert len(server.sampled("/v1/completions")) == 1


def test_a_server_that_hangs(tmp_path: Path, server: Server) -> None:
    run = trainer(tmp_path, server.url, server_request_timeout=0.3)
    server.faults = [hang(1.0)]
    assert run.sampler(run.model, ["ab"]).completions()
    server.faults = [hang(1.0)] * 3
    start = time.monotonic()
    with pytest.raises(RolloutError, match=r"tried 3 times in .*[Tt]imed? ?out"):
        run.sampler(run.model, ["ab"])
    assert time.monotonic() - start < 3


def test_a_server_that_dies_in_the_run(tmp_path: Path, server: Server) -> None:
    def reward(completions: list[str], **_: Any) -> list[float]:
        if run.state.global_step == 2:
            server.close()
        return letters(completions)

    run = trainer(
        tmp_path, server.url, reward=reward, max_steps=6, save_strategy="steps", save_steps=2
    )
    with pytest.raises(RolloutError, match=r"did not get the weights: POST .*tried 3 times"):
        run.train()
    assert run.state.global_step == 3
    assert (tmp_path / "checkpoint-2").exists()


def test_no_server(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(RolloutError, match=r"no server at http://127.0.0.1:9: GET /health was tri"):
        trainer(tmp_path, "http://127.0.0.1:9", vllm_server_timeout=0.3)
    assert time.monotonic() - start < 3


def test_the_command_says_so_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "--model", "tiny", "--steps", "1", "--output-dir", str(tmp_path / "run")]
    arguments += ["--sglang_server_base_url", "http://127.0.0.1:9", "--vllm_server_timeout", "0.2"]
    assert cli.main(arguments) == 2
    assert "fused-grpo: no server at http://127.0.0.1:9" in capsys.readouterr().err


def spoiled(**change: Any) -> Any:
    """Changes of the first choice of vLLM's answer."""

    def spoil(answer: Any) -> Any:
        answer = copy.deepcopy(answer)
        answer["choices"][0].update(change)
        return answer

    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoiled(token_ids=None, logprobs=None), "no token ids, but None"),
        (spoiled(token_ids=["a"]), "no token ids, but"),
        (spoiled(token_ids=[]), " 0 tokens where"),
        (spoiled(token_ids=[5] * 7), " 7 tokens where max_completion"),
        (spoiled(finish_reason="abort"), "finished by 'abort'"),
        (spoiled(finish_reason="stop", token_ids=[7]), "ends with token 7"),
        (spoiled(prompt_token_ids=[3]), r"another prompt .* of 2 tokens .*\(1 t"),
        (spoiled(logprobs=None), "no log-probabilities for"),
        (
            spoiled(logprobs={"token_logprobs": [-1.0], "tokens": []}),
            "1 log-probabilities for 6 tokens",
        ),
        (
            lambda answer: {**answer, "choices": answer["choices"][:1]},
            "1 completions in place of 2",
        ),
        (lambda answer: {"object": "error"}, "no choices"),
        (lambda answer: [answer], "list in place of an object"),
        (lambda answer: {**answer, "usage": {"prompt_tokens": 1}}, "another prompt"),
    ],
)
def test_answers_that_cannot_be_used(
    tmp_path: Path, server: Server, spoil: Any, message: str
) -> None:
    run = trainer(
        tmp_path,
        server.url,
        sampling_correction="monitor",
        generation_kwargs={"eos_token_id": 96},  # beyond the vocabulary: always 6 tokens
    )
    assert len(run.sampler(run.model, ["ab"], copies=2).completions()) == 2
    server.spoil = spoil
    with pytest.raises(RolloutError, match=f"{server.url} answered with.*{message}"):
        run.sampler(run.model, ["ab"], copies=2)


@pytest.mark.parametrize("value", [None, math.nan, -9999.0, 1.0, -math.inf])
def test_log_probabilities_that_are_not_known(
    tmp_path: Path, server: Server, value: float | None
) -> None:
    """They count as a ratio of 1, and the others stay what they are; not one known is an error."""

    def spoil(answer: Any) -> Any:
        for choice in answer["choices"]:
            choice["logprobs"]["token_logprobs"][0] = value
        return answer

    def spoil_all(answer: Any) -> Any:
        for choice in answer["choices"]:
            choice["logprobs"]["token_logprobs"] = [value] * len(choice["token_ids"])
        return answer

    run = trainer(tmp_path, server.url, sampling_correction="token_mask", max_steps=1)
    server.spoil = spoil
    run.train()
    assert logs(run, "sampling/importance_ratio/max")[0] == pytest.approx(1.0, abs=2e-5)
    assert logs(run, "sampling/importance_ratio/min")[0] == pytest.approx(1.0, abs=2e-5)
    assert math.isfinite(logs(run, "grad_norm")[0])
    server.spoil = spoil_all
    with pytest.raises(RolloutError, match="not one log-probability is a number"):
        run.sampler(run.model, ["ab"])


def test_token_ids_of_a_server_that_only_names_tokens(tmp_path: Path, server: Server) -> None:
    def spoil(answer: Any) -> Any:
        for choice in answer["choices"]:
            del choice["token_ids"], choice["prompt_token_ids"]
        return answer

    server.spoil = spoil
    run = trainer(tmp_path, server.url, sampling_correction="monitor", max_steps=1)
    run.train()
    assert logs(run, "sampling/logp_difference/max")[0] < 2e-5


def test_a_sync_that_fails(tmp_path: Path, server: Server) -> None:
    run = trainer(tmp_path, server.url, "sglang")
    run.sampler.folder.next()
    with pytest.raises(RolloutError, match=r"status 400 .*no such folder"):
        run.sampler.load_model(str(tmp_path / "nothing"))
    server.resets = False
    stale = trainer(tmp_path / "b", server.url)
    with pytest.raises(RolloutError, match=r"reset_prefix_cache.* failed: None"):
        stale.sampler.sync(stale.model)


# ---- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"vllm_server_port": 1}, "vllm_server_port=1 has no effect on completions from generate"),
        ({"weight_sync": "none"}, "weight_sync='none' has no effect"),
        ({"use_vllm": True, "vllm_mode": "remote"}, "vllm_mode='remote' is unknown"),
        (
            {"use_vllm": True, "use_transformers_continuous_batching": True},
            "completions come from one place only",
        ),
        ({"use_vllm": True, "vllm_tensor_parallel_size": 2}, "vllm_tensor_parallel_size=2"),
        ({"sglang_server_base_url": "http://a", "server_retries": -1}, "server_retries=-1"),
        ({"sglang_server_base_url": "http://a", "router_replay": "R3"}, "tells its experts"),
        ({"router_replay": "R1"}, "router_replay='R1' is unknown"),
        ({"router_replay": "R2", "torch_compile": True}, "not with torch_compile"),
    ],
)
def test_options_that_do_not_fit(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **more)


def test_adapter_sync_needs_an_adapter(tmp_path: Path, server: Server) -> None:
    with pytest.raises(ValueError, match="weight_sync='adapter' needs a model with a PEFT adapter"):
        trainer(tmp_path, server.url, weight_sync="adapter")


def test_what_the_server_is_asked(tmp_path: Path, server: Server) -> None:
    """All rules are sent, for a server would fill in those of the checkpoint."""
    run = trainer(
        tmp_path, server.url, top_p=0.9, min_p=0.1, generation_kwargs={"seed": 5, "logit_bias": {}}
    )
    run.sampler(run.model, ["ab"], copies=3)
    (body,) = server.sampled("/v1/completions")
    assert body == {
        "model": "tiny",
        "prompt": [2, 3],
        "n": 3,
        "max_tokens": 6,
        "stop_token_ids": [0],
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        **{"temperature": 1.0, "top_p": 0.9, "top_k": 0, "min_p": 0.1, "repetition_penalty": 1.0},
        **{"seed": 5, "logit_bias": {}},
    }
    assert causal_lm(run.model) is not server.model
