"""The engine over a step that the pass has rewritten; on a GPU, where steps are captured: ``test_serve_graphs.py``."""

import random

import pytest
import torch
from serving import DRAFTS, VOCAB, Oracle, assert_solo, model_on, poison, shape, solo_on, tokens

import compile_passes
from models.decode import example_inputs
from models.engine import Engine
from models.pools import Pools
from models.prefix_cache import PrefixCache
from models.requests import Request
from models.scheduler import RandomPreemption
from models.soak import SOAK_CONFIG
from models.speculation import SpeculativeStep
from models.workload import arriving, serve_all


def build(device, step_of, buckets):
    sizes = shape(slots=3)
    model = model_on(device)
    pools = Pools(SOAK_CONFIG, 4, sizes.max_length, device=device, dtype=torch.float64)
    cache = PrefixCache(pools, sizes.block_size, sizes.cache_budget)
    step = SpeculativeStep(model, pools)
    return Engine(step, num_drafts=DRAFTS, step_fn=step_of(step), prefix_cache=cache, buckets=buckets)


def serve_random(engine, device):
    generator = random.Random(3)
    requests = [Request(tokens(i % 7, 3 + 3 * (i % 7)), 14) for i in range(20)]
    solo = solo_on(device)
    engine.drafter = Oracle(requests, solo, lambda right, call: [t if call % 3 else (t + 1) % VOCAB for t in right])
    engine.warm_up()
    preemption = RandomPreemption(0.2, generator)
    arrivals = arriving(requests, 0.4, generator)
    serve_all(engine, arrivals, preemption=preemption, before_step=lambda: poison(engine))
    assert_solo(engine, requests)
    statistics = engine.statistics
    assert statistics.padding_rows > 0 and statistics.copied_out > 0 and statistics.dropped > 0
    assert statistics.tokens_per_row > 1.5 and engine.prefix_cache.statistics.hits > 0


@pytest.mark.slow
def test_the_rewritten_step_serves_the_solo_texts():
    """One compiled batch size for one to three requests, so that padding rows are the rule."""
    compiled = lambda step: torch.compile(step, backend="recoverssm", fullgraph=True, dynamic=False)  # noqa: E731
    engine = build("cpu", compiled, [4])
    with torch.no_grad():
        report = compile_passes.explain(engine.step_module, *example_inputs(4, DRAFTS, VOCAB, "cpu"))
    assert (report.matched, report.refused) == (3, 0)
    serve_random(engine, "cpu")
