"""What an installation promises: light imports, the right files, and no shadowed package."""

import dataclasses
import importlib.metadata
import inspect
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import fused_grpo
from fused_grpo import loss

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]

# Prints what importing all names brought in and cost on top of torch. CPU time, because other
# processes may be using the cores while the tests run.
IMPORT_PROBE = """
import importlib.abc, json, sys, time

class NoTriton(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoTriton())
import torch
before = set(sys.modules)
start = time.process_time()
import fused_grpo
from fused_grpo import *
seconds = time.process_time() - start
added = sorted({name.partition(".")[0] for name in set(sys.modules) - before})
out = fused_grpo.grpo_loss(
    torch.randn(2, 3, 4), torch.randn(7, 4), torch.zeros(2, 3, dtype=torch.long), torch.ones(2)
)
late = sorted({name.partition(".")[0] for name in sys.modules})
print(json.dumps({"seconds": seconds, "added": added, "late": late, "loss": float(out.loss)}))
"""
HEAVY = {"accelerate", "datasets", "matplotlib", "peft", "transformers", "triton", "trl"}


def run_python(code: str, cwd: Path) -> str:
    """Run `code` in a fresh interpreter with `cwd` on sys.path; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def canonical(requirement: str) -> str:
    """The name in a requirement line, as package indexes compare names."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name is not None, requirement
    return re.sub(r"[-_.]+", "-", name.group()).lower()


def pins(lock: str) -> list[str]:
    """The requirement lines of a lock file."""
    lines = (ROOT / lock).read_text().splitlines()
    return [line for line in lines if line and not line.startswith(("#", "-r "))]


# --- the kernels/ folder -------------------------------------------------------------------------


def test_the_kernels_folder_is_not_a_package():
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "conftest.py").exists(), "a root conftest.py puts the root on sys.path"


def test_transformers_imports_from_the_repository_root():
    code = "from transformers import AutoModelForCausalLM, Trainer; import kernels; "
    code += "print(getattr(kernels, '__file__', None))"
    if not (ROOT / "kernels").is_dir():
        pytest.skip("this checkout has no kernels/ folder that could shadow anything")
    # A bare folder is a namespace portion without a file; a real `kernels` package wins over it.
    assert not run_python(code, ROOT).startswith(str(ROOT / "kernels"))


# --- importing -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def probe(tmp_path_factory):
    return json.loads(run_python(IMPORT_PROBE, tmp_path_factory.mktemp("elsewhere")))


def test_import_without_triton_brings_in_nothing_heavy(probe):
    assert not HEAVY & set(probe["added"])


def test_the_loss_runs_without_triton_and_stays_light(probe):
    """I11: Import and loss on a CPU, with triton made impossible to import."""
    assert probe["loss"] == pytest.approx(-1.0)  # ratio 1, advantage 1, mean over the tokens
    # torch itself may look for some of these; what the package adds is checked above.
    assert not (HEAVY - {"triton"}) & set(probe["late"])


def test_import_costs_little_on_top_of_torch(probe):
    assert probe["seconds"] < 0.5


# --- names and metadata --------------------------------------------------------------------------


def test_versions_agree():
    assert fused_grpo.__version__ == PROJECT["version"]
    assert importlib.metadata.version("fused-grpo") == PROJECT["version"]
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert f"## [{PROJECT['version']}]" in changelog


def test_all_is_sorted_and_free_of_repeats():
    assert sorted(set(fused_grpo.__all__)) == list(fused_grpo.__all__)


@pytest.mark.parametrize("name", fused_grpo.__all__)
def test_every_public_name_is_documented(name):
    value = getattr(fused_grpo, name)
    assert value.__module__.startswith("fused_grpo.")
    doc = value.__doc__
    assert doc
    if dataclasses.is_dataclass(value):  # a dataclass without a docstring gets its signature
        assert not doc.startswith(f"{name}(")


