"""Lays the loss and its Triton kernels out as a package for Hugging Face's Kernel Hub.

    python scripts/build_hub_kernel.py OUT [--repo-id you/fused-grpo]

writes what `kernel-builder` takes (edition 5, `[torch-noarch]`: what used to be called universal):

    OUT/build.toml OUT/flake.nix OUT/README.md
    OUT/torch-ext/fused_grpo/...              the modules, with relative imports
    OUT/build/torch-{cuda,rocm,cpu}/...       the same as the builder lays it out, with its metadata

so that OUT can be built, uploaded, or loaded as it is: `kernels.get_local_kernel(Path("OUT"))`.

A Hub kernel is loaded from any path and next to other versions of itself. So every import of the
package's own modules becomes relative, and operators get a namespace of their own; anything beyond
the standard library, torch and triton is refused. What is packed is what `import fused_grpo`
reaches, lazy imports included: the trainer, the integrations and the command line stay out.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAME, PYTHON_NAME, VERSION = "fused-grpo", "fused_grpo", 1
BACKENDS = ("cuda", "rocm", "cpu")
# package -> (its folder, where it goes inside the built one)
PACKAGES = {
    "fused_grpo": (ROOT / "fused_grpo", ""),
    "fused_grpo_kernels": (ROOT / "kernels" / "fused_grpo_kernels", "_kernels"),
}
ALLOWED = {"torch", "triton", "typing_extensions"}
LAZY = (  # registry.MODULES
    *("forward", "target", "fold", "combine", "gradients", "policy"),
    *("routed", "pairs"),
)

BUILD_TOML = """\
[general]
name = "{name}"
version = {version}
edition = 5
license = "Apache-2.0"
backends = [{backends}]

[general.hub]
repo-id = "{repo_id}"

[torch-noarch]
"""
FLAKE = """\
{
  description = "fused-grpo: the GRPO loss fused with the language-model head";
  inputs.kernel-builder.url = "github:huggingface/kernels";
  outputs = { self, kernel-builder }: kernel-builder.lib.genKernelFlakeOutputs {
    inherit self;
    path = ./.;
  };
}
"""
README = """\
---
library_name: kernels
license: apache-2.0
---

# fused-grpo

The GRPO loss fused with the language-model head: log-probabilities, entropies, loss and both
gradients without `[tokens, vocabulary]` logits. Triton on CUDA and ROCm, plain torch on a CPU.

```python
from kernels import get_kernel

fused_grpo = get_kernel("{repo_id}", version={version}, trust_remote_code=True)
out = fused_grpo.grpo_loss(hidden, lm_head.weight, completion_ids, advantages)
logps = fused_grpo.linear_logprobs(hidden, lm_head.weight, targets, temperature=0.7).logps
```

`__all__` lists the functions; each has its arguments in its docstring.
"""
OPS = '''\
"""A namespace of operators for this build alone; `kernel-builder` writes its own such module."""

_NAMESPACE = "{namespace}"


def add_op_namespace_prefix(name: str) -> str:
    """The full name of an operator of this package."""
    return f"{{_NAMESPACE}}::{{name}}"
'''


def source_of(module: str) -> Path | None:
    """The file of a module of ours; None: there is none, the name is something inside a module."""
    package, *parts = module.split(".")
    folder = PACKAGES[package][0].joinpath(*parts)
    found = [p for p in (folder.with_suffix(".py"), folder / "__init__.py") if p.is_file()]
    return found[0] if found else None


def imports(module: str, tree: ast.Module) -> Iterator[str]:
    """Full names of the modules that a module may import, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"{module}: a relative import; this script expects absolute ones")
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
    if module == "fused_grpo_kernels.registry":
        yield from (f"fused_grpo_kernels.{name}" for name in LAZY)


