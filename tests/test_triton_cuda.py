"""The Triton kernels on a GPU: the interpreter's cases in every dtype, and what only a GPU can show."""

import gc

import pytest
import torch
from budget import assert_within_budget, verify_slack

pytest.importorskip("triton")
import kernel_checks as checks
from kernel_cases import CASES, Case, bits, build, check_states, check_verify
from programs import launch_as

from recoverssm_ops.triton import launch

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

DTYPES = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "bf16_data_fp32_pool": (torch.bfloat16, torch.float32),
    "fp32_data_bf16_pool": (torch.float32, torch.bfloat16),
}
# The Gluon verify kernel beyond 8 tokens and 128 key dimensions: 2 to 8 warps, tiles cut off at K, both halves of a window.
LARGE = (
    Case("size_192", 8, K=192, V=192, HV=2),
    Case("size_256_packed", 7, K=256, V=64, H=2, HV=4, lengths=(7, 0, 3, 1), tail=5, padding=(2,)),
    Case("size_144_160", 5, K=144, V=160, padding=(0,)),
    Case("size_208_floor", 8, K=208, V=128, gate="floor"),
    Case("long_9", 9, K=64, V=32, HV=2),
    Case("window_12_packed", 12, K=96, V=96, H=2, HV=4, lengths=(12, 0, 9, 8, 1), tail=40, padding=(2,)),
    Case("long_16", 16, K=128, V=128, HV=2),
    Case("window_16_floor", 16, K=112, V=64, gate="floor", padding=(0,)),
    Case("window_16_repeated_keys", 16, K=128, V=64, same_keys=True, beta="doubled"),
    Case("window_16_size_256", 16, K=256, V=128),
    Case("window_10_size_192_packed", 10, K=192, V=64, lengths=(10, 2), tail=9, beta="doubled"),
)
# The same kernel with gates that are not proven bounded: a scalar one, and one a channel.
ANY_GATE = (
    Case("scalar_128", 8, K=128, V=128, HV=2, gate="unbounded", scalar_gate=True),
    Case("scalar_12_packed", 12, K=64, V=64, HV=2, scalar_gate=True, lengths=(12, 9, 0, 3), tail=3),
    Case("strong_scalar_16", 16, K=64, V=64, batch=1, gate="strong", scalar_gate=True),
    Case("scalar_16_size_256", 16, K=256, V=64, batch=1, gate="unbounded", scalar_gate=True),
    Case("unbounded_128_shared", 8, K=128, V=128, HV=2, gate="unbounded"),
    Case("raw_packed", 7, K=64, V=64, HV=2, gate="none", lengths=(7, 5, 0, 3), tail=3, padding=(1,)),
    Case("strong_long", 16, K=64, V=64, batch=1, gate="strong"),
    Case("unbounded_12_packed", 12, K=128, V=64, HV=2, gate="unbounded", lengths=(12, 9, 0, 3), tail=3, padding=(1,)),
    Case("resets_16", 16, K=64, V=64, batch=1, gate="resets"),
    Case("grows_scalar_12", 12, K=64, V=64, batch=1, gate="grows", scalar_gate=True),
    Case("strong_256", 5, K=256, V=64, batch=1, gate="strong"),
    Case("no_norm_96", 8, K=96, V=64, gate="none", l2norm=False, beta="plain"),
    Case("no_norm_scalar", 8, K=64, V=64, gate="none", scalar_gate=True, l2norm=False),
)
BIG = Case("big", 8, K=128, V=128, H=4, HV=4, batch=320)


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parity(case, dtypes):
    checks.parity(case, "cuda", *dtypes)


@pytest.fixture
def full_gpu(monkeypatch):
    """What launchers choose where there are many programs, for cases that have few."""
    launch_as("many", monkeypatch)


