"""A request's state in the pools, as something that can be cleared, copied out and copied back."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from models.pools import Pools

FIXED_KINDS = ("recurrent", "conv")
CACHE_KINDS = ("key", "value")


def state_buffers(pools: Pools) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The pools' buffers by name: those of one size a request (recurrent, conv), and those that grow (key, value)."""
    fixed, cache = {}, {}
    for name, buffer in pools.named_buffers():
        kind = name.partition("_")[0]
        if kind not in FIXED_KINDS + CACHE_KINDS:
            raise ValueError(f"the pools' buffer {name} is of no known kind {FIXED_KINDS + CACHE_KINDS}")
        (fixed if kind in FIXED_KINDS else cache)[name] = buffer
    return fixed, cache


@dataclasses.dataclass(frozen=True)
class SavedState:
    """All that a request of ``length`` committed tokens needs to go on.

    ``tensors`` by buffer name: ``recurrent_i [H, V, K]``, ``conv_i [D, W-1]``, ``key_i`` and ``value_i [length,
    kv_heads, D]``, in the pools' dtypes. Nothing of a window is in it: what a step computes on its way is not state.
    """

    length: int
    tensors: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


class RequestState:
    """Clear, copy out and restore single slots, without waiting for the device."""

    def __init__(self, pools: Pools) -> None:
        self.fixed, self.cache = state_buffers(pools)

    def clear(self, slot: int) -> None:
        """The state of an empty text.

        The cache is cleared too although no row of it is committed: its rows enter attention with weight zero, and zero
        times what a former holder or a padding row may have left there need not be zero.
        """
        for buffer in (*self.fixed.values(), *self.cache.values()):
            buffer[slot].zero_()

    def copy_out(self, slot: int, length: int) -> SavedState:
        """The slot's state in host memory (pinned, if the pools are on a GPU, so that the copy is asynchronous)."""
        tensors = {name: _to_host(buffer[slot]) for name, buffer in self.fixed.items()}
        tensors |= {name: _to_host(buffer[slot, :length]) for name, buffer in self.cache.items()}
        return SavedState(length, tensors)

    def restore(self, slot: int, saved: SavedState) -> None:
        for name, buffer in self.fixed.items():
            buffer[slot].copy_(saved.tensors[name], non_blocking=True)
        for name, buffer in self.cache.items():
            buffer[slot, : saved.length].copy_(saved.tensors[name], non_blocking=True)
            buffer[slot, saved.length :].zero_()


def _to_host(source: Tensor) -> Tensor:
    host = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
    return host.copy_(source, non_blocking=True)
