"""Nodes of a step's functional graph as an exported program of its own.

The nodes are copied into a module and that module is exported again, rather than an exported program's graph being edited:
its signature, guards and ranges then come from ``torch.export`` itself, whatever the version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import sympy
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import Graph, GraphModule, Node

from compile_passes.export_forms import ATEN
from compile_passes.export_graph import ExportError, Pool, StepGraph
from compile_passes.export_writes import Write
from compile_passes.index_notation import ASSERTION, aten, size_hint


@dataclass(frozen=True)
class Port:
    """One tensor that goes in or comes out of a program. ``role`` is input, pool, record, num_accepted or result."""

    name: str
    role: str
    shape: tuple[int | str, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, name: str, role: str, node: Node) -> Port:
        value = node.meta["val"]
        shape = tuple(s if isinstance(s, int) else str(s.node.expr) for s in value.shape)
        return cls(name, role, shape, value.dtype, value.device)


@dataclass(frozen=True)
class Emitted:
    program: ExportedProgram
    inputs: list[Port]
    outputs: list[Port]
    buffers: list[Port]


class Emitter:
    """Copies nodes into a new graph. ``operators`` replaces calls by functions that the export traces through."""

    def __init__(self, step: StepGraph, writes: Mapping[Node, Write], operators: Mapping[Callable, Callable]):
        self.step, self.writes, self.operators = step, writes, {**ATEN, **operators}
        self.results_of = {result: write for write in writes.values() for result in write.results}

    def emit(
        self,
        nodes: Iterable[Node] | None,
        inputs: dict[Node, tuple[str, str]],
        outputs: dict[str, tuple[str, Node]],
        pools: str,
        copied: list[Pool],
    ) -> Emitted:
        """``inputs`` are node: (name, role); ``outputs`` are name: (role, node). ``pools`` is buffers, inputs or functional.

        Pools in ``copied`` are those whose new contents have to be copied into them.
        """
        kept = None if nodes is None else set(nodes)
        graph, root = Graph(), nn.Module()
        self.env: dict[Node, Node] = {}
        used_pools = [pool for pool in self.step.pools if kept is None or pool.node in kept]
        taken = {pool.node: pool for pool in used_pools if pools != "buffers" or not pool.buffer}
        ports, examples = [], []
        for node, (name, role) in inputs.items():
            self.env[node] = graph.placeholder(_identifier(name))
            ports.append(Port.of(name, role, node))
            examples.append(self._example(node))
        for node, pool in taken.items():
            self.env[node] = graph.placeholder(_identifier(pool.name))
            ports.append(Port.of(pool.name, "pool", node))
            examples.append(pool.value)
        buffers = [pool for pool in used_pools if pool.node not in taken]
        for pool in buffers:
            self.env[pool.node] = graph.get_attr(_register(root, pool.name, pool.value, buffer=True))
        sized = [*inputs, *taken]
        written: set[Node] = set()
        if pools == "functional":
            # What a commit writes is a copy. Later updates and reads find it in the old contents' place.
            for pool in used_pools:
                if kept is None or pool.final in kept:
                    self.env[pool.node] = graph.call_function(aten.clone.default, (self.env[pool.node],))
        for node in self.step.graph.nodes:
            if (kept is not None and node not in kept) or node in self.env or node.target is ASSERTION:
                continue
            if node in self.step.parameters:
                if kept is not None or node.users:
                    name, value = self.step.parameters[node]
                    self.env[node] = graph.get_attr(_register(root, name, value, buffer=False))
            elif node.op in ("placeholder", "output"):
                continue
            elif node in self.results_of:
                self._write(graph, self.results_of[node], written)
            elif node in self.writes:
                self._write(graph, self.writes[node], written)
            elif node.target is aten.sym_size.int:
                self.env[node] = self._size(graph, node, sized)
            else:
                self._call(graph, node)
        finals = [pool for pool in used_pools if kept is None or pool.final in kept]
        for pool in finals:
            if pool in copied and pools != "functional":
                graph.call_function(aten.copy_.default, (self.env[pool.node], self.env[pool.final]))
        named = dict(outputs)
        if pools == "functional":
            named |= {f"{pool.name}_new": ("pool", pool.final) for pool in finals}
        if not named:
            # A program without results cannot be saved (tested on torch 2.13); it returns what it was given first.
            first, (name, role) = next(iter(inputs.items()))
            named = {f"{name}_out": (role, first)}
        values = [self.env[node] for _, node in named.values()]
        given = {self.env[node] for node in inputs}
        graph.output(tuple(graph.call_function(aten.clone.default, (x,)) if x in given else x for x in values))
        module = GraphModule(root, graph)
        shapes = [self._dynamic(node) for node in sized]
        with torch.no_grad():
            program = torch.export.export(module, tuple(examples), dynamic_shapes=tuple(shapes), strict=False)
        out = [Port.of(name, role, node) for name, (role, node) in named.items()]
        return Emitted(program, ports, out, [Port.of(pool.name, "pool", pool.node) for pool in buffers])

    def _call(self, graph: Graph, node: Node) -> None:
        copy = graph.node_copy(node, self.env.__getitem__)
        copy.target = self.operators.get(node.target, node.target)
        self.env[node] = copy

    def _write(self, graph: Graph, write: Write, written: set[Node]) -> None:
        if write.node not in written:
            written.add(write.node)
            target = self.operators.get(write.target, write.target)
            graph.call_function(target, write.arguments(self.env.__getitem__))
        for base, result in zip(write.bases, write.results, strict=True):
            self.env[result] = self.env[base]

    def _size(self, graph: Graph, node: Node, sized: list[Node]) -> Node:
        """The size from one of the program's own inputs: the tensor that the step read it from may be in the other half."""
        value = node.meta["val"]
        expression = value.node.expr if isinstance(value, torch.SymInt) else value
        for tensor in sized:
            for dim, size in enumerate(tensor.meta["val"].shape):
                if isinstance(size, torch.SymInt) and size.node.expr == expression:
                    return graph.call_function(aten.sym_size.int, (self.env[tensor], dim))
        source = self.env.get(node.args[0])
        if source is None:
            raise ExportError(f"no input of the program has the size {value} that {node} needs")
        return graph.call_function(aten.sym_size.int, (source, node.args[1]))

    def _example(self, node: Node) -> Tensor:
        if node in self.step.inputs:
            return self.step.inputs[node][1]
        value = node.meta["val"]
        sizes, strides = (tuple(map(size_hint, x)) for x in (value.shape, value.stride()))
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device).zero_()

    def _dynamic(self, node: Node) -> dict[int, object] | None:
        shapes = {}
        for dim, size in enumerate(node.meta["val"].shape):
            if isinstance(size, torch.SymInt):
                expression = size.node.expr
                shapes[dim] = self._dim(expression) if isinstance(expression, sympy.Symbol) else Dim.AUTO
        return shapes or None

    def _dim(self, symbol: sympy.Symbol) -> object:
        bounds = self.step.ranges.get(symbol)
        low, high = (None, None) if bounds is None else (_bound(bounds.lower), _bound(bounds.upper))
        return Dim(str(symbol), min=low, max=high)


def _bound(value: object) -> int | None:
    return int(value) if getattr(value, "is_Integer", False) else None


def _identifier(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)


def _register(root: nn.Module, name: str, value: Tensor, buffer: bool) -> str:
    """Put a tensor into nested modules under its dotted name, which AOTInductor keeps as the constant's name."""
    *path, leaf = name.split(".")
    module = root
    for part in path:
        if not hasattr(module, part):
            module.add_module(part, nn.Module())
        module = getattr(module, part)
    if not hasattr(module, leaf):
        if buffer or not isinstance(value, nn.Parameter):
            module.register_buffer(leaf, value)
        else:
            module.register_parameter(leaf, value)
    return name
