"""The delta-rule recurrence over a window of tokens, as a plain loop."""

from __future__ import annotations

import torch
from torch import Tensor


def delta_rule_window(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """Run T tokens from the checkpoint and keep the state after every one of them.

    All in float32: ``q, k, g [B, T, H, K]`` (q scaled, q and k normalised, g the log decay), ``v [B, T, H, V]``, ``beta
    [B, T, H]``, checkpoint ``S [B, H, V, K]``. Returns outputs ``[B, T, H, V]`` and states ``[B, T, H, V, K]``.

    Formula: Kimi Linear (arXiv:2510.26692), ``S <- S exp(g)``, ``u = beta (v - S k)``, ``S <- S + u k^T``, ``o = S q``.
    """
    outs, states = [], []
    for t in range(q.shape[1]):
        S = S * g[:, t].exp().unsqueeze(-2)
        u = beta[:, t].unsqueeze(-1) * (v[:, t] - (S * k[:, t].unsqueeze(-2)).sum(-1))
        S = S + u.unsqueeze(-1) * k[:, t].unsqueeze(-2)
        outs.append((S * q[:, t].unsqueeze(-2)).sum(-1))
        states.append(S)
    return torch.stack(outs, 1), torch.stack(states, 1)
