"""``check=True``: every rewritten layer is compared, while it is compiled, with what it replaces.

The layer is cut out of the graph twice, before and after the edit, from what the operators read to what the rest of the model
reads, and both pieces run in float64 on random inputs (``double.py``). Sizes are those of the example inputs. The model's own
tensors are never read, and no random state but a generator of this file's own is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils._python_dispatch import _disable_current_modes

from compile_passes.checking.double import Piece, is_source
from compile_passes.reading.index_notation import aten, dtype, element_of, shape
from compile_passes.reading.joins import STACKS
from compile_passes.reading.views import VIEWS, strip
from compile_passes.replacing.replace import Replacement
from compile_passes.reporting.log import log
from compile_passes.reporting.report import LayerMatch

TOLERANCE = 1e-8  # relative; two spellings of the same layer differ by less than 1e-11
SEED = 0
LARGE_POOL = 2**27  # elements: a pool of more is cut down to the rows that are used


class RewriteCheckError(RuntimeError):
    """A rewritten layer does not compute what the model's own layer does."""


class TooFewSlots(ValueError):
    """Rows would share slots, and which of them is written last is left open."""


@dataclass
class Original:
    """What is replaced, cut out of the graph, and a value for everything that it and what replaces it read.

    ``counts`` are its integers beside slots: ``length`` numbers from one of ``lows`` on, the first of them that it takes.
    """

    piece: Piece
    values: dict[Node, object]
    counts: list[Node]
    length: int
    pool: Node | None
    lows: tuple[int, ...] = (0, 1)

    def run(self) -> tuple[Tensor, ...] | Exception:
        """The exits; an exception if it runs with none of the numbers."""
        error: Exception | None = None
        generator = torch.Generator().manual_seed(SEED)
        for low in self.lows:
            for node in self.counts:
                drawn = torch.randint(low, low + self.length, self.values[node].shape, generator=generator)
                # Both ends occur, so that the wrong choice is an index outside.
                drawn.view(-1)[:1] = low
                drawn.view(-1)[low != 1 :][-1:] = low + self.length - 1
                self.values[node] = drawn.to(self.values[node].dtype)
            try:
                return self.piece.run(self.values, self.pool)
            except Exception as raised:
                error = raised
        return error


@contextmanager
def checked(graph: Graph, replacement: Replacement, layer: LayerMatch) -> Iterator[None]:
    """Around ``replacement.apply(graph)``. Raises :class:`RewriteCheckError` if the edit changed what is computed."""
    name = " at ".join(x for x in (layer.module, layer.source) if x)
    with compared(graph, name, _exits(replacement), lambda exits: _before(replacement, exits)):
        yield


@contextmanager
def compared(
    graph: Graph, name: str, exits: dict[str, Node], cut_out: Callable[[list[Node]], Original]
) -> Iterator[None]:
    """Around an edit that replaces ``exits``, all that the rest of the model reads of what ``cut_out`` returns for them."""
    try:
        with _disable_current_modes():  # the compiler's fake tensors would take over the random ones
            original = cut_out(list(exits.values()))
    except TooFewSlots as error:
        log.warning("could not check the rewrite of %s: %s", name, error)
        yield
        return
    values = original.values
    metadata = [node.meta["val"] for node in exits.values()]
    (end,) = graph.find_nodes(op="output")
    with graph.inserting_before(end):
        # A reader of all exits: the edit puts the new nodes into its arguments.
        probe = graph.call_function(_probe, tuple(exits.values()))
    yield
    after = Piece(probe.args, set(values))
    replaced = [node.meta["val"] for node in probe.args]
    graph.erase_node(probe)
    for what, old, new in zip(exits, metadata, replaced, strict=True):
        if old.dtype != new.dtype or list(map(size, old.shape)) != list(map(size, new.shape)):
            raise RewriteCheckError(_message(name, f"{what} became {new.dtype} {tuple(new.shape)}"))
    with _disable_current_modes():
        expected = original.run()
        if isinstance(expected, Exception):
            # Not the rewrite's fault: an operator without a CPU kernel, or an index that no random number hits.
            log.warning("could not check the rewrite of %s, the original does not run by itself: %s", name, expected)
            return
        values |= {node: random_value(node, torch.Generator()) for node in after.inputs if node not in values}  # sizes
        pairs = zip(exits, expected, after.run(values), strict=True)
        differences = {what: d for what, old, new in pairs if not (d := _difference(old, new)) <= TOLERANCE}
    if differences:
        raise RewriteCheckError(_message(name, ", ".join(f"{what} by {d:.2g}" for what, d in differences.items())))
    log.debug("checked the rewrite of %s", name)


