"""The stages of every batch size, one after the other or in a process each: all compile at once, and are timed in turn."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

import torch

from benchmarks.reporting import available_cores
from benchmarks.step_ways import Setting, measure, prepare


@dataclass(frozen=True)
class Event:
    """A batch size is one stage further: a way compiled, then all of them timed; or it has failed."""

    batch: int
    text: str
    figures: list[dict] = field(default_factory=list)
    failed: bool = False


def stages(
    setting: Setting, batch: int, turn: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
) -> Iterator[Event]:
    """One event for each way, compiled, then one for the figures of all, which are taken when it is asked for."""
    try:
        # All steps share one code object, and the number of compilations that it remembers is limited.
        torch.compiler.reset()
        model, prepared = setting.model(), []
        for way in setting.ways:
            prepared.append(prepare(setting, model, way, batch, turn))
            # While this process waits, the others may want what tuning and the first run took.
            torch.cuda.empty_cache()
            yield Event(batch, f"{way}: compiled in {prepared[-1].seconds:.1f} s")
        figures = measure(prepared, setting, batch)
        text = ", ".join(f"{f['way']} {f['step_ms']:.3f} ms ({f['launch']})" for f in figures)
        yield Event(batch, text, figures)
    except Exception as error:
        traceback.print_exc()
        yield Event(batch, f"failed: {type(error).__name__}: {error}", failed=True)


def in_this_process(setting: Setting, batches: Sequence[int]) -> Iterator[Event]:
    for batch in batches:
        yield from stages(setting, batch)


def in_processes(setting: Setting, batches: Sequence[int], jobs: int) -> Iterator[Event]:
    """``jobs`` batch sizes at a time, each in a process of its own, which keeps what it has compiled until it is timed."""
    with tempfile.NamedTemporaryFile() as lock:
        for first in range(0, len(batches), jobs):
            yield from group_in_processes(setting, batches[first : first + jobs], lock.name)


def group_in_processes(setting: Setting, batches: Sequence[int], lock: str) -> Iterator[Event]:
    context = multiprocessing.get_context("spawn")
    # The compilations that end early leave their cores to the others.
    threads = max(1, 2 * available_cores() // len(batches))
    workers: list[Worker] = []
    try:
        with compile_threads(threads):
            for batch in batches:
                workers.append(Worker(context, setting, batch, lock))
        compiling = {worker.connection: [worker, len(setting.ways)] for worker in workers}
        while compiling:
            for connection in wait(list(compiling)):
                worker, left = compiling[connection]
                yield (event := worker.event())
                compiling[connection][1] = left - 1
                if event.failed or left == 1:
                    del compiling[connection]
        # The device is idle now.
        for worker in workers:
            if not worker.failed:
                yield worker.timed()
    finally:
        for worker in workers:
            worker.end()


@contextlib.contextmanager
def one_at_a_time(lock: str) -> Iterator[None]:
    """A lock of the file ``lock``, which goes with the process that holds it, however that ends."""
    with open(lock) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Worker:
    """The process of one batch size, as the parent sees it."""

    def __init__(self, context: multiprocessing.context.SpawnContext, setting: Setting, batch: int, lock: str) -> None:
        self.batch, self.failed = batch, False
        self.connection, theirs = context.Pipe()
        self.process: SpawnProcess = context.Process(
            target=work, args=(theirs, setting, batch, lock), name=f"batch {batch}"
        )
        self.process.start()
        theirs.close()

    def event(self) -> Event:
        """The next stage; a process that is gone has failed."""
        try:
            event = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            event = Event(self.batch, f"failed: its process ended with status {self.process.exitcode}", failed=True)
        self.failed = event.failed
        return event

    def timed(self) -> Event:
        """Let it take its times. It gives its memory back, and is gone, before the next one begins."""
        with contextlib.suppress(BrokenPipeError):
            self.connection.send("go")
        event = self.event()
        self.end(patience=30)
        return event

    def end(self, patience: float = 0) -> None:
        self.process.join(patience)
        self.process.terminate()
        self.process.join()


def work(connection: Connection, setting: Setting, batch: int, lock: str) -> None:
    """In the process: every stage is sent to the parent; the last one begins when it says so."""
    # Ctrl-C reaches all processes of a terminal; what follows from it is the parent's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ahead = len(setting.ways)
    with contextlib.suppress(EOFError, BrokenPipeError):  # the parent is gone
        for event in stages(setting, batch, functools.partial(one_at_a_time, lock)):
            connection.send(event)
            ahead -= 1
            if ahead == 0:
                connection.recv()


@contextlib.contextmanager
def compile_threads(count: int) -> Iterator[None]:
    """Of processes that start meanwhile: Inductor reads their number, and starts them, when it is imported."""
    name = "TORCHINDUCTOR_COMPILE_THREADS"
    before = os.environ.get(name)
    os.environ[name] = str(count)
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
