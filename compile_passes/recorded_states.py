"""Per-position states that do not exist: what the verify half of a split step returns in their place."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import Graph, Node

import recoverssm_ops.ops as ops
from compile_passes.find import candidates, match
from compile_passes.index_notation import Axis, Element, element_of, unify
from compile_passes.reasons import Refused
from compile_passes.views import Unresolvable, piece_of, strip

_VERIFY = [a.name for a in ops.kda_verify._schema.arguments]
_RECORD = ("state", "state_indices", "u", "k", "g", "A_log", "dt_bias")
_SETTINGS = ("max_seqlen", "A_log", "dt_bias", "lower_bound", "use_qk_l2norm_in_kernel", "use_gate_in_kernel")


@dataclass
class Layout:
    """How a model lays its states out: which dimensions are row and token, and the order of head, V and K in the others."""

    row: int
    token: int
    state: tuple[int, int, int]
    output: Node  # the first token's, which the rewrite replaces


def layout_of(graph: Graph, states: Node) -> Layout | None:
    """Read off the graph before it is rewritten; None for a layout that cannot be indexed by row and token."""
    element, axes = element_of(states)
    element = strip(element)
    if element.node not in candidates(graph):
        return None
    try:
        window = match(graph, element.node)
        which, inner = piece_of(element.node, element.index)
    except (Refused, Unresolvable):
        return None
    roles = window.roles
    names = unify(window.states[0], strip(Element(element.node.args[0][0], inner)))
    if names is None or not isinstance(which, Axis) or len(axes) != 5:
        return None
    found = ["token" if a is which else names.get(a) for a in axes]
    rest = {d: role for d, role in enumerate(found) if role != "token"}
    order = [roles.batch, roles.head, roles.value, roles.key]
    # An axis of size 1 has no name: the one left over is the head, or the row if that is missing too.
    missing = [d for d, role in rest.items() if role not in order or role is None]
    places = {}
    for role in (roles.batch, roles.head):
        given = [d for d, r in rest.items() if role is not None and r is role]
        places[role if role is not None else f"none{len(places)}"] = given[0] if given else missing.pop(0)
    row, head = places.values()
    value, key = (next(d for d, r in rest.items() if r is role) for role in (roles.value, roles.key))
    return Layout(row, found.index("token"), (head, value, key), window.outputs[0].node)


@dataclass
class Record:
    """What ``kda_recover`` needs, as nodes of the rewritten joint graph."""

    arguments: dict[str, object]
    layout: Layout

    @property
    def nodes(self) -> list[Node]:
        return [self.arguments[name] for name in _RECORD if isinstance(self.arguments[name], Node)]


def record_of(output: Node, layout: Layout) -> Record | None:
    """``output``: what took the place of the first token's output; a view of what ``kda_verify`` returns."""
    node = output
    while node.target is not ops.kda_verify:
        if not node.all_input_nodes:
            return None
        node = node.all_input_nodes[0]
    arguments = dict(zip(_VERIFY, node.args, strict=True))
    corrections = [n for n in node.users if n.args[1] == 1]
    if not corrections:
        return None
    return Record({**arguments, "u": corrections[0]}, layout)


@dataclass
class Handover:
    """One verified step between the two calls: the tensors that crossed, and whether they are still what they were."""

    values: dict[Node, object]
    graph: object  # what was traced, and the tensors of the verify call
    tensors: list[Tensor]
    versions: dict[Node, int] = field(init=False)
    committed: bool = False

    def __post_init__(self):
        self.versions = {node: v for node, x in self.values.items() if (v := _version(x)) is not None}

    def check(self) -> None:
        """Raises RuntimeError where the record cannot stand for the states any more."""
        if self.committed:
            raise RuntimeError(
                "these states were committed already: a record is consumed once, verify the next window first"
            )
        for node, version in self.versions.items():
            if _version(self.values[node]) != version:
                raise RuntimeError(
                    f"split_step: {node.name} was written between verify and commit. The states are rebuilt from the "
                    "checkpoints and inputs of the verify call: pools, slots and inputs stay as they were until the commit."
                )


