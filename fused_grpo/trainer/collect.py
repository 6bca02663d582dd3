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
from fused_grpo.trainer.dynamic import (
    Choice,
    ExtraPrompts,
    Round,
    brought,
    dynamic_metrics,
    refill,
    varying,
)
from fused_grpo.trainer.metrics import MetricLog, completion_metrics, reward_metrics
from fused_grpo.trainer.policy import Policy
from fused_grpo.trainer.rewards import RewardFunc, reward_name, score, soft_overlong
from fused_grpo.trainer.rollout import Rollout, Sample, check_sample

# the estimators that count a completion as often as it has tokens
TOKEN_WEIGHTED = ("opo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
OVERLONG = "overlong"  # the name of the punishment of length among the rewards

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
    """Makes a `Generation` of rows of the dataset; all processes call it together.

    Attributes:
        dataset, number: of the run, and which of its generations comes next: where dynamic sampling
            finds other prompts.
    """

    def __init__(
        self,
        args: GRPOConfig,
        accelerator: Accelerator,
        policy: Policy,
        sampler: Rollout,
        reward_funcs: Sequence[RewardFunc],
        tokenizer: Any,
        metrics: MetricLog,
    ) -> None:
        self.args, self.accelerator, self.policy = args, accelerator, policy
        self.sampler, self.reward_funcs, self.tokenizer = sampler, reward_funcs, tokenizer
        self.metrics = metrics
        self.dataset: Any = None
        self.number = 0
        self.on_generation: OnGeneration | None = None

    @property
    def reward_names(self) -> list[str]:
        """As metrics and errors call the reward functions."""
        return [reward_name(func) for func in self.reward_funcs]

    def __call__(self, rows: list[dict[str, Any]]) -> Generation:
        """Sample and score; `rows` hold each prompt once for each of its completions."""
        args, group = self.args, self.args.num_generations
        first = self._round(rows)
        places = len(first.rewards) // group
        rounds, choice = [first], Choice(list(range(places)), [True] * places)
        if args.dynamic_sample:
            extra = ExtraPrompts(self.dataset, args)
            rounds += refill(first, extra, self.number, self._round, args)
            varies = varying(torch.cat([r.rewards for r in rounds]), args)
            choice = Choice.of(varies, places)
            self.metrics.add(dynamic_metrics(rounds, varies, choice))
            rows, sample = brought(rounds, choice.rows(group), args)
        else:
            sample = first.sample
        tokens = self._log(rounds)
        device = first.rewards.device
        trained = torch.tensor(choice.trained, device=device).repeat_interleave(group)
        advantages = self._share(self._advantages(rounds, choice, trained))
        if self.on_generation is not None:
            chosen = torch.cat([r.rewards for r in rounds])[choice.rows(group)]
            self.on_generation(rows, sample, self._share(chosen), advantages)
        trained = self._share(trained)
        counted = sample.completion_mask & trained[:, None]
        if args.mask_truncated_completions:
            counted = counted & sample.ended[:, None]
        size, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
        batches = split(sample, counted, advantages, size, args.padding_free)
        for start in range(0, len(batches), steps):
            rows_trained = trained[start * size : (start + steps) * size].sum()
            self._prepare(batches[start : start + steps], rows_trained)
        return Generation(batches, tokens)

    def _round(self, rows: list[dict[str, Any]]) -> Round:
        """Completions of some prompts and what the reward functions make of them."""
        args, gather = self.args, self.accelerator.gather
        prompts, copies = grouped([row["prompt"] for row in rows])
        sample = self.sampler(self.policy.model, prompts, copies)
        check_sample(sample, args, self.policy.model, len(rows))
        rewards = self._score(rows, sample)
        greedy = None
        if args.advantage_estimator == "remax":
            greedy = gather(self._greedy_rewards(rows, prompts, copies))
        lengths = gather(sample.completion_mask.sum(1))
        return Round(rows, sample, gather(rewards), lengths, gather(sample.ended), greedy)

    def _share(self, values: Tensor) -> Tensor:
        """This process's part of what all have."""
        return values.chunk(self.args.world_size)[self.args.process_index]

    def _prepare(self, step: list[MicroBatch], rows_trained: Tensor) -> None:
        """What the micro-batches of an optimizer step need beside their own rows."""
        args = self.args
        lengths = torch.cat([batch.completion_mask.sum(1) for batch in step])
        local = torch.stack([lengths.sum(), rows_trained, (lengths > 0).sum()])
        # gradients are averaged over the processes: each divides by its part of the sum
        gathered = self.accelerator.gather(local[None]).sum(0) / args.world_size
        for batch in step:
            batch.num_items, batch.num_rows, batch.num_nonempty = gathered
            if args.sampler_support and args.reuses_samples:
                batch.support_ids = self.policy.at_head(batch, support_of(batch, args))
            # the policy moves before this batch is used, or something compares with it
            if args.router_replay == "R2":
                self.policy.record_experts(batch)
            if args.generation_steps > args.gradient_accumulation_steps or args.needs_old:
                batch.old_logps = self.policy.at_head(batch, logps_of(batch, args))
            if args.needs_reference_states:
                batch.reference = self.policy.at_reference(batch, states_of(batch))
            elif args.beta > 0:
                batch.ref_logps = self.policy.at_reference(batch, logps_of(batch, args))

    def _advantages(self, rounds: list[Round], choice: Choice, trained: Tensor) -> Tensor:
        """[B] of all processes, 0 for what is not trained on and counts in no statistic either."""
        args = self.args
        advantages = torch.zeros(trained.shape, dtype=torch.float32, device=trained.device)
        if not trained.any():
            return advantages
        chosen = torch.tensor(choice.rows(args.num_generations), device=trained.device)[trained]
        options = args.advantage_options
        options["weights"] = self._weights(rounds[0].rewards)
        if args.advantage_estimator in TOKEN_WEIGHTED:
            options["lengths"] = torch.cat([r.lengths for r in rounds])[chosen]
        if args.advantage_estimator == "remax":
            greedy = torch.cat([r.greedy for r in rounds if r.greedy is not None])[chosen]
            options["greedy_rewards"] = greedy[:: args.num_generations]
        rewards = torch.cat([self._shaped(r.rewards, r.lengths) for r in rounds])[chosen]
        advantages[trained] = multi_reward_advantages(rewards, args.num_generations, **options)
        return advantages

    def _score(self, rows: list[dict[str, Any]], sample: Sample) -> Tensor:
        """[B, F] rewards of completions of this process."""
        failed: dict[str, int] = {}
        calls = self.args.reward_calls
        rewards = score(self.reward_funcs, rows, sample, self.tokenizer, failed=failed, **calls)
        for name, count in failed.items():
            total = self.accelerator.gather(torch.tensor([count], device=rewards.device)).sum()
            self.metrics.add({f"rewards/{name}/failed": total})
        return rewards

    def _shaped(self, rewards: Tensor, lengths: Tensor) -> Tensor:
        """[n, F] rewards, or [n, F + 1] with the punishment of length [n] as the last of them."""
        args = self.args
        if args.overlong_buffer_len is None:
            return rewards
        longest, factor = args.max_completion_length, args.overlong_penalty_factor
        term = soft_overlong(lengths, longest, args.overlong_buffer_len, factor).to(rewards)
        # a completion without a reward stays one
        term = term.masked_fill(rewards.isnan().all(1), torch.nan)
        return torch.cat([rewards, term[:, None]], 1)

    def _weights(self, rewards: Tensor) -> list[float]:
        """Of `_shaped` rewards."""
        given = self.args.reward_weights or [1.0] * rewards.shape[1]
        return [*given, 1.0] if self.args.overlong_buffer_len is not None else list(given)

    def _greedy_rewards(
        self, rows: list[dict[str, Any]], prompts: list[Any], copies: int
    ) -> Tensor:
        """[B] the weighted reward of one greedy completion of each row's prompt (ReMax)."""
        sample = self.sampler(self.policy.model, prompts, greedy=True)
        rewards = self._score(rows[::copies], sample)
        shaped = self._shaped(rewards, sample.completion_mask.sum(1))
        return weighted_sum(shaped, self._weights(rewards)).repeat_interleave(copies)

    def _log(self, rounds: list[Round]) -> int:
        """Of everything that was sampled; the number of tokens read and sampled by all processes.

        With `dynamic_sample` that is what the policy does, where the rows that are trained on are
        picked by their rewards.
        """
        args, names = self.args, self.reward_names
        rewards = torch.cat([self._shaped(r.rewards, r.lengths) for r in rounds])
        if args.overlong_buffer_len is not None:
            names = [*names, OVERLONG]
        total = weighted_sum(rewards, self._weights(rounds[0].rewards))
        self.metrics.add(reward_metrics(rewards, total, names, args.num_generations))
        lengths = torch.cat([r.lengths for r in rounds])
        self.metrics.add(completion_metrics(lengths, torch.cat([r.ended for r in rounds])))
        read = torch.stack([r.sample.prompt_mask.sum() for r in rounds]).sum()
        return int(lengths.sum() + self.accelerator.gather(read[None]).sum())
