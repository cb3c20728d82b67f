"""Commits of all layers of a step: one call a layer against one call for all, both as CUDA graphs.

    python -m benchmarks.commit_layers

Recurrent states by ``kda_commit`` and ``kda_commit_layers``, convolution histories by ``causal_conv1d_commit`` and
``causal_conv1d_commit_layers``. A replay commits several steps, each into slots of its own, which together are larger than the
L2 cache; the figures are per step (all of its layers). The ways alternate within one run; accepted lengths differ per row.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.reporting import check_at_least, check_device, console_for_tables, machine, measure_all
from benchmarks.timing import alternate, quartiles, replayed
from recoverssm_ops import (
    causal_conv1d_commit,
    causal_conv1d_commit_layers,
    kda_commit,
    kda_commit_layers,
    kda_verify,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LOOP, TOGETHER = "loop", "one call"
STATES, HISTORIES = "states", "histories"


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.commit_layers", description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 128], help="batch sizes, one or more")
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 69], help="layers of a step, one number or more")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head-dim", type=int, default=128, help="K and V")
    parser.add_argument("--window", type=int, default=8, help="tokens, T")
    parser.add_argument("--width", type=int, default=4, help="of the convolution, W")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="activations and histories")
    parser.add_argument("--state-dtype", choices=DTYPES, default="fp32", help="recurrent pools")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--mib", type=int, default=128, help="of pool that a replay writes, at least")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    arguments = parser.parse_args(argv)
    check_at_least(parser, arguments, batch=1, layers=1, heads=1, head_dim=1, window=1, width=2, samples=2, mib=0)
    check_device(parser, arguments.device)
    return arguments


class Step:
    """Pools of all layers, what a window left to be committed, and the slots of ``repeats`` steps."""

    def __init__(self, pool_shape: tuple[int, ...], dtype: torch.dtype, layers: int, batch: int, options) -> None:
        """``pool_shape`` is of one slot."""
        slot_bytes = torch.Size(pool_shape).numel() * dtype.itemsize
        # Thousands of launches in a replay are enough.
        self.repeats = max(1, min(4096 // layers, -(-options.mib * 2**20 // (slot_bytes * layers * batch))))
        generator = torch.Generator().manual_seed(0)
        slots = torch.randperm(self.repeats * batch, generator=generator).view(self.repeats, batch)
        self.slots = slots.to(options.device).unbind()
        lengths = torch.randint(1, options.window + 1, (self.repeats, batch), generator=generator)
        self.num_accepted = lengths.to(options.device).unbind()
        shape = (self.repeats * batch, *pool_shape)
        self.pools = [torch.randn(shape, device=options.device).to(dtype) for _ in range(layers)]

    def rows(self) -> zip:
        return zip(self.num_accepted, self.slots, strict=True)


class States(Step):
    def __init__(self, layers: int, batch: int, options: argparse.Namespace) -> None:
        heads, dim = options.heads, options.head_dim
        super().__init__((heads, dim, dim), DTYPES[options.state_dtype], layers, batch, options)

        def random(*shape: int) -> Tensor:
            return torch.randn(batch, options.window, *shape, device=options.device).to(DTYPES[options.dtype])

        self.records = []
        for pool in self.pools:
            q, k, v, g = (random(heads, dim) for _ in range(4))
            gate = {"A_log": torch.zeros(heads, device=options.device), "lower_bound": -5.0, "use_gate_in_kernel": True}
            window = (q, k, v, g, random(heads).sigmoid(), pool, self.slots[0])
            self.records.append(kda_verify(*window, use_qk_l2norm_in_kernel=True, **gate)[1])

    def fresh_records(self) -> list:
        """A record is consumed by its commit; what is measured here commits it again and again."""
        return [dataclasses.replace(record, committed=False) for record in self.records]

    def loop(self) -> None:
        for rows in self.rows():
            for pool, record in zip(self.pools, self.fresh_records(), strict=True):
                kda_commit(pool, record, *rows)

    def together(self) -> None:
        for rows in self.rows():
            kda_commit_layers(self.pools, self.fresh_records(), *rows)


class Histories(Step):
    def __init__(self, layers: int, batch: int, options: argparse.Namespace) -> None:
        channels, dtype = 3 * options.heads * options.head_dim, DTYPES[options.dtype]
        super().__init__((channels, options.width - 1), dtype, layers, batch, options)
        shape = (batch, options.window, channels)
        self.xs = [torch.randn(shape, device=options.device).to(dtype) for _ in range(layers)]

    def loop(self) -> None:
        for rows in self.rows():
            for pool, x in zip(self.pools, self.xs, strict=True):
                causal_conv1d_commit(pool, x, *rows)

    def together(self) -> None:
        for rows in self.rows():
            causal_conv1d_commit_layers(self.pools, self.xs, *rows)


def check_equal(step: States | Histories) -> None:
    """The ways write the same bits, or their times do not compare."""
    before = [pool.clone() for pool in step.pools]
    step.loop()
    after = [pool.clone() for pool in step.pools]
    for pool, x in zip(step.pools, before, strict=True):
        pool.copy_(x)
    step.together()
    for layer, (pool, x, old) in enumerate(zip(step.pools, after, before, strict=True)):
        if not torch.equal(pool, x) or torch.equal(pool, old):
            raise RuntimeError(f"layer {layer}: one call for all layers should write what the loop writes, but did not")


def measure(kind: str, layers: int, batch: int, options: argparse.Namespace) -> list[dict]:
    step = (States if kind == STATES else Histories)(layers, batch, options)
    check_equal(step)
    ways: dict[str, Callable[[], None]] = {LOOP: step.loop, TOGETHER: step.together}
    calls = {way: replayed(work, options.device) for way, work in ways.items()}
    figures = []
    for way, values in alternate(calls, options.samples, options.device).items():
        low, median, high = (1e3 * value / step.repeats for value in quartiles(values))
        shape = {"what": kind, "layers": layers, "batch": batch, "way": way, "steps_per_replay": step.repeats}
        figures.append(shape | {"step_us": median, "quartiles_us": [low, high]})
    return figures


@torch.no_grad()
def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    torch.manual_seed(0)
    console, about = console_for_tables(), machine(arguments.device)
    sizes = [
        (kind, layers, batch)
        for kind in (STATES, HISTORIES)
        for layers in arguments.layers
        for batch in arguments.batch
    ]
    figures, status = measure_all(sizes, measure, arguments, about, console)
    title = f"Commits of a step, T {arguments.window}, {arguments.heads} heads of {arguments.head_dim}, "
    title += f"{arguments.dtype} activations, {arguments.state_dtype} states, {about['device']}, torch {about['torch']}"
    table = Table(title=title)
    columns = (
        "",
        "layers",
        "batch",
        "loop, µs a step (quartiles)",
        "one call, µs a step (quartiles)",
        "times the loop",
    )
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    for loop, together in zip(figures[::2], figures[1::2], strict=True):
        cells = [f"{f['step_us']:.1f} ({' .. '.join(f'{q:.1f}' for q in f['quartiles_us'])})" for f in (loop, together)]
        speed = f"{loop['step_us'] / together['step_us']:.2f}"
        table.add_row(loop["what"], str(loop["layers"]), str(loop["batch"]), *cells, speed)
    console.print(table)
    return status


if __name__ == "__main__":
    sys.exit(main())
