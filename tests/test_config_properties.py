"""Every accepted RecoverSSMConfig runs, with its shapes, and every refused one has something wrong with the field it names."""

import pytest
import torch
from budget import assert_within_budget
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pools import make_window, oracle, same_bits

import recoverssm_ops as rs
from recoverssm_ops import CommitPlan, LayerShape, RecoverSSMConfig

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


LAYER_GOOD = {
    "num_heads": st.sampled_from([1, 2, 4]),
    "head_k_dim": st.integers(1, 9) | st.just(256),
    "head_v_dim": st.integers(1, 9) | st.just(256),
    "conv_width": st.none() | st.integers(2, 8),
    "scalar_gate": st.booleans(),
    "state_dtype": st.sampled_from(FLOATS),
    "conv_dtype": st.sampled_from(FLOATS),
}
LAYER_BAD = {
    "head_k_dim": st.just(257),
    "head_v_dim": st.just(257),
    "conv_width": st.sampled_from([1, 9]),
    "state_dtype": st.sampled_from([torch.float64, torch.int8, torch.float8_e4m3fn]),
    "conv_dtype": st.sampled_from([torch.float64, torch.int8, torch.float8_e4m3fn]),
}
GOOD = {
    "drafts": st.integers(1, 15),
    "max_seqlen": st.none() | st.just(16),
    "tensor_parallel": st.just(1),
    "activation_dtype": st.sampled_from(FLOATS),
    "stochastic_rounding": st.just(False),
    "cache_mode": st.sampled_from(["align", "none"]),
    "state_block_size": st.integers(1, 20),
    "max_length": st.integers(1, 64),
    "blocks_per_request": st.just(64),
    "new_blocks_per_step": st.none() | st.just(16),
}
# Bad, or near a limit that other fields decide.
DOUBTFUL = {
    "drafts": st.sampled_from([None, 0, 16, 40]),
    "max_seqlen": st.integers(1, 17),
    "tensor_parallel": st.integers(2, 4),
    "activation_dtype": st.sampled_from([torch.float64, torch.int32]),
    "stochastic_rounding": st.just(True),
    "cache_mode": st.sampled_from(["all", ""]),
    "state_block_size": st.sampled_from([0, None]),
    "max_length": st.just(None),
    "blocks_per_request": st.integers(0, 12) | st.none(),
    "new_blocks_per_step": st.integers(0, 6),
}
LAYERS = ("odd layer", "bad layers", "no layers")


@st.composite
def combinations(draw):
    """A good configuration with none, one or two fields changed for doubtful values."""
    doubtful = draw(st.sets(st.sampled_from([*DOUBTFUL, *LAYERS]), max_size=2))
    o = {name: draw(DOUBTFUL[name] if name in doubtful else GOOD[name]) for name in GOOD}
    layer = {name: draw(strategy) for name, strategy in LAYER_GOOD.items()}
    layer["num_value_heads"] = layer["num_heads"] * draw(st.integers(1, 2))
    if "bad layers" in doubtful:
        name = draw(st.sampled_from(list(LAYER_BAD)))
        layer[name] = draw(LAYER_BAD[name])
    o["layers"] = [LayerShape(**layer)] * draw(st.integers(1, 3))
    if "odd layer" in doubtful:
        name = draw(st.sampled_from(list(LAYER_GOOD)[1:]))
        o["layers"].append(LayerShape(**layer | {name: draw(LAYER_GOOD[name])}))
    return o | ({"layers": []} if "no layers" in doubtful else {})


