"""The static gate compiles what launches may choose, and sees what is wrong with a kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

from fused_grpo_kernels import gate
from fused_grpo_kernels.compiled import count_instructions, mma_of, read_amdgcn, read_cuda
from fused_grpo_kernels.gate import Record, changes, problems
from fused_grpo_kernels.registry import TARGETS, kernel_cases

ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}


def run(*arguments: str, env: dict[str, str] = ENVIRONMENT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=280)


# --- compiling -----------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_one_configuration_of_every_kernel_passes(target):
    """K5: Registers, spills and shared memory of every kernel are inside the chip's limits."""
    done = run("-m", "fused_grpo_kernels.gate", "--one-each", "--target", target)
    assert done.returncode == 0, done.stdout + done.stderr
    kernels = {case.fn.__name__ for case in kernel_cases(TARGETS[target])}
    assert f" {len(kernels)} compilations, 0 failed" in done.stdout


def test_it_compiles_for_a_chip_that_has_no_table():
    done = run(
        "-m", "fused_grpo_kernels.gate", "--kernel", "policy/", "--target", "sm_89", "--json"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["target"] for row in rows} == {"sm_89"}
    assert all(row["registers"] > 0 and row["problems"] == [] for row in rows)


@pytest.mark.parametrize("name", ["sm90", "h200", "sm_", "gfx1100"])
def test_an_unknown_target_is_refused(name, capsys):
    assert gate.main(["--target", name]) == 2
    assert name in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--check", "--out", "/nowhere"], "make it with --update"),
        (["--update", "--out", "/nowhere"], "no folder /nowhere"),
        (["--update", "--one-each"], "leave the selection out"),
        (["--update", "--target", "sm_90"], "leave the selection out"),
    ],
)
def test_tables_that_cannot_be_read_or_written_are_refused(monkeypatch, capsys, arguments, said):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert gate.main(arguments) == 2
    assert said in capsys.readouterr().err


def test_it_refuses_to_run_interpreted():
    done = run("-m", "fused_grpo_kernels.gate", env={**ENVIRONMENT, "TRITON_INTERPRET": "1"})
    assert done.returncode == 2
    assert "TRITON_INTERPRET" in done.stderr


