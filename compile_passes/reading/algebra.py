"""Sums of products over elements: the only arithmetic the recurrence is made of.

:func:`expand` multiplies out. ``beta * (v - S k) k^T``, ``beta v k^T - (S k) (beta k)^T`` and ``S (I - beta k k^T)`` are
different programs and the same polynomial, so that what follows needs to know none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Node

from compile_passes.reading.index_notation import (
    Axis,
    Digit,
    Element,
    Lookup,
    aten,
    axis_index,
    broadcast,
    dtype,
    prims,
    same_size,
    shape,
    substitute,
)
from compile_passes.reading.views import counter, strip

ADD, SUB, MUL, DIV = aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor
SUMS = (ADD, SUB, aten.add.Scalar, aten.sub.Scalar)
CONTRACTIONS = (aten.sum.dim_IntList, aten.bmm.default, aten.mm.default)
PRODUCTS = (MUL, aten.mul.Scalar, DIV, aten.div.Scalar, aten.neg.default, aten.where.self, *CONTRACTIONS)


@dataclass
class Product:
    """``coefficient * sum over bound axes of the product of factors``."""

    coefficient: float = 1.0
    factors: list[Element] = field(default_factory=list)
    bound: list[Axis] = field(default_factory=list)

    def times(self, other: Product) -> Product:
        return Product(self.coefficient * other.coefficient, self.factors + other.factors, self.bound + other.bound)


def operand(element: Element, argument) -> Element | float:
    """An argument of an element-wise node, at the node's index."""
    return broadcast(element.index, argument) if isinstance(argument, Node) else argument


def expand(element: Element, opaque: Callable[[Element], bool]) -> list[Product]:
    """The additive terms of ``element``, each multiplied out down to factors that are ``opaque`` or no arithmetic."""
    element = strip(element)
    node, args = element.node, element.node.args
    if opaque(element) or node.op != "call_function":
        return [Product(factors=[element])]
    if node.target in SUMS:
        alpha = node.kwargs.get("alpha", 1)
        if isinstance(alpha, (int, float)):
            signs = (1.0, float(alpha if node.target in (ADD, aten.add.Scalar) else -alpha))
            sides = [_expand_operand(element, a, opaque) for a in args[:2]]
            return [Product(sign).times(p) for sign, side in zip(signs, sides, strict=True) for p in side]
    elif node.target is aten.neg.default:
        return [Product(-1.0).times(p) for p in _expand_operand(element, args[0], opaque)]
    elif node.target in (MUL, aten.mul.Scalar):
        return _multiply([_expand_operand(element, a, opaque) for a in args])
    elif node.target in (DIV, aten.div.Scalar):
        if isinstance(args[1], (int, float)) and not node.kwargs:
            return [Product(1 / args[1]).times(p) for p in _expand_operand(element, args[0], opaque)]
    elif node.target is aten.where.self:
        if _is_zero(args[2]):  # a mask is a factor
            mask = Product(factors=[strip(operand(element, args[0]))])
            return [mask.times(p) for p in _expand_operand(element, args[1], opaque)]
    elif node.target in CONTRACTIONS:
        factors, bound = (_sum if node.target is aten.sum.dim_IntList else _matrix_product)(element)
        summed = Product(bound=[a for a in bound if not same_size(a.size, 1)])
        return [summed.times(p) for p in _multiply([expand(f, opaque) for f in factors])]
    return [Product(factors=[element])]


def _expand_operand(element: Element, argument, opaque: Callable[[Element], bool]) -> list[Product]:
    side = operand(element, argument)
    return expand(side, opaque) if isinstance(side, Element) else [Product(float(side))]


def _multiply(sides: list[list[Product]]) -> list[Product]:
    result = [Product()]
    for side in sides:
        result = [a.times(b) for a in result for b in side]
    return result


def _sum(element: Element) -> tuple[list[Element], list[Axis]]:
    source, dims, keepdim = (*element.node.args, False)[:3]
    sizes = shape(source)
    summed = {d % len(sizes): Axis("c", sizes[d]) for d in (dims or range(len(sizes)))}
    outer = iter(element.index)
    index = []
    for position in range(len(sizes)):
        if position not in summed or keepdim:
            kept = next(outer)
        index.append(axis_index(summed[position]) if position in summed else kept)
    return [Element(source, tuple(index))], list(summed.values())


def _matrix_product(element: Element) -> tuple[list[Element], list[Axis]]:
    """``mm`` and ``bmm``: the last two dimensions, after any batch dimension."""
    a, b = element.node.args[:2]
    *batch, row, column = element.index
    inner = Axis("c", shape(a)[-1])
    left = Element(a, (*batch, row, axis_index(inner)))
    return [left, Element(b, (*batch, axis_index(inner), column))], [inner]


