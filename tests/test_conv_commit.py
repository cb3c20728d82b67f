"""causal_conv1d_commit: the very inputs in the very columns, for every accepted length, plan, layout and index type."""

import itertools

import pytest
import torch
from budget import assert_within_budget
from conv_cases import check_history, conv_oracle, guarded_conv_pool, make_conv_window
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import same_bits

import recoverssm_ops as rs

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
LENGTHS = [4, 0, 4, 1, 2, 3]
ACCEPTED = [4, 0, 2, 1, 1, 3]
SLOTS = [7, 2, 5, 0, 8, 3]


def check_commit(window, pool, slots, accepted, index_dtype=torch.int64) -> None:
    """Commit in place: the oracle's histories bit by bit, no other slot touched."""
    device = window.x.device
    index = torch.tensor(slots, device=device, dtype=index_dtype)
    n = torch.tensor(accepted, device=device, dtype=index_dtype)
    answer = conv_oracle(window, pool.state[slots])
    assert rs.causal_conv1d_commit(pool.state, window.x, n, index, **window.layout) is None
    for row, slot in enumerate(slots):
        check_history(pool.state[slot], answer, row, accepted[row])
    pool.check_only_written(
        slot for slot, n, length in zip(slots, accepted, window.lengths, strict=True) if min(n, length) > 0
    )


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("width", range(2, 9))
def test_widths(device, width, packed):
    lengths, tail = (LENGTHS, 3) if packed else (None, 0)
    window = make_conv_window(6, 4, width=width, lengths=lengths, tail=tail, device=device)
    check_commit(window, guarded_conv_pool(9, 12, width, device=device), SLOTS, ACCEPTED)


@pytest.mark.parametrize("pool_dtype", FLOATS, ids=lambda d: f"pool={d}".replace("torch.", ""))
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: f"x={d}".replace("torch.", ""))
def test_dtypes(device, dtype, pool_dtype):
    """The pool's dtype may differ from the inputs': each input is rounded once, when it is committed."""
    for lengths in (None, LENGTHS):
        window = make_conv_window(6, 4, dtype=dtype, lengths=lengths, device=device)
        check_commit(window, guarded_conv_pool(9, 12, dtype=pool_dtype, device=device), SLOTS, ACCEPTED)


@pytest.mark.parametrize("T", range(1, 17))
def test_every_accepted_length(device, T):
    """One row per accepted length 0..T of a window."""
    for width in (2, 4, 8):
        window = make_conv_window(T + 1, T, width=width, device=device, seed=T)
        pool = guarded_conv_pool(T + 2, 12, width, device=device)
        check_commit(window, pool, list(range(T + 1, 0, -1)), list(range(T + 1)))


@pytest.mark.parametrize("channels", [1, 3, 31, 64, 257, 1000])
def test_channels(device, channels):
    window = make_conv_window(2, 5, channels=channels, device=device)
    check_commit(window, guarded_conv_pool(3, channels, device=device), [2, 0], [1, 5])


def test_index_dtypes_may_differ(device):
    for slot_dtype, count_dtype, packed_dtype in itertools.product((torch.int32, torch.int64), repeat=3):
        window = make_conv_window(6, 4, lengths=LENGTHS, index_dtype=packed_dtype, device=device)
        pool = guarded_conv_pool(9, 12, device=device)
        answer = conv_oracle(window, pool.state[SLOTS])
        n, slots = (torch.tensor(x, device=device, dtype=d) for x, d in ((ACCEPTED, count_dtype), (SLOTS, slot_dtype)))
        rs.causal_conv1d_commit(pool.state, window.x, n, slots, **window.layout)
        for row, slot in enumerate(SLOTS):
            check_history(pool.state[slot], answer, row, ACCEPTED[row])


def test_row_number_is_the_slot_without_indices(device):
    window = make_conv_window(3, 4, device=device)
    pool = guarded_conv_pool(4, 12, device=device)
    answer = conv_oracle(window, pool.state[:3])
    rs.causal_conv1d_commit(pool.state, window.x, torch.tensor([2, 4, 1], device=device))
    for row, n in enumerate([2, 4, 1]):
        check_history(pool.state[row], answer, row, n)
    pool.check_only_written([0, 1, 2])


