"""The commit kernel: one program per row, value head and part of V rebuilds the state after the accepted tokens.

All accepted tokens are applied at once (docs/design.md, section 2),

    S_n = S_0 exp(G_n) + U^T [k exp(G_n - G_i)],

a product on the matrix unit, so the time hardly depends on how many were accepted. ``exp(G_n - G_i)`` is a running
product from the last accepted token backwards: nothing is subtracted, no exponent is positive.

Tokens past ``n`` are not loaded, except by programs that are too few to fill the GPU: those ask for everything at once
(``EAGER``) rather than for the record when its length has arrived.
"""

import triton
import triton.language as tl

from recoverssm_ops.triton.gates import exp, gate_parameters, log_decay, row_span, unit_scale
from recoverssm_ops.triton.products import cut, thin_product


@triton.jit
def plan_column(
    dest, length, row, m, dest_row, dest_column, length_row, length_column, tokens, pad_slot_id, IN_PLACE: tl.constexpr
):
    """Slot that column m writes, how many tokens its state has seen, and whether it is written at all."""
    n = tl.load(length + row * length_row + m * length_column).to(tl.int64)
    n = tl.maximum(tl.minimum(n, tokens), 0)
    if IN_PLACE:
        slot = tl.load(dest + row * dest_row + m * dest_column).to(tl.int64)
        written = slot > pad_slot_id
    else:
        slot, written = row, n >= 0
    return slot, n, written


@triton.jit
def load_keys_and_gates(k, g, stop, k_token, g_token, r, kk, channels, K: tl.constexpr, SCALAR_GATE: tl.constexpr):
    """Of the tokens before ``stop``: key r and the raw gate of the token behind it in row r, and the first token's gate.

    ``channels`` are those of the gate, ``kk`` unless one serves several key dimensions.
    """
    inside = kk < K
    keys = tl.load(k + (r * k_token)[:, None] + kk[None, :], mask=(r < stop)[:, None] & inside[None, :], other=0.0)
    behind = r + 1
    if SCALAR_GATE:
        raw = tl.load(g + behind * g_token, mask=behind < stop, other=0.0)
        first = tl.load(g, mask=stop > 0, other=0.0)
    else:
        mask = (behind < stop)[:, None] & inside[None, :]
        raw = tl.load(g + (behind * g_token)[:, None] + channels[None, :], mask=mask, other=0.0)
        first = tl.load(g + channels, mask=(stop > 0) & inside, other=0.0)
    return keys, raw, first


