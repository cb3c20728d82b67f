"""Remembered launches on a GPU: the bits of Triton's own, on the stream and device that are current, seen by profilers."""

import pytest
import torch

pytest.importorskip("triton")
from kernel_cases import Case, bits, build
from triton import knobs
from triton.runtime import JITFunction

from recoverssm_ops.triton import cached_launch, launch, launch_conv

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

CASES = (
    Case("gluon", 8, K=128, V=128, H=2, HV=4, batch=32),
    Case("few", 5, K=64, V=64, HV=2),
    Case("unbounded", 4, K=40, V=24, HV=2, gate="unbounded", strided=True),
    Case("packed", 4, H=2, HV=4, lengths=(4, 1, 3), tail=2, padding=(1,)),
    Case("scalar", 6, scalar_gate=True, slots="none", batch=3),
)
POOLS = {"bf16": torch.bfloat16, "fp32": torch.float32}


@pytest.fixture
def bound(monkeypatch):
    """The kernels that Triton's binder launched, from the first launch of a fresh memory on."""
    run, kernels = JITFunction.run, []

    def noted(self, *arguments, **keywords):
        kernels.append(self)
        return run(self, *arguments, **keywords)

    monkeypatch.setattr(JITFunction, "run", noted)
    monkeypatch.setattr(cached_launch, "_known", {})
    return kernels


def step(x, conv_x, taps, history):
    """Every operator once, on copies of the pools; all that they write."""
    pool, columns = x.storage.clone(), history.clone()
    state = pool.as_strided(x.state.shape, x.state.stride(), x.state.storage_offset())
    source = x.source().clamp(min=0) if x.slots is None else x.slots
    length = torch.full((x.case.rows, 1), 2, dtype=x.case.index_dtype, device=pool.device)
    o, u = x.verify(state=state)
    x.commit(u, source, source[:, None], length, state=state)
    recovered = x.recover(state[: x.case.rows], u, length[:, 0])
    y = launch_conv.verify(conv_x, taps, None, columns, source, x.cu_seqlens, x.case.T, True, x.case.pad_slot_id)
    launch_conv.commit(columns, conv_x, source, source[:, None], length, x.cu_seqlens, x.case.pad_slot_id)
    return [bits(written) for written in (o, u, pool, recovered, y, columns)]


def convolution(x, device="cuda"):
    rng = torch.Generator().manual_seed(1)
    lead = x.q.shape[:2]
    shapes = ((*lead, 48), (48, 4), (x.state.shape[0], 48, 3))
    return [torch.randn(shape, generator=rng).to(device) for shape in shapes]


def by_triton(arguments):
    with pytest.MonkeyPatch.context() as patch:
        for module in (launch, launch_conv):
            patch.setattr(module, "relaunch", cached_launch.launch_described)
        return step(*arguments)


@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_bits_are_those_of_tritons_launches(case, pool, bound):
    first, x = (build(case, "cuda", torch.bfloat16, pool, seed) for seed in (0, 1))
    step(first, *convolution(first))
    assert len(bound) == 5
    arguments = (x, *convolution(x))
    expected = by_triton(arguments)
    bound.clear()
    actual = step(*arguments)
    assert not bound, "every launch of the second step should be found again"
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("shift", (1, 2, 4, 8))
def test_a_pool_that_lies_otherwise_is_not_taken_for_an_aligned_one(shift, bound):
    x = build(CASES[0], "cuda", torch.bfloat16, torch.bfloat16)
    aligned = x.verify()
    moved = torch.empty(x.state.numel() + shift, dtype=x.state.dtype, device="cuda")[shift:].view(x.state.shape)
    moved.copy_(x.state)
    actual = [x.verify(state=moved) for _ in range(2)]
    assert len(bound) == 2 if shift % 8 else len(bound) == 1
    for o, u in actual:
        torch.testing.assert_close(u, aligned[1], rtol=1e-3, atol=1e-3)
        assert torch.equal(bits(o), bits(actual[0][0])) and torch.equal(bits(u), bits(actual[0][1]))


def test_a_graph_captures_remembered_launches(bound):
    x = build(CASES[0], "cuda", torch.bfloat16, torch.bfloat16)
    arguments = (x, *convolution(x))
    expected = step(*arguments)
    bound.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = step(*arguments)
    assert not bound
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_on_a_side_stream(bound):
    """Launched on any other stream, the operators would read the pools before they are filled."""
    x = build(CASES[1], "cuda", torch.bfloat16, torch.bfloat16)
    arguments = (x, *convolution(x))
    expected = step(*arguments)
    late = [torch.zeros_like(tensor) for tensor in arguments[1:]]
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    bound.clear()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        for to, tensor in zip(late, arguments[1:], strict=True):
            to.copy_(tensor)
        actual = step(x, *late)
    side.synchronize()
    assert not bound
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_device_has_kernels_of_its_own(bound):
    results = []
    for device in ("cuda:0", "cuda:1"):
        x = build(CASES[1], device, torch.bfloat16, torch.bfloat16)
        arguments = (x, *convolution(x, device))
        bound.clear()
        results.append([[y.cpu() for y in step(*arguments)] for _ in range(2)])
        assert len(bound) == 5
        assert torch.cuda.current_device() == 0
    assert all(torch.equal(a, b) for other in results[1] for a, b in zip(results[0][0], other, strict=True))


def test_a_profilers_hook_sees_every_launch(bound):
    x = build(CASES[1], "cuda", torch.bfloat16, torch.bfloat16)
    x.verify()
    entered = []

    def enter(metadata):
        entered.append(metadata.get()["name"])

    knobs.runtime.launch_enter_hook.add(enter)
    try:
        x.verify()
    finally:
        knobs.runtime.launch_enter_hook.remove(enter)
    x.verify()
    assert entered == ["verify_async_kernel"] and len(bound) == 2


def test_a_tensor_on_the_cpu_is_refused_as_triton_refuses_it(bound):
    x = build(CASES[1], "cuda", torch.bfloat16, torch.bfloat16)
    x.verify()
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot be accessed from Triton"):
            x.verify(k=x.k.cpu())
