"""One speculative step in every runtime that can hold it: time and memory, side by side.

    python -m benchmarks.runtimes --preset kimi_linear --batch 32

All ways run the same :class:`models.speculation.SpeculativeStep` on the same weights, each with pools of its own: the
exported step whose operators Python calls one by one, ``torch.compile`` through the pass, AOTInductor packages (with the
Triton kernels inside, and of the portable form), and, where Torch-TensorRT is installed, the verify half as an engine with
the commit left to the operators. On a GPU each is launched from the host and captured as one CUDA graph. The ways alternate;
every sample is one step between CUDA events (on the CPU: the clock); the median and the quartiles are reported.

What a way leaves in the pools after its first step is compared with what the first one left. Packages are compiled in processes
beside this one; a way that fails, or takes longer than ``--patience``, is reported as such, and the others are measured. What
was being done then is on stderr.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

# Read when torch is imported: the profiler that measures memory would announce itself on the terminal.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks import runtime_ways
from benchmarks.reporting import check_at_least, check_device, console_for_tables, machine, progress_over, write_json
from benchmarks.runtime_ways import EAGER, ON_DISK, TENSORRT, WAYS, Way, available, failure
from benchmarks.step_ways import DTYPES, Setting, synchronize
from benchmarks.timing import alternate, quartiles
from compile_passes.reporting.report import readable
from models.captured_step import CapturedStep
from models.config import PRESETS
from models.memory import peak_allocation

LAUNCHED, CAPTURED = "launched", "captured"


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.runtimes", description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, default="kimi_linear")
    parser.add_argument("--layers", type=int, help="fewer or more layers than the preset has")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--drafts", type=int, default=7)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="weights and activations")
    parser.add_argument("--state-dtype", choices=DTYPES, default="fp32", help="recurrent pools")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="default: all that this machine has")
    parser.add_argument(
        "--patience", type=float, default=600.0, help="seconds for the compilations beside this process"
    )
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    arguments = parser.parse_args(argv)
    check_at_least(parser, arguments, layers=1, batch=1, drafts=0, samples=2, patience=0)
    check_device(parser, arguments.device)
    known = available(arguments.device)
    arguments.ways = [way for way in WAYS if way in (arguments.ways or known)]
    if absent := [way for way in arguments.ways if way not in known]:
        parser.error(
            f"--ways {' '.join(absent)}: not on this machine (kernels need CUDA; tensorrt needs torch_tensorrt)"
        )
    return arguments


def prepare(setting: Setting, model, arguments: argparse.Namespace, console: Console) -> dict[str, Way | dict]:
    """Every way ready to be called, or why it is not."""
    batch, ways = arguments.batch, arguments.ways
    found: dict[str, Way | dict] = {}

    def attempt(way: str, make: Callable[[], Way]) -> None:
        started = time.perf_counter()
        try:
            found[way] = make()
            found[way].seconds += time.perf_counter() - started
        except Exception as error:
            found[way] = failure(error)

    with tempfile.TemporaryDirectory() as directory:
        beside = [way for way in ways if way in ON_DISK]
        with runtime_ways.preparing(beside, setting, batch, Path(directory), arguments.patience) as results:
            # What cannot come from disk is made here meanwhile.
            if EAGER in ways:
                attempt(EAGER, lambda: runtime_ways.eager(setting, model, batch))
            if TENSORRT in ways:
                attempt(TENSORRT, lambda: runtime_ways.tensorrt(setting, model, batch))
            for way, result in progress_over(results(), len(beside), "compiling", console):
                found[way] = result
        for way in beside:
            if "failed" not in found[way]:
                seconds = found[way]["seconds"]
                attempt(way, lambda way=way: runtime_ways.load(way, setting, model, batch, Path(directory)))
                if isinstance(found[way], Way):
                    found[way].seconds = seconds
    return {way: found[way] for way in WAYS if way in found}


def captures(device: str) -> bool:
    return torch.device(device).type == "cuda"


def first_step(way: Way, inputs: tuple[Tensor, ...], device: str) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Results, and copies of the pools after it, which were zeros."""
    for pool in way.pools.values():
        pool.zero_()
    results = way.call(*inputs)
    synchronize(device)
    return tuple(x.clone() for x in results), {name: pool.clone() for name, pool in way.pools.items()}


