"""The convolution's operators under torch.compile and torch.export: same bits as eager, few graphs, no copy of the pool."""

import re

import pytest
import torch
from conv_cases import guarded_conv_pool, make_conv_window
from pools import guarded_pool, make_window, same_bits
from torch._dynamo.utils import ReinplaceCounters
from torch._inductor import config
from torch._inductor.utils import fresh_cache, run_and_get_code

import recoverssm_ops as rs

# Sizes that no batch here has: Dynamo takes equal sizes for the same size, and guards on it.
SLOTS, CHANNELS, WIDTH = 37, 20, 8


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch._dynamo.reset()
    ReinplaceCounters.clear()
    with fresh_cache(), torch.no_grad():
        yield
    torch._dynamo.reset()


def make_pool(device):
    return guarded_conv_pool(SLOTS, CHANNELS, WIDTH, guard=0, device=device).state


def make_arguments(device, batch=3, lengths=None, seed=0):
    window = make_conv_window(batch, 4, channels=CHANNELS, width=WIDTH, lengths=lengths, device=device, seed=seed)
    slots = (torch.arange(batch, device=device) * 7 + 5) % SLOTS
    n = (torch.arange(batch, device=device) + seed) % 5
    return window.x, slots, n


def make_step(device):
    _, weight, bias = make_conv_window(1, 1, channels=CHANNELS, width=WIDTH, device=device).inputs

    def step(pool, x, slots, n, cu_seqlens=None):
        packed = {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens}
        window = {} if cu_seqlens is None else {"max_seqlen": 4}
        y = rs.causal_conv1d_verify(x, weight, bias, pool, slots, **packed, **window)
        rs.causal_conv1d_commit(pool, x, n, slots, **packed)
        return y

    return step


def graphs_of(function) -> int:
    return len(torch._dynamo.eval_frame._debug_get_cache_entry_list(function))


def check_equal(compiled, eager, device, *arguments, **more) -> None:
    """Outputs and pool have the eager call's bits, and the pool has changed."""
    pools = make_pool(device), make_pool(device)
    assert same_bits(compiled(pools[0], *arguments, **more), eager(pools[1], *arguments, **more))
    assert same_bits(*pools)
    assert not same_bits(pools[0], make_pool(device)) or not arguments[-1].any()


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_whole_graph_equals_eager(device, dynamic):
    step = make_step(device)
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    check_equal(compiled, step, device, *make_arguments(device))
    check_equal(compiled, step, device, *make_arguments(device, seed=3))


def test_slots_by_row_number(device):
    _, weight, bias = make_conv_window(1, 1, channels=CHANNELS, width=WIDTH, device=device).inputs

    def step(pool, x, n):
        y = rs.causal_conv1d_verify(x, weight, bias, pool, activation=None)
        rs.causal_conv1d_commit(pool, x, n)
        return y

    x, _, n = make_arguments(device)
    check_equal(torch.compile(step, fullgraph=True, backend="aot_eager"), step, device, x, n)


def test_b25_acceptance_never_recompiles(device):
    step = make_step(device)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    x, slots, _ = make_arguments(device)
    for accepted in ([0, 0, 0], [4, 4, 4], [1, 2, 3], [9, -1, 0]):
        check_equal(compiled, step, device, x, slots, torch.tensor(accepted, device=device))
    check_equal(compiled, step, device, x, slots.flip(0), torch.tensor([2, 2, 2], device=device))
    assert graphs_of(step) == 1


@pytest.mark.parametrize("dynamic", [None, True], ids=["automatic", "dynamic"])
def test_b25_batch_sizes_need_two_graphs(device, dynamic):
    """One for a single row, one for all others."""
    step = make_step(device)
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for batch in (1, 2, 3, 5, 8, 3, 1):
        check_equal(compiled, step, device, *make_arguments(device, batch, seed=batch))
    assert graphs_of(step) == 2


def test_b25_packed_rows_and_tokens_need_one_graph(device):
    step = make_step(device)
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ([4, 1, 4], [2, 2], [4, 0, 0, 4, 1], [1, 1], [0, 3, 3]):
        ends = torch.tensor([0, *lengths], device=device).cumsum(0)
        arguments = make_arguments(device, len(lengths), lengths, seed=sum(lengths))
        check_equal(compiled, step, device, *arguments, cu_seqlens=ends)
    assert graphs_of(step) == 1


