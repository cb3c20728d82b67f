"""What a captured step asks of torch.cuda, told by a stand-in for it: the order, the streams, the device."""

import contextlib

import pytest
import torch

from models.captured_step import CapturedStep, CudaRecorder


class FakeCuda:
    """Notes in ``log`` what a recorder asks of torch.cuda, and keeps the current device and stream."""

    def __init__(self, monkeypatch):
        self.log, self.device, self.current, self.recording = [], 0, "default", None
        cuda = self

        class Stream:
            count = 0

            def __init__(self):
                Stream.count += 1
                self.name, self.device = f"stream {Stream.count}", cuda.device

            def wait_stream(self, other):
                cuda.log.append(f"{self.name} waits for {other if isinstance(other, str) else other.name}")

        class Default(str):
            def wait_stream(self, other):
                cuda.log.append(f"default waits for {other.name}")

        class Graph:
            def replay(self):
                cuda.log.append("replay")

        self.current = Default("default")

        @contextlib.contextmanager
        def device(device):
            before, self.device = self.device, torch.device(device).index
            try:
                yield
            finally:
                self.device = before

        @contextlib.contextmanager
        def stream(stream):
            before, self.current = self.current, stream
            try:
                yield
            finally:
                self.current = before

        @contextlib.contextmanager
        def graph(graph, pool, stream, capture_error_mode):
            assert (pool, capture_error_mode, self.current) == ((0, 5), "thread_local", stream)
            self.log.append(f"record on {stream.name}, device {self.device}")
            yield
            self.log.append("recorded")

        fakes = {"Stream": Stream, "CUDAGraph": Graph, "device": device, "stream": stream, "graph": graph}
        fakes |= {"graph_pool_handle": lambda: (0, 5), "current_stream": lambda: self.current}
        fakes |= {"current_device": lambda: self.device, "synchronize": lambda: self.log.append("synchronize")}
        segments = [
            {"segment_pool_id": pool, "total_size": size} for pool, size in (((0, 5), 3), ((0, 0), 4), ((0, 5), 8))
        ]
        fakes["memory_snapshot"] = lambda: segments
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        clear = lambda: self.log.append("clear workspaces")  # noqa: E731
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", clear, raising=False)


def test_what_is_asked_of_cuda_and_in_which_order(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    captured = CapturedStep(lambda x: (cuda.log.append(f"step on {cuda.current.name}"), x)[1:], warm_up_runs=1)
    captured.recorder = CudaRecorder("cuda:3")
    x, y = torch.zeros(3), torch.zeros(2)
    assert captured.capture(x) == (x,)
    first = [
        *("stream 1 waits for default", "step on stream 1", "default waits for stream 1"),
        *("stream 2 waits for default", "synchronize", "clear workspaces", "record on stream 2, device 3"),
        *("step on stream 2", "recorded", "clear workspaces", "default waits for stream 2"),
    ]
    assert cuda.log == first
    captured.capture(y)
    assert cuda.log[len(first) :] == first
    captured(torch.ones(3))
    assert cuda.log[2 * len(first) :] == ["replay"] and x.tolist() == [1, 1, 1] and y.tolist() == [0, 0]
    assert captured.pool_bytes == 11
    assert (cuda.device, cuda.current) == (0, "default")
    assert CudaRecorder("cuda").device == torch.device("cuda:0")


def test_a_failed_recording_restores_the_stream(monkeypatch):
    cuda, runs = FakeCuda(monkeypatch), []

    def step(x):
        runs.append(x)
        if len(runs) == 2:
            raise ValueError("not while recording")
        return (x,)

    captured = CapturedStep(step, warm_up_runs=1, recorder=CudaRecorder("cuda:3"))
    with pytest.raises(RuntimeError, match="not while recording"):
        captured.capture(torch.zeros(3))
    assert (cuda.device, cuda.current) == (0, "default")
