"""ONNX: programs that hold our operators become standard operators, through the portable form.

Needs ``onnx`` and ``onnxscript``; importing this module does not. There is no table of translations and no custom domain: what
an ONNX runtime executes is the algorithm of ``portable.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.export import ExportedProgram

from recoverssm_ops.decompositions import PURE, running_product, without_mutation


def export(
    program: ExportedProgram,
    path: str | None = None,
    *,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    opset_version: int | None = None,
) -> torch.onnx.ONNXProgram:
    """Convert an exported program, as ``torch.onnx.export(program, dynamo=True)`` does for programs without our operators.

    Args:
        program: exported by ``torch.export`` or ``compile_passes.export_step(..., functional=True, portable=True)``.
        path: file to write, too.
        input_names, output_names: in the program's order; None keeps the program's names.
        opset_version: 18 or later; None leaves it to PyTorch.

    Raises:
        ValueError: the program updates a pool in place, or calls an operator that does. ONNX has no mutation.
    """
    program = without_mutation(program, {**PURE, **_MISSING}, "ONNX")
    options = {"input_names": input_names, "output_names": output_names, "opset_version": opset_version}
    converted = torch.onnx.export(program, dynamo=True, verbose=False, **options)
    if path is not None:
        converted.save(path)
    return converted


def _where(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """ONNX Runtime selects numbers, but not booleans (tried on 1.32)."""
    if x.dtype != torch.bool or y.dtype != torch.bool:
        return NotImplemented
    return (condition & x) | (~condition & y)


# What acceptance in a model uses, and ONNX lacks. (PyTorch's own decomposition of cumprod ends in prims.prod, which its
# exporter does not know: tried on torch 2.13.)
_MISSING = {torch.ops.aten.cumprod.default: running_product, torch.ops.aten.where.self: _where}
