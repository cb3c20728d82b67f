"""One launch for the commits of all layers, of states and of the short convolutions' histories.

A commit is small: a launch of its own for every layer costs more than the work. Commits that share their plan and settings,
and whose pools and records are laid out alike, become one ``kda_commit_layers`` or
``causal_conv1d_commit_layers``.

The merged commit takes the place of the last one, after everything that any of them reads. A commit whose result is read
before that place stays as it is; so nothing else has to move, and the graph stays functional and sorted. The records of the
layers live until then, which they do anyway where acceptance is known at the end of the step.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from itertools import chain, groupby

from torch import Tensor
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch._ops import OpOverload
from torch.fx import Graph, Node

import recoverssm_ops.conv_ops as conv_ops
import recoverssm_ops.layers_ops as layers_ops
import recoverssm_ops.ops as ops
from compile_passes.replacing.emit import insert


@dataclass(frozen=True)
class Merging:
    """A commit of one layer and that of many: its pool and what it records, by the names that they have in both."""

    single: OpOverload
    layers: OpOverload
    pools: tuple[str, str]
    records: dict[str, str]

    @property
    def common(self) -> tuple[str, ...]:
        own = (self.pools[0], *self.records)
        return tuple(a.name for a in self.single._schema.arguments if a.name not in own)

    def names_of_pool(self, form: object) -> set[str]:
        """How the functional form of a commit to a whole pool names it beside the other arguments."""
        name, _ = self.pools
        return {name} if form is auto_functionalized else {f"_{name}_base_index", "_all_bases"}


RECORD = ("u", "k", "g", "A_log", "dt_bias")
MERGING = {
    merging.single: merging
    for merging in (
        Merging(
            ops.kda_commit, layers_ops.kda_commit_layers, ("state", "states"), dict(zip(RECORD, RECORD, strict=True))
        ),
        Merging(
            conv_ops.causal_conv1d_commit,
            layers_ops.causal_conv1d_commit_layers,
            ("conv_state", "conv_states"),
            {"x": "xs"},
        ),
    )
}
FORMS = (auto_functionalized_v2, auto_functionalized)


def merge_commits(graph: Graph, device_type: str | None = None) -> int:
    """Merge the commits of layers that are alike, in place; returns how many commits became part of a merged one.

    Args:
        graph: a functional post-grad graph.
        device_type: merge commits to pools of such a device alone.
    """
    found = [(key, node) for node in graph.nodes if (key := _kind(node)) is not None]
    if device_type is not None:
        found = [(key, node) for key, node in found if _pool(node).meta["val"].device.type == device_type]
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
    merging = _merging(node)
    if merging is None:
        return None
    names = {*merging.names_of_pool(node.target), *merging.records, *merging.common}
    if set(node.kwargs) != names or len(node.kwargs.get("_all_bases", [0])) != 1:
        return None
    if any(user.target is not operator.getitem or user.args[1] != 1 for user in node.users):
        return None
    if any(isinstance(x, Node) and not isinstance(x.meta["val"], Tensor) for x in node.kwargs.values()):
        return None
    common = tuple((type(node.kwargs[name]), node.kwargs[name]) for name in merging.common)
    layouts = [_layout(x) for x in (_pool(node), *map(node.kwargs.get, merging.records))]
    return node.target.name(), merging.single.name(), common, *layouts


def _merging(node: Node) -> Merging | None:
    if node.op != "call_function" or node.target not in FORMS or len(node.args) != 1:
        return None
    return MERGING.get(node.args[0])


def _layout(node: Node | None) -> str:
    """As text: sizes may be symbols, and must not be compared by value here."""
    if node is None:
        return "none"
    x = node.meta["val"]
    return f"{x.dtype} {tuple(x.shape)} {x.stride()} {x.device}"


def _pool(node: Node) -> Node:
    if node.target is auto_functionalized:
        return node.kwargs[MERGING[node.args[0]].pools[0]]
    return node.kwargs["_all_bases"][0]


def _readers(node: Node) -> list[Node]:
    return [reader for result in node.users for reader in result.users]


def _merge(graph: Graph, commits: list[Node]) -> None:
    last = commits[-1]
    merging = MERGING[last.args[0]]
    pools = [_pool(node) for node in commits]
    records = {name: [node.kwargs[name] for node in commits] for name in merging.records}
    common = {name: last.kwargs[name] for name in merging.common}
    read = [*pools, *chain(*records.values()), *common.values()]
    read = list(dict.fromkeys(x for x in read if isinstance(x, Node)))
    _, name_of_pools = merging.pools

    def commit(*tensors: Tensor) -> list[Tensor]:
        values = dict(zip(read, tensors, strict=True))
        arguments = {
            merging.records[name]: [values[x] for x in nodes if x is not None] for name, nodes in records.items()
        }
        arguments |= {name: values[x] if isinstance(x, Node) else x for name, x in common.items()}
        states = [values[pool] for pool in pools]
        if last.target is auto_functionalized:
            return auto_functionalized(merging.layers, **{name_of_pools: states}, **arguments)[1]
        bases = {f"_{name_of_pools}_{layer}_base_index": layer for layer in range(len(states))}
        bases |= {f"_{name_of_pools}_length": len(states), "_all_bases": states}
        return list(auto_functionalized_v2(merging.layers, **arguments, **bases)[1:])

    for node, state in zip(commits, insert(graph, last.next, commit, read), strict=True):
        for result in list(node.users):
            result.replace_all_uses_with(state)
            graph.erase_node(result)
        graph.erase_node(node)
