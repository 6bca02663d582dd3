"""`GRPOTrainer`: group-relative policy optimisation on transformers' Trainer.

One optimizer step: the dataloader names the prompts, a `Collector` samples and scores completions,
`training_step` takes the next micro-batch of them, and `compute_loss` runs `grpo_loss` inside the
model's forward. Everything else (optimizer, schedule, checkpoints, logging) is the Trainer's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import gather_object, set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fused_grpo.advantages import weighted_sum
from fused_grpo.integrations.models import add_head_forward, verify_head
from fused_grpo.integrations.routing import check_routing, replaying
from fused_grpo.loss import GRPOLossOutput
from fused_grpo.trainer import identity, loading, setup
from fused_grpo.trainer.batches import MicroBatch, loss_of, states_of
from fused_grpo.trainer.collect import Collector, Generation
from fused_grpo.trainer.config import GRPOConfig
from fused_grpo.trainer.controls import Controls
from fused_grpo.trainer.durable import DurableTrainer
from fused_grpo.trainer.held_out import greedy_rewards
from fused_grpo.trainer.metrics import (
    MetricLog,
    completion_metrics,
    peak_memory,
    reward_metrics,
)
from fused_grpo.trainer.monitor import Monitor
from fused_grpo.trainer.packing import check_packing
from fused_grpo.trainer.policy import Policy, SyncReference
from fused_grpo.trainer.rewards import RewardFunc, reward_name
from fused_grpo.trainer.rollout import Rollout
from fused_grpo.trainer.rollouts import make_rollout
from fused_grpo.trainer.rows import Rows
from fused_grpo.trainer.sampler import GroupSampler
from fused_grpo.trainer.sharding import (
    check_distribution,
    has_weights,
    use_fsdp_on_cpu,
)


class GRPOTrainer(DurableTrainer):
    """Trains a causal language model on rewards of its own completions.

        GRPOTrainer(
            model="Qwen/Qwen3-0.6B",
            reward_funcs=lambda completions, **_: [-len(c) for c in completions],
            args=GRPOConfig(output_dir="run"),
            train_dataset=[{"prompt": "Hello"}, ...],
        ).train()

    Args:
        model: a transformers causal LM, one wrapped in PEFT, or the name or path of one.
        reward_funcs: one or several of
            `f(prompts=..., completions=..., completion_ids=..., **columns)`, each returning a
            number or None per completion, or coroutines that do; columns are those of the dataset,
            as lists. Completions are texts, or [{"role": "assistant", "content": text}] for prompts
            that are conversations.
        args: a `GRPOConfig`.
        train_dataset: rows with a "prompt", a text or a list of messages: a list of dicts, a
            `datasets.Dataset` or anything else with a length and rows by number.
        eval_dataset: the same, for `evaluate`.
        processing_class: the tokenizer; default: the one that belongs to the model's name.
        callbacks, optimizers: as in `transformers.Trainer`.
        peft_config: wraps the model in this adapter.
        rollout: makes completions, in the place of what `args` ask for.

    Raises:
        TypeError, ValueError: naming the argument, what was given and what fits.
        RewardError: from `train` and `evaluate`, when a reward function fails.
        RolloutError: from the same, when a server or an engine that samples fails.
    """

    args: GRPOConfig
    model: Any
    train_dataset: Any
    eval_dataset: Any
    processing_class: Any

    def __init__(
        self,
        model: str | nn.Module,
        reward_funcs: RewardFunc | Sequence[RewardFunc],
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any = None,
        rollout: Rollout | None = None,
    ) -> None:
        args = GRPOConfig("grpo_output") if args is None else args
        if not isinstance(args, GRPOConfig):
            raise TypeError(f"args must be a GRPOConfig, not {type(args).__name__}")
        self.reward_funcs = setup.check_reward_funcs(reward_funcs, args.reward_weights)
        setup.check_dataset("train_dataset", train_dataset)
        setup.check_dataset("eval_dataset", eval_dataset)
        set_seed(args.seed)  # a new adapter is random
        model = setup.load_model(model, args, peft_config)
        if processing_class is None:
            options: Any = args.model_init_kwargs or {}
            trusted = bool(options.get("trust_remote_code"))
            name = setup.model_name(model)
            processing_class = loading.load_tokenizer(name, trust_remote_code=trusted)
        add_head_forward(model)
        if has_weights():
            verify_head(model)
        if args.disable_dropout:
            setup.disable_dropout(model)
        if args.router_replay is not None and has_weights():
            check_routing(model)
        self.sampler = rollout or make_rollout(model, processing_class, args)
        super().__init__(
            model=model,
            args=args,
            data_collator=list,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        check_distribution(self)
        if args.padding_free and has_weights():
            check_packing(self.model)
        # the loss comes with its divisors in its token weights: the Trainer must not divide again
        self.model_accepts_loss_kwargs = self.loss_is_scaled_for_ga = True
        self.policy = Policy(self.model, args.beta > 0, synced=args.sync_ref_model)
        if args.sync_ref_model:
            self.add_callback(SyncReference(self.policy))
        self.controls = Controls(args, self.accelerator)
        self._metrics = MetricLog()
        self.collector = Collector(
            args,
            self.accelerator,
            self.policy,
            self.sampler,
            self.reward_funcs,
            self.processing_class,
            self._metrics,
        )
        fixed = setup.is_peft(self.model) or self.policy.reference is not None
        self._model_identity = identity.model_identity(self.model, needs_base=fixed)
        self.monitor = Monitor(self)
        self._restart()
        if args.world_size > 1:
            set_seed(args.seed, device_specific=True)  # or all processes would sample the same

    def _restart(self) -> None:
        self._generation: Generation | None = None
        self._micro_step: int | None = None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """See `transformers.Trainer.train`."""
        self._restart()
        try:
            return super().train(*args, **kwargs)
        finally:
            self.monitor.close()

    # ---- the Trainer's hooks --------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Sets `accelerator`; the Trainer's constructor calls it."""
        super().create_accelerator_and_postprocess()
        use_fsdp_on_cpu(self)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)
        self.policy.shard_reference(self.accelerator)
        return prepared

    def get_train_dataloader(self) -> DataLoader:
        """Each item holds the rows of one generation of this process; see `GroupSampler`."""
        if self.train_dataset is None:
            raise ValueError("training needs train_dataset")
        args = self.args
        seed = args.seed if args.data_seed is None else args.data_seed
        rows = Rows("train_dataset", self.train_dataset)
        self.collector.dataset = rows
        batches = GroupSampler(
            len(self.train_dataset),
            num_generations=args.num_generations,
            batch_size=args.generation_batch_size,
            repeats=args.generation_steps * args.num_iterations,
            seed=seed if args.shuffle_dataset else None,
            epoch=lambda: int((self.state.epoch or 0) + 1e-6),
            rank=args.process_index,
            world_size=args.world_size,
        )
        # not prepared by accelerate: the sampler has split the groups over the processes already
        return DataLoader(rows, batch_sampler=batches, collate_fn=list)  # type: ignore[arg-type]

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Rows for each micro-batch; sampling waits for `training_step`, when a resumed run has
        restored its random state. A count that is not None keeps the Trainer from dividing."""
        return [next(epoch_iterator) for _ in range(num_batches)], 1

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """Sample where a generation begins, then train on its next micro-batch."""
        args, start = self.args, time.perf_counter()
        if self._micro_step is None:
            self._micro_step = self.state.global_step * args.gradient_accumulation_steps
        number, place = divmod(self._micro_step, args.generation_steps * args.num_iterations)
        if place == 0 or self._generation is None:
            self.collector.number = number
            self.sampler.sync(self.model)
            self._generation = self.collector(inputs)
            self.state.num_input_tokens_seen += self._generation.tokens
        batch: Any = self._generation.batches[self._micro_step % args.generation_steps]
        with replaying(self.model, batch.experts):  # activations are computed again inside
            loss = super().training_step(model, batch, num_items_in_batch)
        self._micro_step += 1
        if self._micro_step % args.gradient_accumulation_steps == 0:
            self.controls.step()
        elapsed = time.perf_counter() - start
        self._metrics.add({"step_time": elapsed * args.gradient_accumulation_steps})
        return loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The share of a `MicroBatch` in the loss of its optimizer step."""
        batch: MicroBatch = inputs
        coefficients = self.controls.coefficients
        head_fn = loss_of(batch, self.args, self.state.global_step, **coefficients)
        out: GRPOLossOutput = model(**batch.model_inputs(self.model), head_fn=head_fn)
        if batch.old_logps is None and self.args.num_iterations > 1:
            # the policy that sampled is that of this first pass: its log-probs are the old ones
            # (one that is not finite would spoil the passes that follow as well)
            finite = bool(out.per_token_logps.isfinite().all())
            batch.old_logps = out.per_token_logps if finite else None
        self.watch.add(batch, out.per_token_logps)
        metrics: dict[str, Any] = dict(out.metrics)
        tokens = metrics.pop("num_tokens")
        self.controls.observe(metrics, tokens)
        metrics.update(coefficients)
        self._metrics.add(metrics, weight=tokens)
        return (out.loss, out) if return_outputs else out.loss

    # ---- what a checkpoint holds beside the Trainer's own ---------------------------------------

    def run_about(self) -> dict[str, Any]:
        """What makes this run the one it is; see `identity`."""
        rewards = [reward_name(func) for func in self.reward_funcs]
        return identity.describe(self._model_identity, self.train_dataset, self.args, rewards)

    def shared_state(self) -> dict[str, Any]:
        """What moves with the steps and is the same on all processes."""
        return {"controls": self.controls.state_dict(), "policy": self.policy.state_dict()}

    def load_shared_state(self, state: dict[str, Any]) -> None:
        """Takes what `shared_state` gave."""
        self.controls.load_state_dict(state["controls"])
        self.policy.load_state_dict(state["policy"])

    def process_state(self) -> dict[str, Any]:
        """The metrics since the last log and, inside a generation, the samples of it."""
        args, generation = self.args, self._generation
        inside = (self._micro_step or 0) % (args.generation_steps * args.num_iterations) != 0
        if generation is None or not inside:
            return {"metrics": self._metrics.pending(), "generation": None}
        # the reference's states are as large as the samples are small: they are computed again
        batches = [replace(batch, reference=None) for batch in generation.batches]
        return {
            "metrics": self._metrics.pending(),
            "generation": replace(generation, batches=batches),
        }

    def load_process_state(self, state: dict[str, Any], same_shape: bool) -> None:
        """Takes what `process_state` gave, and the generation if its rows are still the same."""
        self._metrics.restore(state["metrics"])
        self._generation = state["generation"] if same_shape else None
        if self._generation is not None and self.args.needs_reference_states:
            for batch in self._generation.batches:
                batch.reference = self.policy.at_reference(batch, states_of(batch))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the metrics since the last log, under TRL's names, to those of the Trainer."""
        if "loss" in logs:
            self._metrics.add(peak_memory())
            own = self._metrics.drain(gather_object if self.args.world_size > 1 else None)
            own |= self.monitor.throughput(self.state, own.get("step_time", 0.0))
            logs.update(own, num_tokens=float(self.state.num_input_tokens_seen))
            logs["skipped_steps"] = float(self.watch.skipped)
        super().log(logs, start_time)

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted: sampling has its share, which the Trainer's estimate does not know."""
        return 0

    # ---- evaluation -----------------------------------------------------------------------------

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Rewards of one greedy completion per prompt, which no seed changes; logged as well.

        Returns:
            `{prefix}_reward`, `{prefix}_rewards/<function>/mean`, lengths and the running time.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ValueError("evaluation needs eval_dataset")
        setup.check_dataset("eval_dataset", dataset)
        if isinstance(dataset, dict):
            parts = [self.evaluate(d, None, f"{metric_key_prefix}_{n}") for n, d in dataset.items()]
            return {name: value for part in parts for name, value in part.items()}
        start = time.perf_counter()
        rewards, lengths, ended = greedy_rewards(self, Rows("eval_dataset", dataset))
        self.eval_rewards = rewards  # of each prompt; see `greedy_rewards`
        total = weighted_sum(rewards, self.args.reward_weights)
        metrics = {
            **reward_metrics(rewards, total, self.collector.reward_names, None),
            **completion_metrics(lengths, ended),
            "runtime": torch.tensor(time.perf_counter() - start, dtype=torch.float32),
        }
        out = {f"{metric_key_prefix}_{name}": float(value) for name, value in metrics.items()}
        with self.owned():
            self.log(dict(out))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, out)
        return out
