"""One step of the recurrence as a polynomial in the previous state.

Multiplied out, whatever way it is written,

    S_t = S_{t-1} a  +  beta v k^T  -  beta (sum_k S_{t-1} a k) k^T,    a = exp(g),

is one product that keeps the state, one that does not read it, and one that reads it through a sum over k. Without the last
(gated linear attention, Mamba-2) the second is simply ``u k^T``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Node

from compile_passes.matching.reasons import Refused
from compile_passes.matching.window import Step
from compile_passes.reading.algebra import Product, expand, multiplied_out, same, without, without_identities
from compile_passes.reading.index_notation import Axis, Element, dtype, substitute


def match_step(
    state: Element, previous: Element, dependents: set[Node], channels: Callable[[], tuple[Axis, Axis]]
) -> Step:
    """Match ``S_t`` against ``S_{t-1}``.

    ``dependents`` are the nodes computed from the checkpoint. ``channels`` tells the value and the key axis where the
    step itself does not.
    """
    kept, gained, read = _three_terms(state, previous, dependents)
    if read is None:
        decay = [f for f in kept.factors if f.node is not previous.node]
        return _without_delta(state, decay, gained, *channels())
    try:
        return _with_delta(state, previous, kept, gained, read)
    except Refused as refusal:
        # ``k beta`` may have been computed as one factor and be needed as two, or k before and after its norm.
        kept, gained, read = (_factored(term, previous) for term in (kept, gained, read))
        try:
            return _with_delta(state, previous, kept, gained, read, factored=True)
        except Refused:
            raise refusal from None


def _factored(term: Product, previous: Element) -> Product:
    result = Product(term.coefficient, [], term.bound)
    for factor in term.factors:
        result = result.times(Product(factors=[factor]) if factor.node is previous.node else multiplied_out(factor))
    return result


def _with_delta(
    state: Element, previous: Element, kept: Product, gained: Product, read: Product, factored: bool = False
) -> Step:
    decay = [f for f in kept.factors if f.node is not previous.node]
    (inner,) = read.bound
    outer = _renamed(previous, next(f for f in read.factors if f.node is previous.node), inner)
    if outer is None:
        raise Refused("non_uniform_step", state.node)
    summed = [substitute(f, inner, outer) for f in read.factors if inner in f.axes() and f.node is not previous.node]
    rest = [f for f in read.factors if inner not in f.axes()]
    key, rest = _without_decay(decay, summed, rest, state.node)
    beta, missing = without(rest, key)
    if not key or missing:
        raise Refused("key_mismatch", state.node)
    value_axis = _value_axis(previous, outer, decay, (*key, *beta), state.node)
    gained = _vectors(gained, value_axis, outer, state.node)
    gained = _factored(gained, previous) if factored else gained
    value, missing = without(gained.factors, key)
    if missing:
        raise Refused("key_mismatch", state.node)
    value, missing = without(value, beta)
    for norm in missing if factored else []:  # of both keys: a factor that has no key axis of its own
        rest, absent = without(beta, [norm, norm])
        if not absent:
            key, beta, missing = [*key, norm], rest, without(missing, [norm])[0]
    # The sum over k has to be all that the correction does with k: in v - k_k sum_c S_vc it would stay a free axis.
    if missing or not value or any(outer in f.axes() for f in (*beta, *value)):
        raise Refused("non_uniform_step", state.node)
    scale = -read.coefficient
    if scale <= 0 or kept.coefficient != 1:
        raise Refused("non_uniform_step", state.node)
    return Step(decay, key, Product(scale, beta), Product(gained.coefficient / scale, value), value_axis, outer)


def _without_delta(state: Element, decay: list[Element], gained: Product, value_axis: Axis, key_axis: Axis) -> Step:
    outer = _vectors(gained, value_axis, key_axis, state.node)
    key = [f for f in outer.factors if key_axis in f.axes()]
    value = [f for f in outer.factors if key_axis not in f.axes()]
    if not key or not value or any(value_axis in f.axes() for f in key):
        raise Refused("non_uniform_step", state.node)
    if any(value_axis in f.axes() for f in decay):
        raise Refused("gate_mismatch", state.node)
    return Step(decay, key, None, Product(outer.coefficient, value), value_axis, key_axis)


def _vectors(gained: Product, value: Axis, key: Axis, node: Node) -> Product:
    """``u k^T`` as factors with one of the two axes each, where it was computed as a matrix."""

    def vector(e: Element) -> bool:
        return not {value, key} <= e.axes() or dtype(e.node) != torch.float32

    parts = [Product(gained.coefficient)]
    for factor in gained.factors:
        parts = [a.times(b) for a in parts for b in expand(factor, vector)]
    if len(parts) > 1 or parts[0].bound:
        raise Refused("non_uniform_step", node)
    return parts[0]


def _three_terms(state: Element, previous: Element, dependents: set[Node]) -> tuple[Product, Product, Product | None]:
    """The products that keep the previous state, that do not read it, and that read it through a sum."""
    parts = _terms(state, previous, dependents)
    reads = [[f for f in p.factors if f.node is previous.node] for p in parts]
    if any(len(found) > 1 for found in reads):
        raise Refused("non_uniform_step", state.node)
    kept = [p for p, found in zip(parts, reads, strict=True) if not p.bound and found and same(found[0], previous)]
    gained = [p for p, found in zip(parts, reads, strict=True) if not found]
    read = [p for p, found in zip(parts, reads, strict=True) if found and p not in kept]
    # Something computed from a state that is no arithmetic: an output of this window on its way into a later token.
    foreign = next(
        (f.node for p in parts for f in p.factors if f.node in dependents and f.node is not previous.node), None
    )
    if foreign is not None and (read or len(kept) != 1 or foreign in {f.node for f in kept[0].factors}):
        raise Refused("depends_on_output" if len(kept) == 1 else "non_uniform_step", foreign)
    if len(kept) != 1 or len(gained) != 1 or gained[0].bound or len(read) > 1 or foreign is not None:
        raise Refused("non_uniform_step", state.node)
    if any(len(p.bound) != 1 for p in read):
        raise Refused("non_uniform_step", state.node)
    return kept[0], gained[0], read[0] if read else None


def _terms(state: Element, previous: Element, dependents: set[Node]) -> list[Product]:
    """The step multiplied out, transition matrices (``I - beta k k^T``) among the factors too."""

    def opaque(e: Element) -> bool:
        return e.node is previous.node or e.node not in dependents

    result = []
    for part in expand(state, opaque):
        read = [f for f in part.factors if f.node is previous.node]
        column = _renamed(previous, read[0], part.bound[0]) if len(read) == len(part.bound) == 1 else None
        matrices = [f for f in part.factors if opaque(f) and {column, *part.bound} <= f.axes()] if column else []
        matrices = [f for f in matrices if f not in read]
        if not matrices:
            result.append(part)
            continue
        elsewhere = state.axes() - {column}

        def vector(e: Element) -> bool:
            return len(e.axes() - elsewhere) < 2 or dtype(e.node) != torch.float32  # noqa: B023

        expanded = [Product(part.coefficient, [f for f in part.factors if f not in matrices], part.bound)]
        for matrix in matrices:
            expanded = [a.times(b) for a in expanded for b in expand(matrix, vector)]
        result += [without_identities(p) for p in expanded]
    return result


def _without_decay(
    decay: list[Element], summed: list[Element], rest: list[Element], node: Node
) -> tuple[list[Element], list[Element]]:
    """What a read multiplies the state by, less the decay: the key, and what is not summed."""
    summed, missing = without(summed, decay)
    rest, missing = without(rest, missing)
    if missing:
        raise Refused("gate_mismatch" if len(missing) < len(decay) else "write_before_delta", node)
    return summed, rest


def _value_axis(
    state: Element, key: Axis, decay: list[Element], others: tuple[Element, ...] | list[Element], node: Node
) -> Axis:
    """The innermost axis that belongs to neither the key nor the gate nor the step size."""
    taken = {key}.union(*(e.axes() for e in others))
    free = [d.value for d in state.digits() if isinstance(d.value, Axis) and d.value not in taken]
    rows = [a for a in free if not any(a in e.axes() for e in decay)]
    if not rows:
        raise Refused("gate_mismatch" if free else "non_uniform_step", node)
    # Where inputs are broadcast over rows or heads there is a choice, and any one is right; V is the innermost by custom.
    return rows[-1]


def _renamed(state: Element, read: Element, inner: Axis) -> Axis | None:
    """The axis of the state that ``read`` replaces by ``inner``, if that is their only difference."""
    found = None
    if len(state.index) != len(read.index):
        return None
    for a, b in zip(state.digits(), read.digits(), strict=False):
        if b.value is inner and isinstance(a.value, Axis) and found is None:
            found = a.value
    return found if found is not None and same(substitute(state, found, inner), read) else None
