"""The verify kernel: one program per row and value head, one read of the checkpoint for the whole window.

With ``a`` the window's keys and queries times ``exp(G_t)``, products of the state with ``a^T`` give P and R at once, and the
window's equations (docs/design.md, section 2) become

    U = B (V - P) N^T,   O = R + B (V - P) (D N)^T,   N = (I + B C)^-1   (tokens are columns here),

so ``N`` and ``D N``, found once by elimination, are applied to every tile of V on the matrix unit.

Rows are normalised at the end, by factors of the sums: C and D are ``[TP, TP]``, and P and R meet a factor anyway.
"""

import triton
import triton.language as tl

from recoverssm_ops.triton.gates import exp, gate_parameters, log_decay, reciprocal, row_span, step_size, unit_scale
from recoverssm_ops.triton.products import cut, product, rounded_product, thin_product, transposed


@triton.jit
def couplings_by_token(
    keys, queries, k, g, k_token, g_token, length, rate, bias, t, kk,
    K: tl.constexpr, T: tl.constexpr, TP: tl.constexpr, LOWER_BOUND: tl.constexpr, USE_GATE: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """C, D, and keys and queries times ``exp(G)``, for any decay.

    From the last token to the first, each later row is multiplied by one more decay, as the recurrence would: nothing
    is subtracted and no exponent is positive, so nothing overflows and strong decays end in zeros.
    """
    column = tl.arange(0, TP)
    C = tl.zeros((TP, TP), dtype=tl.float32)
    D = tl.zeros((TP, TP), dtype=tl.float32)
    for back in range(T):
        i = T - 1 - back
        mask = (kk < K) & (i < length)
        key = tl.load(k + i * k_token + kk, mask=mask, other=0.0).to(tl.float32)
        C = tl.where(column[None, :] == i, tl.sum(rounded_product(keys, key[None, :]), 1)[:, None], C)
        D = tl.where(column[None, :] == i, tl.sum(rounded_product(queries, key[None, :]), 1)[:, None], D)
        raw = tl.load(g + i * g_token + kk, mask=mask, other=0.0)
        decay = exp(log_decay(raw, rate, bias, LOWER_BOUND, USE_GATE, EXACT), EXACT)[None, :]
        keys = tl.where(t[:, None] >= i, keys * decay, keys)
        queries = tl.where(t[:, None] >= i, queries * decay, queries)
    return C, D, keys, queries


@triton.jit
def couplings_factored(
    keys, queries, raw, length, rate, bias, t,
    LOWER_BOUND: tl.constexpr, USE_GATE: tl.constexpr, SHIFT: tl.constexpr, PIECES: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """The same, cut, by products ``(keys exp(G)) (keys exp(-G))^T``: only where the gate's bound proves both finite.

    ``exp(G)`` is a running product and ``exp(-G)`` its reciprocal, so what rounding did up to token i cancels, and the error is
    that of the decays in between, as in the recurrence. ``SHIFT`` moves the range of ``exp(G)`` up and that of ``exp(-G)``
    down by 2^SHIFT, so that the small pieces of neither are lost; the two results carry the factor.
    """
    # Tokens past the row's end do not decay, or -G would leave the proven range.
    gate = tl.where((t < length)[:, None], log_decay(raw, rate, bias, LOWER_BOUND, USE_GATE, EXACT), 0.0)
    shrinking = tl.cumprod(exp(gate, EXACT), 0)
    if SHIFT:
        shrinking *= 2.0**SHIFT
    earlier = transposed(cut(keys * reciprocal(shrinking, EXACT), PIECES))
    a_keys, a_queries = cut(keys * shrinking, PIECES), cut(queries * shrinking, PIECES)
    return product(a_keys, earlier), product(a_queries, earlier), a_keys, a_queries


@triton.jit
def couplings_scalar(
    keys, queries, g, g_token, length, rate, bias, t,
    LOWER_BOUND: tl.constexpr, USE_GATE: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """One decay per token and head: the products of keys and queries first, then ``exp(G_t - G_i)`` on the results.

    The sums run over the tokens between i and t alone: a difference of two running sums would cancel. Also ``exp(G_t)``.
    """
    TP: tl.constexpr = keys.shape[0]
    gate = log_decay(tl.load(g + t * g_token, mask=t < length, other=0.0), rate, bias, LOWER_BOUND, USE_GATE, True)
    i = tl.arange(0, TP)
    decay = exp(tl.cumsum(tl.where((t[:, None] > i[None, :]) & (t < length)[:, None], gate[:, None], 0.0), 0), True)
    a_keys, a_queries = cut(keys, PIECES), cut(queries, PIECES)
    earlier = transposed(a_keys)
    return (
        product(a_keys, earlier) * decay,
        product(a_queries, earlier) * decay,
        a_keys,
        a_queries,
        exp(tl.cumsum(gate, 0), True),
    )


@triton.jit
def eliminate(C, D, T: tl.constexpr, TP: tl.constexpr):
    """``N = (I + C)^-1`` and ``D N``, for the strictly lower part of C and the lower part of D.

    A power series of the nilpotent part would need fewer steps, and cancels every digit for repeated keys. What is masked is
    not multiplied by zero: a token that is not finite stays out of the rows before it.
    """
    t = tl.arange(0, TP)
    N = tl.where(t[:, None] == t[None, :], 1.0, 0.0)
    DN = tl.zeros((TP, TP), dtype=tl.float32)
    for i in tl.static_range(T):
        row = tl.sum(tl.where(t[:, None] == i, N, 0.0), 0)[None, :]
        c = tl.sum(tl.where(t[None, :] == i, C, 0.0), 1)[:, None]
        d = tl.sum(tl.where(t[None, :] == i, D, 0.0), 1)[:, None]
        N = tl.where(t[:, None] > i, N - c * row, N)
        DN = tl.where(t[:, None] >= i, DN + d * row, DN)
    return N, DN


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


@triton.jit
def window_operands(
    keys, queries, raw, raw_beta, k, g, k_token, g_token, length, A_log, dt_bias, head, t, kk,
    K: tl.constexpr, T: tl.constexpr, SCALE: tl.constexpr, LOWER_BOUND: tl.constexpr, SCALAR_GATE: tl.constexpr,
    FACTORED: tl.constexpr, USE_L2NORM: tl.constexpr, USE_GATE: tl.constexpr, USE_SIGMOID: tl.constexpr,
    NEG_EIGVAL: tl.constexpr, SHIFT: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """What every tile of V is multiplied by: ``a^T`` of keys and of queries, what scales their products with the state,
    step sizes, ``N^T`` and ``(D N)^T``. ``raw`` are the gates, needed if ``FACTORED``.
    """
    TP: tl.constexpr = keys.shape[0]
    EXACT: tl.constexpr = PIECES == 0
    keys, queries = keys.to(tl.float32), queries.to(tl.float32)
    key_scale, query_scale = unit_scale(keys, 1, USE_L2NORM), unit_scale(queries, 1, USE_L2NORM) * SCALE
    rate, bias = gate_parameters(A_log, dt_bias, head, kk, K, SCALAR_GATE)
    # What brings the columns of S a^T to P and R.
    decay = tl.full((TP,), 0.5**SHIFT, tl.float32)
    if SCALAR_GATE:
        C, D, a_keys, a_queries, decay = couplings_scalar(
            keys, queries, g, g_token, length, rate, bias, t, LOWER_BOUND, USE_GATE, PIECES
        )
    elif FACTORED:
        C, D, a_keys, a_queries = couplings_factored(
            keys, queries, raw, length, rate, bias, t, LOWER_BOUND, USE_GATE, SHIFT, PIECES, EXACT
        )
    else:
        C, D, keys, queries = couplings_by_token(
            keys, queries, k, g, k_token, g_token, length, rate, bias, t, kk, K, T, TP, LOWER_BOUND, USE_GATE, EXACT
        )
        a_keys, a_queries = cut(keys, PIECES), cut(queries, PIECES)

    b = step_size(raw_beta, USE_SIGMOID, NEG_EIGVAL)
    N, DN = eliminate(
        C * (key_scale * b)[:, None] * key_scale[None, :], D * query_scale[:, None] * key_scale[None, :], T, TP
    )
    a_keys, a_queries = transposed(a_keys), transposed(a_queries)
    N, DN = cut(tl.trans(N), PIECES), cut(tl.trans(DN), PIECES)
    key_scale, query_scale = key_scale * decay, query_scale * decay
    return a_keys, a_queries, key_scale, query_scale, b, N, DN


@triton.jit
def corrections_and_outputs(
    S, values, b, a_keys, a_queries, key_scale, query_scale, N, DN,
    TP: tl.constexpr, BV: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """``U^T`` and ``O^T`` of one tile of V, ``[BV, TP]``, of the state ``S [BV, BK]`` before the window."""
    S = cut(S, PIECES, ROUND=False)
    target = b[None, :] * (values - product(S, a_keys) * key_scale[None, :])
    # N is triangular, but 0 * NaN is NaN. What is not finite stays with its token, and is huge for the later ones.
    # (Not ``target - finite``: contracted with the product above it would be that product's rounding error.)
    good = tl.abs(target) < 3.0e38
    finite = tl.where(good, target, 3.0e38)
    excess = tl.where(good, 0.0, target)
    finite = cut(finite, PIECES)
    nothing = tl.zeros((BV, TP), dtype=tl.float32)
    U = thin_product(finite, N, nothing) + excess
    O = product(S, a_queries) * query_scale[None, :] + (thin_product(finite, DN, nothing) + excess)
    return U, O


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
    SHIFT: tl.constexpr, PIECES: tl.constexpr, STAGES: tl.constexpr,
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

    t = tl.arange(0, TP).to(tl.int64)
    kk = tl.arange(0, BK)
    k += where * k_row + start * k_token + kv_head * k_head
    q += where * q_row + start * q_token + kv_head * q_head
    v += where * v_row + start * v_token + head * v_head
    g += where * g_row + start * g_token + head * g_head
    beta += where * beta_row + start * beta_token + head * beta_head

    inside = t < length
    mask = inside[:, None] & (kk < K)[None, :]
    keys = tl.load(k + (t * k_token)[:, None] + kk[None, :], mask=mask, other=0.0)
    queries = tl.load(q + (t * q_token)[:, None] + kk[None, :], mask=mask, other=0.0)
    raw = None
    if FACTORED:
        raw = tl.load(g + (t * g_token)[:, None] + kk[None, :], mask=mask, other=0.0)
    raw_beta = tl.load(beta + t * beta_token, mask=inside, other=0.0)
    # Padding rows are told apart only here, so that the loads above do not wait for the slot.
    if slots is None:
        slot = row
    else:
        slot = tl.load(slots + row * slots_row).to(tl.int64)
        if slot <= pad_slot_id:
            zero_tokens(o, u, token, token + length, TP, head, HV, V, TP, BLOCK_V)
            return

    a_keys, a_queries, key_scale, query_scale, b, N, DN = window_operands(
        keys, queries, raw, raw_beta, k, g, k_token, g_token, length, A_log, dt_bias, head, t, kk,
        K, T, SCALE, LOWER_BOUND, SCALAR_GATE, FACTORED, USE_L2NORM, USE_GATE, USE_SIGMOID, NEG_EIGVAL, SHIFT, PIECES,
    )  # fmt: skip

    rows = tl.arange(0, BV)
    state_tile = state + slot * state_slot + head * state_head + (rows.to(tl.int64) * state_v)[:, None] + kk[None, :]
    v_tile = (v + t * v_token)[:, None] + rows[None, :]
    out_tile = (((token + t) * HV + head) * V)[:, None] + rows[None, :]
    for v0 in tl.range(0, V, BV, num_stages=STAGES):
        if V % BV == 0 and K == BK:
            S = tl.load(state_tile + v0 * state_v)
        else:
            S = tl.load(state_tile + v0 * state_v, mask=(v0 + rows < V)[:, None] & (kk < K)[None, :], other=0.0)
        wanted = inside[:, None] & (v0 + rows < V)[None, :]
        values = tl.trans(tl.load(v_tile + v0, mask=wanted, other=0.0)).to(tl.float32)
        U, O = corrections_and_outputs(S, values, b, a_keys, a_queries, key_scale, query_scale, N, DN, TP, BV, PIECES)
        tl.store(u + out_tile + v0, tl.trans(U), mask=wanted)
        tl.store(o + out_tile + v0, tl.trans(O.to(o.dtype.element_ty)), mask=wanted)
