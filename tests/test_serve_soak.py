"""Hundreds of requests over random schedules: every text is the one the request gets alone."""

import random

import pytest
from serving import BLOCK, WINDOW, assert_solo, build, poison, shape, solo_on

from models.requests import Phase
from models.scheduler import RandomPreemption
from models.soak import SOAK_CONFIG, AdversarialDrafter, random_prompts, random_requests
from models.workload import arriving, serve_all

MOST_TOKENS = 20
# Requests, slots, blocks that the cache holds (0: no cache), arrivals a step, preemptions a step.
SCHEDULES = {
    "busy": (150, 8, 12, 1.0, 0.3),
    "idle-at-times": (80, 5, 40, 0.2, 0.1),
    "one-slot": (20, 1, 12, 1.0, 0.3),
    "cache-of-one-block": (60, 4, 1, 0.5, 0.2),
    "no-cache": (60, 6, 0, 0.5, 0.2),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_text_is_the_solo_text(name, device):
    count, slots, blocks, arrival_rate, preemption_rate = SCHEDULES[name]
    generator, solo = random.Random(name), solo_on(device.type)
    # One set of prompts for all schedules: their solo texts are decoded once.
    prompts = random_prompts(20, 45, WINDOW, BLOCK, random.Random(0))
    texts = {prompt: solo.continuation(prompt, MOST_TOKENS) for prompt in prompts}
    # Greedy texts that repeat one token would be right by accident.
    assert sum(len(set(text)) > 3 for text in texts.values()) > len(texts) * 3 // 4

    requests = random_requests(count, prompts, MOST_TOKENS, generator)
    sizes = dict(slots=slots, block_size=BLOCK if blocks else None, blocks=blocks)
    engine = build(device.type, drafter=AdversarialDrafter(texts, generator), **sizes)
    arrivals = arriving(requests, arrival_rate, generator)
    preemption = RandomPreemption(preemption_rate, generator)
    serve_all(engine, arrivals, preemption=preemption, before_step=lambda: poison(engine))
    assert_solo(engine, requests)

    # The schedule did what it is here for.
    statistics = engine.statistics
    assert engine.allocated_bytes == shape(**sizes).planned_bytes(SOAK_CONFIG)
    assert statistics.copied_out > 0 and statistics.dropped > 0
    assert statistics.peak_running == slots
    assert all(statistics.phases[phase] > count // 2 for phase in Phase)
    assert statistics.emitted_tokens == sum(len(request.continuation) for request in requests)
    assert statistics.tokens_per_row > 1.3
    if slots > 1:
        assert statistics.mixed_steps > statistics.steps // 4
        assert statistics.padding_rows > 0
    if blocks > 1:
        assert engine.prefix_cache.statistics.hit_tokens > 0
        assert sum(request.restored_tokens for request in requests) == engine.prefix_cache.statistics.hit_tokens
