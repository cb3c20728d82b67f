"""The commit kernel whose state stays in registers, in Triton's Gluon dialect: a warp takes whole rows of it.

The equation is that of ``commit.py``, and so are the keys. A row of the state changes by itself: it is multiplied by the
decay, and each accepted token adds its key times one number. So the tiles of the state are asked for as soon as their slot is
known, and nothing but keys and corrections goes through shared memory. The matrix unit would want the state in another
layout, and float32 operands in pieces; eight multiply-adds a number of the state cost less. A scalar gate is read as one whose
channels are all the same number.

For pools whose rows are contiguous, and windows of up to 16 tokens. Columns of a plan come one after another, each as if it
were the only one: seldom has a row more than one state to write, and what is skipped costs two reads.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from recoverssm_ops.triton import commit, gates, layers

load_keys_and_gates, decayed_keys = gluon.jit(commit.load_keys_and_gates.fn), gluon.jit(commit.decayed_keys.fn)
load_corrections, plan_column = gluon.jit(commit.load_corrections.fn), gluon.jit(commit.plan_column.fn)
address = gluon.jit(layers.address.fn)
gate_parameters, row_span = gluon.jit(gates.gate_parameters.fn), gluon.jit(gates.row_span.fn)


@gluon.jit
def load_rows(rows, columns, K: gl.constexpr):
    """Rows of the state; columns past K become zeros."""
    if rows.shape[1] == K:
        return gl.load(rows)
    else:
        return gl.load(rows, mask=(columns < K)[None, :], other=0.0)


@gluon.jit
def store_rows(rows, values, columns, K: gl.constexpr):
    if rows.shape[1] == K:
        gl.store(rows, values)
    else:
        gl.store(rows, values, mask=(columns < K)[None, :])


@gluon.jit
def commit_column(
    old, new, n, asked, u, k, g, rate, bias, k_token, g_token, u_token, r, kk, channels, value, vv, columns,
    K: gl.constexpr, LOWER_BOUND: gl.constexpr, USE_L2NORM: gl.constexpr, USE_GATE: gl.constexpr, EXACT: gl.constexpr,
    PART: gl.constexpr, BUFFERS: gl.constexpr, GROUP: gl.constexpr, tile_layout: gl.constexpr,
):  # fmt: skip
    """Write the state after ``n`` tokens: the first tile is at ``old`` and goes to ``new``, the others are below it.

    ``asked``: the record, where it is on its way already.
    """
    BV: gl.constexpr = old.shape[0]
    BK: gl.constexpr = old.shape[1]
    TILES: gl.constexpr = PART // BV
    TP: gl.constexpr = r.shape[0]
    BLOCK_V: gl.constexpr = vv.shape[0]
    row_layout: gl.constexpr = gl.SliceLayout(1, tile_layout)
    column_layout: gl.constexpr = gl.SliceLayout(0, tile_layout)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lines: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    tiles = ()
    for tile in gl.static_range(min(TILES, BUFFERS)):
        tiles = tiles + (load_rows(old + tile * BV * K, columns, K),)

    if len(asked) == 0:
        corrections = load_corrections(u, n, u_token, value, vv, PART)
        keys, raw, first = load_keys_and_gates(k, g, n, k_token, g_token, r, kk, channels, K, False)
    else:
        corrections, keys, raw, first = asked
    keys, whole = decayed_keys(keys, raw, first, n, rate, bias, r, LOWER_BOUND, False, USE_L2NORM, USE_GATE, EXACT)
    flat_keys = gl.allocate_shared_memory(gl.float32, [TP * BK], line)
    flat_corrections = gl.allocate_shared_memory(gl.float32, [TP * BLOCK_V], line)
    flat_keys._reinterpret(gl.float32, [TP, BK], lines).store(keys)
    # A group of tokens may end past the accepted ones.
    corrections = gl.where((value < n)[:, None], corrections, 0.0)
    flat_corrections._reinterpret(gl.float32, [TP, BLOCK_V], lines).store(corrections)
    whole_shared = gl.allocate_shared_memory(gl.float32, [BK], line)
    whole_shared.store(whole)
    decay = whole_shared.load(column_layout)

    for tile in gl.static_range(TILES):
        result = tiles[tile % BUFFERS]
        if tile + BUFFERS < TILES:
            ahead = load_rows(old + (tile + BUFFERS) * BV * K, columns, K)
            following = ()
            for i in gl.static_range(BUFFERS):
                following = following + ((ahead,) if i == tile % BUFFERS else (tiles[i],))
            tiles = following
        if n > 0:
            S = result.to(gl.float32) * decay[None, :]
            for t0 in gl.static_range(0, TP, GROUP):
                if n > t0:
                    for t in gl.static_range(t0, min(TP, t0 + GROUP)):
                        key = flat_keys.slice(t * BK, BK, 0).load(column_layout)
                        correction = flat_corrections.slice(t * BLOCK_V + tile * BV, BV, 0).load(row_layout)
                        S = S + correction[:, None] * key[None, :]
            result = S.to(result.dtype)
        store_rows(new + tile * BV * K, result, columns, K)


@gluon.jit
def commit_rows_program(
    pid, state, u, k, g, source, dest, length, cu_seqlens, A_log, dt_bias,
    num_tokens, pad_slot_id, source_row, dest_row, dest_column, length_row, length_column,
    u_row, u_token, u_head, k_row, k_token, k_head, g_row, g_token, g_head, state_slot, state_head,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, T: gl.constexpr, M: gl.constexpr,
    LOWER_BOUND: gl.constexpr, SCALAR_GATE: gl.constexpr, USE_L2NORM: gl.constexpr, USE_GATE: gl.constexpr,
    BK: gl.constexpr, PART: gl.constexpr, ROWS: gl.constexpr, BUFFERS: gl.constexpr, GROUP: gl.constexpr,
    EAGER: gl.constexpr,
):  # fmt: skip
    """What program ``pid`` of one layer does: ``PART`` values of one head.

    Each warp changes ``ROWS`` of them at a time, with ``BUFFERS`` times as many on the way, and looks after every ``GROUP`` of
    tokens whether more were accepted. ``EAGER``: the record is asked for before its length is known.
    """
    W: gl.constexpr = gl.num_warps()
    TP: gl.constexpr = 2 if T <= 2 else 4 if T <= 4 else 8 if T <= 8 else 16
    PARTS: gl.constexpr = V // PART
    BV: gl.constexpr = ROWS * W
    gl.static_assert(V % PART == 0 and PART % BV == 0, "no row may be left over")
    BLOCK_V: gl.constexpr = 32 if PART <= 32 else 64 if PART <= 64 else 128 if PART <= 128 else 256
    EXACT: gl.constexpr = state.dtype.element_ty != gl.bfloat16
    VALUES: gl.constexpr = min(32, BLOCK_V // 4)
    token_layout: gl.constexpr = gl.BlockedLayout([TP, max(1, BK // (32 * W))], [1, 32], [1, W], [1, 0])
    value_layout: gl.constexpr = gl.BlockedLayout([1, 4], [32 // VALUES, VALUES], [W, 1], [1, 0])
    tile_layout: gl.constexpr = gl.BlockedLayout([ROWS, BK // 32], [1, 32], [W, 1], [1, 0])

    row, head = (pid // (HV * PARTS)).to(gl.int64), (pid // PARTS % HV).to(gl.int64)
    begin = pid % PARTS * PART
    slot = gl.load(source + row * source_row).to(gl.int64)
    if M == 1:
        to = gl.load(dest + row * dest_row).to(gl.int64)
        n = gl.load(length + row * length_row).to(gl.int64)
    where, start, tokens = row_span(cu_seqlens, row, num_tokens, T)
    if M == 1:
        n = gl.maximum(gl.minimum(n, tokens), 0)
    k += where * k_row + start * k_token + head // (HV // H) * k_head
    u += where * u_row + start * u_token + head * u_head + begin
    g += where * g_row + start * g_token + head * g_head
    r = gl.arange(0, TP, gl.SliceLayout(1, token_layout)).to(gl.int64)
    kk = gl.arange(0, BK, gl.SliceLayout(0, token_layout))
    value = gl.arange(0, TP, gl.SliceLayout(1, value_layout)).to(gl.int64)
    vv = gl.arange(0, BLOCK_V, gl.SliceLayout(0, value_layout))
    rate, bias = gate_parameters(A_log, dt_bias, head, kk, K, SCALAR_GATE)
    channels = kk
    if SCALAR_GATE:
        channels = kk * 0
        bias = bias + kk * 0.0
    asked = ()
    if EAGER:
        keys, raw, first = load_keys_and_gates(k, g, tokens, k_token, g_token, r, kk, channels, K, False)
        asked = (load_corrections(u, tokens, u_token, value, vv, PART), keys, raw, first)
    if M == 1:
        if (slot <= pad_slot_id) | (to <= pad_slot_id) | ((n == 0) & (to == slot)):
            return
    elif slot <= pad_slot_id:
        return

    rows = begin + gl.arange(0, BV, gl.SliceLayout(1, tile_layout))
    columns = gl.arange(0, BK, gl.SliceLayout(0, tile_layout))
    offsets = head * state_head + rows[:, None] * K + columns[None, :]
    old = state + slot * state_slot + offsets
    if M == 1:
        commit_column(
            old, state + to * state_slot + offsets, n, asked, u, k, g, rate, bias, k_token, g_token, u_token, r, kk,
            channels, value, vv, columns, K, LOWER_BOUND, USE_L2NORM, USE_GATE, EXACT, PART, BUFFERS, GROUP, tile_layout,
        )  # fmt: skip
    else:
        # A column that writes to the source's own slot comes last: the others still read it.
        for index in range(2 * M):
            to, n, written = plan_column(
                dest, length, row, index % M, dest_row, dest_column, length_row, length_column, tokens, pad_slot_id, True
            )  # fmt: skip
            in_place = to == slot
            if written & (in_place == (index >= M)) & ((n > 0) | (to != slot)):
                commit_column(
                    old, state + to * state_slot + offsets, n, asked, u, k, g, rate, bias, k_token, g_token, u_token, r, kk,
                    channels, value, vv, columns, K, LOWER_BOUND, USE_L2NORM, USE_GATE, EXACT, PART, BUFFERS, GROUP,
                    tile_layout,
                )  # fmt: skip


@gluon.jit(do_not_specialize=["num_tokens", "pad_slot_id"])
def commit_rows_kernel(
    state, u, k, g, source, dest, length, cu_seqlens, A_log, dt_bias,
    num_tokens, pad_slot_id, source_row, dest_row, dest_column, length_row, length_column,
    u_row, u_token, u_head, k_row, k_token, k_head, g_row, g_token, g_head, state_slot, state_head,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, T: gl.constexpr, M: gl.constexpr,
    LOWER_BOUND: gl.constexpr, SCALAR_GATE: gl.constexpr, USE_L2NORM: gl.constexpr, USE_GATE: gl.constexpr,
    BK: gl.constexpr, PART: gl.constexpr, ROWS: gl.constexpr, BUFFERS: gl.constexpr, GROUP: gl.constexpr,
    EAGER: gl.constexpr,
):  # fmt: skip
    commit_rows_program(
        gl.program_id(0), state, u, k, g, source, dest, length, cu_seqlens, A_log, dt_bias,
        num_tokens, pad_slot_id, source_row, dest_row, dest_column, length_row, length_column,
        u_row, u_token, u_head, k_row, k_token, k_head, g_row, g_token, g_head, state_slot, state_head,
        H, HV, K, V, T, M, LOWER_BOUND, SCALAR_GATE, USE_L2NORM, USE_GATE, BK, PART, ROWS, BUFFERS, GROUP, EAGER,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["num_tokens", "pad_slot_id", "programs"])
def commit_layers_rows_kernel(
    table, source, dest, length, cu_seqlens, programs,
    num_tokens, pad_slot_id, source_row, dest_row, dest_column, length_row, length_column,
    u_row, u_token, u_head, k_row, k_token, k_head, g_row, g_token, g_head, state_slot, state_head,
    LAYERS: gl.constexpr, STATE: gl.constexpr, U: gl.constexpr, KEY: gl.constexpr, GATE: gl.constexpr, RATE: gl.constexpr,
    BIAS: gl.constexpr, ALIGNED: gl.constexpr,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, T: gl.constexpr, M: gl.constexpr,
    LOWER_BOUND: gl.constexpr, SCALAR_GATE: gl.constexpr, USE_L2NORM: gl.constexpr, USE_GATE: gl.constexpr,
    BK: gl.constexpr, PART: gl.constexpr, ROWS: gl.constexpr, BUFFERS: gl.constexpr, GROUP: gl.constexpr,
    EAGER: gl.constexpr,
):  # fmt: skip
    """Every layer's, by the table of ``layers.py``."""
    pid = gl.program_id(0)
    layer = pid // programs
    A_log = None if RATE is None else address(table, 4, layer, LAYERS, RATE, ALIGNED)
    dt_bias = None if BIAS is None else address(table, 5, layer, LAYERS, BIAS, ALIGNED)
    commit_rows_program(
        pid % programs, address(table, 0, layer, LAYERS, STATE, ALIGNED), address(table, 1, layer, LAYERS, U, ALIGNED),
        address(table, 2, layer, LAYERS, KEY, ALIGNED), address(table, 3, layer, LAYERS, GATE, ALIGNED),
        source, dest, length, cu_seqlens, A_log, dt_bias,
        num_tokens, pad_slot_id, source_row, dest_row, dest_column, length_row, length_column,
        u_row, u_token, u_head, k_row, k_token, k_head, g_row, g_token, g_head, state_slot, state_head,
        H, HV, K, V, T, M, LOWER_BOUND, SCALAR_GATE, USE_L2NORM, USE_GATE, BK, PART, ROWS, BUFFERS, GROUP, EAGER,
    )  # fmt: skip
