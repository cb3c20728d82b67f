"""Which launch configuration is the fastest for each shape, and what the launchers' own choice, or a given table, loses.

    python -m benchmarks.launch_table --seconds 60 --json launch.json      # on a GPU
    python -m benchmarks.launch_table --table launch.json                  # the loss of the table of an earlier run

Candidates are compiled in parallel first; those that spill are not run. A row of the table is one question that the launchers
ask (the arguments of ``verify_async_config``, say); its configuration is the one with the least mean loss over
the shapes that ask it. The loss of a configuration is its time over the best time, less one. The time budget covers all of
it: what is not reached is said to be missing.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import math
import multiprocessing
import os
import sys
import time
from itertools import islice, product
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import floors
from benchmarks import kernel_timing as timing
from benchmarks.launch_sweep import Config, Figures, Timer, candidates, fewest_rows, figures, launched
from benchmarks.reporting import check_at_least, check_device
from benchmarks.shape_options import add_shape_options, check_shape_options, shapes_of
from benchmarks.shapes import Shape

OPERATIONS = ("verify", "commit")


@dataclasses.dataclass
class Trial:
    """One operation on one shape: its candidates, what they compile to, and their times in µs."""

    shape: Shape
    operation: str
    question: str
    own: Config
    changes: list[Config]
    figures: dict[int, Figures] = dataclasses.field(default_factory=dict)
    microseconds: dict[int, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.places = {_key(change): at for at, change in enumerate(self.changes)}

    @classmethod
    def of(cls, shape: Shape, operation: str, knobs: dict[str, tuple[int, ...]]) -> Trial:
        _, question, own = launched(shape, operation, {})
        return cls(shape, operation, question, own, candidates(own, shape.head_size, knobs))

    def runnable(self) -> list[int]:
        """Candidates that compiled without spills; the launcher's own, which is the first, whatever it is."""
        return [at for at, f in sorted(self.figures.items()) if at == 0 or not (f.failure or f.spilled_bytes)]

    def loss(self, change: Config) -> float | None:
        """Of a configuration that was timed."""
        us = self.microseconds.get(self.places.get(_key(change)))
        return None if us is None else us / min(self.microseconds.values()) - 1

    def as_json(self) -> dict:
        timed = [
            {"config": self.changes[at], "us": us, **dataclasses.asdict(self.figures[at])}
            for at, us in sorted(self.microseconds.items(), key=lambda item: item[1])
        ]
        head = {"shape": dataclasses.asdict(self.shape), "operation": self.operation, "question": self.question}
        own = self.changes[0]
        return {**head, "own": own, "own_loss": self.loss(own), "compiled": len(self.figures), "timed": timed}


def _key(change: Config) -> tuple:
    return tuple(sorted(change.items()))


def compile_trials(trials: list[Trial], arch: int, jobs: int, deadline: float) -> None:
    """Candidates of all trials, near ones first, for as long as there is time; shapes that differ in rows share them."""
    tasks: dict[tuple, list[tuple[Trial, int]]] = {}
    shapes = [dataclasses.replace(trial.shape, batch=fewest_rows(trial.shape)) for trial in trials]
    for at in range(max(len(trial.changes) for trial in trials)):
        for trial, shape in zip(trials, shapes, strict=True):
            if at < len(trial.changes):
                tasks.setdefault((shape, trial.operation, _key(trial.changes[at])), []).append((trial, at))
    waiting = iter(tasks.items())
    with concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        running = {}
        while time.monotonic() < deadline:
            for (shape, operation, change), users in islice(waiting, 2 * jobs - len(running)):
                running[pool.submit(figures, (shape, operation, dict(change), arch))] = users
            if not running:
                break
            done, _ = concurrent.futures.wait(
                running, max(0.1, deadline - time.monotonic()), concurrent.futures.FIRST_COMPLETED
            )
            for future in done:
                for trial, at in running.pop(future):
                    trial.figures[at] = future.result()
        pool.shutdown(wait=False, cancel_futures=True)


