"""Where completions come from: the share of `GRPOConfig`, with TRL's names where it has them."""

# ruff: noqa: RUF009 (arg is dataclasses.field, one call per field)

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from fused_grpo.trainer.loss_args import arg
from fused_grpo.trainer.secrecy import check_url

ROLLOUTS = ("generate", "continuous_batching", "vllm", "vllm_server", "sglang_server")
SERVERS = ("vllm_server", "sglang_server")
WEIGHT_SYNCS = ("disk", "adapter", "none")
REPLAYS = ("R2", "R3")


@dataclass
class RolloutArguments:
    """Options of sampling outside of `generate`; docs/trainer-rollouts.md explains them."""

    use_transformers_continuous_batching: bool = arg(
        False, "Sample with transformers' continuous batching."
    )
    transformers_continuous_batching_config: dict[str, Any] | str | None = arg(
        None, "Keywords of transformers' ContinuousBatchingConfig."
    )
    use_vllm: bool = arg(False, "Sample with vLLM.")
    vllm_mode: str = arg("colocate", "'colocate': in this process; 'server': `vllm serve`.")
    vllm_server_base_url: str | None = arg(None, "Of a vLLM server, as in http://host:8000.")
    vllm_server_host: str = arg("0.0.0.0", "Host of the vLLM server, where no URL is given.")
    vllm_server_port: int = arg(8000, "Its port.")
    vllm_server_timeout: float = arg(240.0, "Seconds to wait for the server to come up.")
    vllm_gpu_memory_utilization: float = arg(0.3, "Share of the GPU for a colocated vLLM.")
    vllm_max_model_length: int | None = arg(None, "Longest prompt and completion together.")
    vllm_tensor_parallel_size: int = arg(1, "Must be 1: one colocated vLLM for each process.")
    vllm_enable_sleep_mode: bool = arg(False, "Give vLLM's memory back while training.")
    sglang_server_base_url: str | None = arg(
        None, "Sample with the SGLang server at this URL, as in http://host:30000."
    )
    server_request_timeout: float = arg(600.0, "Seconds that one request may take.")
    server_retries: int = arg(4, "How often a request is sent again (lost, 5xx, 429).")
    server_concurrency: int = arg(64, "Requests of a process at the same time.")
    weight_sync: str = arg(
        "disk",
        "How a server gets the weights: 'disk', 'adapter' (LoRA alone), or 'none', which leaves it "
        "as it is and needs a correction.",
    )
    weight_sync_dir: str | None = arg(
        None, "A folder that trainer and server share; default: a temporary one, on this machine."
    )
    router_replay: str | None = arg(
        None,
        "Mixture of experts: train through the experts chosen while sampling ('R3'), or in the "
        "trainer's own pass for old log-probabilities ('R2').",
    )

    @property
    def rollout(self) -> str:
        """Which of `ROLLOUTS` the options ask for."""
        if self.use_transformers_continuous_batching:
            return "continuous_batching"
        if self.use_vllm:
            return "vllm" if self.vllm_mode == "colocate" else "vllm_server"
        return "generate" if self.sglang_server_base_url is None else "sglang_server"

    @property
    def truncates_sampling(self) -> bool:
        """Whether some tokens cannot be sampled."""
        return bool(self.top_k or self.top_p < 1 or self.min_p)  # type: ignore[attr-defined]

    def check_rollout(self) -> None:
        """TypeError, ValueError for options that do not fit, or that nothing would read."""
        if self.router_replay is True:
            self.router_replay = "R3"
        for name, known in (
            ("vllm_mode", ("colocate", "server")),
            ("weight_sync", WEIGHT_SYNCS),
            ("router_replay", (None, *REPLAYS)),
        ):
            if getattr(self, name) not in known:
                choices = ", ".join(map(str, known))
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; choose of {choices}")
        asked = [
            n for n in ("use_transformers_continuous_batching", "use_vllm") if getattr(self, n)
        ]
        asked += ["sglang_server_base_url"] * (self.sglang_server_base_url is not None)
        if len(asked) > 1:
            raise ValueError(f"{' and '.join(asked)}: completions come from one place only")
        for field in fields(RolloutArguments):
            readers = READ_BY.get(field.name, ROLLOUTS)
            if getattr(self, field.name) != field.default and self.rollout not in readers:
                raise ValueError(
                    f"{field.name}={getattr(self, field.name)!r} has no effect on completions from "
                    f"{self.rollout}, only from {', '.join(readers)}"
                )
        for name in POSITIVE:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name} must be a number, not {type(value).__name__}")
            if value <= 0 and not (name == "server_retries" and value == 0):
                raise ValueError(f"{name}={value} must be > 0")
        for name in ("vllm_server_base_url", "sglang_server_base_url"):
            if getattr(self, name) is not None:
                check_url(name, getattr(self, name))
        self._check_sync()
        self._check_replay()

    def _check_sync(self) -> None:
        if self.vllm_tensor_parallel_size != 1:
            raise ValueError(
                f"vllm_tensor_parallel_size={self.vllm_tensor_parallel_size}: a colocated vLLM has "
                "one process; use vllm_mode='server' for models that need more"
            )
        if self.weight_sync != "none":
            return
        spec = self.loss_spec  # type: ignore[attr-defined]
        if not spec.corrects or (spec.sampling_correction == "monitor" and not spec.rejects):
            raise ValueError(
                "weight_sync='none' samples from other weights than those that are trained: set "
                "sampling_correction (token_truncate, sequence_mask, ...) or rejection, which "
                "correct for it"
            )

    def _check_replay(self) -> None:
        if self.router_replay is None:
            return
        if self.torch_compile:  # type: ignore[attr-defined]
            raise ValueError("router_replay works in eager mode only, not with torch_compile")
        if self.router_replay == "R3" and self.rollout not in ("generate", "vllm", "vllm_server"):
            raise ValueError(
                f"router_replay='R3' needs a sampler that tells its experts, and {self.rollout} "
                "does not: use 'R2', or generate or vLLM"
            )


POSITIVE = ("vllm_server_timeout", "server_request_timeout", "server_retries", "server_concurrency")
_COLOCATED = ("gpu_memory_utilization", "max_model_length", "tensor_parallel_size")

# options that only some of ROLLOUTS read
READ_BY: dict[str, tuple[str, ...]] = {
    "transformers_continuous_batching_config": ("continuous_batching",),
    "vllm_mode": ("vllm", "vllm_server"),
    **{f"vllm_server_{n}": ("vllm_server",) for n in ("base_url", "host", "port")},
    "vllm_server_timeout": SERVERS,
    **{f"vllm_{n}": ("vllm",) for n in (*_COLOCATED, "enable_sleep_mode")},
    **{f"server_{n}": SERVERS for n in ("request_timeout", "retries", "concurrency")},
    "weight_sync": SERVERS,
    "weight_sync_dir": SERVERS,
}
