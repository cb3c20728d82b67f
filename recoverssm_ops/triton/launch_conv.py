"""CUDA implementations of the raw convolution operators, by the rules of ``launch.py``; here nothing is copied at all."""

import torch
import triton
from torch import Tensor

from recoverssm_ops.triton.cached_launch import Launch, relaunch
from recoverssm_ops.triton.conv import conv_commit_kernel, conv_verify_kernel
from recoverssm_ops.triton.launch import _contiguous


def conv_config(channels: int) -> dict[str, int]:
    """Tile of channels and warps of both kernels: two channels a lane, so that a warp reads 128 bytes of bf16 a token
    and the widest window stays in registers."""
    BD = min(256, max(32, triton.next_power_of_2(channels)))
    return {"BD": BD, "num_warps": max(1, BD // 64)}


def verify(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    conv_state_indices: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    silu: bool,
    pad_slot_id: int,
) -> Tensor:
    """Outputs like x; arguments as in the schema of ``conv_ops.py``."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    tensors = (x, weight, bias, conv_state, conv_state_indices, _contiguous(cu_seqlens), y)
    relaunch(_verify_launch, tensors, (max_seqlen, silu, pad_slot_id), (conv_config,))
    return y


def _verify_launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    conv_state_indices: Tensor | None,
    cu_seqlens: Tensor | None,
    y: Tensor,
    max_seqlen: int,
    silu: bool,
    pad_slot_id: int,
) -> Launch | None:
    channels, width = weight.shape
    batch, window = (x.shape[0], x.shape[1]) if cu_seqlens is None else (cu_seqlens.shape[0] - 1, max_seqlen)
    if batch * x.numel() == 0:
        y.zero_()
        return None
    config = conv_config(channels)
    tensors = (x, weight, bias, conv_state, conv_state_indices, cu_seqlens, y)
    numbers = (x.shape[1], batch, pad_slot_id, 0 if conv_state_indices is None else conv_state_indices.stride(0))
    numbers += (*x.stride(), *weight.stride(), 0 if bias is None else bias.stride(0), *conv_state.stride())
    grid = (batch * triton.cdiv(channels, config["BD"]),)
    return Launch(conv_verify_kernel, grid, tensors, (*numbers, channels, width, window), {"SILU": silu} | config)


def commit(
    conv_state: Tensor,
    x: Tensor,
    source: Tensor,
    dest: Tensor,
    length: Tensor,
    cu_seqlens: Tensor | None,
    pad_slot_id: int,
) -> None:
    """Write, per row and plan column, the history after ``length`` tokens to slot ``dest``; ``conv_state`` is mutated."""
    tensors = (conv_state, x, source, dest, length, _contiguous(cu_seqlens))
    relaunch(_commit_launch, tensors, (pad_slot_id,), (conv_config,))


def _commit_launch(
    conv_state: Tensor,
    x: Tensor,
    source: Tensor,
    dest: Tensor,
    length: Tensor,
    cu_seqlens: Tensor | None,
    pad_slot_id: int,
) -> Launch | None:
    batch, columns = dest.shape
    channels, kept = conv_state.shape[1:]
    if batch * columns * conv_state.numel() == 0:
        return None
    # A packed row ends where cu_seqlens says; its window is no constant here, so that all of them share one kernel.
    window = x.shape[1] if cu_seqlens is None else 1 << 30
    config = conv_config(channels)
    tensors = (conv_state, x, source, dest, length, cu_seqlens)
    numbers = (x.shape[1], pad_slot_id, source.stride(0), *dest.stride(), *length.stride(), *x.stride())
    numbers += (*conv_state.stride(), channels, kept + 1, window, columns)
    return Launch(conv_commit_kernel, (batch * triton.cdiv(channels, config["BD"]),), tensors, numbers, config)