def test_strided_inputs_and_plans(device):
    """Slices of a fused projection; slots and lengths that are columns of wider tables."""
    window = make_conv_window(3, 5, device=device)
    fused = torch.full((3, 5, 30), float("nan"), device=device)
    fused[..., 11:23] = window.x
    table = torch.tensor([[2, 99, 4], [0, 99, 1], [1, 99, 3]], device=device)
    for x in (fused[..., 11:23], window.x.mT.contiguous().mT):
        pool = guarded_conv_pool(4, 12, device=device)
        answer = conv_oracle(window, pool.state[table[:, 0]])
        plan = rs.CommitPlan(table[:, 0], table[:, :1], table.int()[:, 2:])
        rs.causal_conv1d_commit(pool.state, x, None, plan=plan)
        for row, (slot, _, n) in enumerate(table.tolist()):
            check_history(pool.state[slot], answer, row, n)
        pool.check_only_written([2, 0, 1])


@pytest.mark.parametrize("columns", [1, 2, 3, 5])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_plans_of_several_columns(device, packed, columns):
    window = make_conv_window(3, 6, width=5, lengths=[6, 2, 5] if packed else None, device=device)
    pool = guarded_conv_pool(3 + 3 * columns, 12, 5, device=device)
    source = torch.arange(3, device=device)
    dest = 3 + torch.randperm(3 * columns, generator=torch.Generator().manual_seed(1)).view(3, columns).to(device)
    length = torch.randint(-2, 9, (3, columns), generator=torch.Generator().manual_seed(2)).to(device)
    dest[1, 0] = -1
    answer = conv_oracle(window, pool.state[source])
    rs.causal_conv1d_commit(pool.state, window.x, None, plan=rs.CommitPlan(source, dest, length), **window.layout)
    written = [(row, m) for row in range(3) for m in range(columns) if dest[row, m] >= 0]
    for row, m in written:
        check_history(pool.state[dest[row, m]], answer, row, length[row, m])
    pool.check_only_written([int(dest[where]) for where in written])


@st.composite
def steps(draw):
    batch, columns, width = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(2, 8))
    T = draw(st.integers(1, 16))
    lengths = draw(st.none() | st.lists(st.integers(0, T), min_size=batch, max_size=batch))
    slots = draw(st.permutations(range(1, batch * (columns + 1) + 2)))
    dest = [slots[batch + b * columns : batch + (b + 1) * columns] for b in range(batch)]
    source = list(slots[:batch])
    for b in range(batch):
        if draw(st.booleans()):  # in place, in any column
            dest[b][draw(st.integers(0, columns - 1))] = source[b]
        if draw(st.integers(0, 3)) == 0:
            dest[b][draw(st.integers(0, columns - 1))] = draw(st.sampled_from([0, -1, -9]))
        if draw(st.integers(0, 5)) == 0:
            source[b] = draw(st.sampled_from([0, -1]))
    length = draw(
        st.lists(st.lists(st.integers(-3, 20), min_size=columns, max_size=columns), min_size=batch, max_size=batch)
    )
    return width, T, lengths, source, dest, length


@settings(max_examples=80)
@given(steps())
def test_any_plan(step):
    """Slot 0 is the null block; any mix of columns, padding, aliasing and lengths equals the oracle column by column."""
    width, T, lengths, source, dest, length = step
    window = make_conv_window(len(source), T, channels=3, width=width, lengths=lengths)
    pool = guarded_conv_pool(len(source) * (len(dest[0]) + 1) + 2, 3, width)
    pool.state[0] = float("nan")
    pool.remember()
    answer = conv_oracle(window, pool.state[[max(s, 0) for s in source]])
    y = rs.causal_conv1d_verify(*window.inputs, pool.state, torch.tensor(source), **window.options, pad_slot_id=0)
    pool.check_unchanged()
    plan = rs.CommitPlan(*(torch.tensor(x) for x in (source, dest, length)))
    rs.causal_conv1d_commit(pool.state, window.x, None, plan=plan, **window.layout, pad_slot_id=0)
    written = []
    for row, s in enumerate(source):
        outputs = window.rows(y)[row]
        if s <= 0:
            assert outputs.count_nonzero() == 0
            continue
        assert_within_budget(outputs, *answer.outputs([row]))
        for to, n in zip(dest[row], length[row], strict=True):
            if to > 0:
                check_history(pool.state[to], answer, row, n)
                written.append(to)
    pool.check_only_written(written)


def test_recommitting_shifts_again(device):
    """What the docstring warns of: x does not know that it was committed."""
    window = make_conv_window(1, 2, device=device)
    pool = guarded_conv_pool(1, 12, device=device)
    n = torch.tensor([1], device=device)
    for _ in range(2):
        rs.causal_conv1d_commit(pool.state, window.x, n)
    assert same_bits(pool.state[0, :, 1], window.x[0, 0]) and same_bits(pool.state[0, :, 2], window.x[0, 0])
