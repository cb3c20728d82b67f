"""Both halves of a split step as one functional graph, with the boundary between them marked.

The halves are traced one after the other by ``torch.export``. An operator that does nothing stands where the per-position
states pass from one to the other, and is taken out before the graph is rewritten; what was traced before it belongs to the
first half.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, MethodType

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

_library = torch.library.Library("recoverssm_split", "DEF")
_library.define("boundary(Tensor x, int number) -> Tensor")
_library.impl("boundary", lambda x, number: x.clone(), "CompositeExplicitAutograd")
boundary = torch.ops.recoverssm_split.boundary.default


@torch.library.register_fake("recoverssm_split::boundary", lib=_library)
def _boundary_fake(x: Tensor, number: int) -> Tensor:
    return torch.empty_like(x)


@dataclass(frozen=True)
class Call:
    """The arguments of a call with tensors replaced by their numbers; hashable, so that equal calls can be found again."""

    spec: pytree.TreeSpec
    leaves: tuple

    @staticmethod
    def of(args: object, tensors: list[Tensor]) -> Call:
        """Appends to ``tensors`` those of ``args`` that are not in it yet: a pool that both halves receive is one tensor."""
        numbers = {id(x): n for n, x in enumerate(tensors)}
        leaves, spec = pytree.tree_flatten(args)
        described = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                if id(leaf) not in numbers:
                    numbers[id(leaf)] = len(tensors)
                    tensors.append(leaf)
                described.append((Tensor, numbers[id(leaf)]))
            else:
                described.append((type(leaf), leaf))
        return Call(spec, tuple(described))

    def arguments(self, tensors: list[Tensor]) -> object:
        leaves = [tensors[value] if kind is Tensor else value for kind, value in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)


class Joint(nn.Module):
    """Verify, then commit. What the trace alone can tell is noted on the module."""

    def __init__(self, verify: Callable, commit: Callable, calls: tuple[Call, Call]):
        super().__init__()
        self.functions, self.calls = (as_forward(verify), as_forward(commit)), calls
        owners = [f if isinstance(f, nn.Module) else getattr(f, "__self__", None) for f in (verify, commit)]
        # Registered, so that their parameters and buffers are inputs of the graph rather than constants in it.
        self.owners = nn.ModuleList(dict.fromkeys(owner for owner in owners if isinstance(owner, nn.Module)))

    def forward(self, tensors: list[Tensor]) -> tuple[list, list]:
        (verify, commit), (verify_call, commit_call) = self.functions, self.calls
        places = {**dict(enumerate(tensors)), **dict(self.named_buffers()), **dict(self.named_parameters())}

        def versions() -> dict:
            # Inference tensors count no writes; for them ``trace`` goes by the order in the graph.
            return {place: None if x.is_inference() else x._version for place, x in places.items()}

        before = versions()
        args, kwargs = verify_call.arguments(tensors)
        outputs, states = outputs_and_states(verify(*args, **kwargs))
        between = versions()
        leaves, spec = pytree.tree_flatten(states)
        leaves = [boundary(x, number) for number, x in enumerate(leaves)]
        args, kwargs = commit_call.arguments(tensors)
        result = commit(pytree.tree_unflatten(leaves, spec), *args, **kwargs)
        changes = ((before, between), (between, versions()))
        self.written = [{place for place in places if old[place] != new[place]} for old, new in changes]
        self.states_spec = spec
        flat, self.forms = [], []
        for part in (outputs, result):
            leaves, spec = pytree.tree_flatten(part)
            described = [(Tensor, 0) if isinstance(x, Tensor) else (type(x), x) for x in leaves]
            self.forms.append((spec, described))
            flat.append([x for x in leaves if isinstance(x, Tensor)])
        return tuple(flat)


def as_forward(function: Callable) -> Callable:
    """The function under a name whose source lines torch.export keeps: it notes those of ``forward`` alone."""
    if isinstance(function, MethodType):
        return MethodType(as_forward(function.__func__), function.__self__)
    if not isinstance(function, FunctionType):
        return function
    code = function.__code__.replace(co_name="forward")
    renamed = FunctionType(code, function.__globals__, "forward", function.__defaults__, function.__closure__)
    renamed.__kwdefaults__ = function.__kwdefaults__
    return renamed


def outputs_and_states(returned: object) -> tuple[object, object]:
    """``verify`` returns a pair; its second half holds nothing but per-position states."""
    if not isinstance(returned, (tuple, list)) or len(returned) != 2:
        raise TypeError(
            "split_step: the verify half has to return a pair (outputs, states), where states is a tensor or a structure of "
            f"tensors; it returned {type(returned).__name__}"
        )
    outputs, states = returned
    leaves = pytree.tree_leaves(states)
    if not leaves or not all(isinstance(x, Tensor) for x in leaves):
        raise TypeError(
            "split_step: the second part of what the verify half returns has to hold tensors, and nothing else"
        )
    return outputs, states


def rebuild(form: tuple, tensors: list[Tensor]) -> object:
    """A half's return value from its tensors."""
    spec, described = form
    given = iter(tensors)
    return pytree.tree_unflatten([next(given) if kind is Tensor else x for kind, x in described], spec)


