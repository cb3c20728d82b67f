"""CUDA implementations of the raw convolution operators, by the rules of ``launch.py``; here nothing is copied at all."""

import torch
import triton
from torch import Tensor

from recoverssm_ops.triton.conv import conv_commit_kernel, conv_verify_kernel
from recoverssm_ops.triton.launch import _contiguous, _on_device


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
    channels, width = weight.shape
    batch, window = (x.shape[0], x.shape[1]) if cu_seqlens is None else (cu_seqlens.shape[0] - 1, max_seqlen)
    if batch * x.numel() == 0:
        return x.new_zeros(x.shape)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    config = conv_config(channels)
    with _on_device(conv_state):
        conv_verify_kernel[(batch * triton.cdiv(channels, config["BD"]),)](
            x,
            weight,
            bias,
            conv_state,
            conv_state_indices,
            _contiguous(cu_seqlens),
            y,
            x.shape[1],
            batch,
            pad_slot_id,
            0 if conv_state_indices is None else conv_state_indices.stride(0),
            *x.stride(),
            *weight.stride(),
            0 if bias is None else bias.stride(0),
            *conv_state.stride(),
            channels,
            width,
            window,
            SILU=silu,
            **config,
        )
    return y


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
    batch, columns = dest.shape
    channels, kept = conv_state.shape[1:]
    if batch * columns * conv_state.numel() == 0:
        return
    # A packed row ends where cu_seqlens says; its window is no constant here, so that all of them share one kernel.
    window = x.shape[1] if cu_seqlens is None else 1 << 30
    config = conv_config(channels)
    with _on_device(conv_state):
        conv_commit_kernel[(batch * triton.cdiv(channels, config["BD"]),)](
            conv_state,
            x,
            source,
            dest,
            length,
            _contiguous(cu_seqlens),
            x.shape[1],
            pad_slot_id,
            source.stride(0),
            *dest.stride(),
            *length.stride(),
            *x.stride(),
            *conv_state.stride(),
            channels,
            kept + 1,
            window,
            columns,
            **config,
        )
