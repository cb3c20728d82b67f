"""Which axis is which, and that nothing else reads a window's states."""

from __future__ import annotations

from torch.fx import Node

from compile_passes.matching.reasons import Refused
from compile_passes.matching.window import Count, Output, Roles, Selection, Where
from compile_passes.reading.index_notation import Axis, Element, Lookup, readers
from compile_passes.reading.integers import varies_with
from compile_passes.reading.selections import chosen


def find_roles(
    state: Element, checkpoint: Element, selection: Selection, value: Axis, key: Axis, anchor: Node
) -> Roles:
    """The row axis is the one that the selected position, or the pool's slot, varies with."""
    axes = [d.value for d in state.digits() if isinstance(d.value, Axis)]
    rest = [a for a in axes if a not in (value, key)]
    if len(axes) != len(set(axes)) or len(rest) > 2 or {value, key} - set(axes):
        raise Refused("unsupported_layout", anchor)
    rows = _varies_with(selection.count)
    if not rows:
        looked_up = [d.value for d in chosen(checkpoint).digits() if isinstance(d.value, Lookup)]
        rows = {a for lookup in looked_up for a in varies_with(lookup)}
    if not rows <= set(rest) or len(rows) > 1:
        raise Refused("selection_not_per_row", selection.node)
    batch = next(iter(rows)) if rows else (rest[0] if len(rest) == 2 else None)
    return Roles(batch, next((a for a in rest if a is not batch), None), value, key)


def _varies_with(count: Count) -> set[Axis]:
    if isinstance(count, int):
        return set()
    if isinstance(count, Where):
        return count.condition.axes() | _varies_with(count.then) | _varies_with(count.otherwise)
    return varies_with(count.lookup)


def check_users(
    states: list[Element], outputs: list[Output | None], selection: Node, path: set[Node], dependents: set[Node]
) -> None:
    """Nothing between the checkpoint and the exits has a user elsewhere."""
    read = [o.node for o in outputs if o is not None]
    exits = {selection, *read}
    interior = {*path, *(s.node for s in states)}
    todo = [n for e in (*read, *interior) for n in e.all_input_nodes]
    while todo:
        node = todo.pop()
        if node in dependents and node not in interior:
            interior.add(node)
            todo += node.all_input_nodes
    unread = {s.node for s, o in zip(states, outputs, strict=True) if o is None}
    for node in interior:
        for user in readers(node):
            if user not in interior and user not in exits:
                raise Refused("missing_output" if node in unread else "state_escapes", user)
    crossing = interior & {o.node for o in outputs if o is not None}
    if crossing:
        raise Refused("depends_on_output", next(iter(crossing)))
