"""The `fused-grpo` command."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import warnings
from typing import Any

from fused_grpo import cli_tasks, plan_table
from fused_grpo.cli_tasks import DTYPES, TASK_HELP

EPILOG = """\
Every other field of fused_grpo.trainer.GRPOConfig, and with it of transformers.TrainingArguments,
is an option as well, for example --scale_rewards group --gradient_accumulation_steps 2; `fused-grpo
train --help-all` lists them."""

# option, the field of GRPOConfig it sets, type, help
FIELDS: list[tuple[str, str, type, str]] = [
    ("--steps", "max_steps", int, "optimizer steps"),
    ("--seed", "seed", int, "of sampling, of new adapters and of the order of prompts"),
    ("--lr", "learning_rate", float, "learning rate"),
    ("--num-generations", "num_generations", int, "completions per prompt"),
    ("--batch-size", "per_device_train_batch_size", int, "completions per micro-batch"),
    ("--output-dir", "output_dir", str, "where everything is written (runs/MODEL-TASK)"),
    ("--loss-type", "loss_type", str, "an objective of docs/objectives.md, or module:function"),
    ("--beta", "beta", float, "coefficient of the KL to the reference"),
    ("--temperature", "temperature", float, "of sampling"),
    ("--backward", "backward", str, "gradients: exact, or routed (docs/routed-backward.md)"),
]

# found by trying: the smallest setting whose held-out reward rises reliably, see the README
DEFAULTS: dict[str, Any] = {
    "max_steps": 12,
    "learning_rate": 5e-4,
    "beta": 1e-3,  # next to nothing, but the KL is logged
    "num_generations": 8,
    "per_device_train_batch_size": 64,
    "per_device_eval_batch_size": 128,
    "scale_rewards": "none",
    "lr_scheduler_type": "constant",
    "save_strategy": "no",
    "report_to": "none",
}
TINY_DEFAULTS: dict[str, Any] = {
    **DEFAULTS,
    "learning_rate": 1e-2,
    "per_device_train_batch_size": 32,
}


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command line; unknown options of `train` are those of `GRPOConfig`."""
    parser = argparse.ArgumentParser(prog="fused-grpo", description="GRPO with a fused loss.")
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser(
        "train",
        help="train a language model on a verifiable task",
        description="Train a language model on a verifiable task with the fused GRPO loss.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # an unknown option belongs to GRPOConfig
    )
    train.add_argument(
        "--model", default="smollm2", help="smollm2 (default), tiny, or a name or path"
    )
    cli_tasks.add_task_arguments(train, f"{TASK_HELP}; default: addition (tiny: digits)")
    train.add_argument("--dtype", choices=DTYPES, default="auto", help="of the weights")
    adapter = train.add_mutually_exclusive_group()
    adapter.add_argument("--lora-r", type=int, help="rank of the LoRA adapter (16)")
    adapter.add_argument(
        "--full", action="store_true", help="train all weights, without an adapter"
    )
    for option, field, kind, text in FIELDS:
        default = f" ({DEFAULTS[field]})" if field in DEFAULTS else ""
        train.add_argument(
            option, dest=field, type=kind, default=argparse.SUPPRESS, help=text + default
        )
    train.add_argument(
        "--resume",
        action="store_true",
        help="go on from the last good checkpoint of the output directory, or begin",
    )
    train.add_argument("--help-all", action="store_true", help="list the options of GRPOConfig")
    cli_tasks.add_eval_parser(commands)
    cli_tasks.add_ablate_parser(commands)
    _add_plot(commands)
    _add_completions(commands)
    doctor = commands.add_parser(
        "doctor",
        help="what this machine would use and why, and whether it computes right",
        description="Show versions, devices and the backend that is chosen, compile the kernels, "
        "and check a small loss against fp64. Exit status 1 if anything fails.",
    )
    doctor.add_argument(
        "--target", help="compile for this chip, as sm_90 or gfx942; default: the GPU here"
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    plan = commands.add_parser(
        "plan",
        help="where the memory goes, and the longest context that fits",
        description="Print what a training step holds: weights, optimizer, activations and the "
        "loss, for this loss, TRL's and eager code, and the longest context that fits.",
    )
    plan_table.add_arguments(plan)
    return parser


def _add_plot(commands: Any) -> None:
    plot = commands.add_parser(
        "plot",
        help="draw a run, or several in one picture",
        description="Draw metrics of runs over their optimizer steps. Needs matplotlib.",
    )
    plot.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder or a metrics.jsonl")
    plot.add_argument("--metrics", nargs="+", help="names in metrics.jsonl; default: what matters")
    plot.add_argument(
        "--out",
        help="the picture, .png, .pdf or .svg; default: metrics.png in the run's folder, "
        "of several runs comparison.png here",
    )
    plot.add_argument("--smooth", type=int, default=1, help="mean of the last so many logs (1)")


def _add_completions(commands: Any) -> None:
    completions = commands.add_parser(
        "completions",
        help="show completions that a run has logged",
        description="Show completions of a run that was trained with --log_completions True.",
    )
    completions.add_argument("run", metavar="RUN", help="a run's folder")
    completions.add_argument("--step", type=int, help="default: the last")
    chosen = completions.add_mutually_exclusive_group()
    chosen.add_argument("--best", type=int, metavar="K", help="the K with the highest rewards")
    chosen.add_argument("--worst", type=int, metavar="K", help="the K with the lowest rewards")


def make_config(options: argparse.Namespace, rest: list[str], extra: dict[str, Any]) -> Any:
    """A `GRPOConfig` of defaults, the task's options, and what was given on the command line."""
    from transformers import HfArgumentParser

    from fused_grpo.trainer.config import GRPOConfig

    config_class: Any = GRPOConfig
    parser = HfArgumentParser(config_class, prog="fused-grpo train")
    given = {field: vars(options)[field] for _, field, _, _ in FIELDS if field in vars(options)}
    defaults = TINY_DEFAULTS if options.model == "tiny" else DEFAULTS
    named = [word.replace("-", "_") for word in rest]
    if any(word.startswith("__advantage_estimator") for word in named):  # it has its own scale
        defaults = {k: v for k, v in defaults.items() if k != "scale_rewards"}
    if options.resume:
        given["resume_from_checkpoint"] = True
    parser.set_defaults(**{**defaults, **extra, **given})
    if options.help_all:
        parser.print_help()
        raise SystemExit(0)
    (config,) = parser.parse_args_into_dataclasses(rest)
    return config


def train(options: argparse.Namespace, rest: list[str]) -> int:
    """`fused-grpo train`; unknown options belong to its config."""
    summary = train_run(options, rest)
    if _speaks():
        print(summary)
    return 0


def _speaks() -> bool:
    """Whether this is the first, or the only, process."""
    return os.environ.get("RANK", "0") == "0"


def train_run(options: argparse.Namespace, rest: list[str], control: Any = None) -> Any:
    """The `Summary` of a training run; `control`: see `demo.run`."""
    import torch

    # of peft about transformers, and nothing that a user of the command could do
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)

    from fused_grpo.trainer import demo, models

    tiny = options.model == "tiny"
    full = options.full or (tiny and options.lora_r is None)
    rank = None if full else (16 if options.lora_r is None else options.lora_r)
    if rank is not None and rank < 1:
        raise ValueError(f"--lora-r {rank} must be at least 1; use --full to train all weights")
    task = cli_tasks.task_of(options)
    dtype = demo.default_dtype(full) if options.dtype == "auto" else getattr(torch, options.dtype)
    extra: dict[str, Any] = {"output_dir": f"runs/{cli_tasks.run_name(options)}"}
    make_config(options, rest, extra)  # wrong options are told before a model is loaded
    torch.manual_seed(getattr(options, "seed", 42))  # tiny is random
    model, tokenizer = models.load(options.model, dtype)
    args = make_config(options, rest, extra | demo.task_options(task, tokenizer))
    size = sum(p.numel() for p in model.parameters())
    trained = "all weights" if rank is None else f"LoRA r={rank}"
    if _speaks():
        print(
            f"{options.model} ({size:,} parameters, {dtype}), {trained}; task {task}; writing "
            f"{args.output_dir}",
            flush=True,
        )
    return demo.run(model, tokenizer, task, args, rank, control)


