"""What a corpus of layouts is made of: the layer written otherwise, and what the pass makes of it."""

from __future__ import annotations

import pytest
import torch
from plain_layers import make_inputs, plain_step
from rewriting import DROPS_ROUND_TRIPS, assert_within_budget, copied, run_rewritten
from torch.utils import _pytree as pytree


class Layouts(dict):
    """``(form, function, inputs)`` by name; ``form`` is "commit", "recover", or None where it may be refused."""

    def case(self, form: str | None, inputs=make_inputs):
        def add(fn):
            self[fn.__name__] = (form, fn, inputs)
            return fn

        return add

    def parameters(self) -> list[tuple[str, bool]]:
        """Dynamic tracing is slow, and sizes that coincide matter most there."""
        return [(name, False) for name in self] + [(name, True) for name in list(self)[::4]]


def run_window(S, q, k, v, g, beta, order=None, stack_dim=1):
    outs, states = [], []
    for t in order or range(q.shape[1]):
        S, o = plain_step(S, q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t])
        outs.append(o)
        states.append(S)
    return torch.stack(outs, 1), torch.stack(states, stack_dim)


def check_layout(form, fn, inputs, dynamic) -> None:
    args = inputs()
    eager_args, oracle_args = copied(args), copied(args)
    result, seen = run_rewritten(fn, *args, dynamic=dynamic)
    rounds = fn.__name__ in ("rounded_twice_before_the_write", "states_rounded_into_the_stack")
    if rounds and not seen.rounds:
        pytest.skip(DROPS_ROUND_TRIPS)
    eager = fn(*eager_args)
    oracle_args = [x.double() if x.is_floating_point() else x for x in oracle_args]
    oracle = fn(*oracle_args)
    trees = ((result, args[0]), (eager, eager_args[0]), (oracle, oracle_args[0]))
    for x, y, z in zip(*map(pytree.tree_leaves, trees), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        # What was rounded on its way may be rounded to either neighbour.
        assert_within_budget(x.bfloat16() if rounds else x, y, z, fn.__name__)
    if form is not None:
        assert [(layer.reason, layer.form) for layer in seen.report.layers] == [(None, form)]


def kind(value: object) -> str:
    return {False: "static", True: "dynamic"}.get(value, value)
