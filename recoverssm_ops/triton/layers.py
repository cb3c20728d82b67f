"""The commits of every layer in one launch: the programs of ``commit.py`` and ``conv.py``, once a layer.

The pools, records and gate parameters of a layer are found in a table of addresses on the device, one row a kind and one
column a layer. Everything else, strides included, is common to the layers. The arithmetic is the single-layer kernels' own.
"""

import triton
import triton.language as tl

from recoverssm_ops.triton.commit import commit_program
from recoverssm_ops.triton.conv import conv_commit_program


@triton.jit
def address(table, kind: tl.constexpr, layer, LAYERS: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The layer's tensor of one kind.

    An address loaded from memory says nothing of its divisibility, without which the compiler loads element by element: bit
    ``kind`` of ``ALIGNED`` vouches for it.
    """
    pointer = tl.load(table + kind * LAYERS + layer).to(tl.pointer_type(DTYPE))
    if (ALIGNED >> kind) & 1:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit(do_not_specialize=["num_tokens", "pad_slot_id", "programs"])
def commit_layers_kernel(
    table, source, dest, length, cu_seqlens, programs,
    num_tokens, pad_slot_id, source_row, dest_row, dest_column, length_row, length_column,
    u_row, u_token, u_head, k_row, k_token, k_head, g_row, g_token, g_head, state_slot, state_head, state_v,
    LAYERS: tl.constexpr, STATE: tl.constexpr, U: tl.constexpr, KEY: tl.constexpr, GATE: tl.constexpr,
    RATE: tl.constexpr, BIAS: tl.constexpr, ALIGNED: tl.constexpr,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, T: tl.constexpr, M: tl.constexpr,
    TP: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PART: tl.constexpr, PIECES: tl.constexpr, STAGES: tl.constexpr,
    EAGER: tl.constexpr, LOWER_BOUND: tl.constexpr, SCALAR_GATE: tl.constexpr, USE_L2NORM: tl.constexpr,
    USE_GATE: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    layer = pid // programs
    state = address(table, 0, layer, LAYERS, STATE, ALIGNED)
    u = address(table, 1, layer, LAYERS, U, ALIGNED)
    k = address(table, 2, layer, LAYERS, KEY, ALIGNED)
    g = address(table, 3, layer, LAYERS, GATE, ALIGNED)
    A_log = None if RATE is None else address(table, 4, layer, LAYERS, RATE, ALIGNED)
    dt_bias = None if BIAS is None else address(table, 5, layer, LAYERS, BIAS, ALIGNED)
    commit_program(
        pid % programs, state, state, u, k, g, source, dest, length, cu_seqlens, A_log, dt_bias,
        num_tokens, pad_slot_id, source_row, dest_row, dest_column, length_row, length_column,
        u_row, u_token, u_head, k_row, k_token, k_head, g_row, g_token, g_head,
        state_slot, state_head, state_v, state_slot, state_head, state_v,
        H, HV, K, V, T, M, TP, BK, BV, PART, PIECES, STAGES, EAGER, LOWER_BOUND, SCALAR_GATE, USE_L2NORM, USE_GATE, True,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "pad_slot_id", "programs"])
def conv_commit_layers_kernel(
    table, source, dest, length, cu_seqlens, programs,
    num_tokens, pad_slot_id, source_row, dest_row, dest_column, length_row, length_column,
    x_row, x_token, x_channel, state_slot, state_channel, state_column,
    LAYERS: tl.constexpr, STATE: tl.constexpr, INPUT: tl.constexpr, ALIGNED: tl.constexpr,
    D: tl.constexpr, W: tl.constexpr, T: tl.constexpr, M: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    layer = pid // programs
    state = address(table, 0, layer, LAYERS, STATE, ALIGNED)
    x = address(table, 1, layer, LAYERS, INPUT, ALIGNED)
    conv_commit_program(
        pid % programs, state, x, source, dest, length, cu_seqlens,
        num_tokens, pad_slot_id, source_row, dest_row, dest_column, length_row, length_column,
        x_row, x_token, x_channel, state_slot, state_channel, state_column,
        D, W, T, M, BD,
    )  # fmt: skip