def _version(x: object) -> int | None:
    """Inference tensors count no writes."""
    return x._version if isinstance(x, Tensor) and not x.is_inference() else None


class StatesNotKept(TypeError, AttributeError):
    """Something was asked of recorded states that needs the states themselves."""


class RecordedStates:
    """Stands for the states ``[B, T, ..]`` that a verify half would have returned.

    Pass it to the commit half, or index it by rows and positions, ``states[rows, num_accepted - 1]``: those states are then
    rebuilt from the record (docs/design.md, section 2). ``shape``, ``dtype`` and ``device`` are those of the states. Nothing
    else works, and raises :class:`StatesNotKept`, a TypeError.
    """

    def __init__(self, handover: Handover, number: int, record: Record | None, like: Tensor, shape: torch.Size):
        self.handover, self.number, self._record = handover, number, record
        self.shape, self.dtype, self.device = shape, like.dtype, like.device

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"RecordedStates(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __getitem__(self, index: object) -> Tensor:
        layout = self._record.layout if self._record else None
        if layout is None or {layout.row, layout.token} != {0, 1}:
            raise StatesNotKept(self._refusal("indexing states of this layout"))
        if not isinstance(index, tuple) or len(index) != 2:
            raise StatesNotKept(self._refusal("indexing by anything but one row and one position for every state"))
        if not all(isinstance(x, Tensor) and x.ndim == 1 and _is_integer(x) for x in index):
            raise StatesNotKept(self._refusal("indexing by anything but two integer tensors with one dimension"))
        self.handover.check()
        rows, position = index[layout.row], index[layout.token]
        if rows.shape != position.shape:
            raise StatesNotKept(self._refusal(f"indexing by {rows.shape[0]} rows and {position.shape[0]} positions"))
        count, tokens = self.shape[layout.row], self.shape[layout.token]
        # What indexing does: negative numbers count from the end, numbers out of range are an error.
        for numbers, limit, what in ((rows, count, "row"), (position, tokens, "position")):
            if not bool(((numbers >= -limit) & (numbers < limit)).all()):
                raise IndexError(f"{what} out of range for {limit} {what}s of the recorded states")
        rows, position = rows.remainder(count), position.remainder(tokens)
        given = {
            name: self.handover.values[x] if isinstance(x, Node) else x
            for name, x in self._record.arguments.items()
            if name in (*_RECORD, *_SETTINGS)
        }
        slots = rows if given["state_indices"] is None else given["state_indices"][rows].long()
        record = [given[name][rows] for name in ("u", "k", "g")]
        settings = [given[name] for name in _SETTINGS]
        S = ops.kda_recover(given["state"][slots], *record, position + 1, None, *settings)
        head, value, key = layout.state
        order = sorted([(head, 1), (value, 2), (key, 3)])
        return S.permute(0, *(dim for _, dim in order)).to(self.dtype)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise StatesNotKept(cls._refusal(f"torch.{getattr(function, '__name__', function)}"))

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        raise StatesNotKept(self._refusal(f".{name}"))

    @staticmethod
    def _refusal(what: str) -> str:
        return (
            f"{what} needs states of positions that split_step does not keep. Index them as states[rows, num_accepted - 1] or "
            "pass them to the commit half; a program that needs all of them has to call the verify half without split_step."
        )


def _is_integer(x: Tensor) -> bool:
    return not x.is_floating_point() and not x.is_complex() and x.dtype != torch.bool and x.dtype != torch.uint8


def _unavailable(what: str):
    def method(self, *args, **kwargs):
        raise StatesNotKept(self._refusal(what))

    return method


_ARITHMETIC = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "matmul", "rmatmul", "neg")
for _name in (*_ARITHMETIC, "iter", "bool", "float", "int", "array", "setitem"):
    setattr(RecordedStates, f"__{_name}__", _unavailable(f"__{_name}__"))
