"""What nodes are computed from, and what is computed from them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch.fx import Node


def ancestors(nodes: Iterable[Node], stop: Collection[Node] = ()) -> set[Node]:
    """The nodes themselves and everything that they are computed from, not looking behind ``stop``."""
    found, todo = set(), list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += [] if node in stop else node.all_input_nodes
    return found


def descendants(start: Node) -> set[Node]:
    """The node itself and everything that is computed from it."""
    found = {start}
    for node in start.graph.nodes:
        if any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found
