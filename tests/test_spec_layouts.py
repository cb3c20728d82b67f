"""Planned bytes are allocated bytes; a page holds all parts of a slot; what tensor parallelism does to them."""

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pools import make_window, same_bits

import recoverssm_ops as rs
from models.config import KDAConfig
from models.pools import Pools
from recoverssm_ops import LayerShape, StateSpec

LAYER = LayerShape(num_heads=4, head_k_dim=8, num_value_heads=8, head_v_dim=6)
SPEC = StateSpec(layer=LAYER, num_layers=3, window=4)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def parts(layout):
    return {part.name: part for part in layout.state + layout.transient}


@pytest.mark.parametrize("state_dtype", DTYPES, ids=str)
def test_planned_equals_allocated_in_the_model(state_dtype):
    """The pools of the generic model hold what the plan says, per request and kind."""
    config = KDAConfig(num_layers=8, full_attn_period=4, num_heads=3, num_kv_heads=1, head_k_dim=16, head_v_dim=24)
    pools = Pools(config, 5, 32, dtype=torch.bfloat16, recurrent_dtype=state_dtype)
    layer = LayerShape(num_heads=3, head_k_dim=16, head_v_dim=24, conv_width=config.conv_size, state_dtype=state_dtype)
    layout = StateSpec(layer=layer, num_layers=6, window=8).recoverssm()
    allocated = pools.bytes_per_request()
    assert layout.bytes_of("recurrent") == allocated["recurrent"]
    assert layout.bytes_of("conv") == allocated["conv"]
    assert layout.state_bytes == allocated["recurrent"] + allocated["conv"]


