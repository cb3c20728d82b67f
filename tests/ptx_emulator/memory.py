"""Global memory, made of the tensors of a launch, and a block's shared memory with what is known of every two bytes of it."""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Iterable, Iterator

import numpy as np
from torch import Tensor

from ptx_emulator.errors import PTXError
from ptx_emulator.registers import RAW, SHARED_BASE


def _check_aligned(addresses: np.ndarray, size: int) -> None:
    if (addresses % size).any():
        raise PTXError(
            f"an access of {size} bytes at {int(addresses[addresses % size != 0][0]):#x}, which is misaligned"
        )


class GlobalMemory:
    """Bytes from the first to the last element of each tensor, and no others. The tensors must outlive it."""

    def __init__(self, tensors: Iterable[Tensor]):
        spans: list[list[int]] = []
        for x in sorted((x for x in tensors if x.numel()), key=Tensor.data_ptr):
            last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
            begin, end = x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()
            if spans and begin < spans[-1][1]:
                spans[-1][1] = max(spans[-1][1], end)
            else:
                spans.append([begin, end])
        self._begins = [begin for begin, _ in spans]
        self._ends = [end for _, end in spans]
        # From a multiple of 16 on, so that aligned accesses are whole words.
        self._bytes = [
            np.frombuffer((ctypes.c_uint8 * (end - begin // 16 * 16)).from_address(begin // 16 * 16), np.uint8)
            for begin, end in spans
        ]

    def load(self, addresses: np.ndarray, words: int, width: int) -> np.ndarray:
        """``[n, words]`` of ``width`` bytes from each of ``n`` addresses."""
        loaded = np.empty((len(addresses), words), RAW[width])
        for here, memory, at in self._found(addresses, words, width):
            loaded[here] = memory[at[:, None] + np.arange(words)]
        return loaded

    def store(self, addresses: np.ndarray, values: np.ndarray) -> None:
        words, width = values.shape[1], values.dtype.itemsize
        for here, memory, at in self._found(addresses, words, width):
            memory[at[:, None] + np.arange(words)] = values[here]

    def _found(
        self, addresses: np.ndarray, words: int, width: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """For each span that is accessed: which of the addresses, its memory as words, and the words' indices."""
        size = words * width
        _check_aligned(addresses, size)
        rest = np.ones(len(addresses), bool)
        while rest.any():
            first = int(addresses[rest][0])
            span = bisect.bisect_right(self._begins, first) - 1
            if span < 0 or first + size > self._ends[span]:
                raise PTXError(f"an access of {size} bytes at {first:#x}, outside of every tensor of the launch")
            here = rest & (addresses >= self._begins[span]) & (addresses <= self._ends[span] - size)
            memory = self._bytes[span]
            memory = memory[: len(memory) // width * width].view(RAW[width])
            yield here, memory, (addresses[here] - self._begins[span] // 16 * 16) // width
            rest &= ~here


class SharedMemory:
    """One block's. Addresses are those of the program's, from ``SHARED_BASE`` on.

    Of every two bytes it is known which warp wrote them, which warps read them, in which statements, and how many barriers the
    block had passed then: an access of another warp without a barrier between has no order.
    """

    GRAIN = 2

    def __init__(self, size: int):
        self.size = size
        self._bytes = np.full(-(-size // 16) * 16, 0xFF, np.uint8)
        grains = len(self._bytes) // self.GRAIN
        self.barriers = 0
        self.statement = 0
        self._written_at = np.full(grains, -1, np.int64)
        self._writer = np.zeros(grains, np.int64)
        self._writing = np.zeros(grains, np.int64)
        self._read_at = np.full(grains, -1, np.int64)
        self._readers = np.zeros(grains, np.int64)
        self._reading = np.zeros(grains, np.int64)
        self._arriving = np.full(grains, -1, np.int64)

    def load(self, addresses: np.ndarray, words: int, width: int, warps: np.ndarray) -> np.ndarray:
        """``[n, words]`` of ``width`` bytes from each of ``n`` addresses; ``warps`` are those of the threads that ask."""
        grains = self._grains(addresses, words * width)
        self._check_arrived(grains)
        written = self._written_at[grains]
        if (written < 0).any():
            raise PTXError("shared memory is read that nothing has written")
        self._check_order(
            (written == self.barriers) & (self._writer[grains] != warps[:, None]), self._writing[grains], "written"
        )
        fresh = self._read_at[grains] != self.barriers
        self._readers[grains[fresh]] = 0
        np.bitwise_or.at(self._readers, grains, np.broadcast_to(1 << warps[:, None], grains.shape))
        self._read_at[grains], self._reading[grains] = self.barriers, self.statement
        return self._words(width)[self._indices(addresses, words, width)]

    def store(self, addresses: np.ndarray, values: np.ndarray, warps: np.ndarray) -> None:
        words, width = values.shape[1], values.dtype.itemsize
        grains = self._grains(addresses, words * width)
        indices = self._indices(addresses, words, width)
        self._check_writable(grains, warps)
        memory = self._words(width)
        # Layouts that repeat data store the same value from several warps, which is no race.
        others = (self._written_at[grains] == self.barriers) & (self._writer[grains] != warps[:, None])
        if others.any():
            differ = np.repeat(memory[indices] != values, width // self.GRAIN, 1)
            self._check_order(others & differ, self._writing[grains], "written")
        memory[indices] = values
        if (memory[indices] != values).any():
            raise PTXError("threads of one statement store different values in the same place")
        self._mark_written(grains, warps)

    def begin_copy(self, addresses: np.ndarray, size: int, warps: np.ndarray) -> None:
        """What these bytes will be is on its way: until :meth:`end_copy` they may be neither read nor written."""
        grains = self._grains(addresses, size)
        self._check_writable(grains, warps)
        others = (self._written_at[grains] == self.barriers) & (self._writer[grains] != warps[:, None])
        self._check_order(others, self._writing[grains], "written")
        self._arriving[grains] = self.statement

    def end_copy(self, addresses: np.ndarray, values: np.ndarray, warps: np.ndarray) -> None:
        words, width = values.shape[1], values.dtype.itemsize
        grains = self._grains(addresses, words * width)
        self._words(width)[self._indices(addresses, words, width)] = values
        self._arriving[grains] = -1
        self._mark_written(grains, warps)

    def _mark_written(self, grains: np.ndarray, warps: np.ndarray) -> None:
        self._written_at[grains], self._writer[grains] = self.barriers, warps[:, None]
        self._writing[grains] = self.statement

    def _check_writable(self, grains: np.ndarray, warps: np.ndarray) -> None:
        self._check_arrived(grains)
        others = (self._readers[grains] & ~(1 << warps[:, None])) != 0
        self._check_order(others & (self._read_at[grains] == self.barriers), self._reading[grains], "read")

    def _check_arrived(self, grains: np.ndarray) -> None:
        arriving = self._arriving[grains]
        if (arriving >= 0).any():
            raise Conflict(
                "shared memory is accessed before its copy has been waited for, which began", int(arriving.max())
            )

    def _check_order(self, bad: np.ndarray, statements: np.ndarray, how: str) -> None:
        if bad.any():
            raise Conflict(
                f"a race: another warp has {how} this shared memory since the last barrier", int(statements[bad][0])
            )

    def _grains(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """``[n, size / 2]``, after checks of bounds and alignment."""
        _check_aligned(addresses, size)
        start = addresses - SHARED_BASE
        if (start < 0).any() or (start + size > self.size).any():
            raise PTXError(f"an access of {size} bytes outside of the block's {self.size} bytes of shared memory")
        return start[:, None] // self.GRAIN + np.arange(size // self.GRAIN)

    def _words(self, width: int) -> np.ndarray:
        return self._bytes.view(RAW[width])

    def _indices(self, addresses: np.ndarray, words: int, width: int) -> np.ndarray:
        return (addresses - SHARED_BASE)[:, None] // width + np.arange(words)


class Conflict(PTXError):
    """An access that conflicts with what statement number ``earlier`` did."""

    def __init__(self, reason: str, earlier: int):
        super().__init__(reason)
        self.earlier = earlier
