"""Tensors put together from several others: ``stack``, ``cat``, and slice assignment into a preallocated tensor.

After functionalization ``states[:, t] = S`` is a chain of ``select_scatter``. All of them are read alike: an index that says
which piece is meant leads to an element of that piece. A :class:`Join` is such a tensor seen as ``count`` positions along one
dimension; what the position is may be a constant, an axis, or looked up.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from compile_passes.reading.index_notation import (
    Axis,
    Digit,
    Element,
    Index,
    Lookup,
    Unresolvable,
    aten,
    same_size,
    shape,
)

STACKS = (aten.cat.default, aten.stack.default)
SCATTERS = (aten.select_scatter.default, aten.slice_scatter.default)


@dataclass(frozen=True)
class Join:
    """``node`` as ``count`` positions: the leading digit of dimension ``dim``."""

    node: Node
    dim: int
    count: int

    def at(self, which: Axis | int, names: dict[int, Axis] | None = None) -> Element:
        """The element at one position and fresh axes otherwise, or the axes that ``names`` has for a dimension."""
        names = {} if names is None else names
        index: list[Index] = []
        for dim, size in enumerate(shape(self.node)):
            rest = self._rest if dim == self.dim else size
            axis = names.setdefault(dim, Axis(f"i{dim}", rest))
            inner = () if same_size(rest, 1) else (Digit(axis, rest),)
            index.append((Digit(which, self.count), *inner) if dim == self.dim else inner)
        return Element(self.node, tuple(index))

    @property
    def _rest(self):
        """What a piece has in that dimension beside the position."""
        if self.node.target is not aten.cat.default or same_size(shape(self.node)[self.dim], self.count):
            return 1
        return shape(self.node.args[0][0])[self.dim]

    def position(self, index: tuple[Index, ...]) -> tuple[Axis | int | Lookup, tuple[Index, ...]]:
        """Which position an index addresses, and the index without it."""
        if not index[self.dim] or not same_size(index[self.dim][0].size, self.count):
            raise Unresolvable
        which, *rest = index[self.dim]
        return which.value, (*index[: self.dim], tuple(rest), *index[self.dim + 1 :])


def join_of(node: Node) -> Join | None:
    """``node`` as a join, if it is one of a known number of positions."""
    if node.op != "call_function" or node.target not in (*STACKS, *SCATTERS):
        return None
    rank = len(shape(node))
    if node.target in STACKS:
        pieces, dim = node.args[0], _dim(node) % rank
        if node.target is aten.stack.default or _same_shape(pieces):
            return Join(node, dim, len(pieces))
    else:
        dim = (node.args[2] if len(node.args) > 2 else 0) % rank
    size = shape(node)[dim]
    return Join(node, dim, size) if isinstance(size, int) else None


def _dim(node: Node) -> int:
    return node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)


def _same_shape(nodes: list[Node]) -> bool:
    """Asked for every element that is read through a ``cat``: each fake tensor is looked at once."""
    first = shape(nodes[0])
    return all(len(other) == len(first) and all(map(same_size, first, other)) for other in map(shape, nodes[1:]))


# --- (node, index of its result) -> element of one of its inputs --------------------------------------------------------


def joined(node: Node, index: tuple[Index, ...]) -> Element:
    """The element of the piece of a ``cat`` or ``stack``, where the index says which."""
    pieces, dim = node.args[0], _dim(node) % len(index)
    if node.target is aten.stack.default or _same_shape(pieces):
        which, inner = Join(node, dim, len(pieces)).position(index)
        if not isinstance(which, int):
            raise Unresolvable
        return Element(pieces[which], index[:dim] + index[dim + 1 :] if node.target is aten.stack.default else inner)
    position = _constant(index[dim])
    for piece in pieces:
        size = shape(piece)[dim]
        if not isinstance(size, int):
            break
        if position < size:
            at: Index = () if size == 1 else (Digit(position, size),)
            return Element(piece, (*index[:dim], at, *index[dim + 1 :]))
        position -= size
    raise Unresolvable


def selected_scatter(node: Node, index: tuple[Index, ...]) -> Element:
    """``select_scatter(base, source, dim, position)``: the source there, the base elsewhere."""
    base, source, dim, written = node.args
    dim %= len(index)
    size = shape(base)[dim]
    if isinstance(size, int) and isinstance(written, int) and same_size(size, 1):
        return Element(source, index[:dim] + index[dim + 1 :])
    if not isinstance(size, int) or not isinstance(written, int):
        raise Unresolvable
    if _constant(index[dim]) == written % size:
        return Element(source, index[:dim] + index[dim + 1 :])
    return Element(base, index)


def sliced_scatter(node: Node, index: tuple[Index, ...]) -> Element:
    """``slice_scatter(base, source, dim, start, end, step)``, for one known position or where all are written."""
    base, source, *rest = node.args
    dim, start, _, step = (*rest, *(0, None, None, 1)[len(rest) :])
    dim %= len(index)
    size, written = shape(base)[dim], shape(source)[dim]
    if step == 1 and same_size(size, written):
        return Element(source, index)
    if not all(isinstance(x, int) for x in (size, written, start or 0, step)):
        raise Unresolvable
    start = max(size + start, 0) if start is not None and start < 0 else start or 0
    offset, misfit = divmod(_constant(index[dim]) - start, step)
    if misfit or not 0 <= offset < written:
        return Element(base, index)
    at: Index = () if written == 1 else (Digit(offset, written),)
    return Element(source, (*index[:dim], at, *index[dim + 1 :]))


def _constant(index: Index) -> int:
    if len(index) == 1 and isinstance(index[0].value, int):
        return index[0].value
    raise Unresolvable