def _probe(*exits: Tensor) -> None:
    raise AssertionError("the probe is erased before anything runs")


def _message(name: str, differences: str) -> str:
    return (
        f"the rewritten layer {name} differs from the original (relative, in float64): {differences}. This is a bug of the "
        "pass, which should have refused the layer; compiled without the pass the model is right."
    )


def _difference(old: Tensor, new: Tensor) -> float:
    return ((old - new).norm() / old.norm().clamp_min(1e-30)).item() if old.shape == new.shape else math.inf


def _exits(replacement: Replacement) -> dict[str, Node]:
    """What the rest of the model reads of the layer."""
    window = replacement.window
    exits = {f"output of token {t}": o.node for t, o in enumerate(window.outputs) if o is not None}
    outputs = set(exits.values())
    todo, seen = [user for node in exits.values() for user in node.users], set()
    while todo:
        node = todo.pop()
        if node in seen or node.target not in VIEWS:
            continue
        seen.add(node)
        if node.target not in STACKS:
            todo += node.users
        elif all(strip(element_of(piece)[0]).node in outputs for piece in node.args[0]):
            exits[f"outputs ({node.name})"] = node
    if replacement.commits:
        exits["pool"] = replacement.writeback
    else:
        exits["selected state"] = window.selection.node
    return exits


def _before(replacement: Replacement, exits: list[Node]) -> Original:
    window, operands, pool = replacement.window, replacement.operands, replacement.pool
    state = pool.node if pool else window.checkpoint.node
    slots = pool.slots if pool else None
    leaves = {n for n in (state, *(e.node for e in operands.elements())) if n.all_input_nodes or is_source(n)}
    # Integers are computed as the model computes them, from inputs or from what it reads off floats (an argmax).
    chosen = set() if slots is None else _integer_sources([slots.node], leaves)
    leaves |= _integer_sources(exits, leaves)
    before = cut_off(exits, leaves)
    generator = torch.Generator().manual_seed(SEED)
    values = {node: random_value(node, generator) for node in dict.fromkeys([*before.inputs, *sorted(leaves, key=str)])}
    # Keys of about unit length and decays below one, as models have them: the recurrence does not blow up.
    for node in _read(replacement, "q", "k") & leaves:
        values[node] *= size(window.roles.key.size) ** -0.5
    if not operands.use_gate:
        for node in _read(replacement, "g") & leaves:
            values[node] = -values[node].abs()

    for node in chosen & values.keys():
        by_row = [d for d, index in enumerate(slots.index) if any(x.value is window.roles.batch for x in index)]
        dim = by_row[0] if by_row and node is slots.node else 0
        values[node] = distinct_slots(values, before, state, node, dim, node is slots.node, generator)
    kinds = {node: x.dtype for node, x in values.items() if isinstance(x, Tensor) and node not in chosen}
    counts = [node for node, kind in kinds.items() if kind not in (torch.float64, torch.bool)]
    return Original(before, values, counts, window.length, pool and pool.node)


def cut_off(exits: list[Node], leaves: set[Node]) -> Piece:
    """What computes ``exits`` from ``leaves``, less those that are no values of their own, which are taken out of the set."""
    piece = Piece(exits, leaves)
    while around := _computed_from([n for n in piece.inputs if n not in leaves], leaves):
        # The layer reads this input past a leaf.
        leaves -= around
        piece = Piece(exits, leaves)
    return piece


