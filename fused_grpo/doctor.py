"""`fused-grpo doctor`: what this machine would use and why, and whether it computes right.

It looks at versions and devices, says which backend a call would take, compiles the kernels for
this machine's GPU (or for a named chip, which needs none), and runs the public loss on small inputs
with every backend against fp64.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from fused_grpo.backends import choose, why_not_triton
from fused_grpo.selfcheck import TOLERANCE, Numbers, check_numbers

PACKAGES = ("fused-grpo", "torch", "triton", "transformers", "trl", "liger-kernel", "accelerate")
CPU_FEATURES = {
    "avx2": "_is_avx2_supported",
    "avx512": "_is_avx512_supported",
    "avx512_bf16": "_is_avx512_bf16_supported",
    "amx": "_is_amx_tile_supported",
}


@dataclass
class Kernels:
    """What compiling the kernels for a chip gave: rows of the static gate."""

    target: str | None
    reason: str | None = None  # why nothing was compiled
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        return [f"{r['kernel']}: {p}" for r in self.rows for p in r["problems"]]


@dataclass
class Report:
    """Everything the command prints; `failures` decides its exit status."""

    versions: dict[str, str | None]
    machine: dict[str, Any]
    backends: dict[str, dict[str, str | None]]  # device -> backend -> None, or why not
    chosen: dict[str, str]  # device -> what backend="auto" is there
    products: dict[str, dict[str, str]]  # device -> dtype -> how the Triton backend multiplies
    kernels: Kernels
    numbers: list[Numbers]

    @property
    def failures(self) -> list[str]:
        wrong = [f"{x.backend} on {x.device} in {x.dtype}" for x in self.numbers if not x.ok]
        return [f"wrong numbers: {name}" for name in wrong] + self.kernels.failures


def examine(target: str | None = None) -> Report:
    """Looks, compiles and computes; `target` names a chip to compile for instead of the GPU here.

    Raises:
        ValueError: `target` names no chip.
    """
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    backends = {device: backends_on(device) for device in devices}
    return Report(
        versions={name: _version(name) for name in PACKAGES},
        machine=machine(),
        backends=backends,
        chosen={device: choose("auto", *_probe(device)).name for device in devices},
        products={d: products_on(d) for d in devices if backends[d]["triton"] is None},
        kernels=compile_kernels(target or _own_target()),
        numbers=[
            check_numbers(backend, device, dtype)
            for device in devices
            for backend, reason in backends[device].items()
            if reason is None
            for dtype in TOLERANCE
        ],
    )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def machine() -> dict[str, Any]:
    """Python, processor and GPUs, as far as they decide anything."""
    features = [
        name for name, probe in CPU_FEATURES.items() if getattr(torch.cpu, probe, lambda: False)()
    ]
    gpus = []
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        gpus.append({"name": p.name, "target": _target_of(i), "gib": p.total_memory // 2**30})
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_features": features,
        "gpus": gpus,
    }


def _target_of(index: int) -> str:
    p = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return str(p.gcnArchName).partition(":")[0]
    return f"sm_{p.major}{p.minor}"


def _own_target() -> str | None:
    return _target_of(torch.cuda.current_device()) if torch.cuda.is_available() else None


# --- backends ------------------------------------------------------------------------------------


def backends_on(device: str) -> dict[str, str | None]:
    """None for a backend that works there when asked for by name, else why it does not."""
    try:
        triton = why_not_triton(*_probe(device), explicit=True)
    except ImportError as error:
        triton = f"triton cannot be imported: {error}"
    return {"triton": triton, "chunked": None, "reference": None}


def products_on(device: str) -> dict[str, str]:
    """How the Triton backend multiplies there, by dtype of the inputs."""
    from fused_grpo.triton_backend import Kinds
    from fused_grpo_kernels import forward
    from fused_grpo_kernels.registry import target_of

    how = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        hidden, weight = (x.to(dtype) for x in _probe(device))
        fused = [Kinds.of(hidden, weight, any_grad).fused for any_grad in (False, True)]
        why = forward.refusal(dtype, weight, target_of(weight.device)) or "a gradient needs range"
        how[str(dtype).removeprefix("torch.")] = {
            (True, True): "one product fused with its softmax sums",
            (True, False): f"fused without gradients; with them torch's product and a fold: {why}",
            (False, False): f"torch's product and a fold: {why}",
        }[fused[0], fused[1]]
    return how


def _probe(device: str) -> tuple[Tensor, Tensor]:
    """Hidden states and a weight, such as a call might have."""
    return torch.empty(1, 16, device=device), torch.empty(16, 16, device=device)


# --- kernels -------------------------------------------------------------------------------------


def compile_kernels(target: str | None) -> Kernels:
    """One configuration of each kernel for a chip, in a process of its own.

    There, because a process in which Triton interprets its kernels cannot compile them.
    """
    if target is None:
        return Kernels(None, "no GPU here; name a chip with --target, as sm_90 or gfx942")
    if _version("triton") is None:
        return Kernels(target, "triton is not installed")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "fused_grpo_kernels.gate", "--one-each", "--json"]
    done = subprocess.run(
        [*command, "--target", target], capture_output=True, text=True, env=environment
    )
    if done.returncode == 2:
        raise ValueError(done.stderr.strip())
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode and not any(row["problems"] for row in rows):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        rows.append({"kernel": "the static gate", "problems": [f"did not finish: {last}"]})
    return Kernels(target, rows=rows)


# --- printing ------------------------------------------------------------------------------------


def lines(report: Report) -> Iterator[str]:
    """The report as text."""
    for name, installed in report.versions.items():
        yield f"{name:<14}{installed or 'not installed'}"
    here = report.machine
    yield f"{'python':<14}{here['python']}, {here['system']}"
    features = ", ".join(here["cpu_features"]) or "none of " + ", ".join(CPU_FEATURES)
    yield f"{'cpu':<14}{here['cores']} cores, {here['threads']} threads, {features}"
    for gpu in here["gpus"]:
        yield f"{'gpu':<14}{gpu['name']}, {gpu['target']}, {gpu['gib']} GiB"
    if not here["gpus"]:
        yield f"{'gpu':<14}none that torch can use"
    yield ""
    for device, reasons in report.backends.items():
        yield f'on {device}, backend="auto" is {report.chosen[device]}'
        yield from (f"  {name}: {reason or 'works'}" for name, reason in reasons.items())
        how = report.products.get(device, {})
        yield from (f"  triton in {dtype}: {text}" for dtype, text in how.items())
    yield ""
    kernels = report.kernels
    yield f"kernels for {kernels.target}:" if not kernels.reason else f"kernels: {kernels.reason}"
    for row in kernels.rows:
        found = "; ".join(row["problems"]) or f"{row['registers']} registers, no spills"
        yield f"  {row['kernel']} {row.get('config', '')}: {found}"
    yield ""
    yield "a small loss against fp64 (errors of logps in nats, of gradients relative):"
    for x in report.numbers:
        found = ", ".join(f"{name} {error:.1e}" for name, error in x.errors.items())
        yield f"  {x.backend} on {x.device}, {x.dtype}: {found}: {'ok' if x.ok else 'WRONG'}"
    yield ""
    yield from (f"FAILED: {text}" for text in report.failures)
    if not report.failures:
        yield "all is well"


def main(target: str | None, as_json: bool) -> int:
    """Prints the report; 1 if something failed.

    Raises:
        ValueError: `target` names no chip.
    """
    report = examine(target)
    if as_json:
        print(json.dumps(asdict(report) | {"failures": report.failures}, indent=1))
    else:
        print("\n".join(lines(report)))
    return 1 if report.failures else 0