def wrong_fields(o: dict) -> set[str]:
    """The fields that cannot be as they are, worked out one rule at a time, independently of each other."""
    wrong = set()
    layers, drafts = o["layers"], o["drafts"]
    if not layers:
        return {"layers"}
    for layer in layers:
        others = [x for x in vars(layer) if getattr(layer, x) != getattr(layers[0], x)]
        wrong |= {"layers"} if others else set()
        wrong |= {"layers"} if layer.state_dtype not in FLOATS or layer.conv_dtype not in FLOATS else set()
        wrong |= {"layers"} if max(layer.head_k_dim, layer.head_v_dim) > 256 else set()
        wrong |= {"layers"} if layer.conv_width in (1, 9) else set()
    wrong |= {"tensor_parallel"} if layers[0].num_heads % o.get("tensor_parallel", 1) else set()
    wrong |= {"activation_dtype"} if o.get("activation_dtype", torch.float32) not in FLOATS else set()
    wrong |= {"stochastic_rounding"} if o.get("stochastic_rounding") else set()
    wrong |= {"cache_mode"} if o.get("cache_mode", "none") not in ("none", "align") else set()
    if drafts not in range(1, 16):
        wrong.add("drafts")
    elif o.get("max_seqlen") is not None and o["max_seqlen"] not in range(drafts + 1, 17):
        wrong.add("max_seqlen")
    if o.get("cache_mode") == "align":
        size, length, table = (o.get(x) for x in ("state_block_size", "max_length", "blocks_per_request"))
        given_ = {"state_block_size": size, "max_length": length, "blocks_per_request": table}
        wrong |= {name for name, value in given_.items() if not value}
        if size and length and table and max(p // size for p in range(length)) >= table:
            wrong.add("blocks_per_request")
        if o.get("new_blocks_per_step") is not None and size and drafts is not None:
            # Blocks that begin inside of some window: the tokens n .. n + drafts, of which a block's first is a multiple.
            begun = max(sum(t % size == 0 for t in range(n, n + drafts + 1)) for n in range(size))
            wrong |= {"new_blocks_per_step"} if o["new_blocks_per_step"] < max(begun, 1) else set()
    return wrong


@given(combinations())
@settings(max_examples=600)
def test_refused_exactly_when_a_field_is_wrong(o):
    wrong = wrong_fields(o)
    try:
        RecoverSSMConfig(**o)
    except ValueError as error:
        named = str(error).split(" ")[0].partition("[")[0]
        assert named in wrong, f"{error} (wrong: {wrong or 'nothing'})"
        assert ", but was " in str(error)
    else:
        assert not wrong


ALIGNED = {"cache_mode": "align", "max_length": 64, "blocks_per_request": 64}
SMALL = LayerShape(num_heads=2, head_k_dim=4, num_value_heads=4, head_v_dim=3)


@given(combinations().filter(lambda o: not wrong_fields(o)), st.data())
@example({"layers": [SMALL], "drafts": 15, "state_block_size": 1, **ALIGNED}, None)
@example({"layers": [SMALL], "drafts": 5, "state_block_size": 4, **ALIGNED, "tensor_parallel": 2}, None)
@settings(max_examples=60)
def test_every_accepted_configuration_runs(o, data):
    """Verify and commit of each layer on one rank, in tensors of the planned shapes, against the recurrence in float64."""
    config = RecoverSSMConfig(**o)
    layout = config.spec.recoverssm()
    part = {p.name: p for p in layout.state + layout.transient}
    B, T, M = 2, config.window, 1 + config.boundaries_per_window
    shard = config.spec.shard
    # Row b reads slot b; column m of its plan goes to a slot of its own.
    accepted = torch.tensor([T, T // 2] if data is None else [data.draw(st.integers(0, T)) for _ in range(B)])
    lengths = (accepted[:, None] - torch.arange(M)).clamp(min=0)
    dest = torch.arange(B * M).view(B, M) + B
    for layer in range(len(config.layers)):
        window = make_window(
            B,
            T,
            heads=shard.num_heads,
            value_heads=shard.num_value_heads,
            key_dim=shard.head_k_dim,
            value_dim=shard.head_v_dim,
            scalar_gate=shard.scalar_gate,
            dtype=config.activation_dtype,
            seed=layer,
        )
        pool = torch.randn(B + B * M, *part["recurrent"].shape).to(part["recurrent"].dtype)
        before = pool.clone()
        with torch.no_grad():
            _, record = rs.kda_verify(*window.inputs, pool, torch.arange(B), **window.options)
            assert same_bits(pool, before)
            for name in ("u", "k", "g"):
                assert tuple(getattr(record, name).shape[1:]) == part[name].shape
            assert len(config.layers) * record.nbytes == B * layout.bytes_of("u", "k", "g")
            rs.kda_commit(pool, record, None, plan=CommitPlan(torch.arange(B), dest, lengths))
        answer = oracle(window, before[:B])
        for m in range(M):
            wanted64, wanted32 = answer.states(lengths[:, m])
            assert_within_budget(pool[dest[:, m]].float(), wanted64, wanted32, pool.dtype, f"layer {layer}, column {m}")
        assert same_bits(pool[:B], before[:B])


def test_what_is_refused_would_not_run():
    """The limits are those of the operators, not of the configuration's author: one beyond each fails there too."""

    def run(T=2, K=4, state_dtype=torch.float32):
        window = make_window(1, T, key_dim=K)
        rs.kda_verify(*window.inputs, torch.zeros(1, 2, 6, K, dtype=state_dtype), **window.options)

    with torch.no_grad():
        run(T=16, K=256)
        with pytest.raises(ValueError, match="between 1 and 16 tokens, but was 17"):
            run(T=17)
        with pytest.raises(ValueError, match="head size K between 1 and 256, but it was 257"):
            run(K=257)
        with pytest.raises(TypeError, match="state should have dtype float32, bfloat16, float16, but was float64"):
            run(state_dtype=torch.float64)


def accepted(**options) -> bool:
    try:
        RecoverSSMConfig(layers=[SMALL], cache_mode="align", **options)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 16, 17, 2048])
def test_limits_of_the_block_table(size):
    """One column fewer than the longest request has blocks is refused, and no more is asked for."""
    for length in range(1, 70):
        blocks = len({token // size for token in range(length)})
        common = {"drafts": 7, "state_block_size": size, "max_length": length}
        assert accepted(**common, blocks_per_request=blocks)
        assert blocks == 1 or not accepted(**common, blocks_per_request=blocks - 1)


@pytest.mark.parametrize("drafts", range(1, 16))
def test_limits_of_allocation_in_a_step(drafts):
    """As many blocks as can begin inside of one window, wherever it starts; behaviour 18 for an engine that allocates fewer."""
    for size in (*range(1, 19), 2048):
        begun = max(sum(t % size == 0 for t in range(n, n + drafts + 1)) for n in range(size))
        common = {"drafts": drafts, "state_block_size": size, "max_length": 64, "blocks_per_request": 64}
        assert accepted(**common, new_blocks_per_step=begun)
        assert begun == 1 or not accepted(**common, new_blocks_per_step=begun - 1)
