"""CUDA implementations of the raw operators: pick the kernel's shape, pass strides, launch on the current stream.

Nothing here depends on values: no host synchronisation, no autotuning, the same launch for the same shapes. Only
activations that are not contiguous in their last axis are copied, never a pool.
"""

import contextlib

import torch
import triton
from torch import Tensor
from triton.runtime import JITFunction

from recoverssm_ops.triton import configs
from recoverssm_ops.triton.commit import commit_kernel
from recoverssm_ops.triton.commit_async import commit_async_kernel
from recoverssm_ops.triton.configs import (
    commit_async_config,
    commit_config,
    shift,
    verify_async_config,
    verify_config,
)
from recoverssm_ops.triton.verify import verify_kernel
from recoverssm_ops.triton.verify_async import verify_async_kernel

# exp(-G) of the factored couplings stays below e^80, and its product with a unit vector finite in float32.
MAX_FACTORED_EXPONENT = 80.0


def verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    state_indices: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float,
    scale: float,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    pad_slot_id: int,
) -> tuple[Tensor, Tensor]:
    """Outputs ``o`` (dtype of v) and corrections ``u`` (float32); arguments as in the schema of ``ops.py``."""
    heads, value_heads, value_dim, key_dim = k.shape[2], v.shape[2], v.shape[3], k.shape[3]
    batch, window = (q.shape[0], q.shape[1]) if cu_seqlens is None else (cu_seqlens.shape[0] - 1, max_seqlen)
    if batch * window * v.numel() * key_dim == 0:
        return v.new_zeros(v.shape), v.new_zeros(v.shape, dtype=torch.float32)
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    u = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    q, k, v = (_last_axis_contiguous(x) for x in (q, k, v))
    scalar_gate = g.ndim == 3
    g = g if scalar_gate else _last_axis_contiguous(g)
    factored = (
        use_gate_in_kernel
        and use_qk_l2norm_in_kernel
        and not scalar_gate
        and lower_bound < 0
        and -lower_bound * window <= MAX_FACTORED_EXPONENT
    )
    programs = batch * value_heads
    arguments = (
        q,
        k,
        v,
        g,
        beta,
        state,
        state_indices,
        _contiguous(cu_seqlens),
        _contiguous(A_log),
        _contiguous(dt_bias),
        o,
        u,
    )
    arguments += (v.shape[1], batch, pad_slot_id, 0 if state_indices is None else state_indices.stride(0))
    for x in (q, k, v, g):
        arguments += x.stride()[:3]
    arguments += beta.stride()
    options = {
        "H": heads, "HV": value_heads, "K": key_dim, "V": value_dim, "T": window, "SCALE": scale, "LOWER_BOUND": lower_bound,
        "BLOCK_V": triton.next_power_of_2(value_dim), "SHIFT": shift(lower_bound, window) if factored else 0,
        "USE_SIGMOID": use_beta_sigmoid_in_kernel, "NEG_EIGVAL": allow_neg_eigval,
    }  # fmt: skip
    with _on_device(state):
        if factored and _fits_async(window, (q, k, v, g, beta), state):
            config = verify_async_config(programs, window, key_dim, value_dim, state.dtype)
            verify_async_kernel[(programs,)](*arguments, *state.stride()[:2], **options, **config)
        else:
            config = verify_config(programs, window, key_dim, value_dim, state.dtype)
            gate = {"SCALAR_GATE": scalar_gate, "FACTORED": factored, "USE_GATE": use_gate_in_kernel}
            flags = gate | {"USE_L2NORM": use_qk_l2norm_in_kernel}
            verify_kernel[(programs,)](*arguments, *state.stride()[:3], **options, **flags, **config)
    return o, u


def commit(
    state: Tensor,
    u: Tensor,
    k: Tensor,
    g: Tensor,
    source: Tensor,
    dest: Tensor,
    length: Tensor,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool,
    pad_slot_id: int,
) -> None:
    """Write, per row and plan column, the state after ``length`` tokens to slot ``dest``; ``state`` is mutated."""
    record_and_gate = (u, k, g, cu_seqlens, max_seqlen, A_log, dt_bias, lower_bound)
    flags = (use_qk_l2norm_in_kernel, use_gate_in_kernel)
    _walk(state, state, source, dest, length, dest.shape, pad_slot_id, *record_and_gate, *flags)


def recover(
    initial_state: Tensor,
    u: Tensor,
    k: Tensor,
    g: Tensor,
    num_accepted: Tensor,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool,
) -> Tensor:
    """The state after ``num_accepted`` tokens, a fresh ``[B, HV, V, K]`` float32."""
    out = torch.empty(initial_state.shape, dtype=torch.float32, device=initial_state.device)
    record_and_gate = (u, k, g, cu_seqlens, max_seqlen, A_log, dt_bias, lower_bound)
    flags = (use_qk_l2norm_in_kernel, use_gate_in_kernel)
    plan_shape = (initial_state.shape[0], 1)
    _walk(initial_state, out, None, None, num_accepted, plan_shape, 0, *record_and_gate, *flags)
    return out