def _read(replacement: Replacement, *names: str) -> set[Node]:
    return {f.node for name in names for p in replacement.operands.inputs[name].products for f in p.factors}


def _integer_sources(exits: Iterable[Node], leaves: set[Node]) -> set[Node]:
    """The integers that ``exits`` depend on, where they are inputs, or computed from floats.

    A condition belongs to what it decides about: in a softplus to the float arithmetic, in an acceptance to the integers.
    """
    found, seen, todo = set(), set(), [(node, False) for node in exits]
    while todo:
        node, counting = todo.pop()
        if node in seen or node in leaves:
            continue
        seen.add(node)
        tensors = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
        kind = dtype(node) if isinstance(node.meta.get("val"), Tensor) else torch.float32
        counting = not kind.is_floating_point and (counting or kind != torch.bool)
        if counting and (node.op != "call_function" or any(dtype(n).is_floating_point for n in tensors)):
            found.add(node)
        else:
            todo += [(n, counting) for n in tensors]
    return found


def _computed_from(sources: list[Node], leaves: set[Node]) -> set[Node]:
    """The leaves that depend on one of ``sources`` (sizes aside: they are numbers)."""
    seen, todo = set(), [n for n in sources if isinstance(n.meta.get("val"), Tensor)]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += node.users
    return leaves & seen


def size(n: int | torch.SymInt) -> int:
    """The size in the example inputs, and 2 for sizes that no input has."""
    if isinstance(n, int):
        return n
    expression = n.node.expr.xreplace(n.node.shape_env.backed_var_to_val)
    return int(expression.xreplace(dict.fromkeys(expression.free_symbols, 2)))


def random_value(node: Node, generator: torch.Generator) -> object:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return size(value) if isinstance(value, torch.SymInt) else value
    sizes, strides = ([size(n) for n in part] for part in (value.shape, value.stride()))
    distinct = [1 if stride == 0 else n for n, stride in zip(sizes, strides, strict=True)]
    if value.dtype == torch.bool:
        return torch.randint(2, sizes, generator=generator).bool()
    if not value.is_floating_point():
        return torch.zeros(sizes, dtype=value.dtype)
    x = torch.empty_strided(distinct, strides, dtype=torch.float64)
    return x.copy_(torch.randn(distinct, generator=generator, dtype=torch.float64)).expand(sizes)


def distinct_slots(values: dict, before: Piece, pool: Node, slots: Node, dim: int, direct: bool, generator) -> Tensor:
    """A slot for every row, some counted from the end. Behind arithmetic all that is known is that they are small."""
    old = values[slots]
    rows, whole = old.shape[dim] if old.ndim else 1, size(shape(pool)[0])
    available = _used_pool(values, before, pool, rows)
    if rows > available:
        raise TooFewSlots(f"the example inputs have {rows} rows, and {pool.name} has {whole} slots")
    chosen = torch.randperm(available if direct else rows, generator=generator)[:rows]
    if direct and available == whole:
        chosen = torch.where(torch.arange(rows) % 2 == 1, chosen - whole, chosen)
    return chosen.view([rows if d == dim else 1 for d in range(old.ndim)]).expand(old.shape).to(old.dtype).contiguous()


def _used_pool(values: dict, before: Piece, pool: Node, rows: int) -> int:
    """How many slots the pool has; a large pool that is only indexed needs no more than there are rows."""
    slots = size(shape(pool)[0])
    indexed = {aten.index.Tensor, aten.index_put.default}
    only_indexed = all(n.target in indexed for n in before.nodes if pool in n.all_input_nodes)
    if values[pool].numel() > LARGE_POOL and only_indexed and rows < slots:
        values[pool] = values[pool][: rows + 1].clone()
    return values[pool].shape[0]
