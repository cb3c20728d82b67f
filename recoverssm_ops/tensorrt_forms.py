"""Operations that Torch-TensorRT does not convert, or not for a window's shapes, in forms that it converts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from recoverssm_ops.decompositions import running_product, running_sum


def attention(query, key, value, bias=None, causal=False, scale=None) -> tuple[Tensor, None, None, None]:
    """``softmax(scale q k^T + bias) v`` and nothing of what a backward pass would need."""
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    if bias is not None:
        scores = scores + bias
    return torch.softmax(scores, -1) @ value, None, None, None


def efficient_attention(query, key, value, bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
    return attention(query, key, value, bias, is_causal, scale)


def gather(x: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    """By comparison with every place: as many products as the axis has places, which are few in a window's graph."""
    dim %= x.ndim
    if not any(isinstance(size, torch.SymInt) for size in (*x.shape, *index.shape)):
        return NotImplemented  # TensorRT's own
    pairs = [(a, b) for axis, (a, b) in enumerate(zip(x.shape, index.shape, strict=True)) if axis != dim]
    if not all(statically_known_true(a == b) for a, b in pairs):
        return NotImplemented
    places = torch.arange(x.shape[dim], device=x.device)
    chosen = index.movedim(dim, -1).unsqueeze(-1) == places
    rows = torch.where(chosen, x.movedim(dim, -1).unsqueeze(-2), 0)
    return rows.sum(-1, dtype=x.dtype).movedim(-1, dim)


def index_put(x: Tensor, indices: list[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    """With one index into the flattened leading axes. Rows that occur twice stay twice."""
    indexed = [index for index in indices if index is not None]
    leading = all(index is not None for index in indices[: len(indexed)])
    if accumulate or not leading or any(index.dtype == torch.bool for index in indexed):
        return NotImplemented
    if len(indexed) == 1 and indexed[0].ndim == 1:
        return NotImplemented  # TensorRT's own
    indexed, sizes, rest = torch.broadcast_tensors(*indexed), x.shape[: len(indexed)], x.shape[len(indexed) :]
    place = torch.zeros_like(indexed[0])
    for index, size in zip(indexed, sizes, strict=True):
        place = place * size + torch.where(index < 0, index + size, index)
    values = values.expand(*place.shape, *rest).reshape(-1, *rest)
    return x.reshape(-1, *rest).index_put((place.reshape(-1),), values).reshape(x.shape)


def convolution(
    x, weight, bias, stride, padding, dilation, transposed, output_padding, groups
) -> Tensor:  # the arguments of aten.convolution
    """The short depthwise convolution as W shifted products, in float32 as our kernels: no tf32, and no cuDNN."""
    depthwise = x.ndim == 3 and groups == x.shape[1] == weight.shape[0]
    if not depthwise or transposed or list(stride) != [1] or list(padding) != [0] or list(dilation) != [1]:
        return NotImplemented
    taps = weight.shape[2]
    length = x.shape[2] - taps + 1
    inputs, kernel = x.float(), weight.float()
    y = 0 if bias is None else bias.float()[:, None]
    for tap in range(taps):
        y = y + inputs[:, :, tap : tap + length] * kernel[:, :, tap]
    return y.to(x.dtype)


# TensorRT-RTX has no converter for scans (tried on Torch-TensorRT 2.13), and none for the attention kernel that a CUDA export
# picks where the queries are fewer than the keys (2.11), as those of a window are. Its converter of gather knows static sizes,
# that of index_put one index with one axis (2.11).
UNCONVERTED = {
    torch.ops.aten.cumsum.default: running_sum,
    torch.ops.aten.cumprod.default: running_product,
    torch.ops.aten.gather.default: gather,
    torch.ops.aten.index_put.default: index_put,
    torch.ops.aten.convolution.default: convolution,
    torch.ops.aten._scaled_dot_product_efficient_attention.default: efficient_attention,
}
