"""PTX's fundamental types as numpy's, and operands as functions that read or write a block's registers.

A register holds raw bits, an array over the block's threads. Instructions give them a type: ``f32`` is a view, ``bf16`` is
decoded to float32 and rounded to nearest even, ``f32x2``, ``f16x2`` and ``bf16x2`` are two numbers for each thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ptx_emulator.errors import PTXError
from ptx_emulator.program import Program, vector

if TYPE_CHECKING:
    from ptx_emulator.machine import Block

# Reads values, or writes them where the second argument (None: everywhere) is true.
Source = Callable[["Block"], np.ndarray]
Target = Callable[["Block", np.ndarray, "np.ndarray | None"], None]

RAW = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
TYPES = {
    "pred": np.dtype(bool),
    **{f"{kind}{bits}": np.dtype(f"u{bits // 8}") for kind in "ub" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"f{bits}": np.dtype(f"f{bits // 8}") for bits in (16, 32, 64)},
    "bf16": np.dtype(np.uint16),
    "f16x2": np.dtype(np.uint32),
    "bf16x2": np.dtype(np.uint32),
    "f32x2": np.dtype(np.uint64),
}
# What nobody wrote, in the threads that did not write a register that others wrote: NaN in every type.
POISON = {2: np.uint16(0x7FEF), 4: np.uint32(0x7FEFBEEF), 8: np.uint64(0x7FFFBEEF7FEFBEEF)}


def bf16_to_float(raw: np.ndarray) -> np.ndarray:
    return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)


def bf16_from_float(x: np.ndarray) -> np.ndarray:
    """Round to nearest, ties to even. NaN becomes the canonical one."""
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


# Types that numpy lacks: from raw bits to values, and back.
CODED: dict[str, tuple[Callable, Callable]] = {
    "bf16": (bf16_to_float, bf16_from_float),
    "f16x2": (
        lambda raw: raw.view(np.float16).reshape(-1, 2),
        lambda x: np.ascontiguousarray(x, np.float16).view(np.uint32)[:, 0],
    ),
    "bf16x2": (
        lambda raw: bf16_to_float(raw.view(np.uint16)).reshape(-1, 2),
        lambda x: bf16_from_float(np.ascontiguousarray(x, np.float32)).view(np.uint32)[:, 0],
    ),
    "f32x2": (lambda raw: raw.view(np.float32).reshape(-1, 2), lambda x: np.ascontiguousarray(x).view(np.uint64)[:, 0]),
}


def source(program: Program, operand: str, kind: str) -> Source:
    """A register, a special register, a symbol or a constant."""
    if operand.startswith("!"):
        read = source(program, operand[1:], kind)
        return lambda block: ~read(block)
    declared = program.register_type(operand)
    if declared is not None:
        return _register(operand, declared, kind)
    if operand in SPECIAL:
        special = SPECIAL[operand]
        return lambda block: special(block).astype(TYPES[kind])
    value = constant(operand, kind, program.threads)
    return lambda block: value


def _register(name: str, declared: str, kind: str) -> Source:
    dtype = TYPES[kind]
    if (declared == "pred") != (kind == "pred"):
        raise PTXError(f"{name} is declared .{declared}, not .{kind}")
    if kind in CODED:
        decode, _ = CODED[kind]
        return lambda block: decode(block.read(name))
    if TYPES[declared].itemsize == dtype.itemsize:
        return lambda block: block.read(name).view(dtype)
    if TYPES[declared].itemsize < dtype.itemsize:
        raise PTXError(f"{name} has fewer bits than .{kind}")
    narrow = RAW[dtype.itemsize]
    return lambda block: block.read(name).astype(narrow).view(dtype)


def target(program: Program, operand: str, kind: str) -> Target:
    """A register, or ``_`` for none. One that is wider than the type gets the value extended, by its sign if it has one."""
    if operand == "_":
        return lambda block, value, mask: None
    declared = program.register_type(operand)
    if declared is None or (declared == "pred") != (kind == "pred"):
        raise PTXError(f"{operand} is not declared as a register for .{kind}")
    dtype = TYPES[declared]
    if dtype.itemsize < TYPES[kind].itemsize:
        raise PTXError(f"{operand} has fewer bits than .{kind}")
    if kind in CODED:
        _, encode = CODED[kind]
        return lambda block, value, mask: block.write(operand, encode(value), mask)
    if dtype.itemsize == TYPES[kind].itemsize:
        return lambda block, value, mask: block.write(operand, value.view(dtype), mask)
    return lambda block, value, mask: block.write(operand, value.astype(dtype), mask)


def sources(program: Program, operand: str, kind: str) -> list[Source]:
    return [source(program, x, kind) for x in vector(operand)]


def targets(program: Program, operand: str, kind: str) -> list[Target]:
    return [target(program, x, kind) for x in vector(operand)]


def constant(operand: str, kind: str, threads: int) -> np.ndarray:
    """``0f3F800000`` and ``0d...`` are bits of a float, other numbers integers; ``global_smem`` is shared memory's base."""
    dtype = TYPES[kind]
    try:
        if operand == "global_smem":
            number = SHARED_BASE
        else:
            number = int(operand[2:], 16) if operand[:2] in ("0f", "0d") else int(operand.rstrip("U"), 0)
    except ValueError:
        raise PTXError(f"{operand} is neither a declared register nor a known symbol") from None
    if kind == "pred":
        return np.full(threads, number != 0)
    raw = np.full(threads, number & ((1 << 8 * dtype.itemsize) - 1), RAW[dtype.itemsize])
    return CODED[kind][0](raw) if kind in CODED else raw.view(dtype)


# Where a block's shared memory begins: zero would make an address of what was never computed look right.
SHARED_BASE = 1024
SPECIAL: dict[str, Source] = {
    "%tid.x": lambda block: np.arange(block.threads, dtype=np.uint32),
    "%laneid": lambda block: np.arange(block.threads, dtype=np.uint32) % 32,
    "%ntid.x": lambda block: np.full(block.threads, block.threads, np.uint32),
    "%ctaid.x": lambda block: np.full(block.threads, block.index, np.uint32),
    "%nctaid.x": lambda block: np.full(block.threads, block.grid, np.uint32),
}
