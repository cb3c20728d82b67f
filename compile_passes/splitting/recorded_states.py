"""Per-position states that do not exist: what the verify half of a split step returns in their place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import Node

import recoverssm_ops.ops as ops
from compile_passes.matching.window import Window
from compile_passes.reading.index_notation import Axis, Digit, Element, element_of, same_size, shape, unify
from compile_passes.reading.views import strip
from compile_passes.replacing.replace import Replacement

_VERIFY = [a.name for a in ops.kda_verify._schema.arguments]
_RECORD = ("state", "state_indices", "u", "k", "g", "A_log", "dt_bias")
_SETTINGS = ("max_seqlen", "A_log", "dt_bias", "lower_bound", "use_qk_l2norm_in_kernel", "use_gate_in_kernel")


@dataclass
class Layout:
    """How a model lays its states out: which dimensions are row and token, and the order of head, V and K in the others."""

    row: int
    token: int
    state: tuple[int, int, int]


def layout_of(window: Window, states: Node) -> Layout | None:
    """Which dimension of ``states`` is what; None if they are not this window's, or are not indexed by row and token."""
    roles, sizes = window.roles, shape(states)
    if len(sizes) != 5:
        return None
    for token in (0, 1):
        if not same_size(sizes[token], window.length):
            continue
        found = [_axes_of(states, token, t, window) for t in range(window.length)]
        if None in found or any(f != found[0] for f in found):
            continue
        # An axis of size 1 has no name: what is left over is the row, or else the head.
        rest = {d: axis for d, axis in enumerate(found[0]) if d != token}
        missing = [d for d, axis in rest.items() if axis is None]
        places = {axis: d for d, axis in rest.items() if axis is not None}
        row = places[roles.batch] if roles.batch is not None else 1 - token
        missing = [d for d in missing if d != row]
        head = places[roles.head] if roles.head is not None else missing[0]
        return Layout(row, token, (head, places[roles.value], places[roles.key]))
    return None


def _axes_of(states: Node, token: int, t: int, window: Window) -> list[Axis | None] | None:
    """The window's axis for every dimension of ``states``, where its position ``t`` is the window's state ``t``."""
    element, axes = element_of(states)
    index = tuple((Digit(t, window.length),) if d == token else part for d, part in enumerate(element.index))
    names = unify(window.states[t], strip(Element(states, index)))
    same = strip(Element(states, index)).node is window.states[t].node
    return [names.get(a) for a in axes] if names is not None and same else None


@dataclass
class Record:
    """What ``kda_recover`` needs, as nodes of the rewritten joint graph."""

    arguments: dict[str, object]
    layout: Layout

    @property
    def nodes(self) -> list[Node]:
        return [self.arguments[name] for name in _RECORD if isinstance(self.arguments[name], Node)]


class Records:
    """Watches a rewrite (its ``around``), and notes the record that takes the place of each of ``states``."""

    def __init__(self, states: list[Node]):
        self.states = states
        self.found: list[tuple[Node, Layout] | None] = [None] * len(states)

    @contextmanager
    def __call__(self, replacement: Replacement) -> Iterator[None]:
        window = replacement.window
        # The states of layers that were rewritten before are gone.
        layouts = [None if states._erased else layout_of(window, states) for states in self.states]
        outputs = [o.node for o in window.outputs if o is not None]
        if not any(layouts) or not outputs:
            yield
            return
        graph = outputs[0].graph
        (end,) = graph.find_nodes(op="output")
        with graph.inserting_before(end):
            probe = graph.call_function(_probe, (outputs[0],))  # the edit puts what replaces it into its arguments
        yield
        verify = _verify_behind(probe.args[0])
        graph.erase_node(probe)
        for number, layout in enumerate(layouts):
            if layout is not None and verify is not None:
                self.found[number] = verify, layout

    def records(self) -> list[Record | None]:
        """Read off the finished graph: equal slots of several layers have become one by then."""
        return [None if found is None else Record(_arguments(found[0]), found[1]) for found in self.found]


def _probe(output: Tensor) -> None:
    raise AssertionError("the probe is erased before anything runs")


def _verify_behind(output: Node) -> Node | None:
    """The ``kda_verify`` that ``output`` is a view of."""
    while output.target is not ops.kda_verify and output.all_input_nodes:
        output = output.all_input_nodes[0]
    return output if output.target is ops.kda_verify else None


def _arguments(verify: Node) -> dict[str, object]:
    """What verify was given, and the corrections it returns: those of a layer that is committed are read."""
    (u,) = [n for n in verify.users if n.args[1] == 1]
    return {**dict(zip(_VERIFY, verify.args, strict=True)), "u": u}


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
