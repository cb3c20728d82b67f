"""Which slot of the pools belongs to whom."""

from __future__ import annotations

NULL_SLOT = 0


class SlotAllocator:
    """Slots 1 .. num_slots - 1 for requests; slot 0 is never a request's.

    A step's padding rows run, as every row does, on a slot that no other row of the step names: on the null slot, then
    on slots that nobody holds. They write there; whoever is given a slot later must not rely on what it holds.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 2:
            raise ValueError(f"num_slots should be at least 2 (one is the null slot), got {num_slots}")
        self.num_slots = num_slots
        # The slot released last is given out first: what its last holder left behind is met at once, not after hours.
        self._free = list(range(num_slots - 1, NULL_SLOT, -1))
        self._held: set[int] = set()

    @property
    def available(self) -> int:
        return len(self._free)

    @property
    def in_use(self) -> int:
        return len(self._held)

    def allocate(self) -> int:
        if not self._free:
            raise RuntimeError(f"all {self.num_slots - 1} slots are in use")
        slot = self._free.pop()
        self._held.add(slot)
        return slot

    def release(self, slot: int) -> None:
        if slot not in self._held:
            raise RuntimeError(f"slot {slot} is released, but nobody holds it")
        self._held.remove(slot)
        self._free.append(slot)

    def padding(self, count: int) -> list[int]:
        """``count`` distinct slots that no request holds."""
        spare = [NULL_SLOT, *self._free]
        if count > len(spare):
            raise RuntimeError(f"{count} padding rows need as many slots without a holder, there are {len(spare)}")
        return spare[:count]
