"""``while_loop`` over the tokens of a window, written out where the number of its iterations can be read off the graph.

The loop is run with what is known beforehand: a counter that starts at a constant is a number in every iteration, and so are
the condition and the masks computed from it. Looking up and writing at a known position become slices. Everything else is
traced as it stands.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torch.utils._python_dispatch import _disable_current_modes

from compile_passes.reading.index_notation import aten

SMALL = 64  # elements of a tensor that is worth knowing: counters, positions of a window, masks over it


class NotKnown(Exception):
    """The loop does something at a position, or ends at a condition, that only the data tells."""


class Known:
    """A small tensor of integers or truth values with known contents: ``value``, on the CPU, stands for one on ``device``."""

    def __init__(self, value: Tensor, device: torch.device):
        self.value, self.device = value, device


UNKNOWN = object()


def while_loop(graph: Graph, node: Node, limit: int) -> tuple[Callable[..., list], list[Node]]:
    """The results of a while_loop as a function of its arguments, and the arguments.

    Raises :class:`NotKnown` where the number of iterations is not known or not from 2 to ``limit``; the function may, too.
    """
    condition, body, carried, extra = node.args
    given = [*carried, *extra]
    if node.kwargs or graph.owning_module is None or not all(u.target is operator.getitem for u in node.users):
        raise NotKnown
    if not any(user.users for user in node.users) or not all(isinstance(x, (Node, int)) for x in given):
        raise NotKnown
    condition, body = (getattr(graph.owning_module, part.target) for part in (condition, body))
    constants: dict[Node, Known | None] = {}
    start = [_constant(x, constants) if isinstance(x, Node) else x for x in given]
    count = _iterations(condition, body, [UNKNOWN if x is None else x for x in start], len(carried), limit)
    if count < 2:
        raise NotKnown

    def loop(*tensors: Tensor) -> list:
        rest = iter(tensors)
        values = [next(rest) if value is None else value for value in start]
        carry, others = values[: len(carried)], values[len(carried) :]
        for _ in range(count):
            carry = _run(body, [*carry, *others], _call)
        return [_filled(x) if isinstance(x, Known) else x for x in carry]

    return loop, [x for x, value in zip(given, start, strict=True) if value is None]


def _iterations(condition: GraphModule, body: GraphModule, start: list, carried: int, limit: int) -> int:
    """How often the body runs, by what is known alone; nothing is traced."""
    carry, others = start[:carried], start[carried:]
    for count in range(limit + 1):
        (going,) = _run(condition, [*carry, *others], _known_call)
        going = _number(going) if isinstance(going, Known) else going
        if not isinstance(going, bool):
            raise NotKnown
        if not going:
            return count
        carry = _run(body, [*carry, *others], _known_call)
    raise NotKnown


def _constant(node: Node, constants: dict[Node, Known | None]) -> Known | None:
    """The contents of a small tensor that is computed from nothing."""
    if node not in constants:
        result = None
        if node.op == "call_function" and _is_small(node):
            sources = {n: _constant(n, constants) for n in node.all_input_nodes}
            if all(x is not None for x in sources.values()):
                result = _computed(node, *torch.fx.map_arg((node.args, node.kwargs), sources.__getitem__))
        constants[node] = result
    return constants[node]


def _is_small(node: Node) -> bool:
    value = node.meta.get("val")
    integral = isinstance(value, Tensor) and not value.is_floating_point() and not value.is_complex()
    return integral and all(isinstance(n, int) for n in value.shape) and value.numel() <= SMALL


def _run(module: GraphModule, values: Sequence[object], call: Callable[[Node, tuple, dict], object]) -> list:
    """The module's results; every value is a :class:`Known`, a number, or what ``call`` makes of the rest."""
    given = iter(values)
    environment: dict[Node, object] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            environment[node] = next(given)
        elif node.op == "get_attr":
            environment[node] = getattr(module, node.target)
        elif node.op == "output":
            results = torch.fx.map_arg(node.args[0], environment.__getitem__)
            return list(results) if isinstance(results, (tuple, list)) else [results]
        else:
            environment[node] = call(node, *torch.fx.map_arg((node.args, node.kwargs), environment.__getitem__))
    raise AssertionError("a traced graph ends with an output node")


def _known_call(node: Node, args: tuple, kwargs: dict) -> object:
    """The call if everything about it is known."""
    leaves = _leaves((args, kwargs))
    if any(x is UNKNOWN or isinstance(x, (Tensor, GraphModule)) for x in leaves):
        return UNKNOWN
    if _is_small(node):
        return _computed(node, args, kwargs)
    numbers = getattr(node.target, "__module__", None) == "_operator" and not any(isinstance(x, Known) for x in leaves)
    return node.target(*args, **kwargs) if numbers else UNKNOWN


def _call(node: Node, args: tuple, kwargs: dict) -> object:
    """The call inside a trace."""
    if node.target is aten._assert_scalar.default:
        return None  # about sizes and positions that are numbers now
    leaves = _leaves((args, kwargs))
    if _is_small(node) and not any(isinstance(x, Tensor) for x in leaves):
        return _computed(node, args, kwargs)
    if any(isinstance(x, Known) for x in leaves):
        if node.target in AT_POSITION:
            return AT_POSITION[node.target](*args, **kwargs)
        args, kwargs = _map((args, kwargs), _filled)
    return node.target(*args, **kwargs)


