"""CommitPlan.aligned as a table of slots and lengths: the contract's cases, null blocks, padding, errors."""

import pytest
import torch
from budget import assert_within_budget
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import guarded_pool, make_window, oracle

import recoverssm_ops as rs
from recoverssm_ops.commit_plan import blocks_entered

BLOCK_SIZES = [1, 2, 3, 4, 5, 8, 16, 17, 64, 256, 2048]


def contract(accepted: int, computed: int, slots: list[int], block_size: int) -> dict[int, int]:
    """Slot to length, word for word: the final state, and for every boundary reached the state at exactly that boundary."""

    def slot(block):
        return slots[block] if block < len(slots) else -1

    if accepted == 0:
        return {}
    writes = {slot(max(computed + accepted - 1, 0) // block_size): accepted}
    for position in range(computed + 1, computed + accepted + 1):
        if position % block_size == 0:
            writes[slot(position // block_size - 1)] = position - computed
    return {slot: length for slot, length in writes.items() if slot >= 0}


def writes_of(plan: rs.CommitPlan, row: int) -> list[tuple[int, int]]:
    """(slot, length) of the columns that are written; a slot named twice would be there twice."""
    return [(s, n) for s, n in zip(plan.dest[row].tolist(), plan.length[row].tolist(), strict=True) if s >= 0]


def one_row(accepted, computed, slots, block_size, window, device="cpu"):
    numbers = (torch.tensor([x], device=device) for x in (accepted, computed))
    return rs.CommitPlan.aligned(*numbers, torch.tensor([slots], device=device), block_size, window)


FIVE_CASES = {
    # computed, accepted: final block, closed block
    (8188, 4): (3, 3),
    (8190, 4): (4, 3),
    (8180, 4): (3, None),
    (8192, 1): (4, None),
    (2047, 1): (0, 0),
}


@pytest.mark.parametrize("computed, accepted", FIVE_CASES)
def test_five_cases(device, computed, accepted):
    final, closed = FIVE_CASES[computed, accepted]
    slots = [10, 11, 12, 13, 14, 15]
    plan = one_row(accepted, computed, slots, 2048, 4, device)
    expected = {(slots[final], accepted)}
    if closed is not None:
        expected.add((slots[closed], (closed + 1) * 2048 - computed))
    assert set(writes_of(plan, 0)) == expected and len(writes_of(plan, 0)) == len(expected)
    assert plan.source.tolist() == [slots[(computed - 1) // 2048]]
    assert plan.dest.shape == plan.length.shape == (1, 2)


@pytest.mark.parametrize("computed, accepted", FIVE_CASES)
def test_b17_five_cases_with_the_next_block_unallocated(device, computed, accepted):
    """Only blocks that the tokens so far lie in are allocated; the committed states are all there, and right."""
    allocated = -(-(computed + accepted) // 2048)
    slots = [5, 3, 0, 6, 2][:allocated] + [-1] * (6 - allocated)
    window = make_window(1, 4, device=device)
    pool = guarded_pool(7, 2, 6, 8, device=device)
    num_computed, table = torch.tensor([computed], device=device), torch.tensor([slots], device=device)
    source = rs.CommitPlan.aligned_source(num_computed, table, 2048)
    answer = oracle(window, pool.state[source])
    _, record = rs.kda_verify(*window.inputs, pool.state, source, **window.options)
    plan = rs.CommitPlan.aligned(torch.tensor([accepted], device=device), num_computed, table, 2048, 4)
    rs.kda_commit(pool.state, record, None, plan=plan)
    expected = contract(accepted, computed, slots, 2048)
    assert slots[(computed + accepted - 1) // 2048] in expected
    for slot, length in expected.items():
        assert_within_budget(pool.state[slot : slot + 1].cpu(), *answer.states([length]), name=f"slot {slot}")
    pool.check_only_written(expected)


def test_b17_what_goes_to_a_null_block_is_dropped_and_the_rest_is_not(device):
    """The final block is null, or beyond the table: its state is not kept, the boundary is published all the same."""
    for slots in ([4, -1, 7], [4, -9], [4]):
        assert writes_of(one_row(4, 6, slots, 8, 4, device), 0) == [(4, 2)]
    assert writes_of(one_row(3, 6, [-1, 5], 8, 4, device), 0) == [(5, 3)]


def test_b18_a_window_of_several_blocks(device):
    """block_size 2, tokens 5 to 11 of a request: blocks 2 (closed after 1), 3, 4 (after 3, 5) and 5 (final, after 7)."""
    plan = one_row(7, 5, [20, 21, 22, 23, 24, 25, 26], 2, 8, device)
    assert writes_of(plan, 0) == [(22, 1), (23, 3), (24, 5), (25, 7)]
    assert plan.source.tolist() == [22]
    assert writes_of(one_row(16, 32, list(range(48)), 1, 16, device), 0) == [(32 + i, 1 + i) for i in range(16)]


@st.composite
def batches(draw):
    block_size = draw(st.sampled_from(BLOCK_SIZES))
    window = draw(st.integers(1, 16))
    blocks = draw(st.integers(-(-window // block_size), 24))
    longest = blocks * block_size + window
    computed = st.integers(0, longest) | st.sampled_from([b * block_size for b in range(blocks + 1)])
    rows = draw(st.lists(st.tuples(st.integers(0, window), computed), min_size=1, max_size=6))
    slots = draw(st.permutations(range(len(rows) * blocks)))
    table = [slots[b * blocks : (b + 1) * blocks] for b in range(len(rows))]
    for row in table:
        for hole in draw(st.lists(st.integers(0, blocks - 1), max_size=3)):
            row[hole] = draw(st.integers(-5, -1))
    return block_size, window, rows, table


@settings(max_examples=300)
@given(batches(), st.sampled_from([torch.int32, torch.int64]), st.sampled_from([torch.int32, torch.int64]))
def test_any_batch_is_the_contract(batch, count_dtype, slot_dtype):
    block_size, window, rows, table = batch
    accepted, computed = (torch.tensor(x, dtype=count_dtype) for x in zip(*rows, strict=True))
    table_ = torch.tensor(table, dtype=slot_dtype)
    plan = rs.CommitPlan.aligned(accepted, computed, table_, block_size, window)
    assert plan.dest.shape == plan.length.shape == (len(rows), blocks_entered(window, block_size))
    assert plan.dest.dtype == plan.source.dtype == slot_dtype
    for b, (n, c) in enumerate(rows):
        writes = writes_of(plan, b)
        assert len(dict(writes)) == len(writes), "a slot is named twice"
        assert dict(writes) == contract(n, c, table[b], block_size)
        block = max(c - 1, 0) // block_size
        assert plan.source[b] == (table[b][block] if block < len(table[b]) else -1)
        # Published states never change: blocks closed by earlier steps are not among the destinations.
        assert not {s for s, _ in writes} & set(table[b][: c // block_size])


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("window", range(1, 17))
def test_columns_are_as_few_as_possible(window, block_size):
    """Some start needs them all, none needs more."""
    entered = [(start + window - 1) // block_size + 1 for start in range(block_size)]
    assert blocks_entered(window, block_size) == max(entered)


@pytest.mark.parametrize("computed", [0, 1, 7, 8, 9, -3, 2**31 - 1, 2**40])
def test_b10_rows_of_padding_go_nowhere(device, computed):
    """Whatever their num_computed and num_accepted hold."""
    for accepted in (0, 3, -2):
        plan = one_row(accepted, computed, [-1, -2, -1], 8, 4, device)
        assert writes_of(plan, 0) == [] and plan.source[0] < 0


def test_nothing_accepted_names_no_slot(device):
    """In the middle of a block, on a boundary, at the start: not even a write of what is there already."""
    for computed in (0, 3, 8, 11):
        plan = one_row(0, computed, [4, 5, 6], 8, 4, device)
        assert writes_of(plan, 0) == [] and plan.source.tolist() == [[4, 5, 6][max(computed - 1, 0) // 8]]


def test_accepted_counts_are_clamped(device):
    """To the window, and with cu_seqlens to each row's length: no boundary beyond a row's end is published."""
    assert writes_of(one_row(9, 6, [4, 5, 6], 8, 4, device), 0) == [(4, 2), (5, 4)]
    accepted, computed = torch.tensor([4, 4, 9], device=device), torch.tensor([6, 6, 15], device=device)
    table = torch.tensor([[0, 1, 2], [3, 4, 5], [6, 7, 8]], device=device)
    ends = torch.tensor([0, 1, 1, 4], device=device)
    plan = rs.CommitPlan.aligned(accepted, computed, table, 8, 4, cu_seqlens=ends)
    assert [writes_of(plan, row) for row in range(3)] == [[(0, 1)], [], [(7, 1), (8, 3)]]


def test_tables_of_any_stride(device):
    """Columns of a scheduler's wider tables."""
    numbers = torch.tensor([[4, 0, 6], [2, 0, 14]], device=device)
    table = torch.tensor([[4, 1], [5, 2], [6, 3]], device=device).t()
    plan = rs.CommitPlan.aligned(numbers[:, 0], numbers[:, 2], table, 8, 4)
    assert [writes_of(plan, row) for row in range(2)] == [[(4, 2), (5, 4)], [(2, 2)]]


def test_b21_block_size_is_the_state_blocks(device):
    """Attention blocks of 16 tokens beside state blocks of 64: the plan follows the size and the table it is given."""
    state_table, attention_table = [30, 31], list(range(8))
    assert writes_of(one_row(4, 62, state_table, 64, 8, device), 0) == [(30, 2), (31, 4)]
    assert writes_of(one_row(4, 62, attention_table, 16, 8, device), 0) == [(3, 2), (4, 4)]
    assert writes_of(one_row(4, 14, state_table, 64, 8, device), 0) == [(30, 4)]
    assert writes_of(one_row(4, 14, attention_table, 16, 8, device), 0) == [(0, 2), (1, 4)]


GOOD = {
    "num_accepted": torch.tensor([1, 2]),
    "num_computed": torch.tensor([8, 9]),
    "block_table": torch.tensor([[0, 1, 2], [3, 4, 5]]),
    "block_size": 8,
    "window": 4,
}
BAD = {
    "counts float": (
        {"num_accepted": torch.ones(2)},
        TypeError,
        "num_accepted should have dtype int32, int64, but was",
    ),
    "counts of another batch": (
        {"num_accepted": torch.tensor([1])},
        ValueError,
        r"num_accepted .* \[2\], but was \[1\]",
    ),
    "positions of another batch": ({"num_computed": torch.tensor([[1, 2]])}, ValueError, r"num_computed .* \[1, 2\]"),
    "positions elsewhere": (
        {"num_computed": torch.zeros(2, dtype=torch.int64, device="meta")},
        ValueError,
        "num_computed should be on cpu .* was on meta",
    ),
    "positions as a list": ({"num_computed": [8, 9]}, TypeError, "num_computed should be a tensor, but was list"),
    "table of one row": ({"block_table": torch.tensor([0, 1])}, ValueError, r"block_table .* \[B, blocks\] .* \[2\]"),
    "table bool": ({"block_table": torch.ones(2, 3, dtype=torch.bool)}, TypeError, "block_table .* was bool"),
    "table too narrow": (
        {"block_size": 1},
        ValueError,
        "block_table should have at least 4 blocks, what a window of 4 tokens fills with block_size 1, but had 3: allocate",
    ),
    "no blocks": ({"block_table": torch.zeros(2, 0, dtype=torch.int64)}, ValueError, "at least 1 blocks.* but had 0"),
    "block_size zero": ({"block_size": 0}, ValueError, "block_size should be at least 1, but was 0"),
    "block_size float": ({"block_size": 8.0}, TypeError, "block_size should be an int, but was float"),
    "block_size tensor": ({"block_size": torch.tensor(8)}, TypeError, "block_size should be an int, but was Tensor"),
    "window zero": ({"window": 0}, ValueError, "window should be at least 1, but was 0"),
    "window 17": ({"window": 17}, ValueError, "window should be between 1 and 16 tokens, but was 17"),
    "window None": ({"window": None}, TypeError, "window should be an int, but was NoneType"),
    "packing of another batch": (
        {"cu_seqlens": torch.tensor([0, 1])},
        ValueError,
        r"cu_seqlens should have shape .* \[3\], but was \[2\]",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case):
    changes, exception, message = BAD[case]
    rs.CommitPlan.aligned(**GOOD)
    with pytest.raises(exception, match=message):
        rs.CommitPlan.aligned(**GOOD | changes)


def test_b18_a_table_that_holds_a_window_is_not_rejected():
    """As narrow as it can be: four blocks of one token for a window of four."""
    table = torch.tensor([[0, 1, 2, 3]])
    plan = rs.CommitPlan.aligned(torch.tensor([4]), torch.tensor([0]), table, 1, 4)
    assert writes_of(plan, 0) == [(0, 1), (1, 2), (2, 3), (3, 4)]
