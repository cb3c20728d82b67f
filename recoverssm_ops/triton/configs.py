"""The kernels' launch table: tile sizes, warps and stages for a problem's shape, never tuned at run time.

Measured on an H200; ``python -m benchmarks.launch_table`` says what each choice loses against its neighbours.
"""

import math

import torch
import triton

# No more programs than this: less than one for each multiprocessor of a large GPU.
FEW_PROGRAMS = 96
# One, four and six for each: where all programs run at once, nothing comes after them.
ONE_EACH, FOUR_EACH, ONE_WAVE = 132, 528, 792
# Triton 3.8 keeps more of a loop's operands in registers: with as few as before, tf32 pieces would spill.
KEEPS_OPERANDS = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8)


def limits() -> tuple[int, ...]:
    """Numbers of programs at which choices change. Tests move them, so that a small problem is launched like a large one."""
    return FEW_PROGRAMS, ONE_EACH, FOUR_EACH, ONE_WAVE


def verify_config(programs: int, window: int, key_dim: int, value_dim: int, state_dtype: torch.dtype) -> dict[str, int]:
    """Tile sizes, warps and stages of the verify kernel for ``programs`` pairs of row and value head.

    A program is a long chain of dependent steps. Where there are many, the fewest warps that hold it in registers make the most
    chains run at once; where the GPU is not full, more warps shorten the one there is.
    """
    TP = max(8, triton.next_power_of_2(window))
    BK = max(16, triton.next_power_of_2(key_dim))
    PART = max(16, triton.next_power_of_2(value_dim))
    pieces, large = pieces_of(state_dtype), TP * BK > 2048
    few = programs <= FEW_PROGRAMS and not large
    warps = max(1, min(8, TP * BK // 1024))
    rows = 32 if pieces and warps * 1024 >= TP * BK else 16
    if few:
        warps = min(8, (4 if pieces else 8) * warps)
        rows = 128 // warps
    elif not pieces and KEEPS_OPERANDS:
        warps, rows = 2 * warps, 8
    # With one stage ptxas gives up on what Triton 3.8 makes of the largest: 32 registers and 24 KB of spills, not 255 and 3.
    one_stage = few or (large and not (KEEPS_OPERANDS and state_dtype.itemsize == 4))
    stages = 1 if one_stage else 2
    BV = min(rows * warps, PART, _most_rows(BK * state_dtype.itemsize, 1 if few else 2))
    return {"TP": TP, "BK": BK, "BV": BV, "PIECES": pieces, "STAGES": stages, "num_warps": min(8, warps)}


def verify_async_config(
    programs: int, window: int, key_dim: int, value_dim: int, state_dtype: torch.dtype, halved: bool = False
) -> dict[str, int]:
    """The same for the kernel of ``verify_async.py``; ``halved`` where its couplings are those of ``halved_couplings``.

    How many of its programs run at once decides, so registers and shared memory are rationed: on a multiprocessor of Hopper
    eight programs of two warps for a bf16 pool, four for a float32 one. Where all of a bf16 pool's run at once anyway, each has
    more registers and asks for more of the state first. Float32 tiles of 32 columns let six programs in, for where those are
    all, and leave no column of a head of 96 to multiply by zeros; up to three get tiles of 64. Where there are so few programs
    that each could have a multiprocessor even if it took less than a head, it does (``SHARE``).
    """
    BK = max(64, triton.next_power_of_2(key_dim))
    pieces = pieces_of(state_dtype)
    if window > 8 or BK > 128:
        return _large_verify_async_config(programs, window, BK, key_dim, value_dim, pieces, halved)
    few = programs <= FEW_PROGRAMS and value_dim % 64 == 0
    warps, share, columns, buffers, ahead, registers = 2, value_dim, BK, 2, 1, 168
    if few:
        share = _share(programs, value_dim, (32, 64) if pieces else (64,))
        warps, registers = min(4, share // 16), 128 if pieces else 255
    elif pieces:
        buffers, ahead, registers = (3, 2, 168) if programs <= ONE_WAVE else (2, 1, 128)
    elif state_dtype.itemsize == 4:
        if FOUR_EACH < programs <= ONE_WAVE or key_dim < BK:
            columns, buffers, ahead = 32, 6, 3
        else:
            columns, buffers, ahead = (64, 3, 2) if 2 * programs <= ONE_WAVE else (BK, 2, 2)
            registers = 224 if KEEPS_OPERANDS else 208
    buffers = min(buffers, share // (16 * warps) * -(-key_dim // columns))
    return {
        "BK": BK, "PIECES": pieces, "ACCUMULATORS": 3 if few or not pieces else 2, "SHARE": share,
        "ROWS": 16, "COLUMNS": columns, "PART": min(BK, 64 if few else 128 if pieces else 32), "HOLD": not few,
        "BUFFERS": buffers, "AHEAD": min(ahead, buffers), "num_warps": warps, "maxnreg": registers,
    }  # fmt: skip


def _share(programs: int, value_dim: int, shares: tuple[int, ...]) -> int:
    """The first of ``shares`` of a head's values for which there is a multiprocessor each, or all of them."""
    return next((share for share in shares if programs * (value_dim // share) <= ONE_EACH), value_dim)


def _large_verify_async_config(
    programs: int, window: int, BK: int, key_dim: int, value_dim: int, pieces: int, halved: bool
) -> dict[str, int]:
    """For more than 8 tokens or more than 128 key dimensions: tiles of part of a row, operands in shared memory.

    A tile of 64 columns is 256 bytes of each row; 192 dimensions are three of them, so that nothing is multiplied by padding.
    """
    few, long, wide = programs <= FEW_PROGRAMS, window > 8, BK > 128
    both = long and wide and not pieces
    # Halved couplings hold every token of a column in registers, several times.
    halved = halved and long
    most = 8 if both else 4 if few or wide or (halved and not pieces) else 2
    warps = next(w for w in (8, 4, 2) if w <= most and value_dim % (16 * w) == 0)
    columns = 32 if both else 64
    share = _share(programs, value_dim, (16 * warps,)) if few else value_dim
    tiles = share // (16 * warps) * -(-key_dim // columns)
    if pieces:
        buffers, registers = 4 if not long else 3 if few or not wide else 2, 255 if few else 168 if long else 128
    else:
        buffers, registers = (1, 128) if both else (2 if long else 3, 255)
    registers = 255 if halved else registers
    ahead = 1 if long else 4 if few and pieces else 2
    return {
        "BK": BK, "PIECES": pieces, "ACCUMULATORS": 2 if long or (pieces and not few) else 3, "SHARE": share,
        "ROWS": 16, "COLUMNS": columns, "PART": 64 if pieces else 32, "HOLD": False,
        "BUFFERS": min(tiles, buffers), "AHEAD": min(tiles, ahead), "num_warps": warps, "maxnreg": registers,
    }  # fmt: skip


def commit_config(programs: int, window: int, key_dim: int, value_dim: int, state_dtype: torch.dtype) -> dict[str, int]:
    """Tile sizes, warps and stages of the commit kernel for ``programs`` pairs of row and value head.

    By the rules of :func:`verify_config`; where there are few, programs share out a head's values, ``PART`` to each.
    """
    TP = max(8, triton.next_power_of_2(window))
    BK = max(16, triton.next_power_of_2(key_dim))
    PART = max(16, triton.next_power_of_2(value_dim))
    few = programs <= FEW_PROGRAMS
    warps = max(1, min(8, TP * BK // 1024)) * (4 if few else 2 if state_dtype.itemsize == 4 else 1)
    BV = min(16 * warps, PART, _most_rows(BK * state_dtype.itemsize, 2))
    if few:
        BV = PART = 16
    return {
        "TP": TP, "BK": BK, "BV": BV, "PART": PART, "PIECES": pieces_of(state_dtype), "STAGES": 1 if few else 2,
        "EAGER": few, "num_warps": min(8, warps),
    }  # fmt: skip


def commit_rows_config(
    programs: int, window: int, key_dim: int, value_dim: int, state_dtype: torch.dtype, columns: int = 1
) -> dict[str, int]:
    """The same for the kernel of ``commit_rows.py``.

    What is on the way at once decides: 6 to 12 KiB for each warp, and 2 to 8 where long windows or large heads need the
    registers. Where there are so few programs that two for each head run at once, there are two; where there are fewer, one
    for each 16 values, which hold them all at once. Where there are more than run at once, eight of 128 registers share a
    multiprocessor; on float32 each has less on the way, and takes half a head. Of all this only the number of warps, which
    share out a key, shows in the bits. A loop over a plan's columns keeps addresses, and wants more registers than one column
    does; eight rows of float32 would not fit beside them.
    """
    BK = max(64, triton.next_power_of_2(key_dim))
    if programs <= FEW_PROGRAMS:
        return {
            "BK": BK, "PART": 16, "ROWS": 4, "BUFFERS": 1, "GROUP": 16, "EAGER": True, "num_warps": 4, "maxnreg": 255
        }  # fmt: skip
    part = value_dim if value_dim <= 256 else 32
    registers = 168
    if BK > 128 and window > 8:
        warps, rows, buffers, registers = 8, 4, 1, 128
    elif BK > 128:
        warps, rows, buffers = 8, 4, 2
    elif window > 8:
        warps, rows, buffers = 4, 4, 2
    elif 2 * programs <= ONE_WAVE and part == value_dim:
        warps, rows, buffers, part = 2, 8, 3, part // 2
    elif state_dtype.itemsize == 2:
        warps, rows, buffers, registers = 2, 8, 3, 128
    elif programs > ONE_WAVE and BK > 64 and part == value_dim:
        warps, rows, buffers, part, registers = 2, 4, 3, part // 2, 128
    else:
        warps, rows, buffers = 2, 4, 4
    if columns > 1:
        rows, registers = min(rows, 16 // state_dtype.itemsize), 200 if warps == 2 else 240
    return {
        "BK": BK, "PART": part, "ROWS": rows, "BUFFERS": buffers, "GROUP": 4,
        "EAGER": False, "num_warps": warps, "maxnreg": registers,
    }  # fmt: skip


def shift(lower_bound: float, window: int) -> int:
    """Powers of two by which to move ``exp(G)`` up and ``exp(-G)`` down: half their range, where that is wide."""
    exponent = -lower_bound * window
    return round(exponent * math.log2(math.e) / 2) if exponent > 50 else 0


def _most_rows(row_bytes: int, stages: int) -> int:
    """Rows of state in a tile: a block of the smaller GPUs has 99 KiB of shared memory, and most of it is needed elsewhere."""
    return max(16, (65536 if stages == 1 else 16384) // row_bytes)


def pieces_of(state_dtype: torch.dtype) -> int:
    """How finely products are cut (``products.py``): a bf16 pool rounds to 8 bits what 16 bits have been computed of."""
    return 2 if state_dtype == torch.bfloat16 else 0
