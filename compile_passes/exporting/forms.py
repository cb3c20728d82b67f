"""What calls become on their way into an exported program: operators, plain ATen, or the Triton kernels themselves."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from compile_passes.reading.index_notation import prims
from recoverssm_ops.decompositions import PORTABLE
from recoverssm_ops.lazy_triton import launchers

OPERATORS = tuple(PORTABLE)


def _iota(length: int, *, start: int, step: int, dtype: torch.dtype, device: torch.device, requires_grad: bool):
    return torch.arange(start, start + length * step, step, dtype=dtype, device=device)


def _convert(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype)


# What the rewrite leaves of Inductor's own dialect, which no other runtime reads.
ATEN = {prims.iota.default: _iota, prims.convert_element_type.default: _convert}


def operator_table(form: str) -> dict[Callable, Callable]:
    """What takes the operators' place in a program of this form: ``recoverssm`` (nothing), ``portable`` or ``triton``."""
    if form == "recoverssm":
        return {}
    return PORTABLE if form == "portable" else launchers("visible").VISIBLE
