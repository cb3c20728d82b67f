"""Peak memory of one call, measured from the allocator's own events."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def peak_allocation(call: Callable[[], object], device: torch.device | str) -> int:
    """Bytes that ``call()`` has allocated at its worst moment, beyond what was allocated before it.

    The call should have run just before, so that nothing of a compilation is counted, nor what a library keeps from its first
    call on (cuBLAS its workspaces, until a capture of a CUDA graph frees them).
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        # The result is dropped inside, as the measured caller would.
        call()
    # The profiler's summaries give only net sizes per operator; the running sum needs the single events, in order.
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    if not events:
        raise RuntimeError("the profiler recorded no allocation: peak memory cannot be measured with this PyTorch")
    running = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        running += event.nbytes()
        peak = max(peak, running)
    return peak
