"""Building blocks shared by the KDA and the full-attention layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in float32 and returned in the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return (normed * self.weight.float()).to(x.dtype)


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def l2_normalize(x: Tensor) -> Tensor:
    """``x / |x|`` over the last axis, with the field's epsilon under the root."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def log_decay(f: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """Log decay of every token, head and key channel, in float32.

    ``f [B, T, H, K]`` raw gate, ``A_log [H]``, ``dt_bias [H*K]``. Bounded: ``lower_bound * sigmoid(exp(A_log) * (f +
    dt_bias))``; unbounded (``lower_bound`` None): ``-exp(A_log) * softplus(f + dt_bias)``.
    """
    A = A_log.float().exp().unsqueeze(-1)
    f = f.float() + dt_bias.float().view(f.shape[-2], f.shape[-1])
    if lower_bound is None:
        return -A * F.softplus(f)
    return lower_bound * torch.sigmoid(A * f)