def product(element: Element, opaque: Callable[[Element], bool]) -> Product:
    """``element`` as one product: sums stay factors."""
    terms = expand(element, lambda e: opaque(e) or e.node.target in SUMS)
    return terms[0]


def multiplied_out(element: Element) -> Product:
    """Only products, quotients by a number and signs, no contractions: these belong to the projections before the layer."""
    return product(element, lambda e: not is_call(e, MUL, aten.mul.Scalar, DIV, aten.div.Scalar, aten.neg.default))


def is_call(element: Element, *targets) -> bool:
    """Whether an element is the float32 result of one of these operators."""
    node = element.node
    return node.op == "call_function" and node.target in targets and dtype(node) == torch.float32


# --- the identity matrix ------------------------------------------------------------------------------------------------


def without_identities(term: Product) -> Product:
    """Sums against ``delta[c, k]`` carried out: c becomes k."""
    for position, factor in enumerate(term.factors):
        pair = identity(factor)
        if pair is None:
            continue
        for inner, outer in (pair, pair[::-1]):
            if inner in term.bound:
                rest = term.factors[:position] + term.factors[position + 1 :]
                factors = [substitute(f, inner, outer) for f in rest]
                return without_identities(
                    replace(term, factors=factors, bound=[a for a in term.bound if a is not inner])
                )
    return term


def identity(element: Element) -> tuple[Axis, Axis] | None:
    """The axes i and j of an element that is 1 where i = j and 0 elsewhere: ``arange[i] == arange[j]``, as ``eye`` has it."""
    node = element.node
    if node.target is prims.convert_element_type.default or node.target is aten._to_copy.default:
        return identity(strip(Element(node.args[0], element.index)))
    if node.target is aten.where.self and _is_zero(node.args[2]) and _is_one(node.args[1]):
        return identity(strip(operand(element, node.args[0])))
    if node.target is not aten.eq.Tensor:
        return None
    i, j = (counter(strip(operand(element, a))) for a in node.args)
    return (i, j) if i is not None and j is not None and i is not j else None


def _is_zero(argument) -> bool:
    return _filled_with(argument) == 0


def _is_one(argument) -> bool:
    return _filled_with(argument) == 1


def _filled_with(argument) -> float | None:
    """The number that a tensor holds everywhere."""
    if not isinstance(argument, Node):
        return argument
    if argument.target in (aten.full.default, aten.scalar_tensor.default):
        value = argument.args[1] if argument.target is aten.full.default else argument.args[0]
        return value if isinstance(value, (int, float)) else None
    return None


# --- equality -----------------------------------------------------------------------------------------------------------

_PURE = {
    MUL,
    aten.mul.Scalar,
    ADD,
    SUB,
    DIV,
    aten.exp.default,
    aten.exp2.default,
    aten.neg.default,
    aten.sigmoid.default,
    aten.rsqrt.default,
}


def same(a: Element, b: Element) -> bool:
    """Whether two elements are the same value: same tensor and index, or the same operation on same operands."""
    a, b = strip(a), strip(b)
    if a.node is b.node:
        return len(a.index) == len(b.index) and all(map(_same_index, a.index, b.index))
    if a.node.target is not b.node.target or a.node.target not in _PURE or a.node.kwargs != b.node.kwargs:
        return False
    if dtype(a.node) != dtype(b.node) or len(a.node.args) != len(b.node.args):
        return False
    for x, y in zip(a.node.args, b.node.args, strict=True):
        if isinstance(x, Node) and isinstance(y, Node):
            if not same(broadcast(a.index, x), broadcast(b.index, y)):
                return False
        elif isinstance(x, Node) or isinstance(y, Node) or x != y:
            return False
    return True


def _same_index(a: tuple[Digit, ...], b: tuple[Digit, ...]) -> bool:
    return len(a) == len(b) and all(map(_same_digit, a, b))


def _same_digit(a: Digit, b: Digit) -> bool:
    if isinstance(a.value, Lookup) and isinstance(b.value, Lookup):
        same_row = a.value.row is b.value.row and a.value.stride == b.value.stride
        return same_row and same(a.value.element, b.value.element)
    if isinstance(a.value, int) and isinstance(b.value, int):
        return a.value == b.value
    return a.value is b.value


def remove(factors: list[Element], element: Element) -> bool:
    """Remove one factor that is the same as ``element``; False if there is none."""
    for position, factor in enumerate(factors):
        if same(factor, element):
            del factors[position]
            return True
    return False


def without(factors: list[Element], removed: Iterator[Element] | list[Element]) -> tuple[list[Element], list[Element]]:
    """``factors`` less those in ``removed``, and those of ``removed`` that were not there."""
    rest = list(factors)
    missing = [e for e in removed if not remove(rest, e)]
    return rest, missing
