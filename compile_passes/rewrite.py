"""The rewrite of one graph: find windows, replace them, say what happened."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch.fx import Graph, Node

from compile_passes.checking.check import checked
from compile_passes.convolutions.rewrite import rewrite_convolutions
from compile_passes.matching.find import match
from compile_passes.matching.reasons import Refused
from compile_passes.reading.candidates import Candidate, candidates
from compile_passes.reading.index_notation import dtype, shape, size_hint
from compile_passes.replacing.dedupe import dedupe_integers
from compile_passes.replacing.merge_commits import merge_commits
from compile_passes.replacing.replace import Replacement
from compile_passes.replacing.unread import drop_unread
from compile_passes.replacing.unroll import unroll_loops
from compile_passes.reporting.layer_nodes import nodes_of
from compile_passes.reporting.log import log_convolution, log_layer
from compile_passes.reporting.origin import module_name, source_line
from compile_passes.reporting.report import LayerMatch, Report

Around = Callable[[Replacement], AbstractContextManager]


def rewrite(
    graph: Graph,
    *,
    merge_layers: bool | None = False,
    check: bool = False,
    convolutions: bool | None = None,
    around: Around = nullcontext,
) -> Report:
    """Replace per-position states by record and commit in a functional ATen graph, in place.

    Args:
        graph: as in Inductor's ``post_grad_custom_pre_pass``, or of an ExportedProgram after ``run_decompositions()``.
            Nodes carry fake values in ``meta["val"]``.
        merge_layers: commit all layers that are alike in one launch (``merge_commits.py``); None: where pools are on CUDA.
        check: compare every rewritten layer with the original on random inputs in float64 (``check.py``).
        convolutions: replace short convolutions and their histories' updates too; None: those whose pools are on CUDA.
        around: ``around(replacement)`` is a context in which that layer is edited.

    Returns:
        The report; layers that are not understood completely are left as they were.
    """
    report = Report()
    if convolutions is not False:
        report.convolutions += rewrite_convolutions(graph, cuda_only=convolutions is None, check=check)
    loops = unroll_loops(graph)
    for candidate in candidates(graph):
        try:
            # Everything about a window is read and checked before anything is edited. The next window is read afterwards:
            # what it reads may be an output, or a pool, of this one.
            window = match(candidate)
            replacement = None if window is None else Replacement(window)
        except Refused as refusal:
            if not candidate.stored or refusal.reason == "stored_per_position":
                report.layers.append(_refused(candidate, refusal))
            continue
        if replacement is None:
            continue
        layer = _matched(replacement)
        with around(replacement), checked(graph, replacement, layer) if check else nullcontext():
            replacement.apply(graph)
        _drop_unread(graph, replacement)
        report.layers.append(layer)
    for loop in loops:
        loop.settle()
    for layer in report.layers:
        log_layer(layer)
    for convolution in report.convolutions:
        log_convolution(convolution)
    if report.matched or report.convolutions_replaced:
        dedupe_integers(graph)
        if merge_layers or merge_layers is None:
            merge_commits(graph, "cuda" if merge_layers is None else None)
        graph.lint()
    return report


def _drop_unread(graph: Graph, replacement: Replacement) -> None:
    """What only the window read, and with it the assertions about values that nothing else reads."""
    window = replacement.window
    drop_unread(graph, [window.anchor, window.selection.node, *replacement.replaced])
    if not all(state.node._erased for state in window.states):
        raise AssertionError(f"states are still used after the rewrite: {window.anchor.name}")


def _matched(replacement: Replacement) -> LayerMatch:
    window = replacement.window
    state = _bytes(window.states[0].node)
    roles = window.roles
    value_heads = 1 if roles.head is None else size_hint(roles.head.size)
    rows = 1 if roles.batch is None else size_hint(roles.batch.size)
    record = 4 * rows * window.length * value_heads * size_hint(roles.value.size)
    after = record if replacement.commits else record + state
    form = "commit" if replacement.commits else "recover"
    anchor = window.anchor
    origin = (module_name(anchor), source_line(anchor), nodes_of(anchor, window.states, replacement))
    return LayerMatch(True, None, source_line(anchor), anchor.name, window.length * state, after, form, *origin)


def _refused(candidate: Candidate, refusal: Refused) -> LayerMatch:
    anchor, seen = candidate.anchor, refusal.node
    before = len(candidate.states) * _bytes(candidate.states[-1].node)
    origin = (module_name(anchor), source_line(anchor), nodes_of(anchor, candidate.states))
    return LayerMatch(False, refusal.reason, source_line(seen), seen.name, before, before, None, *origin)


def _bytes(node: Node) -> int:
    return math.prod(map(size_hint, shape(node))) * dtype(node).itemsize
