"""Behaviours 5, 7 to 10, 14 and 16: who may read and write which part of the pool, and how often."""

import copy
import dataclasses

import pytest
import torch
from budget import assert_within_budget, verify_slack
from pools import guarded_pool, make_window, oracle, same_bits
from torch.utils import _pytree as pytree

import recoverssm_ops as rs

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def tensors_of(window) -> list[torch.Tensor]:
    return [*window.inputs, *(x for x in window.options.values() if isinstance(x, torch.Tensor))]


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("pool_dtype", FLOATS, ids=str)
def test_b05_verify_writes_nothing(device, pool_dtype, packed):
    """Not the pool, not the inputs, not the gate's parameters, not the indices."""
    window = make_window(4, 5, lengths=[5, 0, 2, 4] if packed else None, tail=2 if packed else 0, device=device)
    pool = guarded_pool(6, 2, 6, 8, dtype=pool_dtype, device=device)
    slots = torch.tensor([5, -1, 0, 2], device=device)
    before = [x.clone() for x in [*tensors_of(window), slots]]
    for _ in range(2):
        rs.kda_verify(*window.inputs, pool.state, slots, **window.options)
        pool.check_unchanged()
    for x, y in zip([*tensors_of(window), slots], before, strict=True):
        assert same_bits(x, y)


def test_b05_more_programs_than_fit_at_once(device):
    """Thousands of (row, head) programs: every copy of a row gives the same bits, in verify and in commit."""
    batch, distinct, heads = (1024, 4, 16) if device.type == "cuda" else (64, 4, 8)
    few = make_window(distinct, 8, heads=heads, value_heads=heads, key_dim=16, value_dim=16, device=device)
    copies = torch.arange(batch, device=device) % distinct
    window = few.with_inputs(**{name: getattr(few, name)[copies] for name in ("q", "k", "v", "g", "beta")})
    pool = guarded_pool(batch, heads, 16, 16, device=device)
    pool.state.copy_(pool.state[:distinct][copies].clone())
    pool.remember()
    accepted = copies + 2

    o, record = rs.kda_verify(*window.inputs, pool.state, **window.options)
    pool.check_unchanged()
    answer = oracle(few, pool.state[:distinct])
    assert_within_budget(o[:distinct].flatten(0, 1).cpu(), *answer.outputs(), name="o")
    assert same_bits(o, o[:distinct][copies]) and same_bits(record.u, record.u[:distinct][copies])
    rs.kda_commit(pool.state, record, accepted)
    assert_within_budget(pool.state[:distinct].cpu(), *answer.states(accepted[:distinct]), name="state")
    assert same_bits(pool.state, pool.state[:distinct][copies])
    pool.check_guards()


SLOTS, HEADS, V, K = 5, 2, 6, 8
LAYOUTS = {
    "contiguous": lambda **to: guarded_pool(SLOTS, HEADS, V, K, guard=0, **to),
    "guards around rows, heads and slots": lambda **to: guarded_pool(SLOTS, HEADS, V, K, **to),
    "heads outside slots": lambda **to: guarded_pool(SLOTS, HEADS, V, K, order="head-first", **to),
    "odd gaps": lambda **to: guarded_pool(SLOTS, HEADS, V, K, guard=1, **to),
}


@pytest.mark.parametrize("pool_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_b07_strided_pool_is_updated_in_place(device, layout, pool_dtype):
    """NaN guards between rows, heads and slots are neither read nor written."""
    pool = LAYOUTS[layout](dtype=pool_dtype, device=device)
    window = make_window(3, 4, device=device)
    slots = torch.tensor([4, 0, 2], device=device)
    answer = oracle(window, pool.state[slots])
    o, record = rs.kda_verify(*window.inputs, pool.state, slots, **window.options)
    rs.kda_commit(pool.state, record, torch.tensor([4, 1, 3], device=device), slots)
    assert_within_budget(o.flatten(0, 1).cpu(), *answer.outputs(), name="o", slack=verify_slack(pool.state))
    assert_within_budget(pool.state[slots].cpu(), *answer.states([4, 1, 3]), name="state")
    pool.check_only_written(slots)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_b07_layer_of_a_shared_pool(device, axis):
    """One allocation for all layers, the layer axis outermost, inside the slots or inside the heads."""
    shape = [SLOTS, HEADS, V, K]
    shape.insert(axis, 3)
    shared = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device)
    before = shared.clone()
    layer = shared.select(axis, 1)
    window = make_window(3, 4, device=device)
    slots = torch.tensor([4, 0, 2], device=device)
    answer = oracle(window, layer[slots])
    _, record = rs.kda_verify(*window.inputs, layer, slots, **window.options)
    assert same_bits(shared, before)
    rs.kda_commit(layer, record, torch.tensor([4, 1, 3], device=device), slots)
    assert_within_budget(layer[slots].cpu(), *answer.states([4, 1, 3]))
    for other in (0, 2):
        assert same_bits(shared.select(axis, other), before.select(axis, other))
    assert same_bits(layer[[1, 3]], before.select(axis, 1)[[1, 3]])


