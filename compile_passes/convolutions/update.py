"""The history's update: which columns of the sequence go back to the pool, as a count of accepted tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import guard_or_false

from compile_passes.convolutions.reasons import Left
from compile_passes.convolutions.sequence import Sequence, constant, resolved
from compile_passes.reading.algebra import ADD, SUMS, same
from compile_passes.reading.index_notation import (
    Digit,
    Element,
    Index,
    Lookup,
    aten,
    axis_index,
    broadcast,
    dtype,
    element_of,
    prims,
    readers,
    same_size,
    shape,
    substitute,
)
from compile_passes.reading.integers import varies_with
from compile_passes.reading.views import CASTS, cast_source, strip

COUNTERS = (prims.iota.default, aten.arange.start_step, aten.arange.start, aten.arange.default)


@dataclass
class Count:
    """Accepted tokens of a row: ``shift + (start + sum of terms) % size``, or the number ``start`` where ``size`` is 0."""

    start: int
    terms: list[tuple[int, Element]]
    size: int
    shift: int

    def follows(self, first: Count, columns: int) -> bool:
        """Whether this selects the column ``columns`` after the one that ``first`` does, whatever a row looks up."""
        pairs = zip(self.terms, first.terms, strict=False)
        terms = len(self.terms) == len(first.terms) and all(a == b and same(x, y) for (a, x), (b, y) in pairs)
        return terms and self.size == first.size and self.start + self.shift == first.start + first.shift + columns


@dataclass
class Update:
    """``node`` holds the pool with the new histories; ``value`` is what is written."""

    node: Node
    value: Node
    count: Count


def find_update(sequence: Sequence) -> Update:
    """The one node that writes the last inputs at a count a row back to the slots they came from."""
    written = [(user, value) for user in readers(sequence.pool) if (value := _written(user, sequence.pool)) is not None]
    if not written:
        raise Left("no_update", sequence.joins[0])
    found, left = [], None
    for node, value in written:
        try:
            found.append(_update(node, value, sequence))
        except Left as why:
            left = left if left is not None and left.reason == "other_slots" else why
    if len(found) > 1:
        raise Left("history_mismatch", found[1].node)
    if not found:
        raise left
    return found[0]


def _written(user: Node, pool: Node) -> Node | None:
    """What a node writes into the pool."""
    if user.target is aten.index_put.default and user.args[0] is pool:
        return user.args[2]
    if user.target in (aten.copy.default, aten.copy_.default) and user.args[0] is pool:
        value = user.args[1]
        # The end of a graph copies what was made of a pool into it.
        return None if value.target is aten.index_put.default and value.args[0] is pool else value
    return None


def _update(node: Node, value: Node, sequence: Sequence) -> Update:
    counts = [_count(value, i, sequence, node) for i in range(sequence.kept)]
    if not all(count.follows(counts[0], i) for i, count in enumerate(counts)):
        raise Left("history_mismatch", node)
    if not _same_slots(node, value, sequence):
        raise Left("other_slots", node)
    if node.target is aten.copy_.default:
        if readers(value) != [node]:
            raise Left("history_escapes", value)
        return Update(value, value, counts[0])
    return Update(node, value, counts[0])


def _count(value: Node, i: int, sequence: Sequence, node: Node) -> Count:
    """Which column of the sequence column ``i`` of ``value`` is."""
    alone = sequence.batch is None  # then the dimension may be missing
    last: Index = () if sequence.kept == 1 else (Digit(i, sequence.kept),)
    index = (() if alone else axis_index(sequence.batch), axis_index(sequence.channel), last)
    sizes = shape(value)
    if alone and len(sizes) == 2:
        index = index[1:]
    wanted = [(n, x[0].size) for n, x in zip(sizes, index, strict=False) if x]
    # Whether two dynamic batches are equal is left to a guard.
    if len(sizes) != len(index) or not all(guard_or_false(n == size) for n, size in wanted):
        raise Left("history_mismatch", node)
    element = resolved(Element(value, index))
    if element.node.target in CASTS and dtype(element.node) == dtype(sequence.pool):
        element = resolved(cast_source(element))  # the one rounding, to the pool's dtype
    column = sequence.column(element)
    if column is not None:
        return Count(column, [], 0, 0)
    looked_up = [d for d in element.digits() if isinstance(d.value, Lookup)]
    if len(looked_up) != 1 or element.node is sequence.pool:
        raise Left("history_mismatch", node)
    size, lookup = looked_up[0].size, looked_up[0].value
    if not isinstance(size, int) or size > len(sequence.columns) or lookup.row is not None:
        raise Left("history_mismatch", node)
    start, terms = _linear(lookup.element, size)
    if not all(_is_integer(x.node) and varies_with(x) <= {sequence.batch} for _, x in terms):
        raise Left("history_mismatch", node)
    columns = [sequence.column(_at(element, p)) for p in range(size)]
    first = columns[0]
    if first is None or columns != list(range(first, first + size)):
        raise Left("history_mismatch", node)
    return Count(start, terms, size, first)


def _at(element: Element, position: int) -> Element:
    """The element at a known position in place of the looked-up one."""

    def digit(d: Digit) -> Digit:
        return Digit(position, d.size) if isinstance(d.value, Lookup) else d

    return Element(element.node, tuple(tuple(digit(d) for d in index) for index in element.index))


def _is_integer(argument: object) -> bool:
    """A number, or a tensor of them."""
    if not isinstance(argument, Node):
        return isinstance(argument, int)
    value = argument.meta.get("val")
    return isinstance(value, torch.Tensor) and not value.is_floating_point() and value.dtype != torch.bool


def _linear(element: Element, size: int) -> tuple[int, list[tuple[int, Element]]]:
    """An integer as a number and a sum of other integers. Positions are the same modulo the size of what they point into."""
    element = strip(element)
    node, args = element.node, element.node.args
    if node.target in SUMS and node.kwargs.get("alpha", 1) == 1 and all(map(_is_integer, args)):
        sign = 1 if node.target in (ADD, aten.add.Scalar) else -1
        start, terms = 0, []
        for factor, side in ((1, args[0]), (sign, args[1])):
            number, more = (side, []) if isinstance(side, int) else _linear(broadcast(element.index, side), size)
            start += factor * number
            terms += [(factor * a, x) for a, x in more]
        return start, terms
    if node.target is aten.remainder.Scalar and args[1] == size:
        return _linear(broadcast(element.index, args[0]), size)
    if node.target in CASTS and not dtype(cast_source(element).node).is_floating_point:
        return _linear(cast_source(element), size)
    if node.target in COUNTERS and (at := constant(element.index[0])) is not None:
        start, step = _counting(node)
        if isinstance(start, int) and isinstance(step, int):
            return start + at * step, []
    if node.target is aten.full.default and isinstance(args[1], int):
        return args[1], []
    return 0, [(1, element)]


def _counting(node: Node) -> tuple[object, object]:
    if node.target is prims.iota.default:
        return node.kwargs.get("start", 0), node.kwargs.get("step", 1)
    if node.target is aten.arange.default:
        return 0, 1
    return node.args[0], node.args[2] if len(node.args) > 2 else 1


def _same_slots(node: Node, value: Node, sequence: Sequence) -> bool:
    if dtype(value) != dtype(sequence.pool):
        return False
    if node.target is not aten.index_put.default:
        return sequence.slots is None and same_size(shape(value)[0], shape(sequence.pool)[0])
    _, indices, _, *accumulate = node.args
    if len(indices) != 1 or any(accumulate) or node.kwargs or len(shape(indices[0])) != 1:
        return False
    if sequence.slots is None:  # a pool of one slot: whatever the index, it is that one
        return sequence.batch is None and same_size(shape(sequence.pool)[0], 1)
    index, (row,) = element_of(indices[0])
    slots = index if sequence.batch is None else substitute(index, row, sequence.batch)
    return same(slots, sequence.slots)