def doctor(options: argparse.Namespace, rest: list[str]) -> int:
    """`fused-grpo doctor`."""
    from fused_grpo.doctor import main

    if rest:
        raise ValueError(f"doctor does not know {' '.join(rest)}")
    return main(options.target, options.json)


def plan(options: argparse.Namespace, rest: list[str]) -> int:
    """`fused-grpo plan`."""
    if rest:
        raise ValueError(f"plan does not know {' '.join(rest)}")
    print(plan_table.main(options))
    return 0


def plot(options: argparse.Namespace, rest: list[str]) -> int:
    """`fused-grpo plot`."""
    from fused_grpo.trainer.plot import main

    if rest:
        raise ValueError(f"plot does not know {' '.join(rest)}")
    print(main(options.runs, options.metrics, options.out, options.smooth))
    return 0


def completions(options: argparse.Namespace, rest: list[str]) -> int:
    """`fused-grpo completions`."""
    from pathlib import Path

    from fused_grpo.trainer.completions import COMPLETIONS_FILE, find, table

    if rest:
        raise ValueError(f"completions does not know {' '.join(rest)}")
    path = Path(options.run) / COMPLETIONS_FILE
    print(table(find(path, options.step, options.best, options.worst)))
    return 0


COMMANDS = {
    "train": train,
    "eval": cli_tasks.evaluate,
    "ablate": cli_tasks.ablate,
    "plan": plan,
    "plot": plot,
    "completions": completions,
    "doctor": doctor,
}


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status. What a user can put right is one line on stderr."""
    parser = build_parser()
    options, rest = parser.parse_known_args(argv)
    try:
        if options.command != "train" and os.environ.get("WORLD_SIZE", "1") != "1":
            raise ValueError(f"{options.command} runs in one process, not in several of torchrun")
        return COMMANDS[options.command](options, rest)
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        from fused_grpo.trainer.models import MissingExtraError
        from fused_grpo.trainer.nonfinite import NonFiniteError
        from fused_grpo.trainer.rewards import RewardError
        from fused_grpo.trainer.sample import RolloutError

        own = (MissingExtraError, RewardError, RolloutError, NonFiniteError)
        if isinstance(error, (ValueError, TypeError, OSError, *own)):
            print(f"fused-grpo: {error}", file=sys.stderr)
            return 2
        raise
    except KeyboardInterrupt:
        again = " Checkpoints are whole; --resume goes on from the last." * (
            options.command == "train"
        )
        print(f"fused-grpo: interrupted.{again}", file=sys.stderr)
        return 130
    except SystemExit as stopped:
        from fused_grpo.trainer.guards import Interrupted

        if not isinstance(stopped, Interrupted):
            raise
        words = sys.argv[1:] if argv is None else argv
        again = shlex.join(["fused-grpo", *(word for word in words if word != "--resume")])
        print(f"fused-grpo: {stopped}\n{again} --resume", file=sys.stderr)
        return stopped.status


if __name__ == "__main__":
    sys.exit(main())
