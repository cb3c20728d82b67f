"""Find the per-position states of a speculative window and everything around them.

Anchor: a ``cat`` or ``stack`` of T tensors, each computed from the one before. From there the recurrence is read backwards,
one step at a time, as indexed scalars (``index_notation``), and checked term by term against

    S_t = S_{t-1} exp(g_t) + u_t k_t^T,    u_t = beta_t (v_t - sum_k S_{t-1} exp(g_t) k_t),    o_t = sum_k S_t q_t.

Anything else raises :class:`Refused` and leaves the graph alone.
"""

from __future__ import annotations

import itertools

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import guard_or_true

from compile_passes.algebra import terms
from compile_passes.exits import check_users, find_output, find_roles, find_selection
from compile_passes.index_notation import Axis, Element, dtype, element_of, shape, unify
from compile_passes.reasons import Refused
from compile_passes.steps import match_step
from compile_passes.views import CASTS, STACKS, VIEWS, cast_source, strip
from compile_passes.window import Window

MAX_WINDOW, MAX_HEAD_DIM = 16, 256


def candidates(graph: Graph) -> list[Node]:
    """Nodes that put together at least two float tensors of one shape, each computed from the one before."""
    order = {node: position for position, node in enumerate(graph.nodes)}
    return [n for n in graph.nodes if n.target in STACKS and _is_chain(n.args[0], order)]


def _is_chain(pieces: list[Node], order: dict[Node, int]) -> bool:
    if any(isinstance(p, Node) and "val" not in p.meta for p in pieces):
        raise ValueError(
            "the graph has no fake values in meta['val']: run it through AOTAutograd or torch.export first"
        )
    if len(pieces) < 2 or not all(isinstance(p, Node) and dtype(p).is_floating_point for p in pieces):
        return False
    if len(shape(pieces[0])) < 3 or len(set(pieces)) != len(pieces):
        return False
    # Every piece but the last is looked for among the ancestors of the next, no further back than itself.
    bases = [_computed(p) for p in pieces]
    return all(order[a] < order[b] and _reaches(b, a, order) for a, b in itertools.pairwise(bases))


def _computed(piece: Node) -> Node:
    """What a piece was computed as, before views and casts (states may be rounded on their way into the stack)."""
    node = strip(element_of(piece)[0]).node
    while node.target in CASTS:
        node = strip(cast_source(element_of(node)[0])).node
    return node


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


def match(graph: Graph, stack: Node) -> Window:
    """Read the window behind ``stack``; raises :class:`Refused`."""
    pieces = stack.args[0]
    if len(pieces) > MAX_WINDOW:
        raise Refused("window_too_long", stack)
    first, _ = element_of(pieces[0])
    states = [strip(Element(piece, first.index)) for piece in pieces]
    if any(not _same_layout(states[0], s) for s in states):
        raise Refused("non_uniform_step", stack)

    nodes = list(graph.nodes)
    dependents = _descendants(states[0].node, nodes)
    _check_precision(states, dependents)
    step = match_step(states[-1], states[-2], dependents)
    value, key = step.value_axis, step.key_axis
    checkpoint = _checkpoint(states[0], value, key)
    dependents = _descendants(checkpoint.node, nodes)
    recurrence = _check_precision(states, dependents)
    previous = [checkpoint, *states[:-1]]
    steps = [match_step(s, p, dependents) for s, p in zip(states, previous, strict=True)]
    if any((s.value_axis, s.key_axis) != (value, key) for s in steps):
        raise Refused("non_uniform_step", stack)

    selection, path = find_selection(stack, first)
    roles = find_roles(states[0], checkpoint, selection, value, key, stack)
    outputs = [find_output(s, roles, recurrence) for s in states]
    for query in (f.node for o in outputs for f in o.query):
        if query in dependents:
            raise Refused("depends_on_output", query)
    check_users([o.node for o in outputs], selection.node, {stack, *path}, dependents)
    # A dynamic head size is held to the operators' limit by a guard.
    if any(guard_or_true(axis.size > MAX_HEAD_DIM) for axis in (value, key)):
        raise Refused("head_too_large", stack)
    return Window(stack, states, checkpoint, roles, steps, outputs, selection)


def _descendants(start: Node, nodes: list[Node]) -> set[Node]:
    """What is computed from ``start``."""
    found = {start}
    for node in nodes[nodes.index(start) + 1 :]:
        if any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found - {start}


def _check_precision(states: list[Element], dependents: set[Node]) -> set[Node]:
    """The nodes between the first and the last state, all of which have to be float32."""
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
    return seen


def _checkpoint(state: Element, value: Axis, key: Axis) -> Element:
    """What the first step calls its previous state: the one factor with both axes."""

    def opaque(e: Element) -> bool:
        return not {value, key} <= e.axes()

    found = [f for p in terms(state, opaque) for f in p.factors if not opaque(f)]
    if len(found) != 1 or found[0].node is state.node:
        raise Refused("non_uniform_step", state.node)
    return found[0]


def _same_layout(a: Element, b: Element) -> bool:
    names = unify(a, b)
    return names is not None and all(old is new for new, old in names.items())
