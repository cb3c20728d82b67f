"""The convolution's kernels on a GPU: the interpreter's cases in every dtype, and what only a GPU can show."""

import gc

import pytest
import torch

pytest.importorskip("triton")
import conv_kernel_checks as checks
from conv_cases import guarded_conv_pool, make_conv_window
from pools import same_bits

import recoverssm_ops as rs

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

DTYPES = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "bf16_data_fp32_pool": (torch.bfloat16, torch.float32),
    "fp32_data_bf16_pool": (torch.float32, torch.bfloat16),
    "fp16_data_bf16_pool": (torch.float16, torch.bfloat16),
}


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("case", checks.CASES, ids=lambda case: case.name)
def test_parity(case, dtypes):
    checks.parity(case, "cuda", *dtypes)


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_behaviour(check, dtypes):
    check("cuda", *dtypes)


@pytest.mark.parametrize("order", ["slot, channel, column", "slot, column, channel"])
@pytest.mark.parametrize("width", [3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_b09_in_place_equals_out_of_place_whatever_the_threads_do(dtype, width, order):
    """Loads and stores may lie differently over the threads of a program; thousands of programs, again and again."""
    batch, channels = 512, 2048
    window = make_conv_window(batch, 8, channels=channels, width=width, dtype=dtype, device="cuda")
    pool = guarded_conv_pool(2 * batch, channels, width, dtype=dtype, device="cuda", order=order, guard=0)
    initial = pool.state.clone()
    source = torch.arange(batch, device="cuda")
    length = (source[:, None] + torch.tensor([0, 3], device="cuda")) % 9
    apart = torch.stack([source + batch, torch.full_like(source, -1)], 1)
    rs.causal_conv1d_commit(pool.state, window.x, None, plan=rs.CommitPlan(source, apart, length))
    expected = pool.state[batch:].clone()
    for column in range(2):
        dest = torch.full_like(apart, -1)
        dest[:, column] = source
        shuffled = length if column == 0 else length.flip(1)
        for _ in range(20):
            pool.state.copy_(initial)
            rs.causal_conv1d_commit(pool.state, window.x, None, plan=rs.CommitPlan(source, dest, shuffled))
            assert torch.equal(pool.state[:batch], expected)


def test_verify_twice_gives_the_same_bits():
    window = make_conv_window(300, 8, channels=4096, dtype=torch.bfloat16, device="cuda")
    pool = guarded_conv_pool(300, 4096, dtype=torch.bfloat16, device="cuda")
    first, second = (rs.causal_conv1d_verify(*window.inputs, pool.state) for _ in range(2))
    assert same_bits(first, second)
    pool.check_unchanged()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_b11_one_graph_replays_every_mix_of_lengths(dtype):
    """Lengths, slots and plans are read on the device at replay; a small batch after a large one."""
    window = make_conv_window(4, 4, channels=300, lengths=[4, 4, 4, 4], dtype=dtype, device="cuda")
    pool = guarded_conv_pool(8, 300, dtype=dtype, device="cuda", guard=0)
    clean = pool.state.clone()
    slots = torch.tensor([1, 2, 3, 4], device="cuda")
    dest = torch.full((4, 2), -1, device="cuda")
    length = torch.zeros(4, 2, dtype=torch.int64, device="cuda")

    def step(state):
        y = rs.causal_conv1d_verify(*window.inputs, state, slots, **window.options)
        rs.causal_conv1d_commit(
            state, window.x, None, plan=rs.CommitPlan(slots, dest, length), cu_seqlens=window.options["cu_seqlens"]
        )
        return y

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(pool.state)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step(pool.state)
    gc.collect()
    for lengths, rows, columns, accepted in (
        ((4, 4, 4, 4), (1, 2, 3, 4), (1, 2, 3, 4), (4, 0, 2, 1)),
        ((0, 1, 3, 2), (3, -1, 1, 2), (3, 0, 5, 2), (0, 1, 9, 2)),
        ((4, 0, 0, 0), (-1, -1, -1, -1), (-1, -1, -1, -1), (4, 0, 0, 0)),
        ((2, 2, 1, 4), (5, 6, 1, -1), (5, -1, 7, -1), (1, 2, 1, 3)),
    ):
        pool.state.copy_(clean)
        eager = clean.clone()
        ends = torch.tensor([0, *lengths]).cumsum(0)
        window.options["cu_seqlens"].copy_(ends)
        slots.copy_(torch.tensor(rows))
        dest[:, 0].copy_(torch.tensor(columns))
        length.copy_(torch.tensor(accepted)[:, None].expand(4, 2))
        graph.replay()
        expected = step(eager)
        assert same_bits(y, expected) and same_bits(pool.state, eager)


def test_b32_current_stream_of_a_side_stream():
    window = make_conv_window(64, 8, channels=4096, dtype=torch.bfloat16, device="cuda")
    pool = guarded_conv_pool(64, 4096, dtype=torch.bfloat16, device="cuda")
    expected = rs.causal_conv1d_verify(*window.inputs, pool.state)
    x = torch.zeros_like(window.x)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        x.copy_(window.x)
        actual = rs.causal_conv1d_verify(x, *window.inputs[1:], pool.state)
    side.synchronize()
    assert same_bits(actual, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_another_device_than_the_current():
    checks.parity(checks.Case("second", 4), "cuda:1", torch.float32, torch.float32)
    assert torch.cuda.current_device() == 0
