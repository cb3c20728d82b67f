"""Tensors of an FX graph read as indexed scalars.

``mul`` + ``sum``, ``einsum``, ``bmm`` and ``matmul`` are one contraction written four ways; ``view``, ``permute``, ``select``
and ``expand`` only rename indices. Instead of a pattern for each spelling, the pass asks for *one element* of a tensor,
``node[i, j, ...]``, and follows the request backwards: a view turns it into a request for one element of its input. Spellings
that compute the same thing end in the same requests.

The index of one tensor dimension is a tuple of digits, most significant first (mixed radix), so that ``reshape`` is a
regrouping of digits. A digit is an :class:`Axis` (a free or summed variable), a constant, or a :class:`Lookup` (an element of
an integer tensor: gather, advanced indexing).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten, prims = torch.ops.aten, torch.ops.prims
ASSERTION = aten._assert_tensor_metadata.default
Size = int | torch.SymInt


@dataclass(frozen=True, eq=False)
class Axis:
    """An index variable; two axes are the same only if they are the same object."""

    name: str
    size: Size

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Lookup:
    """The value of an integer tensor's element, less ``stride`` times the axis ``row`` where that was split off."""

    element: Element
    row: Axis | None = None
    stride: int = 0


@dataclass(frozen=True)
class Digit:
    value: Axis | int | Lookup
    size: Size


Index = tuple[Digit, ...]


class Unresolvable(Exception):
    """A request that cannot be expressed on the input: the element stays where it is."""


@dataclass(frozen=True)
class Element:
    """``node[index]``: one scalar of a tensor."""

    node: Node
    index: tuple[Index, ...]

    def digits(self) -> Iterator[Digit]:
        for index in self.index:
            yield from index

    def axes(self) -> set[Axis]:
        """Axes the element varies with, as far as its indices show."""
        found: set[Axis] = set()
        for digit in self.digits():
            if isinstance(digit.value, Axis):
                found.add(digit.value)
            elif isinstance(digit.value, Lookup):
                found |= digit.value.element.axes() | ({digit.value.row} - {None})
        return found

    def __repr__(self) -> str:
        inner = ", ".join("·".join(str(d.value) for d in index) or "0" for index in self.index)
        return f"{self.node.name}[{inner}]"


def shape(node: Node) -> tuple[Size, ...]:
    return tuple(node.meta["val"].shape)


def dtype(node: Node) -> torch.dtype:
    return node.meta["val"].dtype


def readers(node: Node) -> list[Node]:
    """The users of a node; those that only assert its dtype and device, which torch.export inserts, read nothing."""
    return [user for user in node.users if user.target is not ASSERTION]


def same_size(a: Size, b: Size) -> bool:
    return a == b if isinstance(a, int) and isinstance(b, int) else statically_known_true(a == b)


def size_hint(size: Size) -> int:
    """The size in the example inputs, 1 where there is none (unbacked); looking at it adds no guard."""
    hint = size if isinstance(size, int) else size.node.hint
    return 1 if hint is None else hint


def element_of(node: Node, names: str = "") -> tuple[Element, list[Axis]]:
    """The element of ``node`` at fresh axes, one for each dimension."""
    axes = [Axis(names[i] if i < len(names) else f"i{i}", size) for i, size in enumerate(shape(node))]
    return Element(node, tuple(axis_index(a) for a in axes)), axes


def axis_index(axis: Axis) -> Index:
    return () if same_size(axis.size, 1) else (Digit(axis, axis.size),)


def broadcast(index: tuple[Index, ...], node: Node) -> Element:
    """The element of an operand that is broadcast to a result at ``index``."""
    sizes = shape(node)
    aligned = index[len(index) - len(sizes) :]
    return Element(node, tuple(() if same_size(s, 1) else i for s, i in zip(sizes, aligned, strict=True)))


def substitute(element: Element, old: Axis, new: Axis | int) -> Element:
    """The element with one axis replaced."""

    def digit(d: Digit) -> Digit:
        if d.value is old:
            return Digit(new, d.size)
        if isinstance(d.value, Lookup):
            row = new if d.value.row is old else d.value.row
            return Digit(Lookup(substitute(d.value.element, old, new), row, d.value.stride), d.size)
        return d

    return Element(element.node, tuple(tuple(digit(d) for d in index) for index in element.index))


def unify(pattern: Element, element: Element) -> dict[Axis, Axis] | None:
    """Axes of ``pattern`` by the axes of ``element`` in their place; None if anything else differs."""
    names: dict[Axis, Axis] = {}
    return names if _unify(pattern, element, names) and len(set(names.values())) == len(names) else None


def _unify(pattern: Element, element: Element, names: dict[Axis, Axis]) -> bool:
    if len(pattern.index) != len(element.index) or any(
        len(a) != len(b) for a, b in zip(pattern.index, element.index, strict=True)
    ):
        return False
    return all(_unify_digit(x.value, y.value, names) for x, y in zip(pattern.digits(), element.digits(), strict=True))


def _unify_digit(x: Axis | int | Lookup, y: Axis | int | Lookup, names: dict[Axis, Axis]) -> bool:
    if isinstance(x, Axis) and isinstance(y, Axis):
        return names.setdefault(y, x) is x
    if isinstance(x, Lookup) and isinstance(y, Lookup):
        if x.element.node is not y.element.node or x.stride != y.stride or (x.row is None) != (y.row is None):
            return False
        return _unify(x.element, y.element, names) and (x.row is None or _unify_digit(x.row, y.row, names))
    return isinstance(x, int) and isinstance(y, int) and x == y
