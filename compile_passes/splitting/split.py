"""``split_step``: a speculative step whose acceptance is decided outside of any graph.

An engine that samples between two functions calls one for the window, which returns the states after every position, and one
that selects the accepted one and writes the pool. Neither alone can be rewritten. Both together can: joined into one graph
(``joint_graph.py``), rewritten as usual, and cut again where the states passed (``cut_graph.py``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node
from torch.utils import _pytree as pytree

from compile_passes.reporting.log import log
from compile_passes.reporting.report import Report
from compile_passes.rewrite import rewrite
from compile_passes.splitting.cut_graph import Half, cut
from compile_passes.splitting.inputs import Inputs, number
from compile_passes.splitting.joint_graph import Call, Traced, outputs_and_states, rebuild, trace
from compile_passes.splitting.recorded_states import Handover, Record, RecordedStates, Records

MAX_GRAPHS = 8


def split_step(
    verify: Callable | ExportedProgram,
    commit: Callable | ExportedProgram,
    *,
    dynamic: bool = False,
    backend: str | Callable | None = "inductor",
    check: bool = False,
) -> SplitStep:
    """Rewrite the two halves of a speculative step together, so that records pass between them in place of states.

    Args:
        verify: ``verify(*args, **kwargs) -> (outputs, states)``; ``states`` is a tensor, or any structure of tensors, each the
            states after every window position of one layer. It may write its arguments (a key cache), but not the pools.
        commit: ``commit(states, *args, **kwargs) -> result``, which selects a state for every row and uses it, typically
            ``commit(states, num_accepted, pools, slots)``. A pool is updated in place if both halves are given the same tensor
            objects as pool and slots, or own them as buffers of one module.
        dynamic: one graph for any size of the arguments' dimensions, where the model allows it; else one for each.
        backend: as for ``torch.compile``; None runs the rewritten graphs operator by operator.
        check: compare every rewritten layer with the original while tracing, as :class:`RecoverSSMPass` does.

    Functions are traced with ``torch.export``: pools and weights have to be arguments, or belong to a module that is itself the
    half or whose method it is. A pair of ExportedPrograms is taken in place of functions.

    Returns:
        :class:`SplitStep`; ``verify, commit = split_step(verify, commit)`` unpacks it. The first step with new shapes runs the
        functions as they are, states and all, and traces; from the second on the verify half returns
        :class:`RecordedStates`. :meth:`SplitStep.prepare` traces beforehand.
    """
    programs = [isinstance(half, ExportedProgram) for half in (verify, commit)]
    if any(programs) and not all(programs):
        raise TypeError("split_step takes two functions or two ExportedPrograms, not one of each")
    halves = [half.module() for half in (verify, commit)] if all(programs) else [verify, commit]
    return SplitStep(*halves, dynamic, backend, check)


@dataclass
class Rewritten:
    """One traced pair of halves; ``run`` is None where both were left as they are."""

    calls: tuple[Call, Call]
    traced: Traced
    records: list[Record | None]
    boundary: list[Tensor]  # the fake values of the states
    halves: tuple[Half, Half] | None = None
    run: list[Callable] | None = None
    inputs: Inputs = field(init=False)

    def __post_init__(self):
        environment = self.boundary[0].fake_mode.shape_env
        self.inputs = Inputs(self.traced.inputs, self.traced.joint, environment)


class SplitStep:
    """Two halves of a step; see :func:`split_step`.

    Attributes:
        report: what the pass did with the halves that were traced last; None before.
    """

    def __init__(self, verify: Callable, commit: Callable, dynamic: bool, backend: str | Callable | None, check: bool):
        self._verify, self._commit, self._dynamic, self._backend = verify, commit, dynamic, backend
        self._check = check
        self._graphs: list[Rewritten] = []
        self._plain: tuple | None = None  # arguments of a verify call that was not rewritten, and its states
        self.report: Report | None = None

    def __iter__(self) -> Iterator[Callable]:
        return iter((self.verify, self.commit))

    def verify(self, *args, **kwargs) -> tuple[object, object]:
        """``(outputs, states)`` of the verify half; the states are :class:`RecordedStates` once the step is rewritten."""
        tensors: list[Tensor] = []
        call = Call.of((args, kwargs), tensors)
        for graph in self._graphs:
            sizes = graph.inputs.fits(tensors) if graph.calls[0] == call else None
            if sizes is not None:
                break
        else:
            returned = outputs_and_states(self._verify(*args, **kwargs))
            if len(self._graphs) < MAX_GRAPHS:
                self._plain = (args, kwargs), [weakref.ref(x) for x in pytree.tree_leaves(returned[1])]
            return returned
        if graph.run is None:
            return self._verify(*args, **kwargs)
        first = graph.halves[0]
        given = {node: graph.inputs.value(node, tensors) for node in first.inputs}
        with torch.no_grad():
            returned = graph.run[0](*given.values())
        values = {**given, **dict(zip(first.outputs, returned, strict=True))}
        # What the second half reads itself stays as it was too: a pool, and slots that were looked up already.
        kept = {*graph.halves[1].inputs, *_nodes(graph.records), *graph.traced.late_reads}
        handover = Handover({n: x for n, x in values.items() if n in kept}, graph, tensors)
        states = [
            RecordedStates(handover, place, record, like, torch.Size(number(n, sizes) for n in like.shape))
            for place, (record, like) in enumerate(zip(graph.records, graph.boundary, strict=True))
        ]
        outputs = rebuild(graph.traced.joint.forms[0], returned)
        return outputs, pytree.tree_unflatten(states, graph.traced.joint.states_spec)

    def commit(self, states: object, *args, **kwargs) -> object:
        """The result of the commit half; of the states it reads the checkpoints and the record of the accepted tokens."""
        leaves, spec = pytree.tree_flatten(states)
        recorded = [leaf for leaf in leaves if isinstance(leaf, RecordedStates)]
        if not recorded:
            self._trace_after(leaves, (args, kwargs))
            return self._commit(states, *args, **kwargs)
        handover = recorded[0].handover
        handover.check()
        graph, tensors = handover.graph, list(handover.tensors)
        same_call = Call.of((args, kwargs), tensors) == graph.calls[1] and spec == graph.traced.joint.states_spec
        in_order = [(leaf.handover is handover, leaf.number) for leaf in recorded] == [
            (True, number) for number in range(len(graph.records))
        ]
        if same_call and in_order and graph.inputs.fits(tensors) is not None:
            second = graph.halves[1]
            kept = handover.values
            with torch.no_grad():
                returned = graph.run[1](
                    *(kept[n] if n in kept else graph.inputs.value(n, tensors) for n in second.inputs)
                )
            result = rebuild(graph.traced.joint.forms[1], returned)
        else:
            # Not the arguments that were traced: the function itself, whose indexing the records understand.
            result = self._commit(states, *args, **kwargs)
        handover.committed = True
        return result

    def prepare(self, verify_args: tuple, commit_args: tuple) -> Report:
        """Trace and rewrite for arguments like these without running anything on them: no step has to pay the states.

        Args:
            verify_args: positional arguments of the verify half.
            commit_args: positional arguments of the commit half after ``states``.
        """
        self._trace((verify_args, {}), (commit_args, {}))
        return self.report

    def _trace_after(self, states: list, commit_args: tuple) -> None:
        """Trace if these states are those of the last verify call, which is then known together with its commit."""
        if self._plain is None:
            return
        verify_args, refs = self._plain
        if len(refs) == len(states) and all(ref() is x for ref, x in zip(refs, states, strict=True)):
            self._plain = None
            self._trace(verify_args, commit_args)

    def _trace(self, verify_args: tuple, commit_args: tuple) -> None:
        tensors: list[Tensor] = []
        calls = Call.of(verify_args, tensors), Call.of(commit_args, tensors)
        traced = trace(self._verify, self._commit, calls, tensors, self._dynamic)
        boundary = [node.meta["val"] for node in traced.states]
        watched = Records(traced.states)
        # What crosses between the halves is a record of states; a sequence that crosses, too, would be no such record.
        self.report = rewrite(traced.graph, check=self._check, convolutions=False, around=watched)
        rewritten = Rewritten(calls, traced, watched.records(), boundary)
        self._graphs.append(rewritten)
        left = [node for node in traced.states if node in set(traced.graph.nodes)]
        if left or traced.conflict:
            reasons = sorted({layer.reason for layer in self.report.layers if layer.reason})
            log.warning(
                "split_step leaves both halves as they are: %s. SplitStep.report has the details, docs/troubleshooting.md the "
                "cures.",
                traced.conflict or ", ".join(reasons) or "the states are not those of a window",
            )
            return
        rewritten.halves = cut(traced, _nodes(rewritten.records))
        modules = [half.module for half in rewritten.halves]
        if self._backend is not None:
            modules = [torch.compile(m, backend=self._backend, dynamic=self._dynamic) for m in modules]
        rewritten.run = modules


def _nodes(records: list[Record | None]) -> list[Node]:
    return [node for record in records if record for node in record.nodes]