FUNCTIONS = [name for name in fused_grpo.__all__ if inspect.isfunction(getattr(fused_grpo, name))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_is_documented(name):
    function = getattr(fused_grpo, name)
    referenced = [other for other in FUNCTIONS if f"`{other}`" in function.__doc__]
    docs = "\n".join(getattr(fused_grpo, other).__doc__ for other in [name, *referenced])
    arguments = set()
    for argument in inspect.signature(function).parameters.values():
        named = re.search(r"Unpack\[(\w+)\]", str(argument.annotation))
        arguments |= set(getattr(loss, named[1]).__annotations__) if named else {argument.name}
    assert not {a for a in arguments if not re.search(rf"\b{a}\b", docs)}


def test_license_is_apache_2():
    assert PROJECT["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text()
    assert re.match(r"\s*Apache License\s+Version 2\.0, January 2004", text)
    assert "END OF TERMS AND CONDITIONS" in text


# --- what is shipped and installed ---------------------------------------------------------------


def test_every_subpackage_is_listed():
    found = {
        ".".join(init.parent.relative_to(ROOT).parts)
        for init in (ROOT / "fused_grpo").rglob("__init__.py")
    }
    listed = {p for p in PYPROJECT["tool"]["setuptools"]["packages"] if p.startswith("fused_grpo")}
    assert found == {p for p in listed if p.partition(".")[0] == "fused_grpo"}


def test_wheel_holds_the_package_and_nothing_else(tmp_path):
    source = tmp_path / "source"  # setuptools writes build/ beside what it builds
    ignore = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "runs")
    shutil.copytree(ROOT, source, ignore=ignore)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, "-w", str(tmp_path), str(source)],
        check=True,
        timeout=240,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    info = f"fused_grpo-{PROJECT['version']}.dist-info"
    allowed = {p.partition(".")[0] for p in PYPROJECT["tool"]["setuptools"]["packages"]}
    assert tops == allowed | {info}
    sources = {str(p.relative_to(source)) for p in (source / "fused_grpo").rglob("*.py")}
    assert sources | {"fused_grpo/py.typed", f"{info}/licenses/LICENSE"} <= set(names)


@pytest.mark.parametrize("lock", ["dev", "model", "bench", "docs"])
def test_locks_pin_exact_versions(lock):
    lines = pins(f"requirements-{lock}.lock")
    assert lines
    for line in lines:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+( ; .+)?", line), line
        # CUDA's packages belong to torch's CUDA wheel, which pins them itself.
        assert not line.startswith(("nvidia-", "cuda-")), line


def test_locks_cover_what_the_project_asks_for():
    extras = PROJECT["optional-dependencies"]
    locked = {
        canonical(line) for lock in ("dev", "model") for line in pins(f"requirements-{lock}.lock")
    }
    wanted = {canonical(r) for r in PROJECT["dependencies"] + extras["dev"] + extras["demo"]}
    assert wanted - {"fused-grpo"} <= locked
    for extra in ("bench", "docs"):
        more = {canonical(line) for line in pins(f"requirements-{extra}.lock")}
        assert {canonical(r) for r in extras[extra]} - {"fused-grpo"} <= locked | more


def test_names_are_found_when_they_are_asked_for() -> None:
    """All of them, and none by another name than it is exported under."""
    assert set(fused_grpo.__all__) == set(fused_grpo._MODULES)
    assert set(fused_grpo.__all__) <= set(dir(fused_grpo))
    for name in fused_grpo.__all__:
        assert getattr(fused_grpo, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'grpo_los'"):
        _ = fused_grpo.grpo_los


def test_planning_does_without_torch() -> None:
    """Its import takes longer than everything else that `fused-grpo plan` does."""
    command = ["plan", "--model", "Qwen3-8B", "--context", "131072", "--gpu-memory", "80"]
    code = f"import sys; from fused_grpo.cli import main; main({command})"
    code += "; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "longest context" in done.stdout
