"""Kernels of the fused trial compiled before they are timed, in processes, without a GPU."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import time
from unittest import mock

import torch

from benchmarks import launch_sweep
from benchmarks.compilation import Launch, compile_launch, only_launch
from benchmarks.fused_kernel import Config
from benchmarks.fused_trial import FusedTrial
from benchmarks.launch_sweep import Figures
from benchmarks.shapes import Shape
from recoverssm_ops import layers_ops
from recoverssm_ops.triton import launch_layers

FUSED, MERGED = "fused", "merged"


@dataclasses.dataclass(frozen=True)
class Task:
    """A kernel: "fused", or "verify", "commit" or "merged" commits of ``layers`` as the launchers choose them."""

    kernel: str
    shape: Shape
    config: tuple[tuple[str, int], ...]
    arch: int
    layers: int = 1


def task(kernel: str, shape: Shape, config: Config, arch: int, layers: int = 1) -> Task:
    """Shapes share the fused kernel: no code of it depends on the number of rows or of heads."""
    if kernel == FUSED:
        shape = dataclasses.replace(shape, batch=2, heads=1, value_heads=shape.num_value_heads // shape.heads)
    return Task(kernel, shape, tuple(sorted(config.items())), arch, layers)


def library_tasks(shape: Shape, layers: int, arch: int) -> list[Task]:
    """The operators' kernels, as the launchers choose them for the shape."""
    return [task("verify", shape, {}, arch), task("commit", shape, {}, arch), task(MERGED, shape, {}, arch, layers)]


def noted_launch(task: Task) -> Launch:
    config = dict(task.config)
    if task.kernel not in (FUSED, MERGED):
        return launch_sweep.launched(task.shape, task.kernel, config)[0]
    trial = FusedTrial(task.shape, 1, 1, "cpu")
    if task.kernel == FUSED:
        return only_launch(lambda: trial.fused(0, config))

    def repeated(*arguments: object) -> None:
        launch_layers.commit(*(x * task.layers if isinstance(x, list) else x for x in arguments))

    with mock.patch.object(layers_ops, "kda_commit_layers", repeated):
        return only_launch(trial.committing.commit_all)


def compiled(task: Task) -> Figures:
    """Compile, which leaves the kernel in Triton's cache."""
    torch.set_num_threads(1)
    try:
        made = compile_launch(noted_launch(task), task.arch)
    except Exception as error:
        return Figures(failure=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:80]}")
    return Figures(made.registers, made.spilled_bytes, made.shared_bytes)


def compile_all(tasks: list[Task], jobs: int, deadline: float) -> dict[Task, Figures]:
    """What has been compiled by the deadline, a value of ``time.monotonic``."""
    figures: dict[Task, Figures] = {}
    pool = concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))
    running = {pool.submit(compiled, task): task for task in dict.fromkeys(tasks)}
    try:
        for done in concurrent.futures.as_completed(running, max(0.1, deadline - time.monotonic())):
            figures[running[done]] = done.result()
    except concurrent.futures.TimeoutError:
        pass
    pool.shutdown(wait=False, cancel_futures=True)
    return figures
