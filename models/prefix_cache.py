"""Prefix cache in align mode: states at block boundaries, found again by the tokens before them."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor

from models.pools import Pools
from models.request_state import state_buffers


@dataclasses.dataclass
class CacheStatistics:
    lookups: int = 0
    hits: int = 0  # lookups that found at least one block
    looked_up_tokens: int = 0
    hit_tokens: int = 0
    published: int = 0
    already_there: int = 0
    evicted: int = 0
    skipped: int = 0  # not published: the prefix before it is gone, or there is no room beside that prefix


class PrefixCache:
    """Snapshots of requests' states, one per block of ``block_size`` tokens, in memory allocated once.

    Block number n of a text holds what a request keeps after *exactly* ``n * block_size`` tokens (recurrent and conv
    state), and the keys and values of those last ``block_size`` tokens. A state holds its whole prefix, but the keys
    and values of a prefix are those of all its blocks, so a block is of use only together with the blocks before it:
    eviction takes the least recently used block that no other needs. A published block is never written again before
    it is evicted.

    A plain step knows a request's state only after its window's accepted tokens, so whoever publishes has to let windows
    end at boundaries (:meth:`models.requests.Request.next_window` does). A commit that writes the states at boundaries
    inside a window would not need that.

    ``budget`` is in bytes; the arena is the largest whole number of blocks within it.
    """

    def __init__(self, pools: Pools, block_size: int, budget: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size should be at least 1, got {block_size}")
        self.block_size = block_size
        self.statistics = CacheStatistics()
        self._fixed, self._cache = state_buffers(pools)
        shapes = {name: tuple(buffer.shape[1:]) for name, buffer in self._fixed.items()}
        shapes |= {name: (block_size, *buffer.shape[2:]) for name, buffer in self._cache.items()}
        buffers = self._fixed | self._cache
        block_bytes = sum(math.prod(shape) * buffers[name].element_size() for name, shape in shapes.items())
        self.capacity = budget // block_bytes
        if self.capacity < 1:
            raise ValueError(
                f"the cache budget of {budget} bytes should hold at least one block, which takes {block_bytes} bytes"
            )
        self._arena = {name: buffers[name].new_zeros(self.capacity, *shape) for name, shape in shapes.items()}
        # By key, least recently used first. A block is always older here than the blocks before it in its text, hence
        # the oldest is one that no other needs.
        self._blocks: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(self.capacity - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(buffer.untyped_storage().nbytes() for buffer in self._arena.values())

    def keys(self, text: bytes | bytearray, length: int) -> list[bytes]:
        """The keys of the whole blocks among the first ``length`` tokens: each is the hash of all tokens before it."""
        running, keys = hashlib.blake2b(digest_size=16), []
        for start in range(0, length - self.block_size + 1, self.block_size):
            running.update(text[start : start + self.block_size])
            keys.append(running.digest())
        return keys

    def restore(self, text: bytes | bytearray, slot: int) -> int:
        """Copy the longest cached prefix of ``text`` into a cleared slot; returns its tokens (0: nothing is cached).

        At least the last token is left out, since the model has to be run for what follows it.
        """
        found = []
        for key in self.keys(text, len(text) - 1):
            if key not in self._blocks:
                break
            found.append(key)
        length = len(found) * self.block_size
        statistics = self.statistics
        statistics.lookups += 1
        statistics.looked_up_tokens += len(text) - 1
        statistics.hits += bool(found)
        statistics.hit_tokens += length
        if found:
            self._touch(found)
            for name, buffer in self._fixed.items():
                buffer[slot].copy_(self._arena[name][self._blocks[found[-1]]])
            for name, buffer in self._cache.items():
                for i, key in enumerate(found):
                    buffer[slot, i * self.block_size :][: self.block_size].copy_(self._arena[name][self._blocks[key]])
        return length

    def publish(self, text: bytes | bytearray, length: int, slot: int) -> None:
        """Copy the state of ``slot``, which has absorbed the first ``length`` tokens: a multiple of the block size."""
        if length < 1 or length % self.block_size:
            raise ValueError(f"a state is published at multiples of {self.block_size} tokens, got {length}")
        *prefix, key = self.keys(text, length)
        if any(earlier not in self._blocks for earlier in prefix):
            self.statistics.skipped += 1
            return
        if key in self._blocks:
            # Equal up to rounding, and a published block stays as it is.
            self._touch([*prefix, key])
            self.statistics.already_there += 1
            return
        self._touch(prefix)
        if not self._free:
            oldest, block = next(iter(self._blocks.items()))
            if oldest in prefix:
                self.statistics.skipped += 1
                return
            del self._blocks[oldest]
            self._free.append(block)
            self.statistics.evicted += 1
        block = self._free.pop()
        for name, buffer in self._fixed.items():
            self._arena[name][block].copy_(buffer[slot])
        for name, buffer in self._cache.items():
            self._arena[name][block].copy_(buffer[slot, length - self.block_size : length])
        self._blocks[key] = block
        self._touch(prefix)
        self.statistics.published += 1

    def contents(self) -> dict[bytes, dict[str, Tensor]]:
        """Views of every published block's tensors, by key; for inspection."""
        return {key: {name: a[block] for name, a in self._arena.items()} for key, block in self._blocks.items()}

    def _touch(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            self._blocks.move_to_end(key)
