"""Pool updates in a functional graph, and how each is written in place again.

A functional graph makes new contents of a pool (``index_put``, ``auto_functionalized_v2`` around a commit) and says at its end
that they replace the old ones. Run as it stands, that copies every pool at every step. Here the updates are found again, so
that the exported program has the operators that mutate.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch.fx import Node

from compile_passes.exporting.graph import Pool, StepGraph
from compile_passes.reading.index_notation import aten

IN_PLACE = {
    aten.index_put.default: aten.index_put_.default,
    aten.copy.default: aten.copy_.default,
}


@dataclass(frozen=True)
class Write:
    """One update: ``node`` is the call, ``results`` are the new contents of ``bases``, in order."""

    node: Node
    target: Callable
    bases: list[Node]
    results: list[Node]
    arguments: Callable[[Callable], tuple]  # given a map of nodes: the arguments of ``target``

    @property
    def nodes(self) -> set[Node]:
        return {self.node, *self.results}


def find_writes(step: StepGraph) -> tuple[dict[Node, Write], list[Pool]]:
    """The updates that can be done in place, by their call; and the pools that have to be copied instead."""
    writes: dict[Node, Write] = {}
    copied = []
    for pool in step.pools:
        chain = _chain(pool)
        if chain is None:
            copied.append(pool)
        else:
            writes.update({write.node: write for write in chain})
    # A call that updates several pools is in place for all of them or for none.
    final_of = {pool.node: pool for pool in step.pools}
    for node, write in list(writes.items()):
        bases = [final_of.get(_root(writes, base)) for base in write.bases]
        if any(pool is None or pool in copied for pool in bases):
            del writes[node]
            copied += [pool for pool in bases if pool is not None and pool not in copied]
    return writes, copied


def as_write(result: Node) -> Write | None:
    """The update whose result this node is."""
    if result.target in IN_PLACE and not result.kwargs:
        target = IN_PLACE[result.target]
        return Write(result, target, [result.args[0]], [result], lambda at: torch.fx.map_arg(result.args, at))
    if result.target is not operator.getitem or not isinstance(result.args[0], Node):
        return None
    call = result.args[0]
    if call.target is auto_functionalized_v2:
        return _unfunctionalized_v2(call)
    if call.target is auto_functionalized:
        return _unfunctionalized(call)
    return None


def _chain(pool: Pool) -> list[Write] | None:
    """The updates from the pool's first contents to its last, if every one of them may happen in place."""
    writes, node = [], pool.final
    while node is not pool.node:
        write = as_write(node)
        if write is None or node not in write.results:
            return None
        writes.append(write)
        node = write.bases[write.results.index(node)]
    writes.reverse()
    return None if any(_read_later(base, write) for write in writes for base in write.bases) else writes


def _root(writes: dict[Node, Write], base: Node) -> Node:
    while True:
        write = next((w for w in writes.values() if base in w.results), None)
        if write is None:
            return base
        base = write.bases[write.results.index(base)]


def _read_later(base: Node, write: Write) -> bool:
    """Whether the old contents, or a view of them, are still read after the update."""
    order = {node: position for position, node in enumerate(base.graph.nodes)}
    todo, seen = [base], set()
    while todo:
        node = todo.pop()
        for user in node.users:
            if user is write.node or user in seen:
                continue
            seen.add(user)
            if user.op == "output" or order[user] > order[write.node]:
                return True
            if _is_view(user):
                todo.append(user)
    return False


def _is_view(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


def _unfunctionalized(call: Node) -> Write | None:
    (op,) = call.args
    mutable = [a.name for a in op._schema.arguments if a.is_write]
    bases = [call.kwargs[name] for name in mutable]
    if op._schema.returns or not all(isinstance(base, Node) for base in bases):
        return None
    results = _results(call, len(bases))
    order = [a.name for a in op._schema.arguments]
    values = [call.kwargs[name] for name in order]
    return results and Write(call, op, bases, results, lambda at: tuple(torch.fx.map_arg(values, at)))


def _unfunctionalized_v2(call: Node) -> Write | None:
    """Only updates of whole tensors: the recipe of a view is not undone."""
    (op,) = call.args
    kwargs = dict(call.kwargs)
    bases = list(kwargs.pop("_all_bases"))
    values, used = [], []
    for argument in op._schema.arguments:
        if not argument.is_write:
            values.append(kwargs.pop(argument.name))
        elif f"_{argument.name}_length" in kwargs:
            length = kwargs.pop(f"_{argument.name}_length")
            indices = [kwargs.pop(f"_{argument.name}_{i}_base_index", None) for i in range(length)]
            used += indices
            values.append([None if i is None else bases[i] for i in indices])
        else:
            used.append(kwargs.pop(f"_{argument.name}_base_index", None))
            values.append(None if used[-1] is None else bases[used[-1]])
    if op._schema.returns or kwargs or None in used or sorted(used) != list(range(len(bases))):
        return None
    results = _results(call, len(bases))
    return results and Write(call, op, bases, results, lambda at: tuple(torch.fx.map_arg(values, at)))


def _results(call: Node, count: int) -> list[Node] | None:
    """The updated tensors follow the operator's own results, of which there is one None."""
    by_index = {user.args[1]: user for user in call.users if user.target is operator.getitem}
    found = [by_index.get(i + 1) for i in range(count)]
    return None if None in found else found
