"""The aligned plan inside graphs: one trace for all values, no host synchronisation, fused by Inductor, with its commit."""

import pytest
import torch
from pools import guarded_pool, make_window, same_bits
from torch._inductor import metrics
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import recoverssm_ops as rs

BLOCK_SIZE, T = 8, 4


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch._dynamo.reset()
    with fresh_cache(), torch.no_grad():
        yield
    torch._dynamo.reset()


def plan_of(num_accepted, num_computed, block_table):
    plan = rs.CommitPlan.aligned(num_accepted, num_computed, block_table, BLOCK_SIZE, T)
    return plan.source, plan.dest, plan.length


def arguments(batch, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(batch * 5, generator=generator).view(batch, 5)
    slots[slots % 7 == 0] = -1
    counts = torch.randint(0, T + 1, (batch,), generator=generator)
    computed = torch.randint(0, 4 * BLOCK_SIZE, (batch,), generator=generator)
    return counts.to(device), computed.to(device), slots.to(device)


def graphs_of(function) -> int:
    return len(torch._dynamo.eval_frame._debug_get_cache_entry_list(function))


def test_no_value_is_read_on_the_host():
    """Traced without values: reading one (``.item()``, a comparison, a data-dependent shape) raises here."""
    given = arguments(3)
    mode = FakeTensorMode()
    fake = [mode.from_tensor(x) for x in given]
    with mode:
        source, dest, length = plan_of(*fake)
        with pytest.raises(DataDependentOutputException):
            dest[0, 0].item()  # the control: this mode does notice
    assert source.shape == (3,) and dest.shape == length.shape == (3, 2)


WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@pytest.mark.parametrize("tracing_mode", ["fake", "symbolic"])
def test_the_trace_is_of_ordinary_operations(tracing_mode):
    """One graph, right for other values and (symbolic) other batches, in which nothing waits for the device."""
    graph = make_fx(plan_of, tracing_mode=tracing_mode)(*arguments(3))
    operations = [node.target for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    assert {operation.namespace for operation in operations} == {"aten"}
    assert not [operation for operation in operations if WAITS & set(operation.tags)]
    for batch in (3, 5) if tracing_mode == "symbolic" else (3,):
        for seed in range(5):
            given = arguments(batch, seed=seed)
            for actual, expected in zip(graph(*given), plan_of(*given), strict=True):
                assert same_bits(actual, expected)


def test_inductor_fuses_the_plan(device):
    """Source, and dest with length: two kernels at most, however many operations they were."""
    metrics.reset()
    compiled = torch.compile(plan_of, fullgraph=True)
    for seed in range(5):
        given = arguments(6, device, seed)
        for actual, expected in zip(compiled(*given), plan_of(*given), strict=True):
            assert same_bits(actual, expected)
    assert 1 <= metrics.generated_kernel_count <= 2
    assert graphs_of(plan_of) == 1


def test_b25_batch_sizes_need_two_graphs():
    compiled = torch.compile(plan_of, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch in (1, 2, 3, 5, 8, 3, 1):
        given = arguments(batch, seed=batch)
        for actual, expected in zip(compiled(*given), plan_of(*given), strict=True):
            assert same_bits(actual, expected)
    assert graphs_of(plan_of) == 2


def make_step(device):
    options = make_window(1, T, device=device).options

    def step(pool, q, k, v, g, beta, num_accepted, num_computed, block_table):
        source = rs.CommitPlan.aligned_source(num_computed, block_table, BLOCK_SIZE)
        o, record = rs.kda_verify(q, k, v, g, beta, pool, source, **options)
        plan = rs.CommitPlan.aligned(num_accepted, num_computed, block_table, BLOCK_SIZE, T)
        rs.kda_commit(pool, record, None, plan=plan)
        return o, plan

    return step


def test_verify_plan_and_commit_in_one_graph(device):
    """The plan is also a result of the compiled step: other state pools are committed with it."""
    step = make_step(device)
    compiled = torch.compile(step, fullgraph=True, backend="inductor" if device.type == "cuda" else "aot_eager")
    for seed in range(4):
        pools = [guarded_pool(30, 2, 6, 8, device=device, seed=seed) for _ in range(2)]
        inputs = make_window(6, T, device=device, seed=seed).inputs
        given = arguments(6, device, seed)
        o, plan = compiled(pools[0].state, *inputs, *given)
        expected_o, expected = step(pools[1].state, *inputs, *given)
        assert isinstance(plan, rs.CommitPlan)
        assert same_bits(o, expected_o) and same_bits(pools[0].state, pools[1].state)
        for name in ("source", "dest", "length"):
            assert same_bits(getattr(plan, name), getattr(expected, name))
        pools[0].check_only_written(s for s in plan.dest.flatten().tolist() if s >= 0)
    assert graphs_of(step) == 1


def test_a_plan_enters_a_compiled_commit(device):
    """Made outside, once a step, and handed to the graph that commits a layer."""

    def commit(pool, record, plan):
        rs.kda_commit(pool, record, None, plan=plan)

    compiled = torch.compile(commit, fullgraph=True, backend="aot_eager")
    window, pools = make_window(6, T, device=device), [guarded_pool(30, 2, 6, 8, device=device) for _ in range(2)]
    for seed in range(3):
        plan = rs.CommitPlan(*plan_of(*arguments(6, device, seed)))
        for pool, function in zip(pools, (compiled, commit), strict=True):
            _, record = rs.kda_verify(*window.inputs, pool.state, plan.source, **window.options)
            function(pool.state, record, plan)
        assert same_bits(pools[0].state, pools[1].state)
    assert graphs_of(commit) == 1


def test_export_with_the_plan_as_input_and_output():
    """The plan is a pytree node of its own type."""

    class Commit(torch.nn.Module):
        def forward(self, plan, num_accepted, num_computed, block_table):
            other = rs.CommitPlan.aligned(num_accepted, num_computed, block_table, BLOCK_SIZE, T)
            return rs.CommitPlan(
                plan.source, torch.cat([plan.dest, other.dest]), torch.cat([plan.length, other.length])
            )

    plan = rs.CommitPlan(*plan_of(*arguments(3)))
    program = torch.export.export(Commit(), (plan, *arguments(3, seed=1)))
    result = program.module()(plan, *arguments(3, seed=2))
    expected = Commit()(plan, *arguments(3, seed=2))
    assert isinstance(result, rs.CommitPlan)
    assert all(same_bits(getattr(result, name), getattr(expected, name)) for name in ("source", "dest", "length"))
