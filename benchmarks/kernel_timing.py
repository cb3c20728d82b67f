"""Kernel times: CUDA-graph replays of many launches, the variants taking turns; the clock on the CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """Microseconds per launch: median and quartiles of the samples."""

    median: float
    low: float
    high: float


def captured(call: Callable[[], object], device: str) -> Callable[[], object]:
    """``call`` as one CUDA graph, after a run that compiles what it launches. On the CPU: ``call`` itself."""
    call()
    if torch.device(device).type != "cuda":
        return call
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def microseconds(replay: Callable[[], object], device: str) -> float:
    """One run of ``replay``."""
    if torch.device(device).type != "cuda":
        started = time.perf_counter()
        replay()
        return 1e6 * (time.perf_counter() - started)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # The device is kept busy while the host enqueues, or the host's own time would be measured.
    torch.cuda._sleep(600_000)
    start.record()
    replay()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end)


def interleaved(
    replays: dict[str, Callable[[], object]], launches: int, samples: int, device: str
) -> dict[str, Timing]:
    """Time per launch of every variant; sample i of all of them is taken before sample i + 1 of any."""
    taken: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(2):
        for replay in replays.values():
            replay()
    for _ in range(max(2, samples)):
        for name, replay in replays.items():
            taken[name].append(microseconds(replay, device) / launches)
    timings = {}
    for name, values in taken.items():
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        timings[name] = Timing(median, low, high)
    return timings


def empty_launch(device: str, samples: int = 15) -> float:
    """Microseconds of a launch that does next to nothing, inside a graph: the least that any kernel takes."""
    x = torch.zeros(1, device=device)

    def call() -> None:
        for _ in range(64):
            x.add_(1)

    return interleaved({"empty": captured(call, device)}, 64, samples, device)["empty"].median


def cache_bytes(device: str) -> int:
    """The GPU's L2 cache; on the CPU nothing is claimed about caches."""
    return torch.cuda.get_device_properties(device).L2_cache_size if torch.device(device).type == "cuda" else 0


def sets_for_cold(bytes_of_a_launch: int, device: str) -> int:
    """How many distinct inputs, used in turn, keep every launch from finding its own in the cache."""
    if torch.device(device).type != "cuda":
        return 2
    return max(8, min(256, -(-3 * cache_bytes(device) // bytes_of_a_launch)))
