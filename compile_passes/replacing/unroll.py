"""``scan`` over the tokens of a window, written out.

The body of a scan is the same for every token by construction. Written out it is the loop that everything else here reads, so
there is no second matcher; where the window is not understood after all, the scan is put back as it was.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from compile_passes.reading.index_notation import shape
from compile_passes.replacing.emit import insert

MAX_TOKENS = 16


class Unrolled:
    """One scan and what stands in its place meanwhile."""

    def __init__(self, graph: Graph, scan: Node, body: GraphModule):
        self.graph, self.scan = graph, scan
        _, init, xs, extra = scan.args
        carried, tokens = len(init), shape(xs[0])[0]

        def loop(*tensors: Tensor) -> list[Tensor]:
            carry, rest = list(tensors[:carried]), tensors[carried : carried + len(xs)]
            kept = []
            for t in range(tokens):
                results = body(*carry, *(x[t] for x in rest), *tensors[carried + len(xs) :])
                carry = list(results[:carried])
                kept.append(results[carried:])
            return [*carry, *(torch.stack(column) for column in zip(*kept, strict=True))]

        before = set(graph.nodes)
        results = insert(graph, scan.next, loop, [*init, *xs, *extra])
        self.inserted = [n for n in graph.nodes if n not in before]
        self.pairs = [(user, results[user.args[1]]) for user in list(scan.users)]
        for read, result in self.pairs:
            read.replace_all_uses_with(result)

    def settle(self) -> None:
        """Remove the scan if a window was found in it, else what was written out."""
        if any(n._erased for n in self.inserted):
            for read, _ in self.pairs:
                self.graph.erase_node(read)
            body = self.scan.args[0]
            self.graph.erase_node(self.scan)
            if not body.users:
                self.graph.erase_node(body)
            return
        for read, result in self.pairs:
            result.replace_all_uses_with(read)
        for node in reversed(self.inserted):
            self.graph.erase_node(node)


def unroll_scans(graph: Graph) -> list[Unrolled]:
    """Write out the scans over 2 to 16 tokens."""
    return [Unrolled(graph, n, body) for n in list(graph.nodes) if (body := _body(graph, n)) is not None]


def _body(graph: Graph, node: Node) -> GraphModule | None:
    if node.op != "call_function" or node.target is not torch.ops.higher_order.scan:
        return None
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
