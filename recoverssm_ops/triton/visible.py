"""The launchers with kernels that a tracer can see.

An operator is opaque to the compiler, and what is registered from Python cannot be called without Python. Traced through
these functions a program holds the kernels themselves (``torch.library.wrap_triton``), which AOTInductor compiles into its
package. They are the launchers of ``launch.py`` and ``launch_conv.py``: nothing here knows a kernel's arguments.

A launcher shapes its kernels by how many programs there are. A traced program of a dynamic batch holds one shape for all of
them: the best one for the batch of the example inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import Tensor
from triton.runtime import JITFunction

from recoverssm_ops import conv_ops, ops
from recoverssm_ops.triton import configs, launch, launch_conv
from recoverssm_ops.triton.cached_launch import launch_described

_POOLS = ("state", "conv_state")
_CONFIGURATIONS = ("verify_config", "commit_config")


@contextmanager
def _wrapped(module: ModuleType) -> Iterator[None]:
    """For the length of a trace: the kernels as the tracer's, none of them remembered, shaped by the example's sizes."""
    kernels = {name: x for name, x in vars(module).items() if isinstance(x, JITFunction)}
    if not kernels:
        raise RuntimeError(f"{module.__name__} names no Triton kernel (under TRITON_INTERPRET there are none to embed)")
    traced = {name: torch.library.wrap_triton(kernel) for name, kernel in kernels.items()}
    traced |= {name: _by_example(x) for name, x in vars(module).items() if name in _CONFIGURATIONS}
    traced["relaunch"] = launch_described
    before = {name: getattr(module, name) for name in traced}
    try:
        for name, x in traced.items():
            setattr(module, name, x)
        yield
    finally:
        for name, x in before.items():
            setattr(module, name, x)


def _by_example(configuration: Callable[..., dict[str, int]]) -> Callable[..., dict[str, int]]:
    """The configuration for the traced example's number of programs.

    Compared as it is, a symbolic number would become a guard: the exported batch would end where the other shape begins.
    """

    def of_the_example(programs: int | torch.SymInt, *sizes: object) -> dict[str, int]:
        if isinstance(programs, torch.SymInt):
            hint = programs.node.hint
            programs = configs.FEW_PROGRAMS + 1 if hint is None else hint  # unbacked: no example says how many
        return configuration(programs, *sizes)

    return of_the_example


def _visible(op: torch._ops.OpOverload, module: ModuleType, name: str) -> Callable:
    names = [argument.name for argument in op._schema.arguments]

    def call(*arguments):
        # The strides become constants or symbols of the launch, and of an intermediate tensor Inductor keeps their order
        # alone. Dense tensors have no other strides than those of their sizes. A pool is an input: its strides stay.
        dense = [
            x.contiguous() if isinstance(x, Tensor) and argument not in _POOLS else x
            for argument, x in zip(names, arguments, strict=True)
        ]
        with _wrapped(module):
            return getattr(module, name)(*dense)

    return call


VISIBLE = {
    op: _visible(op, module, name)
    for op, module, name in (
        (ops.kda_verify, launch, "verify"),
        (ops.kda_commit, launch, "commit"),
        (ops.kda_recover, launch, "recover"),
        (conv_ops.causal_conv1d_verify, launch_conv, "verify"),
        (conv_ops.causal_conv1d_commit, launch_conv, "commit"),
    )
}
