"""The ways to run one speculative step, and compiling them in processes of their own."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing.synchronize import Lock

import torch
from torch import Tensor, nn
from torch._dynamo import lookup_backend

from compile_passes import RecoverSSMPass, explain
from models.config import KDAConfig
from models.model import KDAForCausalLM
from models.pools import Pools
from models.speculation import SpeculativeStep

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
UNTOUCHED, REWRITTEN, MERGED = "untouched", "rewritten", "rewritten, merged commits"


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all configurations of a run have in common."""

    config: KDAConfig
    drafts: int
    dtype: str
    state_dtype: str
    device: str
    accepted: float | None

    @property
    def window(self) -> int:
        return 1 + self.drafts

    def state_bytes(self, batch: int) -> int:
        """The recurrent states after one window position, in float32."""
        config = self.config
        layers = sum(not config.is_full_attention(i) for i in range(config.num_layers))
        return batch * layers * config.num_heads * config.head_k_dim * config.head_v_dim * 4

    def model(self) -> KDAForCausalLM:
        torch.manual_seed(0)
        # Made on the device: half a billion random weights take long on a CPU.
        with torch.device(self.device):
            model = KDAForCausalLM(self.config)
        return model.to(DTYPES[self.dtype]).eval().requires_grad_(False)

    def step(self, model: KDAForCausalLM, batch: int) -> SpeculativeStep:
        """Pools as large as the batch: nothing but the batch decides whether the states fit a cache."""
        types = {"dtype": DTYPES[self.dtype], "recurrent_dtype": DTYPES[self.state_dtype]}
        return SpeculativeStep(model, Pools(self.config, batch, 4 * self.window, device=self.device, **types))

    def accepted_lengths(self, batch: int) -> Tensor:
        """``[B]`` in 1 .. T, different per row: uniform, or around the wanted mean, which their own mean then is (to 1/B)."""
        generator = torch.Generator().manual_seed(0)
        if self.accepted is None:
            return torch.randint(1, self.window + 1, (batch,), generator=generator)
        share = (self.accepted - 1) / max(self.drafts, 1)
        lengths = 1 + (torch.rand(batch, self.drafts, generator=generator) < share).sum(1)
        while (missing := round(self.accepted * batch) - int(lengths.sum())) != 0:
            row = int(torch.randint(batch, (1,), generator=generator))
            lengths[row] = (lengths[row] + (1 if missing > 0 else -1)).clamp(1, self.window)
        return lengths

    def inputs(self, batch: int) -> tuple[Tensor, ...]:
        """Random tokens whose accepted lengths are forced."""
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.config.vocab_size, (batch, self.window), generator=generator)
        forced = self.accepted_lengths(batch) - 1
        zeros = torch.zeros(batch, dtype=torch.int64)
        rows = (tokens, forced, forced.clone(), zeros, torch.arange(batch), torch.zeros(batch))
        noise = (torch.zeros(batch, self.window), torch.ones(batch, self.config.vocab_size))
        return tuple(x.to(self.device) for x in (*rows, *noise))


def compile_step(way: str, step: nn.Module, before_first_run: Callable[[], object] = lambda: None) -> Callable:
    """``before_first_run`` is called when all is compiled and nothing has run."""
    options = {} if way == UNTOUCHED else {"post_grad_custom_pre_pass": RecoverSSMPass(merge_layers=way == MERGED)}

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable:
        compiled = lookup_backend("inductor")(graph, inputs, config_patches=options)
        before_first_run()
        return compiled

    return torch.compile(step, backend=backend, fullgraph=True, dynamic=False)


class Turns:
    """In a worker process: whose turn it is to use the device. Kernels are tuned at their first run, and alone."""

    lock: Lock | None = None

    @classmethod
    def initialise(cls, lock: Lock) -> None:
        cls.lock = lock


@torch.no_grad()
def first_call(setting: Setting, way: str, batch: int) -> float:
    """Compile and run one configuration, for what that leaves in the compile caches; seconds of the compilation."""
    step, inputs = setting.step(setting.model(), batch), setting.inputs(batch)
    started, seconds = time.perf_counter(), []

    def compiled() -> None:
        if not seconds:
            seconds.append(time.perf_counter() - started)
            Turns.lock.acquire()

    try:
        compile_step(way, step, compiled)(*inputs)
        synchronize(setting.device)
    finally:
        if seconds:
            Turns.lock.release()
    return seconds[0]


@torch.no_grad()
def rewritten_layers(setting: Setting, batch: int) -> dict[str, int]:
    """How many layers the pass rewrites and how many it refuses, by its own report."""
    report = explain(setting.step(setting.model(), batch), *setting.inputs(batch))
    return {"rewritten": report.matched, "refused": report.refused}


def in_parallel(
    setting: Setting, configurations: Sequence[tuple[str, int]], jobs: int, threads: int
) -> Iterator[tuple[tuple[str, int] | None, object]]:
    """Warm the compile caches on disk from ``jobs`` processes, each with ``threads`` of Inductor's own for its kernels.

    Yields each (way, batch) and its :func:`first_call` as it is done, and once None and :func:`rewritten_layers`.
    """
    context = multiprocessing.get_context("spawn")
    started_with = {"mp_context": context, "initializer": Turns.initialise, "initargs": (context.Lock(),)}
    with ProcessPoolExecutor(jobs, **started_with) as pool:
        # The untouched step takes longest, so it begins first.
        order = sorted(configurations, key=lambda configuration: configuration[0] != UNTOUCHED)
        # Processes start as they are given work.
        with compile_threads(threads):
            futures = {pool.submit(first_call, setting, *c): c for c in order}
            futures[pool.submit(rewritten_layers, setting, configurations[0][1])] = None
        for future in as_completed(futures):
            yield futures[future], future.result()


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


def synchronize(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


@dataclasses.dataclass
class Prepared:
    """A configuration that is ready to be timed."""

    way: str
    batch: int
    compiled: Callable[..., tuple[Tensor, ...]]
    inputs: tuple[Tensor, ...]
    seconds: float  # of the first call: tracing, and compiling what the caches did not hold

    def call(self) -> None:
        self.compiled(*self.inputs)


@torch.no_grad()
def prepare(setting: Setting, model: KDAForCausalLM, way: str, batch: int) -> Prepared:
    prepared = Prepared(way, batch, compile_step(way, setting.step(model, batch)), setting.inputs(batch), 0.0)
    started = time.perf_counter()
    prepared.call()
    synchronize(setting.device)
    prepared.seconds = time.perf_counter() - started
    return prepared