def difference(pools: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of any recurrent state, relative to the largest state."""
    names = [name for name in expected if "recurrent" in name]
    largest = max(expected[name].float().abs().max().item() for name in names)
    return max((pools[name].float() - expected[name].float()).abs().max().item() for name in names) / largest


@torch.no_grad()
def measure(ways: dict[str, Way | dict], inputs: tuple[Tensor, ...], arguments: argparse.Namespace) -> list[dict]:
    device = arguments.device
    calls, rows, expected = {}, {}, None
    for name, way in ways.items():
        if not isinstance(way, Way):
            rows[name, LAUNCHED] = {"way": name, "launch": LAUNCHED, **way}
            continue
        try:
            results, pools = first_step(way, inputs, device)
            expected = expected or (results, pools)
            row = {"way": name, "launch": LAUNCHED, "prepare_s": way.seconds}
            row["state_difference"] = difference(pools, expected[1])
            row["tokens_equal"] = all(torch.equal(x, y) for x, y in zip(results, expected[0], strict=True))
            del pools
            way.call(*inputs)
            row["peak_bytes"] = peak_allocation(lambda way=way: way.call(*inputs), device)
            row |= {key: value for key, value in way.details.items() if key != "held"}
            rows[name, LAUNCHED], calls[name, LAUNCHED] = row, lambda way=way: way.call(*inputs)
        except Exception as error:
            rows[name, LAUNCHED] = {"way": name, "launch": LAUNCHED, **failure(error)}
            continue
        if captures(device):
            try:
                captured = CapturedStep(way.call)
                captured.capture(*inputs)
                calls[name, CAPTURED] = lambda captured=captured: captured(*inputs)
                rows[name, CAPTURED] = row | {"launch": CAPTURED, "graph_bytes": captured.pool_bytes}
            except Exception as error:
                rows[name, CAPTURED] = {"way": name, "launch": CAPTURED, **failure(error)}
    for call in calls.values():
        for _ in range(3):
            call()
    for key, values in alternate(calls, arguments.samples, device).items():
        low, median, high = (1e3 * ms for ms in quartiles(values))
        rows[key] |= {"us": median, "us_quartiles": [low, high]}
    return list(rows.values())


def report(rows: list[dict], title: str) -> Table:
    table = Table(title=title)
    for column in (
        "way",
        "",
        "step µs (quartiles)",
        "times eager",
        "peak memory",
        "graph's memory",
        "state difference",
    ):
        table.add_column(column, justify="left" if column in ("way", "") else "right")
    table.add_column("prepared in s", justify="right")
    eager = next((row["us"] for row in rows if row["way"] == EAGER and "us" in row), None)
    for row in rows:
        if "failed" in row:
            table.add_row(WAYS[row["way"]], row["launch"], f"failed: {row['failed'].splitlines()[0][:60]}")
            continue
        low, high = row["us_quartiles"]
        table.add_row(
            WAYS[row["way"]],
            row["launch"],
            f"{row['us']:,.0f} ({low:,.0f} .. {high:,.0f})",
            f"{eager / row['us']:.2f}",
            readable(row["peak_bytes"]),
            readable(row["graph_bytes"]) if "graph_bytes" in row else "-",
            f"{row['state_difference']:.1e}",
            f"{row['prepare_s']:.0f}",
        )
    return table


@torch.no_grad()
def main(argv: list[str] | None = None) -> int:
    """1 if a way failed, else 0."""
    arguments = parse_arguments(argv)
    console, started = console_for_tables(), time.perf_counter()
    config = PRESETS[arguments.preset]
    if arguments.layers is not None:
        config = dataclasses.replace(config, num_layers=arguments.layers)
    names = ("drafts", "dtype", "state_dtype", "device")
    setting = Setting(config, accepted=None, **{name: getattr(arguments, name) for name in names})
    model = setting.model()
    ways = prepare(setting, model, arguments, console)
    rows = measure(ways, setting.inputs(arguments.batch), arguments)

    about = machine(arguments.device)
    title = (
        f"{arguments.preset}, {config.num_layers} layers, B {arguments.batch}, T {setting.window}, {arguments.dtype} "
    )
    title += f"activations, {arguments.state_dtype} pools, {about['device']}, torch {about['torch']}"
    console.print(report(rows, title))
    for row in rows:
        if "failed" in row:
            console.print(f"{row['way']}, {row['launch']}: {row['failed']}", markup=False)
    wall = time.perf_counter() - started
    console.print(f"{wall:.0f} s in all")
    write_json(arguments, about | {"wall_s": wall}, rows)
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
