"""RecoverSSMConfig: each combination that cannot work is refused with its field, and what works is not."""

import re
from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from recoverssm_ops import LayerShape, RecoverSSMConfig

FLOATS = "float32, bfloat16, float16"
LAYER = LayerShape(num_heads=4, head_k_dim=8, num_value_heads=8, head_v_dim=6)
GOOD = RecoverSSMConfig(layers=(LAYER,) * 3, drafts=7)
ALIGNED = replace(GOOD, cache_mode="align", state_block_size=16, max_length=100, blocks_per_request=7)


def layers(**changes):
    return {"layers": (replace(LAYER, **changes),) * 3}


def odd_layer(**changes):
    return {"layers": (LAYER, LAYER, replace(LAYER, **changes))}


REFUSED = {
    # pools
    "pool dtype": (
        layers(state_dtype=torch.float64),
        f"layers[0].state_dtype should be {FLOATS}, but was float64: choose",
    ),
    "pool of bytes": (
        layers(state_dtype=torch.float8_e4m3fn),
        f"layers[0].state_dtype should be {FLOATS}, but was float8_e4m3fn",
    ),
    "conv pool dtype": (layers(conv_dtype=torch.int8), f"layers[0].conv_dtype should be {FLOATS}, but was int8"),
    "stochastic rounding": (
        {"stochastic_rounding": True},
        "stochastic_rounding should be False, but was True: .* turn it off",
    ),
    "stochastic rounding of None": ({"stochastic_rounding": None}, "stochastic_rounding should be False, but was None"),
    "head size K": (layers(head_k_dim=257), "layers[0].head_k_dim should be at most 256, but was 257"),
    "head size V": (layers(head_v_dim=512), "layers[0].head_v_dim should be at most 256, but was 512"),
    "conv width 1": (layers(conv_width=1), "layers[0].conv_width should be 2 to 8, or None .*, but was 1"),
    "conv width 9": (layers(conv_width=9), "layers[0].conv_width should be 2 to 8, or None .*, but was 9"),
    # layers
    "no layers": ({"layers": ()}, "layers should hold at least one linear attention layer, but was empty: .* off"),
    "other heads": (
        odd_layer(num_heads=2),
        "layers[2].num_heads should be 4 as in layers[0], but was 2: .* of their own",
    ),
    "other V": (odd_layer(head_v_dim=7), "layers[2].head_v_dim should be 6 as in layers[0], but was 7"),
    "other conv": (odd_layer(conv_width=3), "layers[2].conv_width should be 4 as in layers[0], but was 3"),
    "other dtype": (
        odd_layer(state_dtype=torch.bfloat16),
        "layers[2].state_dtype should be torch.float32 as in layers[0], but was torch.bfloat16",
    ),
    "other gate": (odd_layer(scalar_gate=True), "layers[2].scalar_gate should be False as in layers[0], but was True"),
    "ranks": ({"tensor_parallel": 3}, "tensor_parallel should divide num_heads 4, but was 3: .* one of [1, 2, 4]"),
    "activations": ({"activation_dtype": torch.float64}, f"activation_dtype should be {FLOATS}, but was float64"),
    # window
    "missing drafts": (
        {"drafts": None},
        "drafts should be 1 to 15, but was None: .* a drafter, or leave RecoverSSM off",
    ),
    "no drafts": ({"drafts": 0}, "drafts should be 1 to 15, but was 0: .* a drafter, or leave RecoverSSM off"),
    "negative drafts": ({"drafts": -2}, "drafts should be at least 1, but was -2"),
    "17 window tokens": ({"drafts": 16}, "drafts should be 1 to 15, but was 16: a window .* 16 tokens, so draft fewer"),
    "records too short": (
        {"max_seqlen": 7},
        "max_seqlen should be 8 (1 + drafts) to 16, but was 7: records hold .*, so change it, or drafts",
    ),
    "records too long": ({"max_seqlen": 17}, "max_seqlen should be 8 (1 + drafts) to 16, but was 17"),
    # prefix caching
    "cache mode": ({"cache_mode": "all"}, "cache_mode should be 'none' or 'align', but was 'all': .* choose 'align'"),
    "cache mode None": ({"cache_mode": None}, "cache_mode should be 'none' or 'align', but was None"),
    "no block size": (
        {"cache_mode": "align"},
        "state_block_size should be given with cache_mode 'align', but was None",
    ),
    "no length": (
        {"cache_mode": "align", "state_block_size": 16},
        "max_length should be given with cache_mode 'align', but was None",
    ),
    "no table": (
        {"cache_mode": "align", "state_block_size": 16, "max_length": 100},
        "blocks_per_request should be given with cache_mode 'align', but was None",
    ),
}
REFUSED_ALIGNED = {
    "block size zero": ({"state_block_size": 0}, "state_block_size should be at least 1, but was 0"),
    "table too narrow": (
        {"blocks_per_request": 6},
        "blocks_per_request should be at least 7 (max_length 100 in state blocks of 16), but was 6: widen the block table, "
        "use larger state blocks, or limit max_length to 96",
    ),
    "blocks a step": (
        {"state_block_size": 3, "blocks_per_request": 34, "new_blocks_per_step": 2},
        "new_blocks_per_step should be at least 3 (a window of 8 tokens in state blocks of 3), but was 2: allocate more blocks "
        "a step, use state_block_size 4 or more, or fewer drafts",
    ),
    "no blocks a step": ({"new_blocks_per_step": 0}, "new_blocks_per_step should be at least 1, but was 0"),
}
MISTYPED = {
    "a layer": ({"layers": LAYER}, "layers should be LayerShapes, one a linear attention layer, but was LayerShape"),
    "layer count": ({"layers": 3}, "layers should be LayerShapes, one a linear attention layer, but was 3"),
    "dict": ({"layers": [LAYER, {}]}, "layers[1] should be a LayerShape, but was {}"),
    "drafts text": ({"drafts": "7"}, "drafts should be an int, but was '7'"),
    "drafts bool": ({"drafts": True}, "drafts should be an int, but was True"),
    "drafts False": ({"drafts": False}, "drafts should be an int, but was False"),
    "max_seqlen": ({"max_seqlen": 8.0}, "max_seqlen should be an int, but was 8.0"),
    "ranks": ({"tensor_parallel": None}, "tensor_parallel should be an int, but was None"),
}


