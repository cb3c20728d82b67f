"""Windows of layers without a delta rule (gated linear attention, Mamba-2): the outputs in plain ATen.

Nothing is subtracted, so the record's ``u`` is an input and only the outputs are left to compute:

    o_t = q_t (S0 exp G_t) + sum_{i <= t} <q_t, k_i exp(G_t - G_i)> u_i

One read of the checkpoint and products of T rows; no state is made. There is no kernel for this; Inductor compiles it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recoverssm_ops.gates import log_decay, unit_rows


def outputs_without_delta(
    q: Tensor,
    k: Tensor,
    u: Tensor,
    g: Tensor,
    state: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float,
    scale: float,
    use_qk_l2norm: bool,
    use_gate: bool,
) -> Tensor:
    """Outputs ``[B, T, HV, V]`` in float32.

    Args:
        q, k: ``[B, T, HV, K]``; u: ``[B, T, HV, V]``; g: ``[B, T, HV, K]`` or ``[B, T, HV]``.
        state: ``[B, HV, V, K]``, the checkpoints. The gate, the scale and the norm as in ``kda_verify``.
    """
    if g.ndim == 3:
        g, dt_bias = g.unsqueeze(-1), None if dt_bias is None else dt_bias.unsqueeze(-1)
    q, k = unit_rows(q, use_qk_l2norm) * scale, unit_rows(k, use_qk_l2norm)
    g = log_decay(g, A_log, dt_bias, lower_bound, use_gate)
    carried = torch.einsum("bthk,bhvk->bthv", q * g.cumsum(1).exp(), state.float())
    decay, keys, outputs = g.exp(), k[:, :1], []
    for t in range(q.shape[1]):
        if t:
            # Decays are carried, as in recoverssm_ops.portable: the difference of two running sums cancels.
            keys = torch.cat([keys * decay[:, t : t + 1], k[:, t : t + 1]], 1)
        weights = torch.einsum("bhk,bihk->bhi", q[:, t], keys)
        outputs.append(carried[:, t] + torch.einsum("bhi,bihv->bhv", weights, u[:, : t + 1]))
    return torch.stack(outputs, 1)
