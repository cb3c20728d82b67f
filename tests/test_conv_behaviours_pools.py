"""Behaviours 5 and 7 to 10, for the convolution: who may read and write which part of the pool of histories."""

import pytest
import torch
from budget import assert_within_budget
from conv_cases import check_history, conv_oracle, guarded_conv_pool, make_conv_window
from pools import same_bits

import recoverssm_ops as rs

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("pool_dtype", FLOATS, ids=str)
def test_b05_verify_writes_nothing(device, pool_dtype, packed):
    """Not the pool, not the inputs, not the weights, not the indices."""
    window = make_conv_window(4, 5, lengths=[5, 0, 2, 4] if packed else None, tail=2 if packed else 0, device=device)
    pool = guarded_conv_pool(6, 12, dtype=pool_dtype, device=device)
    slots = torch.tensor([5, -1, 0, 2], device=device)
    tensors = [*window.inputs, slots, *window.layout.values()]
    before = [x.clone() for x in tensors]
    for _ in range(2):
        rs.causal_conv1d_verify(*window.inputs, pool.state, slots, **window.options)
        pool.check_unchanged()
    assert all(same_bits(x, y) for x, y in zip(tensors, before, strict=True))


def test_b05_more_programs_than_fit_at_once(device):
    """Every copy of a row gives the same bits, in verify and in commit."""
    batch, distinct, channels = (2048, 4, 4096) if device.type == "cuda" else (64, 4, 300)
    few = make_conv_window(distinct, 8, channels=channels, device=device)
    copies = torch.arange(batch, device=device) % distinct
    x = few.x[copies]
    pool = guarded_conv_pool(batch, channels, guard=0, device=device)
    pool.state.copy_(pool.state[:distinct][copies].clone())
    pool.remember()
    answer = conv_oracle(few, pool.state[:distinct])
    y = rs.causal_conv1d_verify(x, *few.inputs[1:], pool.state, **few.options)
    pool.check_unchanged()
    assert_within_budget(y[:distinct].flatten(0, 1).cpu(), *answer.outputs())
    assert same_bits(y, y[:distinct][copies])
    rs.causal_conv1d_commit(pool.state, x, copies + 2)
    for row in range(distinct):
        check_history(pool.state[row], answer, row, row + 2)
    assert same_bits(pool.state, pool.state[:distinct][copies])


LAYOUTS = {
    "dense": {"guard": 0},
    "guards around columns, channels and slots": {},
    "columns outside channels": {"order": "slot, column, channel"},
    "slots innermost": {"order": "channel, column, slot", "guard": 1},
    "columns outermost": {"order": "column, slot, channel", "guard": 3},
}


@pytest.mark.parametrize("pool_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_b07_strided_pool_is_updated_in_place(device, layout, pool_dtype):
    """NaN guards are neither read nor written."""
    pool = guarded_conv_pool(5, 12, dtype=pool_dtype, device=device, **LAYOUTS[layout])
    window = make_conv_window(3, 4, device=device)
    slots = torch.tensor([4, 0, 2], device=device)
    answer = conv_oracle(window, pool.state[slots])
    y = rs.causal_conv1d_verify(*window.inputs, pool.state, slots, **window.options)
    rs.causal_conv1d_commit(pool.state, window.x, torch.tensor([4, 1, 3], device=device), slots)
    assert_within_budget(y.flatten(0, 1).cpu(), *answer.outputs())
    for row, n in enumerate([4, 1, 3]):
        check_history(pool.state[slots[row]], answer, row, n)
    pool.check_only_written(slots)


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_b07_layer_of_a_shared_pool(device, axis):
    """One allocation for all layers, the layer axis anywhere."""
    shape = [5, 12, 3]
    shape.insert(axis, 3)
    shared = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device)
    before = shared.clone()
    layer = shared.select(axis, 1)
    window = make_conv_window(3, 4, device=device)
    slots = torch.tensor([4, 0, 2], device=device)
    answer = conv_oracle(window, layer[slots])
    y = rs.causal_conv1d_verify(*window.inputs, layer, slots, **window.options)
    assert same_bits(shared, before)
    assert_within_budget(y.flatten(0, 1).cpu(), *answer.outputs())
    rs.causal_conv1d_commit(layer, window.x, torch.tensor([4, 1, 3], device=device), slots)
    for row, n in enumerate([4, 1, 3]):
        check_history(layer[slots[row]], answer, row, n)
    for other in (0, 2):
        assert same_bits(shared.select(axis, other), before.select(axis, other))
    assert same_bits(layer[[1, 3]], before.select(axis, 1)[[1, 3]])


def test_b08_slot_beyond_32_bit_offsets(device):
    """The last slot starts more than 2^31 elements into the pool. The CPU maps its pages only when they are touched."""
    stride = 2**30 + 64
    if device.type == "cuda" and torch.cuda.mem_get_info()[0] < 6 * 2**30:
        pytest.skip("needs 6 GiB of GPU memory")
    storage = torch.empty(2 * stride + 36, dtype=torch.bfloat16, device=device)
    state = storage.as_strided((3, 12, 3), (stride, 3, 1))
    state.copy_(torch.randn(3, 12, 3, generator=torch.Generator().manual_seed(2)))
    before = state.clone()
    window = make_conv_window(1, 4, device=device)
    slots = torch.tensor([2], device=device, dtype=torch.int32)
    answer = conv_oracle(window, state[slots])
    y = rs.causal_conv1d_verify(*window.inputs, state, slots, **window.options)
    rs.causal_conv1d_commit(state, window.x, torch.tensor([2], device=device), slots)
    assert_within_budget(y[0].cpu(), *answer.outputs())
    check_history(state[2], answer, 0, 2)
    assert same_bits(state[:2], before[:2])


