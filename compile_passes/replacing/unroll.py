"""Loops over the tokens of a window (``scan``, ``while_loop``), written out.

The body of such a loop is the same for every token by construction. Written out it is the loop that everything else here reads,
so there is no second matcher; where the window is not understood after all, the loop is put back as it was.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from compile_passes.reading.index_notation import shape
from compile_passes.replacing.emit import insert
from compile_passes.replacing.unroll_while import NotKnown, while_loop

MAX_TOKENS = 16


class Unrolled:
    """One loop and what stands in its place meanwhile: the results of ``written_out``."""

    def __init__(self, graph: Graph, loop: Node, written_out: Callable[..., list], arguments: list[Node]):
        self.graph, self.loop = graph, loop
        before = set(graph.nodes)
        results = insert(graph, loop.next, written_out, arguments)
        self.inserted = [n for n in graph.nodes if n not in before]
        self.pairs = [(user, results[user.args[1]]) for user in list(loop.users)]
        for read, result in self.pairs:
            read.replace_all_uses_with(result)

    def settle(self) -> None:
        """Remove the loop if a window was found in it, else what was written out."""
        if any(n._erased for n in self.inserted):
            for read, _ in self.pairs:
                self.graph.erase_node(read)
            bodies = [n for n in self.loop.args if isinstance(n, Node)]
            self.graph.erase_node(self.loop)
            for body in bodies:
                if not body.users:
                    self.graph.erase_node(body)
            return
        for read, result in self.pairs:
            result.replace_all_uses_with(read)
        for node in reversed(self.inserted):
            self.graph.erase_node(node)


def unroll_loops(graph: Graph) -> list[Unrolled]:
    """Write out the loops over 2 to 16 tokens."""
    found = []
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is torch.ops.higher_order.scan:
            body = _body(graph, node)
            if body is not None:
                found.append(Unrolled(graph, node, *_scan(node, body)))
        elif node.op == "call_function" and node.target is torch.ops.higher_order.while_loop:
            with suppress(NotKnown):
                found.append(Unrolled(graph, node, *while_loop(graph, node, MAX_TOKENS)))
    return found


def _scan(node: Node, body: GraphModule) -> tuple[Callable[..., list], list[Node]]:
    """The results of a scan as a function of its arguments, and the arguments."""
    _, init, xs, extra = node.args
    carried, tokens = len(init), shape(xs[0])[0]

    def loop(*tensors: Tensor) -> list[Tensor]:
        carry, rest = list(tensors[:carried]), tensors[carried : carried + len(xs)]
        kept = []
        for t in range(tokens):
            results = body(*carry, *(x[t] for x in rest), *tensors[carried + len(xs) :])
            carry = list(results[:carried])
            kept.append(results[carried:])
        return [*carry, *(torch.stack(column) for column in zip(*kept, strict=True))]

    return loop, [*init, *xs, *extra]


def _body(graph: Graph, node: Node) -> GraphModule | None:
    """The body of a scan that can be written out."""
    body, init, xs, extra = node.args
    tensors = all(isinstance(x, Node) and isinstance(x.meta["val"], Tensor) for x in (*init, *xs, *extra))
    reads = all(user.target is operator.getitem for user in node.users)
    reads &= any(user.users for user in node.users)  # else it was written out before
    if not init or not xs or not tensors or not reads or graph.owning_module is None:
        return None
    tokens = shape(xs[0])[0]
    if not isinstance(tokens, int) or not 2 <= tokens <= MAX_TOKENS:
        return None
    return getattr(graph.owning_module, body.target)
