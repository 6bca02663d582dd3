"""vLLM in the process: a stand-in that has what is used of its interface, and is as strict."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from rollout_server import Server
from test_routing import mixture
from test_trainer import PROMPTS, config, letters, logs
from transformers import AutoModelForCausalLM

from fused_grpo.trainer import GRPOTrainer, RolloutError
from fused_grpo.trainer.models import tiny

COLOCATED = {"use_vllm": True}
NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


KNOWN = {"n", "max_tokens", "stop_token_ids", "logprobs", "temperature", "top_p", "top_k"}
KNOWN |= {"min_p", "repetition_penalty", "seed"}


class SamplingParams:
    """Only what vLLM knows."""

    def __init__(self, **options: Any) -> None:
        assert set(options) <= KNOWN
        self.options = options


class LLM:
    """Samples by the same plain loop as the server of the tests."""

    last: Any = None

    def __init__(self, model: str, **options: Any) -> None:
        assert options["logprobs_mode"] == "processed_logprobs"
        self.options, self.model = options, AutoModelForCausalLM.from_pretrained(model).eval()
        moe = options.get("enable_return_routed_experts", False)
        self.sampler = Server(self.model, 0, moe=moe)
        self.sampler.close()
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=self.load))
        worker = SimpleNamespace(model_runner=runner)
        self.llm_engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))
        self.asleep: set[str] = set()
        self.events: list[str] = []
        self.spoil: Any = None
        LLM.last = self

    def load(self, weights: Any) -> None:
        assert "weights" not in self.asleep
        given = dict(weights)
        missing, unexpected = self.model.load_state_dict(given, strict=False)
        assert not missing
        assert not unexpected
        self.events.append("load")

    def sleep(self, level: int) -> None:
        assert self.options["enable_sleep_mode"]
        assert level == 2
        self.asleep = {"weights", "kv_cache"}
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(float("nan"))
        self.events.append("sleep")

    def wake_up(self, tags: list[str]) -> None:
        self.asleep -= set(tags)
        self.events.append(f"wake {tags[0]}")

    def reset_prefix_cache(self) -> None:
        self.events.append("reset")

    def generate(self, requests: Any, sampling_params: Any, use_tqdm: bool) -> list[Any]:
        assert not self.asleep
        assert not use_tqdm
        rules = sampling_params.options
        answers = []
        for request in requests:
            prompt, outs = request["prompt_token_ids"], []
            for _ in range(rules["n"]):
                ids, values, _, reason, experts = self.sampler.sample(
                    prompt, rules, rules["max_tokens"], 0
                )
                logprobs = None
                if rules["logprobs"] is not None:
                    pairs = zip(ids, values, strict=True)
                    logprobs = [{i: SimpleNamespace(logprob=x, rank=1)} for i, x in pairs]
                outs.append(
                    SimpleNamespace(
                        token_ids=tuple(ids),
                        logprobs=logprobs,
                        finish_reason=reason,
                        routed_experts=experts,
                    )
                )
            answers.append(SimpleNamespace(prompt_token_ids=prompt, outputs=outs))
        self.events.append("generate")
        return answers if self.spoil is None else self.spoil(answers)


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("vllm")
    module.LLM, module.SamplingParams = LLM, SamplingParams  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    for name in (*NAMES, "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.setenv(name, "0")  # so that what is set is taken back
        monkeypatch.delenv(name)


def trainer(path: Path, peft: Any = None, make: Any = tiny, **options: Any) -> GRPOTrainer:
    torch.manual_seed(0)
    model, tokenizer = make(torch.float32)
    model.save_pretrained(path / "model")
    args = config(path, **COLOCATED, **options)
    name = str(path / "model")
    return GRPOTrainer(name, letters, args, PROMPTS, PROMPTS, tokenizer, peft_config=peft)


@pytest.mark.parametrize("sleeps", [False, True])
@pytest.mark.parametrize("peft", [None, LoraConfig(r=4, target_modules="all-linear")])
def test_ratio_is_one_on_fresh_samples(tmp_path: Path, peft: Any, sleeps: bool) -> None:
    run = trainer(
        tmp_path,
        peft,
        sampling_correction="monitor",
        temperature=0.8,
        learning_rate=5e-2,
        max_steps=3,
        vllm_enable_sleep_mode=sleeps,
    )
    run.train()
    assert len(logs(run, "sampling/logp_difference/max")) == 3
    assert max(logs(run, "sampling/logp_difference/max")) < 5e-5
    events = LLM.last.events
    if sleeps:
        cycle = ["wake weights", "load", "wake kv_cache", "generate", "sleep"]
        assert events == ["sleep", *cycle * 3]
    else:
        assert events == ["load", "reset", "generate"] * 3


def test_greedy_completions_are_those_of_generate(tmp_path: Path) -> None:
    run = trainer(tmp_path, vllm_enable_sleep_mode=True)
    prompts = ["ab", "a longer prompt", "xyz"]
    got = [run.sampler(run.model, prompts, 2, greedy=True) for _ in range(2)]  # woken twice
    torch.manual_seed(0)
    model, tokenizer = tiny(torch.float32)
    local = GRPOTrainer(model, letters, config(tmp_path), PROMPTS, None, tokenizer)
    want = local.sampler(local.model, prompts, copies=2, greedy=True)
    assert got[0].completions() == got[1].completions() == want.completions()


def test_experts_of_vllm(tmp_path: Path) -> None:
    run = trainer(
        tmp_path, make=mixture, router_replay="R3", sampling_correction="monitor", num_iterations=2
    )
    run.train()
    assert logs(run, "sampling/logp_difference/max")[0] < 2e-5
    sample = run.sampler(run.model, ["ab", "longer"])
    assert sample.routed_experts.shape[1] == sample.prompt_ids.shape[1] + 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: setattr(a, "prompt_token_ids", [9]), "of a prompt of 1 tokens, where 2 of one"),
        (lambda a: a.outputs.pop(), "vLLM made 1 completions"),
        (lambda a: setattr(a.outputs[0], "finish_reason", "abort"), "finished by 'abort'"),
        (lambda a: setattr(a.outputs[0], "logprobs", None), "not one log-probability"),
    ],
)
def test_answers_that_cannot_be_used(tmp_path: Path, change: Any, message: str) -> None:
    def spoil(answers: Any) -> Any:
        change(answers[0])
        return answers

    run = trainer(tmp_path, sampling_correction="monitor")
    LLM.last.spoil = spoil
    with pytest.raises(RolloutError, match=message):
        run.sampler(run.model, ["ab"], copies=2)


def test_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = tiny(torch.float32)
    with pytest.raises(ValueError, match="loads the model by its name or path once more"):
        GRPOTrainer(model, letters, config(tmp_path, **COLOCATED), PROMPTS, None, tokenizer)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match="use_vllm needs vllm, which is not installed"):
        trainer(tmp_path)
