"""Keep the graph's metadata true where an output is laid out otherwise than what it replaces.

The operator's output is dense as ``[B, T, D]``, a library convolution's as ``[B, D, T]``. Views and pointwise operations hand
the layout on, and operators that are inserted later are promised the strides of their inputs: a stale promise costs a copy.
"""

from __future__ import annotations

import heapq
import operator

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from compile_passes.reading.index_notation import aten, same_size
from compile_passes.reading.views import VIEWS
from compile_passes.replacing.emit import fake_mode

HANDS_ON = {*VIEWS, aten.split_with_sizes.default, aten.split.Tensor, operator.getitem}


def refresh(graph: Graph, start: Node) -> None:
    """Compute the metadata of what reads ``start`` again, as far as strides differ."""
    mode, todo, seen = fake_mode(graph), list(start.users), {start}
    heapq.heapify(todo)
    while todo:
        node = heapq.heappop(todo)
        if node in seen or not _hands_on(node):
            continue
        seen.add(node)
        if node.target is aten.view.default:  # what was dense may be a permutation now
            node.target = aten.reshape.default
        args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
        with mode:
            value = node.target(*args, **kwargs)
        if not _same_strides(value, node.meta["val"]):
            node.meta["val"] = value
            for user in node.users:
                heapq.heappush(todo, user)


def _hands_on(node: Node) -> bool:
    if node.op != "call_function":
        return False
    return node.target in HANDS_ON or torch.Tag.pointwise in getattr(node.target, "tags", ())


def _same_strides(a: object, b: object) -> bool:
    tensors = zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True)
    return all(all(map(same_size, x.stride(), y.stride())) for x, y in tensors)