def pattern(message: str) -> str:
    """The message literally, but for ``.*``."""
    return "^" + ".*".join(re.escape(piece) for piece in message.split(".*"))


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(changes, message):
    with pytest.raises(ValueError, match=pattern(message)):
        replace(GOOD, **changes)


@pytest.mark.parametrize(("changes", "message"), REFUSED_ALIGNED.values(), ids=REFUSED_ALIGNED)
def test_refused_with_prefix_caching(changes, message):
    with pytest.raises(ValueError, match=pattern(message)):
        replace(ALIGNED, **changes)
    replace(GOOD, **changes)  # without prefix caching nothing of it matters


@pytest.mark.parametrize(("changes", "message"), MISTYPED.values(), ids=MISTYPED)
def test_mistyped(changes, message):
    with pytest.raises(TypeError, match=pattern(message)):
        replace(GOOD, **changes)


@pytest.mark.parametrize(
    ("changes", "boundaries"),
    [
        ({}, 1),
        ({"state_block_size": 8, "blocks_per_request": 13}, 1),
        ({"state_block_size": 7, "blocks_per_request": 15}, 2),
        ({"state_block_size": 2, "blocks_per_request": 50}, 4),
        ({"state_block_size": 1, "blocks_per_request": 100}, 8),
        ({"state_block_size": 2, "blocks_per_request": 50, "new_blocks_per_step": 4}, 4),
        ({"state_block_size": 2048, "blocks_per_request": 1}, 1),
    ],
)
def test_behaviour_18_blocks_smaller_than_the_window_are_accepted(changes, boundaries):
    config = replace(ALIGNED, **changes)
    assert config.boundaries_per_window == boundaries
    reached = {sum(p % config.state_block_size == 0 for p in range(n + 1, n + 9)) for n in range(4096)}
    assert max(reached) == boundaries


def test_behaviour_21_only_the_state_block_size_counts():
    """There is no other block size in the configuration that could be taken for it."""
    assert [name for name in RecoverSSMConfig.__dataclass_fields__ if "block_size" in name] == ["state_block_size"]


def test_each_remedy_works():
    """What the messages propose is accepted."""
    replace(ALIGNED, blocks_per_request=6, max_length=96)
    replace(ALIGNED, state_block_size=4, blocks_per_request=34, new_blocks_per_step=2)
    replace(GOOD, max_seqlen=8)
    replace(GOOD, max_seqlen=16)
    replace(GOOD, drafts=15, max_seqlen=16)
    replace(GOOD, drafts=1)
    replace(GOOD, tensor_parallel=4)
    replace(GOOD, **layers(conv_width=None, conv_channels=None))


def test_spec_of_the_config():
    config = replace(GOOD, tensor_parallel=2, activation_dtype=torch.float16)
    spec = config.spec
    assert (spec.num_layers, spec.window, spec.layer) == (3, 8, LAYER)
    assert (spec.shard.num_heads, spec.shard.num_value_heads) == (2, 4)
    assert spec.activation_dtype == torch.float16
    assert config.window == 8


def test_layers_from_any_iterable_and_frozen():
    config = RecoverSSMConfig(layers=(LAYER for _ in range(3)), drafts=7)
    assert config == GOOD
    with pytest.raises(FrozenInstanceError):
        config.drafts = 3