@pytest.mark.parametrize("scalar_gate", [False, True], ids=["kda", "scalar gate"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_planned_equals_allocated_in_a_record(scalar_gate, dtype):
    B = 3
    window = make_window(B, 4, heads=4, value_heads=8, scalar_gate=scalar_gate, dtype=dtype, gate_dtype=torch.float32)
    spec = replace_layer(SPEC, scalar_gate=scalar_gate, activation_dtype=dtype, gate_dtype=torch.float32)
    layout = spec.recoverssm()
    with torch.no_grad():
        _, record = rs.kda_verify(*window.inputs, torch.zeros(B, 8, 6, 8), **window.options)
    assert spec.num_layers * record.nbytes == B * layout.bytes_of("u", "k", "g")
    for name in ("u", "k", "g"):
        assert tuple(getattr(record, name).shape) == (B, *parts(layout)[name].shape)
        assert getattr(record, name).dtype == parts(layout)[name].dtype


def replace_layer(spec: StateSpec, **changes) -> StateSpec:
    of_layer = {name: changes.pop(name) for name in list(changes) if hasattr(spec.layer, name)}
    return replace(spec, layer=replace(spec.layer, **of_layer), **changes)


def test_behaviour_20_records_are_no_state():
    """What is copied, moved or published is recurrent and conv state alone, in both layouts."""
    plain, recoverssm = SPEC.plain(), SPEC.recoverssm()
    assert [part.name for part in recoverssm.state] == [part.name for part in plain.state] == ["recurrent", "conv"]
    assert [part.name for part in recoverssm.transient] == ["u", "k", "g", "conv_inputs"]
    assert plain.transient == ()
    assert recoverssm.slot_bytes == 3 * (8 * 6 * 8 * 4 + (2 * 32 + 48) * 3 * 2)


def test_pools_in_one_buffer_of_pages():
    """Recurrent and conv pools as strided views of an allocator's pages: an operator runs on one and leaves the other."""
    slots, window = 3, make_window(2, 4, heads=4, value_heads=8)
    layer = replace(LAYER, head_v_dim=6, head_k_dim=8, state_dtype=torch.float16, conv_channels=7)
    layout = StateSpec(layer=layer, num_layers=1, window=4).recoverssm()
    pages = torch.randn(slots * layout.page_bytes // 4).view(torch.uint8)

    def pool(name):
        part = parts(layout)[name]
        width = part.dtype.itemsize
        strides, stride = [], 1
        for size in reversed(part.shape):
            strides.insert(0, stride)
            stride *= size
        view = pages.view(part.dtype)
        return view.as_strided(
            (slots, *part.shape), (layout.page_bytes // width, *strides), layout.offsets[name] // width
        )

    assert all(offset % layout.alignment == 0 for offset in layout.offsets.values())
    assert layout.page_bytes >= layout.slot_bytes
    recurrent, conv = pool("recurrent"), pool("conv")
    recurrent.copy_(torch.randn(recurrent.shape))
    conv.copy_(torch.randn(conv.shape))
    before, dense, at = conv.clone(), recurrent.clone(), torch.tensor([2, 0])
    with torch.no_grad():
        for state in (recurrent, dense):
            _, record = rs.kda_verify(*window.inputs, state, at, **window.options)
            rs.kda_commit(state, record, torch.tensor([3, 4]), at)
    assert same_bits(recurrent, dense)
    assert same_bits(conv, before)


def test_alignment_rounds_up_every_part():
    layer = LayerShape(num_heads=1, head_k_dim=3, conv_width=3, state_dtype=torch.bfloat16)
    layout = StateSpec(layer=layer, num_layers=2, window=2, alignment=64).recoverssm()
    assert (parts(layout)["recurrent"].nbytes, parts(layout)["conv"].nbytes) == (18, 36)
    assert layout.offsets == {"recurrent": 0, "conv": 64}
    assert layout.page_bytes == 128
    assert layout.slot_bytes == 2 * (18 + 36), "exact, not rounded"


def test_plain_layout_without_draft_columns():
    with_drafts, without = SPEC.plain(), SPEC.plain(conv_draft_columns=False)
    assert parts(with_drafts)["conv"].shape == (112, 6)
    assert parts(without)["conv"].shape == (112, 3)
    assert without.state_bytes == 4 * SPEC.recoverssm().state_bytes


def test_layer_without_convolution():
    spec = replace_layer(SPEC, conv_width=None, conv_channels=None)
    assert list(parts(spec.recoverssm())) == ["recurrent", "u", "k", "g"]
    assert list(parts(spec.plain())) == ["recurrent"]


shapes = st.builds(
    lambda heads, groups, k, v, width: LayerShape(
        num_heads=heads, num_value_heads=heads * groups, head_k_dim=k, head_v_dim=v, conv_width=width
    ),
    st.integers(1, 24),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 9),
    st.none() | st.integers(1, 5),
)


@given(shapes, st.integers(1, 5), st.integers(1, 16), st.integers(1, 26))
def test_tensor_parallel_ranks_add_up(layer, num_layers, window, ranks):
    """Every rank holds an equal share of every part, or the size is refused by name."""
    whole = StateSpec(layer=layer, num_layers=num_layers, window=window)
    if layer.num_heads % ranks:
        with pytest.raises(
            ValueError, match=f"^tensor_parallel should divide num_heads {layer.num_heads}, but was {ranks}"
        ):
            replace_parallel(whole, ranks)
        return
    rank = replace_parallel(whole, ranks)
    for one, all_ in ((rank.plain(), whole.plain()), (rank.recoverssm(), whole.recoverssm())):
        assert one.slots_per_request == all_.slots_per_request
        for name, part in parts(all_).items():
            assert parts(one)[name].nbytes * ranks == part.nbytes


def replace_parallel(spec: StateSpec, ranks: int) -> StateSpec:
    return replace(spec, tensor_parallel=ranks)


@given(st.integers(1, 9), st.integers(0, 200))
def test_data_parallel_ranks_share_requests(ranks, requests):
    """The fullest rank holds the ceiling; state per request does not change."""
    spec = replace(SPEC, data_parallel=ranks)
    assert spec.requests_per_rank(requests) == max(len(range(r, requests, ranks)) for r in range(ranks))
    assert spec.recoverssm() == SPEC.recoverssm()


def sizes(**changes):
    return lambda: replace(LAYER, **changes)


BAD = {
    "no heads": (sizes(num_heads=0), ValueError, "num_heads should be at least 1, but was 0"),
    "bool": (sizes(head_k_dim=True), TypeError, "head_k_dim should be an int, but was True"),
    "float": (sizes(head_v_dim=6.0), TypeError, "head_v_dim should be an int, but was 6.0"),
    "groups": (sizes(num_value_heads=6), ValueError, "num_value_heads should be a multiple of num_heads 4, but was 6"),
    "conv width": (sizes(conv_width=0), ValueError, "conv_width should be at least 1, but was 0"),
    "channels alone": (
        sizes(conv_width=None),
        ValueError,
        "conv_channels should be None without a conv_width, but was 112",
    ),
    "dtype": (sizes(state_dtype="float32"), TypeError, "state_dtype should be a torch.dtype, but was 'float32'"),
    "layer": (lambda: replace(SPEC, layer=3), TypeError, "layer should be a LayerShape, but was 3"),
    "layers": (lambda: replace(SPEC, num_layers=0), ValueError, "num_layers should be at least 1, but was 0"),
    "window": (lambda: replace(SPEC, window=0), ValueError, "window should be at least 1, but was 0"),
    "alignment": (lambda: replace(SPEC, alignment=24), ValueError, "alignment should be a power of two, but was 24"),
    "gate": (lambda: replace(SPEC, gate_dtype="x"), TypeError, "gate_dtype should be a torch.dtype, but was 'x'"),
    "channels": (
        lambda: replace_layer(SPEC, conv_channels=9, tensor_parallel=2),
        ValueError,
        "tensor_parallel should divide conv_channels 9, but was 2: .* one of \\[1\\]",
    ),
    "ranks": (
        lambda: replace(SPEC, tensor_parallel=3),
        ValueError,
        "tensor_parallel should divide num_heads 4, but was 3: .* one of \\[1, 2, 4\\]",
    ),
}


@pytest.mark.parametrize(("make", "error", "message"), BAD.values(), ids=BAD)
def test_refused_by_name(make, error, message):
    with pytest.raises(error) as caught:
        make()
    assert re.match(message, str(caught.value)), caught.value


def test_unknown_part():
    with pytest.raises(KeyError, match="plain has no part u"):
        SPEC.plain().bytes_of("u")
