"""A piece of a graph, run on the CPU in float64.

Both the model's arithmetic and the operators' (their portable form) lose every rounding that way, so that two spellings of
one computation agree to about 1e-12, and a wrong one does not hide behind a float32 tolerance.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import recoverssm_ops.conv_ops as conv_ops
import recoverssm_ops.ops as ops
from recoverssm_ops.decompositions import PORTABLE

COMMITS = (ops.kda_commit, conv_ops.causal_conv1d_commit)
INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten.gather.default, torch.ops.aten.index_select.default)


class Piece:
    """What computes ``exits`` from ``inputs``, copied out of a graph (which need not be sorted)."""

    def __init__(self, exits: Iterable[Node], leaves: set[Node]):
        exits = list(exits)
        order = _inputs_first(exits, leaves)
        self.inputs = [node for node in order if node in leaves or is_source(node)]
        self.nodes = [node for node in order if node not in self.inputs]
        self.graph = Graph()
        copies = {node: self.graph.placeholder(node.name) for node in self.inputs}
        for node in self.nodes:
            copies[node] = self.graph.node_copy(node, lambda n: copies[n])
        self.graph.output(tuple(copies[node] for node in exits))

    def run(self, values: dict[Node, object], wrapping: Node | None = None) -> tuple[Tensor, ...]:
        """The exits, in float64, from the values of ``inputs``.

        Raises IndexError for an index that counts from the end, except into ``wrapping``: in a flattened tensor that is
        another row, and no position at all.
        """
        interpreter = _Interpreter(GraphModule(torch.nn.Module(), self.graph))
        interpreter.wrapping = None if wrapping is None else wrapping.name
        with torch.no_grad(), torch.autocast("cpu", enabled=False), _Double():
            return interpreter.run(*(values[node] for node in self.inputs))


def _inputs_first(exits: list[Node], leaves: set[Node]) -> list[Node]:
    """Everything between ``leaves`` and ``exits``, each node after those that it reads."""
    order: dict[Node, None] = {}
    todo = list(reversed(exits))
    while todo:
        node = todo[-1]
        reads = [] if node in leaves or is_source(node) else node.all_input_nodes
        missing = [n for n in reads if n not in order]
        if missing:
            todo += missing
        else:
            order[todo.pop()] = None
    return list(order)


def is_source(node: Node) -> bool:
    """An input of the graph, or a size: sizes are numbers by the time a piece runs."""
    return node.op in ("placeholder", "get_attr") or not isinstance(node.meta.get("val"), (Tensor, tuple, list))


class _Interpreter(Interpreter):
    """Calls the portable form of the operators, so that the dispatch mode sees their arithmetic."""

    wrapping: str | None

    def run_node(self, n: Node) -> object:
        if n.target in INDEXING and n.args[0].name != self.wrapping:
            for index in pytree.tree_leaves(self.fetch_args_kwargs_from_env(n)[0][1:]):
                if isinstance(index, Tensor) and not index.is_floating_point() and bool((index < 0).any()):
                    raise IndexError(f"{n.name} counts from the end")
        return super().run_node(n)

    def call_function(self, target, args: tuple, kwargs: dict) -> object:
        if target in (auto_functionalized, auto_functionalized_v2) and args[0] in COMMITS:
            (op,) = args
            name, *others = (a.name for a in op._schema.arguments)  # the pool comes first
            pool = kwargs[name] if target is auto_functionalized else kwargs["_all_bases"][0]
            pool = pool.clone()
            PORTABLE[op](pool, *map(kwargs.__getitem__, others))
            return None, pool
        return super().call_function(PORTABLE.get(target, target), args, kwargs)


class _Double(TorchDispatchMode):
    """Every float tensor becomes float64 and every device the CPU, casts and factory functions included."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        args, kwargs = pytree.tree_map(_double, (args, kwargs or {}))
        return pytree.tree_map(_double, func(*args, **kwargs))


def _double(x: object) -> object:
    if isinstance(x, Tensor):
        return x.double() if x.is_floating_point() else x
    if isinstance(x, torch.dtype):
        return torch.float64 if x.is_floating_point else x
    return torch.device("cpu") if isinstance(x, torch.device) else x
