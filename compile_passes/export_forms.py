"""The operators as functions of plain ATen, for programs that must run where this library is not installed.

Exporting a function that calls these traces through them: the same algorithms that are the operators' CPU kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compile_passes.index_notation import prims
from recoverssm_ops import conv_ops, layers_ops, ops, portable, portable_conv


def _commit_layers(states, u, k, g, source, dest, length, cu_seqlens, max_seqlen, A_log, dt_bias, *settings) -> None:
    for layer, state in enumerate(states):
        gate = (layers_ops.of_layer(A_log, layer), layers_ops.of_layer(dt_bias, layer))
        record = (u[layer], k[layer], g[layer])
        portable.commit(state, *record, source, dest, length, cu_seqlens, max_seqlen, *gate, *settings)


def _conv_commit_layers(conv_states, xs, *plan_and_settings) -> None:
    for conv_state, x in zip(conv_states, xs, strict=True):
        portable_conv.commit(conv_state, x, *plan_and_settings)


PORTABLE = {
    ops.kda_verify: portable.verify,
    ops.kda_commit: portable.commit,
    ops.kda_recover: portable.recover,
    conv_ops.causal_conv1d_verify: portable_conv.verify,
    conv_ops.causal_conv1d_commit: portable_conv.commit,
    layers_ops.kda_commit_layers: _commit_layers,
    layers_ops.causal_conv1d_commit_layers: _conv_commit_layers,
}
OPERATORS = tuple(PORTABLE)


def _iota(length: int, *, start: int, step: int, dtype: torch.dtype, device: torch.device, requires_grad: bool):
    return torch.arange(start, start + length * step, step, dtype=dtype, device=device)


def _convert(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype)


# What the rewrite leaves of Inductor's own dialect, which no other runtime reads.
ATEN = {prims.iota.default: _iota, prims.convert_element_type.default: _convert}
