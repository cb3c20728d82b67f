"""How one state of the window is chosen: looked up in the join, by conditions, or by weights that are one-hot."""

from __future__ import annotations

import torch
from torch.fx import Node

from compile_passes.matching.reasons import Refused
from compile_passes.matching.window import Count, Position, Selection, Where
from compile_passes.reading.algebra import product
from compile_passes.reading.candidates import Candidate
from compile_passes.reading.index_notation import (
    Axis,
    Element,
    Lookup,
    Unresolvable,
    aten,
    broadcast,
    dtype,
    element_of,
    readers,
    same_size,
    substitute,
    unify,
)
from compile_passes.reading.joins import Join
from compile_passes.reading.selections import SELECTIONS, chosen
from compile_passes.reading.views import CASTS, VIEWS, cast_source, counter, strip


class Chooser:
    """Reads an element of a tensor as one of a window's states: how many tokens that state has seen."""

    def __init__(self, candidate: Candidate, states: list[Element], checkpoint: Element):
        self.candidate, self.states, self.checkpoint = candidate, states, checkpoint
        self.first = 1 - (len(candidate.states) - len(states))
        self.looked_up = chosen(checkpoint)

    def count(self, element: Element, names: dict[Axis, Axis]) -> Count | None:
        """None if the element is no state. ``names`` collects the window's axes by the axes of the element."""
        element = strip(element)
        if element.node.target is aten.where.self:
            condition, *sides = element.node.args
            then, otherwise = (self.count(broadcast(element.index, side), names) for side in sides)
            if then is None or otherwise is None:
                return None
            return Where(strip(broadcast(element.index, condition)), then, otherwise)
        element = chosen(element)
        if element.node.target in CASTS and dtype(element.node) == self.candidate.dtype:
            element = chosen(cast_source(element))
        known = [(self.looked_up, 0), *((s, t + 1) for t, s in enumerate(self.states))]
        for state, tokens in known:
            if state.node is element.node:
                return tokens if _merge(names, unify(state, element)) else None
        return self._position(element, names)

    def _position(self, element: Element, names: dict[Axis, Axis]) -> Position | None:
        join = self.candidate.join
        if join is None:
            return None
        if element.node is join.node:
            try:
                which, inner = join.position(element.index)
            except Unresolvable:
                return None
            if not isinstance(which, Lookup) or not _merge(names, self._unify(join, inner)):
                return None
            return Position(which, join.count, self.first)
        return self._one_hot(join, element, names)

    def _one_hot(self, join: Join, element: Element, names: dict[Axis, Axis]) -> Position | None:
        """``sum_t w[b, t] states[b, t, ..]`` with ``w[b, t] = (n[b] == t)``."""
        between: dict[Node, bool] = {}

        def opaque(e: Element) -> bool:
            return e.node is join.node or not _computed_from(e.node, join.node, between)

        read = product(element, opaque)
        held = [f for f in read.factors if f.node is join.node]
        weights = [f for f in read.factors if f.node is not join.node]
        if len(held) != 1 or len(weights) != 1 or len(read.bound) != 1 or read.coefficient != 1:
            return None
        try:
            which, inner = join.position(held[0].index)
        except Unresolvable:
            return None
        position = _compared(weights[0], read.bound[0]) if which is read.bound[0] else None
        if position is None or not _merge(names, self._unify(join, inner)):
            return None
        return Position(Lookup(position), join.count, self.first, or_zero=True)

    def _unify(self, join: Join, inner: tuple) -> dict[Axis, Axis] | None:
        pattern = join.at(0, self.candidate.names)
        return unify(Element(join.node, join.position(pattern.index)[1]), Element(join.node, inner))


def _merge(names: dict[Axis, Axis], more: dict[Axis, Axis] | None) -> bool:
    if more is None or any(names.get(new, old) is not old for new, old in more.items()):
        return False
    names.update(more)
    return len(set(names.values())) == len(names)


def _computed_from(node: Node, join: Node, known: dict[Node, bool]) -> bool:
    """Whether ``node`` is a view, product or sum of the join: a short walk, which stops at any other operation."""
    if node not in known:
        inner = node.op == "call_function" and (node.target in VIEWS or node.target in WEIGHING)
        known[node] = node is join or (
            inner and not node < join and any(_computed_from(n, join, known) for n in node.all_input_nodes)
        )
    return known[node]


def _compared(weight: Element, token: Axis) -> Element | None:
    """``n`` of a weight ``(n == arange(T))[t]``."""
    weight = strip(weight)
    while weight.node.target in CASTS:
        weight = strip(cast_source(weight))
    if weight.node.target is not aten.eq.Tensor:
        return None
    sides = [strip(broadcast(weight.index, a)) for a in weight.node.args]
    for counted, position in (sides, sides[::-1]):
        if counter(counted) is token and token not in position.axes():
            return position
    return None


