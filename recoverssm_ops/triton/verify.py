"""The verify kernel: one program per row and value head, one read of the checkpoint for the whole window.

Keys and queries are stacked into one tile of ``2 * TP`` rows (``TP``: the window padded to a power of two): row t is
token t's key, row ``TP + t`` its query. With ``a`` that tile times ``exp(G_t)``, one product with the state gives P
and R at once, and the window's equations (docs/design.md, section 2) become one unit lower triangular system,

    L [U; O] = [beta (V - P); R],    L = [[I + beta c, 0], [-d, I]],

whose inverse, found once by elimination, is applied to every tile of V on the matrix unit.
"""

import triton
import triton.language as tl

from recoverssm_ops.triton.gates import exp, gate_parameters, log_decay, row_span, step_size, unit_scale
from recoverssm_ops.triton.products import product_bf16, product_exact_bf16, product_tf32

# log2(e) as a float32 and the rest of it.
_LOG2E = tl.constexpr(1.44269502162933349609375)
_LOG2E_REST = tl.constexpr(1.925963033500011e-08)


@triton.jit
def couplings_by_token(
    kq, k, g, k_token, g_token, length, rate, bias, r, rt, kk,
    K: tl.constexpr, T: tl.constexpr, TP: tl.constexpr, LOWER_BOUND: tl.constexpr, SCALAR_GATE: tl.constexpr,
    USE_L2NORM: tl.constexpr, USE_GATE: tl.constexpr,
):  # fmt: skip
    """Couplings ``[2 TP, 2 TP]`` and ``a``, for any decay.

    From the last token to the first, each later row is multiplied by one more decay, as the recurrence would: nothing
    is subtracted and no exponent is positive, so nothing overflows and strong decays end in zeros.
    """
    X = tl.zeros((2 * TP, 2 * TP), dtype=tl.float32)
    for back in range(T):
        i = T - 1 - back
        inside = i < length
        key = tl.load(k + i * k_token + kk, mask=(kk < K) & inside, other=0.0).to(tl.float32)
        key = key * unit_scale(key, 0, USE_L2NORM)
        column = tl.sum(kq * key[None, :], 1)
        X = tl.where((r[None, :] == i) & (rt[:, None] >= i), column[:, None], X)
        if SCALAR_GATE:
            raw = tl.load(g + i * g_token, mask=inside, other=0.0)
        else:
            raw = tl.load(g + i * g_token + kk, mask=(kk < K) & inside, other=0.0)
        decay = exp(log_decay(raw, rate, bias, LOWER_BOUND, USE_GATE))
        kq = tl.where(rt[:, None] >= i, kq * (decay if SCALAR_GATE else decay[None, :]), kq)
    return X, kq


@triton.jit
def power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exp_of_sums(gate):
    """``exp(G)`` of the running sums G of ``gate`` along the tokens, |G| <= 80, and ``exp(G - c)``, ``exp(c - G)``.

    All to float32 accuracy: a float32 sum near -80 is only good to 4e-6, and so would be its exponential. In base 2 the sum is
    kept in two parts: multiples of 2^-17, which add up exactly, and what is left of every term. Its integer part becomes an
    exponent by itself. ``c``, half of the whole sum, keeps the small pieces of both factors away from zero.
    """
    high = tl.fma(gate, tl.full(gate.shape, _LOG2E, tl.float32), 192.0) - 192.0
    low = tl.fma(gate, tl.full(gate.shape, _LOG2E, tl.float32), -high) + gate * _LOG2E_REST
    G = tl.cumsum(high, 0)
    whole = (G + 12582912.0) - 12582912.0  # to the nearest integer: 1.5 * 2^23 leaves no bit for a fraction
    part = (G - whole) + tl.cumsum(low, 0)
    # A NaN of a later token must not reach the earlier ones.
    half = tl.floor(0.5 * tl.sum(tl.where(high == high, high, 0.0), 0)).to(tl.int32)[None, :]
    exponent = whole.to(tl.int32)
    fraction, inverse = tl.exp2(part), tl.exp2(-part)
    decay = power_of_two(exponent) * fraction
    return decay, power_of_two(exponent - half) * fraction, power_of_two(half - exponent) * inverse


