"""Torch-TensorRT: programs that hold our operators, lowered so that TensorRT converts all of the recurrence itself.

The operators arrive as their portable form; verify, where TensorRT has quick plugins, as one (``tensorrt_plugin.py``). Needs
``torch_tensorrt`` (``torch-tensorrt`` or ``torch-tensorrt-rtx``); importing this module does not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import statically_known_true

from recoverssm_ops import ops, tensorrt_plugin
from recoverssm_ops.decompositions import PURE, running_product, running_sum, without_mutation


def _attention(query, key, value, bias=None, causal=False, scale=None) -> tuple[Tensor, None, None, None]:
    """``softmax(scale q k^T + bias) v`` and nothing of what a backward pass would need."""
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    if bias is not None:
        scores = scores + bias
    return torch.softmax(scores, -1) @ value, None, None, None


def _efficient(query, key, value, bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
    return _attention(query, key, value, bias, is_causal, scale)


def _gather(x: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    """By comparison with every place: as many products as the axis has places, which are few in a window's graph."""
    dim %= x.ndim
    if not any(isinstance(size, torch.SymInt) for size in (*x.shape, *index.shape)):
        return NotImplemented  # TensorRT's own
    pairs = [(a, b) for axis, (a, b) in enumerate(zip(x.shape, index.shape, strict=True)) if axis != dim]
    if not all(statically_known_true(a == b) for a, b in pairs):
        return NotImplemented
    places = torch.arange(x.shape[dim], device=x.device)
    chosen = index.movedim(dim, -1).unsqueeze(-1) == places
    rows = torch.where(chosen, x.movedim(dim, -1).unsqueeze(-2), 0)
    return rows.sum(-1, dtype=x.dtype).movedim(-1, dim)


# TensorRT-RTX has no converter for scans (tried on Torch-TensorRT 2.13), and none for the attention kernel that a CUDA export
# picks where the queries are fewer than the keys (2.11), as those of a window are. Its converter of gather knows static sizes.
_UNCONVERTED = {
    torch.ops.aten.cumsum.default: running_sum,
    torch.ops.aten.cumprod.default: running_product,
    torch.ops.aten.gather.default: _gather,
    torch.ops.aten._scaled_dot_product_efficient_attention.default: _efficient,
}


def lower(program: ExportedProgram, *, plugin: bool = False) -> ExportedProgram:
    """The program with our operators, scans and attention as operations that TensorRT converts.

    Args:
        plugin: leave ``kda_verify`` as it is.

    Raises:
        ValueError: the program updates a pool in place. Torch-TensorRT would drop the update without a word (tried on
            2.13). Run the commit half in PyTorch, where it is one launch a layer, or export the functional form.
    """
    table = {**PURE, **_UNCONVERTED}
    if plugin:
        del table[ops.kda_verify]
    return without_mutation(program, table, "a TensorRT engine")


def compile(program: ExportedProgram, inputs: Sequence[Tensor], *, plugin: bool | None = None, **options) -> nn.Module:
    """``torch_tensorrt.dynamo.compile`` of the lowered program.

    Args:
        program: exported by ``torch.export`` or ``export_step``.
        inputs: example inputs, or ``torch_tensorrt.Input``. Where the program has dynamic sizes, the engine's profile holds
            them from their least to their greatest value, and is best at the examples'.
        plugin: convert ``kda_verify``, where the program calls it (it was exported without ``portable=True``), to a quick
            plugin: our Triton kernel inside an engine that Python runs. None: where TensorRT has them. TensorRT-RTX has not.
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
    lowered = lower(program, plugin=True) if _with_plugin(plugin) else portable
    options = {"min_block_size": 1, "disable_tf32": True, **options}
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
