"""``export_step``: the programs compute what the step computes, in every form, whole and cut at acceptance."""

import copy

import pytest
import torch
from exporting import (
    SLOTS,
    assert_same_step,
    export_small,
    named_inputs,
    pools_of,
    run_eagerly,
    run_program,
    small_step,
    step_inputs,
)
from spellings import Spelling, Step, inputs
from torch.utils import _pytree as pytree

import recoverssm_ops as rs
from compile_passes import export_step
from compile_passes.exporting.forms import OPERATORS
from compile_passes.exporting.graph import ExportError
from compile_passes.exporting.step import NotRewrittenError
from models.memory import peak_allocation

FORMS = {
    "in place": {},
    "portable": {"portable": True},
    "functional": {"functional": True},
    "functional, portable": {"functional": True, "portable": True},
}


@pytest.mark.parametrize(
    ("form", "dynamic"),
    [
        ("in place", False),
        ("in place", True),
        ("portable", True),
        ("functional", False),
        ("functional, portable", True),
    ],
)
def test_every_form_equals_the_step(form, dynamic):
    step, options = small_step(), FORMS[form]
    before = pools_of(step)
    exported = export_small(step, dynamic=dynamic, **options)
    assert exported.report.matched == 1 and exported.manifest.uncut is None
    for batch in (2, 7) if dynamic else (3,):
        given = step_inputs(batch, seed=batch)
        expected, pools_after = run_eagerly(small_step(), given)
        assert len(expected[1].unique()) == min(batch, 4)  # every number of accepted tokens
        values = named_inputs(exported, given) | {name: pool.clone() for name, pool in before.items()}

        if options.get("functional"):
            pools = run_program(exported, "step", values)
            results = [pools.pop("result_0"), pools.pop("result_1")]
        else:
            module = exported.step.module()
            pools = {name: module.get_buffer(name) for name in before}
            for name, pool in before.items():
                pools[name].copy_(pool)
            results = module(*given)
        assert_same_step(results, pools, expected, pools_after)

        halves = run_program(exported, "verify", values)
        assert all(torch.equal(values[name], before[name]) for name in before)
        committed = run_program(exported, "commit", values | halves | {"num_accepted": halves["result_1"]})
        pools = committed if options.get("functional") else {name: values[name] for name in before}
        assert_same_step([halves["result_0"], halves["result_1"]], pools, expected, pools_after)


def test_portable_programs_hold_no_operator_of_ours():
    exported = export_small(small_step(), portable=True)
    for name in ("step", "verify", "commit"):
        targets = {node.target for node in getattr(exported, name).graph.nodes}
        assert not targets & set(OPERATORS), name
        assert not any("recoverssm" in str(target) for target in targets)
    assert exported.manifest.operators == "portable"


def test_a_window_may_be_committed_in_part_or_not_at_all():
    """The commit half takes the runtime's own count: pools after 2 tokens, whatever the model accepted."""
    step = small_step()
    before = pools_of(step)
    exported = export_small(step)
    given = step_inputs()
    values = named_inputs(exported, given) | {name: pool.clone() for name, pool in before.items()}
    halves = run_program(exported, "verify", values)
    run_program(exported, "commit", values | halves | {"num_accepted": torch.full((3,), 2)})
    forced = (given[0], torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.int64), *given[3:])
    _, expected = run_eagerly(small_step(), forced)
    assert_same_step([], {name: values[name] for name in before}, [], expected)


def plain_function(pool, slots, q, k, v, g, beta, num_accepted):
    S, outputs, states = pool[slots], [], []
    for t in range(q.shape[1]):
        S = S * g[:, t].exp().unsqueeze(-2)
        u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhvk,bhk->bhv", S, k[:, t]))
        S = S + u.unsqueeze(-1) * k[:, t].unsqueeze(-2)
        outputs.append(torch.einsum("bhvk,bhk->bhv", S, q[:, t]))
        states.append(S)
    pool[slots] = torch.stack(states, 1)[torch.arange(q.shape[0]), num_accepted - 1]
    return torch.stack(outputs, 1)


