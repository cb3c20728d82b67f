"""The causal depthwise short convolution in front of q, k and v."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_conv1d_window(x: Tensor, history: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Convolve a window that continues an earlier sequence; SiLU activation.

    ``x [B, T, D]``, ``history [B, D, W-1]`` (the last inputs, oldest first), ``weight [D, W]``. Returns ``y [B, T, D]``
    and the extended input ``[B, D, W-1+T]``, whose columns ``n .. n+W-2`` are the history after n tokens.
    """
    extended = torch.cat([history, x.transpose(1, 2)], dim=-1)
    y = F.conv1d(extended, weight.unsqueeze(1), groups=weight.shape[0])
    return F.silu(y).transpose(1, 2), extended


def history_after(extended: Tensor, num_accepted: Tensor, width: int) -> Tensor:
    """The ``width - 1`` inputs before position ``num_accepted``: ``extended [B, D, W-1+T]`` -> ``[B, D, W-1]``."""
    columns = num_accepted.unsqueeze(-1) + torch.arange(width - 1, device=extended.device)
    return extended.gather(-1, columns.unsqueeze(1).expand(-1, extended.shape[1], -1))


def causal_conv1d_sequence(x: Tensor, weight: Tensor) -> Tensor:
    """Convolve a whole sequence from an empty history; SiLU activation. ``x [B, T, D]``, ``weight [D, W]``.

    Written as W shifted products: the compiler fuses them into one pass, where the library's depthwise backward in low
    precision is slow enough to dominate training.
    """
    T, width = x.shape[1], weight.shape[1]
    padded = F.pad(x, (0, 0, width - 1, 0))
    y = padded[:, :T] * weight[:, 0]
    for i in range(1, width):
        y = y + padded[:, i : i + T] * weight[:, i]
    return F.silu(y)
