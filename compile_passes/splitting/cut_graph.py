"""A rewritten joint graph cut in two at the boundary between verify and commit.

The first half holds what its outputs need, the second one the rest. What passes from one to the other is what the second
reads of the first: with the states gone, the record and the checkpoint's pool and slots.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch.fx import Graph, GraphModule, Node

import recoverssm_ops.ops as ops
from compile_passes.reading.index_notation import aten
from compile_passes.reading.reach import ancestors
from compile_passes.splitting.joint_graph import Traced

COMMIT_ARGUMENTS = [a.name for a in ops.kda_commit._schema.arguments if a.name != "state"]


@dataclass
class Half:
    """One half as a module; ``inputs`` are nodes of the joint graph, and so is what ``outputs`` stand for."""

    module: GraphModule
    inputs: list[Node]
    outputs: list[Node]


def cut(traced: Traced, records: Iterable[Node]) -> tuple[Half, Half]:
    """The two halves; ``records`` are returned by the first one in any case."""
    records = list(records)
    first_writes, second_writes = traced.writes(0), traced.writes(1)
    outputs, results = traced.returned("output"), traced.returned("result")
    order = {node: place for place, node in enumerate(traced.graph.nodes)}
    first = ancestors([*outputs, *(value for _, value in first_writes), *records])
    wanted = [*results, *(value for _, value in second_writes)]
    # Followed only as far as the first half, which hands over what is read at that border.
    second = ancestors(wanted, stop=first)
    read = {n for node in second - first for n in node.all_input_nodes} | set(wanted) | set(records)
    crossing = sorted((n for n in read & first if n.op != "placeholder"), key=order.get)
    kept = sorted((n for n in (read & first) | second if n.op == "placeholder"), key=order.get)

    in_order = sorted(first, key=order.get)
    inputs = [n for n in in_order if n.op == "placeholder"]
    outputs = [*outputs, *crossing]
    one = Half(module_of(traced.graph, inputs, in_order, outputs, first_writes), inputs, outputs)
    inputs = [*crossing, *kept]
    in_order = sorted(second - first, key=order.get)
    two = Half(module_of(traced.graph, inputs, in_order, results, second_writes), inputs, results)
    return one, two


def module_of(joint: Graph, inputs: list[Node], nodes: list[Node], outputs: list[Node], writes: list) -> GraphModule:
    """A module of a part of the joint graph that writes its inputs in place, as the model does."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta["val"] = node.meta.get("val")
    place = {node: i for i, node in enumerate(nodes)}
    for node in nodes:
        if node in copies:
            continue
        if node.target in (auto_functionalized, auto_functionalized_v2) and node.args == (ops.kda_commit,):
            _commit(graph, node, copies, place, outputs)
        elif node.target is operator.getitem and _is_pool(node):
            copies[node] = copies[node.args[0]]
        elif _may_write(node, writes, place, outputs):
            target = copies[node.args[0]]
            graph.call_function(aten.index_put_.default, (target, *torch.fx.map_arg(node.args[1:], copies.get)))
            copies[node] = target
        else:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
    for target, value in writes:
        if copies[value] is not copies[target]:
            graph.call_function(aten.copy_.default, (copies[target], copies[value]))
    graph.output(tuple(copies[node] for node in outputs))
    graph.lint()
    return GraphModule(torch.nn.Module(), graph)


def _may_write(node: Node, writes: list, place: dict[Node, int], outputs: list[Node]) -> bool:
    """Whether an ``index_put`` makes the new contents of an input whose old ones nobody reads later."""
    target = node.args[0] if node.target is aten.index_put.default else None
    return (target, node) in writes and not _read_later(target, node, place, outputs)


def _read_later(target: Node, node: Node, place: dict[Node, int], outputs: list[Node]) -> bool:
    """Whether what ``target`` holds before ``node`` is read after it, as it is or through a view of it."""
    todo, seen = [target], set()
    while todo:
        held = todo.pop()
        if held in outputs:
            return True
        for user in held.users:
            if user in seen or user not in place:
                continue
            seen.add(user)
            if place[user] > place[node]:
                return True
            if user is not node and _is_view(user):
                todo.append(user)
    return False


def _is_view(node: Node) -> bool:
    """By its schema; what has none (a higher-order operator) returns new tensors in a functional graph."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)


def _is_pool(node: Node) -> bool:
    """The second result of a functional commit: the pool after it."""
    source = node.args[0]
    return source.target in (auto_functionalized, auto_functionalized_v2) and source.args == (ops.kda_commit,)


def _commit(graph: Graph, node: Node, copies: dict[Node, Node], place: dict[Node, int], outputs: list[Node]) -> None:
    """The mutating operator itself, on the pool where nobody reads the old one afterwards, else on a copy."""
    pool = node.kwargs["state"] if node.target is auto_functionalized else node.kwargs["_all_bases"][0]
    owned = copies[pool].op == "placeholder" and not _read_later(pool, node, place, outputs)
    state = copies[pool] if owned else graph.call_function(aten.clone.default, (copies[pool],))
    arguments = [node.kwargs[name] for name in COMMIT_ARGUMENTS]
    graph.call_function(ops.kda_commit, (state, *torch.fx.map_arg(tuple(arguments), lambda n: copies[n])))
    copies[node] = state
