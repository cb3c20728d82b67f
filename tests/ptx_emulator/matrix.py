"""Instructions that a warp does together on matrices: ``mma``, and loads and stores of its fragments.

Which lane and register holds which element is the fragment layout of PTX's manual, written here as tables of indices into a
warp's registers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ptx_emulator.program import Program
from ptx_emulator.registers import bf16_to_float, sources, targets
from ptx_emulator.transfers import addresses, check_whole_warps

WARP = 32
# mma's D in register r of each lane: its row and column.
_R, _L = np.indices((4, WARP))
D_ROW, D_COLUMN = _L // 4 + 8 * (_R // 2), 2 * (_L % 4) + _R % 2


def _tf32(raw: np.ndarray) -> np.ndarray:
    """A float32 whose last 13 bits do not count."""
    return (raw & np.uint32(0xFFFFE000)).view(np.float32)


# Elements in a register, and how bits become numbers.
ELEMENTS: dict[str, tuple[int, type, Callable[[np.ndarray], np.ndarray]]] = {
    "bf16": (2, np.uint16, bf16_to_float),
    "f16": (2, np.uint16, lambda raw: raw.view(np.float16)),
    "tf32": (1, np.uint32, _tf32),
}


def _fragments(per_register: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where A's, B's and C's elements are, as indices into ``[register, lane, element of the register]``."""
    half = 4 * per_register

    def index(register: np.ndarray, lane: np.ndarray, element: np.ndarray | int, per: int) -> np.ndarray:
        return (register * WARP + lane) * per + element

    i, j = np.indices((16, 2 * half))
    a = index((i >= 8) + 2 * (j >= half), i % 8 * 4 + j % half // per_register, j % per_register, per_register)
    j, n = np.indices((2 * half, 8))
    b = index(1 * (j >= half), n * 4 + j % half // per_register, j % per_register, per_register)
    i, n = np.indices((16, 8))
    return a, b, index(2 * (i >= 8) + n % 2, i % 8 * 4 + n // 2, 0, 1)


def multiply_add(kind: str) -> Callable:
    """``D = A B + C`` with rows of A ``[16, K]`` and columns of B ``[K, 8]``, 32 bytes of each: K is 16, or 8 for tf32."""
    per_register, raw, decoded = ELEMENTS[kind]
    a_at, b_at, c_at = _fragments(per_register)

    def decode(program: Program, operands: Sequence[str]):
        writes = targets(program, operands[0], "f32")
        a, b, c = (sources(program, x, as_) for x, as_ in zip(operands[1:], ("b32", "b32", "f32"), strict=True))

        def execute(block, mask):
            check_whole_warps(mask)

            def registers(reads, dtype):
                """``[warps, registers x lanes x elements]``"""
                values = np.stack([read(block).reshape(-1, WARP) for read in reads], 1)
                return values.reshape(len(values), -1).view(dtype)

            A = decoded(registers(a, raw)[:, a_at]).astype(np.float64)
            B = decoded(registers(b, raw)[:, b_at]).astype(np.float64)
            D = (A @ B + registers(c, np.float32)[:, c_at]).astype(np.float32)
            for row, column, write in zip(D_ROW, D_COLUMN, writes, strict=True):
                write(block, D[:, row, column].reshape(-1), mask)

        return execute

    return decode


def _rows(block, at, mask: np.ndarray | None, matrices: int) -> tuple[np.ndarray, np.ndarray]:
    """The addresses of all rows, and the warps that ask: lanes 8 i, 8 i + 1, ... have those of matrix i."""
    check_whole_warps(mask)
    warps = np.arange(block.threads // WARP)
    if mask is not None:
        warps = warps[mask.reshape(-1, WARP)[:, 0]]
    where = at(block).reshape(-1, WARP)[warps, : 8 * matrices]
    return where.reshape(-1), np.repeat(warps, 8 * matrices)


def load_matrices(matrices: int, transposed: bool) -> Callable:
    """8 x 8 elements of 16 bits: two neighbours of a row (transposed: of a column) in each lane, four lanes a row."""

    def decode(program: Program, operands: Sequence[str]):
        writes, at = targets(program, operands[0], "b32"), addresses(program, operands[1])

        def execute(block, mask):
            where, warps = _rows(block, at, mask, matrices)
            x = block.shared.load(where, 8, 2, warps).reshape(-1, matrices, 8, 8)
            if transposed:
                x = np.ascontiguousarray(x.swapaxes(2, 3))
            x = x.view(np.uint32).reshape(-1, matrices, WARP)
            for i, write in enumerate(writes):
                value = x[:, i]
                if mask is not None:
                    value = np.zeros((block.threads // WARP, WARP), np.uint32)
                    value[mask.reshape(-1, WARP)[:, 0]] = x[:, i]
                write(block, value.reshape(-1), mask)

        return execute

    return decode


def store_matrices(matrices: int, transposed: bool) -> Callable:
    def decode(program: Program, operands: Sequence[str]):
        at, reads = addresses(program, operands[0]), sources(program, operands[1], "b32")

        def execute(block, mask):
            where, warps = _rows(block, at, mask, matrices)
            x = np.stack([read(block).reshape(-1, WARP) for read in reads], 1)
            if mask is not None:
                x = x[mask.reshape(-1, WARP)[:, 0]]
            x = x.view(np.uint16).reshape(-1, matrices, 8, 8)
            if transposed:
                x = x.swapaxes(2, 3)
            block.shared.store(where, x.reshape(-1, 8), warps)

        return execute

    return decode


def _table() -> dict[str, Callable]:
    table = {
        f"mma.sync.aligned.{shape}.row.col.f32.{kind}.{kind}.f32": multiply_add(kind)
        for kind, shape in {"bf16": "m16n8k16", "f16": "m16n8k16", "tf32": "m16n8k8"}.items()
    }
    for matrices in (1, 2, 4):
        for transposed in (False, True):
            form = f".sync.aligned.m8n8.x{matrices}{'.trans' if transposed else ''}.shared.b16"
            table[f"ldmatrix{form}"] = load_matrices(matrices, transposed)
            table[f"stmatrix{form}"] = store_matrices(matrices, transposed)
    return table


INSTRUCTIONS = _table()
