"""Sums of products over elements: the only arithmetic the recurrence is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch.fx import Node

from compile_passes.index_notation import (
    Axis,
    Digit,
    Element,
    Lookup,
    aten,
    axis_index,
    broadcast,
    same_size,
    shape,
)
from compile_passes.views import strip

ADD, SUB, MUL, DIV = aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor


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


def product(element: Element, opaque: Callable[[Element], bool]) -> Product:
    """Multiply out ``element`` down to factors that are ``opaque`` or no products."""
    element = strip(element)
    node, args = element.node, element.node.args
    if opaque(element) or node.op != "call_function":
        return Product(factors=[element])
    if node.target is aten.neg.default:
        return Product(-1.0).times(product(operand(element, args[0]), opaque))
    if node.target in (MUL, aten.mul.Scalar):
        result = Product()
        for side in (operand(element, a) for a in args):
            result = result.times(product(side, opaque) if isinstance(side, Element) else Product(float(side)))
        return result
    if node.target is aten.sum.dim_IntList:
        return _sum(element, opaque)
    if node.target is aten.bmm.default:
        a, b = args
        inner = Axis("c", shape(a)[2])
        left = Element(a, (element.index[0], element.index[1], axis_index(inner)))
        right = Element(b, (element.index[0], axis_index(inner), element.index[2]))
        return _contract([left, right], [inner], opaque)
    if node.target is aten.mm.default:
        a, b = args
        inner = Axis("c", shape(a)[1])
        left, right = (
            Element(a, (element.index[0], axis_index(inner))),
            Element(b, (axis_index(inner), element.index[1])),
        )
        return _contract([left, right], [inner], opaque)
    return Product(factors=[element])


def _sum(element: Element, opaque: Callable[[Element], bool]) -> Product:
    source, dims, keepdim = (*element.node.args, False)[:3]
    sizes = shape(source)
    summed = {d % len(sizes): Axis("c", sizes[d]) for d in (dims or range(len(sizes)))}
    outer = iter(element.index)
    index = []
    for position in range(len(sizes)):
        if position not in summed or keepdim:
            kept = next(outer)
        index.append(axis_index(summed[position]) if position in summed else kept)
    return _contract([Element(source, tuple(index))], list(summed.values()), opaque)


def _contract(factors: list[Element], bound: list[Axis], opaque: Callable[[Element], bool]) -> Product:
    result = Product(bound=[a for a in bound if not same_size(a.size, 1)])
    for factor in factors:
        result = result.times(product(factor, opaque))
    return result


def terms(element: Element, opaque: Callable[[Element], bool]) -> list[Product]:
    """Additive terms of ``element``, each multiplied out."""
    element = strip(element)
    node = element.node
    if not opaque(element) and node.target in (ADD, SUB, aten.add.Scalar, aten.sub.Scalar):
        alpha = node.kwargs.get("alpha", 1)
        sign = alpha if node.target in (ADD, aten.add.Scalar) else -alpha
        result = []
        for factor, side in zip((1.0, float(sign)), (operand(element, a) for a in node.args[:2]), strict=True):
            parts = terms(side, opaque) if isinstance(side, Element) else [Product(float(side))]
            result += [Product(factor).times(p) for p in parts]
        return result
    expanded = product(element, opaque)
    if len(expanded.factors) == 1 and expanded.factors[0].node is not element.node and not expanded.bound:
        return [Product(expanded.coefficient).times(t) for t in terms(expanded.factors[0], opaque)]
    return [expanded]


_PURE = {
    MUL,
    aten.mul.Scalar,
    ADD,
    SUB,
    DIV,
    aten.exp.default,
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
    if a.node.meta["val"].dtype != b.node.meta["val"].dtype or len(a.node.args) != len(b.node.args):
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
