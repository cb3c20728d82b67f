"""Recognise what the operators can do themselves: L2 norm, sigmoid of beta, gate activation.

Folding saves reading a float32 copy of an input that exists in half precision. It happens only where the operator computes
the very same formula in the same precision; everything else stays in the graph and is passed on precomputed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from compile_passes.algebra import ADD, MUL, Product, operand, product, same
from compile_passes.index_notation import Axis, Element, aten, dtype, substitute
from compile_passes.views import strip

L2NORM_EPS = 1e-6
SOFTPLUS_THRESHOLD = 20.0


@dataclass
class Gate:
    """``g`` per step, raw; ``lower_bound`` None means the softplus gate."""

    g: list[Element]
    A_log: Element | None
    dt_bias: Element | None
    lower_bound: float | None


def multiplied_out(element: Element) -> Product:
    """Only multiplications and signs, no contractions: these belong to the projections before the layer."""
    return product(element, lambda e: not _call(e, MUL, aten.mul.Scalar, aten.neg.default))


def _call(element: Element, *targets) -> bool:
    return (
        element.node.op == "call_function" and element.node.target in targets and dtype(element.node) == torch.float32
    )


def l2norm(factors: list[Element], key: Axis) -> tuple[Element, float] | None:
    """``(x, c)`` where the product of ``factors`` is ``c * x * rsqrt(sum_k x^2 + 1e-6)``."""
    whole = Product()
    for factor in factors:
        whole = whole.times(multiplied_out(factor))
    if len(whole.factors) != 2:
        return None
    for x, root in (whole.factors, whole.factors[::-1]):
        if _call(root, aten.rsqrt.default) and _is_square_sum(operand(root, root.node.args[0]), x, key):
            return x, whole.coefficient
    return None


def _is_square_sum(element: Element, x: Element, key: Axis) -> bool:
    element = strip(element)
    if not _call(element, ADD, aten.add.Scalar) or element.node.args[1] != L2NORM_EPS:
        return False
    total = strip(operand(element, element.node.args[0]))
    if not _call(total, aten.sum.dim_IntList):
        return False
    summed = product(total, lambda e: e.node is not total.node)
    if len(summed.bound) != 1 or len(summed.factors) != 1:
        return False
    square, inner = strip(summed.factors[0]), substitute(x, key, summed.bound[0])
    if _call(square, aten.pow.Tensor_Scalar):
        return square.node.args[1] == 2 and same(operand(square, square.node.args[0]), inner)
    if _call(square, MUL) and all(isinstance(a, Node) for a in square.node.args):
        return all(same(operand(square, a), inner) for a in square.node.args)
    return False


def beta_sigmoid(factors: list[Element]) -> tuple[Element, bool] | None:
    """``(x, doubled)`` where the step size is ``sigmoid(x)`` or ``2 * sigmoid(x)``."""
    if len(factors) != 1:
        return None
    whole = multiplied_out(factors[0])
    if (
        len(whole.factors) != 1
        or whole.coefficient not in (1.0, 2.0)
        or not _call(whole.factors[0], aten.sigmoid.default)
    ):
        return None
    return strip(operand(whole.factors[0], whole.factors[0].node.args[0])), whole.coefficient == 2.0


def exponent(decay: Element) -> Element | None:
    """``g`` where the decay is ``exp(g)``."""
    return strip(operand(decay, decay.node.args[0])) if _call(decay, aten.exp.default) else None


def gate(log_decays: list[Element], head: Axis | None, key: Axis) -> Gate | None:
    """The gate's raw input and parameters, if every step computes one of the two activations."""
    found = [_activation(g, head, key) for g in log_decays]
    if any(f is None for f in found):
        return None
    first = found[0]
    for other in found[1:]:
        if other.lower_bound != first.lower_bound:
            return None
        for a, b in ((first.A_log, other.A_log), (first.dt_bias, other.dt_bias)):
            if (a is None) != (b is None) or (a is not None and not same(a, b)):
                return None
    return Gate([f.g[0] for f in found], first.A_log, first.dt_bias, first.lower_bound)


def _activation(log_decay: Element, head: Axis | None, key: Axis) -> Gate | None:
    whole = multiplied_out(log_decay)
    if len(whole.factors) == 1 and _call(whole.factors[0], aten.sigmoid.default) and whole.coefficient < 0:
        inner = multiplied_out(operand(whole.factors[0], whole.factors[0].node.args[0]))
        if inner.coefficient != 1:
            return None
        return _with_bias(inner.factors, head, key, whole.coefficient)
    if len(whole.factors) == 2 and whole.coefficient == -1:
        for rate, plus in (whole.factors, whole.factors[::-1]):
            y = _softplus(plus)
            if y is not None and _call(rate, aten.exp.default):
                return _with_bias([rate, y], head, key, None)
    return None


def _with_bias(factors: list[Element], head: Axis | None, key: Axis, lower_bound: float | None) -> Gate | None:
    """``exp(A_log) * (g + dt_bias)``; either of the parameters may be missing."""
    rates = [f for f in factors if _call(f, aten.exp.default) and f.axes() <= {head}]
    others = [f for f in factors if f not in rates]
    if len(rates) > 1 or len(others) != 1:
        return None
    A_log = strip(operand(rates[0], rates[0].node.args[0])) if rates else None
    total = strip(others[0])
    if (
        _call(total, ADD)
        and total.node.kwargs.get("alpha", 1) == 1
        and all(isinstance(a, Node) for a in total.node.args)
    ):
        sides = [strip(operand(total, a)) for a in total.node.args]
        for g, bias in (sides, sides[::-1]):
            if _per_channel(bias, head, key) and not _per_channel(g, head, key):
                return Gate([g], A_log, bias, lower_bound)
        return None
    return Gate([total], A_log, None, lower_bound)


def _per_channel(element: Element, head: Axis | None, key: Axis) -> bool:
    """Neither of one row nor of one token: a parameter."""
    return element.axes() <= {head, key} and not any(isinstance(d.value, int) for d in element.digits())


def _softplus(element: Element) -> Element | None:
    """``y`` of ``where(y > 20, y, log1p(exp(y)))``, also as ``aten.softplus``."""
    element = strip(element)
    node = element.node
    if _call(element, aten.softplus.default):
        beta, threshold = (*node.args[1:], 1, 20)[:2] if len(node.args) < 3 else node.args[1:3]
        plain = beta == 1 and threshold == SOFTPLUS_THRESHOLD
        return strip(operand(element, node.args[0])) if plain else None
    if not _call(element, aten.where.self):
        return None
    condition, y, smooth = (strip(operand(element, a)) for a in node.args)
    if condition.node.target is not aten.gt.Scalar or condition.node.args[1] != SOFTPLUS_THRESHOLD:
        return None
    if not same(operand(condition, condition.node.args[0]), y) or not _call(smooth, aten.log1p.default):
        return None
    grown = strip(operand(smooth, smooth.node.args[0]))
    if not _call(grown, aten.exp.default) or not same(operand(grown, grown.node.args[0]), y):
        return None
    return y
