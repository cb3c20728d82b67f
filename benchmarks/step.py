"""Time and memory of one compiled speculative step: the untouched model against the model through the pass.

    python -m benchmarks.step --preset kimi_linear --batch 1 8 32 128 --drafts 7

Every way runs the same :class:`models.speculation.SpeculativeStep`, compiled by Inductor, once as it is and once through the
pass; on a GPU each of them launched from the host and captured as one CUDA graph. Timing: the ways of one batch size
alternate, every sample is one step between CUDA events (on the CPU: the clock), the median and the quartiles are reported.
The pools are as large as the batch, so nothing but the batch decides whether the states fit a cache. Accepted lengths
differ per row and are forced; tokens/s is their sum over the median step.

Compilation takes most of the run. Every batch size has a process of its own; they compile at once, and take their times one
after the other when the device is idle. What an interrupted run (Ctrl-C, SIGTERM) has measured is shown all the same, and the
JSON is written after every batch size.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

# Read when torch is imported: the profiler that measures memory would announce itself on the terminal.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
from rich.table import Table

from benchmarks.reporting import (
    available_cores,
    check_at_least,
    check_device,
    console_for_tables,
    machine,
    progress_over,
    write_json,
)
from benchmarks.step_ways import DTYPES, KEPT, MERGED, REWRITTEN, SEPARATE, UNTOUCHED, Setting
from benchmarks.step_workers import in_processes, in_this_process
from compile_passes.reporting.report import readable
from models.config import PRESETS
from models.interruption import Interruptible


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, default="kimi_linear")
    parser.add_argument("--batch", type=int, nargs="+", default=[32], help="batch sizes, one or more")
    parser.add_argument("--drafts", type=int, default=7)
    parser.add_argument(
        "--accepted", type=float, help="mean tokens accepted, 1 .. 1 + drafts (default: uniform lengths)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="weights and activations")
    parser.add_argument("--state-dtype", choices=DTYPES, default="fp32", help="recurrent pools")
    parser.add_argument(
        "--merge-layers",
        action=argparse.BooleanOptionalAction,
        help="a further way: commits of all layers in one launch, or not (the pass does it on CUDA)",
    )
    parser.add_argument(
        "--keep-convolutions", action="store_true", help="a further way: short convolutions are left to Inductor"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--cudagraphs",
        action=argparse.BooleanOptionalAction,
        help="also capture each step as one CUDA graph (default: on a GPU)",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        help="batch sizes that compile at once, and hold their memory until all of them are timed; 1: one after the other, "
        "in this process (default: as many as there are pairs of cores)",
    )
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    return parser


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argument_parser()
    arguments = parser.parse_args(argv)
    check_at_least(parser, arguments, batch=1, drafts=0, samples=2, jobs=1)
    check_device(parser, arguments.device)
    # Negated so that NaN is refused too.
    if arguments.accepted is not None and not 1 <= arguments.accepted <= 1 + arguments.drafts:
        parser.error(f"--accepted should be in 1..{1 + arguments.drafts}, 1 + drafts, got {arguments.accepted}")
    on_gpu = torch.device(arguments.device).type == "cuda"
    if arguments.cudagraphs is None:
        arguments.cudagraphs = on_gpu
    if arguments.cudagraphs and not on_gpu:
        parser.error("--cudagraphs needs --device cuda")
    arguments.batch = list(dict.fromkeys(arguments.batch))
    if arguments.jobs is None:
        arguments.jobs = max(1, min(len(arguments.batch), available_cores() // 2))
    return arguments


def report(figures: list[dict], setting: Setting, title: str) -> Table:
    table = Table(title=title)
    columns = ("batch", "way", "", "step ms (quartiles)", "times untouched", "tokens/s", "peak memory of a step")
    for column in (*columns, "of one position's states", "graph's memory", "compiled in s"):
        table.add_column(column, justify="left" if column in ("way", "") else "right", no_wrap="quartiles" in column)
    for f in figures:
        same = [g for g in figures if g["batch"] == f["batch"] and g["launch"] == f["launch"]]
        (plain,) = (g for g in same if g["way"] == UNTOUCHED)
        low, high = f["quartiles_ms"]
        table.add_row(
            str(f["batch"]),
            f["way"],
            f["launch"],
            f"{f['step_ms']:.3f} ({low:.3f} .. {high:.3f})",
            f"{plain['step_ms'] / f['step_ms']:.2f}",
            f"{f['tokens_per_second']:,.0f}",
            readable(f["peak_bytes"]),
            f"{f['peak_bytes'] / setting.state_bytes(f['batch']):.2f}",
            readable(f["graph_bytes"]) if "graph_bytes" in f else "-",
            f"{f['compile_s']:.1f}",
            end_section=f is same[-1] and f["launch"] == figures[-1]["launch"],
        )
    return table


def title_of(arguments: argparse.Namespace, about: dict, figures: list[dict]) -> str:
    title = f"{arguments.preset}, T {1 + arguments.drafts}, {arguments.dtype} activations"
    title += f", {arguments.state_dtype} pools, {about['device']}, torch {about['torch']}"
    for layers in [f["layers"] for f in figures if f["way"] == REWRITTEN and f["layers"]][:1]:
        title += f"; {layers['rewritten']} layers rewritten, {layers['refused']} refused"
        title += f", {layers['convolutions']} convolutions replaced"
    return title


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    console, started, about = console_for_tables(), time.perf_counter(), machine(arguments.device)
    names = ("drafts", "dtype", "state_dtype", "device", "accepted", "cudagraphs", "samples")
    merging = {None: (), True: (MERGED,), False: (SEPARATE,)}[arguments.merge_layers]
    ways = (UNTOUCHED, REWRITTEN, *merging, *[KEPT] * arguments.keep_convolutions)
    setting = Setting(PRESETS[arguments.preset], ways=ways, **{name: getattr(arguments, name) for name in names})
    batches, figures = arguments.batch, []
    events = in_processes(setting, batches, arguments.jobs) if arguments.jobs > 1 else in_this_process(setting, batches)
    with Interruptible() as work:
        for event in progress_over(events, len(batches) * (len(ways) + 1), "compiling, timing", console):
            console.print(f"batch {event.batch}: {event.text}", highlight=False, markup=False)
            if event.figures:
                figures += event.figures
                write_json(arguments, about | {"wall_s": time.perf_counter() - started}, figures)
    if figures:
        console.print(report(figures, setting, title_of(arguments, about, figures)))
        console.print(f"mean tokens accepted: {figures[0]['accepted_mean']:.2f}")
    measured = {f["batch"] for f in figures}
    console.print(f"{time.perf_counter() - started:.0f} s in all" + ", interrupted" * work.interrupted)
    if missing := [batch for batch in batches if batch not in measured]:
        console.print(f"batch sizes without figures: {', '.join(map(str, missing))}", style="red")
    return 130 if work.interrupted else int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
