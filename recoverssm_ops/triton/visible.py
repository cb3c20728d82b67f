"""The launchers with kernels that a tracer can see.

An operator is opaque to the compiler, and what is registered from Python cannot be called without Python. Traced through
these functions a program holds the kernels themselves (``torch.library.wrap_triton``), which AOTInductor compiles into its
package. They are the launchers of ``launch.py`` and ``launch_conv.py``: nothing here knows a kernel's arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import Tensor
from triton.runtime import JITFunction

from recoverssm_ops import conv_ops, ops
from recoverssm_ops.triton import launch, launch_conv

_POOLS = ("state", "conv_state")


@contextmanager
def _wrapped(module: ModuleType) -> Iterator[None]:
    """The module's kernels as the tracer's, for the length of a trace."""
    kernels = {name: x for name, x in vars(module).items() if isinstance(x, JITFunction)}
    if not kernels:
        raise RuntimeError(f"{module.__name__} names no Triton kernel (under TRITON_INTERPRET there are none to embed)")
    try:
        for name, kernel in kernels.items():
            setattr(module, name, torch.library.wrap_triton(kernel))
        yield
    finally:
        for name, kernel in kernels.items():
            setattr(module, name, kernel)


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
