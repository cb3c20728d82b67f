"""CUDA implementations of the raw operators: pick the kernel's shape, pass strides, launch on the current stream.

Nothing here depends on values: no host synchronisation, no autotuning, the same launch for the same shapes. Only
activations that are not contiguous in their last axis are copied, never a pool.
"""

import torch
import triton
from torch import Tensor
from triton.runtime import JITFunction

from recoverssm_ops.triton import configs
from recoverssm_ops.triton.cached_launch import Launch, relaunch
from recoverssm_ops.triton.commit import commit_kernel
from recoverssm_ops.triton.commit_rows import commit_rows_kernel
from recoverssm_ops.triton.configs import (
    commit_config,
    commit_rows_config,
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
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    u = torch.empty_like(v, memory_format=torch.contiguous_format, dtype=torch.float32)
    q, k, v, g = _last_axis_contiguous(q), _last_axis_contiguous(k), _last_axis_contiguous(v), _channels_contiguous(g)
    vectors = (_contiguous(cu_seqlens), _contiguous(A_log), _contiguous(dt_bias))
    tensors = (q, k, v, g, beta, state, state_indices, *vectors, o, u)
    gate = (
        lower_bound,
        scale,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
    )
    choices = (
        _fits_gluon,
        verify_config,
        verify_async_config,
        configs.limits(),
        MAX_FACTORED_EXPONENT,
    )
    relaunch(_verify_launch, tensors, (max_seqlen, *gate, pad_slot_id), choices)
    return o, u


def _verify_launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    state_indices: Tensor | None,
    cu_seqlens: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    o: Tensor,
    u: Tensor,
    max_seqlen: int,
    lower_bound: float,
    scale: float,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    pad_slot_id: int,
) -> Launch | None:
    heads, value_heads, value_dim, key_dim = k.shape[2], v.shape[2], v.shape[3], k.shape[3]
    batch, window = (q.shape[0], q.shape[1]) if cu_seqlens is None else (cu_seqlens.shape[0] - 1, max_seqlen)
    if batch * window * v.numel() * key_dim == 0:
        o.zero_()
        u.zero_()
        return None
    scalar_gate = g.ndim == 3
    factored = (
        use_gate_in_kernel
        and use_qk_l2norm_in_kernel
        and not scalar_gate
        and lower_bound < 0
        and -lower_bound * window <= MAX_FACTORED_EXPONENT
    )
    programs = batch * value_heads
    tensors = (q, k, v, g, beta, state, state_indices, cu_seqlens, A_log, dt_bias, o, u)
    numbers = (v.shape[1], batch, pad_slot_id, 0 if state_indices is None else state_indices.stride(0))
    for x in (q, k, v, g):
        numbers += x.stride()[:3]
    numbers += beta.stride()
    options = {
        "H": heads, "HV": value_heads, "K": key_dim, "V": value_dim, "T": window, "SCALE": scale, "LOWER_BOUND": lower_bound,
        "BLOCK_V": triton.next_power_of_2(value_dim), "SHIFT": shift(lower_bound, window) if factored else 0,
        "SCALAR_GATE": scalar_gate, "FACTORED": factored, "USE_GATE": use_gate_in_kernel, "USE_L2NORM": use_qk_l2norm_in_kernel,
        "USE_SIGMOID": use_beta_sigmoid_in_kernel, "NEG_EIGVAL": allow_neg_eigval,
    }  # fmt: skip
    halved = not (factored or scalar_gate)
    if _fits_gluon(window, (q, k, v, g, beta), state) and not (halved and window > 8 and key_dim > 128):
        options |= verify_async_config(programs, window, key_dim, value_dim, state.dtype, halved)
        programs *= value_dim // options["SHARE"]
        options["BLOCK_V"] = triton.next_power_of_2(options["SHARE"])
        return Launch(verify_async_kernel, (programs,), tensors, (*numbers, *state.stride()[:2]), options)
    options |= verify_config(programs, window, key_dim, value_dim, state.dtype)
    return Launch(verify_kernel, (programs,), tensors, (*numbers, *state.stride()[:3]), options)


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
    record = (_last_axis_contiguous(u), _last_axis_contiguous(k), _channels_contiguous(g))
    vectors = (_contiguous(cu_seqlens), _contiguous(A_log), _contiguous(dt_bias))
    tensors = (state, *record, source, dest, length, *vectors)
    settings = (max_seqlen, lower_bound, use_qk_l2norm_in_kernel, use_gate_in_kernel, pad_slot_id)
    relaunch(_commit_launch, tensors, settings, (_fits_gluon, commit_config, commit_rows_config, configs.limits()))


