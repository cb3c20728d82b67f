"""One graph serves every acceptance, and two serve every batch size."""

import pytest
import torch
from rewriting import compile_rewritten, copied
from spellings import Spelling, Step, inputs


@pytest.mark.parametrize("selection", ["index", "gather", "index_select"])
@pytest.mark.parametrize("checkpoint", ["pool", "functional"])
def test_b25_acceptance_compiles_nothing_new(selection, checkpoint):
    s = Spelling(T=3, selection=selection, checkpoint=checkpoint)
    torch._dynamo.reset()
    compiled, seen = compile_rewritten(Step(s))
    states, layers, slots, _ = inputs(s)
    expected_states = copied(states)
    for accepted in ((1, 1, 1), (3, 2, 1), (2, 3, 3), (3, 3, 3)):
        n = torch.tensor(accepted)
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=len(seen.graphs) > 0):
            result = compiled(states, layers, slots, n)
        expected = Step(s)(expected_states, layers, slots, n)
        torch.testing.assert_close((result, states), (expected, expected_states))
    assert [report.matched for report in seen.reports] == [1]


@pytest.mark.parametrize("selection", ["index", "gather"])
@pytest.mark.parametrize("checkpoint", ["pool", "functional"])
def test_b25_five_batch_sizes_take_two_graphs(selection, checkpoint):
    torch._dynamo.reset()
    compiled = seen = None
    for batch in (2, 1, 3, 5, 8):
        s = Spelling(T=2, B=batch, selection=selection, checkpoint=checkpoint)
        args = inputs(s)
        if checkpoint == "pool":
            args = ([torch.randn(9, s.H, s.V, s.K)], args[1], torch.randperm(9)[:batch], args[3])
        if compiled is None:
            compiled, seen = compile_rewritten(Step(s))
        if batch > 1:
            batched = [*args[1][0].values()][:5] + [*args[2:]] + (args[0] if checkpoint == "functional" else [])
            for x in batched:
                torch._dynamo.mark_dynamic(x, 0)
        expected_args = copied(args)
        with torch.no_grad():
            result = compiled(*args)
        torch.testing.assert_close((result, args[0]), (Step(s)(*expected_args), expected_args[0]))
    assert [report.matched for report in seen.reports] == [1, 1]


def test_positions_of_fewer_rows_than_the_batch_are_not_taken_for_all():
    """Under ``gather`` the positions may be fewer; a graph for as many is guarded, and the other one is left alone."""
    s = Spelling(T=2, B=3, selection="gather", checkpoint="functional", shapes="batch_dynamic")
    states, layers, slots, n = inputs(s)
    torch._dynamo.reset()
    compiled, seen = compile_rewritten(Step(s))
    for positions in (n, n[:2].clone()):
        torch._dynamo.mark_dynamic(positions, 0)
        with torch.no_grad():
            result = compiled(states, layers, slots, positions)
        torch.testing.assert_close(result, Step(s)(states, layers, slots, positions))
    assert [report.matched for report in seen.reports] == [1, 0]
