"""Triton's launches on CPU tensors, compiled for a GPU and run by the emulator."""

from __future__ import annotations

import contextlib
import functools
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from benchmarks.compilation import Compiled, Launch, compile_launch
from ptx_emulator.machine import Machine
from ptx_emulator.memory import GlobalMemory
from ptx_emulator.program import Program

# Once in a process, by kernel, what Triton specialises on, options and architecture; and by what was done to the PTX.
_compiled: dict[tuple, Compiled] = {}
_machines: dict[tuple, Machine] = {}


@dataclass
class Emulator:
    """What has been launched, by name. ``reachable``: tensors that a kernel finds by addresses in other tensors."""

    arch: int
    kernels: list[str] = field(default_factory=list)
    compiled: list[Compiled] = field(default_factory=list)
    reachable: list[Tensor] = field(default_factory=list)
    change: Callable[[str], str] | None = None

    def launch(self, launch: Launch) -> None:
        arguments, specialization, options = _binder(launch.kernel, self.arch)(*launch.arguments, **launch.keywords)
        key = (launch.kernel, str(specialization), str(options), self.arch)
        if key not in _compiled:
            _compiled[key] = compile_launch(launch, self.arch)
        compiled = _compiled[key]
        if (key, self.change) not in _machines:
            ptx = compiled.ptx if self.change is None else self.change(compiled.ptx)
            _machines[key, self.change] = Machine(Program.parse(ptx), compiled.shared_bytes)
        self.kernels.append(compiled.kernel)
        self.compiled.append(compiled)
        values = arguments.values() if isinstance(arguments, dict) else arguments
        given = [(x, kind[0]) for x, kind in zip(values, specialization, strict=True) if kind[0] != "constexpr"]
        parameters = [_bits(x, kind) for x, kind in given]
        memory = GlobalMemory([*(x for x, _ in given if isinstance(x, Tensor)), *self.reachable])
        if any(size != 1 for size in launch.grid[1:]):
            raise NotImplementedError("grids of more than one dimension")
        _machines[key, self.change].run(launch.grid[0], parameters, memory)


@contextlib.contextmanager
def emulated(arch: int = 90, change: Callable[[str], str] | None = None) -> Iterator[Emulator]:
    """Triton kernels launched within are compiled for ``sm_{arch}`` and run here. ``change``: what to do to their PTX first."""
    emulator = Emulator(arch, change=change)

    def run(self: JITFunction, *arguments: Any, grid: tuple[int, ...], warmup: bool, **keywords: Any) -> None:
        emulator.launch(Launch(self, grid, arguments, keywords))

    with mock.patch.object(JITFunction, "run", run):
        yield emulator


@functools.cache
def _binder(kernel: JITFunction, arch: int) -> Callable:
    backend = make_backend(GPUTarget("cuda", arch, 32))
    return create_function_from_signature(kernel.signature, kernel.params, backend)


def _bits(x: Any, kind: str) -> int:
    if isinstance(x, Tensor):
        return x.data_ptr()
    if kind == "fp32":
        return struct.unpack("<I", struct.pack("<f", x))[0]
    return int(x)
