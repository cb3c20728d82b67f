"""The rewrite of an exported program's graph: the same functional ATen, without Inductor's epilogue of ``copy_``."""

import pytest
import torch
from rewriting import assert_within_budget, copied
from spellings import Spelling, Step, inputs
from torch.fx import Interpreter
from torch.utils import _pytree as pytree

import recoverssm_ops.ops as ops
from compile_passes import rewrite


def exported(s: Spelling, dynamic: bool):
    args = inputs(s)
    shapes = None
    if dynamic:
        batch = torch.export.Dim("batch", min=2, max=16)
        per_row = {name: {0: batch} for name in ("q", "k", "v", "g", "beta")}
        layers = [{**per_row, "A_log": None, "dt_bias": None}] * s.layers
        states = [{0: batch} if s.checkpoint != "pool" else None] * s.layers
        shapes = (states, layers, {0: batch} if s.checkpoint == "pool" else None, {0: batch})
    with torch.no_grad():
        program = torch.export.export(Step(s), args, dynamic_shapes=shapes, strict=False)
        return program.run_decompositions(), args


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("checkpoint", ["pool", "buffer", "functional"])
@pytest.mark.parametrize("contraction", ["mul", "einsum", "matmul"])
def test_exported_graph_is_rewritten_in_place(contraction, checkpoint, dynamic):
    s = Spelling(T=2, contraction=contraction, checkpoint=checkpoint, layers=2)
    program, args = exported(s, dynamic)
    report = rewrite(program.graph)
    form = "recover" if checkpoint == "functional" else "commit"
    assert [(layer.reason, layer.form) for layer in report.layers] == [(None, form)] * 2
    assert len(program.graph.find_nodes(op="call_function", target=ops.kda_verify)) == 2
    program.graph_module.recompile()

    # The interpreter returns what the signature calls mutated inputs first, then the results.
    flat = pytree.tree_leaves(args)
    expected_args, oracle_args = copied(args), copied(args)
    results = Interpreter(program.graph_module).run(*copied(flat))
    expected, oracle = Step(s)(*expected_args), Step(s, torch.float64)(*oracle_args)
    if checkpoint != "functional":
        expected, oracle = [*expected_args[0], expected], [*oracle_args[0], oracle]
    for x, y, z in zip(*map(pytree.tree_leaves, (results, expected, oracle)), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        assert_within_budget(x, y, z, "result")


def test_outputs_that_are_viewed_as_one_axis():
    """A token's output was dense, and becomes a slice of the window's: ``view`` must not fail on it."""
    from plain_layers import make_inputs, plain_step, select

    class Flattened(torch.nn.Module):
        def forward(self, pool, slots, q, k, v, g, beta, n):
            S, outs, states = pool[slots], [], []
            for t in range(q.shape[1]):
                S, o = plain_step(S, q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t])
                outs.append(o.transpose(0, 1).transpose(0, 1).view(-1, o.shape[-1]))
                states.append(S)
            return torch.cat(outs), select(torch.stack(states, 1), n)

    args = make_inputs()
    with torch.no_grad():
        program = torch.export.export(Flattened(), args, strict=False).run_decompositions()
    assert rewrite(program.graph).matched == 1
    program.graph_module.recompile()
    torch.testing.assert_close(tuple(Interpreter(program.graph_module).run(*args)), Flattened()(*args))


def test_program_with_a_rewritten_graph_runs_as_a_module():
    """Names of inputs and outputs stay in step with the program's signature."""
    s = Spelling(T=2, checkpoint="pool", preprocessing="step")
    program, args = exported(s, dynamic=False)
    with program.graph_module._set_replace_hook(program.graph_signature.get_replace_hook()):
        rewrite(program.graph)
    program.graph_module.recompile()
    expected_args = copied(args)
    result = program.module()(*args)
    torch.testing.assert_close((result, args[0]), (Step(s)(*expected_args), expected_args[0]))


def test_graph_without_fake_values_is_refused_with_a_remedy():
    graph = torch.fx.symbolic_trace(lambda x: torch.ops.aten.cat.default([x, x + 1], 0)).graph
    with pytest.raises(ValueError, match="fake values"):
        rewrite(graph)
