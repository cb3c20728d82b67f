"""CUDA implementations of the all-layers commits, by the rules of ``launch.py``: one launch, whatever the layers' number."""

from collections.abc import Callable, Hashable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from recoverssm_ops.triton import configs, launch
from recoverssm_ops.triton.address_table import address_table, aligned_kinds
from recoverssm_ops.triton.cached_launch import Launch, on_device, relaunch
from recoverssm_ops.triton.commit_rows import commit_layers_rows_kernel
from recoverssm_ops.triton.configs import commit_config, commit_rows_config
from recoverssm_ops.triton.launch import _contiguous, _last_axis_contiguous
from recoverssm_ops.triton.launch_conv import conv_config
from recoverssm_ops.triton.layers import commit_layers_kernel, conv_commit_layers_kernel

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def commit(
    states: list[Tensor],
    u: list[Tensor],
    k: list[Tensor],
    g: list[Tensor],
    source: Tensor,
    dest: Tensor,
    length: Tensor,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    A_log: list[Tensor],
    dt_bias: list[Tensor],
    lower_bound: float,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool,
    pad_slot_id: int,
) -> None:
    """Arguments as in the schema of ``layers_ops.py``; the launch of ``launch.commit``, once for all layers."""
    batch, columns = dest.shape
    if not states or batch * columns * states[0].numel() == 0:
        return
    _check_layout("states", states)
    heads, (value_heads, value_dim, key_dim) = k[0].shape[2], states[0].shape[1:]
    window = u[0].shape[1] if cu_seqlens is None else max_seqlen
    scalar_gate = g[0].ndim == 3
    u, k = _one_layout(u), _one_layout(k)
    g = _one_layout(g, any_last_axis=scalar_gate)
    kinds = [states, u, k, g, *([_contiguous(x) for x in gate] for gate in (A_log, dt_bias))]
    if any(len({x.data_ptr() % 16 == 0 for x in tensors}) > 1 for tensors in kinds):
        # Sums follow the layout that alignment allows: layers that differ in it would not get the bits of their own launches.
        for layer in range(len(states)):
            record_and_gate = (u[layer], k[layer], g[layer], source, dest, length, cu_seqlens, max_seqlen)
            parameters = (x[layer] if x else None for x in (A_log, dt_bias))
            flags = (use_qk_l2norm_in_kernel, use_gate_in_kernel)
            launch.commit(states[layer], *record_and_gate, *parameters, lower_bound, *flags, pad_slot_id)
        return
    # One layer's choices, so that the bits are those of one launch a layer.
    programs = batch * value_heads
    plan = (source, dest, length, _contiguous(cu_seqlens))
    sizes = (heads, value_heads, key_dim, value_dim, window)
    options = {"LOWER_BOUND": lower_bound, "SCALAR_GATE": scalar_gate}
    options |= {"USE_L2NORM": use_qk_l2norm_in_kernel, "USE_GATE": use_gate_in_kernel}
    if launch._fits_gluon(window, (u[0], k[0], g[0]), states[0]):
        # Unless a layer's programs are few, bits do not depend on how many there are, and here are those of all layers.
        together = programs if programs <= configs.FEW_PROGRAMS else programs * len(states)
        config = commit_rows_config(together, window, key_dim, value_dim, states[0].dtype, columns)
        programs *= value_dim // config["PART"]
        numbers = (programs, u[0].shape[1], pad_slot_id, source.stride(0), *dest.stride(), *length.stride())
        numbers += (*_strides(u, k, g), *states[0].stride()[:2])
        numbers += (len(states), *map(_dtype, kinds), aligned_kinds(kinds), *sizes, columns)
        _relaunch(_commit_rows_launch, kinds, plan, len(states) * programs, numbers, options | config)
        return
    config = commit_config(programs, window, key_dim, value_dim, states[0].dtype)
    programs *= triton.cdiv(value_dim, config["PART"])
    numbers = (programs, u[0].shape[1], pad_slot_id, source.stride(0), *dest.stride(), *length.stride())
    numbers += (*_strides(u, k, g, states), len(states), *map(_dtype, kinds), aligned_kinds(kinds), *sizes, columns)
    _relaunch(_commit_launch, kinds, plan, len(states) * programs, numbers, options | config)