@pytest.mark.parametrize("source_column", [0, 1, 2])
@pytest.mark.parametrize("pool_dtype", FLOATS, ids=str)
def test_b09_source_may_be_a_destination(device, source_column, pool_dtype):
    """Whichever column overwrites the history, all columns see the old one: in place equals out of place."""
    window = make_conv_window(2, 5, width=6, channels=300, device=device)
    source, length = torch.tensor([3, 6], device=device), torch.tensor([[5, 2, 4], [1, 3, 0]], device=device)
    apart = torch.tensor([[0, 1, 2], [4, 5, 7]], device=device)
    aliased = apart.clone()
    aliased[:, source_column] = source
    pools = []
    for dest in (apart, aliased):
        pool = guarded_conv_pool(8, 300, 6, dtype=pool_dtype, device=device)
        answer = conv_oracle(window, pool.state[source])
        rs.causal_conv1d_commit(pool.state, window.x, None, plan=rs.CommitPlan(source, dest, length))
        for row in range(2):
            for column in range(3):
                check_history(pool.state[dest[row, column]], answer, row, length[row, column])
        pool.check_only_written(dest.flatten())
        pools.append(pool)
    assert same_bits(pools[0].state[apart], pools[1].state[aliased])


PADDING = [
    pytest.param(-1, [-1, 3, -7, 1], id="negative indices"),
    pytest.param(0, [0, 3, 0, 1], id="slot 0 is the null block"),
    pytest.param(0, [-1, 3, 0, 1], id="both"),
]


@pytest.mark.parametrize("pool_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("pad_slot_id, indices", PADDING)
def test_b10_padding_rows_touch_nothing(device, pad_slot_id, indices, packed, pool_dtype):
    """Slot 0 full of NaN, the padding rows' inputs too: real rows right, padding outputs zero, no other write."""
    window = make_conv_window(4, 4, lengths=[4, 2, 0, 4] if packed else None, device=device)
    pad, real = [0, 2], [1, 3]
    for row in pad:
        window.rows(window.x)[row].fill_(float("nan"))
    pool = guarded_conv_pool(5, 12, dtype=pool_dtype, device=device)
    pool.state[0] = float("nan")
    pool.remember()
    slots = torch.tensor(indices, device=device)
    answer = conv_oracle(window, pool.state[slots.clamp(min=1)])
    y = rs.causal_conv1d_verify(*window.inputs, pool.state, slots, **window.options, pad_slot_id=pad_slot_id)
    pool.check_unchanged()
    rows = window.rows(y)
    assert all(rows[row].count_nonzero() == 0 for row in pad)
    assert_within_budget(torch.cat([rows[row] for row in real]).cpu(), *answer.outputs(real))
    accepted = torch.tensor([3, 2, 4, 1], device=device)
    rs.causal_conv1d_commit(pool.state, window.x, accepted, slots, **window.layout, pad_slot_id=pad_slot_id)
    for row in real:
        check_history(pool.state[indices[row]], answer, row, accepted[row])
    pool.check_only_written([3, 1])


@pytest.mark.parametrize("pad_slot_id, index", [(-1, -1), (0, 0), (0, -1)])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_b10_a_batch_of_nothing_but_padding(device, packed, pad_slot_id, index):
    window = make_conv_window(3, 4, lengths=[4, 0, 2] if packed else None, device=device)
    pool = guarded_conv_pool(2, 12, device=device)
    pool.state[0] = float("nan")
    pool.remember()
    slots = torch.full((3,), index, device=device, dtype=torch.int32)
    y = rs.causal_conv1d_verify(*window.inputs, pool.state, slots, **window.options, pad_slot_id=pad_slot_id)
    assert torch.equal(y, torch.zeros_like(y))
    rs.causal_conv1d_commit(
        pool.state, window.x, torch.full_like(slots, 4), slots, **window.layout, pad_slot_id=pad_slot_id
    )
    pool.check_unchanged()


def test_b10_padding_of_a_plan(device):
    """A padded source skips all columns of its row; a padded destination skips that column."""
    window = make_conv_window(3, 4, device=device)
    pool = guarded_conv_pool(6, 12, device=device)
    pool.state[0] = float("nan")
    pool.remember()
    source = torch.tensor([0, 2, 3], device=device)
    dest = torch.tensor([[4, 5], [0, 2], [-1, 1]], device=device)
    length = torch.tensor([[4, 4], [1, 3], [2, 4]], device=device)
    answer = conv_oracle(window, pool.state[source.clamp(min=1)])
    rs.causal_conv1d_commit(pool.state, window.x, None, plan=rs.CommitPlan(source, dest, length), pad_slot_id=0)
    pool.check_only_written([2, 1])
    check_history(pool.state[2], answer, 1, 3)
    check_history(pool.state[1], answer, 2, 4)
