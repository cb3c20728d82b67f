"""The verify kernel whose states are on their way while the couplings are computed, in Triton's Gluon dialect.

The equations are those of ``verify.py``. There, a program asks for its state when all else is ready, and the memory waits for
every program's long chain of dependent steps. Here tiles of the state are copied to shared memory from the first instruction
on, into buffers that the chain's own operands lend as soon as they are in registers. What that takes is explicit in Gluon:

- one layout for tokens, with all tokens of a column in one thread, so that running products need no exchange;
- one layout for products, in which N, D N and the corrections are operands where they stand;
- keys and queries as rows of one operand, their squared lengths on its product's diagonal.

For states whose rows are contiguous, and any gate: ``channel_gate.py`` and ``scalar_gate.py`` have the couplings. The matrix
unit's accumulator has 8 columns, one for each token: longer windows have two of them, and products of tokens that the warps
share out.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from recoverssm_ops.triton import gates, products
from recoverssm_ops.triton.channel_gate import factored_couplings, halved_couplings
from recoverssm_ops.triton.elimination import above_and_below, eliminate, eliminate_16, in_every_warp, left_and_right
from recoverssm_ops.triton.scalar_gate import decays
from recoverssm_ops.triton.tiles import columns_of, copy_tile, inner_products, rows_of, shared_pieces, store

log_decay, gate_parameters = gluon.jit(gates.log_decay.fn), gluon.jit(gates.gate_parameters.fn)
inverse_norm, step_size, row_span = (gluon.jit(f.fn) for f in (gates.inverse_norm, gates.step_size, gates.row_span))
cut = gluon.jit(products.cut.fn)


@gluon.constexpr_function
def pieces_needed(k_dtype, q_dtype, PIECE):
    """The matrix unit takes 16-bit keys and queries as they are, where a piece has as many bits as they."""
    exact = (gl.bfloat16,) if gl.bfloat16 == PIECE else (gl.bfloat16, gl.float16)
    return 1 if k_dtype in exact and q_dtype in exact else 2


@gluon.jit
def scale_of(squares, USE_L2NORM: gl.constexpr):
    if USE_L2NORM:
        return inverse_norm(squares)
    else:
        return gl.full_like(squares, 1.0)


@gluon.jit
def begin_copy(buffer, source, tile: gl.constexpr, columns, ACROSS: gl.constexpr, K: gl.constexpr):
    """Tiles are counted along rows of the state first; ``ACROSS`` are one row of tiles."""
    BV: gl.constexpr = buffer.shape[0]
    start: gl.constexpr = tile % ACROSS * buffer.shape[1]
    copy_tile(buffer, source + (tile // ACROSS * BV * K + start), columns, K - start)


@gluon.jit
def twice(x, layout: gl.constexpr):
    """``[C, N]`` above itself, ``[2 C, N]``."""
    both = gl.permute(gl.join(x, x), (2, 0, 1))
    return gl.convert_layout(gl.reshape(both, [2 * x.shape[0], x.shape[1]]), layout)


@gluon.jit
def side_by_side(a, b, layout: gl.constexpr):
    """``[N, C]`` and ``[N, C]`` as ``[N, 2 C]``."""
    both = gl.permute(gl.join(a, b), (0, 2, 1))
    return gl.convert_layout(gl.reshape(both, [a.shape[0], 2 * a.shape[1]]), layout)


@gluon.jit
def beside_corrections(N, PIECES: gl.constexpr, right: gl.constexpr):
    """``N^T`` cut in two, as the right operand of :func:`corrections_times`: in registers, or in shared memory if large."""
    if N.shape[0] == 8:
        high, low = cut(gl.permute(N, (1, 0)), PIECES)
        return twice(high, right), twice(low, right)
    else:
        pieces = cut(N, PIECES)
        shared = shared_pieces(2, pieces[0].dtype, 16, 16)
        store(pieces, shared, 0)
        return shared


@gluon.jit
def corrections_times(a, N, acc: gl.constexpr, left: gl.constexpr, right: gl.constexpr):
    """``a N^T`` for ``a [BV, TP]`` cut in two. Two pieces of eight tokens, side by side, fill the matrix unit's contraction."""
    nothing = gl.zeros(a[0].shape, gl.float32, acc)
    if a[0].shape[1] == 8:
        both = side_by_side(a[0], a[1], left)
        return mma_v2(both, N[0], mma_v2(both, N[1], nothing, "tf32"), "tf32")
    else:
        high, low = gl.convert_layout(a[0], left), gl.convert_layout(a[1], left)
        N_high, N_low = columns_of(N[0], 0, 16, right), columns_of(N[1], 0, 16, right)
        return mma_v2(high, N_high, mma_v2(low, N_high, mma_v2(high, N_low, nothing, "tf32"), "tf32"), "tf32")


