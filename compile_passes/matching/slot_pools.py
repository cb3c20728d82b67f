"""A pool with a slot for every position: written at ``table[b, t]`` with the state after token t, read at ``table[b, n - 1]``.

The table is ``[B, W]`` (or ``[W, B]``), given or computed; its entries are slots of the pool. The window may be shorter than
the table is wide. Which state is read was decided after the step before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from compile_passes.reading.candidates import chain
from compile_passes.reading.index_notation import (
    Axis,
    Digit,
    Element,
    Index,
    Lookup,
    Size,
    aten,
    axis_index,
    dtype,
    element_of,
    readers,
    same_size,
    shape,
)
from compile_passes.reading.integers import varies_with
from compile_passes.reading.selections import SELECTIONS, chosen
from compile_passes.reading.views import strip

MAX_COLUMNS = 17  # the window before has at most 16 tokens after its first


@dataclass
class Table:
    """``node[b, t]`` is the slot of row b's position t; ``dim`` is the dimension of t."""

    node: Node
    dim: int

    @property
    def width(self) -> Size:
        return shape(self.node)[self.dim]


@dataclass
class SlotPool:
    """One pool that is read and written by a table of slots. ``states[t]`` at ``axes`` is stored at position t."""

    pool: Node
    table: Table
    position: Lookup  # the column that is read
    gather: Node  # pool[table[b, position]]
    written: Node  # the pool after the last write
    states: list[Element]
    axes: list[Axis | None]  # row, and the pool's other dimensions


def find_slot_pools(graph: Graph) -> tuple[list[SlotPool], dict[Node, str]]:
    """The pools, and for look-alikes why they are none: pools whose states are written, but not as above."""
    found, refused = [], {}
    for pool in graph.find_nodes(op="placeholder"):
        value = pool.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.ndim != 4 or not value.is_floating_point():
            continue
        puts = _puts(pool)
        if not puts:
            continue
        try:
            found.append(_read(pool, puts))
        except _Differs as difference:
            if difference.why:
                refused[pool] = difference.why
    return found, refused


class _Differs(Exception):
    """``why`` is empty where the pool holds something else than a window's states."""

    def __init__(self, why: str):
        super().__init__(why)
        self.why = why


def _tensor_readers(node: Node) -> list[Node]:
    """Sizes are read off a tensor without reading it."""
    return [n for n in readers(node) if n.op == "output" or isinstance(n.meta.get("val"), torch.Tensor)]


def _puts(pool: Node) -> list[Node]:
    """The writes into a pool, one after the other."""
    found = []
    while True:
        puts = [n for n in readers(pool) if n.target is aten.index_put.default and n.args[0] is pool]
        if len(puts) != 1:
            return found
        found += puts
        (pool,) = puts


def _read(pool: Node, puts: list[Node]) -> SlotPool:
    gathers = [n for n in _tensor_readers(pool) if n is not puts[0]]
    slot, axes = _looked_up(gathers[0], pool) if len(gathers) == 1 and gathers[0].target in SELECTIONS else (None, None)
    if axes is None:
        first = puts[0].args[1][0]
        sizes = shape(first)[:1] if first is not None else ()
        axes = [Axis(f"i{d}", n) for d, n in enumerate((*sizes, *shape(pool)[1:]))]
        if len(axes) != 4:
            raise _Differs("")
    row, *rest = axes
    table, position = (None, None) if slot is None else _position(slot, row)
    columns: dict[int, Element] = {}
    for put in puts:
        for column, value in _columns(put, row, rest, table).items():
            if column in columns:
                raise _Differs("")
            columns[column] = value
    stored = [strip(columns[t]) for t in sorted(columns)]
    states = chain(stored) if len(stored) > 1 else None
    if states is None:
        raise _Differs("")
    if position is None:
        raise _Differs(
            "the states of the step before are not read by one lookup of a row's slot, pool[table[b, n - 1]]"
        )
    if any(dtype(e.node) not in (torch.float32, dtype(pool)) for e in stored):
        raise _Differs("the states are rounded to another dtype than the pool's before they are stored")
    if sorted(columns) != list(range(len(columns))):
        raise _Differs("the states are not written to the table's columns 0, 1, .. in the order of their tokens")
    if any(n not in puts and n.op != "output" for put in puts for n in _tensor_readers(put)):
        raise _Differs("the pool is read after it was written")
    names = [None if same_size(a.size, 1) else a for a in axes]
    return SlotPool(pool, table, position, gathers[0], puts[-1], states, names)