def conv_commit(
    conv_states: list[Tensor],
    xs: list[Tensor],
    source: Tensor,
    dest: Tensor,
    length: Tensor,
    cu_seqlens: Tensor | None,
    pad_slot_id: int,
) -> None:
    """Arguments as in the schema of ``layers_ops.py``; the launch of ``launch_conv.commit``, once for all layers."""
    batch, columns = dest.shape
    if not conv_states or batch * columns * conv_states[0].numel() == 0:
        return
    _check_layout("conv_states", conv_states)
    channels, kept = conv_states[0].shape[1:]
    window = xs[0].shape[1] if cu_seqlens is None else 1 << 30
    kinds = [conv_states, _one_layout(xs, any_last_axis=True)]
    config = conv_config(channels)
    programs = batch * triton.cdiv(channels, config["BD"])
    plan = (source, dest, length, _contiguous(cu_seqlens))
    numbers = (programs, xs[0].shape[1], pad_slot_id, source.stride(0), *dest.stride(), *length.stride())
    numbers += (*kinds[1][0].stride(), *conv_states[0].stride(), len(conv_states), *map(_dtype, kinds))
    numbers += (aligned_kinds(kinds), channels, kept + 1, window, columns)
    _relaunch(_conv_commit_launch, kinds, plan, len(conv_states) * programs, numbers, config)


def _relaunch(
    describe: Callable[..., Launch],
    kinds: list[list[Tensor]],
    plan: tuple[Tensor | None, ...],
    programs: int,
    numbers: tuple[Hashable, ...],
    options: dict[str, Hashable],
) -> None:
    """The layers' own layouts are among the numbers."""
    with on_device(kinds[0][0]):
        table = address_table(kinds, kinds[0][0].device)
        relaunch(describe, (table, *plan), (programs, numbers, tuple(options.items())))


def _commit_rows_launch(*tensors_and_numbers) -> Launch:
    return _launch_of(commit_layers_rows_kernel, *tensors_and_numbers)


def _commit_launch(*tensors_and_numbers) -> Launch:
    return _launch_of(commit_layers_kernel, *tensors_and_numbers)


def _conv_commit_launch(*tensors_and_numbers) -> Launch:
    return _launch_of(conv_commit_layers_kernel, *tensors_and_numbers)


def _launch_of(
    kernel: Any,
    table: Tensor,
    source: Tensor,
    dest: Tensor,
    length: Tensor,
    cu_seqlens: Tensor | None,
    programs: int,
    numbers: tuple[Hashable, ...],
    options: tuple[tuple[str, Hashable], ...],
) -> Launch:
    return Launch(kernel, (programs,), (table, source, dest, length, cu_seqlens), numbers, dict(options))


def _strides(*kinds: list[Tensor]) -> tuple[int, ...]:
    return sum((tensors[0].stride()[:3] for tensors in kinds), ())


def _dtype(tensors: list[Tensor]) -> tl.dtype | None:
    return _DTYPES[tensors[0].dtype] if tensors else None


def _one_layout(tensors: list[Tensor], any_last_axis: bool = False) -> list[Tensor]:
    """Activations with the strides of the first; those that lie otherwise are copied."""
    if not any_last_axis:
        tensors = [_last_axis_contiguous(x) for x in tensors]
    if all(x.stride() == tensors[0].stride() for x in tensors):
        return tensors
    return [x.contiguous() for x in tensors]


def _check_layout(name: str, pools: list[Tensor]) -> None:
    """A pool of other strides would be written in the wrong places, and a pool cannot be copied."""
    for layer, pool in enumerate(pools):
        if (pool.shape, pool.dtype, pool.stride()) != (pools[0].shape, pools[0].dtype, pools[0].stride()):
            raise ValueError(f"{name}[{layer}] should have the shape, dtype and strides of {name}[0], but had others")
