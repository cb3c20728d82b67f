"""Continuous batching over the generic model: requests join and leave between steps of one captured graph."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from models.captured_step import CapturedStep
from models.decode import Drafter
from models.drafting import prompt_lookup
from models.prefix_cache import PrefixCache
from models.request_state import RequestState
from models.requests import Phase, Request
from models.scheduler import Scheduler
from models.slots import SlotAllocator
from models.speculation import SpeculativeStep
from models.step_inputs import StepInputs


@dataclasses.dataclass
class EngineStatistics:
    steps: int = 0
    rows: int = 0
    padding_rows: int = 0
    mixed_steps: int = 0  # steps that held rows of more than one phase
    phases: collections.Counter[Phase] = dataclasses.field(default_factory=collections.Counter)
    emitting_rows: int = 0
    emitted_tokens: int = 0
    prefilled_tokens: int = 0  # known tokens run through the model, the last one of a text not counted
    copied_out: int = 0
    dropped: int = 0
    saved_bytes: int = 0  # in host memory now
    peak_running: int = 0

    @property
    def tokens_per_row(self) -> float:
        """Mean tokens that a row emits in a step, of the rows that emit: accepted drafts and the sampled token."""
        return self.emitted_tokens / self.emitting_rows if self.emitting_rows else float("nan")


def batch_buckets(max_running: int, count: int = 8) -> list[int]:
    """Batch sizes to capture: ``max_running`` and its halves, ascending, at most ``count`` of them."""
    sizes = [max_running]
    while sizes[-1] > 1 and len(sizes) < count:
        sizes.append(-(-sizes[-1] // 2))
    return sizes[::-1]


class Engine:
    """Greedy decoding of many requests at once; the text of each is the one it gets alone and without drafts.

    Args:
        step: the model and its pools. Slot 0 is the null slot, so ``num_slots - 1`` requests run at once.
        num_drafts: a step's window is ``1 + num_drafts`` tokens for every row. Prompts are read a window at a time, and
            rows that read, decode and verify share a batch.
        step_fn: what runs a step, called as ``step`` is; by default ``step`` itself, otherwise compiled from it or a
            :class:`models.captured_step.CapturedStep` of it, which needs :meth:`warm_up`.
        drafter: ``drafter(text, n)`` proposes up to n tokens; any proposal is right, good ones are fast.
        prefix_cache: over the same pools, or None.
        buckets: batch sizes that steps are padded to, ascending; the last is at least the number of requests that can
            run at once. By default :func:`batch_buckets`.

    Nothing waits for the device but the one read of a step's results.
    """

    def __init__(
        self,
        step: SpeculativeStep,
        *,
        num_drafts: int,
        step_fn: Callable[..., tuple[Tensor, Tensor]] | None = None,
        drafter: Drafter = prompt_lookup,
        prefix_cache: PrefixCache | None = None,
        buckets: Sequence[int] | None = None,
    ) -> None:
        if num_drafts < 0:
            raise ValueError(f"num_drafts should not be negative, got {num_drafts}")
        first = next(step.pools.buffers())
        self.step_module, self.step_fn = step, step if step_fn is None else step_fn
        self.config, self.pools = step.model.config, step.pools
        self.window, self.drafter, self.prefix_cache = 1 + num_drafts, drafter, prefix_cache
        self.slots = SlotAllocator(first.shape[0])
        self.scheduler = Scheduler(self.slots)
        self.state = RequestState(step.pools)
        self.statistics = EngineStatistics()
        self.max_running = self.slots.available
        sizes = list(batch_buckets(self.max_running) if buckets is None else buckets)
        if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1 or sizes[-1] < self.max_running:
            raise ValueError(
                f"buckets should ascend and reach {self.max_running}, the requests that can run at once, got {sizes}"
            )
        if sizes[-1] > first.shape[0]:
            raise ValueError(f"a batch of {sizes[-1]} needs as many slots, padding rows included: {first.shape[0]}")
        self._inputs = {n: StepInputs(n, self.window, self.config.vocab_size, first.device) for n in sizes}

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    @property
    def allocated_bytes(self) -> dict[str, int]:
        """Bytes on the device that live as long as the engine, from the storages themselves; what CUDA graphs keep for
        their temporaries is not among it."""
        return {
            "pools": sum(buffer.untyped_storage().nbytes() for buffer in self.pools.buffers()),
            "prefix cache": 0 if self.prefix_cache is None else self.prefix_cache.nbytes,
            "step inputs": sum(inputs.nbytes for inputs in self._inputs.values()),
        }

    def submit(self, request: Request) -> None:
        """Queue a request. Raises ValueError if it cannot ever run."""
        needed = request.wanted + self.window
        if needed > self.pools.max_length:
            raise ValueError(
                f"prompt, tokens and window need {needed} positions, the pools hold {self.pools.max_length}"
            )
        if max(request.prompt) >= self.config.vocab_size:
            raise ValueError(
                f"prompt tokens should be below {self.config.vocab_size}, the vocabulary, got {max(request.prompt)}"
            )
        if request.committed or request.finished or len(request.text) != len(request.prompt):
            raise ValueError("the request has run already")
        self.scheduler.submit(request)

    @torch.no_grad()
    def preempt(self, request: Request, *, keep_state: bool) -> None:
        """Take a running request's slot. Its state is copied to host memory, or dropped and computed again later."""
        slot = request.slot
        self.scheduler.preempt(request)
        if keep_state:
            request.saved = self.state.copy_out(slot, request.committed)
            self.statistics.copied_out += 1
            self.statistics.saved_bytes += request.saved.nbytes
        else:
            request.committed = 0
            self.statistics.dropped += 1

    @torch.no_grad()
    def warm_up(self, runs: int = 3) -> None:
        """Run every batch size on padding rows alone: compilation and capture happen here, before the first request.

        Three runs are what Inductor's CUDA graphs take: one to warm up, one to record, one to replay. The largest batch
        comes first, so that the graphs of the others find memory for their temporaries.
        """
        if self.scheduler.running:
            raise RuntimeError("warm_up is for an engine that runs no request")
        for size, inputs in sorted(self._inputs.items(), reverse=True):
            arguments = inputs.fill([], [], [], [], self.slots.padding(size))
            if isinstance(self.step_fn, CapturedStep):
                self.step_fn.capture(*arguments)
            for _ in range(runs):
                self._read(*self.step_fn(*arguments))

    @torch.no_grad()
    def step(self) -> list[tuple[Request, bytes]]:
        """Admit, run one step of every running request, release the finished. Returns what each request got of new text.

        A finished request's tokens behind its end are not among it.
        """
        if isinstance(self.step_fn, CapturedStep) and not self.step_fn.num_graphs:
            raise RuntimeError("a captured step has no graph yet: call warm_up before the first step")
        for request in self.scheduler.admit():
            self._prepare(request)
        running = list(self.scheduler.running)
        if not running:
            if self.scheduler.waiting:
                raise RuntimeError("requests wait, but no slot is free although none of them runs: slots have leaked")
            return []
        statistics = self.statistics
        statistics.peak_running = max(statistics.peak_running, len(running))
        block_size = None if self.prefix_cache is None else self.prefix_cache.block_size
        rows = [request.next_window(self.window, self.drafter, block_size) for request in running]
        size = next(n for n in self._inputs if n >= len(rows))
        arguments = self._inputs[size].fill(
            [row.tokens for row in rows],
            [row.num_drafts for row in rows],
            [row.num_forced for row in rows],
            [request.committed for request in running],
            [request.slot for request in running] + self.slots.padding(size - len(rows)),
        )
        results = self._read(*self.step_fn(*arguments))

        statistics.steps += 1
        statistics.rows += len(rows)
        statistics.padding_rows += size - len(rows)
        statistics.phases.update(row.phase for row in rows)
        statistics.mixed_steps += len({row.phase for row in rows}) > 1
        emitted = []
        # The padding rows trail: what they computed is not looked at.
        for request, row, (num_accepted, *tokens) in zip(running, rows, results[: len(rows)], strict=True):
            before = len(request.text)
            new = request.advance(row, tokens, num_accepted)
            statistics.prefilled_tokens += row.num_forced
            if self.prefix_cache is not None and request.committed % block_size == 0:
                # Before the text is cut: the state has absorbed all of it, and the key has to say so.
                self.prefix_cache.publish(request.text, request.committed, request.slot)
            if new and request.cut():
                self.scheduler.finish(request)
            if new:
                new = bytes(request.text[before:])
                statistics.emitting_rows += 1
                statistics.emitted_tokens += len(new)
                emitted.append((request, new))
        return emitted

    def _prepare(self, request: Request) -> None:
        """Make the slot hold the request's state: its own saved one, a cached prefix', or the empty one."""
        if request.saved is not None:
            self.state.restore(request.slot, request.saved)
            self.statistics.saved_bytes -= request.saved.nbytes
            request.saved = None
            return
        self.state.clear(request.slot)
        if self.prefix_cache is not None:
            request.committed = self.prefix_cache.restore(request.text, request.slot)
            request.restored_tokens += request.committed

    @staticmethod
    def _read(tokens: Tensor, num_accepted: Tensor) -> list[list[int]]:
        """The one place that waits for the device: per row the accepted count, then the tokens."""
        return torch.cat([num_accepted.unsqueeze(1), tokens], dim=1).tolist()
