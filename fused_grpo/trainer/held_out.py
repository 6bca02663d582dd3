"""Rewards of greedy completions of a data set, over all processes: what an evaluation measures."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from fused_grpo.trainer.rewards import score
from fused_grpo.trainer.sharding import check_weights


def greedy_rewards(trainer: Any, dataset: Any) -> tuple[Tensor, Tensor, Tensor]:
    """([n, F] rewards, [n] lengths, [n] whether it ended) over the rows of all processes.

    Their order depends on the data set and the number of processes alone.
    """
    check_weights(trainer.model)
    args = trainer.args
    rows = [dataset[i] for i in range(args.process_index, len(dataset), args.world_size)]
    rows.sort(key=lambda row: len(str(row["prompt"])))  # less padding
    size = args.eval_batch_size
    # as many on every process: a sharded model's forward passes need all of them
    most = -(-len(dataset) // args.world_size)
    batches: Any = [rows[i : i + size] for i in range(0, most, size)]
    trainer.callback_handler.eval_dataloader = batches  # the progress bar asks for its length
    results: list[tuple[list[float], int, bool]] = []
    trainer.sampler.sync(trainer.model)
    for batch in batches:
        prompts = [row["prompt"] for row in batch or [dataset[0]]]
        sample = trainer.sampler(trainer.model, prompts, greedy=True)
        if not batch:
            continue
        tokenizer, calls = trainer.processing_class, args.reward_calls
        scores = score(trainer.reward_funcs, batch, sample, tokenizer, **calls).tolist()
        counts = sample.completion_mask.sum(1).tolist()
        results += zip(scores, counts, sample.ended.tolist(), strict=True)
        trainer.control = trainer.callback_handler.on_prediction_step(
            args, trainer.state, trainer.control
        )
    rewards, lengths, ended = zip(*gather_object(results), strict=True)
    return torch.tensor(rewards, dtype=torch.float32), torch.tensor(lengths), torch.tensor(ended)