@pytest.mark.parametrize("v2", [True, False], ids=["auto_functionalized_v2", "auto_functionalized"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_b23_neither_pool_is_copied(device, dynamic, v2):
    """A whole layer: convolution and recurrence verified, then both pools committed by one plan."""
    sizes = {"heads": 7, "value_heads": 7, "key_dim": 16, "value_dim": 12}
    window = make_window(3, 4, device=device, **sizes)
    channels = 7 * (16 + 16 + 12)
    conv = make_conv_window(3, 4, channels=channels, device=device)

    def step(conv_pool, pool, x, g, beta, slots, n):
        y = rs.causal_conv1d_verify(x, conv.weight, conv.bias, conv_pool, slots)
        q, k, v = (part.unflatten(-1, (7, -1)) for part in y.split([112, 112, 84], -1))
        o, record = rs.kda_verify(q, k, v, g, beta, pool, slots, **window.options)
        plan = rs.CommitPlan.in_place(n, slots)
        rs.causal_conv1d_commit(conv_pool, x, None, plan=plan)
        rs.kda_commit(pool, record, None, plan=plan)
        return o

    def pools():
        return (
            guarded_conv_pool(SLOTS, channels, guard=0, device=device).state,
            guarded_pool(SLOTS, 7, 12, 16, guard=0, device=device).state,
        )

    arguments = (
        conv.x,
        window.g,
        window.beta,
        torch.tensor([5, 12, 19], device=device),
        torch.tensor([4, 0, 2], device=device),
    )
    compiled, actual, expected = torch.compile(step, fullgraph=True, dynamic=dynamic), pools(), pools()
    with config.patch(enable_auto_functionalized_v2=v2):
        o, code = run_and_get_code(compiled, *actual, *arguments)
    assert ReinplaceCounters.get_total_missed() == 0 and ReinplaceCounters.get_total_missed_bytes() == 0
    text = "\n".join(code)
    shapes = re.findall(r"= empty_strided\w*\(\((.*?)\)", text)
    assert not [shape for shape in shapes if shape.startswith(f"{SLOTS},")]
    for copy in ("aten.clone", "aten.copy_", "aten.index_put", "aten.slice_scatter"):
        assert copy not in text
    assert same_bits(o, step(*expected, *arguments))
    assert all(same_bits(x, y) for x, y in zip(actual, expected, strict=True))
    assert not same_bits(actual[0], pools()[0])


class Step(torch.nn.Module):
    """Verify and commit on a pool that is a buffer."""

    def __init__(self, pool: torch.Tensor, step):
        super().__init__()
        self.register_buffer("pool", pool)
        self.step = step

    def forward(self, x, slots, num_accepted):
        return self.step(self.pool, x, slots, num_accepted)


@pytest.mark.parametrize("decomposed", [False, True], ids=["training IR", "functional"])
def test_exported_step_with_dynamic_batch(device, decomposed, tmp_path):
    step, arguments = make_step(device), make_arguments(device)
    batch = torch.export.Dim("batch", min=1, max=8)
    program = torch.export.export(
        Step(make_pool(device), step), arguments, dynamic_shapes=tuple({0: batch} for _ in arguments)
    )
    if decomposed:
        program = program.run_decompositions()
        assert program.graph_signature.buffers_to_mutate
    torch.export.save(program, tmp_path / "step.pt2")
    module = torch.export.load(tmp_path / "step.pt2").module()
    for size in (3, 1, 8):
        arguments = make_arguments(device, size, seed=size)
        pool = make_pool(device)
        expected = step(pool, *arguments)
        module.pool.copy_(make_pool(device))
        assert same_bits(module(*arguments), expected) and same_bits(module.pool, pool)


def test_exported_packed_rows_with_dynamic_tokens_and_rows(device):
    step = make_step(device)

    class Packed(torch.nn.Module):
        def forward(self, pool, x, slots, num_accepted, cu_seqlens):
            return step(pool, x, slots, num_accepted, cu_seqlens)

    def packed(lengths):
        ends = torch.tensor([0, *lengths], device=device).cumsum(0)
        return *make_arguments(device, len(lengths), lengths, seed=1), ends

    tokens, rows = torch.export.Dim("tokens", max=64), torch.export.Dim("rows", max=9)
    shapes = (None, {1: tokens}, {0: rows}, {0: rows}, {0: rows + 1})
    program = torch.export.export(Packed(), (make_pool(device), *packed([4, 1, 3])), dynamic_shapes=shapes)
    for lengths in ([4, 1, 3], [2, 0, 4, 4, 1], [3, 2]):
        states = [make_pool(device), make_pool(device)]
        exported, eager = program.module()(states[0], *packed(lengths)), step(states[1], *packed(lengths))
        assert same_bits(exported, eager) and same_bits(*states), lengths
        assert not same_bits(states[0], make_pool(device))
