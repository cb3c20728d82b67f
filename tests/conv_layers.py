"""Short convolutions with a history in a pool, written in the ways that the pass recognises, and in ways that it must not."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

B, T, D, W, SLOTS = 3, 4, 6, 4, 5


def make_inputs(dtype=torch.float32, pool_dtype=None, W=W, T=T, B=B) -> tuple[Tensor, ...]:
    """``(pool, slots, x, weight, bias, num_accepted)``; slots count from the end, too, and counts reach 0 and T."""
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int, dtype=dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    pool = rand(SLOTS, D, W - 1, dtype=pool_dtype or dtype)
    slots = torch.tensor([3, 0, -1])[:B]
    return pool, slots, rand(B, T, D), rand(D, W), rand(D), torch.tensor([T, 0, min(T, 2)])[:B]


# --- history and window put together: [B, D, W-1+T] ---------------------------------------------------------------------


def joined(history, x):
    return torch.cat([history, x.transpose(1, 2)], -1)


def joined_tokens(history, x):
    return torch.cat([history.transpose(1, 2), x], 1).transpose(1, 2)


def joined_slices(history, x):
    extended = x.new_empty(x.shape[0], x.shape[2], history.shape[2] + x.shape[1])
    extended[..., : history.shape[2]] = history
    extended[..., history.shape[2] :] = x.transpose(1, 2)
    return extended


def joined_columns(history, x):
    columns = [history[..., i] for i in range(history.shape[2])] + [x[:, t] for t in range(x.shape[1])]
    return torch.stack(columns, -1)


# --- the outputs [B, T, D] ----------------------------------------------------------------------------------------------


def library(extended, weight, bias):
    return F.silu(F.conv1d(extended, weight.unsqueeze(1), bias, groups=weight.shape[0])).transpose(1, 2)


def padded(extended, weight, bias):
    kept = weight.shape[1] - 1
    y = F.conv1d(extended, weight.unsqueeze(1), padding=kept, groups=weight.shape[0])
    return F.silu(y[..., kept:-kept]).transpose(1, 2)


def shifted(extended, weight, bias):
    extended, length = extended.transpose(1, 2), extended.shape[2] - weight.shape[1] + 1
    y = bias
    for i in range(weight.shape[1]):
        y = y + extended[:, i : i + length] * weight[:, i]
    return F.silu(y)


def sliding(extended, weight, bias):
    return (extended.unfold(-1, weight.shape[1], 1) * weight.unsqueeze(1)).sum(-1).transpose(1, 2) + bias


def einsum(extended, weight, bias):
    y = torch.einsum("bdtw,dw->btd", extended.unfold(-1, weight.shape[1], 1), weight)
    return y * torch.sigmoid(y)


def stacked_taps(extended, weight, bias):
    width, length = weight.shape[1], extended.shape[2] - weight.shape[1] + 1
    shifts = torch.stack([extended[..., i : i + length] for i in range(width)], -1)
    return torch.tanh((shifts * weight.unsqueeze(1)).sum(-1)).transpose(1, 2)


def each_token(extended, weight, bias):
    width = weight.shape[1]
    windows = [extended[..., t : t + width] for t in range(extended.shape[2] - width + 1)]
    return torch.stack([F.silu((x * weight).sum(-1)) for x in windows], 1)


def newest_first(extended, weight, bias):
    return library(extended, weight.flip(-1), None)


def scaled(extended, weight, bias):
    return shifted(extended, weight * bias.unsqueeze(-1), bias)


# --- the new history [B, D, W-1] ----------------------------------------------------------------------------------------


def _columns(n, kept):
    return n.unsqueeze(-1) + torch.arange(kept, device=n.device)


def gathered(extended, n, kept):
    return extended.gather(-1, _columns(n, kept).unsqueeze(1).expand(-1, extended.shape[1], -1))


def take_along(extended, n, kept):
    return torch.take_along_dim(extended, _columns(n, kept).unsqueeze(1), -1)


def indexed(extended, n, kept):
    rows = torch.arange(extended.shape[0], device=n.device).unsqueeze(1)
    return extended.transpose(1, 2)[rows, _columns(n, kept)].transpose(1, 2)


def from_the_end(extended, n, kept):
    return indexed(extended, n - extended.shape[2], kept)


def sliding_history(extended, n, kept):
    return extended.unfold(-1, kept, 1)[torch.arange(extended.shape[0], device=n.device), :, n]


def stacked_histories(extended, n, kept):
    histories = [extended[..., t : t + kept] for t in range(extended.shape[2] - kept + 1)]
    return torch.stack(histories, 1)[torch.arange(extended.shape[0], device=n.device), n]


def all_accepted(extended, n, kept):
    return extended[..., -kept:]


# --- the layer ----------------------------------------------------------------------------------------------------------


def layer(
    convolve: Callable = library,
    advance: Callable = gathered,
    join: Callable = joined,
    start: Callable = lambda x: x,
    finish: Callable = lambda y, extended: y,
) -> Callable:
    """``start`` is applied to every float but the pool, ``finish`` to the output; the new history gets the pool's dtype."""

    def run(pool, slots, x, weight, bias, n):
        extended = join(start(pool[slots]), start(x))
        y = convolve(extended, start(weight), start(bias))
        pool[slots] = advance(extended, n, pool.shape[2]).to(pool.dtype)
        return finish(y, extended)

    return run
