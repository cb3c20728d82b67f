"""Put verify, commit and recover in the place of a matched window."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch._inductor import config
from torch.fx import Graph, Node

import recoverssm_ops.ops as ops
from compile_passes.matching.window import Output, Window
from compile_passes.matching.writeback import Pool, find_writeback, pool_of
from compile_passes.reading.index_notation import Axis, Digit, Element, Index, aten, dtype
from compile_passes.reading.joins import SCATTERS, join_of
from compile_passes.reading.selections import chosen
from compile_passes.reading.views import VIEWS, strip
from compile_passes.replacing.counts import count_leaves, num_accepted, selected_zeros
from compile_passes.replacing.emit import Values, insert_after, integer_leaves, lift, settle
from compile_passes.replacing.operands import FLOATS, Operands
from compile_passes.replacing.without_delta import outputs_without_delta


class Replacement:
    """What one window becomes. Making it reads everything off the graph and may refuse; ``apply`` edits the graph."""

    def __init__(self, window: Window):
        self.window, self.operands = window, Operands(window)
        roles = window.roles
        self.state_axes = [roles.batch, roles.head, roles.value, roles.key]
        pool = pool_of(window)
        usable = pool is not None and dtype(pool.node) in FLOATS and pool.node.meta["val"].stride()[-1] == 1
        self.pool: Pool | None = pool if usable else None
        self.writeback = find_writeback(window, pool) if usable else None
        self.replaced: list[Node] = []  # no one reads these any more

    @property
    def commits(self) -> bool:
        """In place (commit) rather than functional (recover)."""
        return self.writeback is not None

    def apply(self, graph: Graph) -> None:
        o, *record = self._verify(graph)
        self.end = max(n for n in (o, *record) if n is not None)
        self._replace_outputs(graph, o)
        if self.commits:
            self._commit(graph, record)
        else:
            self._recover(graph, record)

    def _verify(self, graph: Graph) -> list[Node | None]:
        """Insert the operator; returns ``o`` and what the other half needs, in the order of its arguments."""
        window, operands = self.window, self.operands
        state = self.pool.node if self.pool else window.checkpoint.node
        slots = self.pool.slots if self.pool else None
        read = [state, *(e.node for e in operands.elements())]
        read += integer_leaves(slots, {window.roles.batch}) if slots is not None else []
        read = list(dict.fromkeys(read))
        checkpoint = chosen(window.checkpoint) if self.pool else window.checkpoint
        shaped = [checkpoint, *operands.elements()]

        def verify(*tensors: Tensor) -> list[Tensor | None]:
            values = Values(read, tensors, shaped)
            q, k, v, g, beta = (operands.tensor(values, name) for name in ("q", "k", "v", "g", "beta"))
            A_log, dt_bias = operands.gate_parameters(values)
            checkpoints, rows = self._checkpoints(values)
            gate = (A_log, dt_bias, operands.lower_bound)
            if window.delta:
                settings = (
                    operands.scale,
                    operands.l2norm,
                    operands.use_gate,
                    operands.beta_sigmoid,
                    operands.neg_eigval,
                )
                window_form = (None, window.length, *gate, *settings, -1)
                o, u = ops.kda_verify(q, k, v, g, beta, checkpoints, rows, *window_form)
            else:
                state = checkpoints if rows is None else checkpoints[rows]
                u = v.contiguous()
                o = outputs_without_delta(q, k, u, g, state, *gate, operands.scale, operands.l2norm, operands.use_gate)
            return [o, checkpoints, u, k, g, A_log, dt_bias, rows]

        return insert_after(graph, window.states[-1].node, verify, read)

    def _checkpoints(self, values: Values) -> tuple[Tensor, Tensor | None]:
        if self.pool is None:
            return values.tensor(self.window.checkpoint, self.state_axes).contiguous(), None
        pool = values.tensors[self.pool.node]
        if self.pool.slots is None:
            return pool, None
        rows = values.integer(self.pool.slots, [self.window.roles.batch])
        # Indexing counts negative slots from the end; the operators take them for padding.
        return pool, torch.where(rows < 0, rows + pool.shape[0], rows)

    # --- outputs ------------------------------------------------------------------------------------------------------

    def _replace_outputs(self, graph: Graph, o: Node) -> None:
        """``o`` or ``o[:, t]`` for every output; then ``o`` itself where the model puts them together again."""
        outputs = [(t, x) for t, x in enumerate(self.window.outputs) if x is not None and (x.token is None or t == 0)]
        views = [self._view_of(o, output, t) for t, output in outputs]
        # One trace for all tokens: it costs more than anything that is read in a window.
        todo = insert_after(graph, self.end, lambda x: [view(x) for view in views], [o])
        for (_, output), view in zip(outputs, todo, strict=True):
            self._replace(graph, output.node, view)
        todo, seen = list(todo), set()
        while todo:
            node = todo.pop()
            if node in seen or (node.target not in VIEWS and node not in o.users):
                continue
            seen.add(node)
            if self._unjoin(graph, node, o):
                continue
            if node.target is aten.view.default:  # what was dense is a slice now
                node.target = aten.reshape.default
            todo += node.users

    def _view_of(self, o: Node, output: Output, t: int) -> Callable[[Tensor], Tensor]:
        roles, sizes = self.window.roles, o.meta["val"].shape
        batch, head, value = map(_index, (roles.batch, roles.head, roles.value), (sizes[0], *sizes[2:]))
        token = (Digit(t if output.token is None else output.token, self.window.length),)
        return _view(Element(o, (batch, token, head, value)), output.axes)

    def _unjoin(self, graph: Graph, node: Node, o: Node) -> bool:
        """The outputs of all tokens put together, in order, are a view of ``o``."""
        join = join_of(node)
        if join is None or any(user.target in SCATTERS and user.args[0] is node for user in node.users):
            return False
        names: dict[int, Axis] = {}
        token = self.operands.token
        lifted = lift([strip(join.at(t, names)) for t in range(join.count)], token)
        if lifted is None or lifted.node is not o:
            return False
        axes = [names[dim] for dim in range(node.meta["val"].ndim)]
        axes[join.dim : join.dim + 1] = [token, axes[join.dim]]
        flat = _view(lifted, axes)
        view = insert_after(graph, self.end, lambda x: flat(x).flatten(join.dim, join.dim + 1), [o])
        self._replace(graph, node, view)
        return True

    # --- the selected state -------------------------------------------------------------------------------------------

    def _num_accepted(self) -> tuple[list[Node], Callable[..., tuple[Values, Tensor]]]:
        """The nodes that hold the selected position, and ``num_accepted`` as a function of ``u`` and their tensors."""
        count, batch = self.window.selection.count, self.window.roles.batch
        leaves = list(dict.fromkeys(count_leaves(count, {batch})))

        def accepted(u: Tensor, tensors: tuple[Tensor, ...]) -> tuple[Values, Tensor]:
            values = Values(leaves, tensors, [], device=u.device)
            if batch is not None:
                values.sizes[batch] = u.shape[0]
            return values, num_accepted(values, count, batch)

        return leaves, accepted

    def _commit(self, graph: Graph, record: list[Node | None]) -> None:
        operands = self.operands
        leaves, accepted = self._num_accepted()

        def commit(pool, u, k, g, A_log, dt_bias, rows, *positions) -> Tensor:
            _, n = accepted(u, positions)
            rows = torch.arange(u.shape[0], device=u.device) if rows is None else rows
            arguments = {
                "u": u,
                "k": k,
                "g": g,
                "source": rows,
                "dest": rows.unsqueeze(1),
                "length": n.unsqueeze(1),
                "cu_seqlens": None,
                "max_seqlen": self.window.length,
                "A_log": A_log,
                "dt_bias": dt_bias,
                "lower_bound": operands.lower_bound,
                "use_qk_l2norm_in_kernel": operands.l2norm,
                "use_gate_in_kernel": operands.use_gate,
                "pad_slot_id": -1,
            }
            return functional_commit(pool, arguments)

        self._put(graph, self.writeback, commit, [*record, *leaves])

    def _recover(self, graph: Graph, record: list[Node | None]) -> None:
        operands, selection, batch = self.operands, self.window.selection, self.window.roles.batch
        leaves, accepted = self._num_accepted()

        def recover(state, u, k, g, A_log, dt_bias, rows, *positions) -> Tensor:
            values, n = accepted(u, positions)
            initial = state if rows is None else state[rows]
            gate = (A_log, dt_bias, operands.lower_bound)
            settings = (None, self.window.length, *gate, operands.l2norm, operands.use_gate)
            S = ops.kda_recover(initial, u, k, g, n, *settings)
            zeros = selected_zeros(values, selection.count, batch)
            if zeros is not None:
                S = torch.where(zeros.view(-1, 1, 1, 1), 0, S)
            element = Element(selection.node, tuple(map(_index, self.state_axes, S.shape)))
            return _view(element, selection.axes)(S).to(selection.dtype)

        self._put(graph, selection.node, recover, [*record, *leaves])

    def _put(self, graph: Graph, old: Node, function: Callable[..., Tensor], arguments: list[Node | None]) -> None:
        self._replace(graph, old, insert_after(graph, old, function, arguments))

    def _replace(self, graph: Graph, old: Node, new: Node) -> None:
        old.replace_all_uses_with(new)
        settle(graph, new)
        self.replaced.append(old)


def functional_commit(pool: Tensor, arguments: dict) -> Tensor:
    """The pool after a commit, in the functional form that the host's own mutating operators have at this stage."""
    if config.enable_auto_functionalized_v2:
        return auto_functionalized_v2(ops.kda_commit, **arguments, _state_base_index=0, _all_bases=[pool])[1]
    return auto_functionalized(ops.kda_commit, state=pool, **arguments)[1]


def _index(axis: Axis | None, size: int | torch.SymInt) -> Index:
    return () if axis is None else (Digit(axis, size),)


def _view(element: Element, axes: list[Axis | None]) -> Callable[[Tensor], Tensor]:
    """A function that arranges the element's tensor along ``axes``."""
    return lambda x: Values([element.node], [x], [element]).tensor(element, axes)