@triton.jit
def couplings_factored(
    kq, g, g_token, length, rate, bias, t64, kk,
    K: tl.constexpr, LOWER_BOUND: tl.constexpr, USE_GATE: tl.constexpr, BF16_PIECES: tl.constexpr,
):  # fmt: skip
    """The same in one product, ``(k exp(G - c))(k exp(c - G))^T``: only where the gate's bound proves both finite."""
    mask = (t64 < length)[:, None] & (kk < K)[None, :]
    raw = tl.load(g + (t64 * g_token)[:, None] + kk[None, :], mask=mask, other=0.0)
    # Tokens past the row's end do not decay, or -G would leave the proven range.
    gate = tl.where((t64 < length)[:, None], log_decay(raw, rate, bias, LOWER_BOUND, USE_GATE), 0.0)
    decay, shrinking, growing = exp_of_sums(gate)
    SHAPE: tl.constexpr = (2 * kq.shape[1], kq.shape[2])
    is_key = (tl.arange(0, 2) == 0)[:, None, None]
    later = tl.reshape(kq * shrinking[None, :, :], SHAPE)
    earlier = tl.trans(tl.reshape(tl.where(is_key, kq * growing[None, :, :], 0.0), SHAPE))
    X = product_bf16(later, earlier) if BF16_PIECES else product_tf32(later, earlier)
    return X, tl.reshape(kq * decay[None, :, :], SHAPE)


@triton.jit
def invert_unit_lower(L, r, T: tl.constexpr, TP: tl.constexpr):
    """Inverse of ``I + strict_lower(L)`` whose first T columns alone are non-zero, by elimination.

    The power series of a nilpotent matrix would need fewer steps, and cancels every digit for repeated keys.
    """
    inverse = tl.where(r[:, None] == r[None, :], 1.0, 0.0)
    for i in tl.static_range(T):
        row = tl.sum(tl.where(r[:, None] == i, inverse, 0.0), 0)
        column = tl.sum(tl.where((r[None, :] == i) & (r[:, None] > i), L, 0.0), 1)
        # Not 0 * NaN: a token that is not finite stays out of the rows before it.
        later = tl.where(r < TP, r > i, r - TP >= i)
        inverse = tl.where(later[:, None], inverse - column[:, None] * row[None, :], inverse)
    return inverse


@triton.jit
def small_product(a, b, TP: tl.constexpr):
    """``[2 TP, 2 TP]`` times ``[2 TP, BV]``."""
    if TP >= 8:
        return product_tf32(a, b)
    else:
        # Fewer rows than the matrix unit's shortest contraction.
        return tl.sum(a[:, :, None] * b[None, :, :], 1)


@triton.jit
def zero_tokens(
    o, u, first, stop, step, head, HV: tl.constexpr, V: tl.constexpr, TP: tl.constexpr, BLOCK_V: tl.constexpr
):
    """Store zeros for tokens ``first``, ``first + step``, ... in blocks of TP, up to ``stop``."""
    t = tl.arange(0, TP)
    vv = tl.arange(0, BLOCK_V)
    zeros = tl.zeros((TP, BLOCK_V), dtype=tl.float32)
    while first < stop:
        offset = ((first + t) * HV + head)[:, None] * V + vv[None, :]
        mask = (first + t < stop)[:, None] & (vv < V)[None, :]
        tl.store(u + offset, zeros, mask=mask)
        tl.store(o + offset, zeros.to(o.dtype.element_ty), mask=mask)
        first += step


