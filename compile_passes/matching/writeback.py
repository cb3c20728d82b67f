"""Where the selected state goes: back into the slots it was gathered from, or somewhere else."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from compile_passes.matching.window import Selection, Window
from compile_passes.reading.algebra import same
from compile_passes.reading.index_notation import (
    Axis,
    Digit,
    Element,
    Lookup,
    aten,
    dtype,
    element_of,
    readers,
    same_size,
    shape,
)
from compile_passes.reading.selections import chosen
from compile_passes.reading.views import CASTS, cast_source, strip
from compile_passes.replacing.counts import selects_zeros


@dataclass
class Pool:
    """The checkpoints are ``node[slots]``; ``slots`` None means that row b is slot b."""

    node: Node
    slots: Element | None


def pool_of(window: Window) -> Pool | None:
    """The pool a window's checkpoints were gathered from, if it is laid out ``[slots, HV, V, K]``."""
    element, roles = chosen(window.checkpoint), window.roles
    if len(element.index) != 4 or not all(map(_is_axis, element.index[1:], (roles.head, roles.value, roles.key))):
        return None
    rows = element.index[0]
    if len(rows) == 1 and isinstance(rows[0].value, Lookup) and rows[0].value.row is None:
        return Pool(element.node, strip(rows[0].value.element))
    return Pool(element.node, None) if _is_axis(rows, roles.batch) else None


def _is_axis(index: tuple[Digit, ...], axis: Axis | None) -> bool:
    return index == () if axis is None else len(index) == 1 and index[0].value is axis


def find_writeback(window: Window, pool: Pool) -> Node | None:
    """The node that puts the selected state back where the checkpoint came from, if that is its only use."""
    node = window.selection.node
    if selects_zeros(window.selection.count) or window.selection.dtype not in (torch.float32, dtype(pool.node)):
        return None
    while len(readers(node)) == 1:
        (user,) = readers(node)
        if user.op == "output":
            return None
        if user.target is aten.index_put.default:
            return user if _same_slots(user, node, window, pool) else None
        if user.target in (aten.copy_.default, aten.copy.default) and user.args[0] is pool.node:
            whole = pool.slots is None and _same_order(node, window)
            if user.target is aten.copy.default:  # casts to the pool's dtype itself
                return user if whole and dtype(node) in (torch.float32, dtype(pool.node)) else None
            return node if whole and dtype(node) == dtype(pool.node) else None
        if _moved(user, window.selection) is None:
            return None
        node = user
    return None


def _same_slots(put: Node, value: Node, window: Window, pool: Pool) -> bool:
    target, indices, values, *accumulate = put.args
    if target is not pool.node or values is not value:
        return False
    if len(indices) != 1 or any(accumulate) or put.kwargs:
        return False
    if len(shape(indices[0])) != 1 or dtype(value) != dtype(pool.node):
        return False
    if pool.slots is None:
        # A pool of one slot: whatever the index, it is that one.
        alone = window.roles.batch is None and same_size(shape(pool.node)[0], 1)
        return alone and _same_order(value, window)
    index, (row,) = element_of(indices[0])
    names = dict.fromkeys([row]) if window.roles.batch is None else {row: window.roles.batch}
    slots = Element(index.node, tuple(tuple(Digit(names[d.value], d.size) for d in i) for i in index.index))
    return same(slots, pool.slots) and _same_order(value, window)


def _same_order(value: Node, window: Window) -> bool:
    """``value`` is the selected state as ``[batch, head, value, key]``; leading dimensions of size 1 may be missing."""
    axes = _moved(value, window.selection)
    roles = window.roles
    wanted = [roles.batch, roles.head, roles.value, roles.key]
    missing = len(wanted) - len(axes or [])
    return axes is not None and axes == wanted[missing:] and not any(wanted[:missing])


def _moved(node: Node, selection: Selection) -> list[Axis | None] | None:
    """The axes of a view or cast of the selected state, one for each dimension."""
    element, axes = element_of(node)
    element = strip(element)
    if element.node.target in CASTS and element.node is not selection.node and dtype(element.node) == dtype(node):
        element = strip(cast_source(element))
    if element.node is not selection.node or len(element.index) != len(selection.axes):
        return None
    names = {}
    for index, axis in zip(element.index, selection.axes, strict=True):
        if len(index) > 1 or (axis is None) != (index == ()):
            return None
        if axis is not None:
            names[index[0].value] = axis
    return [names.get(a) for a in axes]
