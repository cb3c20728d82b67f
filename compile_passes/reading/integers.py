"""Integer expressions: the accepted position, the slots."""

from __future__ import annotations

from torch.fx import Node

from compile_passes.reading.index_notation import Axis, Element, Lookup, aten, broadcast, prims
from compile_passes.reading.views import strip

# Element-wise on integers, hence an element varies with what its operands vary with.
ELEMENTWISE = {
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.mul.Tensor,
    aten.remainder.Scalar,
    aten.clamp.default,
    aten.clamp_min.default,
    aten.clamp_max.default,
    aten.minimum.default,
    aten.maximum.default,
    prims.convert_element_type.default,
    aten._to_copy.default,
}


def varies_with(value: Element | Lookup) -> set[Axis]:
    """Axes an integer varies with, looking through element-wise arithmetic: ``expand`` after ``remainder`` hides nothing."""
    if isinstance(value, Lookup):
        return varies_with(value.element) | ({value.row} - {None})
    element = strip(value)
    if not element.axes():
        return set()
    if element.node.target in ELEMENTWISE:
        operands = [a for a in element.node.args if isinstance(a, Node)]
        return {axis for a in operands for axis in varies_with(broadcast(element.index, a))}
    return element.axes()
