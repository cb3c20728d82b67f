"""Recorded states in an eager caller's hands: what they answer, what they refuse, and how long they are good."""

from __future__ import annotations

import pytest
import torch
from spellings import Spelling, inputs
from split_halves import halves

from compile_passes import split_step
from compile_passes.splitting.recorded_states import RecordedStates, StatesNotKept


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def recorded(s: Spelling = Spelling(), device="cpu"):  # noqa: B008
    """``(split, args, recorded states, the states themselves)``."""
    split = split_step(*halves(s), backend=None)
    args = inputs(s, device=device)
    states, layers, slots, n = args
    split.prepare((states, layers, slots), (n, states, slots))
    _, (kept,) = split.verify(states, layers, slots)
    _, (plain,) = halves(s)[0](states, layers, slots)
    return split, args, kept, plain


@pytest.mark.parametrize(
    ("rows", "positions"),
    [([0, 1, 2], [0, 1, 2]), ([2, 0], [2, 2]), ([1, 1, 1], [0, 1, 2]), ([-1, 0, 1], [-1, -3, 0]), ([1], [2]), ([], [])],
    ids=["every_row", "some_rows", "one_row_often", "negative", "one", "none"],
)
@pytest.mark.parametrize("checkpoint", ["pool", "functional"])
def test_indexing_rebuilds_the_states(rows, positions, checkpoint, device):
    s = Spelling(checkpoint=checkpoint)
    _, _, kept, plain = recorded(s, device)
    index = tuple(torch.tensor(x, dtype=torch.long, device=device) for x in (rows, positions))
    torch.testing.assert_close(kept[index], plain[index])
    assert (kept.shape, kept.dtype, kept.device, kept.ndim) == (plain.shape, plain.dtype, plain.device, plain.ndim)
    assert kept.size(1) == plain.size(1) and len(kept) == len(plain) and kept.dim() == 5 and kept.size() == plain.size()
    assert "RecordedStates" in repr(kept)


def test_halves_traced_with_the_check_on(caplog):
    s = Spelling(T=2, layers=2)
    split = split_step(*halves(s), backend=None, check=True)
    states, layers, slots, n = inputs(s)
    with caplog.at_level("DEBUG", "compile_passes"):
        assert split.prepare((states, layers, slots), (n, states, slots)).matched == 2
    assert caplog.text.count("checked the rewrite") == 2


def test_derived_sizes_are_checked():
    """The fitting of sizes knows that twice the batch is twice the batch."""
    s = Spelling(T=2)
    verify, commit = halves(s)

    def paired(states, layers, slots, twice):
        return twice.view(2, slots.shape[0], -1).sum(0), verify(states, layers, slots)[1]

    split = split_step(paired, commit, backend=None, dynamic=True)
    states, layers, slots, n = inputs(s)
    split.prepare((states, layers, slots, torch.ones(6, 4)), (n, states, slots))
    o, _ = split.verify(states, layers, slots, torch.ones(6, 4))
    assert o.shape == (3, 4)
    with pytest.raises(RuntimeError, match="shape"):  # the function's own error, from the function itself
        split.verify(states, layers, slots, torch.ones(5, 4))


def test_negative_slots_count_from_the_end():
    s = Spelling()
    split = split_step(*halves(s), backend=None)
    states, layers, slots, n = inputs(s)
    split.prepare((states, layers, slots), (n, states, slots))
    _, (kept,) = split.verify(states, layers, slots - 5)
    _, (plain,) = halves(s)[0](states, layers, slots)
    rows = torch.arange(s.B)
    torch.testing.assert_close(kept[rows, n - 1], plain[rows, n - 1])


WRONG = {
    "all": lambda S: S[:],
    "one_row": lambda S: S[0],
    "slices": lambda S: S[:, 0],
    "integers": lambda S: S[0, 1],
    "mask": lambda S: S[torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.long)],
    "floats": lambda S: S[torch.arange(3), torch.zeros(3)],
    "lengths": lambda S: S[torch.arange(3), torch.zeros(2, dtype=torch.long)],
    "torch": lambda S: torch.sum(S),
    "stack": lambda S: torch.stack([S, S]),
    "method": lambda S: S.sum(),
    "attribute": lambda S: S.grad,
    "arithmetic": lambda S: S + 1,
    "from_the_left": lambda S: torch.ones(3) * S,
    "iteration": lambda S: list(S),
    "truth": lambda S: bool(S),
    "assignment": lambda S: S.__setitem__(0, 1),
    "write": lambda S: torch.zeros(3, 3, 2, 6, 8).copy_(S),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_anything_else_is_an_error_that_names_the_remedy(wrong):
    _, _, kept, _ = recorded()
    with pytest.raises(TypeError, match=r"states\[rows, num_accepted - 1\]"):
        WRONG[wrong](kept)
    assert not hasattr(kept, "sum") and issubclass(StatesNotKept, TypeError)


@pytest.mark.parametrize("index", [([3], [0]), ([0], [3]), ([-4], [0]), ([0], [-4])], ids=str)
def test_numbers_out_of_range_are_an_index_error(index):
    _, _, kept, _ = recorded()
    with pytest.raises(IndexError, match="out of range"):
        kept[tuple(map(torch.tensor, index))]


def test_other_arguments_than_traced_go_through_the_function():
    """Another pool than was verified, and a list of rows: the commit half runs as written, on rebuilt states."""
    split, (states, _, _, n), kept, plain = recorded()
    pool, expected = torch.zeros(7, *states[0].shape[1:]), torch.zeros(7, *states[0].shape[1:])
    other = torch.tensor([6, 1, 3])
    split.commit([kept], n, [pool], other)
    expected[other] = plain[torch.arange(3), n - 1]
    torch.testing.assert_close(pool, expected)
    assert len(split._graphs) == 1


def test_b16_a_record_is_consumed_once():
    split, (states, _, slots, n), kept, _ = recorded()
    split.commit([kept], n, states, slots)
    with pytest.raises(RuntimeError, match="consumed once"):
        split.commit([kept], n, states, slots)
    with pytest.raises(RuntimeError, match="consumed once"):
        kept[torch.arange(3), n - 1]


@pytest.mark.parametrize("what", ["pool", "slots", "k"])
def test_a_write_between_the_calls_is_noticed(what):
    split, (states, layers, slots, n), kept, _ = recorded()
    {"pool": states[0], "slots": slots, "k": layers[0]["k"]}[what].zero_()
    with pytest.raises(RuntimeError, match="written between verify and commit"):
        split.commit([kept], n, states, slots)


def test_inference_mode():
    s = Spelling(layers=2)
    with torch.inference_mode():
        split = split_step(*halves(s), backend=None)
        states, plain = inputs(s)[0], inputs(s)[0]
        for step in range(2):
            _, layers, slots, n = inputs(s, seed=step)
            o, kept = split.verify(states, layers, slots)
            split.commit(kept, n, states, slots)
            plain_o, window_states = halves(s)[0](plain, layers, slots)
            halves(s)[1](window_states, n, plain, slots)
            torch.testing.assert_close((o, states), (plain_o, plain))
        assert isinstance(kept[0], RecordedStates)
