"""Figures from the benchmarks' JSON files.

    python -m benchmarks.plots --kernels kernels.json --steps step_*.json --compile-time compile_time.json --out docs

Writes ``kernels_verify.png`` and ``kernels_commit.png`` (time of every provider on every shape, beside the floor),
``steps.png`` (time and memory of a step against the batch) and ``compile_time.png``. Needs matplotlib:
``pip install recoverssm[benchmark]``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path

from benchmarks.shapes import Shape

# Okabe and Ito's colours, which stay apart for colour-blind readers; every series has a marker of its own besides.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


@dataclass
class KernelRow:
    """One shape: the floor and every provider's time, in µs."""

    label: str
    floor: float
    times: dict[str, float] = field(default_factory=dict)


def kernel_rows(document: dict, operation: str, everything: bool = False) -> list[KernelRow]:
    """Of one operation, in the file's order; without ``everything``, the shapes of the models this is for.

    Commits are those of half the window.
    """
    names = {f.name for f in fields(Shape)}
    rows: dict[Shape, KernelRow] = {}
    for row in document["rows"]:
        shape = Shape(**{name: row[name] for name in names})
        usual = shape.head_size == 128 and shape.gate == "bounded" and shape.window in (4, 8)
        half = operation == "verify" or row.get("accepted") == max(1, shape.window // 2)
        if row.get("operation") == operation and half and (usual or everything):
            label = str(shape).replace(" pool", "")
            rows.setdefault(shape, KernelRow(label, row["floor_us"])).times[row["provider"]] = row["us"]
    return list(rows.values())


@dataclass
class StepSeries:
    """One way to run the step: ``points[batch] = (ms, low, high, peak bytes)``."""

    name: str
    points: dict[int, tuple[float, float, float, int]] = field(default_factory=dict)


def step_series(documents: Iterable[dict]) -> list[StepSeries]:
    """One file of ``benchmarks.step`` for each batch."""
    series: dict[str, StepSeries] = {}
    for document in documents:
        batch = int(document["settings"]["batch"])
        for name, figures in document["figures"].items():
            low, high = figures["quartiles_ms"]
            point = (figures["step_ms"], low, high, figures["peak_bytes"])
            series.setdefault(name, StepSeries(name)).points[batch] = point
    for one in series.values():
        one.points = dict(sorted(one.points.items()))
    return list(series.values())


def style(at: int) -> dict[str, str]:
    return {"color": COLOURS[at % len(COLOURS)], "marker": MARKERS[at % len(MARKERS)]}


def figure(*sizes: float, **options: object):
    from matplotlib.figure import Figure  # not pyplot: nothing is shown, nothing is global

    return Figure(figsize=sizes, layout="constrained", **options)


def draw_kernels(rows: list[KernelRow], operation: str, machine: str):
    """A line for each shape, times to the right."""
    made = figure(9, 1.6 + 0.34 * len(rows))
    axes = made.add_subplot()
    providers = list(dict.fromkeys(name for row in rows for name in row.times))
    heights = [len(rows) - 1 - at for at in range(len(rows))]
    floors = [row.floor for row in rows]
    axes.scatter(
        floors, heights, marker="|", s=220, color="black", linewidths=2, label="floor: bytes over copy bandwidth"
    )
    for at, name in enumerate(providers):
        points = [(row.times[name], y) for row, y in zip(rows, heights, strict=True) if name in row.times]
        axes.scatter(
            *zip(*points, strict=True), s=48, label=name, zorder=9 - at, edgecolors="white", linewidths=0.6, **style(at)
        )
    axes.set_yticks(heights, [row.label for row in rows])
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("time of one launch, µs (median, logarithmic)")
    axes.set_title(f"{operation}: {machine}", loc="left", fontsize=10)
    axes.grid(axis="x", which="both", alpha=0.25)
    axes.grid(axis="y", alpha=0.25)
    made.legend(loc="outside lower center", ncols=3, frameon=False)
    return made


def draw_steps(series: list[StepSeries], machine: str):
    """Time on the left, memory on the right, both against the batch."""
    made = figure(10, 4.2)
    time, memory = made.subplots(1, 2)
    for at, one in enumerate(series):
        batches = list(one.points)
        middle, low, high, peak = (list(column) for column in zip(*one.points.values(), strict=True))
        time.plot(batches, middle, label=one.name, **style(at))
        time.fill_between(batches, low, high, color=style(at)["color"], alpha=0.2)
        memory.plot(batches, [size / 2**30 for size in peak], label=one.name, **style(at))
    batches = sorted({batch for one in series for batch in one.points})
    for axes, text in ((time, "step, ms (median; shaded: quartiles)"), (memory, "peak memory of a step, GiB")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, map(str, batches))
        axes.set_xlabel("batch, requests")
        axes.set_ylabel(text)
        axes.grid(alpha=0.25)
    time.set_ylim(bottom=0)
    memory.set_yscale("log")
    memory.yaxis.set_major_formatter("{x:g}")
    time.legend(frameon=False)
    made.suptitle(machine, x=0.01, ha="left", fontsize=10)
    return made


def draw_compile_time(document: dict):
    """Time of the pass against layers and against T, with the line of exact proportion."""
    made = figure(10, 4)
    growth = document["growth"]
    for axes, size, other in zip(made.subplots(1, 2), ("layers", "window"), ("window", "layers"), strict=True):
        fixed = [g[other] for g in growth]
        common = max(set(fixed), key=fixed.count)
        points = dict(sorted((g[size], 1e3 * g["pass_s"]) for g in growth if g[other] == common))
        axes.plot(points.keys(), points.values(), label="the pass", **style(0))
        last = max(points)
        line = [points[last] * n / last for n in points]
        axes.plot(points.keys(), line, "--", color="0.5", label="in exact proportion to the last")
        axes.set_xlabel("layers" if size == "layers" else "T, window tokens")
        axes.set_ylabel("CPU time of the pass, ms")
        axes.set_title(f"{'T' if other == 'window' else 'layers'} = {common}", loc="left", fontsize=10)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
    return made


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plots", description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", type=Path)
    parser.add_argument("--steps", type=Path, nargs="+", default=[], help="one file of benchmarks.step for each batch")
    parser.add_argument("--compile-time", type=Path)
    parser.add_argument("--all-shapes", action="store_true", help="not the usual shapes alone")
    parser.add_argument("--out", type=Path, default=Path("docs"))
    arguments = parser.parse_args(argv)
    figures = {}
    if arguments.kernels:
        document = json.loads(arguments.kernels.read_text())
        header = document["header"]
        machine = f"{header['device']}, torch {header['torch']}, triton {header['triton']}, L2 "
        machine += "warm" if header["warm"] else "cold"
        for operation in ("verify", "commit"):
            rows = kernel_rows(document, operation, arguments.all_shapes)
            if rows:
                title = operation if operation == "verify" else "commit of half the window"
                figures[f"kernels_{operation}"] = draw_kernels(rows, title, machine)
    if arguments.steps:
        documents = [json.loads(path.read_text()) for path in arguments.steps]
        settings = documents[0]["settings"]
        shown = ", ".join(
            f"{name} {settings[name]}" for name in ("preset", "drafts", "dtype", "state_dtype") if name in settings
        )
        figures["steps"] = draw_steps(step_series(documents), f"{documents[0]['device']}, {shown}")
    if arguments.compile_time:
        figures["compile_time"] = draw_compile_time(json.loads(arguments.compile_time.read_text()))
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, made in figures.items():
        path = arguments.out / f"{name}.png"
        made.savefig(path, dpi=150)
        print(path)


if __name__ == "__main__":
    main()
