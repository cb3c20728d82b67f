"""The short convolution in plain ATen: the CPU kernel, and the decomposition for runtimes that know no custom op.

A depthwise causal convolution of width W needs the W-1 inputs before the window and nothing else, so the window's own
inputs are the record: after n accepted tokens the history is the last W-1 columns of ``cat(history, x[:n])``.
"""

import torch
from torch import Tensor

from recoverssm_ops.windows import in_row, pack, row_lengths, unpack


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
    num_tokens, dtype = x.shape[1], x.dtype
    valid = None
    if cu_seqlens is not None:
        x, valid = unpack(x, cu_seqlens, max_seqlen), in_row(cu_seqlens, max_seqlen)
    batch, window = x.shape[:2]
    if conv_state_indices is None:
        history = conv_state[:batch]
    else:
        active = conv_state_indices > pad_slot_id
        history = conv_state[torch.where(active, conv_state_indices, 0).long()]
        valid = active[:, None] if valid is None else valid & active[:, None]

    # W shifted products: every output is the same sum in the same order whatever T is, so that a window gives what
    # plain decoding gives, and a token that is not finite reaches no earlier output.
    inputs = torch.cat([history.float().transpose(1, 2), x.float()], 1)
    weight = weight.float()
    y = 0 if bias is None else bias.float()
    for tap in range(weight.shape[1]):
        y = y + inputs[:, tap : tap + window] * weight[:, tap]
    if silu:
        y = torch.nn.functional.silu(y)

    if valid is not None:
        y = torch.where(valid[..., None], y, 0)
    if cu_seqlens is not None:
        y = pack(y, cu_seqlens, num_tokens)
    return y.to(dtype).contiguous()


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
    if dest.numel() == 0 or conv_state.numel() == 0:
        return
    kept = conv_state.shape[2]
    rows = torch.arange(source.shape[0], device=x.device)
    if cu_seqlens is None:
        lead, start, tokens = rows, torch.zeros_like(rows), torch.full_like(rows, x.shape[1])
    else:
        lead, start = torch.zeros_like(rows), cu_seqlens[:-1].long()
        tokens = torch.minimum(row_lengths(cu_seqlens, x.shape[1]), (x.shape[1] - start).clamp(min=0))
    n = torch.minimum(length.long().clamp(min=0), tokens[:, None])

    # Columns of cat(history, x), [B, M, W-1]: the first W-1 of them are the history's.
    column = n[..., None] + torch.arange(kept, device=x.device)
    active = source > pad_slot_id
    history = conv_state[torch.where(active, source, 0).long()]
    value = history[rows[:, None, None], :, column.clamp(max=kept - 1)]
    if x.shape[1] > 0:
        token = (start[:, None, None] + column - kept).clamp(0, x.shape[1] - 1)
        inputs = x[lead[:, None, None], token].to(conv_state.dtype)
        value = torch.where((column < kept)[..., None], value, inputs)
    value = value.transpose(2, 3).flatten(0, 1)

    # Without data-dependent shapes a skipped column must still write something: it repeats what a written one writes,
    # and where nothing is written, slot 0 receives what it holds.
    written = ((dest > pad_slot_id) & active[:, None]).flatten()
    any_written = written.any()
    item = torch.where(written, torch.arange(written.shape[0], device=x.device), written.long().argmax())
    slot = torch.where(any_written, dest.long().flatten()[item], 0)
    conv_state.index_put_((slot,), torch.where(any_written, value[item], conv_state[slot]))
