"""The all-layers commits on a GPU: the interpreter's cases in every dtype, capture, replay, and what Inductor captures."""

import gc

import pytest
import torch

pytest.importorskip("triton")
import layers_kernel_checks as checks
from layers_cases import assert_same, make_conv_layers, make_layers, make_plan, verify_all
from pools import same_bits
from programs import launch_as
from torch._dynamo.utils import counters
from torch._inductor import config

import recoverssm_ops as rs

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

DTYPES = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "bf16_data_fp32_pool": (torch.bfloat16, torch.float32),
    "fp32_data_bf16_pool": (torch.float32, torch.bfloat16),
}


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("case", checks.CASES, ids=lambda case: case.name)
def test_parity(case, dtypes):
    checks.parity(case, "cuda", *dtypes)


@pytest.mark.parametrize("case", checks.CASES, ids=lambda case: case.name)
def test_parity_of_a_full_gpu(case, monkeypatch):
    """The bits of one launch a layer, by the kernels that many programs get."""
    launch_as("many", monkeypatch)
    checks.parity(case, "cuda", *DTYPES["bf16"])


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("case", checks.CONV_CASES, ids=lambda case: case.name)
def test_conv_parity(case, dtypes):
    checks.conv_parity(case, "cuda", *dtypes)


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_behaviour(check, dtypes):
    check("cuda", *dtypes)


LARGE = {"heads": 4, "value_heads": 4, "key_dim": 128, "value_dim": 128}


@pytest.mark.parametrize("gate", ["bounded", "unbounded"])
def test_the_model_s_sizes_equal_the_loop(gate):
    """20 layers of 128 x 128 heads in bf16, more programs than fit the GPU at once."""
    plan = make_plan("cuda", 8, 2)
    results = []
    for together in (True, False):
        pools, windows = make_layers(
            "cuda", layers=20, batch=8, window=8, slots=40, sizes=LARGE, guard=0, gate=gate, dtype=torch.bfloat16,
            pool_dtype=torch.bfloat16,
        )  # fmt: skip
        records = verify_all(pools, windows, plan.source)
        if together:
            rs.kda_commit_layers([p.state for p in pools], records, None, plan=plan)
        else:
            for pool, record in zip(pools, records, strict=True):
                rs.kda_commit(pool.state, record, None, plan=plan)
        results.append(pools)
    assert_same(*results)


class Step:
    """A step of three layers on persistent tensors: every window, then the commits of all layers or one by one."""

    def __init__(self):
        self.pools, self.windows = make_layers("cuda", guard=0, batch=4, lengths=[4, 4, 4, 4])
        self.convs, self.xs, _ = make_conv_layers("cuda", guard=0, batch=4, lengths=[4, 4, 4, 4])
        self.cu_seqlens = self.windows[0].options["cu_seqlens"]
        self.slots = torch.tensor([5, 6, 7, 8], device="cuda")
        self.n = torch.tensor([4, 0, 2, 1], device="cuda")

    def __call__(self, together=True):
        records = verify_all(self.pools, self.windows, self.slots)
        states, conv_states = [p.state for p in self.pools], [p.state for p in self.convs]
        plan = rs.CommitPlan.in_place(self.n, self.slots)
        if together:
            rs.kda_commit_layers(states, records, None, plan=plan)
            rs.causal_conv1d_commit_layers(conv_states, self.xs, None, plan=plan, cu_seqlens=self.cu_seqlens)
        else:
            for state, conv, record, x in zip(states, conv_states, records, self.xs, strict=True):
                rs.kda_commit(state, record, None, plan=plan)
                rs.causal_conv1d_commit(conv, x, None, plan=plan, cu_seqlens=self.cu_seqlens)

    def set(self, lengths, slots, n):
        self.cu_seqlens.copy_(torch.tensor([0, *lengths]).cumsum(0))
        self.slots.copy_(torch.tensor(slots))
        self.n.copy_(torch.tensor(n))

    def reset(self):
        for pool in self.pools + self.convs:
            pool.storage.copy_(pool.before)


