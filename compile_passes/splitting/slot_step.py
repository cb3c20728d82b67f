"""``slot_step``: a step that stores the state after every position, for the next step to choose from.

Within one graph such a step cannot be rewritten: another program may read any of the slots. Here the caller promises that none
does, and the rewritten step keeps what the slots would hold as a record of each token (``slot_graph.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import Node

from compile_passes.matching.slot_pools import MAX_COLUMNS, SlotPool, find_slot_pools
from compile_passes.reading.reach import ancestors
from compile_passes.replacing.dedupe import dedupe_integers
from compile_passes.replacing.unroll import unroll_loops
from compile_passes.reporting.report import Report
from compile_passes.rewrite import rewrite
from compile_passes.splitting.cut_graph import module_of
from compile_passes.splitting.inputs import Inputs, number
from compile_passes.splitting.joint_graph import Call, rebuild
from compile_passes.splitting.slot_graph import NO_SLOT, SlotLayer, add_record, keep_first, kept, rewritten_commit
from compile_passes.splitting.traced_step import TracedStep, trace

MAX_GRAPHS = 32


def slot_step(
    step: Callable, *, dynamic: bool = False, backend: str | Callable | None = "inductor", check: bool = False
) -> SlotStep:
    """Rewrite a step that reads ``pool[table[b, num_accepted - 1]]`` and stores the state after token t in ``table[b, t]``.

    Only the slots of the table's first column are used then; of half-precision pools those of the second, too, so that states
    are rounded as often as before. The caller promises that between two steps

    - nobody else reads or writes the slots of any column but the first; those that are not used need not exist in the pool;
    - whoever writes a slot of the first column (a prefill) has that row's next step read position 0 (``num_accepted`` 1);
    - whoever wants to read or copy a request's state calls :meth:`SlotStep.settle` before.

    Args:
        step: ``step(*args, **kwargs)``; pools ``[slots, HV, V, K]``, the table ``[B, W]`` (W from 2 to 16) and the accepted
            counts of the step before are among the arguments, or pools are buffers of the module that the step is, or whose
            method it is. Windows have 2 to 16 tokens, and no more than W.
        dynamic: one graph for any size of the arguments' dimensions, where the model allows it; else one for each.
        backend: as for ``torch.compile``; None runs the rewritten graph operator by operator.
        check: compare every rewritten layer with the original while tracing, as :class:`RecoverSSMPass` does.

    Returns:
        :class:`SlotStep`, which is called like ``step``. Formulas: docs/slot_step.md.
    """
    return SlotStep(step, dynamic, backend, check)


@dataclass
class PoolRecord:
    """What stands for a pool's other positions between steps. ``pool`` is kept so that its address stays its own."""

    pool: Tensor
    buffers: dict[str, Tensor]
    settings: tuple
    gate: tuple | None = None


@dataclass
class Rewritten:
    """One traced step; ``run`` and ``settle`` are its modules, and what each of them takes."""

    call: Call
    traced: TracedStep
    layers: list[SlotLayer]
    run: tuple[Callable, list[Node]] = field(init=False)
    settle: tuple[Callable, list[Node]] = field(init=False)

    @property
    def inputs(self) -> Inputs:
        return self.traced.inputs


