"""How long the pass takes: against the number of layers, against T, and as a share of Inductor's own time.

    python -m benchmarks.compile_time                       # growth, up to the pass: no kernel is generated
    python -m benchmarks.compile_time --share               # also complete compilations, for the share of the whole
    python -m benchmarks.compile_time --profile 20          # also the functions that the pass spends its time in
    python -m benchmarks.compile_time --check               # exit status 1 unless growth is linear and the share below 3 %

The model is the generic one with sizes as small as they come: compile time depends on the number of nodes, not on sizes. Times
of the pass are CPU times of its thread, medians of several runs on copies of one graph; Inductor's time is the clock's,
from the graph that Dynamo hands over to the loaded kernels, with every cache off. The CPU times of the thread that compiles are
beside it: they leave out the wait for the kernels' compilers (C++, Triton), which is shorter on a machine with more cores.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import json
import math
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch._functorch.config
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch._inductor.utils import fresh_inductor_cache
from torch.fx import Graph, GraphModule

from compile_passes import RecoverSSMPass
from compile_passes.install import SLOT
from models.config import KDAConfig
from models.model import KDAForCausalLM
from models.pools import Pools
from models.speculation import SpeculativeStep

LINEAR, SHARE = 1.25, 0.03  # the largest growth exponent that counts as linear, and the share that is allowed


@dataclass(frozen=True)
class Growth:
    """One graph. ``pass_s`` is CPU time of the pass, the median of ``runs``."""

    layers: int
    window: int
    nodes: int
    pass_s: float
    rewritten: int


@dataclass(frozen=True)
class Share:
    """One complete compilation, in seconds of the clock and (``cpu``) of the compiling thread."""

    layers: int
    window: int
    pass_s: float
    inductor_s: float
    total_s: float
    pass_cpu_s: float
    inductor_cpu_s: float

    @property
    def share(self) -> float:
        return self.pass_s / self.inductor_s

    @property
    def cpu_share(self) -> float:
        """Of what Inductor itself does, the kernels' compilers left out."""
        return self.pass_cpu_s / self.inductor_cpu_s


def step_of(layers: int, window: int, device: str, batch: int = 2) -> tuple[SpeculativeStep, tuple[Tensor, ...]]:
    """A speculative step of the generic model, and its arguments."""
    sizes = KDAConfig(
        vocab_size=32, hidden_size=32, num_layers=layers, full_attn_period=0, num_heads=2, head_k_dim=16, head_v_dim=16,
        gate_rank=8, intermediate_size=48,
    )  # fmt: skip
    model = KDAForCausalLM(sizes).to(device).eval()
    step = SpeculativeStep(model, Pools(sizes, batch, 4 * window, device=device))
    rows = torch.zeros(batch, dtype=torch.int64, device=device)
    noise = torch.rand(batch, window, device=device), torch.ones(batch, sizes.vocab_size, device=device)
    tokens = torch.zeros(batch, window, dtype=torch.int64, device=device)
    slots, temperature = torch.arange(batch, device=device), torch.zeros(batch, device=device)
    arguments = (tokens, rows + window - 1, rows, rows, slots, temperature, *noise)
    return step, arguments


class Reached(Exception):
    """The graph is captured; nothing else is wanted."""


def graph_before_the_pass(layers: int, window: int, device: str) -> Graph:
    """What the pass gets to see, with fake values."""
    step, arguments = step_of(layers, window, device)
    captured: list[Graph] = []

    def inner_compile(gm: GraphModule, example_inputs: list, **settings: object) -> None:
        view_to_reshape(gm)
        captured.append(gm.graph)
        raise Reached

    def backend(gm: GraphModule, inputs: list) -> object:
        with torch._functorch.config.patch(enable_autograd_cache=False):
            return compile_fx(gm, inputs, inner_compile=inner_compile, config_patches={"fx_graph_cache": False})

    torch.compiler.reset()
    try:
        torch.compile(step, backend=backend, fullgraph=True, dynamic=False)(*arguments)
    except Exception:
        if not captured:
            raise
    return captured[0]


def copy_of(graph: Graph) -> Graph:
    """Nodes of its own, the same fake values."""
    result = Graph()
    result.output(result.graph_copy(graph, {}))
    return result


def cpu_seconds(call: Callable[[], object]) -> float:
    started = time.thread_time()
    call()
    return time.thread_time() - started


def growth(layers: int, window: int, device: str, runs: int) -> Growth:
    graph = graph_before_the_pass(layers, window, device)
    seconds, recover = [], RecoverSSMPass()
    for _ in range(runs):
        seconds.append(cpu_seconds(functools.partial(recover, copy_of(graph))))
    return Growth(layers, window, len(graph.nodes), statistics.median(seconds), recover.last_report.matched)


