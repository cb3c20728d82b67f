"""The short convolution of one window and its history's update: as Inductor compiles it, and by the library's kernels.

    python -m benchmarks.conv

As compiled: :mod:`models.short_conv` as the generic model uses it (histories gathered from the pool, convolution, history
selected at the accepted length, written back). By kernels: ``causal_conv1d_verify`` and ``causal_conv1d_commit``. Each is one
CUDA graph of many layers with pools and windows of their own, together larger than the L2 cache, and the figures are per
layer: time of a replay over the layers. The two alternate within one run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.reporting import check_at_least, check_device, console_for_tables, machine, measure_all
from benchmarks.timing import alternate, quartiles, replayed
from models.short_conv import causal_conv1d_window, history_after
from recoverssm_ops import causal_conv1d_commit, causal_conv1d_verify

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
INDUCTOR, KERNELS = "Inductor", "kernels"


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conv", description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 128], help="batch sizes, one or more")
    parser.add_argument("--channels", type=int, default=3 * 32 * 128, help="of q, k and v together")
    parser.add_argument("--window", type=int, default=8, help="tokens, T")
    parser.add_argument("--width", type=int, default=4, help="of the convolution, W")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--mib", type=int, default=256, help="that the layers of a replay touch together, at least")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    arguments = parser.parse_args(argv)
    check_at_least(parser, arguments, batch=1, channels=1, window=1, width=2, samples=2, mib=0)
    check_device(parser, arguments.device)
    return arguments


class Layers:
    """Windows, weights and pools of layers enough to touch ``mib`` MiB; slots in a scattered order."""

    def __init__(self, arguments: argparse.Namespace, batch: int) -> None:
        channels, window, width, device = arguments.channels, arguments.window, arguments.width, arguments.device
        options = {"device": device, "dtype": DTYPES[arguments.dtype]}
        # A layer reads and writes a window and the histories.
        touched = 2 * batch * channels * (window + width - 1) * options["dtype"].itemsize
        self.count = max(1, -(-arguments.mib * 2**20 // touched))
        generator = torch.Generator().manual_seed(0)
        torch.manual_seed(0)
        self.xs = torch.randn(self.count, batch, window, channels, **options).unbind()
        self.weights = torch.randn(self.count, channels, width, **options).unbind()
        shape = (2 * batch, channels, width - 1)
        self.pools = {way: [torch.randn(shape, **options) for _ in range(self.count)] for way in (INDUCTOR, KERNELS)}
        self.reset()
        self.slots = torch.randperm(2 * batch, generator=generator)[:batch].to(device)
        self.num_accepted = torch.randint(1, window + 1, (batch,), generator=generator).to(device)

    def reset(self) -> None:
        """The pools of both ways hold the same."""
        for mine, other in zip(*self.pools.values(), strict=True):
            mine.copy_(other)

    def outputs(self, way: str, layer_step: Callable[..., Tensor]) -> list[Tensor]:
        rows = (self.slots, self.num_accepted)
        arguments = zip(self.xs, self.weights, self.pools[way], strict=True)
        return [layer_step(x, weight, pool, *rows) for x, weight, pool in arguments]


def compiled_layer(x: Tensor, weight: Tensor, pool: Tensor, slots: Tensor, num_accepted: Tensor) -> Tensor:
    y, extended = causal_conv1d_window(x, pool[slots], weight)
    pool[slots] = history_after(extended, num_accepted, weight.shape[1])
    return y


def kernel_layer(x: Tensor, weight: Tensor, pool: Tensor, slots: Tensor, num_accepted: Tensor) -> Tensor:
    y = causal_conv1d_verify(x, weight, None, pool, slots)
    causal_conv1d_commit(pool, x, num_accepted, slots)
    return y


def check_equal(layers: Layers, steps: dict[str, Callable[..., Tensor]]) -> None:
    """Both ways compute the same, or their times do not compare: outputs up to rounding, histories to the bit."""
    one, other = (layers.outputs(way, step) for way, step in steps.items())
    # The library that Inductor calls may multiply float32 as tf32.
    tolerance = max(4 * torch.finfo(one[0].dtype).eps, 2**-9)
    for a, b in zip(one, other, strict=True):
        # Inductor's way rounds once more, before the activation.
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * a.abs().max().item())
    for a, b in zip(*layers.pools.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def measure(batch: int, arguments: argparse.Namespace) -> list[dict]:
    layers = Layers(arguments, batch)
    # One batch size is one graph, as in a captured step.
    torch.compiler.reset()
    steps = {INDUCTOR: torch.compile(compiled_layer, fullgraph=True, dynamic=False), KERNELS: kernel_layer}
    check_equal(layers, steps)
    calls = {
        way: replayed(lambda way=way, step=step: layers.outputs(way, step), arguments.device)
        for way, step in steps.items()
    }
    figures = []
    for way, values in alternate(calls, arguments.samples, arguments.device).items():
        low, median, high = (1e3 * value / layers.count for value in quartiles(values))
        figures.append(
            {"batch": batch, "way": way, "layers": layers.count, "layer_us": median, "quartiles_us": [low, high]}
        )
    return figures


@torch.no_grad()
def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    console, about = console_for_tables(), machine(arguments.device)
    batches = list(dict.fromkeys(arguments.batch))
    figures, status = measure_all([(batch,) for batch in batches], measure, arguments, about, console)
    title = f"Short convolution of a layer, T {arguments.window}, {arguments.channels} channels, W {arguments.width}, "
    table = Table(title=title + f"{arguments.dtype}, {about['device']}, torch {about['torch']}")
    for column in ("batch", "", "µs a layer (quartiles)", "times Inductor", "layers a replay"):
        table.add_column(column, justify="right" if column else "left")
    for f in figures:
        (plain,) = (g for g in figures if g["batch"] == f["batch"] and g["way"] == INDUCTOR)
        low, high = f["quartiles_us"]
        spread = f"{f['layer_us']:.2f} ({low:.2f} .. {high:.2f})"
        speed = f"{plain['layer_us'] / f['layer_us']:.2f}"
        table.add_row(str(f["batch"]), f["way"], spread, speed, str(f["layers"]), end_section=f["way"] == KERNELS)
    console.print(table)
    return status


if __name__ == "__main__":
    sys.exit(main())
