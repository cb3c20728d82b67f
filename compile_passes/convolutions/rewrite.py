"""The rewrite of a graph's short convolutions."""

from __future__ import annotations

from contextlib import nullcontext

from torch.fx import Graph, Node

from compile_passes.convolutions.check import checked
from compile_passes.convolutions.reasons import Left
from compile_passes.convolutions.replace import ConvolutionReplacement
from compile_passes.convolutions.sequence import sequences
from compile_passes.convolutions.sums import find_convolution
from compile_passes.convolutions.update import find_update
from compile_passes.reporting.origin import module_name, source_line
from compile_passes.reporting.report import ConvolutionMatch


def rewrite_convolutions(graph: Graph, *, cuda_only: bool = False, check: bool = False) -> list[ConvolutionMatch]:
    """Replace every short convolution whose history is updated in the same graph, in place; the others are left alone.

    Both halves or neither: an operator that reads the pool beside the model's own code that gathers the history would read it
    twice.

    Args:
        cuda_only: those whose pools are on CUDA.
        check: compare each with what replaces it, on random inputs in float64.
    """
    matches = []
    for sequence in sequences(graph):
        try:
            if isinstance(sequence, Left):
                raise sequence
            convolution = find_convolution(sequence)
            if convolution is None:
                continue
            replacement = ConvolutionReplacement(sequence, convolution, find_update(sequence))
            if cuda_only and sequence.pool.meta["val"].device.type != "cuda":
                raise Left("on_cpu", convolution.root)
        except Left as left:
            matches.append(_match(left.node, left.reason))
            continue
        match = _match(convolution.root, None)
        with checked(graph, replacement, match) if check else nullcontext():
            replacement.apply(graph)
        matches.append(match)
    return matches


def _match(node: Node, reason: str | None) -> ConvolutionMatch:
    return ConvolutionMatch(reason is None, reason, source_line(node), node.name, module_name(node))
