"""The public functions: check the inputs, name the defaults, call the operator."""

import torch
from torch import Tensor

from recoverssm_ops import ops
from recoverssm_ops import validation as check
from recoverssm_ops.commit_plan import CommitPlan, resolve_plan
from recoverssm_ops.records import Record


def kda_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    state_indices: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    pad_slot_id: int = -1,
) -> tuple[Tensor, Record]:
    """Run a window of drafted tokens from the checkpoints in ``state`` and keep a compact record. Writes no state.

    The delta rule with per-channel decay (Kimi Delta Attention, arXiv:2510.26692), or with one decay per head (gated delta
    rule, arXiv:2412.06464), in its window-parallel form; docs/design.md, section 2, has every formula.

    Args:
        q, k: ``[B, T, H, K]``, fp32, bf16 or fp16. Packed: ``[1, N, H, K]`` with ``cu_seqlens``. T is at most 16.
        v: ``[B, T, HV, V]``; HV is a multiple of H.
        g: ``[B, T, HV, K]`` (KDA) or ``[B, T, HV]`` (scalar gate): log decay, or the raw gate with ``use_gate_in_kernel``.
        beta: ``[B, T, HV]``: step size, or its logit with ``use_beta_sigmoid_in_kernel``.
        state: pool ``[slots, HV, V, K]``, fp32, bf16 or fp16, any slot and head stride, K contiguous. Not modified.
        state_indices: ``[B]`` int32 or int64 slots on the device; at most ``pad_slot_id`` marks a padding row, whose outputs
            are zeros. None: row b uses slot b.
        cu_seqlens: ``[B + 1]`` row boundaries of packed input; rows of any length 0..max_seqlen.
        max_seqlen: T of packed input.
        A_log: ``[HV]``, or None (rate 1) for the bounded gate.
        dt_bias: ``[HV, K]``, ``[HV*K]`` or (scalar gate) ``[HV]``, or None.
        lower_bound: negative: ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))``; None: ``-exp(A_log) * softplus(..)``.
        scale: factor of q; None: ``K ** -0.5``.
        use_qk_l2norm_in_kernel: normalise q and k by ``rsqrt(sum x^2 + 1e-6)``.
        allow_neg_eigval: doubles the step size; needs ``use_beta_sigmoid_in_kernel``.

    Returns:
        ``o`` like v, and the :class:`Record` (its ``u`` is float32 like v). Outputs of tokens in no row are zeros.

    Raises:
        ValueError, TypeError: a shape, dtype, device, stride or combination that cannot work, named.
        RuntimeError: an input requires grad.
    """
    check.expect_tensor("state", state, check.FLOATS)
    for name, x in {"q": q, "k": k, "v": v, "g": g, "beta": beta}.items():
        check.expect_tensor(name, x, check.FLOATS, state.device)
    if q.ndim != 4:
        raise ValueError(f"q should have shape [B, T, H, K], but was {list(q.shape)}")
    batch, window = check.check_window(q, cu_seqlens, max_seqlen, "q")
    rows, tokens, heads, key_dim = q.shape
    check.expect_shape("k", k, (rows, tokens, heads, key_dim), "[B, T, H, K] like q")
    check.expect_shape("v", v, (rows, tokens, None, None), "[B, T, HV, V]")
    value_heads, value_dim = v.shape[2:]
    if heads < 1 or value_heads % heads:
        raise ValueError(f"v should have a multiple of q's {heads} heads, but had {value_heads}")
    if g.ndim == 3:
        check.expect_shape("g", g, (rows, tokens, value_heads), "[B, T, HV]")
    else:
        check.expect_shape("g", g, (rows, tokens, value_heads, key_dim), "[B, T, HV, K] or [B, T, HV]")
    check.expect_shape("beta", beta, (rows, tokens, value_heads), "[B, T, HV]")
    check.check_state("state", state, (None, value_heads, value_dim, key_dim), "[slots, HV, V, K]")
    check.check_slots("state_indices", state_indices, batch, "state", state, pad_slot_id, written=False)
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError(
            "allow_neg_eigval should be False when use_beta_sigmoid_in_kernel is False (beta is then the step size itself), "
            "but was True"
        )
    check.expect_number_or_none("scale", scale)
    dt_bias = check.check_gate(g, A_log, dt_bias, lower_bound, use_gate_in_kernel, value_heads, key_dim)
    if cu_seqlens is not None and check.debugging():
        check.debug_packing(cu_seqlens, window, tokens)

    gate = (A_log, dt_bias, 0.0 if lower_bound is None else float(lower_bound))
    o, u = ops.kda_verify(
        q,
        k,
        v,
        g,
        beta,
        state,
        state_indices,
        cu_seqlens,
        window,
        *gate,
        key_dim**-0.5 if scale is None else float(scale),
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        pad_slot_id,
    )
    record = Record(
        u, k, g, A_log, dt_bias, cu_seqlens, window, lower_bound, use_qk_l2norm_in_kernel, use_gate_in_kernel
    )
    return o, record


