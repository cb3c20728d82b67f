"""What an engine allocates is what was planned, in every layout and precision."""

import dataclasses

import pytest
import torch
from serving import MAX_LENGTH, build, serve, tokens

from models.config import PRESETS, KDAConfig
from models.engine_shape import EngineShape
from models.memory_plan import MemoryPlan
from models.model import KDAForCausalLM
from models.requests import Request
from models.soak import SOAK_CONFIG

# Key and value heads, head sizes, width and number of layers all differ, so that no factor stands for another.
ODD = dataclasses.replace(SOAK_CONFIG, num_layers=7, full_attn_period=3, num_heads=4, num_kv_heads=2, conv_size=3)
SHAPES = {
    "float64": (SOAK_CONFIG, EngineShape(4, 5, 60, 8, 100_000, dtype=torch.float64)),
    "float32": (ODD, EngineShape(3, 0, 33, 5, 77_777)),
    "bfloat16-state": (ODD, EngineShape(1, 7, 40, 16, 123_456, torch.bfloat16, torch.bfloat16)),
    "float16": (ODD, EngineShape(9, 2, 17, 1, 50_000, torch.float16, torch.float32)),
    "no-cache": (ODD, EngineShape(5, 3, 20)),
    "two-batch-sizes": (ODD, EngineShape(9, 3, 20, most_buckets=2)),
    "no-attention": (dataclasses.replace(ODD, full_attn_period=0), EngineShape(2, 3, 20, 4, 40_000)),
    "attention-only": (dataclasses.replace(ODD, full_attn_period=1), EngineShape(2, 3, 20, 4, 40_000)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_allocated_bytes_are_the_planned_bytes(name):
    config, shape = SHAPES[name]
    engine = shape.build(KDAForCausalLM(config).to(shape.dtype))
    planned = shape.planned_bytes(config)
    assert engine.allocated_bytes == planned
    assert (planned["prefix cache"] > 0) == (shape.block_size is not None)
    assert planned["prefix cache"] <= shape.cache_budget
    if shape.block_size is not None:
        block = MemoryPlan(config, shape.dtype, shape.recurrent_dtype).saved_bytes(shape.block_size)
        assert planned["prefix cache"] == engine.prefix_cache.capacity * block
        assert planned["prefix cache"] + block > shape.cache_budget


def test_the_plan_of_the_shipped_model_by_hand():
    """Three KDA layers of 4 heads 64 x 64 and 768 channels, one full-attention layer with one key-value head of 64."""
    plan = MemoryPlan(PRESETS["bytes"])
    assert plan.fixed_bytes == 3 * (4 * 64 * 64 * 4 + 768 * 3 * 4)
    assert plan.token_bytes == 2 * 64 * 4
    assert plan.pools_bytes(9, 100) == 9 * (plan.fixed_bytes + 100 * 512)
    low = MemoryPlan(PRESETS["bytes"], torch.bfloat16, torch.float32)
    assert low.fixed_bytes == 3 * (4 * 64 * 64 * 4 + 768 * 3 * 2) and low.token_bytes == 256


def test_serving_allocates_nothing_that_stays():
    """The same storages before and after, and a copied-out state takes what was planned for its length."""
    engine, requests = build(), [Request(tokens(i, 9 + i), 12) for i in range(6)]
    storages = {name: buffer.data_ptr() for name, buffer in engine.pools.named_buffers()}
    before, sizes = engine.allocated_bytes, []

    def preempt():
        for request in list(engine.scheduler.running)[:1]:
            if len(sizes) < 3:
                length = request.committed
                engine.preempt(request, keep_state=True)
                sizes.append((request.saved.nbytes, length, engine.statistics.saved_bytes))
                assert sum(t.untyped_storage().nbytes() for t in request.saved.tensors.values()) == request.saved.nbytes

    serve(engine, requests, before_step=preempt)
    plan = MemoryPlan(SOAK_CONFIG, torch.float64)
    assert len(sizes) == 3
    for nbytes, length, outstanding in sizes:
        assert nbytes == plan.saved_bytes(length)
        assert outstanding >= nbytes
    assert engine.allocated_bytes == before
    assert storages == {name: buffer.data_ptr() for name, buffer in engine.pools.named_buffers()}


def test_the_models_dtype_has_to_be_the_planned_one():
    config = KDAConfig(hidden_size=8, num_layers=1, head_k_dim=4, head_v_dim=4, gate_rank=2, intermediate_size=8)
    with pytest.raises(ValueError, match=r"the model is in torch.float32, the engine is planned for torch.float64"):
        EngineShape(2, 3, MAX_LENGTH, dtype=torch.float64).build(KDAForCausalLM(config))
