"""What a corpus of look-alikes is made of: a layer that must be refused, the reason, and its inputs.

Every case is the layer of :func:`plain_layers.layer` with one thing changed. A wrong rewrite would compute the unchanged layer.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from plain_layers import layer, make_inputs, plain_step
from rewriting import DROPS_ROUND_TRIPS, copied, run_rewritten
from torch import testing
from torch.utils import _pytree as pytree


class Corpus(dict):
    """``(reason, function, inputs)`` by name."""

    def case(self, reason: str, inputs: Callable = make_inputs, **around):
        """A step that must be refused for ``reason``; ``around`` changes the layer outside the step."""

        def add(step):
            self[step.__name__] = (reason, layer(step, **around), inputs)
            return step

        return add

    def after(
        self, name: str, reason: str, inputs: Callable = make_inputs, step: Callable = plain_step, **around
    ) -> None:
        self[name] = (reason, layer(step, **around), inputs)

    def whole(self, reason: str, inputs: Callable = make_inputs):
        """A function of all the inputs."""

        def add(function):
            self[function.__name__] = (reason, function, inputs)
            return function

        return add

    def parameters(self) -> list[tuple[str, bool]]:
        """Dynamic tracing is slow, and the reasons that depend on sizes are few: a quarter of the cases has to do."""
        return [(name, False) for name in self] + [(name, True) for name in list(self)[::4]]


def kind(value: object) -> str:
    return {False: "static", True: "dynamic"}.get(value, value)


def check_left_alone(reason: str, fn: Callable, inputs: Callable, dynamic: bool) -> None:
    args = inputs()
    expected_args = copied(args)
    result, seen = run_rewritten(fn, *args, dynamic=dynamic)
    if reason == "rounded_between_steps" and not seen.rounds:
        pytest.skip(DROPS_ROUND_TRIPS)
    expected = fn(*expected_args)
    # Where an output feeds the next token, the outputs are a chain of their own and reported as well.
    assert seen.report.matched == 0 and reason in [layer.reason for layer in seen.report.layers]
    assert seen.untouched
    for x, y in zip(*map(pytree.tree_leaves, ((result, args[0]), (expected, expected_args[0]))), strict=True):
        testing.assert_close(x, y)  # the very operations of the original, but for rounding of its decompositions
