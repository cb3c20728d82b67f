"""Cut a step at acceptance: what must run before it is known how many tokens are kept, and what must run after.

The verify half computes everything that the step returns, and the *record*: whatever the pools' update reads of it. The
commit half takes the record and ``num_accepted`` and updates every pool. No pool is written before the commit, so a runtime
may sample in between, discard the window, or commit fewer tokens than the model accepted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

import recoverssm_ops.layers_ops as layers_ops
import recoverssm_ops.ops as ops
from compile_passes.exporting.graph import ExportError, StepGraph
from compile_passes.exporting.writes import Write, as_write
from compile_passes.reading.index_notation import aten, prims
from compile_passes.reading.joins import STACKS
from compile_passes.reading.reach import ancestors, descendants
from compile_passes.reading.selections import SELECTIONS
from compile_passes.reading.views import VIEWS

_COMMITS = (ops.kda_commit, layers_ops.kda_commit_layers)
# What may stand between the model's num_accepted and a commit's: arithmetic of one tensor that keeps the rows apart.
_STEPS = {
    aten.add.Tensor,
    aten.add.Scalar,
    aten.sub.Tensor,
    aten.sub.Scalar,
    aten.remainder.Scalar,
    aten.clamp.default,
    aten.unsqueeze.default,
    aten.squeeze.dims,
    aten.view.default,
    aten.reshape.default,
    aten.clone.default,
    aten.alias.default,
    aten._to_copy.default,
    prims.convert_element_type.default,
}


@dataclass
class Cut:
    """Nodes of the functional graph. ``carried`` are the record, in graph order, each with the name it gets."""

    accepted: Node
    verify: set[Node]
    commit: set[Node]
    carried: dict[Node, str]


def cut(step: StepGraph) -> Cut:
    """Raises :class:`ExportError` where the step cannot be cut."""
    accepted = find_acceptance(step)
    late = descendants(accepted)
    chains = {node for pool in step.pools for node in _written(step, pool.final)}
    finals = [pool.final for pool in step.pools]
    free = _recomputed(step)
    commit, carried, todo = set(), set(), list(finals)
    while todo:
        node = todo.pop()
        if node in commit:
            continue
        if node is accepted or not (node in chains or node in late or node in free or node.op == "placeholder"):
            carried.add(node)
            continue
        commit.add(node)
        todo += node.all_input_nodes
    carried.discard(accepted)
    verify = ancestors([*step.results, *carried])
    early_writes = verify & chains
    if early_writes:
        raise ExportError(f"the step reads a pool after it has updated it ({min(early_writes, key=str)})")
    return Cut(accepted, verify, commit, _names(step, carried))


def find_acceptance(step: StepGraph) -> Node:
    """The count of accepted tokens that every commit uses, as the step takes or returns it."""
    if not step.pools:
        raise ExportError("the step updates no pool: what it selects is among its results")
    known = {*step.inputs, *step.results}
    found: dict[Node, None] = {}
    for node in step.graph.nodes:
        length = _length(node)
        while length is not None and length not in known:
            sources = length.all_input_nodes
            length = sources[0] if len(sources) == 1 and _keeps_rows(length) else None
        if _length(node) is not None:
            if length is None:
                raise ExportError(
                    "the number of accepted tokens is neither an input nor an output of the step; return num_accepted, or "
                    "take it as an input"
                )
            found[length] = None
    if not found:
        raise ExportError("the step commits nothing: no pool of states is updated by the number of accepted tokens")
    if len(found) > 1:
        raise ExportError(f"the layers commit by different numbers of accepted tokens ({', '.join(map(str, found))})")
    return next(iter(found))


def _keeps_rows(node: Node) -> bool:
    if node.target is aten.select.int:  # of a single row there is one to select
        source, dim = node.args[:2]
        return source.meta["val"].shape[dim] == 1
    return node.target in _STEPS


def _length(node: Node) -> Node | None:
    """What says how many tokens this node commits."""
    if node.op != "call_function":
        return None
    if node.target is ops.kda_recover:
        return node.args[4]
    return node.kwargs["length"] if node.args and node.args[0] in _COMMITS else None


def _written(step: StepGraph, final: Node) -> set[Node]:
    """The nodes that make a pool's new contents of its old ones."""
    found, node = set(), final
    while step.pool(node) is None:
        write: Write | None = as_write(node)
        if write is None or node not in write.results:
            return found | {final}
        found |= write.nodes
        node = write.bases[write.results.index(node)]
    return found


def _recomputed(step: StepGraph) -> set[Node]:
    """What the commit half computes again rather than being given it: indices made of the step's inputs, sizes, views of
    parameters, and checkpoints gathered from pools (which nothing has written in between)."""
    found: set[Node] = set()
    pools = {pool.node for pool in step.pools}
    for node in step.graph.nodes:
        if node.op != "call_function":
            continue
        value, sources = node.meta.get("val"), node.all_input_nodes
        if isinstance(value, (torch.SymInt, torch.SymBool)):
            found.add(node)
        elif isinstance(value, torch.Tensor):
            integral = not value.is_floating_point() and not value.is_complex()
            if integral and all(s in step.inputs or s in found for s in sources):
                found.add(node)
            elif node.target in SELECTIONS or (node.target in VIEWS and node.target not in STACKS):
                from_kept = sources[0] in step.parameters or sources[0] in pools or sources[0] in found
                if from_kept and all(s in step.inputs or s in found for s in sources[1:]):
                    found.add(node)
    return found


def _names(step: StepGraph, carried: set[Node]) -> dict[Node, str]:
    """``record_<layer>_<u|k|g>`` for what a commit reads, ``carried_<n>`` for what any other update reads."""
    names: dict[Node, str] = {}
    layer = 0
    for node in step.graph.nodes:
        if _length(node) is None:
            continue
        parts = node.args[1:4] if node.target is ops.kda_recover else [node.kwargs[name] for name in "ukg"]
        groups = zip(*parts, strict=True) if isinstance(parts[0], (list, tuple)) else [parts]
        for group in groups:
            for part, value in zip("ukg", group, strict=True):
                if value in carried:
                    names.setdefault(value, f"record_{layer}_{part}")
            layer += 1
    others = [node for node in step.graph.nodes if node in carried and node not in names]
    names |= {node: f"carried_{i}" for i, node in enumerate(others)}
    order = {node: position for position, node in enumerate(step.graph.nodes)}
    return {node: names[node] for node in sorted(names, key=order.get)}
