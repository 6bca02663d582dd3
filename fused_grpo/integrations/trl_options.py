"""What TRL 1.16's `GRPOConfig` means to `grpo_loss`: every option used, left to TRL, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_CLIP = ("epsilon_low", "epsilon_high", "delta")
_SAPO = ("sapo_temperature_pos", "sapo_temperature_neg")
_VESPO = ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")

# TRL's loss_type -> ours, and the options that it reads. Its reductions are token weights.
LOSS_TYPES: dict[str, tuple[str, tuple[str, ...]]] = {
    **dict.fromkeys(("grpo", "bnpo", "dr_grpo", "dapo", "luspo"), ("grpo", _CLIP)),
    "cispo": ("cispo", ("ratio_max",)),
    "sapo": ("sapo", _SAPO),
    "vespo": ("vespo", _VESPO),
}

# options of GRPOConfig that make up the loss, and go to grpo_loss
USED = frozenset(
    {"loss_type", "importance_sampling_level", "epsilon", "epsilon_high", "delta", *_SAPO, *_VESPO}
    | {"beta", "use_bias_correction_kl", "off_policy_mask_threshold", "top_entropy_quantile"}
    | {"entropy_coef", "use_adaptive_entropy", "max_completion_length", "steps_per_generation"}
    | {"temperature", "cast_lm_head_to_fp32", "vllm_importance_sampling_correction", "use_vllm"}
)
# options of sampling, rewards, logging, the model and its reference, which TRL goes on reading, and
# those of the loss that it computes beforehand: masks, importance weights, the entropy's controller
LEFT_TO_TRL = frozenset(
    {"model_init_kwargs", "trust_remote_code", "router_aux_loss_coef", "disable_dropout"}
    | {"num_generations", "num_generations_eval", "ds3_gather_for_generation", "shuffle_dataset"}
    | {"pad_to_multiple_of", "generation_batch_size", "top_p", "top_k", "min_p"}
    | {"generation_kwargs", "chat_template_kwargs", "repetition_penalty", "cache_implementation"}
    | {"vllm_mode", "vllm_model_impl", "vllm_enable_sleep_mode", "vllm_structured_outputs_regex"}
    | {"vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout"}
    | {"vllm_group_port", "vllm_gpu_memory_utilization", "vllm_max_model_length"}
    | {"vllm_tensor_parallel_size", "vllm_importance_sampling_mode"}
    | {"vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"}
    | {"vllm_importance_sampling_cap", "num_iterations", "reward_weights", "scale_rewards"}
    | {"multi_objective_aggregation", "mask_truncated_completions", "sync_ref_model"}
    | {"ref_model_mixup_alpha", "ref_model_sync_steps", "entropy_coef_min", "entropy_coef_max"}
    | {"entropy_coef_delta", "entropy_target", "max_tool_calling_iterations", "log_completions"}
    | {"log_multimodal", "num_completions_to_print", "log_unique_prompts"}
    | {"log_completions_hub_repo", "use_transformers_continuous_batching"}
    | {"transformers_continuous_batching_config", "use_transformers_paged"}
)

FUSED_OPTIONS = frozenset(
    {"backend", "chunk_bytes", "backward", "route_tau", "route_seed", "route_weight_grad"}
)


def _small_rate(t: Any) -> bool:
    return t.loss_type == "vespo" and min(t.args.vespo_lambda_pos, t.args.vespo_lambda_neg) < 1e-4


def _ratio_without_one(t: Any) -> bool:
    low, high = t.args.vllm_importance_sampling_clip_min, t.args.vllm_importance_sampling_clip_max
    excluded = (low is not None and low > 1) or (high is not None and high < 1)
    return bool(t.loss_type == "vespo" and t.args.use_vllm and excluded)


# what is refused: option -> (trainer -> whether, why)
REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "loss_type": (lambda t: t.loss_type not in LOSS_TYPES, f"it knows {', '.join(LOSS_TYPES)}"),
    "importance_sampling_level": (
        lambda t: t.loss_type == "vespo" and t.importance_sampling_level != "token",
        "loss_type='vespo' has ratios of whole sequences of its own",
    ),
    "epsilon_high": (
        lambda t: t.loss_type == "cispo" and t.epsilon_high < 1,
        "loss_type='cispo' bounds the ratio itself by it, and would clip every token below 1",
    ),
    "off_policy_mask_threshold": (
        lambda t: t.off_policy_mask_threshold is not None and t.off_policy_mask_threshold < 0,
        "it must be >= 0: a policy does not differ from itself",
    ),
    "top_entropy_quantile": (
        lambda t: t.top_entropy_quantile < 1 and t.accelerator.num_processes > 1,
        "the quantile over all processes is known after the pass only; use patch()",
    ),
    "vespo_lambda_neg": (_small_rate, "the rates of VESPO must be at least 1e-4"),
    "vllm_importance_sampling_clip_max": (
        _ratio_without_one,
        "loss_type='vespo' multiplies the weights of masked tokens, 1, in as well: the bounds must "
        "leave 1 as it is",
    ),
    "torch_compile": (lambda t: t.args.torch_compile, "the loss runs inside the model's forward"),
    "n_gpu": (
        lambda t: t.args.n_gpu > 1,
        "DataParallel is not supported; launch one process per GPU",
    ),
}


def check(trainer: Any) -> None:
    """ValueError for options of a trainer that `grpo_loss` cannot honour as TRL does."""
    for name, (refuses, why) in REFUSED.items():
        if refuses(trainer):
            value = getattr(trainer, name, getattr(trainer.args, name))
            raise ValueError(f"FusedGRPOTrainer refuses {name}={value!r}: {why}")


def check_fused_options(options: dict[str, Any]) -> dict[str, Any]:
    """ValueError for options that are not about how the loss is computed."""
    unknown = sorted(set(options) - FUSED_OPTIONS)
    if unknown:
        raise ValueError(
            f"fused_options has {', '.join(unknown)}; there are {', '.join(sorted(FUSED_OPTIONS))}"
        )
    return dict(options)


def loss_options(trainer: Any) -> dict[str, Any]:
    """The options of `LossSpec` that stay the same in every step."""
    t, args = trainer, trainer.args
    values = {
        "epsilon_low": t.epsilon_low,
        "epsilon_high": t.epsilon_high,
        "ratio_max": t.epsilon_high,
        "delta": args.delta,
        **{name: getattr(args, name) for name in (*_SAPO, *_VESPO)},
    }
    loss_type, reads = LOSS_TYPES[t.loss_type]
    options: dict[str, Any] = {"loss_type": loss_type, **{name: values[name] for name in reads}}
    if t.loss_type != "vespo":
        options["importance_sampling_level"] = t.importance_sampling_level
    if t.loss_type != "vespo" or t.beta != 0:
        options["log_ratio_clamp"] = None  # TRL has none
    if t.beta != 0:
        options |= {"beta": t.beta, "use_bias_correction_kl": args.use_bias_correction_kl}
    return options | {"top_entropy_quantile": t.top_entropy_quantile}


def of_batch(trainer: Any, inputs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(options, tensors [B, T], [B] or [B, 1]) of `grpo_loss` for a batch of TRL's."""
    options = loss_options(trainer)
    mask = inputs["completion_mask"]
    if "tool_mask" in inputs:
        mask = mask * inputs["tool_mask"]
    weights = token_weights(trainer, inputs, mask)
    tensors: dict[str, Any] = {
        "advantages": inputs["advantages"],
        "completion_mask": mask.bool(),
        "token_weights": weights,
        "old_per_token_logps": inputs.get("old_per_token_logps"),
        "importance_sampling_ratio": importance_weights(trainer, inputs, mask),
    }
    if trainer.beta != 0:
        tensors["ref_per_token_logps"] = inputs["ref_per_token_logps"]
    threshold = trainer.off_policy_mask_threshold
    sampler = inputs.get("sampling_per_token_logps")
    # without either the policy is compared with itself, and nothing is masked
    if threshold is not None and (
        sampler is not None or tensors["old_per_token_logps"] is not None
    ):
        options["off_policy_mask_threshold"] = threshold
        tensors["sampling_per_token_logps"] = sampler
    coef = entropy_coef(trainer)
    if coef != 0:
        options["entropy_coef"] = coef
        # TRL's bonus is a mean over the tokens it acts on, whatever the reduction of the loss
        tensors["entropy_scale"] = 1 / (
            weights * mask.sum().clamp(min=1.0) * _accumulation(trainer)
        )
    given = {name: x for name, x in tensors.items() if x is not None}
    return options, given


