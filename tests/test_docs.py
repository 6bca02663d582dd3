"""README.md and docs/: their code runs, their links lead somewhere, and nothing is left out."""

from __future__ import annotations

import ast
import re
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import doc_blocks
import pytest
import torch
import torch.distributed as dist
from doc_blocks import COMMANDS, LANGUAGES, PAGES, ROOT, Block, blocks_of, commands, indented_code

import fused_grpo
from fused_grpo import trainer
from fused_grpo.integrations import liger, trl
from fused_grpo.objectives import LOSS_TYPES

sys.path.append(str(ROOT))  # benchmarks/ is run from the root, and not installed

# Commands that are read by nobody here: page, words they begin with, why not.
NOT_RUN = (
    (
        "docs/replacing.md",
        "python3 -m verl.trainer.main_ppo",
        "verl's, not installed with the tests",
    ),
    ("docs/integrations.md", "python3 -m verl.trainer.main_ppo", "the same"),
    ("docs/trainer-rollouts.md", "vllm serve", "vLLM's, needs a GPU"),
    ("docs/trainer-rollouts.md", "python -m sglang.launch_server", "SGLang's, needs a GPU"),
    ("docs/gpu.md", "python -m venv venv36", "another Triton, from an index"),
    ("docs/gpu.md", "echo", "the same"),
    ("docs/gpu.md", "venv36/bin/python", "the same"),
)

# What is made smaller, so that it takes seconds: page, text, what stands for it.
SMALLER = (("README.md", "max_steps=100,", 'max_steps=1, use_cpu=True, report_to="none",'),)

# Blocks need these packages; elsewhere they are left out.
OPTIONAL = ("trl", "liger_kernel", "kernels", "peft", "matplotlib")

# Blocks that are for several processes; here they run in a group of one.
IN_A_GROUP = ("docs/integrations.md",)

# What must hold once a page has run: its names, and what it has printed.
AFTERWARDS: dict[str, Callable[[dict[str, Any], str], bool]] = {
    "docs/objectives.md": lambda names, out: "soft_clip" in LOSS_TYPES,
    "docs/trainer-long-context.md": lambda names, out: out == recipes(),
    "docs/trainer-loop.md": lambda names, out: out.endswith("[None]\nCounter({'error': 1})\n"),
    "docs/trainer-monitoring.md": lambda names, out: Path("comparison.png").exists(),
    "docs/trainer-rollouts.md": lambda names, out: names["trainer"].state.global_step == 2,
}

# Commands whose output is shown in the block of text after them.
SHOWN = "fused-grpo plan"

# Pages without a block to run.
SILENT = {f"docs/api/{name}.md" for name in ("loss", "trainer", "integrations", "arguments")}
SILENT |= {f"docs/{name}.md" for name in ("bug-list", "faults", "mutants", "how-it-works")}
SILENT |= {"docs/kernels.md", "docs/trainer.md"}


def recipes() -> str:
    page = (ROOT / "docs" / "trainer-long-context.md").read_text()
    return page.split("<!-- recipes -->\n")[1].split("<!-- end -->")[0]


OTHERS = [ROOT / n for n in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "tests/README.md")]


