"""Find the per-position states of a speculative window and everything around them.

Anchor: a tensor of several positions (``joins``) or a choice between tensors (``where``) whose parts were each computed from
the one before. From there the recurrence is read backwards, one step at a time, as indexed scalars (``index_notation``), and
checked term by term against

    S_t = S_{t-1} exp(g_t) + u_t k_t^T,    u_t = beta_t (v_t - sum_k S_{t-1} exp(g_t) k_t),    o_t = sum_k S_t q_t.

Anything else raises :class:`Refused` and leaves the graph alone.
"""

from __future__ import annotations

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import guard_or_true

from compile_passes.matching.exits import check_users, find_roles
from compile_passes.matching.outputs import Exits, find_outputs
from compile_passes.matching.reasons import Refused
from compile_passes.matching.selection import find_selection
from compile_passes.matching.steps import match_step
from compile_passes.matching.window import Step, Window
from compile_passes.reading.algebra import expand
from compile_passes.reading.candidates import Candidate
from compile_passes.reading.index_notation import Element, dtype, substitute, unify
from compile_passes.reading.views import VIEWS

MAX_WINDOW, MAX_HEAD_DIM = 16, 256


def match(candidate: Candidate) -> Window | None:
    """Read the window behind a candidate; None if it is one token, :class:`Refused` if it is not understood."""
    anchor, states = candidate.anchor, candidate.states
    if len(states) > MAX_WINDOW + 1:
        raise Refused("window_too_long", anchor)
    if any(not _same_layout(states[-1], s) for s in states[1:]):
        raise Refused("non_uniform_step", anchor)

    dependents = descendants(states[0].node, states[-1].node)
    exits = Exits(candidate, _check_precision(states[-1], dependents))
    step = match_step(states[-1], states[-2], dependents, exits.channels)
    checkpoint = find_checkpoint(states[0], step, states[-1].node)
    if checkpoint is None:  # the checkpoint is one of the selectable states
        checkpoint, *states = states
    elif not _same_layout(states[-1], states[0]):
        raise Refused("non_uniform_step", anchor)
    if len(states) > MAX_WINDOW:
        raise Refused("window_too_long", anchor)
    if len(states) < 2:
        return None
    steps = _steps(states, checkpoint, step, anchor)

    value, key = step.value_axis, step.key_axis
    selection, path = find_selection(candidate, states, checkpoint)
    roles = find_roles(states[0], checkpoint, selection, value, key, anchor)
    outputs = find_outputs(exits, states, roles, path)
    read = [o for o in outputs if o is not None]
    dependents = descendants(checkpoint.node, states[-1].node, *(o.node for o in read))
    for query in (f.node for o in read for f in o.query):
        if query in dependents:
            raise Refused("depends_on_output", query)
    check_users(states, outputs, selection.node, path, dependents)
    # A dynamic head size is held to the operators' limit by a guard.
    if any(guard_or_true(axis.size > MAX_HEAD_DIM) for axis in (value, key)):
        raise Refused("head_too_large", anchor)
    return Window(anchor, states, checkpoint, roles, steps, outputs, selection)


def _steps(states: list[Element], checkpoint: Element, last: Step, anchor: Node) -> list[Step]:
    dependents = descendants(checkpoint.node, states[-1].node)
    _check_precision(states[-1], dependents)
    previous = [checkpoint, *states[:-1]]
    pairs = zip(states, previous, strict=True)
    steps = [match_step(s, p, dependents, lambda: (last.value_axis, last.key_axis)) for s, p in pairs]
    kinds = {(s.value_axis, s.key_axis, s.beta is None) for s in steps}
    if len(kinds) > 1:
        raise Refused("non_uniform_step", anchor)
    return steps


def descendants(start: Node, *ends: Node) -> set[Node]:
    """What is computed from ``start`` and stands no later in the graph than the last of ``ends``."""
    end = max(ends)
    found, todo = set(), [start]
    while todo:
        for user in todo.pop().users:
            if user not in found and not end < user:
                found.add(user)
                todo.append(user)
    return found


def _check_precision(last: Element, dependents: set[Node]) -> set[Node]:
    """The nodes between the first and the last state, all of which have to be float32."""
    todo, seen = [last.node], set()
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


def find_checkpoint(state: Element, last: Step, end: Node) -> Element | None:
    """What the first step calls its previous state; None if ``state`` is no step but the checkpoint itself.

    Candidates are the elements in ``state`` that have a value axis and a key axis, summed or not; the right one makes the
    first step one like the last. What is done to a checkpoint before the window (a mask for new requests) stays outside.
    """
    outer, value, key = state.axes(), last.value_axis, last.key_axis
    seen: dict[Node, Element] = {}

    def opaque(e: Element) -> bool:
        axes = e.axes()
        summed = [a for a in axes if a not in outer]
        if value not in axes or not (key in axes or len(summed) == 1):
            return True
        seen.setdefault(e.node, e if key in axes else substitute(e, summed[0], key))
        return False

    terms = expand(state, opaque)
    seen.pop(state.node, None)
    if not seen or len(terms) == 1:
        return None
    for previous in seen.values():
        try:
            first = match_step(state, previous, descendants(previous.node, end), lambda: (value, key))
        except Refused:
            continue
        if len(first.decay) == len(last.decay) and (first.beta is None) == (last.beta is None):
            return previous
    # Which is what the model means by its checkpoint is unknown: the innermost is where it comes from.
    previous = list(seen.values())[-1]
    match_step(state, previous, descendants(previous.node, end), lambda: (value, key))
    raise Refused("gate_mismatch", state.node)


def _same_layout(a: Element, b: Element) -> bool:
    names = unify(a, b)
    return names is not None and all(old is new for new, old in names.items())