def _computed(node: Node, args: tuple, kwargs: dict) -> Known:
    """The call itself, on the CPU and outside of the trace."""
    args, kwargs = _map((args, kwargs), lambda x: x.value)
    kwargs = {**kwargs, "device": torch.device("cpu")} if "device" in kwargs else kwargs
    with _disable_current_modes():
        return Known(node.target(*args, **kwargs), node.meta["val"].device)


def _leaves(tree: object) -> list:
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [x for part in tree for x in _leaves(part)] if isinstance(tree, (tuple, list)) else [tree]


def _map(tree: object, function: Callable[[Known], object]) -> object:
    """``tree`` with its known tensors replaced."""
    if isinstance(tree, dict):
        return {name: _map(x, function) for name, x in tree.items()}
    if isinstance(tree, (tuple, list)):
        return type(tree)(_map(x, function) for x in tree)
    return function(tree) if isinstance(tree, Known) else tree


def _number(x: Known) -> int | bool:
    if x.value.numel() != 1:
        raise NotKnown
    with _disable_current_modes():
        return x.value.item()


def _filled(x: Known) -> Tensor:
    """A known number as a tensor of the trace."""
    return torch.full(list(x.value.shape), _number(x), dtype=x.value.dtype, device=x.device)


# --- operators at a known position --------------------------------------------------------------------------------------


def _position(indices: Sequence[object]) -> tuple[int, int, list[int]]:
    """Dimension, position and the shape of the index, where one dimension is looked up at one known position."""
    used = [(dim, x) for dim, x in enumerate(indices) if x is not None]
    if len(used) != 1 or not isinstance(used[0][1], Known) or used[0][1].value.dtype in (torch.bool, torch.uint8):
        raise NotKnown
    ((dim, x),) = used
    return dim, _number(x), list(x.value.shape)


def _in_range(position: int, x: Tensor, dim: int) -> int:
    size = x.shape[dim]
    if isinstance(size, int) and -size <= position < 0:
        return position + size
    # A dynamic size is held to it by a guard. Outside the loop itself reports the error, where a slice would not.
    if position < 0 or not guard_or_false(position < size):
        raise NotKnown
    return position


def _with_index_shape(x: Tensor, dim: int, sizes: list[int]) -> Tensor:
    """``x`` has one position in ``dim``, the index that stood there had ``sizes`` (all 1)."""
    return x.reshape([*x.shape[:dim], *sizes, *x.shape[dim + 1 :]]) if len(sizes) != 1 else x


def _index(x: Tensor, indices: Sequence[object]) -> Tensor:
    dim, position, sizes = _position(indices)
    position = _in_range(position, x, dim)
    return _with_index_shape(aten.slice.Tensor(x, dim, position, position + 1), dim, sizes)


def _index_put(x: Tensor, indices: Sequence[object], values: Tensor, accumulate: bool = False) -> Tensor:
    dim, position, sizes = _position(indices)
    if accumulate or not isinstance(values, Tensor):
        raise NotKnown
    position = _in_range(position, x, dim)
    values = values.expand([*x.shape[:dim], *sizes, *x.shape[dim + 1 :]])
    values = values.reshape([*x.shape[:dim], 1, *x.shape[dim + 1 :]])
    return aten.slice_scatter.default(x, values, dim, position, position + 1)


def _index_select(x: Tensor, dim: int, index: Known) -> Tensor:
    if not isinstance(index, Known) or index.value.ndim > 1:
        raise NotKnown
    dim %= x.ndim
    _, position, _ = _position([index])
    position = _in_range(position, x, dim)
    return aten.slice.Tensor(x, dim, position, position + 1)


def _where(condition: object, then: Tensor, otherwise: Tensor) -> Tensor:
    """A mask that is true at one position of one dimension writes there."""
    if not all(isinstance(x, Tensor) for x in (then, otherwise)) or not isinstance(condition, Known):
        raise NotKnown
    mask = condition.value
    dims = [dim - mask.ndim for dim, size in enumerate(mask.shape) if size != 1]
    with _disable_current_modes():
        true = mask.reshape(-1).nonzero().view(-1).tolist()
    if len(dims) != 1 or len(true) != 1 or mask.dtype != torch.bool or then.dtype != otherwise.dtype:
        raise NotKnown
    dim, (position,) = dims[0] + otherwise.ndim, true
    rank = max(then.ndim, otherwise.ndim, mask.ndim)
    if rank != otherwise.ndim or otherwise.shape[dim] != mask.shape[dims[0]]:
        raise NotKnown
    if -dims[0] <= then.ndim and not (isinstance(then.shape[dims[0]], int) and then.shape[dims[0]] == 1):
        then = aten.slice.Tensor(then, dims[0] + then.ndim, position, position + 1)
    then = then.expand([*otherwise.shape[:dim], 1, *otherwise.shape[dim + 1 :]])
    return aten.slice_scatter.default(otherwise, then, dim, position, position + 1)


AT_POSITION = {
    aten.index.Tensor: _index,
    aten.index_put.default: _index_put,
    aten.index_select.default: _index_select,
    aten.where.self: _where,
}
