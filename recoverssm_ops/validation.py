"""Input checks of the public functions: every message names the argument, what it should be and what it was.

They run before anything is computed or written, look at metadata only (no host synchronisation), and are safe under tracing.
``RECOVERSSM_DEBUG=1`` adds, in eager mode, the checks that must look at values.
"""

import os

import torch
from torch import Tensor

MAX_WINDOW = 16
MAX_HEAD_DIM = 256
MIN_CONV_WIDTH, MAX_CONV_WIDTH = 2, 8
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64)
INTS = (int, torch.SymInt)
NUMBERS = (int, float, torch.SymInt, torch.SymFloat)


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)


def expect_tensor(name: str, x: object, dtypes: tuple[torch.dtype, ...], device: torch.device | None = None) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} should be a tensor, but was {type(x).__name__}")
    if x.dtype not in dtypes:
        raise TypeError(f"{name} should have dtype {_names(dtypes)}, but was {_names((x.dtype,))}")
    if device is not None and x.device != device:
        raise ValueError(f"{name} should be on {device} like the state, but was on {x.device}")
    if torch.is_grad_enabled() and x.requires_grad:
        raise RuntimeError(
            f"{name} requires grad, but RecoverSSM is for inference only: call under torch.no_grad() or "
            f"torch.inference_mode(), or pass {name}.detach()"
        )


def expect_int(name: str, x: object) -> None:
    if not isinstance(x, INTS):
        raise TypeError(f"{name} should be an int, but was {type(x).__name__}")


def expect_number_or_none(name: str, x: object) -> None:
    if x is not None and not isinstance(x, NUMBERS):
        raise TypeError(f"{name} should be a number or None, but was {type(x).__name__}")


def expect_shape(name: str, x: Tensor, shape: tuple, letters: str) -> None:
    """``shape`` may hold None for a free axis; ``letters`` is how the documentation writes it."""
    if x.ndim != len(shape) or any(s is not None and x.shape[i] != s for i, s in enumerate(shape)):
        wanted = ", ".join("any" if s is None else str(s) for s in shape)
        raise ValueError(f"{name} should have shape {letters} = [{wanted}], but was {list(x.shape)}")


def check_window(batch_tokens: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None, name: str) -> tuple[int, int]:
    """Number of rows and window length T of a dense or packed batch whose data tensor is ``batch_tokens``."""
    if cu_seqlens is None:
        batch, window = batch_tokens.shape[0], batch_tokens.shape[1]
        if max_seqlen is not None and max_seqlen != window:
            raise ValueError(
                f"max_seqlen should be {window}, the window of {name}, in dense form, but was {max_seqlen}"
            )
    else:
        expect_tensor("cu_seqlens", cu_seqlens, INTEGERS, batch_tokens.device)
        if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1:
            raise ValueError(f"cu_seqlens should have shape [B+1], but was {list(cu_seqlens.shape)}")
        if batch_tokens.shape[0] != 1:
            raise ValueError(
                f"{name} should have shape [1, N, ...] with cu_seqlens, but was {list(batch_tokens.shape)}"
            )
        if max_seqlen is None:
            raise ValueError("max_seqlen should be the longest row's length (an int) with cu_seqlens, but was None")
        expect_int("max_seqlen", max_seqlen)
        batch, window = cu_seqlens.shape[0] - 1, max_seqlen
    if not 1 <= window <= MAX_WINDOW:
        argument = "max_seqlen" if cu_seqlens is not None else f"the window T of {name}"
        raise ValueError(f"{argument} should be between 1 and {MAX_WINDOW} tokens, but was {window}")
    if cu_seqlens is not None and not torch.compiler.is_compiling() and batch_tokens.shape[1] > batch * window:
        raise ValueError(
            f"{name} should hold at most {batch} rows of max_seqlen {window} tokens, but held "
            f"{batch_tokens.shape[1]} tokens: a row is longer than the window"
        )
    return batch, window


def check_state(name: str, state: Tensor, shape: tuple, letters: str) -> None:
    expect_tensor(name, state, FLOATS)
    expect_shape(name, state, shape, letters)
    for axis, letter in ((-2, "V"), (-1, "K")):
        if not 1 <= state.shape[axis] <= MAX_HEAD_DIM:
            raise ValueError(
                f"{name} should have head size {letter} between 1 and {MAX_HEAD_DIM}, but it was {state.shape[axis]}"
            )
    if state.stride(-1) != 1 and state.shape[-1] != 1:
        raise ValueError(
            f"{name} should have K contiguous (last stride 1), but its strides were {list(state.stride())}: "
            "the state is V-first, [slots, HV, V, K]"
        )


