"""No line of the project loads code, or hands text to an interpreter, but those that are listed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("fused_grpo", "kernels", "scripts", "benchmarks", "examples")
PICKLES = ("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib")
BUILTINS = ("eval", "exec", "compile")
INTERPRETERS = (
    *BUILTINS,
    *("os.system", "os.popen", "pty.spawn", "subprocess.getoutput", "subprocess.getstatusoutput"),
    *("runpy.run_path", "runpy.run_module", "code.interact", "ctypes.CDLL"),
    *("torch.jit.load", "torch.ops.load_library", "pandas.read_pickle"),
)
SAFE_YAML = ("SafeLoader", "CSafeLoader", "BaseLoader")

# (file, what is found there): why it is no danger
ALLOWED = {
    ("fused_grpo/trainer/isolation.py", "pickle.loads"): (
        "an answer of a process of its own, over a socket that nobody else has; SECURITY.md says "
        "how far a verifier is trusted"
    ),
    ("fused_grpo/trainer/isolation_server.py", "pickle.loads"): (
        "the verifier and its samples, from the process that started it, over the same socket"
    ),
    ("fused_grpo/trainer/trainer.py", "trust_remote_code"): (
        "the tokenizer's, where the user's own model_init_kwargs ask for the model's"
    ),
    ("fused_grpo/trainer/loading.py", "pickle.Unpickler"): "makes what a table lists, no more",
    ("benchmarks/measure.py", "ctypes.CDLL"): "the C library, by a name in the source",
    ("fused_grpo/trainer/judges_guard.py", "eval"): "numbers and containers: its tree was checked",
    ("fused_grpo/trainer/judges_guard.py", "compile"): "of that tree",
}


def hazards(source: str) -> Iterator[tuple[int, str]]:
    """(line, name) of each call and option that could run what a file or a text says."""
    tree = ast.parse(source)
    names = _imports(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = _dotted(node.func, names)
            options = {k.arg: k.value for k in node.keywords}
            found = _hazard(called, node, options)
            if found:
                yield node.lineno, found
        elif isinstance(node, ast.ClassDef):
            bases = [_dotted(base, names) for base in node.bases]
            yield from ((node.lineno, b) for b in bases if b.endswith("pickle.Unpickler"))
        elif isinstance(node, ast.Dict):  # keywords that are passed on as **options
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value in OPTIONS and not _false(value):
                    yield node.lineno, f"{key.value}"
        elif isinstance(node, ast.Assign):  # into such a dict, or to be called by another name
            keys = [t.slice for t in node.targets if isinstance(t, ast.Subscript)]
            named = [key.value for key in keys if isinstance(key, ast.Constant)]
            if not _false(node.value):
                yield from ((node.lineno, option) for option in OPTIONS if option in named)
            if _dotted(node.value, names).removeprefix("builtins.") in BUILTINS:
                yield node.lineno, _dotted(node.value, names)


OPTIONS = ("trust_remote_code", "shell", "allow_pickle")


def _hazard(called: str, node: ast.Call, options: dict[str | None, ast.expr]) -> str | None:
    base, _, name = called.rpartition(".")
    for option in OPTIONS:
        if option in options and not _false(options[option]):
            return option
    if called == "torch.load" and not _true(options.get("weights_only")):
        return "torch.load"
    if base.split(".")[0] in PICKLES and name in ("load", "loads", "Unpickler", "open"):
        return called
    if called in ("numpy.load", "np.load") and len(node.args) > 2:  # allow_pickle by its position
        return "allow_pickle"
    if called in INTERPRETERS or called.startswith(("builtins.e", "os.exec", "os.spawn")):
        return called
    if base == "yaml" and name in ("unsafe_load", "full_load", "unsafe_load_all", "full_load_all"):
        return called
    if called in ("yaml.load", "yaml.load_all"):
        loader = options.get("Loader") or (node.args[1] if len(node.args) > 1 else None)
        last = _dotted(loader, {}).rpartition(".")[2] if loader is not None else ""
        return None if last in SAFE_YAML else called
    if called == "tempfile.mktemp":
        return called
    if name in ("extractall", "unpack_archive"):
        return name
    return None


def _imports(tree: ast.AST) -> dict[str, str]:
    """What a file calls something, and what it is."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update({a.asname: a.name for a in node.names if a.asname})
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
    return found


def _dotted(node: ast.expr | None, names: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value, names)}.{node.attr}"
    return "?"


