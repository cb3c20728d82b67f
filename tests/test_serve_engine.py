"""Rows of every kind in one batch, padding, slots and captured inputs.

The numbered behaviours are failures that public bug reports of other projects describe.
"""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from serving import (
    BLOCK,
    DRAFTS,
    VOCAB,
    WINDOW,
    Oracle,
    assert_same_state,
    build,
    poison,
    serve,
    solo_on,
    state_after,
    tokens,
    wrong,
)

from models.captured_step import CapturedStep
from models.decode import example_inputs
from models.engine import Engine
from models.requests import Phase, Request
from models.slots import NULL_SLOT
from models.step_inputs import StepInputs


def requests_of(lengths, max_new_tokens=16, seed=1):
    return [Request(tokens(seed + i, n), max_new_tokens) for i, n in enumerate(lengths)]


def spy(calls):
    """A step function that remembers its integer arguments."""

    def compile_step(step):
        def run(*arguments):
            calls.append([argument.clone() for argument in arguments[:5]])
            return step(*arguments)

        return run

    return compile_step


@pytest.mark.parametrize("rejected", range(1, DRAFTS + 2))
def test_behaviour_6_reject_at_every_position_leaves_the_state_of_plain_decoding(rejected):
    """Recurrent state, conv history, keys and values after each step are those of the committed tokens alone."""
    request = Request(tokens(3, 7), 18)

    def reject(right, call):
        return [wrong(token) if i == rejected - 1 else token for i, token in enumerate(right)]

    engine = build(drafter=Oracle([request], solo_on("cpu"), reject), block_size=None)
    engine.submit(request)
    accepted = []
    while not engine.idle:
        before = len(request.text)
        engine.step()
        accepted.append(len(request.text) - before)
        if not request.finished:
            saved = engine.state.copy_out(request.slot, request.committed)
            assert_same_state(saved.tensors, state_after(request.text[: request.committed]))
    assert accepted[2] == rejected
    assert request.continuation == solo_on("cpu").expected(request)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 7])
def test_behaviour_10_null_slot_and_padding_rows_disturb_nobody(count):
    """All that no request holds is NaN before every step, and the padding rows run on it."""
    engine = build(slots=8)
    serve(engine, requests_of(range(2, 2 + count)), before_step=lambda: poison(engine))
    assert (engine.statistics.padding_rows > 0) == (count not in (1, 2))  # of the buckets 1, 2, 4, 8
    null = [buffer[NULL_SLOT] for buffer in engine.pools.buffers()]
    assert all(state.isnan().any() for state in null)


def test_behaviour_10_padding_rows_trail_and_name_slots_of_nobody():
    calls = []
    engine = build(slots=8, compile_step=spy(calls))
    for request in requests_of([3, 4, 5, 6, 7]):
        engine.submit(request)
    engine.step()
    window, num_drafts, num_forced, positions, slots = calls[0]
    held = [request.slot for request in engine.scheduler.running]
    assert slots[:5].tolist() == held
    assert len(set(slots.tolist())) == 8 and NULL_SLOT in slots[5:]
    assert NULL_SLOT not in held
    assert not any(x[5:].any() for x in (window, num_drafts, num_forced, positions))


ROWS = st.lists(
    st.tuples(st.binary(min_size=1, max_size=WINDOW), st.integers(0, 5), st.integers(0, 5), st.integers(0, 80)),
    max_size=7,
)


@given(st.lists(ROWS, min_size=1, max_size=4))
def test_behaviour_11_no_tail_of_a_larger_batch_comes_back(steps):
    """The buffers stay where they are, and hold after every step what fresh ones would."""
    inputs = StepInputs(7, WINDOW, VOCAB, "cpu")
    places = [tensor.data_ptr() for tensor in inputs.tensors]
    for rows in steps:
        columns = [[row[i] for row in rows] for i in range(4)]
        slots = list(range(11, 18))
        filled = inputs.fill(*columns, slots)
        assert [tensor.data_ptr() for tensor in filled] == places
        padded = [[*row, *bytes(WINDOW - len(row))] for row in columns[0]] + [[0] * WINDOW] * (7 - len(rows))
        expected = [padded, *([*column, *[0] * (7 - len(rows))] for column in columns[1:]), slots]
        assert [tensor.tolist() for tensor in filled[:5]] == expected


