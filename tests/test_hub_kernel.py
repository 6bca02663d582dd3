"""The package for the Kernel Hub: its layout, and that it computes right where it is loaded from.

Loaded by Hugging Face's `kernels` in a process of its own, whose kernels are interpreted, from a
folder that no path knows.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("triton")

from fused_grpo_kernels import registry

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "build_hub_kernel.py"

# Runs elsewhere, with the folder of the package as its argument; prints errors against float64.
PROGRAM = """
import json, sys
from pathlib import Path
import torch
{load}
found = {{"module": module.__name__}}

torch.manual_seed(0)
rows, width, dim, vocab = 2, 5, 16, 67
hidden64, weight64 = torch.randn(rows, width, dim).double(), torch.randn(vocab, dim).double() / 2
ids = torch.randint(vocab, (rows, width))
mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
advantages = torch.tensor([1.0, -0.5])
upstream = torch.randn(rows, width).double()

def reference(dtype):
    h, w = (x.to(dtype).double().requires_grad_() for x in (hidden64, weight64))
    logps = (h @ w.T / 0.7).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    return h, w, logps

def error(got, want):
    return float((got.double() - want).norm() / want.norm())

for dtype in (torch.float32, torch.bfloat16):
    h64, w64, want = reference(dtype)
    expected = torch.autograd.grad((want * upstream).sum(), (h64, w64), retain_graph=True)
    # the objective with every ratio 1: the value is -mean(A), the gradient that of -A logp
    loss64 = -(want * advantages[:, None] * mask).sum() / mask.sum()
    of_loss = torch.autograd.grad(loss64, (h64, w64))
    for backend in ("triton", "chunked"):
        h, w = (x.to(dtype).requires_grad_() for x in (hidden64, weight64))
        out = module.linear_logprobs(h, w, ids, temperature=0.7, backend=backend)
        (out.logps * upstream.float()).sum().backward()
        errors = {{"logps": float((out.logps - want).abs().max())}}
        errors |= {{"hidden": error(h.grad, expected[0]), "weight": error(w.grad, expected[1])}}
        h.grad = w.grad = None
        loss = module.grpo_loss(
            h, w, ids, advantages, completion_mask=mask, temperature=0.7, backend=backend
        ).loss
        loss.backward()
        total = float(-(advantages[:, None] * mask).sum() / mask.sum())
        errors |= {{"loss": abs(float(loss.detach()) - total)}}
        errors |= {{"loss hidden": error(h.grad, of_loss[0])}}
        errors |= {{"loss weight": error(w.grad, of_loss[1])}}
        found[f"{{backend}} {{dtype}}"] = errors
