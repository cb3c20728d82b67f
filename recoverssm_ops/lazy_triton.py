"""Triton is imported on the first CUDA call: the package itself needs torch alone."""

import functools
import importlib
from types import ModuleType


@functools.cache
def launchers(module: str) -> ModuleType:
    """A module of ``recoverssm_ops.triton``; an ImportError says what to do."""
    try:
        return importlib.import_module(f"recoverssm_ops.triton.{module}")
    except ImportError as error:
        raise ImportError(
            "RecoverSSM needs triton for CUDA tensors: pip install triton (it comes with torch's CUDA builds), "
            "or move the tensors to the CPU"
        ) from error
