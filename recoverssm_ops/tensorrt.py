"""Torch-TensorRT: programs that hold our operators, lowered so that TensorRT converts all of the recurrence itself.

The operators arrive as their portable form; verify, where TensorRT has quick plugins, as one (``tensorrt_plugin.py``). Needs
``torch_tensorrt`` (``torch-tensorrt`` or ``torch-tensorrt-rtx``); importing this module does not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from recoverssm_ops import ops, tensorrt_plugin, tensorrt_products
from recoverssm_ops.decompositions import PURE, without_mutation
from recoverssm_ops.tensorrt_forms import UNCONVERTED


def lower(program: ExportedProgram, *, plugin: bool = False, split_products: bool = False) -> ExportedProgram:
    """The program with our operators, scans and attention as operations that TensorRT converts.

    Args:
        plugin: leave ``kda_verify`` as it is.
        split_products: as of :func:`compile`.

    Raises:
        ValueError: the program updates a pool in place. Torch-TensorRT would drop the update without a word (tried on
            2.13). Run the commit half in PyTorch, where it is one launch a layer, or export the functional form.
    """
    table = {**PURE, **UNCONVERTED}
    if plugin:
        del table[ops.kda_verify]
    if split_products:
        table |= tensorrt_products.decompositions()
    lowered = without_mutation(program, table, "a TensorRT engine")
    return tensorrt_products.split(lowered) if split_products else lowered


def compile(
    program: ExportedProgram,
    inputs: Sequence[Tensor],
    *,
    plugin: bool | None = None,
    split_products: bool | None = None,
    **options,
) -> nn.Module:
    """``torch_tensorrt.dynamo.compile`` of the lowered program.

    Args:
        program: exported by ``torch.export`` or ``export_step``.
        inputs: example inputs, or ``torch_tensorrt.Input``. Where the program has dynamic sizes, the engine's profile holds
            them from their least to their greatest value, and is best at the examples'.
        plugin: convert ``kda_verify``, where the program calls it (it was exported without ``portable=True``), to a quick
            plugin: our Triton kernel inside an engine that Python runs. None: where TensorRT has them. TensorRT-RTX has not.
        split_products: float32 products as three of factors that tf32 holds, right to 2^-17 of the terms. None: where
            TensorRT-RTX rounds to tf32 although it is told not to, which is tried on GPUs that it does not list.
        options: for ``torch_tensorrt.dynamo.compile``. ``min_block_size`` is 1 unless given, so that nothing small falls
            back to PyTorch. Keep ``disable_tf32=True`` unless a state with 11 bits is enough: tf32 is TensorRT's default.

    Raises:
        ImportError: torch_tensorrt is not installed, or has no quick plugins and ``plugin`` is True.
        ValueError: as :func:`lower`; or a dynamic size has no greatest value.
    """
    # Refused before anything is imported: what is wrong with the program is wrong in every build.
    portable = lower(program)
    try:
        import torch_tensorrt
    except ImportError as error:
        raise ImportError(
            "recoverssm_ops.tensorrt needs torch_tensorrt: pip install torch-tensorrt (or torch-tensorrt-rtx)"
        ) from error
    options = {"min_block_size": 1, "disable_tf32": True, **options}
    if split_products is None:
        split_products = _products_round(options)
    plugin = _with_plugin(plugin)
    lowered = lower(program, plugin=plugin, split_products=split_products) if plugin or split_products else portable
    # Torch-TensorRT reads layouts off its example inputs, and knows dense ones alone; a record may be a view.
    dense = [x.contiguous() if isinstance(x, Tensor) else x for x in inputs]
    return torch_tensorrt.dynamo.compile(lowered, arg_inputs=_with_profiles(lowered, dense), **options)


def _with_plugin(plugin: bool | None) -> bool:
    if plugin is False or not (found := tensorrt_plugin.available()):
        if plugin:
            raise ImportError(
                "plugin=True needs the quick plugins of TensorRT 10.7 or later, which TensorRT-RTX has not"
            )
        return False
    tensorrt_plugin.register()
    return found


def _products_round(options: dict) -> bool:
    """Tried where an engine can be: not in a dry run, nor without a GPU."""
    possible = options["disable_tf32"] and torch.cuda.is_available() and not options.get("dryrun")
    return (
        possible and tensorrt_products.unlisted_gpu() and tensorrt_products.products_round(torch.cuda.current_device())
    )


def _with_profiles(program: ExportedProgram, inputs: Sequence[object]) -> tuple:
    """Examples of inputs with dynamic sizes as ``torch_tensorrt.Input`` with the range of each size."""
    import torch_tensorrt

    names = program.graph_signature.user_inputs
    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    found = []
    for name, x in zip(names, inputs, strict=True):
        sizes = nodes[name].meta["val"].shape if isinstance(x, Tensor) else ()
        if not any(isinstance(size, torch.SymInt) for size in sizes):
            found.append(x)
            continue
        ranges = [_range(program, name, size) for size in sizes]
        least, greatest = zip(*ranges, strict=True)
        found.append(
            torch_tensorrt.Input(
                min_shape=least, opt_shape=tuple(x.shape), max_shape=greatest, dtype=x.dtype, name=name
            )
        )
    return tuple(found)


def _range(program: ExportedProgram, name: str, size: int | torch.SymInt) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    bounds = program.range_constraints.get(size.node.expr)
    if bounds is None or not (bounds.lower.is_Integer and bounds.upper.is_Integer):
        raise ValueError(
            f"{name}: TensorRT's profile needs the greatest value of the dynamic size {size}: export with "
            "torch.export.Dim(..., max=...)"
        )
    return max(1, int(bounds.lower)), int(bounds.upper)
