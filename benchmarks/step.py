"""Time and memory of one compiled speculative step: the untouched model against the model through the pass.

    python -m benchmarks.step --preset kimi_linear --batch 1 8 32 128 --drafts 7

Every way runs the same :class:`models.speculation.SpeculativeStep`, compiled by Inductor, once as it is and once through the
pass; on a GPU each of them launched from the host and captured as one CUDA graph. Timing: the ways of one batch size
alternate, every sample is one step between CUDA events (on the CPU: the clock), the median and the quartiles are reported.
The pools are as large as the batch, so nothing but the batch decides whether the states fit a cache. Accepted lengths
differ per row and are forced; tokens/s is their sum over the median step.

Compilation takes most of the run. With several jobs it is done in parallel processes, which leave the results in Inductor's
caches on disk; timing begins when they are gone.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

# Read when torch is imported: the profiler that measures memory would announce itself on the terminal.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.reporting import check_at_least, check_device, console_for_tables, machine, progress_over, write_json
from benchmarks.step_ways import DTYPES, MERGED, REWRITTEN, UNTOUCHED, Prepared, Setting, in_parallel, prepare
from benchmarks.step_ways import rewritten_layers as count_layers
from benchmarks.timing import alternate, quartiles
from compile_passes.reporting.report import readable
from models.captured_step import CapturedStep
from models.config import PRESETS
from models.memory import peak_allocation

LAUNCHED, CAPTURED = "launched", "captured"


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
    parser.add_argument("--merge-layers", action="store_true", help="a third way: commits of all layers in one launch")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--cudagraphs",
        action=argparse.BooleanOptionalAction,
        help="also capture each step as one CUDA graph (default: on a GPU)",
    )
    parser.add_argument("--jobs", type=int, help="processes that compile (default: as many as cores and steps allow)")
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    return parser


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argument_parser()
    arguments = parser.parse_args(argv)
    check_at_least(parser, arguments, batch=1, drafts=0, samples=2, jobs=0)
    check_device(parser, arguments.device)
    # Negated so that NaN is refused too.
    if arguments.accepted is not None and not 1 <= arguments.accepted <= 1 + arguments.drafts:
        parser.error(f"--accepted should be in 1..{1 + arguments.drafts}, 1 + drafts, got {arguments.accepted}")
    on_gpu = torch.device(arguments.device).type == "cuda"
    if arguments.cudagraphs is None:
        arguments.cudagraphs = on_gpu
    if arguments.cudagraphs and not on_gpu:
        parser.error("--cudagraphs needs --device cuda")
    return arguments


def measure(prepared: list[Prepared], setting: Setting, arguments: argparse.Namespace) -> list[dict]:
    """Figures of all ways of one batch size."""
    device, batch = arguments.device, prepared[0].batch
    calls, figures = {}, {}
    for way in prepared:
        peak = peak_allocation(way.call, device)
        common = {"batch": batch, "way": way.way, "peak_bytes": peak, "first_call_s": way.seconds}
        calls[way.way, LAUNCHED] = way.call
        figures[way.way, LAUNCHED] = common
        if arguments.cudagraphs:
            captured = CapturedStep(way.compiled)
            captured.capture(*way.inputs)
            calls[way.way, CAPTURED] = lambda captured=captured, inputs=way.inputs: captured(*inputs)
            figures[way.way, CAPTURED] = common | {"graph_bytes": captured.pool_bytes}
    for call in calls.values():
        for _ in range(3):
            call()
    accepted = setting.accepted_lengths(batch).sum().item()
    for key, values in alternate(calls, arguments.samples, device).items():
        low, median, high = quartiles(values)
        figures[key] |= {"launch": key[1], "step_ms": median, "quartiles_ms": [low, high]}
        figures[key] |= {"accepted_mean": accepted / batch, "tokens_per_second": 1e3 * accepted / median}
    return list(figures.values())


def report(figures: list[dict], setting: Setting, title: str) -> Table:
    table = Table(title=title)
    columns = ("batch", "way", "", "step ms (quartiles)", "times untouched", "tokens/s", "peak memory of a step")
    for column in (*columns, "of one position's states", "graph's memory", "first call s"):
        table.add_column(column, justify="left" if column in ("way", "") else "right")
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
            f"{f['first_call_s']:.1f}",
            end_section=f is same[-1] and f["launch"] == figures[-1]["launch"],
        )
    return table


def compile_all(
    setting: Setting, configurations: list[tuple[str, int]], arguments: argparse.Namespace, console: Console
) -> dict:
    """Warm the caches; the layers that the pass rewrites, and what compiling took."""
    jobs, cores = arguments.jobs, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if jobs is None:
        # One step is compiled where it runs.
        jobs = min(len(configurations) + 1, max(1, cores // 2))
    started = time.perf_counter()
    if jobs < 2:
        return {"layers": count_layers(setting, configurations[0][1]), "jobs": 0}
    # The compilations that end early leave their cores to the others.
    work = in_parallel(setting, configurations, jobs, max(1, 2 * cores // jobs))
    done = dict(progress_over(work, len(configurations) + 1, f"compiling in {jobs} processes", console))
    layers = done.pop(None)
    seconds = [{"way": way, "batch": batch, "compile_s": s} for (way, batch), s in done.items()]
    return {"layers": layers, "jobs": jobs, "compile_wall_s": time.perf_counter() - started, "compilations": seconds}


@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    console = console_for_tables()
    started = time.perf_counter()
    names = ("drafts", "dtype", "state_dtype", "device", "accepted")
    setting = Setting(PRESETS[arguments.preset], **{name: getattr(arguments, name) for name in names})
    ways = [UNTOUCHED, REWRITTEN] + [MERGED] * arguments.merge_layers
    batches = list(dict.fromkeys(arguments.batch))
    compilation = compile_all(setting, [(way, batch) for batch in batches for way in ways], arguments, console)

    model, figures = setting.model(), []
    for batch in progress_over(batches, len(batches), "timing", console):
        # All steps share one code object, and the number of compilations that it remembers is limited.
        torch.compiler.reset()
        figures += measure([prepare(setting, model, way, batch) for way in ways], setting, arguments)

    layers = compilation["layers"]
    about = machine(arguments.device)
    title = f"{arguments.preset}, T {setting.window}, {arguments.dtype} activations, {arguments.state_dtype} pools, "
    title += f"{about['device']}, torch {about['torch']}; layers {layers['rewritten']} rewritten, {layers['refused']} refused"
    console.print(report(figures, setting, title))
    wall = time.perf_counter() - started
    console.print(f"{wall:.0f} s in all; mean tokens accepted: {figures[0]['accepted_mean']:.2f}")
    write_json(arguments, about | {"wall_s": wall} | compilation, figures)


if __name__ == "__main__":
    main()
