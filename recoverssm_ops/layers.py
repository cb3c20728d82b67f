"""Commits of every layer of a step in one call: the same bits as the loop over the layers, one launch on a GPU."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from recoverssm_ops import layers_ops as ops
from recoverssm_ops import validation as check
from recoverssm_ops.commit_plan import CommitPlan, resolve_plan
from recoverssm_ops.conv import check_commit as check_conv_commit
from recoverssm_ops.kda import _layout_and_gate, check_commit
from recoverssm_ops.records import Record


def kda_commit_layers(
    states: Sequence[Tensor],
    records: Sequence[Record],
    num_accepted: Tensor | None,
    state_indices: Tensor | None = None,
    *,
    plan: CommitPlan | None = None,
    pad_slot_id: int = -1,
) -> None:
    """:func:`kda_commit` of every layer of a step, in place. Consumes the records.

    All layers are checked before anything is written. On a GPU it is one launch; captured in a CUDA graph it keeps a few
    bytes a layer of pinned memory for the life of the process, and needs the usual run before the capture.

    Args:
        states: one pool ``[slots, HV, V, K]`` a layer, of one shape, dtype, device and strides. In a compiled function each
            is a tensor of its own: Inductor copies or misplaces views of one tensor (docs/design.md, section 4).
        records: one a layer, of windows of one shape and packing, with the same settings; strides of ``k`` and ``g`` that
            differ cost a copy of them.
        num_accepted, state_indices, plan, pad_slot_id: as :func:`kda_commit`, common to the layers.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`kda_commit`, naming the layer; also layers that differ, and a pool or
            record that is given twice.
    """
    _check_lists("states", states, "records", records)
    if not states:
        return
    for layer, (state, record) in enumerate(zip(states, records, strict=True)):
        batch = _naming_layer(layer, check_commit, state, record)
        _check_alike(f"states[{layer}]", _pool_layout(state), _pool_layout(states[0]))
        _check_alike(f"records[{layer}]", _record_layout(record), _record_layout(records[0]))
        if record.cu_seqlens is not records[0].cu_seqlens:
            raise ValueError(f"records[{layer}] should have the cu_seqlens tensor of records[0], but had another one")
    rows = ("state_indices", batch, "states[0]", states[0])
    plan = resolve_plan(plan, num_accepted, state_indices, *rows, pad_slot_id)
    cu_seqlens, max_seqlen, _, _, *settings = _layout_and_gate(records[0])
    ops.kda_commit_layers(
        list(states),
        [record.u for record in records],
        [record.k for record in records],
        [record.g for record in records],
        plan.source,
        plan.dest,
        plan.length,
        cu_seqlens,
        max_seqlen,
        [record.A_log for record in records if record.A_log is not None],
        [record.dt_bias for record in records if record.dt_bias is not None],
        *settings,
        pad_slot_id,
    )
    for record in records:
        record.committed = True


def causal_conv1d_commit_layers(
    conv_states: Sequence[Tensor],
    xs: Sequence[Tensor],
    num_accepted: Tensor | None,
    conv_state_indices: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    plan: CommitPlan | None = None,
    pad_slot_id: int = -1,
) -> None:
    """:func:`causal_conv1d_commit` of every layer of a step, in place; as :func:`kda_commit_layers` in all else.

    Args:
        conv_states: one pool ``[slots, D, W-1]`` a layer, of one shape, dtype, device and strides.
        xs: one window a layer, ``[B, T, D]`` or ``[1, N, D]``, of one shape and dtype.
        num_accepted, conv_state_indices, cu_seqlens, plan, pad_slot_id: as :func:`causal_conv1d_commit`.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`causal_conv1d_commit`, naming the layer; also layers that differ, and
            a pool that is given twice.
    """
    _check_lists("conv_states", conv_states, "xs", xs)
    if not conv_states:
        return
    for layer, (conv_state, x) in enumerate(zip(conv_states, xs, strict=True)):
        batch = _naming_layer(layer, check_conv_commit, conv_state, x, cu_seqlens)
        _check_alike(f"conv_states[{layer}]", _pool_layout(conv_state), _pool_layout(conv_states[0]))
        _check_alike(f"xs[{layer}]", _kind(x), _kind(xs[0]))
    rows = ("conv_state_indices", batch, "conv_states[0]", conv_states[0])
    plan = resolve_plan(plan, num_accepted, conv_state_indices, *rows, pad_slot_id)
    if cu_seqlens is not None and check.debugging():
        check.debug_packing(cu_seqlens, check.MAX_WINDOW, xs[0].shape[1])
    where = (plan.source, plan.dest, plan.length)
    ops.causal_conv1d_commit_layers(list(conv_states), list(xs), *where, cu_seqlens, pad_slot_id)


def _check_lists(pools_name: str, pools: object, windows_name: str, windows: object) -> None:
    for name, values in {pools_name: pools, windows_name: windows}.items():
        if not isinstance(values, (list, tuple)):
            raise TypeError(f"{name} should be a list or tuple, one entry a layer, but was {type(values).__name__}")
        if not torch.compiler.is_compiling() and len(set(map(id, values))) != len(values):
            raise ValueError(f"{name} should hold one of its own for each layer, but holds one of them twice")
    if len(pools) != len(windows):
        raise ValueError(f"{windows_name} should have {len(pools)} layers like {pools_name}, but had {len(windows)}")


def _naming_layer(layer: int, checker: Callable[..., int], *arguments: Any) -> int:
    """What ``checker`` returns; its errors say which layer they are about."""
    try:
        return checker(*arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        raise type(error)(f"layer {layer}: {error}") from error


def _kind(x: Tensor | None, prefix: str = "") -> dict:
    return {} if x is None else {f"{prefix}shape": tuple(x.shape), f"{prefix}dtype": x.dtype}


def _pool_layout(pool: Tensor) -> dict:
    """One launch has one set of strides, and a pool cannot be copied."""
    return _kind(pool) | {"strides": tuple(pool.stride()), "device": pool.device}


def _record_layout(record: Record) -> dict:
    layout = {
        "max_seqlen": record.max_seqlen,
        "lower_bound": record.lower_bound,
        "use_qk_l2norm_in_kernel": record.use_qk_l2norm_in_kernel,
        "use_gate_in_kernel": record.use_gate_in_kernel,
        "an A_log": record.A_log is not None,
        "a dt_bias": record.dt_bias is not None,
    }
    for name in ("u", "k", "g", "A_log", "dt_bias"):
        layout |= _kind(getattr(record, name), f"{name}.")
    return layout


def _check_alike(name: str, layout: dict, first: dict) -> None:
    for part, value in first.items():
        if layout[part] != value:
            raise ValueError(f"{name} should have {part} = {value} like layer 0, but had {layout[part]}")
