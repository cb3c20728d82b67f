"""``explain`` says what would be rewritten, and changes nothing."""

import pytest
import torch
from rewriting import copied
from spellings import Spelling, Step, inputs
from torch.utils import _pytree as pytree

from compile_passes import REASONS, explain


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


class TwoLayers(torch.nn.Module):
    """Layers with a pool as buffer each, a graph break between them."""

    def __init__(self, broken: bool = True):
        super().__init__()
        self.layer, self.broken = Step(Spelling(T=2)), broken
        args = inputs(Spelling(T=2, layers=2))
        for i, pool in enumerate(args[0]):
            self.register_buffer(f"pool_{i}", pool)

    def forward(self, layers, slots, num_accepted):
        o = self.layer([self.pool_0], layers[:1], slots, num_accepted)
        if self.broken:
            torch._dynamo.graph_break()
        return self.layer([self.pool_1], [{**layers[1], "v": o}], slots, num_accepted)


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(*map(pytree.tree_leaves, (a, b)), strict=True))


def test_inputs_buffers_and_pools_keep_their_values():
    args = inputs(Spelling(T=2, layers=2))
    before = copied(args)
    assert explain(Step(Spelling(T=2, layers=2)), *args).matched == 2
    assert same(args, before)

    model, rest = TwoLayers(), args[1:]
    buffers, before = copied(dict(model.named_buffers())), copied(rest)
    assert explain(model, *rest).matched == 2
    assert same(dict(model.named_buffers()), buffers) and same(rest, before)


def test_layers_of_several_graphs_are_reported_in_order():
    report = explain(TwoLayers(), *inputs(Spelling(T=2, layers=2))[1:])
    assert [(layer.matched, layer.form) for layer in report.layers] == [(True, "commit")] * 2


def test_many_explanations_of_one_function_all_explain():
    """Dynamo gives up compiling a function after eight variants and runs it: that would write the pools."""
    args = inputs(Spelling(T=2))
    step = Step(Spelling(T=2))
    before = copied(args)
    for _ in range(12):
        assert explain(step, *args).matched == 1
        assert explain(step.forward, *args).matched == 1
    assert same(args, before)


def test_explaining_does_not_use_up_the_compilations_of_the_function():
    args = inputs(Spelling(T=2))
    step = Step(Spelling(T=2))
    for _ in range(9):
        explain(step, *args)
    compiled = torch.compile(step, backend="eager")
    with torch._dynamo.config.patch(error_on_recompile=True, fail_on_recompile_limit_hit=True), torch.no_grad():
        compiled(*args)


def test_explaining_a_broken_graph_leaves_pools_alone_every_time():
    model, rest = TwoLayers(), inputs(Spelling(T=2, layers=2))[1:]
    buffers = copied(dict(model.named_buffers()))
    for _ in range(10):
        assert explain(model, *rest).matched == 2
    assert same(dict(model.named_buffers()), buffers)


def test_report_has_a_row_for_every_layer():
    def step(states, layers, slots, num_accepted):
        first = Step(Spelling(T=2))(states[:1], layers[:1], slots, num_accepted)
        return first, Step(Spelling(T=2, contraction="matmul"))(states[1:], layers[1:], slots, num_accepted)

    args = inputs(Spelling(T=2, layers=2))
    report = explain(step, *args)
    lines = str(report).splitlines()
    assert lines[0].split() == ["layer", "result", "states", "before", "after", "source"]
    for number, (line, layer) in enumerate(zip(lines[2:4], report.layers, strict=True)):
        assert line.startswith(f"{number}  ") and "rewritten (commit)" in line and "spellings.py:" in line
        states = 3 * 2 * 2 * 6 * 8 * 4  # B T H V K float32
        record = 3 * 2 * 2 * 6 * 4  # B T HV V float32
        assert (layer.state_bytes_before, layer.state_bytes_after) == (states, record)
        assert "2.2 KiB" in line and "288 B" in line
    assert lines[-1] == "2 rewritten, 0 refused; states after every position 4.5 KiB -> 576 B"


def test_report_says_why_not_and_what_to_do():
    s = Spelling(T=2)

    def step(states, layers, slots, num_accepted):
        o, window_states = window(states[0][slots], layers[0])
        states[0][slots] = window_states[torch.arange(s.B), num_accepted - 1]
        return o, window_states[:, 0].sum()

    def window(S, layer):
        from spellings import _window

        _, states = _window(s, layer, layer["v"], S, torch.float32)
        return layer["q"], torch.stack(states[1:], 1)

    report = explain(step, *inputs(s))
    assert (report.matched, report.refused) == (0, 1)
    text = str(report)
    assert "refused: state_escapes" in text and REASONS["state_escapes"] in text
    assert "0 rewritten, 1 refused" in text


def test_report_of_a_model_without_windows():
    report = explain(lambda x: x.relu() @ x.T, torch.randn(3, 4))
    assert (report.layers, report.matched, report.refused) == ([], 0, 0)
    assert "no per-position states found" in str(report)


def test_a_function_that_cannot_be_traced_raises():
    def broken(x):
        return torch.nn.functional.linear(x, torch.zeros(3, 5))

    with pytest.raises(Exception, match=r"shapes|size|mat1"):
        explain(broken, torch.randn(2, 4))