found["installed"] = sorted(m for m in sys.modules if m.partition(".")[0] in {installed})
found["launched"] = sorted(m for m in sys.modules if m.startswith(module.__name__ + "._kernels."))
print(json.dumps(found))
"""
BY_KERNELS = """
from kernels import get_local_kernel
module = get_local_kernel(Path(sys.argv[1]))
"""
# what the importer of `kernels` does, where that is not installed
BY_HAND = """
import importlib.util
path = Path(sys.argv[1]) / "build" / "torch-cpu"
name = json.loads((path / "metadata.json").read_text())["id"]
spec = importlib.util.spec_from_file_location(name, path / "__init__.py")
module = importlib.util.module_from_spec(spec)
sys.modules[name] = module
spec.loader.exec_module(module)
"""
INSTALLED = ("fused_grpo", "fused_grpo_kernels")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_hub_kernel", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hub") / "out"
    subprocess.run([sys.executable, SCRIPT, out, "--repo-id", "me/fused-grpo"], check=True)
    return out


def run(package: Path, load: str, before: str = "") -> dict[str, Any]:
    """What the program prints, in a folder of its own."""
    elsewhere = package.parent / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    environment = os.environ | {"TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", before + PROGRAM.format(load=load, installed=INSTALLED), package],
        cwd=elsewhere,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def assert_right(found: dict[str, Any]) -> None:
    """fp32 logits throughout; gradients in the dtype of the leaves."""
    for backend in ("triton", "chunked"):
        exact, rounded = (found[f"{backend} torch.{d}"] for d in ("float32", "bfloat16"))
        assert all(error < 1e-5 for error in exact.values()), (backend, exact)
        assert rounded["logps"] < 1e-4, (backend, rounded)
        assert all(error < 5e-3 for error in rounded.values()), (backend, rounded)
    launched = {name.rpartition(".")[2] for name in found["launched"]}
    assert {"forward", "fold", "combine", "gradients", "policy"} <= launched


def test_loaded_by_the_library(package: Path) -> None:
    """`get_local_kernel`, interpreted, against fp64: log-probabilities and both gradients."""
    pytest.importorskip("kernels")
    found = run(package, BY_KERNELS)
    assert found["module"].startswith("_fused_grpo_cpu_")
    assert found["installed"] == []  # nothing of it came from an installation
    assert_right(found)


def test_loaded_beside_an_installation(package: Path) -> None:
    """Two copies of its operators in one process, as versions of a kernel on the Hub are."""
    found = run(package, BY_HAND, before="import fused_grpo, fused_grpo.compiled\n")
    assert "fused_grpo.compiled" in found["installed"]
    assert "fused_grpo_kernels.forward" not in found["installed"]
    assert_right(found)


def test_build_file_and_metadata_are_what_the_library_reads(package: Path) -> None:
    rust = pytest.importorskip("kernels._rust")
    build = rust.Build.open(package)
    assert [str(b) for b in build.general.backends] == ["cuda", "rocm", "cpu"]
    for backend in ("cuda", "rocm", "cpu"):
        metadata = rust.Metadata.read_from_file(package / f"build/torch-{backend}/metadata.json")
        assert metadata.name.python_name == "fused_grpo"
        assert str(metadata.backend.backend_type) == backend
        assert metadata.license == "Apache-2.0"
        assert metadata.version == 1


def test_a_variant_for_every_system(package: Path) -> None:
    variants = pytest.importorskip("kernels.variants")
    found = variants.get_variants_local(package / "build")
    assert sorted(v.variant_str for v in found) == ["torch-cpu", "torch-cuda", "torch-rocm"]


def test_layout(package: Path) -> None:
    """Source and builds hold the same modules; the builder adds `_ops.py` and the metadata."""

    def names(folder: Path) -> set[str]:
        return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}

    source = names(package / "torch-ext" / "fused_grpo")
    assert {"__init__.py", "loss.py", "objectives/registry.py", "_kernels/forward.py"} <= source
    for backend in ("cuda", "rocm", "cpu"):
        assert names(package / "build" / f"torch-{backend}") == source | {
            "_ops.py",
            "metadata.json",
        }
    assert not [n for n in source if "trainer" in n or "integrations" in n or "cli" in n]
    for path in (package / "torch-ext").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level:
                assert node.module is not None
                assert node.module.partition(".")[0] not in INSTALLED, path
    assert (package / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert 'repo-id = "me/fused-grpo"' in (package / "build.toml").read_text()


def test_every_kernel_is_packed(script: ModuleType) -> None:
    assert script.LAZY == registry.MODULES
    packed = script.files()
    for name in registry.MODULES:
        assert Path("_kernels", f"{name}.py") in packed


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import fused_grpo\n", "was not made relative"),
        ("def f():\n    from fused_grpo.loss import (\n        a,\n    )\n", None),
        ('name = "fused_grpo.loss"\n', "names its package in a string"),
        ('op = "fused_grpo::loss"\n', "names its package in a string"),
    ],
)
def test_what_cannot_be_packed(script: ModuleType, source: str, message: str | None) -> None:
    if message is None:
        assert "from .loss import (" in script.rewrite("fused_grpo.loss", source)
        return
    with pytest.raises(ValueError, match=message):
        script.rewrite("fused_grpo.loss", source)


def test_other_dependencies_are_refused(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = ast.parse("import numpy as np")
    assert list(script.imports("fused_grpo.loss", tree)) == ["numpy"]
    monkeypatch.setattr(script, "ALLOWED", {"torch"})
    with pytest.raises(ValueError, match=r"may not depend on (triton|typing_extensions)"):
        script.reachable()


def test_nothing_is_overwritten(package: Path, script: ModuleType) -> None:
    with pytest.raises(FileExistsError, match="is not empty"):
        script.build(package)
