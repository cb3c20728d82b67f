"""Elements back to tensors: the inverse of ``index_notation``, run while a replacement is traced.

A replacement is an ordinary function of tensors. It is traced with ``make_fx`` under the graph's own fake mode, and the
traced nodes are copied, so that every new node carries ``meta["val"]`` and ``meta["eager_input_vals"]`` (from which Inductor
knows the strides that an operator was promised).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from compile_passes.reading.algebra import Product
from compile_passes.reading.index_notation import Axis, Digit, Element, Lookup, aten, broadcast, same_size
from compile_passes.reading.integers import ELEMENTWISE
from compile_passes.reading.views import strip


class Values:
    """Tensors of the nodes an expression reads, and the sizes of its axes, inside a trace."""

    def __init__(
        self,
        nodes: Sequence[Node],
        tensors: Sequence[Tensor],
        elements: Sequence[Element],
        device: torch.device | None = None,
    ):
        self.tensors, self.device = dict(zip(nodes, tensors, strict=True)), device
        self.sizes: dict[Axis, int | torch.SymInt] = {}
        for element in elements:
            for dim, index in enumerate(element.index):
                if len(index) == 1 and isinstance(index[0].value, Axis) and element.node in self.tensors:
                    # A size read off an argument is known to the trace; one from the old graph is not.
                    self.sizes.setdefault(index[0].value, self.tensors[element.node].shape[dim])

    def size(self, axis: Axis | None) -> int | torch.SymInt:
        return 1 if axis is None else self.sizes.get(axis, axis.size)

    def tensor(self, element: Element, axes: Sequence[Axis | None]) -> Tensor:
        """``element`` as a tensor with one dimension for each of ``axes``; axes it does not vary with are expanded."""
        x = self.tensors[element.node]
        digits = [d for index in element.index for d in (index or (None,))]
        if len(digits) != len(element.index):
            x = x.reshape(self._split_sizes(element))
        kept = []
        for dim, digit in reversed(list(enumerate(digits))):
            if digit is None or isinstance(digit.value, int):
                x = x.select(dim, 0 if digit is None else digit.value)
            else:
                kept.insert(0, digit.value)
        order = [kept.index(a) for a in axes if a in kept]
        x = x if order == sorted(order) else x.permute(order)
        for dim, axis in enumerate(axes):
            if axis not in kept:
                x = x.unsqueeze(dim)
        return x.expand([self.size(a) for a in axes]) if any(a not in kept for a in axes if a is not None) else x

    def _split_sizes(self, element: Element) -> list:
        sizes = []
        for dim, index in enumerate(element.index):
            if len(index) < 2:
                sizes.append(self.tensors[element.node].shape[dim])
            else:
                sizes += [self.size(d.value) if isinstance(d.value, Axis) else d.size for d in index]
        return sizes

    def product(self, factors: Product, axes: Sequence[Axis | None]) -> Tensor:
        """A product of factors in half precision is still one of the float32 numbers that the model cast them to."""
        tensors = [self.tensor(factor, axes) for factor in factors.factors]
        if len(tensors) == 1 and factors.coefficient == 1:
            return tensors[0]
        result = functools.reduce(torch.mul, [x.float() for x in tensors])
        return result if factors.coefficient == 1 else result * factors.coefficient

    def integer(self, value: Element | Lookup, axes: Sequence[Axis | None]) -> Tensor:
        """An integer expression (see ``integers.varies_with``)."""
        if isinstance(value, Lookup):
            result = self.integer(value.element, axes)
            if value.row is None:
                return result
            return result - torch.arange(self.size(value.row), device=result.device) * value.stride
        element = strip(value)
        if not isinstance(self.tensors.get(element.node, None), (Tensor, type(None))):
            # A number that came out of a tensor is the same for every row.
            return torch.full([self.size(a) for a in axes], self.tensors[element.node], device=self.device)
        if element.axes() <= set(axes) or element.node.target not in ELEMENTWISE:
            return self.tensor(element, axes)
        arguments = [
            self.integer(broadcast(element.index, a), axes) if isinstance(a, Node) else a for a in element.node.args
        ]
        return element.node.target(*arguments, **element.node.kwargs)


def integer_leaves(value: Element | Lookup, axes: set[Axis | None]) -> list[Node]:
    """The nodes that :meth:`Values.integer` will read."""
    if isinstance(value, Lookup):
        return integer_leaves(value.element, axes)
    element = strip(value)
    if element.axes() <= axes or element.node.target not in ELEMENTWISE:
        return [element.node]
    return [
        leaf
        for a in element.node.args
        if isinstance(a, Node)
        for leaf in integer_leaves(broadcast(element.index, a), axes)
    ]


def lift(elements: Sequence[Element], token: Axis) -> Element | None:
    """One element that varies with ``token`` in place of one element per token, if they are slices of one tensor."""
    first = elements[0]
    if any(e.node is not first.node or len(e.index) != len(first.index) for e in elements):
        return None
    index = []
    for parts in zip(*(e.index for e in elements), strict=True):
        if len({len(part) for part in parts}) != 1:
            return None
        digits = [_lift_digit(column, token) for column in zip(*parts, strict=True)]
        if None in digits:
            return None
        index.append(tuple(digits))
    lifted = Element(first.node, tuple(index))
    counts = sum(d.value is token for d in lifted.digits())
    return lifted if counts == 1 or (counts == 0 and len(elements) > 1) else None


def _lift_digit(column: Sequence[Digit], token: Axis) -> Digit | None:
    first = column[0]
    if all(d.value is first.value or (isinstance(d.value, int) and d.value == first.value) for d in column):
        return first
    counting = all(isinstance(d.value, int) and d.value == t for t, d in enumerate(column))
    return Digit(token, first.size) if counting and same_size(first.size, len(column)) else None


def insert(graph: Graph, before: Node, function: Callable[..., object], arguments: Sequence[Node | None]) -> object:
    """Trace ``function`` on the arguments' fake values and copy the trace in front of ``before``.

    Returns the nodes that stand for the function's results, in the function's own structure (a node, or a list of
    nodes). None stays None in both.
    """
    present = [n for n in arguments if n is not None]

    def traced(*tensors: Tensor) -> object:
        given = iter(tensors)
        return function(*(None if n is None else next(given) for n in arguments))

    with fake_mode(graph):
        trace = make_fx(traced, select_decomp_table(), tracing_mode="real")(*(n.meta["val"] for n in present))
    trace.graph.eliminate_dead_code()
    copies: dict[Node, Node] = {}
    placeholders = iter(present)
    stack_trace = before.meta.get("stack_trace")
    with graph.inserting_before(before):
        for node in trace.graph.nodes:
            if node.op == "placeholder":
                copies[node] = next(placeholders)
            elif node.op == "output":
                return torch.fx.map_arg(node.args[0], lambda n: copies[n])
            else:
                copies[node] = graph.node_copy(node, lambda n: copies[n])
                if node.target is aten.view.default:  # this late, Inductor's graphs reshape
                    copies[node].target = aten.reshape.default
                if stack_trace is not None:
                    copies[node].meta.setdefault("stack_trace", stack_trace)
    raise AssertionError("a traced graph ends with an output node")


def insert_after(
    graph: Graph, place: Node, function: Callable[..., object], arguments: Sequence[Node | None]
) -> object:
    """:func:`insert` after ``place`` and every argument; what reads the result has to be :func:`settle` d."""
    return insert(graph, max([place, *(n for n in arguments if n is not None)]).next, function, arguments)


def settle(graph: Graph, new: Node) -> None:
    """Move what reads ``new`` and stands before it behind it, in order, so that the graph stays sorted."""
    early, todo = set(), [new]
    while todo:
        for user in todo.pop().users:
            if user < new and user not in early:
                early.add(user)
                todo.append(user)
    place = new
    for node in sorted(early):
        place.append(node)
        place = node


def fake_mode(graph: Graph) -> torch._subclasses.FakeTensorMode:
    """The fake mode that the graph's values were made in."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch._subclasses.FakeTensor):
            return value.fake_mode
    raise ValueError("the graph carries no fake values in meta['val']: run it through AOTAutograd or export first")
