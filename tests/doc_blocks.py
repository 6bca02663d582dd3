"""The code of README.md and docs/: its blocks, the names they use, how each kind is run."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from fused_grpo import cli

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = ("python", "bash", "yaml", "json", "text")


@dataclass(frozen=True)
class Block:
    page: str  # relative to the root
    line: int  # of its first line of code
    language: str
    code: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """Fenced blocks of a page, in order."""
    found, start = [], None
    lines = page.read_text().split("\n")
    name = str(page.relative_to(ROOT))
    for number, line in enumerate(lines, 1):
        if line.strip().startswith("```"):
            if start is None:
                start, language = number, line.strip().lstrip("`")
            else:
                code = "\n".join(lines[start : number - 1])
                found.append(Block(name, start + 1, language, code))
                start = None
    assert start is None, f"{name}: a fence is not closed"
    return found


def indented_code(page: Path) -> list[int]:
    """Lines at which an indented code block begins, which no test would run."""
    lines, fenced, found = page.read_text().split("\n"), False, []
    for number, line in enumerate(lines, 1):
        fenced ^= line.startswith("```")
        blank_before = number == 1 or not lines[number - 2].strip()
        if not fenced and blank_before and line.startswith("    ") and line.strip():
            before = [x for x in lines[: number - 1] if x.strip()]
            if not (before and re.match(r"\s*([-*]|\d+\.) |:::", before[-1])):
                found.append(number)
    return found


# --- what the pages take for granted -------------------------------------------------------------


def stand_ins() -> dict[str, Any]:
    """The names of docs/replacing.md, and a few more, on a tiny random model."""
    from fused_grpo.trainer.models import tiny

    torch.manual_seed(0)
    model, tokenizer = tiny(torch.float32)
    head: Any = model
    weight = head.lm_head.weight.detach().clone().requires_grad_()
    prompt, tokens, rows = 3, 6, 4
    input_ids = torch.randint(len(tokenizer), (rows, prompt + tokens))
    ids = input_ids[:, prompt:]
    with torch.no_grad():
        hidden = head.model(input_ids=input_ids).last_hidden_state[:, prompt - 1 : -1]
        logps = (hidden @ weight.T).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    lora = torch.nn.Linear(hidden.shape[-1], 2), torch.nn.Linear(2, len(weight))
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5])
    return {
        "__name__": "docs",
        "torch": torch,
        "model": model,
        "ref_model": tiny(torch.float32)[0],
        "tokenizer": tokenizer,
        "dataset": dataset("a", "to", "be", "or"),
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        "prompt_length": prompt,
        "completion_ids": ids,
        "mask": (torch.arange(tokens) < torch.tensor([[6], [2], [4], [5]])).float(),
        "advantages": advantages,
        "hidden": hidden.clone().requires_grad_(),
        "ref_hidden": hidden.clone(),
        "weight": weight,
        "old_per_token_logps": logps,
        "A": advantages[:, None],
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "T": 1.0,
        "step": 3,
        "scaling": 2.0,
        "lora_A": lora[0],
        "lora_B": lora[1],
        "dropout": torch.nn.Dropout(0.1),
        "world_size": 1,
        "tokens_of_all_ranks": 17,
    }


def dataset(*prompts: str) -> Any:
    """TRL wants one of `datasets`, where both are installed; elsewhere it is not used."""
    rows = [{"prompt": text} for text in prompts]
    if importlib.util.find_spec("datasets") is None:
        return rows
    from datasets import Dataset

    return Dataset.from_list(rows)


# --- commands ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    where: str
    words: list[str]  # without what it sets in its environment
    environment: dict[str, str]


def commands(block: Block) -> Iterator[Command]:
    for line in re.sub(r"\\\n\s*", "", block.code).split("\n"):
        words = shlex.split(line, comments=True)
        environment = {}
        while words and re.match(r"[A-Z_]+=", words[0]):
            name, value = words.pop(0).split("=", 1)
            environment[name] = value
        if words:
            yield Command(block.where, words, environment)


def check_fused_grpo(words: list[str]) -> None:
    """The real parser takes it, as far as this goes without loading a model; some are run."""
    if _quick(words):
        assert cli.main(words) == 0
        return
    options, rest = cli.build_parser().parse_known_args(words)
    if options.command in ("train", "ablate"):
        for name in ("help_all", "resume"):
            setattr(options, name, getattr(options, name, False))
        _make_config(options, rest)
    else:
        assert not rest, f"unknown: {rest}"


def _make_config(options: Any, rest: list[str]) -> None:
    try:
        cli.make_config(options, rest, {"output_dir": "parsed"})
    except ValueError as error:
        # a tracker that is not installed is the last thing that is checked
        if not re.search(r"report_to=.* needs \w+: pip install", str(error)):
            raise


def _quick(words: list[str]) -> bool:
    if words[:3] == ["train", "--model", "tiny"]:
        steps = int(words[words.index("--steps") + 1]) if "--steps" in words else 99
        return steps <= 6 and "--report_to" not in words
    if words[0] in ("plot", "completions"):
        runs = [word for word in words[1:] if "/" in word]
        return all(Path(run).exists() for run in runs if not run.startswith("ratio"))
    return words[0] == "plan"


def check_make(words: list[str]) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    variables = re.findall(r"^(\w+) \?=", (ROOT / "Makefile").read_text(), re.M)
    for word in words:
        assert word in targets or word.split("=")[0] in variables, word


def check_python(words: list[str]) -> None:
    if words[0] == "-m":
        assert importlib.util.find_spec(words[1]), words[1]
        return
    script = ROOT / words[0]
    ast.parse(script.read_text())
    if script.name == "build_hub_kernel.py":  # the block after it loads what it makes
        subprocess.run([sys.executable, script, *words[1:]], check=True, capture_output=True)


def check_pip(words: list[str]) -> None:
    """`pip install .[extras]`, or of lock files of this repository."""
    text = (ROOT / "pyproject.toml").read_text()
    extras = re.findall(r"^(\w+) = \[", text.split("optional-dependencies]")[1], re.M)
    assert words[0] == "install"
    rest = iter(words[1:])
    for word in rest:
        if word == "-r":
            assert (ROOT / next(rest)).exists()
        elif match := re.fullmatch(r"(?:\.|fused-grpo)\[([\w,]+)\]", word):
            assert set(match[1].split(",")) <= set(extras), word
        else:
            assert word in (".", "-e", "--no-deps"), word


def check_torchrun(words: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    assert get_args_parser().parse_args(words).training_script == "train.py"


def check_accelerate(words: list[str]) -> None:
    from accelerate.commands.launch import launch_command_parser

    assert words[0] == "launch"
    assert launch_command_parser().parse_args(words[1:]).training_script == "train.py"


def check_export(words: list[str]) -> None:
    name, value = words[0].split("=", 1)
    assert name == "VERL_USE_EXTERNAL_MODULES"
    assert importlib.util.find_spec(value)


def check_pytest(words: list[str]) -> None:
    assert all((ROOT / word).exists() for word in words if word.startswith("tests/"))


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "fused-grpo": check_fused_grpo,
    "make": check_make,
    "python": check_python,
    "pip": check_pip,
    "pytest": check_pytest,
    "torchrun": check_torchrun,
    "accelerate": check_accelerate,
    "export": check_export,
}


# --- data ----------------------------------------------------------------------------------------


def check_yaml(code: str) -> None:
    """A configuration of accelerate, by its own class."""
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.utils import FullyShardedDataParallelPlugin

    Path("config.yaml").write_text(code)
    config: Any = load_config_from_file("config.yaml")
    known = {f.name.removeprefix("fsdp_") for f in fields(FullyShardedDataParallelPlugin)}
    assert not {key for key in config.fsdp_config if key.removeprefix("fsdp_") not in known}


def check_json(code: str) -> None:
    for line in code.split("\n"):
        json.loads(line)