@pytest.mark.parametrize("pool", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
@pytest.mark.parametrize("case", [case for case in CASES if case.T <= 8], ids=lambda case: case.name)
def test_parity_of_a_full_gpu(case, pool, full_gpu):
    checks.parity(case, "cuda", torch.bfloat16, pool)


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", ("window_1", "window_128", "bounded_64_packed", "bounded_112_160"))
@pytest.mark.parametrize("programs", ("wave", "full wave"))
def test_parity_where_all_programs_run_at_once(programs, name, dtypes, monkeypatch):
    launch_as(programs, monkeypatch)
    checks.parity(next(case for case in CASES if case.name == name), "cuda", *dtypes)


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("case", (*LARGE, *ANY_GATE), ids=lambda case: case.name)
def test_large_windows_and_heads_of_a_full_gpu(case, dtypes, full_gpu):
    checks.parity(case, "cuda", *dtypes)


@pytest.mark.parametrize("pool", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
@pytest.mark.parametrize("case", (*LARGE, *ANY_GATE), ids=lambda case: case.name)
def test_large_windows_and_heads(case, pool):
    check_verify(build(case, "cuda", torch.bfloat16, pool))


@pytest.mark.parametrize("pool", (torch.float32, torch.bfloat16, torch.float16), ids=("fp32", "bf16", "fp16"))
@pytest.mark.parametrize(
    ("sizes", "n"),
    (({"T": 16, "K": 64, "V": 64}, 3), ({"T": 16, "K": 64, "V": 64}, 11), ({"T": 8, "K": 192, "V": 64}, 3)),
)
def test_later_tokens_of_large_windows_do_not_reach_earlier_ones(sizes, n, pool):
    checks.later_tokens_do_not_reach_earlier_ones("cuda", pool, n, ("bounded",), **sizes)


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_behaviour_of_a_full_gpu(check, full_gpu):
    check("cuda", torch.bfloat16)


@pytest.mark.parametrize("pool", (torch.float32, torch.bfloat16, torch.float16), ids=("fp32", "bf16", "fp16"))
@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_behaviour(check, pool):
    check("cuda", pool)


@pytest.mark.parametrize("pool", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
def test_more_programs_than_fit_the_gpu(pool):
    """Later waves read checkpoints that earlier waves must not have touched, and equal launches give equal bits."""
    x = build(BIG, "cuda", torch.bfloat16, pool)
    before = bits(x.storage).clone()
    o, u = x.verify()
    again = x.verify()
    assert torch.equal(bits(x.storage), before)
    rows = (0, 141, 319)
    assert torch.equal(bits(o), bits(again[0])) and torch.equal(bits(u), bits(again[1]))
    for row in rows:
        oracle, low = x.oracle(row, torch.float64), x.oracle(row, torch.float32)
        assert_within_budget(o[row].cpu(), oracle[0], low[0], name=f"o {row}", slack=verify_slack(x.state))
        assert_within_budget(u[row].cpu(), oracle[1], low[1], name=f"u {row}", slack=verify_slack(x.state))
    check_states(x, u, [row % 9 for row in range(320)], rows)


@pytest.mark.parametrize("pool", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
def test_slot_beyond_two_gigabytes(pool):
    """Byte and element offsets exceed 2^31. The pool is a strided view of memory that is never touched elsewhere."""
    if torch.cuda.mem_get_info()[0] < 14 << 30:
        pytest.skip("needs 14 GiB of free GPU memory")
    x = build(Case("far", 4, K=40, V=24, HV=2, batch=2, gate="unbounded"), "cuda", pool, pool)
    stride = (1 << 31) + 1024
    far = torch.empty(stride + 4096, dtype=pool, device="cuda").as_strided((2, 2, 24, 40), (stride, 960, 40, 1))
    near = x.state[x.slots.long()].clone()
    far[1].copy_(near[0])
    x.slots = torch.tensor([1, -1], dtype=torch.int32, device="cuda")
    o, u = x.verify(state=far)
    x.slots = torch.tensor([0, -1], dtype=torch.int32, device="cuda")
    expected = x.verify(state=near)
    assert torch.equal(bits(o), bits(expected[0])) and torch.equal(bits(u), bits(expected[1]))
    length = torch.full((2, 1), 3, dtype=torch.int32, device="cuda")
    x.commit(u, x.slots, x.slots[:, None], length, state=near)
    x.slots = torch.tensor([1, -1], dtype=torch.int32, device="cuda")
    x.commit(u, x.slots, x.slots[:, None], length, state=far)
    assert torch.equal(bits(far[1]), bits(near[0]))


@pytest.mark.parametrize("pool", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
def test_one_graph_replays_every_mix_of_lengths(pool):
    """Lengths, slots and acceptance are read on the device at replay."""
    case = Case("graph", 4, K=40, V=24, HV=2, lengths=(4, 4, 4, 4), gate="unbounded")
    static = build(case, "cuda", pool, pool)
    clean = static.state.clone()
    length = torch.zeros(4, 1, dtype=torch.int32, device="cuda")

    def step():
        o, u = static.verify()
        static.commit(u, static.slots, static.slots[:, None], length)
        return o, u

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, u = step()
    gc.collect()
    for lengths, slots, accepted in (
        ((4, 4, 4, 4), (1, 2, 3, 4), (4, 0, 2, 1)),
        ((0, 1, 3, 2), (3, -1, 1, 2), (0, 1, 9, 2)),
        ((4, 0, 0, 0), (-1, -1, -1, -1), (4, 0, 0, 0)),
        ((2, 2, 1, 4), (5, 6, 1, -1), (1, 2, 1, 3)),
    ):
        bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
        static.state.copy_(torch.where(clean.isnan(), 1, clean))
        eager = static.state.clone()
        static.cu_seqlens.copy_(bounds)
        static.slots.copy_(torch.tensor(slots, dtype=torch.int32))
        length.copy_(torch.tensor(accepted, dtype=torch.int32)[:, None])
        graph.replay()
        expected = static.verify(state=eager)
        static.commit(expected[1], static.slots, static.slots[:, None], length, state=eager)
        assert torch.equal(bits(o), bits(expected[0])) and torch.equal(bits(u), bits(expected[1]))
        assert torch.equal(bits(static.state), bits(eager))


def test_current_stream_of_a_side_stream():
    x = build(BIG, "cuda", torch.bfloat16, torch.bfloat16)
    expected = x.verify()
    q = torch.zeros_like(x.q)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        q.copy_(x.q)
        actual = x.verify(q=q)
    side.synchronize()
    assert torch.equal(bits(actual[0]), bits(expected[0]))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_another_device_than_the_current():
    check_states_on = build(Case("second", 4), "cuda:1", torch.float32, torch.float32)
    assert torch.cuda.current_device() == 0
    check_states(check_states_on, check_verify(check_states_on), [3, 1])


@pytest.mark.parametrize("window", (1, 5, 8, 16))
def test_factored_couplings_agree_with_those_by_token(window, monkeypatch):
    """The fast path of the bounded gate against the general one, bf16 pool, head size 128."""
    x = build(Case("paths", window, K=128, V=128, HV=2), "cuda", torch.bfloat16, torch.bfloat16)
    fast = x.verify()
    monkeypatch.setattr(launch, "MAX_FACTORED_EXPONENT", -1.0)
    general = x.verify()
    for row in range(2):
        oracle, low = x.oracle(row, torch.float64)[1], x.oracle(row, torch.float32)[1]
        assert_within_budget(fast[1][row].cpu(), oracle, low, name="factored", slack=verify_slack(x.state))
        assert_within_budget(general[1][row].cpu(), oracle, low, name="by token", slack=verify_slack(x.state))
