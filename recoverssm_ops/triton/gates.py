"""What verify and commit share: one gate, one normalisation, one step size, one notion of where a row's tokens are.

The Triton twin of ``recoverssm_ops/gates.py`` (formulas: docs/design.md, section 2). A second spelling of the gate
would let the committed state drift away from the verified outputs unseen, so both kernels call these functions. All
float32.
"""

import triton
import triton.language as tl

from recoverssm_ops.gates import L2NORM_EPS
from recoverssm_ops.triton.products import rounded_product

_EPS = tl.constexpr(L2NORM_EPS)
_LOG2E = tl.constexpr(1.44269502162933349609375)  # as a float32
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def exp(x, EXACT: tl.constexpr):
    """``exp(x)``, for any decay; to float32 accuracy if ``EXACT``, else to about 2^-20.

    The hardware has ``2^y`` alone, and rounding y = x log2(e) costs 2^-22 at y = 7, token after token; so what was lost is
    put back (of a finite power: infinities would cancel).
    """
    if EXACT:
        x = tl.maximum(x, -150.0, propagate_nan=tl.PropagateNan.ALL)
        x = tl.minimum(x, 88.0, propagate_nan=tl.PropagateNan.ALL)
    power = x * _LOG2E
    estimate = tl.exp2(power)
    if EXACT:
        estimate = tl.fma(estimate, tl.fma(x, -_LOG2E, power) * -_LN2, estimate)
    return estimate


@triton.jit
def reciprocal(x, EXACT: tl.constexpr):
    """``1 / x`` for finite positive ``x`` by way of the square root: a division costs twice as much."""
    root = tl.rsqrt(x)
    estimate = root * root
    if EXACT:
        estimate = tl.fma(estimate, tl.fma(-x, estimate, 1.0), estimate)
    return estimate


@triton.jit
def sigmoid(x, EXACT: tl.constexpr):
    return reciprocal(1.0 + exp(-x, EXACT), EXACT)


@triton.jit
def softplus(x):
    """``log(1 + exp(x))`` to float32 accuracy, also where it is tiny.

    The hardware logarithm has a fixed absolute error, which the rate ``exp(A_log)`` would amplify; so log1p(z), z in
    (0, 1], is ``2 atanh(s)`` with ``s = z / (2 + z) <= 1/3``, whose series has converged after eight terms.
    """
    z = exp(-tl.abs(x), True)
    s = z / (2.0 + z)
    s2 = s * s
    series = s2 * (1.0 / 15.0) + 1.0 / 13.0
    series = s2 * series + 1.0 / 11.0
    series = s2 * series + 1.0 / 9.0
    series = s2 * series + 1.0 / 7.0
    series = s2 * series + 1.0 / 5.0
    series = s2 * series + 1.0 / 3.0
    series = s2 * series + 1.0
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def log_decay(g, rate, bias, LOWER_BOUND: tl.constexpr, USE_GATE: tl.constexpr, EXACT: tl.constexpr):
    """Log decay of raw gates ``g``; ``rate`` and ``bias`` broadcast. ``LOWER_BOUND == 0``: the unbounded gate."""
    g = g.to(tl.float32)
    if USE_GATE:
        x = g + bias
        g = -rate * softplus(x) if LOWER_BOUND == 0.0 else LOWER_BOUND * sigmoid(rate * x, EXACT)
    return g


@triton.jit
def gate_parameters(A_log, dt_bias, head, kk, K: tl.constexpr, SCALAR_GATE: tl.constexpr):
    """Rate ``exp(A_log)`` (a scalar) and bias (``[BK]``, or a scalar for the scalar gate) of one value head."""
    rate = 1.0 if A_log is None else exp(tl.load(A_log + head).to(tl.float32), True)
    if dt_bias is None:
        bias = 0.0 if SCALAR_GATE else kk * 0.0
    elif SCALAR_GATE:
        bias = tl.load(dt_bias + head).to(tl.float32)
    else:
        bias = tl.load(dt_bias + head * K + kk, mask=kk < K, other=0.0).to(tl.float32)
    return rate, bias


@triton.jit
def inverse_norm(squares):
    """``1 / |x|`` of a sum of squares."""
    squares = squares + _EPS
    # The hardware's estimate is good to 2^-22; the delta rule subtracts nearly equal numbers, so one Newton step more.
    scale = tl.rsqrt(squares)
    return tl.fma(scale, 0.5 * tl.fma(-squares * scale, scale, 1.0), scale)


@triton.jit
def unit_scale(x, axis: tl.constexpr, USE_L2NORM: tl.constexpr):
    """``1 / |x|`` along ``axis``, or ones: the factor that normalises keys and queries."""
    squares = tl.sum(rounded_product(x, x), axis)
    if not USE_L2NORM:
        return squares * 0.0 + 1.0
    return inverse_norm(squares)


@triton.jit
def step_size(beta, USE_SIGMOID: tl.constexpr, NEG_EIGVAL: tl.constexpr):
    beta = beta.to(tl.float32)
    if USE_SIGMOID:
        beta = sigmoid(beta, True)
    if NEG_EIGVAL:
        beta = 2.0 * beta
    return beta


@triton.jit
def row_span(cu_seqlens, row, num_tokens, T: tl.constexpr):
    """Where a row lives: batch index, first token, number of tokens. 64-bit, so that products with strides are."""
    zero = row * 0
    if cu_seqlens is None:
        batch, start, length = row, zero, zero + T
    else:
        start = tl.load(cu_seqlens + row).to(tl.int64)
        length = tl.load(cu_seqlens + row + 1).to(tl.int64) - start
        batch, length = zero, tl.maximum(tl.minimum(tl.minimum(length, num_tokens - start), T), 0)
    return batch, start, length
