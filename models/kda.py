"""Kimi Delta Attention layer (arXiv:2510.26692), in plain PyTorch."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from models.chunked import delta_rule_chunked
from models.config import KDAConfig
from models.layers import RMSNorm, l2_normalize, log_decay
from models.recurrence import delta_rule_window
from models.short_conv import causal_conv1d_sequence, causal_conv1d_window


class KimiDeltaAttention(nn.Module):
    """Short convolution on q, k and v; low-rank decay gate; delta rule; gated RMSNorm."""

    def __init__(self, config: KDAConfig) -> None:
        super().__init__()
        self.config = config
        hidden, rank = config.hidden_size, config.gate_rank
        self.q_proj = nn.Linear(hidden, config.key_dim, bias=False)
        self.k_proj = nn.Linear(hidden, config.key_dim, bias=False)
        self.v_proj = nn.Linear(hidden, config.value_dim, bias=False)
        self.q_conv1d = nn.Parameter(torch.empty(config.key_dim, config.conv_size))
        self.k_conv1d = nn.Parameter(torch.empty(config.key_dim, config.conv_size))
        self.v_conv1d = nn.Parameter(torch.empty(config.value_dim, config.conv_size))
        self.f_a_proj = nn.Linear(hidden, rank, bias=False)
        self.f_b_proj = nn.Linear(rank, config.key_dim, bias=False)
        self.b_proj = nn.Linear(hidden, config.num_heads, bias=False)
        self.g_a_proj = nn.Linear(hidden, rank, bias=False)
        self.g_b_proj = nn.Linear(rank, config.value_dim, bias=False)
        self.A_log = nn.Parameter(torch.empty(config.num_heads))
        self.dt_bias = nn.Parameter(torch.empty(config.key_dim))
        self.o_norm = RMSNorm(config.head_v_dim, config.norm_eps)
        self.o_proj = nn.Linear(config.value_dim, hidden, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for weight in (self.q_conv1d, self.k_conv1d, self.v_conv1d):
            bound = self.config.conv_size**-0.5
            weight.uniform_(-bound, bound)
        # Decay rates start log-uniform between one e-fold in a thousand tokens and one in a single token.
        A = torch.empty_like(self.A_log).uniform_(1.0, 4.0)
        self.A_log.copy_(A.log())
        rate = torch.empty_like(self.dt_bias).uniform_(math.log(1e-3), 0.0).exp()
        A = A.repeat_interleave(self.config.head_k_dim)
        if self.config.lower_bound is None:
            self.dt_bias.copy_(torch.log(torch.expm1(rate / A)))
        else:
            share = (rate / -self.config.lower_bound).clamp(max=0.5)
            self.dt_bias.copy_(torch.logit(share) / A)

    def forward(self, x: Tensor) -> Tensor:
        """A whole sequence from the empty state, for training and evaluation: ``x [B, T, hidden]`` -> same."""
        qkv = causal_conv1d_sequence(self._project(x), self._conv_weight())
        # Autocast would take the state's products down to the activations' dtype.
        with torch.autocast(x.device.type, enabled=False):
            o, _ = delta_rule_chunked(*self._recurrence_inputs(qkv, x), lower_bound=self.config.lower_bound)
        return self._output(o, x)

    def window(self, x: Tensor, state: Tensor, history: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A window that continues each request.

        ``x [B, T, hidden]``, checkpoint ``state [B, H, V, K]`` float32, conv ``history [B, D, W-1]``. Returns the
        output ``[B, T, hidden]``, the state after every position ``[B, T, H, V, K]`` and the extended conv input ``[B,
        D, W-1+T]``.
        """
        qkv, extended = causal_conv1d_window(self._project(x), history.to(x.dtype), self._conv_weight())
        o, states = delta_rule_window(*self._recurrence_inputs(qkv, x), state)
        return self._output(o, x), states, extended

    def _project(self, x: Tensor) -> Tensor:
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)

    def _conv_weight(self) -> Tensor:
        return torch.cat([self.q_conv1d, self.k_conv1d, self.v_conv1d])

    def _recurrence_inputs(self, qkv: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        config = self.config
        q, k, v = qkv.split([config.key_dim, config.key_dim, config.value_dim], dim=-1)
        q, k, v = (y.unflatten(-1, (config.num_heads, -1)).float() for y in (q, k, v))
        q = l2_normalize(q) * config.head_k_dim**-0.5
        k = l2_normalize(k)
        f = self.f_b_proj(self.f_a_proj(x)).unflatten(-1, (config.num_heads, config.head_k_dim))
        g = log_decay(f, self.A_log, self.dt_bias, config.lower_bound)
        beta = torch.sigmoid(self.b_proj(x).float())
        return q, k, v, g, beta

    def _output(self, o: Tensor, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.g_b_proj(self.g_a_proj(x)))
        o = self.o_norm(o.to(gate.dtype)).flatten(-2)
        return self.o_proj(o * gate)