def test_staged_inputs_are_what_a_step_takes():
    """Shapes, dtypes and alignment: compiled code reads them in place."""
    for batch, window in itertools.product((1, 3, 4), (1, 5, 8)):
        staged = StepInputs(batch, window, VOCAB, "cpu").tensors
        example = example_inputs(batch, window - 1, VOCAB, "cpu")
        for actual, expected in zip(staged, example, strict=True):
            assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
            assert actual.is_contiguous() and actual.data_ptr() % 16 == 0


def test_behaviour_11_every_batch_size_reads_its_own_buffers():
    places = {}

    def compile_step(step):
        def run(*arguments):
            places.setdefault(len(arguments[0]), set()).add(tuple(x.data_ptr() for x in arguments))
            return step(*arguments)

        return run

    engine = build(slots=8, compile_step=compile_step)
    engine.warm_up()
    assert sorted(places) == [1, 2, 4, 8]
    requests = requests_of([3, 30, 5, 6, 7, 12, 9], 12)
    requests[0].max_new_tokens = 30
    serve(engine, requests)
    assert all(len(seen) == 1 for seen in places.values())


@pytest.mark.parametrize("counts", list(itertools.product((0, 2, DRAFTS), repeat=3)), ids=str)
def test_behaviour_12_every_sequence_of_draft_counts(counts):
    """Draftless rows after accepted drafts, beside rows with drafts, and a batch that drafts nothing."""
    requests = requests_of([3, 3, 5])
    oracle = Oracle(requests, solo_on("cpu"), lambda right, call: right[: counts[call % 3]])
    engine = serve(build(drafter=oracle, block_size=None), requests)
    assert (engine.statistics.phases[Phase.VERIFY] > 0) == any(counts)


@pytest.mark.parametrize("length", [1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 2 * WINDOW + 1])
@pytest.mark.parametrize("block_size", [None, BLOCK], ids=["no-cache", "cache"])
def test_behaviour_13_a_prompt_as_long_as_a_window_is_a_prompt(length, block_size):
    request = Request(tokens(length, length), 12)

    def all_wrong(text, n):
        return bytes(wrong(token) for token in solo_on("cpu").continuation(request.prompt, 12)[:n])

    engine = build(drafter=all_wrong, block_size=block_size)
    engine.submit(request)
    engine.step()
    phases = engine.statistics.phases
    assert phases[Phase.PREFILL] == (length > 1)
    # Each of the prompt's tokens is taken, whatever the model would have preferred.
    assert request.committed >= min(length, WINDOW if block_size is None else min(WINDOW, BLOCK))
    assert request.text.startswith(request.prompt)
    while not engine.idle:
        engine.step()
    assert request.continuation == solo_on("cpu").expected(request)


def test_rows_of_all_phases_share_a_step():
    long, drafting, draftless = requests_of([40, 2, 2], 20)
    oracle = Oracle([drafting], solo_on("cpu"), lambda right, call: right)
    engine = build(drafter=lambda text, n: oracle(text, n) if text.startswith(drafting.prompt) else b"")
    serve(engine, [long, drafting, draftless])
    assert all(engine.statistics.phases[phase] for phase in Phase)
    assert engine.statistics.mixed_steps > 3


@pytest.mark.parametrize("slots", [1, 2])
def test_behaviour_22_a_reused_slot_starts_from_nothing(slots):
    """Requests follow one another on the same slots; what is left there is made worse than it was."""
    requests = requests_of([9, 2, 1, 14, 3, 6])
    engine = build(slots=slots, block_size=None)
    used = []

    def look_and_poison():
        used.extend((request, request.slot) for request in engine.scheduler.running)
        poison(engine)

    serve(engine, requests, before_step=look_and_poison)
    holders = {slot: {id(request) for request, at in used if at == slot} for _, slot in used}
    assert len(holders) == slots and all(len(found) > 1 for found in holders.values())


