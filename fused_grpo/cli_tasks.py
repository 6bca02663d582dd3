"""Tasks on the command line: their options, `fused-grpo eval` and `fused-grpo ablate`."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

TASK_NAMES = ("addition", "copying", "digits")  # of trainer.tasks, which is slow to import
DTYPES = ("auto", "float32", "bfloat16", "float16")
TASK_HELP = f"{', '.join(TASK_NAMES)}, reasoning-gym:ENVIRONMENT, or FILE.jsonl"

# option, type, help; each is a field of trainer.task_options.TaskOptions
TASK_OPTIONS: list[tuple[str, type, str]] = [
    ("--prompt", str, "text (to be continued) or chat (through the chat template)"),
    ("--shots", int, "reasoning-gym: worked examples before each question (text: 2, chat: 0)"),
    ("--system-prompt", str, "the system message, or the first paragraph of a text"),
    (
        "--answer-from",
        str,
        "what of a completion is verified: first-line, last-line, tag (<answer>), "
        "tag-or-last-line, whole",
    ),
    ("--train-rows", int, "reasoning-gym: prompts for training (2048)"),
    ("--held-out", int, "prompts for evaluation (reasoning-gym: 512)"),
    ("--task-seed", int, "reasoning-gym: of the questions (0)"),
    ("--verifier", str, "JSON lines: math, exact, regex:PATTERN or module:function"),
    ("--prompt-column", str, "JSON lines: text or messages (prompt)"),
    ("--answer-column", str, "JSON lines: what the verifier compares with (answer)"),
    ("--held-out-file", str, "JSON lines: a file of its own for evaluation, or"),
    (
        "--held-out-share",
        float,
        "JSON lines: this share of it, by a hash of the prompt (0.1)",
    ),
]


def add_task_arguments(parser: Any, task_help: str = TASK_HELP, required: bool = False) -> None:
    """`--task` and what goes with it."""
    parser.add_argument("--task", required=required, help=task_help)
    parser.add_argument(
        "--task-options",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="reasoning-gym: of the environment, values as JSON (min_terms=2 max_terms=3)",
    )
    for option, kind, text in TASK_OPTIONS:
        parser.add_argument(option, type=kind, help=text)


def task_words(options: argparse.Namespace) -> list[str]:
    """The words that give another command the same task."""
    words = ["--task", options.task] if options.task else []
    if options.task_options:
        words += ["--task-options", *options.task_options]
    for option, _, _ in TASK_OPTIONS:
        value = getattr(options, _field(option))
        words += [] if value is None else [f"{option}={value}"]
    return words


def task_of(options: argparse.Namespace) -> Any:
    """The `Task` that the command line describes.

    Raises:
        ValueError, OSError, MissingExtraError: as `trainer.tasks.make_task` does.
    """
    from fused_grpo.trainer.task_options import TaskOptions, parse_options
    from fused_grpo.trainer.tasks import make_task

    given = {_field(option): getattr(options, _field(option)) for option, _, _ in TASK_OPTIONS}
    task = options.task or ("digits" if options.model == "tiny" else "addition")
    return make_task(task, TaskOptions(options=parse_options(options.task_options), **given))


def run_name(options: argparse.Namespace) -> str:
    """The folder under runs/ that a model and a task have: MODEL-TASK."""
    model = options.model.rstrip("/").split("/")[-1]
    default = "digits" if options.model == "tiny" else "addition"
    task = Path(options.task or default).name.removesuffix(".jsonl")
    return re.sub(r"[^\w.-]+", "-", f"{model}-{task}")


def _field(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def add_eval_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "eval",
        help="pass@1 and pass@k of a model on a task, and of others on the same prompts",
        description="Sample completions of the held-out prompts of a task, verify them, and print "
        "pass@k with bootstrap intervals; see docs/trainer-evaluation.md.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", default="smollm2", help="smollm2, tiny, or a name or path")
    parser.add_argument("--adapter", help="a PEFT adapter on the model")
    add_task_arguments(parser)
    parser.add_argument("--samples", type=int, default=8, help="completions per prompt (8)")
    parser.add_argument("--k", type=int, nargs="+", help="of pass@k (1 2 4 8, up to --samples)")
    parser.add_argument("--greedy", action="store_true", help="one completion, no sampling")
    parser.add_argument("--temperature", type=float, default=1.0, help="of sampling (1)")
    parser.add_argument("--seed", type=int, default=0, help="of sampling and resampling (0)")
    parser.add_argument("--level", type=float, default=0.95, help="of the intervals (0.95)")
    parser.add_argument(
        "--compare", nargs="+", default=[], metavar="MODEL", help="others, in pairs with --model"
    )
    parser.add_argument(
        "--compare-adapter",
        nargs="+",
        default=[],
        metavar="PATH",
        help="adapters on --model, in pairs with it",
    )
    parser.add_argument(
        "--match-run",
        metavar="RUN",
        help="also what --model reaches by best-of-G and maj@G for the tokens of this training",
    )
    parser.add_argument("--batch-size", type=int, default=128, help="completions at once (128)")
    parser.add_argument("--max-completion-length", type=int, help="tokens; default: the task's")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of the weights")
    parser.add_argument("--output", default="eval.json", help="everything as JSON (eval.json)")


def add_ablate_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "ablate",
        help="what normalisations change, and what a reward without sense would have done",
        description="Train each variant with each seed in a folder of its own, one after another, "
        "skipping those that are finished; see docs/trainer-evaluation.md. Unknown options are "
        "those of `fused-grpo train`, for all runs.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", default="smollm2", help="smollm2, tiny, or a name or path")
    add_task_arguments(parser)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(0 1 2)")
    parser.add_argument("--steps", type=int, help="optimizer steps of each run")
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="default: all of them")
    parser.add_argument("--output-dir", help="where everything is written (runs/MODEL-TASK-ablate)")


def evaluate(options: argparse.Namespace, rest: list[str]) -> int:
    """`fused-grpo eval`."""
    from fused_grpo.trainer.evaluation import main

    if rest:
        raise ValueError(f"eval does not know {' '.join(rest)}")
    return main(options, task_of(options))


def ablate(options: argparse.Namespace, rest: list[str]) -> int:
    """`fused-grpo ablate`; unknown options belong to `train`."""
    from fused_grpo.trainer.ablation import main

    folder = options.output_dir or f"runs/{run_name(options)}-ablate"
    words = ["--model", options.model, *task_words(options), *rest]
    words += [] if options.steps is None else ["--steps", str(options.steps)]
    return main(words, options.seeds, options.variants, Path(folder))
