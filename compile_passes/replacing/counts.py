"""How many tokens the selected state has seen, as a tensor again."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node

from compile_passes.matching.window import Count, Position, Where
from compile_passes.reading.index_notation import Axis
from compile_passes.replacing.emit import Values, integer_leaves


def count_leaves(count: Count, axes: set[Axis | None]) -> list[Node]:
    """The nodes that :func:`num_accepted` reads."""
    if isinstance(count, int):
        return []
    if isinstance(count, Where):
        return [count.condition.node, *count_leaves(count.then, axes), *count_leaves(count.otherwise, axes)]
    return integer_leaves(count.lookup, axes)


def num_accepted(values: Values, count: Count, batch: Axis | None) -> Tensor | int:
    """``[B]``, or a number."""
    if isinstance(count, int):
        return count
    if isinstance(count, Where):
        condition = values.tensor(count.condition, [batch])
        sides = [num_accepted(values, side, batch) for side in (count.then, count.otherwise)]
        then, otherwise = (torch.full_like(condition, s, dtype=torch.int64) if isinstance(s, int) else s for s in sides)
        return torch.where(condition, then, otherwise)
    # Position T - 1 - i may also be written -1 - i.
    position = torch.remainder(values.integer(count.lookup, [batch]), count.count)
    return position + count.first if count.first else position


def selects_zeros(count: Count) -> bool:
    """Whether a position outside of the window selects zeros."""
    if isinstance(count, Where):
        return selects_zeros(count.then) or selects_zeros(count.otherwise)
    return isinstance(count, Position) and count.or_zero


def selected_zeros(values: Values, count: Count, batch: Axis | None) -> Tensor | None:
    """The rows that select zeros, ``[B]``; None if none can."""
    if not selects_zeros(count):
        return None
    if isinstance(count, Where):
        condition = values.tensor(count.condition, [batch])
        sides = [selected_zeros(values, side, batch) for side in (count.then, count.otherwise)]
        then, otherwise = (torch.zeros_like(condition) if side is None else side for side in sides)
        return torch.where(condition, then, otherwise)
    position = values.integer(count.lookup, [batch])
    return (position < 0) | (position >= count.count)