def test_b07_head_sizes_of_one_have_any_stride(device):
    """An axis of length 1 reports a stride that means nothing."""
    window = make_window(2, 3, key_dim=1, value_dim=1, device=device)
    storage = torch.full((2, 2, 3, 7), float("nan"), device=device)
    state = storage[:, :, :1, :1].transpose(-1, -2)
    state.fill_(0.5)
    answer = oracle(window, state)
    _, record = rs.kda_verify(*window.inputs, state, **window.options)
    rs.kda_commit(state, record, torch.tensor([3, 2], device=device))
    assert_within_budget(state.cpu(), *answer.states([3, 2]))
    assert int(storage.isnan().sum()) == storage.numel() - 4


def test_b08_slot_beyond_32_bit_offsets(device):
    """The last slot starts more than 2^31 elements into the pool. The CPU maps its pages only when they are touched."""
    slot_stride = 2**30 + 64
    need = (2 * slot_stride + HEADS * V * K) * 2
    if device.type == "cuda" and torch.cuda.mem_get_info()[0] < need + 2**30:
        pytest.skip(f"needs {need / 2**30:.1f} GiB of GPU memory")
    storage = torch.empty(2 * slot_stride + HEADS * V * K, dtype=torch.bfloat16, device=device)
    state = storage.as_strided((3, HEADS, V, K), (slot_stride, V * K, K, 1))
    state.copy_(torch.randn(3, HEADS, V, K, generator=torch.Generator().manual_seed(2)))
    before = state.clone()
    window = make_window(1, 4, device=device)
    slots = torch.tensor([2], device=device, dtype=torch.int32)
    answer = oracle(window, state[slots])
    o, record = rs.kda_verify(*window.inputs, state, slots, **window.options)
    rs.kda_commit(state, record, torch.tensor([3], device=device), slots)
    assert_within_budget(o[0].cpu(), *answer.outputs(), name="o", slack=verify_slack(state))
    assert_within_budget(state[2:].cpu(), *answer.states([3]), name="state")
    assert same_bits(state[:2], before[:2])


@pytest.mark.parametrize("source_column", [0, 1, 2])
@pytest.mark.parametrize("pool_dtype", FLOATS, ids=str)
def test_b09_source_may_be_a_destination(device, source_column, pool_dtype):
    """Whichever column overwrites the checkpoint, all columns see the old one: in place equals out of place."""
    window = make_window(2, 5, device=device)
    source, length = torch.tensor([3, 6], device=device), torch.tensor([[5, 2, 4], [1, 3, 0]], device=device)
    apart = torch.tensor([[0, 1, 2], [4, 5, 7]], device=device)
    aliased = apart.clone()
    aliased[:, source_column] = source
    pools = []
    for dest in (apart, aliased):
        pool = guarded_pool(8, 2, 6, 8, dtype=pool_dtype, device=device)
        answer = oracle(window, pool.state[source])
        _, record = rs.kda_verify(*window.inputs, pool.state, source, **window.options)
        rs.kda_commit(pool.state, record, None, plan=rs.CommitPlan(source, dest, length))
        for column in range(3):
            assert_within_budget(pool.state[dest[:, column]].cpu(), *answer.states(length[:, column]))
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
    lengths = [4, 2, 0, 4] if packed else None
    window = make_window(4, 4, lengths=lengths, device=device)
    pad, real = [0, 2], [1, 3]
    for name in ("q", "k", "v", "g", "beta"):
        for row in pad:
            window.rows(getattr(window, name))[row].fill_(float("nan"))
    pool = guarded_pool(5, 2, 6, 8, dtype=pool_dtype, device=device)
    pool.state[0] = float("nan")
    pool.remember()
    slots = torch.tensor(indices, device=device)
    answer = oracle(window, pool.state[slots.clamp(min=1)])
    o, record = rs.kda_verify(*window.inputs, pool.state, slots, **window.options, pad_slot_id=pad_slot_id)
    pool.check_unchanged()
    for name, x, which in (("o", o, 0), ("u", record.u, 1)):
        rows = window.rows(x)
        for row in pad:
            assert torch.equal(rows[row], torch.zeros_like(rows[row])), f"{name} of a padding row should be zero"
        exact, plain = (torch.cat([kind[row][which] for row in real]) for kind in (answer.rows64, answer.rows32))
        actual, slack = torch.cat([rows[row] for row in real]), verify_slack(pool.state)
        assert_within_budget(actual.cpu(), exact, plain, name=name, slack=slack)
    accepted = torch.tensor([3, 2, 4, 1], device=device)
    rs.kda_commit(pool.state, record, accepted, slots, pad_slot_id=pad_slot_id)
    states = [x[real] for x in answer.states(accepted)]
    assert_within_budget(pool.state[[3, 1]].cpu(), *states, name="state")
    pool.check_only_written([3, 1])


