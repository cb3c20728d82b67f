"""A compiled kernel, found again without Triton's binder.

Which kernel a launcher takes, in which shape, and what Triton specialises it on (dtypes, alignments, integers that are 1 or
multiples of 16) depends on the layout of an operator's tensors and on its settings, never on what the tensors hold. So a
launcher has two parts: one describes a launch, :func:`relaunch` makes it. Made again for the same layout, a launch needs the
tensors' addresses and nothing else; to choose, bind and specialise again would take longer than most of the kernels run.

What is kept is the compiled kernel that Triton returned for the first launch. Where that is not as expected (a version or
backend that is not known, the interpreter, a profiler's hooks), every launch is Triton's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction, driver

# The versions whose compiled kernels are called as below.
KNOWN_VERSIONS = ((3, 6), (3, 7), (3, 8))
# Where token counts are of every size, so are layouts: those of one entry are some kilobytes.
MOST_LAYOUTS = 4096


class Launch(NamedTuple):
    """``kernel[grid](*tensors, *numbers, **options)``: the kernel's tensors are its first parameters."""

    kernel: Any
    grid: tuple[int, ...]
    tensors: tuple[Tensor | None, ...]
    numbers: tuple[int, ...]
    options: dict[str, Any]

    def __call__(self) -> Any:
        return self.kernel[self.grid](*self.tensors, *self.numbers, **self.options)


# From tensors and settings to a launch; None where there is nothing to compute.
Description = Callable[..., "Launch | None"]


class Known(NamedTuple):
    """A launch without its tensors' addresses. ``addresses`` takes the kernel's from those of the operator's tensors."""

    function: JITFunction
    kernel: CompiledKernel
    grid: tuple[int, int, int]
    addresses: itemgetter
    others: tuple[Any, ...]


_known: dict[Hashable, Known] = {}


def relaunch(
    describe: Description,
    tensors: tuple[Tensor | None, ...],
    settings: tuple[Hashable, ...],
    choices: tuple[Hashable, ...] = (),
) -> None:
    """Launch ``describe(*tensors, *settings)`` on the device of the first tensor.

    ``describe`` may read the tensors' shapes, strides, dtypes, devices and alignments by 16 bytes, and its settings. Whatever
    else it depends on (the launch table, which benchmarks replace) belongs to ``choices``: a launch with equal layouts,
    settings and choices is not described again.
    """
    device = tensors[0].get_device()
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            relaunch(describe, tensors, settings, choices)
        return
    addresses, layout = addresses_and_layout(tensors)
    key = (describe, settings, choices, layout)
    known = _known.get(key)
    if known is None or known.function.pre_run_hooks or _observed():
        _launch_and_remember(key, describe, tensors, settings)
        return
    kernel = known.kernel
    kernel.run(
        *known.grid, driver.active.get_current_stream(device), kernel.function, kernel.packed_metadata,
        None, None, None, *known.addresses(addresses), *known.others,
    )  # fmt: skip


def addresses_and_layout(tensors: tuple[Tensor | None, ...]) -> tuple[list[int | None], Hashable]:
    """What differs between launches of one compiled kernel, and what tells two kernels apart: more than Triton looks at."""
    addresses, layout = [], []
    for x in tensors:
        if x is None:
            addresses.append(None)
            layout.append(None)
        else:
            address = x.data_ptr()
            addresses.append(address)
            layout.append((x.shape, x.stride(), x.dtype, x.get_device(), address % 16 == 0))
    return addresses, tuple(layout)


def launch_described(
    describe: Description,
    tensors: tuple[Tensor | None, ...],
    settings: tuple[Hashable, ...],
    choices: tuple[Hashable, ...] = (),
) -> None:
    """:func:`relaunch` without a memory, for kernels in whose place something else stands (a tracer's)."""
    with on_device(tensors[0]):
        if described := describe(*tensors, *settings):
            described()


def on_device(x: Tensor) -> contextlib.AbstractContextManager:
    """Triton launches on the current device's current stream, which must be the tensor's."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return contextlib.nullcontext()


def _launch_and_remember(
    key: Hashable, describe: Description, tensors: tuple[Tensor | None, ...], settings: tuple[Hashable, ...]
) -> None:
    # An object for each place, even if a caller passes one tensor twice: the kernel's tensors tell which places they are from.
    tensors = tuple(None if x is None else x.detach() for x in tensors)
    described = describe(*tensors, *settings)
    if described is None:
        return
    function, kernel = described.kernel, described()
    places = [next((i for i, given in enumerate(tensors) if given is x), None) for x in described.tensors]
    if (
        not _as_expected(function, kernel)
        or _observed()
        or function.pre_run_hooks
        or None in places  # a copy, made for this launch
        or len({x.get_device() for x in tensors if x is not None}) > 1  # Triton says which one the GPU cannot read
    ):
        return
    named = {name: x for name, x in described.options.items() if name in function.signature.parameters}
    bound = function.signature.bind(*described.tensors, *described.numbers, **named)
    bound.apply_defaults()
    others = tuple(bound.arguments.values())[len(places) :]
    if len(_known) >= MOST_LAYOUTS:
        _known.clear()
    grid = (*described.grid, 1, 1)[:3]
    _known[key] = Known(function, kernel, grid, itemgetter(*places), others)


def _as_expected(function: Any, kernel: Any) -> bool:
    """Whether Triton compiled and launched this, in a version and for a backend that are known."""
    return (
        _version() in KNOWN_VERSIONS
        and isinstance(function, JITFunction)
        and isinstance(kernel, CompiledKernel)
        and kernel.metadata.target.backend == "cuda"  # others specialise on more than alignments
    )


def _version() -> tuple[int, ...]:
    return tuple(map(int, triton.__version__.split(".")[:2]))


def _observed() -> bool:
    """Whether somebody wants to see launches or change what is compiled: a profiler, a sanitizer, a debugger."""
    runtime = knobs.runtime
    return bool(
        runtime.debug
        or knobs.compilation.instrumentation_mode
        or runtime.add_stages_inspection_hook
        or _hooked(runtime.launch_enter_hook)
        or _hooked(runtime.launch_exit_hook)
    )


def _hooked(hook: Any) -> Any:
    """A chain of hooks is there even when it is empty."""
    return getattr(hook, "calls", hook)
