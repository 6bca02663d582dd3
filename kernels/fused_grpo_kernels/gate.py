"""The static gate: every kernel and configuration, compiled ahead of time, without a GPU.

    python -m fused_grpo_kernels.gate --check     compile all, compare with the committed table
    python -m fused_grpo_kernels.gate --update    compile all, write the table

A configuration passes if it compiles, keeps everything in registers (no stack, no spill), fits the
chip's shared memory, and holds the tensor-core instructions of its chip where it multiplies
matrices. Registers and instructions go into a table, one for each release of Triton, so that a
change of the code or of the compiler shows as a difference.

Exit status: 0 all passed, 1 something did not, 2 it could not run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fused_grpo_kernels.compiled import (
    SHARED_LIMIT,
    compile_case,
    count_instructions,
    cuobjdump,
    mma_of,
    read_amdgcn,
    read_cuda,
    target_named,
)
from fused_grpo_kernels.registry import TARGETS, KernelCase, kernel_cases

# How far counts may drift before --check calls it a change. What is yes or no has no margin.
MARGIN = {"registers": 8, "instructions": 0.05, "shared": 1024}
TABLES = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


@dataclass(frozen=True)
class Record:
    """What one compilation gave: a row of the table."""

    target: str
    kernel: str
    config: str
    dtype: str
    error: str | None = None  # of the compiler, first line
    registers: int = 0
    stack: int = 0  # bytes of stack (CUDA) or scratch (ROCm) a thread
    spills: int = 0  # local loads and stores (CUDA), spilled vector registers (ROCm)
    shared: int = 0  # bytes
    mma: int = 0  # matrix instructions
    instructions: int = 0

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.target, self.kernel, self.config, self.dtype


def describe(case: KernelCase) -> str:
    """The configuration of a case in a few words."""
    numbers = [f"{k}={int(v)}" for k, v in case.config.constexprs.items()]
    return " ".join(
        [*numbers, f"warps={case.config.num_warps}", f"stages={case.config.num_stages}"]
    )


def measure(case: KernelCase, name: str) -> Record:
    """Compiles a case for the target `name` and reads what came out."""
    row = Record(name, case.name, describe(case), case.dtype)
    try:
        compiled = compile_case(case, target_named(name))
    except Exception as error:  # the table has to name what does not compile, whatever it raises
        text = str(error).strip() or type(error).__name__
        return replace(row, error=f"{type(error).__name__}: {text.splitlines()[0]}"[:200])
    shared = int(compiled.metadata.shared)
    if target_named(name).backend == "hip":
        return replace(row, shared=shared, **read_amdgcn(compiled.asm["amdgcn"]))
    usage, sass = (cuobjdump(compiled.asm["cubin"], flag) for flag in ("-res-usage", "-sass"))
    mma = count_instructions(compiled.asm["ptx"], mma_of(name))
    return replace(row, shared=shared, mma=mma, **read_cuda(usage, sass))


def problems(row: Record, needs_mma: bool) -> list[str]:
    """What keeps a configuration out; empty if it passes."""
    if row.error is not None:
        return [f"does not compile: {row.error}"]
    found = []
    if row.stack or row.spills:
        found.append(f"spills: {row.stack} bytes of stack, {row.spills} spilled")
    limit = SHARED_LIMIT.get(row.target, 99 * 1024)
    if row.shared > limit:
        found.append(f"{row.shared} bytes of shared memory, limit {limit}")
    if needs_mma and not row.mma:
        found.append(f"no {mma_of(row.target)}")
    return found


def changes(old: Record, new: Record) -> list[str]:
    """What differs from the committed row by more than its margin."""
    found = []
    for field, value in asdict(new).items():
        before = getattr(old, field)
        margin = MARGIN.get(field, 0)
        if isinstance(margin, float):
            margin = max(16, int(margin * before))
        same = abs(value - before) <= margin if isinstance(value, int) else value == before
        if not same:
            found.append(f"{field} was {before}, is {value}")
    return found


def selected(target: str, kernels: list[str] | None, one_each: bool) -> Iterator[KernelCase]:
    """The cases of a target, or one of each kernel: the last, which has most switched on."""
    seen: dict[str, KernelCase] = {}
    for case in kernel_cases(target_named(target)):
        if kernels and not any(k in case.name for k in kernels):
            continue
        if not one_each:
            yield case
        seen[case.fn.__name__] = case
    if one_each:
        yield from seen.values()


def release() -> str:
    """Major and minor version of Triton: what a table belongs to."""
    import triton

    return ".".join(triton.__version__.split(".")[:2])


def table_path(folder: Path = TABLES) -> Path:
    return folder / f"static-gate-triton-{release()}.json"


def read_table(path: Path) -> dict[tuple[str, str, str, str], Record]:
    rows = [Record(**row) for row in json.loads(path.read_text())["rows"]]
    return {row.key: row for row in rows}


def write_table(rows: Iterable[Record], path: Path) -> None:
    """The rows as JSON, one a line, and as a Markdown table beside it."""
    rows = sorted(rows, key=lambda r: r.key)
    lines = ",\n".join(json.dumps(asdict(row)) for row in rows)
    path.write_text(f'{{"triton": "{release()}", "rows": [\n{lines}\n]}}\n')
    columns = list(asdict(rows[0]))
    columns.remove("error")
    head = f"Static gate, Triton {release()}: `python -m fused_grpo_kernels.gate --update`\n\n"
    table = [" | ".join(columns), " | ".join("---" for _ in columns)]
    table += [" | ".join(str(getattr(row, c)) for c in columns) for row in rows]
    path.with_suffix(".md").write_text(head + "\n".join(f"| {line} |" for line in table) + "\n")


def parse(argv: list[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser("python -m fused_grpo_kernels.gate", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--target", nargs="+", metavar="NAME", default=list(TARGETS), help="sm_90, gfx942, ...")
    add("--kernel", nargs="+", metavar="NAME", help="only kernels whose name contains one of these")
    add("--one-each", action="store_true", help="only one configuration of each kernel")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="compare with the committed table")
    what.add_argument("--update", action="store_true", help="write the table (all of it)")
    add("--json", action="store_true", help="print a line of JSON per compilation")
    add("--out", type=Path, default=TABLES, help="folder of the tables")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        for name in args.target:
            target_named(name)
    except ValueError as error:
        print(f"gate: --target: {error}", file=sys.stderr)
        return 2
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        print("gate: TRITON_INTERPRET is set: nothing would be compiled", file=sys.stderr)
        return 2
    whole = not args.kernel and not args.one_each and args.target == list(TARGETS)
    if args.update and not whole:
        print("gate: --update writes the whole table: leave the selection out", file=sys.stderr)
        return 2
    if args.update and not args.out.is_dir():
        print(f"gate: there is no folder {args.out} for the table", file=sys.stderr)
        return 2
    path = table_path(args.out)
    if args.check and not path.exists():
        print(f"gate: {path} is missing: make it with --update", file=sys.stderr)
        return 2
    committed = read_table(path) if args.check else {}
    rows: list[Record] = []
    failures, start = 0, time.perf_counter()
    for target in args.target:
        for case in selected(target, args.kernel, args.one_each):
            row = measure(case, target)
            wrong = problems(row, case.needs_mma)
            if args.check and row.key not in committed:
                wrong.append("not in the committed table: run --update")
            elif args.check:
                wrong += changes(committed[row.key], row)
            text = json.dumps(asdict(row) | {"problems": wrong}) if args.json else None
            print(text or report_line(row, wrong), flush=True)
            failures += bool(wrong)
            rows.append(row)
    if args.check and whole:
        for key in committed.keys() - {row.key for row in rows}:
            print(f"{' '.join(key)}: only in the committed table: run --update")
            failures += 1
    if args.update and not failures:
        write_table(rows, path)
        print(f"wrote {path} and .md")
    seconds = time.perf_counter() - start
    if args.json:
        return 1 if failures else 0
    print(f"Triton {release()}: {len(rows)} compilations, {failures} failed, {seconds:.0f} s")
    return 1 if failures else 0


def report_line(row: Record, wrong: list[str]) -> str:
    if row.error is None:
        numbers = (
            f"{row.registers} registers, {row.shared} B shared, {row.instructions} instructions"
        )
        numbers += f", {row.mma} x {mma_of(row.target)}" if row.mma else ""
    else:
        numbers = "-"
    return f"{' '.join(row.key)}: {numbers}: {'; '.join(wrong) if wrong else 'ok'}"


if __name__ == "__main__":
    sys.exit(main())
