"""The run loop: blocks of a grid one after another, all threads of a block that are at one statement together.

Where threads diverge, those that are furthest behind run first, so that they meet the others again where paths join.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ptx_emulator import matrix, transfers
from ptx_emulator.arithmetic import ELEMENTWISE, Elementwise
from ptx_emulator.errors import PTXError
from ptx_emulator.memory import Conflict, GlobalMemory, SharedMemory
from ptx_emulator.program import Program, Statement
from ptx_emulator.registers import POISON, Source, source, target

# The second argument: which threads execute (None: all of them).
Execute = Callable[["Block", "np.ndarray | None"], None]
# From a statement to the threads that execute it next.
Places = dict[int, np.ndarray]
# A kernel that runs longer does not end.
MOST_STATEMENTS = 5_000_000
SCRATCH_PARAMETERS = 2
FLOW = {"bra", "bra.uni", "ret", "exit", "bar.sync", "barrier.sync"}


class Block:
    """The state of one block: registers by name, arrays over its threads; shared memory; copies that are on their way."""

    def __init__(
        self, index: int, grid: int, threads: int, shared_bytes: int, memory: GlobalMemory, parameters: Sequence[int]
    ):
        self.index, self.grid, self.threads = index, grid, threads
        self.warps = np.arange(threads) // 32
        self.memory, self.shared, self.parameters = memory, SharedMemory(shared_bytes), parameters
        self.copies = transfers.Copies(threads)
        self.active: np.ndarray | None = None
        self._registers: dict[str, np.ndarray] = {}
        self._partly: dict[str, np.ndarray] = {}

    def read(self, name: str) -> np.ndarray:
        """Compilers let threads read what only others wrote and drop the result, but nobody needs what no thread wrote."""
        if name not in self._registers:
            raise PTXError(f"{name} is read, and no executed statement has written it")
        if self._partly and name in self._partly:
            written = self._partly[name]
            if not (written if self.active is None else written & self.active).any():
                raise PTXError(f"{name} is read, and no executed statement has written it in any thread that reads it")
        return self._registers[name]

    def write(self, name: str, raw: np.ndarray, mask: np.ndarray | None) -> None:
        if mask is None:
            self._partly.pop(name, None)
        elif name not in self._registers:
            poison = False if raw.dtype == bool else POISON[raw.dtype.itemsize]
            raw, self._partly[name] = np.where(mask, raw, poison), mask
        else:
            raw = np.where(mask, raw, self._registers[name])
            if name in self._partly:
                self._partly[name] = self._partly[name] | mask
        self._registers[name] = raw


class Machine:
    """A program, ready to run. ``shared_bytes``: what a launch gives each block."""

    def __init__(self, program: Program, shared_bytes: int = 0):
        self.program, self.shared_bytes = program, shared_bytes
        self._guards = [self._located(self._guard, s) for s in program.statements]
        self._code = [self._located(self._decode, s) for s in program.statements]

    def run(self, grid: int, parameters: Sequence[int], memory: GlobalMemory) -> None:
        """``parameters``: raw bits, in order, without Triton's scratch memory at the end, which these kernels do not use."""
        missing = len(self.program.parameters) - len(parameters)
        if not 0 <= missing <= SCRATCH_PARAMETERS:
            raise PTXError(
                f"{self.program.name} has {len(self.program.parameters)} parameters, and {len(parameters)} were given"
            )
        parameters = [*parameters, *[0] * missing]
        with np.errstate(all="ignore"):
            for index in range(grid):
                self._run_block(Block(index, grid, self.program.threads, self.shared_bytes, memory, parameters))

    def _located(self, decode: Callable, statement: Statement):
        try:
            return decode(statement)
        except PTXError as error:
            raise PTXError(error.reason, str(statement)) from None

    def _guard(self, statement: Statement) -> Source | None:
        if statement.guard is None:
            return None
        name, negated = statement.guard
        return source(self.program, f"!{name}" if negated else name, "pred")

    def _decode(self, statement: Statement) -> Execute | None:
        opcode, operands = statement.opcode.replace(".shared::cta", ".shared"), statement.operands
        if opcode in FLOW:
            if opcode.startswith("bra") and operands[0] not in self.program.labels:
                raise PTXError(f"there is no label {operands[0]}")
            if opcode.startswith("bar") and len(operands) != 1:
                raise PTXError("a barrier of some of the threads is not known")
            return None
        if opcode in ELEMENTWISE:
            return self._elementwise(ELEMENTWISE[opcode], operands)
        for table in (transfers.INSTRUCTIONS, matrix.INSTRUCTIONS):
            if opcode in table:
                return table[opcode](self.program, operands)
        raise PTXError(f"{opcode} is not known")

    def _elementwise(self, operation: Elementwise, operands: Sequence[str]) -> Execute:
        if len(operands) != len(operation.sources) + 1:
            raise PTXError(f"{len(operation.sources) + 1} operands were expected")
        if any(x.startswith("{") for x in operands):
            return transfers.packed_move(self.program, operation.target, *operands)
        reads = [source(self.program, x, kind) for x, kind in zip(operands[1:], operation.sources, strict=True)]
        function = operation.function
        if "|" in operands[0]:  # the predicates of two halves
            writes = [target(self.program, x, operation.target) for x in operands[0].split("|")]

            def write_both(block: Block, mask: np.ndarray | None) -> None:
                for write, half in zip(writes, function(*[read(block) for read in reads]).T, strict=True):
                    write(block, half, mask)

            return write_both
        write = target(self.program, operands[0], operation.target)
        return lambda block, mask: write(block, function(*[read(block) for read in reads]), mask)

    def _run_block(self, block: Block) -> None:
        at_statement: Places = {0: np.ones(block.threads, bool)}
        at_barrier: Places = {}
        end = len(self.program.statements)
        executed = 0
        while at_statement:
            at = min(at_statement)
            active = at_statement.pop(at)
            if at == end:
                continue
            executed += 1
            block.active = None if active.all() else active
            block.shared.statement = at
            try:
                if executed > MOST_STATEMENTS:
                    raise PTXError(f"the block does not end: it has executed {MOST_STATEMENTS} statements")
                guard, code = self._guards[at], self._code[at]
                if code is None:
                    chosen = active if guard is None else active & guard(block)
                    self._flow(at, active, chosen, at_statement, at_barrier, block)
                    continue
                if guard is None:
                    code(block, block.active)
                elif (chosen := active & guard(block)).any():
                    code(block, None if chosen.all() else chosen)
            except PTXError as error:
                raise self._explained(error, at, block) from None
            _send(at_statement, at + 1, active)
        if at_barrier:
            waiting = self.program.statements[min(at_barrier) - 1]
            raise PTXError("some threads wait at a barrier, and the others have ended", str(waiting))

    def _flow(
        self, at: int, active: np.ndarray, chosen: np.ndarray, at_statement: Places, at_barrier: Places, block: Block
    ) -> None:
        """A branch, an end or a barrier: where the threads are next."""
        statement = self.program.statements[at]
        if (passing := active & ~chosen).any():
            _send(at_statement, at + 1, passing)
        if not chosen.any():
            return
        if statement.opcode in ("ret", "exit"):
            return
        if statement.opcode.startswith("bra"):
            _send(at_statement, self.program.labels[statement.operands[0]], chosen)
            return
        _send(at_barrier, at + 1, chosen)
        if sum(mask.sum() for mask in at_barrier.values()) == block.threads:
            block.shared.barriers += 1
            for resumed, mask in at_barrier.items():
                _send(at_statement, resumed, mask)
            at_barrier.clear()

    def _explained(self, error: PTXError, at: int, block: Block) -> PTXError:
        reason = error.reason
        if isinstance(error, Conflict):
            reason += f"\n  by {self.program.statements[error.earlier]}"
        return PTXError(reason, f"{self.program.statements[at]}, block {block.index} of {self.program.name}")


def _send(places: Places, at: int, mask: np.ndarray) -> None:
    places[at] = places[at] | mask if at in places else mask
