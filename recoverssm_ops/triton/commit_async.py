"""The commit kernel whose state is on its way while the accepted tokens' keys are prepared, in Triton's Gluon dialect.

The equation is that of ``commit.py``, and so are the keys. Tiles of the state are copied to shared memory as soon as their slot
is known, changed there, and written from there in whole lines.

For bf16 pools whose rows are contiguous, windows of up to 8 tokens, one plan column, and a gate of key dimensions. Tiles of
float32 are twice as large, and their operands, too: they gain nothing.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from recoverssm_ops.triton import commit, gates, layers, products
from recoverssm_ops.triton.tiles import copy_tile, store

load_keys_and_gates, decayed_keys = gluon.jit(commit.load_keys_and_gates.fn), gluon.jit(commit.decayed_keys.fn)
load_corrections, address = gluon.jit(commit.load_corrections.fn), gluon.jit(layers.address.fn)
gate_parameters, row_span = gluon.jit(gates.gate_parameters.fn), gluon.jit(gates.row_span.fn)
cut = gluon.jit(products.cut.fn)


@gluon.jit
def commit_async_program(
    pid, state, u, k, g, source, dest, length, cu_seqlens, A_log, dt_bias,
    num_tokens, pad_slot_id, source_row, dest_row, length_row,
    u_row, u_token, u_head, k_row, k_token, k_head, g_row, g_token, g_head, state_slot, state_head,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, T: gl.constexpr, BLOCK_V: gl.constexpr,
    LOWER_BOUND: gl.constexpr, USE_L2NORM: gl.constexpr, USE_GATE: gl.constexpr, BK: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """What program ``pid`` of one layer does: one head of one row."""
    W: gl.constexpr = gl.num_warps()
    TP: gl.constexpr = 8
    BV: gl.constexpr = 16 * W
    TILES: gl.constexpr = V // BV
    ROW: gl.constexpr = min(32, BK // 8)
    VALUES: gl.constexpr = min(32, BLOCK_V // 4)
    token_layout: gl.constexpr = gl.BlockedLayout([TP, max(1, BK // (32 * W))], [1, 32], [1, W], [1, 0])
    copy_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ROW, ROW], [W, 1], [1, 0])
    value_layout: gl.constexpr = gl.BlockedLayout([1, 4], [32 // VALUES, VALUES], [W, 1], [1, 0])
    acc: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, acc, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, acc, 2)
    shared: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])

    row, head = (pid // HV).to(gl.int64), (pid % HV).to(gl.int64)
    slot = gl.load(source + row * source_row).to(gl.int64)
    to = gl.load(dest + row * dest_row).to(gl.int64)
    n = gl.load(length + row * length_row).to(gl.int64)
    where, start, tokens = row_span(cu_seqlens, row, num_tokens, T)
    n = gl.maximum(gl.minimum(n, tokens), 0)
    if (slot <= pad_slot_id) | (to <= pad_slot_id) | ((n == 0) & (to == slot)):
        return

    rows = gl.arange(0, BV, gl.SliceLayout(1, copy_layout))
    columns = gl.arange(0, BK, gl.SliceLayout(0, copy_layout))
    offsets = head * state_head + rows[:, None] * K + columns[None, :]
    old, new = state + slot * state_slot + offsets, state + to * state_slot + offsets
    tiles = ()
    for tile in gl.static_range(BUFFERS):
        buffer = gl.allocate_shared_memory(gl.bfloat16, [BV, BK], shared)
        copy_tile(buffer, old + tile * BV * K, columns, K)
        tiles = tiles + (buffer,)

    # Corrections and keys of the accepted tokens; pieces of corrections above each other, of keys twice.
    k += where * k_row + start * k_token + head // (HV // H) * k_head
    u += where * u_row + start * u_token + head * u_head
    g += where * g_row + start * g_token + head * g_head
    r = gl.arange(0, TP, gl.SliceLayout(1, value_layout)).to(gl.int64)
    corrections = load_corrections(u, n, u_token, r, gl.arange(0, BLOCK_V, gl.SliceLayout(0, value_layout)), V)
    r = gl.arange(0, TP, gl.SliceLayout(1, token_layout)).to(gl.int64)
    kk = gl.arange(0, BK, gl.SliceLayout(0, token_layout))
    rate, bias = gate_parameters(A_log, dt_bias, head, kk, K, False)
    keys, raw, first = load_keys_and_gates(k, g, n, k_token, g_token, r, kk, K, False)
    keys, whole = decayed_keys(keys, raw, first, n, rate, bias, r, LOWER_BOUND, False, USE_L2NORM, USE_GATE, False)
    keys, corrections = cut(keys, 2), cut(corrections, 2)
    large = gl.allocate_shared_memory(gl.bfloat16, [2 * TP, BK], shared)
    small = gl.allocate_shared_memory(gl.bfloat16, [2 * TP, BK], shared)
    stacked = gl.allocate_shared_memory(gl.bfloat16, [2 * TP, BLOCK_V], shared)
    whole_shared = gl.allocate_shared_memory(gl.float32, [BK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for i in gl.static_range(2):
        store(keys, (large, small), i * TP)
        store((corrections[i],), (stacked,), i * TP)
    whole_shared.store(whole)

    for tile in gl.static_range(TILES):
        async_copy.wait_group(min(TILES, tile + BUFFERS) - 1 - tile)
        buffer = tiles[tile % BUFFERS]
        if n > 0:
            decay = whole_shared.load(gl.SliceLayout(0, acc))
            S = buffer.load(acc).to(gl.float32) * decay[None, :]
            stacked_tile = stacked.slice(tile * BV, BV, 1).permute((1, 0)).load(left)
            S = mma_v2(stacked_tile, small.load(right), S)
            S = mma_v2(stacked_tile, large.load(right), S)
            buffer.store(S.to(gl.bfloat16))
        result = buffer.load(copy_layout)
        if K == BK:
            gl.store(new + tile * BV * K, result)
        else:
            gl.store(new + tile * BV * K, result, mask=(columns < K)[None, :])
        if tile + BUFFERS < TILES:
            copy_tile(buffer, old + (tile + BUFFERS) * BV * K, columns, K)


@gluon.jit(do_not_specialize=["num_tokens", "pad_slot_id"])
def commit_async_kernel(
    state, u, k, g, source, dest, length, cu_seqlens, A_log, dt_bias,
    num_tokens, pad_slot_id, source_row, dest_row, length_row,
    u_row, u_token, u_head, k_row, k_token, k_head, g_row, g_token, g_head, state_slot, state_head,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, T: gl.constexpr, BLOCK_V: gl.constexpr,
    LOWER_BOUND: gl.constexpr, USE_L2NORM: gl.constexpr, USE_GATE: gl.constexpr, BK: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    commit_async_program(
        gl.program_id(0), state, u, k, g, source, dest, length, cu_seqlens, A_log, dt_bias,
        num_tokens, pad_slot_id, source_row, dest_row, length_row,
        u_row, u_token, u_head, k_row, k_token, k_head, g_row, g_token, g_head, state_slot, state_head,
        H, HV, K, V, T, BLOCK_V, LOWER_BOUND, USE_L2NORM, USE_GATE, BK, BUFFERS,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["num_tokens", "pad_slot_id", "programs"])
def commit_layers_async_kernel(
    table, source, dest, length, cu_seqlens, programs,
    num_tokens, pad_slot_id, source_row, dest_row, length_row,
    u_row, u_token, u_head, k_row, k_token, k_head, g_row, g_token, g_head, state_slot, state_head,
    LAYERS: gl.constexpr, U: gl.constexpr, KEY: gl.constexpr, GATE: gl.constexpr, RATE: gl.constexpr, BIAS: gl.constexpr,
    ALIGNED: gl.constexpr,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, T: gl.constexpr, BLOCK_V: gl.constexpr,
    LOWER_BOUND: gl.constexpr, USE_L2NORM: gl.constexpr, USE_GATE: gl.constexpr, BK: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """Every layer's, by the table of ``layers.py``."""
    pid = gl.program_id(0)
    layer = pid // programs
    A_log = None if RATE is None else address(table, 4, layer, LAYERS, RATE, ALIGNED)
    dt_bias = None if BIAS is None else address(table, 5, layer, LAYERS, BIAS, ALIGNED)
    commit_async_program(
        pid % programs, address(table, 0, layer, LAYERS, gl.bfloat16, ALIGNED), address(table, 1, layer, LAYERS, U, ALIGNED),
        address(table, 2, layer, LAYERS, KEY, ALIGNED), address(table, 3, layer, LAYERS, GATE, ALIGNED),
        source, dest, length, cu_seqlens, A_log, dt_bias,
        num_tokens, pad_slot_id, source_row, dest_row, length_row,
        u_row, u_token, u_head, k_row, k_token, k_head, g_row, g_token, g_head, state_slot, state_head,
        H, HV, K, V, T, BLOCK_V, LOWER_BOUND, USE_L2NORM, USE_GATE, BK, BUFFERS,
    )  # fmt: skip
