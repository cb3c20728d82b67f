"""Put ``causal_conv1d_verify`` and ``causal_conv1d_commit`` in the place of a short convolution and its history's update."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch._inductor import config
from torch.fx import Graph, Node

import recoverssm_ops.conv_ops as ops
from compile_passes.convolutions.reasons import Left
from compile_passes.convolutions.sequence import Sequence
from compile_passes.convolutions.strides import refresh
from compile_passes.convolutions.sums import Convolution
from compile_passes.convolutions.update import Count, Update
from compile_passes.reading.algebra import Product
from compile_passes.reading.index_notation import Axis, Element, dtype, readers
from compile_passes.replacing.emit import Values, insert_after, integer_leaves, lift, settle
from compile_passes.replacing.operands import FLOATS
from compile_passes.replacing.unread import drop_unread


class ConvolutionReplacement:
    """Making it reads everything off the graph and may refuse; ``apply`` edits the graph."""

    def __init__(self, sequence: Sequence, convolution: Convolution, update: Update):
        self.sequence, self.convolution, self.update = sequence, convolution, update
        self.tap = Axis("w", len(convolution.taps))
        self.inputs = _together([Product(factors=[x]) for x in sequence.inputs], convolution.token)
        self.weights = _together(convolution.taps, self.tap)
        self.counts = [x for _, x in update.count.terms]
        for element in (*self.operands(), Element(sequence.pool, ())):
            if dtype(element.node) not in FLOATS:
                raise Left("unsupported_dtype", element.node)
        self._check_users()

    def operands(self) -> list[Element]:
        """The floats that the operators read beside the pool."""
        return [f for p in (*self.inputs, *self.weights, self.convolution.bias) if p is not None for f in p.factors]

    @property
    def exits(self) -> dict[str, Node]:
        """What the rest of the model reads."""
        return {"output": self.convolution.node, "pool": self.update.node}

    def integers(self, elements: list[Element]) -> list[Node]:
        return [n for x in elements for n in integer_leaves(x, {self.sequence.batch})]

    def leaves(self) -> set[Node]:
        """The nodes that both the model's arithmetic and the operators start from."""
        slots = [] if self.sequence.slots is None else [self.sequence.slots]
        floats = [e.node for e in (*self.operands(), *self.convolution.operands(), *self.sequence.inputs)]
        return {self.sequence.pool, *floats, *self.integers([*slots, *self.counts])}

    def _check_users(self) -> None:
        """Nothing between the pool and the exits has a user elsewhere."""
        leaves, exits = self.leaves(), set(self.exits.values())
        above, todo = set(), list(exits)
        while todo:
            node = todo.pop()
            if node not in above and node not in leaves:
                above.add(node)
                todo += node.all_input_nodes
        interior: set[Node] = set()
        for node in sorted(above):
            if any(n is self.sequence.pool or n in interior for n in node.all_input_nodes):
                interior.add(node)
        self.interior = interior - exits
        for node in self.interior:
            for user in readers(node):
                if user not in self.interior and user not in exits:
                    raise Left("history_escapes", user)

    # --- the edit -----------------------------------------------------------------------------------------------------

    def apply(self, graph: Graph) -> None:
        y, x, rows = self._verify(graph)
        self._replace(graph, self.convolution.node, y)
        refresh(graph, y)
        self._replace(graph, self.update.node, self._commit(graph, x, rows))
        for node in (self.convolution.node, self.update.node):
            drop_unread(graph, [node])
        if not all(node._erased for node in self.interior):
            raise AssertionError(f"the joined inputs are still used after the rewrite: {self.sequence.joins[0].name}")

    def _verify(self, graph: Graph) -> list[Node | None]:
        """Insert the operator; returns the output in the model's layout, the window's inputs ``[B, T, D]`` and the slots."""
        sequence, conv = self.sequence, self.convolution
        slots = sequence.slots
        read = [sequence.pool, *(e.node for e in self.operands())]
        read += self.integers([slots]) if slots is not None else []
        read = list(dict.fromkeys(read))
        shaped = [*self.operands(), *([slots] if slots is not None else [])]
        axes = [sequence.batch, conv.token, sequence.channel]

        def verify(*tensors: Tensor) -> list[Tensor | None]:
            values = Values(read, tensors, shaped)
            x = _tensor(values, self.inputs, axes, 1)
            weight = _tensor(values, self.weights, [sequence.channel, self.tap], 1)
            bias = None if conv.bias is None else values.product(conv.bias, [sequence.channel])
            pool = values.tensors[sequence.pool]
            rows = None
            if slots is not None:
                rows = values.integer(slots, [sequence.batch])
                # Indexing counts negative slots from the end; the operators take them for padding.
                rows = torch.where(rows < 0, rows + pool.shape[0], rows)
            # The operator rounds to the dtype of its input, once; the model to another one, once.
            given = x if x.dtype == conv.dtype else x.float()
            y = ops.causal_conv1d_verify(given, weight, bias, pool, rows, None, sequence.window, conv.silu, -1)
            return [y.to(conv.dtype).permute([axes.index(a) for a in conv.axes]), x, rows]

        return insert_after(graph, conv.node, verify, read)

    def _commit(self, graph: Graph, x: Node, rows: Node | None) -> Node:
        leaves = list(dict.fromkeys(self.integers(self.counts)))

        def commit(pool: Tensor, x: Tensor, rows: Tensor | None, *integers: Tensor) -> Tensor:
            values = Values(leaves, integers, [], device=x.device)
            if self.sequence.batch is not None:
                values.sizes[self.sequence.batch] = x.shape[0]
            n = _accepted(values, self.update.count, self.sequence.batch, x)
            rows = torch.arange(x.shape[0], device=x.device) if rows is None else rows
            arguments = {
                "x": x,
                "source": rows,
                "dest": rows.unsqueeze(1),
                "length": n.unsqueeze(1),
                "cu_seqlens": None,
                "pad_slot_id": -1,
            }
            # The functional form that the host's own mutating operators have at this stage.
            op = ops.causal_conv1d_commit
            if config.enable_auto_functionalized_v2:
                return auto_functionalized_v2(op, **arguments, _conv_state_base_index=0, _all_bases=[pool])[1]
            return auto_functionalized(op, conv_state=pool, **arguments)[1]

        return insert_after(graph, self.update.node, commit, [self.sequence.pool, x, rows, *leaves])

    def _replace(self, graph: Graph, old: Node, new: Node) -> None:
        old.replace_all_uses_with(new)
        settle(graph, new)


