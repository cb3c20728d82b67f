"""What a short convolution reads: a history gathered from a pool, and the window's inputs behind it.

However the two are put together, and in whatever layout, each column of the result is an element of the pool or one of the
window's inputs. That is all that the rest of the pass compares with.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from torch.fx import Graph, Node

from compile_passes.convolutions.reasons import Left
from compile_passes.reading.algebra import same
from compile_passes.reading.index_notation import (
    Axis,
    Digit,
    Element,
    Index,
    Lookup,
    Unresolvable,
    aten,
    axis_index,
    dtype,
    shape,
)
from compile_passes.reading.joins import SCATTERS, STACKS, join_of
from compile_passes.reading.selections import chosen
from compile_passes.reading.views import CASTS, cast_source
from recoverssm_ops.validation import MAX_CONV_WIDTH, MAX_WINDOW

LONGEST_HISTORY = MAX_CONV_WIDTH - 1
UNFOLD = aten.unfold.default


@dataclass
class Sequence:
    """``columns`` at ``[batch, channel]``: the ``kept`` elements of ``pool[slots]``, oldest first, then the window's inputs.

    ``slots`` None means that row b is slot b; ``batch`` is None where there is one row.
    """

    joins: list[Node]
    pool: Node
    slots: Element | None
    batch: Axis | None
    channel: Axis
    columns: list[Element]
    kept: int

    @property
    def window(self) -> int:
        return len(self.columns) - self.kept

    @property
    def inputs(self) -> list[Element]:
        """The window's inputs, one a token."""
        return self.columns[self.kept :]

    def column(self, element: Element) -> int | None:
        """Which column an element is; None if it is none of them."""
        element = resolved(element)
        found = [p for p in self.places.get(_place(element), ()) if same(self.columns[p], element)]
        return found[0] if len(found) == 1 else None

    @functools.cached_property
    def places(self) -> dict[tuple, list[int]]:
        found: dict[tuple, list[int]] = {}
        for p, column in enumerate(self.columns):
            found.setdefault(_place(column), []).append(p)
        return found


def _place(element: Element) -> tuple:
    """Elements of different places are different; what is looked up is left out."""
    digits = (tuple("slot" if isinstance(d.value, Lookup) else d.value for d in index) for index in element.index)
    return element.node, *digits


def sequences(graph: Graph) -> list[Sequence | Left]:
    """Every history and window that are put together, in graph order; joins of one history are one entry."""
    found: dict[tuple, Sequence | Left] = {}
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in (*STACKS, *SCATTERS) or not _may_join(node):
            continue
        try:
            sequence = _sequence(node)
        except Left as left:
            found.setdefault((left.node,), left)
            continue
        if sequence is not None:
            key = (sequence.pool, sequence.slots and sequence.slots.node)
            known = found.setdefault(key, sequence)
            if known is not sequence and isinstance(known, Sequence):
                known.joins.append(node)
    return list(found.values())


def _may_join(node: Node) -> bool:
    if any(user.target in SCATTERS and user.args[0] is node for user in node.users):
        return False  # the next slice assignment goes on with it
    known = "val" in node.meta
    return known and len(shape(node)) == 3 and dtype(node).is_floating_point