def _commit_launch(state: Tensor, *arguments) -> Launch | None:
    return _walk_launch(state, state, *arguments)


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
    record = (_last_axis_contiguous(u), _last_axis_contiguous(k), _channels_contiguous(g))
    vectors = (_contiguous(cu_seqlens), _contiguous(A_log), _contiguous(dt_bias))
    tensors = (initial_state, out, *record, None, None, num_accepted, *vectors)
    settings = (max_seqlen, lower_bound, use_qk_l2norm_in_kernel, use_gate_in_kernel, 0)
    relaunch(_walk_launch, tensors, settings, (commit_config, configs.limits()))
    return out


def _walk_launch(
    source_state: Tensor,
    dest_state: Tensor,
    u: Tensor,
    k: Tensor,
    g: Tensor,
    source: Tensor | None,
    dest: Tensor | None,
    length: Tensor,
    cu_seqlens: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    max_seqlen: int,
    lower_bound: float,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool,
    pad_slot_id: int,
) -> Launch | None:
    """Of a commit kernel. Without ``source`` and ``dest``, row b of one tensor goes to row b of the other."""
    batch, columns = (source_state.shape[0], 1) if dest is None else dest.shape
    heads, (value_heads, value_dim, key_dim) = k.shape[2], dest_state.shape[1:]
    if batch * columns * dest_state.numel() == 0:
        return None
    window = u.shape[1] if cu_seqlens is None else max_seqlen
    programs = batch * value_heads
    tensors = (dest_state, u, k, g, source, dest, length, cu_seqlens, A_log, dt_bias)
    strides = sum((x.stride()[:3] for x in (u, k, g)), ())
    options = {"LOWER_BOUND": lower_bound, "SCALAR_GATE": g.ndim == 3}
    options |= {"USE_L2NORM": use_qk_l2norm_in_kernel, "USE_GATE": use_gate_in_kernel}
    sizes = (heads, value_heads, key_dim, value_dim, window)
    if source is not None and _fits_gluon(window, (u, k, g), dest_state):
        config = commit_rows_config(programs, window, key_dim, value_dim, dest_state.dtype, columns)
        numbers = (u.shape[1], pad_slot_id, source.stride(0), *dest.stride(), *length.stride())
        numbers += (*strides, *dest_state.stride()[:2], *sizes, columns)
        programs *= value_dim // config["PART"]
        return Launch(commit_rows_kernel, (programs,), tensors, numbers, options | config)
    config = commit_config(programs, window, key_dim, value_dim, dest_state.dtype)
    tiles = triton.cdiv(value_dim, config["PART"])
    numbers = (u.shape[1], pad_slot_id, 0 if source is None else source.stride(0))
    numbers += ((0, 0) if dest is None else dest.stride()) + (
        length.stride(0),
        length.stride(1) if length.ndim == 2 else 0,
    )
    numbers += (*strides, *source_state.stride()[:3], *dest_state.stride()[:3], *sizes, columns)
    options |= {"IN_PLACE": source is not None} | config
    return Launch(commit_kernel, (programs * tiles,), (source_state, *tensors), numbers, options)


def _fits_gluon(window: int, activations: tuple[Tensor, ...], state: Tensor) -> bool:
    """Whether the Gluon kernels take this: whole state rows in copies of 16 bytes, 32-bit offsets within a window.

    Their bits may differ from those of the Triton ones.

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


def _channels_contiguous(g: Tensor) -> Tensor:
    """A scalar gate has no channels, and any strides."""
    return g if g.ndim == 3 else _last_axis_contiguous(g)


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()
