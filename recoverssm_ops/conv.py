"""The public functions of the short convolution: check the inputs, name the defaults, call the operator."""

from torch import Tensor

from recoverssm_ops import conv_ops as ops
from recoverssm_ops import validation as check
from recoverssm_ops.commit_plan import CommitPlan, resolve_plan


def causal_conv1d_verify(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    conv_state_indices: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    activation: str | None = "silu",
    pad_slot_id: int = -1,
) -> Tensor:
    """Convolve a window of drafted tokens that continues the histories in ``conv_state``. Writes no state.

    The depthwise causal convolution in front of q, k and v (Mamba, arXiv:2312.00752, section 3.4):
    ``y_t = act(bias + sum_i weight[:, i] * x_{t - (W-1) + i})``, where inputs before the window come from the history.
    Sums are float32. The window's inputs ``x`` are the record: keep them unchanged until the commit.

    Args:
        x: ``[B, T, D]``, fp32, bf16 or fp16, any strides. Packed: ``[1, N, D]`` with ``cu_seqlens``. T is at most 16.
        weight: ``[D, W]``, fp32, bf16 or fp16; W from 2 to 8, the newest input's weight last.
        bias: ``[D]`` or None.
        conv_state: pool ``[slots, D, W-1]``, fp32, bf16 or fp16, any strides: the last W-1 inputs, oldest first. Not
            modified.
        conv_state_indices: ``[B]`` int32 or int64 slots on the device; at most ``pad_slot_id`` marks a padding row, whose
            outputs are zeros. None: row b uses slot b.
        cu_seqlens: ``[B + 1]`` row boundaries of packed input; rows of any length 0..max_seqlen.
        max_seqlen: T of packed input.
        activation: "silu" or None.

    Returns:
        ``y`` like x, row-major. Outputs of tokens in no row are zeros.

    Raises:
        ValueError, TypeError: a shape, dtype, device or combination that cannot work, named.
        RuntimeError: an input requires grad.
    """
    check.expect_tensor("conv_state", conv_state, check.FLOATS)
    for name, tensor in {"x": x, "weight": weight, **({} if bias is None else {"bias": bias})}.items():
        check.expect_tensor(name, tensor, check.FLOATS, conv_state.device)
    channels, width = _check_shapes(x, conv_state)
    check.expect_shape("weight", weight, (channels, width), "[D, W]")
    if bias is not None:
        check.expect_shape("bias", bias, (channels,), "[D]")
    batch, window = check.check_window(x, cu_seqlens, max_seqlen, "x")
    if activation not in ("silu", None):
        raise ValueError(f"activation should be 'silu' or None, but was {activation!r}")
    check.check_slots(
        "conv_state_indices", conv_state_indices, batch, "conv_state", conv_state, pad_slot_id, written=False
    )
    if cu_seqlens is not None and check.debugging():
        check.debug_packing(cu_seqlens, window, x.shape[1])
    silu = activation is not None
    return ops.causal_conv1d_verify(
        x, weight, bias, conv_state, conv_state_indices, cu_seqlens, window, silu, pad_slot_id
    )


def causal_conv1d_commit(
    conv_state: Tensor,
    x: Tensor,
    num_accepted: Tensor | None,
    conv_state_indices: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    plan: CommitPlan | None = None,
    pad_slot_id: int = -1,
) -> None:
    """Advance the histories to the accepted position, in place: the last W-1 columns of ``cat(history, x[:n])``.

    Unlike a :class:`Record`, ``x`` does not know that it was committed: a second commit shifts the same tokens in again.

    Args:
        conv_state: the pool ``[slots, D, W-1]`` that verify read; only the listed slots are written. Inputs are rounded
            once to its dtype; history that stays is moved bit by bit.
        x: the window as given to verify, ``[B, T, D]`` or ``[1, N, D]``. Rejected tokens change no bit.
        num_accepted: ``[B]`` int32 or int64, committed window tokens per row, clamped to the row's length. 0 leaves the
            history bit-identical. None with ``plan``.
        conv_state_indices: ``[B]`` slots, as given to verify. None: row b uses slot b.
        cu_seqlens: None, or as given to verify.
        plan: the :class:`CommitPlan` of the step, the same as for :func:`kda_commit`, in place of ``num_accepted`` and
            ``conv_state_indices``.
        pad_slot_id: slots at or below it are padding and skipped.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`causal_conv1d_verify`.
    """
    batch = check_commit(conv_state, x, cu_seqlens)
    rows = (conv_state_indices, "conv_state_indices", batch)
    plan = resolve_plan(plan, num_accepted, *rows, "conv_state", conv_state, pad_slot_id)
    if cu_seqlens is not None and check.debugging():
        check.debug_packing(cu_seqlens, check.MAX_WINDOW, x.shape[1])
    ops.causal_conv1d_commit(conv_state, x, plan.source, plan.dest, plan.length, cu_seqlens, pad_slot_id)


def check_commit(conv_state: Tensor, x: Tensor, cu_seqlens: Tensor | None) -> int:
    """Check that the window may be committed to the pool; returns its number of rows."""
    check.expect_tensor("conv_state", conv_state, check.FLOATS)
    check.expect_tensor("x", x, check.FLOATS, conv_state.device)
    _check_shapes(x, conv_state)
    limit = None if cu_seqlens is None else check.MAX_WINDOW
    batch, _ = check.check_window(x, cu_seqlens, limit, "x")
    return batch


def _check_shapes(x: Tensor, conv_state: Tensor) -> tuple[int, int]:
    """Channels D and width W."""
    check.expect_shape("conv_state", conv_state, (None, None, None), "[slots, D, W-1]")
    channels, width = conv_state.shape[1], conv_state.shape[2] + 1
    if channels < 1:
        raise ValueError(f"conv_state should have at least one channel D, but its shape was {list(conv_state.shape)}")
    if not check.MIN_CONV_WIDTH <= width <= check.MAX_CONV_WIDTH:
        raise ValueError(
            "conv_state should have shape [slots, D, W-1] with width W between "
            f"{check.MIN_CONV_WIDTH} and {check.MAX_CONV_WIDTH}, but was {list(conv_state.shape)}"
        )
    check.expect_shape("x", x, (None, None, channels), "[B, T, D]")
    return channels, width
