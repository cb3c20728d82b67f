"""What a request keeps between steps: one buffer per layer and kind, one slot per request."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.config import KDAConfig


class Pools(nn.Module):
    """State pools for ``num_slots`` requests of at most ``max_length`` tokens.

    Buffers of a KDA layer i: ``recurrent_i [slots, H, V, K]`` in ``recurrent_dtype`` and ``conv_i [slots, D, W-1]``
    (the last inputs, oldest first). Of a full-attention layer i: ``key_i`` and ``value_i [slots, max_length, kv_heads,
    D]``. The window's entries are written before it is known which are kept, so ``max_length`` includes one window of
    room.
    """

    def __init__(
        self,
        config: KDAConfig,
        num_slots: int,
        max_length: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        recurrent_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.max_length = max_length
        state_shape = (num_slots, config.num_heads, config.head_v_dim, config.head_k_dim)
        conv_shape = (num_slots, config.conv_dim, config.conv_size - 1)
        cache_shape = (num_slots, max_length, config.num_kv_heads, config.head_k_dim)
        for i in range(config.num_layers):
            if config.is_full_attention(i):
                self.register_buffer(f"key_{i}", torch.zeros(cache_shape, dtype=dtype, device=device))
                self.register_buffer(f"value_{i}", torch.zeros(cache_shape, dtype=dtype, device=device))
            else:
                self.register_buffer(f"recurrent_{i}", torch.zeros(state_shape, dtype=recurrent_dtype, device=device))
                self.register_buffer(f"conv_{i}", torch.zeros(conv_shape, dtype=dtype, device=device))

    def of(self, kind: str, layer: int) -> Tensor:
        return getattr(self, f"{kind}_{layer}")

    def reset(self) -> None:
        """Empty every slot, in place."""
        for buffer in self.buffers():
            buffer.zero_()

    def bytes_per_request(self) -> dict[str, int]:
        """Bytes of one slot, by kind: ``recurrent``, ``conv`` and ``cache`` (keys and values)."""
        sizes = {"recurrent": 0, "conv": 0, "cache": 0}
        for name, buffer in self.named_buffers():
            kind = name.partition("_")[0]
            sizes[kind if kind in sizes else "cache"] += buffer[0].numel() * buffer.element_size()
        return sizes
