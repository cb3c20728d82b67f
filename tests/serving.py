"""Engines over a small random model, its solo texts, and its states: shared by the serving tests."""

import functools
import random

import torch

from models.engine_shape import EngineShape
from models.memory_plan import MemoryPlan
from models.pools import Pools
from models.request_state import RequestState
from models.soak import SOAK_CONFIG, random_model
from models.speculation import SpeculativeStep
from models.workload import Arrival, SoloTexts, serve_all

VOCAB = SOAK_CONFIG.vocab_size
DRAFTS = 5
WINDOW = 1 + DRAFTS
# Neither divides the other: windows and blocks meet at every offset.
BLOCK = 8
MAX_LENGTH = SOAK_CONFIG.max_length


@functools.lru_cache
def model_on(device, seed=0):
    return random_model(seed, device=device)


@functools.lru_cache
def solo_on(device, seed=0):
    return SoloTexts(model_on(device, seed), MAX_LENGTH, dtype=torch.float64)


def shape(slots=4, drafts=DRAFTS, block_size=BLOCK, blocks=12):
    budget = blocks * MemoryPlan(SOAK_CONFIG, torch.float64).saved_bytes(block_size) if block_size else 0
    return EngineShape(slots, drafts, MAX_LENGTH, block_size, budget, dtype=torch.float64)


def build(device="cpu", seed=0, drafter=None, compile_step=None, **sizes):
    options = {} if drafter is None else {"drafter": drafter}
    return shape(**sizes).build(model_on(device, seed), compile_step=compile_step, **options)


def tokens(seed, n):
    generator = random.Random(seed)
    return bytes(generator.randrange(VOCAB) for _ in range(n))


def wrong(token):
    return (token + 1) % VOCAB


class Oracle:
    """Drafts from the solo text, as ``distort(right drafts, call number)`` says."""

    def __init__(self, requests, solo, distort):
        self.full = [r.prompt + solo.continuation(r.prompt, r.max_new_tokens) for r in requests]
        self.distort, self.calls = distort, 0

    def __call__(self, text, n):
        full = next((full for full in self.full if full.startswith(text)), None)
        assert full is not None, "the engine's text left the solo one"
        self.calls += 1
        return bytes(self.distort(full[len(text) : len(text) + n], self.calls - 1))


def serve(engine, requests, **options):
    """All at once; every text must be the solo one. Returns the engine."""
    serve_all(engine, [Arrival(0, request) for request in requests], **options)
    assert_solo(engine, requests)
    return engine


def assert_solo(engine, requests, seed=0):
    solo = solo_on(next(engine.pools.buffers()).device.type, seed)
    for i, request in enumerate(requests):
        assert request.finished, f"request {i} did not finish"
        expected = solo.expected(request)
        assert request.continuation == expected, f"request {i}: {request.continuation!r} != {expected!r}"
    assert engine.slots.in_use == 0
    assert engine.statistics.saved_bytes == 0


def unheld_slots(engine):
    return engine.slots.padding(1 + engine.slots.available)


def poison(engine, value=float("nan")):
    """Fill every slot that no request holds, the null slot too."""
    slots = unheld_slots(engine)
    for buffer in engine.pools.buffers():
        buffer[slots] = value


@torch.no_grad()
def state_after(text, seed=0):
    """The state of a request alone after exactly these tokens, fed one by one."""
    step = SpeculativeStep(model_on("cpu", seed), Pools(SOAK_CONFIG, 1, MAX_LENGTH, dtype=torch.float64))
    zero, temperature = torch.zeros(1, dtype=torch.int64), torch.zeros(1)
    for position, token in enumerate(text):
        window, positions = torch.tensor([[token]]), torch.tensor([position])
        step(window, zero, zero, positions, zero, temperature, torch.zeros(1, 1), torch.ones(1, VOCAB))
    return RequestState(step.pools).copy_out(0, len(text)).tensors


def assert_same_state(actual, expected):
    assert actual.keys() == expected.keys()
    assert {name.partition("_")[0] for name in actual} == {"recurrent", "conv", "key", "value"}
    for name, tensor in expected.items():
        assert tensor.abs().max() > 1e-3
        torch.testing.assert_close(
            actual[name], tensor, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
