"""CUDA implementations of the raw operators: pick the kernel's shape, pass strides, launch on the current stream.

Nothing here depends on values: no host synchronisation, no autotuning, the same launch for the same shapes. Only
activations that are not contiguous in their last axis are copied, never a pool.
"""

import contextlib

import torch
import triton
from torch import Tensor

from recoverssm_ops.triton.commit import commit_kernel
from recoverssm_ops.triton.verify import verify_kernel

# exp(-G) of the factored couplings stays below e^80, and its product with a unit vector finite in float32.
MAX_FACTORED_EXPONENT = 80.0


def verify_config(window: int, key_dim: int, value_dim: int, element_size: int) -> dict[str, int]:
    """Tile sizes, warps and stages of the verify kernel.

    The serial part of a program is latency, so many small programs beat few large ones: as few warps as hold the
    ``[2 TP, BK]`` operand and its pieces in registers without spilling.
    """
    TP = max(4, triton.next_power_of_2(window))
    BK = max(16, triton.next_power_of_2(key_dim))
    warps = max(1, min(8, max(2 * TP * BK // 1024, BK // 64)))
    large = _is_large(window, key_dim)
    wide = warps >= 4 and BK * element_size < 1024 and not large
    BV = min(64 if wide else 16 if large else 32, max(16, triton.next_power_of_2(value_dim)))
    return {"TP": TP, "BK": BK, "BV": BV, "STAGES": 1 if large else 2, "num_warps": warps}


def commit_config(key_dim: int, value_dim: int) -> dict[str, int]:
    """Tile sizes and warps of the commit kernel: 64 state elements a lane leave room to load one token ahead."""
    BK = max(16, triton.next_power_of_2(key_dim))
    BV = min(max(16, 2048 // BK), triton.next_power_of_2(value_dim))
    return {"BK": BK, "BV": BV, "num_warps": max(1, BK * BV // 2048)}


def _is_large(window: int, key_dim: int) -> bool:
    """Operands that leave little of the 99 KiB that a block can have on the smaller GPUs."""
    return window > 8 and key_dim > 128


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
        and not _is_large(window, key_dim)
    )
    with _on_device(state):
        verify_kernel[(batch * value_heads,)](
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
            v.shape[1],
            batch,
            pad_slot_id,
            0 if state_indices is None else state_indices.stride(0),
            *q.stride()[:3],
            *k.stride()[:3],
            *v.stride()[:3],
            *g.stride()[:3],
            *beta.stride(),
            *state.stride()[:3],
            heads,
            value_heads,
            key_dim,
            value_dim,
            window,
            BLOCK_V=triton.next_power_of_2(value_dim),
            SCALE=scale,
            LOWER_BOUND=lower_bound,
            SCALAR_GATE=scalar_gate,
            FACTORED=factored,
            USE_L2NORM=use_qk_l2norm_in_kernel,
            USE_GATE=use_gate_in_kernel,
            USE_SIGMOID=use_beta_sigmoid_in_kernel,
            NEG_EIGVAL=allow_neg_eigval,
            **verify_config(window, key_dim, value_dim, state.element_size()),
        )
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
    config = commit_config(key_dim, value_dim)
    tiles = triton.cdiv(value_dim, config["BV"])
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


def _last_axis_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _on_device(x: Tensor) -> contextlib.AbstractContextManager:
    """Triton launches on the current device's current stream, which must be the tensor's."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return contextlib.nullcontext()