def reachable(start: str = "fused_grpo") -> dict[str, str]:
    """Module -> source, of everything of ours that importing `start` may lead to."""
    found: dict[str, str] = {}
    queue = [start]
    while queue:
        module = queue.pop()
        path = source_of(module)
        if path is None or module in found:
            continue
        found[module] = path.read_text()
        parent = module.rpartition(".")[0]
        queue += [parent] if parent else []
        for name in imports(module, ast.parse(found[module])):
            top = name.partition(".")[0]
            if top in PACKAGES:
                queue.append(name)
            elif top not in ALLOWED and top not in sys.stdlib_module_names:
                raise ValueError(f"{module} imports {name}: a Hub kernel may not depend on {top}")
    return found


def target_of(module: str) -> Path:
    """Where a module goes, inside the built package."""
    package, *parts = module.split(".")
    path = source_of(module)
    assert path is not None
    folder = [PACKAGES[package][1], *parts] if PACKAGES[package][1] else parts
    return (
        Path(*folder, "__init__.py")
        if path.name == "__init__.py"
        else Path(*folder[:-1]) / (folder[-1] + ".py")
    )


def rewrite(module: str, source: str) -> str:
    """The source with imports of our own modules made relative, and operators renamed."""
    dots = "." * len(target_of(module).parts)
    lines = []
    for line in source.splitlines():
        match = re.match(r"(\s*)from (fused_grpo(?:_kernels)?)((?:\.\w+)*) import (.*)$", line)
        if match:
            indent, package, rest, names = match.groups()
            inside = ".".join(p for p in (PACKAGES[package][1], rest.lstrip(".")) if p)
            line = f"{indent}from {dots}{inside} import {names}"
        lines.append(line)
    text = "\n".join(lines) + "\n"
    renamed = re.sub(
        r'custom_op\("fused_grpo::(\w+)"', r'custom_op(add_op_namespace_prefix("\1")', text
    )
    if renamed != text:
        own = f"from {dots}_ops import add_op_namespace_prefix"
        renamed = renamed.replace(
            "\nfrom torch import Tensor\n", f"\nfrom torch import Tensor\n\n{own}\n", 1
        )
    check(module, renamed)
    return renamed


def check(module: str, source: str) -> None:
    """ValueError for anything that would only work where fused-grpo is installed."""
    for node in ast.walk(ast.parse(source)):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        if any(name.partition(".")[0] in PACKAGES for name in names):
            raise ValueError(f"{module} line {node.lineno}: this import was not made relative")
    if re.search(r"['\"]fused_grpo(_kernels)?(::|\.)", source):
        raise ValueError(f"{module} names its package in a string: it is another one on the Hub")


def files() -> dict[Path, str]:
    """Path inside the package -> source."""
    return {target_of(module): rewrite(module, text) for module, text in reachable().items()}


def build(out: Path, repo_id: str = "fused-grpo/fused-grpo") -> None:
    """Writes everything below `out`, which must not exist or be empty.

    Raises:
        FileExistsError: it holds something.
        ValueError: a module that cannot be packed.
    """
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty")
    packed = files()
    digest = hashlib.sha256(repr(sorted((str(k), v) for k, v in packed.items())).encode())
    unique = digest.hexdigest()[:12]
    quoted = ", ".join(f'"{backend}"' for backend in BACKENDS)
    fields = {"name": NAME, "version": VERSION, "backends": quoted, "repo_id": repo_id}
    _write(out / "build.toml", BUILD_TOML.format(**fields))
    _write(out / "flake.nix", FLAKE)
    _write(out / "README.md", README.format(**fields))
    shutil.copy(ROOT / "LICENSE", out / "LICENSE")
    for path, text in packed.items():
        _write(out / "torch-ext" / PYTHON_NAME / path, text)
    for backend in BACKENDS:
        folder = out / "build" / f"torch-{backend}"
        identity = f"_{PYTHON_NAME}_{backend}_{unique}"
        for path, text in packed.items():
            _write(folder / path, text)
        _write(folder / "_ops.py", OPS.format(namespace=identity))
        metadata = {
            "name": NAME,
            "id": identity,
            "version": VERSION,
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": backend},
        }
        _write(folder / "metadata.json", json.dumps(metadata, indent=2) + "\n")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("--repo-id", default="fused-grpo/fused-grpo")
    arguments = parser.parse_args()
    build(arguments.out, arguments.repo_id)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
