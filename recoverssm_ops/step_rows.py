"""The rows of a step, as the caller names them, and what they may not be."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Phase(enum.Enum):
    """What a row does in a step. The caller knows; a shape does not tell: a prompt chunk may be as long as a window."""

    PREFILL = "prefill"  # a chunk of the prompt: every token is kept
    DECODE = "decode"  # the last token alone: a verify row without drafts
    VERIFY = "verify"  # the last token and drafts


@dataclass(frozen=True)
class StepRow:
    """One request in a step; made by :meth:`prefill`, :meth:`decode` or :meth:`verify`.

    Attributes:
        phase: see :class:`Phase`.
        slot: the request's checkpoint; in align mode that of block ``max(num_computed - 1, 0) // block_size``.
        num_computed: tokens committed before this step.
        num_tokens: tokens of the row in this step, 1 or more.
        block_slots: in align mode the slots of the request's state blocks, -1 for a null block.
    """

    phase: Phase
    slot: int
    num_computed: int
    num_tokens: int
    block_slots: tuple[int, ...] = ()

    @classmethod
    def prefill(cls, slot: int, num_computed: int, num_tokens: int, block_slots: Sequence[int] = ()) -> StepRow:
        """A chunk of ``num_tokens`` prompt tokens."""
        return cls(Phase.PREFILL, slot, num_computed, num_tokens, tuple(block_slots))

    @classmethod
    def decode(cls, slot: int, num_computed: int, block_slots: Sequence[int] = ()) -> StepRow:
        """The last sampled token; staged as :meth:`verify` with no drafts is."""
        return cls(Phase.DECODE, slot, num_computed, 1, tuple(block_slots))

    @classmethod
    def verify(cls, slot: int, num_computed: int, num_drafts: int, block_slots: Sequence[int] = ()) -> StepRow:
        """The last sampled token and ``num_drafts`` drafts, 0 or more."""
        return cls(Phase.VERIFY, slot, num_computed, 1 + num_drafts, tuple(block_slots))


def check_rows(rows: Sequence[StepRow], window: int, block_size: int, max_blocks: int, pad_slot_id: int) -> None:
    """Raise ValueError or TypeError for the first row that buffers of this kind cannot stage; see :class:`StepBuffers`."""
    for i, row in enumerate(rows):
        if not isinstance(row, StepRow) or not isinstance(row.phase, Phase):
            raise TypeError(f"row {i} should be a StepRow with a Phase, but was {row!r}")
        what = f"row {i} ({row.phase.value})"
        if not 1 <= row.num_tokens <= window:
            cure = "split the chunk" if row.phase is Phase.PREFILL else "draft fewer tokens"
            raise ValueError(
                f"{what} should have between 1 and {window} tokens, the captured window, but had {row.num_tokens}: "
                f"{cure}, or capture a longer window"
            )
        if row.phase is Phase.DECODE and row.num_tokens != 1:
            raise ValueError(f"{what} should have 1 token, but had {row.num_tokens}: drafts make it a verify row")
        if row.slot <= pad_slot_id:
            raise ValueError(f"{what} should have a slot above {pad_slot_id}, the padding, but had {row.slot}")
        if row.num_computed < 0:
            raise ValueError(f"{what} should have num_computed of at least 0, but had {row.num_computed}")
        if len(row.block_slots) > max_blocks:
            raise ValueError(
                f"{what} should have at most {max_blocks} blocks, the width of the block table, but had "
                f"{len(row.block_slots)}"
            )
        if block_size:
            block = max(row.num_computed - 1, 0) // block_size
            held = row.block_slots[block] if block < len(row.block_slots) else "null"
            if row.slot != held:
                raise ValueError(
                    f"{what} should have the slot of block {block}, which holds the state after {row.num_computed} "
                    f"tokens: it is {held}, but the row had {row.slot}"
                )
    _check_owners(rows, block_size, pad_slot_id)


def _check_owners(rows: Sequence[StepRow], block_size: int, pad_slot_id: int) -> None:
    """No slot that a row may write is read or written by another; requests may share the blocks they have left."""
    owners: dict[int, int] = {}
    for i, row in enumerate(rows):
        slots = (row.slot,)
        if block_size:
            last = (row.num_computed + row.num_tokens - 1) // block_size
            slots = row.block_slots[row.num_computed // block_size : last + 1]
        for slot in slots:
            if slot > pad_slot_id and owners.setdefault(slot, i) != i:
                raise ValueError(
                    f"rows should write slots of their own, but rows {owners[slot]} and {i} both had slot {slot}"
                )
    for i, row in enumerate(rows):
        if owners.get(row.slot, i) != i:
            raise ValueError(
                f"row {i} should read no slot that another row writes, but its slot {row.slot} is row "
                f"{owners[row.slot]}'s"
            )
