"""One step of the recurrence, term by term."""

from __future__ import annotations

from torch.fx import Node

from compile_passes.algebra import Product, remove, same, terms
from compile_passes.index_notation import Axis, Element, substitute
from compile_passes.reasons import Refused
from compile_passes.window import Step


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
    if any(f.node is previous.node for f in deltas):
        raise Refused("non_uniform_step", state.node)
    if len(deltas) > 1:
        raise Refused("depends_on_output", state.node)
    value, read = _delta(deltas[0], previous, opaque)

    (inner,) = read.bound
    outer = _renamed(previous, next(f for f in read.factors if f.node is previous.node), inner)
    # The sum over k has to be all that the correction does with k: in v - k_k sum_c S_vc it would stay a free axis.
    if outer is None or any(outer in f.axes() for f in read.factors):
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
    free = _axes_without(previous, outer, *key, *leaves)
    rows = [a for a in free if not any(a in e.axes() for e in decay)]
    if not rows:
        raise Refused("gate_mismatch" if free else "non_uniform_step", state.node)
    for element in (*decay, *key, *value):
        if element.node in dependents:
            raise Refused("depends_on_output", element.node)
    # Where inputs are broadcast over rows or heads there is a choice, and any one is right; V is the innermost by custom.
    return Step(decay, key, leaves, value, value_axis=rows[-1], key_axis=outer)


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


def _axes_without(state: Element, key: Axis, *inputs: Element) -> list[Axis]:
    """Axes of the state, outermost first, that neither are ``key`` nor belong to one of the inputs."""
    taken = {key}.union(*(e.axes() for e in inputs))
    return [d.value for d in state.digits() if isinstance(d.value, Axis) and d.value not in taken]
