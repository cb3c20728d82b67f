"""The previous step's commit fused into the next verify: is it worth it? One kernel against the two of the library.

    python -m benchmarks.fused --json fused.json

A step commits ``--accepted`` tokens of the previous window and verifies the next one. The library's kernels run in the order of
a serving engine, all commits and then all verifies (and with the commits of all layers merged into one launch, and with
each layer's verify right after its commit); the fused kernel does both for a layer at once. Each way is one CUDA graph over so
many layers that none finds its own state in the L2 cache; the ways take turns; medians and quartiles are reported, per
layer. The fused kernel's launch parameters are the best of a sweep for each shape, the library's are its launchers'
choice. The floor is the bytes that must move over the copy bandwidth measured in the same run. Errors are relative Frobenius
norms against the float64 recurrence: of the committed state from the initial one, of u from the committed one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from dataclasses import asdict
from itertools import product
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import floors, fused_compile
from benchmarks import kernel_timing as timing
from benchmarks.fused_kernel import Config
from benchmarks.fused_trial import FUSED, SEPARATE, WAYS, FusedTrial, Sweep, time_trial
from benchmarks.kernel_table import Header
from benchmarks.launch_sweep import Figures
from benchmarks.reporting import check_at_least, check_device, console_for_tables
from benchmarks.shapes import DTYPES, Shape


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fused", description=__doc__.splitlines()[0])
    several = {"type": int, "nargs": "+"}
    parser.add_argument("--batch", default=[1, 8, 64], **several)
    parser.add_argument("--heads", default=[32, 12], **several)
    parser.add_argument("--window", type=int, default=8, help="T = 1 + drafts")
    parser.add_argument("--accepted", type=int, default=4, help="tokens of the previous window to commit")
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--state-dtype", choices=DTYPES, nargs="+", default=["bf16", "fp32"])
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of q, k, v, g, beta")
    parser.add_argument("--gate", choices=("bounded", "unbounded"), default="bounded")
    parser.add_argument("--block-v", default=[16, 32, 64, 128], help="rows of state in a tile", **several)
    parser.add_argument("--warps", default=[1, 2, 4, 8], **several)
    parser.add_argument("--stages", default=[1, 2, 3], **several)
    parser.add_argument("--seconds", type=float, default=60.0, help="for all of it; 0.6 of it may go to compiling")
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--sets", type=int, help="layers of a replay; default: three times the L2 cache")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that compile")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    arguments = parser.parse_args(argv)
    check_at_least(parser, arguments, batch=1, heads=1, window=1, accepted=0, samples=2, sets=1, jobs=1)
    if arguments.accepted > arguments.window:
        parser.error(f"--accepted should be at most the window of {arguments.window}, got {arguments.accepted}")
    check_device(parser, arguments.device)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if torch.device(arguments.device).type == "cpu" and not interpreted:
        parser.error(
            "--device cpu: a Triton kernel runs there with TRITON_INTERPRET=1 alone, and its times mean nothing"
        )
    return arguments


def shapes_of(arguments: argparse.Namespace) -> list[Shape]:
    return [
        Shape(batch, heads, arguments.window, pool, arguments.head_size, 0, arguments.gate, False, arguments.dtype)
        for pool, heads, batch in product(arguments.state_dtype, arguments.heads, arguments.batch)
    ]


def candidates(arguments: argparse.Namespace) -> list[Config]:
    """Launch parameters to try: 4 to 32 rows a warp; a head's values by one program, or a tile by each of several.

    Stages are for loops of more than one tile.
    """
    widest, fewest = max(16, 1 << (arguments.head_size - 1).bit_length()), min(arguments.stages)
    configs = []
    for stages, rows, warps in product(sorted(arguments.stages), arguments.block_v, arguments.warps):
        if rows <= widest and 4 <= rows / warps <= 32:
            parts = [part for part in (widest, rows) if stages == fewest or rows < part]
            configs += [
                {"BV": rows, "PART": part, "num_warps": warps, "STAGES": stages} for part in dict.fromkeys(parts)
            ]
    return configs


def sets_of(shape: Shape, arguments: argparse.Namespace) -> int:
    return arguments.sets or timing.sets_for_cold(floors.verify_bytes(shape), arguments.device)


def compile_sweeps(shapes: list[Shape], arguments: argparse.Namespace, deadline: float) -> dict[Shape, Sweep]:
    """The configurations of every shape, compiled; interpreted kernels are not."""
    configs = candidates(arguments)
    sweeps = {shape: Sweep(configs) for shape in shapes}
    if torch.device(arguments.device).type == "cpu":
        for sweep in sweeps.values():
            sweep.figures = {at: Figures() for at in range(len(configs))}
        return sweeps
    major, minor = torch.cuda.get_device_capability(arguments.device)
    arch = 10 * major + minor
    needed = [task for shape in shapes for task in fused_compile.library_tasks(shape, sets_of(shape, arguments), arch)]
    tried = {(shape, at): fused_compile.task(FUSED, shape, config, arch)
             for at, config in enumerate(configs) for shape in shapes}  # fmt: skip
    figures = fused_compile.compile_all([*needed, *tried.values()], arguments.jobs, deadline)
    for (shape, at), task in tried.items():
        if task in figures:
            sweeps[shape].figures[at] = figures[task]
    return sweeps


def row_of(trial: FusedTrial, sweep: Sweep, measured: dict, bandwidth: float) -> dict:
    ways = {}
    for name, t in measured["timings"].items():
        floor = 1e6 * trial.bytes_of(name) / bandwidth
        ways[name] = {
            "us": t.median,
            "us_quartiles": [t.low, t.high],
            "floor_us": floor,
            "times_floor": t.median / floor,
        }
    at = measured["config"]
    row = {**asdict(trial.shape), "accepted": trial.accepted, "sets": trial.sets, "ways": ways}
    row |= {"errors": measured["errors"], "equal": measured.get("equal")}
    if at is not None:
        row["config"] = sweep.configs[at] | asdict(sweep.figures[at])
        row["fused_over_separate"] = ways[FUSED]["us"] / ways[SEPARATE]["us"]
    return row | {"sweep": sweep.as_json(), "candidates": len(sweep.configs)}


def times_table(rows: list[dict], title: str) -> Table:
    """Each way's time, and how many times its floor that is; a floor of the fused kernel and one of all others."""
    table = Table(title=title, title_justify="left")
    for column in ("pool", "H", "B"):
        table.add_column(column)
    for name in WAYS:
        table.add_column(f"{name}, µs", justify="right", no_wrap=True)
        table.add_column("x", justify="right")
    for column in ("floors, µs", "fused / separate"):
        table.add_column(column, justify="right")
    for row in rows:
        cells = []
        for name in WAYS:
            way = row["ways"].get(name)
            if way is None:
                cells += ["-", "-"]
            else:
                low, high = way["us_quartiles"]
                cells += [f"{_us(way['us'])} ({_us(low)}..{_us(high)})", f"{way['times_floor']:.2f}"]
        floors_of = [_us(row["ways"][name]["floor_us"]) for name in (SEPARATE, FUSED) if name in row["ways"]]
        ratio = row.get("fused_over_separate")
        table.add_row(*_name(row), *cells, " | ".join(floors_of), "-" if ratio is None else f"{ratio:.2f}")
    return table


