"""The rewrite of one graph: find windows, replace them, say what happened."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph, Node

from compile_passes.check import checked
from compile_passes.dedupe import dedupe_integers
from compile_passes.find import Window, candidates, match
from compile_passes.index_notation import ASSERTION, dtype, readers, shape, size_hint
from compile_passes.layer_nodes import nodes_of
from compile_passes.log import log_layer
from compile_passes.merge_commits import merge_commits
from compile_passes.origin import module_name
from compile_passes.reasons import Refused
from compile_passes.replace import Replacement
from compile_passes.report import LayerMatch, Report

Around = Callable[[Replacement], AbstractContextManager]


def rewrite(graph: Graph, *, merge_layers: bool = False, check: bool = False, around: Around = nullcontext) -> Report:
    """Replace per-position states by record and commit in a functional ATen graph, in place.

    Args:
        graph: as in Inductor's ``post_grad_custom_pre_pass``, or of an ExportedProgram after ``run_decompositions()``.
            Nodes carry fake values in ``meta["val"]``.
        merge_layers: commit all layers that are alike in one launch (``merge_commits.py``).
        check: compare every rewritten layer with the original on random inputs in float64 (``check.py``).
        around: ``around(replacement)`` is a context in which that layer is edited.

    Returns:
        The report; layers that are not understood completely are left as they were.
    """
    report = Report()
    for stack in candidates(graph):
        try:
            # Everything about a window is read and checked before anything is edited. The next window is read afterwards:
            # what it reads may be an output, or a pool, of this one.
            replacement = Replacement(match(graph, stack))
        except Refused as refusal:
            report.layers.append(_refused(stack, refusal))
            continue
        layer = _matched(stack, replacement)
        with around(replacement), checked(graph, replacement, layer) if check else nullcontext():
            replacement.apply(graph)
        stable_topological_sort(graph)
        _drop_unread(graph)
        if stack in graph.find_nodes(op="call_function", target=stack.target):
            raise AssertionError(f"states are still used after the rewrite: {stack.name}")
        report.layers.append(layer)
    for layer in report.layers:
        log_layer(layer)
    if report.matched:
        dedupe_integers(graph)
        if merge_layers:
            merge_commits(graph)
        graph.lint()
    return report


def _drop_unread(graph: Graph) -> None:
    """Dead code, and with it the assertions about values that nothing else reads."""
    for node in reversed(list(graph.nodes)):
        asserted = node.args[0] if node.target is ASSERTION else None
        unread = asserted is not None and asserted.op != "placeholder" and not readers(asserted)
        dead = node.op == "call_function" and not node.users and not node.is_impure()
        if unread or dead:
            graph.erase_node(node)


def _matched(stack: Node, replacement: Replacement) -> LayerMatch:
    window: Window = replacement.window
    state = _bytes(window.states[0].node)
    roles = window.roles
    value_heads = 1 if roles.head is None else size_hint(roles.head.size)
    rows = 1 if roles.batch is None else size_hint(roles.batch.size)
    record = 4 * rows * window.length * value_heads * size_hint(roles.value.size)
    after = record if replacement.commits else record + state
    form = "commit" if replacement.commits else "recover"
    before, origin = (
        window.length * state,
        (module_name(stack), source_line(stack), nodes_of(stack, window.states, replacement)),
    )
    return LayerMatch(True, None, source_line(stack), stack.name, before, after, form, *origin)


def _refused(stack: Node, refusal: Refused) -> LayerMatch:
    before = _bytes(stack)
    seen, origin = refusal.node, (module_name(stack), source_line(stack), nodes_of(stack, stack.args[0]))
    return LayerMatch(False, refusal.reason, source_line(seen), seen.name, before, before, None, *origin)


def _bytes(node: Node) -> int:
    return math.prod(map(size_hint, shape(node))) * dtype(node).itemsize


def source_line(node: Node) -> str:
    """``file:line: text`` of the innermost frame that the graph remembers, else the node's name."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in .*\n\s*(.*)', node.meta.get("stack_trace") or "")
    if not frames:
        return node.name
    path, line, text = frames[-1]
    return f"{path.rsplit('/', 1)[-1]}:{line}: {text.strip()}"