STORES = (aten.index_put.default, aten.scatter.src, aten.index_copy.default, aten.copy.default, aten.copy_.default)
JOIN, SUM, CHOSEN = "join", "sum", "chosen"
WEIGHING = (aten.mul.Tensor, aten.bmm.default, aten.mm.default, aten.sum.dim_IntList, aten.where.self)


def find_selection(candidate: Candidate, states: list[Element], checkpoint: Element) -> tuple[Selection, set[Node]]:
    """The one place where a state is chosen, and the nodes between the states and it."""
    if candidate.stored:
        raise Refused("stored_per_position", candidate.anchor)
    chooser = Chooser(candidate, states, checkpoint)
    found: dict[Node, Selection] = {}
    # What a reader is given: the join itself, a sum over it, or a state that was chosen.
    todo = [(n, JOIN) for n in readers(candidate.join.node)] if candidate.join else [(candidate.anchor, JOIN)]
    reached = {candidate.join.node} if candidate.join else set()
    returned = stored = None
    while todo:
        node, given = todo.pop()
        if node in reached:
            continue
        if node.op == "output":
            returned = node if given is JOIN else returned
            continue
        selection = _selected(node, chooser) if given is not CHOSEN or node.target is aten.where.self else None
        if selection is not None:
            found[node], given = selection, CHOSEN
        elif node.target in SELECTIONS and node.target not in VIEWS and given is JOIN:
            raise Refused("selection_not_per_row", node)
        elif node.target in WEIGHING and given is not CHOSEN:
            given = SUM
        elif node.target not in VIEWS:
            if given is JOIN and node.target in STORES and candidate.join and _reads_whole(node, candidate.join.node):
                stored = node
            continue
        todo += [(n, given) for n in readers(node)]
        reached.add(node)
    # ``where(n > 0, states[rows, n - 1], S0)``: the outer choice is the one that counts.
    inner = {n: _sources(n, reached) for n in found}
    outermost = [n for n in found if not any(n in inner[other] for other in found)]
    if not outermost and stored:
        raise Refused("stored_per_position", stored)
    if not outermost:
        raise Refused("no_selection", returned or candidate.anchor)
    if len(outermost) > 1:
        raise Refused("state_escapes", outermost[1])
    (node,) = outermost
    ends = {s.node for s in states}
    held = _parts(candidate.join.node, ends) if candidate.join else set()
    return found[node], inner[node] | held | _choices(node, ends)


def _parts(join: Node, states: set[Node]) -> set[Node]:
    """The views and casts between the states and the tensor that holds them."""
    found, todo, first = set(), [join], min(states)
    while todo:
        for source in todo.pop().all_input_nodes:
            if source.target in VIEWS and source not in states and source not in found and first < source:
                found.add(source)
                todo.append(source)
    return found


def _choices(node: Node, states: set[Node]) -> set[Node]:
    """The nodes between a chain of choices and the states, conditions aside."""
    sides = node.args[1:] if node.target is aten.where.self else ()
    found = set()
    for side in sides:
        while side not in states and side.target in VIEWS and side.target is not aten.where.self:
            found.add(side)
            side = side.all_input_nodes[0]
        if side.target is aten.where.self:
            found |= {side} | _choices(side, states)
    return found


def _reads_whole(node: Node, join: Node) -> bool:
    tensors = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    return any(strip(element_of(n)[0]).node is join for n in tensors)


def _sources(node: Node, reached: set[Node]) -> set[Node]:
    """The nodes of ``reached`` that ``node`` is computed from."""
    found, todo = set(), [node]
    while todo:
        for source in todo.pop().all_input_nodes:
            if source in reached and source not in found:
                found.add(source)
                todo.append(source)
    return found


def _selected(node: Node, chooser: Chooser) -> Selection | None:
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    element, axes = element_of(node)
    names: dict[Axis, Axis] = {}
    count = chooser.count(element, names)
    if count is None or isinstance(count, int):
        return None
    if any(a not in names and not same_size(a.size, 1) for a in axes):
        raise Refused("selection_not_per_row", node)
    return Selection(node, [names.get(a) for a in axes], _renamed(count, names), dtype(node))


def _renamed(count: Count, names: dict[Axis, Axis]) -> Count:
    if isinstance(count, int):
        return count
    if isinstance(count, Where):
        condition = count.condition
        for new, old in names.items():
            condition = substitute(condition, new, old)
        return Where(condition, _renamed(count.then, names), _renamed(count.otherwise, names))
    element, row = count.lookup.element, names.get(count.lookup.row, count.lookup.row)
    for new, old in names.items():
        element = substitute(element, new, old)
    return Position(Lookup(element, row, count.lookup.stride), count.count, count.first, count.or_zero)
