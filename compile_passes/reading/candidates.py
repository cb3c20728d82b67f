"""Tensors that hold, or choose between, several states of one recurrence.

A state is not known yet; what shows here is only that each part was computed from the one before it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from compile_passes.reading.index_notation import Axis, Element, aten, broadcast, dtype, element_of, shape
from compile_passes.reading.joins import SCATTERS, STACKS, Join, join_of
from compile_passes.reading.selections import chosen
from compile_passes.reading.views import CASTS, cast_source, strip

LONGEST = 64  # parts: beyond any window, and a bound on the work that an unrelated stack costs


@dataclass
class Candidate:
    """``states`` at common axes, in the order they were computed; ``join`` is the tensor that holds them, if one does.

    ``names`` are the axes by the dimension of ``join``; ``dtype`` is what the states are rounded to in it. ``stored`` are
    written to one pool: no window unless every step is one, since other caches are written in turn, too.
    """

    anchor: Node
    states: list[Element]
    dtype: torch.dtype
    join: Join | None = None
    names: dict[int, Axis] = field(default_factory=dict)
    stored: bool = False


def candidates(graph: Graph) -> list[Candidate]:
    """Joins and choices of at least two float tensors of one layout, each computed from the one before."""
    found = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        candidate = _READERS.get(node.target, _joined)(node)
        if candidate is not None and _is_chain(candidate.states) and not _is_history(candidate.states):
            # ``cat([S0, stack(states)])``: the inner one is a part of the outer one.
            held = {s.node for s in candidate.states}
            found = [c for c in found if not {s.node for s in c.states} <= held or c.anchor not in _parts(node)]
            found.append(candidate)
    return found


def _joined(node: Node) -> Candidate | None:
    if any(user.target in SCATTERS and user.args[0] is node for user in node.users):
        return None  # the next slice assignment goes on with it
    if node.target in (*STACKS, *SCATTERS):
        _expect_values(node)
    join = join_of(node)
    if join is None or not 2 <= join.count <= LONGEST or not dtype(node).is_floating_point:
        return None
    names: dict[int, Axis] = {}
    states = [_computed(join.at(t, names)) for t in range(join.count)]
    return Candidate(node, states, dtype(node), join, names)


def _choice(node: Node) -> Candidate | None:
    """A chain of ``where`` with a condition per row."""
    if any(user.target is aten.where.self and node in user.args[1:] for user in node.users):
        return None
    _expect_values(node)
    if not dtype(node).is_floating_point or len(shape(node)) < 3:
        return None
    element, _ = element_of(node)
    leaves = _leaves(element)
    if leaves is None or any(join_of(chosen(e).node) for e in leaves):
        return None
    states = list({e.node: e for e in map(_computed, leaves)}.values())
    return Candidate(node, sorted(states, key=lambda e: e.node), dtype(node)) if len(states) > 1 else None


def _stored(node: Node) -> Candidate | None:
    """States that are written to one pool, one after the other."""
    if any(user.target is node.target and user.args[0] is node for user in node.users):
        return None
    values, put = [], node
    while put.target is aten.index_put.default and len(put.args[1]) == 1 and len(values) <= LONGEST:
        values.insert(0, put.args[2])
        put = put.args[0]
    if len(values) < 2 or any("val" not in v.meta or shape(v) != shape(node.args[2]) for v in values):
        return None
    index = element_of(values[-1])[0].index
    return Candidate(node, [_computed(Element(v, index)) for v in values], dtype(values[-1]), stored=True)


def _leaves(element: Element) -> list[Element] | None:
    """What a chain of choices chooses from; None where a condition varies with more than one axis."""
    element = strip(element)
    if element.node.target is not aten.where.self:
        return [element]
    condition, *sides = element.node.args
    if len(broadcast(element.index, condition).axes()) > 1:
        return None
    found = [_leaves(broadcast(element.index, side)) for side in sides]
    return None if None in found else [e for leaves in found for e in leaves]


def _expect_values(node: Node) -> None:
    if any("val" not in n.meta for n in (node, *node.all_input_nodes)):
        raise ValueError(
            "the graph has no fake values in meta['val']: run it through AOTAutograd or torch.export first"
        )


def _parts(node: Node) -> set[Node]:
    """The tensors that a join is made of, through views."""
    parts = set(node.all_input_nodes)
    return parts | {n for part in parts if join_of(part) is None for n in part.all_input_nodes}


def _computed(element: Element) -> Element:
    """What a part was computed as, before views and casts (states may be rounded on their way into the join)."""
    element = strip(element)
    return strip(cast_source(element)) if element.node.target in CASTS else element


def chain(parts: list[Element]) -> list[Element] | None:
    """What the parts were computed as, if each was computed from the one before."""
    states = [_computed(part) for part in parts]
    return states if _is_chain(states) else None


def _is_chain(states: list[Element]) -> bool:
    nodes = [s.node for s in states]
    if len(set(nodes)) != len(nodes) or not all(dtype(n).is_floating_point for n in nodes):
        return False
    if len(shape(nodes[-1])) < 3:
        return False
    # Every part but the last is looked for among the ancestors of the next, no further back than itself.
    return all(a < b and _reaches(b, a) for a, b in itertools.pairwise(nodes))


def _is_history(states: list[Element]) -> bool:
    """The inputs that a convolution keeps, after every token: each is the last columns of the one before and a new one."""
    shifted = [s.node.args[0] for s in states if s.node.target is aten.slice.Tensor]
    return len(shifted) == len(states) and all(
        _computed(element_of(n)[0]).node.target is aten.cat.default for n in shifted
    )


def _reaches(node: Node, ancestor: Node) -> bool:
    seen, todo = {node}, [node]
    while todo:
        for source in todo.pop().all_input_nodes:
            if source is ancestor:
                return True
            if source not in seen and ancestor < source:
                seen.add(source)
                todo.append(source)
    return False


_READERS = {aten.where.self: _choice, aten.index_put.default: _stored}