@pytest.mark.parametrize("keep_state", [True, False], ids=["copied-out", "computed-again"])
@pytest.mark.parametrize("at", range(1, 9))
def test_preemption_at_any_step_changes_no_text(at, keep_state):
    """Preempted while it reads its prompt and while it decodes; another request has its slot meanwhile."""
    victim, other, third = requests_of([20, 4, 5], 14)
    engine = build(slots=2, block_size=None)
    engine.submit(victim)
    for _ in range(at):
        engine.step()
    if victim.finished:
        pytest.fail("the victim should be running")
    slot, committed = victim.slot, victim.committed
    engine.submit(other)
    engine.submit(third)
    saved = engine.state.copy_out(slot, committed)
    engine.preempt(victim, keep_state=keep_state)
    assert victim.slot is None and (victim.saved is not None) == keep_state
    engine.step()
    assert slot in (other.slot, third.slot)
    while victim.slot is None:
        engine.step()
    if keep_state:
        # Its first step since has run; what was restored is the state then, bit for bit.
        assert victim.committed > committed
        for name, buffer in engine.state.cache.items():
            assert torch.equal(buffer[victim.slot, :committed].cpu(), saved.tensors[name])
    while not engine.idle:
        engine.step()
    for request in (victim, other, third):
        assert request.continuation == solo_on("cpu").expected(request)
    assert victim.preemptions == 1 and engine.slots.in_use == 0


def test_a_preempted_request_waits_behind_the_others():
    first, second, third = requests_of([5, 5, 5])
    engine = build(slots=1, block_size=None)
    for request in (first, second, third):
        engine.submit(request)
    engine.step()
    engine.preempt(first, keep_state=True)
    engine.step()
    assert second.slot is not None
    assert list(engine.scheduler.waiting) == [third, first]


def test_a_stop_token_ends_a_text_within_a_window():
    plain = solo_on("cpu").continuation(tokens(1, 6), 16)
    at = next(i for i in range(3, 16) if plain[i] not in plain[:i])
    request = Request(tokens(1, 6), 16, stop_token=plain[at])
    engine = build(drafter=Oracle([Request(tokens(1, 6), 16)], solo_on("cpu"), lambda right, call: right))
    serve(engine, [request])
    assert request.continuation == plain[: at + 1]
    assert engine.statistics.emitted_tokens == at + 1


def test_a_stop_token_in_the_prompt_does_not_count():
    prompt = tokens(1, 6)
    stop = next(token for token in prompt if token not in solo_on("cpu").continuation(prompt, 3))
    request = Request(prompt, 3, stop_token=stop)
    serve(build(), [request])
    assert len(request.continuation) == 3


def test_what_a_step_returns_adds_up_to_the_texts():
    requests, streamed = requests_of([3, 9, 17], 15), {}
    engine = build()

    def after_step(emitted):
        for request, new in emitted:
            assert new
            streamed[id(request)] = streamed.get(id(request), b"") + new

    serve(engine, requests, after_step=after_step)
    assert [streamed[id(request)] for request in requests] == [request.continuation for request in requests]


def test_a_drafter_may_propose_too_much():
    requests = requests_of([4, 6])
    serve(build(drafter=lambda text, n: bytes(40)), requests)
    assert [len(request.continuation) for request in requests] == [16, 16]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("compile_step", [None, CapturedStep], ids=["launched", "captured"])
def test_nothing_but_the_read_of_the_results_waits_for_the_device(compile_step, monkeypatch):
    """Admission, staging, publishing, hits and preemption included."""
    requests = requests_of([30, 9, 30, 4], 14) + requests_of([30, 9], 14)
    # The first use of a kernel or of pinned memory may wait.
    serve(build("cuda", slots=2), [Request(request.prompt, 14) for request in requests])
    engine, read = build("cuda", slots=2, compile_step=compile_step), Engine._read
    engine.warm_up()

    def allowed(*results):
        torch.cuda.set_sync_debug_mode("default")
        try:
            return read(*results)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    monkeypatch.setattr(engine, "_read", allowed)
    for request in requests:
        engine.submit(request)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for i in itertools.count():
            if engine.idle:
                break
            engine.step()
            if i in (3, 6) and engine.scheduler.running:
                engine.preempt(engine.scheduler.running[0], keep_state=i == 3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert engine.prefix_cache.statistics.hits > 0 and engine.statistics.copied_out == 1
    for request in requests:
        assert request.continuation == solo_on("cuda").expected(request)
