"""The short convolution's kernels: one program per row and tile of channels.

Both are all latency: every load is issued before anything waits for one. Verify holds the history and the whole window in
registers, and adds up each output in the same order whatever T is.
"""

import triton
import triton.language as tl

from recoverssm_ops.triton.gates import row_span, sigmoid


@triton.jit
def zero_tokens(y, first, stop, step, dd, D: tl.constexpr):
    """Store zeros for tokens ``first``, ``first + step``, ... before ``stop``; y is dense."""
    zeros = tl.zeros(dd.shape, dtype=tl.float32).to(y.dtype.element_ty)
    while first < stop:
        tl.store(y + first * D + dd, zeros, mask=dd < D)
        first += step


@triton.jit(do_not_specialize=["num_tokens", "batch", "pad_slot_id"])
def conv_verify_kernel(
    x, weight, bias, state, slots, cu_seqlens, y,
    num_tokens, batch, pad_slot_id, slots_row, x_row, x_token, x_channel, weight_channel, weight_tap, bias_channel,
    state_slot, state_channel, state_column,
    D: tl.constexpr, W: tl.constexpr, T: tl.constexpr, BD: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (D + BD - 1) // BD
    pid = tl.program_id(0).to(tl.int64)
    row = pid // TILES
    dd = pid % TILES * BD + tl.arange(0, BD)
    inside = dd < D
    where, start, length = row_span(cu_seqlens, row, num_tokens, T)
    token = where * T + start

    if cu_seqlens is not None:
        # Tokens of no row: before the first, after the last (shared out among the rows), past a window of T.
        end = tl.load(cu_seqlens + batch).to(tl.int64)
        zero_tokens(y, tl.maximum(end, 0) + row, num_tokens, batch, dd, D)
        next_start = tl.minimum(tl.load(cu_seqlens + row + 1).to(tl.int64), num_tokens)
        zero_tokens(y, start + length, next_start, 1, dd, D)
        if row == 0:
            zero_tokens(y, row, tl.minimum(start, num_tokens), 1, dd, D)

    if slots is None:
        slot = row
    else:
        slot = tl.load(slots + row * slots_row).to(tl.int64)
        if slot <= pad_slot_id:
            zero_tokens(y, token, token + length, 1, dd, D)
            return

    state += slot * state_slot + dd * state_channel
    x += where * x_row + start * x_token + dd * x_channel
    inputs = ()
    for column in tl.static_range(W - 1):
        inputs = inputs + (tl.load(state + column * state_column, mask=inside, other=0.0),)
    for t in tl.static_range(T):
        inputs = inputs + (tl.load(x + t * x_token, mask=inside & (t < length), other=0.0),)
    taps = ()
    for tap in tl.static_range(W):
        taps = taps + (tl.load(weight + dd * weight_channel + tap * weight_tap, mask=inside, other=0.0),)
    first = tl.zeros((BD,), dtype=tl.float32)
    if bias is not None:
        first += tl.load(bias + dd * bias_channel, mask=inside, other=0.0).to(tl.float32)

    y += token * D + dd
    for t in tl.static_range(T):
        total = first
        for tap in tl.static_range(W):
            total += inputs[t + tap].to(tl.float32) * taps[tap].to(tl.float32)
        if SILU:
            total = total * sigmoid(total, True)
        tl.store(y + t * D, total.to(y.dtype.element_ty), mask=inside & (t < length))


@triton.jit
def conv_commit_program(
    pid, state, x, source, dest, length, cu_seqlens,
    num_tokens, pad_slot_id, source_row, dest_row, dest_column, length_row, length_column,
    x_row, x_token, x_channel, state_slot, state_channel, state_column,
    D: tl.constexpr, W: tl.constexpr, T: tl.constexpr, M: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """What program ``pid`` of one layer does."""
    TILES: tl.constexpr = (D + BD - 1) // BD
    row = pid // TILES
    dd = pid % TILES * BD + tl.arange(0, BD)
    inside = dd < D
    slot = tl.load(source + row * source_row).to(tl.int64)
    if slot <= pad_slot_id:
        return
    where, start, tokens = row_span(cu_seqlens, row, num_tokens, T)

    state += dd * state_channel
    x += where * x_row + start * x_token + dd * x_channel
    history = ()
    for column in tl.static_range(W - 1):
        history = history + (tl.load(state + slot * state_slot + column * state_column, mask=inside, other=0.0),)
    # The source may be a destination, and a store need not be laid out over the threads as the loads were.
    tl.debug_barrier()

    for m in range(M):
        to = tl.load(dest + row * dest_row + m * dest_column).to(tl.int64)
        n = tl.load(length + row * length_row + m * length_column).to(tl.int64)
        n = tl.maximum(tl.minimum(n, tokens), 0)
        # No token in place: the slot keeps its bits.
        if (to > pad_slot_id) & ((to != slot) | (n > 0)):
            new = ()
            for column in tl.static_range(W - 1):
                # Column n + ``column`` of cat(history, x).
                t = n + (column - (W - 1))
                value = tl.load(x + t * x_token, mask=inside & (t >= 0), other=0.0).to(tl.float32)
                value = value.to(state.dtype.element_ty)
                for i in tl.static_range(column, W - 1):
                    value = tl.where(n + column == i, history[i], value)
                new = new + (value,)
            for column in tl.static_range(W - 1):
                tl.store(state + to * state_slot + column * state_column, new[column], mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "pad_slot_id"])
def conv_commit_kernel(
    state, x, source, dest, length, cu_seqlens,
    num_tokens, pad_slot_id, source_row, dest_row, dest_column, length_row, length_column,
    x_row, x_token, x_channel, state_slot, state_channel, state_column,
    D: tl.constexpr, W: tl.constexpr, T: tl.constexpr, M: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    conv_commit_program(
        tl.program_id(0).to(tl.int64), state, x, source, dest, length, cu_seqlens,
        num_tokens, pad_slot_id, source_row, dest_row, dest_column, length_row, length_column,
        x_row, x_token, x_channel, state_slot, state_channel, state_column,
        D, W, T, M, BD,
    )  # fmt: skip
