"""StepBuffers: what is staged for which rows, what is refused, and that nothing of an earlier step is left."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import recoverssm_ops as rs
from models.acceptance import accept

decode, prefill, verify = rs.StepRow.decode, rs.StepRow.prefill, rs.StepRow.verify
TENSORS = ("slots", "num_computed", "num_drafts", "num_forced", "cu_seqlens", "block_table")


def values(metadata) -> dict:
    tensors = {name: getattr(metadata, name) for name in TENSORS}
    return {name: None if x is None else x.tolist() for name, x in tensors.items()}


def test_rows_of_every_phase(device):
    buffers = rs.StepBuffers([2, 8, 4], 4, device=device)
    metadata = buffers.stage([verify(5, 40, 2), prefill(0, 8, 4), decode(7, 21)])
    assert values(metadata) == {
        "slots": [5, 0, 7, -1],
        "num_computed": [40, 8, 21, 0],
        "num_drafts": [2, 3, 0, 0],
        "num_forced": [0, 3, 0, 0],
        "cu_seqlens": [0, 3, 7, 8, 8],
        "block_table": None,
    }
    assert (metadata.batch_size, metadata.num_rows, metadata.window, metadata.dummy) == (4, 3, 4, False)
    assert metadata.phases == (rs.Phase.VERIFY, rs.Phase.PREFILL, rs.Phase.DECODE)
    for name in TENSORS[:-1]:
        x = getattr(metadata, name)
        assert x.device.type == device.type and x.dtype == torch.int64 and x.is_contiguous()
        assert x.data_ptr() % 16 == 0


def test_smallest_captured_size():
    buffers = rs.StepBuffers([8, 1, 3], 4)
    sizes = [buffers.stage([decode(slot, 1) for slot in range(n)]).batch_size for n in range(9)]
    assert sizes == [1, 1, 3, 3, 8, 8, 8, 8, 8]


@pytest.mark.parametrize("pad_slot_id", [-1, 0])
def test_null_slot_of_padding(pad_slot_id):
    buffers = rs.StepBuffers([3], 2, pad_slot_id=pad_slot_id)
    assert buffers.stage([decode(1, 4)]).slots.tolist() == [1, pad_slot_id, pad_slot_id]
    with pytest.raises(ValueError, match=rf"row 1 \(decode\) should have a slot above {pad_slot_id}, .* {pad_slot_id}"):
        buffers.stage([decode(1, 4), decode(pad_slot_id, 4)])


def test_b12_decode_is_a_verify_row_without_drafts():
    """Draftless rows between, before and after rows with drafts; a whole batch of them."""
    for rows in ([0, 2, 0], [1, 0, 3], [0, 0, 0]):
        as_verify = values(rs.StepBuffers([4], 4).stage([verify(b, 9, d) for b, d in enumerate(rows)]))
        mixed = [verify(b, 9, d) if d else decode(b, 9) for b, d in enumerate(rows)]
        assert values(rs.StepBuffers([4], 4).stage(mixed)) == as_verify
        assert as_verify["num_drafts"] == [*rows, 0] and as_verify["num_forced"] == [0, 0, 0, 0]


def test_b13_a_prompt_of_a_windows_length_is_no_verify_row():
    """Same tokens, same length, a model that disagrees: the prompt chunk is kept whole, the drafts are rejected."""
    T = 4
    metadata = rs.StepBuffers([2], T).stage([prefill(0, 0, T), verify(1, 0, T - 1)])
    window = torch.tensor([[3, 4, 5, 6]]).expand(2, T)
    logits = torch.zeros(2, T, 10)
    logits[..., 9] = 1.0
    noise = torch.zeros(2), torch.zeros(2, T), torch.ones(2, 10)
    tokens, num_accepted = accept(logits, window, metadata.num_drafts, metadata.num_forced, *noise)
    assert num_accepted.tolist() == [T, 1]
    assert tokens.tolist() == [[4, 5, 6, 9], [9, -1, -1, -1]]


@st.composite
def steps(draw):
    """Rows that fit buffers for 1, 2, 5 and 8 rows, windows of 5 and tables of 4 blocks of 6 tokens."""
    count = draw(st.integers(0, 8))
    slots = iter(draw(st.permutations(range(32))))
    rows = []
    for _ in range(count):
        computed = draw(st.integers(0, 18))
        blocks = [next(slots) for _ in range(max(1, -(-computed // 6)))]
        new = draw(st.sampled_from([decode, verify, prefill]))
        more = () if new is decode else (draw(st.integers(new is prefill, 4)),)
        rows.append(new(blocks[-1], computed, *more, block_slots=blocks))
    return rows


@settings(max_examples=60)
@given(st.lists(steps(), min_size=2, max_size=5))
def test_b11_nothing_of_an_earlier_step_is_left(schedule):
    """Every captured size is read through the views of its capture, whatever was staged before."""
    buffers = rs.StepBuffers([1, 2, 5, 8], 5, block_size=6, max_blocks=4)
    captured = {size: buffers.stage_dummy(size) for size in buffers.batch_sizes}
    for rows in schedule:
        metadata = buffers.stage(rows)
        fresh = rs.StepBuffers([1, 2, 5, 8], 5, block_size=6, max_blocks=4).stage(rows)
        for name in TENSORS:
            assert getattr(metadata, name).data_ptr() == getattr(captured[metadata.batch_size], name).data_ptr()
        assert values(metadata) == values(captured[metadata.batch_size]) == values(fresh)
        # A larger graph, replayed by mistake or for an idle rank, finds rows of padding behind the real ones.
        largest = values(captured[8])
        assert largest["slots"][len(rows) :] == [-1] * (8 - len(rows))
        assert largest["block_table"][len(rows) :] == [[-1] * 4] * (8 - len(rows))
        assert largest["cu_seqlens"] == [sum(r.num_tokens for r in rows[:i]) for i in range(9)]
        assert largest["num_drafts"] == [r.num_tokens - 1 for r in rows] + [0] * (8 - len(rows))
        table = values(metadata)["block_table"]
        assert [tuple(s for s in row if s >= 0) for row in table[: len(rows)]] == [r.block_slots for r in rows]
        source = rs.CommitPlan.aligned_source(metadata.num_computed, metadata.block_table, 6)
        assert torch.equal(source, metadata.slots), "the staged slots are those that the plan reads"


PLAIN = {"batch_sizes": [2, 4], "window": 4}
ALIGNED = PLAIN | {"block_size": 8, "max_blocks": 3}
REFUSED = {
    "more rows than captured": (
        PLAIN,
        [decode(b, 1) for b in range(5)],
        r"at most 4 rows, the largest of the captured sizes \[2, 4\], but had 5: run fewer requests, or capture",
    ),
    "b14: drafts beyond the window": (
        PLAIN,
        [decode(0, 1), verify(1, 1, 4)],
        r"row 1 \(verify\) should have between 1 and 4 tokens, the captured window, but had 5: draft fewer tokens",
    ),
    "b14: a prompt beyond the window": (PLAIN, [prefill(0, 0, 64)], r"row 0 \(prefill\) .* had 64: split the chunk"),
    "an empty chunk": (PLAIN, [prefill(0, 0, 0)], r"row 0 \(prefill\) should have between 1 and 4 tokens.* had 0"),
    "negative drafts": (PLAIN, [verify(0, 0, -1)], r"row 0 \(verify\) .* had 0"),
    "a decode row of two tokens": (
        PLAIN,
        [rs.StepRow(rs.Phase.DECODE, 0, 0, 2)],
        r"row 0 \(decode\) should have 1 token, but had 2: drafts make it a verify row",
    ),
    "negative count": (PLAIN, [decode(0, -1)], r"row 0 \(decode\) should have num_computed of at least 0, but had -1"),
    "one slot twice": (PLAIN, [decode(3, 1), decode(3, 2)], "rows 0 and 1 both had slot 3"),
    "blocks without a table": (PLAIN, [decode(3, 1, [3])], "at most 0 blocks, the width of the block table, but had 1"),
    "more blocks than the table": (ALIGNED, [decode(3, 1, [3, 4, 5, 6])], "at most 3 blocks, .* but had 4"),
    "no blocks": (ALIGNED, [decode(3, 1)], "slot of block 0, .* after 1 tokens: it is null, but the row had 3"),
    "b21: the slot of another block size": (
        ALIGNED,
        [decode(4, 9, [3, 5, 4])],
        r"row 0 \(decode\) should have the slot of block 1, .* after 9 tokens: it is 5, but the row had 4",
    ),
    "b19: a published block of another row": (
        ALIGNED,
        [decode(3, 8, [3, 4]), verify(3, 7, 2, [3, 5])],
        "row 0 should read no slot that another row writes, but its slot 3 is row 1's",
    ),
    "one block for two rows": (
        ALIGNED,
        [decode(3, 8, [3, 4]), decode(3, 8, [3, 4])],
        "rows 0 and 1 both had slot 4",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_b14_refused_before_anything_is_written(case):
    settings, rows, message = REFUSED[case]
    buffers = rs.StepBuffers(**settings)
    good = [decode(1, 3, [1] if settings is ALIGNED else [])]
    metadata = buffers.stage(good)
    before = values(metadata)
    with pytest.raises(ValueError, match=message):
        buffers.stage(rows)
    assert values(metadata) == before


def test_b19_requests_may_read_the_block_they_share():
    """Both continue from a published block into their own; a null block may follow."""
    buffers = rs.StepBuffers([2], 4, block_size=8, max_blocks=3)
    metadata = buffers.stage([verify(3, 8, 3, [3, 4]), verify(3, 8, 0, [3, -1])])
    assert metadata.slots.tolist() == [3, 3] and metadata.block_table.tolist() == [[3, 4, -1], [3, -1, -1]]


@pytest.mark.parametrize("row", [(1, 2), None, dataclasses.replace(decode(0, 1), phase="decode")])
def test_rows_need_a_phase(row):
    with pytest.raises(TypeError, match="row 0 should be a StepRow with a Phase, but was"):
        rs.StepBuffers([2], 4).stage([row])


def test_b14_dummy_steps():
    """Of padding alone, of captured sizes, not longer than the window."""
    buffers = rs.StepBuffers([2, 4], 4)
    metadata = buffers.stage([decode(1, 3), decode(2, 3), decode(0, 3)])
    before = values(metadata)
    for size, tokens, message in (
        (3, 4, r"batch_size should be one of \[2, 4\], but was 3"),
        (4, 5, "a dummy step should have between 1 and 4 tokens a row, the captured window, but had 5"),
        (4, 0, "but had 0"),
    ):
        with pytest.raises(ValueError, match=message):
            buffers.stage_dummy(size, tokens)
        assert values(metadata) == before
    dummy = buffers.stage_dummy(4, 4)
    assert dummy.dummy and dummy.num_rows == 0 and dummy.phases == ()
    assert dummy.slots.tolist() == [-1] * 4 and dummy.cu_seqlens.tolist() == [0] * 5


BAD_BUFFERS = {
    "no size": ({"batch_sizes": []}, ValueError, r"batch_sizes should name at least one size, .* was \[\]"),
    "size zero": ({"batch_sizes": [0, 2]}, ValueError, r"all at least 1, but was \[0, 2\]"),
    "size float": ({"batch_sizes": [2.0]}, TypeError, "batch_sizes should be an int, but was float"),
    "window 17": ({"window": 17}, ValueError, "window should be between 1 and 16 tokens, but was 17"),
    "window zero": ({"window": 0}, ValueError, "window should be between 1 and 16 tokens, but was 0"),
    "window None": ({"window": None}, TypeError, "window should be an int, but was NoneType"),
    "blocks without size": ({"max_blocks": 3}, ValueError, "block_size and max_blocks should both .* were 0 and 3"),
    "size without blocks": ({"block_size": 3}, ValueError, "block_size and max_blocks should both .* were 3 and 0"),
    "blocks negative": ({"max_blocks": -1, "block_size": 2}, ValueError, "should both be at least 1, .* 2 and -1"),
    "padding below -1": ({"pad_slot_id": -2}, ValueError, "pad_slot_id should be -1 or a slot, but was -2"),
}


@pytest.mark.parametrize("case", BAD_BUFFERS)
def test_bad_buffers(case):
    changes, exception, message = BAD_BUFFERS[case]
    with pytest.raises(exception, match=message):
        rs.StepBuffers(**PLAIN | changes)
