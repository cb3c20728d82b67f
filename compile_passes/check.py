"""``check=True``: every rewritten layer is compared, while it is compiled, with what it replaces.

The layer is cut out of the graph twice, before and after the edit, from what the operators read to what the rest of the model
reads, and both pieces run in float64 on random inputs (``double.py``). Sizes are those of the example inputs. The model's own
tensors are never read, and no random state but a generator of this file's own is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils._python_dispatch import _disable_current_modes

from compile_passes.double import Piece, is_source
from compile_passes.emit import integer_leaves
from compile_passes.index_notation import Element, Lookup, aten, element_of, shape
from compile_passes.log import log
from compile_passes.origin import module_name
from compile_passes.replace import Replacement
from compile_passes.views import STACKS, VIEWS, strip

TOLERANCE = 1e-8  # relative; two spellings of the same layer differ by less than 1e-11
SEED = 0
LARGE_POOL = 2**27  # elements: a pool of more is cut down to the rows that are used


class RewriteCheckError(RuntimeError):
    """A rewritten layer does not compute what the model's own layer does."""


@contextmanager
def checked(graph: Graph, replacement: Replacement, source: str) -> Iterator[None]:
    """Around ``replacement.apply(graph)``. Raises :class:`RewriteCheckError` if the edit changed what is computed."""
    name = " at ".join(x for x in (module_name(replacement.window.stack), source) if x)
    exits = _exits(replacement)
    with _disable_current_modes():  # the compiler's fake tensors would take over the random ones
        before, values = _before(replacement, list(exits.values()))
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
        try:
            expected = before.run(values)
        except Exception as error:
            # Not the rewrite's fault: an operator without a CPU kernel, or an index that no random number hits.
            log.warning("could not check the rewrite of %s, the original does not run by itself: %s", name, error)
            return
        values |= {node: _random(node, torch.Generator()) for node in after.inputs if node not in values}  # sizes
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
    outputs = [o.node for o in window.outputs]
    exits = {f"output of token {t}": node for t, node in enumerate(outputs)}
    todo, seen = [user for node in outputs for user in node.users], set()
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


def _before(replacement: Replacement, exits: list[Node]) -> tuple[Piece, dict[Node, object]]:
    """The original layer, and a value for everything that it and the rewritten one read."""
    window, operands, pool = replacement.window, replacement.operands, replacement.pool
    batch = window.roles.batch
    state = pool.node if pool else window.checkpoint.node
    slots = pool.slots if pool else None
    integers = integer_leaves(window.selection.position, {batch})
    integers += [] if slots is None else integer_leaves(slots, {batch})
    leaves = {
        n for n in (state, *(e.node for e in operands.elements()), *integers) if n.all_input_nodes or is_source(n)
    }
    before = Piece(exits, leaves)
    while around := _computed_from([n for n in before.inputs if n not in leaves], leaves):
        # The layer reads this input past a leaf, which then is no value of its own.
        leaves -= around
        before = Piece(exits, leaves)

    generator = torch.Generator().manual_seed(SEED)
    values = {node: _random(node, generator) for node in dict.fromkeys([*before.inputs, *sorted(leaves, key=str)])}
    # Keys of about unit length and decays below one, as models have them: the recurrence does not blow up.
    for node in {e.node for name in ("q", "k") for e in _factors(replacement, name)} & leaves:
        values[node] *= size(window.roles.key.size) ** -0.5
    if not operands.use_gate:
        for node in {e.node for e in _factors(replacement, "g")} & leaves:
            values[node] = -values[node].abs()

    rows = 1 if batch is None else size(batch.size)
    position = torch.randint(window.length, (rows,), generator=generator)
    _look_up(values, leaves, window.selection.position, position, batch)
    if slots is not None:
        available = _used_pool(values, before, state, rows)
        chosen = torch.randperm(available, generator=generator)[:rows]
        if chosen.numel() < rows:
            log.warning(
                "the example inputs of %s have more rows than the pool has slots: two rows share one", state.name
            )
            chosen = torch.arange(rows) % available
        if available == size(shape(state)[0]):  # negative slots count from the end
            chosen = torch.where(torch.arange(rows) % 2 == 1, chosen - available, chosen)
        _look_up(values, leaves, Lookup(slots), chosen, batch)
    return before, values


def _factors(replacement: Replacement, name: str) -> list[Element]:
    return [f for p in replacement.operands.inputs[name].products for f in p.factors]


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


def _random(node: Node, generator: torch.Generator) -> object:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return size(value) if isinstance(value, torch.SymInt) else value
    sizes, strides = ([size(n) for n in part] for part in (value.shape, value.stride()))
    distinct = [1 if stride == 0 else n for n, stride in zip(sizes, strides, strict=True)]
    if not value.is_floating_point():
        return torch.zeros(sizes, dtype=value.dtype)
    x = torch.empty_strided(distinct, strides, dtype=torch.float64)
    return x.copy_(torch.randn(distinct, generator=generator, dtype=torch.float64)).expand(sizes)


def _look_up(values: dict, leaves: set[Node], lookup: Lookup, numbers: Tensor, batch) -> None:
    """Let ``lookup`` be ``numbers`` (one a row). Behind further arithmetic all that is known is that they are small."""
    nodes = [node for node in integer_leaves(lookup, {batch}) if node in values]
    for node in nodes:
        values[node] = numbers.new_zeros(()).expand(values[node].shape).to(values[node].dtype)
    element = strip(lookup.element)
    direct = nodes == [element.node]
    if direct and lookup.row is not None:
        numbers = numbers + torch.arange(numbers.shape[0]) * lookup.stride
    for node in nodes:
        by_row = [d for d, index in enumerate(element.index) if any(x.value is batch for x in index)] if direct else []
        dims = by_row or [d for d, n in enumerate(values[node].shape) if n == numbers.shape[0]][:1]
        if dims or numbers.shape[0] == 1:
            view = [-1 if [d] == dims else 1 for d in range(values[node].ndim)]
            values[node] = numbers.view(view).to(values[node].dtype).expand(values[node].shape).contiguous()


def _used_pool(values: dict, before: Piece, pool: Node, rows: int) -> int:
    """How many slots the pool has; a large pool that is only indexed needs no more than there are rows."""
    slots = size(shape(pool)[0])
    indexed = {aten.index.Tensor, aten.index_put.default}
    only_indexed = all(n.target in indexed for n in before.nodes if pool in n.all_input_nodes)
    if values[pool].numel() > LARGE_POOL and only_indexed and rows < slots:
        values[pool] = values[pool][: rows + 1].clone()
    return values[pool].shape[0]
