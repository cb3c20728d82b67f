"""How a window's states leave it: each through one contraction with a query, all through one selection."""

from __future__ import annotations

from collections import deque

import torch
from torch.fx import Node

from compile_passes.algebra import product
from compile_passes.index_notation import (
    Axis,
    Element,
    Lookup,
    aten,
    dtype,
    element_of,
    readers,
    same_size,
    substitute,
    unify,
)
from compile_passes.integers import varies_with
from compile_passes.reasons import Refused
from compile_passes.views import SELECTIONS, STACKS, VIEWS, Unresolvable, piece_of, strip
from compile_passes.window import Output, Roles, Selection

PRODUCTS = (aten.mul.Tensor, aten.bmm.default, aten.mm.default, aten.sum.dim_IntList)


def find_output(state: Element, roles: Roles, recurrence: set[Node]) -> Output:
    """The one contraction of this state with a query.

    The read of the next step's correction is such a contraction too, but it is part of the ``recurrence``.
    """
    seen, todo = set(), deque(readers(state.node))
    while todo:
        user = todo.popleft()
        if user in seen or user.target in STACKS or not isinstance(user.meta.get("val"), torch.Tensor):
            continue
        seen.add(user)
        output = None if user in recurrence else _as_output(user, state, roles)
        if output is not None:
            return output
        if user.target in VIEWS or (user.target in PRODUCTS and user not in recurrence):
            todo += readers(user)
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
    named = _named(axes, names)
    return None if named is None else Output(node, named, read.coefficient, query)


def _named(axes: list[Axis], names: dict[Axis, Axis]) -> list[Axis | None] | None:
    """The window's axes for those of a node. An axis that is not of the window must have one position."""
    if any(a not in names and not same_size(a.size, 1) for a in axes):
        return None
    return [names.get(a) for a in axes]


def _computed_from(node: Node, state: Node, known: set[Node]) -> bool:
    """Whether ``node`` is a view, product or sum of ``state``: a short walk, since outputs stand next to their state."""
    if node is state or node in known:
        return True
    inner = node.target in PRODUCTS or (node.target in VIEWS and node.target not in STACKS)
    if inner and any(_computed_from(n, state, known) for n in node.all_input_nodes):
        known.add(node)
        return True
    return False


def find_selection(stack: Node, piece: Element) -> tuple[Selection, list[Node]]:
    """The one gather of a looked-up position, and the views between the stack and it."""
    path, todo, found, returned = [], readers(stack), [], None
    while todo:
        node = todo.pop()
        if node.op == "output":
            returned = node
            continue
        if node.target not in VIEWS and node.target not in SELECTIONS:
            raise Refused("state_escapes", node)
        element, axes = element_of(node)
        element = strip(element, selections=True)
        try:
            which, inner = piece_of(stack, element.index) if element.node is stack else (None, ())
        except Unresolvable:
            which, inner = None, ()
        if isinstance(which, Lookup):
            names = unify(piece, Element(piece.node, inner))
            named = names and _named(axes, names)
            if not named:
                raise Refused("selection_not_per_row", node)
            position = which.element
            row = names.get(which.row, which.row)
            for new, old in names.items():
                position = substitute(position, new, old)
            found.append(Selection(node, named, Lookup(position, row, which.stride)))
        elif node.target in SELECTIONS:
            raise Refused("selection_not_per_row", node)
        else:
            path.append(node)
            todo += readers(node)
    if not found:
        raise Refused("no_selection", returned or stack)
    if returned or len(found) > 1:
        raise Refused("state_escapes", returned or found[1].node)
    return found[0], path


def find_roles(state: Element, checkpoint: Element, selection: Selection, value: Axis, key: Axis, stack: Node) -> Roles:
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


def check_users(outputs: list[Node], selection: Node, downstream: set[Node], dependents: set[Node]) -> None:
    """Nothing between the checkpoint and the exits has a user elsewhere."""
    exits = {*outputs, selection}
    interior, todo = set(downstream), [n for e in (*outputs, *downstream) for n in e.all_input_nodes]
    while todo:
        node = todo.pop()
        if node in dependents and node not in interior:
            interior.add(node)
            todo += node.all_input_nodes
    for node in interior:
        for user in readers(node):
            if user not in interior and user not in exits:
                raise Refused("state_escapes", user)
    crossing = interior & set(outputs)
    if crossing:
        raise Refused("depends_on_output", next(iter(crossing)))