class SlotStep:
    """A step whose per-position slots are a record; see :func:`slot_step`.

    Attributes:
        report: what the pass did with the step that was traced last; None before.
    """

    def __init__(self, step: Callable, dynamic: bool, backend: str | Callable | None, check: bool):
        self._step, self._dynamic, self._backend, self._check = step, dynamic, backend, check
        self._graphs: list[Rewritten] = []
        self._records: dict[tuple, PoolRecord] = {}
        self.report: Report | None = None

    def __call__(self, *args, **kwargs) -> object:
        """The step's own result.

        Raises:
            RuntimeError: the step is not understood (the message says why; nothing was run), or what the gates are computed
                with changed since the records were made.
        """
        graph, given = self._prepared(args, kwargs)
        module, inputs = graph.run
        with torch.no_grad():
            return rebuild(graph.traced.form, list(module(*(given[n] for n in inputs))))

    def settle(self, *args, **kwargs) -> None:
        """Bring the first column's slots to the accepted states; takes the arguments that the next step would.

        Afterwards the rows' states may be read and copied there, and their next step reads position 0 (``num_accepted`` 1).
        """
        graph, given = self._prepared(args, kwargs)
        module, inputs = graph.settle
        with torch.no_grad():
            module(*(given[n] for n in inputs))

    def reset(self) -> None:
        """Forget all records, before weights are changed: every row's next step has to read position 0."""
        for record in self._records.values():
            record.buffers["owner"].fill_(NO_SLOT)
            record.gate = None

    def prepare(self, *args, **kwargs) -> Report:
        """Trace, rewrite and allocate the records for arguments like these, without running anything on them."""
        self._prepared(args, kwargs)
        return self.report

    @property
    def record_bytes(self) -> int:
        """Bytes of all records."""
        return sum(x.nbytes for record in self._records.values() for x in record.buffers.values())

    def _prepared(self, args: tuple, kwargs: dict) -> tuple[Rewritten, dict[Node, Tensor]]:
        """The graph for these arguments, and what its inputs are."""
        tensors: list[Tensor] = []
        call = Call.of((args, kwargs), tensors)
        for graph in self._graphs:
            sizes = graph.inputs.fits(tensors) if graph.call == call else None
            if sizes is not None:
                break
        else:
            if len(self._graphs) == MAX_GRAPHS:
                raise RuntimeError(f"slot_step keeps {MAX_GRAPHS} graphs, and no more shapes: try dynamic=True")
            graph = self._trace(call, tensors)
            sizes = graph.inputs.fits(tensors)
            self._graphs.append(graph)
        given = {node: graph.inputs.value(node, tensors) for node in graph.inputs.kinds}
        for layer in graph.layers:
            record = self._record(layer, given[layer.pool], sizes)
            gate = tuple(map(_contents, (given[n] for n in layer.gate)))
            if record.gate not in (None, gate):
                raise RuntimeError(
                    "slot_step: what the gates are computed with (A_log, dt_bias) is not what it was when the tokens were "
                    "recorded. Weights are arguments that stay the same tensors; before they change, settle all rows and reset."
                )
            record.gate = gate
            given |= {node: record.buffers[name] for name, node in layer.buffers.items()}
        return graph, given

    def _record(self, layer: SlotLayer, pool: Tensor, sizes: dict) -> PoolRecord:
        key = pool.data_ptr(), pool.shape, pool.stride(), pool.dtype, pool.device
        values = {name: node.meta["val"] for name, node in layer.buffers.items()}
        shapes = {name: tuple(number(n, sizes) for n in x.shape) for name, x in values.items()}
        if key not in self._records:
            buffers = {n: torch.zeros(shapes[n], dtype=x.dtype, device=pool.device) for n, x in values.items()}
            buffers["owner"].fill_(NO_SLOT)
            self._records[key] = PoolRecord(pool, buffers, layer.settings)
        record = self._records[key]
        differing = [n for n, x in record.buffers.items() if x.shape != shapes[n] or x.dtype != values[n].dtype]
        if differing:
            old, new = tuple(record.buffers[differing[0]].shape), shapes[differing[0]]
            raise RuntimeError(
                f"slot_step: this pool has a record {differing[0]} of shape {old}, and the step needs {new}. All steps on a "
                "pool take tables of the same width, and inputs of the same dtypes."
            )
        if record.settings != layer.settings:
            raise RuntimeError(
                f"slot_step: tokens of this pool were recorded with {record.settings}, and this step reads them with "
                f"{layer.settings}. All steps on a pool compute norm and gate alike."
            )
        return record

    def _trace(self, call: Call, tensors: list[Tensor]) -> Rewritten:
        traced = trace(self._step, call, tensors, self._dynamic)
        loops, found, why = self._find(traced)
        # The records are as wide as the table: that size is a number.
        widths = [f.table.width for f in found if isinstance(f.table.width, torch.SymInt)]
        if widths:
            static = frozenset().union(*map(traced.dims_of, widths))
            traced = trace(self._step, call, tensors, self._dynamic, static)
            loops, found, why = self._find(traced)
        graph = traced.graph
        with kept(graph, [keep_first(graph, pool) for pool in found]) as columns:
            self.report = rewrite(graph, check=self._check, convolutions=False)
        for loop in loops:
            loop.settle()
        after = dict(traced.writes)
        refused = [layer for layer in self.report.layers if not layer.matched]
        reasons = [f"{pool.name}: {text}" for pool, text in why.items()]
        reasons += [f"{layer.source}: {layer.reason}" for layer in refused]
        left = [f.pool for f in found if rewritten_commit(f.pool, after[f.pool]) is None]
        if left and not refused:
            reasons += [f"{pool.name}: the pool is not laid out [slots, HV, V, K] with K contiguous" for pool in left]
        if found and not reasons:
            layers = [add_record(graph, f, c, after[f.pool]) for f, c in zip(found, columns, strict=True)]
            dedupe_integers(graph)
            graph.lint()
            return self._modules(Rewritten(call, traced, layers))
        raise RuntimeError(
            "slot_step cannot rewrite this step: "
            + ("; ".join(reasons) or "no pool [slots, HV, V, K] is read at table[b, n - 1] and written at table[b, t]")
            + ". SlotStep.report has the details, docs/slot_step.md what is understood."
        )

    @staticmethod
    def _find(traced: TracedStep) -> tuple[list, list[SlotPool], dict[Node, str]]:
        loops = unroll_loops(traced.graph)
        found, why = find_slot_pools(traced.graph)
        pools = {value: pool for pool, value in traced.writes}
        found = [f for f in found if pools.get(f.written) is f.pool]
        for f in found:
            width = f.table.width
            if isinstance(width, int) and not len(f.states) <= width <= MAX_COLUMNS:
                why[f.pool] = f"the table's width has to be from {len(f.states)} to {MAX_COLUMNS}, but is {width}"
        return loops, found, why

    def _modules(self, rewritten: Rewritten) -> Rewritten:
        traced, layers = rewritten.traced, rewritten.layers
        records = [(layer.buffers[name], layer.stored[name]) for layer in layers for name in layer.buffers]
        settled = [(layer.pool, layer.settled) for layer in layers]
        forgotten = [(layer.buffers["owner"], layer.forgotten) for layer in layers]
        rewritten.run = self._module(traced, traced.results, [*traced.writes, *records])
        rewritten.settle = self._module(traced, [], [*settled, *forgotten])
        return rewritten

    def _module(self, traced: TracedStep, results: list[Node], writes: list) -> tuple[Callable, list[Node]]:
        order = {node: place for place, node in enumerate(traced.graph.nodes)}
        nodes = sorted(ancestors([*results, *(n for pair in writes for n in pair)]), key=order.get)
        inputs = [n for n in nodes if n.op == "placeholder"]
        module: Callable = module_of(traced.graph, inputs, nodes, results, writes)
        if self._backend is not None:
            module = torch.compile(module, backend=self._backend, dynamic=self._dynamic)
        return module, inputs


def _contents(x: Tensor) -> tuple:
    """Tells whether a tensor was exchanged or written. Inference tensors count no writes."""
    return x.data_ptr(), None if x.is_inference() else x._version
