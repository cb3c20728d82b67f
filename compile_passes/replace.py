"""Put verify, commit and recover in the place of a matched window."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch._inductor import config
from torch.fx import Graph, Node

import recoverssm_ops.ops as ops
from compile_passes import fold
from compile_passes.algebra import Product
from compile_passes.emit import Values, insert, integer_leaves, lift
from compile_passes.index_notation import Axis, Digit, Element, aten, dtype
from compile_passes.reasons import Refused
from compile_passes.views import VIEWS, strip
from compile_passes.window import Window
from compile_passes.writeback import Pool, find_writeback, pool_of

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Replacement:
    """What one window becomes. ``plan`` reads everything off the graph and may still refuse; ``apply`` edits the graph."""

    def __init__(self, window: Window):
        self.window = window
        self.token = Axis("t", window.length)
        roles = window.roles
        self.rows, self.heads = [roles.batch, self.token], [roles.head]
        self._plan_inputs()
        self._plan_state()

    # --- plan ---------------------------------------------------------------------------------------------------------

    def _plan_inputs(self) -> None:
        window, roles = self.window, self.window.roles
        steps, outputs = window.steps, window.outputs
        if len({o.coefficient for o in outputs}) != 1:
            raise Refused("non_uniform_step", outputs[-1].node)
        self.scale = outputs[0].coefficient

        keys, queries = [s.key for s in steps], [o.query for o in outputs]
        unit_k, unit_q = ([fold.l2norm(f, roles.key) for f in group] for group in (keys, queries))
        self.l2norm = (
            all(unit_k) and all(unit_q) and len({c for _, c in unit_q}) == 1 and all(c == 1 for _, c in unit_k)
        )
        if self.l2norm:
            keys, queries = ([[x] for x, _ in group] for group in (unit_k, unit_q))
            self.scale *= unit_q[0][1]
        else:
            queries = self._without_scale(queries)

        betas = [s.beta for s in steps]
        logits = [fold.beta_sigmoid(f) for f in betas]
        self.beta_sigmoid = all(logits) and len({doubled for _, doubled in logits}) == 1
        self.neg_eigval = self.beta_sigmoid and logits[0][1]
        if self.beta_sigmoid:
            betas = [[x] for x, _ in logits]

        self.gate = self._plan_gate()
        key_axes, head_axes = [*self.rows, roles.head, roles.key], [*self.rows, roles.head]
        decays = [*self.gate.g, *(e for e in (self.gate.dt_bias,) if e is not None)]
        scalar_gate = not any(roles.key in e.axes() for e in decays)
        self.inputs = {
            "q": (self._over_window(queries), key_axes),
            "k": (self._over_window(keys), key_axes),
            "v": (self._over_window([s.value for s in steps]), [*self.rows, roles.head, roles.value]),
            "g": (
                self._over_window([[g] for g in self.gate.g] or [[]] * window.length),
                head_axes if scalar_gate else key_axes,
            ),
            "beta": (self._over_window(betas), head_axes),
        }
        for products, _ in self.inputs.values():
            for factor in (f for p in products for f in p.factors):
                if dtype(factor.node) not in FLOATS:
                    raise Refused("unsupported_dtype", factor.node)

    def _without_scale(self, queries: list[list[Element]]) -> list[list[Element]]:
        """A constant factor of the queries is the operator's ``scale``."""
        scaled = [fold.multiplied_out(factors[0]) for factors in queries]
        plain = all(len(factors) == len(s.factors) == 1 for factors, s in zip(queries, scaled, strict=True))
        if not plain or len({s.coefficient for s in scaled}) != 1:
            return queries
        self.scale *= scaled[0].coefficient
        return [s.factors for s in scaled]

    def _plan_gate(self) -> fold.Gate:
        window, roles = self.window, self.window.roles
        if any(len(s.decay) > 1 for s in window.steps) or len({len(s.decay) for s in window.steps}) != 1:
            raise Refused("gate_mismatch", window.states[0].node)
        log_decays = [fold.exponent(d) for s in window.steps for d in s.decay]
        if any(g is None for g in log_decays):
            raise Refused("gate_mismatch", window.steps[0].decay[0].node)
        folded = fold.gate(log_decays, roles.head, roles.key) if log_decays else None
        self.use_gate = folded is not None and all(
            dtype(e.node) in FLOATS for e in (folded.A_log, folded.dt_bias) if e is not None
        )
        return folded if self.use_gate else fold.Gate(log_decays, None, None, None)

    def _over_window(self, per_token: list[list[Element]]) -> list[Product]:
        """One product that varies with the token where the tokens are slices of whole tensors, else one a token."""
        if len({len(factors) for factors in per_token}) == 1:
            lifted = [lift(column, self.token) for column in zip(*per_token, strict=True)]
            if None not in lifted:
                return [Product(factors=lifted)]
        return [Product(factors=factors) for factors in per_token]

    def _plan_state(self) -> None:
        window, roles = self.window, self.window.roles
        self.state_axes = [roles.batch, roles.head, roles.value, roles.key]
        pool = pool_of(window)
        if pool is not None and dtype(pool.node) in FLOATS and pool.node.meta["val"].stride()[-1] == 1:
            self.pool: Pool | None = pool
            self.writeback = find_writeback(window, pool)
        else:
            self.pool, self.writeback = None, None

    @property
    def commits(self) -> bool:
        """In place (commit) rather than functional (recover)."""
        return self.writeback is not None

    # --- apply --------------------------------------------------------------------------------------------------------

    def apply(self, graph: Graph) -> None:
        window, gate = self.window, self.gate
        elements = [f for products, _ in self.inputs.values() for p in products for f in p.factors]
        elements += [e for e in (gate.A_log, gate.dt_bias) if e is not None]
        state = self.pool.node if self.pool else window.checkpoint.node
        slots = self.pool.slots if self.pool else None
        arguments = list(dict.fromkeys([state, *(e.node for e in elements)]))
        if slots is not None:
            arguments = list(dict.fromkeys([*arguments, *integer_leaves(slots, {window.roles.batch})]))
        shaped = [window.checkpoint, *elements] if window.checkpoint.node in arguments else elements
        shaped = [strip(window.checkpoint, selections=True), *shaped] if self.pool else shaped

        def verify(*tensors: Tensor):
            values = Values(arguments, tensors, shaped)
            q, k, v, g, beta = (self._input(values, name) for name in ("q", "k", "v", "g", "beta"))
            A_log, dt_bias = self._gate_parameters(values)
            checkpoints, rows = self._checkpoints(values, state, slots)
            gate_settings = (A_log, dt_bias, gate.lower_bound or 0.0)
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
                *gate_settings,
                self.scale,
                self.l2norm,
                self.use_gate,
                self.beta_sigmoid,
                self.neg_eigval,
                -1,
            )
            optional = [x for x in (A_log, dt_bias, rows) if x is not None]
            return [o, u, k, g, checkpoints, *optional]

        o, u, k, g, checkpoints, *optional = insert(graph, window.states[-1].node.next, verify, arguments)
        for name in ("A_log", "dt_bias"):
            setattr(self, f"_{name}", optional.pop(0) if getattr(gate, name) is not None else None)
        self._rows = optional.pop(0) if optional else None
        self._replace_outputs(graph, o)
        if self.commits:
            self._commit(graph, u, k, g)
        else:
            self._recover(graph, u, k, g, checkpoints)

    def _input(self, values: Values, name: str) -> Tensor:
        products, axes = self.inputs[name]
        if not products[0].factors:  # no beta: a step of 1; no gate: a decay of exp(0)
            sizes = [values.size(a) for a in axes]
            like = next(iter(values.tensors.values()))
            return like.new_full(sizes, 1.0 if name == "beta" else 0.0, dtype=torch.float32)
        if len(products) == 1:
            x = values.product(products[0], axes)
        else:
            per_token = [a for a in axes if a is not self.token]
            x = torch.stack([values.product(p, per_token) for p in products], 1)
        # The outputs replace float32 tensors, and they have the dtype of v.
        return x.float() if name == "v" else x

    def _gate_parameters(self, values: Values) -> tuple[Tensor | None, Tensor | None]:
        roles = self.window.roles
        scalar = self.inputs["g"][1][-1] is not roles.key
        bias_axes = [roles.head] if scalar else [roles.head, roles.key]
        A_log = None if self.gate.A_log is None else values.tensor(self.gate.A_log, [roles.head])
        dt_bias = None if self.gate.dt_bias is None else values.tensor(self.gate.dt_bias, bias_axes)
        return A_log, dt_bias

    def _checkpoints(self, values: Values, state: Node, slots: Element | None) -> tuple[Tensor, Tensor | None]:
        if self.pool is None:
            gathered = values.tensor(self.window.checkpoint, self.state_axes)
            return gathered.contiguous(), None
        pool = values.tensors[state]
        if slots is None:
            return pool, None
        rows = values.integer(slots, [self.window.roles.batch])
        # Indexing counts negative slots from the end; the operators take them for padding.
        return pool, torch.where(rows < 0, rows + pool.shape[0], rows)

    def _replace_outputs(self, graph: Graph, o: Node) -> None:
        roles = self.window.roles
        sizes = o.meta["val"].shape
        batch, head, value = (
            () if axis is None else (Digit(axis, size),)
            for axis, size in zip((roles.batch, roles.head, roles.value), (sizes[0], *sizes[2:]), strict=True)
        )
        for t, output in enumerate(self.window.outputs):
            token = (Digit(t, self.window.length),)
            read = _view(Element(o, (batch, token, head, value)), output.axes)
            new = insert(graph, output.node, read, [o])
            output.node.replace_all_uses_with(new)
            _views_to_reshapes(new)

    def _position(self, graph: Graph, before: Node) -> tuple[list[Node], object]:
        """Nodes to read and a function that gives ``num_accepted``."""
        position, batch = self.window.selection.position, self.window.roles.batch
        leaves = list(dict.fromkeys(integer_leaves(position, {batch})))

        def num_accepted(values: Values) -> Tensor:
            # Position T - 1 - i may also be written -1 - i.
            return torch.remainder(values.integer(position, [batch]), self.window.length) + 1

        return leaves, num_accepted

    def _settings(self) -> tuple:
        return (self.gate.lower_bound or 0.0, self.l2norm, self.use_gate)

    def _record(self, graph: Graph, before: Node, u: Node, k: Node, g: Node) -> list[Node]:
        """The record, the gate's parameters and ``num_accepted``, as arguments of a trace."""
        leaves, count = self._position(graph, before)
        axis_source = Element(
            u,
            (
                (() if self.window.roles.batch is None else (Digit(self.window.roles.batch, u.meta["val"].shape[0]),)),
                (),
                (),
                (),
            ),
        )

        def fn(u_value: Tensor, *tensors: Tensor) -> Tensor:
            return count(Values([u, *leaves], [u_value, *tensors], [axis_source]))

        n = insert(graph, before, fn, [u, *leaves])
        return [u, k, g, n, *(x for x in (self._A_log, self._dt_bias) if x is not None)]

    def _unpack(self, gate_tensors: tuple[Tensor, ...]) -> tuple[Tensor | None, Tensor | None]:
        rest = list(gate_tensors)
        A_log = rest.pop(0) if self._A_log is not None else None
        return A_log, rest.pop(0) if self._dt_bias is not None else None

    def _commit(self, graph: Graph, u: Node, k: Node, g: Node) -> None:
        put, pool = self.writeback, self.pool.node
        lower_bound, l2norm, use_gate = self._settings()

        def commit(pool_value: Tensor, *tensors: Tensor) -> Tensor:
            tensors = list(tensors)
            rows = (
                tensors.pop(0)
                if self._rows is not None
                else torch.arange(tensors[0].shape[0], device=pool_value.device)
            )
            u_value, k_value, g_value, n, *gate_tensors = tensors
            A_log, dt_bias = self._unpack(tuple(gate_tensors))
            record = {"u": u_value, "k": k_value, "g": g_value}
            where = {"source": rows, "dest": rows.unsqueeze(1), "length": n.unsqueeze(1)}
            settings = {
                "cu_seqlens": None,
                "max_seqlen": self.window.length,
                "A_log": A_log,
                "dt_bias": dt_bias,
                "lower_bound": lower_bound,
                "use_qk_l2norm_in_kernel": l2norm,
                "use_gate_in_kernel": use_gate,
                "pad_slot_id": -1,
            }
            arguments = {**record, **where, **settings}
            # The functional form that the host's own mutating operators have at this stage.
            if config.enable_auto_functionalized_v2:
                results = auto_functionalized_v2(
                    ops.kda_commit, **arguments, _state_base_index=0, _all_bases=[pool_value]
                )
            else:
                results = auto_functionalized(ops.kda_commit, state=pool_value, **arguments)
            return results[1]

        record = self._record(graph, put, u, k, g)
        rows = [self._rows] if self._rows is not None else []
        put.replace_all_uses_with(insert(graph, put, commit, [pool, *rows, *record]))

    def _recover(self, graph: Graph, u: Node, k: Node, g: Node, checkpoints: Node) -> None:
        selection = self.window.selection
        lower_bound, l2norm, use_gate = self._settings()
        record = self._record(graph, selection.node, u, k, g)
        rows = [self._rows] if self._rows is not None else []
        names = self.state_axes

        def recover(state: Tensor, *tensors: Tensor) -> Tensor:
            tensors = list(tensors)
            if self._rows is not None:
                state = state[tensors.pop(0)]
            u_value, k_value, g_value, n, *gate_tensors = tensors
            A_log, dt_bias = self._unpack(tuple(gate_tensors))
            settings = (None, self.window.length, A_log, dt_bias, lower_bound, l2norm, use_gate)
            S = ops.kda_recover(state, u_value, k_value, g_value, n, *settings)
            element = Element(
                u, tuple(() if a is None else (Digit(a, s),) for a, s in zip(names, S.shape, strict=True))
            )
            return Values([u], [S], [element]).tensor(element, selection.axes)

        selection.node.replace_all_uses_with(insert(graph, selection.node, recover, [checkpoints, *rows, *record]))


def _view(element: Element, axes: list[Axis | None]) -> Callable[[Tensor], Tensor]:
    """A function that arranges the element's tensor along ``axes``."""
    return lambda x: Values([element.node], [x], [element]).tensor(element, axes)


def _views_to_reshapes(node: Node) -> None:
    """An output is now a slice of a larger tensor, which ``view`` may not take (Inductor's graphs have ``reshape`` already)."""
    for user in node.users:
        if user.target is aten.view.default:
            user.target = aten.reshape.default
        if user.target in VIEWS:
            _views_to_reshapes(user)
