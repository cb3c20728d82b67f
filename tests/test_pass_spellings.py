"""Every way to write the layer is found, and the rewritten graph computes what the original does."""

import pytest
import torch
from rewriting import assert_within_budget, copied, run_rewritten, verify_calls
from spellings import CHOICES, Spelling, Step, covering_sample, inputs, possible
from torch.utils import _pytree as pytree

SAMPLE = covering_sample(44)
PARTICULAR = [
    Spelling(T=16),
    Spelling(T=16, contraction="einsum", checkpoint="functional"),
    Spelling(T=8, shapes="batch_dynamic"),
    Spelling(layers=3),
    Spelling(H=3, K=6, V=6),  # heads like rows, square states
    Spelling(H=3, K=3, V=3, contraction="matmul", shapes="all_dynamic"),
    Spelling(H=1, B=1),
    Spelling(H=1, B=1, T=2, checkpoint="functional", contraction="einsum"),
    Spelling(B=1, selection="index_select", checkpoint="buffer"),
    Spelling(H=1, contraction="matmul", shapes="batch_dynamic"),
]


def check(s: Spelling) -> None:
    dynamic = {"static": False, "batch_dynamic": None, "all_dynamic": True}[s.shapes]
    args = inputs(s)
    eager_args, oracle_args = copied(args), copied(args)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        result, seen = run_rewritten(Step(s), *args, dynamic=dynamic)
    eager, oracle = Step(s)(*eager_args), Step(s, torch.float64)(*oracle_args)

    layers = seen.report.layers
    assert [layer.reason for layer in layers] == [None] * s.layers
    assert [layer.form for layer in layers] == [s.form] * s.layers
    found = verify_calls(seen.graph)
    assert len(found) == (0 if s.update == "none" else s.layers)
    for call in found:
        assert {flag: call[flag] for flag in s.flags} == s.flags
    for kind, actual, expected, exact in (
        ("result", result, eager, oracle),
        ("states", args[0], eager_args[0], oracle_args[0]),
    ):
        for x, y, z in zip(*map(pytree.tree_leaves, (actual, expected, exact)), strict=True):
            assert x.dtype == y.dtype and x.shape == y.shape
            assert_within_budget(x, y, z, kind)


@pytest.mark.parametrize("spelling", SAMPLE, ids=str)
def test_b29_spelling_is_rewritten(spelling):
    check(spelling)


@pytest.mark.parametrize("spelling", PARTICULAR, ids=str)
def test_particular_shapes(spelling):
    check(spelling)


ALTERNATIVES = (
    "update",
    "layout",
    "stacking",
    "selection",
    "outputs",
    "projection",
    "gate",
    "l2norm",
    "beta",
    "checkpoint",
)
CHANGES = [
    {name: choice, "shapes": shapes}
    for name in ALTERNATIVES
    for choice in CHOICES[name]
    for shapes in CHOICES["shapes"]
]
EACH = [possible(Spelling(T=2, **change)) for change in CHANGES]


@pytest.mark.exhaustive
@pytest.mark.parametrize("spelling", dict.fromkeys(EACH), ids=str)
def test_every_choice_in_every_shape_mode(spelling):
    """The rows of the table in docs/pass.md."""
    check(spelling)
