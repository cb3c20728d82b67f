"""Figures from the benchmarks' JSON files.

    python -m benchmarks.plots --kernels targets.json layers.json --steps step.json --compile-time compile_time.json

Writes to ``docs/``: ``kernels_verify.png``, ``kernels_commit.png`` and ``kernels_step.png`` (time of every provider on every
shape, beside the floor), ``steps.png`` (time and memory of a step against the batch) and ``compile_time.png``, each where its
figures are given. Needs matplotlib: ``pip install recoverssm[benchmark]``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path

from benchmarks.shapes import Shape
from benchmarks.step_ways import CAPTURED, LAUNCHED, UNTOUCHED

# Okabe and Ito's colours, which stay apart for colour-blind readers; every series has a marker of its own besides.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
TITLES = {
    "verify": "verify",
    "commit": "commit of half the window",
    "step": "one layer of a step: verify, then commit of half the window",
}
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


@dataclass
class KernelRow:
    """One shape: the floor and every provider's time, in µs."""

    label: str
    floor: float
    times: dict[str, float] = field(default_factory=dict)


def kernel_rows(documents: Iterable[dict], operation: str, everything: bool = False) -> list[KernelRow]:
    """Of one operation, in the files' order; without ``everything``, the shapes of the models this is for.

    Commits, and steps with their commits, are those of half the window.
    """
    names = {f.name for f in fields(Shape)}
    rows: dict[Shape, KernelRow] = {}
    for row in (row for document in documents for row in document["rows"]):
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
    """By way, of all batch sizes; of captured steps where there are any: launches from the host are the host's time."""
    figures = [figure for document in documents for figure in document["figures"]]
    launch = CAPTURED if any(figure["launch"] == CAPTURED for figure in figures) else LAUNCHED
    series: dict[str, StepSeries] = {}
    for figure in sorted((f for f in figures if f["launch"] == launch), key=lambda f: f["batch"]):
        point = (figure["step_ms"], *figure["quartiles_ms"], figure["peak_bytes"])
        series.setdefault(figure["way"], StepSeries(figure["way"])).points[figure["batch"]] = point
    return list(series.values())


def style(at: int) -> dict[str, str]:
    return {"color": COLOURS[at % len(COLOURS)], "marker": MARKERS[at % len(MARKERS)]}


def figure(*sizes: float, **options: object):
    from matplotlib.figure import Figure  # not pyplot: nothing is shown, nothing is global

    return Figure(figsize=sizes, layout="constrained", **options)


def logarithmic(axis, set_scale) -> None:
    """Labelled often enough to be read where the figures span less than a decade."""
    from matplotlib.ticker import LogLocator, NullFormatter

    set_scale("log")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


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
    logarithmic(axes.xaxis, axes.set_xscale)
    axes.set_xlabel("time, µs (median, logarithmic)")
    axes.set_title(f"{operation}\n{machine}", loc="left", fontsize=10)
    axes.grid(axis="x", which="both", alpha=0.25)
    axes.grid(axis="y", alpha=0.25)
    made.legend(loc="outside lower center", ncols=3, frameon=False)
    return made


def draw_steps(series: list[StepSeries], machine: str):
    """Time on the left, memory on the right, both against the batch, all logarithmic: ratios are distances."""
    made = figure(10, 4.4)
    time, memory = made.subplots(1, 2)
    plain = next((one.points for one in series if one.name == UNTOUCHED), {})
    for at, one in enumerate(series):
        batches = list(one.points)
        middle, low, high, peak = (list(column) for column in zip(*one.points.values(), strict=True))
        time.plot(batches, middle, label=one.name, **style(at))
        time.fill_between(batches, low, high, color=style(at)["color"], alpha=0.2)
        memory.plot(batches, [size / 2**20 for size in peak], label=one.name, **style(at))
        for batch in batches if at == 1 and plain else ():
            if batch in plain:
                _note(time, batch, one.points[batch][0], f"{plain[batch][0] / one.points[batch][0]:.1f}× as fast")
                size = one.points[batch][3]
                _note(memory, batch, size / 2**20, f"1/{plain[batch][3] / size:.1f}")
    batches = sorted({batch for one in series for batch in one.points})
    for axes, title, unit in (
        (time, "one step (median; shaded: quartiles)", "ms"),
        (memory, "peak memory of one step", "MiB"),
    ):
        axes.set_title(title, fontsize=10)
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, map(str, batches))
        axes.set_xlabel("batch, requests (logarithmic)")
        axes.set_ylabel(f"{unit} (logarithmic)")
        logarithmic(axes.yaxis, axes.set_yscale)
        axes.margins(x=0.12, y=0.12)
        axes.grid(alpha=0.25)
    made.legend(*time.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    made.suptitle(machine, x=0.01, ha="left", fontsize=10)
    return made


def _note(axes, x: float, y: float, text: str) -> None:
    """Above a point."""
    axes.annotate(text, (x, y), (0, 9), textcoords="offset points", ha="center", va="bottom", fontsize=8, color="0.2")


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
    parser.add_argument(
        "--kernels", type=Path, nargs="+", default=[], help="files of benchmarks.kernels, of one machine"
    )
    parser.add_argument("--steps", type=Path, nargs="+", default=[], help="files of benchmarks.step, of one machine")
    parser.add_argument("--compile-time", type=Path)
    parser.add_argument("--all-shapes", action="store_true", help="not the usual shapes alone")
    parser.add_argument("--out", type=Path, default=Path("docs"))
    arguments = parser.parse_args(argv)
    figures = {}
    if arguments.kernels:
        documents = [json.loads(path.read_text()) for path in arguments.kernels]
        header = documents[0]["header"]
        machine = f"{header['device']}, torch {header['torch']}, triton {header['triton']}"
        if header["l2_bytes"]:
            machine += f", L2 {'warm' if header['warm'] else 'cold'}"
        for operation, title in TITLES.items():
            if rows := kernel_rows(documents, operation, arguments.all_shapes):
                figures[f"kernels_{operation}"] = draw_kernels(rows, title, machine)
    if arguments.steps:
        documents = [json.loads(path.read_text()) for path in arguments.steps]
        settings = documents[0]["settings"]
        shown = f"{settings['preset']}, T {1 + settings['drafts']}, {settings['dtype']} activations, "
        shown += f"{settings['state_dtype']} pools, {documents[0]['device']}, torch {documents[0]['torch']}"
        figures["steps"] = draw_steps(step_series(documents), shown)
    if arguments.compile_time:
        figures["compile_time"] = draw_compile_time(json.loads(arguments.compile_time.read_text()))
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, made in figures.items():
        path = arguments.out / f"{name}.png"
        made.savefig(path, dpi=150)
        print(path)


if __name__ == "__main__":
    main()