BAD_KERNELS = '''
import triton
import triton.language as tl
from fused_grpo_kernels.registry import Config, KernelCase

@triton.jit
def spilling(x, out, N: tl.constexpr):
    """N * N values held at once by one warp."""
    i = tl.arange(0, N)
    a = tl.load(x + i[:, None] * N + i[None, :])
    tl.store(out + i[None, :] * N + i[:, None], a + tl.sum(a, 1)[:, None] * tl.max(a, 0)[None, :])

@triton.jit
def wrong(x, out, N: tl.constexpr):
    tl.store(out, tl.load(x + tl.arange(0, N + 1)))

@triton.jit
def fine(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i))

@triton.jit
def product(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i[:, None] * N + i[None, :])
    tl.store(out + i[:, None] * N + i[None, :], tl.dot(a, a).to(tl.float16))

def cases(target):
    signature = {"x": "*fp16", "out": "*fp16"}
    for fn, n, warps, mma in (
        (spilling, 256 if target.backend == "hip" else 128, 1, False),
        (wrong, 64, 4, False),
        (fine, 64, 4, True),
        (product, 128, 4, True),
    ):
        config = Config({"N": n}, warps, 1)
        yield KernelCase(fn.__name__, fn, signature, {"N": n}, config, "fp16", mma)
'''
RUN_BAD = """
import sys
sys.path.insert(0, sys.argv[1])
import bad_kernels
from fused_grpo_kernels import gate
gate.kernel_cases = bad_kernels.cases
sys.exit(gate.main())
"""


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    """What the gate says about kernels with one fault each, on all targets."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "bad_kernels.py").write_text(BAD_KERNELS)
    script = folder / "run_bad.py"
    script.write_text(RUN_BAD.replace("gate.main()", "gate.main([])"))
    done = run(str(script), str(folder))
    assert done.returncode == 1, done.stdout + done.stderr
    return {tuple(line.split()[:2]): line for line in done.stdout.splitlines()}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("kernel", "fault"),
    [
        ("spilling", "spills: "),
        ("wrong", "does not compile: "),
        ("fine", "no {mma}"),
        ("product", ": ok"),
    ],
)
def test_it_sees_faults(bad, target, kernel, fault):
    assert fault.format(mma=mma_of(target)) in bad[target, kernel]


# --- the committed tables ------------------------------------------------------------------------


def test_a_table_is_committed_for_each_supported_release():
    """K6: Each release of Triton that is supported has compiled all kernels."""
    names = {path.name for path in gate.TABLES.glob("static-gate-triton-*.json")}
    assert names >= {"static-gate-triton-3.6.json", "static-gate-triton-3.9.json"}


@pytest.mark.parametrize("path", sorted(gate.TABLES.glob("static-gate-triton-*.json")))
def test_committed_tables_hold_every_configuration_and_all_passed(path):
    table = gate.read_table(path)
    needed = {
        (name, case.name, gate.describe(case), case.dtype): case.needs_mma
        for name, target in TARGETS.items()
        for case in kernel_cases(target)
    }
    assert table.keys() == needed.keys(), "run python -m fused_grpo_kernels.gate --update"
    assert not {key: p for key, row in table.items() if (p := problems(row, needed[key]))}


def test_every_compilation_says_whether_multiply_adds_are_fused():
    """Releases of Triton differ in the default, and unfused ones cost registers."""
    for target in TARGETS.values():
        for case in kernel_cases(target):
            assert case.config.options["enable_fp_fusion"] is True


def test_tables_survive_writing_and_reading(tmp_path):
    rows = [Record("sm_90", "a", "N=1", "bf16", registers=8), Record("sm_80", "b", "N=2", "fp16")]
    path = tmp_path / "table.json"
    gate.write_table(rows, path)
    assert gate.read_table(path) == {row.key: row for row in rows}
    assert "| sm_90 | a | N=1 | bf16 | 8 |" in path.with_suffix(".md").read_text()


ROW = Record("sm_90", "k", "N=1", "bf16", None, 100, 0, 0, 4096, 32, 1000)


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        ({}, False),
        ({"registers": 108}, False),
        ({"registers": 109}, True),
        ({"instructions": 950}, False),
        ({"instructions": 1051}, True),
        ({"shared": 5121}, True),
        ({"mma": 31}, True),
        ({"stack": 8}, True),
        ({"spills": 1}, True),
        ({"error": "no"}, True),
    ],
)
def test_changes_beyond_the_margins_are_reported(change, seen):
    assert bool(changes(ROW, replace(ROW, **change))) is seen


@pytest.mark.parametrize(
    ("row", "needs_mma", "text"),
    [
        (ROW, True, None),
        (replace(ROW, mma=0), False, None),
        (replace(ROW, mma=0), True, "no wgmma"),
        (replace(ROW, stack=8), True, "8 bytes of stack"),
        (replace(ROW, spills=2), True, "2 spilled"),
        (replace(ROW, shared=228 * 1024), True, "limit 232448"),
        (replace(ROW, error="TypeError: x"), True, "TypeError: x"),
    ],
)
def test_problems_name_what_is_wrong(row, needs_mma, text):
    found = problems(row, needs_mma)
    assert (not found) if text is None else (len(found) == 1 and text in found[0])


# --- reading what the tools print ----------------------------------------------------------------


def test_read_cuda():
    usage = " Function k:\n  REG:52 STACK:16 SHARED:0 LOCAL:0 CONSTANT[0]:432 TEXTURE:0\n"
    sass = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;    /* 0x00000a0000017a02 */
        /*0010*/              @!P0 BRA 0x30 ;                /* 0x000fe20000000f00 */
        /*0020*/                   STL.64 [R1], R14 ;        /* 0x000fe20000000f00 */
        /*0030*/               @P1 LDL R14, [R1] ;           /* 0x000fe20000000f00 */
        /*0040*/                   NOP;                      /* 0x000fe20000000f00 */
    """
    assert read_cuda(usage, sass) == {"registers": 52, "stack": 16, "spills": 2, "instructions": 4}


def test_read_amdgcn():
    text = """
\ts_load_dwordx2 s[2:3], s[0:1], 0x0
\tv_mfma_f32_32x32x8_bf16_1k a[0:15], v[0:1], v[2:3], a[0:15]
\t.amdhsa_next_free_vgpr 40
    .private_segment_fixed_size: 12
    .sgpr_spill_count: 1
    .vgpr_count:     40
    .vgpr_spill_count: 3
"""
    want = {"registers": 40, "stack": 12, "spills": 3, "mma": 1, "instructions": 2}
    assert read_amdgcn(text) == want
    with pytest.raises(ValueError, match="vgpr_count"):
        read_amdgcn("\ts_endpgm\n")


def test_mma_is_counted_where_it_stands_as_an_instruction():
    ptx = "\twgmma.mma_async.sync.aligned.m64n256k16 {%f1};\n\t@%p1 wgmma.mma_async.x;\n"
    ptx += "// wgmma.mma_async"
    assert count_instructions(ptx, "wgmma.mma_async") == 2


def test_tables_live_where_the_command_says():
    assert gate.table_path(Path("x")) == Path(f"x/static-gate-triton-{gate.release()}.json")
