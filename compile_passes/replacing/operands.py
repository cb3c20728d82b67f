"""What the operators receive in place of a window's steps: the inputs over all tokens, and the settings that fit them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compile_passes.matching import fold
from compile_passes.matching.reasons import Refused
from compile_passes.matching.window import Window
from compile_passes.reading.algebra import Product
from compile_passes.reading.index_notation import Axis, Element, dtype
from compile_passes.replacing.emit import Values, lift

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Input:
    """One product over the whole window, or one product a token; ``axes`` is the layout that the operator wants."""

    products: list[Product]
    axes: list[Axis | None]


class Operands:
    """Reads the inputs off a matched window and folds what the operators do themselves. Edits nothing, may refuse."""

    def __init__(self, window: Window):
        steps, roles = window.steps, window.roles
        self.window, self.token = window, Axis("t", window.length)
        self.scale, queries = self._queries()
        queries, keys = self._fold_norm(queries, [s.key for s in steps])
        betas = self._fold_beta([s.beta for s in steps if s.beta is not None])
        log_decays = self._fold_gate()

        rows = [roles.batch, self.token]
        per_head, per_channel = [*rows, roles.head], [*rows, roles.head, roles.key]
        decays = [f for p in log_decays for f in p.factors] + list(filter(None, [self.dt_bias]))
        self.scalar_gate = not any(roles.key in e.axes() for e in decays)
        self.inputs = {
            "q": Input(self._over_window([Product(factors=q) for q in queries]), per_channel),
            "k": Input(self._over_window([Product(factors=k) for k in keys]), per_channel),
            "v": Input(self._over_window([s.value for s in steps]), [*rows, roles.head, roles.value]),
            "g": Input(self._over_window(log_decays), per_head if self.scalar_gate else per_channel),
            "beta": Input(self._over_window(betas), per_head),
        }
        for element in self.elements():
            if dtype(element.node) not in FLOATS:
                raise Refused("unsupported_dtype", element.node)

    def _queries(self) -> tuple[float, list[list[Element]]]:
        """The common factor of the outputs, and the queries. A state that no query reads may be given any."""
        window = self.window
        read = [o for o in window.outputs if o is not None]
        if len({o.coefficient for o in read}) > 1:
            raise Refused("non_uniform_step", read[-1].node)
        if len(read) == window.length:
            return read[0].coefficient, [o.query for o in read]
        # A query that is there keeps what can be folded: a norm, a factor. Without any, the keys are as good.
        spare = read[0].query if read else None
        queries = [
            o.query if o is not None else spare or s.key for o, s in zip(window.outputs, window.steps, strict=True)
        ]
        return read[0].coefficient if read else 1.0, queries

    def _fold_norm(
        self, queries: list[list[Element]], keys: list[list[Element]]
    ) -> tuple[list[list[Element]], list[list[Element]]]:
        """The operator normalises both or neither; a constant factor of the queries is its ``scale``."""
        key_axis = self.window.roles.key
        unit_q, unit_k = ([fold.l2norm(factors, key_axis) for factors in group] for group in (queries, keys))
        both = all(unit_q) and all(unit_k)
        self.l2norm = both and len({c for _, c in unit_q}) == 1 and all(c == 1 for _, c in unit_k)
        if self.l2norm:
            self.scale *= unit_q[0][1]
            return [[x] for x, _ in unit_q], [[x] for x, _ in unit_k]
        scaled = [fold.multiplied_out(factors[0]) for factors in queries]
        plain = all(len(factors) == len(s.factors) == 1 for factors, s in zip(queries, scaled, strict=True))
        if not plain or len({s.coefficient for s in scaled}) != 1:
            return queries, keys
        self.scale *= scaled[0].coefficient
        return [s.factors for s in scaled], keys

    def _fold_beta(self, betas: list[Product]) -> list[Product]:
        logits = [fold.beta_sigmoid(b) for b in betas]
        self.beta_sigmoid = bool(logits) and all(logits) and len({doubled for _, doubled in logits}) == 1
        self.neg_eigval = self.beta_sigmoid and logits[0][1]
        if self.beta_sigmoid:
            return [Product(factors=[x]) for x, _ in logits]
        return betas or [Product()] * self.window.length

    def _fold_gate(self) -> list[Product]:
        """The log decays, raw where the operator has the gate's activation. Sets what it needs to know about it."""
        window, roles = self.window, self.window.roles
        if len({len(s.decay) for s in window.steps}) != 1 or len(window.steps[0].decay) > 1:
            raise Refused("gate_mismatch", window.states[0].node)
        log_decays = [fold.exponent(d) for s in window.steps for d in s.decay]
        if any(g is None for g in log_decays):
            raise Refused("gate_mismatch", window.steps[0].decay[0].node)
        gate = fold.gate(log_decays, roles.head, roles.key) if log_decays else None
        parameters = [] if gate is None else [e for e in (gate.A_log, gate.dt_bias) if e is not None]
        self.use_gate = gate is not None and all(dtype(e.node) in FLOATS for e in parameters)
        self.A_log, self.dt_bias = (gate.A_log, gate.dt_bias) if self.use_gate else (None, None)
        # As the raw operators take it: 0 for the unbounded gate.
        self.lower_bound = (gate.lower_bound or 0.0) if self.use_gate else 0.0
        if self.use_gate:
            return [Product(factors=[g]) for g in gate.g]
        return log_decays or [Product(coefficient=0.0)] * window.length

    def _over_window(self, per_token: list[Product]) -> list[Product]:
        """One product that varies with the token where the tokens are slices of whole tensors, else one a token."""
        if len({(p.coefficient, len(p.factors)) for p in per_token}) == 1:
            lifted = [lift(column, self.token) for column in zip(*(p.factors for p in per_token), strict=True)]
            if None not in lifted:
                return [Product(per_token[0].coefficient, lifted)]
        return per_token

    def elements(self) -> list[Element]:
        """Everything that is read off the graph."""
        inputs = [f for x in self.inputs.values() for p in x.products for f in p.factors]
        return [*inputs, *(e for e in (self.A_log, self.dt_bias) if e is not None)]

    # --- inside a trace -----------------------------------------------------------------------------------------------

    def tensor(self, values: Values, name: str) -> Tensor:
        products, axes = self.inputs[name].products, self.inputs[name].axes
        if not products[0].factors:  # no beta: a step of 1; no gate: a decay of exp(0)
            like = next(iter(values.tensors.values()))
            return like.new_full([values.size(a) for a in axes], products[0].coefficient, dtype=torch.float32)
        if len(products) == 1:
            x = values.product(products[0], axes)
        else:
            per_token = [a for a in axes if a is not self.token]
            x = torch.stack([values.product(p, per_token) for p in products], 1)
        # The outputs replace float32 tensors, and they have the dtype of v.
        return x.float() if name == "v" else x

    def gate_parameters(self, values: Values) -> tuple[Tensor | None, Tensor | None]:
        """``A_log [HV]`` and ``dt_bias [HV, K]`` (``[HV]`` for a scalar gate)."""
        head, key = self.window.roles.head, self.window.roles.key
        return (
            None if self.A_log is None else values.tensor(self.A_log, [head]),
            None if self.dt_bias is None else values.tensor(self.dt_bias, [head] if self.scalar_gate else [head, key]),
        )