@triton.jit
def decayed_keys(
    keys, raw, first, n, rate, bias, r,
    LOWER_BOUND: tl.constexpr, SCALAR_GATE: tl.constexpr, USE_L2NORM: tl.constexpr, USE_GATE: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """``k exp(G_n - G_i)`` of the ``n`` accepted tokens, ``[TP, BK]``, and ``exp(G_n)``, ``[BK]`` or a scalar.

    Row r has the gate of the token behind its own, so the running product from the last one backwards ends before its own.
    What follows the accepted tokens may be anything: it is replaced, not multiplied by zero.
    """
    behind = r + 1 < n
    if SCALAR_GATE:
        decay = tl.where(behind, exp(log_decay(raw, rate, bias, LOWER_BOUND, USE_GATE, EXACT), EXACT), 1.0)
        decay = tl.cumprod(decay, 0, reverse=True)
        whole = tl.sum(tl.where(r == 0, decay, 0.0), 0)
        decay = decay[:, None]
    else:
        decay = exp(log_decay(raw, rate, bias[None, :], LOWER_BOUND, USE_GATE, EXACT), EXACT)
        decay = tl.cumprod(tl.where(behind[:, None], decay, 1.0), 0, reverse=True)
        whole = tl.sum(tl.where((r == 0)[:, None], decay, 0.0), 0)
    whole = tl.where(n > 0, whole * exp(log_decay(first, rate, bias, LOWER_BOUND, USE_GATE, EXACT), EXACT), 1.0)
    keys = tl.where((r < n)[:, None], keys.to(tl.float32), 0.0)
    return keys * unit_scale(keys, 1, USE_L2NORM)[:, None] * decay, whole


@triton.jit
def load_corrections(u, stop, u_token, r, vv, V: tl.constexpr):
    return tl.load(u + (r * u_token)[:, None] + vv[None, :], mask=(r < stop)[:, None] & (vv < V)[None, :], other=0.0)


@triton.jit
def load_state(matrix, vv, kk, stride_v, V: tl.constexpr, K: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr):
    tile = (matrix + vv.to(tl.int64) * stride_v)[:, None] + kk[None, :]
    if V % BV == 0 and K == BK:
        return tl.load(tile)
    else:
        return tl.load(tile, mask=(vv < V)[:, None] & (kk < K)[None, :], other=0.0)


@triton.jit
def advanced(state, whole, corrections, keys, SCALAR_GATE: tl.constexpr, PIECES: tl.constexpr):
    """``state exp(G_n) + U^T keys`` of one tile, of cut ``corrections [BV, TP]`` and ``keys [TP, BK]``."""
    state *= whole if SCALAR_GATE else whole[None, :]
    if PIECES == 0:
        # The matrix unit truncates as it accumulates, which a float32 pool would show.
        state += thin_product(corrections, keys, tl.zeros(state.shape, dtype=tl.float32))
    else:
        state = thin_product(corrections, keys, state)
    return state


@triton.jit
def store_state(matrix, S, vv, kk, stride_v, V: tl.constexpr, K: tl.constexpr):
    """One tile of a state matrix; rounds to the pool's dtype, the only rounding there is."""
    tile = (matrix + vv.to(tl.int64) * stride_v)[:, None] + kk[None, :]
    tl.store(tile, S.to(matrix.dtype.element_ty), mask=(vv < V)[:, None] & (kk < K)[None, :])


@triton.jit
def commit_program(
    pid, source_state, dest_state, u, k, g, source, dest, length, cu_seqlens, A_log, dt_bias,
    num_tokens, pad_slot_id, source_row, dest_row, dest_column, length_row, length_column,
    u_row, u_token, u_head, k_row, k_token, k_head, g_row, g_token, g_head,
    source_slot, source_head, source_v, dest_slot, dest_head, dest_v,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, T: tl.constexpr, M: tl.constexpr,
    TP: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PART: tl.constexpr, PIECES: tl.constexpr, STAGES: tl.constexpr,
    EAGER: tl.constexpr, LOWER_BOUND: tl.constexpr, SCALAR_GATE: tl.constexpr, USE_L2NORM: tl.constexpr,
    USE_GATE: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    """What program ``pid`` of one layer does: ``PART`` values of one head, in tiles of ``BV``."""
    PARTS: tl.constexpr = (V + PART - 1) // PART
    row, head = pid // (HV * PARTS), pid // PARTS % HV
    begin = (pid % PARTS).to(tl.int32) * PART
    end = begin + PART if V % PART == 0 else tl.minimum(begin + PART, V)
    AT_ONCE: tl.constexpr = EAGER and M == 1 and BV == PART
    kk = tl.arange(0, BK)
    r = tl.arange(0, TP).to(tl.int64)
    where, start, tokens = row_span(cu_seqlens, row, num_tokens, T)
    k += where * k_row + start * k_token + head // (HV // H) * k_head
    u += where * u_row + start * u_token + head * u_head
    g += where * g_row + start * g_token + head * g_head
    rate, bias = gate_parameters(A_log, dt_bias, head, kk, K, SCALAR_GATE)
    if AT_ONCE:
        keys, raw, first = load_keys_and_gates(k, g, tokens, k_token, g_token, r, kk, kk, K, SCALAR_GATE)
        corrections = load_corrections(u, tokens, u_token, r, begin + tl.arange(0, BV), V)
    if M == 1:
        to, n, written = plan_column(
            dest, length, row, 0, dest_row, dest_column, length_row, length_column, tokens, pad_slot_id, IN_PLACE
        )  # fmt: skip
    if IN_PLACE:
        slot = tl.load(source + row * source_row).to(tl.int64)
        if slot <= pad_slot_id:
            return
    else:
        slot = row
    source_state += slot * source_slot + head * source_head
    dest_state += head * dest_head
    if AT_ONCE:
        state = load_state(source_state, begin + tl.arange(0, BV), kk, source_v, V, K, BV, BK)

    # A column that writes to the source's own slot comes last: the others still read it.
    for index in range(2 * M if M > 1 else 1):
        if M > 1:
            to, n, written = plan_column(
                dest, length, row, index % M, dest_row, dest_column, length_row, length_column, tokens, pad_slot_id, IN_PLACE
            )  # fmt: skip
        in_place = IN_PLACE and to == slot
        if M > 1:
            written = written & (in_place == (index >= M))
        if written & (n > 0):
            if not AT_ONCE:
                keys, raw, first = load_keys_and_gates(k, g, n, k_token, g_token, r, kk, kk, K, SCALAR_GATE)
            decayed, whole = decayed_keys(
                keys, raw, first, n, rate, bias, r, LOWER_BOUND, SCALAR_GATE, USE_L2NORM, USE_GATE, PIECES == 0
            )
            decayed = cut(decayed, PIECES)
            for v0 in tl.range(begin, end, BV, num_stages=STAGES):
                vv = v0 + tl.arange(0, BV)
                if not AT_ONCE:
                    corrections = load_corrections(u, n, u_token, r, vv, V)
                    state = load_state(source_state, vv, kk, source_v, V, K, BV, BK)
                accepted = tl.where((r < n)[:, None], corrections, 0.0) if AT_ONCE else corrections
                accepted = cut(tl.trans(accepted), PIECES)
                after = advanced(state.to(tl.float32), whole, accepted, decayed, SCALAR_GATE, PIECES)
                store_state(dest_state + to * dest_slot, after, vv, kk, dest_v, V, K)
        elif written & (not in_place):
            # No token, no arithmetic: the source's bits.
            for v0 in range(begin, end, BV):
                vv = v0 + tl.arange(0, BV)
                if not AT_ONCE:
                    state = load_state(source_state, vv, kk, source_v, V, K, BV, BK)
                store_state(dest_state + to * dest_slot, state, vv, kk, dest_v, V, K)


@triton.jit(do_not_specialize=["num_tokens", "pad_slot_id"])
def commit_kernel(
    source_state, dest_state, u, k, g, source, dest, length, cu_seqlens, A_log, dt_bias,
    num_tokens, pad_slot_id, source_row, dest_row, dest_column, length_row, length_column,
    u_row, u_token, u_head, k_row, k_token, k_head, g_row, g_token, g_head,
    source_slot, source_head, source_v, dest_slot, dest_head, dest_v,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, T: tl.constexpr, M: tl.constexpr,
    TP: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PART: tl.constexpr, PIECES: tl.constexpr, STAGES: tl.constexpr,
    EAGER: tl.constexpr, LOWER_BOUND: tl.constexpr, SCALAR_GATE: tl.constexpr, USE_L2NORM: tl.constexpr,
    USE_GATE: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    commit_program(
        tl.program_id(0).to(tl.int64), source_state, dest_state, u, k, g, source, dest, length, cu_seqlens, A_log, dt_bias,
        num_tokens, pad_slot_id, source_row, dest_row, dest_column, length_row, length_column,
        u_row, u_token, u_head, k_row, k_token, k_head, g_row, g_token, g_head,
        source_slot, source_head, source_v, dest_slot, dest_head, dest_v,
        H, HV, K, V, T, M, TP, BK, BV, PART, PIECES, STAGES, EAGER, LOWER_BOUND, SCALAR_GATE, USE_L2NORM,
        USE_GATE, IN_PLACE,
    )  # fmt: skip
