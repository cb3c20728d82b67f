"""A step as one CUDA graph per batch size, recorded by hand: nothing but a replay is launched from the host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

StepFunction = Callable[..., tuple[Tensor, ...]]


class Recorder(Protocol):
    """What runs and records a step; :class:`CudaRecorder`, or a test's own."""

    def warm_up(self, run: Callable[[], object]) -> None: ...

    def record(self, run: Callable[[], tuple[Tensor, ...]]) -> tuple[Callable[[], object], tuple[Tensor, ...]]:
        """Returns what replays the recorded work, and the tensors that each replay writes."""
        ...


class CudaRecorder:
    """Records on streams of one device; all its graphs allocate from one memory pool."""

    def __init__(self, device: torch.device | str) -> None:
        device = torch.device(device)
        if device.type != "cuda":
            raise ValueError(
                f"a CUDA graph records what runs on a CUDA GPU, but the step's tensors are on {device}: call the step "
                "itself there"
            )
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        with torch.cuda.device(self.device):
            # Streams of our own: torch.cuda.graph's default one belongs to whatever device was current at its first use.
            self._warm_up_stream, self._stream = torch.cuda.Stream(), torch.cuda.Stream()
            self.pool = torch.cuda.graph_pool_handle()

    def warm_up(self, run: Callable[[], object]) -> None:
        """Off the stream of the capture, and after what was enqueued before; what comes later waits for it."""
        with self._on(self._warm_up_stream):
            run()

    def record(self, run: Callable[[], tuple[Tensor, ...]]) -> tuple[Callable[[], object], tuple[Tensor, ...]]:
        graph = torch.cuda.CUDAGraph()
        with self._on(self._stream):
            torch.cuda.synchronize()
            # Workspaces of cuBLAS that the capture finds would stay outside the graph's memory, and Inductor's own
            # graphs free them at will. Without any, the capture makes its own, which live as long as its memory pool.
            torch._C._cuda_clearCublasWorkspaces()
            # Other threads may use the device meanwhile.
            settings = {"pool": self.pool, "stream": self._stream, "capture_error_mode": "thread_local"}
            with torch.cuda.graph(graph, **settings):
                outputs = run()
            torch._C._cuda_clearCublasWorkspaces()
        return graph.replay, outputs

    @property
    def pool_bytes(self) -> int:
        """Device memory that the graphs hold for their temporaries and results."""
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if tuple(s.get("segment_pool_id", ())) == tuple(self.pool))

    @contextlib.contextmanager
    def _on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            stream.wait_stream(current)
            # Also restores the stream after a capture that failed, where torch.cuda.graph leaves its own current.
            with torch.cuda.stream(stream):
                yield
            current.wait_stream(stream)


class CapturedStep:
    """Replays ``step`` from a graph of the call's shapes; :meth:`capture` has to have recorded it.

    ::

        captured = CapturedStep(step)  # eager, or compiled without CUDA graphs of its own
        captured.capture(*arguments)  # padding rows: the runs before the recording do advance the rows' states
        tokens, num_accepted = captured(*other_arguments)

    The arguments of :meth:`capture` become the graph's inputs, and are kept. A call's arguments are copied into them, except
    those that *are* them: who fills the same tensors before every call pays for no copy. Results are always the same tensors
    for the same shapes, valid until the next call of any shapes (the graphs share their memory): read or copy them first.

    A replay repeats the recorded work on whatever the inputs, the weights and the pools hold by then; numbers and decisions
    of the host are those of the recording. It runs on the current stream.

    Args:
        step: a function of tensors, all on one device, that returns a tuple of tensors. Kept, and with it the kernels that
            the graphs launch.
        warm_up_runs: runs on a side stream before each recording. In them kernels are compiled, tuned and loaded and
            libraries make their handles, none of which may happen in a capture.
        recorder: by default a :class:`CudaRecorder` for the device of the first capture.
    """

    def __init__(self, step: StepFunction, *, warm_up_runs: int = 2, recorder: Recorder | None = None) -> None:
        if warm_up_runs < 1:
            raise ValueError(
                f"warm_up_runs should be at least 1: nothing may run first in a capture, got {warm_up_runs}"
            )
        self.step, self.warm_up_runs, self.recorder = step, warm_up_runs, recorder
        self._graphs: dict[tuple, tuple[tuple[Tensor, ...], Callable[[], object], tuple[Tensor, ...]]] = {}

    @property
    def num_graphs(self) -> int:
        """Graphs recorded."""
        return len(self._graphs)

    @torch.no_grad()
    def capture(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        """Record the step for these shapes; a second time for the same shapes does nothing.

        The step runs ``warm_up_runs`` times and is recorded, not run, once more: give rows whose state is nobody's. Larger
        batches first: their memory then serves the smaller ones.

        Returns:
            The results' tensors; they hold nothing until the first call.

        Raises:
            ValueError: tensors that are not on a GPU, or one tensor for two arguments (a call could give it one value only).
            RuntimeError: the step cannot be recorded; nothing is kept of it, the graphs recorded before stay.
        """
        shapes = _shapes(arguments)
        if shapes not in self._graphs:
            places = [x.data_ptr() for x in arguments if x.numel()]
            if len(set(places)) < len(places):
                raise ValueError(
                    "each argument of a captured step should have memory of its own, but two begin at one place"
                )
            if self.recorder is None:
                self.recorder = CudaRecorder(arguments[0].device)

            failures = []

            def run() -> tuple[Tensor, ...]:
                try:
                    return self.step(*arguments)
                except Exception as error:
                    failures.append(error)
                    raise

            for _ in range(self.warm_up_runs):
                self.recorder.warm_up(run)
            try:
                replay, outputs = self.recorder.record(run)
            except Exception as error:
                # Ending an invalid capture raises too: the step's own error says more.
                first = failures[0] if failures else error
                message = _FAILURE.format(shapes=_readable(arguments), error=f"{type(first).__name__}: {first}")
                raise RuntimeError(message) from first
            self._graphs[shapes] = (tuple(arguments), replay, outputs)
        return self._graphs[shapes][2]

    @torch.no_grad()
    def __call__(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        """Raises RuntimeError for shapes that were not captured: capturing now would advance the rows' states."""
        if (graph := self._graphs.get(_shapes(arguments))) is None:
            raise RuntimeError(
                f"no graph was captured for {_readable(arguments)}: call capture with padding rows of these shapes and "
                "dtypes first (an engine does it in warm_up)"
            )
        inputs, replay, outputs = graph
        for static, given in zip(inputs, arguments, strict=True):
            if given is not static:
                static.copy_(given)
        replay()
        return outputs

    @property
    def pool_bytes(self) -> int:
        """Device memory that the graphs hold beside their inputs."""
        return 0 if self.recorder is None else getattr(self.recorder, "pool_bytes", 0)


_FAILURE = (
    "the step could not be captured as a CUDA graph for {shapes}. First error: {error}\nDuring a capture nothing may wait "
    "for the device (.item(), .tolist(), a Python branch on a tensor, a mask used as an index), copy from pageable host "
    "memory, or compile and load a kernel for the first time. CUDA_LAUNCH_BLOCKING=1 should not be set; without graphs the "
    "step runs as it is."
)


def _shapes(arguments: Sequence[Tensor]) -> tuple:
    return tuple((argument.shape, argument.dtype) for argument in arguments)


def _readable(arguments: Sequence[Tensor]) -> str:
    return ", ".join(f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in arguments)
