"""Slots and accepted positions are the same for every layer; compute them once.

Every layer of a model writes ``num_accepted - 1``, and every rewritten window adds its own arithmetic on it. Inductor does
not look for common subexpressions this late, and each would be a kernel of its own, as expensive to launch as a large one.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from compile_passes.reading.index_notation import aten, dtype, prims
from compile_passes.reading.integers import ELEMENTWISE

PURE = ELEMENTWISE | {
    aten.lt.Scalar,
    aten.unsqueeze.default,
    aten.where.self,
    aten.arange.default,
    aten.arange.start_step,
    prims.iota.default,
}


def dedupe_integers(graph: Graph) -> None:
    """Merge integer nodes that compute the same. Results of the graph keep tensors of their own."""
    _dedupe_sizes(graph)
    first: dict[tuple, Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in PURE or dtype(node).is_floating_point:
            continue
        if any(user.op == "output" or user.target is aten.copy_.default for user in node.users):
            continue
        leaves, structure = pytree.tree_flatten((node.args, node.kwargs))
        if any(isinstance(x, torch.SymInt) for x in leaves):
            continue
        # 1, 1.0 and True are equal keys, and different arguments.
        key = (node.target, str(structure), *((type(x), x) for x in leaves))
        kept = first.setdefault(key, node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            graph.erase_node(node)


def _dedupe_sizes(graph: Graph) -> None:
    """A size that is the same symbol is the same number, whichever tensor it was read from."""
    first: dict[object, Node] = {}
    for node in graph.find_nodes(op="call_function", target=aten.sym_size.int):
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            kept = first.setdefault(value.node.expr, node)
            if kept is not node:
                node.replace_all_uses_with(kept)
                graph.erase_node(node)
