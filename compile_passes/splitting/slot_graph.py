"""A step with a slot for every position, rewritten to keep the first position's state and a record of the tokens after it.

What the pool held at ``table[b, t]`` is, at any time,

    pool[table[b, 0]]                                   for t = 0, as before,
    recover(pool[table[b, 0]], record[table[b, 0]], t)  for t > 0.

So a step begins with a commit of the ``n - 1`` tokens after the first, in place, and verifies from there. It ends with a commit
of one token, and stores the record of the others. A half-precision pool would be rounded twice a window that way: there the
second column keeps the checkpoint of the window before, and the record has the first token too.

Writing ``select position 0`` in the place of the stores leaves a graph that the pass rewrites as it does any other; this file
prepares that graph, and puts the records around the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch.fx import Graph, Node

import recoverssm_ops.ops as ops
from compile_passes.matching.slot_pools import SlotPool, Table
from compile_passes.reading.index_notation import aten
from compile_passes.reading.reach import ancestors
from compile_passes.replacing.emit import Values, fake_mode, insert, insert_after, integer_leaves, settle
from compile_passes.replacing.replace import functional_commit
from compile_passes.replacing.unread import drop_unread

NO_SLOT = torch.iinfo(torch.int64).min
RECORD = ("u", "k", "g", "owner")
SETTINGS = ("lower_bound", "use_qk_l2norm_in_kernel", "use_gate_in_kernel")


@dataclass
class SlotLayer:
    """A rewritten pool: ``buffers`` are the placeholders of its record by name, ``stored`` their new values.

    ``begun`` is the pool after the commit a step begins with, ``settled`` the one with those states in the first column, and
    ``forgotten`` the owners without those rows. ``gate`` are the
    inputs that the gate's parameters are computed from, ``settings`` what else a record has to be read with.
    """

    pool: Node
    buffers: dict[str, Node]
    stored: dict[str, Node]
    begun: Node
    settled: Node
    forgotten: Node
    gate: list[Node]
    settings: tuple


def keep_first(graph: Graph, found: SlotPool) -> Node:
    """Read and write position 0 alone. Returns the position that was read, ``[B]`` from 0 to W - 1."""
    pool, table, elements, row = found.pool, found.table, found.states, found.axes[0]
    leaves = list(dict.fromkeys(integer_leaves(found.position, {row})))
    sources = list(dict.fromkeys(e.node for e in elements))

    def position(slots: Tensor, *positions: Tensor) -> Tensor:
        values = Values(leaves, positions, [], device=slots.device)
        if row is not None:
            values.sizes[row] = slots.shape[1 - table.dim]
        return values.integer(found.position, [row]).long().remainder(table.width)

    def gather(pool: Tensor, slots: Tensor) -> Tensor:
        return pool[slots.select(table.dim, found.base)]

    def arrange(*states: Tensor) -> list[Tensor]:
        values = Values(sources, states, elements)
        return [values.tensor(e, found.axes) for e in elements]

    def put(pool: Tensor, slots: Tensor, states: Tensor) -> Tensor:
        own = slots.select(table.dim, found.base)
        rows = torch.arange(own.shape[0], device=pool.device)
        return pool.index_put((own,), states[torch.zeros_like(rows), rows].to(pool.dtype))

    column = insert_after(graph, table.node, position, [table.node, *leaves])
    found.gather.replace_all_uses_with(insert(graph, found.gather, gather, [pool, table.node]))
    # Not traced: what torch.stack becomes reads the sizes of a state.
    arranged = insert(graph, found.written, arrange, sources)
    with graph.inserting_before(found.written), fake_mode(graph):
        stacked = graph.call_function(aten.stack.default, (arranged,))
        stacked.meta["val"] = torch.stack([n.meta["val"] for n in arranged])
        stacked.meta["stack_trace"] = found.written.meta.get("stack_trace")
    new = insert(graph, found.written, put, [pool, table.node, stacked])
    found.written.replace_all_uses_with(new)
    drop_unread(graph, [found.gather, found.written])
    return column


@contextmanager
def kept(graph: Graph, nodes: list[Node]) -> Iterator[list[Node]]:
    """Reads ``nodes`` while the graph is edited; the list holds what they are by then."""
    (end,) = graph.find_nodes(op="output")
    with graph.inserting_before(end):
        probe = graph.call_function(_probe, (list(nodes),))
    now: list[Node] = []
    yield now
    now += probe.args[0]
    graph.erase_node(probe)


def _probe(nodes: list[Tensor]) -> None:
    raise AssertionError("the probe is erased before anything runs")


def rewritten_commit(pool: Node, after: Node) -> dict | None:
    """The arguments of the commit that made ``after`` of the pool, None if none did."""
    source = after.args[0] if after.all_input_nodes else None
    if not isinstance(source, Node) or source.args != (ops.kda_commit,):
        return None
    arguments = dict(source.kwargs)
    if source.target is auto_functionalized_v2:
        (base,) = arguments.pop("_all_bases")
        arguments = {name: x for name, x in arguments.items() if not name.startswith("_")}
    elif source.target is auto_functionalized:
        base = arguments.pop("state")
    else:
        return None
    return arguments if base is pool else None


def add_record(graph: Graph, found: SlotPool, column: Node, after: Node) -> SlotLayer:
    """Put the buffers of the record into the graph: read by a commit before everything else, written at the end.

    ``column`` is what :func:`keep_first` returned, ``after`` the pool after the window's own commit.
    """
    commit, pool, table = rewritten_commit(found.pool, after), found.pool, found.table
    tokens, window, base = found.recorded, len(found.states), found.base
    record = {name: commit[name] for name in ("u", "k", "g")}
    buffers = {name: _buffer(graph, pool, x, tokens, name) for name, x in record.items()}
    buffers["owner"] = _buffer(graph, pool, None, table.width, "owner")
    gate = [commit["A_log"], commit["dt_bias"]]
    readers = [n for n in pool.users if isinstance(n.meta.get("val"), (Tensor, tuple, list))]

    def begin(pool, slots, column, u, k, g, owner, A_log, dt_bias) -> tuple[Tensor, Tensor, Tensor]:
        slots, column = _rows(slots, table), column.unsqueeze(1)
        first, start = _column(slots, 0, pool), _column(slots, base, pool)
        # A record is of the row it was made for. Any other row gets NaN, which is seen, rather than another request's state.
        own = (owner[first].gather(1, column) == slots.gather(1, column)) | (column == 0)
        u = torch.where(own.view(-1, 1, 1, 1), u[first], torch.nan)
        record = {"u": u, "k": k[first], "g": g[first], "A_log": A_log, "dt_bias": dt_bias, "max_seqlen": tokens}
        # Position 0 is the first column's own contents, which somebody else may have written.
        source = torch.where(column.squeeze(1) == 0, first, start)
        length = torch.where(column == 0, 0, column + base)
        settings = {name: x for name, x in commit.items() if not isinstance(x, Node)}
        arguments = {**settings, **record, "source": source, "length": length}
        begun, settled = (functional_commit(pool, {**arguments, "dest": x.unsqueeze(1)}) for x in (start, first))
        return begun, settled, owner.index_put((first,), owner.new_full((1, table.width), NO_SLOT))

    def store(slots, u, k, g, owner, *new) -> list[Tensor]:
        slots = _rows(slots, table)
        first = _column(slots, 0, u)
        at = first.unsqueeze(1), torch.arange(window - 1 + base, device=u.device).unsqueeze(0)
        stored = [old.index_put(at, x[:, 1 - base :].to(old.dtype)) for old, x in zip((u, k, g), new, strict=True)]
        # Columns that this window did not reach hold nothing.
        mark = torch.where(torch.arange(table.width, device=u.device) < window, slots.long(), NO_SLOT)
        return [*stored, owner.index_put((first,), mark)]

    (*_, last) = graph.find_nodes(op="placeholder")
    held = [buffers[name] for name in RECORD]
    begun, settled, forgotten = insert_after(graph, last, begin, [pool, table.node, column, *held, *gate])
    for node in readers:
        node.replace_input_with(pool, begun)
    settle(graph, begun)
    if base:  # the window's own commit leaves its checkpoint where it is
        own = after.args[0]
        first = insert(
            graph, own, lambda slots, pool: _column(_rows(slots, table), 0, pool).unsqueeze(1), [table.node, pool]
        )
        own.update_kwarg("dest", first)
    stored = insert_after(graph, after, store, [table.node, *held, *record.values()])
    parameters = [x for x in gate if x is not None]
    settings = tuple(commit[name] for name in SETTINGS) + tuple(x is None for x in gate)
    values = dict(zip(RECORD, stored, strict=True))
    return SlotLayer(pool, buffers, values, begun, settled, forgotten, _sources(parameters), settings)


def _rows(slots: Tensor, table: Table) -> Tensor:
    """The table as ``[B, W]``."""
    return slots if table.dim == 1 else slots.t()


def _column(slots: Tensor, column: int, pool: Tensor) -> Tensor:
    """Slots of one column. Indexing counts negative ones from the end; the operators take them for padding."""
    chosen = slots[:, column].long()
    return torch.where(chosen < 0, chosen + pool.shape[0], chosen)


def _buffer(graph: Graph, pool: Node, like: Node | None, tokens: int, name: str) -> Node:
    """A new input ``[slots, tokens, ..]``."""
    value = pool.meta["val"]
    with fake_mode(graph):
        if like is None:
            fake = torch.empty(value.shape[0], tokens, dtype=torch.int64, device=value.device)
        else:
            x = like.meta["val"]
            fake = torch.empty(value.shape[0], tokens, *x.shape[2:], dtype=x.dtype, device=value.device)
    with graph.inserting_before(graph.find_nodes(op="placeholder")[0]):
        node = graph.placeholder(f"{pool.name}_{name}")
    node.meta["val"] = fake
    return node


def _sources(nodes: list[Node]) -> list[Node]:
    """The placeholders that nodes are computed from."""
    return sorted(n for n in ancestors(nodes) if n.op == "placeholder")
