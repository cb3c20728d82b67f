"""Kernels compiled for GPUs that this machine does not have, exactly as the launchers would: registers, spills, shared memory.

The launchers run on CPU tensors with Triton's launch replaced by a note of what was launched. From it Triton's own binder
derives types, constants and alignments, so nothing here knows a kernel's arguments.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction, create_function_from_signature


@dataclass(frozen=True)
class Launch:
    """One launch that a launcher asked for."""

    kernel: JITFunction
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a launch. ``spilled_bytes``: stores and loads together, as ptxas counts them."""

    kernel: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    num_warps: int
    ptx: str
    ttgir: str


@contextlib.contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Triton kernels launched within are noted, not run."""
    launches: list[Launch] = []

    def run(self: JITFunction, *arguments: Any, grid: tuple[int, ...], warmup: bool, **keywords: Any) -> None:
        launches.append(Launch(self, grid, arguments, keywords))

    with mock.patch.object(JITFunction, "run", run):
        yield launches


def only_launch(call: Callable[[], object]) -> Launch:
    """The one launch that ``call()`` makes."""
    with recorded_launches() as launches:
        call()
    if len(launches) != 1:
        raise ValueError(f"one launch was expected, but there were {[launch.kernel.__name__ for launch in launches]}")
    return launches[0]


def compile_launch(launch: Launch, arch: int) -> Compiled:
    """Compile for ``sm_{arch}``."""
    kernel, target = launch.kernel, GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    arguments, specialization, options = bind(*launch.arguments, **launch.keywords)
    options, signature, constants, attributes = kernel._pack_args(
        backend, dict(launch.keywords), arguments, specialization, options
    )
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    return compile_source(source(kernel, signature, constants, attributes), target, vars(options))


def compile_source(source: ASTSource, target: GPUTarget, options: dict[str, Any]) -> Compiled:
    """Compile past Triton's cache: the figures stand in the log of ptxas, which is not cached."""
    log = io.StringIO()
    with knobs.compilation.scope(), knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        knobs.compilation.always_compile = True
        knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(source, target=target, options=options)
    registers = int(re.search(r"Used (\d+) registers", log.getvalue()).group(1))
    spilled = sum(map(int, re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log.getvalue()).groups()))
    metadata, asm = compiled.metadata, compiled.asm
    return Compiled(
        source.fn.__name__, registers, spilled, metadata.shared, metadata.num_warps, asm["ptx"], asm["ttgir"]
    )
