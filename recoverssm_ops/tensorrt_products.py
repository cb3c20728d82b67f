"""Float32 matrix products of a program in pieces that tf32 holds, for TensorRT-RTX where it rounds to tf32 unasked.

TensorRT-RTX lists compute capabilities 7.5, 8.6, 8.9 and 12.x. On an H200 (version 1.4) it rounds the factors of float32
products to tf32 although the engine says ``tf32=0``: a product of 256 terms is off by 2^-13 of their sum, and rounding its
factors to the nearest tf32 number gives the very same errors. ``NVIDIA_TF32_OVERRIDE=0`` is no remedy: no engine with such a
product can be loaded then.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Graph, Node

LISTED = ((7, 5), (8, 6), (8, 9), (12, 0), (12, 1))
_COMPOSITE = (torch.ops.aten.einsum.default, torch.ops.aten.matmul.default, torch.ops.aten.linear.default)
# Which arguments are the factors.
_FACTORS = {
    torch.ops.aten.mm.default: (0, 1),
    torch.ops.aten.bmm.default: (0, 1),
    torch.ops.aten.addmm.default: (1, 2),
    torch.ops.aten.baddbmm.default: (1, 2),
}


def decompositions() -> dict:
    """Everything that is a matrix product, as one of the operators that :func:`split` knows."""
    table = torch.export.default_decompositions()
    return {operator: table[operator] for operator in _COMPOSITE}


def split(program: ExportedProgram) -> ExportedProgram:
    """The program with float32 products in pieces, in place.

    Factors are sums of two, ``x = x0 + x1`` with x0 of 8 bits, and the product is ``x0 y0 + x0 y1 + x1 y0`` (one product, three
    times as long). tf32 keeps x0 and 11 bits of x1: the terms are right to 2^-17. An infinite factor gives NaN.
    """
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        if node.target in _FACTORS and node.meta["val"].dtype == torch.float32:
            _in_pieces(graph, node)
    graph.lint()
    program.graph_module.recompile()
    return program


def _in_pieces(graph: Graph, node: Node) -> None:
    first, second = _FACTORS[node.target]
    with graph.inserting_before(node):
        (x0, x1), (y0, y1) = (_halves(graph, node.args[i]) for i in (first, second))
        arguments = list(node.args)
        arguments[first] = graph.call_function(torch.ops.aten.cat.default, ([x0, x0, x1], -1))
        arguments[second] = graph.call_function(torch.ops.aten.cat.default, ([y0, y1, y0], -2))
    node.args = tuple(arguments)


def _halves(graph: Graph, x: Node) -> tuple[Node, Node]:
    def cast(y: Node, dtype: torch.dtype) -> Node:
        return graph.call_function(torch.ops.aten._to_copy.default, (y,), {"dtype": dtype})

    high = cast(cast(x, torch.bfloat16), torch.float32)
    return high, graph.call_function(torch.ops.aten.sub.Tensor, (x, high))


def unlisted_gpu() -> bool:
    """Whether this is TensorRT-RTX on a GPU that it does not list."""
    import torch_tensorrt

    # Releases that know no TensorRT-RTX have no such feature.
    features = getattr(torch_tensorrt, "ENABLED_FEATURES", None)
    return getattr(features, "tensorrt_rtx", False) and torch.cuda.get_device_capability() not in LISTED


@functools.cache
def products_round(device: int) -> bool:
    """Whether float32 products in an engine there are rounded with tf32 switched off: one is built and compared with float64.

    2^-17 of the terms' absolute sum is a hundred times what float32 costs here, and less than tf32 costs in most results.
    """
    import torch_tensorrt

    class Product(torch.nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x @ y

    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(shape, generator=generator).to(device) for shape in ((16, 256), (256, 256)))
    program = torch.export.export(Product(), (x, y))
    engine = torch_tensorrt.dynamo.compile(program, arg_inputs=(x, y), min_block_size=1, disable_tf32=True)
    error = (engine(x, y).double() - x.double() @ y.double()).abs()
    return bool((error > 2.0**-17 * (x.double().abs() @ y.double().abs())).any())
