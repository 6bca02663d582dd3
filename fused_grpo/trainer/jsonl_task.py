"""Files of JSON lines as tasks: a prompt, an answer and a verifier that compares."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from fused_grpo.trainer import judges
from fused_grpo.trainer.prompts import ANSWERS
from fused_grpo.trainer.setup import RESERVED_COLUMNS
from fused_grpo.trainer.task_options import TaskOptions
from fused_grpo.trainer.tasks import Task
from fused_grpo.trainer.verifiers import VerifierReward, make_verifier

HELD_OUT_SHARE = 0.1
ROLES = ("system", "user", "assistant", "tool", "developer")


def jsonl_task(name: str, options: TaskOptions) -> Task:
    """The task of a file; see `TaskOptions` for its columns, its verifier and what is held out.

    Rows with a prompt that is held out are never trained on, and of rows with the same prompt the
    first is kept.

    Raises:
        ValueError: a bad line, naming the file, the line and what is wrong with it; a bad option.
        MissingExtraError: the verifier needs a package that is not installed.
        OSError: a file cannot be read.
    """
    options.check("a JSON-lines file")
    if options.verifier is None:
        raise ValueError(f"{name}: say with --verifier how its answers are verified")
    label, verifier = make_verifier(options.verifier)
    train, repeated = _distinct(read_rows(Path(name), options))
    if options.held_out_file is not None:
        held_out, more = _distinct(read_rows(Path(options.held_out_file), options))
        repeated += more
    else:
        share = options.get("held_out_share", HELD_OUT_SHARE)
        held_out = [row for row in train if _place(row["prompt"], options) < share]
    asked = {_key(row["prompt"]) for row in held_out}
    known = len(train)
    train = [row for row in train if _key(row["prompt"]) not in asked]
    leaked = known - len(train) if options.held_out_file is not None else 0
    held_out = held_out[: options.held_out]
    if not train or not held_out:
        raise ValueError(
            f"{name} leaves {len(train)} prompts for training and {len(held_out)} held out: both "
            "need some; see --held-out-share and --held-out-file"
        )
    answer_from = options.get(
        "answer_from", "tag-or-last-line" if verifier is judges.exact else "whole"
    )
    text_only = all(isinstance(row["prompt"], str) for row in train + held_out)
    return Task(
        Path(name).stem,
        train,
        held_out,
        VerifierReward(label, verifier, ANSWERS[answer_from]),
        max_completion_length=256,
        stop="\n" if answer_from == "first-line" and text_only else None,
        answer_of=ANSWERS[answer_from],
        dropped=repeated + leaked,
    )


def read_rows(path: Path, options: TaskOptions) -> list[dict[str, Any]]:
    """Rows of a file with a "prompt" and all of its columns, those that a row lacks being None.

    Raises:
        ValueError: naming the file, the line and what is wrong.
        OSError: it cannot be read.
    """
    rows = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    rows.append(_row(line, options))
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: {error}") from error
    if not rows:
        raise ValueError(f"{path} has no rows")
    names = {name: None for row in rows for name in row}
    return [{**names, **row} for row in rows]


def _row(line: bytes, options: TaskOptions) -> dict[str, Any]:
    try:
        given = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error}") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(given, dict):
        raise ValueError(f"a row must be a JSON object, not {type(given).__name__}")
    prompt_column = options.get("prompt_column", "prompt")
    answer_column = options.get("answer_column", "answer")
    for column in (prompt_column, answer_column) if _compares(options) else (prompt_column,):
        if given.get(column) is None:
            raise ValueError(f"no {column!r}; its columns are {', '.join(map(repr, given))}")
    clash = [column for column in RESERVED_COLUMNS if column in given]
    if clash:
        raise ValueError(f"columns {clash} are what reward functions get from the trainer")
    prompt = _prompt(given[prompt_column], options)
    row = {k: v for k, v in given.items() if k not in (prompt_column, answer_column)}
    return {**row, "prompt": prompt, "answer": given.get(answer_column)}


def _compares(options: TaskOptions) -> bool:
    """Whether the verifier cannot do without an answer."""
    return options.answer_column is not None or options.verifier in ("exact", "math")


def _prompt(value: Any, options: TaskOptions) -> Any:
    """A prompt as the trainer takes it; a text becomes a conversation where that is asked for."""
    system = options.system_prompt
    if isinstance(value, str):
        if not value:
            raise ValueError("the prompt is empty")
        if options.get("prompt", "text" if system is None else "chat") == "text":
            return value if system is None else f"{system}\n\n{value}"
        value = [{"role": "user", "content": value}]
    elif options.prompt == "text":
        raise ValueError("the prompt is a conversation, not a text: leave out --prompt text")
    if not isinstance(value, list) or not value:
        raise ValueError(f"a prompt must be text or a list of messages, not {value!r}")
    for message in value:
        if (
            not isinstance(message, dict)
            or message.get("role") not in ROLES
            or not isinstance(message.get("content"), str)
        ):
            raise ValueError(
                f'a message must be {{"role": one of {", ".join(ROLES)}, "content": text}}, not '
                f"{message!r}"
            )
    if system is None:
        return value
    if value[0]["role"] == "system":
        raise ValueError("the prompt has a system message already: leave out --system-prompt")
    return [{"role": "system", "content": system}, *value]


def _key(prompt: Any) -> str:
    return json.dumps(prompt, sort_keys=True)


def _place(prompt: Any, options: TaskOptions) -> float:
    """A number in [0, 1) that depends on the question alone: nothing else in the file moves it.

    Nor does a system prompt, or whether the question is a text or a conversation.
    """
    if isinstance(prompt, str):
        question = [prompt.removeprefix(f"{options.system_prompt}\n\n")]
    else:
        question = [message["content"] for message in prompt if message["role"] != "system"]
    digest = hashlib.sha256(_key(question).encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def _distinct(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """(the first row of each prompt, how many others there were)."""
    first: dict[str, dict[str, Any]] = {}
    for row in rows:
        first.setdefault(_key(row["prompt"]), row)
    return list(first.values()), len(rows) - len(first)