def _us(microseconds: float) -> str:
    return f"{microseconds:.{1 if microseconds >= 10 else 2}f}"


def _name(row: dict) -> tuple[str, str, str]:
    return row["state_dtype"], str(row["heads"]), str(row["batch"])


def details_table(rows: list[dict]) -> Table:
    table = Table(
        title="The fused kernel, and errors: separate kernels | fused (share of equal elements)", title_justify="left"
    )
    for column in (
        "pool",
        "H",
        "B",
        "BV",
        "part",
        "warps",
        "stages",
        "registers",
        "spilled",
        "timed",
        "state",
        "u",
        "o",
    ):
        table.add_column(column, justify="left" if column == "pool" else "right")
    for row in rows:
        config = row.get("config", {})
        cells = [config.get(name, "-") for name in ("BV", "PART", "num_warps", "STAGES", "registers", "spilled_bytes")]
        timed = sum(entry["us"] is not None for entry in row["sweep"])
        errors = []
        for name in ("state", "u", "o"):
            values = [f"{row['errors'][way][name]:.1e}" for way in (SEPARATE, FUSED) if way in row["errors"]]
            share = f" ({100 * row['equal'][name]:.1f} %)" if row["equal"] else ""
            errors.append(" | ".join(values) + share)
        table.add_row(*_name(row), *map(str, cells), f"{timed}/{row['candidates']}", *errors)
    return table


def verdict(rows: list[dict]) -> list[str]:
    """One line a pool dtype and number of heads: at which batches the fused kernel is the faster one."""
    lines = []
    for (pool, heads), group in itertools.groupby(rows, lambda row: (row["state_dtype"], row["heads"])):
        parts = []
        for row in group:
            if FUSED not in row["ways"]:
                parts.append(f"B {row['batch']} not measured")
                continue
            fused = row["ways"][FUSED]["us"]
            slower = [name for name, way in row["ways"].items() if name != FUSED and way["us"] <= fused]
            parts.append(f"B {row['batch']} {'loses to ' + ', '.join(slower) if slower else 'wins'}")
        lines.append(f"{pool} pool, H {heads}: " + "; ".join(parts))
    return lines


@torch.no_grad()
def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    started = time.monotonic()
    end = started + arguments.seconds
    console: Console = console_for_tables()
    shapes = shapes_of(arguments)
    with console.status("compiling"):
        sweeps = compile_sweeps(shapes, arguments, started + 0.6 * arguments.seconds)
    compiling = time.monotonic() - started
    header = Header.measured(arguments.device, False)
    rows = []
    for number, shape in enumerate(shapes):
        share = (end - time.monotonic()) / (len(shapes) - number)
        with console.status(f"{number + 1}/{len(shapes)}: {shape}"):
            trial = FusedTrial(shape, sets_of(shape, arguments), arguments.accepted, arguments.device)
            # A quarter of the time is for building the inputs and for the comparison after the sweep.
            measured = time_trial(trial, sweeps[shape], arguments.samples, time.monotonic() + 0.75 * share)
            rows.append(row_of(trial, sweeps[shape], measured, header.copy_bytes_per_s))
            del trial
            if torch.device(arguments.device).type == "cuda":
                torch.cuda.empty_cache()
    title = f"T {arguments.window}, {arguments.accepted} accepted, {header.device}, torch {header.torch}, "
    title += f"triton {header.triton}, copy {1e-12 * header.copy_bytes_per_s:.2f} TB/s; per layer"
    console.print(times_table(rows, title), details_table(rows))
    for line in verdict(rows):
        console.print(line, highlight=False)
    failures = sorted({entry["failure"] for row in rows for entry in row["sweep"] if entry["failure"]})
    for failure in failures:
        console.print(f"not timed: {failure}", highlight=False)
    console.print(f"{time.monotonic() - started:.0f} s, of which compiling {compiling:.0f} s")
    if arguments.json:
        document = {"header": asdict(header), "rows": rows}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    return int(any(FUSED not in row["ways"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
