"""Views: an element of the result as an element of the input."""

from __future__ import annotations

import math

import torch
from torch.fx import Node

from compile_passes.reading.index_notation import (
    Axis,
    Digit,
    Element,
    Index,
    Lookup,
    Size,
    Unresolvable,
    aten,
    broadcast,
    dtype,
    prims,
    same_size,
    shape,
)
from compile_passes.reading.joins import joined, selected_scatter, sliced_scatter


def strip(element: Element) -> Element:
    """Follow views, copies and exact widening casts to the tensor that computed the value."""
    while element.node.op == "call_function" and element.node.target in VIEWS:
        try:
            element = VIEWS[element.node.target](element.node, element.index)
        except Unresolvable:
            break
    return element


# --- views: (node, index of its result) -> element of its input ---------------------------------------------------------


def _same(node: Node, index: tuple[Index, ...]) -> Element:
    return Element(node.args[0], index)


def _cast(node: Node, index: tuple[Index, ...]) -> Element:
    """A cast that loses nothing is no arithmetic; any other one is."""
    read = cast_source(Element(node, index))
    source, target = dtype(read.node), dtype(node)
    widening = source == target or (
        source in (torch.bfloat16, torch.float16) and target in (torch.float32, torch.float64)
    )
    integral = not source.is_floating_point and not target.is_floating_point and torch.bool not in (source, target)
    if not (widening or (integral and target.itemsize >= source.itemsize)):
        raise Unresolvable
    return read


def cast_source(element: Element) -> Element:
    """What a cast (``CASTS``) converts; ``copy(target, source)`` casts to the dtype of its first argument."""
    source = element.node.args[1 if element.node.target is aten.copy.default else 0]
    return broadcast(element.index, source)


def _reshape(node: Node, index: tuple[Index, ...]) -> Element:
    digits = [d for part in index for d in part if not same_size(d.size, 1)]
    sizes = shape(node.args[0])
    result: list[Index] = []
    for position, size in enumerate(sizes):
        group: list[Digit] = []
        filled: Size = 1
        while not same_size(filled, size):
            if not digits:
                raise Unresolvable
            inner = _excess(filled * digits[0].size, sizes[position:])
            if inner is not None:
                digits[:1] = _split(digits[0], inner)
            head = digits.pop(0)
            group.append(head)
            filled = filled * head.size
        result.append(tuple(group))
    if digits:
        raise Unresolvable
    return Element(node.args[0], tuple(result))


def _excess(filled: Size, sizes: tuple[Size, ...]) -> Size | None:
    """How many positions of the following dimensions a digit reaches into, if it ends exactly at one of them."""
    if isinstance(filled, int) and isinstance(sizes[0], int) and filled <= sizes[0]:
        return None
    product: Size = sizes[0]
    for position, size in enumerate(sizes[1:], 2):
        product = product * size
        if not same_size(size, 1) and same_size(product, filled):
            return math.prod(sizes[1:position])
    return None


