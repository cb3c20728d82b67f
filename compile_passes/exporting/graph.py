"""A rewritten step as a functional graph whose inputs and outputs have roles: parameters, pools, inputs, results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument
from torch.fx import Graph, Node

from compile_passes.reporting.report import Report
from compile_passes.rewrite import rewrite


class ExportError(ValueError):
    """A step that cannot be exported as asked; the message says why and what to do."""


@dataclass(frozen=True)
class Pool:
    """A tensor that the step updates. ``value`` is what it held at export; ``buffer`` says whether the module owns it."""

    node: Node
    name: str
    value: Tensor
    buffer: bool
    final: Node  # the functional graph's new contents


@dataclass
class StepGraph:
    """A functional ATen graph after the rewrite. Every placeholder is a parameter, a pool, an input, or unused."""

    graph: Graph
    report: Report
    parameters: dict[Node, tuple[str, Tensor]]
    pools: list[Pool]
    inputs: dict[Node, tuple[str, Tensor]]
    results: list[Node]
    ranges: dict  # symbol -> ValueRanges

    def pool(self, node: Node) -> Pool | None:
        return next((pool for pool in self.pools if pool.node is node), None)


def trace_step(
    module: nn.Module, args: tuple, kwargs: dict | None, dynamic_shapes: object, convolutions: bool | None = None
) -> StepGraph:
    """Export the module, make its graph functional and rewrite it."""
    with torch.no_grad():
        program = torch.export.export(module, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
        program = program.run_decompositions()
    names = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    report = rewrite(program.graph, convolutions=convolutions)
    return _with_roles(program, names, report)


def as_module(step: nn.Module | Callable) -> nn.Module:
    """A function as a module that keeps its parameters' names."""
    if isinstance(step, nn.Module):
        return step
    module = nn.Module()
    module.forward = step
    return module


def _with_roles(program: ExportedProgram, names: dict[str, Node], report: Report) -> StepGraph:
    signature = program.graph_signature
    (output,) = program.graph.find_nodes(op="output")
    constants = {**program.constants, **program.state_dict}
    examples = _examples(program)
    finals: dict[str, Node] = {}
    results = []
    for spec, node in zip(signature.output_specs, output.args[0], strict=True):
        if spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION):
            finals[spec.target] = node
        elif spec.kind is OutputKind.USER_OUTPUT and isinstance(spec.arg, TensorArgument):
            results.append(node)
        elif not (isinstance(spec.arg, ConstantArgument) and spec.arg.value is None):
            raise ExportError(f"the step should return tensors, but returns {spec.arg} ({spec.kind.name})")

    parameters, pools, inputs = {}, [], {}
    for spec in signature.input_specs:
        node = names.get(spec.arg.name)
        if isinstance(spec.arg, ConstantArgument):
            continue  # a number, which the graph holds as a constant
        if spec.kind is InputKind.USER_INPUT:
            name, value = spec.arg.name, examples[spec.arg.name]
            if name in finals:
                pools.append(Pool(node, name, value, False, finals[name]))
            else:
                inputs[node] = (name, value)
        elif spec.kind is InputKind.BUFFER and spec.target in finals:
            pools.append(Pool(node, spec.target, constants[spec.target], True, finals[spec.target]))
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            parameters[node] = (spec.target, constants[spec.target])
        else:
            raise ExportError(f"input {spec.arg.name}: {spec.kind.name} inputs are not supported")
    return StepGraph(program.graph, report, parameters, pools, inputs, results, dict(program.range_constraints))


def _examples(program: ExportedProgram) -> dict[str, object]:
    args, kwargs = program.example_inputs
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    specs = [spec for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    return {spec.arg.name: leaf for spec, leaf in zip(specs, leaves, strict=True)}
