"""The operators called by a user inside torch.compile: same bits as eager, few graphs, no copy of the pool."""

import contextlib
import re

import pytest
import torch
from pools import guarded_pool, make_window, same_bits
from torch._dynamo.utils import ReinplaceCounters
from torch._inductor import config
from torch._inductor.utils import fresh_cache, run_and_get_code

import recoverssm_ops as rs

# Sizes that no batch here has: Dynamo takes equal sizes for the same size, and guards on it.
SLOTS, SIZES = 37, {"heads": 7, "value_heads": 7, "key_dim": 16, "value_dim": 12}


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch._dynamo.reset()
    ReinplaceCounters.clear()
    with fresh_cache(), torch.no_grad():
        yield
    torch._dynamo.reset()


def make_pool(device):
    return guarded_pool(SLOTS, 7, 12, 16, guard=0, device=device).state


def make_arguments(device, batch=3, lengths=None, seed=0):
    window = make_window(batch, 4, lengths=lengths, device=device, seed=seed, **SIZES)
    slots = (torch.arange(batch, device=device) * 7 + 5) % SLOTS
    n = (torch.arange(batch, device=device) + seed) % 5
    return (*window.inputs, slots, n)


def make_options(device):
    """The same gate for every batch: its parameters are part of the model."""
    return make_window(1, 4, device=device, **SIZES).options


def graphs_of(function) -> int:
    """How many compiled graphs Dynamo holds for a function. (A backend is called more often than that.)"""
    return len(torch._dynamo.eval_frame._debug_get_cache_entry_list(function))


def make_step(device):
    options = make_options(device)

    def step(pool, q, k, v, g, beta, slots, n, cu_seqlens=None):
        packed = {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens, "max_seqlen": 4}
        o, record = rs.kda_verify(q, k, v, g, beta, pool, slots, **options, **packed)
        rs.kda_commit(pool, record, n, slots)
        return o, record.u

    return step


def check_equal(compiled, eager, device, *arguments, **more) -> None:
    """Outputs and pool have the eager call's bits, and the pool has changed."""
    pools = make_pool(device), make_pool(device)
    outputs = compiled(pools[0], *arguments, **more), eager(pools[1], *arguments, **more)
    assert all(same_bits(x, y) for x, y in zip(*outputs, strict=True))
    assert same_bits(*pools)
    assert not same_bits(pools[0], make_pool(device)) or not arguments[-1].any()


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_whole_graph_equals_eager(device, dynamic):
    step = make_step(device)
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    check_equal(compiled, step, device, *make_arguments(device))
    check_equal(compiled, step, device, *make_arguments(device, seed=3))


def test_slots_by_row_number_and_recover(device):
    """``state_indices=None`` and ``kda_recover`` trace too."""
    options = make_options(device)

    def step(pool, q, k, v, g, beta, n):
        o, record = rs.kda_verify(q, k, v, g, beta, pool, **options)
        recovered = rs.kda_recover(pool[: q.shape[0]], record, n)
        rs.kda_commit(pool, record, n)
        return o, recovered

    *inputs, _, n = make_arguments(device)
    check_equal(torch.compile(step, fullgraph=True, backend="aot_eager"), step, device, *inputs, n)


def test_b25_acceptance_never_recompiles(device):
    step = make_step(device)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    *inputs, slots, _ = make_arguments(device)
    for accepted in ([0, 0, 0], [4, 4, 4], [1, 2, 3], [9, -1, 0]):
        check_equal(compiled, step, device, *inputs, slots, torch.tensor(accepted, device=device))
    check_equal(compiled, step, device, *inputs, slots.flip(0), torch.tensor([2, 2, 2], device=device))
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
    """Any number of rows and tokens, any mix of lengths."""
    step = make_step(device)
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ([4, 1, 3], [2, 2], [4, 0, 0, 4, 1], [1, 1], [0, 3, 3]):
        arguments = make_arguments(device, len(lengths), lengths, seed=sum(lengths))
        ends = torch.tensor([0, *lengths], device=device).cumsum(0)
        check_equal(compiled, step, device, *arguments, cu_seqlens=ends)
    assert graphs_of(step) == 1


ALLOCATION = re.compile(r"= empty_strided\w*\(\((.*?)\)")


