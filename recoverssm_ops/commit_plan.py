"""Where a commit reads and writes."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from recoverssm_ops import validation as check
from recoverssm_ops.windows import row_lengths

NO_SLOT = -1


@dataclass(frozen=True)
class CommitPlan:
    """Per row, where committed states go. Device tensors made by ordinary PyTorch operations; no host synchronisation.

    Commit reads the checkpoint of row b at slot ``source[b]`` and, for each column m, writes the state after
    ``length[b, m]`` tokens to slot ``dest[b, m]``. Columns whose ``dest`` is at most ``pad_slot_id`` are skipped, and so are
    rows whose ``source`` is. The source may also be a destination.

    Attributes:
        source: ``[B]`` int32 or int64.
        dest: ``[B, M]`` int32 or int64.
        length: ``[B, M]`` int32 or int64, clamped to the row's window.
    """

    source: Tensor
    dest: Tensor
    length: Tensor

    @classmethod
    def in_place(cls, num_accepted: Tensor, state_indices: Tensor) -> "CommitPlan":
        """Each row's state goes back to the slot it came from.

        Args:
            num_accepted: ``[B]`` committed window tokens.
            state_indices: ``[B]`` slots.
        """
        return cls(state_indices, state_indices.unsqueeze(1), num_accepted.unsqueeze(1))

    @classmethod
    def aligned(
        cls,
        num_accepted: Tensor,
        num_computed: Tensor,
        block_table: Tensor,
        block_size: int,
        window: int,
        *,
        cu_seqlens: Tensor | None = None,
    ) -> "CommitPlan":
        """Prefix caching in align mode: one slot per block of ``block_size`` tokens, holding the state at the block's end.

        Every block that the accepted tokens enter receives one state: the one at exactly its end if they reach it, else
        the one after the last of them. So block i, ``i = (num_computed + length - 1) // block_size``, receives the state
        after ``length = min(n, (i + 1) * block_size - num_computed)`` of n accepted tokens: each boundary reached goes to
        the block it closes, the final state to the block of the last committed token, and where these are the same block,
        it is written once. Nothing accepted: nothing is written.

        The first block entered is ``num_computed // block_size``, and closed blocks come before it: a plan never names
        the slot of a block that was closed by an earlier step, so that published states may be shared and never change.
        The source may be such a shared slot (``num_computed`` on a boundary); otherwise it is a destination too.

        Args:
            num_accepted: ``[B]`` int32 or int64, committed window tokens, clamped to [0, window]; 0 for padding rows.
            num_computed: ``[B]`` int32 or int64, tokens committed before the window. At 0 the slot of block 0 holds the
                request's initial state (zeros).
            block_table: ``[B, blocks]`` int32 or int64, the slot of each block; negative is a null block, as is any block
                beyond the table. What would go to a null block is not written, the other states are: null the last
                block only of a request that ends with this step. Rows of padding are negative throughout.
            block_size: tokens in a state block, 1 or more; may be smaller than the window.
            window: T, the most tokens that a row accepts; 1 to 16.
            cu_seqlens: ``[B + 1]`` of packed windows, as given to verify: ``num_accepted`` is clamped to each row's length.

        Returns:
            A plan with ``M = blocks_entered(window, block_size)`` columns; ``source`` is :meth:`aligned_source`. Skipped
            columns hold -1.

        Raises:
            TypeError, ValueError: an argument's type, shape or device; a table with fewer blocks than a window may enter.
        """
        columns = blocks_entered(window, block_size)
        source = cls.aligned_source(num_computed, block_table, block_size)
        batch, blocks = block_table.shape
        check.check_rows("num_accepted", num_accepted, batch, block_table.device)
        if blocks < -(-window // block_size):
            raise ValueError(
                f"block_table should have at least {-(-window // block_size)} blocks, what a window of {window} tokens "
                f"fills with block_size {block_size}, but had {blocks}: allocate more blocks, enlarge block_size or "
                "draft fewer tokens"
            )
        n = num_accepted.long().clamp(0, window)
        if cu_seqlens is not None:
            check.check_rows("cu_seqlens", cu_seqlens, batch + 1, block_table.device)
            n = torch.minimum(n, row_lengths(cu_seqlens, window))
        n = n.unsqueeze(1)
        computed = num_computed.long().clamp(min=0).unsqueeze(1)
        block = computed // block_size + torch.arange(columns, device=computed.device)
        length = torch.minimum(n, (block + 1) * block_size - computed)
        entered = (n > 0) & (block * block_size < computed + n)
        return cls(source, torch.where(entered, _slots_of(block_table, block), NO_SLOT), length)

    @staticmethod
    def aligned_source(num_computed: Tensor, block_table: Tensor, block_size: int) -> Tensor:
        """The slots that hold the states after ``num_computed`` tokens: what verify reads in align mode.

        The state lives in the block of the last committed token, ``max(num_computed - 1, 0) // block_size``. Arguments and
        errors as in :meth:`aligned`. Several rows may name one slot when their requests share a prefix.

        Returns:
            ``[B]`` in the table's dtype; -1, or the table's negative entry, where that block is null.
        """
        _check_at_least_one("block_size", block_size)
        check.expect_tensor("block_table", block_table, check.INTEGERS)
        check.expect_shape("block_table", block_table, (None, None), "[B, blocks]")
        check.check_rows("num_computed", num_computed, block_table.shape[0], block_table.device)
        block = (num_computed.long() - 1).clamp(min=0) // block_size
        return _slots_of(block_table, block.unsqueeze(1)).squeeze(1)


def resolve_plan(
    plan: CommitPlan | None,
    num_accepted: Tensor | None,
    slots: Tensor | None,
    slots_name: str,
    batch: int,
    pool_name: str,
    pool: Tensor,
    pad_slot_id: int,
) -> CommitPlan:
    """The checked plan of a commit that was given either a plan, or ``num_accepted`` and slots (None: row b is slot b)."""
    if plan is None:
        if num_accepted is None:
            raise ValueError("num_accepted should be a tensor [B] unless a plan is given, but was None")
        check.check_rows("num_accepted", num_accepted, batch, pool.device)
        check.check_slots(slots_name, slots, batch, pool_name, pool, pad_slot_id, written=True)
        return CommitPlan.in_place(num_accepted, torch.arange(batch, device=pool.device) if slots is None else slots)
    for name, value in {"num_accepted": num_accepted, slots_name: slots}.items():
        if value is not None:
            raise ValueError(f"{name} should be None when a plan is given (the plan holds it), but was a tensor")
    if not isinstance(plan, CommitPlan):
        raise TypeError(f"plan should be a CommitPlan, but was {type(plan).__name__}")
    check.check_plan(plan.source, plan.dest, plan.length, batch, pool_name, pool, pad_slot_id)
    return plan


def blocks_entered(window: int, block_size: int) -> int:
    """The most blocks that a window's tokens lie in, wherever it starts: ``1 + ceil((window - 1) / block_size)``.

    An allocator provides blocks ``num_computed // block_size`` to ``(num_computed + window - 1) // block_size`` before a step.

    Raises:
        TypeError, ValueError: not an int, below 1, or a window above 16.
    """
    _check_at_least_one("block_size", block_size)
    _check_at_least_one("window", window)
    if window > check.MAX_WINDOW:
        raise ValueError(f"window should be between 1 and {check.MAX_WINDOW} tokens, but was {window}")
    return 1 + -(-(window - 1) // block_size)


def _check_at_least_one(name: str, value: int) -> None:
    check.expect_int(name, value)
    if value < 1:
        raise ValueError(f"{name} should be at least 1, but was {value}")


def _slots_of(block_table: Tensor, block: Tensor) -> Tensor:
    """Entries of the table; no slot for blocks beyond it (padding rows may hold any ``num_computed``)."""
    blocks = block_table.shape[1]
    if blocks == 0:
        return block_table.new_full(block.shape, NO_SLOT)
    inside = block < blocks
    return torch.where(inside, block_table.gather(1, torch.where(inside, block, 0)), NO_SLOT)


# Exported programs and compiled regions may take and return plans.
pytree.register_dataclass(CommitPlan, serialized_type_name="recoverssm_ops.CommitPlan")
