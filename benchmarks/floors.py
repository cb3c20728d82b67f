"""What no implementation can beat: the bytes that must move, over the copy bandwidth of the same run."""

from __future__ import annotations

import statistics
import time

import torch

from benchmarks.shapes import DTYPES, Shape


def token_bytes(shape: Shape) -> dict[str, int]:
    """Bytes of one token of one row, by tensor."""
    data, values = DTYPES[shape.dtype].itemsize, shape.num_value_heads
    keys = shape.heads * shape.head_size * data
    gates = values * (1 if shape.scalar_gate else shape.head_size) * data
    value = values * shape.head_size
    return {
        "q": keys,
        "k": keys,
        "v": value * data,
        "g": gates,
        "beta": values * data,
        "o": value * data,
        "u": 4 * value,
    }


def verify_bytes(shape: Shape) -> int:
    """The states once, the window's inputs in, outputs and float32 corrections out."""
    return shape.state_bytes + shape.batch * shape.window * sum(token_bytes(shape).values())


def commit_bytes(shape: Shape, accepted: int) -> int:
    """The states in and out, the record of the accepted tokens in."""
    token = token_bytes(shape)
    record = accepted * (token["u"] + token["k"] + token["g"])
    return 2 * shape.state_bytes + shape.batch * record


def materialised_bytes(shape: Shape) -> int:
    """A plain window: the states once in, T of them out; no corrections."""
    token = token_bytes(shape)
    inputs = shape.batch * shape.window * (sum(token.values()) - token["u"])
    return (1 + shape.window) * shape.state_bytes + inputs


def copy_bandwidth(device: str, samples: int = 20) -> float:
    """Bytes per second, read and written, of one large copy: the median."""
    on_gpu = torch.device(device).type == "cuda"
    size = min(1 << 30, torch.cuda.mem_get_info()[0] // 4) if on_gpu else 1 << 26
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(samples + 3):
        if on_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            target.copy_(source)
            end.record()
            end.synchronize()
            seconds.append(1e-3 * start.elapsed_time(end))
        else:
            started = time.perf_counter()
            target.copy_(source)
            seconds.append(time.perf_counter() - started)
    return 2 * size / statistics.median(seconds[3:])
