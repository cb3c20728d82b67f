"""Instructions that move data: loads, stores, copies to shared memory, exchanges between the lanes of a warp."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from ptx_emulator.errors import PTXError
from ptx_emulator.program import Program, address, vector
from ptx_emulator.registers import RAW, SHARED_BASE, TYPES, source, sources, target, targets


def chosen(x: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    return x if mask is None else x[mask]


def spread(x: np.ndarray, mask: np.ndarray | None, threads: int) -> np.ndarray:
    """What the chosen threads got, as an array over all threads."""
    if mask is None:
        return np.ascontiguousarray(x)
    full = np.zeros(threads, x.dtype)
    full[mask] = x
    return full


def addresses(program: Program, operand: str) -> Callable:
    base, offset = address(operand)
    if base == "global_smem":
        at = np.full(program.threads, SHARED_BASE + offset, np.int64)
        return lambda block: at
    declared = program.register_type(base)
    if declared is None:
        raise PTXError(f"{base} is no register that holds an address")
    read = source(program, base, declared)
    return lambda block: read(block).astype(np.int64) + offset


def load(space: str, kind: str) -> Callable:
    def decode(program: Program, operands: Sequence[str]):
        writes, at, width = targets(program, operands[0], kind), addresses(program, operands[1]), TYPES[kind].itemsize

        def execute(block, mask):
            where = chosen(at(block), mask)
            if space == "global":
                words = block.memory.load(where, len(writes), width)
            else:
                words = block.shared.load(where, len(writes), width, chosen(block.warps, mask))
            for i, write in enumerate(writes):
                write(block, spread(words[:, i], mask, block.threads).view(TYPES[kind]), mask)

        return execute

    return decode


def store(space: str, kind: str) -> Callable:
    def decode(program: Program, operands: Sequence[str]):
        at, reads, width = addresses(program, operands[0]), sources(program, operands[1], kind), TYPES[kind].itemsize

        def execute(block, mask):
            where = chosen(at(block), mask)
            words = np.stack([chosen(read(block), mask).view(RAW[width]) for read in reads], 1)
            if space == "global":
                block.memory.store(where, words)
            else:
                block.shared.store(where, words, chosen(block.warps, mask))

        return execute

    return decode


def load_parameter(kind: str) -> Callable:
    def decode(program: Program, operands: Sequence[str]):
        name, offset = address(operands[1])
        if name not in program.parameters or offset:
            raise PTXError(f"{operands[1]} is no parameter of {program.name}")
        write, at, dtype = target(program, operands[0], kind), program.parameters.index(name), TYPES[kind]
        bits = (1 << 8 * dtype.itemsize) - 1

        def execute(block, mask):
            raw = np.full(block.threads, block.parameters[at] & bits, RAW[dtype.itemsize])
            write(block, raw.view(dtype), mask)

        return execute

    return decode


def packed_move(program: Program, kind: str, to: str, of: str):
    """``mov``: a register as several narrower ones, or several as one; the first are the lowest bits."""
    parts = vector(to if to.startswith("{") else of)
    width = TYPES[kind].itemsize // len(parts)
    part = f"b{8 * width}"
    if to.startswith("{"):
        read, writes = source(program, of, kind), targets(program, to, part)

        def unpack(block, mask):
            words = np.ascontiguousarray(read(block)).view(RAW[width]).reshape(block.threads, len(writes))
            for i, write in enumerate(writes):
                write(block, np.ascontiguousarray(words[:, i]), mask)

        return unpack
    reads, write = sources(program, of, part), target(program, to, kind)

    def pack(block, mask):
        words = np.stack([read(block) for read in reads], 1)
        write(block, words.view(TYPES[kind])[:, 0], mask)

    return pack


class Copies:
    """The ``cp.async`` of a block's threads. Data arrive only when a thread waits for the group it has put them in."""

    def __init__(self, threads: int):
        self._committed = np.zeros(threads, np.int64)
        self._pending: list[tuple] = []

    def begin(self, threads: np.ndarray, to: np.ndarray, words: np.ndarray) -> None:
        self._pending.append((threads, self._committed[threads], to, words))

    def commit(self, mask: np.ndarray | None) -> None:
        self._committed = self._committed + (1 if mask is None else mask)

    def wait(self, block, mask: np.ndarray | None, most: int | None) -> None:
        """Until at most ``most`` of a thread's groups are on their way; None: until nothing is."""
        still = []
        for threads, group, to, words in self._pending:
            done = np.ones(len(threads), bool) if most is None else group < self._committed[threads] - most
            if mask is not None:
                done &= mask[threads]
            if done.any():
                block.shared.end_copy(to[done], words[done], block.warps[threads[done]])
            if not done.all():
                still.append((threads[~done], group[~done], to[~done], words[~done]))
        self._pending = still


