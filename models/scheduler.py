"""Who runs: admission in order of arrival, preemption, release."""

from __future__ import annotations

import random
from collections import deque

from models.requests import Request
from models.slots import SlotAllocator


class Scheduler:
    """Waiting and running requests. Every running request holds a slot and has a row in every step."""

    def __init__(self, slots: SlotAllocator) -> None:
        self.slots = slots
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running)

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    def admit(self) -> list[Request]:
        """Give free slots to those who waited longest; their slots still hold what the last holder left."""
        admitted = []
        while self.waiting and self.slots.available:
            request = self.waiting.popleft()
            request.slot = self.slots.allocate()
            self.running.append(request)
            admitted.append(request)
        return admitted

    def finish(self, request: Request) -> None:
        self._leave(request)
        request.finished = True

    def preempt(self, request: Request) -> None:
        """Take the slot away. The request waits behind all others: in front, it would get the same slot back at once."""
        self._leave(request)
        request.preemptions += 1
        self.waiting.append(request)

    def _leave(self, request: Request) -> None:
        if request not in self.running:
            raise ValueError("the request is not running")
        self.running.remove(request)
        self.slots.release(request.slot)
        request.slot = None


class RandomPreemption:
    """Preempts one running request with probability ``rate`` before a step, as an engine short of memory would."""

    def __init__(self, rate: float, generator: random.Random) -> None:
        if not 0 <= rate <= 1:
            raise ValueError(f"the preemption rate should be in 0..1, got {rate}")
        self.rate, self.generator = rate, generator

    def choose(self, running: list[Request]) -> tuple[Request, bool] | None:
        """The request and whether its state is kept (copied out) or dropped (computed again); None: nobody."""
        if not running or self.generator.random() >= self.rate:
            return None
        return self.generator.choice(running), self.generator.random() < 0.5