def _true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def _false(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value in (False, None)


# ---- the files -----------------------------------------------------------------------------------

FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def test_nothing_loads_code_or_interprets_text():
    assert len(FILES) > 100
    found = {}
    for path in FILES:
        name = path.relative_to(ROOT).as_posix()
        for line, hazard in hazards(path.read_text(encoding="utf-8")):
            found.setdefault((name, hazard), []).append(line)
    unknown = [f"{n}:{x[0]}: {what}" for (n, what), x in found.items() if (n, what) not in ALLOWED]
    assert not unknown, "\n".join(unknown)
    assert set(ALLOWED) <= set(found), "an entry of ALLOWED has nothing to allow any more"


@pytest.mark.parametrize(
    ("source", "hazard"),
    [
        ("import torch\ntorch.load(p)", "torch.load"),
        ("import torch as t\nt.load(p, weights_only=False)", "torch.load"),
        ("from torch import load as read\nread(p)", "torch.load"),
        ("import torch\ntorch.load(p, weights_only=flag)", "torch.load"),
        ("import pickle\npickle.load(f)", "pickle.load"),
        ("from pickle import loads\nloads(b)", "pickle.loads"),
        ("import pickle\npickle.Unpickler(f).load()", "pickle.Unpickler"),
        ("import pickle\nclass Mine(pickle.Unpickler): ...", "pickle.Unpickler"),
        ("import dill\ndill.loads(b)", "dill.loads"),
        ("import marshal\nmarshal.loads(b)", "marshal.loads"),
        ("import shelve\nshelve.open(p)", "shelve.open"),
        ("import joblib\njoblib.load(p)", "joblib.load"),
        ("import numpy as np\nnp.load(p, allow_pickle=True)", "allow_pickle"),
        ("import numpy\nnumpy.load(p, None, True)", "allow_pickle"),
        ("eval(text)", "eval"),
        ("exec(text)", "exec"),
        ("compile(text, '', 'exec')", "compile"),
        ("import builtins\nbuiltins.eval(text)", "builtins.eval"),
        ("import os\nos.system(text)", "os.system"),
        ("from os import popen\npopen(text)", "os.popen"),
        ("import os\nos.execvp(a, b)", "os.execvp"),
        ("import subprocess\nsubprocess.run(text, shell=True)", "shell"),
        ("import subprocess\nsubprocess.run(text, shell=flag)", "shell"),
        ("import yaml\nyaml.load(f)", "yaml.load"),
        ("import yaml\nyaml.load(f, Loader=yaml.FullLoader)", "yaml.load"),
        ("import yaml\nyaml.unsafe_load(f)", "yaml.unsafe_load"),
        ("AutoModel.from_pretrained(n, trust_remote_code=True)", "trust_remote_code"),
        ("options = {'trust_remote_code': True}", "trust_remote_code"),
        ("options['trust_remote_code'] = True", "trust_remote_code"),
        ("f = eval\nf(text)", "eval"),
        ("import subprocess\nsubprocess.getoutput(text)", "subprocess.getoutput"),
        ("import runpy\nrunpy.run_path(p)", "runpy.run_path"),
        ("import ctypes\nctypes.CDLL(p)", "ctypes.CDLL"),
        ("import torch\ntorch.jit.load(p)", "torch.jit.load"),
        ("import pandas as pd\npd.read_pickle(p)", "pandas.read_pickle"),
        ("import tempfile\ntempfile.mktemp()", "tempfile.mktemp"),
        ("import tarfile\ntarfile.open(p).extractall(d)", "extractall"),
        ("import shutil\nshutil.unpack_archive(p)", "unpack_archive"),
    ],
)
def test_the_walker_sees_a_sample_of_each(source, hazard):
    assert [found for _, found in hazards(source)] == [hazard]


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.load(p, weights_only=True)",
        "import torch\ntorch.compile(model)",
        "import re\nre.compile(text)",
        "model.eval()",
        "import json\njson.load(f)",
        "import numpy as np\nnp.load(p, allow_pickle=False)",
        "import yaml\nyaml.load(f, Loader=yaml.SafeLoader)",
        "import yaml\nyaml.safe_load(f)",
        "AutoModel.from_pretrained(n, trust_remote_code=False)",
        "import subprocess\nsubprocess.run([a, b])",
        "options['trust_remote_code'] = False",
    ],
)
def test_the_walker_leaves_alone_what_is_safe(source):
    assert not list(hazards(source))
