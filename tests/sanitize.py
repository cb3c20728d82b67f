"""The kernels' tests under NVIDIA's compute-sanitizer, on a machine with a GPU.

    python -m tests.sanitize                                            # memcheck, then racecheck
    python -m tests.sanitize --tool racecheck --jobs 14 --limit 150     # seconds
    python -m tests.sanitize -k "not full_gpu" --logs logs

The tests are split over processes, each under the tool. Beside them runs a kernel with a mistake of the tool's kind
(``planted_mistakes.py``): a run in which that is not reported has shown nothing. The exit status is 1 if it is not, if
anything else is, if a test fails, or if the limit leaves a test out. Stopped by Ctrl-C or SIGTERM, it shows what has been seen.

Under memcheck every tensor is an allocation of its own, with padding behind it: the tool does not see the end of a tensor
that torch's allocator has put into a larger one, nor an access behind one that hits its neighbour. Tests that capture graphs
need that allocator and keep it.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from models.interruption import Interruptible

HERE = Path(__file__).parent
ROOT = HERE.parent
KERNEL_TESTS = [HERE / f"test_{name}_cuda.py" for name in ("triton", "layers_triton", "conv_triton")]
PLANTED = HERE / "planted_mistakes.py"
CAPTURES = re.compile("graph|capture|reduce_overhead")
PADDING = 1 << 16  # bytes: the state of a head of 128 in float32
PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist"]

RESULT = re.compile(r" (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")
# A report begins right after the margin, its details are indented. Not reports: sums, and what it says of pytest's exit status.
NO_REPORT = r" |COMPUTE-SANITIZER|\w+ SUMMARY|Target application returned an error|Error: process didn't terminate"
REPORT = re.compile(rf"^========= (?!{NO_REPORT})", re.MULTILINE)
PLACE = re.compile(r"\bat ([\w$]+)[^\n]*? in (?:\S*/)?([\w.-]+:\d+)")


@dataclass
class Slice:
    """Tests that share a process, and what is known of them by now."""

    tool: str
    tests: Sequence[str]
    folder: Path
    uncached: bool = False
    planted: bool = False
    process: subprocess.Popen | None = None
    stopped: bool = False

    def start(self, sanitizer: str) -> None:
        self.folder.mkdir(parents=True)
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        if self.uncached:
            environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        # Every report names the kernel's line; where in Python it was launched only costs time.
        options = f"--tool {self.tool} --show-backtrace no --print-limit 0".split()
        if self.tool == "memcheck":
            options += ["--padding", str(PADDING)]
        with (self.folder / "tests.log").open("w") as log:
            self.process = subprocess.Popen(
                [sanitizer, *options, "--log-file", self.folder / "tool.log", *PYTEST, "-v", "-rfE", *self.tests],
                cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def stop(self) -> None:
        """The tool, pytest, and the compilers that it has started."""
        if self.running:
            self.stopped = True
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _read(self, name: str) -> str:
        path = self.folder / name
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def results(self) -> collections.Counter[str]:
        return collections.Counter(RESULT.findall(self._read("tests.log").partition(" short test summary ")[0]))

    @property
    def failures(self) -> list[str]:
        """Of tests, and what pytest, or the tool, said last where it broke off by itself."""
        lines = self._read("tests.log").splitlines()
        named = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
        broke_off = not self.stopped and not named and self.results.total() < len(self.tests)
        return [f"{self.folder.name} broke off: {line}" for line in lines[-3:]] if broke_off else named

    @property
    def reports(self) -> list[str]:
        """The first line of each."""
        log = self._read("tool.log")
        return [log[m.end() :].partition("\n")[0] for m in REPORT.finditer(log)]

    @property
    def places(self) -> collections.Counter[str]:
        return collections.Counter(f"{kernel} at {line}" for kernel, line in PLACE.findall(self._read("tool.log")))


def collect(files: Sequence[str], expression: str) -> list[str]:
    done = subprocess.run(
        [*PYTEST, "--collect-only", "-q", "-k", expression, *files], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"no tests: pytest --collect-only says\n{done.stdout}{done.stderr}")
    return [line for line in done.stdout.splitlines() if "::" in line]


def slices(tool: str, tests: Sequence[str], jobs: int, folder: Path) -> list[Slice]:
    """Every ``jobs``-th test: neighbours cost alike."""
    captures = [test for test in tests if CAPTURES.search(test)] if tool == "memcheck" else []
    others = [test for test in tests if test not in set(captures)]
    parts = [(others[i::jobs], tool == "memcheck") for i in range(jobs)] + [(captures, False)]
    made = [
        Slice(tool, part, folder / tool / f"{i:02}", uncached=uncached)
        for i, (part, uncached) in enumerate(parts) if part
    ]  # fmt: skip
    planted = Slice(tool, [f"{PLANTED}::test_{tool}"], folder / tool / "planted", uncached=True, planted=True)
    return [planted, *made]


def run(parts: Sequence[Slice], sanitizer: str, limit: float, progress: Progress) -> None:
    end = time.monotonic() + limit
    tests = [part for part in parts if not part.planted]
    task = progress.add_task(parts[0].tool, total=sum(len(part.tests) for part in tests))
    try:
        for part in parts:
            part.start(sanitizer)
        while any(part.running for part in parts) and time.monotonic() < end:
            progress.update(task, completed=sum(part.results.total() for part in tests))
            time.sleep(0.5)
    finally:
        for part in parts:
            part.stop()
        progress.update(task, completed=sum(part.results.total() for part in tests))


def summarize(parts: Sequence[Slice], seconds: float, table: Table, console: Console) -> bool:
    """Adds the tool's row, prints what has been found; whether the tool is content."""
    tests = [part for part in parts if not part.planted]
    wanted = sum(len(part.tests) for part in tests)
    results = sum((part.results for part in tests), collections.Counter())
    reports = [line for part in tests for line in part.reports]
    failures = [line for part in tests for line in part.failures]
    seen = any(f" at {PLANTED.name}:" in place for part in parts if part.planted for place in part.places)
    table.add_row(
        parts[0].tool, f"{results.total()} of {wanted}", str(results["PASSED"]), str(results["SKIPPED"]),
        str(results["FAILED"] + results["ERROR"]), str(len(reports)), "reported" if seen else "NOT REPORTED", f"{seconds:.0f}",
    )  # fmt: skip
    for place, count in sum((part.places for part in tests), collections.Counter()).most_common():
        console.print(f"{parts[0].tool}: {count:5} x {place}", highlight=False)
    for line, count in collections.Counter(line[:100] for line in reports).most_common(10):
        console.print(f"{parts[0].tool}: {count:5} x {line}", highlight=False, markup=False)
    for line in failures:
        console.print(f"{parts[0].tool}: {line}", highlight=False, markup=False)
    return seen and not reports and not failures and results.total() == wanted


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.sanitize", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tests", nargs="*", default=KERNEL_TESTS, help="files or tests (default: those of the kernels)")
    parser.add_argument("--tool", nargs="+", choices=("memcheck", "racecheck"), default=["memcheck", "racecheck"])
    parser.add_argument(
        "--jobs", type=int, default=max(1, (os.cpu_count() or 1) - 2), help="processes (default: %(default)s)"
    )
    parser.add_argument("--limit", type=float, default=3600, help="seconds for each tool (default: %(default)s)")
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="which tests, as pytest's -k")
    parser.add_argument(
        "--logs", type=Path, help="a new folder for what the tool and the tests print (default: temporary)"
    )
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="the program (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs: at least one process, not {options.jobs}")
    if shutil.which(options.sanitizer) is None:
        parser.error(
            f"--sanitizer: there is no program {options.sanitizer!r}; it comes with the CUDA toolkit, in its folder bin"
        )
    if options.logs is not None and options.logs.exists() and any(options.logs.iterdir()):
        parser.error(f"--logs: {options.logs} holds files already")
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA GPU")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    console = Console()
    folder = (options.logs or Path(tempfile.mkdtemp(prefix="sanitize-"))).resolve()
    tests = collect([str(Path(test).resolve()) if Path(test).exists() else test for test in options.tests], options.k)
    table = Table("tool", "tests", "passed", "skipped", "failed", "reports", "planted mistake", "seconds")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    content = True
    with Progress(*columns, console=console) as progress:
        for tool in options.tool:
            parts, begin = slices(tool, tests, min(options.jobs, len(tests)), folder), time.monotonic()
            with Interruptible() as work:
                run(parts, options.sanitizer, options.limit, progress)
            content &= summarize(parts, time.monotonic() - begin, table, progress.console)
            if work.interrupted:
                break
    console.print(table)
    console.print(f"logs: {folder}", soft_wrap=True, highlight=False)
    return 130 if work.interrupted else 0 if content else 1


if __name__ == "__main__":
    sys.exit(main())
