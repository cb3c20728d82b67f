"""The verify kernel: one program per row and value head, one read of the checkpoint for the whole window.

Keys and queries are stacked into one tile of ``2 * TP`` rows (``TP``: the window padded to a power of two): row t is token t's
key, row ``TP + t`` its query. With ``a`` that tile times ``exp(G_t)``, one product with the state gives P and R at once, and the
window's equations (docs/design.md, section 2) become one unit lower triangular system,

    L [U; O] = [beta (V - P); R],    L = [[I + beta c, 0], [-d, I]],

whose inverse, found once by elimination, is applied to every tile of V on the matrix unit.
"""

import triton
import triton.language as tl

from recoverssm_ops.triton.gates import gate_parameters, log_decay, row_span, step_size, unit_scale


@triton.jit
def three_pieces(x):
    """bf16 tensors whose sum is the float32 ``x`` to its last bit or so; bf16 has float32's exponent range."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def couplings_by_token(
    kq, k, g, k_token, g_token, length, rate, bias, r, rt, kk,
    K: tl.constexpr, T: tl.constexpr, TP: tl.constexpr, LOWER_BOUND: tl.constexpr, SCALAR_GATE: tl.constexpr,
    USE_L2NORM: tl.constexpr, USE_GATE: tl.constexpr,
):  # fmt: skip
    """Couplings ``[2 TP, 2 TP]`` and ``a``, for any decay.

    From the last token to the first, each later row is multiplied by one more decay, exactly as the recurrence would: nothing
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
            decay = tl.exp(
                log_decay(tl.load(g + i * g_token, mask=inside, other=0.0), rate, bias, LOWER_BOUND, USE_GATE)
            )
        else:
            raw = tl.load(g + i * g_token + kk, mask=(kk < K) & inside, other=0.0)
            decay = tl.exp(log_decay(raw, rate, bias, LOWER_BOUND, USE_GATE))[None, :]
        kq = tl.where(rt[:, None] >= i, kq * decay, kq)
    return X, kq


@triton.jit
def couplings_factored(
    kq, g, g_token, length, rate, bias, r, rt, kk,
    K: tl.constexpr, TP: tl.constexpr, LOWER_BOUND: tl.constexpr, USE_GATE: tl.constexpr,
    EXACT_BF16: tl.constexpr,
):  # fmt: skip
    """The same in one product, ``(k exp G)(k exp -G)^T``: only for a gate whose bound proves that ``exp(-G)`` is finite."""
    mask = (rt < length)[:, None] & (kk < K)[None, :]
    raw = tl.load(g + (rt * g_token)[:, None] + kk[None, :], mask=mask, other=0.0)
    # Tokens past the row's end do not decay, or -G would leave the proven range.
    gate = tl.where((rt < length)[:, None], log_decay(raw, rate, bias[None, :], LOWER_BOUND, USE_GATE), 0.0)
    BK: tl.constexpr = gate.shape[1]
    G = tl.reshape(tl.cumsum(tl.reshape(gate, (2, TP, BK)), 1), (2 * TP, BK))
    a = kq * tl.exp(G)
    keys = tl.where((r < TP)[:, None], kq * tl.exp(-G), 0.0)
    # Either form is float32 quality; each shares the pieces of ``a`` with the product with the state that follows.
    PRECISION: tl.constexpr = "bf16x6" if EXACT_BF16 else "tf32x3"
    return tl.dot(a, tl.trans(keys), input_precision=PRECISION), a


@triton.jit
def invert_unit_lower(L, r, T: tl.constexpr, TP: tl.constexpr):
    """Inverse of ``I + strict_lower(L)`` whose first T columns alone are non-zero, by elimination.

    The power series of a nilpotent matrix would need fewer steps, and cancels every digit for repeated keys.
    """
    inverse = tl.where(r[:, None] == r[None, :], 1.0, 0.0)
    for i in tl.static_range(T):
        row = tl.sum(tl.where(r[:, None] == i, inverse, 0.0), 0)
        column = tl.sum(tl.where((r[None, :] == i) & (r[:, None] > i), L, 0.0), 1)
        inverse -= column[:, None] * row[None, :]
    return inverse


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

    EXACT_BF16: tl.constexpr = state.dtype.element_ty == tl.bfloat16
    r = tl.arange(0, 2 * TP)
    rt = r % TP
    kk = tl.arange(0, BK)
    is_key = r < TP
    k += where * k_row + start * k_token + kv_head * k_head
    q += where * q_row + start * q_token + kv_head * q_head
    v += where * v_row + start * v_token + head * v_head
    g += where * g_row + start * g_token + head * g_head
    beta += where * beta_row + start * beta_token + head * beta_head

    t64 = rt.to(tl.int64)
    mask = (rt < length)[:, None] & (kk < K)[None, :]
    rows = tl.where(is_key, k + t64 * k_token, q + t64 * q_token)
    kq = tl.load(rows[:, None] + kk[None, :], mask=mask, other=0.0).to(tl.float32)
    kq = kq * (unit_scale(kq, 1, USE_L2NORM) * tl.where(is_key, 1.0, SCALE))[:, None]
    rate, bias = gate_parameters(A_log, dt_bias, head, kk, K, SCALAR_GATE)
    if FACTORED:
        X, a = couplings_factored(
            kq, g, g_token, length, rate, bias + tl.zeros((BK,), tl.float32), r, t64, kk, K, TP, LOWER_BOUND, USE_GATE,
            EXACT_BF16,
        )  # fmt: skip
    else:
        X, a = couplings_by_token(
            kq, k, g, k_token, g_token, length, rate, bias, r, rt, kk, K, T, TP, LOWER_BOUND, SCALAR_GATE, USE_L2NORM, USE_GATE
        )  # fmt: skip

    b = tl.load(beta + t64 * beta_token, mask=is_key & (rt < length), other=0.0)
    b = tl.where(is_key, step_size(b, USE_SIGMOID, NEG_EIGVAL), 0.0)
    # Row t of L is beta_t c_t (i < t); row TP + t is -d_t (i <= t).
    lower = (r[None, :] < TP) & tl.where(is_key[:, None], rt[:, None] > r[None, :], rt[:, None] >= r[None, :])
    L = tl.where(lower, X * tl.where(is_key, b, -1.0)[:, None], 0.0)
    inverse = invert_unit_lower(L, r, T, TP)

    pool = state + slot * state_slot + head * state_head
    if EXACT_BF16:
        # The state is exact in bf16; three bf16 pieces of the other operand keep the product at float32 quality.
        high, middle, low = three_pieces(a)
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
        if EXACT_BF16:
            PR = tl.dot(low, tl.trans(S))
            PR = tl.dot(middle, tl.trans(S), PR)
            PR = tl.dot(high, tl.trans(S), PR)
        else:
            PR = tl.dot(a, tl.trans(S.to(tl.float32)), input_precision="tf32x3")
        target = tl.where(is_key[:, None], b[:, None] * (values - PR), 0.0)
        result = tl.where(is_key[:, None], 0.0, PR)
        if TP >= 8:
            result = tl.dot(inverse, target, result, input_precision="tf32x3")
        else:
            # Fewer rows than the matrix unit's shortest contraction.
            result += tl.sum(inverse[:, :, None] * target[None, :, :], 1)
        store = (rt < length)[:, None] & (vv < V)[None, :]
        offset = out_row[:, None] + vv[None, :]
        tl.store(u + offset, result, mask=store & is_key[:, None])
        tl.store(o + offset, result.to(o.dtype.element_ty), mask=store & (r >= TP)[:, None])