def pool_allocations(code: list[str], static: bool) -> list[str]:
    """Shapes of the allocations in Inductor's generated code that could hold the pool."""
    shapes = [shape for text in code for shape in ALLOCATION.findall(text)]
    return [shape for shape in shapes if shape.startswith(f"{SLOTS},") or not static]


@pytest.mark.parametrize("v2", [True, False], ids=["auto_functionalized_v2", "auto_functionalized"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_b23_the_pool_is_never_copied(device, dynamic, v2):
    step = make_step(device)
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    pool, expected = make_pool(device), make_pool(device)
    with config.patch(enable_auto_functionalized_v2=v2):
        _, code = run_and_get_code(compiled, pool, *make_arguments(device))
    assert ReinplaceCounters.get_total_missed() == 0 and ReinplaceCounters.get_total_missed_bytes() == 0
    assert pool_allocations(code, static=False) == [], "the step should allocate nothing but the operators' results"
    text = "\n".join(code)
    for copy in ("aten.clone", "aten.copy_", "aten.index_put", "aten.slice_scatter"):
        assert copy not in text
    step(expected, *make_arguments(device))
    assert same_bits(pool, expected)


def test_b23_a_copy_would_have_been_seen(device):
    """The control of the test above: a step that copies the pool is found by the same search."""
    step = make_step(device)

    def copying(pool, *arguments):
        pool = pool * 1.5
        return *step(pool, *arguments), pool

    _, code = run_and_get_code(torch.compile(copying, fullgraph=True), make_pool(device), *make_arguments(device))
    assert pool_allocations(code, static=True)


def test_b16_a_record_is_consumed_once_under_compile(device):
    """Within one graph, and across the border of a compiled function that takes the record."""
    options = make_options(device)

    def twice(pool, q, k, v, g, beta, slots, n):
        _, record = rs.kda_verify(q, k, v, g, beta, pool, slots, **options)
        rs.kda_commit(pool, record, n, slots)
        rs.kda_commit(pool, record, n, slots)

    pool, arguments = make_pool(device), make_arguments(device)
    with pytest.raises(Exception, match=r"record was committed already|Observed exception"):
        torch.compile(twice, fullgraph=True, backend="aot_eager")(pool, *arguments)
    assert same_bits(pool, make_pool(device))

    *inputs, slots, n = arguments
    commit = torch.compile(rs.kda_commit, fullgraph=True, backend="aot_eager")
    for _ in range(3):  # a new record each step is no new graph
        _, record = rs.kda_verify(*inputs, pool, slots, **options)
        commit(pool, record, n, slots)
        assert record.committed
    assert graphs_of(rs.kda_commit) == 1
    before = pool.clone()
    with pytest.raises(RuntimeError, match="record was committed already"):
        rs.kda_commit(pool, record, n, slots)
    assert same_bits(pool, before)


@pytest.mark.parametrize("around", ["autocast", "inference_mode", "autocast inside"])
def test_b35_compiled_under_a_mode(device, around):
    step = make_step(device)

    def inside(*arguments):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return step(*arguments)

    compiled = torch.compile(inside if around == "autocast inside" else step, fullgraph=True)
    modes = {"autocast": torch.autocast(device.type, dtype=torch.bfloat16), "inference_mode": torch.inference_mode()}
    with modes.get(around, contextlib.nullcontext()):
        check_equal(compiled, step, device, *make_arguments(device))


def test_b35_nested_compiled_region(device):
    """A commit inside a nested compiled region mutates the pool, or the compilation says that it cannot."""
    options = make_options(device)

    @torch.compiler.nested_compile_region
    def commit(pool, record, n, slots):
        rs.kda_commit(pool, record, n, slots)
        return n + 1

    def step(pool, q, k, v, g, beta, slots, n):
        o, record = rs.kda_verify(q, k, v, g, beta, pool, slots, **options)
        return o, commit(pool, record, n, slots)

    def plain(pool, q, k, v, g, beta, slots, n):
        o, record = rs.kda_verify(q, k, v, g, beta, pool, slots, **options)
        rs.kda_commit(pool, record, n, slots)
        return o, n + 1

    try:
        check_equal(torch.compile(step, fullgraph=True, backend="aot_eager"), plain, device, *make_arguments(device))
    except RuntimeError as error:
        assert re.search("(?i)mutat|alias|side effect", str(error))
