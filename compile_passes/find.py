"""Find the per-position states of a speculative window and everything around them.

Anchor: a ``cat`` or ``stack`` of T tensors, each computed from the one before. From there the recurrence is read backwards,
one step at a time, as indexed scalars (``index_notation``), and checked term by term against

    S_t = S_{t-1} exp(g_t) + u_t k_t^T,    u_t = beta_t (v_t - sum_k S_{t-1} exp(g_t) k_t),    o_t = sum_k S_t q_t.

Anything else raises :class:`Refused` and leaves the graph alone.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from compile_passes.algebra import Product, product, remove, same, terms
from compile_passes.index_notation import (
    SELECTIONS,
    VIEWS,
    Axis,
    Element,
    Lookup,
    Unresolvable,
    aten,
    dtype,
    element_of,
    piece_of,
    shape,
    size_hint,
    strip,
    substitute,
)
from compile_passes.integers import varies_with
from compile_passes.reasons import Refused

STACKS = (aten.cat.default, aten.stack.default)
MAX_WINDOW, MAX_HEAD_DIM = 16, 256


@dataclass
class Roles:
    """Which axis of the state is which. Batch and head are None where their size is 1."""

    batch: Axis | None
    head: Axis | None
    value: Axis
    key: Axis


@dataclass
class Step:
    """The inputs of one step, each a product of elements; ``decay`` is empty for the plain delta rule."""

    decay: list[Element]
    key: list[Element]
    beta: list[Element]
    value: list[Element]


@dataclass
class Output:
    """``node[axes] = coefficient * sum_k S_t q_t``."""

    node: Node
    axes: list[Axis | None]
    coefficient: float
    query: list[Element]


@dataclass
class Selection:
    """``node[axes]`` is the state after ``position + 1`` tokens."""

    node: Node
    axes: list[Axis | None]
    position: Lookup


@dataclass
class Window:
    """A matched window of T tokens of one layer."""

    stack: Node
    states: list[Element]
    checkpoint: Element
    roles: Roles
    steps: list[Step]
    outputs: list[Output]
    selection: Selection

    @property
    def length(self) -> int:
        return len(self.steps)


def candidates(graph: Graph, order: dict[Node, int]) -> list[Node]:
    """Nodes that put together at least two float tensors of one shape, each computed from the one before."""
    return [n for n in graph.nodes if n.target in STACKS and _is_chain(n.args[0], order)]


def _is_chain(pieces: list[Node], order: dict[Node, int]) -> bool:
    if len(pieces) < 2 or not all(isinstance(p, Node) and dtype(p).is_floating_point for p in pieces):
        return False
    if len(shape(pieces[0])) < 3 or len(set(pieces)) != len(pieces):
        return False
    # Every piece but the last is looked for among the ancestors of the next, no further back than itself.
    bases = [strip(element_of(p)[0]).node for p in pieces]
    return all(order[a] < order[b] and _reaches(b, a, order) for a, b in itertools.pairwise(bases))


def _reaches(node: Node, ancestor: Node, order: dict[Node, int]) -> bool:
    seen, todo = {node}, [node]
    while todo:
        for source in todo.pop().all_input_nodes:
            if source is ancestor:
                return True
            if source not in seen and order[source] > order[ancestor]:
                seen.add(source)
                todo.append(source)
    return False


def match(stack: Node, order: dict[Node, int], nodes: list[Node]) -> Window:
    """Read the window behind ``stack``; raises :class:`Refused`."""
    pieces = stack.args[0]
    if len(pieces) > MAX_WINDOW:
        raise Refused("window_too_long", stack)
    first, _ = element_of(pieces[0])
    states = [strip(Element(piece, first.index)) for piece in pieces]
    if any(not _same_layout(states[0], s) for s in states):
        raise Refused("non_uniform_step", stack)

    last = order[states[-1].node]
    dependents = _descendants(states[0].node, last, order, nodes)
    _check_precision(states, dependents)
    value, key = _value_and_key(states[-1], states[-2], dependents)
    checkpoint = _checkpoint(states[0], value, key)
    dependents = _descendants(checkpoint.node, last, order, nodes)
    _check_precision(states, dependents)
    previous = [checkpoint, *states[:-1]]
    steps = [match_step(s, p, dependents) for s, p in zip(states, previous, strict=True)]

    selection, path = _selection(stack, first)
    roles = _roles(states[0], checkpoint, selection, value, key, stack)
    outputs = [_output(s, roles, order, dependents, states) for s in states]
    end = max(last, *(order[o.node] for o in outputs))
    dependents = _descendants(checkpoint.node, end, order, nodes)
    _check_users([o.node for o in outputs], selection.node, {stack, *path}, dependents)
    for query in (f.node for o in outputs for f in o.query):
        if order[query] > order[checkpoint.node] and _reaches(query, checkpoint.node, order):
            raise Refused("depends_on_output", query)
    if any(size_hint(axis.size) > MAX_HEAD_DIM for axis in (value, key)):
        raise Refused("head_too_large", stack)
    return Window(stack, states, checkpoint, roles, steps, outputs, selection)


def _descendants(start: Node, last: int, order: dict[Node, int], nodes: list[Node]) -> set[Node]:
    """What is computed from ``start``, up to position ``last``."""
    found = {start}
    for node in nodes[order[start] + 1 : last + 1]:
        if any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found - {start}


def _check_precision(states: list[Element], dependents: set[Node]) -> None:
    """Between the first and the last state everything is float32."""
    todo, seen = [states[-1].node], set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if dtype(node) != torch.float32:
            narrowed = dtype(node) in (torch.bfloat16, torch.float16) and node.target in VIEWS
            raise Refused("rounded_between_steps" if narrowed else "unsupported_dtype", node)
        todo += [n for n in node.all_input_nodes if n in dependents]


# --- one step -----------------------------------------------------------------------------------------------------------


def match_step(state: Element, previous: Element, dependents: set[Node]) -> Step:
    """Match ``S_t`` against ``S_{t-1}``; ``dependents`` are the nodes computed from the checkpoint."""

    def opaque(e: Element) -> bool:
        return e.node is previous.node or e.node not in dependents

    kept, gained = _two_terms(state, previous, opaque)
    decay = [f for f in kept.factors if f.node is not previous.node]
    deltas = [f for f in gained.factors if f.node in dependents]
    leaves = [f for f in gained.factors if f.node not in dependents]
    if not deltas:
        raise Refused("missing_delta", state.node)
    if len(deltas) > 1 or deltas[0].node is previous.node:
        raise Refused("non_uniform_step", state.node)
    value, read = _delta(deltas[0], previous, opaque)

    (inner,) = read.bound
    outer = _renamed(previous, next(f for f in read.factors if f.node is previous.node), inner)
    if outer is None:
        raise Refused("non_uniform_step", deltas[0].node)
    key = [substitute(f, inner, outer) for f in read.factors if f.node is not previous.node]
    missing = [d for d in decay if not remove(key, d)]
    if missing:
        read_decayed = len(missing) < len(decay)
        raise Refused("gate_mismatch" if read_decayed else "write_before_delta", deltas[0].node)
    if not key or not all(remove(leaves, k) for k in key):
        raise Refused("key_mismatch", deltas[0].node)
    if any(outer in b.axes() for b in leaves) or any(outer in v.axes() for v in value):
        raise Refused("non_uniform_step", state.node)
    rows = _value_axis(value, decay, key, leaves)
    if rows is None or any(rows in e.axes() for e in (*key, *leaves)):
        raise Refused("non_uniform_step", state.node)
    if any(rows in e.axes() for e in decay):
        raise Refused("gate_mismatch", state.node)
    return Step(decay, key, leaves, value)


def _two_terms(state: Element, previous: Element, opaque) -> tuple[Product, Product]:
    """``S_{t-1} * decay`` and ``u k^T``."""
    parts = terms(state, opaque)
    kept = [p for p in parts if not p.bound and any(same(f, previous) for f in p.factors)]
    if len(parts) != 2 or len(kept) != 1 or any(p.coefficient != 1 for p in parts):
        raise Refused("non_uniform_step", state.node)
    (gained,) = [p for p in parts if p is not kept[0]]
    if gained.bound or sum(f.node is previous.node for f in kept[0].factors) != 1:
        raise Refused("non_uniform_step", state.node)
    return kept[0], gained


def _delta(delta: Element, previous: Element, opaque) -> tuple[list[Element], Product]:
    """``v_t - sum_k (..)`` as the factors of v and the product that is summed."""
    parts = terms(delta, opaque)
    reads = [p for p in parts if any(f.node is previous.node for f in p.factors)]
    if len(parts) != 2 or len(reads) != 1 or reads[0].coefficient != -1 or len(reads[0].bound) != 1:
        raise Refused("non_uniform_step", delta.node)
    (value,) = [p for p in parts if p is not reads[0]]
    if value.coefficient != 1 or value.bound or not value.factors:
        raise Refused("non_uniform_step", delta.node)
    return value.factors, reads[0]


def _renamed(state: Element, read: Element, inner: Axis) -> Axis | None:
    """The axis of the state that ``read`` replaces by ``inner``, if that is their only difference."""
    found = None
    if len(state.index) != len(read.index):
        return None
    for a, b in zip(state.digits(), read.digits(), strict=False):
        if b.value is inner and isinstance(a.value, Axis) and found is None:
            found = a.value
    return found if found is not None and same(substitute(state, found, inner), read) else None


def _value_axis(value: list[Element], *others: list[Element]) -> Axis | None:
    """The axis that only v has."""
    elsewhere = {a for group in others for e in group for a in e.axes()}
    own = {a for e in value for a in e.axes()} - elsewhere
    return own.pop() if len(own) == 1 else None


def _value_and_key(state: Element, previous: Element, dependents: set[Node]) -> tuple[Axis, Axis]:
    step = match_step(state, previous, dependents)
    value = _value_axis(step.value, step.decay, step.key, step.beta)
    columns = {a for e in step.key for a in e.axes()} - {a for e in step.value for a in e.axes()}
    if len(columns) != 1:
        raise Refused("unsupported_layout", state.node)
    return value, columns.pop()


def _checkpoint(state: Element, value: Axis, key: Axis) -> Element:
    """What the first step calls its previous state: the one factor with both axes."""

    def opaque(e: Element) -> bool:
        return not {value, key} <= e.axes()

    found = [f for p in terms(state, opaque) for f in p.factors if not opaque(f)]
    if len(found) != 1 or found[0].node is state.node:
        raise Refused("non_uniform_step", state.node)
    return found[0]


# --- outputs and selection ----------------------------------------------------------------------------------------------


def _output(
    state: Element, roles: Roles, order: dict[Node, int], dependents: set[Node], states: list[Element]
) -> Output:
    """The one contraction of this state with a query."""
    others = {s.node for s in states} - {state.node}
    seen, todo = set(), deque(state.node.users)
    while todo:
        user = todo.popleft()
        if user in seen or user in others or not isinstance(user.meta.get("val"), torch.Tensor):
            continue
        seen.add(user)
        output = _as_output(user, state, roles)
        if output is not None:
            return output
        if user.target in VIEWS or user.target in (aten.mul.Tensor, aten.bmm.default, aten.sum.dim_IntList):
            todo += user.users
    raise Refused("missing_output", state.node)


def _as_output(node: Node, state: Element, roles: Roles) -> Output | None:
    element, axes = element_of(node)
    between: set[Node] = set()

    def opaque(e: Element) -> bool:
        if e.node is state.node:
            return True
        return not _computed_from(e.node, state.node, between)

    read = product(element, opaque)
    factors = [f for f in read.factors if f.node is state.node]
    if len(factors) != 1 or len(read.bound) != 1 or dtype(node) != torch.float32:
        return None
    names = unify(state, factors[0])
    if names is None or names.get(read.bound[0]) is not roles.key:
        return None
    query = [f for f in read.factors if f.node is not state.node]
    for new, old in names.items():
        query = [substitute(f, new, old) for f in query]
    allowed = {roles.batch, roles.head, roles.key}
    if not query or any(not f.axes() <= allowed for f in query):
        return None
    return Output(node, [names.get(a) for a in axes], read.coefficient, query)


def _computed_from(node: Node, state: Node, known: set[Node]) -> bool:
    """Whether ``node`` is a view, product or sum of ``state``: a short walk, since outputs stand next to their state."""
    if node is state or node in known:
        return True
    inner = node.target in VIEWS or node.target in (aten.mul.Tensor, aten.bmm.default, aten.sum.dim_IntList)
    if inner and node.target not in STACKS and any(_computed_from(n, state, known) for n in node.all_input_nodes):
        known.add(node)
        return True
    return False


def unify(pattern: Element, element: Element) -> dict[Axis, Axis] | None:
    """Axes of ``element`` by the axes of ``pattern`` in their place; None if anything else differs."""
    names: dict[Axis, Axis] = {}
    if len(pattern.index) != len(element.index):
        return None
    for a, b in zip(pattern.index, element.index, strict=True):
        if len(a) != len(b):
            return None
        for x, y in zip(a, b, strict=True):
            if isinstance(x.value, Axis) and isinstance(y.value, Axis) and y.value not in names:
                names[y.value] = x.value
            elif isinstance(x.value, Axis):
                if names.get(y.value) is not x.value:
                    return None
            elif isinstance(x.value, Lookup) or x.value != y.value:
                return None
    return names if len(set(names.values())) == len(names) else None


def _same_layout(a: Element, b: Element) -> bool:
    names = unify(a, b)
    return names is not None and all(old is new for new, old in names.items())


def _selection(stack: Node, piece: Element) -> tuple[Selection, list[Node]]:
    """The one gather of a looked-up position, and the views between the stack and it."""
    path, todo, found = [], list(stack.users), []
    while todo:
        node = todo.pop()
        if node.target not in VIEWS and node.target not in SELECTIONS:
            raise Refused("state_escapes" if node.op != "output" else "no_selection", node)
        element, axes = element_of(node)
        element = strip(element, selections=True)
        try:
            which, inner = piece_of(stack, element.index) if element.node is stack else (None, ())
        except Unresolvable:
            which, inner = None, ()
        if isinstance(which, Lookup):
            names = unify(piece, Element(piece.node, inner))
            if names is None:
                raise Refused("selection_not_per_row", node)
            position = which.element
            row = names.get(which.row, which.row)
            for new, old in names.items():
                position = substitute(position, new, old)
            found.append(Selection(node, [names.get(a) for a in axes], Lookup(position, row, which.stride)))
        elif node.target in SELECTIONS:
            raise Refused("selection_not_per_row", node)
        else:
            path.append(node)
            todo += node.users
    if len(found) != 1:
        raise Refused("state_escapes" if found else "no_selection", found[1].node if found else stack)
    return found[0], path


def _roles(state: Element, checkpoint: Element, selection: Selection, value: Axis, key: Axis, stack: Node) -> Roles:
    """The row axis is the one that the selected position, or the pool's slot, varies with."""
    axes = [d.value for d in state.digits() if isinstance(d.value, Axis)]
    rest = [a for a in axes if a not in (value, key)]
    if len(axes) != len(set(axes)) or len(rest) > 2 or {value, key} - set(axes):
        raise Refused("unsupported_layout", stack)
    rows = varies_with(selection.position)
    if not rows:
        looked_up = [d.value for d in strip(checkpoint, selections=True).digits() if isinstance(d.value, Lookup)]
        rows = {a for lookup in looked_up for a in varies_with(lookup)}
    if not rows <= set(rest):
        raise Refused("selection_not_per_row", selection.node)
    if len(rows) > 1:
        raise Refused("selection_not_per_row", selection.node)
    batch = next(iter(rows)) if rows else (rest[0] if len(rest) == 2 else None)
    return Roles(batch, next((a for a in rest if a is not batch), None), value, key)


def _check_users(outputs: list[Node], selection: Node, downstream: set[Node], dependents: set[Node]) -> None:
    """Nothing between the checkpoint and the exits has a user elsewhere."""
    exits = {*outputs, selection}
    interior, todo = set(downstream), [n for e in (*exits, *downstream) for n in e.all_input_nodes]
    while todo:
        node = todo.pop()
        if node in dependents and node not in interior:
            interior.add(node)
            todo += node.all_input_nodes
    for node in interior:
        for user in node.users:
            if user not in interior and user not in exits:
                raise Refused("state_escapes", user)
    crossing = interior & set(outputs)
    if crossing:
        raise Refused("depends_on_output", next(iter(crossing)))