@gluon.jit
def zero_tokens(
    o, u, first, stop, step, head, HV: gl.constexpr, V: gl.constexpr, SHARE: gl.constexpr, layout: gl.constexpr,
    BLOCK_V: gl.constexpr,
):  # fmt: skip
    """Store ``SHARE`` zeros for tokens ``first``, ``first + step``, ... in blocks of 8, up to ``stop``."""
    t = gl.arange(0, 8, gl.SliceLayout(1, layout))
    vv = gl.arange(0, BLOCK_V, gl.SliceLayout(0, layout))
    zeros = gl.zeros([8, BLOCK_V], gl.float32, layout)
    while first < stop:
        offset = ((first + t) * HV + head)[:, None] * V + vv[None, :]
        mask = (first + t < stop)[:, None] & (vv < SHARE)[None, :]
        gl.store(u + offset, zeros, mask=mask)
        gl.store(o + offset, zeros.to(o.dtype.element_ty), mask=mask)
        first += step


@gluon.jit(do_not_specialize=["num_tokens", "batch", "pad_slot_id"])
def verify_async_kernel(
    q, k, v, g, beta, state, slots, cu_seqlens, A_log, dt_bias, o, u,
    num_tokens, batch, pad_slot_id, slots_row,
    q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head,
    g_row, g_token, g_head, beta_row, beta_token, beta_head, state_slot, state_head,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, T: gl.constexpr, BLOCK_V: gl.constexpr,
    SCALE: gl.constexpr, LOWER_BOUND: gl.constexpr, SCALAR_GATE: gl.constexpr, FACTORED: gl.constexpr,
    USE_GATE: gl.constexpr, USE_L2NORM: gl.constexpr, USE_SIGMOID: gl.constexpr, NEG_EIGVAL: gl.constexpr, SHIFT: gl.constexpr,
    PIECES: gl.constexpr, ACCUMULATORS: gl.constexpr, BK: gl.constexpr, SHARE: gl.constexpr, ROWS: gl.constexpr,
    COLUMNS: gl.constexpr, PART: gl.constexpr, BUFFERS: gl.constexpr, AHEAD: gl.constexpr, HOLD: gl.constexpr,
):  # fmt: skip
    """A program takes ``SHARE`` values of a head. A tile is ``ROWS`` rows of state a warp and ``COLUMNS`` columns.

    The tiles are walked through shared memory's buffers; ``AHEAD`` of these are filled while the couplings are computed.
    ``PART`` of the columns are multiplied at a time; ``HOLD``: the other operand stays in registers meanwhile. Products of
    operands in two pieces have two ``ACCUMULATORS`` or three: one waits for the one before it in its own.
    """
    W: gl.constexpr = gl.num_warps()
    TP: gl.constexpr = 8 if T <= 8 else 16
    EXACT: gl.constexpr = PIECES == 0
    BV: gl.constexpr = ROWS * W
    ACROSS: gl.constexpr = (K + COLUMNS - 1) // COLUMNS
    SHARES: gl.constexpr = V // SHARE
    TILES: gl.constexpr = SHARE // BV * ACROSS
    gl.static_assert(
        V % SHARE == 0 and SHARE % BV == 0 and COLUMNS % PART == 0, "no row and no column may be left over"
    )
    gl.static_assert(
        AHEAD <= BUFFERS and BUFFERS <= TILES, "no copy may go past the state, or into a buffer that is not read"
    )
    SPAN: gl.constexpr = BK if TP * BK <= 1024 else 32 if EXACT else 64
    PIECE: gl.constexpr = gl.float32 if EXACT else gl.bfloat16
    POOL: gl.constexpr = state.dtype.element_ty
    INPUT_PIECES: gl.constexpr = pieces_needed(k.dtype.element_ty, q.dtype.element_ty, PIECE)
    VEC: gl.constexpr = 128 // POOL.primitive_bitwidth
    ROW: gl.constexpr = min(32, COLUMNS // VEC)
    VALUES: gl.constexpr = min(32, BLOCK_V // 8)
    token_layout: gl.constexpr = gl.BlockedLayout([TP, max(1, BK // (32 * W))], [1, 32], [1, W], [1, 0])
    copy_layout: gl.constexpr = gl.BlockedLayout([1, VEC], [32 // ROW, ROW], [W, 1], [1, 0])
    value_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // VALUES, VALUES], [W, 1], [1, 0])
    acc: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, acc, 32 // PIECE.primitive_bitwidth)
    right: gl.constexpr = gl.DotOperandLayout(1, acc, 32 // PIECE.primitive_bitwidth)
    # Products of tokens with tokens: one accumulator in every warp, or four shared out. Then every warp gets them all.
    tokens: gl.constexpr = acc if TP == 8 else gl.NVMMADistributedLayout([2, 0], [2, W // 2], [16, 8])
    everywhere: gl.constexpr = acc if TP == 8 else in_every_warp(W)
    shared_state: gl.constexpr = gl.SwizzledSharedLayout(VEC, 1, 8, [1, 0])

    pid = gl.program_id(0)
    row, head = (pid // (HV * SHARES)).to(gl.int64), (pid // SHARES % HV).to(gl.int64)
    begin = pid % SHARES * SHARE
    o += begin
    u += begin
    kv_head = head // (HV // H)
    where, start, length = row_span(cu_seqlens, row, num_tokens, T)
    token = where * T + start
    if cu_seqlens is not None:
        # Tokens of no row: before the first, after the last (shared out among the rows), past a window of T.
        end = gl.load(cu_seqlens + batch).to(gl.int64)
        zero_tokens(
            o, u, gl.maximum(end, 0) + row * 8, num_tokens, batch * 8, head, HV, V, SHARE, value_layout, BLOCK_V
        )
        next_start = gl.minimum(gl.load(cu_seqlens + row + 1).to(gl.int64), num_tokens)
        zero_tokens(o, u, start + length, next_start, 8, head, HV, V, SHARE, value_layout, BLOCK_V)
        if row == 0:
            zero_tokens(o, u, row, gl.minimum(start, num_tokens), 8, head, HV, V, SHARE, value_layout, BLOCK_V)

    k += where * k_row + start * k_token + kv_head * k_head
    q += where * q_row + start * q_token + kv_head * q_head
    v += where * v_row + start * v_token + head * v_head + begin
    g += where * g_row + start * g_token + head * g_head
    beta += where * beta_row + start * beta_token + head * beta_head
    if slots is None:
        slot, padding = row, row < 0
    else:
        slot = gl.load(slots + row * slots_row).to(gl.int64)
        padding = slot <= pad_slot_id

    # Loads that do not wait for the slot come before those that do. Offsets within a window and a state fit 32 bits.
    length = length.to(gl.int32)
    t = gl.arange(0, TP, gl.SliceLayout(1, token_layout))
    kk = gl.arange(0, BK, gl.SliceLayout(0, token_layout))
    mask = (t < length)[:, None] & (kk < K)[None, :]
    keys = gl.load(k + t[:, None] * k_token + kk[None, :], mask=mask, other=0.0)
    queries = gl.load(q + t[:, None] * q_token + kk[None, :], mask=mask, other=0.0)
    # Rows of products: keys, then queries. Columns: keys.
    r = gl.arange(0, 2 * TP, gl.SliceLayout(1, everywhere))
    i = gl.arange(0, TP, gl.SliceLayout(0, everywhere))
    if SCALAR_GATE:
        raw = gl.load(g + i * g_token, mask=i < length, other=0.0)
    else:
        raw = gl.load(g + t[:, None] * g_token + kk[None, :], mask=mask, other=0.0)
    c = gl.arange(0, TP, gl.SliceLayout(0, acc))
    row_beta = gl.load(beta + r * beta_token, mask=r < length, other=0.0)
    beta = gl.load(beta + c * beta_token, mask=c < length, other=0.0)
    tv = gl.arange(0, TP, gl.SliceLayout(1, value_layout))
    vv = gl.arange(0, BLOCK_V, gl.SliceLayout(0, value_layout))
    values = gl.load(
        v + tv[:, None] * v_token + vv[None, :], mask=(tv < length)[:, None] & (vv < SHARE)[None, :], other=0.0
    )
    rate, bias = gate_parameters(A_log, dt_bias, head, kk, K, SCALAR_GATE)

    if padding:
        zero_tokens(o, u, token, token + length, 8, head, HV, V, SHARE, value_layout, BLOCK_V)
        return

    rows = gl.arange(0, BV, gl.SliceLayout(1, copy_layout))
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, copy_layout))
    source = state + slot * state_slot + head * state_head + (begin + rows)[:, None] * K + columns[None, :]
    tiles = ()
    for tile in gl.static_range(AHEAD):
        buffer = gl.allocate_shared_memory(POOL, [BV, COLUMNS], shared_state)
        begin_copy(buffer, source, tile, columns, ACROSS, K)
        tiles = tiles + (buffer,)

    if INPUT_PIECES == 1:
        key_pieces, query_pieces = (keys.to(PIECE),), (queries.to(PIECE),)
    else:
        key_pieces, query_pieces = cut(keys.to(gl.float32), PIECES), cut(queries.to(gl.float32), PIECES)
    inputs = shared_pieces(INPUT_PIECES, PIECE, 2 * TP, BK)
    store(key_pieces, inputs, 0)
    store(query_pieces, inputs, TP)
    key_products = inner_products(inputs, rows_of(inputs, 0, TP), SPAN, tokens, ACCUMULATORS)
    query_products = inner_products(inputs, rows_of(inputs, TP, TP), SPAN, tokens, ACCUMULATORS)
    key_products, query_products = (
        gl.convert_layout(key_products, everywhere),
        gl.convert_layout(query_products, everywhere),
    )
    squares = gl.where(r[:, None] == i[None, :], key_products, 0.0)
    query_squares = gl.where(r[:, None] == i[None, :] + TP, query_products, 0.0)
    key_scale = scale_of(gl.sum(squares, 0), USE_L2NORM)
    query_scale = scale_of(gl.sum(query_squares, 0), USE_L2NORM) * SCALE
    row_scale = scale_of(gl.sum(squares + query_squares, 1), USE_L2NORM)

    if SCALAR_GATE:
        gate = gl.where(i < length, log_decay(raw, rate, bias, LOWER_BOUND, USE_GATE, True), 0.0)
        couplings, operands = key_products, inputs
    else:
        # Tokens past the row's end do not decay, or -G would leave the proven range.
        gate = gl.where((t < length)[:, None], log_decay(raw, rate, bias[None, :], LOWER_BOUND, USE_GATE, EXACT), 0.0)
        keys, queries = keys.to(gl.float32), queries.to(gl.float32)
        if FACTORED:
            couplings, operands = factored_couplings(
                keys, queries, gate, SHIFT, PIECES, PIECE, SPAN, tokens, ACCUMULATORS
            )
            couplings = gl.convert_layout(couplings, everywhere)
        else:
            couplings, operands = halved_couplings(
                keys, queries, gate, key_products, r, i, PIECES, PIECE, SPAN, tokens, everywhere
            )
    # Float32 pieces but the first one stay in shared memory, or registers would not do.
    HELD: gl.constexpr = 1 if EXACT else len(operands)
    held = ()
    for part in gl.static_range(ACROSS * COLUMNS // PART):
        pieces = ()
        for piece in gl.static_range(HELD):
            pieces = pieces + (columns_of(operands[piece], part * PART, PART, right),)
        held = held + (pieces,)

    # The operands' memory is free now, and lent to the next tiles.
    for tile in gl.static_range(AHEAD, BUFFERS):
        buffer = gl.allocate_shared_memory(POOL, [BV, COLUMNS], shared_state)
        begin_copy(buffer, source, tile, columns, ACROSS, K)
        tiles = tiles + (buffer,)
    shared_values = gl.allocate_shared_memory(values.dtype, [TP, BLOCK_V], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    shared_values.store(values)

    beta = step_size(beta, USE_SIGMOID, NEG_EIGVAL)
    row_beta = step_size(row_beta, USE_SIGMOID, NEG_EIGVAL)
    couplings *= (row_scale * gl.where(r < TP, -row_beta, SCALE))[:, None] * key_scale[None, :]
    C, D = above_and_below(couplings)
    row_of, _ = above_and_below(r[:, None] + 0 * i[None, :])
    column_of, _ = above_and_below(0 * r[:, None] + i[None, :])
    if SCALAR_GATE:
        gate, _ = above_and_below(0.0 * r[:, None] + gate[None, :])
        between, until = decays(gate, row_of, column_of, T)
        C *= gl.convert_layout(between, C.type.layout)
        D *= gl.convert_layout(between, C.type.layout)
        until = gl.sum(gl.where(row_of == TP - 1, gl.convert_layout(until, C.type.layout), 0.0), 0)
        until = gl.convert_layout(until, gl.SliceLayout(0, everywhere))
        key_scale *= until
        query_scale *= until
    if TP == 8:
        N, DN = eliminate(C, D, row_of, column_of, T)
    else:
        N, DN = eliminate_16(C, D, row_of, column_of, T)
    N, DN = beside_corrections(N, PIECES, right), beside_corrections(DN, PIECES, right)
    # What brings the columns of S a^T to P and R.
    key_scale = gl.convert_layout(key_scale * 0.5**SHIFT, gl.SliceLayout(0, acc))
    query_scale = gl.convert_layout(query_scale * 0.5**SHIFT, gl.SliceLayout(0, acc))

    out_rows = gl.arange(0, BV, gl.SliceLayout(1, acc))
    out = (token * HV + head) * V + (c * (HV * V))[None, :] + out_rows[:, None]
    wanted = (c < length)[None, :]
    large = gl.zeros([BV, 2 * TP], gl.float32, acc)
    small, cross = large, large
    for tile in gl.static_range(TILES):
        async_copy.wait_group(min(TILES, tile + BUFFERS) - 1 - tile)
        for part in gl.static_range(COLUMNS // PART):
            S = cut(tiles[tile % BUFFERS].slice(part * PART, PART, 1).load(left), PIECES, False)
            pieces = held[tile % ACROSS * (COLUMNS // PART) + part] if HOLD else ()
            for piece in gl.static_range(len(pieces), len(operands)):
                pieces = pieces + (columns_of(operands[piece], tile % ACROSS * COLUMNS + part * PART, PART, right),)
            if len(S) > 1 and ACCUMULATORS > 2:
                cross = mma_v2(S[1], pieces[0], cross, "tf32")
            elif len(S) > 1:
                small = mma_v2(S[1], pieces[0], small, "tf32")
            if len(pieces) > 1:
                small = mma_v2(S[0], pieces[1], small, "tf32")
            large = mma_v2(S[0], pieces[0], large, "tf32")
        if tile + BUFFERS < TILES:
            begin_copy(tiles[tile % BUFFERS], source, tile + BUFFERS, columns, ACROSS, K)
        if tile % ACROSS == ACROSS - 1:
            if EXACT and ACCUMULATORS > 2:
                small += cross
            if EXACT or len(operands) > 1:
                large += small
            P, R = left_and_right(large)
            large = gl.zeros([BV, 2 * TP], gl.float32, acc)
            small, cross = large, large
            P, R = gl.convert_layout(P, acc), gl.convert_layout(R, acc)
            tile_values = shared_values.slice(tile // ACROSS * BV, BV, 1).permute((1, 0)).load(acc).to(gl.float32)
            target = beta[None, :] * (tile_values - P * key_scale[None, :])
            # N is triangular, but 0 * NaN is NaN. What is not finite stays with its token, and is huge for the later ones.
            good = gl.abs(target) < 3.0e38
            excess = gl.where(good, 0.0, target)
            finite = cut(gl.where(good, target, 3.0e38), PIECES)
            U = corrections_times(finite, N, acc, left, right) + excess
            O = corrections_times(finite, DN, acc, left, right) + excess
            O = R * query_scale[None, :] + O
            gl.store(u + out + tile // ACROSS * BV, U, mask=wanted)
            gl.store(o + out + tile // ACROSS * BV, O.to(o.dtype.element_ty), mask=wanted)
