"""One launch for the commits of all layers.

A commit is small: a launch of its own for every layer costs more than the work. Commits that share their plan and settings,
and whose pools and records are laid out alike, become one ``kda_commit_layers``.

The merged commit takes the place of the last one, after everything that any of them reads. A commit whose result is read
before that place stays as it is; so nothing else has to move, and the graph stays functional and sorted. The records of the
layers live until then, which they do anyway where acceptance is known at the end of the step.
"""

from __future__ import annotations

import operator
from itertools import chain, groupby

from torch import Tensor
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch.fx import Graph, Node

import recoverssm_ops.layers_ops as layers_ops
import recoverssm_ops.ops as ops
from compile_passes.replacing.emit import insert

RECORD = ("u", "k", "g", "A_log", "dt_bias")
COMMON = tuple(a.name for a in ops.kda_commit._schema.arguments if a.name not in ("state", *RECORD))
# The functional forms of a commit to a whole pool: how they name the pool beside the other arguments.
POOLS = {auto_functionalized_v2: {"_state_base_index", "_all_bases"}, auto_functionalized: {"state"}}


def merge_commits(graph: Graph) -> int:
    """Merge the commits of layers that are alike, in place; returns how many commits became part of a merged one."""
    found = [(key, node) for node in graph.nodes if (key := _kind(node)) is not None]
    found.sort(key=lambda item: str(item[0]))  # stable: of one kind, in the graph's order
    merged = 0
    for _, group in groupby(found, key=lambda item: item[0]):
        commits = [node for _, node in group]
        while commits:
            place = {node: i for i, node in enumerate(graph.nodes)}
            last = commits[-1]
            together, later = [], []
            for node in commits:
                pool = _pool(node)
                alone = any(place[reader] <= place[last] for reader in _readers(node))
                alone |= any(_pool(other) is pool for other in together)
                (later if alone else together).append(node)
            if len(together) > 1:
                _merge(graph, together)
                merged += len(together)
            commits = later
    return merged


def _kind(node: Node) -> tuple | None:
    """What commits of one launch have in common; None for anything but a commit to a whole pool."""
    if node.op != "call_function" or node.target not in POOLS or node.args != (ops.kda_commit,):
        return None
    if set(node.kwargs) != {*POOLS[node.target], *RECORD, *COMMON} or len(node.kwargs.get("_all_bases", [0])) != 1:
        return None
    if any(user.target is not operator.getitem or user.args[1] != 1 for user in node.users):
        return None
    if any(isinstance(x, Node) and not isinstance(x.meta["val"], Tensor) for x in node.kwargs.values()):
        return None
    common = tuple((type(node.kwargs[name]), node.kwargs[name]) for name in COMMON)
    layouts = [_layout(x) for x in (_pool(node), *map(node.kwargs.get, RECORD))]
    return node.target.name(), common, *layouts


def _layout(node: Node | None) -> str:
    """As text: sizes may be symbols, and must not be compared by value here."""
    if node is None:
        return "none"
    x = node.meta["val"]
    return f"{x.dtype} {tuple(x.shape)} {x.stride()} {x.device}"


def _pool(node: Node) -> Node:
    return node.kwargs["state"] if node.target is auto_functionalized else node.kwargs["_all_bases"][0]


def _readers(node: Node) -> list[Node]:
    return [reader for result in node.users for reader in result.users]


def _merge(graph: Graph, commits: list[Node]) -> None:
    last = commits[-1]
    pools = [_pool(node) for node in commits]
    records = {name: [node.kwargs[name] for node in commits] for name in RECORD}
    common = {name: last.kwargs[name] for name in COMMON}
    read = [*pools, *chain(*records.values()), *common.values()]
    read = list(dict.fromkeys(x for x in read if isinstance(x, Node)))

    def commit(*tensors: Tensor) -> list[Tensor]:
        values = dict(zip(read, tensors, strict=True))
        arguments = {name: [values[x] for x in nodes if x is not None] for name, nodes in records.items()}
        arguments |= {name: values[x] if isinstance(x, Node) else x for name, x in common.items()}
        states = [values[pool] for pool in pools]
        if last.target is auto_functionalized:
            return auto_functionalized(layers_ops.kda_commit_layers, states=states, **arguments)[1]
        bases = {f"_states_{layer}_base_index": layer for layer in range(len(states))}
        bases |= {"_states_length": len(states), "_all_bases": states}
        return list(auto_functionalized_v2(layers_ops.kda_commit_layers, **arguments, **bases)[1:])

    for node, state in zip(commits, insert(graph, last.next, commit, read), strict=True):
        for result in list(node.users):
            result.replace_all_uses_with(state)
            graph.erase_node(result)
        graph.erase_node(node)
