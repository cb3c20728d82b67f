"""The outputs of a short convolution: for every token a sum of its last W inputs, each times its channel's weight.

Outputs are read token by token, down to columns of the sequence. A library convolution, W shifted products, a sum over sliding
windows and a stack of them then end in the same W products, and a dilation, a stride or another offset in other ones.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass

import torch
from torch.fx import Node

from compile_passes.convolutions.reasons import Left
from compile_passes.convolutions.sequence import UNFOLD, Sequence, resolved
from compile_passes.reading.algebra import (
    ADD,
    CONTRACTIONS,
    DIV,
    MUL,
    SUMS,
    Product,
    expand,
    is_call,
    operand,
    same,
    without,
)
from compile_passes.reading.index_notation import (
    Axis,
    Digit,
    Element,
    aten,
    axis_index,
    dtype,
    same_size,
    shape,
    substitute,
)
from compile_passes.reading.views import CASTS, VIEWS, cast_source, strip
from recoverssm_ops.validation import MAX_CONV_WIDTH

CONVOLUTION, BMM = aten.convolution.default, aten.bmm.default
LIBRARY = (CONVOLUTION, BMM)  # sums in float32 whatever their dtype, and rounds once
ACTIVATION = (aten.neg.default, aten.exp.default, aten.sigmoid.default, aten.silu.default, DIV)
REACHED = {*VIEWS, *CASTS, UNFOLD, CONVOLUTION, MUL, aten.mul.Scalar, *SUMS, *ACTIVATION, *CONTRACTIONS} - {
    aten.mm.default  # of the projections behind the convolution
}
# Nodes that are looked at in vain: beside the widest loop over tokens and taps, and behind the outputs.
BEFORE, BEHIND, MOST_TERMS = 1024, 24, 256


@dataclass
class Convolution:
    """``node[axes]``, one of them ``token``: the sum of ``taps[i] * columns[token + i]``, oldest first, plus ``bias``.

    ``dtype`` is what the result is rounded to, once. ``root`` is the node that computes token 0.
    """

    node: Node
    axes: list[Axis | None]
    token: Axis
    taps: list[Product]
    bias: Product | None
    silu: bool
    dtype: torch.dtype
    root: Node

    def operands(self) -> list[Element]:
        return [f for p in (*self.taps, self.bias) if p is not None for f in p.factors]


def find_convolution(sequence: Sequence) -> Convolution | None:
    """The last node that is the whole convolution: with its bias and activation, where nothing rounds before them.

    None if nothing multiplies the sequence; raises :class:`Left` if what does is no such sum.
    """
    reached: set[Node] = set()
    todo = sorted({user for join in sequence.joins for user in join.users})
    best = why = None
    vain = 0
    while todo and vain < (BEFORE if best is None else BEHIND):
        node = heapq.heappop(todo)
        if node in reached or node.target not in REACHED:
            continue
        reached.add(node)
        vain += 1
        for user in node.users:
            heapq.heappush(todo, user)
        for axes in _layouts(node, sequence):
            try:
                read = _Reader(sequence, reached).read(node, axes)
            except Left as left:
                why = left if best is None and (why is None or left.reason != "no_convolution") else why
                continue
            if best is None or read.root is not best.root:  # else a view of it
                best, vain = read, 0
            break
    if best is None and why is not None:
        raise why
    return best


def _layouts(node: Node, sequence: Sequence) -> list[list[Axis | None]]:
    """Which dimension may be which, the token as None."""
    if not isinstance(node.meta.get("val"), torch.Tensor) or len(shape(node)) != 3:
        return []
    if not dtype(node).is_floating_point:
        return []
    batch = sequence.batch or Axis("b", 1)
    sizes = {batch: batch.size, sequence.channel: sequence.channel.size, None: sequence.window}
    orders = itertools.permutations((batch, None, sequence.channel))
    return [list(order) for order in orders if all(map(same_size, shape(node), map(sizes.get, order)))]


class _Reader:
    """Reads one node as a convolution."""

    def __init__(self, sequence: Sequence, reached: set[Node]):
        self.sequence, self.reached = sequence, reached
        self.width, self.seen = sequence.kept + 1, 0
        self.library: Node | None = None  # the one node whose result is rounded

    def read(self, node: Node, axes: list[Axis | None]) -> Convolution:
        length = self.sequence.window
        first = None
        for t in range(length):
            index = tuple((Digit(t, length),) if a is None else axis_index(a) for a in axes)
            read = self._token(Element(node, index), t, node)
            if first is None:
                first = read
            elif not self._alike(first, read):
                raise Left("taps_mismatch", node)
        token = Axis("t", length)
        named = [token if a is None else a if axis_index(a) else None for a in axes]
        taps, bias, silu, rounded, root = first
        return Convolution(node, named, token, taps, bias, silu, rounded, root)

    def _token(self, element: Element, t: int, node: Node) -> tuple:
        element = resolved(element)
        root, rounded = element.node, dtype(element.node)
        if root not in self.reached:
            raise Left("no_convolution", node)
        narrowed = root.target in CASTS
        if narrowed:
            element = resolved(cast_source(element))
        x = silu_of(element)
        element = element if x is None else resolved(x)
        alone = element.node.target in LIBRARY and not narrowed and x is None
        self.library = element.node if alone else None
        self._expect_exact(element.node)
        taps: list[Product | None] = [None] * self.width
        bias = None
        for term in self._terms(element):
            held = [(f, p) for f in term.factors if (p := self.sequence.column(f)) is not None]
            rest = Product(term.coefficient, [f for f in term.factors if all(f is not h for h, _ in held)])
            if not rest.factors or not all(f.axes() <= {self.sequence.channel} for f in rest.factors):
                raise Left("taps_mismatch" if held else "no_convolution", node)
            if not held and bias is None:
                bias = rest
                continue
            tap = held[0][1] - t if len(held) == 1 else -1
            if not 0 <= tap < self.width or taps[tap] is not None:
                raise Left("taps_mismatch", node)
            taps[tap] = rest
        if None in taps:
            raise Left("taps_mismatch" if any(taps) else "no_convolution", node)
        return taps, bias, x is not None, rounded, root

    def _alike(self, a: tuple, b: tuple) -> bool:
        products = zip((*a[0], a[1]), (*b[0], b[1]), strict=True)
        return a[2:4] == b[2:4] and all(_same_product(x, y) for x, y in products)

    def _terms(self, element: Element) -> list[Product]:
        """The sum multiplied out, sums over a few taps too, down to columns and to what is no part of it."""
        todo, done = [Product(factors=[element])], []
        while todo:
            if len(todo) + len(done) > MOST_TERMS:
                raise Left("no_convolution", element.node)
            term = todo.pop()
            if term.bound:
                axis, *rest = term.bound
                if not isinstance(axis.size, int) or axis.size > MAX_CONV_WIDTH:
                    raise Left("not_depthwise", element.node)
                for value in range(axis.size):
                    todo.append(Product(term.coefficient, [substitute(f, axis, value) for f in term.factors], rest))
                continue
            for position, factor in enumerate(term.factors):
                parts = self._expanded(resolved(factor))
                if parts is not None:
                    others = Product(term.coefficient, term.factors[:position] + term.factors[position + 1 :])
                    todo += [others.times(part) for part in parts]
                    break
            else:
                done.append(term)
        return done

    def _expanded(self, factor: Element) -> list[Product] | None:
        """A factor that was computed from the sequence as the products it is the sum of."""
        node = factor.node
        if node not in self.reached:
            return None
        self._expect_exact(node)
        if node.target is CONVOLUTION:
            return _convolved(factor)
        parts = expand(factor, self._opaque)
        if len(parts) == 1 and not parts[0].bound and [f.node for f in parts[0].factors] == [node]:
            raise Left("no_convolution", node)
        return parts

    def _opaque(self, element: Element) -> bool:
        self.seen += 1
        if self.seen > MOST_TERMS * MOST_TERMS:
            raise Left("no_convolution", element.node)
        return element.node not in self.reached or not self._exact(element.node)

    def _exact(self, node: Node) -> bool:
        """Whether a node adds no rounding to the one at the end."""
        return dtype(node) == torch.float32 or node is self.library

    def _expect_exact(self, node: Node) -> None:
        if not self._exact(node):
            raise Left("unsupported_dtype" if dtype(node).itemsize > 4 else "rounded_products", node)


def _convolved(element: Element) -> list[Product]:
    """One output of ``aten.convolution``, for a convolution of each channel by itself over one dimension."""
    node = element.node
    x, weight, bias, stride, padding, dilation, transposed, _, groups = node.args
    if transposed or len(shape(node)) != 3:
        raise Left("no_convolution", node)
    if not same_size(shape(x)[1], groups) or not same_size(shape(weight)[0], groups):
        raise Left("not_depthwise", node)
    batch, channel, position = element.index
    if not all(isinstance(d.value, int) for d in position) or len(position) > 1:
        raise Left("no_convolution", node)
    start = (position[0].value if position else 0) * stride[0] - padding[0]
    width, length = shape(weight)[2], shape(x)[2]
    parts = [] if bias is None else [Product(factors=[Element(bias, (channel,))])]
    for tap in range(width):
        at = start + tap * dilation[0]
        if 0 <= at < length:
            kernel = Element(weight, (channel, (), () if width == 1 else (Digit(tap, width),)))
            parts.append(Product(factors=[Element(x, (batch, channel, (Digit(at, length),))), kernel]))
    return parts


def silu_of(element: Element) -> Element | None:
    """``x`` of ``x * sigmoid(x)``, in the forms that decompositions give it."""
    node = element.node
    if is_call(element, aten.silu.default):
        return strip(operand(element, node.args[0]))
    if not is_call(element, MUL, DIV) or not all(isinstance(a, Node) for a in node.args):
        return None
    a, b = (strip(operand(element, x)) for x in node.args)
    if node.target is MUL:
        for x, gate in ((a, b), (b, a)):
            if is_call(gate, aten.sigmoid.default) and same(operand(gate, gate.node.args[0]), x):
                return x
    elif is_call(b, ADD, aten.add.Scalar) and b.node.args[1] == 1 and b.node.kwargs.get("alpha", 1) == 1:
        grown = strip(operand(b, b.node.args[0]))
        negated = strip(operand(grown, grown.node.args[0])) if is_call(grown, aten.exp.default) else grown
        if is_call(negated, aten.neg.default) and same(operand(negated, negated.node.args[0]), a):
            return a
    return None


def _same_product(a: Product | None, b: Product | None) -> bool:
    if a is None or b is None:
        return a is b
    rest, missing = without(a.factors, b.factors)
    return a.coefficient == b.coefficient and not rest and not missing
