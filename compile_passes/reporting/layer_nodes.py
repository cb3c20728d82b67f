"""The graph nodes of one layer in words, for pictures and logs: the graph is edited afterwards, these stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from compile_passes.reading.index_notation import Element, dtype, shape, size_hint
from compile_passes.replacing.replace import Replacement


@dataclass(frozen=True)
class LayerNodes:
    """Nodes as ``name [shape] dtype``; None where a layer has none, or where it was refused before they were found.

    Attributes:
        tokens: T, the length of the window.
        states: the stack of states.
        state: one of them.
        checkpoint: what the window starts from: the pool, or the states of the rows.
        selection: the node that takes the accepted one.
        writeback: the node that writes it to the pool.
        record: shape and dtype of the corrections ``u``.
    """

    tokens: int
    states: str
    state: str
    checkpoint: str | None = None
    selection: str | None = None
    writeback: str | None = None
    record: str | None = None


def nodes_of(stack: Node, states: Sequence[Node | Element], replacement: Replacement | None = None) -> LayerNodes:
    """Read off the graph before it is edited; ``replacement`` None for a refused layer."""
    first = states[-1].node if isinstance(states[-1], Element) else states[-1]
    known = LayerNodes(len(states), _described(stack), _kind(first))
    if replacement is None:
        return known
    window, roles = replacement.window, replacement.window.roles
    batch, heads, value = (1 if a is None else size_hint(a.size) for a in (roles.batch, roles.head, roles.value))
    return replace(
        known,
        checkpoint=_described(replacement.pool.node if replacement.pool else window.checkpoint.node),
        selection=_described(window.selection.node),
        writeback=_described(replacement.writeback) if replacement.commits else None,
        record=f"[{batch}, {window.length}, {heads}, {value}] float32",
    )


def _described(node: Node) -> str:
    return f"{node.name} {_kind(node)}"


def _kind(node: Node) -> str:
    sizes = ", ".join(str(size_hint(n) if isinstance(n, torch.SymInt) else n) for n in shape(node))
    return f"[{sizes}] {str(dtype(node)).removeprefix('torch.')}"