def function_inputs(batch=3, slots=5, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(shape, generator=generator)

    pool = rand(slots, 2, 6, 8)
    keys = [rand(batch, 4, 2, 8), rand(batch, 4, 2, 8) / 4, rand(batch, 4, 2, 6)]
    gates = -rand(batch, 4, 2, 8).abs(), rand(batch, 4, 2).sigmoid()
    return pool, torch.randperm(slots, generator=generator)[:batch], *keys, *gates, torch.arange(batch) % 4 + 1


@pytest.mark.parametrize("portable", [False, True])
def test_a_pool_that_is_an_argument_and_acceptance_that_is_one(portable):
    """Nothing is returned but outputs; num_accepted arrives from outside, so verify does not ask for it."""
    given = function_inputs()
    exported = export_step(plain_function, copy.deepcopy(given), portable=portable)
    roles = {port["name"]: port["role"] for port in exported.manifest.programs["step"]["inputs"]}
    assert roles["pool"] == "pool" and roles["num_accepted"] == "num_accepted" and roles["q"] == "input"
    assert exported.manifest.pools == "inputs"
    verify_inputs = {port["name"] for port in exported.manifest.programs["verify"]["inputs"]}
    assert "num_accepted" not in verify_inputs and "pool" in verify_inputs
    commit_inputs = [port["name"] for port in exported.manifest.programs["commit"]["inputs"]]
    assert commit_inputs[:2] == ["num_accepted", "slots"] and commit_inputs[-1] == "pool"

    expected_pool = given[0].clone()
    expected = plain_function(expected_pool, *given[1:])
    pool, *rest = copy.deepcopy(given)
    (o,) = exported.step.module()(*rest, pool)
    torch.testing.assert_close((o, pool), (expected, expected_pool))

    values = dict(zip(("slots", "q", "k", "v", "g", "beta", "num_accepted"), given[1:], strict=True))
    values["pool"] = given[0].clone()
    halves = run_program(exported, "verify", values)
    run_program(exported, "commit", values | halves)
    torch.testing.assert_close((halves["result_0"], values["pool"]), (expected, expected_pool))


@pytest.mark.parametrize(
    ("checkpoint", "pool_dtype"),
    [("pool", torch.float32), ("buffer", torch.float32), ("pool", torch.bfloat16)],
    ids=str,
)
def test_nested_arguments_and_two_layers(checkpoint, pool_dtype):
    s = Spelling(T=2, checkpoint=checkpoint, layers=2, pool_dtype=pool_dtype)
    given = inputs(s)
    exported = export_step(Step(s), copy.deepcopy(given))
    assert exported.report.matched == 2
    layers = {
        port["name"].split("_")[1]
        for port in exported.manifest.programs["verify"]["outputs"]
        if "record" in port["name"]
    }
    assert layers == {"0", "1"}
    expected_given = copy.deepcopy(given)
    expected = Step(s)(*expected_given)
    leaves = dict(zip(_leaf_names(exported), pytree.tree_leaves(copy.deepcopy(given)), strict=True))
    halves = run_program(exported, "verify", leaves)
    run_program(exported, "commit", leaves | halves)
    torch.testing.assert_close(halves["result_0"], expected, rtol=1e-4, atol=1e-5)
    for name, state in zip(("states_0", "states_1"), expected_given[0], strict=True):
        rounding = torch.finfo(pool_dtype).eps
        torch.testing.assert_close(leaves[name], state, rtol=max(1e-4, rounding), atol=max(1e-5, rounding / 4))


def _leaf_names(exported):
    """Names in the order of the arguments: states, then each layer's dictionary, slots and num_accepted."""
    names = [port["name"] for port in exported.manifest.programs["step"]["inputs"]]
    states = sorted(name for name in names if name.startswith("states"))
    return states + [name for name in names if not name.startswith("states")]


def test_a_pool_that_the_operators_cannot_update():
    """Stored transposed, the selected state is rebuilt and the step's own write stays; the checkpoint is no record."""

    def step(pool, slots, q, k, v, g, beta, num_accepted):
        S, outputs, states = pool[slots].transpose(-1, -2), [], []
        for t in range(q.shape[1]):
            S = S * g[:, t].exp().unsqueeze(-2)
            u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhvk,bhk->bhv", S, k[:, t]))
            S = S + u.unsqueeze(-1) * k[:, t].unsqueeze(-2)
            outputs.append(torch.einsum("bhvk,bhk->bhv", S, q[:, t]))
            states.append(S)
        selected = torch.stack(states, 1)[torch.arange(q.shape[0]), num_accepted - 1]
        pool[slots] = selected.transpose(-1, -2)
        return torch.stack(outputs, 1)

    pool, *rest = function_inputs()
    given = (pool.transpose(-1, -2).contiguous(), *rest)
    exported = export_step(step, copy.deepcopy(given))
    assert [layer.form for layer in exported.report.layers] == ["recover"]
    records = [port["name"] for port in exported.manifest.programs["commit"]["inputs"] if port["role"] == "record"]
    assert sorted(records) == ["record_0_u"]  # k and g are the step's own inputs
    expected_pool = given[0].clone()
    expected = step(expected_pool, *rest)
    values = dict(zip(("slots", "q", "k", "v", "g", "beta", "num_accepted"), rest, strict=True))
    values["pool"] = given[0].clone()
    halves = run_program(exported, "verify", values)
    run_program(exported, "commit", values | halves)
    torch.testing.assert_close((halves["result_0"], values["pool"]), (expected, expected_pool))


def test_slots_and_batch_may_be_dynamic_together():
    rows, slots = torch.export.Dim("rows", min=2, max=4), torch.export.Dim("slots", min=4, max=64)
    shapes = ({0: slots}, *[{0: rows}] * 7)
    exported = export_step(plain_function, function_inputs(), dynamic_shapes=shapes)
    assert sorted(exported.manifest.dims.values()) == [[2, 4], [4, 64]]
    for batch, size in ((2, 4), (4, 60)):
        given = function_inputs(batch, size)
        expected_pool, pool = given[0].clone(), given[0].clone()
        expected = plain_function(expected_pool, *given[1:])
        (o,) = exported.step.module()(*given[1:], pool)
        torch.testing.assert_close((o, pool), (expected, expected_pool))


def test_parameters_that_require_grad_leave_no_graph_behind():
    step = small_step().requires_grad_(True)
    module = export_small(step).step.module()
    module(*step_inputs())
    assert not any(buffer.requires_grad for buffer in module.buffers())


def test_a_functional_checkpoint_has_one_program():
    """The selected state is a result: nothing is committed, and a cut would leave one half empty."""
    s = Spelling(T=2, checkpoint="functional")
    exported = export_step(Step(s), inputs(s))
    assert exported.report.layers[0].form == "recover"
    with pytest.raises(ExportError, match="no pool"):
        _ = exported.commit
    results = exported.step.module()(*pytree.tree_leaves(inputs(s)))
    torch.testing.assert_close(results, tuple(pytree.tree_leaves(Step(s)(*inputs(s)))), rtol=1e-4, atol=1e-5)


def test_a_model_that_calls_the_operators_needs_no_rewrite():
    def step(pool, slots, q, k, v, g, beta, num_accepted):
        o, record = rs.kda_verify(q, k, v, g, beta, pool, slots, scale=1.0)
        rs.kda_commit(pool, record, num_accepted, slots)
        return o

    given = function_inputs()
    exported = export_step(step, copy.deepcopy(given), portable=True)
    assert exported.report.layers == [] and exported.manifest.window == 4
    expected_pool = given[0].clone()
    expected = plain_function(expected_pool, *given[1:])
    values = dict(zip(("slots", "q", "k", "v", "g", "beta", "num_accepted"), given[1:], strict=True))
    values |= {"pool": given[0].clone()}
    halves = run_program(exported, "verify", values)
    run_program(exported, "commit", values | halves)
    torch.testing.assert_close((halves["result_0"], values["pool"]), (expected, expected_pool))


def rounded(pool, slots, q, k, v, g, beta, num_accepted):
    """A near miss: every state is also summed up for the caller."""
    S, states = pool[slots], []
    for t in range(q.shape[1]):
        S = S * g[:, t].exp().unsqueeze(-2)
        u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhvk,bhk->bhv", S, k[:, t]))
        S = S + u.unsqueeze(-1) * k[:, t].unsqueeze(-2)
        states.append(S)
    states = torch.stack(states, 1)
    pool[slots] = states[torch.arange(q.shape[0]), num_accepted - 1]
    return states.sum(1)


def test_a_step_that_was_not_rewritten_is_an_error_with_the_report():
    with pytest.raises(NotRewrittenError, match="refused") as caught:
        export_step(rounded, function_inputs())
    (layer,) = caught.value.report.layers
    assert not layer.matched and layer.reason in str(caught.value)

    given = function_inputs()
    exported = export_step(rounded, copy.deepcopy(given), allow_unrewritten=True)
    expected_pool = given[0].clone()
    expected = rounded(expected_pool, *given[1:])
    pool, *rest = copy.deepcopy(given)
    (o,) = exported.step.module()(*rest, pool)
    assert torch.equal(o, expected) and torch.equal(pool, expected_pool)
    with pytest.raises(ExportError, match="no verify: the step commits nothing"):
        _ = exported.verify


def test_acceptance_has_to_be_seen_from_outside():
    class TokensOnly(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = small_step()

        def forward(self, *given):
            return self.inner(*given)[0]

    exported = export_small(TokensOnly())
    assert exported.report.matched == 1
    with pytest.raises(ExportError, match="return num_accepted"):
        _ = exported.commit


def test_a_pool_read_after_its_update_stays_right_and_uncut(tmp_path):
    def step(pool, slots, q, k, v, g, beta, num_accepted):
        o = plain_function(pool, slots, q, k, v, g, beta, num_accepted)
        return o + pool[slots].sum((1, 2, 3))[:, None, None, None]

    given = function_inputs()
    exported = export_step(step, copy.deepcopy(given))
    assert exported.report.matched == 1
    expected_pool, pool = given[0].clone(), given[0].clone()
    (total,) = exported.step.module()(*given[1:], pool)
    torch.testing.assert_close(total, step(expected_pool, *given[1:]))
    torch.testing.assert_close(pool, expected_pool)
    with pytest.raises(ExportError, match="reads a pool after it has updated it"):
        _ = exported.verify
    with pytest.raises(ExportError, match=r"programs of \['step'\], but had \['verify'\]: the step reads a pool after"):
        exported.save(tmp_path, aot_inductor=("verify",))


def test_old_contents_read_after_the_update_are_not_overwritten():
    """A snapshot's view is read late: then the update cannot be in place, and is copied."""

    def step(pool, slots, q, k, v, g, beta, num_accepted):
        before = pool.clone()
        o = plain_function(pool, slots, q, k, v, g, beta, num_accepted)
        return o, before[slots] - pool[slots]

    given = function_inputs()
    exported = export_step(step, copy.deepcopy(given))
    expected_pool, pool = given[0].clone(), given[0].clone()
    o, difference = exported.step.module()(*given[1:], pool)
    torch.testing.assert_close((o, difference), step(expected_pool, *given[1:]))
    assert difference.abs().max() > 0.1
    torch.testing.assert_close(pool, expected_pool)


@pytest.mark.parametrize("portable", [False, True])
def test_the_exported_step_copies_no_pool(portable):
    step = small_step(slots=20 * SLOTS)
    exported = export_small(step, portable=portable)
    smallest = min(buffer.nbytes for name, buffer in step.named_buffers() if "recurrent" in name or "conv" in name)
    module, given = exported.step.module(), step_inputs()
    module(*given)
    assert peak_allocation(lambda: module(*given), "cpu") < smallest


def test_numbers_are_constants_and_results_are_tensors():
    exported = export_step(lambda x, n: x * n, (torch.ones(3), 2), allow_unrewritten=True)
    assert [port["name"] for port in exported.manifest.programs["step"]["inputs"]] == ["x"]
    assert torch.equal(exported.step.module()(torch.ones(3))[0], torch.full((3,), 2.0))
    with pytest.raises(ExportError, match="should return tensors"):
        export_step(lambda x: (x + 1, 3), (torch.ones(3),), allow_unrewritten=True)