def _looked_up(gather: Node, pool: Node) -> tuple[Element | None, list[Axis] | None]:
    """The slot of ``pool[slot]``, where the gather has the pool's dimensions and one slot a row."""
    element, axes = element_of(gather)
    element = chosen(element)
    if element.node is not pool or len(axes) != 4:
        return None, None
    slot, *rest = element.index
    if not all(map(_is_axis, rest, axes[1:])) or len(slot) != 1 or not isinstance(slot[0].value, Lookup):
        return None, None
    lookup = slot[0].value
    return (lookup.element, axes) if lookup.row is None and varies_with(lookup) <= {axes[0]} else (None, None)


def _position(slot: Element, row: Axis) -> tuple[Table | None, Lookup | None]:
    """The table and n of ``table[b, n]``."""
    slot = chosen(slot)
    for dim in (1, 0) if len(slot.index) == 2 else ():
        column, rows = slot.index[dim], slot.index[1 - dim]
        lookup = column[0].value if len(column) == 1 else None
        if _is_axis(rows, row) and isinstance(lookup, Lookup) and varies_with(lookup) <= {row}:
            return Table(slot.node, dim), lookup
    return None, None


def _columns(put: Node, row: Axis, rest: list[Axis], table: Table | None) -> dict[int, Element]:
    """By column of the table (of any, where it is None): what is written there."""
    _, indices, values, *accumulate = put.args
    if len(indices) != 1 or any(accumulate) or put.kwargs:
        raise _Differs("")
    (slots,) = indices
    missing = len(shape(slots)) + 3 - len(shape(values))
    if missing not in range(len(shape(slots))) or not all(same_size(n, 1) for n in shape(slots)[:missing]):
        raise _Differs("")  # the values are broadcast
    # Of two sizes that have to be equal, one may be known.
    sizes = shape(slots) if missing else [n if isinstance(n, int) else m for n, m in zip(shape(slots), shape(values))]  # noqa: B905
    for tokens, arranged in _arrangements(sizes, row):
        found = {}
        for t in range(tokens):
            index = arranged(t)
            column = _column_of(strip(_element(slots, index)), row, table)
            if column is None:
                break
            found[column] = _element(values, (*index[missing:], *map(axis_index, rest)))
        if len(found) == tokens:
            return found
    raise _Differs("")


def _element(node: Node, index: tuple[Index, ...]) -> Element:
    """With the tensor's own sizes, which may be other symbols than those of the tensor that the axes were made for."""
    sized = (
        (Digit(part[0].value, size),) if len(part) == 1 else part for part, size in zip(index, shape(node), strict=True)
    )
    return Element(node, tuple(sized))


def _arrangements(sizes: Sequence[Size], row: Axis):
    """How the slots written may be laid out: the number of tokens, and the index of row b's token t."""
    rows, count = axis_index(row), row.size

    def token(t: int, tokens: int) -> Index:
        return () if tokens == 1 else (Digit(t, tokens),)

    if len(sizes) == 1:
        if same_size(sizes[0], count):
            yield 1, lambda t: (rows,)
        for tokens in range(2, MAX_COLUMNS + 1):
            if same_size(sizes[0], count * tokens):
                yield tokens, lambda t: ((*rows, *token(t, tokens)),)  # noqa: B023
                yield tokens, lambda t: ((*token(t, tokens), *rows),)  # noqa: B023
    if len(sizes) == 2:
        if same_size(sizes[0], count) and isinstance(sizes[1], int):
            yield sizes[1], lambda t: (rows, token(t, sizes[1]))
        if same_size(sizes[1], count) and isinstance(sizes[0], int):
            yield sizes[0], lambda t: (token(t, sizes[0]), rows)


def _column_of(slot: Element, row: Axis, table: Table | None) -> int | None:
    """The column of a slot that is the table's at row b."""
    if len(slot.index) != 2 or (table is not None and slot.node is not table.node):
        return None
    for dim in (1, 0) if table is None else (table.dim,):
        column, rows = slot.index[dim], slot.index[1 - dim]
        if _is_axis(rows, row) and len(column) == 1 and isinstance(column[0].value, int):
            return column[0].value
    return None


def _is_axis(index: Index, axis: Axis) -> bool:
    return index == () if same_size(axis.size, 1) else len(index) == 1 and index[0].value is axis
