"""The inputs of a step in buffers that stay where they are: what a captured graph reads at every replay."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Views that start on 16 bytes are read in place by compiled code; others would be copied first.
ALIGNMENT = 2


class StepInputs:
    """Persistent inputs of :class:`models.speculation.SpeculativeStep` for batches of one size, greedy decoding.

    Every row is written at every step, padding rows too: nothing of an earlier, larger batch can come back.
    """

    def __init__(self, batch: int, window: int, vocab_size: int, device: torch.device | str) -> None:
        self.batch, self.window = batch, window
        self._widths = (window, 1, 1, 1, 1)  # window, num_drafts, num_forced, positions, slots
        self._offsets, total = [], 0
        for width in self._widths:
            self._offsets.append(total)
            total += -(-batch * width // ALIGNMENT) * ALIGNMENT
        pinned = torch.device(device).type == "cuda"
        self._host = torch.zeros(total, dtype=torch.int64, pin_memory=pinned)
        self._device = torch.zeros(total, dtype=torch.int64, device=device)
        self._temperature = torch.zeros(batch, device=device)
        self._uniform = torch.zeros(batch, window, device=device)
        self._exponential = torch.ones(batch, vocab_size, device=device)
        self.tensors = (*self._views(self._device), self._temperature, self._uniform, self._exponential)

    @property
    def nbytes(self) -> int:
        """Bytes allocated on the step's device."""
        buffers = (self._device, self._temperature, self._uniform, self._exponential)
        return sum(buffer.untyped_storage().nbytes() for buffer in buffers)

    def fill(
        self,
        windows: Sequence[bytes],
        num_drafts: Sequence[int],
        num_forced: Sequence[int],
        positions: Sequence[int],
        slots: Sequence[int],
    ) -> tuple[Tensor, ...]:
        """Stage one step, one copy to the device; ``slots`` names the padding rows' too. Returns the step's arguments.

        The former step's results have been read by now, so its copy is over and the host buffer free.
        """
        rows = len(windows)
        pad = [0] * (self.batch - rows)
        window, *columns = self._views(self._host)
        tokens = [[*row, *bytes(self.window - len(row))] for row in windows] + [[0] * self.window] * len(pad)
        window.copy_(torch.tensor(tokens))
        values = (num_drafts, num_forced, positions)
        for column, value in zip(columns, (*([*v, *pad] for v in values), slots), strict=True):
            column.copy_(torch.tensor(value))
        self._device.copy_(self._host, non_blocking=True)
        return self.tensors

    def _views(self, packed: Tensor) -> list[Tensor]:
        views = [
            packed[offset : offset + self.batch * width]
            for offset, width in zip(self._offsets, self._widths, strict=True)
        ]
        return [views[0].view(self.batch, self.window), *views[1:]]
