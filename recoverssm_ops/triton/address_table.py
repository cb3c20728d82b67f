"""Addresses of the layers' tensors, on the device.

The table is built on the host, in pinned memory, and copied on the current stream. A CUDA graph repeats that copy at every
replay and reads the host's memory again, so what a captured copy reads is never reused: it stays for the life of the process
(8 bytes a tensor and captured launch). Pinned memory cannot be had during a capture, so it is set aside by the calls before
it, the warm-up that capturing needs anyway.
"""

import threading

import torch
from torch import Tensor

PAGE = 1 << 16


class CaptureMemory:
    """Pinned memory that is handed out once."""

    def __init__(self):
        self._lock = threading.Lock()
        self._page: Tensor | None = None
        self._used = 0

    def reserve(self) -> None:
        """Have at least half a page for the captures to come."""
        with self._lock:
            if self._page is None or self._used > PAGE // 2:
                # The old page lives as long as the slices of it.
                self._page, self._used = torch.empty(PAGE, dtype=torch.int64, pin_memory=True), 0

    def take(self, size: int) -> Tensor:
        with self._lock:
            if self._page is None or self._used + size > PAGE:
                raise RuntimeError(
                    "a commit of all layers was captured in a CUDA graph without pinned memory set aside: run it once "
                    "before the capture (the warm-up), on the same shapes"
                )
            self._used += size
            _handed_out.append(self._page[self._used - size : self._used])
            return _handed_out[-1]


_handed_out: list[Tensor] = []
_memory = CaptureMemory()


def address_table(kinds: list[list[Tensor]], device: torch.device) -> Tensor:
    """``[kinds, layers]`` int64 on the device; a kind that the layers lack (an empty list) has a row of zeros."""
    layers = len(kinds[0])
    table = torch.tensor([[x.data_ptr() for x in tensors] or [0] * layers for tensors in kinds], dtype=torch.int64)
    if device.type != "cuda":
        return table
    if torch.cuda.is_current_stream_capturing():
        staged = _memory.take(table.numel()).view(table.shape)
        staged.copy_(table)
    else:
        _memory.reserve()
        staged = table.pin_memory()
    return staged.to(device, non_blocking=True)


def aligned_kinds(kinds: list[list[Tensor]]) -> int:
    """Bit i: every address of kind i is a multiple of 16, which whole vectors are loaded by."""
    return sum(1 << i for i, tensors in enumerate(kinds) if all(x.data_ptr() % 16 == 0 for x in tensors))
