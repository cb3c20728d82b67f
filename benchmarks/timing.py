"""Samples of what several ways of the same work take, alternating within one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

from models.captured_step import CapturedStep, CudaRecorder


def sample(call: Callable[[], object], device: str) -> float:
    """Milliseconds of one call."""
    if torch.device(device).type == "cpu":
        started = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - started)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # The device is kept busy while the host enqueues, or the host's own time would be measured.
    torch.cuda._sleep(2_000_000)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def alternate(
    calls: Mapping[str, Callable[[], object]],
    samples: int,
    device: str,
    advance: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Milliseconds by name. What changes while measuring (clocks, temperature) then changes for all of them alike."""
    taken = {name: [] for name in calls}
    for _ in range(samples):
        for name, call in calls.items():
            taken[name].append(sample(call, device))
        advance()
    return taken


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def replayed(work: Callable[[], object], device: str) -> Callable[[], object]:
    """``work`` as one CUDA graph, after the runs that a capture needs; on the CPU ``work`` itself, run once."""

    def step() -> tuple:
        work()
        return ()

    if torch.device(device).type == "cpu":
        work()
        return work
    captured = CapturedStep(step, recorder=CudaRecorder(device))
    captured.capture()
    return captured
