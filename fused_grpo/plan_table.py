"""`fused-grpo plan`: the memory of a training step as a table, ours beside TRL's and eager code."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from fused_grpo.model_shapes import shape_of
from fused_grpo.plan import ITEMSIZE, LOSSES, OPTIMIZERS, RESERVE, MemoryPlan, plan_memory

_TITLES = {
    "sampling": "at the peak of sampling",
    "loss": "at the peak of the loss",
    "backward": "at the peak of the backward",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", required=True, help="a name such as Qwen3-8B, or a config.json or its folder"
    )
    parser.add_argument("--context", type=int, required=True, help="tokens, prompt and completion")
    parser.add_argument("--batch", type=int, default=1, help="sequences per micro-batch (1)")
    parser.add_argument("--prompt", type=int, default=0, help="tokens of the prompt (0)")
    parser.add_argument("--gpu-memory", type=float, help="of the device, in GB (10^9 bytes)")
    parser.add_argument("--lora", type=int, help="rank of an adapter (all weights are trained)")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--dtype", choices=ITEMSIZE, default="bfloat16", help="(bfloat16)")
    parser.add_argument(
        "--reference", action="store_true", help="hold a reference model (beta > 0)"
    )
    parser.add_argument(
        "--no-checkpointing", action="store_true", help="keep all activations of the layers"
    )
    parser.add_argument("--shards", type=int, default=1, help="devices that FSDP spreads over (1)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(options: argparse.Namespace) -> str:
    """The report that `options` (see `add_arguments`) ask for."""
    arguments: dict[str, Any] = {
        "context": options.context,
        "batch": options.batch,
        "gpu_memory": options.gpu_memory,
        "dtype": options.dtype,
        "optimizer": options.optimizer,
        "lora_r": options.lora,
        "reference": options.reference,
        "prompt": options.prompt,
        "shards": options.shards,
        "device": options.device,
    }
    shape, kept = shape_of(options.model), options.no_checkpointing
    plans = {
        loss: plan_memory(shape, loss=loss, checkpointing=not kept, **arguments) for loss in LOSSES
    }
    others = {
        loss: plan_memory(shape, loss=loss, checkpointing=kept, **arguments) for loss in LOSSES
    }
    if options.json:
        found = {
            "model": dataclasses.asdict(shape),
            "arguments": arguments | {"checkpointing": not kept},
        }
        found["plans"] = {loss: _as_dict(plan) for loss, plan in plans.items()}
        return json.dumps(found, indent=1)
    size, limit = shape.parameters, options.gpu_memory
    trained = "all weights trained" if options.lora is None else f"LoRA r={options.lora}"
    head = (
        f"{options.model}: {size / 1e9:.2f} B parameters, V = {shape.vocab:,}, H = {shape.hidden}; "
        f"{trained}, {options.dtype}, {options.optimizer}\n{options.batch} x {options.context:,} "
        f"tokens a micro-batch, {'no' if kept else 'with'} activation checkpointing"
    )
    if options.shards > 1:
        head += f", weights over {options.shards} devices"
    lines = [head, "", *_table(plans)]
    if limit is not None:
        lines += ["", *_verdict(plans, others, limit, kept)]
    return "\n".join(lines)


def _as_dict(plan: MemoryPlan) -> dict[str, Any]:
    chunk = None if plan.chunk is None else plan.chunk._asdict()
    return dataclasses.asdict(plan) | {"chunk": chunk, "peak": plan.peak, "fits": plan.fits}


def _table(plans: dict[str, MemoryPlan]) -> list[str]:
    def row(name: str, values: list[int]) -> str:
        return f"{name:30s}" + "".join(f"{v / 1e9:>20.2f}" for v in values)

    lines = [f"{'GB (10^9 bytes)':30s}" + "".join(f"{loss:>20s}" for loss in plans)]
    for name in next(iter(plans.values())).parts:
        values = [plan.parts[name] for plan in plans.values()]
        if any(values):
            lines.append(row(name, values))
    lines.append("-" * len(lines[0]))
    for name, title in _TITLES.items():
        lines.append(row(title, [plan.peaks[name] for plan in plans.values()]))
    lines.append(row("needed", [plan.peak for plan in plans.values()]))
    return lines


def _verdict(
    plans: dict[str, MemoryPlan], others: dict[str, MemoryPlan], memory: float, kept: bool
) -> list[str]:
    limit = memory * (1 - RESERVE)
    lines = [f"of {memory:g} GB, {limit:.1f} may be used ({RESERVE:.0%} are left to the device)"]
    for loss, plan in plans.items():
        other, how = others[loss].longest, "with" if kept else "without"
        fits = "fits" if plan.fits else "DOES NOT FIT"
        longest = f"longest context {plan.longest:>10,}; {how} checkpointing {other:,}"
        lines.append(f"{loss:20s} {fits:13s} {longest}")
    ours = plans[LOSSES[0]]
    if ours.longest == 0:
        lines.append(
            "no context fits: train an adapter (--lora), spread the weights (--shards), or choose "
            "a smaller model"
        )
    if ours.chunk is not None:
        budget = "its default" if ours.chunk_bytes is None else f"{ours.chunk_bytes:,}"
        lines.append(f"chunk_bytes: {budget}: {ours.chunk.tokens:,} tokens at a time")
    return lines