def share(layers: int, window: int, device: str) -> Share:
    """A complete compilation with empty caches."""
    clock, cpu = (dict.fromkeys(("pass", "inductor", "total"), 0.0) for _ in range(2))

    def timed(name: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*arguments):
            started = time.perf_counter(), time.thread_time()
            result = function(*arguments)
            clock[name] += time.perf_counter() - started[0]
            cpu[name] += time.thread_time() - started[1]
            return result

        return call

    class Timed(RecoverSSMPass):
        __call__ = timed("pass", RecoverSSMPass.__call__)

    def backend(gm: GraphModule, inputs: list) -> object:
        return compile_fx(gm, inputs, config_patches={SLOT: Timed()})

    torch.compiler.reset()
    step, arguments = step_of(layers, window, device)
    compiled = torch.compile(step, backend=timed("inductor", backend), fullgraph=True, dynamic=False)
    with fresh_inductor_cache(), config.patch(force_disable_caches=True):
        # What a process pays once (looking at the compiler, precompiling its headers) is none of this model's.
        torch.compile(torch.sin)(arguments[-1])
        timed("total", compiled)(*arguments)
    return Share(layers, window, *clock.values(), cpu["pass"], cpu["inductor"])


def exponent(points: list[tuple[int, float]]) -> float:
    """p of the best fit of ``seconds = c * size^p``: 1 is linear, 2 quadratic."""
    logs = [(math.log(size), math.log(seconds)) for size, seconds in points]
    return statistics.linear_regression(*zip(*logs, strict=True)).slope


def profile_of(layers: int, window: int, device: str, lines: int) -> str:
    """The functions of the pass by their own time."""
    graph = copy_of(graph_before_the_pass(layers, window, device))
    profiler = cProfile.Profile()
    profiler.runcall(RecoverSSMPass(), graph)
    text = pstats.Stats(profiler, stream=(out := _Lines()))
    text.strip_dirs().sort_stats("tottime").print_stats(lines)
    text.sort_stats("cumulative").print_stats(lines)
    return str(out)


class _Lines(list):
    """What pstats writes to."""

    write = list.append

    def __str__(self) -> str:
        return "".join(self)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compile_time", description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--window", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--at-layers", type=int, default=2, help="layers where the window varies")
    parser.add_argument("--at-window", type=int, default=4, help="window where the number of layers varies")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--share", action="store_true", help="compile completely, too")
    parser.add_argument("--share-layers", type=int, default=4)
    parser.add_argument("--share-window", type=int, default=8)
    parser.add_argument("--profile", type=int, metavar="LINES", help="profile the largest graph")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


@torch.no_grad()
def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    console = Console()
    runs = functools.partial(growth, device=arguments.device, runs=arguments.runs)
    growth(1, 2, arguments.device, 1)  # imports and first traces
    by_layers = [runs(n, arguments.at_window) for n in arguments.layers]
    by_window = [runs(arguments.at_layers, T) for T in arguments.window]
    table = Table(title=f"the pass alone, {arguments.device}, torch {torch.__version__}")
    for column in ("layers", "T", "nodes", "rewritten", "ms", "ms a layer", "µs a node"):
        table.add_column(column, justify="right")
    for group in (by_layers, by_window):
        table.add_section()
        for g in group:
            milliseconds = 1e3 * g.pass_s
            each = f"{milliseconds / g.layers:.1f}", f"{1e3 * milliseconds / g.nodes:.1f}"
            table.add_row(str(g.layers), str(g.window), str(g.nodes), str(g.rewritten), f"{milliseconds:.1f}", *each)
    console.print(table)
    figures = {
        "torch": torch.__version__,
        "device": arguments.device,
        "growth": [asdict(g) for g in (*by_layers, *by_window)],
        "exponent_layers": exponent([(g.layers, g.pass_s) for g in by_layers]),
        "exponent_window": exponent([(g.window, g.pass_s) for g in by_window]),
    }
    console.print("time grows as layers^{exponent_layers:.2f} and as T^{exponent_window:.2f}".format(**figures))
    failed = max(figures["exponent_layers"], figures["exponent_window"]) > LINEAR
    if any(g.rewritten != g.layers for g in (*by_layers, *by_window)):
        console.print("not every layer was rewritten: these are times of refusals")
        failed = True
    if arguments.share:
        measured = share(arguments.share_layers, arguments.share_window, arguments.device)
        figures["share"] = asdict(measured) | {"share": measured.share}
        console.print(
            f"{measured.layers} layers, T {measured.window}: pass {measured.pass_s:.2f} s of Inductor's "
            f"{measured.inductor_s:.1f} s ({100 * measured.share:.1f} %), of {measured.total_s:.1f} s in all; "
            f"without the kernels' compilers {measured.pass_cpu_s:.2f} s of {measured.inductor_cpu_s:.1f} s CPU "
            f"({100 * measured.cpu_share:.1f} %)"
        )
        failed = failed or measured.share > SHARE
    if arguments.profile:
        print(profile_of(max(arguments.layers), arguments.at_window, arguments.device, arguments.profile))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    return int(arguments.check and failed)


if __name__ == "__main__":
    sys.exit(main())
