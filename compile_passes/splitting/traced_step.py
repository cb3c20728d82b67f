"""One function of tensors as a functional graph, with what its inputs and outputs are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from compile_passes.splitting.inputs import Inputs
from compile_passes.splitting.joint_graph import Call, as_forward


class Function(nn.Module):
    """The function on a list of tensors; ``form`` is the structure of what it returned, noted by the trace."""

    def __init__(self, function: Callable, call: Call):
        super().__init__()
        self.function, self.call = as_forward(function), call
        owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
        # Registered, so that its parameters and buffers are inputs of the graph rather than constants in it.
        self.owners = nn.ModuleList([owner] if isinstance(owner, nn.Module) else [])

    def forward(self, tensors: list[Tensor]) -> tuple:
        args, kwargs = self.call.arguments(tensors)
        leaves, spec = pytree.tree_flatten(self.function(*args, **kwargs))
        self.form = spec, [(Tensor, 0) if isinstance(x, Tensor) else (type(x), x) for x in leaves]
        return tuple(x for x in leaves if isinstance(x, Tensor))


@dataclass
class TracedStep:
    """``targets[i]`` is the placeholder that output i is written to, None where it is returned."""

    graph: Graph
    inputs: Inputs
    form: tuple
    targets: list[Node | None]

    def dims_of(self, size: torch.SymInt) -> frozenset[tuple[int, int]]:
        """The dimensions of argument tensors that a size is computed from."""
        symbols = size.node.expr.free_symbols
        return frozenset(
            (place, d)
            for node, (kind, place) in self.inputs.kinds.items()
            if kind == "tensor"
            for d, n in enumerate(node.meta["val"].shape)
            if isinstance(n, torch.SymInt) and n.node.expr.free_symbols & symbols
        )

    def _outputs(self) -> list[tuple[Node, Node | None]]:
        """As they are now: a rewrite replaces them."""
        (end,) = self.graph.find_nodes(op="output")
        return list(zip(end.args[0], self.targets, strict=True))

    @property
    def results(self) -> list[Node]:
        return [value for value, target in self._outputs() if target is None]

    @property
    def writes(self) -> list[tuple[Node, Node]]:
        """The placeholders that are written, and their new values."""
        return [(target, value) for value, target in self._outputs() if target is not None]


def trace(
    function: Callable,
    call: Call,
    tensors: list[Tensor],
    dynamic: bool,
    static: frozenset[tuple[int, int]] = frozenset(),
) -> TracedStep:
    """Trace on the shapes of ``tensors``; nothing is run on their values and nothing of them is written.

    ``static`` are dimensions ``(number of the tensor, dimension)`` that stay numbers when ``dynamic``.
    """
    module = Function(function, call)
    auto = torch.export.Dim.AUTO
    dims = [{d: auto for d in range(x.ndim) if (place, d) not in static} for place, x in enumerate(tensors)]
    with torch.no_grad():
        program = torch.export.export(module, (tensors,), dynamic_shapes=(dims,) if dynamic else None, strict=False)
        program = program.run_decompositions()
    graph, signature = program.graph, program.graph_signature
    kinds, places, numbers = {}, {}, iter(range(len(tensors)))
    environment = None
    for node, spec in zip(graph.find_nodes(op="placeholder"), signature.input_specs, strict=True):
        place = next(numbers) if spec.kind is InputKind.USER_INPUT else spec.target
        constant = spec.kind is InputKind.CONSTANT_TENSOR and place in program.constants
        kind = "tensor" if spec.kind is InputKind.USER_INPUT else "state"
        kinds[node] = ("constant", program.constants[place]) if constant else (kind, place)
        places[spec.target or spec.arg.name] = node
        environment = environment or node.meta["val"].fake_mode.shape_env
    returned = OutputKind.USER_OUTPUT
    targets = [None if spec.kind is returned else places[spec.target] for spec in signature.output_specs]
    return TracedStep(graph, Inputs(kinds, module, environment), module.form, targets)
