"""One CUDA graph a batch size (behaviours 11, 15, 31, 32). Without a GPU: the same staging and bookkeeping, with a recorder
that runs the step again where a graph would be replayed."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from graphs import FakeRecorder, check_replays, make_step, staged
from rich.console import Console
from serving import DRAFTS, VOCAB, model_on
from test_serve_compiled import build, serve_random
from torch._dynamo.utils import counters
from torch._inductor import config

from models.captured_step import CapturedStep, CudaRecorder
from models.decode import decode
from models.pools import Pools
from models.serve_report import summary
from models.soak import SOAK_CONFIG
from models.speculation import SpeculativeStep
from models.workload import SoloTexts

ROOT = Path(__file__).parent.parent
SIZES = (1, 2, 4)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
BACKENDS = ["eager", "inductor", "recoverssm"]


def compiled(step, backend, **options):
    return (
        step if backend == "eager" else torch.compile(step, backend=backend, fullgraph=True, dynamic=False, **options)
    )


def capture_all(captured, device, sizes=SIZES):
    """Capture every batch size, the largest first, on rows of padding; returns the inputs by size."""
    inputs = {size: staged(size, device) for size in sizes}
    for size in sorted(sizes, reverse=True):
        captured.capture(*inputs[size].fill([], [], [], [], list(range(size))))
    return inputs


# Without a GPU.


def test_b11_b15_replays_equal_direct_steps():
    step, recorder = make_step("cpu"), FakeRecorder()
    captured = CapturedStep(step, recorder=recorder)
    inputs = capture_all(captured, "cpu")
    assert (recorder.warm_ups, recorder.recordings, recorder.replays) == (6, 3, 0)
    check_replays(captured, step.pools, inputs)
    assert (recorder.warm_ups, recorder.recordings, recorder.replays) == (6, 3, 40)


def test_capture_disturbs_no_slot_but_those_of_its_rows():
    step = make_step("cpu")
    before = {name: buffer.clone() for name, buffer in step.pools.named_buffers()}
    capture_all(CapturedStep(step, recorder=FakeRecorder()), "cpu")
    for name, buffer in step.pools.named_buffers():
        assert torch.equal(buffer[4:], before[name][4:]), name
        assert not torch.equal(buffer[:4], before[name][:4]), name


def test_an_engine_serves_from_graphs_that_warm_up_recorded():
    recorder = FakeRecorder()
    engine = build("cpu", lambda step: CapturedStep(step, recorder=recorder), [1, 2, 4])
    serve_random(engine, "cpu")
    assert recorder.recordings == engine.step_fn.num_graphs == 3
    # warm_up replays each three times.
    assert recorder.replays == engine.statistics.steps + 9
    console = Console(record=True, width=160, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(summary(engine, engine.allocated_bytes, [], 1.0, ""))
    assert "3, 2 KiB beside the planned memory" in console.export_text()


def test_other_tensors_are_copied_and_the_captured_ones_are_not():
    step = make_step("cpu")
    captured = CapturedStep(step, recorder=FakeRecorder())
    inputs = staged(2, "cpu")
    static = inputs.fill([], [], [], [], [0, 1])
    results = captured.capture(*static)
    versions = [x._version for x in static]
    assert captured(*static) is results
    assert [x._version for x in static] == versions
    given = [x.clone() for x in static]
    given[4].copy_(torch.tensor([3, 4]))
    before = step.pools.of("recurrent", 0)[3:5].clone()
    assert captured(*given) is results
    assert static[4].tolist() == [3, 4]
    assert not torch.equal(step.pools.of("recurrent", 0)[3:5], before)


def test_decode_runs_on_a_captured_step():
    """The loop makes new tensors every step."""
    pools = Pools(SOAK_CONFIG, 2, 64, dtype=torch.float64)
    captured = CapturedStep(SpeculativeStep(model_on("cpu"), pools), recorder=FakeRecorder())
    captured.capture(*staged(2, "cpu").fill([], [], [], [], [0, 1]))
    prompts = [b"\1\2\3\1\2\3\1", b"\5\4\5\4\5"]
    decoded = decode(captured, pools, prompts, num_tokens=20, num_drafts=DRAFTS, vocab_size=VOCAB)
    solo = SoloTexts(model_on("cpu"), 64, dtype=torch.float64)
    assert decoded.continuations == [solo.continuation(prompt, 20) for prompt in prompts]


def test_solo_texts_of_a_captured_step_are_those_of_a_launched_one():
    recorder = FakeRecorder()
    captured = SoloTexts(model_on("cpu"), 64, recorder=recorder, dtype=torch.float64)
    launched = SoloTexts(model_on("cpu"), 64, dtype=torch.float64)
    for prompt in (b"\1\2\3\1", b"\5", b"\1\2\3\1\4"):
        assert captured.continuation(prompt, 20) == launched.continuation(prompt, 20)
    # Every token of prompt and text but the last is one replay.
    assert recorder.recordings == 1 and recorder.replays == sum(n + 20 - 1 for n in (4, 1, 5))


def test_shapes_that_were_not_captured_are_refused_and_nothing_runs():
    step = make_step("cpu")
    captured = CapturedStep(step, recorder=FakeRecorder())
    capture_all(captured, "cpu")
    before = [buffer.clone() for buffer in step.pools.buffers()]
    with pytest.raises(RuntimeError, match=r"no graph was captured for int64 \[3, 6\], int64 \[3\].*call capture with"):
        captured(*staged(3, "cpu").fill([], [], [], [], [0, 1, 2]))
    arguments = list(staged(2, "cpu").fill([], [], [], [], [0, 1]))
    arguments[4] = arguments[4].int()
    with pytest.raises(RuntimeError, match=r"no graph was captured for .* int32 \[2\]"):
        captured(*arguments)
    assert all(torch.equal(x, y) for x, y in zip(step.pools.buffers(), before, strict=True))


def test_capturing_twice_records_once():
    recorder = FakeRecorder()
    captured = CapturedStep(make_step("cpu"), recorder=recorder)
    first = captured.capture(*staged(2, "cpu").fill([], [], [], [], [0, 1]))
    assert captured.capture(*staged(2, "cpu").fill([], [], [], [], [2, 3])) is first
    assert recorder.recordings == 1 and captured.num_graphs == 1


def test_one_tensor_for_two_arguments_is_refused():
    captured = CapturedStep(lambda a, b: (a + b,), recorder=FakeRecorder())
    x = torch.zeros(3)
    with pytest.raises(ValueError, match="memory of its own"):
        captured.capture(x, x)
    (result,) = captured.capture(x, x.clone())
    captured(torch.ones(3), torch.full((3,), 2.0))
    assert result.tolist() == [3, 3, 3]


class Failing(FakeRecorder):
    """Fails steps of five numbers in the recording, and ends that with an error of its own, as CUDA does."""

    recording = False

    def step(self, x):
        if self.recording and len(x) == 5:
            raise ValueError("something that cannot be captured")
        return (x + 1,)

    def record(self, run):
        self.recording = True
        try:
            return super().record(run)
        except ValueError as error:
            raise RuntimeError("operation failed due to a previous error during capture") from error
        finally:
            self.recording = False


def test_a_failed_capture_says_why_and_leaves_the_others():
    recorder = Failing()
    captured = CapturedStep(recorder.step, recorder=recorder)
    captured.capture(torch.zeros(3))
    with pytest.raises(RuntimeError) as error:
        captured.capture(torch.zeros(5))
    message = str(error.value)
    assert "could not be captured as a CUDA graph for float32 [5]" in message
    assert "First error: ValueError: something that cannot be captured" in message and ".item()" in message
    with pytest.raises(RuntimeError, match=r"no graph was captured for float32 \[5\]"):
        captured(torch.zeros(5))
    assert captured(torch.ones(3))[0].tolist() == [2, 2, 2]
    captured.capture(torch.zeros(7))
    assert captured.num_graphs == 2


def test_without_a_gpu_the_error_says_what_to_do():
    captured = CapturedStep(make_step("cpu"))
    with pytest.raises(ValueError, match="tensors are on cpu: call the step itself there"):
        captured.capture(*staged(1, "cpu").fill([], [], [], [], [0]))
    engine = build("cpu", CapturedStep, [4])
    with pytest.raises(RuntimeError, match="call warm_up before the first step"):
        engine.step()
    with pytest.raises(ValueError, match="tensors are on cpu"):
        engine.warm_up()
    with pytest.raises(ValueError, match="warm_up_runs should be at least 1"):
        CapturedStep(make_step("cpu"), warm_up_runs=0)


# On a GPU.


def sizes_for(backend):
    """Compiling one takes far longer than all that is tested with it."""
    return SIZES if backend == "eager" else (1, 4)


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("backend", BACKENDS)
def test_b11_b15_b32_graphs_replay_any_rows(backend):
    """Bit for bit what the same function does when it is launched. Nothing but the captured step keeps that alive.

    Then on another stream than the capture's, which is late: inputs are staged, the graph replayed and its results read on it.
    """
    torch.compiler.reset()
    step = make_step("cuda")
    captured = CapturedStep(compiled(step, backend))
    inputs = capture_all(captured, "cuda", sizes_for(backend))
    gc.collect()
    torch.cuda.empty_cache()
    check_replays(captured, step.pools, inputs, on_step=gc.collect)
    assert captured.num_graphs == len(inputs) and captured.pool_bytes > 0

    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        check_replays(captured, step.pools, inputs, on_step=lambda: torch.cuda._sleep(2_000_000))
        assert torch.cuda.current_stream() == side
    side.synchronize()


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("backend", BACKENDS)
def test_b11_captured_by_hand_an_engine_serves_the_solo_texts(backend):
    torch.compiler.reset()
    buckets = [1, 2, 4] if backend == "eager" else [2, 4]
    engine = build("cuda", lambda step: CapturedStep(compiled(step, backend)), buckets)
    serve_random(engine, "cuda")
    assert engine.step_fn.num_graphs == len(buckets)


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_b31_reduce_overhead_skips_no_graph(backend):
    """Any acceptance, any mix of rows, any padding, changed slots: the same two graphs are replayed."""
    torch.compiler.reset()
    counters.clear()
    # A skipped graph is an error.
    with config.patch({"triton.cudagraph_or_error": True}):
        engine = build("cuda", lambda step: compiled(step, backend, mode="reduce-overhead"), [2, 4])
        serve_random(engine, "cuda")
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.cuda
@needs_cuda
def test_b32_captured_on_another_stream_than_the_default():
    step = make_step("cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        captured = CapturedStep(step)
        inputs = capture_all(captured, "cuda")
        assert torch.cuda.current_stream() == side
    torch.cuda.current_stream().wait_stream(side)
    check_replays(captured, step.pools, inputs)


@pytest.mark.cuda
@needs_cuda
def test_b32_graphs_of_inductor_and_others_beside_it_change_nothing():
    """They clear workspaces, allocate from pools of their own, and are collected."""
    torch.compiler.reset()
    step = make_step("cuda")
    captured = CapturedStep(step)
    inputs = capture_all(captured, "cuda")
    third = make_step("cuda")
    graphed = torch.compile(third, fullgraph=True, dynamic=False, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(4):
            graphed(*staged(4, "cuda").fill([], [], [], [], [0, 1, 2, 3]))
    capture_all(CapturedStep(make_step("cuda")), "cuda")
    gc.collect()
    torch.cuda.empty_cache()
    filler = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(64)]
    check_replays(captured, step.pools, inputs)
    assert all(x.isnan().all() for x in filler)


@pytest.mark.cuda
@needs_cuda
def test_capture_disturbs_no_slot_but_those_of_its_rows_on_a_gpu():
    step = make_step("cuda")
    before = {name: buffer.clone() for name, buffer in step.pools.named_buffers()}
    capture_all(CapturedStep(step), "cuda")
    torch.cuda.synchronize()
    for name, buffer in step.pools.named_buffers():
        assert torch.equal(buffer[4:], before[name][4:]), name


FAILS = """
import torch
from models.captured_step import CapturedStep
captured = CapturedStep(lambda x: (x * x.sum().item(),))
try:
    captured.capture(torch.ones(3, device="cuda"))
except RuntimeError as error:
    print(error)
print("stream restored:", torch.cuda.current_stream() == torch.cuda.default_stream())
"""


@pytest.mark.cuda
@needs_cuda
def test_waiting_for_the_device_in_a_capture_is_explained():
    """In a process of its own: a failed capture may leave CUDA in a bad state."""
    done = subprocess.run([sys.executable, "-c", FAILS], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert "could not be captured as a CUDA graph for float32 [3]" in done.stdout, done.stdout + done.stderr
    assert "nothing may wait for the device (.item()" in done.stdout
    assert "stream restored: True" in done.stdout


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_device_of_the_tensors_is_that_of_the_graph():
    step = make_step("cuda:1")
    captured = CapturedStep(step)
    inputs = capture_all(captured, "cuda:1")
    check_replays(captured, step.pools, inputs)
    assert captured.recorder.device.index == 1 and torch.cuda.current_device() == 0
    assert CudaRecorder("cuda").device.index == 0
