"""Where a commit reads and writes."""

from dataclasses import dataclass

from torch import Tensor


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
