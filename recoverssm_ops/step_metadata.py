"""What a step needs to know of its rows, staged into buffers that captured graphs read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recoverssm_ops import validation as check
from recoverssm_ops.lifecycle import StepLifecycle
from recoverssm_ops.step_rows import Phase, StepRow, check_rows


@dataclass(frozen=True)
class StepMetadata:
    """One staged step. Tensors are views of the persistent buffers: the same memory for the same ``batch_size``.

    Rows come in the order given, rows of padding trail. Integers are int64.

    Attributes:
        batch_size: rows with padding, B: the captured size.
        num_rows: rows without padding.
        window: T, the longest a row may be.
        phases: of the real rows.
        slots: ``[B]``; padding rows hold the buffers' ``pad_slot_id``.
        num_computed: ``[B]``; padding 0.
        num_drafts: ``[B]`` tokens after the first, the drafts of a dense window; padding 0.
        num_forced: ``[B]`` how many of ``num_drafts`` are prompt, and kept whatever the model says; padding 0.
        cu_seqlens: ``[B + 1]`` of packed windows; padding rows are empty.
        block_table: ``[B, blocks]``, -1 beyond a row's blocks and in padding; None unless the buffers were made for it.
        dummy: staged for warm-up or capture, of padding alone.
    """

    batch_size: int
    num_rows: int
    window: int
    phases: tuple[Phase, ...]
    slots: Tensor
    num_computed: Tensor
    num_drafts: Tensor
    num_forced: Tensor
    cu_seqlens: Tensor
    block_table: Tensor | None
    dummy: bool


_FIELDS = ("cu_seqlens", "slots", "num_computed", "num_drafts", "num_forced")


class StepBuffers:
    """Persistent device buffers for the batch sizes that graphs are captured at.

    Every :meth:`stage` rewrites all of them to the end, not only the rows in use: a graph replayed after a larger batch
    finds padding where that batch's rows were. One copy to the device a step; the host waits for nothing.

    Args:
        batch_sizes: captured sizes, 1 or more each. A step takes the smallest that holds its rows.
        window: T, the longest row that was captured; 1 to 16.
        block_size, max_blocks: in align mode the tokens of a state block and the width of the block table; 0 for none.
        device: of the buffers.
        pad_slot_id: what padding rows' slots hold, -1 or the null block's slot; real slots are above it.
        lifecycle: if given, a step is not staged while it has records pending: their commit would read the new slots.

    Raises:
        TypeError, ValueError: an argument is no int or out of range.
    """

    def __init__(
        self,
        batch_sizes: Sequence[int],
        window: int,
        *,
        block_size: int = 0,
        max_blocks: int = 0,
        device: torch.device | str = "cpu",
        pad_slot_id: int = -1,
        lifecycle: StepLifecycle | None = None,
    ) -> None:
        for size in batch_sizes:
            check.expect_int("batch_sizes", size)
        if not batch_sizes or min(batch_sizes) < 1:
            raise ValueError(f"batch_sizes should name at least one size, all at least 1, but was {list(batch_sizes)}")
        check.expect_int("window", window)
        if not 1 <= window <= check.MAX_WINDOW:
            raise ValueError(f"window should be between 1 and {check.MAX_WINDOW} tokens, but was {window}")
        check.expect_int("block_size", block_size)
        check.expect_int("max_blocks", max_blocks)
        if min(block_size, max_blocks) < 0 or (block_size == 0) != (max_blocks == 0):
            raise ValueError(
                "block_size and max_blocks should both be at least 1, or both 0 without a block table, but were "
                f"{block_size} and {max_blocks}"
            )
        check.expect_int("pad_slot_id", pad_slot_id)
        if pad_slot_id < -1:
            raise ValueError(f"pad_slot_id should be -1 or a slot, but was {pad_slot_id}")
        self.batch_sizes = sorted(set(batch_sizes))
        self.window = window
        self.block_size = block_size
        self.max_blocks = max_blocks
        self.pad_slot_id = pad_slot_id
        self.lifecycle = lifecycle
        # One allocation, so that one copy fills it: the vectors first (cu_seqlens is one longer), then the table.
        # Vectors are padded to 128 bytes: kernels and Inductor want tensors that start on a multiple of 16.
        self._vector = (self.batch_sizes[-1] + 16) // 16 * 16
        size = len(_FIELDS) * self._vector + self.batch_sizes[-1] * max_blocks
        self._buffer = torch.zeros(size, dtype=torch.int64, device=device)
        self._fill([])

    def stage(self, rows: Sequence[StepRow]) -> StepMetadata:
        """Write the rows into the buffers.

        No rows at all is a step of padding, which an idle rank of a data-parallel group runs with the others.

        Raises:
            ValueError: more rows than the largest captured size, a row longer than the window, slots, counts or blocks that
                cannot be, all before anything is written.
            RuntimeError: the lifecycle has a step pending.
        """
        self._check_idle()
        batch_size = self.bucket(len(rows))
        check_rows(rows, self.window, self.block_size, self.max_blocks, self.pad_slot_id)
        self._fill(rows)
        return self._metadata(batch_size, rows, dummy=False)

    def stage_dummy(self, batch_size: int, num_tokens: int | None = None) -> StepMetadata:
        """Padding alone, to warm up or capture ``batch_size``: graphs read all values when replayed, so none matter yet.

        ``num_tokens``: the longest query of the run, where that is not the window.

        Raises:
            ValueError: a size not among ``batch_sizes``, or a query longer than the window; before anything is written.
            RuntimeError: the lifecycle has a step pending.
        """
        self._check_idle()
        if batch_size not in self.batch_sizes:
            raise ValueError(f"batch_size should be one of {self.batch_sizes}, but was {batch_size}")
        if num_tokens is not None and not 1 <= num_tokens <= self.window:
            raise ValueError(
                f"a dummy step should have between 1 and {self.window} tokens a row, the captured window, but had {num_tokens}"
            )
        self._fill([])
        return self._metadata(batch_size, [], dummy=True)

    def bucket(self, num_rows: int) -> int:
        """The smallest captured size that holds ``num_rows``; ValueError where none does."""
        for size in self.batch_sizes:
            if num_rows <= size:
                return size
        raise ValueError(
            f"a step should have at most {self.batch_sizes[-1]} rows, the largest of the captured sizes "
            f"{self.batch_sizes}, but had {num_rows}: run fewer requests, or capture a larger size"
        )

    def _check_idle(self) -> None:
        if self.lifecycle is not None:
            self.lifecycle.require_idle("stage a step")

    def _fill(self, rows: Sequence[StepRow]) -> None:
        ends = [0]
        for row in rows:
            ends.append(ends[-1] + row.num_tokens)
        columns = {
            "cu_seqlens": (ends, ends[-1]),
            "slots": ([row.slot for row in rows], self.pad_slot_id),
            "num_computed": ([row.num_computed for row in rows], 0),
            "num_drafts": ([row.num_tokens - 1 for row in rows], 0),
            "num_forced": ([row.num_tokens - 1 if row.phase is Phase.PREFILL else 0 for row in rows], 0),
        }
        values: list[int] = []
        for name in _FIELDS:
            column, padding = columns[name]
            values += column + [padding] * (self._vector - len(column))
        for b in range(self.batch_sizes[-1] if self.max_blocks else 0):
            blocks = rows[b].block_slots if b < len(rows) else ()
            values += [*blocks, *[-1] * (self.max_blocks - len(blocks))]
        # Fresh pinned memory a step: its allocator hands it out again only when the copy is done. Reused pinned memory
        # would be overwritten by the next step while the device still reads it.
        host = torch.tensor(values, dtype=torch.int64, pin_memory=self._buffer.is_cuda)
        self._buffer.copy_(host, non_blocking=True)

    def _metadata(self, batch_size: int, rows: Sequence[StepRow], dummy: bool) -> StepMetadata:
        vectors = self._buffer[: len(_FIELDS) * self._vector].view(len(_FIELDS), self._vector)
        views = {name: vectors[i, : batch_size + (name == "cu_seqlens")] for i, name in enumerate(_FIELDS)}
        table = self._buffer[len(_FIELDS) * self._vector :].view(-1, self.max_blocks) if self.max_blocks else None
        return StepMetadata(
            batch_size=batch_size,
            num_rows=len(rows),
            window=self.window,
            phases=tuple(row.phase for row in rows),
            block_table=None if table is None else table[:batch_size],
            dummy=dummy,
            **views,
        )
