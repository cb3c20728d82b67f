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


def mostly(good, bad):
    """Bad values are rare enough for a whole configuration to be good often."""
    return st.integers(0, 24).flatmap(lambda n: bad if n == 0 else good)


def dtypes():
    return mostly(st.sampled_from(FLOATS), st.sampled_from([torch.float64, torch.int8, torch.float8_e4m3fn]))


@st.composite
def layer_lists(draw):
    heads = draw(st.sampled_from([1, 2, 4]))
    layer = {
        "num_heads": heads,
        "num_value_heads": heads * draw(st.integers(1, 2)),
        "head_k_dim": draw(mostly(st.integers(1, 9), st.sampled_from([256, 257]))),
        "head_v_dim": draw(mostly(st.integers(1, 9), st.sampled_from([256, 300]))),
        "conv_width": draw(mostly(st.none() | st.integers(2, 8), st.sampled_from([1, 9]))),
        "scalar_gate": draw(st.booleans()),
        "state_dtype": draw(dtypes()),
        "conv_dtype": draw(dtypes()),
    }
    layers = [LayerShape(**layer)] * draw(st.integers(1, 3))
    odd = draw(
        mostly(st.none(), st.sampled_from([{"head_k_dim": 11}, {"conv_width": 7}, {"state_dtype": torch.float32}]))
    )
    return layers if odd is None else [*layers, LayerShape(**layer | odd)]


options = st.fixed_dictionaries(
    {
        "layers": mostly(layer_lists(), st.just([])),
        "drafts": mostly(st.integers(1, 15), st.sampled_from([None, 0, 16, 40])),
    },
    optional={
        "max_seqlen": mostly(st.none() | st.just(16), st.integers(1, 17)),
        "tensor_parallel": mostly(st.just(1), st.integers(1, 4)),
        "activation_dtype": dtypes(),
        "stochastic_rounding": mostly(st.just(False), st.just(True)),
        "cache_mode": mostly(st.sampled_from(["none", "align"]), st.sampled_from(["all", ""])),
        "state_block_size": mostly(st.integers(1, 20), st.sampled_from([0, None])),
        "max_length": mostly(st.integers(1, 64), st.just(None)),
        "blocks_per_request": mostly(st.integers(8, 64), st.sampled_from([1, None])),
        "new_blocks_per_step": mostly(st.none() | st.just(16), st.integers(0, 4)),
    },
)


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


@given(options)
@settings(max_examples=400)
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


@given(options.filter(lambda o: not wrong_fields(o)), st.data())
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