def time_trial(trial: Trial, device: str, deadline: float) -> None:
    """Every candidate briefly while there is time, then the launcher's own and the best four in turns."""
    sets = timing.sets_for_cold(floors.verify_bytes(trial.shape), device)
    timer = Timer(trial.shape, trial.operation, max(1, trial.shape.window // 2), sets, device)
    for at in trial.runnable():
        if time.monotonic() > deadline and trial.microseconds:
            break
        try:
            trial.microseconds[at] = timer.microseconds([trial.changes[at]], 3)[0]
        except Exception as error:  # too much shared memory, say
            trial.figures[at] = Figures(failure=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:80]}")
    best = sorted(trial.microseconds, key=trial.microseconds.get)[:4]
    again = [at for at in dict.fromkeys([0, *best]) if at in trial.microseconds]
    for at, us in zip(again, timer.microseconds([trial.changes[at] for at in again], 9), strict=True):
        trial.microseconds[at] = us


def table_of(trials: list[Trial]) -> dict[str, Config]:
    """The configuration with the least geometric mean of times over best times, for each question."""
    table = {}
    for question in dict.fromkeys(trial.question for trial in trials):
        asking = [trial for trial in trials if trial.question == question and trial.microseconds]
        if not asking:
            continue
        timed = [asking[0].changes[at] for at in sorted(asking[0].microseconds)]
        everywhere = [c for c in timed if all(trial.loss(c) is not None for trial in asking)]
        table[question] = min(
            everywhere, key=lambda c: sum(math.log1p(trial.loss(c)) for trial in asking), default=None
        )
    return {question: change for question, change in table.items() if change is not None}


def mean_loss(losses: list[float]) -> float:
    return math.exp(sum(map(math.log1p, losses)) / len(losses)) - 1 if losses else math.nan


def shown(trials: list[Trial], table: dict[str, Config], title: str) -> Table:
    result = Table(title=title, title_justify="left")
    for column in ("shape", "operation", "best", "µs", "own", "own loss", "table's loss", "timed"):
        result.add_column(column, no_wrap=True)
    for trial in trials:
        if not trial.microseconds:
            result.add_row(str(trial.shape), trial.operation, "not reached")
            continue
        at = min(trial.microseconds, key=trial.microseconds.get)
        losses = [trial.loss(change) for change in (trial.changes[0], table.get(trial.question, {}))]
        cells = ["-" if loss is None else f"{100 * loss:.1f} %" for loss in losses]
        result.add_row(
            str(trial.shape), trial.operation, _short(trial.changes[at]), f"{trial.microseconds[at]:.2f}",
            _short(trial.changes[0]), *cells, f"{len(trial.microseconds)}/{len(trial.changes)}",
        )  # fmt: skip
    return result


def _short(config: Config) -> str:
    return " ".join(f"{name}={value}" for name, value in config.items())


def _knob(text: str) -> tuple[str, tuple[int, ...]]:
    name, _, values = text.partition("=")
    return name, tuple(map(int, values.split(",")))


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.launch_table", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    add_shape_options(parser, batch=[1, 64], heads=[12], window=[4, 8], state_dtype=["bf16", "fp32"])
    parser.add_argument("--op", choices=OPERATIONS, nargs="+", default=list(OPERATIONS))
    parser.add_argument(
        "--knob", type=_knob, nargs="+", default=[], metavar="NAME=V,V", help="values of an entry to try"
    )
    parser.add_argument(
        "--table", type=Path, help="an earlier run's JSON, whose table is judged in place of this run's"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that compile")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    check_shape_options(parser, arguments)
    check_at_least(parser, arguments, jobs=1)
    check_device(parser, arguments.device)
    if arguments.table and not arguments.table.is_file():
        parser.error(f"--table should be the JSON of an earlier run, but there is no file {arguments.table}")
    return arguments


@torch.no_grad()
def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    started = time.monotonic()
    end = started + arguments.seconds
    trials = [
        Trial.of(shape, operation, dict(arguments.knob))
        for shape, operation in product(shapes_of(arguments), arguments.op)
    ]
    major, minor = torch.cuda.get_device_capability(arguments.device) if arguments.device != "cpu" else (9, 0)
    console = Console() if sys.stdout.isatty() else Console(width=180)
    with console.status("compiling"):
        compile_trials(trials, 10 * major + minor, arguments.jobs, started + 0.5 * arguments.seconds)
    for at, trial in enumerate(trials):
        share = (end - time.monotonic()) / (len(trials) - at)
        with console.status(f"{trial.shape}, {trial.operation}"):
            time_trial(trial, arguments.device, time.monotonic() + share)
    best = table_of(trials)
    judged = json.loads(arguments.table.read_text())["table"] if arguments.table else best
    title = (
        f"{torch.cuda.get_device_name() if arguments.device != 'cpu' else 'CPU'}, {time.monotonic() - started:.0f} s"
    )
    console.print(shown(trials, judged, title))
    for question, change in best.items():
        console.print(f"{question}: {_short(change)}", highlight=False)
    losses = {
        "own_loss": mean_loss([trial.loss(trial.changes[0]) for trial in trials if 0 in trial.microseconds]),
        "table_loss": mean_loss([x for t in trials if (x := t.loss(judged.get(t.question, {}))) is not None]),
    }
    console.print("mean loss: the launchers' own choice {own_loss:.1%}, the table {table_loss:.1%}".format(**losses))
    if arguments.json:
        document = {**losses, "table": best, "trials": [trial.as_json() for trial in trials]}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
