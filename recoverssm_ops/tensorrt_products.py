"""Matrix products of a program for TensorRT-RTX on a GPU that its support matrix does not list, as the H200 (sm_90).

TensorRT-RTX lists compute capabilities 7.5, 8.6, 8.9 and 12.x, and builds engines for 8.0 and later. Elsewhere two things go
wrong (version 1.4 on an H200). A product and the operations behind it (a residual, a cast) are fused for cuDNN, which compiles
when the engine is loaded: an engine with such fusions could not be, for cuDNN's compilation failed. And float32 products are
rounded to tf32 although the engine says ``tf32=0``: rounding factors to the nearest tf32 number gives the very same errors.
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
    """Everything that is a matrix product, as one of the operators that :func:`rewrite` knows."""
    table = torch.export.default_decompositions()
    return {operator: table[operator] for operator in _COMPOSITE}


def rewrite(program: ExportedProgram, *, separate: bool, split: bool) -> ExportedProgram:
    """The program with its matrix products written for such a GPU, in place.

    Args:
        separate: read every product through a gather of all its rows, which no product is fused with. It costs little: the
            operations behind the gather are fused with that.
        split: float32 factors as sums of two, ``x = x0 + x1`` with x0 of 8 bits, and the product as ``x0 y0 + x0 y1 + x1 y0``
            (one product, three times as long). tf32 keeps x0 and 11 bits of x1: the terms are right to 2^-17. An infinite
            factor gives NaN.
    """
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        if node.target not in _FACTORS:
            continue
        if split and node.meta["val"].dtype == torch.float32:
            _in_pieces(graph, node)
        if separate:
            _read_apart(graph, node)
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


def _read_apart(graph: Graph, node: Node) -> None:
    # A result of the program is not fused with anything, and its name is in the program's signature.
    users = [user for user in node.users if user.op != "output"]
    if not users:
        return
    with graph.inserting_after(node):
        size = node.meta["val"].shape[0]
        if isinstance(size, torch.SymInt):
            size = graph.call_function(torch.ops.aten.sym_size.int, (node, 0))
    with graph.inserting_after(size if isinstance(size, Node) else node):
        rows = graph.call_function(torch.ops.aten.arange.default, (size,), {"device": node.meta["val"].device})
    with graph.inserting_after(rows):
        read = graph.call_function(torch.ops.aten.index_select.default, (node, 0, rows))
    for user in users:
        user.replace_input_with(node, read)
    if isinstance(size, Node):
        size.args = (node, 0)


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