def copy_async(program: Program, operands: Sequence[str]):
    """Of ``size`` bytes; those past the optional fourth operand are zeros, and with 0 nothing is read."""
    to, of, size = addresses(program, operands[0]), addresses(program, operands[1]), int(operands[2], 0)
    given = source(program, operands[3], "u32") if len(operands) > 3 else None
    width = min(size, 8)

    def execute(block, mask):
        threads = np.arange(block.threads) if mask is None else np.flatnonzero(mask)
        there = np.ones(len(threads), bool)
        if given is not None:
            count = given(block)[threads]
            if ((count != 0) & (count != size)).any():
                raise PTXError("a copy of part of its bytes is not known")
            there = count == size
        words = np.zeros((len(threads), size // width), RAW[width])
        words[there] = block.memory.load(of(block)[threads][there], size // width, width)
        where = to(block)[threads]
        block.shared.begin_copy(where, size, block.warps[threads])
        block.copies.begin(threads, where, words)

    return execute


def commit_group(program: Program, operands: Sequence[str]):
    return lambda block, mask: block.copies.commit(mask)


def wait_group(program: Program, operands: Sequence[str]):
    most = int(operands[0], 0)
    return lambda block, mask: block.copies.wait(block, mask, most)


def wait_all(program: Program, operands: Sequence[str]):
    return lambda block, mask: block.copies.wait(block, mask, None)


def check_whole_warps(mask: np.ndarray | None) -> None:
    if mask is not None and (mask.reshape(-1, 32).any(1) != mask.reshape(-1, 32).all(1)).any():
        raise PTXError("part of a warp executes what a warp does together")


LANES = np.arange(32)
# From the lane number and the operand to the lane that is read.
SHUFFLES = {
    "idx": lambda by: by & 31,
    "bfly": lambda by: LANES ^ (by & 31),
    "up": lambda by: LANES - (by & 31),
    "down": lambda by: LANES + (by & 31),
}


def shuffle(mode: str) -> Callable:
    def decode(program: Program, operands: Sequence[str]):
        destination, _, inside = operands[0].partition("|")
        write = target(program, destination.strip(), "b32")
        write_inside = target(program, inside.strip(), "pred") if inside else None
        value, by = source(program, operands[1], "b32"), source(program, operands[2], "s32")
        if int(operands[3], 0) != (0 if mode == "up" else 31) or int(operands[4], 0) not in (-1, 0xFFFFFFFF):
            raise PTXError("an exchange among part of a warp is not known")

        def execute(block, mask):
            check_whole_warps(mask)
            lane = SHUFFLES[mode](by(block).reshape(-1, 32))
            valid = (lane >= 0) & (lane < 32)
            lane = np.where(valid, lane, LANES)
            write(block, np.take_along_axis(value(block).reshape(-1, 32), lane, 1).reshape(-1), mask)
            if write_inside:
                write_inside(block, valid.reshape(-1), mask)

        return execute

    return decode


def nothing(program: Program, operands: Sequence[str]):
    """The lanes of a warp are in lockstep."""
    return lambda block, mask: check_whole_warps(mask)


def _table() -> dict[str, Callable]:
    table = {
        "cp.async.commit_group": commit_group,
        "cp.async.wait_group": wait_group,
        "cp.async.wait_all": wait_all,
        "cp.async.cg.shared.global": copy_async,
        "cp.async.ca.shared.global": copy_async,
        "bar.warp.sync": nothing,
    }
    for mode in SHUFFLES:
        table[f"shfl.sync.{mode}.b32"] = shuffle(mode)
    kinds = [f"{letter}{bits}" for letter in "bus" for bits in (16, 32, 64)] + ["f32", "f64"]
    for kind in kinds:
        table[f"ld.param.{kind}"] = load_parameter(kind)
        for space, many in itertools.product(("global", "shared"), ("", ".v2", ".v4")):
            table[f"ld.{space}{many}.{kind}"] = load(space, kind)
            table[f"st.{space}{many}.{kind}"] = store(space, kind)
    return table


INSTRUCTIONS = _table()