def check_gate(
    g: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    use_gate_in_kernel: bool,
    value_heads: int,
    key_dim: int,
) -> Tensor | None:
    """Check the gate's parameters; returns ``dt_bias`` as ``[HV, K]`` (KDA) or ``[HV]`` (scalar gate)."""
    parameters = {"A_log": A_log, "dt_bias": dt_bias, "lower_bound": lower_bound}
    if not use_gate_in_kernel:
        for name, value in parameters.items():
            if value is not None:
                raise ValueError(
                    f"{name} should be None when use_gate_in_kernel is False (g is then the log decay itself), "
                    f"but was {'a tensor' if isinstance(value, Tensor) else value}"
                )
        return None
    expect_number_or_none("lower_bound", lower_bound)
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"lower_bound should be negative or None, but was {lower_bound}")
    if A_log is None:
        if lower_bound is None:
            raise ValueError("A_log should be a tensor [HV] for the unbounded gate (lower_bound=None), but was None")
    else:
        expect_tensor("A_log", A_log, FLOATS, g.device)
        expect_shape("A_log", A_log, (value_heads,), "[HV]")
    if dt_bias is None:
        return None
    expect_tensor("dt_bias", dt_bias, FLOATS, g.device)
    scalar = g.ndim == 3
    size = value_heads if scalar else value_heads * key_dim
    if dt_bias.numel() != size or dt_bias.ndim not in (1, 2) or dt_bias.shape[0] not in (value_heads, size):
        letters = "[HV]" if scalar else "[HV, K] or [HV*K]"
        raise ValueError(f"dt_bias should have shape {letters} with {size} elements, but was {list(dt_bias.shape)}")
    return dt_bias.reshape(value_heads) if scalar else dt_bias.reshape(value_heads, key_dim)


def check_rows(name: str, x: Tensor, batch: int, device: torch.device) -> None:
    expect_tensor(name, x, INTEGERS, device)
    expect_shape(name, x, (batch,), "[B]")


def check_slots(
    name: str, slots: Tensor | None, batch: int, pool_name: str, pool: Tensor, pad_slot_id: int, *, written: bool
) -> None:
    """Slots of the rows in a pool, or None where row b uses slot b. Rows may share a slot that is only read."""
    expect_int("pad_slot_id", pad_slot_id)
    if slots is None:
        if not torch.compiler.is_compiling() and pool.shape[0] < batch:
            raise ValueError(
                f"{name} should be given, or {pool_name} have at least {batch} slots, one a row, but it had {pool.shape[0]}"
            )
        return
    check_rows(name, slots, batch, pool.device)
    if debugging():
        debug_slots(name, slots, pool.shape[0], pad_slot_id, distinct=written)


def check_plan(
    source: Tensor, dest: Tensor, length: Tensor, batch: int, pool_name: str, pool: Tensor, pad_slot_id: int
) -> None:
    """The fields of a commit plan for ``batch`` rows of a pool."""
    expect_tensor("plan.source", source, INTEGERS, pool.device)
    check_slots("plan.source", source, batch, pool_name, pool, pad_slot_id, written=False)
    expect_tensor("plan.dest", dest, INTEGERS, pool.device)
    expect_shape("plan.dest", dest, (batch, None), "[B, M]")
    expect_tensor("plan.length", length, INTEGERS, pool.device)
    expect_shape("plan.length", length, tuple(dest.shape), "[B, M] like plan.dest")
    if debugging():
        debug_slots("plan.dest", dest, pool.shape[0], pad_slot_id, distinct=True)
        debug_sources(source, dest, pad_slot_id)


def debugging() -> bool:
    return os.environ.get("RECOVERSSM_DEBUG") == "1" and not torch.compiler.is_compiling()


def debug_slots(name: str, slots: Tensor, num_slots: int, pad_slot_id: int, *, distinct: bool) -> None:
    """Slots of one call exist, and are distinct if they are written. Synchronises with the device."""
    real = slots[slots > pad_slot_id].flatten()
    if real.numel() and (real.max() >= num_slots or real.min() < 0):
        raise ValueError(f"{name} should name slots in [0, {num_slots}), but was {slots.tolist()}")
    if distinct and real.unique().numel() != real.numel():
        raise ValueError(f"{name} should name distinct slots, but was {slots.tolist()}")


def debug_sources(source: Tensor, dest: Tensor, pad_slot_id: int) -> None:
    """No row writes a slot that another row reads: which comes first is undefined. Synchronises with the device."""
    rows = torch.arange(source.shape[0], device=source.device)
    other = rows[:, None, None] != rows
    clash = (dest[:, :, None] == source) & (dest > pad_slot_id)[:, :, None] & other
    if clash.any():
        raise ValueError(
            f"plan.dest should not name another row's plan.source, but was {dest.tolist()} with sources {source.tolist()}"
        )


def debug_packing(cu_seqlens: Tensor, max_seqlen: int, num_tokens: int) -> None:
    """Row boundaries ascend, rows fit the window, all inside the packed tensor. Synchronises with the device."""
    lengths = cu_seqlens.diff()
    outside = cu_seqlens[0] < 0 or cu_seqlens[-1] > num_tokens
    if outside or (lengths.numel() and (lengths.min() < 0 or lengths.max() > max_seqlen)):
        raise ValueError(
            f"cu_seqlens should ascend from 0 or more in steps of at most max_seqlen = {max_seqlen} to at most "
            f"{num_tokens} tokens, but was {cu_seqlens.tolist()}"
        )
