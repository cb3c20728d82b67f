"""The commit kernel: one program per row, value head and tile of V walks the accepted tokens from the checkpoint.

The arithmetic is the recurrence's own, ``S <- S exp(g) + u k^T``, through the same gate and norm as verify. The states
asked for are stored on the way, so any number of plan columns costs one walk. Tokens past the longest column are never
loaded.
"""

import triton
import triton.language as tl

from recoverssm_ops.triton.gates import exp, gate_parameters, log_decay, row_span, unit_scale


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
    BK: tl.constexpr, BV: tl.constexpr, LOWER_BOUND: tl.constexpr, SCALAR_GATE: tl.constexpr,
    USE_L2NORM: tl.constexpr, USE_GATE: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    """What program ``pid`` of one layer does."""
    TILES: tl.constexpr = (V + BV - 1) // BV
    row, head = pid // (HV * TILES), pid // TILES % HV
    vv = (pid % TILES).to(tl.int32) * BV + tl.arange(0, BV)
    kk = tl.arange(0, BK)
    if IN_PLACE:
        slot = tl.load(source + row * source_row).to(tl.int64)
        if slot <= pad_slot_id:
            return
    else:
        slot = row
    where, start, tokens = row_span(cu_seqlens, row, num_tokens, T)

    longest = tokens * 0
    for m in tl.static_range(M):
        _slot, n, written = plan_column(
            dest, length, row, m, dest_row, dest_column, length_row, length_column, tokens, pad_slot_id, IN_PLACE
        )
        longest = tl.maximum(longest, tl.where(written, n, 0))

    inside = (vv < V)[:, None] & (kk < K)[None, :]
    v64 = vv.to(tl.int64)
    source_tile = (source_state + slot * source_slot + head * source_head + v64 * source_v)[:, None] + kk[None, :]
    dest_state += head * dest_head
    raw = tl.load(source_tile) if V % BV == 0 and K == BK else tl.load(source_tile, mask=inside, other=0.0)
    for m in tl.static_range(M):
        to, n, written = plan_column(
            dest, length, row, m, dest_row, dest_column, length_row, length_column, tokens, pad_slot_id, IN_PLACE
        )
        # No token, no arithmetic: the slot keeps its bits (in place) or receives the source's.
        if IN_PLACE:
            written = written & (to != slot)
        if written & (n == 0):
            store_state(dest_state + to * dest_slot, raw, vv, kk, dest_v, V, K)

    k += where * k_row + start * k_token + head // (HV // H) * k_head + kk
    u += where * u_row + start * u_token + head * u_head + vv
    g += where * g_row + start * g_token + head * g_head
    if not SCALAR_GATE:
        g += kk
    rate, bias = gate_parameters(A_log, dt_bias, head, kk, K, SCALAR_GATE)
    S = raw.to(tl.float32)
    i = longest * 0
    # Each token's inputs are loaded while the one before is applied.
    key = tl.load(k, mask=(kk < K) & (i < longest), other=0.0)
    correction = tl.load(u, mask=(vv < V) & (i < longest), other=0.0)
    if SCALAR_GATE:
        gate = tl.load(g, mask=i < longest, other=0.0)
    else:
        gate = tl.load(g, mask=(kk < K) & (i < longest), other=0.0)
    while i < longest:
        unit = key.to(tl.float32)
        unit = unit * unit_scale(unit, 0, USE_L2NORM)
        decay = exp(log_decay(gate, rate, bias, LOWER_BOUND, USE_GATE))
        step = correction
        i += 1
        key = tl.load(k + i * k_token, mask=(kk < K) & (i < longest), other=0.0)
        correction = tl.load(u + i * u_token, mask=(vv < V) & (i < longest), other=0.0)
        if SCALAR_GATE:
            gate = tl.load(g + i * g_token, mask=i < longest, other=0.0)
        else:
            gate = tl.load(g + i * g_token, mask=(kk < K) & (i < longest), other=0.0)
        S = S * (decay if SCALAR_GATE else decay[None, :]) + step[:, None] * unit[None, :]
        if M > 1:
            for m in tl.static_range(M):
                to, n, written = plan_column(
                    dest, length, row, m, dest_row, dest_column, length_row, length_column, tokens, pad_slot_id,
                    IN_PLACE,
                )  # fmt: skip
                if written & (n == i):
                    store_state(dest_state + to * dest_slot, S, vv, kk, dest_v, V, K)
    if M == 1:
        to, n, written = plan_column(
            dest, length, row, 0, dest_row, dest_column, length_row, length_column, tokens, pad_slot_id, IN_PLACE
        )
        if written & (n > 0):
            store_state(dest_state + to * dest_slot, S, vv, kk, dest_v, V, K)


@triton.jit(do_not_specialize=["num_tokens", "pad_slot_id"])
def commit_kernel(
    source_state, dest_state, u, k, g, source, dest, length, cu_seqlens, A_log, dt_bias,
    num_tokens, pad_slot_id, source_row, dest_row, dest_column, length_row, length_column,
    u_row, u_token, u_head, k_row, k_token, k_head, g_row, g_token, g_head,
    source_slot, source_head, source_v, dest_slot, dest_head, dest_v,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, T: tl.constexpr, M: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, LOWER_BOUND: tl.constexpr, SCALAR_GATE: tl.constexpr,
    USE_L2NORM: tl.constexpr, USE_GATE: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    commit_program(
        tl.program_id(0).to(tl.int64), source_state, dest_state, u, k, g, source, dest, length, cu_seqlens, A_log, dt_bias,
        num_tokens, pad_slot_id, source_row, dest_row, dest_column, length_row, length_column,
        u_row, u_token, u_head, k_row, k_token, k_head, g_row, g_token, g_head,
        source_slot, source_head, source_v, dest_slot, dest_head, dest_v,
        H, HV, K, V, T, M, BK, BV, LOWER_BOUND, SCALAR_GATE, USE_L2NORM, USE_GATE, IN_PLACE,
    )  # fmt: skip
