"""What an engine has: slots and batch sizes; and what it refuses."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import VOCAB, build, serve, tokens

from models.engine import Engine, batch_buckets
from models.requests import Request
from models.slots import NULL_SLOT, SlotAllocator


def test_slots():
    slots = SlotAllocator(4)
    assert [slots.allocate() for _ in range(3)] == [1, 2, 3]
    with pytest.raises(RuntimeError, match="all 3 slots are in use"):
        slots.allocate()
    assert slots.padding(1) == [NULL_SLOT]
    with pytest.raises(RuntimeError, match="2 padding rows need as many slots without a holder, there are 1"):
        slots.padding(2)
    slots.release(2)
    assert slots.in_use == 2 and sorted(slots.padding(2)) == [NULL_SLOT, 2]
    with pytest.raises(RuntimeError, match="slot 2 is released, but nobody holds it"):
        slots.release(2)
    with pytest.raises(RuntimeError, match="slot 0 is released"):
        slots.release(NULL_SLOT)
    assert slots.allocate() == 2
    with pytest.raises(ValueError, match="num_slots should be at least 2"):
        SlotAllocator(1)


def test_waiting_for_a_leaked_slot_is_an_error():
    engine = build(slots=1)
    engine.slots.allocate()
    assert engine.step() == []
    engine.submit(Request(tokens(1, 3), 2))
    with pytest.raises(RuntimeError, match="slots have leaked"):
        engine.step()


@given(st.integers(1, 300))
def test_batch_buckets_reach_every_batch(most):
    sizes = batch_buckets(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most and len(sizes) <= 8
    # No step has more padding than rows, but for the smallest size.
    assert all(large <= 2 * small for small, large in itertools.pairwise(sizes))


def test_bad_requests_and_engines_are_refused():
    with pytest.raises(ValueError, match="at least one token, got an empty one"):
        Request(b"", 4)
    with pytest.raises(ValueError, match="max_new_tokens should be at least 1, got 0"):
        Request(b"a", 0)
    engine = build()
    with pytest.raises(ValueError, match="need 97 positions, the pools hold 96"):
        engine.submit(Request(tokens(1, 60), 31))
    with pytest.raises(ValueError, match=f"below {VOCAB}, the vocabulary, got {VOCAB}"):
        engine.submit(Request(bytes([3, VOCAB]), 4))
    done = Request(tokens(1, 3), 2)
    serve(engine, [done])
    with pytest.raises(ValueError, match="has run already"):
        engine.submit(done)
    with pytest.raises(ValueError, match="is not running"):
        engine.preempt(done, keep_state=True)
    for buckets in ([], [4, 2], [1, 2], [0, 4], [2, 2, 4]):
        with pytest.raises(ValueError, match="buckets should ascend and reach 4"):
            Engine(engine.step_module, num_drafts=2, buckets=buckets)
    with pytest.raises(ValueError, match="a batch of 8 needs as many slots, padding rows included: 5"):
        Engine(engine.step_module, num_drafts=2, buckets=[8])
    with pytest.raises(ValueError, match="num_drafts should not be negative"):
        Engine(engine.step_module, num_drafts=-1)
    engine.submit(Request(tokens(1, 3), 9))
    engine.step()
    with pytest.raises(RuntimeError, match="runs no request"):
        engine.warm_up()
