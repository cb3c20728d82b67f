"""Recognise what the operators can do themselves: L2 norm, sigmoid of beta, gate activation.

Folding saves reading a float32 copy of an input that exists in half precision. It happens only where the operator computes
the very same formula in the same precision; everything else stays in the graph and is passed on precomputed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import Node

from compile_passes.reading.algebra import ADD, DIV, MUL, Product, is_call, multiplied_out, operand, product, same
from compile_passes.reading.index_notation import Axis, Element, aten, substitute
from compile_passes.reading.views import strip

L2NORM_EPS = 1e-6
SOFTPLUS_THRESHOLD = 20.0
FLOAT32_EPS = 2.0**-23


@dataclass
class Gate:
    """``g`` per step, raw; ``lower_bound`` None means the softplus gate."""

    g: list[Element]
    A_log: Element | None
    dt_bias: Element | None
    lower_bound: float | None


def l2norm(factors: list[Element], key: Axis) -> tuple[Element, float] | None:
    """``(x, c)`` where the product of ``factors`` is ``c * x * rsqrt(sum_k x^2 + 1e-6)``, or ``c * x / sqrt(..)``."""
    whole = Product()
    for factor in factors:
        whole = whole.times(multiplied_out(factor))
    for x, root in _fractions(whole.factors):
        if _is_square_sum(operand(root, root.node.args[0]), x, key):
            return x, whole.coefficient
    return None


def _fractions(factors: list[Element]) -> Iterator[tuple[Element, Element]]:
    """``(x, root)`` where the factors are ``x * rsqrt(y)`` or ``x / sqrt(y)``; root is the node of y's square root."""
    if len(factors) == 2:
        yield from (pair for pair in (factors, factors[::-1]) if is_call(pair[1], aten.rsqrt.default))
    elif len(factors) == 1 and is_call(factors[0], DIV):
        x, root = (operand(factors[0], a) for a in factors[0].node.args)
        if isinstance(x, Element) and isinstance(root, Element) and is_call(root := strip(root), aten.sqrt.default):
            yield strip(x), root


def _is_square_sum(element: Element, x: Element, key: Axis) -> bool:
    element = strip(element)
    if not is_call(element, ADD, aten.add.Scalar) or element.node.args[1] != L2NORM_EPS:
        return False
    total = strip(operand(element, element.node.args[0]))
    if not is_call(total, aten.sum.dim_IntList):
        return False
    summed = product(total, lambda e: e.node is not total.node)
    if len(summed.bound) != 1 or len(summed.factors) != 1:
        return False
    square, inner = strip(summed.factors[0]), substitute(x, key, summed.bound[0])
    if is_call(square, aten.pow.Tensor_Scalar):
        return square.node.args[1] == 2 and same(operand(square, square.node.args[0]), inner)
    if is_call(square, MUL) and all(isinstance(a, Node) for a in square.node.args):
        return all(same(operand(square, a), inner) for a in square.node.args)
    return False


def beta_sigmoid(beta: Product) -> tuple[Element, bool] | None:
    """``(x, doubled)`` where the step size is ``sigmoid(x)`` or ``2 * sigmoid(x)``."""
    if len(beta.factors) != 1:
        return None
    whole = Product(beta.coefficient).times(multiplied_out(beta.factors[0]))
    logistic = whole.factors[0]
    if len(whole.factors) != 1 or whole.coefficient not in (1.0, 2.0) or not is_call(logistic, aten.sigmoid.default):
        return None
    return strip(operand(logistic, logistic.node.args[0])), whole.coefficient == 2.0


def exponent(decay: Element) -> Product | None:
    """``g`` of ``exp(g)``; ``exp2(x)`` is ``exp(x log 2)``, and often x was multiplied by log2(e) before."""
    decay = strip(decay)
    if is_call(decay, aten.exp.default):
        return Product(factors=[strip(operand(decay, decay.node.args[0]))])
    if is_call(decay, aten.exp2.default):
        base, power = 2.0, operand(decay, decay.node.args[0])
    elif is_call(decay, aten.pow.Scalar) and decay.node.args[0] > 0:
        base, power = decay.node.args[0], operand(decay, decay.node.args[1])
    else:
        return None
    whole = Product(math.log(base)).times(multiplied_out(power))
    if math.isclose(whole.coefficient, 1, rel_tol=FLOAT32_EPS):
        whole.coefficient = 1.0
    return whole


def gate(log_decays: list[Product], head: Axis | None, key: Axis) -> Gate | None:
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


def _activation(log_decay: Product, head: Axis | None, key: Axis) -> Gate | None:
    whole = Product(log_decay.coefficient)
    for factor in log_decay.factors:
        whole = whole.times(multiplied_out(factor))
    if len(whole.factors) == 1 and is_call(whole.factors[0], aten.sigmoid.default) and whole.coefficient < 0:
        inner = multiplied_out(operand(whole.factors[0], whole.factors[0].node.args[0]))
        if inner.coefficient != 1:
            return None
        return _with_bias(inner.factors, head, key, whole.coefficient)
    if len(whole.factors) == 2 and whole.coefficient == -1:
        for rate, plus in (whole.factors, whole.factors[::-1]):
            y = _softplus(plus)
            if y is not None and is_call(rate, aten.exp.default):
                return _with_bias([rate, y], head, key, None)
    return None


def _with_bias(factors: list[Element], head: Axis | None, key: Axis, lower_bound: float | None) -> Gate | None:
    """``exp(A_log) * (g + dt_bias)``; either of the parameters may be missing."""
    rates = [f for f in factors if is_call(f, aten.exp.default) and f.axes() <= {head}]
    others = [f for f in factors if f not in rates]
    if len(rates) > 1 or len(others) != 1:
        return None
    A_log = strip(operand(rates[0], rates[0].node.args[0])) if rates else None
    total = strip(others[0])
    if (
        is_call(total, ADD)
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
    if is_call(element, aten.softplus.default):
        beta, threshold = (*node.args[1:], 1, 20)[:2] if len(node.args) < 3 else node.args[1:3]
        plain = beta == 1 and threshold == SOFTPLUS_THRESHOLD
        return strip(operand(element, node.args[0])) if plain else None
    if not is_call(element, aten.where.self):
        return None
    condition, y, smooth = (strip(operand(element, a)) for a in node.args)
    if condition.node.target is not aten.gt.Scalar or condition.node.args[1] != SOFTPLUS_THRESHOLD:
        return None
    if not same(operand(condition, condition.node.args[0]), y) or not is_call(smooth, aten.log1p.default):
        return None
    grown = strip(operand(smooth, smooth.node.args[0]))
    if not is_call(grown, aten.exp.default) or not same(operand(grown, grown.node.args[0]), y):
        return None
    return y