def _sequence(node: Node) -> Sequence | None:
    """``node`` as history and window along one of its dimensions."""
    sizes = shape(node)
    for dim, length in enumerate(sizes):
        if not isinstance(length, int) or not 3 <= length <= LONGEST_HISTORY + 2 * MAX_WINDOW:
            continue
        axes = [Axis("bdt"[i], size) for i, size in enumerate(sizes)]
        others = [a for i, a in enumerate(axes) if i != dim]

        def at(p: int, dim=dim, length=length, axes=axes) -> Element:
            index = [(Digit(p, length),) if i == dim else axis_index(a) for i, a in enumerate(axes)]
            return resolved(Element(node, tuple(index)))

        first = at(0)
        if first.node is node or len(first.index) != 3 or (first.node.op == "call_function" and _is_join(first.node)):
            continue
        if constant(first.index[1]) == 0 and any(_is_axis(first.index[2], a) for a in others):
            if isinstance(shape(first.node)[1], int) and shape(first.node)[1] <= LONGEST_HISTORY and _slots(first)[1]:
                raise Left("unsupported_layout", node)
            continue
        kept = shape(first.node)[2]
        if not isinstance(kept, int) or not 1 <= kept <= min(LONGEST_HISTORY, length - 2):
            continue
        looked_up, slots = _slots(first)
        channel = next((a for a in others if _is_axis(first.index[1], a)), None)
        if channel is None or not looked_up:
            continue
        if slots is None and first.node.op == "call_function":
            if first.node.target in CASTS and _slots(resolved(cast_source(first)))[1] is not None:
                raise Left("rounded_products", first.node)
            continue  # two tensors of the model's own
        (batch,) = (a for a in others if a is not channel)
        if slots is None and first.index[0] and not _is_axis(first.index[0], batch):
            continue
        rows = slots.axes() if slots is not None else set()
        if not rows <= {batch}:
            continue
        columns = [at(p) for p in range(length)]
        if not all(c.node is first.node and constant(c.index[2]) == p for p, c in enumerate(columns[:kept])):
            continue
        if any(c.node is first.node or c.node is node for c in columns[kept:]):
            continue
        if length - kept > MAX_WINDOW:
            raise Left("window_too_long", node)
        return Sequence([node], first.node, slots, batch if axis_index(batch) else None, channel, columns, kept)
    return None


def _is_join(node: Node) -> bool:
    return node.target in (*STACKS, *SCATTERS)


def _slots(element: Element) -> tuple[bool, Element | None]:
    """Whether the first dimension is a row or a row's slot, and the latter."""
    rows = element.index[0]
    if rows == () or isinstance(rows[0].value, Axis):
        return len(rows) < 2, None
    value = rows[0].value
    if len(rows) > 1 or not isinstance(value, Lookup) or value.row is not None:
        return False, None
    return True, chosen(value.element)


def _is_axis(index: Index, axis: Axis) -> bool:
    return len(index) == 1 and index[0].value is axis


def constant(index: Index) -> int | None:
    """The constant that an index is; an axis of size 1 has no digit."""
    if index == ():
        return 0
    return index[0].value if len(index) == 1 and isinstance(index[0].value, int) else None


# --- views that only a convolution has ----------------------------------------------------------------------------------


def resolved(element: Element) -> Element:
    """Follow views and selections; windows that slide over a tensor (``unfold``) where it is known which one is meant."""
    while True:
        element = chosen(element)
        step = {UNFOLD: _unfolded, aten.cat.default: _piece}.get(element.node.target)
        if step is None:
            return element
        try:
            element = step(element.node, element.index)
        except Unresolvable:
            return element


def _piece(node: Node, index: tuple[Index, ...]) -> Element:
    """A known position of a ``cat`` of equal pieces (a history as long as the window), which are told apart by a digit of
    their own."""
    join = join_of(node)
    position = None if join is None else constant(index[join.dim])
    if position is None or len(index[join.dim]) != 1 or not isinstance(shape(node)[join.dim], int):
        raise Unresolvable
    inner, misfit = divmod(shape(node)[join.dim], join.count)
    if misfit or inner == 1:
        raise Unresolvable
    which, rest = divmod(position, inner)
    digits = (Digit(which, join.count), Digit(rest, inner))
    return Element(node, (*index[: join.dim], digits, *index[join.dim + 1 :]))


def _unfolded(node: Node, index: tuple[Index, ...]) -> Element:
    source, dim, _, step = node.args
    *outer, inner = index
    dim %= len(outer)
    which, offset = constant(outer[dim]), constant(inner)
    if which is None or offset is None:
        raise Unresolvable
    outer[dim] = (Digit(which * step + offset, shape(source)[dim]),)
    return Element(source, tuple(outer))
