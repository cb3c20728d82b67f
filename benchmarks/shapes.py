"""Shapes of one layer's verify and commit, and the sets of them that are measured together."""

from __future__ import annotations

from dataclasses import dataclass

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BOUND = -5.0  # the bounded gate's lower bound, Kimi's


@dataclass(frozen=True)
class Shape:
    """One layer. Key and value heads have the same size, as in every published model of the family."""

    batch: int
    heads: int
    window: int
    state_dtype: str = "bf16"
    head_size: int = 128
    value_heads: int = 0
    gate: str = "bounded"
    scalar_gate: bool = False
    dtype: str = "bf16"

    @property
    def num_value_heads(self) -> int:
        return self.value_heads or self.heads

    @property
    def lower_bound(self) -> float | None:
        return BOUND if self.gate == "bounded" else None

    @property
    def state_bytes(self) -> int:
        """One state of every row and head."""
        elements = self.batch * self.num_value_heads * self.head_size**2
        return elements * DTYPES[self.state_dtype].itemsize

    def __str__(self) -> str:
        heads = f"H {self.heads}" if self.num_value_heads == self.heads else f"H {self.heads}/{self.value_heads}"
        gate = f", {self.gate} gate" if self.gate != "bounded" else ""
        gate += ", scalar gate" if self.scalar_gate else ""
        return f"{self.state_dtype} pool, B {self.batch}, {heads}, T {self.window}, D {self.head_size}{gate}"


def targets() -> list[Shape]:
    """Enough rows and heads to fill the GPU, then one request, then the other sizes, windows and gates."""
    shapes = []
    for pool in ("bf16", "fp32"):
        for batch, heads in ((64, 12), (256, 12), (64, 32), (1, 12)):
            shapes += [Shape(batch, heads, window, pool) for window in (8, 4)]
        shapes += [Shape(64, 32, window, pool) for window in (1, 2, 16)]
        shapes += [Shape(64, 12, 8, pool, head_size=size) for size in (64, 96, 192, 256)]
        shapes += [Shape(64, 16, 8, pool, value_heads=n, gate="unbounded", scalar_gate=True) for n in (32, 64)]
        shapes.append(Shape(64, 32, 8, pool, gate="unbounded"))
    return shapes


def layers() -> list[Shape]:
    """A Kimi-K3 shard: 12 heads a GPU; the number of layers is ``LAYERS``."""
    return [Shape(32, 12, 8, pool) for pool in ("bf16", "fp32")]


PRESETS = {"targets": targets, "layers": layers}
LAYERS = 69
