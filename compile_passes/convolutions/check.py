"""``check=True`` for short convolutions: what the model computes against what the operators do, as in ``checking/check.py``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.fx import Graph, Node

from compile_passes.checking.check import SEED, Original, compared, cut_off, distinct_slots, random_value
from compile_passes.convolutions.replace import ConvolutionReplacement
from compile_passes.reporting.report import ConvolutionMatch


@contextmanager
def checked(graph: Graph, replacement: ConvolutionReplacement, match: ConvolutionMatch) -> Iterator[None]:
    """Around ``replacement.apply(graph)``. Raises RewriteCheckError if the edit changed what is computed."""
    name = " at ".join(x for x in (match.module, match.source) if x)
    with compared(graph, f"short convolution {name}", replacement.exits, lambda exits: _original(replacement, exits)):
        yield


def _original(replacement: ConvolutionReplacement, exits: list[Node]) -> Original:
    sequence, count = replacement.sequence, replacement.update.count
    leaves = replacement.leaves()
    piece = cut_off(exits, leaves)
    generator = torch.Generator().manual_seed(SEED)
    values = {node: random_value(node, generator) for node in dict.fromkeys([*piece.inputs, *sorted(leaves, key=str)])}
    slots = set(replacement.integers([sequence.slots])) if sequence.slots is not None else set()
    for node in slots & values.keys():
        direct = node is sequence.slots.node and len(slots) == 1
        values[node] = distinct_slots(values, piece, sequence.pool, node, 0, direct, generator)
    integers = [n for n, x in values.items() if isinstance(x, Tensor) and x.dtype in (torch.int64, torch.int32)]
    numbers = [n for n in integers if n not in slots]
    # A count of 0 .. T tokens, where it is one integer more or less; else what the model itself would take.
    lows = (-count.start - count.shift, 0, 1) if len(numbers) == 1 else (0, 1)
    return Original(piece, values, numbers, sequence.window + 1, sequence.pool, lows)
