"""One kernel that commits the previous window and verifies the next: the state is read once and written once a step.

A trial, not part of the library: :mod:`benchmarks.fused` measures whether it is worth what it would ask of an engine. It is
composed of the functions of the commit and verify kernels, so its arithmetic is theirs. Verify sees the state as the
pool's dtype rounds it, which is what it would read after a commit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.inputs import Inputs
from recoverssm_ops.triton import configs, launch
from recoverssm_ops.triton.commit import advanced, decayed_keys, load_corrections, load_keys_and_gates, load_state
from recoverssm_ops.triton.gates import gate_parameters
from recoverssm_ops.triton.products import cut
from recoverssm_ops.triton.verify import corrections_and_outputs, window_operands, zero_tokens

Config = dict[str, int]


@triton.jit(do_not_specialize=["pad_slot_id"])
def fused_kernel(
    q, k, v, g, beta, previous_u, previous_k, previous_g, accepted, state, slots, A_log, dt_bias, o, u, pad_slot_id,
    GROUPS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, T: tl.constexpr,
    TP: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PART: tl.constexpr, BLOCK_V: tl.constexpr,
    SCALE: tl.constexpr, LOWER_BOUND: tl.constexpr, FACTORED: tl.constexpr, SHIFT: tl.constexpr,
    PIECES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (head, row, part) for ``PART`` values of a head; every tensor is contiguous. Each part of a head solves the
    window's equations by itself. Rows with nothing accepted are not written.
    """
    head, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    HV = tl.num_programs(0).to(tl.int64)
    H, key_head = HV // GROUPS, head // GROUPS
    token = row * T
    t = tl.arange(0, TP).to(tl.int64)
    kk = tl.arange(0, BK)
    q += (token * H + key_head) * K
    k += (token * H + key_head) * K
    g += (token * HV + head) * K
    v += (token * HV + head) * V
    beta += token * HV + head
    previous_k += (token * H + key_head) * K
    previous_g += (token * HV + head) * K
    previous_u += (token * HV + head) * V

    n = tl.load(accepted + row).to(tl.int64)
    n = tl.maximum(tl.minimum(n, T), 0)
    inside = t < T
    mask = inside[:, None] & (kk < K)[None, :]
    keys = tl.load(k + (t * (H * K))[:, None] + kk[None, :], mask=mask, other=0.0)
    queries = tl.load(q + (t * (H * K))[:, None] + kk[None, :], mask=mask, other=0.0)
    raw = None
    if FACTORED:
        raw = tl.load(g + (t * (HV * K))[:, None] + kk[None, :], mask=mask, other=0.0)
    raw_beta = tl.load(beta + t * HV, mask=inside, other=0.0)
    slot = tl.load(slots + row).to(tl.int64)
    if slot <= pad_slot_id:
        zero_tokens(o, u, token, token + T, TP, head, HV, V, TP, BLOCK_V)
        return

    rate, bias = gate_parameters(A_log, dt_bias, head, kk, K, False)
    accepted_keys, previous_raw, first = load_keys_and_gates(
        previous_k, previous_g, n, H * K, HV * K, t, kk, kk, K, False
    )
    accepted_keys, whole = decayed_keys(
        accepted_keys, previous_raw, first, n, rate, bias, t, LOWER_BOUND, False, True, True, PIECES == 0
    )
    accepted_keys = cut(accepted_keys, PIECES)
    a_keys, a_queries, key_scale, query_scale, b, N, DN = window_operands(
        keys, queries, raw, raw_beta, k, g, H * K, HV * K, T, A_log, dt_bias, head, t, kk,
        K, T, SCALE, LOWER_BOUND, False, FACTORED, True, True, True, False, SHIFT, PIECES,
    )  # fmt: skip

    state += (slot * HV + head) * (V * K)
    out = (token * HV + head) * V
    begin = tl.program_id(2) * PART if PART < V else 0
    for v0 in tl.range(begin, min(begin + PART, V), BV, num_stages=STAGES):
        vv = v0 + tl.arange(0, BV)
        corrections = cut(tl.trans(load_corrections(previous_u, n, HV * V, t, vv, V)), PIECES)
        S = load_state(state, vv, kk, K, V, K, BV, BK).to(tl.float32)
        S = advanced(S, whole, corrections, accepted_keys, False, PIECES).to(state.dtype.element_ty)
        tile = (state + vv.to(tl.int64) * K)[:, None] + kk[None, :]
        tl.store(tile, S, mask=(n > 0) & (vv < V)[:, None] & (kk < K)[None, :])
        wanted = inside[:, None] & (vv < V)[None, :]
        tokens = (t * (HV * V))[:, None] + vv[None, :]
        values = tl.trans(tl.load(v + tokens, mask=wanted, other=0.0)).to(tl.float32)
        U, O = corrections_and_outputs(S, values, b, a_keys, a_queries, key_scale, query_scale, N, DN, TP, BV, PIECES)
        tl.store(u + out + tokens, tl.trans(U), mask=wanted)
        tl.store(o + out + tokens, tl.trans(O.to(o.dtype.element_ty)), mask=wanted)


def fused_verify(
    window: Inputs, i: int, u: Tensor, k: Tensor, g: Tensor, accepted: Tensor, config: Config, pad_slot_id: int = 0
) -> tuple[Tensor, Tensor]:
    """Commit ``accepted`` tokens of the record ``u``, ``k``, ``g`` to the pool of set ``i``, then verify its window.

    Args:
        window: the next window, and the pools; its gate is the record's, too.
        u, k, g: the previous window's, shaped as the next one's.
        accepted: ``[B]`` int32 or int64, clamped to [0, T].
        config: ``BV``, ``PART`` (a multiple of it), ``STAGES`` and ``num_warps``.

    Returns:
        ``o`` (dtype of v) and ``u`` (float32) of the next window, ``[B, T, HV, V]``.

    Raises:
        ValueError: a tensor is not contiguous, which the kernel takes for granted.
    """
    q, next_k, v, next_g, beta, state = (
        x[i] for x in (window.q, window.k, window.v, window.g, window.beta, window.states)
    )
    named = {"q": q, "k": next_k, "v": v, "g": next_g, "beta": beta, "state": state, "slots": window.slots,
             "previous u": u, "previous k": k, "previous g": g, "accepted": accepted}  # fmt: skip
    for name, x in named.items():
        if not x.is_contiguous():
            raise ValueError(f"{name} should be contiguous, but has shape {list(x.shape)} and strides {x.stride()}")
    (batch, T, H, K), (HV, V) = q.shape, v.shape[2:]
    bound = window.shape.lower_bound or 0.0
    factored = bound < 0 and -bound * T <= launch.MAX_FACTORED_EXPONENT
    o, next_u = torch.empty_like(v), torch.empty_like(v, dtype=torch.float32)
    tile = launch.verify_config(batch * HV, T, K, V, state.dtype)
    fused_kernel[(HV, batch, triton.cdiv(V, config["PART"]))](
        q, next_k, v, next_g, beta, u, k, g, accepted, state, window.slots, window.A_log, window.dt_bias, o, next_u,
        pad_slot_id, HV // H, K, V, T, tile["TP"], tile["BK"],
        BLOCK_V=triton.next_power_of_2(V), SCALE=window.scale, LOWER_BOUND=bound, FACTORED=factored,
        SHIFT=configs.shift(bound, T) if factored else 0, PIECES=tile["PIECES"], **config,
    )  # fmt: skip
    return o, next_u