@pytest.mark.parametrize("pad_slot_id, index", [(-1, -1), (0, 0), (0, -1)])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_b10_a_batch_of_nothing_but_padding(device, packed, pad_slot_id, index):
    window = make_window(3, 4, lengths=[4, 0, 2] if packed else None, device=device)
    pool = guarded_pool(2, 2, 6, 8, device=device)
    pool.state[0] = float("nan")
    pool.remember()
    slots = torch.full((3,), index, device=device, dtype=torch.int32)
    o, record = rs.kda_verify(*window.inputs, pool.state, slots, **window.options, pad_slot_id=pad_slot_id)
    assert torch.equal(o, torch.zeros_like(o)) and torch.equal(record.u, torch.zeros_like(record.u))
    rs.kda_commit(pool.state, record, torch.full_like(slots, 4), slots, pad_slot_id=pad_slot_id)
    pool.check_unchanged()


def test_b10_padding_of_a_plan(device):
    """A padded source skips all columns of its row; a padded destination skips that column."""
    window = make_window(3, 4, device=device)
    pool = guarded_pool(6, 2, 6, 8, device=device)
    pool.state[0] = float("nan")
    pool.remember()
    source = torch.tensor([0, 2, 3], device=device)
    dest = torch.tensor([[4, 5], [0, 2], [-1, 1]], device=device)
    length = torch.tensor([[4, 4], [1, 3], [2, 4]], device=device)
    answer = oracle(window, pool.state[source.clamp(min=1)])
    _, record = rs.kda_verify(*window.inputs, pool.state, source, **window.options, pad_slot_id=0)
    rs.kda_commit(pool.state, record, None, plan=rs.CommitPlan(source, dest, length), pad_slot_id=0)
    pool.check_only_written([2, 1])
    states = [x[1:] for x in answer.states([0, 3, 4])]
    assert_within_budget(pool.state[[2, 1]].cpu(), *states)


TOO_LONG = {
    "dense window of 64": (make_window(1, 64), {}),
    "dense window of 17": (make_window(2, 17), {}),
    "packed tokens beyond the rows' windows": (make_window(2, 4, lengths=[4, 4], tail=1), {}),
    "one packed row of 64": (make_window(1, 4, lengths=[64]), {}),
    "max_seqlen beyond the window limit": (make_window(2, 17, lengths=[4, 4]), {}),
    "max_seqlen unlike the dense window": (make_window(2, 4), {"max_seqlen": 8}),
}


@pytest.mark.parametrize("case", TOO_LONG)
def test_b14_a_query_longer_than_the_window_is_refused(device, case):
    """As a serving engine's dummy run before capture would send it; refused before anything is computed or written."""
    window, more = TOO_LONG[case]
    window = window.with_inputs(**{name: getattr(window, name).to(device) for name in ("q", "k", "v", "g", "beta")})
    options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in window.options.items()}
    pool = guarded_pool(2, 2, 6, 8, device=device)
    with pytest.raises(ValueError, match=r"(max_seqlen|window|q) .*but (was|held) (64|17|9|8)"):
        rs.kda_verify(*window.inputs, pool.state, **options | more)
    pool.check_unchanged()


def verified(device):
    window = make_window(2, 4, device=device)
    pool = guarded_pool(2, 2, 6, 8, device=device)
    _, record = rs.kda_verify(*window.inputs, pool.state, **window.options)
    return pool, record, torch.tensor([3, 1], device=device)


COPIES = {
    "the record itself": lambda record: record,
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "dataclasses.replace": dataclasses.replace,
    "a pytree map": lambda record: pytree.tree_map_only(torch.Tensor, torch.clone, record),
}


@pytest.mark.parametrize("duplicate", COPIES)
def test_b16_a_record_is_consumed_once(device, duplicate):
    """A second commit would advance the state twice. It is refused, for copies made after the first one too."""
    pool, record, n = verified(device)
    rs.kda_recover(pool.state, record, n)  # looking does not consume
    rs.kda_commit(pool.state, record, n)
    pool.remember()
    again = COPIES[duplicate](record)
    with pytest.raises(RuntimeError, match=r"record was committed already.*kda_verify again"):
        rs.kda_commit(pool.state, again, n)
    with pytest.raises(RuntimeError, match="record was committed already"):
        rs.kda_commit(pool.state, again, None, plan=rs.CommitPlan.in_place(n, torch.arange(2, device=device)))
    pool.check_unchanged()


def test_b16_a_refused_commit_does_not_consume(device):
    pool, record, n = verified(device)
    with pytest.raises(TypeError, match="num_accepted"):
        rs.kda_commit(pool.state, record, n.float())
    pool.check_unchanged()
    assert not record.committed
    rs.kda_commit(pool.state, record, n)
    assert record.committed
    with pytest.raises(AssertionError):
        pool.check_unchanged()
