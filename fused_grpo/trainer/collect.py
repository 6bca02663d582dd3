"""One generation: sampled, scored, compared within its groups, and cut into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from fused_grpo.advantages import multi_reward_advantages, weighted_sum
from fused_grpo.trainer.batches import MicroBatch, grouped, logps_of, split, states_of, support_of
from fused_grpo.trainer.config import GRPOConfig
from fused_grpo.trainer.metrics import MetricLog, completion_metrics, reward_metrics
from fused_grpo.trainer.policy import Policy
from fused_grpo.trainer.rewards import RewardFunc, reward_name, score
from fused_grpo.trainer.rollout import Sample, Sampler

# the estimators that count a completion as often as it has tokens
TOKEN_WEIGHTED = ("opo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")

# takes the rows of this process, their sample, [B, F] rewards and [B] advantages
OnGeneration = Callable[[list[dict[str, Any]], Sample, Tensor, Tensor], None]


@dataclass
class Generation:
    """What the optimizer steps until the next sampling learn from.

    Attributes:
        batches: the micro-batches of this process, in order.
        tokens: read and sampled over all processes.
    """

    batches: list[MicroBatch]
    tokens: int


class Collector:
    """Makes a `Generation` of rows of the dataset; all processes call it together."""

    def __init__(
        self,
        args: GRPOConfig,
        accelerator: Accelerator,
        policy: Policy,
        sampler: Sampler,
        reward_funcs: Sequence[RewardFunc],
        tokenizer: Any,
        metrics: MetricLog,
    ) -> None:
        self.args, self.accelerator, self.policy = args, accelerator, policy
        self.sampler, self.reward_funcs, self.tokenizer = sampler, reward_funcs, tokenizer
        self.metrics = metrics
        self.on_generation: OnGeneration | None = None

    @property
    def reward_names(self) -> list[str]:
        """As metrics and errors call the reward functions."""
        return [reward_name(func) for func in self.reward_funcs]

    def __call__(self, rows: list[dict[str, Any]]) -> Generation:
        """Sample and score; `rows` hold each prompt once for each of its completions."""
        args = self.args
        prompts, copies = grouped([row["prompt"] for row in rows])
        sample = self.sampler(self.policy.model, prompts, copies)
        rewards = score(self.reward_funcs, rows, sample, self.tokenizer)
        remax = args.advantage_estimator == "remax"
        greedy = self._greedy_rewards(rows, prompts, copies) if remax else None
        advantages = self._advantages(rewards, sample.completion_mask.sum(1), greedy)
        if self.on_generation is not None:
            self.on_generation(rows, sample, rewards, advantages)
        counted = sample.completion_mask
        if args.mask_truncated_completions:
            counted = counted & sample.ended[:, None]
        tokens = self._log_sample(sample)
        batches = split(sample, counted, advantages, args.per_device_train_batch_size)
        steps = args.gradient_accumulation_steps
        for start in range(0, len(batches), steps):
            self._prepare(batches[start : start + steps])
        return Generation(batches, tokens)

    def _prepare(self, step: list[MicroBatch]) -> None:
        """What the micro-batches of an optimizer step need beside their own rows."""
        args = self.args
        lengths = torch.cat([batch.completion_mask.sum(1) for batch in step])
        local = torch.stack([lengths.sum(), torch.ones_like(lengths).sum(), (lengths > 0).sum()])
        # gradients are averaged over the processes: each divides by its part of the sum
        gathered = self.accelerator.gather(local[None]).sum(0) / args.world_size
        for batch in step:
            batch.num_items, batch.num_rows, batch.num_nonempty = gathered
            if args.sampler_support and args.reuses_samples:
                batch.support_ids = self.policy.at_head(batch, support_of(batch, args))
            # the policy moves before this batch is used, or something compares with it
            if args.generation_steps > args.gradient_accumulation_steps or args.needs_old:
                batch.old_logps = self.policy.at_head(batch, logps_of(batch, args))
            if args.needs_reference_states:
                batch.reference = self.policy.at_reference(batch, states_of(batch))
            elif args.beta > 0:
                batch.ref_logps = self.policy.at_reference(batch, logps_of(batch, args))

    def _advantages(self, rewards: Tensor, lengths: Tensor, greedy: Tensor | None = None) -> Tensor:
        """[B] of this process; groups may span processes, so that the rewards of all count.

        `lengths` [B] in tokens, `greedy` [B] the reward of each prompt's greedy completion.
        """
        args = self.args
        rewards = self.accelerator.gather(rewards)
        total = weighted_sum(rewards, args.reward_weights)
        self.metrics.add(reward_metrics(rewards, total, self.reward_names, args.num_generations))
        options = args.advantage_options
        if args.advantage_estimator in TOKEN_WEIGHTED:
            options["lengths"] = self.accelerator.gather(lengths)
        if greedy is not None:
            options["greedy_rewards"] = self.accelerator.gather(greedy)[:: args.num_generations]
        advantages = multi_reward_advantages(rewards, args.num_generations, **options)
        return advantages.chunk(args.world_size)[args.process_index]

    def _greedy_rewards(
        self, rows: list[dict[str, Any]], prompts: list[Any], copies: int
    ) -> Tensor:
        """[B] the weighted reward of one greedy completion of each row's prompt (ReMax)."""
        sample = self.sampler(self.policy.model, prompts, greedy=True)
        rewards = score(self.reward_funcs, rows[::copies], sample, self.tokenizer)
        return weighted_sum(rewards, self.args.reward_weights).repeat_interleave(copies)

    def _log_sample(self, sample: Sample) -> int:
        """The number of tokens read and sampled over all processes."""
        lengths = self.accelerator.gather(sample.completion_mask.sum(1))
        ended = self.accelerator.gather(sample.ended)
        read = self.accelerator.gather(sample.prompt_mask.sum(1))
        self.metrics.add(completion_metrics(lengths, ended))
        return int(lengths.sum() + read.sum())