@dataclass
class Traced:
    """The joint graph and what its inputs and outputs are.

    Attributes:
        inputs: for every placeholder ``("tensor", number)``, ``("state", qualified name)`` or ``("constant", tensor)``.
        roles: for every output ``("output",)``, ``("result",)`` or ``("write", placeholder, half)``.
        states: the nodes that pass the boundary.
        late_reads: the placeholders that the second half reads itself, when it is called.
        conflict: why the two halves cannot be told apart, or None.
    """

    joint: Joint
    graph: Graph
    inputs: dict[Node, tuple[str, object]]
    roles: list[tuple]
    states: list[Node]
    late_reads: set[Node]
    conflict: str | None

    def returned(self, kind: str) -> list[Node]:
        """Outputs of one kind, as they are now: a rewrite replaces them."""
        (end,) = self.graph.find_nodes(op="output")
        return [node for node, role in zip(end.args[0], self.roles, strict=True) if role[0] == kind]

    def writes(self, half: int) -> list[tuple[Node, Node]]:
        """The placeholders that a half writes, and their new values."""
        (end,) = self.graph.find_nodes(op="output")
        pairs = zip(end.args[0], self.roles, strict=True)
        return [(role[1], node) for node, role in pairs if role[0] == "write" and role[2] == half]


def trace(verify: Callable, commit: Callable, calls: tuple[Call, Call], tensors: list[Tensor], dynamic: bool) -> Traced:
    """Trace both halves on the shapes of ``tensors``; nothing is run on their values and nothing of them is written."""
    joint = Joint(verify, commit, calls)
    dims = [dict.fromkeys(range(x.ndim), torch.export.Dim.AUTO) for x in tensors]
    with torch.no_grad():
        program = torch.export.export(joint, (tensors,), dynamic_shapes=(dims,) if dynamic else None, strict=False)
        program = program.run_decompositions()
    graph, signature = program.graph, program.graph_signature
    inputs, places, numbers = {}, {}, iter(range(len(tensors)))
    for node, spec in zip(graph.find_nodes(op="placeholder"), signature.input_specs, strict=True):
        place = next(numbers) if spec.kind is InputKind.USER_INPUT else spec.target
        kind = "tensor" if spec.kind is InputKind.USER_INPUT else "state"
        constant = place in program.constants and spec.kind is InputKind.CONSTANT_TENSOR
        inputs[node] = ("constant", program.constants[place]) if constant else (kind, place)
        places[spec.target or spec.arg.name] = node, place
    nodes, marks = list(graph.nodes), graph.find_nodes(op="call_function", target=boundary)
    border = nodes.index(marks[-1])
    late_reads = {n for node in nodes[border:] for n in node.all_input_nodes if n.op == "placeholder"}
    roles, conflict, outputs = [], None, sum(kind is Tensor for kind, _ in joint.forms[0][1])
    for spec, value in zip(signature.output_specs, nodes[-1].args[0], strict=True):
        if spec.kind is OutputKind.USER_OUTPUT:
            roles.append(("output",) if outputs > 0 else ("result",))
            outputs -= 1
            continue
        target, place = places[spec.target]
        halves = [half for half, written in enumerate(joint.written) if place in written]
        halves = halves or [int(nodes.index(value) > border)]
        if len(halves) == 2:
            conflict = f"{spec.target} is written by both halves"
        roles.append(("write", target, halves[0]))
    states = {}
    for node in marks:
        states[node.args[1]] = node.args[0]
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    ordered = [states[number] for number in sorted(states)]
    return Traced(joint, graph, inputs, roles, ordered, late_reads, conflict)