def _together(products: list[Product], axis: Axis) -> list[Product]:
    """One product that varies with ``axis``, where its positions are slices of one tensor; else one a position."""
    if all(len(p.factors) == 1 and p.coefficient == 1 for p in products):
        lifted = lift([p.factors[0] for p in products], axis)
        if lifted is not None:
            return [Product(factors=[lifted])]
    return products


def _tensor(values: Values, products: list[Product], axes: list[Axis | None], dim: int) -> Tensor:
    if len(products) == 1:
        return values.product(products[0], axes)
    rest = [*axes[:dim], *axes[dim + 1 :]]
    return torch.stack([values.product(p, rest) for p in products], dim)


def _accepted(values: Values, count: Count, batch: Axis | None, x: Tensor) -> Tensor:
    """``[B]``"""
    if not count.size:
        return torch.full([x.shape[0]], count.start, dtype=torch.int64, device=x.device)
    total: Tensor | int = count.start
    for sign, term in count.terms:
        number = values.integer(term, [batch])
        total = total + number if sign > 0 else total - number
    if isinstance(total, int):
        return torch.full([x.shape[0]], total % count.size + count.shift, dtype=torch.int64, device=x.device)
    # A position may also be counted from the end.
    position = torch.remainder(total, count.size)
    return position + count.shift if count.shift else position