STEPS = [
    ((4, 4, 4, 4), (5, 6, 7, 8), (4, 0, 2, 1)),
    ((0, 1, 3, 2), (9, -1, 5, 6), (0, 1, 9, 2)),
    ((4, 0, 0, 0), (-1, -1, -1, -1), (4, 0, 0, 0)),
    ((2, 2, 1, 4), (12, 13, 5, -1), (1, 2, 1, 3)),
]


def capture(step) -> torch.cuda.CUDAGraph:
    """The documented order: one run on a side stream, then the capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def check_replays(graph, step, loop) -> None:
    for settings in STEPS:
        for x in (step, loop):
            x.reset()
            x.set(*settings)
        graph.replay()
        loop(together=False)
        assert_same(step.pools + step.convs, loop.pools + loop.convs)
    assert any(not same_bits(pool.storage, pool.before) for pool in step.pools)


def test_b11_one_graph_replays_every_mix_of_lengths():
    step, loop = Step(), Step()
    graph = capture(step)
    gc.collect()
    check_replays(graph, step, loop)


def test_b32_addresses_outlive_the_capture():
    """The captured copy reads pinned memory at every replay: nothing that runs later may be given that memory."""
    step, loop = Step(), Step()
    graph = capture(step)
    others = [Step() for _ in range(3)]
    graphs = [capture(other) for other in others]
    for other in others:
        for _ in range(20):
            other()
    for size in (8, 64, 512, 4096):
        torch.full((size,), -1, dtype=torch.int64).pin_memory()
    gc.collect()
    check_replays(graph, step, loop)
    for x, y in zip(graphs, others, strict=True):
        check_replays(x, y, loop)


def test_capture_without_a_run_before_it_is_an_error(monkeypatch):
    from recoverssm_ops.triton import address_table

    step = Step()
    step()
    monkeypatch.setattr(address_table, "_memory", address_table.CaptureMemory())
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="run it once before the capture"), torch.cuda.graph(graph):
        step()
    torch.cuda.synchronize()


def test_b32_current_stream_of_a_side_stream():
    step, loop = Step(), Step()
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        step.set(*STEPS[3])
        step()
    side.synchronize()
    loop.set(*STEPS[3])
    loop(together=False)
    assert_same(step.pools + step.convs, loop.pools + loop.convs)


@config.patch({"triton.cudagraph_or_error": True})
def test_b31_reduce_overhead_skips_nothing():
    torch._dynamo.reset()
    counters.clear()
    step, loop = Step(), Step()

    def function(states, conv_states, inputs, xs, slots, n, cu_seqlens):
        records = []
        for state, window, (q, k, v, g, beta) in zip(states, step.windows, inputs, strict=True):
            options = {**window.options, "cu_seqlens": cu_seqlens}
            records.append(rs.kda_verify(q, k, v, g, beta, state, slots, **options)[1])
        plan = rs.CommitPlan.in_place(n, slots)
        rs.kda_commit_layers(states, records, None, plan=plan)
        rs.causal_conv1d_commit_layers(conv_states, xs, None, plan=plan, cu_seqlens=cu_seqlens)

    compiled = torch.compile(function, fullgraph=True, mode="reduce-overhead")
    states, conv_states = [p.state for p in step.pools], [p.state for p in step.convs]
    for x in states + conv_states:
        torch._dynamo.mark_static_address(x)
    for settings in STEPS * 2:
        for x in (step, loop):
            x.reset()
            x.set(*settings)
        torch.compiler.cudagraph_mark_step_begin()
        inputs = [window.inputs for window in step.windows]
        compiled(states, conv_states, inputs, step.xs, step.slots, step.n, step.cu_seqlens)
        loop(together=False)
        assert_same(step.pools + step.convs, loop.pools + loop.convs)
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_another_device_than_the_current():
    checks.parity(checks.CASES[0], "cuda:1", torch.float32, torch.float32)
    assert torch.cuda.current_device() == 0
