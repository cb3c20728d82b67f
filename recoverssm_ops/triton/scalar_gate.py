"""The decays of a scalar gate in the registers of a warp, in Gluon: one number a token, so that they multiply results.

Sums run over the tokens in between alone: a difference of two running sums would cancel. Every warp computes all of it. The
layout of matrices, whose rows and columns are tokens, is that of ``elimination.py``.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from recoverssm_ops.triton import gates
from recoverssm_ops.triton.elimination import even_and_odd, from_lane, from_quarters, joined, quarters

exp = gluon.jit(gates.exp.fn)


@gluon.jit
def add(a, b):
    return a[0] + b[0], a[1] + b[1]


@gluon.jit
def sums(gate, t, i, T: gl.constexpr):
    """Of the first ``T`` numbers of ``gate`` (the same in every row): those after i up to t; up to i; up to t; after i."""
    zero = gl.zeros_like(gate[0])
    between, until, above, after = (zero, zero), (zero, zero), (zero, zero), (zero, zero)
    for j in gl.static_range(T):
        step = from_lane(gate[j % 2], 4 * t + j // 2)
        reached = gl.where(t >= j, step, 0.0)
        between = add(between, (gl.where(i < j, reached, 0.0), gl.where(i + 1 < j, reached, 0.0)))
        until = add(until, (gl.where(i < j, 0.0, step), gl.where(i + 1 < j, 0.0, step)))
        above = add(above, (reached, reached))
        after = add(after, (gl.where(i < j, step, 0.0), gl.where(i + 1 < j, step, 0.0)))
    return between, until, above, after


@gluon.jit
def decays(gate, t, i, T: gl.constexpr):
    """``exp(G_t - G_i)``, on and above the diagonal 1, and, in the last row, ``exp(G_i)``.

    ``gate`` is the log decays, the same in every row; ``t`` and ``i`` are row and column of every element. ``[8, 8]`` or
    ``[16, 16]``.
    """
    if gate.shape[0] == 8:
        t, i = even_and_odd(t)[0], even_and_odd(i)[0]
        between, until, _, _ = sums(even_and_odd(gate), t, i, T)
        return exp(joined(between), True), exp(joined(until), True)
    else:
        t, i = even_and_odd(quarters(t)[0])[0], even_and_odd(quarters(i)[0])[0]
        first, _, last = quarters(gate)
        between, until, _, after = sums(even_and_odd(first), t, i, 8)
        between_last, until_last, above_last, _ = sums(even_and_odd(last), t, i, T - 8)
        lower = from_quarters(joined(between), joined(add(after, above_last)), joined(between_last))
        whole = add(add(until, after), until_last)
        return exp(lower, True), exp(from_quarters(joined(until), joined(until), joined(whole)), True)
