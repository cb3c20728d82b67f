"""The options by which the benchmarks of one layer's kernels are told their shapes."""

from __future__ import annotations

import argparse
from itertools import product

from benchmarks.reporting import check_at_least
from benchmarks.shapes import DTYPES, Shape


def add_shape_options(
    parser: argparse.ArgumentParser, *, batch: list[int], heads: list[int], window: list[int], state_dtype: list[str]
) -> None:
    """Every combination of what is named is a shape; the arguments are the defaults where a command has its own."""
    several = {"type": int, "nargs": "+"}
    parser.add_argument("--batch", default=batch, **several)
    parser.add_argument("--heads", default=heads, help="key heads", **several)
    parser.add_argument("--value-heads", type=int, default=0, help="a multiple of the key heads; default: as many")
    parser.add_argument("--window", default=window, help="T = 1 + drafts", **several)
    parser.add_argument("--head-size", default=[128], **several)
    parser.add_argument("--state-dtype", choices=DTYPES, nargs="+", default=state_dtype)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of q, k, v, g, beta")
    parser.add_argument("--gate", choices=("bounded", "unbounded"), nargs="+", default=["bounded"])
    parser.add_argument("--scalar-gate", action="store_true", help="one decay per head: the gated delta rule")


def check_shape_options(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    check_at_least(parser, arguments, batch=1, heads=1, value_heads=0, window=1, head_size=1)
    for heads in arguments.heads:
        if arguments.value_heads % heads:
            parser.error(f"--value-heads should be a multiple of --heads {heads}, got {arguments.value_heads}")


def shapes_of(arguments: argparse.Namespace) -> list[Shape]:
    return [
        Shape(batch, heads, window, pool, size, arguments.value_heads, gate, arguments.scalar_gate, arguments.dtype)
        for pool, gate, size, batch, heads, window in product(
            arguments.state_dtype, arguments.gate, arguments.head_size, arguments.batch, arguments.heads,
            arguments.window,
        )
    ]  # fmt: skip
