"""``split_step``: acceptance is decided outside, and records cross between the halves in place of states."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rewriting import assert_within_budget, copied
from spellings import Spelling, _select, inputs
from split_halves import crossing, halves, window
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import recoverssm_ops.ops as ops
from compile_passes import split_step
from compile_passes.splitting.recorded_states import RecordedStates


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


SPELLINGS = [
    Spelling(),
    Spelling(layers=2, contraction="matmul", selection="gather"),
    Spelling(layers=2, contraction="einsum", checkpoint="functional"),
    Spelling(pool_dtype=torch.bfloat16, dtype=torch.bfloat16, gate="unbounded", layers=2),
    Spelling(gate="scalar", beta="doubled", T=2),
    Spelling(gate="none", l2norm="none", beta="raw"),
    Spelling(preprocessing="step", l2norm="normalize", gate="precomputed", selection="index_select"),
    Spelling(B=1, H=1, T=2),
    Spelling(T=8, stacking="cat", contraction="einsum"),
    Spelling(T=2, stacking="slices"),
]


@pytest.mark.parametrize("s", SPELLINGS, ids=str)
def test_several_steps_equal_the_plain_halves(s):
    verify, commit = split = split_step(*halves(s), backend=None)
    states, *_ = inputs(s)
    plain_states, exact_states = copied(states), [x.double() for x in states]
    for step in range(3):
        _, layers, slots, n = inputs(s, seed=step)
        o, kept = verify(states, layers, slots)
        recorded = step > 0
        assert all(isinstance(x, RecordedStates) == recorded for x in kept)
        result = commit(kept, n, states, slots)
        if recorded:
            per_position = s.layers * s.B * s.T * s.H * s.V * s.K
            assert sum(x.numel() for x in crossing(kept) if x.ndim == 5) == 0 < per_position
        runs = []
        for own, compute in ((plain_states, torch.float32), (exact_states, torch.float64)):
            plain_verify, plain_commit = halves(s, compute)
            plain_o, window_states = plain_verify(own, layers, slots)
            runs.append((plain_o, plain_commit(window_states, n, own, slots), own))
        for x, y, z in zip(*map(pytree.tree_leaves, ((o, result, states), *runs)), strict=True):
            assert x.dtype == y.dtype and x.shape == y.shape
            assert_within_budget(x, y, z, f"step {step}")
        if s.checkpoint == "functional":
            states, plain_states, exact_states = result, runs[0][1], runs[1][1]
    assert split.report.matched == s.layers and split.report.refused == 0
    form = "recover" if s.checkpoint == "functional" else "commit"
    assert {layer.form for layer in split.report.layers} == {form}
    assert split.report.layers[0].source.startswith("split_halves.py:"), "the caller's line, not ours"


def test_the_pool_is_committed_in_place_by_the_operator():
    s = Spelling(layers=2)
    split = split_step(*halves(s), backend=None)
    states, layers, slots, n = inputs(s)
    split.prepare((states, layers, slots), (n, states, slots))
    first, second = (half.module.graph for half in split._graphs[0].halves)
    assert len(first.find_nodes(op="call_function", target=ops.kda_verify)) == 2
    commits = second.find_nodes(op="call_function", target=ops.kda_commit)
    assert len(commits) == 2 and all(node.args[0].op == "placeholder" for node in commits)
    assert not second.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    assert not second.find_nodes(op="call_function", target=torch.ops.aten.clone.default)


def test_prepare_runs_nothing_and_the_first_step_has_records():
    s = Spelling()
    split = split_step(*halves(s), backend=None)
    args = inputs(s)
    before = copied(args)
    report = split.prepare(args[:2] + args[2:3], (args[3], args[0], args[2]))
    assert report.matched == 1
    for x, y in zip(*map(pytree.tree_leaves, (args, before)), strict=True):
        assert torch.equal(x, y)
    assert isinstance(split.verify(*args[:3])[1][0], RecordedStates)


@pytest.mark.parametrize("checkpoint", ["pool", "functional"])
def test_dynamic_batch_takes_one_graph_and_static_ones_one_each(checkpoint):
    graphs = {}
    for dynamic in (True, False):
        s = Spelling(T=2, layers=2, checkpoint=checkpoint)
        split = split_step(*halves(s), backend=None, dynamic=dynamic)
        for batch in (3, 2, 5, 3):
            s = replace(s, B=batch)
            states, layers, slots, n = inputs(s, seed=batch)
            plain = copied(states)
            o, kept = split.verify(states, layers, slots)
            assert kept[0].shape == (batch, s.T, s.H, s.V, s.K) and kept[0].device == states[0].device
            result = split.commit(kept, n, states, slots)
            plain_verify, plain_commit = halves(s)
            plain_o, window_states = plain_verify(plain, layers, slots)
            torch.testing.assert_close(
                (o, result, states), (plain_o, plain_commit(window_states, n, plain, slots), plain)
            )
        graphs[dynamic] = len(split._graphs)
    assert graphs == {True: 1, False: 3}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_halves(dynamic, device):
    s = Spelling(T=2, gate="precomputed", l2norm="none", beta="raw")
    split = split_step(*halves(s), dynamic=dynamic)
    states, *_ = inputs(s, device=device)
    plain, address = copied(states), states[0].data_ptr()
    for step in range(3):
        _, layers, slots, n = inputs(s, seed=step, device=device)
        o, kept = split.verify(states, layers, slots)
        split.commit(kept, n, states, slots)
        plain_verify, plain_commit = halves(s)
        plain_o, window_states = plain_verify(plain, layers, slots)
        plain_commit(window_states, n, plain, slots)
        torch.testing.assert_close((o, states), (plain_o, plain))
    assert isinstance(kept[0], RecordedStates) and states[0].data_ptr() == address


class Engine(nn.Module):
    """Pools and weights of one module, whose methods are the halves; verify also writes a cache of its own."""

    def __init__(self, s: Spelling):
        super().__init__()
        self.s, (states, layers, *_) = s, inputs(s)
        self.register_buffer("pool", states[0])
        self.register_buffer("seen", torch.zeros(s.B))
        self.scale = nn.Parameter(torch.tensor(0.5), requires_grad=False)
        self.layers = layers

    def verify(self, v, slots):
        self.seen.add_(1)
        layer = {**self.layers[0], "v": v * self.scale}
        o, states = window(self.s, layer, layer["v"], self.pool[slots], torch.float32)
        return {"o": o, "length": self.s.T}, states

    def commit(self, states, num_accepted, slots):
        self.pool[slots] = _select(self.s, states, num_accepted)
        return num_accepted * 2


def test_methods_of_a_module_with_pools_as_buffers():
    s = Spelling(T=2)
    engine, plain = Engine(s), Engine(s)
    verify, commit = split = split_step(engine.verify, engine.commit, backend=None)
    for step in range(3):
        _, layers, slots, n = inputs(s, seed=step)
        engine.scale.data.fill_(0.1 * step)
        plain.scale.data.fill_(0.1 * step)
        outputs, states = verify(layers[0]["v"], slots)
        plain_outputs, plain_states = plain.verify(layers[0]["v"], slots)
        assert torch.equal(engine.seen, plain.seen), "written by the half that writes it"
        assert outputs["length"] == s.T
        result, plain_result = commit(states, n, slots), plain.commit(plain_states, n, slots)
        torch.testing.assert_close((outputs, result, engine.pool), (plain_outputs, plain_result, plain.pool))
    assert isinstance(states, RecordedStates) and split.report.layers[0].form == "commit"


def test_exported_programs():
    s = Spelling(T=2, layers=2)
    functions = halves(s)
    args = inputs(s)

    class Half(nn.Module):
        def __init__(self, function):
            super().__init__()
            self.function = function

        def forward(self, *args):
            return self.function(*args)

    with torch.no_grad():
        verify = torch.export.export(Half(functions[0]), args[:3], strict=False)
        commit_args = (functions[0](*args[:3])[1], args[3], args[0], args[2])
        commit = torch.export.export(Half(functions[1]), commit_args, strict=False)
    split = split_step(verify, commit, backend=None)
    states, plain = inputs(s)[0], inputs(s)[0]
    for step in range(2):
        _, layers, slots, n = inputs(s, seed=step)
        o, kept = split.verify(states, layers, slots)
        split.commit(kept, n, states, slots)
        plain_o, window_states = functions[0](plain, layers, slots)
        functions[1](window_states, n, plain, slots)
        torch.testing.assert_close((o, states), (plain_o, plain))
    assert isinstance(kept[0], RecordedStates) and split.report.matched == 2
    with pytest.raises(TypeError, match="two ExportedPrograms"):
        split_step(verify, functions[1])


@pytest.mark.parametrize("order", ["token_first", "transposed"])
def test_other_layouts(order):
    """[T, B, ..] and states stored K before V."""
    s = Spelling(T=3)

    def verify(pool, layer, slots):
        S = pool[slots] if order == "token_first" else pool[slots].transpose(-1, -2)
        o, states = window(s, layer, layer["v"], S, torch.float32)
        return o, states.transpose(0, 1) if order == "token_first" else states.transpose(-1, -2)

    def commit(states, n, pool, slots):
        rows = torch.arange(n.shape[0])
        pool[slots] = states[n - 1, rows] if order == "token_first" else states[rows, n - 1]

    states, layers, slots, n = inputs(s)
    pool = states[0] if order == "token_first" else states[0].transpose(-1, -2).contiguous()
    plain = pool.clone()
    split = split_step(verify, commit, backend=None)
    split.prepare((pool, layers[0], slots), (n, pool, slots))
    o, kept = split.verify(pool, layers[0], slots)
    plain_o, window_states = verify(plain, layers[0], slots)
    assert kept.shape == window_states.shape
    index = (n - 1, torch.arange(s.B)) if order == "token_first" else (torch.arange(s.B), n - 1)
    torch.testing.assert_close(kept[index], window_states[index])
    split.commit(kept, n, pool, slots)
    commit(window_states, n, plain, slots)
    torch.testing.assert_close((o, pool), (plain_o, plain))


# --- left as they are ---------------------------------------------------------------------------------------------------


def run_plainly(verify, commit, caplog, reason: str):
    s = Spelling()
    split = split_step(verify, commit, backend=None)
    states, plain = inputs(s)[0], inputs(s)[0]
    for step in range(3):
        _, layers, slots, n = inputs(s, seed=step)
        outputs, kept = split.verify(states, layers, slots)
        result = split.commit(kept, n, states, slots)
        plain_outputs, window_states = verify(plain, layers, slots)
        plain_result = commit(window_states, n, plain, slots)
        assert all(isinstance(x, Tensor) for x in kept)
        pairs = ((outputs, result, states), (plain_outputs, plain_result, plain))
        assert all(torch.equal(x, y) for x, y in zip(*map(pytree.tree_leaves, pairs), strict=True))
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING" and r.name == "compile_passes"]
    assert len(warnings) == 1 and reason in warnings[0] and len(split._graphs) == 1
    return split


def test_a_refused_layer_leaves_both_halves_as_they_were(caplog):
    verify, commit = halves(Spelling())

    def escaping(states, layers, slots):
        o, kept = verify(states, layers, slots)
        return (o, kept[0].norm()), kept

    split = run_plainly(escaping, commit, caplog, "state_escapes")
    assert [layer.reason for layer in split.report.layers] == ["state_escapes"]


def test_one_refused_layer_of_two_leaves_everything(caplog):
    s = Spelling(layers=2)
    verify, commit = halves(s)

    def mean(kept, n, states, slots):
        commit([kept[0], kept[0]], n, [states[0], states[0].clone()], slots)
        return kept[1].mean()

    split = split_step(verify, mean, backend=None)
    states, layers, slots, n = inputs(s)
    _, kept = split.verify(states, layers, slots)
    split.commit(kept, n, states, slots)
    assert all(isinstance(x, Tensor) for x in split.verify(states, layers, slots)[1])
    assert split.report.refused == 2 and "leaves both halves" in caplog.text


def test_an_input_that_both_halves_write(caplog):
    verify, commit = halves(Spelling())

    def writing(states, layers, slots):
        result = verify(states, layers, slots)
        states[0].mul_(1)
        return result

    run_plainly(writing, commit, caplog, "written by both halves")


def test_states_that_are_no_window(caplog):
    run_plainly(
        lambda states, layers, slots: (slots + 1, [states[0] * 2]),
        lambda kept, n, states, slots: kept[0].sum(),
        caplog,
        "not those of a window",
    )


@pytest.mark.parametrize("returned", [3, (1, 2, 3), (torch.ones(2), []), (torch.ones(2), [None])], ids=str)
def test_a_verify_half_that_returns_something_else(returned):
    with pytest.raises(TypeError, match="split_step: the"):
        split_step(lambda x: returned, lambda states: states).verify(torch.ones(2))


def test_two_steps_under_way_at_once():
    """Verified A and B, then committed A: the trace must not join B's arguments with A's commit."""
    s = Spelling()
    split = split_step(*halves(s), backend=None)
    a, b = inputs(s, seed=1), inputs(replace(s, B=2), seed=2)
    (_, kept_a), (_, kept_b) = split.verify(*a[:3]), split.verify(*b[:3])
    split.commit(kept_a, a[3], a[0], a[2])
    assert split._graphs == []
    split.commit(kept_b, b[3], b[0], b[2])
    assert len(split._graphs) == 1


def test_the_example_of_the_documentation(capsys):
    text = (Path(__file__).resolve().parent.parent / "docs" / "split_step.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(example, {})
    printed = capsys.readouterr().out
    assert "rewritten (commit)" in printed and "RecordedStates(shape=(3, 4, 2, 6, 8)" in printed