def _walk(
    source_state: Tensor,
    dest_state: Tensor,
    source: Tensor | None,
    dest: Tensor | None,
    length: Tensor,
    plan_shape: tuple[int, int],
    pad_slot_id: int,
    u: Tensor,
    k: Tensor,
    g: Tensor,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool,
) -> None:
    """Launch the commit kernel. Without ``source`` and ``dest``, row b of one tensor goes to row b of the other."""
    batch, columns = plan_shape
    heads, (value_heads, value_dim, key_dim) = k.shape[2], dest_state.shape[1:]
    if batch * columns * dest_state.numel() == 0:
        return
    window = u.shape[1] if cu_seqlens is None else max_seqlen
    u, k = _last_axis_contiguous(u), _last_axis_contiguous(k)
    scalar_gate = g.ndim == 3
    g = g if scalar_gate else _last_axis_contiguous(g)
    programs = batch * value_heads
    if source is not None and commits_async(programs, columns, window, (u, k, g), dest_state):
        arguments = (
            dest_state,
            u,
            k,
            g,
            source,
            dest,
            length,
            *map(_contiguous, (cu_seqlens, A_log, dt_bias)),
            u.shape[1],
        )
        arguments += (pad_slot_id, source.stride(0), dest.stride(0), length.stride(0))
        for x in (u, k, g):
            arguments += x.stride()[:3]
        with _on_device(dest_state):
            commit_async_kernel[(programs,)](
                *arguments, *dest_state.stride()[:2], heads, value_heads, key_dim, value_dim, window,
                BLOCK_V=triton.next_power_of_2(value_dim), LOWER_BOUND=lower_bound, USE_L2NORM=use_qk_l2norm_in_kernel,
                USE_GATE=use_gate_in_kernel, **commit_async_config(key_dim, value_dim),
            )  # fmt: skip
        return
    config = commit_config(programs, window, key_dim, value_dim, dest_state.dtype)
    tiles = triton.cdiv(value_dim, config["PART"])
    with _on_device(dest_state):
        commit_kernel[(batch * value_heads * tiles,)](
            source_state,
            dest_state,
            u,
            k,
            g,
            source,
            dest,
            length,
            _contiguous(cu_seqlens),
            _contiguous(A_log),
            _contiguous(dt_bias),
            u.shape[1],
            pad_slot_id,
            0 if source is None else source.stride(0),
            *((0, 0) if dest is None else dest.stride()),
            length.stride(0),
            length.stride(1) if length.ndim == 2 else 0,
            *u.stride()[:3],
            *k.stride()[:3],
            *g.stride()[:3],
            *source_state.stride()[:3],
            *dest_state.stride()[:3],
            heads,
            value_heads,
            key_dim,
            value_dim,
            window,
            columns,
            LOWER_BOUND=lower_bound,
            SCALAR_GATE=scalar_gate,
            USE_L2NORM=use_qk_l2norm_in_kernel,
            USE_GATE=use_gate_in_kernel,
            IN_PLACE=source is not None,
            **config,
        )


def commits_async(
    programs: int, columns: int, window: int, record: tuple[Tensor, Tensor, Tensor], state: Tensor
) -> bool:
    """Whether a layer is committed by ``commit_async.py``: its bits may differ from those of ``commit.py``."""
    suited = (
        columns == 1
        and record[2].ndim == 4
        and state.dtype == torch.bfloat16
        and window <= 8
        and state.shape[3] <= 128
        and _fits_async(window, record, state)
    )
    # Last, so that a tracer's symbolic batch is not asked.
    return suited and programs > configs.FEW_PROGRAMS


def _fits_async(window: int, activations: tuple[Tensor, ...], state: Tensor) -> bool:
    """Whether the Gluon kernels take this: whole state rows in copies of 16 bytes, 32-bit offsets within a window.

    Neither Triton's interpreter nor a tracer (``visible.py``) takes Gluon; both put something else in the kernel's place.
    """
    value_dim, key_dim = state.shape[2:]
    wide, long = key_dim > 128, window > 8
    return (
        isinstance(verify_kernel, JITFunction)
        and window <= 16
        and key_dim <= 256
        and key_dim % 16 == 0
        and value_dim % (64 if wide and long else 32) == 0
        and (value_dim <= 256 or not (wide or long))
        and state.stride(2) == key_dim
        and state.stride(0) % 16 == state.stride(1) % 16 == state.data_ptr() % 16 == 0
        and all(16 * x.stride(1) < 2**31 for x in activations)
    )


def _last_axis_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _on_device(x: Tensor) -> contextlib.AbstractContextManager:
    """Triton launches on the current device's current stream, which must be the tensor's."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return contextlib.nullcontext()
