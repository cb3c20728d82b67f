"""Compile up to the pass, keep the graphs before and after it, and run the rewritten graph with an interpreter.

That checks the numbers of a rewrite without generating any code: a test costs a trace, not a C++ compilation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch._functorch.config
from torch import Tensor
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch.fx import Graph, GraphModule, Interpreter, Node

import recoverssm_ops.ops as ops
from compile_passes import Report, rewrite

# Torch 2.11: there the compiled model does not round, with or without the pass.
DROPS_ROUND_TRIPS = "this Inductor drops a cast to half precision and back before any post-grad pass sees it"


@dataclass
class Rewriting:
    """What the pass saw and left, one entry a graph."""

    before: list[str] = field(default_factory=list)
    graphs: list[Graph] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)

    @property
    def report(self) -> Report:
        return Report.joined(self.reports)

    @property
    def graph(self) -> Graph:
        (graph,) = self.graphs
        return graph

    @property
    def rounds(self) -> bool:
        """Whether anything was cast to half precision in what the pass saw."""
        return any("torch.bfloat16" in before or "torch.float16" in before for before in self.before)

    @property
    def untouched(self) -> bool:
        return all(before == printed(graph) for before, graph in zip(self.before, self.graphs, strict=True))


def printed(graph: Graph) -> str:
    """Every node with its arguments: two equal prints are the same graph."""
    return "\n".join(f"{n.name} = {n.op} {n.target} {n.args} {n.kwargs}" for n in graph.nodes)


def compile_rewritten(fn: Callable, dynamic: bool | None = None, **options) -> tuple[Callable, Rewriting]:
    """``fn`` compiled with the pass (and its options) and interpreted; graphs and reports appear with the first call."""
    seen = Rewriting()

    def inner_compile(gm: GraphModule, example_inputs: list, **settings):
        view_to_reshape(gm)
        seen.before.append(printed(gm.graph))
        seen.reports.append(rewrite(gm.graph, **options))
        seen.graphs.append(gm.graph)
        gm.recompile()
        interpreter = Interpreter(gm)

        def run(inputs: list) -> list:
            arguments = list(inputs)
            inputs.clear()
            return list(interpreter.run(*arguments))

        run._boxed_call = True
        return run

    def backend(gm: GraphModule, example_inputs: list):
        with torch._functorch.config.patch(enable_autograd_cache=False):
            return compile_fx(gm, example_inputs, inner_compile=inner_compile, config_patches={"fx_graph_cache": False})

    return torch.compile(fn, backend=backend, dynamic=dynamic), seen


def calls(graph: Graph, target: object) -> list[Node]:
    return graph.find_nodes(op="call_function", target=target)


def verify_calls(graph: Graph) -> list[dict]:
    """The arguments of every kda_verify in the graph, by name."""
    names = [a.name for a in ops.kda_verify._schema.arguments]
    return [dict(zip(names, node.args, strict=True)) for node in calls(graph, ops.kda_verify)]


def run_rewritten(fn: Callable, *args, dynamic: bool | None = None, **options) -> tuple[object, Rewriting]:
    """Results of the rewritten ``fn`` (arguments that it mutates are mutated), and what the pass did."""
    torch._dynamo.reset()
    compiled, seen = compile_rewritten(fn, dynamic, **options)
    with torch.no_grad():
        return compiled(*args), seen


def copied(args: object) -> object:
    """A deep copy that keeps dynamic marks."""
    return copy.deepcopy(args)


def assert_within_budget(actual: Tensor, eager32: Tensor, oracle: Tensor, what: str) -> None:
    """At most twice the float32 recurrence's error against the float64 one, plus one rounding band of the dtype."""
    oracle = oracle.double()
    norm = oracle.norm()
    eps = torch.finfo(actual.dtype).eps
    error = (actual.double() - oracle).norm() / norm
    allowed = 2 * (eager32.double() - oracle).norm() / norm + eps
    assert actual.isfinite().all() and error <= allowed, f"{what}: relative error {error:.3g}, allowed {allowed:.3g}"