def kda_commit(
    state: Tensor,
    record: Record,
    num_accepted: Tensor | None,
    state_indices: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    plan: CommitPlan | None = None,
    pad_slot_id: int = -1,
) -> None:
    """Advance the checkpoints to the accepted position, in place. Consumes the record.

    Args:
        state: the pool ``[slots, HV, V, K]`` that verify read; only the listed slots are written.
        record: from :func:`kda_verify`. Committing it a second time is an error: the state would advance twice.
        num_accepted: ``[B]`` int32 or int64, committed window tokens per row, clamped to the row's length. 0 leaves the
            checkpoint bit-identical. None with ``plan``.
        state_indices: ``[B]`` slots, as given to verify. None: row b uses slot b.
        cu_seqlens: None, or the same tensor that verify received.
        plan: a :class:`CommitPlan` in place of ``num_accepted`` and ``state_indices``.
        pad_slot_id: slots at or below it are padding and skipped.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`kda_verify`; RuntimeError for a record already committed.
    """
    batch = check_commit(state, record, cu_seqlens)
    plan = resolve_plan(plan, num_accepted, state_indices, "state_indices", batch, "state", state, pad_slot_id)
    ops.kda_commit(
        state,
        record.u,
        record.k,
        record.g,
        plan.source,
        plan.dest,
        plan.length,
        *_layout_and_gate(record),
        pad_slot_id,
    )
    record.committed = True


def check_commit(state: Tensor, record: Record, cu_seqlens: Tensor | None = None) -> int:
    """Check that the record may be committed to the pool; returns its number of rows."""
    batch = _check_record(record, cu_seqlens)
    value_heads, value_dim = record.u.shape[2:]
    check.check_state("state", state, (None, value_heads, value_dim, record.k.shape[-1]), "[slots, HV, V, K]")
    check.expect_tensor("record.u", record.u, (torch.float32,), state.device)
    if record.committed:
        raise RuntimeError(
            "record was committed already, and a second commit would advance the state twice: run kda_verify again"
        )
    return batch


def kda_recover(
    initial_state: Tensor, record: Record, num_accepted: Tensor, *, cu_seqlens: Tensor | None = None
) -> Tensor:
    """The state after ``num_accepted`` window tokens, without writing anything: the functional sibling of commit.

    ``S_n = S_0 exp(G_n) + sum_{i<=n} u_i (k_i exp(G_n - G_i))^T`` (docs/design.md, section 2).

    Args:
        initial_state: ``[B, HV, V, K]`` checkpoints, fp32, bf16 or fp16.
        record: from :func:`kda_verify`; it is not consumed.
        num_accepted: ``[B]`` int32 or int64, clamped to the row's length.
        cu_seqlens: None, or the same tensor that verify received.

    Returns:
        ``[B, HV, V, K]`` float32.
    """
    batch = _check_record(record, cu_seqlens)
    shape = (batch, *record.u.shape[2:], record.k.shape[-1])
    check.check_state("initial_state", initial_state, shape, "[B, HV, V, K]")
    check.expect_tensor("record.u", record.u, (torch.float32,), initial_state.device)
    check.check_rows("num_accepted", num_accepted, batch, initial_state.device)
    return ops.kda_recover(initial_state, record.u, record.k, record.g, num_accepted, *_layout_and_gate(record))


def _layout_and_gate(record: Record) -> tuple:
    bound = 0.0 if record.lower_bound is None else float(record.lower_bound)
    gate = (record.A_log, record.dt_bias, bound)
    return (
        record.cu_seqlens,
        record.max_seqlen,
        *gate,
        record.use_qk_l2norm_in_kernel,
        record.use_gate_in_kernel,
    )


def _check_record(record: Record, cu_seqlens: Tensor | None) -> int:
    """Number of rows of the record."""
    if not isinstance(record, Record):
        raise TypeError(f"record should be a Record made by kda_verify, but was {type(record).__name__}")
    if cu_seqlens is not None and cu_seqlens is not record.cu_seqlens:
        raise ValueError("cu_seqlens should be the tensor that kda_verify received, but was another one")
    return record.u.shape[0] if record.cu_seqlens is None else record.cu_seqlens.shape[0] - 1