def _split(digit: Digit, inner: Size) -> list[Digit]:
    """One digit as (outer, inner)."""
    if not isinstance(inner, int):
        raise Unresolvable
    if isinstance(digit.value, int) and isinstance(digit.size, int):
        outer, rest = divmod(digit.value, inner)
        return [Digit(outer, digit.size // inner), Digit(rest, inner)]
    if isinstance(digit.value, Lookup) and digit.value.row is None:
        # ``flat[arange(B) * T + n]``: the row is an axis, and what remains is the position.
        row = _row_of(digit.value.element, inner)
        if row is not None:
            return [Digit(row, row.size), Digit(Lookup(digit.value.element, row, inner), inner)]
    raise Unresolvable


def _row_of(element: Element, stride: int) -> Axis | None:
    """The axis r of a sum that contains ``arange[r] * stride``."""
    element = strip(element)
    node, operands = element.node, element.node.args
    if node.target in (aten.add.Tensor, aten.sub.Tensor) and node.kwargs.get("alpha", 1) == 1:
        sides = operands[:1] if node.target is aten.sub.Tensor else operands[:2]
        rows = [_row_of(broadcast(element.index, x), stride) for x in sides if isinstance(x, Node)]
        return next((r for r in rows if r is not None), None)
    if node.target is aten.mul.Tensor and stride in operands:
        counted = strip(broadcast(element.index, operands[0] if operands[1] == stride else operands[1]))
        return counter(counted)
    return counter(element) if stride == 1 else None


def counter(element: Element) -> Axis | None:
    """The axis a of ``arange(n)[a]``."""
    node = element.node
    if node.target is prims.iota.default:
        plain = node.kwargs.get("start", 0) == 0 and node.kwargs.get("step", 1) == 1
    elif node.target is aten.arange.start_step:
        plain = node.args[0] == 0 and node.args[2:] in ((), (1,))
    else:
        plain = node.target is aten.arange.default or (node.target is aten.arange.start and node.args[0] == 0)
    digits = element.index[0] if plain else ()
    return digits[0].value if len(digits) == 1 and isinstance(digits[0].value, Axis) else None


def _unsqueeze(node: Node, index: tuple[Index, ...]) -> Element:
    dim = node.args[1] % len(index)
    return Element(node.args[0], index[:dim] + index[dim + 1 :])


def _squeeze(node: Node, index: tuple[Index, ...]) -> Element:
    sizes = shape(node.args[0])
    dims = node.args[1] if len(node.args) > 1 else range(len(sizes))
    chosen = {d % len(sizes) for d in ([dims] if isinstance(dims, int) else dims)}
    remaining = iter(index)
    return Element(
        node.args[0],
        tuple(() if i in chosen and same_size(s, 1) else next(remaining) for i, s in enumerate(sizes)),
    )


def _permute(node: Node, index: tuple[Index, ...]) -> Element:
    result: list[Index] = [()] * len(index)
    for position, dim in enumerate(node.args[1]):
        result[dim % len(index)] = index[position]
    return Element(node.args[0], tuple(result))


def _transpose(node: Node, index: tuple[Index, ...]) -> Element:
    a, b = node.args[1:3] if len(node.args) > 1 else (0, 1)
    result = list(index)
    result[a], result[b] = result[b], result[a]
    return Element(node.args[0], tuple(result))


def _expand(node: Node, index: tuple[Index, ...]) -> Element:
    return broadcast(index, node.args[0])


def _select(node: Node, index: tuple[Index, ...]) -> Element:
    source, dim, position = node.args
    sizes = shape(source)
    dim %= len(sizes)
    if not isinstance(position, int):
        raise Unresolvable
    if position < 0:
        if not isinstance(sizes[dim], int):
            raise Unresolvable
        position += sizes[dim]
    chosen: Index = () if same_size(sizes[dim], 1) else (Digit(position, sizes[dim]),)
    return Element(source, (*index[:dim], chosen, *index[dim:]))


def _slice(node: Node, index: tuple[Index, ...]) -> Element:
    """A slice of everything, or one that is read at a known position: another one shifts an axis."""
    source, dim, start, _, step = (*node.args, *(0, 0, None, 1)[len(node.args) - 1 :])[:5]
    sizes = shape(source)
    dim %= len(sizes)
    if step == 1 and same_size(shape(node)[dim], sizes[dim]):
        return Element(source, index)
    if not all(isinstance(x, int) for x in (start or 0, step, sizes[dim], *(d.value for d in index[dim]))):
        raise Unresolvable
    if len(index[dim]) > 1 or (not index[dim] and not same_size(shape(node)[dim], 1)):
        raise Unresolvable
    start = max(start + sizes[dim], 0) if start is not None and start < 0 else start or 0
    position = start + step * (index[dim][0].value if index[dim] else 0)
    return Element(source, (*index[:dim], (Digit(position, sizes[dim]),), *index[dim + 1 :]))


def _flip(node: Node, index: tuple[Index, ...]) -> Element:
    """Of a dimension that is read at one known position."""
    source, dims = node.args
    result = list(index)
    for dim in (d % len(index) for d in dims):
        if not all(isinstance(d.value, int) and isinstance(d.size, int) for d in index[dim]):
            raise Unresolvable
        result[dim] = tuple(Digit(d.size - 1 - d.value, d.size) for d in index[dim])
    return Element(source, tuple(result))


VIEWS = {
    aten.view.default: _reshape,
    aten.reshape.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: _transpose,
    aten.expand.default: _expand,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.flip.default: _flip,
    aten.cat.default: joined,
    aten.stack.default: joined,
    aten.select_scatter.default: selected_scatter,
    aten.slice_scatter.default: sliced_scatter,
    aten.clone.default: _same,
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.lift_fresh_copy.default: _same,
    aten._to_copy.default: _cast,
    aten.copy.default: _cast,
    prims.convert_element_type.default: _cast,
}
CASTS = (prims.convert_element_type.default, aten._to_copy.default, aten.copy.default)
