"""Put verify, commit and recover in the place of a matched window."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch._inductor import config
from torch.fx import Graph, Node

import recoverssm_ops.ops as ops
from compile_passes.emit import Values, insert, integer_leaves, lift
from compile_passes.index_notation import Axis, Digit, Element, Index, aten, dtype, element_of
from compile_passes.operands import FLOATS, Operands
from compile_passes.views import STACKS, VIEWS, strip
from compile_passes.window import Window
from compile_passes.writeback import Pool, find_writeback, pool_of


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

    @property
    def commits(self) -> bool:
        """In place (commit) rather than functional (recover)."""
        return self.writeback is not None

    def apply(self, graph: Graph) -> None:
        o, *record = self._verify(graph)
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
        checkpoint = strip(window.checkpoint, selections=True) if self.pool else window.checkpoint
        shaped = [checkpoint, *operands.elements()]

        def verify(*tensors: Tensor) -> list[Tensor | None]:
            values = Values(read, tensors, shaped)
            q, k, v, g, beta = (operands.tensor(values, name) for name in ("q", "k", "v", "g", "beta"))
            A_log, dt_bias = operands.gate_parameters(values)
            checkpoints, rows = self._checkpoints(values)
            o, u = ops.kda_verify(
                q,
                k,
                v,
                g,
                beta,
                checkpoints,
                rows,
                None,
                window.length,
                A_log,
                dt_bias,
                operands.lower_bound,
                operands.scale,
                operands.l2norm,
                operands.use_gate,
                operands.beta_sigmoid,
                operands.neg_eigval,
                -1,
            )
            return [o, checkpoints, u, k, g, A_log, dt_bias, rows]

        return insert(graph, window.states[-1].node.next, verify, read)

    def _checkpoints(self, values: Values) -> tuple[Tensor, Tensor | None]:
        if self.pool is None:
            return values.tensor(self.window.checkpoint, self.state_axes).contiguous(), None
        pool = values.tensors[self.pool.node]
        if self.pool.slots is None:
            return pool, None
        rows = values.integer(self.pool.slots, [self.window.roles.batch])
        # Indexing counts negative slots from the end; the operators take them for padding.
        return pool, torch.where(rows < 0, rows + pool.shape[0], rows)

    def _replace_outputs(self, graph: Graph, o: Node) -> None:
        """``o[:, t]`` for every step's output; then ``o`` itself where the model stacks them again."""
        roles, sizes = self.window.roles, o.meta["val"].shape
        batch, head, value = map(_index, (roles.batch, roles.head, roles.value), (sizes[0], *sizes[2:]))
        todo = []
        for t, output in enumerate(self.window.outputs):
            token = (Digit(t, self.window.length),)
            read = _view(Element(o, (batch, token, head, value)), output.axes)
            todo.append(insert(graph, output.node, read, [o]))
            output.node.replace_all_uses_with(todo[-1])
        seen = set()
        while todo:
            node = todo.pop()
            if node.target in STACKS:
                self._unstack(graph, node, o)
            elif node not in seen and node.target in VIEWS:
                seen.add(node)
                if node.target is aten.view.default:  # what was dense is a slice now
                    node.target = aten.reshape.default
                todo += node.users

    def _unstack(self, graph: Graph, stack: Node, o: Node) -> None:
        """A stack of the outputs of all tokens, in order, is a view of ``o``."""
        first, axes = element_of(stack.args[0][0])
        token = self.operands.token
        lifted = lift([strip(Element(piece, first.index)) for piece in stack.args[0]], token)
        if lifted is None or lifted.node is not o:
            return
        dim = (stack.args[1] if len(stack.args) > 1 else 0) % stack.meta["val"].ndim
        view = _view(lifted, [*axes[:dim], token, *axes[dim:]])
        joined = view if stack.target is aten.stack.default else lambda x: view(x).flatten(dim, dim + 1)
        stack.replace_all_uses_with(insert(graph, stack, joined, [o]))

    def _num_accepted(self) -> tuple[list[Node], Callable[..., Tensor]]:
        """The nodes that hold the selected position, and ``num_accepted`` as a function of ``u`` and their tensors."""
        position, batch = self.window.selection.position, self.window.roles.batch
        leaves = list(dict.fromkeys(integer_leaves(position, {batch})))

        def num_accepted(u: Tensor, tensors: tuple[Tensor, ...]) -> Tensor:
            values = Values(leaves, tensors, [])
            if batch is not None:
                values.sizes[batch] = u.shape[0]
            # Position T - 1 - i may also be written -1 - i.
            return torch.remainder(values.integer(position, [batch]), self.window.length) + 1

        return leaves, num_accepted

    def _commit(self, graph: Graph, record: list[Node | None]) -> None:
        operands = self.operands
        leaves, num_accepted = self._num_accepted()

        def commit(pool, u, k, g, A_log, dt_bias, rows, *positions) -> Tensor:
            n = num_accepted(u, positions)
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
            # The functional form that the host's own mutating operators have at this stage.
            if config.enable_auto_functionalized_v2:
                return auto_functionalized_v2(ops.kda_commit, **arguments, _state_base_index=0, _all_bases=[pool])[1]
            return auto_functionalized(ops.kda_commit, state=pool, **arguments)[1]

        self.writeback.replace_all_uses_with(insert(graph, self.writeback, commit, [*record, *leaves]))

    def _recover(self, graph: Graph, record: list[Node | None]) -> None:
        operands, selection = self.operands, self.window.selection
        leaves, num_accepted = self._num_accepted()

        def recover(state, u, k, g, A_log, dt_bias, rows, *positions) -> Tensor:
            n = num_accepted(u, positions)
            initial = state if rows is None else state[rows]
            gate = (A_log, dt_bias, operands.lower_bound)
            settings = (None, self.window.length, *gate, operands.l2norm, operands.use_gate)
            S = ops.kda_recover(initial, u, k, g, n, *settings)
            element = Element(selection.node, tuple(map(_index, self.state_axes, S.shape)))
            return _view(element, selection.axes)(S)

        selection.node.replace_all_uses_with(insert(graph, selection.node, recover, [*record, *leaves]))


def _index(axis: Axis | None, size: int | torch.SymInt) -> Index:
    return () if axis is None else (Digit(axis, size),)


def _view(element: Element, axes: list[Axis | None]) -> Callable[[Tensor], Tensor]:
    """A function that arranges the element's tensor along ``axes``."""
    return lambda x: Values([element.node], [x], [element]).tensor(element, axes)
