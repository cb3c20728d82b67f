"""Linear attention of flash-linear-attention and transformers is rewritten as it was published (tests/third_party.py)."""

import pytest
import torch
from budget import assert_within_budget
from rewriting import copied, run_rewritten, verify_calls
from third_party import BATCH, CHUNKED, KEY_DIM, LAYOUTS, RECURRENT, SLOTS, exact_step, pool_of, step_of

SHAPES = {"static": False, "batch_dynamic": None, "all_dynamic": True}
# In place where the pool is laid out as the operators have it.
FORMS = {"key_first": "recover", "value_first": "commit"}


def arguments(published, layout, T=3, batch=BATCH, dtype=torch.float32, shapes="static"):
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(2))[:batch]
    rows = [slots, torch.arange(batch) % T + 1, *(x[:batch] for x in published.window(T, dtype=dtype))]
    if shapes == "batch_dynamic":
        for x in rows:
            torch._dynamo.mark_dynamic(x, 0)
    return [pool_of(published.value_heads, layout), *rows]


def check(published, layout, shapes, dtype=torch.float32):
    step, args = step_of(published, layout), arguments(published, layout, dtype=dtype, shapes=shapes)
    eager_args, exact_args = copied(args), copied(args)
    result, seen = run_rewritten(step, *args, dynamic=SHAPES[shapes])
    assert [(layer.reason, layer.form) for layer in seen.report.layers] == [(None, FORMS[layout])]
    assert len(verify_calls(seen.graph)) == 1
    eager, (exact, exact_pool) = step(*eager_args), exact_step(published, layout, *exact_args)
    assert result.dtype == eager.dtype
    assert_within_budget(result, exact, eager, name="outputs")
    assert_within_budget(args[0], exact_pool, eager_args[0], name="pool")
    return seen


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_function_is_rewritten(name):
    seen = check(RECURRENT[name], "key_first", "static")
    (call,) = verify_calls(seen.graph)
    assert call["use_qk_l2norm_in_kernel"] is bool(RECURRENT[name].options)
    assert call["scale"] == pytest.approx(KEY_DIM**-0.5)


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_function_with_a_dynamic_batch_is_rewritten(name):
    check(RECURRENT[name], "value_first", "batch_dynamic")


@pytest.mark.exhaustive
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_function_in_every_shape_mode(name, layout, shapes):
    """The rows of the table in docs/pass.md."""
    check(RECURRENT[name], layout, shapes)


@pytest.mark.parametrize("name", ["naive_recurrent_kda", "torch_recurrent_gated_delta_rule"])
def test_half_precision_inputs(name):
    check(RECURRENT[name], "value_first", "static", dtype=torch.bfloat16)


def test_chunked_function_is_refused():
    """It solves a triangular system a call: no token's update is in sight."""
    args = arguments(CHUNKED, "value_first", T=2)
    expected_args, step = copied(args), step_of(CHUNKED, "value_first")
    result, seen = run_rewritten(step, *args)
    # Where the system is solved row by row in place, its rows are a chain too.
    assert "non_uniform_step" in [layer.reason for layer in seen.report.layers]
    assert seen.report.matched == 0 and seen.untouched
    torch.testing.assert_close((result, args[0]), (step(*expected_args), expected_args[0]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", RECURRENT)
def test_compiled_to_kernels(name):
    """The whole way, Inductor's code included, at two batch sizes."""
    published = RECURRENT[name]
    step = step_of(published, "value_first")
    torch._dynamo.reset()
    compiled = torch.compile(step, backend="recoverssm", dynamic=True)
    for batch in (3, 2):
        args = arguments(published, "value_first", batch=batch)
        eager_args, exact_args = copied(args), copied(args)
        with torch.no_grad():
            result = compiled(*args)
        eager, (exact, exact_pool) = step(*eager_args), exact_step(published, "value_first", *exact_args)
        assert_within_budget(result, exact, eager, name="outputs")
        assert_within_budget(args[0], exact_pool, eager_args[0], name="pool")
