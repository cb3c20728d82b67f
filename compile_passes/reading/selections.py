"""Selections, read as views with looked-up digits: gather, advanced indexing, one position that only the data tells."""

from __future__ import annotations

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import guard_or_false

from compile_passes.reading.index_notation import (
    Digit,
    Element,
    Index,
    Lookup,
    Size,
    Unresolvable,
    aten,
    broadcast,
    dtype,
    same_size,
    shape,
)
from compile_passes.reading.views import counter, strip


def chosen(element: Element) -> Element:
    """Follow views as :func:`views.strip` does, and selections too, which leave :class:`Lookup` digits."""
    while True:
        element = strip(element)
        step = SELECTIONS.get(element.node.target) if element.node.op == "call_function" else None
        if step is None:
            return element
        try:
            element = step(element.node, element.index)
        except Unresolvable:
            return element


def _looked_up(element: Element, size: Size) -> Index:
    """``x[arange(n)]`` is x itself; anything else is looked up."""
    if same_size(size, 1):
        return ()
    counted = strip(element)
    row = counter(counted)
    if row is not None and same_size(row.size, size):
        return (Digit(row, size),)
    return (Digit(Lookup(element), size),)


def _advanced_index(node: Node, index: tuple[Index, ...]) -> Element:
    source, indices = node.args
    if any(i is not None and dtype(i) in (torch.bool, torch.uint8) for i in indices):
        raise Unresolvable
    used = [p for p, i in enumerate(indices) if i is not None]
    rank = max(len(shape(indices[p])) for p in used)
    first = used[0] if used == list(range(used[0], used[-1] + 1)) else 0
    block, rest = index[first : first + rank], iter(index[:first] + index[first + rank :])
    sizes = shape(source)
    result = []
    for position, size in enumerate(sizes):
        tensor = indices[position] if position < len(indices) else None
        result.append(next(rest) if tensor is None else _looked_up(broadcast(block, tensor), size))
    return Element(source, tuple(result))


def _index_select(node: Node, index: tuple[Index, ...]) -> Element:
    source, dim, tensor = node.args
    dim %= len(index)
    looked_up = _looked_up(Element(tensor, (index[dim],)), shape(source)[dim])
    return Element(source, (*index[:dim], looked_up, *index[dim + 1 :]))


def _gather(node: Node, index: tuple[Index, ...]) -> Element:
    source, dim, tensor = node.args[:3]
    dim %= len(index)
    for position, (part, whole) in enumerate(zip(shape(tensor), shape(source), strict=True)):
        # A gather may ask for a part of the other dimensions. Whether two dynamic sizes are equal is left to a guard.
        if position != dim and not guard_or_false(part == whole):
            raise Unresolvable
    looked_up = _looked_up(Element(tensor, index), shape(source)[dim])
    return Element(source, (*index[:dim], looked_up, *index[dim + 1 :]))


def _scalar_select(node: Node, index: tuple[Index, ...]) -> Element:
    """``x.select(dim, n)`` where n is a number that came out of a tensor."""
    source, dim, position = node.args
    if not isinstance(position, Node):
        raise Unresolvable
    dim %= len(shape(source))
    looked_up = (Digit(Lookup(Element(position, ())), shape(source)[dim]),)
    return Element(source, (*index[:dim], looked_up, *index[dim:]))


def _scalar_slice(node: Node, index: tuple[Index, ...]) -> Element:
    """``x.narrow(dim, n, 1)``, likewise."""
    source, dim, start = node.args[:3] if len(node.args) > 2 else (None, 0, None)
    if not isinstance(start, Node) or len(node.args) > 4 or not same_size(shape(node)[dim], 1):
        raise Unresolvable
    dim %= len(index)
    looked_up = (Digit(Lookup(Element(start, ())), shape(source)[dim]),)
    return Element(source, (*index[:dim], looked_up, *index[dim + 1 :]))


SELECTIONS = {
    aten.index.Tensor: _advanced_index,
    aten.index_select.default: _index_select,
    aten.gather.default: _gather,
    aten.select.int: _scalar_select,
    aten.slice.Tensor: _scalar_slice,
}