def _accumulation(trainer: Any) -> float:
    """Micro-batches of an optimizer step, by which TRL divides."""
    return float(trainer.current_gradient_accumulation_steps) if trainer.model.training else 1.0


def token_weights(trainer: Any, inputs: dict[str, Any], mask: Tensor) -> Tensor:
    """[B, T] w_t of TRL's reductions."""
    t, (rows, _) = trainer, mask.shape
    lengths = mask.sum(1, keepdim=True).clamp(min=1.0)
    steps = _accumulation(t)
    divisors: dict[str, Callable[[], Any]] = {
        **dict.fromkeys(("grpo", "sapo"), lambda: lengths * rows * steps),
        "bnpo": lambda: mask.sum().clamp(min=1.0) * steps,
        "dr_grpo": lambda: rows * t.max_completion_length * steps,
        "luspo": lambda: rows * steps,
        **dict.fromkeys(("cispo", "dapo", "vespo"), lambda: _generated_tokens(t, inputs, steps)),
    }
    ones = torch.ones(mask.shape, dtype=torch.float32, device=mask.device)
    return ones / divisors[t.loss_type]()


def _generated_tokens(trainer: Any, inputs: dict[str, Any], steps: float) -> Tensor:
    """Of the generation batch, scaled to one optimizer step."""
    normalizer: Tensor = (
        inputs["num_items_in_batch"].clamp(min=1.0) / trainer.accelerator.num_processes
    )
    if trainer.model.training:
        normalizer = normalizer * steps / trainer.args.steps_per_generation
    return normalizer


def importance_weights(trainer: Any, inputs: dict[str, Any], mask: Tensor) -> Tensor | None:
    """[B, T] or [B, 1]; None where TRL uses none."""
    ratio: Tensor | None = inputs.get("importance_sampling_ratio")
    if trainer.loss_type != "vespo":
        return ratio if trainer.use_vllm and trainer.vllm_importance_sampling_correction else None
    if ratio is None or ratio.shape == mask.shape:
        return ratio
    # one factor of a sequence's product: at its first token
    first = (mask.cumsum(1) == 1) & mask.bool()
    return torch.where(first, ratio, 1.0)


def entropy_coef(trainer: Any) -> float:
    """The coefficient of the entropy bonus in this micro-batch; adaptive ones are gated."""
    if not trainer._entropy_bonus_enabled:
        return 0.0
    if trainer.use_adaptive_entropy and trainer._last_world_entropy > trainer.args.entropy_target:
        return 0.0
    return float(trainer.entropy_coef)
