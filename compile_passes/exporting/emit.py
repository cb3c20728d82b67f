"""Nodes of a step's functional graph as an exported program of its own.

The nodes are copied into a module and that module is exported again, rather than an exported program's graph being edited:
its signature, guards and ranges then come from ``torch.export`` itself, whatever the version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import sympy
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import Graph, GraphModule, Node

from compile_passes.exporting.forms import ATEN
from compile_passes.exporting.graph import ExportError, Pool, StepGraph
from compile_passes.exporting.writes import Write
from compile_passes.reading.index_notation import ASSERTION, aten, size_hint


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
    """Copies nodes into new programs. ``operators`` replaces calls by functions that the export traces through."""

    def __init__(self, step: StepGraph, writes: Mapping[Node, Write], operators: Mapping[Callable, Callable]):
        self.step, self.writes, self.operators = step, writes, {**ATEN, **operators}
        self.results_of = {result: write for write in writes.values() for result in write.results}

    def emit(
        self,
        nodes: set[Node] | None,
        inputs: dict[Node, tuple[str, str]],
        outputs: dict[str, tuple[str, Node]],
        pools: str,
        copied: list[Pool],
    ) -> Emitted:
        """A program of ``nodes`` (None: all of them).

        ``inputs`` are node: (name, role); ``outputs`` are name: (role, node). ``pools`` is buffers, inputs or functional.
        Pools in ``copied`` are those whose new contents have to be copied into them.
        """
        self.graph, self.root, self.env = Graph(), nn.Module(), {}
        self.written: set[Node] = set()
        used = [pool for pool in self.step.pools if nodes is None or pool.node in nodes]
        updated = [pool for pool in used if nodes is None or pool.final in nodes]
        taken = {pool.node: pool for pool in used if pools != "buffers" or not pool.buffer}
        owned = [pool for pool in used if pool.node not in taken]
        self.given = {**inputs, **{node: (pool.name, "pool") for node, pool in taken.items()}}
        for node, (name, _) in self.given.items():
            self.env[node] = self.graph.placeholder(_identifier(name))
        for pool in owned:
            self.env[pool.node] = self.graph.get_attr(_register(self.root, pool.name, pool.value))
        if pools == "functional":
            for pool in updated:  # the copy stands for the pool from here on, and is what the step writes to
                self.env[pool.node] = self.graph.call_function(aten.clone.default, (self.env[pool.node],))
        for node in self.step.graph.nodes:
            if (nodes is None or node in nodes) and node not in self.env:
                self._copy(node)
        results = dict(outputs)
        if pools == "functional":
            results |= {f"{pool.name}_new": ("pool", pool.final) for pool in updated}
        else:
            for pool in updated:
                if pool in copied:
                    self.graph.call_function(aten.copy_.default, (self.env[pool.node], self.env[pool.final]))
        if not results:
            # A program without results cannot be saved (tried on torch 2.13); it returns what it was given first.
            first, (name, role) = next(iter(inputs.items()))
            results = {f"{name}_out": (role, first)}
        self.graph.output(tuple(self._result(node) for _, node in results.values()))
        return Emitted(
            self._export(),
            [Port.of(name, role, node) for node, (name, role) in self.given.items()],
            [Port.of(name, role, node) for name, (role, node) in results.items()],
            [Port.of(pool.name, "pool", pool.node) for pool in owned],
        )

    def _export(self) -> ExportedProgram:
        module = GraphModule(self.root, self.graph)
        examples = tuple(map(self._example, self.given))
        shapes = tuple(map(self._dynamic, self.given))
        with torch.no_grad():
            return torch.export.export(module, examples, dynamic_shapes=shapes, strict=False)

    def _copy(self, node: Node) -> None:
        if node.op in ("placeholder", "output"):
            if node in self.step.parameters and node.users:
                self.env[node] = self.graph.get_attr(_register(self.root, *self.step.parameters[node]))
        elif node in self.writes or node in self.results_of:
            self._write(self.writes.get(node) or self.results_of[node])
        elif node.target is aten.sym_size.int:
            self.env[node] = self._size(node)
        elif node.target is not ASSERTION:
            copy = self.graph.node_copy(node, self.env.__getitem__)
            copy.target = self.operators.get(node.target, node.target)
            self.env[node] = copy

    def _write(self, write: Write) -> None:
        if write.node not in self.written:
            self.written.add(write.node)
            target = self.operators.get(write.target, write.target)
            self.graph.call_function(target, write.arguments(self.env.__getitem__))
        for base, result in zip(write.bases, write.results, strict=True):
            self.env[result] = self.env[base]

    def _result(self, node: Node) -> Node:
        """An input that is a result is returned as a copy: a runtime may hold results and inputs in the same memory."""
        value = self.env[node]
        return self.graph.call_function(aten.clone.default, (value,)) if value.op == "placeholder" else value

    def _size(self, node: Node) -> Node:
        """The size from one of the program's own inputs: the tensor that the step read it from may be in the other half."""
        value = node.meta["val"]
        expression = value.node.expr if isinstance(value, torch.SymInt) else value
        for tensor in self.given:
            for dim, size in enumerate(tensor.meta["val"].shape):
                if isinstance(size, torch.SymInt) and size.node.expr == expression:
                    return self.graph.call_function(aten.sym_size.int, (self.env[tensor], dim))
        source = self.env.get(node.args[0])
        if source is None:
            raise ExportError(f"no input of the program has the size {value} that {node} needs")
        return self.graph.call_function(aten.sym_size.int, (source, node.args[1]))

    def _example(self, node: Node) -> Tensor:
        pool = self.step.pool(node)
        if pool is not None:
            return pool.value
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


def _register(root: nn.Module, name: str, value: Tensor) -> str:
    """Put a tensor into nested modules under its dotted name, which AOTInductor keeps as the constant's name."""
    *path, leaf = name.split(".")
    module = root
    for part in path:
        if not hasattr(module, part):
            module.add_module(part, nn.Module())
        module = getattr(module, part)
    if not hasattr(module, leaf):
        if isinstance(value, nn.Parameter):
            # For inference: a gradient would tie the pools of every step to those of the last one.
            module.register_parameter(leaf, nn.Parameter(value.detach(), requires_grad=False))
        else:
            module.register_buffer(leaf, value)
    return name