@triton.jit(do_not_specialize=["num_tokens", "batch", "pad_slot_id"])
def verify_kernel(
    q, k, v, g, beta, state, slots, cu_seqlens, A_log, dt_bias, o, u,
    num_tokens, batch, pad_slot_id, slots_row,
    q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head,
    g_row, g_token, g_head, beta_row, beta_token, beta_head, state_slot, state_head, state_v,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, T: tl.constexpr,
    TP: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BLOCK_V: tl.constexpr,
    SCALE: tl.constexpr, LOWER_BOUND: tl.constexpr, SCALAR_GATE: tl.constexpr, FACTORED: tl.constexpr,
    USE_L2NORM: tl.constexpr, USE_GATE: tl.constexpr, USE_SIGMOID: tl.constexpr, NEG_EIGVAL: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    row, head = pid // HV, pid % HV
    kv_head = head // (HV // H)
    where, start, length = row_span(cu_seqlens, row, num_tokens, T)
    token = where * T + start

    if cu_seqlens is not None:
        # Tokens of no row: before the first, after the last (shared out among the rows), past a window of T.
        end = tl.load(cu_seqlens + batch).to(tl.int64)
        zero_tokens(o, u, tl.maximum(end, 0) + row * TP, num_tokens, batch * TP, head, HV, V, TP, BLOCK_V)
        next_start = tl.minimum(tl.load(cu_seqlens + row + 1).to(tl.int64), num_tokens)
        zero_tokens(o, u, start + length, next_start, TP, head, HV, V, TP, BLOCK_V)
        if row == 0:
            zero_tokens(o, u, row, tl.minimum(start, num_tokens), TP, head, HV, V, TP, BLOCK_V)

    if slots is None:
        slot = row
    else:
        slot = tl.load(slots + row * slots_row).to(tl.int64)
        if slot <= pad_slot_id:
            zero_tokens(o, u, token, token + length, TP, head, HV, V, TP, BLOCK_V)
            return

    BF16_POOL: tl.constexpr = state.dtype.element_ty == tl.bfloat16
    t = tl.arange(0, TP).to(tl.int64)
    r = tl.arange(0, 2 * TP)
    rt = r % TP
    kk = tl.arange(0, BK)
    is_key = r < TP
    k += where * k_row + start * k_token + kv_head * k_head
    q += where * q_row + start * q_token + kv_head * q_head
    v += where * v_row + start * v_token + head * v_head
    g += where * g_row + start * g_token + head * g_head
    beta += where * beta_row + start * beta_token + head * beta_head

    # One tile [2, TP, BK], keys before queries: what depends on the token alone is computed once for both.
    half = tl.arange(0, 2)[:, None]
    rows = tl.where(half == 0, k + (t * k_token)[None, :], q + (t * q_token)[None, :])
    mask = (t < length)[None, :, None] & (kk < K)[None, None, :]
    kq = tl.load(rows[:, :, None] + kk[None, None, :], mask=mask, other=0.0).to(tl.float32)
    kq = kq * (unit_scale(kq, 2, USE_L2NORM) * tl.where(half == 0, 1.0, SCALE))[:, :, None]
    rate, bias = gate_parameters(A_log, dt_bias, head, kk, K, SCALAR_GATE)
    if FACTORED:
        X, a = couplings_factored(kq, g, g_token, length, rate, bias, t, kk, K, LOWER_BOUND, USE_GATE, BF16_POOL)
    else:
        X, a = couplings_by_token(
            tl.reshape(kq, (2 * TP, BK)), k, g, k_token, g_token, length, rate, bias, r, rt, kk,
            K, T, TP, LOWER_BOUND, SCALAR_GATE, USE_L2NORM, USE_GATE,
        )  # fmt: skip

    t64 = rt.to(tl.int64)
    everything = tl.load(
        (v + t64 * v_token)[:, None] + tl.arange(0, BLOCK_V)[None, :],
        mask=(is_key & (rt < length))[:, None] & (tl.arange(0, BLOCK_V) < V)[None, :],
        other=0.0,
    ).to(tl.float32)
    spoiled = tl.max(tl.where(tl.abs(everything) < float("inf"), 0, 1), 1)
    X = tl.where((spoiled == 1)[None, :], float("nan"), X)
    b = tl.load(beta + t64 * beta_token, mask=is_key & (rt < length), other=0.0)
    b = tl.where(is_key, step_size(b, USE_SIGMOID, NEG_EIGVAL), 0.0)
    # Row t of L is beta_t c_t (i < t, the inverse reads no others); row TP + t is -d_t (i <= t).
    L = tl.where(rt[:, None] >= r[None, :], X * tl.where(is_key, b, -1.0)[:, None], 0.0)
    inverse = invert_unit_lower(L, r, T, TP)

    pool = state + slot * state_slot + head * state_head
    out_row = ((token + t64) * HV + head) * V
    for v0 in tl.range(0, V, BV, num_stages=STAGES):
        vv = v0 + tl.arange(0, BV)
        tile = (pool + vv.to(tl.int64) * state_v)[:, None] + kk[None, :]
        if V % BV == 0 and K == BK:
            S = tl.load(tile)
        else:
            S = tl.load(tile, mask=(vv < V)[:, None] & (kk < K)[None, :], other=0.0)
        values = tl.load(
            (v + t64 * v_token)[:, None] + vv[None, :],
            mask=(is_key & (rt < length))[:, None] & (vv < V)[None, :],
            other=0.0,
        ).to(tl.float32)
        PR = product_exact_bf16(a, tl.trans(S)) if BF16_POOL else product_tf32(a, tl.trans(S))
        target = tl.where(is_key[:, None], b[:, None] * (values - PR), 0.0)
        result = tl.where(is_key[:, None], 0.0, PR)
        # The inverse is triangular, but 0 * NaN is NaN: what is not finite stays with its token (and, by X, the later ones).
        finite = tl.abs(target) < float("inf")
        result += small_product(inverse, tl.where(finite, target, 0.0), TP)
        result = tl.where(finite, result, float("nan"))
        store = (rt < length)[:, None] & (vv < V)[None, :]
        offset = out_row[:, None] + vv[None, :]
        tl.store(u + offset, result, mask=store & is_key[:, None])
        tl.store(o + offset, result.to(o.dtype.element_ty), mask=store & (r >= TP)[:, None])
