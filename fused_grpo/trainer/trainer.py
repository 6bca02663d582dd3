"""`GRPOTrainer`: group-relative policy optimisation on transformers' Trainer.

One optimizer step: the dataloader names the prompts, a `Collector` samples and scores completions,
`training_step` takes the next micro-batch of them, and `compute_loss` runs `grpo_loss` inside the
model's forward. Everything else (optimizer, schedule, checkpoints, logging) is the Trainer's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object, set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, Trainer

from fused_grpo.advantages import weighted_sum
from fused_grpo.entropy import AdaptiveEntropy
from fused_grpo.integrations.models import add_head_forward, verify_head
from fused_grpo.loss import GRPOLossOutput
from fused_grpo.trainer import setup
from fused_grpo.trainer.batches import MicroBatch, loss_of
from fused_grpo.trainer.collect import Collector, Generation
from fused_grpo.trainer.config import GRPOConfig
from fused_grpo.trainer.metrics import (
    MetricLog,
    completion_metrics,
    peak_memory,
    reward_metrics,
)
from fused_grpo.trainer.monitor import Monitor
from fused_grpo.trainer.policy import Policy
from fused_grpo.trainer.rewards import RewardFunc, score
from fused_grpo.trainer.rollout import Sampler
from fused_grpo.trainer.sampler import GroupSampler

ENTROPY_FILE = "adaptive_entropy.json"  # in a checkpoint


class GRPOTrainer(Trainer):
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
            number or None per completion; columns are those of the dataset, as lists. Completions
            are texts, or [{"role": "assistant", "content": text}] for prompts that are
            conversations.
        args: a `GRPOConfig`.
        train_dataset: rows with a "prompt", a text or a list of messages: a list of dicts, a
            `datasets.Dataset` or anything else with a length and rows by number.
        eval_dataset: the same, for `evaluate`.
        processing_class: the tokenizer; default: the one that belongs to the model's name.
        callbacks, optimizers: as in `transformers.Trainer`.
        peft_config: wraps the model in this adapter.

    Raises:
        TypeError, ValueError: naming the argument, what was given and what fits.
        RewardError: from `train` and `evaluate`, when a reward function fails.
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
            processing_class = AutoTokenizer.from_pretrained(setup.model_name(model))
        add_head_forward(model)
        verify_head(model)
        if args.disable_dropout:
            setup.disable_dropout(model)
        self.sampler = Sampler(model, processing_class, args)
        super().__init__(
            model=model,
            args=args,
            data_collator=list,  # type: ignore[arg-type]
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        setup.check_distribution(self)
        # the loss comes with its divisors in its token weights: the Trainer must not divide again
        self.model_accepts_loss_kwargs = self.loss_is_scaled_for_ga = True
        self.policy = Policy(self.model, copy_reference=args.beta > 0)
        self.entropy_control = args.adaptive_entropy()
        self._entropy = torch.zeros(2, dtype=torch.float64)  # sum over counted tokens, their number
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

    def get_train_dataloader(self) -> DataLoader:
        """Each item holds the rows of one generation of this process; see `GroupSampler`."""
        if self.train_dataset is None:
            raise ValueError("training needs train_dataset")
        args = self.args
        seed = args.seed if args.data_seed is None else args.data_seed
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
        return DataLoader(self.train_dataset, batch_sampler=batches, collate_fn=list)

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
        begins = self._micro_step % (args.generation_steps * args.num_iterations) == 0
        if begins or self._generation is None:  # a run resumed inside one samples it again
            self._generation = self.collector(inputs)
            self.state.num_input_tokens_seen += self._generation.tokens
        batch: Any = self._generation.batches[self._micro_step % args.generation_steps]
        loss = super().training_step(model, batch, num_items_in_batch)
        self._micro_step += 1
        if self._micro_step % args.gradient_accumulation_steps == 0:
            self._adapt_entropy()
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
        control = self.entropy_control
        coef = None if control is None else control.current
        head_fn = loss_of(batch, self.args, coef, self.state.global_step)
        out: GRPOLossOutput = model(**batch.model_inputs(self.model), head_fn=head_fn)
        if batch.old_logps is None and self.args.num_iterations > 1:
            # the policy that sampled is that of this first pass: its log-probs are the old ones
            batch.old_logps = out.per_token_logps
        metrics = dict(out.metrics)
        tokens = metrics.pop("num_tokens")
        if control is not None:
            metrics["entropy_coef"] = torch.tensor(control.current)
            self._entropy += torch.stack([metrics["entropy"] * tokens, tokens]).double().cpu()
        self._metrics.add(metrics, weight=tokens)
        return (out.loss, out) if return_outputs else out.loss

    def _adapt_entropy(self) -> None:
        """Gives the controller the mean entropy of the step, over all processes."""
        if self.entropy_control is None:
            return
        total, tokens = self.accelerator.reduce(self._entropy.to(self.args.device)).tolist()
        self.entropy_control.update(total / max(tokens, 1.0))
        self._entropy.zero_()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.entropy_control is not None and self.args.should_save:
            path = Path(output_dir) / ENTROPY_FILE
            path.write_text(json.dumps(self.entropy_control.state()))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None or self.entropy_control is None:
            return
        path = Path(checkpoint) / ENTROPY_FILE
        if path.exists():
            self.entropy_control = AdaptiveEntropy(**json.loads(path.read_text()))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the metrics since the last log, under TRL's names, to those of the Trainer."""
        if "loss" in logs:
            self._metrics.add(peak_memory())
            own = self._metrics.drain(gather_object if self.args.world_size > 1 else None)
            own |= self.monitor.throughput(self.state, own.get("step_time", 0.0))
            logs.update(own, num_tokens=float(self.state.num_input_tokens_seen))
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
        rewards, lengths, ended = self._greedy(dataset)
        total = weighted_sum(rewards, self.args.reward_weights)
        metrics = {
            **reward_metrics(rewards, total, self.collector.reward_names, None),
            **completion_metrics(lengths, ended),
            "runtime": torch.tensor(time.perf_counter() - start),
        }
        out = {f"{metric_key_prefix}_{name}": float(value) for name, value in metrics.items()}
        self.log(dict(out))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, out)
        return out

    def _greedy(self, dataset: Any) -> tuple[Tensor, Tensor, Tensor]:
        """([n, F] rewards, [n] lengths, [n] whether it ended) over the rows of all processes."""
        args = self.args
        rows = [dataset[i] for i in range(args.process_index, len(dataset), args.world_size)]
        rows.sort(key=lambda row: len(str(row["prompt"])))  # less padding
        size = args.eval_batch_size
        batches: Any = [rows[i : i + size] for i in range(0, len(rows), size)]
        self.callback_handler.eval_dataloader = batches  # the progress bar asks for its length
        results: list[tuple[list[float], int, bool]] = []
        for batch in batches:
            sample = self.sampler(self.model, [row["prompt"] for row in batch], greedy=True)
            rewards = score(self.reward_funcs, batch, sample, self.processing_class).tolist()
            lengths = sample.completion_mask.sum(1).tolist()
            results += zip(rewards, lengths, sample.ended.tolist(), strict=True)
            self.control = self.callback_handler.on_prediction_step(args, self.state, self.control)
        columns = zip(*gather_object(results), strict=True)
        all_rewards, all_lengths, all_ended = (torch.tensor(column) for column in columns)
        return all_rewards, all_lengths, all_ended
