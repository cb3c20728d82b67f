"""The oracle: the token-by-token recurrence, one row, one token at a time, in the dtype you ask for (float64 by default).

It shares no line with the other implementations, and it keeps every intermediate state, which is exactly what the library
exists to avoid. Tests compare against it; nothing else should call it. Formulas: docs/design.md, section 2.
"""

import torch
from torch import Tensor


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """One window of one request.

    Args:
        q, k: ``[T, H, K]``; v: ``[T, HV, V]``; g: ``[T, HV, K]`` or ``[T, HV]``; beta: ``[T, HV]``.
        initial_state: ``[HV, V, K]``.
        dtype: dtype of every operation and result.

    Returns:
        ``o [T, HV, V]``, ``u [T, HV, V]`` and ``states [T + 1, HV, V, K]``, where ``states[n]`` is the state after n tokens.
    """
    q, k, v, g, beta, S = (x.to(dtype) for x in (q, k, v, g, beta, initial_state))
    value_heads, key_dim = v.shape[1], k.shape[-1]
    groups = value_heads // k.shape[1]
    scale = key_dim**-0.5 if scale is None else scale
    if g.ndim == 2:
        g = g[..., None].expand(-1, -1, key_dim)
        dt_bias = None if dt_bias is None else dt_bias.reshape(value_heads, 1).expand(-1, key_dim)

    o, u, states = torch.zeros_like(v), torch.zeros_like(v), [S]
    for t in range(q.shape[0]):
        S = S.clone()
        for h in range(value_heads):
            q_h, k_h, gate = q[t, h // groups], k[t, h // groups], g[t, h]
            if use_qk_l2norm_in_kernel:
                q_h = q_h / torch.sqrt((q_h * q_h).sum() + 1e-6)
                k_h = k_h / torch.sqrt((k_h * k_h).sum() + 1e-6)
            if use_gate_in_kernel:
                if dt_bias is not None:
                    gate = gate + dt_bias.reshape(value_heads, key_dim)[h].to(dtype)
                rate = 1.0 if A_log is None else torch.exp(A_log[h].to(dtype))
                if lower_bound is not None:
                    gate = lower_bound / (1 + torch.exp(-rate * gate))
                else:
                    gate = -rate * torch.where(gate > 20, gate, torch.log1p(torch.exp(gate.clamp(max=20))))
            b = beta[t, h]
            if use_beta_sigmoid_in_kernel:
                b = 1 / (1 + torch.exp(-b))
            if allow_neg_eigval:
                b = 2 * b
            decayed = S[h] * torch.exp(gate)[None, :]
            u[t, h] = b * (v[t, h] - decayed @ k_h)
            S[h] = decayed + torch.outer(u[t, h], k_h)
            o[t, h] = S[h] @ (scale * q_h)
        states.append(S)
    return o, u, torch.stack(states)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    history: Tensor,
    *,
    activation: str | None = "silu",
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """The short convolution over one window of one request, one token at a time.

    Args:
        x: ``[T, D]``; weight: ``[D, W]``, newest input last; bias: ``[D]`` or None.
        history: ``[D, W-1]``, the inputs before the window, oldest first.
        dtype: everything is converted to it first.

    Returns:
        ``y [T, D]`` and ``histories [T + 1, D, W-1]``, where ``histories[n]`` is the history after n tokens.
    """
    x, weight, history = (a.to(dtype) for a in (x, weight, history))
    y, histories = torch.zeros_like(x), [history]
    for t in range(x.shape[0]):
        inputs = torch.cat([histories[-1], x[t].unsqueeze(1)], 1)
        total = (inputs * weight).sum(1)
        if bias is not None:
            total = total + bias.to(dtype)
        y[t] = total / (1 + torch.exp(-total)) if activation == "silu" else total
        histories.append(inputs[:, 1:])
    return y, torch.stack(histories)
