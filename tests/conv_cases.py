"""Seeded windows and guarded pools of the short convolution, and the oracle's answer for a whole batch."""

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from pools import GuardedPool, same_bits
from torch import Tensor

from recoverssm_ops.reference import causal_conv1d


def guarded_conv_pool(
    slots: int,
    channels: int,
    width: int = 4,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    order: str = "slot, channel, column",
    guard: int = 5,
    seed: int = 0,
) -> GuardedPool:
    """A pool ``[slots, D, W-1]`` of seeded normal values with NaN guards around every column, channel and slot.

    ``order`` names the axes as they lie in memory, outermost first. ``guard=0`` leaves no gaps.
    """
    sizes = {"slot": slots, "channel": channels, "column": width - 1}
    strides, step = {}, 1 + guard
    for axis in reversed(order.split(", ")):
        strides[axis] = step
        step = step * sizes[axis] + guard
    storage = torch.full((step + 2 * guard,), float("nan"), dtype=dtype, device=device)
    state = storage.as_strided(tuple(sizes.values()), tuple(strides[axis] for axis in sizes), guard)
    state.copy_(torch.randn(state.shape, generator=torch.Generator().manual_seed(seed)))
    return GuardedPool(state, storage)


@dataclass
class ConvWindow:
    """The inputs of one call: ``causal_conv1d_verify(*window.inputs, conv_state, slots, **window.options)``."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    options: dict
    lengths: list[int]

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.x, self.weight, self.bias

    @property
    def layout(self) -> dict:
        """What commit needs to know of the options."""
        return {name: self.options[name] for name in ("cu_seqlens",) if name in self.options}

    def with_x(self, x: Tensor) -> "ConvWindow":
        return replace(self, x=x)

    def rows(self, x: Tensor) -> list[Tensor]:
        """Split a tensor laid out like x into one ``[length, D]`` tensor a row."""
        if "cu_seqlens" not in self.options:
            return list(x)
        return [x[0, start:end] for start, end in pairwise(self.options["cu_seqlens"].tolist())]


def make_conv_window(
    batch: int,
    window: int,
    *,
    channels: int = 12,
    width: int = 4,
    bias: bool = True,
    activation: str | None = "silu",
    dtype: torch.dtype = torch.float32,
    weight_dtype: torch.dtype | None = None,
    lengths: list[int] | None = None,
    tail: int = 0,
    index_dtype: torch.dtype = torch.int32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> ConvWindow:
    """Seeded inputs; ``lengths`` makes a packed window, after which ``tail`` tokens belong to no row."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    lead = (batch, window) if lengths is None else (1, sum(lengths) + tail)
    weight_dtype = dtype if weight_dtype is None else weight_dtype
    options: dict = {"activation": activation}
    if lengths is not None:
        ends = torch.tensor([0, *lengths]).cumsum(0)
        options |= {"cu_seqlens": ends.to(device, index_dtype), "max_seqlen": window}
    return ConvWindow(
        normal(*lead, channels).to(device, dtype),
        normal(channels, width).to(device, weight_dtype),
        normal(channels).to(device, weight_dtype) if bias else None,
        options,
        [window] * batch if lengths is None else lengths,
    )


@dataclass
class ConvAnswer:
    """Per row: ``y [T, D]`` in float64 and in float32, and the exact histories ``[T + 1, D, W-1]``."""

    y64: list[Tensor]
    y32: list[Tensor]
    histories: list[Tensor]

    def outputs(self, rows=None) -> tuple[Tensor, Tensor]:
        rows = range(len(self.y64)) if rows is None else rows
        return tuple(torch.cat([kind[row] for row in rows]) for kind in (self.y64, self.y32))

    def history(self, row: int, n: int) -> Tensor:
        """After n tokens, clamped to the row."""
        return self.histories[row][min(max(int(n), 0), len(self.histories[row]) - 1)]


def conv_oracle(window: ConvWindow, histories) -> ConvAnswer:
    """The convolution of every row after ``histories[b]``, on the CPU."""
    weight, bias = window.weight.cpu(), None if window.bias is None else window.bias.cpu()
    activation = window.options["activation"]
    rows = list(zip([x.cpu() for x in window.rows(window.x)], [h.cpu() for h in histories], strict=True))

    def run(dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        return [causal_conv1d(x, weight, bias, h, activation=activation, dtype=dtype) for x, h in rows]

    exact, plain = run(torch.float64), run(torch.float32)
    return ConvAnswer([y for y, _ in exact], [y for y, _ in plain], [h for _, h in exact])


def check_history(actual: Tensor, answer: ConvAnswer, row: int, n: int) -> None:
    """A committed history holds the very inputs, each rounded once to the pool's dtype: no tolerance."""
    expected = answer.history(row, n).to(actual.dtype)
    assert same_bits(actual.cpu(), expected), f"row {row} after {n} tokens"
