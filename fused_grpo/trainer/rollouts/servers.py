"""The servers of vLLM (OpenAI's completions) and of SGLang (its own `/generate`)."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from torch import nn

from fused_grpo.trainer.config import GRPOConfig
from fused_grpo.trainer.rollouts.http import RefusedError
from fused_grpo.trainer.rollouts.server import ServerRollout
from fused_grpo.trainer.sample import Completion

PROBED = 5  # tokens whose log-probabilities are compared
PREFIX = "token_id:"  # before an id, where a server reports tokens


class VLLMServer(ServerRollout):
    """`vllm serve`, or another server of OpenAI's `/v1/completions` that takes and gives token ids.

    Needs vLLM >= 0.10.2 for `return_token_ids`. Weights go over the development endpoint
    `/collective_rpc` (VLLM_SERVER_DEV_MODE=1), adapters over `/v1/load_lora_adapter`
    (VLLM_ALLOW_RUNTIME_LORA_UPDATING=True).
    """

    sync_paths = {"disk": "/collective_rpc", "adapter": "/v1/load_lora_adapter"}  # noqa: RUF012
    no_sync_hint = {  # noqa: RUF012
        "disk": "start it with VLLM_SERVER_DEV_MODE=1 in its environment",
        "adapter": "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True",
    }
    raw_logps_hint = "start it with --logprobs-mode processed_logprobs"

    def __init__(self, model: nn.Module, tokenizer: Any, args: GRPOConfig) -> None:
        super().__init__(model, tokenizer, args)
        try:
            self.served: str = self.http.get("/v1/models")["data"][0]["id"]
        except (KeyError, IndexError, TypeError) as error:
            raise self.unusable("no model in /v1/models") from error

    def url(self, args: GRPOConfig) -> str:
        given = args.vllm_server_base_url
        return given or f"http://{args.vllm_server_host}:{args.vllm_server_port}"

    def ask(self, prompt: list[int], copies: int, greedy: bool, logps: bool) -> list[Completion]:
        args = self.args
        body = {
            "n": copies,
            "max_tokens": args.max_completion_length,
            "stop_token_ids": self.eos_ids,
            **_rules(args, greedy, no_top_k=0),
            **self.extra,
        }
        answer = self._complete(prompt, body | ({"logprobs": 1} if logps else {}))
        self.check_prompt(prompt, (answer.get("usage") or {}).get("prompt_tokens"))
        choices = answer.get("choices")
        if not isinstance(choices, list):
            raise self.unusable(f"no choices: {str(answer)[:200]}")
        return [
            self._completion(prompt, choice, answer, logps)
            for choice in sorted(choices, key=lambda choice: choice.get("index", 0))
        ]

    def _completion(
        self, prompt: list[int], choice: dict[str, Any], answer: dict[str, Any], wanted: bool
    ) -> Completion:
        self.check_prompt(prompt, None, choice.get("prompt_token_ids"))
        reported = choice.get("logprobs") or {}
        ids, tokens = choice.get("token_ids"), reported.get("tokens")
        if ids is None and tokens and all(str(t).startswith(PREFIX) for t in tokens):
            ids = [int(token.removeprefix(PREFIX)) for token in tokens]
        replays = self.args.router_replay == "R3"
        experts = self._experts(prompt, ids, choice, answer) if replays else None
        return self.completion(
            ids, choice.get("finish_reason"), reported.get("token_logprobs"), wanted, experts
        )

    def _experts(
        self, prompt: list[int], ids: Any, choice: dict[str, Any], answer: dict[str, Any]
    ) -> Any:
        """[P + T - 1, layers, K] of what `--enable-return-routed-experts` adds to the answer."""
        found = choice.get("routed_experts")
        if isinstance(found, str):  # the bytes of a .npy file; vLLM 0.21 sent two lists
            whole = np.load(io.BytesIO(base64.b64decode(found)), allow_pickle=False)
        elif found is not None and answer.get("prompt_routed_experts") is not None:
            whole = np.asarray(answer["prompt_routed_experts"] + found)
        else:
            raise self.unusable(
                "no routed_experts, which router_replay='R3' needs: start it with "
                "--enable-return-routed-experts, or use 'R2'"
            )
        length = len(prompt) + len(ids or ()) - 1
        if whole.ndim != 3 or len(whole) < length:
            raise self.unusable(f"experts of shape {whole.shape} for {length} tokens")
        return whole[:length].astype(np.int16)

    def likeliest(self, prompt: list[int], temperature: float) -> dict[Any, float]:
        body = {"max_tokens": 1, "temperature": temperature, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
        answer = self._complete(prompt, body | {"logprobs": PROBED})
        try:
            found: dict[Any, float] = answer["choices"][0]["logprobs"]["top_logprobs"][0]
        except (KeyError, IndexError, TypeError) as error:
            raise self.unusable("no top_logprobs") from error
        return found

    def _complete(self, prompt: list[int], body: dict[str, Any]) -> dict[str, Any]:
        fixed = {
            "model": self.adapter or self.served,
            "prompt": prompt,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        answer = self.http.post("/v1/completions", fixed | body)
        if not isinstance(answer, dict):
            raise self.unusable(f"{type(answer).__name__} in place of an object")
        return answer

    def load_model(self, path: str) -> None:
        self.http.post(
            "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}}
        )
        # keys and values of prompts, computed with the weights before
        self.checked_post("/reset_prefix_cache?reset_running_requests=true")

    def load_adapter(self, name: str, path: str) -> None:
        # in place: a request whose answer was lost may have done its work
        body = {"lora_name": name, "lora_path": path, "load_inplace": True}
        self.http.post("/v1/load_lora_adapter", body)

    def unload_adapter(self, name: str) -> None:
        try:
            self.http.post("/v1/unload_lora_adapter", {"lora_name": name})
        except RefusedError as error:
            if error.status not in (400, 404):  # it has made room for the new one already
                raise


class SGLangServer(ServerRollout):
    """`python -m sglang.launch_server`, by `/generate` and `/update_weights_from_disk`."""

    truncates = False
    sync_paths = {  # noqa: RUF012
        "disk": "/update_weights_from_disk",
        "adapter": "/load_lora_adapter",
    }
    no_sync_hint = {  # noqa: RUF012
        "disk": "use a version of SGLang that has it",
        "adapter": "start it with --enable-lora and --max-lora-rank",
    }
    raw_logps_hint = "start it without SGLANG_RETURN_ORIGINAL_LOGPROB"

    def url(self, args: GRPOConfig) -> str:
        assert args.sglang_server_base_url is not None
        return args.sglang_server_base_url

    def ask(self, prompt: list[int], copies: int, greedy: bool, logps: bool) -> list[Completion]:
        rules = {
            "n": copies,
            "max_new_tokens": self.args.max_completion_length,
            "stop_token_ids": self.eos_ids,
            **_rules(self.args, greedy, no_top_k=-1),
            **self.extra,
        }
        return [
            self._completion(prompt, answer, logps)
            for answer in self._generate(prompt, rules, return_logprob=True)
        ]

    def _completion(self, prompt: list[int], answer: dict[str, Any], wanted: bool) -> Completion:
        meta = answer.get("meta_info") or {}
        self.check_prompt(prompt, meta.get("prompt_tokens"))
        reason = (meta.get("finish_reason") or {}).get("type")
        reported = meta.get("output_token_logprobs") or []
        ids = [entry[1] for entry in reported] or answer.get("output_ids")
        return self.completion(ids, reason, [entry[0] for entry in reported], wanted)

    def likeliest(self, prompt: list[int], temperature: float) -> dict[Any, float]:
        rules = {"max_new_tokens": 1, "temperature": temperature}
        (answer,) = self._generate(prompt, rules, return_logprob=True, top_logprobs_num=PROBED)
        try:
            return {entry[1]: entry[0] for entry in answer["meta_info"]["output_top_logprobs"][0]}
        except (KeyError, IndexError, TypeError) as error:
            raise self.unusable("no output_top_logprobs") from error

    def _generate(
        self, prompt: list[int], rules: dict[str, Any], **options: Any
    ) -> list[dict[str, Any]]:
        body = {"input_ids": prompt, "sampling_params": rules, **options}
        if self.adapter is not None:
            body["lora_path"] = self.adapter
        answer = self.http.post("/generate", body)
        answers = answer if isinstance(answer, list) else [answer]
        if not all(isinstance(one, dict) for one in answers):
            raise self.unusable(f"{str(answer)[:200]} in place of completions")
        return answers

    def load_model(self, path: str) -> None:
        self.checked_post("/update_weights_from_disk", {"model_path": path})

    def load_adapter(self, name: str, path: str) -> None:
        self.checked_post("/load_lora_adapter", {"lora_name": name, "lora_path": path})

    def unload_adapter(self, name: str) -> None:
        self.checked_post("/unload_lora_adapter", {"lora_name": name})


def _rules(args: GRPOConfig, greedy: bool, no_top_k: int) -> dict[str, Any]:
    """All of them, for a server fills in what the checkpoint's authors sample with."""
    if greedy:
        return {"temperature": 0.0, "top_p": 1.0, "top_k": no_top_k, "min_p": 0.0}
    return {
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k or no_top_k,
        "min_p": args.min_p or 0.0,
        "repetition_penalty": args.repetition_penalty,
    }
