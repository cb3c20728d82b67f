"""Dense and packed windows.

A packed batch keeps rows of different lengths back to back (``cu_seqlens``). The portable form computes on the dense
``[B, T]`` layout; these functions move between the two without a loop over the batch, a data-dependent shape or a host
synchronisation.
"""

import torch
from torch import Tensor


def row_lengths(cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """Window tokens of each row, ``[B]``, never more than ``max_seqlen``."""
    return (cu_seqlens[1:] - cu_seqlens[:-1]).clamp(0, max_seqlen).long()


def unpack(x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """``[1, N, ...]`` packed to ``[B, T, ...]`` dense, zeros past each row's end."""
    if x.shape[1] == 0:  # rows, but no tokens: there is nothing that a gather could point at
        return x.new_zeros(cu_seqlens.shape[0] - 1, max_seqlen, *x.shape[2:])
    index = cu_seqlens[:-1, None].long() + torch.arange(max_seqlen, device=x.device)
    inside = in_row(cu_seqlens, max_seqlen) & (index < x.shape[1])
    picked = x[0][torch.where(inside, index, 0)]
    return torch.where(inside.view(*inside.shape, *[1] * (x.ndim - 2)), picked, 0)


def in_row(cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """Which positions of the dense layout hold a token, ``[B, T]``."""
    return torch.arange(max_seqlen, device=cu_seqlens.device) < row_lengths(cu_seqlens, max_seqlen)[:, None]


def pack(x: Tensor, cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """``[B, T, ...]`` dense to ``[1, N, ...]`` packed; tokens that belong to no row become zeros."""
    batch, window = x.shape[:2]
    n = torch.arange(num_tokens, device=x.device)
    row = torch.searchsorted(cu_seqlens[1:].long(), n, right=True).clamp(max=batch - 1)
    t = n - cu_seqlens[row].long()
    inside = (t >= 0) & (n < cu_seqlens[row + 1]) & (t < window)
    picked = x[row, t.clamp(0, window - 1)]
    return torch.where(inside.view(-1, *[1] * (x.ndim - 2)), picked, 0).unsqueeze(0)
