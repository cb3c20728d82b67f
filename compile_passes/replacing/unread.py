"""What nobody reads any more leaves the graph."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Graph, Node

from compile_passes.reading.index_notation import readers


def drop_unread(graph: Graph, nodes: Iterable[Node]) -> None:
    """Erase those of ``nodes`` that are not read, with the assertions about their values, and what only they read."""
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node._erased or node.op != "call_function" or node.is_impure() or readers(node):
            continue
        for assertion in list(node.users):
            graph.erase_node(assertion)
        sources = node.all_input_nodes
        graph.erase_node(node)
        todo += sources
