"""vLLM in the process that trains, on the same GPU."""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from torch import nn

from fused_grpo.trainer import setup
from fused_grpo.trainer.config import GRPOConfig
from fused_grpo.trainer.rollout import TokenRollout
from fused_grpo.trainer.rollouts.server import known_logp
from fused_grpo.trainer.rollouts.weights import merged_weights
from fused_grpo.trainer.sample import Completion, RolloutError


class ColocatedVLLM(TokenRollout):
    """One engine of vLLM for each process, which gets the weights in place.

    With `vllm_enable_sleep_mode` its memory is given back between generations; its weights are then
    gone, and come again from the policy before the next.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, args: GRPOConfig) -> None:
        super().__init__(model, tokenizer, args)
        name = setup.model_name(model)
        if not name:
            raise ValueError(
                "use_vllm with vllm_mode='colocate' loads the model by its name or path once more: "
                "give GRPOTrainer a name, or a model from from_pretrained"
            )
        _place_engine(args)
        try:
            from vllm import LLM, SamplingParams
        except ImportError as error:
            raise ImportError(
                "use_vllm needs vllm, which is not installed here: `pip install vllm`, or use "
                "another way of sampling (docs/trainer-rollouts.md)"
            ) from error
        self.params: Any = SamplingParams
        self.asleep = False
        replay = {"enable_return_routed_experts": True} if args.router_replay == "R3" else {}
        self.engine: Any = LLM(
            model=name,
            dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
            gpu_memory_utilization=args.vllm_gpu_memory_utilization,
            max_model_len=args.vllm_max_model_length,
            enable_sleep_mode=args.vllm_enable_sleep_mode,
            distributed_executor_backend="external_launcher",
            seed=args.seed + args.process_index,
            logprobs_mode="processed_logprobs",
            **replay,
        )
        self._sleep()

    def sync(self, model: nn.Module) -> None:
        """Write the policy's weights into the engine. All processes call it together."""
        if self.asleep:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self.engine.wake_up(tags=["weights"])
        worker = self.engine.llm_engine.model_executor.driver_worker
        worker.model_runner.model.load_weights(merged_weights(model))
        if not self.asleep:
            self.engine.reset_prefix_cache()
        else:
            self.engine.wake_up(tags=["kv_cache"])
            self.asleep = False

    def complete(
        self, model: nn.Module, prompts: list[list[int]], copies: int, greedy: bool
    ) -> list[Completion]:
        if self.asleep:
            self.sync(model)
        wants_logps = self.args.reads_sampler and not greedy
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        params = self._rules(copies, greedy, wants_logps)
        answers = self.engine.generate(requests, sampling_params=params, use_tqdm=False)
        rows = []
        for prompt, answer in zip(prompts, answers, strict=True):
            if list(answer.prompt_token_ids) != prompt or len(answer.outputs) != copies:
                raise RolloutError(
                    f"vLLM made {len(answer.outputs)} completions of a prompt of "
                    f"{len(answer.prompt_token_ids)} tokens, where {copies} of one of "
                    f"{len(prompt)} tokens were asked for"
                )
            rows += [self._completion(prompt, answer, out, wants_logps) for out in answer.outputs]
        self._sleep()
        return rows

    def _rules(self, copies: int, greedy: bool, wants_logps: bool) -> Any:
        args = self.args
        sampling: dict[str, Any] = {"temperature": 0.0}
        if not greedy:
            sampling = {
                "temperature": args.temperature,
                "top_p": args.top_p,
                "top_k": args.top_k,
                "min_p": args.min_p or 0.0,
                "repetition_penalty": args.repetition_penalty,
            }
        return self.params(
            n=copies,
            max_tokens=args.max_completion_length,
            stop_token_ids=self.eos_ids,
            logprobs=0 if wants_logps else None,
            **sampling,
            **self.extra,
        )

    def _completion(
        self, prompt: list[int], answer: Any, out: Any, wants_logps: bool
    ) -> Completion:
        ids, logps, experts = list(out.token_ids), None, None
        if out.finish_reason not in ("stop", "length") or not ids:
            raise RolloutError(
                f"vLLM made {len(ids)} tokens that finished by {out.finish_reason!r}"
            )
        if wants_logps:
            pairs = zip(ids, out.logprobs or [{}] * len(ids), strict=True)
            logps = [known_logp(getattr(at.get(token), "logprob", None)) for token, at in pairs]
            if all(map(math.isnan, logps)):
                raise RolloutError("vLLM reports not one log-probability that is a number")
        if self.args.router_replay == "R3":
            experts = self._experts(answer, out, len(prompt) + len(ids) - 1)
        return Completion(ids, logps, experts)

    def _experts(self, answer: Any, out: Any, length: int) -> Any:
        parts = [getattr(answer, "prompt_routed_experts", None), out.routed_experts]
        found = [torch.as_tensor(part) for part in parts if part is not None]
        whole = torch.cat(found) if found else torch.empty(0)
        if len(whole) < length:
            raise RolloutError(f"vLLM reports experts of {len(whole)} tokens in place of {length}")
        return whole[:length]

    def _sleep(self) -> None:
        if self.args.vllm_enable_sleep_mode:
            self.engine.sleep(level=2)  # 1 would keep weights in main memory that are stale anyway
            self.asleep = True

    def close(self) -> None:
        """Drop the engine; nothing can be sampled afterwards."""
        self.engine = None


def _place_engine(args: GRPOConfig) -> None:
    """In this process, or its weights could not be written to, and alone with it on its GPU."""
    port = os.environ.get("MASTER_PORT", "29500")
    for name, value in (
        ("VLLM_ENABLE_V1_MULTIPROCESSING", 0),
        ("RANK", args.process_index),  # what vLLM's external_launcher reads
        ("LOCAL_RANK", args.local_process_index),
        ("WORLD_SIZE", args.world_size),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", port),
    ):
        os.environ.setdefault(name, str(value))
