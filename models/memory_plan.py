"""What an engine will allocate, from the model's shapes alone: known before anything is allocated."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from models.config import KDAConfig


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes on the device that live as long as an engine over ``models.pools.Pools`` does.

    ``dtype`` is that of convolution state, keys and values; the recurrent state has its own.
    """

    config: KDAConfig
    dtype: torch.dtype = torch.float32
    recurrent_dtype: torch.dtype = torch.float32

    @property
    def _kda_layers(self) -> int:
        return sum(not self.config.is_full_attention(i) for i in range(self.config.num_layers))

    @property
    def fixed_bytes(self) -> int:
        """Recurrent and convolution state of one request, however long its text is."""
        config = self.config
        recurrent = config.num_heads * config.head_v_dim * config.head_k_dim * self.recurrent_dtype.itemsize
        conv = config.conv_dim * (config.conv_size - 1) * self.dtype.itemsize
        return self._kda_layers * (recurrent + conv)

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token."""
        layers = self.config.num_layers - self._kda_layers
        return layers * 2 * self.config.num_kv_heads * self.config.head_k_dim * self.dtype.itemsize

    def saved_bytes(self, length: int) -> int:
        """State of one request of ``length`` tokens, copied out."""
        return self.fixed_bytes + length * self.token_bytes

    def pools_bytes(self, num_slots: int, max_length: int) -> int:
        return num_slots * self.saved_bytes(max_length)

    def cache_bytes(self, block_size: int, budget: int) -> int:
        """The whole blocks within ``budget``; a block is a state and ``block_size`` tokens' keys and values."""
        block = self.saved_bytes(block_size)
        return budget // block * block

    def inputs_bytes(self, window: int, buckets: Sequence[int]) -> int:
        """The persistent inputs of every batch size: int64 tokens and four int64 numbers a row, float32 noise."""
        total = 0
        for batch in buckets:
            # Each of the five integer inputs starts on 16 bytes.
            integers = sum(-(-batch * width // 2) * 2 for width in (window, 1, 1, 1, 1))
            total += 8 * integers + 4 * batch * (1 + window + self.config.vocab_size)
        return total
