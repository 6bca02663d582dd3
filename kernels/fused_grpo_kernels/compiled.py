"""Compiling a kernel for a chip that need not be here, and reading what came out."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from fused_grpo_kernels.registry import KernelCase, Target

# Bytes of shared memory that one block may have, by chip; 99 KiB on those that are not here.
SHARED_LIMIT = {
    "sm_80": 163 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_103": 227 * 1024,
    "gfx90a": 64 * 1024,
    "gfx942": 64 * 1024,
    "gfx950": 160 * 1024,
}


def target_named(name: str) -> Target:
    """The target that "sm_90" or "gfx942" names; any chip, not only those of the table.

    Raises:
        ValueError: for any other name.
    """
    if re.fullmatch(r"sm_\d{2,3}", name):
        return Target("cuda", int(name[3:]), 32)
    if re.fullmatch(r"gfx9\w{2}", name):
        return Target("hip", name, 64)
    raise ValueError(f"{name!r} is no target: give sm_<capability>, as sm_90, or gfx9<..>")


def mma_of(name: str) -> str:
    """The matrix instruction of a chip, as PTX or AMD assembly spells it."""
    target = target_named(name)
    if target.backend == "hip":
        return "v_mfma"
    arch = int(target.arch)
    if arch == 90:
        return "wgmma.mma_async"
    return "tcgen05.mma" if 100 <= arch < 120 else "mma.sync"


def compile_case(case: KernelCase, target: Target) -> Any:
    """The compiled kernel, with the types, constants and alignments of a launch.

    Raises whatever Triton raises.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.fn.arg_names
    signature = {name: case.signature.get(name, "constexpr") for name in names}
    # torch allocates on multiples of 16 bytes, and launches tell Triton so
    aligned = {n for n, kind in signature.items() if kind.startswith("*")} | set(case.divisible)
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in aligned}
    source = ASTSource(case.fn, signature=signature, constexprs=dict(case.constexprs), attrs=attrs)
    gpu = GPUTarget(target.backend, target.arch, target.warp_size)
    return triton.compile(source, target=gpu, options=case.config.options)


def cuobjdump(cubin: bytes, flag: str) -> str:
    """Output of the cuobjdump that comes with Triton."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, flag, str(path)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def read_cuda(usage: str, sass: str) -> dict[str, Any]:
    """Registers and stack of `cuobjdump -res-usage`, spills and instructions of `-sass`."""
    found = {key: int(x) for key, x in re.findall(r"\b(REG|STACK):(\d+)", usage)}
    instructions = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", sass)
    return {
        "registers": found["REG"],
        "stack": found["STACK"],
        "spills": sum(x.split(".")[0] in ("LDL", "STL") for x in instructions),
        "instructions": sum(x != "NOP" for x in instructions),
    }


def read_amdgcn(text: str) -> dict[str, Any]:
    """What the assembly's metadata and its instructions say."""

    def metadata(key: str) -> int:
        match = re.search(rf"^\s*\.{key}:\s+(\d+)", text, re.M)
        if match is None:
            raise ValueError(f"the assembly has no .{key}")
        return int(match.group(1))

    lines = re.findall(r"^\t([a-z]+_\w+)", text, re.M)
    return {
        "registers": metadata("vgpr_count"),
        "stack": metadata("private_segment_fixed_size"),
        # scalar registers spill into lanes of vector registers, not to memory
        "spills": metadata("vgpr_spill_count"),
        "mma": sum(x.startswith("v_mfma") for x in lines),
        "instructions": sum(x.startswith(("v_", "s_", "ds_", "buffer_", "global_")) for x in lines),
    }


def count_instructions(assembly: str, name: str) -> int:
    return len(re.findall(rf"^\s*(?:@!?%\w+\s+)?{re.escape(name)}\b", assembly, re.M))
