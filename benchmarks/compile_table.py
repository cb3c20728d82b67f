"""Every kernel variant compiled for every generation of GPUs: registers, shared memory, spills.

    python -m benchmarks.compile_table              # what differs from the pinned table
    python -m benchmarks.compile_table --update     # write tests/compile_table.txt anew

Needs no GPU. The pinned table holds for the Triton version that it names; tests/test_compile_table.py compares.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import triton

from benchmarks.compilation import Compiled, compile_launch, only_launch
from benchmarks.kernel_variants import VARIANTS

ARCHITECTURES = (80, 90, 100, 120)
ENDS = (80, 120)  # the oldest and the newest, for kernels with registers to spare, or with another kernel's arithmetic
PATH = Path(__file__).resolve().parent.parent / "tests" / "compile_table.txt"
_HEADER = """\
# Kernels as compiled by triton {version}: warps, then registers/shared bytes/spilled bytes for each architecture.
# Regenerate with: python -m benchmarks.compile_table --update
"""


@dataclass(frozen=True)
class Row:
    """One variant: the kernel that the launcher chose, its warps, and a cell for each architecture."""

    kernel: str
    warps: int
    cells: dict[int, tuple[int, int, int]]


@dataclass(frozen=True)
class CompileTable:
    triton: str
    rows: dict[str, Row]

    def __str__(self) -> str:
        lines = [("variant", "kernel", "warps", *(f"sm_{arch}" for arch in ARCHITECTURES))]
        for name, row in self.rows.items():
            cells = ("/".join(map(str, row.cells[arch])) if arch in row.cells else "-" for arch in ARCHITECTURES)
            lines.append((name, row.kernel, str(row.warps), *cells))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = ("  ".join(x.ljust(w) for x, w in zip(line, widths, strict=True)).rstrip() for line in lines)
        return _HEADER.format(version=self.triton) + "\n".join(text) + "\n"

    @classmethod
    def parse(cls, text: str) -> CompileTable:
        version = text.split("triton ", 1)[1].split(":", 1)[0]
        lines = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
        architectures = [int(name.removeprefix("sm_")) for name in lines[0][3:]]
        rows = {}
        for name, kernel, warps, *cells in lines[1:]:
            present = [(arch, cell) for arch, cell in zip(architectures, cells, strict=True) if cell != "-"]
            rows[name] = Row(kernel, int(warps), {arch: tuple(map(int, cell.split("/"))) for arch, cell in present})
        return cls(version, rows)


def architectures_of(name: str) -> tuple[int, ...]:
    return ENDS if name.startswith(("conv", "commit_layers")) else ARCHITECTURES


def compile_variant(name: str, arch: int) -> Compiled:
    build, settings = VARIANTS[name]
    return compile_launch(only_launch(build(**settings)), arch)


def _figures(name: str, arch: int) -> tuple[str, int, tuple[int, int, int]]:
    compiled = compile_variant(name, arch)
    return compiled.kernel, compiled.num_warps, (compiled.registers, compiled.shared_bytes, compiled.spilled_bytes)


def compile_all(jobs: int, names: list[str]) -> CompileTable:
    pairs = [(name, arch) for name in names for arch in architectures_of(name)]
    with concurrent.futures.ProcessPoolExecutor(jobs) as pool:
        figures = dict(zip(pairs, pool.map(_figures, *zip(*pairs, strict=True)), strict=True))
    rows = {}
    for name in names:
        kernel, warps, _ = figures[name, ARCHITECTURES[0]]
        rows[name] = Row(kernel, warps, {arch: figures[name, arch][2] for arch in architectures_of(name)})
    return CompileTable(triton.__version__, rows)


def differences(pinned: CompileTable, actual: CompileTable) -> list[str]:
    """One line for each variant that is not as pinned."""
    lines = []
    for name in {**pinned.rows, **actual.rows}:
        before, after = pinned.rows.get(name), actual.rows.get(name)
        if before != after:
            lines.append(f"{name}:\n  pinned {before}\n  now    {after}")
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compile_table", description=__doc__.splitlines()[0])
    parser.add_argument("--update", action="store_true", help=f"write {PATH.name}")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--only", nargs="+", choices=VARIANTS, metavar="VARIANT", help="print these, compare nothing")
    arguments = parser.parse_args(argv)
    actual = compile_all(arguments.jobs, arguments.only or list(VARIANTS))
    if arguments.only:
        print(actual, end="")
        return 0
    if arguments.update:
        PATH.write_text(str(actual))
        print(f"wrote {PATH}")
        return 0
    print(actual, end="")
    pinned = CompileTable.parse(PATH.read_text())
    different = differences(pinned, actual)
    if pinned.triton != actual.triton:
        print(f"The pinned table is of triton {pinned.triton}.")
    print("\n".join(different) or "As pinned.")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