def relative(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder of its own, a tiny model under every name, and whatever is registered undone."""
    import transformers

    from fused_grpo.trainer.models import tiny

    monkeypatch.chdir(tmp_path)
    for kind, which in (("AutoModelForCausalLM", 0), ("AutoTokenizer", 1)):
        stub = staticmethod(lambda *_, _which=which, **__: tiny(torch.float32)[_which])
        monkeypatch.setattr(getattr(transformers, kind), "from_pretrained", stub)
    theirs = types.ModuleType("my_package.losses")
    theirs.soft_clip = lambda tokens, spec: -tokens.ratio * tokens.advantages  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_package", types.ModuleType("my_package"))
    monkeypatch.setitem(sys.modules, "my_package.losses", theirs)
    before = dict(LOSS_TYPES)
    yield
    LOSS_TYPES.clear()
    LOSS_TYPES.update(before)
    patched = [module for module in (trl, liger) if module._PATCH.applied]
    for module in patched:
        module.unpatch()
    assert not patched, "the page leaves another library patched"


@contextmanager
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_python(block: Block, names: dict[str, Any]) -> None:
    missing = [name for name in OPTIONAL if find_spec(name) is None]
    wanted = [n for n in missing if re.search(rf"^ *(from|import) {n}\b", block.code, re.M)]
    if wanted:
        pytest.skip(f"{block.where} needs {', '.join(wanted)}")
    code = block.code
    for page, text, small in SMALLER:
        if page == block.page:
            code = code.replace(text, small)
    exec(compile("\n" * (block.line - 1) + code, block.page, "exec"), names)


def run_commands(block: Block) -> None:
    for command in commands(block):
        text = " ".join(command.words)
        if any(block.page == page and text.startswith(start) for page, start, _ in NOT_RUN):
            continue
        assert command.words[0] in COMMANDS, f"{command.where}: who reads {text!r}?"
        try:
            COMMANDS[command.words[0]](command.words[1:])
        except (Exception, SystemExit) as error:
            raise AssertionError(f"{command.where}: {text}: {error}") from error


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_code_blocks(page: Path, apart: None, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = blocks_of(page)
    runnable = [block for block in blocks if block.language != "text"]
    assert bool(runnable) == (relative(page) not in SILENT)
    names = doc_blocks.stand_ins()
    printed = last = err = ""
    for before, block in zip([None, *blocks], blocks, strict=False):
        assert block.language in LANGUAGES, f"{block.where}: no language"
        if block.language == "python":
            with group_of_one() if relative(page) in IN_A_GROUP else nullcontext():
                run_python(block, names)
        elif block.language == "bash":
            run_commands(block)
        elif block.language == "yaml":
            doc_blocks.check_yaml(block.code)
        elif block.language == "json":
            doc_blocks.check_json(block.code)
        elif before and before.code.startswith(SHOWN):
            assert block.code == last.strip(), f"{block.where}: it prints something else"
        last, more = capsys.readouterr()
        printed, err = printed + last, err + more
    assert "Traceback" not in err
    assert AFTERWARDS.get(relative(page), lambda *_: True)(names, printed)


def test_every_exception_is_needed() -> None:
    text = {relative(page): page.read_text() for page in PAGES}
    for page, start, why in NOT_RUN:
        assert why
        assert any(start in line for line in text[page].split("\n")), start
    for page, old, _ in SMALLER:
        assert old in text[page]


def test_the_commands_of_contributing(apart: None) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    lines = re.findall(r"^    (?:[A-Z_]+=\S+ )?(?:make|pip|python) .*$", text, re.M)
    assert len(lines) >= 12
    run_commands(Block("CONTRIBUTING.md", 1, "bash", "\n".join(lines)))


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_no_code_outside_of_fences(page: Path) -> None:
    assert not indented_code(page)


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_rows_of_tables_have_the_columns_of_their_heads(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        head, rule, *rows = table.splitlines()
        assert re.fullmatch(r"(\|-+)+\|", rule), f"{relative(page)}: {head}"
        for row in [rule, *rows]:  # GitHub splits at bars in code as well
            assert len(re.findall(r"(?<!\\)\|", row)) == len(re.findall(r"(?<!\\)\|", head)), row


# --- links ---------------------------------------------------------------------------------------


def slug(heading: str) -> str:
    """A heading's anchor, where GitHub and mkdocs make the same one."""
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", heading).strip().lower()
    github = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
    mkdocs = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain)).strip("-")
    return github if github == mkdocs else f"{github} and {mkdocs} differ"


def anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", text, re.M)}


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=relative)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.is_file(), f"{relative(page)}: {target}"
        assert file.is_relative_to(ROOT)
        assert not anchor or anchor in anchors(file), f"{relative(page)}: {target}"
    for path in re.findall(r"`(docs/[\w./-]+\.md|examples/[\w./]+|tests/[\w./]+\.py)`", text):
        assert (ROOT / path).exists(), f"{relative(page)}: {path}"


# --- the site ------------------------------------------------------------------------------------


def test_every_page_is_in_the_navigation() -> None:
    nav = re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    docs = {str(page.relative_to(ROOT / "docs")) for page in PAGES[1:]}
    assert sorted(n for n in nav if not n.startswith("repository/")) == sorted(docs)


def documented(page: str) -> set[str]:
    text = (ROOT / "docs" / "api" / f"{page}.md").read_text()
    return set(re.findall(r"^::: fused_grpo\.(\S+)", text, re.M))


def test_the_reference_has_every_public_name() -> None:
    assert documented("loss") >= set(fused_grpo.__all__)
    assert documented("trainer") >= {f"trainer.{name}" for name in trainer.__all__}
    expected = set()
    for module in ("models", "trl", "liger", "verl", "routing", "patching", "adapters"):
        tree = ast.parse((ROOT / "fused_grpo" / "integrations" / f"{module}.py").read_text())
        names = [n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
        expected |= {f"integrations.{module}.{n}" for n in names if not n.startswith("_")}
    assert documented("integrations") >= expected


def test_the_table_of_arguments_is_what_the_fields_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import docs_tables

    text = docs_tables.PAGE.read_text()
    assert docs_tables.filled(text) == text, "run scripts/docs_tables.py"
    assert not re.search(r"\| +\|$", docs_tables.tables(), re.M), "an argument without its help"
