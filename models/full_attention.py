"""Full attention, the one layer in four that keeps a key-value cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import KDAConfig


class FullAttention(nn.Module):
    """Causal softmax attention with grouped keys and values and no positional encoding (NoPE, as Kimi Linear)."""

    def __init__(self, config: KDAConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_heads, config.num_kv_heads
        kv_dim = config.num_kv_heads * config.head_k_dim
        self.q_proj = nn.Linear(config.hidden_size, config.key_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_dim, bias=False)
        self.o_proj = nn.Linear(config.key_dim, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """A whole sequence: ``x [B, T, hidden]`` -> same."""
        q, k, v = self._project(x)
        group = self.heads // self.kv_heads
        k, v = (y.repeat_interleave(group, dim=2).transpose(1, 2) for y in (k, v))
        o = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True)
        return self.o_proj(o.transpose(1, 2).flatten(-2))

    def window(self, x: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A window that continues each request.

        ``x [B, T, hidden]``; the cached ``keys, values [B, L, kv_heads, D]``, of which the first ``positions [B]``
        entries are committed and the rest is stale. Returns the output and the window's own keys and values ``[B, T,
        kv_heads, D]``.
        """
        B, T, _ = x.shape
        q, k, v = self._project(x)
        committed = torch.arange(keys.shape[1], device=x.device) < positions.unsqueeze(-1)
        causal = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
        mask = torch.cat([committed.unsqueeze(1).expand(-1, T, -1), causal.expand(B, -1, -1)], dim=-1)
        # The heads that share keys are queries of one longer window: nothing of the cache is repeated.
        group = self.heads // self.kv_heads
        q = q.unflatten(2, (self.kv_heads, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        all_keys = torch.cat([keys, k.to(keys.dtype)], dim=1).to(q.dtype).transpose(1, 2)
        all_values = torch.cat([values, v.to(values.dtype)], dim=1).to(q.dtype).transpose(1, 2)
        o = F.scaled_dot_product_attention(q, all_keys, all_values, attn_mask=mask.repeat(1, group, 1).unsqueeze(1))
        o = o.unflatten(2, (group, T)).permute(0, 3, 1, 2, 4).flatten(2)
        return self.o_proj(o), k, v

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = self.q_proj(x).unflatten(-1, (self.heads, -1))
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, -1))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, -1))
        return q, k, v
