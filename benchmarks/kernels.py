"""One layer's verify, commit, and both, in time and accuracy: ours, the plain path, and the peers' kernels.

    python -m benchmarks.kernels --batch 64 --heads 32 --window 8 --state-dtype bf16 fp32
    python -m benchmarks.kernels --preset targets --json kernels.json
    python -m benchmarks.kernels --preset layers                        # 69 layers of 12 heads, batch 32, one graph

Timing: CUDA graphs of one launch per set of inputs, with so many sets that a launch finds nothing of its own in the L2 cache
(``--warm``: one set, again and again); the providers take turns, medians and quartiles are reported. ``step`` is the
verifies of all sets, then their commits, per set. The floor is the bytes that any implementation must move, over the copy
bandwidth measured in the same run; GB/s counts what the provider itself moves. Errors are relative Frobenius norms against
the float64 recurrence, of some rows and heads of the first set, before anything was timed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console

from benchmarks import peers
from benchmarks.kernel_run import OPERATIONS, ShapeRun
from benchmarks.kernel_table import Header, table
from benchmarks.peer_providers import PEERS
from benchmarks.providers import OURS
from benchmarks.reporting import check_at_least, check_device, replace_text
from benchmarks.shape_options import add_shape_options, check_shape_options, shapes_of
from benchmarks.shapes import PRESETS, Shape
from models.interruption import Interruptible


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, help="in place of the shape's options")
    add_shape_options(parser, batch=[64], heads=[32], window=[8], state_dtype=["bf16"])
    parser.add_argument("--op", choices=OPERATIONS, nargs="+", help="default: all; layers: step")
    parser.add_argument("--accepted", type=int, nargs="+", help="committed tokens; default: 1, T/2, T; layers: T/2")
    parser.add_argument(
        "--providers", choices=(*OURS, *PEERS), nargs="+",
        help="default: recoverssm and the peers, and plain where vllm-native is absent; on the CPU ours",
    )  # fmt: skip
    parser.add_argument(
        "--peers", type=Path, default=Path(".peers"), help="folder filled by python -m benchmarks.peers"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--warm", action="store_true", help="one set of inputs: what fits the L2 cache stays there")
    parser.add_argument("--sets", type=int, help="distinct inputs; default: three times the L2 cache")
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--jobs", type=int, default=0, help="compile in so many processes first")
    parser.add_argument(
        "--compile-only", metavar="I/N", help="compile each N-th shape, time nothing (what --jobs starts)"
    )
    parser.add_argument("--json", type=Path, help="write the rows here, too")
    arguments = parser.parse_args(argv)
    check_shape_options(parser, arguments)
    check_at_least(parser, arguments, accepted=0, sets=1, samples=2, jobs=0)
    check_device(parser, arguments.device)
    return arguments


def default_providers(arguments: argparse.Namespace, found: peers.Peers) -> list[str]:
    if arguments.providers:
        return arguments.providers
    if torch.device(arguments.device).type == "cpu":
        return ["recoverssm", "portable", "plain"]
    plain = ["plain"] if "vllm-native" in found.absent and not arguments.preset else []
    # Its kernel is compiled for the number of layers: once a preset, not once a shape.
    merged = ["recoverssm-merged"] if arguments.preset == "layers" else []
    return ["recoverssm", *merged, *plain, *PEERS]


def compile_in_processes(jobs: int, argv: list[str]) -> None:
    """Fill Triton's cache: every process runs its share of the shapes once."""
    command = [sys.executable, "-m", "benchmarks.kernels", *argv, "--jobs", "0", "--compile-only"]
    started: list[subprocess.Popen] = []
    try:
        for i in range(jobs):
            started.append(subprocess.Popen([*command, f"{i}/{jobs}"], stdout=subprocess.DEVNULL))
        for process in started:
            process.wait()
    finally:
        for process in started:
            process.terminate()


@torch.no_grad()
def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    arguments = parse_arguments(argv)
    found = peers.load(arguments.peers)
    names = default_providers(arguments, found)
    shapes = PRESETS[arguments.preset]() if arguments.preset else shapes_of(arguments)
    if arguments.compile_only:
        index, count = map(int, arguments.compile_only.split("/"))
        cached = [name for name in names if name != "flashinfer"]  # another compiler, which keeps nothing on disk
        for shape in shapes[index::count]:
            ShapeRun(shape, cached, arguments, found).check()
        return 0
    # Wide enough for whole rows where the output is a file.
    console = Console() if sys.stdout.isatty() else Console(width=150)
    started, rows = time.perf_counter(), []
    absent = {name: found.absent[name] for name in names if name in found.absent}
    with Interruptible() as work:
        if arguments.jobs:
            with console.status(f"compiling in {arguments.jobs} processes"):
                compile_in_processes(arguments.jobs, argv)
            console.print(f"compiled in {time.perf_counter() - started:.0f} s")
        header = Header.measured(arguments.device, arguments.warm)
        for number, shape in enumerate(shapes):
            with console.status(f"{number + 1}/{len(shapes)}: {shape}"):
                measured = measure(shape, names, arguments, found, header)
            console.print(table(shape, measured, header, arguments.preset == "layers"))
            for row in measured:
                if "note" in row:
                    console.print(f"{row['provider']}: {row['note']}", highlight=False)
            rows += measured
            if arguments.json:
                document = {"header": asdict(header), "absent": absent, "rows": rows}
                replace_text(arguments.json, json.dumps(document, indent=1) + "\n")
    for name, reason in absent.items():
        console.print(f"absent: {name}: {reason}", highlight=False)
    console.print(f"{time.perf_counter() - started:.0f} s" + ", interrupted" * work.interrupted)
    failed = any("failed" in row.get("note", "") and row["provider"] in OURS for row in rows)
    return 130 if work.interrupted else int(failed)


def measure(
    shape: Shape, names: list[str], arguments: argparse.Namespace, found: peers.Peers, header: Header
) -> list[dict]:
    """Rows of one shape; what it has allocated is given back."""
    torch.compiler.reset()
    run = ShapeRun(shape, names, arguments, found)
    run.check()
    rows = run.rows(header.copy_bytes_per_s)
    run.providers.clear()
    del run
    if torch.device(arguments.device).type == "cuda":
        torch.cuda.empty_cache()
    return rows


if __name__ == "__main__":
    sys.exit(main())
