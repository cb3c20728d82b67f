"""Requests that arrive over time, and the loop that serves them."""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from models.captured_step import CapturedStep, Recorder
from models.decode import decode
from models.engine import Engine
from models.model import KDAForCausalLM
from models.pools import Pools
from models.prompts import held_out_prompts
from models.requests import Request
from models.scheduler import RandomPreemption
from models.speculation import SpeculativeStep
from models.step_inputs import StepInputs


@dataclasses.dataclass(frozen=True)
class Arrival:
    step: int  # the engine's step before which the request is submitted
    request: Request


def arriving(requests: Iterable[Request], rate: float, generator: random.Random) -> list[Arrival]:
    """Independent arrivals, ``rate`` a step on average."""
    if rate <= 0:
        raise ValueError(f"the arrival rate should be positive, got {rate}")
    now, arrivals = 0.0, []
    for request in requests:
        arrivals.append(Arrival(int(now), request))
        now += generator.expovariate(rate)
    return arrivals


def held_out_requests(count: int, prompt_length: int, max_new_tokens: int, generator: random.Random) -> list[Request]:
    """Requests over excerpts of held-out modules. Several continue one excerpt, from different places of it."""
    excerpts = held_out_prompts(max(1, count // 4), prompt_length)
    requests = []
    for _ in range(count):
        excerpt = generator.choice(excerpts)
        length = generator.randint(-(-len(excerpt) // 2), len(excerpt))
        requests.append(Request(excerpt[:length], max_new_tokens))
    return requests


def serve_all(
    engine: Engine,
    arrivals: Sequence[Arrival],
    *,
    preemption: RandomPreemption | None = None,
    before_step: Callable[[], None] | None = None,
    after_step: Callable[[list[tuple[Request, bytes]]], None] | None = None,
) -> None:
    """Run the engine until every request is finished. ``after_step`` is told what the step has emitted."""
    pending = deque(sorted(arrivals, key=lambda arrival: arrival.step))
    now = 0
    while pending or not engine.idle:
        while pending and pending[0].step <= now:
            engine.submit(pending.popleft().request)
        victim = preemption.choose(engine.scheduler.running) if preemption else None
        if victim is not None:
            engine.preempt(victim[0], keep_state=victim[1])
        if before_step is not None:
            before_step()
        emitted = engine.step()
        if after_step is not None:
            after_step(emitted)
        now += 1


class SoloTexts:
    """What each prompt's text is when it is decoded alone, token by token, by the model as it is: the reference.

    With a ``recorder`` (:class:`models.captured_step.CudaRecorder`) the eager step is replayed from a CUDA graph: the same
    kernels, which on a GPU take a fraction of their launches.
    """

    def __init__(
        self, model: KDAForCausalLM, max_length: int, *, recorder: Recorder | None = None, **pool_options
    ) -> None:
        self.vocab_size = model.config.vocab_size
        device = model.embed_tokens.weight.device
        self.step = SpeculativeStep(model, Pools(model.config, 1, max_length, device=device, **pool_options))
        self._run = self.step
        if recorder is not None:
            self._run = CapturedStep(self.step, recorder=recorder)
            self._run.capture(*StepInputs(1, 1, self.vocab_size, device).fill([], [], [], [], [0]))
        self._known: dict[bytes, bytes] = {}

    def continuation(self, prompt: bytes, num_tokens: int) -> bytes:
        known = self._known.get(prompt, b"")
        if len(known) < num_tokens:
            options = dict(num_tokens=num_tokens, num_drafts=0, vocab_size=self.vocab_size)
            known = decode(self._run, self.step.pools, [prompt], **options).continuations[0]
            self._known[prompt] = known
        return known[:num_tokens]

    def expected(self, request: Request) -> bytes:
        text = self.continuation(request.prompt, request.max_new_tokens)
        stop = -1 if request.stop_token is None else text.find(request.stop_token)
        return text if stop < 0 else text[: stop + 1]
