"""Torch-TensorRT: programs that hold our operators, lowered so that TensorRT converts all of the recurrence itself.

The operators arrive as their portable form; there is no plugin, which TensorRT-RTX would not take. Needs ``torch_tensorrt``
(``torch-tensorrt`` or ``torch-tensorrt-rtx``); importing this module does not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from recoverssm_ops.decompositions import PURE, running_product, running_sum, without_mutation

# TensorRT-RTX has no converter for scans (tried on Torch-TensorRT 2.13).
_SCANS = {torch.ops.aten.cumsum.default: running_sum, torch.ops.aten.cumprod.default: running_product}


def lower(program: ExportedProgram) -> ExportedProgram:
    """The program with our operators and scans as operations that TensorRT converts.

    Raises:
        ValueError: the program updates a pool in place. Torch-TensorRT would drop the update without a word (tried on
            2.13). Run the commit half in PyTorch, where it is one launch a layer, or export the functional form.
    """
    return without_mutation(program, {**PURE, **_SCANS}, "a TensorRT engine")


def compile(program: ExportedProgram, inputs: Sequence[Tensor], **options) -> nn.Module:
    """``torch_tensorrt.dynamo.compile`` of the lowered program.

    Args:
        program: exported by ``torch.export`` or ``export_step``.
        inputs: example inputs, or ``torch_tensorrt.Input`` for dynamic sizes.
        options: for ``torch_tensorrt.dynamo.compile``. ``min_block_size`` is 1 unless given, so that nothing small falls
            back to PyTorch. Keep ``disable_tf32=True`` unless a state with 11 bits is enough: tf32 is TensorRT's default.

    Raises:
        ImportError: torch_tensorrt is not installed. ValueError: as :func:`lower`.
    """
    lowered = lower(program)
    try:
        import torch_tensorrt
    except ImportError as error:
        raise ImportError(
            "recoverssm_ops.tensorrt needs torch_tensorrt: pip install torch-tensorrt (or torch-tensorrt-rtx)"
        ) from error
    options = {"min_block_size": 1, "disable_tf32": True, **options}
    # Torch-TensorRT reads layouts off its example inputs, and knows dense ones alone; a record may be a view.
    dense = tuple(x.contiguous() if isinstance(x, Tensor) else x for x in inputs)
    return torch_tensorrt.dynamo.compile(lowered, arg_inputs=dense, **options)
