"""How a window is read: one contraction with a query for each state, or one for all of them where they are joined."""

from __future__ import annotations

import torch
from torch.fx import Node

from compile_passes.matching.reasons import Refused
from compile_passes.matching.window import Output, Roles
from compile_passes.reading.algebra import CONTRACTIONS, MUL, product
from compile_passes.reading.candidates import Candidate
from compile_passes.reading.index_notation import (
    Axis,
    Element,
    Unresolvable,
    aten,
    dtype,
    element_of,
    readers,
    same_size,
    substitute,
    unify,
)
from compile_passes.reading.views import VIEWS

READS = (MUL, aten.mul.Scalar, *CONTRACTIONS)


class Exits:
    """Contractions of a candidate's states with something else."""

    def __init__(self, candidate: Candidate, recurrence: set[Node]):
        self.candidate = candidate
        self.states = {s.node: (t, s) for t, s in enumerate(candidate.states)}
        self.reached = self._reach(recurrence)

    def _reach(self, recurrence: set[Node]) -> list[Node]:
        """Views and products of the states, in the graph's order; what the next state is computed from is none of them."""
        seen, todo = set(), [n for node in self.states for n in readers(node)]
        while todo:
            node = todo.pop()
            inner = node.target in VIEWS or (node.target in READS and node not in recurrence)
            if node in seen or not inner or not isinstance(node.meta.get("val"), torch.Tensor):
                continue
            seen.add(node)
            todo += readers(node)
        return sorted(seen)

    def channels(self) -> tuple[Axis, Axis]:
        """The value and the key axis as the queries tell them apart, where the recurrence itself does not."""
        reached = set(self.reached)
        for node in self.reached:
            found = self.read(node, reached)
            if found is not None:
                output, key, number = found
                taken = {key}.union(*(f.axes() for f in output.query))
                digits = self.candidate.states[number].digits()
                free = [d.value for d in digits if isinstance(d.value, Axis) and d.value not in taken]
                if free:
                    return free[-1], key
        raise Refused("missing_output", self.candidate.states[-1].node)

    def read(self, node: Node, reached: set[Node]) -> tuple[Output, Axis, int] | None:
        """``node`` as the contraction of one state, or of the join: with the contracted axis and the state's number."""
        element, axes = element_of(node)
        join = self.candidate.join

        def opaque(e: Element) -> bool:
            return e.node in self.states or e.node not in reached or (join is not None and e.node is join.node)

        if dtype(node) != torch.float32:
            return None
        whole = product(element, opaque)
        held = [f for f in whole.factors if f.node in self.states or (join is not None and f.node is join.node)]
        query = [f for f in whole.factors if f not in held]
        if len(held) != 1 or len(whole.bound) != 1 or not query or any(f.node in reached for f in query):
            return None
        number, token, names = self._which(held[0])
        inner = None if names is None else names.get(whole.bound[0])
        if inner is None or any(a not in names and a is not token and not same_size(a.size, 1) for a in axes):
            return None
        for new, old in names.items():
            query = [substitute(f, new, old) for f in query]
        named = [token if a is token else names.get(a) for a in axes]
        return Output(node, named, whole.coefficient, query, token), inner, number

    def _which(self, held: Element) -> tuple[int, Axis | None, dict[Axis, Axis] | None]:
        if held.node in self.states:
            number, state = self.states[held.node]
            return number, None, unify(state, held)
        join = self.candidate.join
        pattern = join.at(0, self.candidate.names)
        try:
            which, inner = join.position(held.index)
        except Unresolvable:
            return 0, None, None
        if not isinstance(which, Axis) or self.candidate.dtype != torch.float32:
            return 0, None, None
        inside = Element(join.node, join.position(pattern.index)[1])
        return 0, which, unify(inside, Element(join.node, inner))


def find_outputs(exits: Exits, states: list[Element], roles: Roles, selected: set[Node]) -> list[Output | None]:
    """The contraction of each of ``states`` with its query; None where there is none."""
    before = len(exits.candidate.states) - len(states)  # the checkpoint, where it is one of the joined states
    outputs: list[Output | None] = [None] * len(states)
    allowed = {roles.batch, roles.head, roles.key}
    reached, done = set(exits.reached), set(selected)
    for node in exits.reached:
        if node in done or any(n in done and n not in selected for n in node.all_input_nodes):
            done.add(node)  # computed from an output
            continue
        found = exits.read(node, reached)
        if found is None:
            continue
        output, contracted, number = found
        if contracted is not roles.key or any(not f.axes() <= {*allowed, output.token} for f in output.query):
            continue
        if output.token is None and number >= before and outputs[number - before] is None:
            outputs[number - before] = output
            done.add(node)
        elif output.token is not None and not before and not any(outputs):
            for t in range(len(states)):
                query = [substitute(f, output.token, t) for f in output.query]
                outputs[t] = Output(node, output.axes, output.coefficient, query, output.token)
            done.add(node)
    return outputs
