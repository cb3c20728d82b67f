"""The verify kernel whose states are on their way while the couplings are computed, in Triton's Gluon dialect.

The equations are those of ``verify.py``. There, a program asks for its state when all else is ready, and the memory waits for
every program's long chain of dependent steps. Here tiles of the state are copied to shared memory from the first instruction
on, into buffers that the chain's own operands lend as soon as they are in registers. What that takes is explicit in Gluon:

- one layout for tokens, with all tokens of a column in one thread, so that running products need no exchange;
- one layout for products, in which N, D N and the corrections are operands where they stand;
- keys and queries as rows of one operand, their squared lengths on its product's diagonal.

For windows of up to 8 tokens, a gate whose bound proves the factored couplings finite, and states whose rows are contiguous.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from recoverssm_ops.triton import gates, products
from recoverssm_ops.triton.tiles import copy_tile, store

exp, reciprocal, log_decay = gluon.jit(gates.exp.fn), gluon.jit(gates.reciprocal.fn), gluon.jit(gates.log_decay.fn)
inverse_norm, step_size, row_span = (gluon.jit(f.fn) for f in (gates.inverse_norm, gates.step_size, gates.row_span))
cut = gluon.jit(products.cut.fn)


@gluon.constexpr_function
def pieces_needed(k_dtype, q_dtype, PIECE):
    """The matrix unit takes 16-bit keys and queries as they are, where a piece has as many bits as they."""
    exact = (gl.bfloat16,) if gl.bfloat16 == PIECE else (gl.bfloat16, gl.float16)
    return 1 if k_dtype in exact and q_dtype in exact else 2


@gluon.jit
def multiply(a, b):
    return a * b


@gluon.jit
def product(a, b, sum):
    """``sum + a b`` for matrices cut in one or two pieces, with an accumulator for the large terms and one for the small."""
    small = gl.zeros_like(sum)
    if len(b) > 1:
        small = mma_v2(a[0], b[1], small, "tf32")
    if len(a) > 1:
        small = mma_v2(a[1], b[0], small, "tf32")
    return mma_v2(a[0], b[0], sum, "tf32") + small


@gluon.jit
def shared_pieces(COUNT: gl.constexpr, DTYPE: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    layout: gl.constexpr = gl.SwizzledSharedLayout(128 // DTYPE.primitive_bitwidth, 1, 8, [1, 0])
    if COUNT == 1:
        return (gl.allocate_shared_memory(DTYPE, [ROWS, COLUMNS], layout),)
    else:
        return (
            gl.allocate_shared_memory(DTYPE, [ROWS, COLUMNS], layout),
            gl.allocate_shared_memory(DTYPE, [ROWS, COLUMNS], layout),
        )


@gluon.jit
def load_left(shared, layout: gl.constexpr):
    if len(shared) == 1:
        return (shared[0].load(layout),)
    else:
        return shared[0].load(layout), shared[1].load(layout)


@gluon.jit
def load_transposed(shared, start: gl.constexpr, stop: gl.constexpr, layout: gl.constexpr):
    """Rows ``start .. stop - 1`` as columns of a right operand."""
    first = shared[0].slice(start, stop - start, 0).permute((1, 0)).load(layout)
    if len(shared) == 1:
        return (first,)
    else:
        return first, shared[1].slice(start, stop - start, 0).permute((1, 0)).load(layout)


@gluon.jit
def above_and_below(x):
    """``[2 N, M]`` as two ``[N, M]``."""
    return gl.split(gl.permute(gl.reshape(x, [2, x.shape[0] // 2, x.shape[1]]), (1, 2, 0)))


@gluon.jit
def even_and_odd(x):
    """Columns 0, 2, ... and 1, 3, ...: the two that a thread holds."""
    return gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


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
def from_lane(x, lane):
    """What lane ``lane`` of the warp holds in the same register."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=r,r,r", [x, lane], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def eliminate(couplings, t, i, T: gl.constexpr):
    """``N = (I - C)^-1`` and ``D N`` of ``couplings``, C above D; only what is below C's and on or below D's diagonal counts.

    ``t`` and ``i`` are row and column of every element of C. Its rows are four threads each, of two columns: lane 4 t + i / 2,
    as the matrix unit leaves them. What is masked is not multiplied by zero (``verify.py``).
    """
    C, D = above_and_below(couplings)
    C, D, t, i = even_and_odd(C), even_and_odd(D), even_and_odd(t)[0], even_and_odd(i)[0]
    N_even, N_odd = gl.where(t == i, 1.0, 0.0), gl.where(t == i + 1, 1.0, 0.0)
    DN_even, DN_odd = gl.zeros_like(N_even), gl.zeros_like(N_even)
    for j in gl.static_range(T):
        c, d = from_lane(C[j % 2], 4 * t + j // 2), from_lane(D[j % 2], 4 * t + j // 2)
        row_even, row_odd = from_lane(N_even, 4 * j + i // 2), from_lane(N_odd, 4 * j + i // 2)
        N_even = gl.where(t > j, N_even + c * row_even, N_even)
        N_odd = gl.where(t > j, N_odd + c * row_odd, N_odd)
        DN_even = gl.where(t >= j, DN_even + d * row_even, DN_even)
        DN_odd = gl.where(t >= j, DN_odd + d * row_odd, DN_odd)
    return gl.reshape(gl.join(N_even, N_odd), [8, 8]), gl.reshape(gl.join(DN_even, DN_odd), [8, 8])


@gluon.jit
def zero_tokens(
    o, u, first, stop, step, head, HV: gl.constexpr, V: gl.constexpr, layout: gl.constexpr, BLOCK_V: gl.constexpr
):
    """Store zeros for tokens ``first``, ``first + step``, ... in blocks of 8, up to ``stop``."""
    t = gl.arange(0, 8, gl.SliceLayout(1, layout))
    vv = gl.arange(0, BLOCK_V, gl.SliceLayout(0, layout))
    zeros = gl.zeros([8, BLOCK_V], gl.float32, layout)
    while first < stop:
        offset = ((first + t) * HV + head)[:, None] * V + vv[None, :]
        mask = (first + t < stop)[:, None] & (vv < V)[None, :]
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
    SCALE: gl.constexpr, LOWER_BOUND: gl.constexpr, USE_SIGMOID: gl.constexpr, NEG_EIGVAL: gl.constexpr, SHIFT: gl.constexpr,
    PIECES: gl.constexpr, BK: gl.constexpr, PART: gl.constexpr, BUFFERS: gl.constexpr, HOLD: gl.constexpr,
):  # fmt: skip
    """``PART`` columns of the state are multiplied at a time; ``HOLD``: the other operand stays in registers meanwhile."""
    W: gl.constexpr = gl.num_warps()
    TP: gl.constexpr = 8
    EXACT: gl.constexpr = PIECES == 0
    BV: gl.constexpr = 16 * W
    TILES: gl.constexpr = V // BV
    PIECE: gl.constexpr = gl.float32 if EXACT else gl.bfloat16
    POOL: gl.constexpr = state.dtype.element_ty
    INPUT_PIECES: gl.constexpr = pieces_needed(k.dtype.element_ty, q.dtype.element_ty, PIECE)
    VEC: gl.constexpr = 128 // POOL.primitive_bitwidth
    ROW: gl.constexpr = min(32, BK // VEC)
    VALUES: gl.constexpr = min(32, BLOCK_V // 8)
    token_layout: gl.constexpr = gl.BlockedLayout([TP, max(1, BK // (32 * W))], [1, 32], [1, W], [1, 0])
    copy_layout: gl.constexpr = gl.BlockedLayout([1, VEC], [32 // ROW, ROW], [W, 1], [1, 0])
    value_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // VALUES, VALUES], [W, 1], [1, 0])
    acc: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, acc, 32 // PIECE.primitive_bitwidth)
    right: gl.constexpr = gl.DotOperandLayout(1, acc, 32 // PIECE.primitive_bitwidth)
    shared_state: gl.constexpr = gl.SwizzledSharedLayout(VEC, 1, 8, [1, 0])

    pid = gl.program_id(0)
    row, head = (pid // HV).to(gl.int64), (pid % HV).to(gl.int64)
    kv_head = head // (HV // H)
    where, start, length = row_span(cu_seqlens, row, num_tokens, T)
    token = where * T + start
    if cu_seqlens is not None:
        # Tokens of no row: before the first, after the last (shared out among the rows), past a window of T.
        end = gl.load(cu_seqlens + batch).to(gl.int64)
        zero_tokens(o, u, gl.maximum(end, 0) + row * 8, num_tokens, batch * 8, head, HV, V, value_layout, BLOCK_V)
        next_start = gl.minimum(gl.load(cu_seqlens + row + 1).to(gl.int64), num_tokens)
        zero_tokens(o, u, start + length, next_start, 8, head, HV, V, value_layout, BLOCK_V)
        if row == 0:
            zero_tokens(o, u, row, gl.minimum(start, num_tokens), 8, head, HV, V, value_layout, BLOCK_V)

    k += where * k_row + start * k_token + kv_head * k_head
    q += where * q_row + start * q_token + kv_head * q_head
    v += where * v_row + start * v_token + head * v_head
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
    raw = gl.load(g + t[:, None] * g_token + kk[None, :], mask=mask, other=0.0)
    # Rows of products: keys, then queries. Columns: keys.
    r = gl.arange(0, 2 * TP, gl.SliceLayout(1, acc))
    c = gl.arange(0, TP, gl.SliceLayout(0, acc))
    row_beta = gl.load(beta + r * beta_token, mask=r < length, other=0.0)
    beta = gl.load(beta + c * beta_token, mask=c < length, other=0.0)
    tv = gl.arange(0, TP, gl.SliceLayout(1, value_layout))
    vv = gl.arange(0, BLOCK_V, gl.SliceLayout(0, value_layout))
    values = gl.load(
        v + tv[:, None] * v_token + vv[None, :], mask=(tv < length)[:, None] & (vv < V)[None, :], other=0.0
    )
    rate = 1.0 if A_log is None else exp(gl.load(A_log + head).to(gl.float32), True)
    if dt_bias is None:
        bias = 0.0
    else:
        bias = gl.load(dt_bias + head * K + kk, mask=kk < K, other=0.0).to(gl.float32)[None, :]

    if padding:
        zero_tokens(o, u, token, token + length, TP, head, HV, V, value_layout, BLOCK_V)
        return

    rows = gl.arange(0, BV, gl.SliceLayout(1, copy_layout))
    columns = gl.arange(0, BK, gl.SliceLayout(0, copy_layout))
    source = state + slot * state_slot + head * state_head + rows[:, None] * K + columns[None, :]
    first_tile = gl.allocate_shared_memory(POOL, [BV, BK], shared_state)
    copy_tile(first_tile, source, columns, K)
    tiles = (first_tile,)

    none = gl.zeros([2 * TP, TP], gl.float32, acc)
    if INPUT_PIECES == 1:
        key_pieces, query_pieces = (keys.to(PIECE),), (queries.to(PIECE),)
    else:
        key_pieces, query_pieces = cut(keys.to(gl.float32), PIECES), cut(queries.to(gl.float32), PIECES)
    inputs = shared_pieces(INPUT_PIECES, PIECE, 2 * TP, BK)
    store(key_pieces, inputs, 0)
    store(query_pieces, inputs, TP)
    x = load_left(inputs, left)
    squares = gl.where(r[:, None] == c[None, :], product(x, load_transposed(inputs, 0, TP, right), none), 0.0)
    key_scale = inverse_norm(gl.sum(squares, 0))
    query_squares = product(x, load_transposed(inputs, TP, 2 * TP, right), none)
    query_squares = gl.where(r[:, None] == c[None, :] + TP, query_squares, 0.0)
    query_scale = inverse_norm(gl.sum(query_squares, 0)) * SCALE
    row_scale = inverse_norm(gl.sum(squares + query_squares, 1))

    # Tokens past the row's end do not decay, or -G would leave the proven range.
    keys, queries = keys.to(gl.float32), queries.to(gl.float32)
    gate = gl.where((t < length)[:, None], log_decay(raw, rate, bias, LOWER_BOUND, True, EXACT), 0.0)
    shrinking = gl.associative_scan(exp(gate, EXACT), 0, multiply)
    if SHIFT:
        shrinking *= 2.0**SHIFT
    decayed = shared_pieces(2, PIECE, 2 * TP, BK)
    store(cut(keys * shrinking, PIECES), decayed, 0)
    store(cut(queries * shrinking, PIECES), decayed, TP)
    earlier = shared_pieces(2, PIECE, TP, BK)
    store(cut(keys * reciprocal(shrinking, EXACT), PIECES), earlier, 0)
    couplings = product(load_left(decayed, left), load_transposed(earlier, 0, TP, right), none)
    held = ()
    for part in gl.static_range(BK // PART):
        high = decayed[0].slice(part * PART, PART, 1).permute((1, 0)).load(right)
        if EXACT or not HOLD:
            held = held + (high,)
        else:
            held = held + ((high, decayed[1].slice(part * PART, PART, 1).permute((1, 0)).load(right)),)

    # The operands' memory is free now, and lent to the next tiles.
    for tile in gl.static_range(1, BUFFERS):
        buffer = gl.allocate_shared_memory(POOL, [BV, BK], shared_state)
        copy_tile(buffer, source + tile * BV * K, columns, K)
        tiles = tiles + (buffer,)
    shared_values = gl.allocate_shared_memory(values.dtype, [TP, BLOCK_V], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    shared_values.store(values)

    beta = step_size(beta, USE_SIGMOID, NEG_EIGVAL)
    row_beta = step_size(row_beta, USE_SIGMOID, NEG_EIGVAL)
    couplings *= (row_scale * gl.where(r < TP, -row_beta, SCALE))[:, None] * key_scale[None, :]
    row_of, _ = above_and_below(r[:, None] + 0 * c[None, :])
    column_of, _ = above_and_below(0 * r[:, None] + c[None, :])
    N, DN = eliminate(couplings, row_of, column_of, T)
    N, DN = cut(gl.permute(N, (1, 0)), PIECES), cut(gl.permute(DN, (1, 0)), PIECES)
    N, DN = (twice(N[0], right), twice(N[1], right)), (twice(DN[0], right), twice(DN[1], right))
    # What brings the columns of S a^T to P and R.
    key_scale, query_scale = key_scale * 0.5**SHIFT, query_scale * 0.5**SHIFT

    out_rows = gl.arange(0, BV, gl.SliceLayout(1, acc))
    out = (token * HV + head) * V + (c * (HV * V))[None, :] + out_rows[:, None]
    wanted = (c < length)[None, :]
    nothing = gl.zeros([BV, TP], gl.float32, acc)
    for tile in gl.static_range(TILES):
        async_copy.wait_group(min(TILES, tile + BUFFERS) - 1 - tile)
        large = gl.zeros([BV, 2 * TP], gl.float32, acc)
        small = large
        for part in gl.static_range(BK // PART):
            S = cut(tiles[tile % BUFFERS].slice(part * PART, PART, 1).load(left), PIECES, False)
            if HOLD and not EXACT:
                high, low = held[part]
            else:
                high = held[part] if HOLD else decayed[0].slice(part * PART, PART, 1).permute((1, 0)).load(right)
                low = decayed[1].slice(part * PART, PART, 1).permute((1, 0)).load(right)
            if len(S) > 1:
                small = mma_v2(S[1], high, small, "tf32")
            small = mma_v2(S[0], low, small, "tf32")
            large = mma_v2(S[0], high, large, "tf32")
        if tile + BUFFERS < TILES:
            copy_tile(tiles[tile % BUFFERS], source + (tile + BUFFERS) * BV * K, columns, K)
        P, R = gl.split(gl.permute(gl.reshape(large + small, [BV, 2, TP]), (0, 2, 1)))
        P, R = gl.convert_layout(P, acc), gl.convert_layout(R, acc)
        tile_values = shared_values.slice(tile * BV, BV, 1).permute((1, 0)).load(acc).to(gl.float32)
        target = beta[None, :] * (tile_values - P * key_scale[None, :])
        # N is triangular, but 0 * NaN is NaN. What is not finite stays with its token, and is huge for the later ones.
        good = gl.abs(target) < 3.0e38
        excess = gl.where(good, 0.0, target)
        finite = cut(gl.where(good, target, 3.0e38), PIECES)
        finite = side_by_side(finite[0], finite[1], left)
        U = mma_v2(finite, N[0], mma_v2(finite, N[1], nothing, "tf32"), "tf32") + excess
        O = mma_v2(finite, DN[0], mma_v2(finite, DN[1], nothing, "tf32"), "tf32") + excess
        O = R * query_scale[None, :] + O
        gl.store(u + out + tile * BV, U, mask=wanted)
        gl.store(o + out + tile * BV, O.to(o.dtype.element_ty), mask=wanted)
