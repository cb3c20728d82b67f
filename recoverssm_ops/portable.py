"""The window-parallel form in plain ATen: the algorithm as a reader should see it.

It is the CPU kernel, and the decomposition for runtimes that know no custom op. One read of the checkpoint serves the whole
window: with ``G_t`` the running sum of the log decays,

    P = S0 (k_t exp G_t)        R = S0 (q_t exp G_t)
    c_ti = <k_t, k_i exp(G_t - G_i)>,  i < t        d_ti = <q_t, k_i exp(G_t - G_i)>,  i <= t
    (I + diag(beta) c) U = diag(beta) (V - P)        O = R + d U

and the state after n tokens is ``S0 exp(G_n) + sum_{i<=n} u_i (k_i exp(G_n - G_i))^T`` (docs/design.md, section 2).
``exp(G_t - G_i)`` is a product or a sum over the tokens between i and t: the factored form ``exp(G_t) exp(-G_i)`` overflows
under strong decay, and the difference of running sums cancels.
"""

import torch
from torch import Tensor

from recoverssm_ops.gates import log_decay, step_size, unit_rows
from recoverssm_ops.windows import in_row, pack, row_lengths, unpack


def verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    state_indices: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float,
    scale: float,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    pad_slot_id: int,
) -> tuple[Tensor, Tensor]:
    """Outputs ``o`` (dtype of v) and corrections ``u`` (float32); arguments as in the schema of ``ops.py``."""
    num_tokens, dtype = v.shape[1], v.dtype
    heads, value_heads = k.shape[2], v.shape[2]
    if g.ndim == 3:
        g, dt_bias = g.unsqueeze(-1), None if dt_bias is None else dt_bias.unsqueeze(-1)
    if cu_seqlens is None:
        batch, valid = q.shape[0], None
    else:
        batch = cu_seqlens.shape[0] - 1
        q, k, v, g, beta = (unpack(x, cu_seqlens, max_seqlen) for x in (q, k, v, g, beta))
        valid = in_row(cu_seqlens, max_seqlen)

    def per_value_head(x: Tensor) -> Tensor:
        return x.repeat_interleave(value_heads // heads, dim=2) if value_heads != heads else x

    q = per_value_head(unit_rows(q, use_qk_l2norm_in_kernel)) * scale
    k = per_value_head(unit_rows(k, use_qk_l2norm_in_kernel))
    beta = step_size(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    g = log_decay(g, A_log, dt_bias, lower_bound, use_gate_in_kernel)

    s0, active = _checkpoints(state, state_indices, batch, pad_slot_id)
    from_start = g.cumsum(1).exp()
    P = torch.einsum("bthk,bhvk->bthv", k * from_start, s0)
    R = torch.einsum("bthk,bhvk->bthv", q * from_start, s0)
    o, u = _solve(q, k, g.exp(), beta.unsqueeze(-1), v.float() - P, R)

    if active is not None:
        valid = active[:, None] if valid is None else valid & active[:, None]
    if valid is not None:
        o, u = (torch.where(valid[..., None, None], x, 0) for x in (o, u))
    if cu_seqlens is not None:
        o, u = (pack(x, cu_seqlens, num_tokens) for x in (o, u))
    return o.to(dtype).contiguous(), u.contiguous()


def recover(
    initial_state: Tensor,
    u: Tensor,
    k: Tensor,
    g: Tensor,
    num_accepted: Tensor,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool,
) -> Tensor:
    """The state after ``num_accepted`` tokens, ``[B, HV, V, K]`` float32. Later tokens, NaN or not, change no bit of it."""
    if g.ndim == 3:
        g, dt_bias = g.unsqueeze(-1), None if dt_bias is None else dt_bias.unsqueeze(-1)
    window = u.shape[1]
    n = num_accepted.long()
    if cu_seqlens is not None:
        window = max_seqlen
        u, k, g = (unpack(x, cu_seqlens, max_seqlen) for x in (u, k, g))
        n = torch.minimum(n, row_lengths(cu_seqlens, max_seqlen))
    n = n.clamp(0, window)
    kept = (torch.arange(window, device=u.device) < n[:, None])[..., None, None]

    k = unit_rows(k, use_qk_l2norm_in_kernel).repeat_interleave(u.shape[2] // k.shape[2], dim=2)
    log_decays = log_decay(g, A_log, dt_bias, lower_bound, use_gate_in_kernel)
    log_decays = torch.where(kept, log_decays, 0)
    # G_n - G_i as the sum of the decays after i: the difference of two running sums cancels.
    after = torch.nn.functional.pad(log_decays[:, 1:], (0, 0, 0, 0, 0, 1)).flip(1).cumsum(1).flip(1)
    since = torch.where(kept, after.exp(), 0)
    gained = torch.einsum("bthv,bthk->bhvk", torch.where(kept, u, 0), torch.where(kept, k, 0) * since)
    s0 = initial_state.float()
    # An untouched row is returned as it was: S * exp(0) + 0 would turn -0.0 into 0.0.
    return torch.where(n.view(-1, 1, 1, 1) > 0, s0 * log_decays.sum(1).exp().unsqueeze(-2) + gained, s0)


def commit(
    state: Tensor,
    u: Tensor,
    k: Tensor,
    g: Tensor,
    source: Tensor,
    dest: Tensor,
    length: Tensor,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool,
    pad_slot_id: int,
) -> None:
    """Write, per row and plan column, the state after ``length`` tokens to slot ``dest``; ``state`` is mutated."""
    if dest.numel() == 0 or state.numel() == 0:
        return
    s0, _ = _checkpoints(state, source, source.shape[0], pad_slot_id)
    for column in range(dest.shape[1]):
        record = (u, k, g, length[:, column], cu_seqlens, max_seqlen, A_log, dt_bias)
        new = recover(s0, *record, lower_bound, use_qk_l2norm_in_kernel, use_gate_in_kernel)
        slot = dest[:, column].long()
        # Without data-dependent shapes a skipped row must still write something: it repeats what a written row writes,
        # and where no row is written, slot 0 receives what it holds.
        written = (slot > pad_slot_id) & (source > pad_slot_id)
        any_written = written.any()
        row = torch.where(written, torch.arange(slot.shape[0], device=slot.device), written.long().argmax())
        slot = torch.where(any_written, slot[row], 0)
        value = torch.where(any_written, new.to(state.dtype)[row], state[slot])
        state.index_put_((slot,), value)


def _checkpoints(
    state: Tensor, state_indices: Tensor | None, batch: int, pad_slot_id: int
) -> tuple[Tensor, Tensor | None]:
    """Checkpoints ``[B, HV, V, K]`` in float32 and which rows are real (None: all of them)."""
    if state_indices is None:
        return state[:batch].float(), None
    active = state_indices > pad_slot_id
    rows = state[torch.where(active, state_indices, 0).long()].float()
    return torch.where(active.view(-1, 1, 1, 1), rows, 0), active


def _solve(q: Tensor, k: Tensor, decay: Tensor, beta: Tensor, target: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
    """Forward substitution for U, and O = R + d U; everything ``[B, T, HV, ..]``.

    The inverse as a power series is shorter, and loses every digit for repeated keys. Row t of c and d needs the earlier
    keys decayed from their own position to t. Multiplying them by one decay a step keeps every factor as exact as in the
    recurrence; ``G_t - G_i`` cancels once some token has decayed strongly (ulp(200) is 1.5e-5), and is NaN beyond -inf.
    Nothing of a later token enters row t, so that not even its NaN does.
    """
    own = (q * k).sum(-1, keepdim=True)  # the diagonal of d
    keys, corrections = k[:, :1], beta[:, :1] * target[:, :1]
    outputs = [R[:, 0] + own[:, 0] * corrections[:, 0]]
    for t in range(1, k.shape[1]):
        keys = keys * decay[:, t : t + 1]
        readers = torch.stack([k[:, t], q[:, t]], 2)  # they give rows t of c and of d
        earlier = torch.einsum("bhxk,bihk->bhxi", readers, keys) @ corrections.transpose(1, 2)
        u_t = beta[:, t] * (target[:, t] - earlier[:, :, 0])
        outputs.append(R[:, t] + earlier[:, :, 1] + own[:, t] * u_t)
        keys = torch.cat([keys, k[:, t : t + 1]], 1)
        corrections = torch.cat([corrections, u_t.unsqueeze(1)], 1)
    return torch.stack(outputs, 1), corrections
